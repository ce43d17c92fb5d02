"""The rule of an optimizer for a GPU's kernel, on tensors in host memory: the same operations in the same order.

So an update by the host has the bits of one by the GPU, and a plan may split pages between both. Each operation rounds
once, as the kernel's do. torch's fused optimizers contract products and sums, each build of them in its own way.
"""

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from zero.core.fused import OWN_NUMBERS, row
from zero.core.optim import Fused
from zero.core.tile import bound
from zero.core.updates import AVERAGE, INVERSE, PageBatch
from zero.errors import ConfigError


class _Numbers:
    """A pointer into a group's numbers, as rules use it."""

    def __init__(self, numbers: Sequence[Tensor], first: int) -> None:
        self._numbers, self._first = numbers, first

    def __add__(self, count: int) -> "_Numbers":
        return _Numbers(self._numbers, self._first + count)

    def load(self) -> Tensor:
        return self._numbers[self._first]


class _Language:
    """The functions of `triton.language` that rules may use on the host."""

    float32 = torch.float32
    load = staticmethod(_Numbers.load)
    where, maximum, minimum = torch.where, torch.maximum, torch.minimum
    abs, div_rn = torch.abs, torch.div

    @staticmethod
    def sqrt_rn(square: Tensor) -> Tensor:
        """Return the nearest roots: fp32 roots of torch on a CPU are not always the nearest, but fp64 ones, rounded."""
        return square.double().sqrt_().float()

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(f"tl.{name} of the optimizer's rule exists on a GPU only. Set offload.compute=device.")


@cache
def _on_tensors(tile: Callable[..., Any]) -> Callable[..., Any]:
    return cast(Callable[..., Any], bound(cast(FunctionType, tile), _Language(), lambda function: function))


def update_on_host(fused: Fused, batch: PageBatch) -> None:
    """Update pages in host memory as the kernel updates pages on a GPU, to the bit.

    Raises:
        ConfigError: the rule uses a function of Triton's that is not defined here.
    """
    numbers = torch.tensor(row(fused, batch.settings, batch.divisor), dtype=torch.float32, device="cpu").unbind()
    rule, pointer = _on_tensors(fused.tile), _Numbers(numbers, OWN_NUMBERS)
    for param, grad, *moments in zip(batch.params, batch.grads, *batch.moments, strict=True):
        means = [moments.pop()] if fused.average is not None else []
        results = rule(param, grad.mul_(numbers[INVERSE]), pointer, *moments)
        for page, value in zip((param, *moments), results if moments else (results,), strict=True):
            page.copy_(value)
        for mean in means:
            mean.mul_(numbers[AVERAGE]).add_(param * numbers[AVERAGE + 1])
