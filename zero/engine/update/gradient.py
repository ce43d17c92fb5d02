"""Keep each unit's gradient from backward until its update, in device memory or in pages of the store.

An offloaded gradient is in a borrowed buffer while it changes: `open` borrows a buffer and loads the pages, `park`
writes the pages and frees the buffer afterwards.

On a GPU two side streams copy gradients, so that the copies overlap with compute:

    "gradients out"    starts after all work enqueued so far on the current stream. The next user of the buffer and
                       readers of the pages wait for it.
    "gradients in"     starts after the unit's last copy out, when the buffer is free. The current stream waits for it.

The gradient of the first of several microbatches is exact in the dtype of compute, because nothing has been added yet.
It is offloaded in that dtype (on a disk in separate pages), and `open` converts it to fp32 before anything is added and
for the update. After a unit's gradient was reduced over ranks, only the pages that this rank updates are written.

The store considers a page in host memory as written once its copy is enqueued, so a reader must first wait for the
event `Gradients.left`. Pages on a disk are written by threads of the store, which order reads after writes themselves.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from zero.engine.memory import Scratch, ScratchPool, load_page, save_page
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.errors import StoreError
from zero.platform.device import PASSED, Event
from zero.platform.tape import Tape
from zero.store import Page, PageKind, PrefetchStore, Ticket


class Gradients:
    """Gradients in device memory: `grad` of each unit is allocated once.

    Attributes:
        scarce: whether few buffers exist, so that a gradient must be parked before others arrive.
        overflowed: the number of extra buffers that were allocated beyond those of the plan.
    """

    scarce = False
    overflowed = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers that gradients borrow, measured between steps."""
        return 0

    def open(self, unit: UnitState, *, fresh: bool, held: bool = False, sums: bool = True) -> Tensor:
        """Make `unit.grad` available for changes and return it.

        Args:
            fresh: the caller overwrites it; otherwise it contains the sum so far.
            held: a reduction will write into it, so it stays open until `park`. Only the range that this rank updates
                is kept then.
            sums: return it in the dtype of sums. With False a gradient that is not a sum yet may be in
                `Facts.first_grad_dtype`.
        """
        assert unit.grad is not None
        unit.await_grad_readers()
        return unit.grad

    def widen(self, unit: UnitState) -> Tensor:
        """Convert the open `unit.grad` to fp32 and return it, because more is added to it than was planned.

        An offloaded gradient then stays in device memory until the step ends. Its pages keep their dtype, to which each
        `park` rounds the sum.
        """
        assert unit.grad is not None
        unit.grad = unit.grad.float()
        return unit.grad

    def park(self, unit: UnitState) -> None:
        """End the changes of `unit.grad` until the next `open`; an offloaded gradient is written to its pages."""

    def left(self, unit: UnitState) -> Event:
        """Return the event at the end of the last copy of an offloaded gradient to its pages in this step."""
        return PASSED

    def drop_open(self) -> None:
        """Drop the open gradients, and the records of a step."""

    def reset(self) -> None:
        """Drop all gradients, and wait for copies to and from their pages."""


@dataclass(eq=False, slots=True)
class _Paged:
    """The record of one unit's offloaded gradient in one step."""

    borrowed: Scratch | None = None
    """The buffer that the gradient has borrowed while it is open."""
    narrow: bool = False
    """Whether the gradient is in `Facts.first_grad_dtype`."""
    wide: Tensor | None = None
    """The sum in fp32 of a gradient that has got more microbatches than planned."""
    reducing: bool = False
    """Whether a reduction writes into the gradient, so that it must stay open."""
    own_only: bool = False
    """Whether only the range that this rank updates is kept."""
    left: Event = PASSED
    """The event at the end of the last copy to its pages."""


class PagedGradients(Gradients):
    """Offloaded gradients: pages of the store, and a few device buffers for the gradients that are open."""

    scarce = True

    def __init__(self, plan: Plan, store: PrefetchStore, tape: Tape) -> None:
        self._plan, self._store, self._device, self._tape = plan, store, plan.world.compute, tape
        self._pool = ScratchPool(plan.sizes.grad_buffer_sizes(), plan.facts.grad_dtype, self._device)
        self._records = defaultdict[UnitState, _Paged](_Paged)  # records of this step
        self._open: list[UnitState] = []  # the one that was opened first comes first
        self._leaving: deque[tuple[Scratch, list[Ticket]]] = deque()  # each with its tickets of writes
        self._coming: list[Ticket] = []

    @property
    def allocated_bytes(self) -> int:
        return self._pool.free_bytes + sum(buffer.whole.nbytes for buffer, _ in self._leaving)

    def open(self, unit: UnitState, *, fresh: bool, held: bool = False, sums: bool = True) -> Tensor:
        unit.await_grad_readers()
        record = self._records[unit]
        record.own_only = held or (record.own_only and not fresh)
        if unit.grad is None:
            if fresh:
                record.narrow = not sums and self._plan.facts.first_grad_dtype != self._plan.facts.grad_dtype
            dtype = self._plan.facts.first_grad_dtype if record.narrow else self._plan.facts.grad_dtype
            buffer = self._take(self._plan.sizes.grad_numel(unit.spec))
            record.borrowed = buffer
            self._open.append(unit)  # first, so that `reset` finds it after an interrupt
            unit.grad = buffer.flat.view(dtype)[: buffer.flat.numel()]
            if fresh or record.wide is not None:
                with self._tape.stream_standing("page out", unit.spec.name):
                    buffer.free.wait()
            else:
                self._bring_back(unit, buffer)
            if record.wide is not None:
                unit.grad = record.wide
        if sums and record.narrow:
            record.narrow = False
            assert record.borrowed is not None
            unit.grad = _widened(record.borrowed.flat, unit.grad)
        record.reducing = record.reducing or held
        return unit.grad

    def widen(self, unit: UnitState) -> Tensor:
        assert unit.grad is not None
        if unit.grad.dtype != torch.float32:
            unit.grad = self._records[unit].wide = unit.grad.float()
        return unit.grad

    def park(self, unit: UnitState) -> None:
        if unit.grad is None:
            return
        record = self._records[unit]
        if record.wide is not None:
            assert record.borrowed is not None
            unit.grad = record.borrowed.flat.copy_(record.wide)
        with self._device.aside("gradients out") as record.left, self._tape.streaming("page out", unit.spec.name):
            tickets = [save_page(self._store, self._device, page, part_K) for page, part_K in self._pages(unit)]
        buffer = self._closed(unit)
        buffer.free = record.left
        self._leaving.append((buffer, tickets))

    def left(self, unit: UnitState) -> Event:
        return self._records[unit].left

    def reset(self) -> None:
        with suppress(StoreError):  # the caller is already handling the error of a failed store
            self._await_coming()
            while self._leaving:
                self._finish_oldest()
        self._leaving.clear()
        self.drop_open()
        self._pool.reset(self._device.mark())

    def drop_open(self) -> None:
        free = self._device.mark() if self._open else PASSED
        while self._open:
            self._pool.give_back(self._closed(self._open[0]), free)
        self._pool.drop_extra()
        self._records.clear()

    def _closed(self, unit: UnitState) -> Scratch:
        """End the use of the unit's buffer, and return the buffer."""
        record = self._records[unit]
        buffer = record.borrowed
        assert buffer is not None
        self._open.remove(unit)
        unit.grad = record.borrowed = None
        record.reducing = False
        return buffer

    def _bring_back(self, unit: UnitState, buffer: Scratch) -> None:
        """Load the pages of `unit` into `buffer` on the side stream "gradients in"."""
        with self._device.aside("gradients in", after=buffer.free) as loaded:
            self._records[unit].left.wait()
            with self._tape.streaming("page in", unit.spec.name):
                for page, part_K in self._pages(unit):
                    self._coming.append(load_page(self._store, self._device, page, part_K))
        self._await_coming()
        with self._tape.stream_standing("page in", unit.spec.name):
            loaded.wait()

    def _await_coming(self) -> None:
        while self._coming:
            self._coming[-1].wait()
            self._coming.pop()

    def _take(self, numel: int) -> Scratch:
        """Return a buffer of `numel` elements, to be used after its event `free`.

        If none is left, wait for the oldest write, else park an open gradient, else allocate an extra buffer.
        """
        while (buffer := self._pool.take(numel)) is None:
            if self._leaving:
                self._finish_oldest()
                continue
            oldest = next((unit for unit in self._open if not self._records[unit].reducing), None)
            if oldest is None:
                self.overflowed += 1
                return self._pool.extra(numel)
            self.park(oldest)  # its unit gets more gradients, so a later `open` loads the gradient again
        return buffer

    def _finish_oldest(self) -> None:
        """Free the buffer that was parked first, after its pages are written, or their copies enqueued."""
        for ticket in self._leaving[0][1]:
            ticket.wait()
        buffer, _ = self._leaving.popleft()
        self._pool.give_back(buffer, buffer.free)

    def _pages(self, unit: UnitState) -> Iterator[tuple[Page, Tensor]]:
        assert unit.grad is not None
        narrow = self._records[unit].narrow and PageKind.FIRST_GRAD in self._plan.pages.grad_dtypes
        kind = PageKind.FIRST_GRAD if narrow else PageKind.GRAD
        ranges = self._plan.pages.grad_ranges(unit.spec)
        if self._records[unit].own_only:
            ranges = ranges[: self._plan.pages.updated_pages(unit.spec)]
        for number, (start, stop) in enumerate(ranges):
            yield Page(unit.index, kind, number), unit.grad[start:stop]


def _widened(flat: Tensor, narrow: Tensor) -> Tensor:
    """Convert a gradient in place to the wider dtype of its buffer.

    The last half of the remaining values is copied at a time, because their destination no longer holds values that are
    needed.

    Args:
        flat: (n,) the buffer.
        narrow: (n,) the values, in a dtype half as wide, in the first half of the buffer's memory.
    """
    stop = flat.numel()
    while stop > 1:
        start = (stop + 1) // 2
        flat[start:stop].copy_(narrow[start:stop])
        stop = start
    flat[:stop].copy_(narrow[:stop].clone())
    return flat
