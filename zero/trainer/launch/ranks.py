"""Start and restart of a run's ranks on this machine, and the choice of the rank that failed first.

Each child process writes its output to `ranks/<rank>.log`, except that the stdout of rank 0 stays on the terminal.

The child that ends first is not always the cause: it may have lost its connection to the rank that failed. So a failing
rank leaves a note with the time, and after a failure the parent waits half a second for other ranks to end. The cause
is a child that a signal killed before it could leave a note; otherwise it is the rank with the earliest note. Nothing
here depends on models: `entry` is any function that can be pickled.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zero.distributed.failure import Notes
from zero.errors import DeadlineError, MachineError, RankFailedError
from zero.platform.run_files import writing
from zero.platform.threads import repeating
from zero.trainer.launch.board import Board
from zero.trainer.launch.ending import MEMORY_ADVICE, Interrupted
from zero.trainer.launch.process import ProcessSettings, environ, environment, log_traceback, redirect, write_to_log
from zero.trainer.launch.request import (
    FATAL_SIGNALS,
    STOP_SIGNALS,
    RankRequest,
    Request,
    blocked,
    signals_waiting,
    stacks_of_ranks,
)

if TYPE_CHECKING:
    from zero.platform.memory_watch import Reading

FINAL = (2, 3, 4, 6, 75)
"""Exit codes after which ranks are not restarted: errors of settings, environment, checkpoints and numbers, which
would occur again, and a requested stop."""

_PASSED_ON: Mapping[int, int] = {**dict.fromkeys(STOP_SIGNALS, signal.SIGUSR1), signal.SIGINT: signal.SIGINT}
_NOTE_S = 0.5  # seconds to wait after a failure, because the cause may be a rank that ends a little later
_LATE_S = 2.0  # seconds by which the parent waits longer than a rank, because the rank's message is more precise
_PR_SET_PDEATHSIG = 1  # as prctl.h numbers it


class _Job(NamedTuple):
    """The arguments that all attempts at a run share."""

    entry: Callable[..., Any]
    args: tuple[Any, ...]
    ranks: int
    port: int
    processes: ProcessSettings
    board: Board
    max_restarts: int


def launch(entry: Callable[..., Any], *args: Any, ranks: int, processes: ProcessSettings, max_restarts: int = 0) -> Any:
    """Call `entry(*args)` in each of `ranks` new processes; returns the result of rank 0.

    The environment of each process has torchrun's variables, such as RANK, WORLD_SIZE and MASTER_PORT. All processes
    have ended when this function returns or raises.

    SIGTERM or SIGUSR1 to this process requests a stop. The handler passes the request on to all ranks, and each rank
    ends by returning from `entry`. If only one rank gets the signal, `entry` must inform the other ranks, see
    `preempted`. SIGUSR2 to this process makes every rank write the stacks of its threads into its log.

    After a failure all ranks start again and the failure is printed, unless `max_restarts` is reached, the exit code is
    in `FINAL`, or a stop was requested.

    Args:
        entry: a function at the top level of a module; its arguments and result can be pickled.
        processes: set-up of the processes; restarted ranks append to their logs.
        max_restarts: how often all ranks are started again after a failure.

    Raises:
        RankFailedError: names the first rank that failed in the last attempt, and why; has the `exit_code` of the
            cause.
        Interrupted: SIGINT or a signal in `FATAL_SIGNALS` arrived, or `entry` did not return in time after a request to
            stop.
    """
    with signals_waiting():
        from zero.distributed.rendezvous import local_store

    with writing(processes.folder):
        processes.folder.mkdir(parents=True, exist_ok=True)
    store = local_store()  # in the parent, because any rank may die
    try:
        board = Board(ranks)
    except OSError as error:
        raise MachineError(f"/dev/shm cannot be written: {error.strerror}. Mount shared memory there.") from None
    job = _Job(entry, args, ranks, store.port, processes, board, max_restarts)
    children: list[BaseProcess] = []
    send = partial(_send, children)
    # A rank that cannot save yet ends at SIGINT, so the parent passes it on and waits. The ranks know no SIGTERM.
    request = Request(processes.grace_s + _LATE_S, lambda signum: send(_PASSED_ON[signum]), accepts_sigint=True)
    with (
        environ(environment(ranks, processes)),
        request.handling(*STOP_SIGNALS, *FATAL_SIGNALS, signal.SIGINT),
        stacks_of_ranks(send, processes.folder),
    ):
        for attempt in range(max_restarts + 1):
            try:
                return _attempt(job, attempt, children, request)
            except RankFailedError as failed:
                if attempt == max_restarts or failed.exit_code in FINAL or request.is_made:
                    raise
                print(f"restart {attempt + 1} of {max_restarts}: {failed}", file=sys.stderr, flush=True)
            job.board.clear()
    raise AssertionError("the last attempt returns or raises")


def _attempt(job: _Job, attempt: int, children: list[BaseProcess], request: Request) -> Any:
    """Start all ranks once, wait until they have ended, and return rank 0's result; `children` gets their processes.

    The result comes through a pipe, not through the store: a pickle may run code, and every user of the machine can
    write to the store.

    Raises:
        RankFailedError, Interrupted: see `_first_failure`.
    """
    from zero.platform.memory_watch import EVERY_S, MemoryWatch

    if multiprocessing.get_start_method() not in multiprocessing.get_all_start_methods():
        # joblib sets the start method loky, which is unknown in an interpreter that has not imported joblib
        multiprocessing.set_start_method("spawn", force=True)
    context, memory = multiprocessing.get_context("spawn"), MemoryWatch()
    receiver, sender = context.Pipe(duplex=False)
    children[:] = [context.Process(target=_rank, args=(job, rank, attempt, sender)) for rank in range(job.ranks)]
    try:
        with signals_waiting(), blocked(signal.SIGINT, *STOP_SIGNALS, signal.SIGUSR2):
            for child in children:
                child.start()
        sender.close()  # now the pipe ends when the ranks have ended
        if request.signum is not None:  # the request came before the children
            _send(children, _PASSED_ON[request.signum])
        memory.read()  # a rank may be killed before the first reading of the thread
        with repeating(memory.read, EVERY_S, name="memory"):
            exit_codes, results = _await_ends(children, job.board, receiver)
    finally:
        with signals_waiting():
            for child in (started := [child for child in children if child.pid]):
                child.kill()
            for child in started:
                child.join()
        sender.close()
        receiver.close()
        if sys.stdout.isatty():
            print("\x1b[?25h", end="", flush=True)  # show the cursor: a rank's progress bar hides it
    if any(exit_codes.values()):
        raise _first_failure(exit_codes, job.board.notes(), job.processes.folder, memory.last)
    return results[0]


def _send(children: Sequence[BaseProcess], *signals: int) -> None:
    for pid in [child.pid for child in children if child.pid and child.exitcode is None]:
        with suppress(ProcessLookupError):
            for signum in signals:
                os.kill(pid, signum)


def _await_ends(
    children: Sequence[BaseProcess], board: Board, receiver: Connection
) -> tuple[dict[int, int], list[Any]]:
    """Wait until all ranks have ended, or until `_NOTE_S` seconds after the first failure.

    Returns:
        The exit codes of the ranks that have ended, by rank, the earliest first; and what was received, one result at
        most.
    """
    codes: dict[int, int] = {}
    results: list[Any] = []
    failed_s: float | None = None
    while len(codes) < len(children):
        alive: list[Any] = [child.sentinel for rank, child in enumerate(children) if rank not in codes]
        awaited = [*alive, *([] if results or receiver.closed else [receiver])]
        ready = wait(awaited, None if failed_s is None else max(0.0, failed_s + _NOTE_S - time.monotonic()))
        if not ready:
            break
        if receiver in ready:
            try:
                results.append(receiver.recv())
            except (EOFError, OSError):  # no rank has a result, or it was killed while it sent one
                receiver.close()
        for rank, child in enumerate(children):
            if rank not in codes and child.exitcode is not None:
                codes[rank] = child.exitcode
        if failed_s is None and any(codes.values()):
            failed_s = time.monotonic()
            if any(note["stacks"] for note in board.notes()):
                _send(children, signal.SIGUSR2, signal.SIGCONT)  # SIGCONT, because a stopped process writes nothing
    return codes, results


def _rank(job: _Job, rank: int, attempt: int, sender: Connection) -> None:
    os.environ |= {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(job.ranks)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job.port),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    # A terminal's Ctrl-C reaches the ranks too. The default action ends this process at once, even inside a collective,
    # where a Python handler would not run.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the signal was blocked while the process started
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # sent when the parent dies
    parent = multiprocessing.parent_process()
    if parent is None or not parent.is_alive():  # the parent died while this process started
        os._exit(128 + signal.SIGKILL)
    log = job.processes.folder / f"{rank}.log"
    again = f", restart {attempt} of {job.max_restarts}" if attempt else ""
    try:
        with writing(log):
            redirect(log, stdout=rank > 0, further=attempt > 0)
            write_to_log(f"rank {rank} of {job.ranks}, process {os.getpid()}{again}\n")
    except MachineError as error:
        raise SystemExit(job.board.leave_note(rank, error)) from None
    faulthandler.enable()
    Notes.board = job.board
    request = RankRequest(job.board, rank, job.processes.grace_s)
    try:
        result = job.entry(*job.args)
    except BaseException as error:
        sys.last_value = error  # for `Note.of_ending`: in Python 3.14 a child's finalizers do not see it otherwise
        log_traceback()
        if isinstance(error, DeadlineError):
            faulthandler.dump_traceback()
        raise SystemExit(job.board.leave_note(rank, error)) from None
    request.returned()
    if rank == 0:
        sender.send(result)


def _first_failure(
    exit_codes: Mapping[int, int], notes: Sequence[Mapping[str, Any]], folder: Path, memory: "Reading | None" = None
) -> RankFailedError | Interrupted:
    """Return the error that names the cause of a failure.

    A rank that a signal killed before it could leave a note is the cause. Otherwise it is the rank of the first note,
    or without notes the first rank with an exit code other than 0.

    Args:
        exit_codes: by rank, the earliest first.
        notes: the result of `Board.notes`.
        folder: folder of the logs.
        memory: the last reading of the ranks' memory.
    """
    if -signal.SIGINT in exit_codes.values():
        return Interrupted(signal.SIGINT)
    noted = {note["rank"] for note in notes}
    silent = {rank: code for rank, code in exit_codes.items() if code and rank not in noted}
    if notes and not any(code < 0 for code in silent.values()):
        first = notes[0]
        where = f"(log: {folder}/{first['rank']}.log{', stacks in the log of each' if first.get('stacks') else ''})"
        if first["exit_code"] == 128 + signal.SIGTERM:
            return Interrupted(signal.SIGTERM, f"{first['why']} {where}")
        error = RankFailedError(f"rank {first['rank']} failed: {first['cause']} {where}")
        error.exit_code = first["exit_code"]
        return error
    dead, code = min(silent.items(), key=lambda item: item[1] >= 0)  # a rank that a signal killed, else the first
    if code == -signal.SIGKILL:
        likely, advice = "or by another process", "Continue with resume=latest"
        if memory is None or memory.is_scarce:
            likely, advice = "most likely because host memory ran out", MEMORY_ADVICE
        why = f"was killed by the system (signal 9), {likely}{f': {memory}' if memory else ''}. {advice}"
    elif code < 0:
        why = f"died of {signal.Signals(-code).name} (signal {-code})"
    else:
        why = f"ended with exit code {code} and no message"
    return RankFailedError(f"rank {dead} {why} (log: {folder}/{dead}.log)")
