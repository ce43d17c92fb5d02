"""What a user's scheduler and script remember, as JSON holds it, and back.

JSON has no keys but texts and no infinities; MultiStepLR has the one and ReduceLROnPlateau the other. Nor has it
tuples, sets, bytes, tensors and arrays of numpy, as the states of generators are made of. What is none of these is left
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
from zero.platform.device import memory_of

ITEMS, NUMBER = "zero: items of a mapping", "zero: a number"
TENSOR, ARRAY = "zero: a tensor", "zero: an array of numpy"
KINDS: Mapping[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "zero: a tuple": (tuple, list, tuple),
    "zero: a set": (set, lambda value: sorted(value, key=repr), set),
    "zero: bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
}
"""Mark -> class, to what JSON holds, and back."""


def plain(value: Any) -> Any:
    """As JSON holds it."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not {ITEMS, NUMBER, TENSOR, ARRAY, *KINDS} & value.keys():
            return {key: plain(one) for key, one in value.items()}
        return {ITEMS: [[plain(key), plain(one)] for key, one in value.items()]}
    if isinstance(value, list):
        return [plain(one) for one in value]
    for mark, (kind, there, _) in KINDS.items():
        if isinstance(value, kind):
            return {mark: plain(there(value))}
    if isinstance(value, Tensor) and not value.ndim:
        return plain(value.item())
    if isinstance(value, Tensor) and value.layout is torch.strided:
        held = value.detach().cpu().contiguous()
        octets = base64.b64encode(memory_of(held)).decode()
        return {TENSOR: [str(held.dtype).removeprefix("torch."), list(held.shape), octets]}
    if type(value).__module__ == "numpy":  # told by its module: numpy need not be there
        with suppress(TypeError):  # of objects, or of texts
            return {ARRAY: plain(torch.as_tensor(value))}
    if isinstance(value, float) and not math.isfinite(value):
        return {NUMBER: str(value)}
    return value


def read_back(value: Any) -> Any:
    """The opposite; tensors without dimensions have become numbers."""
    if isinstance(value, list):
        return [read_back(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {NUMBER}:
        return float(value[NUMBER])
    if value.keys() == {TENSOR}:
        return _tensor(value[TENSOR])
    if value.keys() == {ARRAY}:
        found = read_back(value[ARRAY])
        return found.numpy() if isinstance(found, Tensor) else found
    if len(value) == 1 and (mark := next(iter(value))) in KINDS:
        return KINDS[mark][2](read_back(value[mark]))
    if value.keys() == {ITEMS}:
        return {read_back(key): read_back(one) for key, one in value[ITEMS]}
    return {key: read_back(one) for key, one in value.items()}


def _tensor(said: Any) -> Tensor:
    """A tensor out of what a file says of it, of which nothing is believed."""
    try:
        name, shape, octets = said
        dtype = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}[f"torch.{name}"]
        held = bytearray(base64.b64decode(octets))
        return (torch.frombuffer(held, dtype=dtype) if held else torch.empty(0, dtype=dtype)).view(shape)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"the client state has a tensor that cannot be read: {one_line(error)}") from None
