"""Matrices that are updated as a whole: their batches in a flat tensor, their owners, and the interface of a rule."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, Self

from torch import Tensor

from zero.core.layout import Layout, Slot
from zero.core.updates import PageBatch


class Matrices(NamedTuple):
    """A batch of matrices of one parameter: `number` of (rows, columns), one after another from `start` in a flat."""

    start: int
    number: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.number * self.rows * self.columns

    @property
    def scratch_numel(self) -> int:
        """Elements of scratch memory for the products of `MatrixRule.orthogonalize`."""
        low, high = sorted((self.rows, self.columns))
        return 2 * self.number * (low * high + low * low)


class MatrixRule(Protocol):
    """An update of matrices in two elementwise passes, `mix` and `descend`, with whole matrices in between.

    The passes work on any cut of a flat tensor. `mix` writes directions, which `orthogonalize` changes as matrices, and
    `descend` subtracts.
    """

    @property
    def title(self) -> str:
        """The name for messages."""

    @property
    def groups(self) -> int:
        """The number of optimizer groups whose parameters are such matrices; these groups come first."""

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether this rule updates a parameter."""

    def problem(self, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Return a message if the settings do not fit the model's parameters; None: they do."""

    def factor(self, slot: Slot) -> float:
        """Return the factor of the learning rate for a parameter."""

    def batches(self, layout: Layout) -> list[Matrices]:
        """Return the batches of a flat of such parameters, in order; they do not depend on the ranks."""

    def mix(self, batch: PageBatch) -> None:
        """Update the momentum, and write directions to `batch.params` in their dtype, bf16."""

    def descend(self, batch: PageBatch) -> None:
        """Subtract `batch.grads`, the final directions, from the parameters."""

    def orthogonalize(self, matrices_BMN: Tensor, scratch: Tensor) -> None:
        """Replace directions, (batch, rows, columns) bf16, in place; scratch has `Matrices.scratch_numel` elements."""

    def flops(self, batch: Matrices) -> int:
        """Return the floating point operations of `orthogonalize` for a batch."""

    def averaged(self, decay: float) -> Self:
        """Return a rule that also keeps a running mean of the parameters in the last moment."""


def owners(batches: Sequence[Matrices], layout: Layout) -> tuple[int, ...]:
    """Return where each rank's part of a flat begins, and the end, if no batch is on two ranks: W + 1 ascending cuts.

    A batch is on the rank whose shard has its middle, so most of it is there already.
    """
    cuts = [0]
    for rank in range(1, layout.world_size):
        inside = (batch.start for batch in batches if batch.start + batch.stop >= 2 * rank * layout.S)
        cuts.append(next(inside, layout.P))
    return (*cuts, layout.P)
