"""Tables that a fused kernel reads: where the parameters are in a piece, and the numbers of each group in one step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from zero.core.layout import ONE_SETTING, VECTOR, Layout
from zero.core.optim import Fused, Hyper

GROUP_NUMBERS = 13
"""Numbers of a group: whether it trains, the divisor of gradients, the number of its update, two for the mean of
parameters, at most eight of the optimizer."""


def tables(
    layout: Layout, start: int, stop: int, tile_numel: int, settings: Mapping[str, int] = ONE_SETTING
) -> tuple[Tensor, Tensor]:
    """Return the tables of the parameters in [start, stop) of a flat, which is cut into tiles.

    A tile has `tile_numel` elements of one parameter and of the gap after it, or fewer at their end.

    Args:
        settings: as in `Layout.segments`.

    Returns:
        slots: (n, 8) int32, a row for each parameter: its first tile, first vector in the range, vectors with the gap,
            first vector in the parameter, whole vectors and further elements of the parameter, key, index of settings.
        tiles: (tiles,) int32: the row of each tile.
    """
    rows = [
        (first, last, slot.offset, slot.numel, signed(slot.key), settings.get(slot.name, slot.group))
        for slot, first, last in layout.extents(start, stop)
    ]
    first, last, offset, numel, key, number = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 6).unbind(1)
    vectors = (last - first) // VECTOR
    tiles = -(-vectors * VECTOR // tile_numel)
    begins = tiles.cumsum(0) - tiles, (first - start) // VECTOR
    columns = *begins, vectors, (first - offset) // VECTOR, numel // VECTOR, numel % VECTOR, key, number
    of_tiles = torch.arange(len(rows), dtype=torch.int32, device="cpu").repeat_interleave(tiles)
    return torch.stack(columns, 1).int(), of_tiles


def signed(key: int) -> int:
    """Return the int32 with the bits of a uint32."""
    return key - (key >> 31 << 32)


def numbers(fused: Fused | None, hyper: Hyper, first: int = 0) -> Tensor:
    """Return the numbers of each group in one step, (groups, `GROUP_NUMBERS`) fp32, in the order of the kernel.

    Args:
        fused: the rule of the kernel; None without a kernel.
        first: the number of groups before those of this optimizer.
    """
    rows, average = [], 0.0 if fused is None else fused.average or 0.0
    for number, now in enumerate(hyper.groups):
        row = now.trains, hyper.divisor, now.step, average, 1 - average
        rule = fused.numbers(now) if fused is not None and now.trains and number >= first else ()
        rows.append((*row, *rule, *(0.0,) * (GROUP_NUMBERS - len(row) - len(rule))))
    return torch.tensor(rows, dtype=torch.float32, device="cpu")
