"""Search and replacement of tensors in the nested arguments and results of a module.

Containers are lists, tuples, named tuples, mappings of any class, dataclasses whether torch knows them or not, and
classes that were registered with torch's pytree. Tensors inside any other object are not seen.
"""

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import SUPPORTED_NODES


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor in `value`, in order; a tensor that occurs twice is returned twice."""
    return [leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor)]


def leaves_in(value: Any) -> list[Any]:
    """Return every object in `value` that is no container, in order."""
    leaves: list[Any] = []
    _collect(value, leaves, set())
    return leaves


def replaced(value: Any, new: Mapping[int, Tensor]) -> Any:
    """Return `value` with each tensor whose id is in `new` replaced by that entry.

    Containers that hold a replaced tensor are copied; all others are the same objects.
    """
    return _replace(value, new, set()) if new else value


# These are functions of the module because recursive closures are reference cycles, which would keep tensors until the
# next garbage collection.


def _collect(value: Any, leaves: list[Any], within: set[int]) -> None:
    """Append the objects in `value` that are no containers to `leaves`.

    Args:
        within: ids of the containers around `value`, because a container may hold itself.
    """
    if isinstance(value, Tensor) or not _is_container(value):
        leaves.append(value)
    elif id(value) not in within:
        within.add(id(value))
        for _, part in _parts(value):
            _collect(part, leaves, within)
        within.discard(id(value))


def _replace(value: Any, new: Mapping[int, Tensor], within: set[int]) -> Any:
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    if id(value) in within:
        return value
    within.add(id(value))
    parts = _parts(value)
    changed = {key: after for key, part in parts if (after := _replace(part, new, within)) is not part}
    within.discard(id(value))
    return _rebuilt(value, parts, changed) if changed else value


def _is_container(value: Any) -> bool:
    return (
        isinstance(value, list | tuple | Mapping)
        or type(value) in SUPPORTED_NODES
        or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    )


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """Return (key, part) of the contents of a container; an empty list for any other object."""
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if type(value) in SUPPORTED_NODES and not isinstance(value, dict):
        return list(enumerate(SUPPORTED_NODES[type(value)].flatten_fn(value)[0]))
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return []


def _rebuilt(value: Any, parts: list[tuple[Any, Any]], changed: Mapping[Any, Any]) -> Any:
    """Return a copy of a container in which the parts in `changed` are replaced."""
    if isinstance(value, tuple):
        make = getattr(type(value), "_make", type(value))  # the class of a named tuple takes separate arguments
        return make(changed.get(key, part) for key, part in parts)
    if type(value) in SUPPORTED_NODES and not isinstance(value, dict | list):
        node = SUPPORTED_NODES[type(value)]
        return node.unflatten_fn([changed.get(key, part) for key, part in parts], node.flatten_fn(value)[1])
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)({**value, **changed})  # type: ignore[call-arg]
    copied = copy.copy(value)
    for key, part in changed.items():
        if isinstance(copied, list | MutableMapping):
            copied[key] = part
        if dataclasses.is_dataclass(copied) and not isinstance(copied, list):  # some dataclasses are mappings too
            object.__setattr__(copied, key, part)  # also if frozen: only this function has the copy
    return copied
