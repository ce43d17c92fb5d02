"""All-gather units, the next ones ahead of time, and release their buffers.

A unit is gathered into a buffer of its own (resident) or one borrowed from the pool. The copy is current while the
buffer's version equals the unit's. A unit's deferred update is applied before it is gathered, so that the buffer gets
this step's parameters.

The gather of an offloaded unit does not wait for the whole update. The store orders each page's read after its update,
so pages are read as they are updated. With several ranks, a gather of pages starts when the work of the unit before it
has been launched, so it runs beside that work on a GPU.

Gathers into borrowed buffers depend only on the order of calls, so ranks with the same calls start the same gathers. If
units are resident, ranks may call different units. Then a unit is gathered after all changed units before it in the
plan, and the remaining units before any other collective.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from zero.engine.checksums import Checksums
from zero.engine.gather.fetch import Fetch, Later
from zero.engine.gather.visit_order import CollectiveLog, VisitOrder
from zero.engine.memory import Buffer, Pool
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.engine.update import Updater
from zero.errors import if_it_fails
from zero.platform.handle import Handle
from zero.platform.timeline import Tape
from zero.store import Ticket


class Residency:
    """The gathered units of this rank: gathers them into buffers, and releases the buffers.

    Args:
        updater: applies a unit's deferred update before the gather. If parameters are offloaded, the update may still
            run while the unit is gathered, because `fetch` reads each page after its update. Else a unit is gathered
            ahead only if its update does not wait for the store's threads. An update of Muon that does begins when the
            present unit's work is launched.
        fetch: starts to fill a buffer with a unit, see `zero.engine.gather.fetch`.
        advance: starts the second halves of gathers that this rank does not wait for, see `Routes.advance`.
        log: records every collective, to compare ranks.
        tape: records gathers in the timeline.
        checksums: records each buffer at both ends of its use, if a step is made twice.

    Attributes:
        pool: the borrowed buffers; None if every unit is resident. On one rank, units without codes are resident
            beside a pool.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[UnitState],
        updater: Updater,
        fetch: Fetch,
        advance: Callable[[], None],
        log: CollectiveLog,
        tape: Tape,
        checksums: Checksums,
    ) -> None:
        self._advance, self._checksums = advance, checksums
        self._units, self._device, self._log, self._tape = units, plan.world.compute, log, tape
        self._buffer_numel = plan.sizes.buffer_numel
        self._prefetch, self._apply, self._fetch = plan.facts.prefetch, updater.apply_deferred, fetch
        self._launch_ahead = updater.launch_ahead
        self._hand_off = updater.hand_off if plan.facts.params_offloaded else None
        sizes, own_sizes = plan.sizes.shared_buffer_sizes(), plan.sizes.own_buffer_sizes()
        self.pool = None if plan.facts.resident else Pool(sizes, plan.precision.compute, self._device, own_sizes)
        self._later: list[tuple[UnitState, Later]] = []  # requested ahead, and not started
        self._coming: list[UnitState] = []  # to be requested ahead when the present unit's work is launched
        self._alone = plan.world.size == 1  # with one rank, decisions may depend on timing
        self._keeps = plan.facts.keeps_secondary
        self._in_order = plan.facts.resident and not self._alone  # units are gathered in the plan's order
        self._next = 0  # with `_in_order`: the index after the last gathered unit
        self._orders = {True: VisitOrder(), False: VisitOrder()}

    def begin(self) -> None:
        """Begin a microbatch, or an evaluation."""
        for order in self._orders.values():
            order.begin()
        self.end()

    def end(self) -> None:
        """End the pass: wait for gathers ahead that were not used, and release their buffers."""
        self._later.clear()
        self._coming.clear()
        for buffer in [*self._resident, *(self.pool.buffers if self.pool is not None else ())]:
            if buffer.ahead or buffer.extra:
                buffer.land()
                buffer.ahead = False
                if self.pool is not None:
                    self.pool.drop_extra(buffer)

    def reset(self) -> None:
        """Clean up after an exception: unpin all buffers and forget the incomplete visit order."""
        for order in self._orders.values():
            order.forget()
        self._later.clear()
        self._coming.clear()
        for unit in self._units:
            unit.secondary_versions = -1, -1, -1  # the gather that fills them may be lost
        for buffer in self._resident:
            buffer.ahead = False
        if self.pool is not None:
            self.pool.reset()

    def invalidate(self) -> None:
        """Make all gathered copies stale between two passes, so that each unit is gathered again from its shards."""
        for unit in self._units:
            unit.secondary_versions = -1, -1, -1
        for buffer in [*self._resident, *(self.pool.buffers if self.pool is not None else ())]:
            buffer.version = -1

    def pin(self, unit: UnitState, *, training: bool) -> Buffer:
        """Gather `unit`, and the next ones ahead of time; return its buffer, pinned and ready to compute on.

        Args:
            training: whether backward will follow, or is running. Evaluations have a separate visit order.
        """
        # the shared unit stays gathered, so its visits predict nothing
        upcoming = () if unit.spec.shared else self._orders[training].visit(unit.index, self._prefetch)
        self._request(unit)
        buffer = self.buffer(unit)
        buffer.pins += 1
        with if_it_fails(partial(self.unpin, unit, buffer)):
            for index in upcoming:
                self._request_ahead(self._units[index])
            self._arrive(unit)
            self._checksums.note(unit.spec.name, "gathered parameters", unit.spec.gathered(buffer.flat))
        return buffer

    def launched(self) -> None:
        """Launch a later unit's update, and start the next unit's gather if that waits for the store's threads.

        The host waits for the threads. Call this when work of the present unit is launched, at the same point of the
        program on all ranks.
        """
        self._launch_ahead()
        coming, self._coming = self._coming, []
        for unit in coming:
            self._request_ahead(unit, launched=True)
        if self._later:
            for handle in self._forget_later(self._later[0][0]):
                handle.start()

    def _forget_later(self, unit: UnitState) -> list[Later]:
        """Remove and return the gathers of `unit` that were requested and have not been started."""
        forgotten = [handle for of_unit, handle in self._later if of_unit is unit]
        self._later = [(of_unit, handle) for of_unit, handle in self._later if of_unit is not unit]
        return forgotten

    def unpin(self, unit: UnitState, buffer: Buffer) -> None:
        """End one use of `buffer`, which holds `unit`."""
        self._checksums.note(unit.spec.name, "gathered parameters", unit.spec.gathered(buffer.flat))
        if self.pool is not None:
            self.pool.unpin(buffer)
        else:
            buffer.pins -= 1

    def buffer(self, unit: UnitState) -> Buffer:
        """Return the buffer that `unit` is gathered in."""
        buffer = self._find(unit)
        assert buffer is not None, f"{unit.spec.name} is not gathered"
        return buffer

    def materialise(self, unit: UnitState) -> Tensor:
        """Return the full flat of `unit`, current until the next gather, for reading outside a step. Collective."""
        self._request(unit)
        buffer = self._arrive(unit)
        if self.pool is not None:
            self.pool.drop_extra(buffer)
        return buffer.flat

    def land(self) -> None:
        """Wait for every gather into a resident buffer, before parameters are written."""
        for buffer in self._resident:
            buffer.land()

    def complete(self) -> None:
        """Start the gathers of all resident units that have changed, if there are several ranks."""
        if self._in_order:
            for unit in self._units:
                self._request(unit)
            self._advance()  # other ranks may wait for units that this rank does not use

    @property
    def _resident(self) -> list[Buffer]:
        return [unit.resident for unit in self._units if unit.resident is not None]

    def _request(self, unit: UnitState) -> None:
        """Start the gather of `unit`, unless its buffer is current or a gather of this version has started."""
        if not self._is_current(unit):
            for changed in self._starting(unit):
                self._start(changed)
            self._next = unit.index + 1

    def _starting(self, unit: UnitState) -> list[UnitState]:
        """Return the units to gather when the changed `unit` is requested.

        For resident units these include all changed units before it in the plan, so that all ranks gather in one order.
        """
        if not self._in_order:
            return [unit]
        first = self._next if self._next <= unit.index else 0  # else start again from the first unit
        return [before for before in self._units[first : unit.index + 1] if not self._is_current(before)]

    def _is_current(self, unit: UnitState) -> bool:
        buffer = self._find(unit)
        return buffer is not None and buffer.version == unit.version and unit.deferred is None

    def _start(self, unit: UnitState) -> None:
        buffer = unit.resident
        if buffer is None:  # outside of the stream "gather", so that new memory belongs to the compute stream
            assert self.pool is not None
            buffer = self.pool.take(unit.index, self._buffer_numel(unit.spec))
        with self._device.aside("gather") as ready:
            tickets: list[Ticket] = []
            if unit.deferred is not None:
                if self._hand_off is not None:
                    tickets = self._hand_off(unit)
                else:
                    self._apply(unit)
                unit.grad_readers += [ready, *tickets]
            buffer.ready = ready
            buffer.arrivals += tickets
            if buffer.version != unit.version:
                buffer.version = -1  # so that the buffer is not current after an interrupt in `_fill`
                self._fill(unit, buffer, tickets)
                buffer.version = unit.version
                if self._keeps:  # safe before the gather ends, because the buffer's next user waits for it
                    unit.secondary_versions = unit.versions

    def _fill(self, unit: UnitState, buffer: Buffer, tickets: Sequence[Ticket]) -> None:
        if not self._in_order:  # else ranks may gather at different times, even before the step begins
            self._log.note(f"gather of {unit.spec.name}")

        def fetch() -> Sequence[Handle]:
            handles = self._fetch(unit, buffer.flat, tickets, not self._is_over(tickets))
            self._later += [(unit, handle) for handle in handles if isinstance(handle, Later)]
            return handles

        buffer.arrivals += self._tape.under_way("gather", unit.spec.name, fetch)

    def _is_over(self, tickets: Sequence[Ticket]) -> bool:
        """Return whether the update with these tickets has ended.

        With several ranks any ticket counts as not ended, because a decision by timing would differ between ranks.
        """
        return not tickets or (self._alone and all(ticket.ended for ticket in tickets))

    def _request_ahead(self, unit: UnitState, *, launched: bool = False) -> None:
        starting = self._starting(unit)
        tickets = [ticket for changed in starting for ticket in changed.tickets]
        if self._hand_off is None and not self._is_over(tickets):
            return  # waiting for the store's threads here would delay the current unit
        if not launched and any(changed.waits_in_update for changed in starting):
            self._coming.append(unit)  # for the same reason
            return
        if self._find(unit) is not None or (self.pool is not None and self.pool.has_room_for(unit.index)):
            self._request(unit)
            self.buffer(unit).ahead = True

    def _arrive(self, unit: UnitState) -> Buffer:
        buffer = self.buffer(unit)
        self._forget_later(unit)
        with self._tape.stream_standing("gather, update", unit.spec.name):  # both run on side streams
            buffer.land()
        buffer.ahead = False
        if self.pool is not None:
            self.pool.touch(buffer)
        return buffer

    def _find(self, unit: UnitState) -> Buffer | None:
        return unit.resident if self.pool is None or unit.resident is not None else self.pool.find(unit.index)
