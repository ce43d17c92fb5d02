"""Storage of moments between updates in fp32, bf16 or 8 bits. Updates always compute in fp32.

fp32   `Moments`: not rounded, 4 bytes per parameter and moment
bf16   `Bf16Moments`: rounded stochastically, 2 bytes per parameter and moment
8bit   `EightBitMoments`: likewise, with an exponent for each 64 elements, 1 1/64 bytes per parameter and moment

A running mean in so few bits would stop changing if it were rounded to the nearest number, because with beta2 = 0.999 a
step changes it by less than half of bf16's last bit. Stochastic rounding rounds up or down with probabilities that keep
the expected value exact. The random bits are a function of (seed, step, parameter, element) only, so they do not depend
on how state is cut or where it is stored.

Eight bits are an exponent, relative to the exponent that a block of 64 elements shares, and the first three bits of the
mantissa:

a mean               sign, 4 bits of exponent: down to 2^-15 of the block's largest, and zero
a mean of squares    5 bits of exponent: down to 2^-31 of the block's largest; not zero in a block with other values

Smaller values are stored as the smallest of these, so their expected value is not exact. A mean of squares must not
become zero, because updates divide by its root. A block is 64 aligned elements of the flat tensor: no cut divides it,
and every parameter begins a new one. A page consists of rows, the last of which may have fewer blocks:

a row                the codes of 16 blocks, 64 bytes each; the exponents of these blocks, 1 byte each

so that kernels read and write aligned words. A page is cut into pieces at rows.

Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3.1; Zamirai et al. 2020,
"Revisiting BFloat16 Training", section 4; Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"; Rouhani
et al. 2023, "Microscaling Data Formats for Deep Learning", for exponents that blocks share.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from zero.core.layout import VECTOR, SlotPiece, key_of
from zero.core.master import cut_as, one_after_another, rounded

ROUNDING_BLOCK = 2**16
"""Consecutive elements of a parameter that share one random number: a 16-bit offset into `permutation`."""

_NAN = 0x7FC00000
"""The bits of an fp32 NaN, as an integer."""

ROW_NUMEL = 16 * VECTOR
"""The elements of a row of 8-bit moments. A page of 4 KiB in fp32 has as many, so pages consist of whole rows."""

_ROW_BYTES = ROW_NUMEL // VECTOR * (VECTOR + 1)

_DROPPED = 20
"""Number of mantissa bits that the 8-bit format drops: 3 of 23 are kept."""


@dataclass(frozen=True)
class Moments:
    """The storage of moments in fp32. Base class of the storage formats.

    Attributes:
        dtype: the dtype of the pages.
        saved: the dtype of a checkpoint's values, which represents the contents of pages exactly.
        draws: whether rounding takes random bits, for which each element's parameter and index must be known.
        seed: the seed of the random bits.
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    saved: ClassVar[torch.dtype] = torch.float32
    draws: ClassVar[bool] = False
    seed: int = 0

    def of_squares(self) -> "Moments":
        """Return this format for moments that are never negative."""
        return self

    def key(self, text: str) -> int:
        """Return the 32-bit seed of the random bits of one moment in one step, which `text` names."""
        return key_of(f"{self.seed}/{text}")

    def numel(self, count: int) -> int:
        """Return the number of elements of `dtype` that store `count` values; `count` is a multiple of 64."""
        return count

    @contextmanager
    def opened(
        self, kept: Sequence[Tensor], places: Sequence[Sequence[SlotPiece]], key: str
    ) -> Iterator[Sequence[Tensor]]:
        """Yield one moment as fp32 tensors to be updated in place, then encode it into its pages.

        Args:
            kept: one or more pages of the moment, (K,).
            places: for each page, the pieces of parameters that it consists of; empty if `draws` is False.
            key: identifies this moment in this step; part of the seed of random bits.
        """
        yield kept

    def page_of(self, values_K: Tensor) -> Tensor:
        """Return the contents of the page that stores fp32 values, (K,), rounded to the nearest."""
        return values_K

    def values_of(self, page: Tensor) -> Tensor:
        """Return the values that a page stores, (K,), in the dtype `saved`."""
        return page


@dataclass(frozen=True)
class Bf16Moments(Moments):
    """The storage of moments in bf16, rounded stochastically."""

    dtype = saved = torch.bfloat16
    draws = True

    @contextmanager
    def opened(
        self, kept: Sequence[Tensor], places: Sequence[Sequence[SlotPiece]], key: str
    ) -> Iterator[Sequence[Tensor]]:
        flat = one_after_another(kept).float()
        yield cut_as(kept, flat)
        bits = flat.view(torch.int32)
        bits.clamp_(max=_NAN)  # a GPU's NaN is 0x7FFFFFFF: an addition would overflow to -0
        _draw(cut_as(kept, bits), places, self.key(key))  # rounds up in magnitude if the sum carries
        torch._foreach_copy_([page.view(torch.int16) for page in kept], cut_as(kept, bits.bitwise_right_shift_(16)))

    def page_of(self, values_K: Tensor) -> Tensor:
        return rounded(values_K, torch.bfloat16)


@dataclass(frozen=True)
class EightBitMoments(Moments):
    """The storage of moments in 8 bits, rounded stochastically: for each block an exponent and 64 codes.

    Attributes:
        signed: whether the moment is a mean, which has a sign; otherwise it is a mean of squares.
    """

    dtype = torch.uint8
    draws = True
    signed: bool = True

    def of_squares(self) -> Moments:
        return replace(self, signed=False)

    def numel(self, count: int) -> int:
        return count // VECTOR * (VECTOR + 1)

    @contextmanager
    def opened(
        self, kept: Sequence[Tensor], places: Sequence[Sequence[SlotPiece]], key: str
    ) -> Iterator[Sequence[Tensor]]:
        page = one_after_another(kept)
        rows = _rows(page, [tensor.numel() for tensor in kept])
        flat = self._decoded(rows)
        numels = [tensor.numel() // (VECTOR + 1) * VECTOR for tensor in kept]
        yield list(flat.split(numels))
        self._write(rows, flat, lambda bits: _draw(bits.split(numels), places, self.key(key), _DROPPED - 16))
        if len(kept) > 1:
            torch._foreach_copy_(list(kept), cut_as(kept, page))

    def page_of(self, values_K: Tensor) -> Tensor:
        page = values_K.new_empty(self.numel(values_K.numel()), dtype=torch.uint8)
        rows = _rows(page, [page.numel()])
        self._write(rows, values_K, lambda bits: bits.add_(1 << (_DROPPED - 1)))  # rounds to the nearest
        return page

    def values_of(self, page: Tensor) -> Tensor:
        return self._decoded(_rows(page, [page.numel()]))

    def _decoded(self, rows: "_Rows") -> Tensor:
        """Return the fp32 values, (K,), of rows."""
        lowest = _in_blocks([part.to(torch.int32) for part in rows.lowest]).bitwise_left_shift_(23)
        dtype = torch.int8 if self.signed else torch.uint8  # a sign stays the first bit in int32
        codes = _in_blocks([part.view(dtype).to(torch.int32) for part in rows.codes])
        if not self.signed:
            return codes.bitwise_left_shift_(_DROPPED).add_(lowest).view(torch.float32).view(-1)
        sizes = codes.bitwise_and(0x7F)
        lowest = lowest * (sizes > 0)  # a code of zero is 0.0, without the block's exponent
        bits = sizes.bitwise_left_shift_(_DROPPED).add_(lowest)
        return bits.bitwise_or_(codes.bitwise_and_(-(2**31))).view(torch.float32).view(-1)

    def _write(self, rows: "_Rows", values: Tensor, add: Callable[[Tensor], object]) -> None:
        """Encode fp32 values, (K,), into rows.

        `add` gets the values' bits without sign, (K,) int32, and adds to the bits that will be dropped, for rounding.
        """
        codes = 128 if self.signed else 256
        flat = values.abs().view(torch.int32).clamp_(max=_NAN)  # a GPU's NaN would overflow, as for bf16
        add(flat)
        bits = flat.view(-1, VECTOR).bitwise_right_shift_(_DROPPED)
        # taken after rounding, which may raise the largest value of a block to the next power of two
        lowest = bits.amax(1, keepdim=True).bitwise_right_shift_(23 - _DROPPED).sub_(codes // 8 - 1)
        lowest.clamp_(min=0)
        bits.sub_(lowest, alpha=1 << (23 - _DROPPED)).clamp_(min=0)
        if self.signed:
            bits.add_(values.view(-1, VECTOR).signbit(), alpha=128)
        for parts, made in ((rows.lowest, lowest), (rows.codes, bits)):
            cuts = made.split([part.numel() // made.shape[1] for part in parts])
            for part, cut in zip(parts, cuts, strict=True):
                part.copy_(cut.view(part.shape))


class _Rows(NamedTuple):
    """Views of pages of 8-bit moments, one of each kind for all rows of equal length that follow each other."""

    lowest: list[Tensor]
    """The exponents of blocks, (rows, blocks, 1) each."""
    codes: list[Tensor]
    """The codes of blocks, (rows, blocks, 64) each."""


def _rows(page: Tensor, sizes: Sequence[int]) -> _Rows:
    """Return the rows of pages of `sizes` bytes, which follow each other in `page`."""
    runs = [[0, _ROW_BYTES]]  # [bytes, bytes of a row]
    for size in sizes:
        if runs[-1][1] != _ROW_BYTES:
            runs.append([0, _ROW_BYTES])
        short = size % _ROW_BYTES
        runs[-1][0] += size - short
        if short:
            runs.append([short, short])
    runs = [run for run in runs if run[0]] or runs
    views = _Rows([], [])
    for part, (_, row) in zip(page.split([size for size, _ in runs]), runs, strict=True):
        blocks = row // (VECTOR + 1)
        codes, lowest = part.view(-1, row).split_with_sizes([blocks * VECTOR, blocks], 1)
        views.lowest.append(lowest.unsqueeze(2))
        views.codes.append(codes.unflatten(1, (blocks, VECTOR)))
    return views


def _in_blocks(parts: Sequence[Tensor]) -> Tensor:
    """Return the blocks of rows one below the other, (blocks, n)."""
    return one_after_another([part.view(-1, part.shape[2]) for part in parts])


def _draw(bits: Sequence[Tensor], places: Sequence[Sequence[SlotPiece]], key: int, left: int = 0) -> None:
    """Add random bits to (K,) int32 tensors with `add_random`, but not in gaps, which stay zero."""
    for tensor, pieces in zip(bits, places, strict=True):
        for slot, start, stop, place in pieces:
            add_random(tensor[place : place + stop - start], slot.key ^ key, start, left)


def add_random(bits: Tensor, key: int, start: int, left: int = 0) -> None:
    """Add 16 random bits to each element in place: uniform, and independent for each key.

    Within a block of 2^16 elements each value of 16 bits occurs once, because a block uses one permutation, from a
    random offset on.

    Args:
        bits: (n,) int32: elements [start, start + n) of a parameter.
        key: the seed, 32 bits.
        left: the number of bits by which the random bits are shifted to the left.
    """
    stop, mixed = start + bits.numel(), mix(key)
    for block in range(start // ROUNDING_BLOCK, -(-stop // ROUNDING_BLOCK)):
        first, last = max(start, block * ROUNDING_BLOCK), min(stop, (block + 1) * ROUNDING_BLOCK)
        place = (mix(mixed + block) >> 16) - block * ROUNDING_BLOCK
        part = permutation(bits.device)[place + first : place + last]
        bits[first - start : last - start].add_(part, alpha=1 << left)


def mix(x: int) -> int:
    """Return a 32-bit hash of the lower 32 bits of a number. `zero.platform.tiles` computes the same on a GPU.

    Source: the 32-bit hash of Wellons 2018, "Prospecting for Hash Functions".
    """
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


@cache
def permutation(device: torch.device) -> Tensor:
    """Return a fixed permutation of all 16-bit values followed by its copy: (2^17,) int32.

    The first call for a device creates it; other threads and streams must not use it before that call has returned.
    Source: the 16-bit hash of Wellons 2018, "Prospecting for Hash Functions".
    """
    x = torch.arange(ROUNDING_BLOCK, dtype=torch.int64)
    for shift, factor in ((8, 0x88B5), (7, 0xDB2D), (9, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFF
    return x.to(torch.int32).repeat(2).to(device)
