"""Moments between updates: kept in fp32, in bf16 or in 8 bits. Updates always work in fp32.

fp32   `Moments`: as they are, 4 bytes a parameter each
bf16   `Bf16Moments`: rounded stochastically, 2 bytes a parameter each
8bit   `EightBitMoments`: likewise, with an exponent for each 64 elements, 1 1/64 bytes a parameter each

A running mean in so few bits would stand still if it were rounded to the nearest number: beta2 = 0.999 moves it by less
than half of bf16's last bit. Stochastic rounding goes up or down with the probability that keeps the mean exact. The
random bits are a function of (seed, step, parameter, element) alone, so they are the same however state is cut and
whatever holds it.

Eight bits are an exponent, counted from one that a block of 64 elements shares, and three bits after the leading one:

a mean               sign, 4 bits of exponent: down to 2^-15 of the block's largest, and zero
a mean of squares    5 bits of exponent: down to 2^-31 of the block's largest, and not zero beside what is not

Smaller values are kept as the smallest of these, so their mean is not exact. A mean of squares that became zero would
be a division by zero. A block is a vector of the flat: no cut falls into it, and every parameter begins a new one.

Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3.1; Zamirai et al. 2020,
"Revisiting BFloat16 Training", section 4; Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"; Rouhani
et al. 2023, "Microscaling Data Formats for Deep Learning", for exponents that blocks share.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from zero.core.layout import VECTOR, Piece
from zero.core.master import cut_as, one_after_another, rounded

BLOCK = 2**16
"""Elements of a parameter that share a number of 16 random bits."""

_KEYS = 32
"""Numbers in one hash."""

_NAN = 0x7FC00000
"""The bits of a NaN, as an integer."""

_DROPPED = 20
"""Bits of a mantissa that are dropped: 3 of 23 are kept."""


@dataclass(frozen=True)
class Moments:
    """Moments in fp32.

    Attributes:
        dtype: of the pages.
        saved: of a checkpoint's values, which hold what pages hold to the bit.
        draws: random bits are needed, so elements have to be known by their places.
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    saved: ClassVar[torch.dtype] = torch.float32
    draws: ClassVar[bool] = False

    def of_squares(self) -> "Moments":
        """Return the form for moments that are never negative."""
        return self

    def numel(self, count: int) -> int:
        """Return the elements of `dtype` that keep `count` values, a multiple of 64."""
        return count

    @contextmanager
    def opened(self, kept: Sequence[Tensor], places: Sequence[Sequence[Piece]], key: str) -> Iterator[Sequence[Tensor]]:
        """Yield one moment in fp32, to be updated in place; then write it back.

        Args:
            kept: (K,) tensors of its pages, one or more.
            places: of each, its pieces of parameters; empty where nothing is drawn.
            key: of this moment in this step, for random bits.
        """
        yield kept

    def page_of(self, values_K: Tensor) -> Tensor:
        """Return the contents of a page for fp32 values, (K,), rounded to the nearest."""
        return values_K

    def values_of(self, page: Tensor) -> Tensor:
        """Return the values of a page, (K,), in the dtype `saved`."""
        return page


@dataclass(frozen=True)
class Bf16Moments(Moments):
    """Moments in bf16, rounded stochastically.

    Attributes:
        seed: of the random bits.
    """

    dtype = saved = torch.bfloat16
    draws = True
    seed: int = 0

    @contextmanager
    def opened(self, kept: Sequence[Tensor], places: Sequence[Sequence[Piece]], key: str) -> Iterator[Sequence[Tensor]]:
        flat = one_after_another(kept).float()
        yield cut_as(kept, flat)
        bits = flat.view(torch.int32)
        bits.clamp_(max=_NAN)  # a GPU's NaN is the largest number of all: to add to it would make it -0
        _draw(cut_as(kept, bits), places, f"{self.seed}/{key}")  # up or down in magnitude, as these bits carry or not
        torch._foreach_copy_([page.view(torch.int16) for page in kept], cut_as(kept, bits.bitwise_right_shift_(16)))

    def page_of(self, values_K: Tensor) -> Tensor:
        return rounded(values_K, torch.bfloat16)


@dataclass(frozen=True)
class EightBitMoments(Moments):
    """Moments in 8 bits, rounded stochastically: of each block its exponent, then its codes.

    Attributes:
        seed: of the random bits.
        signed: they are means; otherwise means of squares.
    """

    dtype = torch.uint8
    draws = True
    seed: int = 0
    signed: bool = True

    def of_squares(self) -> Moments:
        return replace(self, signed=False)

    def numel(self, count: int) -> int:
        return count // VECTOR * (VECTOR + 1)

    @contextmanager
    def opened(self, kept: Sequence[Tensor], places: Sequence[Sequence[Piece]], key: str) -> Iterator[Sequence[Tensor]]:
        page = one_after_another(kept)
        flat = self.values_of(page)
        numels = [tensor.numel() // (VECTOR + 1) * VECTOR for tensor in kept]
        yield list(flat.split(numels))
        self._write(page, flat, lambda bits: _draw(bits.split(numels), places, f"{self.seed}/{key}", _DROPPED - 16))
        if len(kept) > 1:
            torch._foreach_copy_(list(kept), cut_as(kept, page))

    def page_of(self, values_K: Tensor) -> Tensor:
        page = values_K.new_empty(self.numel(values_K.numel()), dtype=torch.uint8)
        self._write(page, values_K, lambda bits: bits.add_(1 << (_DROPPED - 1)))  # half of what random bits can be
        return page

    def values_of(self, page: Tensor) -> Tensor:
        blocks = page.view(-1, VECTOR + 1)
        lowest, codes = blocks[:, :1].to(torch.int32).bitwise_left_shift_(23), blocks[:, 1:].to(torch.int32)
        if not self.signed:
            return codes.bitwise_left_shift_(_DROPPED).add_(lowest).view(torch.float32).view(-1)
        sizes = codes.bitwise_and(0x7F)
        lowest = lowest * (sizes > 0)  # what is zero has no exponent
        bits = sizes.bitwise_left_shift_(_DROPPED).add_(lowest)
        return bits.bitwise_or_(codes.bitwise_and_(0x80).bitwise_left_shift_(24)).view(torch.float32).view(-1)

    def _write(self, page: Tensor, values: Tensor, add: Callable[[Tensor], object]) -> None:
        """Fill a page. `add` adds the rounding of the bits that are dropped to all bits, (K,) int32."""
        codes = 128 if self.signed else 256
        flat = values.abs().view(torch.int32).clamp_(max=_NAN)  # a GPU's NaN would become negative, as for bf16
        add(flat)
        bits = flat.view(-1, VECTOR).bitwise_right_shift_(_DROPPED)
        # the exponent of the largest after rounding: a value just below a power of two could not round up to it
        # otherwise
        lowest = bits.amax(1, keepdim=True).bitwise_right_shift_(23 - _DROPPED).sub_(codes // 8 - 1)
        lowest.clamp_(min=0)
        bits.sub_(lowest.bitwise_left_shift(23 - _DROPPED)).clamp_(min=0)
        if self.signed:
            bits.add_(values.view(-1, VECTOR).signbit(), alpha=128)
        blocks = page.view(-1, VECTOR + 1)
        blocks[:, :1].copy_(lowest)
        blocks[:, 1:].copy_(bits)


def _draw(bits: Sequence[Tensor], places: Sequence[Sequence[Piece]], key: str, left: int = 0) -> None:
    """Add random bits to (K,) int32 tensors, as `add_random` does; nothing in gaps, which are zero."""
    for tensor, pieces in zip(bits, places, strict=True):
        for slot, start, stop, place in pieces:
            add_random(tensor[place : place + stop - start], f"{key}/{slot.name}", start, left)


def add_random(bits: Tensor, key: str, start: int, left: int = 0) -> None:
    """Add 16 random bits to each element from `start` on: (n,) int32; uniform, independent for each key.

    Within a block of 2^16 elements they are all values once: one permutation, from a random place on.

    Args:
        left: places by which they are shifted to the left.
    """
    stop = start + bits.numel()
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        first, last = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
        place = _number(key, block) - block * BLOCK
        part = permutation(bits.device)[place + first : place + last]
        bits[first - start : last - start].add_(part, alpha=1 << left)


def _number(key: str, block: int) -> int:
    numbers = array("H", hashlib.blake2b(f"{key}/{block // _KEYS}".encode(), digest_size=2 * _KEYS).digest())
    return numbers[block % _KEYS]


@cache
def permutation(device: torch.device) -> Tensor:
    """Return (2^17,) int32: a permutation of all values of 16 bits, twice.

    Made by the first call; other threads and streams must come after it. Source: Wellons 2018, "Prospecting for Hash
    Functions", of 16 bits.
    """
    x = torch.arange(BLOCK, dtype=torch.int64)
    for shift, factor in ((8, 0x88B5), (7, 0xDB2D), (9, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFF
    return x.to(torch.int32).repeat(2).to(device)
