"""Gather units into buffers: of their own (resident), or borrowed from the pool.

The copy in a buffer is current while the buffer's version equals the unit's. A unit's deferred update is applied before
it is gathered, so that the buffer gets this step's parameters. The gather of an offloaded unit does not wait for the
whole update: the store orders each page's read after its update, so pages are read as they are updated.
"""

from collections.abc import Sequence

from zero.engine.gather.fetch import Fetch, Later
from zero.engine.gather.visit_order import CollectiveLog
from zero.engine.memory import Buffer, Pool
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.engine.update import Updater
from zero.platform.handle import Handle
from zero.platform.tape import Tape
from zero.store import Ticket


class Gathers:
    """The gathers of this rank, and the buffers that they fill.

    Args:
        updater: applies a unit's deferred update before the gather. If parameters are offloaded, the update may still
            run while the unit is gathered, because `fetch` reads each page after its update.
        fetch: starts to fill a buffer with a unit, see `zero.engine.gather.fetch`.
        log: records every collective, to compare ranks.
        tape: records gathers in the timeline.

    Attributes:
        pool: the borrowed buffers; None if every unit is resident. On one rank, units without packed parameters
            are resident beside a pool.
        in_order: whether units are gathered in the plan's order, because ranks may call different units: on several
            ranks, if all units are resident.
        waits: whether the gather of a unit waits for its whole update.
    """

    def __init__(
        self, plan: Plan, units: Sequence[UnitState], updater: Updater, fetch: Fetch, log: CollectiveLog, tape: Tape
    ) -> None:
        self._units, self._device, self._log, self._tape = units, plan.world.compute, log, tape
        self._buffer_numel, self._apply, self._fetch = plan.sizes.buffer_numel, updater.apply_deferred, fetch
        self._hand_off = updater.hand_off
        self.waits = not plan.facts.params_offloaded
        sizes, own_sizes = plan.sizes.shared_buffer_sizes(), plan.sizes.own_buffer_sizes()
        self.pool = None if plan.facts.resident else Pool(sizes, plan.precision.compute, self._device, own_sizes)
        self._alone = plan.world.size == 1  # with one rank, decisions may depend on timing
        self.in_order = plan.facts.resident and not self._alone
        self._keeps_secondary = plan.facts.keeps_secondary
        self._unstarted: dict[UnitState, list[Later]] = {}  # to be started behind other work, in the order of requests

    @property
    def resident(self) -> list[Buffer]:
        """The buffers of resident units."""
        return [unit.resident for unit in self._units if unit.resident is not None]

    @property
    def buffers(self) -> list[Buffer]:
        """All buffers."""
        return [*self.resident, *(self.pool.buffers if self.pool is not None else ())]

    def find(self, unit: UnitState) -> Buffer | None:
        """Return the buffer that `unit` is gathered in, or None."""
        return unit.resident if self.pool is None or unit.resident is not None else self.pool.find(unit.index)

    def buffer(self, unit: UnitState) -> Buffer:
        """Return the buffer that `unit` is gathered in."""
        buffer = self.find(unit)
        assert buffer is not None, f"{unit.spec.name} is not gathered"
        return buffer

    def is_current(self, unit: UnitState) -> bool:
        """Return whether the unit's buffer has its present parameters, or a gather of them has started."""
        buffer = self.find(unit)
        return buffer is not None and buffer.version == unit.version and unit.deferred is None

    def has_room_for(self, unit: UnitState) -> bool:
        """Return whether `unit` can be gathered without taking the buffer of another unit in use."""
        return self.find(unit) is not None or (self.pool is not None and self.pool.has_room_for(unit.index))

    def is_over(self, tickets: Sequence[Ticket]) -> bool:
        """Return whether the update with these tickets has ended.

        With several ranks any ticket counts as not ended, because a decision by timing would differ between ranks.
        """
        return not tickets or (self._alone and all(ticket.ended for ticket in tickets))

    def start(self, unit: UnitState) -> None:
        """Apply the deferred update of `unit`, and start to gather it."""
        buffer = unit.resident
        if buffer is None:  # outside of the stream "gather", so that new memory belongs to the compute stream
            assert self.pool is not None
            buffer = self.pool.take(unit.index, self._buffer_numel(unit.spec))
        with self._device.aside("gather") as ready:
            tickets: list[Ticket] = []
            if unit.deferred is not None:
                if self.waits:
                    self._apply(unit)
                else:
                    tickets = self._hand_off(unit)
                unit.grad_readers += [ready, *tickets]
            buffer.ready = ready
            buffer.arrivals += tickets
            if buffer.version != unit.version:
                buffer.version = -1  # so that the buffer is not current after an interrupt in `_fill`
                self._fill(unit, buffer, tickets)
                buffer.version = unit.version
                if self._keeps_secondary:  # safe before the gather ends, because the buffer's next user waits for it
                    unit.secondary_versions = unit.versions

    def _fill(self, unit: UnitState, buffer: Buffer, tickets: Sequence[Ticket]) -> None:
        if not self.in_order:  # else ranks may gather at different times, even before the step begins
            self._log.note(f"gather of {unit.spec.name}")

        def fetch() -> Sequence[Handle]:
            handles = self._fetch(unit, buffer.flat, tickets, not self.is_over(tickets))
            if later := [handle for handle in handles if isinstance(handle, Later)]:
                self._unstarted[unit] = later
            return handles

        buffer.arrivals += self._tape.under_way("gather", unit.spec.name, fetch)

    def start_next(self) -> None:
        """Start the parts of the first requested gather that were to be started behind other work."""
        if self._unstarted:
            for handle in self._unstarted.pop(next(iter(self._unstarted))):
                handle.start()

    def arrive(self, unit: UnitState) -> Buffer:
        """Have the current stream wait for the gather of `unit`; return its buffer."""
        buffer = self.buffer(unit)
        self._unstarted.pop(unit, None)  # `land` starts these parts
        with self._tape.stream_standing("gather, update", unit.spec.name):  # gather and update run on side streams
            buffer.land()
        buffer.ahead = False
        if self.pool is not None:
            self.pool.touch(buffer)
        return buffer

    def end(self) -> None:
        """Wait for gathers ahead that were not used, and release their buffers."""
        self._unstarted.clear()
        for buffer in self.buffers:
            if buffer.ahead or buffer.extra:
                buffer.land()
                buffer.ahead = False
                if self.pool is not None:
                    self.pool.drop_extra(buffer)

    def reset(self) -> None:
        """Clean up after an exception."""
        self._unstarted.clear()
        for unit in self._units:
            unit.secondary_versions = ()  # the gather that fills the secondary shards may be lost
        for buffer in self.resident:
            buffer.ahead = False
        if self.pool is not None:
            self.pool.reset()

    def invalidate(self) -> None:
        """Make all gathered copies stale, so that each unit is gathered again from its shards."""
        for unit in self._units:
            unit.secondary_versions = ()
        for buffer in self.buffers:
            buffer.version = -1

    def land(self) -> None:
        """Wait for every gather into a resident buffer, before parameters are written."""
        for buffer in self.resident:
            buffer.land()
