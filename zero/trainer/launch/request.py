"""Handlers of signals that request a run to stop, or its ranks to write their stacks.

SIGTERM and SIGUSR1 request a stop: `preempted` then returns true in the rank, and `entry` has `grace_s` seconds to
return. After `save_on_sigint` a first SIGINT requests a stop too, without a limit of time.

Every other signal that ends a run ends it immediately, and the message names the signal.

SIGUSR2 makes a rank write stacks into its log: immediately the stack of one thread, usually the main thread, and the
stacks of all threads as soon as a thread holds the interpreter lock (GIL). Without the lock faulthandler would read
stacks that change, and the rank could crash. The parent passes SIGUSR2 on to all ranks.
"""

import faulthandler
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TextIO

from zero.trainer.launch.board import Board
from zero.trainer.launch.ending import Interrupted

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
FATAL_SIGNALS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
"""Signals of a closed terminal, of Ctrl-\\, and of a limit on CPU time. SIGINT is left to Python unless a caller
adds it."""

_PAUSE_S = 0.05
_SAVING = b"\nCtrl-C: the run finishes this step and saves. Press Ctrl-C again to end it at once.\n"


def preempted() -> bool:
    """Return whether a signal to this rank or to the parent that called `launch` requested a stop.

    The rank then agrees with the other ranks, saves, and returns from `entry`.
    """
    request = _installed()
    return request is not None and request.is_made


def save_on_sigint(*, announces: bool) -> None:
    """Let a first SIGINT request a stop from now on, if this process handles requests; a second one ends the run.

    Args:
        announces: print a line when it arrives.
    """
    if (request := _installed()) is not None:
        request.accept_sigint(announces=announces)


def _installed() -> "Request | None":
    handler = signal.getsignal(signal.SIGTERM)
    return handler if isinstance(handler, Request) else None


class Request:
    """A request to this process to stop. The object handles the signals, and the timer that SIGTERM starts.

    Args:
        grace_s: seconds between SIGTERM or SIGUSR1 and the end.
        pass_on: called with the first signal of a request.
        accepts_sigint: whether a first SIGINT is a request.
    """

    def __init__(
        self, grace_s: float, pass_on: Callable[[int], None] = lambda _: None, *, accepts_sigint: bool = False
    ) -> None:
        self._grace_s, self._pass_on, self._accepts_sigint = grace_s, pass_on, accepts_sigint
        self._announces, self._deadline_s = False, math.inf
        self.signum: int | None = None
        """The signal that requested the stop; None: no request."""

    @property
    def is_made(self) -> bool:
        return self.signum is not None

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._deadline_s

    def make(self, signum: int) -> bool:
        """Record a request. Returns whether it differs from the last, because a scheduler may signal every process."""
        limited = signum in STOP_SIGNALS and self._deadline_s == math.inf
        if self.is_made and not limited:
            return False
        self.signum = signum
        if limited:
            self._deadline_s = time.monotonic() + self._grace_s
        elif self._announces:
            os.write(1, _SAVING)  # a signal may arrive while stdout's buffer is being written; stderr may be a log
        return True

    def accept_sigint(self, *, announces: bool) -> None:
        """Let a first SIGINT request a stop from now on; `announces`: print a line then."""
        self._accepts_sigint, self._announces = True, announces
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self)

    @contextmanager
    def handling(self, *signals: int) -> Iterator[None]:
        """Install this object as the handler of `signals` and of the timer during the body."""
        with _signal_handlers_kept():
            for signum in (*signals, signal.SIGALRM):
                if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # as set by nohup
                    signal.signal(signum, self)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def __call__(self, signum: int, _: object) -> None:
        if signum in STOP_SIGNALS:
            if self.make(signum):
                signal.setitimer(signal.ITIMER_REAL, self._grace_s)
                self._pass_on(signum)
            return
        if signum == signal.SIGINT and self._accepts_sigint and not self.is_made:
            self.make(signum)
            self._pass_on(signum)
            return
        is_late = signum == signal.SIGALRM and self.is_late
        interrupted = Interrupted(signal.SIGTERM, self._late("the run")) if is_late else Interrupted(signum)
        for further in (*STOP_SIGNALS, *FATAL_SIGNALS, signal.SIGINT, signal.SIGALRM):
            signal.signal(further, signal.SIG_IGN)  # a terminal and torchrun may both send a signal
        raise interrupted

    def _late(self, name: str) -> str:
        return f"{name} had not ended {self._grace_s:g} s after the request to stop. Raise launch.grace"


class RankRequest(Request):
    """A request to a rank that `launch` started. The rank must end in time even if it is inside a collective.

    Inside a collective the main thread runs no Python handler, so the signals wake a thread.
    """

    def __init__(self, board: Board, rank: int, grace_s: float) -> None:
        super().__init__(grace_s)
        self._board, self._rank = board, rank
        self._has_returned = False
        self._signals_fd, wakeup_fd = os.pipe()
        os.set_blocking(wakeup_fd, False)
        signal.set_wakeup_fd(wakeup_fd, warn_on_full_buffer=False)
        for signum in (*STOP_SIGNALS, signal.SIGUSR2):
            signal.signal(signum, self)
        faulthandler.register(signal.SIGUSR2, all_threads=False, chain=True)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGUSR2))  # blocked during the start

    def __call__(self, signum: int, _: object) -> None:
        """Do nothing, because the thread acts. Without a handler Python would not write to the wakeup descriptor."""

    def returned(self) -> None:
        """Record that `entry` has returned, so that a request does not end the rank any more."""
        self._has_returned = True

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._signals_fd], [], [], _PAUSE_S if self.is_made else None)
            for signum in os.read(self._signals_fd, 64) if ready else b"":
                if signum == signal.SIGUSR2:
                    faulthandler.dump_traceback()
                else:
                    self.make(signum)
            if self.is_late and not self._has_returned:
                self._end()

    def _end(self) -> None:
        error = Interrupted(signal.SIGTERM, self._late(f"rank {self._rank}"))
        os.write(2, f"{error}\n".encode())
        faulthandler.dump_traceback()
        self._board.leave_note(self._rank, error)
        os._exit(error.exit_code)


@contextmanager
def stacks_on_request(log: TextIO | int) -> Iterator[None]:
    """Write stacks to `log` on SIGUSR2 during the body.

    The stack of one thread is written immediately, those of all threads when the main thread runs Python code again.
    """
    before = signal.signal(signal.SIGUSR2, lambda *_: faulthandler.dump_traceback(log))
    faulthandler.register(signal.SIGUSR2, file=log, all_threads=False, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, before)


@contextmanager
def stacks_of_ranks(send: Callable[[int], None], folder: Path) -> Iterator[None]:
    """Pass SIGUSR2 on from the parent to all ranks during the body."""

    def pass_on(*_: object) -> None:
        send(signal.SIGUSR2)
        os.write(2, f"SIGUSR2: each rank writes its stacks into {folder}/<rank>.log\n".encode())

    with _signal_handlers_kept():
        signal.signal(signal.SIGUSR2, pass_on)
        yield


@contextmanager
def signals_waiting() -> Iterator[None]:
    """Hold back the signals that end a run during the body, and raise them after it in their order.

    Has no effect outside the main thread, because only the main thread handles signals.
    """
    waiting: list[int] = []
    ending = (signal.SIGINT, *STOP_SIGNALS, *FATAL_SIGNALS, signal.SIGALRM)
    with _handled(lambda number, _: waiting.append(number), *ending):
        yield
    for number in waiting:
        signal.raise_signal(number)


def import_torch() -> None:
    """Import torch while signals are held back.

    An exception during the import would leave a part of torch that cannot be imported again and that crashes the
    interpreter when it exits. And numpy, which torch imports, would swallow a KeyboardInterrupt.
    """
    with signals_waiting():
        import torch  # noqa: F401


def no_further_sigint() -> AbstractContextManager[None]:
    """Ignore SIGINT during the body, in which a first Ctrl-C is reported."""
    return _handled(signal.SIG_IGN, signal.SIGINT)


@contextmanager
def _handled(handler: Callable[[int, Any], Any] | signal.Handlers, *signals: int) -> Iterator[None]:
    """Install `handler` for `signals` during the body, if this is the main thread and Python handles them."""
    is_main = threading.current_thread() is threading.main_thread()
    ours = [signum for signum in signals if is_main and signal.getsignal(signum) is not None]
    before = {signum: signal.signal(signum, handler) for signum in ours}
    try:
        yield
    finally:
        for signum, kept in reversed(before.items()):
            signal.signal(signum, kept)


@contextmanager
def blocked(*signals: int) -> Iterator[None]:
    """Block signals in this thread, and in the processes that it starts, during the body.

    A starting process has only Python's own handlers, which would print a traceback. The process unblocks the signals
    itself when its handlers are installed.
    """
    resource_tracker.ensure_running()  # started before the block, because its start unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    caught = (*STOP_SIGNALS, *FATAL_SIGNALS, signal.SIGINT, signal.SIGALRM, signal.SIGUSR2)
    before = {signum: signal.getsignal(signum) for signum in caught}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
