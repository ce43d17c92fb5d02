"""Decide when units are gathered: before their use, the next ones ahead of time; pin the buffers in use.

A unit whose update waits for the store's threads is either not gathered ahead, or gathered once the work of the unit
before it is launched, so that on a GPU its gather runs beside that work.

Gathers into borrowed buffers depend only on the order of calls, so ranks with the same calls start the same gathers. If
units are resident, ranks may call different units. Then a unit is gathered after all changed units before it in the
plan, and the remaining units before any other collective.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from zero.engine.checksums import Checksums
from zero.engine.gather.gathers import Gathers
from zero.engine.gather.visit_order import VisitOrder
from zero.engine.memory import Buffer
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.errors import if_it_fails


class Residency:
    """The gathered units of this rank.

    Args:
        launch_ahead: launches a part of a coming update, see `Updater.launch_ahead`.
        advance: starts the later parts of gathers that this rank does not wait for, see `Routes.advance`.
        checksums: records each buffer at both ends of its use, if a step is made twice.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[UnitState],
        gathers: Gathers,
        launch_ahead: Callable[[], None],
        advance: Callable[[], None],
        checksums: Checksums,
    ) -> None:
        self._units, self._prefetch, self.gathers, self.pool = units, plan.facts.prefetch, gathers, gathers.pool
        self._launch_ahead, self._advance, self._checksums = launch_ahead, advance, checksums
        self._coming: list[UnitState] = []  # to be requested ahead when the present unit's work is launched
        self._next = 0  # if units are gathered in the plan's order: the index after the last gathered unit
        self._orders = {True: VisitOrder(), False: VisitOrder()}

    def begin(self) -> None:
        """Begin a microbatch, or an evaluation."""
        for order in self._orders.values():
            order.begin()
        self.end()

    def end(self) -> None:
        """End the pass: wait for gathers ahead that were not used, and release their buffers."""
        self._coming.clear()
        self.gathers.end()

    def reset(self) -> None:
        """Clean up after an exception: unpin all buffers and forget the incomplete visit order."""
        for order in self._orders.values():
            order.forget()
        self._coming.clear()
        self.gathers.reset()

    def pin(self, unit: UnitState, *, training: bool) -> Buffer:
        """Gather `unit`, and the next ones ahead of time; return its buffer, pinned and ready to compute on.

        Args:
            training: whether backward will follow, or is running. Evaluations have a separate visit order.
        """
        # the shared unit stays gathered, so its visits predict nothing
        upcoming = () if unit.spec.shared else self._orders[training].visit(unit.index, self._prefetch)
        self._request(unit)
        buffer = self.gathers.buffer(unit)
        buffer.pins += 1
        with if_it_fails(partial(self.unpin, unit, buffer)):
            for index in upcoming:
                self._request_ahead(self._units[index])
            self.gathers.arrive(unit)
            self._checksums.note(unit.spec.name, "gathered parameters", unit.spec.gathered(buffer.flat))
        return buffer

    def launched(self) -> None:
        """Launch a later unit's update, and start the next unit's gather if the gather waits for the store's threads.

        The host waits for the threads. Call this when work of the present unit is launched, at the same point of the
        program on all ranks.
        """
        self._launch_ahead()
        coming, self._coming = self._coming, []
        for unit in coming:
            self._request_ahead(unit, launched=True)
        self.gathers.start_next()

    def unpin(self, unit: UnitState, buffer: Buffer) -> None:
        """End one use of `buffer`, which holds `unit`."""
        self._checksums.note(unit.spec.name, "gathered parameters", unit.spec.gathered(buffer.flat))
        if self.pool is not None:
            self.pool.unpin(buffer)
        else:
            buffer.pins -= 1

    def materialise(self, unit: UnitState) -> Tensor:
        """Return the full flat of `unit`, current until the next gather, for reading outside a step. Collective."""
        self._request(unit)
        buffer = self.gathers.arrive(unit)
        if self.pool is not None:
            self.pool.drop_extra(buffer)
        return buffer.flat

    def complete(self) -> None:
        """Start the gathers of all resident units that have changed, if there are several ranks."""
        if self.gathers.in_order:
            for unit in self._units:
                self._request(unit)
            self._advance()  # other ranks may wait for units that this rank does not use

    def _request(self, unit: UnitState) -> None:
        """Start the gather of `unit`, unless its buffer is current or a gather of this version has started."""
        if not self.gathers.is_current(unit):
            for changed in self._starting(unit):
                self.gathers.start(changed)
            self._next = unit.index + 1

    def _starting(self, unit: UnitState) -> list[UnitState]:
        """Return the units to gather when the changed `unit` is requested.

        For resident units these include all changed units before it in the plan, so that all ranks gather in one order.
        """
        if not self.gathers.in_order:
            return [unit]
        first = self._next if self._next <= unit.index else 0  # else start again from the first unit
        return [before for before in self._units[first : unit.index + 1] if not self.gathers.is_current(before)]

    def _request_ahead(self, unit: UnitState, *, launched: bool = False) -> None:
        starting = self._starting(unit)
        tickets = [ticket for changed in starting for ticket in changed.tickets]
        if self.gathers.waits and not self.gathers.is_over(tickets):
            return  # waiting for the store's threads here would delay the current unit
        if not launched and any(changed.waits_in_update for changed in starting):
            self._coming.append(unit)  # would delay the current unit, too
            return
        if self.gathers.has_room_for(unit):
            self._request(unit)
            self.gathers.buffer(unit).ahead = True
