"""What a user's scheduler and script remember, as JSON holds it, and back.

JSON has no keys but texts and no infinities; MultiStepLR has the one and ReduceLROnPlateau the other. What JSON cannot
hold at all is left as it is, and the checkpoint refuses it by name.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

ITEMS, NUMBER = "zero: items of a mapping", "zero: a number"


def plain(value: Any) -> Any:
    """As JSON holds it."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not {ITEMS, NUMBER} & value.keys():
            return {key: plain(one) for key, one in value.items()}
        return {ITEMS: [[plain(key), plain(one)] for key, one in value.items()]}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return {NUMBER: str(value)}
    return value


def read_back(value: Any) -> Any:
    """The opposite; tuples have become lists."""
    if isinstance(value, list):
        return [read_back(one) for one in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {NUMBER}:
        return float(value[NUMBER])
    if value.keys() == {ITEMS}:
        return {read_back(key): read_back(one) for key, one in value[ITEMS]}
    return {key: read_back(one) for key, one in value.items()}
