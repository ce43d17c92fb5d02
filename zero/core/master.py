"""The fp32 master of the parameters: how it is stored beside them, and how they are rounded from it.

fp32 compute     `Master`: the parameters are the master
bf16             `SplitMaster`: the 16 bits that the parameters lack, 2 bytes a parameter
fp16, or whole   `WholeMaster`: fp32 pages of its own, 4 bytes a parameter

A bf16 parameter is the upper half of its master, rounded. The lower half, read as a signed number, is the difference:
the bits of the master are the bits of the parameter times 2^16, plus that number, whose sign says whether the parameter
was rounded up or down. Every master is restored exactly if a tie, a lower half of exactly 0x8000, is rounded up in
magnitude. (Rounded to the nearest even number, two masters would have the same parameter and lower half.) A whole
master is rounded in the same way, so both formats give the same bits.

Source: Kalamkar et al. 2020, "Optimizing Deep Learning Recommender Systems Training on CPU Cluster Architectures",
section on Split-SGD-BF16, which truncates instead of rounding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Master:
    """The master of fp32 parameters, which is the parameters themselves. Base class of the storage formats.

    Attributes:
        kind: the kind of the pages that store it; None: it has no pages.
        dtype: the dtype of these pages.
        reads_params: whether an update reads the parameters; otherwise it only writes them.
    """

    kind: ClassVar[str | None] = None
    dtype: ClassVar[torch.dtype] = torch.float32
    reads_params: ClassVar[bool] = True

    @contextmanager
    def opened(self, params: Sequence[Tensor], kept: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yield the master as fp32 tensors to be updated in place, then store it and round the parameters from it.

        Args:
            params: one or more (K,) tensors in the dtype of compute.
            kept: the (K,) pages of the master for the same elements; empty if it has none.
        """
        yield params

    def of(self, param_K: Tensor, kept_K: Tensor) -> Tensor:
        """Return the fp32 master of the parameters. The caller must not write to it."""
        return param_K

    def page_of(self, values_K: Tensor) -> Tensor:
        """Return the contents of the page that stores the fp32 master `values_K`, (K,)."""
        return values_K


@dataclass(frozen=True)
class WholeMaster(Master):
    """An fp32 master that is stored whole in pages of its own."""

    kind = "master"
    reads_params = False

    @contextmanager
    def opened(self, params: Sequence[Tensor], kept: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        yield kept
        _round_into(params, kept)

    def of(self, param_K: Tensor, kept_K: Tensor) -> Tensor:
        return kept_K


@dataclass(frozen=True)
class SplitMaster(Master):
    """The master of bf16 parameters, of which pages store the lower 16 bits."""

    kind = "master_low"
    dtype = torch.int16

    @contextmanager
    def opened(self, params: Sequence[Tensor], kept: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        flat = in_fp32(params)
        flat.view(torch.int32).add_(one_after_another(kept))
        yield cut_as(params, flat)
        torch._foreach_copy_(list(kept), cut_as(kept, flat.view(torch.int32)))
        _round_into(params, [flat])

    def of(self, param_K: Tensor, kept_K: Tensor) -> Tensor:
        return join(param_K, kept_K)

    def page_of(self, values_K: Tensor) -> Tensor:
        return low(values_K)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values to the nearest number of the compute dtype. In bf16 a tie is rounded up in magnitude."""
    return (_without_ties(values) if dtype == torch.bfloat16 and values.dtype == torch.float32 else values).to(dtype)


def low(master_K: Tensor) -> Tensor:
    """Return the lower 16 bits of fp32 numbers as signed integers, (K,) int16."""
    return master_K.view(torch.int32).to(torch.int16)


def join(param_K: Tensor, low_K: Tensor) -> Tensor:
    """Return the fp32 masters, (K,), of bf16 parameters and lower halves. NaN stays NaN, with another payload."""
    master_K = param_K.float()
    master_K.view(torch.int32).add_(low_K)
    return master_K


def _without_ties(values: Tensor) -> Tensor:
    """Return fp32 numbers near `values` whose rounding to bf16 rounds the ties of `values` up in magnitude.

    Clearing the lower 15 bits keeps a tie and turns every value above it into that tie. Adding 1/4096 of each value,
    less than the distance to the next tie, then moves all of these up, however that sum is rounded. Infinities and NaN
    do not change.
    """
    return values.view(torch.int32).bitwise_and(~0x7FFF).view(torch.float32).add_(values, alpha=2**-12)


def _round_into(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Write masters, rounded, to `params`, which have the same elements in the same order."""
    if params[0].dtype == torch.bfloat16:
        masters = cut_as(params, _without_ties(one_after_another(masters)))
    torch._foreach_copy_(list(params), list(masters))


def one_after_another(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, so that an operator on all of them is one launch on a GPU."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def in_fp32(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype and convert them to fp32, in one launch."""
    flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), dtype=torch.float32)
    torch._foreach_copy_(cut_as(tensors, flat), list(tensors))
    return flat


def cut_as(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Split `flat` into views with the lengths of `tensors`."""
    return [flat] if len(tensors) == 1 else list(flat.split_with_sizes([tensor.numel() for tensor in tensors]))
