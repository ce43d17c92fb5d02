"""Signals that request a run to stop, or to write where it is.

SIGTERM and SIGUSR1 request a stop: then `preempted` is true in the rank, and `entry` has some time to return. torch's
elastic agent also ends its children with SIGTERM, once one has failed. A rank tells the two apart by the notes that
others have left on the board.

Every other signal that ends a run does so at once, and the message names it.

SIGUSR2 makes a rank write its stacks into its log: at once the stack of one thread, the main one as a rule, and those
of all as soon as a thread holds the interpreter's lock. Without the lock faulthandler reads stacks that are changing
under it, and the rank could crash of that. The parent passes the signal on to all ranks.
"""

import faulthandler
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
"""A terminal that is closed, its Ctrl-\\, and a limit on CPU time. SIGINT is left to Python unless a caller adds it."""

SECOND = "a second one came before the run had ended"

TOGETHER_S = 1.0
"""Within which SIGTERMs are one: a scheduler signals every process, and an agent passes its own on."""

_CLOSING_S = 1.0  # for a rank that fails in these moments too, and has a dashboard to close
_PAUSE_S = 0.05


def preempted() -> bool:
    """Whether a stop of this rank was requested, by SIGTERM or SIGUSR1 to it or to the parent of `launch`.

    It then has `grace_s` to agree with the others, save, and return from `entry`.
    """
    handler = signal.getsignal(signal.SIGTERM)
    return isinstance(handler, Request) and handler.is_made


class Request:
    """A request to this process to stop: the handler of its signals, and of the clock that then runs.

    Args:
        grace_s: from the request to the interruption.
        pass_on: called once, at the request.
        wrap: what to raise for an interruption.
    """

    def __init__(
        self,
        grace_s: float,
        pass_on: Callable[[], None] = lambda: None,
        wrap: Callable[[Interrupted], BaseException] = lambda stopped: stopped,
    ) -> None:
        self._grace_s, self._pass_on, self._wrap = grace_s, pass_on, wrap
        self._made_s: float | None = None
        self._term_s: float | None = None
        self.interrupted: Interrupted | None = None

    @property
    def is_made(self) -> bool:
        return self._made_s is not None

    @property
    def is_late(self) -> bool:
        return self._made_s is not None and time.monotonic() > self._made_s + self._grace_s

    def record(self, signum: int) -> bool:
        """Record a stop signal; returns whether it is another SIGTERM, which means at once."""
        now_s = time.monotonic()
        self._made_s = now_s if self._made_s is None else self._made_s
        if signum != signal.SIGTERM:
            return False
        self._term_s = now_s if self._term_s is None else self._term_s
        return now_s - self._term_s > TOGETHER_S

    @contextmanager
    def handling(self, *signals: int) -> Iterator[None]:
        """For the time of the body, handle these signals."""
        with _signal_handlers_kept():
            for signum in (*signals, signal.SIGALRM):
                if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # which nohup sets
                    signal.signal(signum, self)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def __call__(self, signum: int, _: object) -> None:
        if signum in STOP_SIGNALS:
            is_first = not self.is_made
            if not self.record(signum):
                if is_first:
                    signal.setitimer(signal.ITIMER_REAL, self._grace_s)
                    self._pass_on()
                return
            self.interrupted = Interrupted(signal.SIGTERM, SECOND)
        elif signum == signal.SIGALRM and self.is_late:
            self.interrupted = Interrupted(signal.SIGTERM, self._late("the run"))
        else:
            self.interrupted = Interrupted(signum)
        for further in (*STOP_SIGNALS, *FATAL_SIGNALS, signal.SIGINT, signal.SIGALRM):
            signal.signal(further, signal.SIG_IGN)  # a terminal and torchrun both send one
        raise self._wrap(self.interrupted)

    def _late(self, who: str) -> str:
        return f"{who} had not ended {self._grace_s:g} s after it was asked to; raise launch.grace"


class RankRequest(Request):
    """The same in a rank that `launch` started, where the agent's SIGTERM has to end us even inside a collective.

    There the main thread runs no handler, so the signals wake a thread. A SIGTERM after another rank has failed is the
    agent's. There is no other way to know: the agent can send no other signal, and Python does not say who sent one.
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
        board.announce(rank)
        if board.stop_requested:  # before this handler was set
            os.kill(os.getpid(), signal.SIGUSR1)

    def __call__(self, signum: int, _: object) -> None:
        """The thread acts on it: without a handler the wakeup descriptor gets nothing."""

    def returned(self) -> None:
        """Nothing is left to stop: only the failure of another rank ends us now."""
        self._has_returned = True
        self._board.withdraw(self._rank)

    def _watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._signals_fd], [], [], _PAUSE_S if self.is_made else None)
            for signum in os.read(self._signals_fd, 64) if ready else b"":
                if signum == signal.SIGUSR2:
                    faulthandler.dump_traceback()
                elif signum in STOP_SIGNALS and self.record(signum) and not self._has_returned:
                    self._end(SECOND)
            if self.is_made and self._board.has_trouble():
                time.sleep(_CLOSING_S)
                os._exit(128 + signal.SIGTERM)
            if self.is_late and not self._has_returned:
                self._end(self._late(f"rank {self._rank}"))

    def _end(self, why: str) -> None:
        error = Interrupted(signal.SIGTERM, why)
        os.write(2, f"{error}\n".encode())
        faulthandler.dump_traceback()
        self._board.leave_note(self._rank, error)
        os._exit(error.exit_code)


@contextmanager
def stacks_on_request(log: TextIO | int) -> Iterator[None]:
    """SIGUSR2 writes to `log` where this process is; all stacks once the main thread runs Python again."""
    before = signal.signal(signal.SIGUSR2, lambda *_: faulthandler.dump_traceback(log))
    faulthandler.register(signal.SIGUSR2, file=log, all_threads=False, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, before)


@contextmanager
def stacks_of_ranks(board: Board, folder: Path) -> Iterator[None]:
    """The same in their parent: SIGUSR2 reaches all of them, and the run goes on."""

    def pass_on(*_: object) -> None:
        board.request_stacks()
        os.write(2, f"SIGUSR2: each rank writes where it is into {folder}/<rank>.log\n".encode())

    with _signal_handlers_kept():
        signal.signal(signal.SIGUSR2, pass_on)
        yield


@contextmanager
def signals_waiting() -> Iterator[None]:
    """For the time of the body the signals that end a run wait: they are raised after it, in their order.

    Only the main thread has signals to handle.
    """
    came: list[int] = []
    ending = (signal.SIGINT, *STOP_SIGNALS, *FATAL_SIGNALS, signal.SIGALRM)
    with _handled(lambda number, _: came.append(number), *ending):
        yield
    for number in came:
        signal.raise_signal(number)


def import_torch() -> None:
    """Import torch while signals wait.

    An exception in the middle of it would leave a part that cannot be imported again, and on which Python's end
    crashes; and numpy, which torch imports, would swallow a KeyboardInterrupt.
    """
    with signals_waiting():
        import torch  # noqa: F401


def no_further_sigint() -> AbstractContextManager[None]:
    """For the time of the body, in which a run that Ctrl-C has stopped says so: a second one changes nothing."""
    return _handled(signal.SIG_IGN, signal.SIGINT)


@contextmanager
def _handled(handler: Callable[[int, Any], Any] | signal.Handlers, *signals: int) -> Iterator[None]:
    """For the time of the body these signals have this handler, where it is Python in this thread that handles them."""
    is_main = threading.current_thread() is threading.main_thread()
    ours = [signum for signum in signals if is_main and signal.getsignal(signum) is not None]
    before = {signum: signal.signal(signum, handler) for signum in ours}
    try:
        yield
    finally:
        for signum, kept in reversed(before.items()):
            signal.signal(signum, kept)


@contextmanager
def left_to_others(signum: int) -> Iterator[None]:
    """For the time of the body this thread leaves a signal to other threads; in a process that it starts it waits.

    Python's own handler would show the traceback of a process that is only starting. That process unblocks the signal.
    """
    resource_tracker.ensure_running()  # starting it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signum})
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
