"""Read-ahead and write-behind around any store: what `paging` decides, a few threads carry out.

`modify` asks for a group of pages to be read into a slot, worked on and written back, by whichever worker is free;
`expect` says which groups will be asked for next, so that they are read before. Beside that every page can be read and
written on its own. Operations on one page happen in the order in which they were asked for.

A page that the inner store lends is never copied to a slot: work gets the page itself.

One lock guards the schedule's state. It is never held during I/O or work, and no worker waits for another operation:
what cannot start yet is not given to a worker. A worker that finishes takes its next action along, so that nobody has
to be woken for it.

The first error ends everything: whoever waits or asks afterwards gets its text, because a page may be half modified.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.errors import StoreError
from zero.store.base import Done, Page, Store, Ticket, Watch, nobody
from zero.store.paging import (
    Action,
    Asked,
    Copy,
    Due,
    Event,
    Expect,
    Finished,
    Group,
    Move,
    Read,
    Work,
    Write,
    advance,
    start,
)

ALIGNMENT_BYTES = 4096
"""Where slots, and the pages in them, begin: direct I/O asks for it."""

IDLE_S = 1.0
"""How often a worker without work looks up: what it costs at most if an interrupt swallows a wake-up."""


@dataclass(frozen=True)
class Traffic:
    """What moved between the inner store and memory since the store was opened; lent pages do not move."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_s: float = 0.0
    """Wall time in which at least one read was under way."""
    write_s: float = 0.0
    """The same for writes."""
    busy_s: float = 0.0
    """The same for reads or writes."""
    wait_s: float = 0.0
    """Time that callers were blocked, added up."""


class PrefetchStore(Store):
    """Any store, with threads before it.

    Args:
        inner: reads and writes in the calling thread; called from several threads at once, for different pages. Its
            pages are allocated through this store.
        slots: host memory for groups on their way: 1-D uint8, of equal size, aligned to 4 KiB.
        threads: most actions (read, work, write) at a time.
        read_ahead: most slots that groups may take which are expected and not asked for.
        timeout_s: the longest that anybody waits.
        prepare: called once in each thread before its first action.

    The threads are started when they are first needed and end in `close`.

    Raises:
        StoreError: slots that are not as above.
    """

    def __init__(
        self,
        inner: Store,
        slots: Sequence[Tensor],
        *,
        threads: int,
        read_ahead: int,
        timeout_s: float = 300.0,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        _check_slots(slots)
        self._inner, self._slots = inner, tuple(slots)
        self._sizes: dict[Page, tuple[int, torch.dtype]] = {}
        self._shapes: dict[Group, _Shape] = {}
        self._opened: list[tuple[Tensor, ...]] = [()] * len(slots)  # what lies in each slot
        self._meter = _Meter()
        self._watch: Watch = nobody
        self._claimed = False
        self._crew = _Crew(len(slots), threads, read_ahead, timeout_s, prepare, self._carry_out, self._meter)

    # -- a store like any other --

    def allocate(self, page: Page, numel: int, dtype: torch.dtype) -> None:
        self._inner.allocate(page, numel, dtype)
        self._sizes[page] = (numel, dtype)

    def read(self, page: Page, into: Tensor) -> Ticket:
        return self._transfer(page, into, writes=False)

    def write(self, page: Page, source: Tensor) -> Ticket:
        return self._transfer(page, source, writes=True)

    def in_place(self, page: Page) -> Tensor | None:
        return self._inner.in_place(page)

    @property
    def allocated_bytes(self) -> int:
        return self._inner.allocated_bytes

    @property
    def slots_bytes(self) -> int:
        """Memory that pages pass through."""
        return sum(slot.nbytes for slot in self._slots)

    def close(self) -> None:
        """End the threads, then close the inner store. What was asked for and has not started is dropped.

        Raises:
            StoreError: a thread is still at work after `timeout_s`. The inner store stays open then.
        """
        self._crew.leave()
        self._shapes.clear()
        self._inner.close()

    def claim(self) -> None:
        """Say that the pages hold a state from here on; a store holds one in its life.

        Raises:
            StoreError: it has one already, which another would mix with.
        """
        if self._claimed:
            raise StoreError("this store holds a state already; open another one with zero.open_store(plan)")
        self._claimed = True

    def observe(self, watch: Watch) -> None:
        """Tell `watch` of everything from here on: reads, writes and work in the threads, and callers that wait."""
        self._watch = self._crew.watch = watch

    # -- groups --

    def expect(self, groups: Sequence[Group]) -> None:
        """These groups will be modified next, in this order; replaces what was expected before.

        Raises:
            StoreError: an unknown page, or a group that is larger than a slot.
        """
        self._crew.tell(Expect(tuple(group for group in groups if self._shape(group).reads)))

    def modify(
        self, group: Group, work: Callable[[tuple[Tensor, ...]], None], priority: tuple[int, ...] = ()
    ) -> Ticket:
        """Have the group read, run `work` on it in a worker under `no_grad`, and have it written back.

        Args:
            work: gets a 1-D tensor for each of `pages`, `beside` and `out`, in this order, which are its own until it
                returns; those of `out` hold anything. It must not wait for this store.
            priority: of the groups that are asked for, the smallest goes first.

        Returns:
            A ticket whose `wait` returns when `work` has run. The pages are written behind.

        Raises:
            StoreError: an unknown page, or a group that is larger than a slot.
        """
        return self._crew.ask(Due(0, group, priority, self._shape(group).is_lent), work)

    def settle(self) -> None:
        """Return when everything that was asked for is done and written. Expected groups may lie in slots.

        Raises:
            StoreError: something went wrong, now or earlier; or `timeout_s` went by.
        """
        self._crew.settle()

    @property
    def traffic(self) -> Traffic:
        return self._meter.read_off()

    # -- what callers do --

    def _transfer(self, page: Page, tensor: Tensor, *, writes: bool) -> Ticket:
        numel, dtype = self._size(page)
        if tensor.shape != (numel,) or tensor.dtype != dtype:
            raise StoreError(f"{page} holds ({numel},) {dtype}, the other side is {tuple(tensor.shape)} {tensor.dtype}")
        asked = Asked(0, page, writes)
        if self._inner.in_place(page) is None:
            return self._crew.ask(asked, partial(self._move, page, tensor, writes))
        self._crew.do_here(asked, partial(self._copy_here, page, tensor, writes))
        return Done()

    def _size(self, page: Page) -> tuple[int, torch.dtype]:
        try:
            return self._sizes[page]
        except KeyError:
            raise StoreError(f"{page} was never allocated") from None

    def _shape(self, group: Group) -> "_Shape":
        shape = self._shapes.get(group)
        if shape is None:
            shape = self._shapes[group] = self._new_shape(group)
        return shape

    def _new_shape(self, group: Group) -> "_Shape":
        """Where each page of a group lies: one after the other from the slot's start, without those that are lent."""
        places, end = [], 0
        for page in (*group.pages, *group.beside, *group.out):
            (numel, dtype), lent = self._size(page), self._inner.in_place(page)
            nbytes = numel * dtype.itemsize if lent is None else 0
            places.append(_Place(page, slice(end, end + nbytes), dtype, lent))
            end += nbytes + -nbytes % ALIGNMENT_BYTES
        room = self._slots[0].nbytes if self._slots else 0
        if end > room:
            raise StoreError(f"{group} takes {end} bytes of memory, and a slot has {room}")
        asleep = [number for number, place in enumerate(places) if place.lent is None]
        beside, out = len(group.pages), len(group.pages) + len(group.beside)
        return _Shape(
            tuple(places),
            reads=tuple(number for number in asleep if number < beside),
            beside=tuple(number for number in asleep if beside <= number < out),
            writes=tuple(number for number in asleep if not beside <= number < out),
        )

    # -- what workers do --

    def _carry_out(self, action: Action, job: Callable[..., None]) -> None:
        """One action. The schedule sees to it that nobody else touches its slot and its pages."""
        if isinstance(action, Move):
            job()
            return
        shape, slot = self._shape(action.group), action.slot
        if isinstance(action, Copy):
            job(self._opened[action.slot][shape.number_of(action.page)])
            return
        if isinstance(action, Read):
            self._opened[action.slot] = shape.open(self._slots[action.slot])
        opened = shape.open(None) if slot is None else self._opened[slot]
        match action:
            case Read():
                self._move_all(shape, shape.reads, opened, writes=False)
            case Work():
                self._move_all(shape, shape.beside, opened, writes=False)
                with self._watch(_kind_of(action.group), action.group.unit, action.group.number):
                    job(opened)
            case Write():
                self._move_all(shape, shape.writes, opened, writes=True)

    def _move_all(self, shape: "_Shape", numbers: tuple[int, ...], opened: tuple[Tensor, ...], *, writes: bool) -> None:
        for number in numbers:
            self._move(shape.places[number].page, opened[number], writes)

    def _move(self, page: Page, tensor: Tensor, writes: bool, slot_K: Tensor | None = None) -> None:
        with self._watch("write" if writes else "read", *page):
            if slot_K is not None:  # a page that is being written: it is in memory still
                tensor.copy_(slot_K)
                return
            with self._meter.moving(tensor.nbytes, writes):
                self._copy(page, tensor, writes)

    def _copy(self, page: Page, tensor: Tensor, writes: bool) -> None:
        (self._inner.write if writes else self._inner.read)(page, tensor).wait()

    def _copy_here(self, page: Page, tensor: Tensor, writes: bool) -> None:
        with self._watch("wait"), self._watch("write" if writes else "read", *page):
            self._copy(page, tensor, writes)


def _kind_of(group: Group) -> str:
    """Work on no pages of its own takes in what is `beside`, or gives what goes `out`: see `transfer`."""
    if group.pages:
        return "work"
    return "read" if group.beside else "write"


def _check_slots(slots: Sequence[Tensor]) -> None:
    for slot in slots:
        if slot.dtype != torch.uint8 or slot.dim() != 1 or slot.device.type != "cpu" or slot.nbytes != slots[0].nbytes:
            raise StoreError("slots are 1-D uint8 tensors of one size in host memory")
        if slot.data_ptr() % ALIGNMENT_BYTES:
            raise StoreError(f"slots begin at multiples of {ALIGNMENT_BYTES} bytes")


class _Place(NamedTuple):
    """Where one page of a group is while the group is awake."""

    page: Page
    part: slice
    """Bytes of the slot."""
    dtype: torch.dtype
    lent: Tensor | None
    """The page itself; it takes nothing of the slot."""


class _Shape(NamedTuple):
    """A group in memory: every page's place, and which of them move when; lent pages never do."""

    places: tuple[_Place, ...]
    reads: tuple[int, ...]
    beside: tuple[int, ...]
    writes: tuple[int, ...]

    def number_of(self, page: Page) -> int:
        return next(number for number, place in enumerate(self.places) if place.page == page)

    @property
    def is_lent(self) -> bool:
        return not (self.reads or self.beside or self.writes)

    def open(self, slot: Tensor | None) -> tuple[Tensor, ...]:
        """The pages as tensors: views of the slot, or lent."""
        opened = []
        for _, part, dtype, lent in self.places:
            if lent is None:
                assert slot is not None
                lent = slot[part].view(dtype)
            opened.append(lent)
        return tuple(opened)


# -- threads -----------------------------------------------------------------------------------------------------------


class _Ticket:
    """Something asked for; `ended` once its work has run or its page has moved."""

    def __init__(self, crew: "_Crew", event: Due | Asked, job: Callable[..., None]) -> None:
        self.event, self.ended = event, False
        self.job: Callable[..., None] = job
        self._crew = crew

    def wait(self) -> None:
        self._crew.await_end(self)

    def end(self) -> None:
        self.drop()
        self.ended = True

    def drop(self) -> None:
        """Let go of the job: a ticket may be kept for longer than what its job holds."""
        self.job = _nothing


def _nothing(*_: Any) -> None:
    return None


class _Watcher(NamedTuple):
    """A caller that waits for a condition; looked at after every action, woken only when it holds."""

    holds: Callable[[], bool]
    called: threading.Condition


class _Crew:
    """The schedule's state, one lock around it, and the threads that carry out its actions.

    Args:
        carry_out: does an action; gets what was given as `job` with the operation.
    """

    def __init__(
        self,
        slots: int,
        threads: int,
        read_ahead: int,
        timeout_s: float,
        prepare: Callable[[], None],
        carry_out: Callable[[Action, Callable[..., None]], None],
        meter: "_Meter",
    ) -> None:
        self._state = start(slots=slots, workers=threads, read_ahead=read_ahead)
        self._timeout_s, self._prepare, self._carry_out, self._meter = timeout_s, prepare, carry_out, meter
        self.watch: Watch = nobody
        self._size = threads
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._called = threading.Condition(self._lock)  # where workers wait for an action
        self._to_start: tuple[Action, ...] = ()
        self._tickets: dict[int, _Ticket] = {}
        self._watchers: list[_Watcher] = []
        self._count = 0
        self._closed = False
        self._failure: tuple[str, BaseException] | None = None

    # -- what callers do --

    def tell(self, event: Event) -> None:
        """An event that nobody waits for."""
        with self._lock:
            self._refuse()
            self._advance(event)

    def ask(self, event: Due | Asked, job: Callable[..., None]) -> Ticket:
        """A new operation, which gets its number here."""
        with self._lock:
            self._refuse()
            self._count += 1
            event = event._replace(number=self._count)
            ticket = self._tickets[self._count] = _Ticket(self, event, job)
            self._advance(event)
        return ticket

    def do_here(self, event: Asked, job: Callable[..., None]) -> None:
        """A transfer in the calling thread, once everything that was asked for before on its page has ended."""
        with self._lock:
            self._refuse()
            self._wait(lambda: self._starts_here(event), event)
            self._count += 1
            move = self._advance(event._replace(number=self._count, here=True), keep_first=True)
        assert move is not None
        try:
            with torch.no_grad():
                job()
        except Exception as error:
            self._fail(error, move)
            raise
        finally:
            self._finish(move, keep_first=False)

    def await_end(self, ticket: _Ticket) -> None:
        if ticket.ended and self._failure is None:
            return
        with self._lock:
            self._wait(lambda: ticket.ended, ticket.event)

    def settle(self) -> None:
        with self._lock:
            self._refuse()
            self._wait(lambda: self._state.is_quiet, None)

    def leave(self) -> None:
        """No more actions; returns when every thread has ended."""
        with self._lock:
            self._closed = True
            self._called.notify_all()
            unfinished = bool(self._tickets)
        if unfinished:
            self._fail(StoreError("this store was closed before everything that was asked of it had ended"), None)
        end_s = time.monotonic() + self._timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
            if thread.is_alive():
                raise StoreError(f"{thread.name} is still at work after {self._timeout_s:g} s; the store stays open")
        self._threads.clear()

    # -- what workers do --

    def _run(self) -> None:
        """A worker's life: prepare, then one action after the other until the crew is closed or something failed."""
        action: Action | None = None
        try:
            self._prepare()
            with torch.no_grad():
                while (action := action or self._next()) is not None:
                    self._carry_out(action, self._job_of(action))
                    action = self._finish(action, keep_first=True)
        except BaseException as error:
            self._fail(error, action)

    def _next(self) -> Action | None:
        with self._lock:
            while not self._is_over:
                if self._to_start:
                    action, self._to_start = self._to_start[0], self._to_start[1:]
                    return action
                self._called.wait(IDLE_S)
        return None

    def _job_of(self, action: Action) -> Callable[..., None]:
        return self._tickets[action.number].job if isinstance(action, Work | Move | Copy) else _nothing

    def _finish(self, action: Action, *, keep_first: bool) -> Action | None:
        """The action has ended well; returns the next one for this thread, if it is to keep the first."""
        with self._lock:
            if self._is_over:
                return None
            if isinstance(action, Work | Move | Copy) and action.number in self._tickets:
                self._tickets.pop(action.number).end()
            following = self._advance(Finished(action), keep_first=keep_first)
            for watcher in self._watchers:
                if watcher.holds():
                    watcher.called.notify()
        return following

    def _fail(self, error: BaseException, action: Action | None) -> None:
        """Everything ends, and everybody who waits is told."""
        where = "a thread of the store" if action is None else _words(action)
        told = str(error) if isinstance(error, StoreError) else f"{where}: {type(error).__name__}: {error}"
        with self._lock:
            if self._failure is None:
                self._failure = (told, error)
            for ticket in self._tickets.values():
                ticket.drop()
            self._tickets.clear()
            self._called.notify_all()
            for watcher in self._watchers:
                watcher.called.notify()

    # -- under the lock --

    @property
    def _is_over(self) -> bool:
        return self._closed or self._failure is not None

    def _advance(self, event: Event, *, keep_first: bool = False) -> Action | None:
        """Take in an event and hand its actions out, all of them or all but the first.

        The state and the actions change hands in one statement, so that an interrupt cannot come between them.
        """
        state, actions = advance(self._state, event)
        kept, handed = (actions[0], actions[1:]) if keep_first and actions else (None, actions)
        if handed and not self._threads:
            self._start_threads()
        self._state, self._to_start = state, self._to_start + handed
        if handed:
            self._called.notify(len(handed))
        return kept

    def _start_threads(self) -> None:
        """As many as asked for, or as many as there can be."""
        while len(self._threads) < self._size:
            name = f"store worker {len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if self._threads:
                    return
                raise StoreError(f"the store could not start a thread: {error}") from error
            self._threads.append(thread)

    def _starts_here(self, event: Asked) -> bool:
        number = self._count + 1
        _, actions = advance(self._state, event._replace(number=number, here=True))
        return any(isinstance(action, Move) and action.number == number for action in actions[:1])

    def _wait(self, holds: Callable[[], bool], event: Due | Asked | None) -> None:
        """Return when `holds()`, with the lock held again.

        Raises:
            StoreError: something failed, or it takes too long.
        """
        if self._failure is None and holds():
            return
        self._raise_failure()
        watcher = _Watcher(holds, threading.Condition(self._lock))
        self._watchers.append(watcher)
        begun_s = time.monotonic()
        try:
            with self.watch("wait"):
                watcher.called.wait_for(lambda: self._failure is not None or holds(), self._timeout_s)
        finally:
            self._watchers.remove(watcher)
            self._meter.waited(time.monotonic() - begun_s)
        self._raise_failure()
        if not holds():
            under_way = ", ".join(sorted(map(_words, self._state.running))) or "nothing"
            raise StoreError(f"waited {self._timeout_s:g} s for {_words(event)}; under way: {under_way}")

    def _refuse(self) -> None:
        self._raise_failure()
        if self._closed:
            raise StoreError("this store is closed")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            told, error = self._failure
            raise StoreError(told) from error


def _words(what: Action | Due | Asked | None) -> str:
    """An operation or an action, as messages name it."""
    match what:
        case Due(_, group) | Work(_, group):
            return f"the work on {group}"
        case Read(group):
            return f"the read of {group}"
        case Write(_, group):
            return f"the write of {group}"
        case Asked(_, page, writes) | Move(_, page, writes):
            return f"the {'write' if writes else 'read'} of page {page.kind} {page.number} of unit {page.unit}"
        case Copy(_, page):
            return f"the read of page {page.kind} {page.number} of unit {page.unit}"
    return "everything that was asked for"


class _Meter:
    """Bytes, and the wall time in which something was under way. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_s = time.monotonic()
        self._reads = self._writes = 0  # under way
        self._read_bytes = self._write_bytes = 0
        self._read_s = self._write_s = self._busy_s = self._wait_s = 0.0

    @contextmanager
    def moving(self, nbytes: int, writes: bool) -> Iterator[None]:
        """Around one read or write; its bytes count when it has ended well."""
        self._change(writes, +1, 0)
        moved = 0
        try:
            yield
            moved = nbytes
        finally:
            self._change(writes, -1, moved)

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._wait_s += seconds

    def read_off(self) -> Traffic:
        with self._lock:
            self._tick()
            return Traffic(self._read_bytes, self._write_bytes, self._read_s, self._write_s, self._busy_s, self._wait_s)

    def _change(self, writes: bool, by: int, nbytes: int) -> None:
        with self._lock:
            self._tick()
            if writes:
                self._writes += by
                self._write_bytes += nbytes
            else:
                self._reads += by
                self._read_bytes += nbytes

    def _tick(self) -> None:
        """Add the time since the last change to what was under way since then."""
        now_s = time.monotonic()
        passed_s, self._since_s = now_s - self._since_s, now_s
        if self._reads:
            self._read_s += passed_s
        if self._writes:
            self._write_s += passed_s
        if self._reads or self._writes:
            self._busy_s += passed_s
