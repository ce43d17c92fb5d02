"""Read-ahead and write-behind around any store: threads execute the decisions of `indexed_schedule`.

`modify` has a free worker read a group of pages into a slot, call a function on it, and write it back. `expect`
announces the groups that will be modified next, so that they are read ahead. Every page can also be read and written on
its own. Operations on one page run in the order in which they were submitted.

A page that the inner store lends (`in_place`) is never copied to a slot: the function gets the page itself.

`workers` has the threads, the waits and the failures; this file executes one action on pages and slots.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zero.core.sizes import round_up
from zero.errors import StoreError
from zero.platform.handle import Done
from zero.store.base import Page, Pages, Store, Ticket, Watch, check_matching
from zero.store.events import Action, Copy, Expect, Modify, Move, PageGroup, Read, Transfer, Work, Write
from zero.store.traffic_counter import Traffic, TrafficCounter
from zero.store.workers import WorkerPool


class PrefetchStore(Store):
    """A store that adds threads, read-ahead and write-behind to another store.

    Args:
        inner: the other store, which reads and writes in the calling thread. Several threads call it at once, for
            different pages. Its pages are allocated through this store.
        slots: host memory for loaded groups: 1-D uint8, of equal size, aligned to 4 KiB.
        bounce_buffers: host memory for other tensors of a group's work, one for each thread, see `bounce_buffer`.
        threads: the most actions (read, work, write) at a time.
        read_ahead: the most slots for groups that are only announced.
        timeout_s: the limit of every wait, in seconds.
        prepare: called once in each thread before its first action.

    The threads are started when they are first needed and end in `close`.
    """

    def __init__(
        self,
        inner: Store,
        slots: Sequence[Tensor],
        bounce_buffers: Sequence[Tensor] = (),
        *,
        threads: int,
        read_ahead: int,
        timeout_s: float = 300.0,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self._inner, self._slots = inner, tuple(slots)
        self._bounce_buffers, self._idle = tuple(bounce_buffers), list(bounce_buffers)
        self._sizes = Pages[tuple[int, torch.dtype]]()
        self._shapes: dict[PageGroup, _Shape] = {}
        self._opened: list[tuple[Tensor, ...]] = [()] * len(slots)  # the pages in each slot
        self._versions: Counter[Page] = Counter()
        self._meter = TrafficCounter()
        self._claimed = False
        self._workers = WorkerPool(
            slots=len(slots),
            threads=threads,
            read_ahead=read_ahead,
            timeout_s=timeout_s,
            prepare=prepare,
            carry_out=self._carry_out,
            meter=self._meter,
        )

    # -- the interface of every store --

    def allocate(self, page: Page, numel: int, dtype: torch.dtype) -> None:
        self._inner.allocate(page, numel, dtype)
        self._sizes[page] = numel, dtype

    def read(self, page: Page, into: Tensor) -> Ticket:
        return self._transfer(page, into, writes=False)

    def write(self, page: Page, source: Tensor) -> Ticket:
        return self._transfer(page, source, writes=True)

    def in_place(self, page: Page) -> Tensor | None:
        return self._inner.in_place(page)

    def in_place_views(self, pages: Sequence[Page]) -> list[Tensor]:
        """Return views of pages of one dtype in place; pages that are adjacent in memory are one view.

        The caller has to wait for the tickets of `modify` on these pages before it reads the views.

        Raises:
            StoreError: a page is not in place, or the store has failed.
        """
        self._workers.check()
        views: list[Tensor] = []
        for page in pages:
            memory = self._inner.in_place(page)
            if memory is None:
                raise StoreError(f"{page} has no memory to update in place, because its tier returns copies")
            if views and _adjoin(views[-1], memory):
                views[-1] = views[-1].as_strided((views[-1].numel() + memory.numel(),), (1,))
            else:
                views.append(memory)
        return views

    def versions(self, pages: Sequence[Page]) -> tuple[int, ...]:
        """Return the number of calls of `write` for each page so far."""
        return tuple(self._versions[page] for page in pages)

    @property
    def allocated_bytes(self) -> int:
        return self._inner.allocated_bytes

    @property
    def slots_bytes(self) -> int:
        """Return the bytes of all slots and bounce buffers."""
        return sum(memory.nbytes for memory in (*self._slots, *self._bounce_buffers))

    @contextmanager
    def bounce_buffer(self) -> Iterator[Tensor]:
        """Lend the calling thread, one of the store's, a bounce buffer: through it tensors of a GPU reach the host."""
        memory = self._idle.pop()
        try:
            yield memory
        finally:
            self._idle.append(memory)

    def close(self) -> None:
        """End the threads, then close the inner store. Operations that have not started are dropped.

        Raises:
            StoreError: a thread is still running after `timeout_s`. The inner store stays open then.
        """
        self._workers.leave()
        self._shapes.clear()
        self._inner.close()

    def claim(self) -> None:
        """Reserve the store for one state.

        Raises:
            StoreError: the store is reserved already.
        """
        if self._claimed:
            raise StoreError("this store holds a state already. Open another one with zero.open_store(plan).")
        self._claimed = True

    def observe(self, watch: Watch) -> None:
        """Call `watch` around every later action: reads, writes and work in the threads, and waits of callers."""
        self._workers.watch = watch

    # -- groups --

    def expect(self, groups: Sequence[PageGroup]) -> None:
        """Announce the groups that will be modified next, in this order; replaces the last announcement.

        Raises:
            StoreError: a page is unknown, or a group is larger than a slot.
        """
        self._workers.post(Expect(tuple(group for group in groups if self._shape(group).reads)))

    def modify(
        self, group: PageGroup, work: Callable[[tuple[Tensor, ...]], None], priority: tuple[int, ...] = ()
    ) -> Ticket:
        """Have a worker read the group, run `work` on it under `no_grad`, and write it back.

        Args:
            work: gets a 1-D tensor for each of `pages`, `beside` and `out`, in this order, which it may use until it
                returns; those of `out` are not initialized. It must not wait for this store.
            priority: the group with the smallest priority is modified first.

        Returns:
            A ticket whose `wait` returns when `work` has returned. Kernels that `work` launched on a device may still
                be running, and the pages are written later.

        Raises:
            StoreError: a page is unknown, or the group is larger than a slot.
        """
        return self._workers.submit(Modify(0, group, priority, self._shape(group).is_in_place), work)

    def drain(self) -> None:
        """Wait until all operations have ended and all pages are written. Announced groups may stay in slots.

        Raises:
            StoreError: an operation failed, now or earlier, or took longer than `timeout_s`.
        """
        self._workers.drain()

    @property
    def traffic(self) -> Traffic:
        return self._meter.read_off()

    # -- in the calling thread --

    def _transfer(self, page: Page, tensor: Tensor, *, writes: bool) -> Ticket:
        check_matching(page, *self._sizes[page], tensor)
        if writes:
            self._versions[page] += 1
        event = Transfer(0, page, writes)
        if self._inner.in_place(page) is None:
            return self._workers.submit(event, partial(self._move, page, tensor, writes))
        self._workers.do_here(event, partial(self._copy_here, page, tensor, writes))
        return Done()

    def _shape(self, group: PageGroup) -> "_Shape":
        shape = self._shapes.get(group)
        if shape is None:
            shape = self._shapes[group] = self._new_shape(group)
        return shape

    def _new_shape(self, group: PageGroup) -> "_Shape":
        """Lay out the pages of a group one after another from the slot's start, without the pages in place."""
        places, end = [], 0
        for page in group.all:
            (numel, dtype), view = self._sizes[page], self._inner.in_place(page)
            nbytes = numel * dtype.itemsize if view is None else 0
            places.append(_Place(slice(end, end + nbytes), dtype, view))
            end += round_up(nbytes)
        room = self._slots[0].nbytes if self._slots else 0
        if end > room:
            raise StoreError(f"{group} takes {end} bytes of memory, but a slot of the arena has {room}")
        moving = [number for number, place in enumerate(places) if place.view is None]
        beside, out = len(group.pages), len(group.pages) + len(group.beside)
        return _Shape(
            tuple(places),
            reads=tuple(number for number in moving if number < beside),
            beside=tuple(number for number in moving if beside <= number < out),
            writes=tuple(number for number in moving if not beside <= number < out),
        )

    # -- in worker threads --

    def _carry_out(self, action: Action, job: Callable[..., None]) -> None:
        """Execute one action. The schedule gives no other action its slot or its pages meanwhile."""
        match action:
            case Move():
                job()
            case Copy(_, page, group, slot):
                job(self._opened[slot][group.all.index(page)])
            case Read(group, slot):
                self._opened[slot] = self._shape(group).open(self._slots[slot])
                self._move_all(group, self._shape(group).reads, self._opened[slot], writes=False)
            case Work(_, group, slot):
                opened = self._shape(group).open(None) if slot is None else self._opened[slot]
                self._move_all(group, self._shape(group).beside, opened, writes=False)
                with self._workers.watch(_action_on(group), group.unit, group.number):
                    job(opened)
            case Write(_, group, slot):
                self._move_all(group, self._shape(group).writes, self._opened[slot], writes=True)

    def _move_all(
        self, group: PageGroup, numbers: tuple[int, ...], opened: tuple[Tensor, ...], *, writes: bool
    ) -> None:
        for number in numbers:
            self._move(group.all[number], opened[number], writes)

    def _move(self, page: Page, tensor: Tensor, writes: bool, slot_K: Tensor | None = None) -> None:
        with self._workers.watch("write" if writes else "read", *page):
            if slot_K is not None:  # the page is still in memory, because it is written now or was just written
                tensor.copy_(slot_K)
                return
            with self._meter.moving(tensor.nbytes, writes):
                self._copy(page, tensor, writes)

    def _copy(self, page: Page, tensor: Tensor, writes: bool) -> None:
        (self._inner.write if writes else self._inner.read)(page, tensor).wait()

    def _copy_here(self, page: Page, tensor: Tensor, writes: bool) -> None:
        with self._workers.watch("wait"), self._workers.watch("write" if writes else "read", *page):
            self._copy(page, tensor, writes)


def _action_on(group: PageGroup) -> str:
    """Return the name of the work on a group for `Watch`: without `pages` it only reads `beside` or writes `out`."""
    if group.pages:
        return "work"
    return "read" if group.beside else "write"


def _adjoin(first: Tensor, second: Tensor) -> bool:
    """Return whether the second 1-D tensor begins where the first ends, in one storage."""
    same_storage = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same_storage and first.data_ptr() + first.nbytes == second.data_ptr()


class _Place(NamedTuple):
    """The location of one page while its group is loaded: in the slot, or in place."""

    part: slice
    """Range of bytes in the slot."""
    dtype: torch.dtype
    view: Tensor | None
    """The page itself if it is in place; it then takes no bytes of the slot."""


class _Shape(NamedTuple):
    """The layout of a group in memory: each page's location, and the indexes of the pages that each action moves."""

    places: tuple[_Place, ...]
    reads: tuple[int, ...]
    beside: tuple[int, ...]
    writes: tuple[int, ...]

    @property
    def is_in_place(self) -> bool:
        return not (self.reads or self.beside or self.writes)

    def open(self, slot: Tensor | None) -> tuple[Tensor, ...]:
        """Return the pages as tensors: views of the slot, or the pages in place."""
        opened = []
        for part, dtype, view in self.places:
            if view is None:
                assert slot is not None
                view = slot[part].view(dtype)
            opened.append(view)
        return tuple(opened)
