"""Starts the ranks of one run on this machine, and says in one message why a run ended badly.

`launch` starts child processes through torch's elastic agent, never restarted; `inside` runs the only rank in this
process; `joined` runs the rank as which torchrun started this process. What a rank prints goes to `ranks/<rank>.log`,
except the stdout of rank 0, which is the user's terminal.

The agent reports whichever dead child it sees first, and that may be a survivor that lost its connection. So a failing
rank leaves a dated note, then waits a moment for the death of another to be seen: the earliest note, or a
death without a note, is the cause. Knows nothing of models; `entry` is any function that can be pickled.
"""

import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import psutil

from zero.errors import RankFailedError, ZeroError

MEMORY_ADVICE = "lower batch.micro or model.seq, set zero.activations=remat, or raise zero.stage or launch.ranks"

Malloc = Literal["raised", "lean", "default"]

THRESHOLDS: Mapping[Malloc, tuple[int, int]] = {"raised": (4 << 30, 16 << 30), "lean": (2 << 20, 16 << 20)}
"""Of glibc's malloc: bytes from which a tensor gets a mapping of its own, which goes back to the system when it is
freed; and free bytes at the heap's end from which they go back."""

MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
CUBLAS_WORKSPACE = ":4096:8"

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them

NOT_AGAIN = (2, 3, 4, 6)
"""Exit codes of failures that would only happen again: settings, environment, checkpoint and store, numerics."""

_GRACE_S = 0.5

_asked_to_stop = False  # of this process: handlers and whoever asks share it


class Interrupted(BaseException):
    """The run was told to stop by a signal. Like KeyboardInterrupt no Exception: nobody should go on after it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


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


def preempted() -> bool:
    """This rank was asked to stop, by SIGTERM or SIGUSR1: to save, and to return before `grace_s` is over."""
    return _asked_to_stop


def restart_count() -> int:
    """How often all ranks have been started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def inside(
    entry: Callable[..., Any],
    *args: Any,
    folder: Path,
    threads: int | Literal["auto"] = "auto",
    malloc: Malloc = "raised",
    deterministic: bool = False,
    grace_s: float = 30.0,
) -> Any:
    """`entry(*args)` as the only rank, in this process, so that a debugger works. Errors pass through.

    Args:
        folder: receives `0.log`, with the traceback if there is one.
        grace_s: how long `entry` may go on after a signal has asked it to stop.

    Raises:
        Interrupted: it went on for longer, or was asked again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_set_up(threads, malloc, deterministic))
        log = stack.enter_context((folder / "0.log").open("w"))
        stack.enter_context(_asking_to_stop(grace_s, then=_stop))
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
    grace_s: float = 30.0,
) -> Any:
    """`entry(*args)` as the rank that torchrun made of this process. Errors pass through.

    `threads="auto"` keeps the OMP_NUM_THREADS that torchrun sets.

    Args:
        folder: receives `<rank>.log`, with the traceback if there is one.
        grace_s: how long `entry` may go on after a signal has asked it to stop; torchrun itself waits for 30 s.

    Raises:
        Interrupted: it went on for longer, or was asked again.
    """
    rank = int(os.environ["RANK"])
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_set_up(threads, malloc, deterministic))
        # torchrun sends SIGTERM when it is to stop, and also when another rank has failed: then our connection to
        # that one breaks, and the error names it
        stack.enter_context(_asking_to_stop(grace_s, then=_stop))
        signal.signal(signal.SIGINT, _stop)
        stack.enter_context(_redirected(folder / f"{rank}.log", stdout=rank > 0))
        faulthandler.enable()
        stack.callback(faulthandler.disable)
        print(f"rank {rank} of {os.environ['WORLD_SIZE']}, process {os.getpid()}", file=sys.stderr, flush=True)
        try:
            return entry(*args)
        except BaseException:
            traceback.print_exc()
            raise


@contextmanager
def _asking_to_stop(
    grace_s: float, then: Callable[[int, Any], None], *, is_over: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """The first SIGTERM or SIGUSR1 asks. A second SIGTERM, and the end of the grace, are `then`; so is every SIGTERM
    where `is_over`.
    """
    global _asked_to_stop
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears signals
        return

    def ask(signum: int, frame: Any) -> None:
        global _asked_to_stop
        if signum == signal.SIGTERM and (_asked_to_stop or is_over()):
            then(signum, frame)
        if not _asked_to_stop:
            _asked_to_stop = True
            signal.setitimer(signal.ITIMER_REAL, grace_s)

    with _signal_handlers_kept():
        for signum, handler in ((signal.SIGTERM, ask), (signal.SIGUSR1, ask), (signal.SIGALRM, then)):
            signal.signal(signum, handler)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            _asked_to_stop = False


def _stop(signum: int, _: object) -> None:
    for further in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(further, signal.SIG_IGN)  # a terminal and torchrun both send one
    raise Interrupted(signal.SIGTERM if signum == signal.SIGALRM else signum)


def _die(signum: int, _: object) -> None:
    """Of this signal."""
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def launch(
    entry: Callable[..., Any],
    *args: Any,
    ranks: int,
    folder: Path,
    threads: int | Literal["auto"] = "auto",
    malloc: Malloc = "raised",
    deterministic: bool = False,
    max_restarts: int = 0,
    grace_s: float = 30.0,
) -> Any:
    """`entry(*args)` in each of `ranks` new processes; returns what rank 0 returned.

    Each finds torchrun's variables in its environment. All are gone when this returns or raises.

    A SIGTERM or SIGUSR1 that arrives here, or at one of the ranks, asks them to stop: see `preempted`. They are not
    ended for it before `grace_s`, and what they return is returned.

    Args:
        entry: defined at the top of a module, like its arguments and result able to be pickled.
        folder: receives `<rank>.log`.
        max_restarts: how often all ranks are started again when one has failed. Not when it failed for a reason that
            would still be there, see `NOT_AGAIN`: such a rank returns its failure as a value, and the others, which
            lose it, do likewise.
        grace_s: how long ranks may go on after they were asked to stop.

    Raises:
        RankFailedError: names the first rank that failed and why; its `exit_code` is that of the cause.
        Interrupted: SIGINT, or a second SIGTERM, arrived here.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        notes = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zero-ranks-")))
        stack.enter_context(_environ(environment(ranks, threads, malloc, deterministic)))
        stack.enter_context(_quiet("torch.distributed", "torch.multiprocessing"))
        stack.enter_context(_signal_handlers_kept())
        _pass_on_requests_to_stop()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            max_restarts=max_restarts,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            start_method="spawn",
            monitor_interval=0.1,
            signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # SIGTERM and SIGUSR1 are ours
            logs_specs=DefaultLogsSpecs(log_dir=str(notes)),
        )
        try:
            returned = elastic_launch(config, _rank)(entry, args, folder, notes, max_restarts, grace_s)
            if any(isinstance(value, _Failed) for value in returned.values()):
                raise _first_failure(0, 1, _read_notes(notes), folder, grace_s)
            return returned[0]
        except SignalException as stopped:
            raise Interrupted(stopped.sigval) from None
        except ChildFailedError as failed:
            rank, failure = min(failed.failures.items())
            if failure.exitcode == -signal.SIGINT:
                raise Interrupted(signal.SIGINT) from None
            raise _first_failure(rank, failure.exitcode, _read_notes(notes), folder, grace_s) from None
        finally:
            if sys.stdout.isatty():
                print("\x1b[?25h", end="", flush=True)  # a rank that died inside its progress bar left no cursor


def _pass_on_requests_to_stop() -> None:
    """The first SIGTERM or SIGUSR1 goes to the ranks as SIGUSR1; a second SIGTERM ends them."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    asked: list[int] = []

    def ask(signum: int, _: object) -> None:
        if asked and signum == signal.SIGTERM:
            raise SignalException(f"process {os.getpid()} was told to stop twice", signal.Signals(signum))
        asked.append(signum)
        for child in psutil.Process().children():
            # Python's own child, which counts shared resources, ignores SIGTERM but not SIGUSR1
            if "resource_tracker" not in " ".join(child.cmdline()):
                child.send_signal(signal.SIGUSR1)

    if threading.current_thread() is threading.main_thread():
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, ask)


class _Failed:
    """What a rank returns whose failure must not be tried again."""


def _rank(
    entry: Callable[..., Any], args: tuple[Any, ...], folder: Path, notes: Path, max_restarts: int, grace_s: float
) -> Any:
    rank = int(os.environ["RANK"])
    # The kernel sends SIGINT when the agent dies: it ends us at once, even inside a collective, where a Python handler
    # would not run. So does the end of the grace.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if rank == 0 and restart_count():
        print(f"restart {restart_count()} of {max_restarts}: {_last_words(notes)}", file=sys.stderr, flush=True)
    _redirect(folder / f"{rank}.log", stdout=rank > 0, anew=not restart_count())
    faulthandler.enable()
    print(f"rank {rank} of {os.environ['WORLD_SIZE']}, process {os.getpid()}", file=sys.stderr, flush=True)
    # The agent sends SIGTERM too, when another rank has failed: then that one has left a note
    with _asking_to_stop(grace_s, then=_die, is_over=lambda: any(notes.glob(f"*.{restart_count()}.note"))):
        try:
            return entry(*args)
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            _leave_note(notes, rank, error)
            time.sleep(_GRACE_S)
            if max_restarts and any(note["exit_code"] in NOT_AGAIN for note in _read_notes(notes)):
                return _Failed()
            raise SystemExit(getattr(error, "exit_code", 1)) from None


def _leave_note(notes: Path, rank: int, error: BaseException) -> None:
    note = {
        "time_ns": time.monotonic_ns(),
        "start": restart_count(),
        "rank": rank,
        "cause": describe(error),
        "exit_code": getattr(error, "exit_code", 1),
    }
    unfinished = notes / f"{rank}.{restart_count()}.unfinished"
    unfinished.write_text(json.dumps(note))
    unfinished.rename(notes / f"{rank}.{restart_count()}.note")


def _last_words(notes: Path) -> str:
    """Why the last start failed, as far as a rank could say it."""
    left = _read_notes(notes)
    return f"rank {left[0]['rank']} failed: {left[0]['cause']}" if left else "a rank died without a word"


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


def _read_notes(notes: Path) -> list[Mapping[str, Any]]:
    """Those of the last start that left any, the earliest first."""
    found = [json.loads(path.read_text()) for path in notes.glob("*.note")]
    last = max((note["start"] for note in found), default=0)
    return sorted((note for note in found if note["start"] == last), key=lambda note: note["time_ns"])


def _first_failure(
    dead: int, code: int, notes: list[Mapping[str, Any]], folder: Path, grace_s: float = 30.0
) -> RankFailedError:
    """Choose between the child that the agent found dead and the notes that ranks left, the earliest first."""
    if notes and (code >= 0 or dead in {note["rank"] for note in notes}):
        first = notes[0]
        error = RankFailedError(f"rank {first['rank']} failed: {first['cause']} (log: {folder}/{first['rank']}.log)")
        error.exit_code = first["exit_code"]
        return error
    if code == -signal.SIGKILL:
        why = f"was killed by the system (signal 9), most likely because host memory ran out; {MEMORY_ADVICE}"
    elif code == -signal.SIGALRM:
        why = f"was asked to stop and had not ended after launch.grace={grace_s:g} s; give it more, or save less often"
    elif code < 0:
        why = f"died of {signal.Signals(-code).name} (signal {-code})"
    else:
        why = f"ended with exit code {code} and no message"
    error = RankFailedError(f"rank {dead} {why} (log: {folder}/{dead}.log)")
    error.exit_code = 128 + signal.SIGTERM if code == -signal.SIGALRM else error.exit_code
    return error


def _redirect(path: Path, *, stdout: bool, anew: bool = True) -> None:
    """Send file descriptor 2, and 1 if asked, to `path`: what native code prints goes there too."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if anew else os.O_APPEND), 0o644)
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
def _signal_handlers_kept() -> Iterator[None]:
    """The agent installs handlers and leaves them behind."""
    caught = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGUSR1)
    before = {signum: signal.getsignal(signum) for signum in caught}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
