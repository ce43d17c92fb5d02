"""Keep each unit's gradient from backward until its update, in memory of its own or in pages of the store.

Where gradients are offloaded, a unit's gradient is in a borrowed buffer while it changes: `open` borrows a buffer,
`park` writes the pages and frees the buffer when they are written.

On a GPU gradients are copied on streams of their own, beside compute:

    out    after what was enqueued on the current stream; the next user of the buffer, or reader of pages, waits for it
    in     after the last copy out, and as soon as the buffer is free; the current stream waits for it

The gradient of the first of several microbatches loses nothing in the dtype of compute. So it is copied in that, to a
disk in pages of its own; `open` returns it in fp32 for adding and for the update. Once ranks have added up a whole
flat, only the pages that this rank updates are copied.

A page in host memory counts as written in the store once its copy is enqueued, so a reader has to wait for `left`
first. A page of a disk is written by a thread of the store, which keeps the order itself.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from zero.engine.plan import Plan
from zero.engine.transfer import load, save
from zero.engine.unit_state import UnitState
from zero.errors import StoreError
from zero.platform.device import PASSED, Event
from zero.platform.timeline import Tape
from zero.store import Page, PageKind, PrefetchStore, Ticket


class Gradients:
    """Gradients in memory of their own.

    Attributes:
        scarce: buffers are few, so a gradient must not stay open while others arrive.
        overflowed: the number of buffers that were made beyond the plan's.
    """

    scarce = False
    overflowed = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the borrowed buffers, between steps."""
        return 0

    def open(self, unit: UnitState, *, fresh: bool, held: bool = False, sums: bool = True) -> Tensor:
        """Return `unit.grad`, to be changed.

        Args:
            fresh: its content does not matter; otherwise it is the sum so far.
            held: a reduction writes into it, so it stays open until `park`; outside of the range that this rank updates
                its content is not needed any more.
            sums: return it in the dtype of sums; otherwise in that of one gradient where it holds no sum yet.
        """
        assert unit.grad is not None
        unit.await_grad_readers()
        return unit.grad

    def park(self, unit: UnitState) -> None:
        """Close `unit.grad`; nothing changes it until the next `open`."""

    def left(self, unit: UnitState) -> Event:
        """Return an event that passes when the gradient that was parked last is in its pages."""
        return PASSED

    def reset(self) -> None:
        """Drop all gradients."""


class _Buffer(NamedTuple):
    """Memory for a gradient that changes; it may be overwritten once `free` has passed."""

    flat: Tensor
    free: Event


class PagedGradients(Gradients):
    """Gradients in pages of the store, and in a few buffers while they change."""

    scarce = True

    def __init__(self, plan: Plan, store: PrefetchStore, tape: Tape) -> None:
        self._plan, self._store, self._device, self._tape = plan, store, plan.world.compute, tape
        self._counts = plan.grad_buffer_counts()
        self._free = {numel: [self._buffer(numel) for _ in range(n)] for numel, n in self._counts.items()}
        self._open: dict[int, tuple[UnitState, Tensor]] = {}  # by unit, with the whole buffer
        self._single: set[int] = set()  # units whose gradient is one microbatch's, in the dtype of compute
        self._held: set[int] = set()
        self._reduced: set[int] = set()  # units of which only the range that this rank updates is needed
        self._leaving: deque[tuple[_Buffer, list[Ticket]]] = deque()  # with those of the writes of its pages
        self._left: dict[int, Event] = {}  # by unit
        self._coming: list[Ticket] = []

    @property
    def allocated_bytes(self) -> int:
        leaving = [buffer for buffer, _ in self._leaving]
        return sum(buffer.flat.nbytes for buffers in (*self._free.values(), leaving) for buffer in buffers)

    def open(self, unit: UnitState, *, fresh: bool, held: bool = False, sums: bool = True) -> Tensor:
        unit.await_grad_readers()
        if held:
            self._reduced.add(unit.index)
        elif fresh:
            self._reduced.discard(unit.index)
        if unit.grad is None:
            if fresh and not sums and self._plan.first_grad_dtype != self._plan.grad_dtype:
                self._single.add(unit.index)
            elif fresh:
                self._single.discard(unit.index)
            dtype = self._plan.first_grad_dtype if unit.index in self._single else self._plan.grad_dtype
            buffer = self._take(self._plan.grad_numel(unit.spec))
            self._open[unit.index] = unit, buffer.flat  # first: `reset` finds it here after an interrupt
            unit.grad = buffer.flat.view(dtype)[: buffer.flat.numel()]
            if fresh:
                with self._tape.stream_standing("page out", unit.spec.name):
                    buffer.free.wait()
            else:
                self._bring_back(unit, buffer)
        if sums and unit.index in self._single:
            self._single.discard(unit.index)
            unit.grad = _widened(self._open[unit.index][1], unit.grad)
        if held:
            self._held.add(unit.index)
        return unit.grad

    def park(self, unit: UnitState) -> None:
        if unit.grad is None:
            return
        with self._device.aside("gradients out") as left, self._tape.streaming("page out", unit.spec.name):
            tickets = [save(self._store, self._device, page, part_K) for page, part_K in self._pages(unit)]
        unit.grad = None
        _, flat = self._open.pop(unit.index)
        self._held.discard(unit.index)
        self._left[unit.index] = left
        self._leaving.append((_Buffer(flat, left), tickets))

    def left(self, unit: UnitState) -> Event:
        return self._left.get(unit.index, PASSED)

    def reset(self) -> None:
        with suppress(StoreError):  # a broken store is what is being reported already
            self._await_coming()
            while self._leaving:
                self._finish_oldest()
        free = self._device.mark()
        for unit, flat in self._open.values():
            self._give_back(_Buffer(flat, free))
            unit.grad = None
        for by_unit in (self._open, self._single, self._held, self._reduced):
            by_unit.clear()

    def _bring_back(self, unit: UnitState, buffer: _Buffer) -> None:
        """Load the pages of `unit`, beside what is computed since the buffer became free."""
        with self._device.aside("gradients in", after=buffer.free) as loaded:
            self.left(unit).wait()
            with self._tape.streaming("page in", unit.spec.name):
                for page, part_K in self._pages(unit):
                    self._coming.append(load(self._store, self._device, page, part_K))
        self._await_coming()
        with self._tape.stream_standing("page in", unit.spec.name):
            loaded.wait()

    def _await_coming(self) -> None:
        while self._coming:
            self._coming[-1].wait()
            self._coming.pop()

    def _take(self, numel: int) -> _Buffer:
        """Return a buffer of this size, to be used once it is free."""
        while not self._free[numel]:
            if self._leaving:
                self._finish_oldest()
                continue
            idle = (unit for unit, _ in self._open.values() if unit.index not in self._held)
            oldest = next((unit for unit in idle if self._plan.grad_numel(unit.spec) == numel), None)
            if oldest is None:
                self.overflowed += 1
                return self._buffer(numel)
            self.park(oldest)  # many are open at once, as in a stack that is looped over: it comes back
        return self._free[numel].pop()

    def _buffer(self, numel: int) -> _Buffer:
        flat = self._device.zeros(numel, self._plan.grad_dtype)
        return _Buffer(flat, self._device.mark())

    def _finish_oldest(self) -> None:
        """Wait until its pages are written, or their copies enqueued."""
        for ticket in self._leaving[0][1]:
            ticket.wait()
        self._give_back(self._leaving.popleft()[0])

    def _give_back(self, buffer: _Buffer) -> None:
        free = self._free[buffer.flat.numel()]
        if len(free) < self._counts[buffer.flat.numel()]:
            free.append(buffer)
        else:
            buffer.free.finish()  # the next user of its memory does not know this event

    def _pages(self, unit: UnitState) -> Iterator[tuple[Page, Tensor]]:
        assert unit.grad is not None
        single = unit.index in self._single and PageKind.FIRST_GRAD in self._plan.grad_dtypes
        kind = PageKind.FIRST_GRAD if single else PageKind.GRAD
        ranges = self._plan.grad_ranges(unit.spec)
        if unit.index in self._reduced:
            ranges = ranges[: self._plan.updated_pages(unit.spec)]
        for number, (start, stop) in enumerate(ranges):
            yield Page(unit.index, kind, number), unit.grad[start:stop]


def _widened(flat: Tensor, narrow: Tensor) -> Tensor:
    """Return `flat`, (n,), with the values of `narrow`, (n,) of a dtype half as wide in the first half of its memory.

    From the end, half of what is left at a time: their new places hold nothing that is still needed.
    """
    stop = flat.numel()
    while stop > 1:
        start = (stop + 1) // 2
        flat[start:stop].copy_(narrow[start:stop])
        stop = start
    flat[:stop].copy_(narrow[:stop].clone())
    return flat
