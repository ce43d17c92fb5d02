"""Read-ahead and write-behind around any store: threads execute the decisions of `indexed_schedule`.

`modify` has a free worker read a group of pages into a slot, call a function on it, and write it back. `expect`
announces the groups that will be modified next, so that they are read ahead. Every page can also be read and written on
its own. Operations on one page run in the order in which they were submitted.

`workers` has the threads, the waits and the failures; `executor` executes one action on pages and slots.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from zero.errors import StoreError
from zero.platform.handle import Done
from zero.store.base import Page, Pages, Store, Ticket, Watch, check_matching, watch_nothing
from zero.store.bounce_buffers import BounceBuffers
from zero.store.events import Expect, Modify, PageGroup, PageTransfer
from zero.store.executor import Executor
from zero.store.traffic_counter import Traffic, TrafficCounter
from zero.store.workers import WorkerPool


class PrefetchStore(Store):
    """A store that adds threads, read-ahead and write-behind to another store.

    Args:
        inner: the other store, which reads and writes in the calling thread. Several threads call it at once, for
            different pages. Its pages are allocated through this store.
        slots: host memory for loaded groups: 1-D uint8, of equal size, aligned to 4 KiB.
        bounce_buffers: host memory for other tensors of a group's work, one for each thread.
        threads: the most actions (read, work, write) at a time.
        read_ahead: the most slots for groups that are only announced.
        timeout_s: the limit of every wait, in seconds.
        prepare: called once in each thread before its first action.
        release: called in `close`, when slots and bounce buffers are not used any more.

    The threads are started when they are first needed and end in `close`.

    Attributes:
        inner: the other store.
        bounce_buffers: lends them to the store's threads.
    """

    def __init__(
        self,
        inner: Store,
        slots: Sequence[Tensor] = (),
        bounce_buffers: Sequence[Tensor] = (),
        *,
        threads: int,
        read_ahead: int = 0,
        timeout_s: float = 300.0,
        prepare: Callable[[], None] = lambda: None,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.inner, self._sizes = inner, Pages[tuple[int, torch.dtype]]()
        self._versions: Counter[Page] = Counter()
        self._claimed, self._watch, self._traffic = False, watch_nothing, TrafficCounter()
        self._make_pool = partial(WorkerPool, timeout_s=timeout_s, prepare=prepare)
        self._executor = Executor(inner, (), self._sizes, self._traffic)
        self._release: Callable[[], None] = lambda: None
        self._workers = self._make_pool(self._executor, threads=threads, read_ahead=0)
        self.refit(slots, bounce_buffers, threads=threads, read_ahead=read_ahead, release=release)

    def refit(
        self,
        slots: Sequence[Tensor] = (),
        bounce_buffers: Sequence[Tensor] = (),
        *,
        threads: int,
        read_ahead: int = 0,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Use other slots, bounce buffers and threads; pages stay as they are. Call `drain` first.

        Args: as those of the class.

        Raises:
            StoreError: as `close`.
        """
        self._workers.leave()
        self._release()
        self._executor, self._release = Executor(self.inner, slots, self._sizes, self._traffic), release
        self._executor.watch, self.bounce_buffers = self._watch, BounceBuffers(bounce_buffers)
        self._workers = self._make_pool(self._executor, threads=threads, read_ahead=read_ahead)

    # -- the interface of every store --

    def allocate_all(self, sizes: Mapping[Page, tuple[int, torch.dtype]]) -> None:
        self.inner.allocate_all(sizes)
        self._sizes |= sizes

    def rename(self, page: Page, name: Page) -> None:
        self.inner.rename(page, name)
        self._sizes.rename(page, name)
        self._executor.forget_layouts()

    def free(self, page: Page) -> None:
        self._sizes.take(page)
        self._executor.forget_layouts()
        self.inner.free(page)

    def read(self, page: Page, into: Tensor) -> Ticket:
        return self._transfer(page, into, writes=False)

    def write(self, page: Page, source: Tensor) -> Ticket:
        return self._transfer(page, source, writes=True)

    def in_place(self, page: Page) -> Tensor | None:
        return self.inner.in_place(page)

    def in_place_views(self, pages: Sequence[Page]) -> list[Tensor]:
        """Return views of pages of one dtype in place; pages that are adjacent in memory are one view.

        The caller has to wait for the tickets of `modify` on these pages before it reads the views.

        Raises:
            StoreError: a page is not in place, or the store has failed.
        """
        self._workers.check()
        views: list[Tensor] = []
        for page in pages:
            memory = self.inner.in_place(page)
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
        return self.inner.allocated_bytes

    @property
    def slots_bytes(self) -> int:
        """Return the bytes of all slots and bounce buffers."""
        return sum(slot.nbytes for slot in self._executor.slots) + self.bounce_buffers.nbytes

    def close(self) -> None:
        """End the threads, then close the inner store. Operations that have not started are dropped.

        Raises:
            StoreError: a thread is still running after `timeout_s`. The inner store stays open then.
        """
        self._workers.leave()
        try:
            self._executor.close()
        finally:
            self._release()

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
        self._watch = self._executor.watch = watch

    # -- groups --

    def expect(self, groups: Sequence[PageGroup]) -> None:
        """Announce the groups that will be modified next, in this order; replaces the last announcement.

        Raises:
            StoreError: a page is unknown, or a group is larger than a slot.
        """
        self._workers.post(Expect(tuple(group for group in groups if self._executor.layout(group).reads)))

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
        return self._workers.submit(Modify(0, group, priority, self._executor.layout(group).is_in_place), work)

    def drain(self) -> None:
        """Wait until all operations have ended and all pages are written. Announced groups may stay in slots.

        Raises:
            StoreError: an operation failed, now or earlier, or took longer than `timeout_s`.
        """
        self._workers.drain()

    @property
    def traffic(self) -> Traffic:
        return self._traffic.read_off()

    # -- in the calling thread --

    def _transfer(self, page: Page, tensor: Tensor, *, writes: bool) -> Ticket:
        check_matching(page, *self._sizes[page], tensor)
        if writes:
            self._versions[page] += 1
        event = PageTransfer(0, page, writes)
        if self.inner.in_place(page) is None:
            return self._workers.submit(event, partial(self._executor.move, page, tensor, writes))
        self._workers.do_here(event, partial(self._executor.copy_in_caller, page, tensor, writes))
        return Done()


def _adjoin(first: Tensor, second: Tensor) -> bool:
    """Return whether the second 1-D tensor begins where the first ends, in one storage."""
    same_storage = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return same_storage and first.data_ptr() + first.nbytes == second.data_ptr()
