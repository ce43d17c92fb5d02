"""The record of one unit in one step: its calls, gradients and reductions.

Every step makes a new record for each unit and drops the old one, so no step sees anything of an earlier one. What
outlives a step, such as a deferred update, is in `UnitState`.
"""

from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any

from torch import Tensor

from zero.engine.memory import Buffer, Scratch


class Phase(IntEnum):
    """The phase of a unit's gradient in the present round of reductions, see `zero.engine.backward.rounds`."""

    CLOSED = auto()
    """The unit's reduction of this round has started, or no round has begun."""
    EMPTY = auto()
    """No gradient has arrived in this round."""
    FILLING = auto()
    """Gradients are arriving."""
    READY = auto()
    """All gradients of this round have arrived; the unit waits for its turn."""


NEXT_PHASES = {
    Phase.CLOSED: {Phase.EMPTY: "a round begins"},
    Phase.EMPTY: {
        Phase.FILLING: "a gradient arrives",
        Phase.READY: "all its calls have returned, without a gradient",
        Phase.CLOSED: "its turn comes; zeros are reduced, or its extra flat",
    },
    Phase.FILLING: {
        Phase.READY: "all its calls have returned",
        Phase.CLOSED: "the round ends first, as for a unit that the last microbatch did not use",
    },
    Phase.READY: {Phase.CLOSED: "its turn comes"},
}
"""The legal changes of a phase, with their reasons. With one rank there are no rounds, and the phase stays CLOSED."""


@dataclass(eq=False, slots=True)
class UnitStep:
    """The record of one unit in one step."""

    calls: list[Any] = field(default_factory=list)
    """The autograd nodes of this microbatch's forward calls, until all their gradients have arrived."""
    returned: int = 0
    """The number of these calls whose gradients have arrived."""
    delivered: bool = False
    """Whether a gradient has arrived, or a call has returned, since the unit was last ready."""
    hooked: dict[int, Tensor] = field(default_factory=dict)
    """The sums of gradients, by slot, for which hooks of the user will be called."""
    held: Buffer | None = None
    """The gathered buffer that the running backward pass has pinned."""

    phase: Phase = Phase.CLOSED
    flat: Scratch | None = None
    """The pooled flat that receives gradients of this round."""
    extra: Scratch | None = None
    """The pooled flat that receives gradients after the unit was ready."""
    unwritten: set[int] | None = None
    """The slots without a gradient yet of the flat, or `grad`, that receives gradients now; None if no gradient has
    arrived since it was completed."""

    filled: bool = False
    """Whether `grad` holds at least a part of this step's gradient."""
    summed: bool = False
    """Whether `grad` holds a sum over ranks, or will when started reductions have ended."""
    squares: Tensor | None = None
    """The sum of squares of this rank's shard of the final gradient, 0-dim fp64; None if `grad` is not final."""
    equal_squares: list[Tensor] = field(default_factory=list)
    """For each norm group, the part of `squares` of parameters that are equal on its ranks."""

    def go(self, phase: Phase) -> None:
        """Change to `phase`, which must be a legal change."""
        assert phase in NEXT_PHASES[self.phase], f"a unit's gradient cannot go from {self.phase.name} to {phase.name}"
        self.phase = phase

    def emptied(self) -> "UnitStep":
        """Return the record without gradients; it keeps its forward calls, whose backward may still follow."""
        return UnitStep(calls=self.calls, returned=self.returned, delivered=self.delivered, held=self.held)
