"""Tables that kernels read: where the parameters are in a piece or flat, and the numbers of each group in one step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from zero.core.layout import ONE_SETTING, VECTOR, Layout
from zero.core.optim import Fused, Hyper
from zero.core.sizes import round_up
from zero.core.updates import GroupSettings

FIRST_OF_RULE = 6
"""The place of the first number of the optimizer, behind those that `zero.core.updates` names."""

GROUP_NUMBERS = FIRST_OF_RULE + 8
"""Numbers of a group, at most eight of them the optimizer's."""


def tables(
    layout: Layout, start: int, stop: int, tile_numel: int, settings: Mapping[str, int] = ONE_SETTING
) -> tuple[Tensor, Tensor]:
    """Return the tables of the parameters in [start, stop) of a flat, which is cut into tiles.

    A tile has `tile_numel` elements of one parameter and of the gap after it, or fewer at their end.

    Args:
        settings: as in `Layout.segments`.

    Returns:
        slots: (n, 6) int32, a row for each parameter: its first tile, first vector in the range, vectors with the gap,
            first vector in the parameter, key, index of settings.
        tiles: (tiles,) int32: the row of each tile.
    """
    rows = [
        (first, last, slot.offset, signed(slot.key), settings.get(slot.name, slot.group))
        for slot, first, last in layout.extents(start, stop)
    ]
    first, last, offset, key, number = torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 5).unbind(1)
    vectors = (last - first) // VECTOR
    begins, of_tiles = _tiles(vectors, tile_numel)
    columns = begins, (first - start) // VECTOR, vectors, (first - offset) // VECTOR, key, number
    return torch.stack(columns, 1).int(), of_tiles


def expansion(stored: Layout, values: Layout, tile_numel: int) -> tuple[Tensor, Tensor]:
    """Return the tables of the parameters of a flat in a packed format, each of which is cut into tiles.

    Args:
        stored: the layout of the codes, in bytes.
        values: the layout of the values.

    Returns:
        slots: (n, 4) int32, a row for each parameter: its first tile, first vector of values, first 64 bytes of codes,
            vectors with the gap.
        tiles: (tiles,) int32: the row of each tile.
    """
    rows = [
        (value.offset, code.offset, round_up(value.numel, VECTOR))
        for code, value in zip(stored.slots, values.slots, strict=True)
    ]
    first, codes, vectors = (torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 3) // VECTOR).unbind(1)
    begins, of_tiles = _tiles(vectors, tile_numel)
    return torch.stack((begins, first, codes, vectors), 1).int(), of_tiles


def _tiles(vectors: Tensor, tile_numel: int) -> tuple[Tensor, Tensor]:
    """Return the first tile of each row, and the row of each tile, for rows of `vectors`, (n,)."""
    tiles = -(-vectors * VECTOR // tile_numel)
    of_tiles = torch.arange(len(vectors), dtype=torch.int32, device="cpu").repeat_interleave(tiles)
    return tiles.cumsum(0) - tiles, of_tiles


def signed(key: int) -> int:
    """Return the int32 with the bits of a uint32."""
    return key - (key >> 31 << 32)


def numbers(fused: Fused | None, hyper: Hyper, first: int = 0) -> Tensor:
    """Return the numbers of each group in one step, (groups, `GROUP_NUMBERS`) fp32, in the order of the kernel.

    Args:
        fused: the rule of the kernel; None without a kernel.
        first: the number of groups before those of this optimizer.
    """
    rows = [row(fused if number >= first else None, now, hyper.divisor) for number, now in enumerate(hyper.groups)]
    return torch.tensor(rows, dtype=torch.float32, device="cpu")


def row(fused: Fused | None, now: GroupSettings, divisor: float) -> tuple[float, ...]:
    """Return the numbers of one group, see `numbers`."""
    average = 0.0 if fused is None else fused.average or 0.0
    shared = now.trains, 1 / divisor, now.step, divisor, average, 1 - average
    rule = fused.numbers(now) if fused is not None and now.trains else ()
    return *shared, *rule, *(0.0,) * (GROUP_NUMBERS - FIRST_OF_RULE - len(rule))
