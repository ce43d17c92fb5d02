"""The memory accesses of a torch operator, found in its schema: which bytes it reads and which it writes."""

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
"""Operators that launch no kernel themselves: views, allocations and queries of a tensor's properties."""

SYNCHRONIZING = frozenset(
    f"aten::{name}"
    for name in ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_dim")
)
"""Operators that make the host wait for the device, because they return a number or a size."""

MATMULS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm"))
"""Matrix products. Their simulated time depends on bytes and FLOPs, that of all other operators on bytes only."""


class ByteRange(NamedTuple):
    """The bytes [start, stop) of a tensor's storage."""

    tensor: Tensor
    storage: int
    """Address of the storage, which identifies the storage until it is freed."""
    start: int
    stop: int


class _TensorArgument(NamedTuple):
    number: int
    name: str
    is_written: bool


class OperatorInfo(NamedTuple):
    """The properties of an operator that its schema states.

    Attributes:
        name: name of the operator, such as "aten::add_".
        without_kernel: the operator reads and writes no bytes on the device.
        allocates: the operator returns uninitialized memory.
        arguments: the arguments that are tensors or lists of tensors.
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
        _TensorArgument(number, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for number, argument in enumerate(schema.arguments)
        if "Tensor" in str(argument.type)
    ]
    name = schema.name
    without_kernel = name in WITHOUT_KERNEL or operator.is_view
    aliases = {
        alias: number
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for alias in argument.alias_info.before_set
    }
    returned = tuple(
        aliases[alias]
        for result in schema.returns
        if result.alias_info is not None
        for alias in result.alias_info.before_set
        if alias in aliases
    )
    return OperatorInfo(name, without_kernel, "empty" in name, tuple(arguments), returned)


def tensor_arguments(
    info: OperatorInfo, args: Sequence[Any], kwargs: Mapping[str, Any], *, written: bool
) -> list[Tensor]:
    """Return the tensors that a call writes if `written`, else the tensors that it only reads."""
    return [
        tensor
        for argument in info.arguments
        if argument.is_written is written
        for tensor in tensors_in(args[argument.number] if argument.number < len(args) else kwargs.get(argument.name))
    ]


def in_place_results(info: OperatorInfo, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments that a call of an in-place operator returns: one, a tuple of several, or None."""
    names = {argument.number: argument.name for argument in info.arguments}
    results = [args[number] if number < len(args) else kwargs[names[number]] for number in info.returned]
    return tuple(results) if len(results) > 1 else next(iter(results), None)


def matmul_flops(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the floating-point operations of a matrix product; 0 for any other operator."""
    if operator_info(operator).name not in MATMULS:
        return 0
    return int(flop_registry[operator.overloadpacket](*args, **kwargs))


def tensors_in(value: Any) -> list[Tensor]:
    """Return all strided CPU tensors in an operator's argument or result, also inside lists and tuples."""
    tensors = tree.tensors_in(value)
    return [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.layout is torch.strided]


def byte_range(tensor: Tensor) -> ByteRange | None:
    """Return the range from a tensor's first to its last byte; None if the tensor has no elements or no storage."""
    if not tensor.numel():
        return None
    storage = tensor.untyped_storage().data_ptr()
    if not storage:
        return None
    item, start = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
    last = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    return ByteRange(tensor, storage, start, start + (last + 1) * item)
