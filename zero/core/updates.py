"""Batches of pages that an update changes in place, and rules for its rounding.

Every update gives the same bits for any cut of a flat tensor at multiples of 64 elements and for any number of threads.
The fused kernels of torch do so because they split work into units of 64 elements (at other cuts the tail of their
vector loop rounds differently). Elementwise operators are split between threads anywhere, so only operators that round
once are used here. `add(alpha=)` and `lerp` may round once or twice, differently in the vector loop and in its tail.

Letters: K elements of one page.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TensorList = list[Tensor]
TRAINS, INVERSE, STEP, DIVISOR, AVERAGE = range(5)
"""The places of these numbers in a row of `zero.core.fused.numbers`. `INVERSE` is the inverse of the divisor,
which kernels read; `DIVISOR` is read by operators, and lacks the clipping of a step that the device decides. `AVERAGE`
is the decay of a running mean of the parameters, before one minus it."""


class GroupSettings(NamedTuple):
    """Optimizer settings of one group at one step."""

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, ...] = ()
    """The numbers by which moments decay: none, one or two."""
    trains: bool = True
    """False: parameters and moments of the group do not change, and its gradient does not count in the norm."""
    step: int = 1
    """1 for the group's first update; skipped steps and steps in which the group does not train are not counted."""


class PageBatch(NamedTuple):
    """Pages of one group on one device that are updated together; no tensor requires a gradient.

    Args:
        params: fp32, updated in place; each K is a multiple of 64.
        grads: fp32, may be overwritten.
        moments: for each moment a list as long as `params`, updated in place.
        divisor: gradients are divided by it.
        row: the group's row of `Hyper.table`; None: there is no table.
        factor: factor of the learning rate for matrices of one shape, see `MatrixRule.factor`.
    """

    params: TensorList
    grads: TensorList
    moments: tuple[TensorList, ...]
    settings: GroupSettings
    divisor: float
    row: Tensor | None = None
    factor: float = 1.0

    def step(self) -> Tensor:
        return self._scalar(STEP, self.settings.step)

    def grad_scale(self) -> Tensor | None:
        return None if self.divisor == 1.0 else self._scalar(DIVISOR, self.divisor)

    def divide_grads(self) -> None:
        """Multiply the gradients by the inverse of the divisor, as the kernel does, which divides more slowly."""
        if self.divisor != 1.0:
            torch._foreach_mul_(self.grads, 1 / self.divisor)

    def _scalar(self, place: int, value: float) -> Tensor:
        """Return a number of the row; on another device than the row's, make a tensor of `value`."""
        here = self.params[0]
        return here.new_full((), value) if self.row is None or self.row.device != here.device else self.row[place]


PageUpdate = Callable[[PageBatch], None]


def average(decay: float, means: TensorList, params: TensorList) -> None:
    """Take the parameters into their running means."""
    torch._foreach_mul_(means, decay)
    torch._foreach_add_(means, torch._foreach_mul(params, 1 - decay))
