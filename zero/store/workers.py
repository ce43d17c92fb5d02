"""The store's threads: workers that execute the actions of the schedule, and callers that wait for them.

One lock guards the schedule's state. It is never held during I/O or work, and no worker waits for another operation,
because the schedule returns only actions that can start. A worker that finishes an action gets its next action from the
same call, so that no other worker has to be woken.

After the first error every wait and every submission raises a StoreError with its text, because a page may be half
modified.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from zero.errors import StoreError
from zero.platform.threads import BackgroundThread, uninterrupted
from zero.store.base import Ticket
from zero.store.events import Action, Copy, Finished, Modify, Move, PageTransfer, Read, StoreEvent, Work, Write
from zero.store.executor import Executor
from zero.store.indexed_schedule import IndexedSchedule

IDLE_S = 1.0
"""Seconds after which an idle worker looks for work, in case an interrupt swallowed a wake-up."""


class _Ticket:
    """An operation in progress; `ended` is True when its work has run or its page has moved."""

    __slots__ = ("_workers", "ended", "event", "job")

    def __init__(self, workers: "WorkerPool", event: Modify | PageTransfer, job: Callable[..., None]) -> None:
        self.event, self.ended = event, False
        self.job: Callable[..., None] = job
        self._workers = workers

    def wait(self) -> None:
        self._workers.await_end(self)

    def end(self) -> None:
        self.drop()
        self.ended = True

    def drop(self) -> None:
        """Free the job and the tensors that it holds, because the ticket may be kept for longer."""
        self.job = _nothing


def _nothing(*_: Any) -> None:
    return None


class _Watcher(NamedTuple):
    """A caller that waits until `holds()`, which is checked after every action, and is woken only then."""

    holds: Callable[[], bool]
    called: threading.Condition


class WorkerPool:
    """The schedule's state, one lock around it, and the threads that execute its actions.

    Args:
        prepare: called once in each thread before its first action.
    """

    def __init__(
        self, executor: Executor, *, threads: int, read_ahead: int, timeout_s: float, prepare: Callable[[], None]
    ) -> None:
        self._schedule = IndexedSchedule(slots=len(executor.slots), workers=threads, read_ahead=read_ahead)
        self.executor, self._timeout_s, self._prepare = executor, timeout_s, prepare
        self._size = threads
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._called = threading.Condition(self._lock)  # where workers wait for an action
        self._to_start: deque[Action] = deque()
        self._tickets: dict[int, _Ticket] = {}
        self._watchers: list[_Watcher] = []
        self._count = 0
        self._closed = False
        self._failure: tuple[str, BaseException] | None = None

    # -- in the calling thread --

    def post(self, event: StoreEvent) -> None:
        """Process an event that has no ticket."""
        with self._lock, uninterrupted():
            self._refuse()
            self._advance(event)

    def submit(self, event: Modify | PageTransfer, job: Callable[..., None]) -> Ticket:
        """Submit a new operation, give it a number, and return its ticket."""
        with self._lock:
            self._refuse()
            with uninterrupted():
                self._count += 1
                event = event._replace(number=self._count)
                ticket = self._tickets[self._count] = _Ticket(self, event, job)
                self._advance(event)
        return ticket

    def do_here(self, event: PageTransfer, job: Callable[..., None]) -> None:
        """Execute a transfer in the calling thread, once every earlier operation on its page has ended."""
        move: Action | None = None
        try:
            with self._lock:
                self._refuse()
                self._wait(lambda: self._schedule.would_start(event), event)
                with uninterrupted():
                    self._count += 1
                    move = self._advance(event._replace(number=self._count, here=True), keep_first=True)
            with torch.no_grad():
                job()
        except Exception as error:
            if move is not None:
                self._fail(error, move)
            raise
        finally:
            if move is not None:
                with uninterrupted():
                    self._finish(move, keep_first=False)

    def check(self) -> None:
        """Raise StoreError if something has failed or the store is closed."""
        with self._lock:
            self._refuse()

    def await_end(self, ticket: _Ticket) -> None:
        if ticket.ended and self._failure is None:
            return
        with self._lock:
            self._wait(lambda: ticket.ended, ticket.event)

    def drain(self) -> None:
        with self._lock:
            self._refuse()
            self._wait(lambda: self._schedule.is_quiet, None)

    def leave(self) -> None:
        """Start no more actions and return when every thread has ended."""
        with self._lock:
            self._closed = True
            self._called.notify_all()
            unfinished = bool(self._tickets)
        if unfinished:
            self._fail(StoreError("this store was closed before all its operations had ended"), None)
        end_s = time.monotonic() + self._timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
            if thread.is_alive():
                raise StoreError(f"{thread.name}: not ended after {self._timeout_s:g} s, so the store stays open")
        self._threads.clear()

    # -- in worker threads --

    def _run(self) -> None:
        """Execute actions in a worker until the pool is closed or something failed."""
        action: Action | None = None
        try:
            self._prepare()
            with torch.no_grad():
                while (action := action or self._next()) is not None:
                    self.executor.carry_out(action, self._job_of(action))
                    action = self._finish(action, keep_first=True)
        except BaseException as error:
            self._fail(error, action)

    def _next(self) -> Action | None:
        with self._lock:
            while not self._is_over:
                if self._to_start:
                    return self._to_start.popleft()
                self._called.wait(IDLE_S)
        return None

    def _job_of(self, action: Action) -> Callable[..., None]:
        return self._tickets[action.number].job if isinstance(action, Work | Move | Copy) else _nothing

    def _finish(self, action: Action, *, keep_first: bool) -> Action | None:
        """Process the end of an action; with `keep_first` return the next action for this thread."""
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
        """Record the first error, drop all operations, and wake all waiting threads, which raise the error."""
        where = "a thread of the store" if action is None else _words(action)
        message = str(error) if isinstance(error, StoreError) else f"{where}: {type(error).__name__}: {error}"
        with self._lock:
            if self._failure is None:
                self._failure = (message, error)
            for ticket in self._tickets.values():
                ticket.drop()
            self._tickets.clear()
            self._wake_all()

    # -- with the lock held --

    @property
    def _is_over(self) -> bool:
        return self._closed or self._failure is not None

    def _advance(self, event: StoreEvent, *, keep_first: bool = False) -> Action | None:
        """Process an event and queue its actions; with `keep_first` return the first action instead of queueing it."""
        try:
            actions = self._schedule.advance(event)
            kept, handed = (actions[0], actions[1:]) if keep_first and actions else (None, actions)
            if handed and not self._threads:
                self._start_threads()
            self._to_start += handed
        except BaseException as error:  # also an interrupt, after which the state is unknown
            self._failure = self._failure or (f"the store's schedule failed: {type(error).__name__}", error)
            self._wake_all()
            raise
        if handed:
            self._called.notify(len(handed))
        return kept

    def _wake_all(self) -> None:
        self._called.notify_all()
        for watcher in self._watchers:
            watcher.called.notify()

    def _start_threads(self) -> None:
        ended = StoreError("the script ended with an open store. Close the store or destroy the engine first.")
        for number in range(self._size):
            thread = BackgroundThread(self._run, name=f"store worker {number}", stop=partial(self._fail, ended, None))
            thread.start()
            self._threads.append(thread)

    def _wait(self, holds: Callable[[], bool], event: Modify | PageTransfer | None) -> None:
        """Wait until `holds()` is true, and return with the lock held again.

        Raises:
            StoreError: something failed, or the wait took longer than the timeout.
        """
        if self._failure is None and holds():
            return
        self._raise_failure()
        watcher = _Watcher(holds, threading.Condition(self._lock))
        self._watchers.append(watcher)
        begun_s = time.monotonic()
        try:
            with self.executor.watch("wait"):
                watcher.called.wait_for(lambda: self._failure is not None or holds(), self._timeout_s)
        finally:
            self._watchers.remove(watcher)
            self.executor.meter.waited(time.monotonic() - begun_s)
        self._raise_failure()
        if not holds():
            under_way = ", ".join(sorted(map(_words, self._schedule.running))) or "nothing"
            raise StoreError(f"{_words(event)}: not ended after {self._timeout_s:g} s. Still running: {under_way}.")

    def _refuse(self) -> None:
        self._raise_failure()
        if self._closed:
            raise StoreError("this store is closed")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            message, error = self._failure
            raise StoreError(message) from error


def _words(action: Action | Modify | PageTransfer | None) -> str:
    """Return the name of an operation or an action for a message."""
    if action is None:
        return "all operations"
    if isinstance(action, Modify | Work):
        return f"the work on {action.group}"
    writes = isinstance(action, Write) or (isinstance(action, PageTransfer | Move) and action.writes)
    place = action.group if isinstance(action, Read | Write) else action.page
    return f"the {'write' if writes else 'read'} of {place}"
