"""Start the reductions of units in one order that all ranks share, whichever units a rank uses.

A round reduces every trainable unit once. A step has one round per microbatch of the plan, or a single round if
microbatches are added up first. A unit that is ready early waits for its turn. When the microbatch ends, the remaining
units of the round are reduced, with zeros where this rank has no gradient. One more round, in fp32, reduces the extra
flats if any rank has one. With one rank there are no rounds.

So every rank starts the same operations in the same order, and waits only for operations that it has started. A step
cannot deadlock: consider the earliest operation that any rank waits for. A rank that has not started it has started
only earlier operations, waits for none of them, and will start it.

The first order is the plan's, reversed. If units became ready in another order in a step, and this order was the same
on all ranks, the next steps use it. The order changes no bit of a sum, because a unit's flat contains exactly the
gradients that arrived until it was ready.

Source: Li et al. 2020, "PyTorch Distributed", section 3.2.3, for the order of buckets that ranks must share.
"""

import zlib
from collections.abc import Callable, Sequence

import torch

from zero.engine.backward.copies import BatchedCopies
from zero.engine.backward.reduce import Reductions
from zero.engine.memory import Scratch
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.engine.unit_step import Phase
from zero.engine.update import Gradients


class Rounds:
    """The turns of units, in which their reductions start. `UnitStep.phase` is a unit's phase in this round.

    Args:
        apply: applies a unit's deferred update, which reads the old gradient.
        copies: pending copies into flats, which are executed before a flat is sent.
        first: a callback, called before a step's first reduction.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[UnitState],
        gradients: Gradients,
        apply: Callable[[UnitState], None],
        copies: BatchedCopies,
        reductions: Reductions,
        first: Callable[[], None],
    ) -> None:
        self._world, self._local, self._gradients, self._apply = plan.world, plan.facts.local_sum, gradients, apply
        self._copies, self._reductions, self._first = copies, reductions, first
        self._backward = [unit for unit in reversed(units) if unit.spec.trainable.slots]
        self._order = self._backward
        rounds = 0 if plan.world.size == 1 else 1 if self._local else plan.accumulate
        self._planned = rounds * len(self._order)  # reductions of a step
        self._turns = 0  # reductions that this step has started
        self._seen: list[UnitState] = []  # units in the order in which they were ready in the first round

    @property
    def order_seen(self) -> int:
        """A number for the order in which units became ready in this step; 0 if it is the present order."""
        seen = self._next_order()
        return 0 if seen == self._order else zlib.crc32(repr([unit.index for unit in seen]).encode()) + 1

    def adopt_order(self) -> None:
        """Use the order in which units became ready in this step for the next steps.

        It must have been the same on all ranks.
        """
        self._order = self._next_order()

    def _next_order(self) -> list[UnitState]:
        return list(dict.fromkeys((*self._seen, *self._backward)))

    # -- rounds --------------------------------------------------------------------------------------------------------

    @property
    def have_begun(self) -> bool:
        """Whether a round of this step has begun."""
        return self._turns > 0 or self._is_open

    @property
    def _is_open(self) -> bool:
        """Whether reductions of this round have not started. It is open until its last unit's has started."""
        return bool(self._order) and self._order[-1].step.phase is not Phase.CLOSED

    @property
    def _end(self) -> int:
        """The value of `_turns` at the end of this round."""
        return self._turns + sum(unit.step.phase is not Phase.CLOSED for unit in self._order)

    def restart(self) -> None:
        """Go back to the first round; all units have been given new records."""
        self._seen.clear()
        self._turns = 0

    def begin_microbatch(self) -> None:
        """End the last microbatch's round, if each microbatch has a round, and open the next one."""
        if not self._local:
            self._take_turns(self._end)
        self.open_planned()

    def open_planned(self) -> None:
        """Open the next round, if the present round has ended and the plan has more."""
        if self._turns < self._planned:
            self._open()

    def finish_planned(self) -> None:
        """Start all planned reductions."""
        self._take_turns(self._planned)

    def run_extra(self) -> None:
        """Start a round in fp32, after all planned rounds."""
        self._take_turns(self._turns + len(self._order), torch.float32)

    def meet(self, has_extra: bool, has_arrived: bool, *, end_round: bool) -> tuple[bool, bool]:
        """Agree with the other ranks on the largest number of turns, and take turns up to it. Collective.

        Args:
            has_extra: whether this rank has an extra flat.
            has_arrived: whether this rank has a gradient.
            end_round: whether this rank needs all turns of this round.

        Returns:
            (whether any rank has a late gradient, in an extra flat; whether any rank has a gradient).
        """
        self._reductions.advance(through=True)
        turns = self._end if end_round else self._turns
        report = torch.tensor([turns, has_extra, has_arrived], dtype=torch.int64, device="cpu")
        most, some_extra, some_arrived = self._world.exchange(report, what="turns").amax(0).tolist()
        self._take_turns(most)
        return bool(some_extra), bool(some_arrived)

    def _open(self) -> None:
        """Begin the next round, if the present round has ended."""
        if not self._is_open:
            for unit in self._order:
                unit.step.go(Phase.EMPTY)

    # -- turns ---------------------------------------------------------------------------------------------------------

    def ready(self, unit: UnitState) -> None:
        """Note that all gradients of `unit` of this round have arrived, and start the reductions whose turn it is."""
        unit.step.go(Phase.READY)
        if self._turns < len(self._order):
            self._seen.append(unit)
        while self._is_open and self._next.step.phase is Phase.READY:
            self._take_turn()

    @property
    def _next(self) -> UnitState:
        """The unit whose turn is next."""
        return self._order[self._turns % len(self._order)]

    def _take_turns(self, count: int, dtype: torch.dtype | None = None) -> None:
        """Take turns until the step has taken `count`; arguments as in `_take_turn`."""
        while self._turns < count:
            self._open()
            self._take_turn(dtype)

    def _take_turn(self, dtype: torch.dtype | None = None) -> None:
        """Start reducing this round's next unit, even if it is not ready yet.

        Args:
            dtype: dtype of the round's flats; None: the plan's.
        """
        self._copies.execute()
        if not self._turns:
            self._first()
        unit = self._next
        self._turns += 1
        unit.step.go(Phase.CLOSED)
        sent, unit.step.flat = unit.step.flat or self._copied(unit, dtype), None
        self._reductions.start(unit, sent, last=self._turns > self._planned - len(self._order))

    def _copied(self, unit: UnitState, dtype: torch.dtype | None) -> Scratch:
        """Return a pooled flat with the unit's sum of microbatches, or with zeros if it has no gradient.

        `grad` cannot be sent itself, because the sum over ranks is written into it.
        """
        self._apply(unit)
        sent = self._reductions.take(unit.spec.trainable.P, dtype)
        if self._local and not unit.step.summed:
            # on the compute stream, because opening may park another gradient, which was written on it
            grad = self._gradients.open(unit, fresh=not unit.step.filled)
            if unit.step.filled:
                sent.flat.copy_(grad)
                return sent
        sent.flat.zero_()
        return sent
