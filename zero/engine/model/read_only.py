"""Read-only views and copies of the values of parameters: writes into them raise OutsideUnitError."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero.core.tree import replaced, tensors_in
from zero.engine.memory import storage_address
from zero.engine.meta import requested, writes
from zero.errors import OutsideUnitError

METADATA_ATTRIBUTES = frozenset(
    {"shape", "dtype", "layout", "ndim", "names", "itemsize", "nbytes", "requires_grad", "grad_fn", "is_leaf"}
    | {"retains_grad", "is_sparse", "is_quantized", "is_nested", "size", "dim", "ndimension", "numel", "nelement"}
    | {"stride", "is_contiguous", "data_ptr", "element_size", "is_floating_point", "is_complex", "__len__", "__hash__"}
    | {"_version", "_base", "_backward_hooks", "requires_grad_", "is_inference"}
)
"""Attributes and methods of a tensor that do not read its values."""


class ReadOnlyTensor(Tensor):
    """A read-only view or copy of a parameter's values. Writes raise, because they would not reach the parameter."""

    full_name: str

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> "ReadOnlyTensor":
        part = tensor.as_subclass(cls)
        part.full_name = name
        return part

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().clone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self._plain().detach().clone()

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, (request, _) = kwargs or {}, requested(func)
        if request in METADATA_ATTRIBUTES or request in ("grad", "retain_grad", "register_hook"):  # need no values
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        reject_writing(cls, func, request, args, kwargs)
        parts = {id(part): part for part in tensors_in((args, kwargs)) if isinstance(part, ReadOnlyTensor)}
        names = {storage_address(part): part.full_name for part in parts.values()}
        args, kwargs = replaced((args, kwargs), {key: part._plain() for key, part in parts.items()})
        return call_for_reading(func, args, kwargs, names)


def reject_writing(cls: type[Any], func: Any, request: str, args: Any, kwargs: Any) -> None:
    """Raise OutsideUnitError if a call writes into a tensor of class `cls`, which has a `full_name`."""
    first = next(iter((*args, *kwargs.values())), None)
    for tensor in tensors_in([kwargs.get("out"), first if func.__name__ == "__set__" or writes(request) else None]):
        if isinstance(tensor, cls):
            reject_written(tensor.full_name, request)
    if kwargs.get("inplace") and isinstance(first, cls):
        reject_written(first.full_name, f"{request}(inplace=True)")


def reject_written(name: str, by: str) -> None:
    raise OutsideUnitError(
        f"parameter {name} was written to by {by}, but it is in shards. Write with zero.gathered(state or engine, "
        "names, modify=True) or zero.set_full, to a clone() of it, or after state.close()."
    )


def call_for_reading(func: Any, args: Any, kwargs: Any, names: Mapping[int, str], *, clone_views: bool = False) -> Any:
    """Call `func` and make its results read-only: views become `ReadOnlyTensor`, and numpy arrays not writable.

    Args:
        names: the address of a parameter's values -> the parameter's name.
        clone_views: copy views that do not require a gradient.
    """
    walks = func.__name__ == "__iter__"
    result = Tensor.unbind(args[0]) if walks else func(*args, **kwargs)
    parts = {}
    for tensor in tensors_in(result):
        if tensor.numel() and (name := names.get(storage_address(tensor))) is not None:
            part = tensor.clone() if clone_views and not tensor.requires_grad else tensor
            parts[id(tensor)] = ReadOnlyTensor.of(part, name)
    result = replaced(result, parts)
    if type(result).__name__ == "ndarray":  # compared by name to avoid importing numpy
        result.flags.writeable = False
    return iter(result) if walks else result


def version_of(tensor: Tensor) -> int:
    """Return the tensor's version counter; 0 for an inference tensor of the user, which has none."""
    return 0 if tensor.is_inference() else tensor._version
