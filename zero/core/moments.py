"""How moments are kept between updates: in fp32, or in bf16 with stochastic rounding. Updates work in fp32 always.

fp32   `Moments`: as they are, 4 bytes a parameter each
bf16   `Bf16Moments`: rounded stochastically, 2 bytes a parameter each

A running mean in bf16 would stand still if it were rounded to the nearest number: beta2 = 0.999 moves it by less than
half of bf16's last bit. Stochastic rounding goes up or down with the probability that keeps the mean exact. The random
bits are a function of (seed, step, parameter, element) alone, so they are the same however state is cut and whatever
holds it.

Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3.1; Zamirai et al. 2020,
"Revisiting BFloat16 Training", section 4.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from zero.core.layout import Piece
from zero.core.master import cut_as, one_after_another, rounded

BLOCK = 2**16
"""Elements of a parameter that share a number of 16 random bits."""

_KEYS = 32
"""Such numbers in one hash."""

_NAN = 0x7FC00000
"""The bits of a NaN, as an integer."""


@dataclass(frozen=True)
class Moments:
    """Kept in fp32.

    Attributes:
        dtype: of the pages.
        draws: random bits are needed, so elements have to be known by their places.
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    draws: ClassVar[bool] = False

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


@dataclass(frozen=True)
class Bf16Moments(Moments):
    """Kept in bf16, rounded stochastically.

    Attributes:
        seed: of the random bits.
    """

    dtype = torch.bfloat16
    draws = True
    seed: int = 0

    @contextmanager
    def opened(self, kept: Sequence[Tensor], places: Sequence[Sequence[Piece]], key: str) -> Iterator[Sequence[Tensor]]:
        flat = one_after_another(kept).float()
        yield cut_as(kept, flat)
        noise = torch.zeros_like(flat, dtype=torch.int16)
        for one, pieces in zip(cut_as(kept, noise), places, strict=True):
            for slot, start, stop, place in pieces:
                fill(one[place : place + stop - start], f"{self.seed}/{key}/{slot.name}", start)
        torch._foreach_copy_([one.view(torch.int16) for one in kept], cut_as(kept, stochastic_upper(flat, noise)))

    def page_of(self, values_K: Tensor) -> Tensor:
        return rounded(values_K, torch.bfloat16)


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
