"""What an operator of torch does with memory, as its schema says: which bytes it reads, which it writes."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

LOOKS = frozenset(
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
"""Operators that look at memory, or allocate it, and launch nothing by themselves."""

WAITS = frozenset(
    f"aten::{name}"
    for name in ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_dim")
)
"""Operators for which the host waits for the device: a number or a size comes back."""

PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm"))
"""Products of matrices, which take as long as their arithmetic; other operators are done when their bytes are moved."""


class Place(NamedTuple):
    """Bytes [start, stop) of a storage."""

    tensor: Tensor
    storage: int
    """Where the storage begins, which is its name as long as it lives."""
    start: int
    stop: int


class _Argument(NamedTuple):
    number: int
    name: str
    is_written: bool


class Form(NamedTuple):
    """What the schema of an operator says.

    Attributes:
        looks: it touches no bytes on the device.
        allocates: its result is memory that holds anything.
        returned: numbers of the written arguments that are its results, where they are.
    """

    name: str
    looks: bool
    allocates: bool
    arguments: tuple[_Argument, ...]
    returned: tuple[int, ...]

    @property
    def in_place(self) -> bool:
        return any(one.is_written for one in self.arguments)


@cache
def form_of(operator: OpOverload) -> Form:
    schema = operator._schema
    arguments = [
        _Argument(number, one.name, one.alias_info is not None and one.alias_info.is_write)
        for number, one in enumerate(schema.arguments)
        if "Tensor" in str(one.type)
    ]
    name = schema.name
    looks = name in LOOKS or operator.is_view
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
    return Form(name, looks, "empty" in name, tuple(arguments), returned)


def tensors_of(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any], *, written: bool) -> list[Tensor]:
    """Of the arguments that are written, or of those that are only read."""
    return [
        tensor
        for one in form.arguments
        if one.is_written is written
        for tensor in _tensors_in(args[one.number] if one.number < len(args) else kwargs.get(one.name))
    ]


def results_of(form: Form, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operator that works in place returns: its own arguments."""
    names = {one.number: one.name for one in form.arguments}
    found = [args[number] if number < len(args) else kwargs[names[number]] for number in form.returned]
    return None if not found else found[0] if len(found) == 1 else tuple(found)


def flops_of(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Of a product of matrices; 0 for other operators."""
    if form_of(operator).name not in PRODUCTS:
        return 0
    return int(flop_registry[operator.overloadpacket](*args, **kwargs))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.device.type == "cpu" and value.layout is torch.strided:
            yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one)


def fresh_tensors(results: Any) -> list[Tensor]:
    """Of an operator's results."""
    return list(_tensors_in(results))


def place_of(tensor: Tensor) -> Place | None:
    """From the first byte that the tensor can reach to its last; None where it has none."""
    if not tensor.numel():
        return None
    storage = tensor.untyped_storage().data_ptr()
    if not storage:
        return None
    item, start = tensor.element_size(), int(tensor.storage_offset()) * tensor.element_size()
    reach = int(sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    return Place(tensor, storage, start, start + (reach + 1) * item)
