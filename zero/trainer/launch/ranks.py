"""Start the ranks of a run on this machine, restart them after a failure, and name the rank that failed first.

`launch` starts child processes through torch's elastic agent; `inside` runs the only rank in this process; `joined`
runs the rank as which torchrun started this process. What a rank prints goes to `ranks/<rank>.log`, except the stdout
of rank 0, which is the user's terminal.

The agent reports whichever dead child it sees first, and that may be a survivor that lost its connection. So a failing
rank leaves a dated note, then waits a moment so that the agent sees the death of another: the earliest note, or a
death without a note, is the cause. Nothing here depends on models; `entry` is any function that can be pickled.
"""

import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TextIO

from zero.distributed.failure import Notes
from zero.errors import ConfigError, DeadlineError, MachineError, RankFailedError, if_it_fails
from zero.platform.run_files import writing
from zero.platform.threads import repeating
from zero.trainer.launch.board import Board
from zero.trainer.launch.ending import MEMORY_ADVICE, Interrupted
from zero.trainer.launch.process import Processes, environ, environment, redirect, redirected, set_up
from zero.trainer.launch.request import (
    FATAL_SIGNALS,
    STOP_SIGNALS,
    RankRequest,
    Request,
    import_torch,
    left_to_others,
    signals_waiting,
    stacks_of_ranks,
    stacks_on_request,
)

if TYPE_CHECKING:
    from zero.platform.memory_watch import Reading

FINAL = (2, 3, 4, 6, 75)
"""Exit codes that another start would meet again: settings, environment, checkpoints, numbers; or a stop."""

_NOTE_S = 0.5  # the agent needs so long to see the death of another rank
_LATE_S = 2.0  # the parent waits longer than a rank by this, because the rank's message is more precise
_RESUME_S = 0.1


def restart_count() -> int:
    """Return how often the ranks of this run were started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def count_ranks(ranks: int | Literal["auto"], device: str = "auto") -> int:
    """Return the number of ranks: for "auto" torchrun's, or one per GPU, or 1 on a CPU.

    Imports torch only on a machine that has a GPU driver.

    Raises:
        ConfigError: torchrun has started another number.
    """
    if under_torchrun():
        started = int(os.environ["WORLD_SIZE"])
        if ranks not in ("auto", started):
            raise ConfigError(
                f"launch.ranks={ranks} contradicts torchrun, which has started {started} ranks. Leave it out."
            )
        return started
    if ranks != "auto":
        return ranks
    if device == "cpu" or not (Path("/proc/driver/nvidia/version").exists() or Path("/dev/kfd").exists()):
        return 1
    with signals_waiting():
        import torch

    return max(1, torch.cuda.device_count())


def under_torchrun() -> bool:
    """Return whether torchrun started this process. RANK alone does not tell: some clusters number nodes with it."""
    return "LOCAL_RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ


def tell_torchrun(text: str) -> bool:
    """Write `text` to torchrun's error file of this rank, if it has set one; returns whether it has."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        error = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": error}))
    return bool(path)


def inside(entry: Callable[..., Any], *args: Any, processes: Processes) -> Any:
    """Call `entry(*args)` as the only rank, in this process, so that a debugger works. Errors pass through.

    Raises:
        Interrupted: `entry` did not return in time after a request to stop, or a second SIGTERM or another signal
            that ends a run came.
    """
    with ExitStack() as stack:
        is_main = threading.current_thread() is threading.main_thread()  # others may not set handlers
        if is_main:
            stack.enter_context(Request(processes.grace_s).handling(*STOP_SIGNALS, *FATAL_SIGNALS))
        import_torch()
        stack.enter_context(set_up(processes))
        log = stack.enter_context(_log(processes.folder, f"rank 0 of 1, process {os.getpid()}"))
        if is_main:
            stack.enter_context(stacks_on_request(log))
        try:
            return entry(*args)
        except Exception:
            with suppress(OSError):  # the disk may be what failed
                traceback.print_exc(file=log)
            raise


def joined(entry: Callable[..., Any], *args: Any, processes: Processes) -> Any:
    """Call `entry(*args)` as the rank that torchrun made of this process. Errors pass through.

    `threads="auto"` keeps the OMP_NUM_THREADS that torchrun sets. torchrun sends SIGTERM to all ranks when it is to
    stop, and also when one of them has failed: then the connection to that one breaks, and the error names it.

    Raises:
        Interrupted: `entry` did not return in time after a request to stop, or SIGINT or a second SIGTERM came.
    """
    rank = int(os.environ["RANK"])
    log = processes.folder / f"{rank}.log"
    with ExitStack() as stack:
        stack.enter_context(set_up(processes))
        stack.enter_context(Request(processes.grace_s).handling(*STOP_SIGNALS, signal.SIGINT))
        with writing(log):
            processes.folder.mkdir(parents=True, exist_ok=True)
            again = restart_count()
            stack.enter_context(redirected(log, stdout=rank > 0, further=again > 0))
            of = f"of {os.environ['WORLD_SIZE']} on {socket.gethostname()}"
            _write_to_log(f"rank {rank} {of}, process {os.getpid()}{f', restart {again}' if again else ''}\n")
        stack.enter_context(stacks_on_request(2))
        if not faulthandler.is_enabled():
            faulthandler.enable()
            stack.callback(faulthandler.disable)
        with if_it_fails(_log_traceback):
            return entry(*args)


@contextmanager
def _log(folder: Path, first: str) -> Iterator[TextIO]:
    """Open the log of a rank that keeps its terminal. A full disk neither stops the run nor hides its errors."""
    path = folder / "0.log"
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        log = path.open("w")
    try:
        with writing(path):
            print(first, file=log, flush=True)
        yield log
    finally:
        with suppress(OSError):
            log.close()


def _write_to_log(text: str) -> None:
    """Write past the buffer of sys.stderr, which would show on the terminal later what a full disk rejects now."""
    sys.stderr.flush()
    os.write(2, text.encode(errors="replace"))


def _log_traceback() -> None:
    with suppress(OSError):  # the disk may be what failed
        _write_to_log(traceback.format_exc())


class _Job(NamedTuple):
    """The arguments of every attempt at a run."""

    entry: Callable[..., Any]
    args: tuple[Any, ...]
    ranks: int
    processes: Processes
    agent_folder: Path
    board: Board
    max_restarts: int


def launch(entry: Callable[..., Any], *args: Any, ranks: int, processes: Processes, max_restarts: int = 0) -> Any:
    """Call `entry(*args)` in each of `ranks` new processes; returns the result of rank 0.

    Each has torchrun's variables in its environment. All have ended when this returns or raises.

    SIGTERM or SIGUSR1 here, or at a rank, requests a stop. The agent does not see it: the handler here passes the
    request on to all ranks, and they end by returning. A rank that is signalled alone informs the others by `entry`'s
    own means, see `preempted`. A rank that is still being started has no handler, and dies. SIGUSR2 here makes every
    rank write its stacks into its log.

    Every attempt has its own agent that restarts nothing, because torch's restarts swallow the cause and repeat any.
    Each failure is printed here, and all ranks start again unless its exit code is in `FINAL` or a stop was requested.

    Args:
        entry: a function at the top of a module; its arguments and result can be pickled.
        processes: set-up of the processes; their logs are of all attempts.
        max_restarts: starts of all ranks after a failure.

    Raises:
        RankFailedError: the first rank that failed in the last attempt, and why; its `exit_code` is that of the cause.
        Interrupted: a second SIGTERM, SIGINT or another signal that ends a run came, or `entry` did not return in time.
    """
    with signals_waiting():
        from torch.distributed.elastic.multiprocessing.api import SignalException

    with writing(processes.folder):
        processes.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        agent_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zero-ranks-")))
        with _shared_memory():
            board = Board(ranks)
        job = _Job(entry, args, ranks, processes, agent_folder, board, max_restarts)
        stack.enter_context(environ(environment(ranks, processes)))
        # the agent ends the children by SIGINT, which no rank handles, and passes its own error on
        request = Request(
            processes.grace_s + _LATE_S,
            board.request_stop,
            lambda stopped: SignalException(str(stopped), signal.SIGINT),
        )
        stack.enter_context(request.handling(*STOP_SIGNALS, *FATAL_SIGNALS, signal.SIGINT))
        stack.enter_context(stacks_of_ranks(board, processes.folder))
        try:
            return _until_done(job, request)
        except SignalException:
            assert request.interrupted is not None
            raise request.interrupted from None


@contextmanager
def _shared_memory() -> Iterator[None]:
    """Raise MachineError if the board, or a lock such as torch's agent makes, cannot be in shared memory."""
    try:
        multiprocessing.get_context("spawn").Lock()
        yield
    except OSError as error:
        raise MachineError(
            f"/dev/shm cannot be written: {error.strerror}. Mount shared memory there, in Docker with --shm-size=1g."
        ) from error


def _until_done(job: _Job, request: Request) -> Any:
    for attempt in range(job.max_restarts + 1):
        try:
            return _attempt(job, attempt, request)
        except RankFailedError as failed:
            if attempt == job.max_restarts or failed.exit_code in FINAL or request.is_made:
                raise
            print(f"restart {attempt + 1} of {job.max_restarts}: {failed}", file=sys.stderr, flush=True)
        job.board.clear()
    raise AssertionError("the last attempt returns or raises")


def _attempt(job: _Job, attempt: int, request: Request) -> Any:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from zero.platform.memory_watch import EVERY_S, MemoryWatch

    def resume_stopped() -> None:
        """Let stopped ranks go on once the run ends: the agent's signal does not reach them for 30 s."""
        if request.interrupted is not None or job.board.has_trouble():
            job.board.resume()

    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        # joblib sets loky, which a new interpreter does not know before it has imported joblib
        multiprocessing.set_start_method("spawn", force=True)
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
        logs_specs=DefaultLogsSpecs(log_dir=str(job.agent_folder)),
        signals_to_handle="",  # `Request` handles them
    )
    try:
        with (
            repeating(memory.read, EVERY_S, name="memory"),
            repeating(resume_stopped, _RESUME_S, name="resuming"),
            _logging_off(),
            left_to_others(signal.SIGINT),  # to the threads of `repeating`
        ):
            return elastic_launch(config, _rank)(job, attempt)[0]
    except ChildFailedError as failed:
        rank, failure = min(failed.failures.items())
        if request.is_made and -failure.exitcode in STOP_SIGNALS:
            raise Interrupted(signal.SIGTERM, f"rank {rank} was still being started") from None
        raise _first_failure(rank, failure.exitcode, job.board.notes(), job.processes.folder, memory.last) from None
    finally:
        if sys.stdout.isatty():
            print("\x1b[?25h", end="", flush=True)  # a rank that died inside its progress bar has hidden the cursor


def _rank(job: _Job, attempt: int) -> Any:
    rank = int(os.environ["RANK"])
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(job.max_restarts)
    # The agent ends its children with SIGINT, and the kernel sends it when the agent dies. The default action ends this
    # process at once, even inside a collective, where a Python handler would not run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked during the start
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it died during the start
        os._exit(128 + signal.SIGINT)
    log = job.processes.folder / f"{rank}.log"
    again = f", restart {attempt} of {job.max_restarts}" if attempt else ""
    try:
        with writing(log):
            redirect(log, stdout=rank > 0, further=attempt > 0)
            _write_to_log(f"rank {rank} of {os.environ['WORLD_SIZE']}, process {os.getpid()}{again}\n")
    except MachineError as error:
        raise SystemExit(job.board.leave_note(rank, error)) from None
    faulthandler.enable()
    Notes.board = job.board
    request = RankRequest(job.board, rank, job.processes.grace_s)
    try:
        result = job.entry(*job.args)
    except BaseException as error:
        sys.last_value = error  # for `Note.of_ending`: in Python 3.14 a child's finalizers no longer have it
        _log_traceback()
        if isinstance(error, DeadlineError):
            job.board.request_stacks()
            job.board.resume()
        exit_code = job.board.leave_note(rank, error)
        time.sleep(_NOTE_S)
        raise SystemExit(exit_code) from None
    request.returned()
    return result


def _first_failure(
    dead: int, code: int, notes: list[Mapping[str, Any]], folder: Path, memory: "Reading | None" = None
) -> RankFailedError | Interrupted:
    """Choose between the child that the agent saw die first and the notes of ranks, which are sorted by time."""
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
        likely, advice = "or by another process", "continue with resume=latest"
        if memory is None or memory.is_scarce:
            likely, advice = "most likely because host memory ran out", MEMORY_ADVICE
        why = f"was killed by the system (signal 9), {likely}; {f'{memory}; ' if memory else ''}{advice}"
    elif code < 0:
        why = f"died of {signal.Signals(-code).name} (signal {-code})"
    else:
        why = f"ended with exit code {code} and no message"
    return RankFailedError(f"rank {dead} {why} (log: {folder}/{dead}.log)")


@contextmanager
def _logging_off() -> Iterator[None]:
    """Silence the agent's report of a failure, which has sixty lines."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(before)
