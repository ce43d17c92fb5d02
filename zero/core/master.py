"""The fp32 master, kept whole or as the half that the bf16 parameter lacks, and its rounding to that parameter.

fp32 compute     `Master`: the parameters are the master
bf16             `SplitMaster`: the 16 bits that the parameters lack, 2 bytes a parameter
fp16, or whole   `WholeMaster`: fp32 pages of its own, 4 bytes a parameter

A bf16 parameter is the upper half of its master, rounded. Read the lower half as a signed number: then the bits of the
master are those of the parameter times 2^16, plus that number, whose sign says which way the parameter was rounded.
Every number comes back if a tie, a lower half of exactly 0x8000, is rounded up in magnitude. (To the nearest even
number, two masters would share one pair.) A whole master is rounded like that too, so both give the same bits.

Source: Kalamkar et al. 2020, "Optimizing Deep Learning Recommender Systems Training on CPU Cluster Architectures",
section on Split-SGD-BF16, which truncates where this rounds.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Master:
    """The parameters themselves, which are fp32.

    Attributes:
        kind: the name of its pages; None where it has none.
        dtype: of its pages.
        reads_params: the update has to read the parameters, not only to write them.
    """

    kind: ClassVar[str | None] = None
    dtype: ClassVar[torch.dtype] = torch.float32
    reads_params: ClassVar[bool] = True

    @contextmanager
    def opened(self, params: Sequence[Tensor], kept: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        """Yield the master in fp32, to be updated in place; then write it back and round the parameters from it.

        Args:
            params: (K,) tensors in the dtype of compute, one or more.
            kept: (K,) tensors of its pages, for the same elements; empty where it has none.
        """
        yield params

    def of(self, param_K: Tensor, kept_K: Tensor) -> Tensor:
        """Return the master in fp32, to be read only."""
        return param_K

    def page_of(self, values_K: Tensor) -> Tensor:
        """Return the contents of its page for fp32 values, (K,)."""
        return values_K


@dataclass(frozen=True)
class WholeMaster(Master):
    """An fp32 master in pages of its own."""

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
    """A master whose lower halves are in pages, beside parameters in bf16."""

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
    """Round fp32 values to the nearest in the dtype that a model computes in; in bf16 a tie goes up in magnitude."""
    return (_without_ties(values) if dtype == torch.bfloat16 and values.dtype == torch.float32 else values).to(dtype)


def low(master_K: Tensor) -> Tensor:
    """Return the lower halves of fp32 numbers as signed numbers, (K,) int16."""
    return master_K.view(torch.int32).to(torch.int16)


def join(param_K: Tensor, low_K: Tensor) -> Tensor:
    """Return the fp32 masters, (K,), of bf16 parameters and lower halves. NaN stays NaN, with another payload."""
    master_K = param_K.float()
    master_K.view(torch.int32).add_(low_K)
    return master_K


def _without_ties(values: Tensor) -> Tensor:
    """Return numbers whose nearest bf16 number is that of `values`, and the larger one of two that are as near.

    Without the lower 15 bits a tie stays a tie, and what is above it becomes one. A 4096th of each value, less than the
    distance to the next tie, then moves all of these up; how that sum is rounded does not matter. Infinities and NaN
    stay what they are.
    """
    return values.view(torch.int32).bitwise_and(~0x7FFF).view(torch.float32).add_(values, alpha=2**-12)


def _round_into(params: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
    """Write the parameters of masters, which have the same elements in one sequence."""
    if params[0].dtype == torch.bfloat16:
        masters = cut_as(params, _without_ties(one_after_another(masters)))
    torch._foreach_copy_(list(params), list(masters))


def one_after_another(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors: on a GPU each operator is a launch, so all of them go through at once."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def in_fp32(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of one dtype in fp32, in one launch."""
    flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors), dtype=torch.float32)
    torch._foreach_copy_(cut_as(tensors, flat), list(tensors))
    return flat


def cut_as(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    """Cut `flat` as the tensors are."""
    return [flat] if len(tensors) == 1 else list(flat.split_with_sizes([tensor.numel() for tensor in tensors]))
