"""Threads beside the training thread; the interpreter waits for them, so none ends inside torch.

A daemon that asks for the interpreter's lock after that has its stack unwound; where C++ is on it, the process dies
with SIGABRT. For a thread that is not a daemon Python waits without end, and before anybody could stop it. So these
are daemons which are asked to stop, and waited for, just before: what is under way ends, and nothing new begins.
"""

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zero.errors import ConfigError

log = logging.getLogger("zero")

LIMIT_S = 90.0
"""How long the end waits: longer than a view of the run is waited for as it closes, and not for ever for a disk."""


class Beside(threading.Thread):
    """A daemon that the end of the interpreter waits for.

    Args:
        work: what it does.
        stop: has `work` return soon; called by another thread, and returns at once.
        limit_s: how long the end waits for it. Who has given it up sets 0.
    """

    def __init__(
        self,
        work: Callable[[], None],
        *,
        name: str,
        stop: Callable[[], None] = lambda: None,
        limit_s: float = LIMIT_S,
    ) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self.stop, self.limit_s = stop, limit_s

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.stop = lambda: None  # as Python lets go of the work: whose thread this was may be gone


class OneThread:
    """A guard that one thread of one process holds at a time, any number of times. It raises an error and never waits.

    Args:
        name: the guarded object, for the message.
    """

    def __init__(self, name: str) -> None:
        self._name, self._lock, self._pid = name, threading.RLock(), os.getpid()

    def __enter__(self) -> None:
        """Take the guard.

        Raises:
            ConfigError: another thread holds the guard, or this process was forked from the one that made it.
        """
        if os.getpid() != self._pid:
            raise ConfigError(
                f"{self._name} belongs to the process that made it, and this process was forked from that one. Make "
                "another one here, or use the start method spawn."
            )
        if not self._lock.acquire(blocking=False):
            raise ConfigError(
                f"{self._name} belongs to one thread at a time, and another thread uses it now. Hold a lock around "
                "each use."
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let a SIGINT that arrives during the body take effect after it.

    Use it for a change of several steps that an exception would leave half made. Python handles signals in the main
    thread only.
    """
    if threading.get_ident() != threading.main_thread().ident:
        yield
        return
    arrived: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda signum, _: arrived.append(signum))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if handler is None else handler)
    if arrived:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def repeating(work: Callable[[], None], every_s: float, *, name: str) -> Iterator[None]:
    """While the body runs, a thread calls `work` every so often; it must not call torch."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every_s):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=10)


def _end() -> None:
    """A process that was forked has none of its parent's threads, and waits for none."""
    begin_s, late = time.monotonic(), set[Beside]()
    while threads := [one for one in _at_work() if one not in late]:  # one that ends may have begun another
        for one in threads:
            one.stop()
        for one in threads:
            one.join(max(0.0, begin_s + one.limit_s - time.monotonic()))
        late |= {one for one in threads if one.is_alive()}
    for one in late:
        log.warning("the thread %r is still at work %g s after the end of the script", one.name, one.limit_s)


def _at_work() -> list[Beside]:
    return [one for one in threading.enumerate() if isinstance(one, Beside) and one.is_alive() and one.limit_s]


atexit.register(_end)  # now: what a script registers later may still use the threads
