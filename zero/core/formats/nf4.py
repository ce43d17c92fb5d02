"""nf4: 4 bits, the index of one of 16 quantiles of a normal distribution; 0.5161 bytes a value.

There is a scale for each 64 values, which is kept in 8 bits with an fp32 scale and an fp32 offset for each 256 of them.

    a row    offset, scale of scales (fp32 each); 1 byte for each 64 values; 32 bytes of codes for each 64 values

Expanding rounds as bitsandbytes does. The offset is the mean of 256 scales; bitsandbytes takes one for a whole tensor,
which codes from bitsandbytes keep.

Source: Dettmers et al. 2023, "QLoRA", sections 3 and E; Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization", for the 256 numbers of a scale.
"""

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zero.core.formats.packed import LEAST_DIVISOR, PackedFormat, fp32_numbers, of_fp32
from zero.core.layout import VECTOR

if TYPE_CHECKING:
    import triton.language as tl

    from zero.core.tile import Tile

NORMAL_FLOAT = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 values of nf4, in units of a block's largest magnitude."""


def tile(
    codes: "Tile", pairs: "Tile", dynamic: "Tile", count: "Tile", first: "Tile", vector: "Tile", lane: "Tile"
) -> "Tile":
    """Return a tile of values; it is in one row, of 256 vectors in 8,456 bytes."""
    row = first // 256
    codes += row.to(tl.int64) * 8456
    count = tl.minimum(count - row * 256, 256)
    vector += first - row * 256
    live = vector < count
    number = tl.load(dynamic + tl.load(codes + (8 + vector), live, other=0).to(tl.int32))
    scale = number * tl.load(of_fp32(codes + 4)) + tl.load(of_fp32(codes))
    code = tl.load(codes + (8 + count + vector * 32 + lane // 2), live, other=0).to(tl.int32)
    return tl.load(pairs + (code * 2 + lane % 2)) * scale


class NormalFloat4(PackedFormat):
    """4-bit codes with scales in 8 bits."""

    name, block, head_bytes, vector_bytes, moved_bytes = "nf4", 256 * VECTOR, 8, 1 + VECTOR // 2, 24.0

    tile = staticmethod(tile)

    def tables(self, device: torch.device) -> tuple[Tensor, ...]:
        return _pairs(device), _dynamic(device)

    def _encode(self, values: Tensor, rows: Tensor) -> None:
        head, scales, codes = self._parts(rows)
        vectors = values.view(len(rows), -1, VECTOR)
        largest = vectors.abs().amax(2)
        offset = _mean(largest)
        centred = largest - offset
        spread = centred.abs().amax(1, keepdim=True)
        head.copy_(torch.cat([offset, spread], 1).view(torch.uint8))
        scales.copy_(_nearest(centred * (1 / spread.clamp(min=LEAST_DIVISOR)), _dynamic(values.device)))
        relative = vectors * (1 / largest.clamp(min=LEAST_DIVISOR))[:, :, None]
        nibbles = _nearest(relative, _pairs(values.device)[:16, 1].contiguous()).view(len(rows), -1, 2)
        codes.copy_(nibbles[:, :, 0] << 4 | nibbles[:, :, 1])

    def _expanded(self, rows: Tensor) -> Tensor:
        head, scales, codes = self._parts(rows)
        offset, spread = fp32_numbers(head).split(1, 1)
        scale = _looked_up(_dynamic(rows.device), scales) * spread + offset
        pairs = _pairs(rows.device).view(torch.int64).view(-1)  # index_select of rows takes 8 times as long
        values = _looked_up(pairs, codes).view(torch.float32).view(*scales.shape, VECTOR)
        return values.mul_(scale[:, :, None])

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = (rows.shape[1] - self.head_bytes) // self.vector_bytes
        begin = self.head_bytes + count
        return rows[:, : self.head_bytes], rows[:, self.head_bytes : begin], rows[:, begin:]


NF4 = NormalFloat4()


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte of codes, (256, 2) fp32: the first has the upper 4 bits."""
    table = torch.tensor(NORMAL_FLOAT, dtype=torch.float32, device="cpu")
    return torch.stack([table.repeat_interleave(16), table.repeat(16)], 1).to(device)


@cache
def _dynamic(device: torch.device) -> Tensor:
    """Return the sorted 256 numbers of 8 bits: a sign, a power of ten to 1e-6, and a fraction.

    The smaller the power, the fewer fractions there are: 64 of 1, 32 of 0.1, and so on; each fraction is the middle of
    its part of [0.1, 1].
    """
    numbers = [torch.tensor([0.0, 1.0], dtype=torch.float32, device="cpu")]
    for power in range(7):
        edges = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32, device="cpu")
        part = 10.0 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2)
        numbers += [part, -part]
    return torch.cat(numbers).sort().values.to(device)


def _looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """Return the element of a 1-D table for each code."""
    elements = table.new_empty(codes.shape)
    torch.index_select(table, 0, codes.int().reshape(-1), out=elements.view(-1))
    return elements


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    """Return the index, uint8, of the number in a sorted table that is nearest to each value; of two, the smaller."""
    return torch.bucketize(values, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


def _mean(values: Tensor) -> Tensor:
    """Return the mean of each row, (r, 1), added by halves, so that no number of threads or rows changes a bit."""
    count = values.shape[1]
    total = torch.nn.functional.pad(values, (0, 2 ** (count - 1).bit_length() - count))
    while total.shape[1] > 1:
        total = total[:, : total.shape[1] // 2] + total[:, total.shape[1] // 2 :]
    return total / count
