"""Background threads that are stopped and joined before the interpreter exits, because they may call torch.

Python ends a daemon thread that requests the interpreter's lock (GIL) after the exit began by unwinding its stack. With
C++ frames of torch on the stack, that kills the process with SIGABRT. For threads that are not daemons, Python waits
without a limit and before exit handlers could stop them. So these threads are daemons, and an exit handler stops and
joins them.
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
"""Default limit of the exit handler's wait for a thread.

It is longer than a run waits for its outputs to close, and finite because a disk may hang.
"""


class BackgroundThread(threading.Thread):
    """A daemon thread that is stopped and joined when the interpreter exits.

    Args:
        work: the function that the thread runs.
        stop: makes `work` return soon; must not block, because the exiting thread calls it.
        limit_s: maximum seconds that the exit waits for the thread; 0: the exit does not wait.
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
            self.stop = lambda: None  # drops the reference to its object; Thread.run drops the one to `work`


class OneThread:
    """A reentrant lock that raises an error, and does not wait, if another thread or a forked process takes it.

    Args:
        name: name of the guarded object, for the message.
        undo: cleans up when an interrupt, such as Ctrl-C, leaves the outermost block.
    """

    def __init__(self, name: str, undo: Callable[[], object] = lambda: None) -> None:
        self._name, self._undo, self._lock, self._pid = name, undo, threading.RLock(), os.getpid()
        self._depth = 0

    def __enter__(self) -> None:
        """Take the lock.

        Raises:
            ConfigError: another thread holds the lock, or this process was forked from the one that made the lock.
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

        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._depth -= 1
        try:
            if not self._depth and kind is not None and not issubclass(kind, Exception):
                self._undo()
        finally:
            self._lock.release()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a SIGINT that arrives in the block until the end of the block.

    Use it for a change in several parts, which a KeyboardInterrupt in between would leave incomplete. In other threads
    than the main thread this does nothing, because Python handles signals in the main thread only.
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
    """Call `work` every `every_s` seconds in a daemon thread until the end of the block. `work` must not call torch."""
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
    """Stop and join all background threads when the interpreter exits; log a warning for each that takes too long."""
    begin_s, late = time.monotonic(), set[BackgroundThread]()
    while threads := [thread for thread in _at_work() if thread not in late]:  # a thread may start another one
        for thread in threads:
            thread.stop()
        for thread in threads:
            thread.join(max(0.0, begin_s + thread.limit_s - time.monotonic()))
        late |= {thread for thread in threads if thread.is_alive()}
    for thread in late:
        log.warning("the thread %r still runs %g s after the end of the script", thread.name, thread.limit_s)


def _at_work() -> list[BackgroundThread]:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, BackgroundThread)]
    return [thread for thread in threads if thread.is_alive() and thread.limit_s]


atexit.register(_end)  # registered early, so that a script's handlers run before it and may still use the threads
