"""Start the ranks of one run on this machine, again if one dies; say in one message which rank failed first, and why.

`launch` starts child processes through torch's elastic agent; `inside` runs the only rank in this process; `joined`
runs the rank as which torchrun started this process. What a rank prints goes to `ranks/<rank>.log`, except the stdout
of rank 0, which is the user's terminal.

The agent reports whichever dead child it sees first, and that may be a survivor that lost its connection. So a failing
rank leaves a dated note, then waits a moment for the death of another to be seen: the earliest note, or a
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

from zero.distributed.failure import Places
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
"""Exit codes of causes that another start would meet again: settings, environment, checkpoints, numbers; or a stop."""

_NOTE_S = 0.5  # for the death of another to be seen
_LATE_S = 2.0  # that the parent waits longer than a rank, whose message is more precise
_RESUME_S = 0.1


def restart_count() -> int:
    """How often the ranks of this run were started again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def count_ranks(ranks: int | Literal["auto"], device: str = "auto") -> int:
    """How many ranks `launch.ranks` means: one per GPU, or 1 on a CPU, when it is "auto".

    Under torchrun its world size. Imports torch only on a machine that has a GPU driver.

    Raises:
        ConfigError: torchrun has started another number.
    """
    if under_torchrun():
        started = int(os.environ["WORLD_SIZE"])
        if ranks not in ("auto", started):
            raise ConfigError(
                f"launch.ranks={ranks} contradicts torchrun, which has started {started} (WORLD_SIZE={started}); leave "
                "launch.ranks out, and give their number to torchrun"
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
    """Whether an agent outside started this process. RANK alone is no sign: some clusters number nodes with it."""
    return "LOCAL_RANK" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ


def tell_torchrun(text: str) -> bool:
    """Write `text` where torchrun looks for the error of this rank: its last lines show that in place of a link.

    Returns whether torchrun has set such a file.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        error = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": error}))
    return bool(path)


def inside(entry: Callable[..., Any], *args: Any, how: Processes) -> Any:
    """`entry(*args)` as the only rank, in this process, so that a debugger works. Errors pass through.

    Raises:
        Interrupted: it did not return in time after a request to stop, or a second SIGTERM came, or another signal
            that ends a run.
    """
    with ExitStack() as stack:
        is_main = threading.current_thread() is threading.main_thread()  # no other may set handlers
        if is_main:
            stack.enter_context(Request(how.grace_s).handling(*STOP_SIGNALS, *FATAL_SIGNALS))
        import_torch()
        stack.enter_context(set_up(how))
        log = stack.enter_context(_log(how.folder, f"rank 0 of 1, process {os.getpid()}"))
        if is_main:
            stack.enter_context(stacks_on_request(log))
        try:
            return entry(*args)
        except Exception:
            with suppress(OSError):  # the disk may be what failed
                traceback.print_exc(file=log)
            raise


def joined(entry: Callable[..., Any], *args: Any, how: Processes) -> Any:
    """`entry(*args)` as the rank that torchrun made of this process. Errors pass through.

    `threads="auto"` keeps the OMP_NUM_THREADS that torchrun sets. torchrun sends SIGTERM to all ranks when it is to
    stop, and also when one of them has failed: then the connection to that one breaks, and the error names it.

    Raises:
        Interrupted: it did not return in time after a request to stop, or SIGINT or a second SIGTERM came.
    """
    rank = int(os.environ["RANK"])
    log = how.folder / f"{rank}.log"
    with ExitStack() as stack:
        stack.enter_context(set_up(how))
        stack.enter_context(Request(how.grace_s).handling(*STOP_SIGNALS, signal.SIGINT))
        with writing(log):
            how.folder.mkdir(parents=True, exist_ok=True)
            again = restart_count()
            stack.enter_context(redirected(log, stdout=rank > 0, further=again > 0))
            of = f"of {os.environ['WORLD_SIZE']} on {socket.gethostname()}"
            _write_to_log(f"rank {rank} {of}, process {os.getpid()}{f', restart {again}' if again else ''}\n")
        stack.enter_context(stacks_on_request(2))
        if not faulthandler.is_enabled():  # whoever enabled it wants its crashes told as well
            faulthandler.enable()
            stack.callback(faulthandler.disable)
        with if_it_fails(_log_traceback):
            return entry(*args)


@contextmanager
def _log(folder: Path, first: str) -> Iterator[TextIO]:
    """The log of a rank that keeps its terminal. A full disk does not stop the run, and hides no error of it."""
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
    """Without the buffer of sys.stderr, which would keep what a full disk refuses and show it on the terminal later."""
    sys.stderr.flush()
    os.write(2, text.encode(errors="replace"))


def _log_traceback() -> None:
    with suppress(OSError):  # the disk may be what failed
        _write_to_log(traceback.format_exc())


class _Job(NamedTuple):
    """What every attempt at a run has in common."""

    entry: Callable[..., Any]
    args: tuple[Any, ...]
    ranks: int
    how: Processes
    agent_folder: Path
    board: Board
    max_restarts: int


def launch(entry: Callable[..., Any], *args: Any, ranks: int, how: Processes, max_restarts: int = 0) -> Any:
    """`entry(*args)` in each of `ranks` new processes; returns what rank 0 returned.

    Each finds torchrun's variables in its environment. All are gone when this returns or raises.

    SIGTERM or SIGUSR1 here, or at a rank, requests a stop. The agent does not see it: the handler here passes the
    request on to all ranks, and they end by returning. A rank that is signalled alone informs the others by `entry`'s
    own means, see `preempted`. A rank that is still being started has no handler, and dies. SIGUSR2 here makes every
    rank write its stacks into its log.

    Every attempt has an agent of its own that restarts nothing, since one that does would swallow the cause and try
    again whatever it was. So each failure comes here first: it is printed and all ranks start again, unless its exit
    code is one of `FINAL`, or a stop was requested.

    Args:
        entry: defined at the top of a module, like its arguments and result able to be pickled.
        how: the processes; the logs are of all attempts.
        max_restarts: how often all ranks are started again after a failure.

    Raises:
        RankFailedError: names the first rank that failed last and why; its `exit_code` is that of the cause.
        Interrupted: a second SIGTERM, SIGINT or another signal that ends a run arrived, or `entry` did not return in
            time.
    """
    with signals_waiting():
        from torch.distributed.elastic.multiprocessing.api import SignalException

    with writing(how.folder):
        how.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        agent_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zero-ranks-")))
        with _shared_memory():
            board = Board(ranks)
        job = _Job(entry, args, ranks, how, agent_folder, board, max_restarts)
        stack.enter_context(environ(environment(ranks, how)))
        # The agent's own error: it ends the children by this signal, which no rank handles, and passes the error on
        request = Request(
            how.grace_s + _LATE_S, board.request_stop, lambda stopped: SignalException(str(stopped), signal.SIGINT)
        )
        stack.enter_context(request.handling(*STOP_SIGNALS, *FATAL_SIGNALS, signal.SIGINT))
        stack.enter_context(stacks_of_ranks(board, how.folder))
        try:
            return _until_done(job, request)
        except SignalException:
            assert request.interrupted is not None
            raise request.interrupted from None


@contextmanager
def _shared_memory() -> Iterator[None]:
    """Raise MachineError where the board, or a lock such as torch's agent makes, cannot be in shared memory."""
    try:
        multiprocessing.get_context("spawn").Lock()
        yield
    except OSError as error:
        raise MachineError(
            f"/dev/shm cannot be written: {error.strerror}; free or mount shared memory there, in Docker with "
            "--shm-size=1g"
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
        """Once the run ends: the agent's signal does not reach a stopped rank, and it waits 30 s to kill it."""
        if request.interrupted is not None or job.board.has_trouble():
            job.board.resume()

    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        # joblib's loky, which a new interpreter looks up by name before it has imported joblib
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
        signals_to_handle="",  # all are ours
    )
    try:
        with (
            repeating(memory.read, EVERY_S, name="memory"),
            repeating(resume_stopped, _RESUME_S, name="resuming"),
            _quiet("torch.distributed", "torch.multiprocessing"),  # its loggers exist once it is imported
            left_to_others(signal.SIGINT),  # the threads of `repeating` take it
        ):
            return elastic_launch(config, _rank)(job, attempt)[0]
    except ChildFailedError as failed:
        rank, failure = min(failed.failures.items())
        if request.is_made and -failure.exitcode in STOP_SIGNALS:
            raise Interrupted(signal.SIGTERM, f"rank {rank} was still being started") from None
        raise _first_failure(rank, failure.exitcode, job.board.notes(), job.how.folder, memory.last) from None
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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # it has waited while we were being started
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # it died while we were being started
        os._exit(128 + signal.SIGINT)
    log = job.how.folder / f"{rank}.log"
    again = f", restart {attempt} of {job.max_restarts}" if attempt else ""
    try:
        with writing(log):
            redirect(log, stdout=rank > 0, further=attempt > 0)
            _write_to_log(f"rank {rank} of {os.environ['WORLD_SIZE']}, process {os.getpid()}{again}\n")
    except MachineError as error:
        raise SystemExit(job.board.leave_note(rank, error)) from None
    faulthandler.enable()
    Places.board = job.board
    request = RankRequest(job.board, rank, job.how.grace_s)
    try:
        result = job.entry(*job.args)
    except BaseException as error:
        sys.last_value = error  # for `Note.of_ending`: Python 3.14 no longer has it when a child's finalizers run
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
        likely, advice = "or by another process", "resume=latest goes on"
        if memory is None or memory.is_scarce:
            likely, advice = "most likely because host memory ran out", MEMORY_ADVICE
        why = f"was killed by the system (signal 9), {likely}; {f'{memory}; ' if memory else ''}{advice}"
    elif code < 0:
        why = f"died of {signal.Signals(-code).name} (signal {-code})"
    else:
        why = f"ended with exit code {code} and no message"
    return RankFailedError(f"rank {dead} {why} (log: {folder}/{dead}.log)")


@contextmanager
def _quiet(*prefixes: str) -> Iterator[None]:
    """Silence the agent's own report of a failure, which is sixty lines; ours is one. Each logger has its own level."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(prefixes)]
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
