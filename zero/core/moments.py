"""How moments are kept between updates: in fp32, in bf16 or in 8 bits. Updates work in fp32 always.

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

What is smaller is kept as the smallest of them, so its mean is not exact. A mean of squares that became zero would
divide its mean by nothing. Blocks are those vectors of a flat that no cut falls into, and every parameter begins with
one of its own.

Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3.1; Zamirai et al. 2020,
"Revisiting BFloat16 Training", section 4; Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization"; Rouhani
et al. 2023, "Microscaling Data Formats for Deep Learning", for exponents that blocks share.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
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
"""Such numbers in one hash."""

_NAN = 0x7FC00000
"""The bits of a NaN, as an integer."""

_DROPPED = 20
"""Of the 23 bits of a mantissa, where 3 are kept."""


@dataclass(frozen=True)
class Moments:
    """Kept in fp32.

    Attributes:
        dtype: of the pages.
        saved: of a checkpoint's values, which hold what pages hold to the bit.
        draws: random bits are needed, so elements have to be known by their places.
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    saved: ClassVar[torch.dtype] = torch.float32
    draws: ClassVar[bool] = False

    def of_squares(self) -> "Moments":
        """The form of what is never negative."""
        return self

    def numel(self, count: int) -> int:
        """Elements of `dtype` that keep `count` values, a multiple of 64."""
        return count

    @contextmanager
    def opened(self, kept: Sequence[Tensor], places: Sequence[Sequence[Piece]], key: str) -> Iterator[Sequence[Tensor]]:
        """Yields one moment in fp32, to be updated in place; then it is written back.

        Args:
            kept: (K,) tensors of its pages, one or more.
            places: of each, which elements of which parameters it has; empty where nothing is drawn.
            key: of this moment in this step, for random bits.
        """
        yield kept

    def page_of(self, values_K: Tensor) -> Tensor:
        """What a page holds for fp32 values, (K,): the nearest."""
        return values_K

    def values_of(self, page: Tensor) -> Tensor:
        """(K,) in `saved`: what a page holds."""
        return page


@dataclass(frozen=True)
class Bf16Moments(Moments):
    """Kept in bf16, rounded stochastically.

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
        bits = stochastic_upper(flat, _noise(cut_as(kept, flat), places, f"{self.seed}/{key}"))
        torch._foreach_copy_([one.view(torch.int16) for one in kept], cut_as(kept, bits))

    def page_of(self, values_K: Tensor) -> Tensor:
        return rounded(values_K, torch.bfloat16)


@dataclass(frozen=True)
class EightBitMoments(Moments):
    """Kept in 8 bits, rounded stochastically: of each block its exponent, then its codes.

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
        values = list(flat.split([one.numel() // (VECTOR + 1) * VECTOR for one in kept]))
        yield values
        self._write(page, flat, _noise(values, places, f"{self.seed}/{key}"))
        if len(kept) > 1:
            torch._foreach_copy_(list(kept), cut_as(kept, page))

    def page_of(self, values_K: Tensor) -> Tensor:
        page = values_K.new_empty(self.numel(values_K.numel()), dtype=torch.uint8)
        self._write(page, values_K, None)
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

    def _write(self, page: Tensor, values: Tensor, noise: Tensor | None) -> None:
        """Fill a page. Random bits are added to the bits that are dropped; without them half of what those can be."""
        codes = 128 if self.signed else 256
        bits = values.abs().view(-1, VECTOR).view(torch.int32)
        bits.clamp_(max=_NAN).add_(1 << (_DROPPED - 1))  # a GPU's NaN would become negative, as for bf16
        if noise is not None:
            bits.add_(noise.view(-1, VECTOR), alpha=1 << (_DROPPED - 16))
        bits.bitwise_right_shift_(_DROPPED)
        # the exponent of the largest as it was rounded: of the largest itself, what is just below a power of two could
        # never become it
        lowest = bits.amax(1, keepdim=True).bitwise_right_shift_(23 - _DROPPED).sub_(codes // 8 - 1)
        lowest.clamp_(min=0)
        bits.sub_(lowest.bitwise_left_shift(23 - _DROPPED)).clamp_(min=0)
        if self.signed:
            bits.add_(values.view(-1, VECTOR).signbit(), alpha=128)
        blocks = page.view(-1, VECTOR + 1)
        blocks[:, :1].copy_(lowest)
        blocks[:, 1:].copy_(bits)


def stochastic_upper(values: Tensor, noise: Tensor) -> Tensor:
    """The bits of fp32 values in bf16, rounded up or down in magnitude as 16 random bits say: (n,) int32.

    What bf16 can hold stays as it is; what is not a number stays none, as far as arithmetic makes it.

    Args:
        values: (n,) fp32; destroyed.
        noise: (n,) int16, uniform over all its values.
    """
    bits = values.view(torch.int32)
    bits.clamp_(max=_NAN)  # a GPU's NaN is the largest number of all: to add to it would make it -0
    return bits.add_(noise).add_(0x8000).bitwise_right_shift_(16)


def _noise(values: Sequence[Tensor], places: Sequence[Sequence[Piece]], key: str) -> Tensor:
    """(n,) int16 random bits of all values, one after another; 0 in gaps."""
    noise = torch.zeros(sum(one.numel() for one in values), dtype=torch.int16, device=values[0].device)
    for one, pieces in zip(cut_as(values, noise), places, strict=True):
        for slot, start, stop, place in pieces:
            fill(one[place : place + stop - start], f"{key}/{slot.name}", start)
    return noise


def fill(noise: Tensor, key: str, start: int) -> None:
    """Random bits of the elements from `start` on: (n,) int16, uniform, independent for each key.

    Within a block of 2^16 elements they are one permutation of all values plus a random number, so over a block they
    are spread evenly.
    """
    stop = start + noise.numel()
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        first, last = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
        part = permutation(noise.device)[first - block * BLOCK : last - block * BLOCK]
        torch.add(part, _number(key, block), out=noise[first - start : last - start])


def _number(key: str, block: int) -> int:
    found = array("h", hashlib.blake2b(f"{key}/{block // _KEYS}".encode(), digest_size=2 * _KEYS).digest())
    return found[block % _KEYS]


@cache
def permutation(device: torch.device) -> Tensor:
    """(2^16,) int16: all values once, without order. Made once, by whoever asks first; others have to come after that.

    Source: Wellons 2018, "Prospecting for Hash Functions", of 16 bits.
    """
    x = torch.arange(BLOCK, dtype=torch.int64)
    for shift, factor in ((8, 0x88B5), (7, 0xDB2D), (9, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFF
    return x.to(torch.int16).to(device)
