"""Codes of frozen parameters: 4 or 8 bits a value, with scales for blocks of values.

    nf4    4 bits, the index of one of 16 quantiles of a normal distribution; a scale for each 64 values, which is kept
           in 8 bits with an fp32 scale and an fp32 offset for each 256 of them: 0.5161 bytes a value
    int8   8 bits, with an fp32 scale for each 256 values: 1.0156 bytes a value

A parameter's codes are one string of bytes, a row for each block of its values in row-major order: 16,384 values with
nf4, 256 with int8. A row depends on its block alone, so each rank makes only the bytes that it keeps, and no cut of the
string changes a bit. The last row is shorter, in steps of 64 values.

    a row of nf4    offset, scale of scales (fp32 each); 1 byte for each 64 values; 32 bytes of codes for each 64 values
    a row of int8   scale (fp32); codes

Expanding rounds in fp32 after each product and sum, and last to the dtype of the result, as bitsandbytes does. The
offset is the mean of 256 scales; bitsandbytes takes one for a whole tensor, which its codes keep when they come in.

Source: Dettmers et al. 2023, "QLoRA", sections 3 and E; Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization", for the 256 numbers of a scale; Dettmers et al. 2022, "LLM.int8()", section 2.1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from zero.core.layout import VECTOR

NORMAL_FLOAT = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The 16 values of nf4, in units of a block's largest magnitude."""

TINY = 1e-38
"""The least divisor, for blocks of zeros. Its inverse is finite in fp32."""

CHUNK = 2**18
"""Values that are encoded or expanded at once, so that temporaries take 3 MiB. Half as many take a third longer."""


@dataclass(frozen=True)
class Codec(ABC):
    """A format of frozen parameters.

    Attributes:
        name: the format's name in settings and checkpoints.
        block: the number of values of a row.
        head_bytes: bytes of a row beside those of its vectors.
        vector_bytes: bytes of a row for each 64 values.
        moved_bytes: bytes of memory that operators could read and write in the time that they take to expand a value;
            measured on an EPYC core that copies 27 GB/s.
    """

    name: ClassVar[str]
    block: ClassVar[int]
    head_bytes: ClassVar[int]
    vector_bytes: ClassVar[int]
    moved_bytes: ClassVar[float]

    @property
    def row_bytes(self) -> int:
        return self.nbytes(self.block)

    def nbytes(self, count: int) -> int:
        """Return the number of bytes that `count` values take."""
        return self.head_bytes * -(-count // self.block) + self.vector_bytes * -(-count // VECTOR)

    def encode(self, values: Tensor) -> Tensor:
        """Return the codes of a parameter's values, (n,) fp32: (`nbytes(n)`,) uint8, of which `is_finite` may be false.

        A part of a parameter that begins at a multiple of `block` gives a part of its codes.
        """
        codes = values.new_empty(self.nbytes(values.numel()), dtype=torch.uint8)
        for rows, first, last in self._rows(codes, values.numel()):
            padded = values.new_zeros(rows.shape[0], (rows.shape[1] - self.head_bytes) // self.vector_bytes * VECTOR)
            padded.view(-1)[: last - first].copy_(values[first:last])
            self._encode(padded, rows)
        return codes

    def expand(self, codes: Tensor, values: Tensor, chunk: int = CHUNK) -> None:
        """Write the values of codes, (`nbytes(n)`,) uint8, to `values`, (n,) of any floating-point dtype.

        Args:
            chunk: the number of values that are expanded at once, a multiple of `CHUNK`.
        """
        for rows, first, last in self._rows(codes, values.numel(), chunk):
            values[first:last].copy_(self._decoded(rows).view(-1)[: last - first])

    def is_finite(self, codes: Tensor) -> bool:
        """Return whether all scales of some rows of codes, (n,) uint8, are finite.

        They are not if a value is NaN or infinite, or if the largest values of the blocks of a row of nf4 are above
        1.3e36 on average, because their sum is infinite.
        """
        rows = torch.arange(0, codes.numel(), self.row_bytes, device=codes.device)
        heads = codes[rows[:, None] + torch.arange(self.head_bytes, device=codes.device)]
        return bool(heads.view(torch.float32).isfinite().all())

    def tables(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the tables of the kernel in `zero.platform.kernels`, on `device`."""
        return ()

    def bytes_of(self, values: Callable[[int, int], Tensor], count: int) -> Callable[[int, int], Tensor]:
        """Return a function to ranges of the codes of a parameter of `count` values.

        Args:
            values: function from (start, stop) to these values, (stop - start,) fp32.
        """

        def codes(start: int, stop: int) -> Tensor:
            first, last = start // self.row_bytes, -(-stop // self.row_bytes)
            rows = self.encode(values(first * self.block, min(last * self.block, count)))
            return rows[start - first * self.row_bytes : stop - first * self.row_bytes]

        return codes

    def values_of(
        self, codes: Callable[[int, int], Tensor], count: int, dtype: torch.dtype = torch.float32
    ) -> Callable[[int, int], Tensor]:
        """Return a function to ranges of the values of codes, as a gather in `dtype` makes them; see `bytes_of`."""

        def values(start: int, stop: int) -> Tensor:
            first, last = start // self.block, -(-stop // self.block)
            end = min(last * self.block, count)
            whole = torch.empty(end - first * self.block, dtype=dtype, device="cpu")
            self.expand(codes(first * self.row_bytes, self.nbytes(end)), whole)
            return whole[start - first * self.block : stop - first * self.block]

        return values

    def _rows(self, codes: Tensor, count: int, chunk: int = CHUNK) -> list[tuple[Tensor, int, int]]:
        """Return (rows of equal length, first value, last value) of some rows of codes at once, in order."""
        whole, parts = count // self.block * self.block, []
        for first in range(0, whole, chunk):
            last = min(first + chunk, whole)
            parts.append((codes[self.nbytes(first) : self.nbytes(last)].view(-1, self.row_bytes), first, last))
        if whole < count:
            parts.append((codes[self.nbytes(whole) :].view(1, -1), whole, count))
        return parts

    @abstractmethod
    def _encode(self, values: Tensor, rows: Tensor) -> None:
        """Write the codes of blocks, (r, n) fp32, to rows, (r, b)."""

    @abstractmethod
    def _decoded(self, rows: Tensor) -> Tensor:
        """Return the values of rows, (r, b), as fp32, (r, n)."""


class NF4(Codec):
    """4-bit codes with scales in 8 bits."""

    name, block, head_bytes, vector_bytes, moved_bytes = "nf4", 256 * VECTOR, 8, 1 + VECTOR // 2, 24.0

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
        scales.copy_(_nearest(centred * (1 / spread.clamp(min=TINY)), _dynamic(values.device)))
        relative = vectors * (1 / largest.clamp(min=TINY))[:, :, None]
        nibbles = _nearest(relative, _pairs(values.device)[:16, 1].contiguous()).view(len(rows), -1, 2)
        codes.copy_(nibbles[:, :, 0] << 4 | nibbles[:, :, 1])

    def _decoded(self, rows: Tensor) -> Tensor:
        head, scales, codes = self._parts(rows)
        offset, spread = _numbers(head).split(1, 1)
        scale = _looked_up(_dynamic(rows.device), scales) * spread + offset
        pairs = _pairs(rows.device).view(torch.int64).view(-1)  # index_select of rows takes 8 times as long
        values = _looked_up(pairs, codes).view(torch.float32).view(*scales.shape, VECTOR)
        return values.mul_(scale[:, :, None])

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count = (rows.shape[1] - self.head_bytes) // self.vector_bytes
        begin = self.head_bytes + count
        return rows[:, : self.head_bytes], rows[:, self.head_bytes : begin], rows[:, begin:]


class Int8(Codec):
    """8-bit codes with a scale for each 256 values."""

    name, block, head_bytes, vector_bytes, moved_bytes = "int8", 4 * VECTOR, 4, VECTOR, 12.0

    def _encode(self, values: Tensor, rows: Tensor) -> None:
        largest = values.abs().amax(1, keepdim=True).clamp(min=127 * TINY)
        rows[:, :4].copy_(largest.view(torch.uint8))
        rows[:, 4:].view(torch.int8).copy_(torch.round(values * (127 / largest)))

    def _decoded(self, rows: Tensor) -> Tensor:
        return rows[:, 4:].view(torch.int8).float().mul_(_numbers(rows[:, :4])).mul_(1 / 127)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (NF4(), Int8())}


def _numbers(head: Tensor) -> Tensor:
    """Return the fp32 numbers, (r, n), in the heads of rows, (r, 4 n); copied, because a last row is not aligned."""
    return head.clone(memory_format=torch.contiguous_format).view(torch.float32)


@cache
def _pairs(device: torch.device) -> Tensor:
    """Return the two values of each byte of codes, (256, 2) fp32: the first has the upper 4 bits."""
    table = torch.tensor(NORMAL_FLOAT, dtype=torch.float32, device="cpu")
    return torch.stack([table.repeat_interleave(16), table.repeat(16)], 1).to(device)


@cache
def _dynamic(device: torch.device) -> Tensor:
    """Return the 256 numbers of an 8-bit scale, in order: a sign, a power of ten to 1e-6, and a fraction.

    The smaller the power, the fewer fractions there are: 64 of 1, 32 of 0.1, and so on; each is the middle of its part
    of [0.1, 1].
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
