"""Where a unit's gradient is between backward and its update.

Usually in memory of its own, for good. Where gradients are offloaded it lies in a borrowed buffer while it changes, and
in pages of the store otherwise: `open` borrows one, `park` writes the pages and lets it go when they are written.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from zero.device import Device, Event
from zero.errors import StoreError
from zero.plan import Plan
from zero.store import Page, PrefetchStore, Ticket
from zero.transfer import load, save
from zero.unit_state import UnitState


class Gradients:
    """Gradients in memory of their own.

    Attributes:
        scarce: buffers are few, so a gradient must not stay open while others arrive.
    """

    scarce = False

    @property
    def allocated_bytes(self) -> int:
        """Of buffers that no unit owns, between steps."""
        return 0

    def open(self, unit: UnitState, *, fresh: bool, held: bool = False) -> Tensor:
        """`unit.grad`, to be changed.

        Args:
            fresh: what it holds does not matter; otherwise it is the sum so far.
            held: something will arrive in it on its own, so it stays open until `park`.
        """
        assert unit.grad is not None
        return unit.grad

    def park(self, unit: UnitState) -> None:
        """`unit.grad` is not needed for a while."""

    def reset(self) -> None:
        """After an exception: what was summed up so far is not worth keeping."""


class _Leaving(NamedTuple):
    """A buffer whose pages are being written."""

    flat: Tensor
    tickets: list[Ticket]
    read: Event


class PagedGradients(Gradients):
    """Gradients in pages of the store, and few buffers."""

    scarce = True

    def __init__(self, plan: Plan, store: PrefetchStore, device: Device) -> None:
        self._plan, self._store, self._device = plan, store, device
        self._counts = plan.grad_buffer_counts()
        self._free = {numel: [self._buffer(numel) for _ in range(n)] for numel, n in self._counts.items()}
        self._open: dict[int, UnitState] = {}
        self._held: set[int] = set()
        self._leaving: deque[_Leaving] = deque()
        self._coming: list[Ticket] = []
        self.overflowed = 0

    @property
    def allocated_bytes(self) -> int:
        leaving = [one.flat for one in self._leaving]
        return sum(flat.nbytes for flats in (*self._free.values(), leaving) for flat in flats)

    def open(self, unit: UnitState, *, fresh: bool, held: bool = False) -> Tensor:
        if unit.grad is None:
            unit.grad = self._take(self._plan.grad_numel(unit.spec))
            self._open[unit.index] = unit
            if not fresh:
                for page, part_K in self._pages(unit):
                    self._coming.append(load(self._store, self._device, page, part_K))
                while self._coming:
                    self._coming[-1].wait()
                    self._coming.pop()
        if held:
            self._held.add(unit.index)
        return unit.grad

    def park(self, unit: UnitState) -> None:
        if unit.grad is None:
            return
        tickets = [save(self._store, self._device, page, part_K) for page, part_K in self._pages(unit)]
        flat, unit.grad = unit.grad, None
        del self._open[unit.index]
        self._held.discard(unit.index)
        self._leaving.append(_Leaving(flat, tickets, self._device.mark()))

    def reset(self) -> None:
        with suppress(StoreError):  # a broken store is what is being reported already
            while self._coming:
                self._coming[-1].wait()
                self._coming.pop()
            while self._leaving:
                self._finish_oldest()
        for unit in self._open.values():
            assert unit.grad is not None
            self._give_back(unit.grad)
            unit.grad = None
        self._open.clear()
        self._held.clear()

    def _take(self, numel: int) -> Tensor:
        while not self._free[numel]:
            if self._leaving:
                self._finish_oldest()
                continue
            idle = (unit for unit in self._open.values() if unit.index not in self._held)
            oldest = next((unit for unit in idle if self._plan.grad_numel(unit.spec) == numel), None)
            if oldest is None:
                self.overflowed += 1
                return self._buffer(numel)
            self.park(oldest)  # many units at once, as in a stack that is looped over: it comes back
        return self._free[numel].pop()

    def _buffer(self, numel: int) -> Tensor:
        return self._device.zeros(numel, self._plan.grad_dtype)

    def _finish_oldest(self) -> None:
        leaving = self._leaving[0]
        for ticket in leaving.tickets:
            ticket.wait()
        leaving.read.wait()
        self._give_back(self._leaving.popleft().flat)

    def _give_back(self, flat: Tensor) -> None:
        if len(self._free[flat.numel()]) < self._counts[flat.numel()]:
            self._free[flat.numel()].append(flat)

    def _pages(self, unit: UnitState) -> Iterator[tuple[Page, Tensor]]:
        assert unit.grad is not None
        for number, (start, stop) in enumerate(self._plan.grad_ranges(unit.spec)):
            yield Page(unit.index, "grad", number), unit.grad[start:stop]
