"""int8: 8 bits with an fp32 scale for each 256 values; 1.0156 bytes a value.

    a row    scale (fp32); codes

Source: Dettmers et al. 2022, "LLM.int8()", section 2.1.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero.core.formats.packed import LEAST_DIVISOR, PackedFormat, fp32_numbers, of_fp32
from zero.core.layout import VECTOR

if TYPE_CHECKING:
    import triton.language as tl

    from zero.core.tile import Tile


def tile(
    codes: "Tile",
    _first_table: "Tile",
    _second_table: "Tile",
    count: "Tile",
    first: "Tile",
    vector: "Tile",
    lane: "Tile",
) -> "Tile":
    """Return a tile of values; a row has 4 vectors in 260 bytes, and a tile has some rows."""
    row = first // 4
    live = first + vector < count
    vector += first - row * 4
    codes += row.to(tl.int64) * 260 + vector // 4 * 260
    scale = tl.load(of_fp32(codes), live, other=0.0)
    code = tl.load(codes + (4 + vector % 4 * 64 + lane), live, other=0).to(tl.int8, bitcast=True)
    return code.to(tl.float32) * scale * 0.007874015718698502  # 1 / 127 in fp32


class Integer8(PackedFormat):
    """8-bit codes with a scale for each 256 values."""

    name, block, head_bytes, vector_bytes, moved_bytes = "int8", 4 * VECTOR, 4, VECTOR, 12.0

    tile = staticmethod(tile)

    def _encode(self, values: Tensor, rows: Tensor) -> None:
        largest = values.abs().amax(1, keepdim=True).clamp(min=127 * LEAST_DIVISOR)
        rows[:, :4].copy_(largest.view(torch.uint8))
        rows[:, 4:].view(torch.int8).copy_(torch.round(values * (127 / largest)))

    def _expanded(self, rows: Tensor) -> Tensor:
        return rows[:, 4:].view(torch.int8).float().mul_(fp32_numbers(rows[:, :4])).mul_(1 / 127)


INT8 = Integer8()
