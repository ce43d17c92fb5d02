"""The decision of a step as tensors, from which kernels read it before the host knows it."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the norm before the limit is divided by it, as in `torch.nn.utils.clip_grad_norm_`."""


def clip(limit: float | None, norm: float) -> float:
    """Return the factor that clips the gradient, computed as in `torch.nn.utils.clip_grad_norm_`."""
    return 1.0 if limit is None else min(1.0, limit / (norm + EPSILON))


class Decision(NamedTuple):
    """Whether a step makes its updates, and by what gradients are divided.

    Attributes:
        finite: whether the norm of the gradient is finite, 0-dim bool.
        inverse: the inverse of the divisor of gradients with the coefficient of clipping, 0-dim fp64.
        learn: function that waits for both and returns the divisor; None if the step makes no update.
    """

    finite: Tensor
    inverse: Tensor
    learn: Callable[[], float | None]

    @classmethod
    def of(
        cls, square_sums: Tensor, divisor: float | Tensor, limit: float | None, learn: Callable[[], float | None]
    ) -> "Decision":
        """Decide as the host would by `Totals.norm` and `clip`, with the same rounding.

        Args:
            square_sums: the sums of squares of the parts of the summed gradient, (n,) fp64, which are added in order.
            divisor: the number by which the sum of gradients is divided; a 0-dim fp64 tensor if the host does not know.
            limit: the largest norm of the mean gradient; None: no clipping.
        """
        square_sum = functools.reduce(torch.add, square_sums.unbind())
        norm = (torch.sqrt(square_sum) / divisor).float().double()
        clipped = divisor if isinstance(divisor, Tensor) else norm.new_full((), divisor)
        if limit is not None:
            clipped = divisor / (limit / (norm + EPSILON)).clamp(max=1.0)
        return cls(norm.isfinite(), clipped.reciprocal(), learn)

    def applied(self, table: Tensor, trains: int, inverse: int) -> Tensor:
        """Write the decision to columns of the table of numbers, (groups, n) fp32; return the table."""
        table[:, trains].mul_(self.finite)
        table[:, inverse].copy_(self.inverse)
        return table
