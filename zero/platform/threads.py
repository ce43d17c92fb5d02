"""Threads beside the training thread; the interpreter waits for them, so none ends inside torch.

Python unwinds the stack of a daemon that asks for the interpreter's lock after the end; with C++ on the stack the
process dies with SIGABRT. For other threads Python waits without a limit, before anything could stop them. So these
threads are daemons that an exit handler asks to stop and waits for.
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
"""Seconds that the end waits: longer than a run waits for a view to close, and not for ever for a disk."""


class Beside(threading.Thread):
    """A daemon that the end of the interpreter waits for.

    Args:
        work: the function that it runs.
        stop: makes `work` return soon; called by another thread, and returns at once.
        limit_s: seconds that the end waits for it; 0 once it is given up.
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
            self.stop = lambda: None  # free the owner, as Python frees `work`


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
    """Call `work`, which must not call torch, every `every_s` seconds in a thread while the body runs."""
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
    """Stop all threads and wait for them. A forked process has none of its parent's threads."""
    begin_s, late = time.monotonic(), set[Beside]()
    while threads := [thread for thread in _at_work() if thread not in late]:  # a thread may start another at its end
        for thread in threads:
            thread.stop()
        for thread in threads:
            thread.join(max(0.0, begin_s + thread.limit_s - time.monotonic()))
        late |= {thread for thread in threads if thread.is_alive()}
    for thread in late:
        log.warning("the thread %r is still at work %g s after the end of the script", thread.name, thread.limit_s)


def _at_work() -> list[Beside]:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, Beside)]
    return [thread for thread in threads if thread.is_alive() and thread.limit_s]


atexit.register(_end)  # handlers that a script registers later run first and may use the threads
