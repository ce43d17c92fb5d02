"""int8: 8 bits with an fp32 scale for each 256 values; 1.0156 bytes a value.

    a row    scale (fp32); codes

Source: Dettmers et al. 2022, "LLM.int8()", section 2.1.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero.core.formats.packed import LEAST_DIVISOR, PackedFormat, bytes_as_fp32, fp32_numbers
from zero.core.layout import VECTOR

if TYPE_CHECKING:
    import triton.language as tl

    from zero.core.tile import Tile


def tile(
    codes: "Tile", _first_table: "Tile", _second_table: "Tile", numel: "Tile", first: "Tile", lane: "Tile"
) -> "Tile":
    """Return a tile of values; a row has 256 values in 260 bytes, and a tile has some rows."""
    at = first + lane
    live = at < numel
    row = tl.minimum(at, numel - 1) // 256
    scale = bytes_as_fp32(codes + row * 260)
    code = tl.load(codes + row * 260 + 4 + at % 256, live, other=0).to(tl.int8, bitcast=True)
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
