"""Receive the gradients of units as backward makes them, and have each unit reduced when all of its gradients are in.

Gradients arrive for each call of a unit, the large ones one at a time, and are copied into one flat tensor. When all
calls of the unit have delivered and it is the unit's turn, the flat is reduced over ranks while the next units'
backward runs. The flat is:

    gradients sharded, or one microbatch    a pooled flat, free again after its reduction; two reductions may run
    several microbatches, not sharded       `grad`, which adds up microbatches and is copied to a pooled flat at the end
    one rank                                `grad` itself, and nothing is reduced

Gradients that arrive for a unit after it was ready (from a second backward, or more microbatches than planned) are
added up in an extra flat, in fp32, because there may be many. If the step's totals show that any rank has an extra
flat, all ranks run one more round of reductions.

`grad` is the sum over ranks and microbatches, and the update divides it once.

`zero.engine.backward.rounds` has the order in which units are reduced, `zero.engine.backward.reduce` the sums.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from zero.distributed.routes import Routes
from zero.engine.backward.copies import BatchedCopies
from zero.engine.backward.reduce import Reductions
from zero.engine.backward.rounds import Rounds
from zero.engine.checksums import Checksums
from zero.engine.gather import CollectiveLog
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.engine.unit_step import Phase, UnitStep
from zero.engine.update import Gradients, Updater
from zero.platform.tape import Tape


class Reducer:
    """Receiver of gradients from backward, which leaves their sum in each unit's `grad`.

    Args:
        routes: the collectives, plain or by node.
        gradients: the memory of each unit's `grad`.
        updater: applies a unit's deferred update, which needs the old gradient, before a new gradient arrives. It also
            measures each final `grad` for the norm.
        first: a callback, called before a step's first reduction.
        log: records every collective, to compare ranks.
        tape: records reductions in the timeline.
        checksums: records each gradient that is sent, if a step is made twice.

    Attributes:
        rounds: the order of reductions.
        reductions: the sums over ranks.
    """

    def __init__(
        self,
        plan: Plan,
        routes: Routes,
        units: Sequence[UnitState],
        gradients: Gradients,
        updater: Updater,
        *,
        first: Callable[[], None],
        log: CollectiveLog,
        tape: Tape,
        checksums: Checksums,
    ) -> None:
        self._units, self._gradients, self._apply = units, gradients, updater.apply_deferred
        self._alone = plan.world.size == 1
        self._local = plan.facts.local_sum  # microbatches are added up in `grad`, which is reduced after the last one
        self._copies = BatchedCopies(plan.world.compute)
        self.reductions = Reductions(plan, routes, gradients, updater.numbers.measure, log, tape, checksums)
        self.rounds = Rounds(plan, units, gradients, updater.apply_deferred, self._copies, self.reductions, first)
        self._last = False  # whether this is the last planned microbatch
        self._arrived = False  # whether a gradient has arrived in this step
        self.ended = True

    @property
    def has_extra(self) -> bool:
        """Whether this rank has an extra flat, so that all ranks need one more round than planned."""
        return any(unit.step.extra is not None for unit in self._units)

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step: make new records. Gradients of a backward outside of any step are dropped."""
        if self.reductions.are_pending or self._copies:
            self._drop()
        self._gradients.drop_open()
        self._renew(lambda _: UnitStep())
        self.ended = False

    def begin_microbatch(self, *, last: bool) -> None:
        """Begin a microbatch.

        Args:
            last: whether it is the last planned microbatch of the step.
        """
        self._last = last
        self.rounds.begin_microbatch()

    def finish(self) -> None:
        """Start and complete all planned reductions. Collective.

        If no rank `has_extra`, every unit's `grad` is then final and may be read on the compute stream.
        """
        self._check_complete()
        self.rounds.finish_planned()
        self.reductions.settle(self._units)

    def finish_extra(self) -> None:
        """Run one more round with the extra flats, because a rank `has_extra`. Collective."""
        for unit in self._units:
            if unit.step.extra is not None:
                unit.step.flat, unit.step.extra = unit.step.extra, None
        self.rounds.run_extra()
        self.reductions.settle(self._units)

    def end_step(self) -> None:
        """End the step: its gradients cannot be read any more, because the update may overwrite them."""
        self.ended = True

    def sum_so_far(self) -> bool:
        """Reduce all gradients that have arrived in this step, so that `grad` can be read; more may arrive. Collective.

        Returns:
            Whether any rank has a gradient.
        """
        self._check_complete()
        if self.ended:
            return False
        if self._alone:
            self.reductions.settle(self._units)
            return any(unit.step.filled for unit in self._units)
        some_extra, some_arrived = self.rounds.meet(self.has_extra, self._arrived, end_round=True)
        self.reductions.settle(self._units)
        if some_extra:
            self.finish_extra()
        return some_arrived

    def forget(self) -> None:
        """Drop all gradients that have arrived in this step, on every rank. Collective."""
        has_begun = self.rounds.have_begun
        if not self._alone:
            self.rounds.meet(self.has_extra, self._arrived, end_round=False)
        self._drop()
        self._renew(UnitStep.emptied)  # forwards that have run may still be followed by their backward
        if has_begun:
            self.rounds.open_planned()

    def reset(self) -> None:
        """Clean up after an exception: wait for started operations, drop all gradients and records."""
        self.ended = True
        self._drop()
        self._renew(lambda _: UnitStep())

    def _drop(self) -> None:
        self.reductions.drop()
        self._copies.clear()

    def _renew(self, renewed: Callable[[UnitStep], UnitStep]) -> None:
        for unit in self._units:
            unit.step = renewed(unit.step)
        self.rounds.restart()
        self._arrived = False

    # -- what arrives --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def deliver(self, unit: UnitState, grads: Mapping[int, Tensor]) -> None:
        """Add gradients of trainable slots, by slot, from one call of the unit."""
        if not grads:
            return
        beyond_plan = unit.step.squares is not None and self._adds_up(unit)
        self._arrived = True
        flat_P, slots = self._open(unit), unit.spec.trainable.slots
        unwritten = unit.step.unwritten or set()
        self._copies.add((slots[slot].of(flat_P), grads[slot]) for slot in unwritten.intersection(grads))
        added = grads.keys() - unwritten
        unwritten.difference_update(grads)
        if added:
            self._copies.execute()
            flat_P = self._open(unit, sums=True)
            if beyond_plan:
                flat_P = self._gradients.widen(unit)
        for slot in added:
            slots[slot].of(flat_P).add_(grads[slot])

    def start_reduce(self, unit: UnitState) -> None:
        """Mark `unit` as ready: all its calls of this microbatch have delivered. It is reduced when its turn comes."""
        self._copies.execute()
        adds_up = self._adds_up(unit)
        if unit.step.unwritten is not None or (adds_up and not unit.step.filled):
            self._complete(unit)
        if adds_up and not self._last:
            self._gradients.park(unit)
        elif self._alone:
            self.reductions.publish(unit)
        elif self._is_open(unit):
            self.rounds.ready(unit)

    def _adds_up(self, unit: UnitState) -> bool:
        """Return whether gradients of `unit` are added directly to `grad`, which is not reduced over ranks yet."""
        return self._local and not unit.step.summed and unit.step.phase is not Phase.READY

    def _is_open(self, unit: UnitState) -> bool:
        """Return whether gradients that arrive for `unit` now are still part of this round."""
        return unit.step.phase in (Phase.EMPTY, Phase.FILLING)

    def _open(self, unit: UnitState, *, sums: bool = False) -> Tensor:
        """Return the flat, (P,), that gradients of `unit` are copied into.

        Args:
            sums: a gradient will be added to the flat, so the flat must be in the dtype of sums.
        """
        # a unit that was not gathered since the last step still has its deferred update, which reads the old gradient
        self._apply(unit)
        record = unit.step
        if record.phase is Phase.EMPTY:
            record.go(Phase.FILLING)
        if self._adds_up(unit):
            fresh, record.squares = not record.filled, None
            if unit.grad is None:  # opening it may park another gradient, to which copies are pending
                self._copies.execute()
            grad = self._gradients.open(unit, fresh=fresh, sums=sums)
            record.filled = True
        elif self._is_open(unit):
            fresh = record.flat is None
            record.flat = record.flat or self.reductions.take(unit.spec.trainable.P)
            grad = record.flat.flat
        else:
            fresh = record.extra is None
            record.extra = record.extra or self.reductions.take(unit.spec.trainable.P, torch.float32)
            grad = record.extra.flat
        if fresh:
            record.unwritten = set(range(len(unit.spec.trainable.slots)))
        return grad

    @torch.no_grad()
    def _complete(self, unit: UnitState) -> None:
        """Write zeros into the slots without a gradient and into the gaps between slots."""
        flat_P, layout = self._open(unit), unit.spec.trainable
        for slot in unit.step.unwritten or ():
            layout.slots[slot].of(flat_P).zero_()
        unit.step.unwritten = None
        for start, stop in layout.gaps:
            flat_P[start:stop].zero_()

    def _check_complete(self) -> None:
        names = ", ".join(unit.spec.name for unit in reversed(self._units) if unit.step.unwritten is not None)
        if names:  # never reduced: a gradient would be missing silently
            raise AssertionError(f"gradients of {names} have arrived and were never reduced")
