"""Which units are gathered on this rank now: starts gathers, the next units' ahead of time, and releases buffers.

A unit is gathered into a buffer of its own (resident) or one borrowed from the pool. Its copy is current while the
buffer's version is the unit's; a deferred update is made before a gather, so what arrives is this step's parameters.

Where the unit is offloaded its gather does not wait for the update: the store keeps the order, and each page arrives as
soon as it is updated.

Where units are borrowed, everything that starts a collective here depends on the order of calls alone, so ranks that
call alike start the same ones. Where they are resident, ranks may call differently: a unit is gathered after all that
come before it in the plan, and the rest before anything else is sent.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from zero.engine.fetch import Fetch
from zero.engine.plan import Plan
from zero.engine.pool import Buffer, Pool
from zero.engine.unit_state import UnitState
from zero.engine.update import Updater
from zero.engine.visit_order import CollectiveLog, VisitOrder
from zero.platform.timeline import Tape
from zero.store import Ticket


class Residency:
    """Gathers units into their buffers.

    Args:
        updater: makes a unit's deferred update first. Where parameters are offloaded it hands it off instead: what
            `fetch` starts comes after it by itself. Elsewhere a unit is gathered ahead only if its update is made.
        fetch: starts to fill a buffer with a unit, whose update may be under way still; returns what to wait for.
        advance: makes what it started go on without this rank, see `Routes.advance`.
        log: where every collective is noted.
        tape: records gathers.

    Attributes:
        pool: None when every unit is resident.
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
    ) -> None:
        self._advance = advance
        self._units, self._device, self._log, self._tape = units, plan.world.compute, log, tape
        self._prefetch, self._apply, self._fetch = plan.prefetch, updater.apply_deferred, fetch
        self._hand_off = updater.hand_off if plan.params_offloaded else None
        self.pool = None if plan.resident else Pool(plan.buffer_counts(), plan.precision.compute, self._device)
        self._alone = plan.world.size == 1  # what is gathered ahead may depend on what happens to be ready
        self._keeps = plan.keeps_secondary
        self._in_order = plan.resident and not self._alone  # units are gathered in the plan's order
        self._next = 0  # where units are gathered in order: the one after the last
        self._orders = {True: VisitOrder(), False: VisitOrder()}
        self._ahead: set[int] = set()  # units requested before their turn, and not used yet

    def begin(self) -> None:
        """A microbatch, or a forward without gradients, starts."""
        for order in self._orders.values():
            order.begin()
        self.end()

    def end(self) -> None:
        """It is over: what was gathered ahead and never used has arrived, and may go."""
        for index in sorted(self._ahead):
            buffer = self._find(self._units[index])
            if buffer is not None:
                buffer.land()
        self._ahead.clear()
        if self.pool is not None:
            self.pool.drop_ahead()

    def reset(self) -> None:
        """After an exception: forget pins and half-made records."""
        for order in self._orders.values():
            order.forget()
        self._ahead.clear()
        for unit in self._units:
            unit.secondary_versions = -1, -1  # what should have filled it may have gone with its buffer
        if self.pool is not None:
            self.pool.reset()

    def pin(self, unit: UnitState, *, training: bool) -> Buffer:
        """Gather `unit`, and ahead of time those that come next; returns its buffer, pinned and ready to compute on.

        Args:
            training: whether backward will follow, or is under way; forwards without it have an order of their own.
        """
        upcoming = self._orders[training].visit(unit.index, self._prefetch)
        self._request(unit)
        self.buffer(unit).pins += 1
        for index in upcoming:
            self._request_ahead(self._units[index])
        return self._arrive(unit)

    def unpin(self, buffer: Buffer) -> None:
        """One user of `buffer` is done."""
        if self.pool is not None:
            self.pool.unpin(buffer)
        else:
            buffer.pins -= 1

    def buffer(self, unit: UnitState) -> Buffer:
        """Where `unit` is gathered now."""
        buffer = self._find(unit)
        assert buffer is not None, f"{unit.spec.name} is not gathered"
        return buffer

    def materialise(self, unit: UnitState) -> Tensor:
        """The full flat of `unit`, current until the next gather: for reading outside a step. Collective."""
        self._request(unit)
        return self._arrive(unit).flat

    def land(self) -> None:
        """Wait for every gather into a buffer that stays, before parameters are written."""
        for unit in self._units:
            if unit.resident is not None:
                unit.resident.land()

    def complete(self) -> None:
        """Where units are gathered in order: start the gathers of all that have changed."""
        if self._in_order:
            for unit in self._units:
                self._request(unit)
            self._advance()  # those that this rank does not use are waited for by others

    def _request(self, unit: UnitState) -> None:
        """Start the gather of `unit` unless a current copy is loaded or on its way."""
        if not self._is_current(unit):
            for one in self._starting(unit):
                self._start(one)
            self._next = unit.index + 1

    def _starting(self, unit: UnitState) -> list[UnitState]:
        """What is gathered when `unit`, which has changed, is requested."""
        if not self._in_order:
            return [unit]
        first = self._next if self._next <= unit.index else 0  # else it has changed since the last one was gathered
        return [one for one in self._units[first : unit.index + 1] if not self._is_current(one)]

    def _is_current(self, unit: UnitState) -> bool:
        buffer = self._find(unit)
        return buffer is not None and buffer.version == unit.version and unit.deferred is None

    def _start(self, unit: UnitState) -> None:
        buffer = self._find(unit)
        with self._device.aside("gather") as ready:
            tickets: list[Ticket] = []
            if unit.deferred is not None:
                if self._hand_off is not None:
                    tickets = self._hand_off(unit)
                else:
                    self._apply(unit)
                unit.grad_readers += [ready, *tickets]
            if unit.resident is None:
                assert self.pool is not None
                buffer = self.pool.take(unit.index, unit.spec.full_numel)
            assert buffer is not None
            buffer.ready = ready
            buffer.arrivals += tickets
            if buffer.version != unit.version:
                buffer.version = -1  # until it is known what to wait for: an interrupt may come in between
                self._fill(unit, buffer, tickets)
                buffer.version = unit.version
                if self._keeps:  # of what is under way: whoever takes the buffer lets it arrive first
                    unit.secondary_versions = unit.versions

    def _fill(self, unit: UnitState, buffer: Buffer, tickets: Sequence[Ticket]) -> None:
        if not self._in_order:  # else there is nothing to compare: one rank may gather before a step begins
            self._log.note(f"gather of {unit.spec.name}")
        buffer.arrivals += self._tape.under_way(
            "gather", unit.spec.name, lambda: self._fetch(unit, buffer.flat, tickets, not self._is_over(tickets))
        )

    def _is_over(self, tickets: Sequence[Ticket]) -> bool:
        """An update is made, so far as this rank may decide by it: several must not decide by time."""
        return not tickets or (self._alone and all(ticket.ended for ticket in tickets))

    def _request_ahead(self, unit: UnitState) -> None:
        tickets = [ticket for one in self._starting(unit) for ticket in one.tickets]
        if not self._is_over(tickets) and self._hand_off is None:
            return  # the store's threads work on it: waiting for them here would hold up the unit before it
        self._ahead.add(unit.index)
        if unit.resident is not None:
            self._request(unit)
            return
        assert self.pool is not None
        if self.pool.find(unit.index) is not None or self.pool.has_room(unit.spec.full_numel):
            self._request(unit)
            self.buffer(unit).ahead = True

    def _arrive(self, unit: UnitState) -> Buffer:
        self._ahead.discard(unit.index)
        buffer = self.buffer(unit)
        with self._tape.stream_standing("gather, update", unit.spec.name):  # both were enqueued aside
            buffer.land()
        buffer.ahead = False
        if self.pool is not None:
            self.pool.touch(buffer)
        return buffer

    def _find(self, unit: UnitState) -> Buffer | None:
        return unit.resident if self.pool is None else self.pool.find(unit.index)
