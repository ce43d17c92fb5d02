"""Starts the ranks of one run on this machine, and says in one message why a run ended badly.

`launch` starts child processes through torch's elastic agent; `inside` runs the only rank in this process; `joined`
runs the rank as which torchrun started this process. What a rank prints goes to `ranks/<rank>.log`, except the stdout
of rank 0, which is the user's terminal.

The agent reports whichever dead child it sees first, and that may be a survivor that lost its connection. So a failing
rank leaves a dated note, then waits a moment for the death of another to be seen: the earliest note, or a
death without a note, is the cause. Knows nothing of models; `entry` is any function that can be pickled.

SIGTERM and SIGUSR1 ask a run to stop: `preempted` says so to the rank, and `entry` has some time to return. The agent
ends its children with SIGTERM too, once one has failed. A rank tells the two apart by what the others have left on the
board, the folder where they tell each other that they live, and why they died.

SIGUSR2 makes a rank write where it is into its log: at once the stack of one thread, the main one as a rule, and those
of all as soon as a thread holds the interpreter's lock. Without the lock faulthandler reads stacks that are changing
under it, and a rank that was only asked where it is would die of that.
"""

import ctypes
import faulthandler
import json
import logging
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from zero.errors import DeadlineError, RankFailedError, ZeroError
from zero.failure import PLACES

if TYPE_CHECKING:
    from zero.watch import Reading

MEMORY_ADVICE = "mode=plan with the same settings shows which ones take less"

Malloc = Literal["raised", "lean", "default"]

THRESHOLDS: Mapping[Malloc, tuple[int, int]] = {"raised": (4 << 30, 16 << 30), "lean": (2 << 20, 16 << 20)}
"""Of glibc's malloc: bytes from which a tensor gets a mapping of its own, which goes back to the system when it is
freed; and free bytes at the heap's end from which they go back."""

MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
CUBLAS_WORKSPACE = ":4096:8"

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them

FINAL = (2, 3, 4, 6, 75)
"""Exit codes of what another start would only meet again: settings, environment, checkpoints, numbers; or did stop."""

GRACE_S = 30.0
"""How long `entry` has to return once it was asked to stop. torchrun waits as long, unless told otherwise."""

_ASKING = (signal.SIGTERM, signal.SIGUSR1)
_SECOND = "a second one came before the run had ended"

_NOTE_S = 0.5  # for the death of another to be seen
_LAST_WORDS_S = 1.0  # for a rank that fails in these moments too, and has a dashboard to tell
_LATE_S = 2.0  # that the parent waits longer than a rank, which has more to say
_TOGETHER_S = 1.0  # within which SIGTERMs are one: a scheduler signals every process, and an agent passes its own on
_PAUSE_S = 0.05


class Interrupted(BaseException):
    """A signal stopped the run at once. Like KeyboardInterrupt no Exception: nobody should go on after it."""

    def __init__(self, signum: int, why: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}" + (f": {why}" if why else ""))
        self.exit_code = 128 + signum
        self.why = why


def preempted() -> bool:
    """Whether this rank was asked to stop, by SIGTERM or SIGUSR1 to it or to the parent of `launch`.

    It then has `grace_s` to agree with the others, save, and return from `entry`.
    """
    handler = signal.getsignal(signal.SIGTERM)
    return isinstance(handler, _Request) and handler.is_made


def restart_count() -> int:
    """How often the ranks of this run were started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def count_ranks(asked: int | Literal["auto"]) -> int:
    """How many ranks `launch.ranks` means: one per GPU, or 1 on a CPU, when it is "auto".

    Under torchrun its world size. Imports torch only on a machine that has a GPU driver.
    """
    if under_torchrun():
        return int(os.environ["WORLD_SIZE"])
    if asked != "auto":
        return asked
    if not (Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists()):
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def under_torchrun() -> bool:
    """Whether an agent outside started this process. RANK alone is no sign: some clusters number nodes with it."""
    return "LOCAL_RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ


def tell_torchrun(text: str) -> bool:
    """Leave `text` where torchrun looks for what this rank died of: its last lines show that in place of a link.

    Returns whether it has said where it looks.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        told = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        Path(path).write_text(json.dumps(told))
    return bool(path)


def environment(
    ranks: int, threads: int | Literal["auto"], malloc: Malloc, deterministic: bool = False
) -> dict[str, str]:
    """Variables that child ranks are started with; what the user has set already stays.

    Page faults of freshly mapped tensors can cost more than an optimizer step. With both thresholds raised glibc keeps
    freed memory for the next tensor instead of giving it back, in pieces that do not always fit: several hundred MB
    may lie idle. Lean is the opposite: every large tensor goes back at once. Deterministic runs need cuBLAS's workspace
    fixed before its first product, or torch refuses it.
    """
    share = max(1, _cores() // ranks) if threads == "auto" else threads
    wanted = {"OMP_NUM_THREADS": str(share), "MKL_NUM_THREADS": str(share)}
    wanted |= dict(zip(MALLOC_VARIABLES, map(str, THRESHOLDS.get(malloc, ())), strict=False))
    if deterministic:
        wanted["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    own = {} if threads == "auto" else {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    return {name: value for name, value in wanted.items() if name in own or name not in os.environ}


def inside(
    entry: Callable[..., Any],
    *args: Any,
    folder: Path,
    threads: int | Literal["auto"] = "auto",
    malloc: Malloc = "raised",
    deterministic: bool = False,
    grace_s: float = GRACE_S,
) -> Any:
    """`entry(*args)` as the only rank, in this process, so that a debugger works. Errors pass through.

    Args:
        folder: receives `0.log`, with the traceback if there is one.
        grace_s: how long `entry` has to return after a first SIGTERM or SIGUSR1.

    Raises:
        Interrupted: it did not, or a second SIGTERM came.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_set_up(threads, malloc, deterministic))
        log = stack.enter_context((folder / "0.log").open("w"))
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            stack.enter_context(_Request(grace_s).heard_at(*_ASKING))
            stack.enter_context(_stacks_on_request(log))
        print(f"rank 0 of 1, process {os.getpid()}", file=log, flush=True)
        try:
            return entry(*args)
        except Exception:
            traceback.print_exc(file=log)
            raise


def joined(
    entry: Callable[..., Any],
    *args: Any,
    folder: Path,
    threads: int | Literal["auto"] = "auto",
    malloc: Malloc = "raised",
    deterministic: bool = False,
    grace_s: float = GRACE_S,
) -> Any:
    """`entry(*args)` as the rank that torchrun made of this process. Errors pass through.

    `threads="auto"` keeps the OMP_NUM_THREADS that torchrun sets. torchrun sends SIGTERM to all ranks when it is asked
    to stop, and also when one of them has failed: then the connection to that one breaks, and the error names it.

    Args:
        folder: receives `<rank>.log`, with the traceback if there is one.
        grace_s: how long `entry` has to return after a first SIGTERM or SIGUSR1.

    Raises:
        Interrupted: it did not, or SIGINT or a second SIGTERM came.
    """
    rank = int(os.environ["RANK"])
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_set_up(threads, malloc, deterministic))
        stack.enter_context(_Request(grace_s).heard_at(*_ASKING, signal.SIGINT))
        stack.enter_context(_redirected(folder / f"{rank}.log", stdout=rank > 0))
        stack.enter_context(_stacks_on_request(2))
        faulthandler.enable()
        stack.callback(faulthandler.disable)
        print(f"rank {rank} of {os.environ['WORLD_SIZE']}, process {os.getpid()}", file=sys.stderr, flush=True)
        try:
            return entry(*args)
        except BaseException:
            traceback.print_exc()
            raise


class _Request:
    """That this process is asked to stop: the handler of the signals that ask, and of the clock that then runs.

    Args:
        grace_s: from being asked to being interrupted.
        pass_on: called once, when asked.
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

    def hear(self, signum: int) -> bool:
        """Take note of a signal; returns whether it is another SIGTERM, which means at once."""
        now_s = time.monotonic()
        self._made_s = now_s if self._made_s is None else self._made_s
        if signum != signal.SIGTERM:
            return False
        self._term_s = now_s if self._term_s is None else self._term_s
        return now_s - self._term_s > _TOGETHER_S

    @contextmanager
    def heard_at(self, *signals: int) -> Iterator[None]:
        """For the time of the body, these signals come here."""
        with _signal_handlers_kept():
            for signum in (*signals, signal.SIGALRM):
                signal.signal(signum, self)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def __call__(self, signum: int, _: object) -> None:
        if signum in _ASKING:
            is_first = not self.is_made
            if not self.hear(signum):
                if is_first:
                    signal.setitimer(signal.ITIMER_REAL, self._grace_s)
                    self._pass_on()
                return
            self.interrupted = Interrupted(signal.SIGTERM, _SECOND)
        elif signum == signal.SIGALRM:
            self.interrupted = Interrupted(signal.SIGTERM, self._late("the run"))
        else:
            self.interrupted = Interrupted(signum)
        for further in (*_ASKING, signal.SIGINT, signal.SIGALRM):
            signal.signal(further, signal.SIG_IGN)  # a terminal and torchrun both send one
        raise self._wrap(self.interrupted)

    def _late(self, who: str) -> str:
        return f"{who} had not ended {self._grace_s:g} s after it was asked to; raise launch.grace"


class _RankRequest(_Request):
    """The same in a rank that `launch` started, where the agent's SIGTERM has to end us even inside a collective.

    There the main thread runs no handler; so the signals wake a thread. A SIGTERM after another rank has failed is the
    agent's. No other way to tell: the agent cannot be made to send another signal, nor Python to say who sent one.
    """

    def __init__(self, board: "_Board", rank: int, grace_s: float) -> None:
        super().__init__(grace_s)
        self._board, self._rank = board, rank
        self._has_returned = False
        self._ear, mouth = os.pipe()
        os.set_blocking(mouth, False)
        signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        for signum in (*_ASKING, signal.SIGUSR2):
            signal.signal(signum, self)
        faulthandler.register(signal.SIGUSR2, all_threads=False, chain=True)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        board.announce(rank)
        if board.is_asked():  # before we could be told
            os.kill(os.getpid(), signal.SIGUSR1)

    def __call__(self, signum: int, _: object) -> None:
        """The thread hears it. Without a handler, there would be nothing to hear."""

    def returned(self) -> None:
        """Nothing is left to stop: only the failure of another rank ends us now."""
        self._has_returned = True
        self._board.withdraw(self._rank)

    def _listen(self) -> None:
        while True:
            ready, _, _ = select.select([self._ear], [], [], _PAUSE_S if self.is_made else None)
            for signum in os.read(self._ear, 64) if ready else b"":
                if signum == signal.SIGUSR2:
                    faulthandler.dump_traceback()
                elif signum in _ASKING and self.hear(signum) and not self._has_returned:
                    self._end(_SECOND)
            if self.is_made and self._board.has_trouble():
                time.sleep(_LAST_WORDS_S)
                os._exit(128 + signal.SIGTERM)
            if self.is_late and not self._has_returned:
                self._end(self._late(f"rank {self._rank}"))

    def _end(self, why: str) -> None:
        error = Interrupted(signal.SIGTERM, why)
        os.write(2, f"{error}\n".encode())
        faulthandler.dump_traceback()
        self._board.leave_note(self._rank, error)
        os._exit(error.exit_code)


@dataclass(frozen=True)
class _Board:
    """The folder through which the parent and its ranks tell each other that they live, and why they died."""

    path: Path

    def ask(self) -> None:
        """Ask every rank to stop, those too that have not started yet."""
        (self.path / "asked").touch()
        self._send(signal.SIGUSR1)  # of which any number is one request

    def is_asked(self) -> bool:
        return (self.path / "asked").exists()

    def announce(self, rank: int) -> None:
        self._write(f"{rank}.pid", str(os.getpid()))

    def withdraw(self, rank: int) -> None:
        (self.path / f"{rank}.pid").unlink()

    def ask_for_stacks(self) -> None:
        """A rank that somebody has stopped is woken: it could neither answer nor end, other than by SIGKILL."""
        self._send(signal.SIGUSR2)
        self._send(signal.SIGCONT)

    def leave_note(self, rank: int, error: BaseException) -> int:
        """Say why this rank ends; returns its exit code."""
        exit_code = getattr(error, "exit_code", 1)
        note = {
            "time_ns": time.monotonic_ns(),
            "rank": rank,
            "cause": describe(error),
            "why": getattr(error, "why", ""),
            "stacks": isinstance(error, DeadlineError),
            "follows": isinstance(error, RankFailedError),
            "exit_code": exit_code,
        }
        self._write(f"{rank}.note", json.dumps(note))
        return int(exit_code)

    def notes(self) -> list[Mapping[str, Any]]:
        """Causes before what followed from them, the earliest first."""
        notes = [json.loads(path.read_text()) for path in self.path.glob("*.note")]
        return sorted(notes, key=lambda note: (note["follows"], note["time_ns"]))

    def has_trouble(self) -> bool:
        """Whether a rank has said that it ends, or is gone without a word."""
        return any(self.path.glob("*.note")) or not self._send(0)

    def clear(self) -> None:
        """For another attempt. A request to stop stays."""
        for name in ("*.note", "*.pid", "*.place"):
            for path in self.path.glob(name):
                path.unlink()

    def _send(self, signum: int) -> bool:
        """To every rank that has announced itself; returns whether all of them live."""
        all_live = True
        for path in self.path.glob("*.pid"):
            with suppress(FileNotFoundError):  # it has just withdrawn
                pid = int(path.read_text())
                try:
                    os.kill(pid, signum)
                except ProcessLookupError:
                    all_live = False
        return all_live

    def _write(self, name: str, text: str) -> None:
        unfinished = self.path / f"{name}.unfinished"
        unfinished.write_text(text)
        unfinished.rename(self.path / name)


@dataclass(frozen=True)
class _Job:
    """What every attempt at a run has in common."""

    entry: Callable[..., Any]
    args: tuple[Any, ...]
    ranks: int
    folder: Path
    board: _Board
    grace_s: float
    max_restarts: int


def launch(
    entry: Callable[..., Any],
    *args: Any,
    ranks: int,
    folder: Path,
    threads: int | Literal["auto"] = "auto",
    malloc: Malloc = "raised",
    deterministic: bool = False,
    grace_s: float = GRACE_S,
    max_restarts: int = 0,
) -> Any:
    """`entry(*args)` in each of `ranks` new processes; returns what rank 0 returned.

    Each finds torchrun's variables in its environment. All are gone when this returns or raises.

    SIGTERM or SIGUSR1 here, or at a rank, asks to stop. The agent never hears of it: the handler is ours, it passes the
    request on to all ranks, and they end by returning. A rank that is signalled alone tells the others by `entry`'s own
    means, see `preempted`. A rank that is still being started has no handler, and dies.

    Every attempt has an agent of its own that restarts nothing, since one that does would swallow the cause and try
    again whatever it was. So each failure comes here first: it is printed and all ranks start again, unless its exit
    code is one of `FINAL`, or the run was asked to stop.

    Args:
        entry: defined at the top of a module, like its arguments and result able to be pickled.
        folder: receives `<rank>.log`, of all attempts.
        grace_s: how long `entry` has to return once asked to stop.
        max_restarts: how often all ranks are started again after a failure.

    Raises:
        RankFailedError: names the first rank that failed last and why; its `exit_code` is that of the cause.
        Interrupted: SIGINT or a second SIGTERM arrived, or `entry` did not return in time.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException

    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        board = _Board(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zero-ranks-"))))
        job = _Job(entry, args, ranks, folder, board, grace_s, max_restarts)
        variables = environment(ranks, threads, malloc, deterministic) | {PLACES: str(board.path)}
        stack.enter_context(_environ(variables))
        # What the agent knows: end the children by this signal, which no rank handles, and pass the error on
        request = _Request(grace_s + _LATE_S, board.ask, lambda stopped: SignalException(str(stopped), signal.SIGINT))
        stack.enter_context(request.heard_at(*_ASKING))
        for attempt in range(max_restarts + 1):
            try:
                return _attempt(job, attempt, request)
            except RankFailedError as failed:
                if attempt == max_restarts or failed.exit_code in FINAL or request.is_made:
                    raise
                print(f"restart {attempt + 1} of {max_restarts}: {failed}", file=sys.stderr, flush=True)
            board.clear()
    raise AssertionError("the last attempt returns or raises")


def _attempt(job: _Job, attempt: int, request: _Request) -> Any:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from zero.watch import MemoryWatch

    memory = MemoryWatch()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.ranks,
        max_restarts=0,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        start_method="spawn",
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(job.board.path)),
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # the others are ours
    )
    try:
        with memory, _quiet("torch.distributed", "torch.multiprocessing"):  # its loggers exist once it is imported
            return elastic_launch(config, _rank)(job, attempt)[0]
    except SignalException as stopped:
        raise request.interrupted or Interrupted(stopped.sigval) from None
    except ChildFailedError as failed:
        rank, failure = min(failed.failures.items())
        if request.is_made and -failure.exitcode in _ASKING:
            raise Interrupted(signal.SIGTERM, f"rank {rank} was still being started") from None
        raise _first_failure(rank, failure.exitcode, job.board.notes(), job.folder, memory.last) from None
    finally:
        if sys.stdout.isatty():
            print("\x1b[?25h", end="", flush=True)  # a rank that died inside its progress bar left no cursor


def _rank(job: _Job, attempt: int) -> Any:
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(job.max_restarts)
    # Interrupted, the agent ends its children with SIGINT, and the kernel sends it when the agent dies: it ends us at
    # once, even inside a collective, where a Python handler would not run
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it died while we were being started
        os._exit(128 + signal.SIGINT)
    _redirect(job.folder / f"{rank}.log", stdout=rank > 0, further=attempt > 0)
    faulthandler.enable()
    request = _RankRequest(job.board, rank, job.grace_s)
    again = f", restart {attempt} of {job.max_restarts}" if attempt else ""
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}, process {os.getpid()}{again}", file=sys.stderr, flush=True)
    try:
        result = job.entry(*job.args)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        if isinstance(error, DeadlineError):
            job.board.ask_for_stacks()
        exit_code = job.board.leave_note(rank, error)
        time.sleep(_NOTE_S)
        raise SystemExit(exit_code) from None
    request.returned()
    return result


def describe(error: BaseException) -> str:
    """One line: the class unless it is one of ours, the message, and advice where memory ran out."""
    if isinstance(error, KeyboardInterrupt):
        error = Interrupted(signal.SIGINT)
    text = " ".join(str(error).split()) or "no message"
    if not isinstance(error, ZeroError | Interrupted):
        text = f"{type(error).__name__}: {text}"
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text:
        text = f"{text}; {MEMORY_ADVICE}"
    return text


def _first_failure(
    dead: int, code: int, notes: list[Mapping[str, Any]], folder: Path, memory: "Reading | None" = None
) -> RankFailedError | Interrupted:
    """Choose between the child that the agent found dead and the notes that ranks left, the earliest first."""
    if code == -signal.SIGINT:
        return Interrupted(signal.SIGINT)
    if notes and (code >= 0 or dead in {note["rank"] for note in notes}):
        first = notes[0]
        where = f"(log: {folder}/{first['rank']}.log{', stacks in the log of each' if first.get('stacks') else ''})"
        if first["exit_code"] == 128 + signal.SIGTERM:
            return Interrupted(signal.SIGTERM, f"{first['why']} {where}")
        error = RankFailedError(f"rank {first['rank']} failed: {first['cause']} {where}")
        error.exit_code = first["exit_code"]
        return error
    if code == -signal.SIGKILL:
        likely = "most likely because host memory ran out" if memory is None or memory.is_scarce else "or by somebody"
        advice = MEMORY_ADVICE if memory is None or memory.is_scarce else "resume=latest goes on"
        why = f"was killed by the system (signal 9), {likely}; {f'{memory}; ' if memory else ''}{advice}"
    elif code < 0:
        why = f"died of {signal.Signals(-code).name} (signal {-code})"
    else:
        why = f"ended with exit code {code} and no message"
    return RankFailedError(f"rank {dead} {why} (log: {folder}/{dead}.log)")


def _redirect(path: Path, *, stdout: bool, further: bool = False) -> None:
    """Send file descriptor 2, and 1 if asked, to `path`, or to its end: what native code prints goes there too."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if further else os.O_TRUNC), 0o644)
    for descriptor in (1, 2) if stdout else (2,):
        os.dup2(log, descriptor)
    os.close(log)


@contextmanager
def _redirected(path: Path, *, stdout: bool) -> Iterator[None]:
    """`_redirect` for the time of the body."""
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    _redirect(path, stdout=stdout)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in kept.items():
            os.dup2(copy, descriptor)
            os.close(copy)


@contextmanager
def _set_up(threads: int | Literal["auto"], malloc: Malloc, deterministic: bool) -> Iterator[None]:
    """What `environment` does for children, for a process that already runs."""
    _set_thresholds(THRESHOLDS.get(malloc, ()))
    if threads != "auto":
        import torch

        torch.set_num_threads(threads)
    fixed = deterministic and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with _environ({"CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACE} if fixed else {}):
        yield


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _set_thresholds(wanted: Sequence[int]) -> None:
    """Nothing where malloc is not glibc's, or the user has set them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or set(MALLOC_VARIABLES) & os.environ.keys():
        return
    for parameter, nbytes in zip((M_MMAP_THRESHOLD, M_TRIM_THRESHOLD), wanted, strict=False):
        mallopt(parameter, min(nbytes, 2**31 - 1))  # it takes an int


@contextmanager
def _environ(changes: Mapping[str, str]) -> Iterator[None]:
    """Children read these when their interpreter starts, so they have to be in this process first."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _quiet(*prefixes: str) -> Iterator[None]:
    """The agent's own account of a failure is sixty lines; ours is one. Its loggers have a level each."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _stacks_on_request(log: TextIO | int) -> Iterator[None]:
    """SIGUSR2 writes to `log` where this process is; all stacks once the main thread runs Python again."""
    before = signal.signal(signal.SIGUSR2, lambda *_: faulthandler.dump_traceback(log))
    faulthandler.register(signal.SIGUSR2, file=log, all_threads=False, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, before)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """The agent installs handlers and leaves them behind."""
    caught = (*_ASKING, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)
    before = {signum: signal.getsignal(signum) for signum in caught}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
