"""Values of Python as JSON holds them, and back: what a loop asks a checkpoint to keep, such as a scheduler's state.

JSON has only texts as keys, and no infinities; MultiStepLR needs other keys and ReduceLROnPlateau an infinity. Nor has
it tuples, sets, bytes, tensors or numpy's arrays, of which states of random generators are made. Anything else is left
as it is, and the checkpoint refuses it by name.
"""

import base64
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zero.errors import CheckpointError, one_line
from zero.platform.files import memory_of

ITEMS, NUMBER = "zero: items of a mapping", "zero: a number"
TENSOR, ARRAY = "zero: a tensor", "zero: an array of numpy"
KINDS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "zero: a tuple": (tuple, list, tuple),
    "zero: a set": (set, lambda value: sorted(value, key=repr), set),
    "zero: bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
}
"""Mark -> class, to what JSON holds, and back."""


def to_json(value: Any) -> Any:
    """A value as JSON holds it; tensors without dimensions become numbers."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not {ITEMS, NUMBER, TENSOR, ARRAY, *KINDS} & value.keys():
            return {key: to_json(one) for key, one in value.items()}
        return {ITEMS: [[to_json(key), to_json(one)] for key, one in value.items()]}
    if isinstance(value, list):
        return [to_json(one) for one in value]
    for mark, (kind, encode, _) in KINDS.items():
        if isinstance(value, kind):
            return {mark: to_json(encode(value))}
    if isinstance(value, Tensor) and not value.ndim:
        return to_json(value.item())
    if isinstance(value, Tensor) and value.layout is torch.strided:
        held = value.detach().cpu().contiguous()
        octets = base64.b64encode(memory_of(held)).decode()
        return {TENSOR: [str(held.dtype).removeprefix("torch."), list(held.shape), octets]}
    if type(value).__module__ == "numpy":  # known by its module, because numpy need not be installed
        with suppress(TypeError):  # an array of objects, or of texts
            return {ARRAY: to_json(torch.as_tensor(value))}
    if isinstance(value, float) and not math.isfinite(value):
        return {NUMBER: str(value)}
    return value


def from_json(value: Any) -> Any:
    """The value that `to_json` was given.

    Raises:
        CheckpointError: a tensor that cannot be read.
    """
    if isinstance(value, list):
        return [from_json(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {NUMBER}:
        return float(value[NUMBER])
    if value.keys() == {TENSOR}:
        return _tensor(value[TENSOR])
    if value.keys() == {ARRAY}:
        found = from_json(value[ARRAY])
        return found.numpy() if isinstance(found, Tensor) else found
    if len(value) == 1 and (mark := next(iter(value))) in KINDS:
        return KINDS[mark][2](from_json(value[mark]))
    if value.keys() == {ITEMS}:
        return {from_json(key): from_json(one) for key, one in value[ITEMS]}
    return {key: from_json(one) for key, one in value.items()}


def _tensor(encoded: Any) -> Tensor:
    """A tensor from a file, of which nothing is trusted."""
    try:
        name, shape, octets = encoded
        dtype = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}[f"torch.{name}"]
        held = bytearray(base64.b64decode(octets))
        return (torch.frombuffer(held, dtype=dtype) if held else torch.empty(0, dtype=dtype)).view(shape)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the client state has a tensor that cannot be read: {one_line(error)}") from None
