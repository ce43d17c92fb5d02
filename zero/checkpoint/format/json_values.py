"""Convert Python values to JSON and back, such as a scheduler's state that the user adds to a checkpoint.

JSON cannot represent keys that are not strings (MultiStepLR), infinities (ReduceLROnPlateau), tuples, sets, bytes,
tensors and numpy arrays (states of random generators), so these are encoded. Values of other classes are returned
unchanged; the save then raises an error.
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
CLASSES: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "zero: a tuple": (tuple, list, tuple),
    "zero: a set": (set, lambda value: sorted(value, key=repr), set),
    "zero: bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
}
"""Key that marks an encoded value -> (class, function that encodes, function that decodes)."""
MARKS = {ITEMS, NUMBER, TENSOR, ARRAY, *CLASSES}


def to_json(value: Any) -> Any:
    """Convert a value to JSON; 0-dim tensors become numbers."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key not in MARKS for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return {ITEMS: [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    for mark, (cls, encode, _) in CLASSES.items():
        if isinstance(value, cls):
            return {mark: to_json(encode(value))}
    if isinstance(value, Tensor) and not value.ndim:
        return to_json(value.item())
    if isinstance(value, Tensor) and value.layout is torch.strided:
        tensor = value.detach().cpu().contiguous()
        octets = base64.b64encode(memory_of(tensor)).decode()
        return {TENSOR: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), octets]}
    if type(value).__module__ == "numpy":  # numpy need not be installed
        with suppress(TypeError):  # torch has no arrays of objects or strings
            return {ARRAY: to_json(torch.as_tensor(value))}
    if isinstance(value, float) and not math.isfinite(value):
        return {NUMBER: str(value)}
    return value


def from_json(value: Any) -> Any:
    """Convert a result of `to_json` back.

    Raises:
        CheckpointError: the encoding of a tensor is invalid.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    mark: Any = next(iter(value)) if len(value) == 1 else ""
    content: Any = value.get(mark)
    if mark == NUMBER:
        return float(content)
    if mark == TENSOR:
        return _tensor(content)
    if mark == ARRAY:
        tensor = from_json(content)
        return tensor.numpy() if isinstance(tensor, Tensor) else tensor
    if mark == ITEMS:
        return {from_json(key): from_json(item) for key, item in content}
    if mark in CLASSES:
        return CLASSES[mark][2](from_json(content))
    return {key: from_json(item) for key, item in value.items()}


def _tensor(encoded: Any) -> Tensor:
    """Decode a tensor; the encoding comes from a file and may be malformed."""
    try:
        name, shape, octets = encoded
        dtype = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}[f"torch.{name}"]
        memory = bytearray(base64.b64decode(octets))
        return (torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype)).view(shape)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the client state has a tensor that cannot be read: {one_line(error)}") from None
