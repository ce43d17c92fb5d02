"""What a torch operator does with memory, taken from its schema: which bytes it reads and which it writes."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from zero.core import tree

WITHOUT_KERNEL = frozenset(
    f"aten::{name}"
    for name in (
        *("alias", "as_strided", "chunk", "detach", "detach_", "expand", "expand_as", "flatten", "lift_fresh"),
        *("movedim", "narrow", "numpy_T", "permute", "reshape", "resolve_conj", "resolve_neg", "select", "slice"),
        *("split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unfold", "unsafe_chunk"),
        *("unsafe_split", "unsqueeze", "view", "view_as", "_reshape_alias", "_unsafe_view", "view_as_real"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "contiguous"),
        *("is_same_size", "result_type", "item", "_local_scalar_dense", "to", "is_pinned", "record_stream"),
    )
)
"""Operators that launch no kernel themselves: views, allocations, and questions about a tensor."""

SYNCHRONIZING = frozenset(
    f"aten::{name}"
    for name in ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_dim")
)
"""Operators that make the host wait for the device, because they return a number or a size."""

MATMULS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm"))
"""Matrix products, whose time depends on their arithmetic. All other operators take as long as moving their bytes."""


class ByteRange(NamedTuple):
    """Bytes [start, stop) of a tensor's storage."""

    tensor: Tensor
    storage: int
    """Address of the storage. It identifies the storage as long as that lives."""
    start: int
    stop: int


class _TensorArgument(NamedTuple):
    number: int
    name: str
    is_written: bool


class OperatorInfo(NamedTuple):
    """What the schema of an operator says.

    Attributes:
        name: such as "aten::add_".
        without_kernel: the operator reads and writes no bytes on the device.
        allocates: its result is uninitialized memory.
        arguments: those that are tensors or lists of tensors.
        returned: for an in-place operator, the positions of the arguments that it returns.
    """

    name: str
    without_kernel: bool
    allocates: bool
    arguments: tuple[_TensorArgument, ...]
    returned: tuple[int, ...]

    @property
    def in_place(self) -> bool:
        return any(argument.is_written for argument in self.arguments)


@cache
def operator_info(operator: OpOverload) -> OperatorInfo:
    schema = operator._schema
    arguments = [
        _TensorArgument(number, one.name, one.alias_info is not None and one.alias_info.is_write)
        for number, one in enumerate(schema.arguments)
        if "Tensor" in str(one.type)
    ]
    name = schema.name
    without_kernel = name in WITHOUT_KERNEL or operator.is_view
    aliases = {
        alias: number
        for number, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
        for alias in one.alias_info.before_set
    }
    returned = tuple(
        aliases[alias]
        for one in schema.returns
        if one.alias_info is not None
        for alias in one.alias_info.before_set
        if alias in aliases
    )
    return OperatorInfo(name, without_kernel, "empty" in name, tuple(arguments), returned)


def tensor_arguments(
    info: OperatorInfo, args: Sequence[Any], kwargs: Mapping[str, Any], *, written: bool
) -> list[Tensor]:
    """The tensors that a call writes (`written`), or those that it only reads."""
    return [
        tensor
        for one in info.arguments
        if one.is_written is written
        for tensor in tensors_in(args[one.number] if one.number < len(args) else kwargs.get(one.name))
    ]


def in_place_results(info: OperatorInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call of an in-place operator returns: some of its own arguments, a tuple if several, None if none."""
    names = {one.number: one.name for one in info.arguments}
    found = [args[number] if number < len(args) else kwargs[names[number]] for number in info.returned]
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def matmul_flops(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Floating-point operations of a matrix product; 0 for any other operator."""
    if operator_info(operator).name not in MATMULS:
        return 0
    return int(flop_registry[operator.overloadpacket](*args, **kwargs))


def tensors_in(value: Any) -> list[Tensor]:
    """All strided CPU tensors in an operator's argument or result, with those inside lists and tuples."""
    return [one for one in tree.tensors_in(value) if one.device.type == "cpu" and one.layout is torch.strided]


def byte_range(tensor: Tensor) -> ByteRange | None:
    """From the first to the last byte that the tensor's elements occupy; None if it has no elements or no storage."""
    if not tensor.numel():
        return None
    storage = tensor.untyped_storage().data_ptr()
    if not storage:
        return None
    item, start = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
    last = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    return ByteRange(tensor, storage, start, start + (last + 1) * item)
