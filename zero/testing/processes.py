"""Ranks as processes that communicate over gloo, with a time limit; an error at the limit has every rank's stack."""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch

from zero.distributed.failure import GRACE_S, some_ranks
from zero.distributed.rendezvous import LOOPBACK, local_store
from zero.distributed.world import open_world
from zero.errors import DeadlineError, RankFailedError, WorldError

START_S = 90.0
"""Maximum seconds for the start of all processes, which import their modules, on a busy machine."""

PRELOADED = (
    "zero.trainer.run.loop",
    "zero.trainer.planning",
    "zero.tracker.report.run",
    "rich.console",
    "pytest",
    "hypothesis",
)
"""Modules that the fork server imports, because most ranks need them. Modules that are not installed are skipped."""

SURROUNDINGS: list[Callable[[], contextlib.AbstractContextManager[object]]] = []
"""Functions, picklable, whose context managers every new rank enters before it makes its world, the outermost first."""

_STARTED = b"started"
_STREAMS = (1, 2)  # standard output and standard error


def run_processes(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run `fn(world, *args)` in `size` new processes, one thread each, that communicate over gloo.

    The calling process hosts torch's key-value store on a free port, so that calls do not interfere and the store
    survives the death of any rank. Ranks use the caller's warning filters, environment, working folder, output and
    `SURROUNDINGS`.

    Ranks are forked from a server process that has imported torch and never used it, so only the first call waits for
    the imports. Environment variables that libraries read during their import therefore have the values that they had
    at the first call.

    Args:
        size: number of ranks.
        fn: a function that can be imported by name. Its first argument is the rank's `zero.World`.
        args: further arguments of `fn`. They and the result of `fn` must be picklable.
        timeout_s: maximum seconds of the run after the last rank has started; also the timeout of collectives.

    Returns:
        The results in rank order.

    Raises:
        Exception: the error of the first rank that failed, with rank and traceback as a note. If the error cannot be
            pickled, a `WorldError` with its text.
        RankFailedError: a rank was killed, or ended without a result.
        DeadlineError: ranks were still running at the time limit; the message has their stacks.
    """
    store = local_store()
    context = _fork_context()
    job = pickle.dumps((fn, args, SURROUNDINGS))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_RankProcess(context, rank, size, store.port, folder, job, timeout_s) for rank in range(size)]
        try:
            return _collect(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.kill()


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Let `zero.trainer.launch` fork ranks from the server of `run_processes` in the block, so that they start fast.

    Do not use it in tests of malloc's settings, because a process reads them when it starts. Do not use it in tests in
    which the launcher dies, because forked ranks may outlive it, for example a rank that is stopped (SIGSTOP).
    """
    _fork_context()
    with patch.object(multiprocessing.context.SpawnContext, "Process", _ForkedProcess):
        yield


class _ForkedProcess(multiprocessing.context.ForkServerProcess):
    """A process forked from the fork server, in place of one with a new interpreter."""

    def start(self) -> None:
        with _inherited(os.environ) as inherited:
            process: Any = self
            process._target, process._args = _run_inheriting, (inherited, process._target, process._args)
            super().start()


def _run_inheriting(inherited: "_Inherited", fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    inherited.apply()
    fn(*args)


def _fork_context() -> Any:
    """Start the fork server if it is not running, with this process's module search path; return its context."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOADED])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), PYTHONSAFEPATH="1"):
        forkserver.ensure_running()
    return context


class _Inherited(NamedTuple):
    """The environment and output of the parent, for a forked process to use.

    Without it, the process would have the environment and output of the fork server, which are those of the first call.
    """

    environ: dict[str, str]
    streams: list[Connection]
    """Standard output and standard error, as connections, because descriptors can only be pickled in that form."""

    def apply(self) -> None:
        """Set environment and output of this process, and end this process when its parent ends."""
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        os.environ.clear()
        os.environ.update(self.environ)
        for stream, descriptor in zip(self.streams, _STREAMS, strict=True):
            os.dup2(stream.fileno(), descriptor)
            stream.close()


@contextlib.contextmanager
def _inherited(environ: Mapping[str, str]) -> Iterator[_Inherited]:
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(Connection(os.dup(descriptor), readable=False)) for descriptor in _STREAMS]
        yield _Inherited(dict(environ), streams)


class _Outcome(NamedTuple):
    """The result of a rank, or its error and the text of its traceback."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""


class _RankProcess:
    """One rank in the parent process: its process, the pipe for its outcome, and the file for its threads' stacks."""

    def __init__(
        self,
        context: Any,
        rank: int,
        size: int,
        port: int,
        folder: str,
        job: bytes,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.stacks = Path(folder, f"stacks-{rank}")
        self.outcome, child_end = context.Pipe(duplex=False)
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        with _inherited(env) as inherited:
            arguments = (inherited, job, child_end, str(self.stacks), timeout_s, list(warnings.filters))
            self.process = context.Process(target=_rank_main, args=arguments, name=f"rank {rank}", daemon=False)
            self.process.start()
        child_end.close()

    def receive(self) -> "_Outcome | None":
        """Receive a message: return the rank's outcome, or None for the message that the rank has started."""
        try:
            message = self.outcome.recv_bytes()
        except EOFError:
            self.process.join(GRACE_S)
            reason = _describe_exit(self.process.exitcode)
            return _Outcome(error=RankFailedError(f"rank {self.rank} ended without a result: {reason}"))
        if message == _STARTED:
            return None
        outcome: _Outcome = pickle.loads(message)
        if outcome.error is not None:
            outcome.error.add_note(f"raised on rank {self.rank}:\n{outcome.trace}")
        return outcome

    def dump_stacks(self) -> None:
        if self.stacks.exists() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(GRACE_S)
        if self.process.exitcode is not None:
            self.process.close()
        self.outcome.close()


def _collect(ranks: list[_RankProcess], timeout_s: float) -> list[Any]:
    """Wait for all ranks and return their results in rank order, or raise the error that caused the other errors."""
    waiting = {rank.outcome: rank for rank in ranks}
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    starting = len(ranks)
    end_s = time.monotonic() + START_S
    while waiting and (ready := multiprocessing.connection.wait(list(waiting), max(0.0, end_s - time.monotonic()))):
        for connection in ready:
            rank = waiting[connection]
            outcome = rank.receive()
            if outcome is None:
                starting -= 1
                end_s = end_s if starting or errors else time.monotonic() + timeout_s
                continue
            del waiting[connection]
            results[rank.rank] = outcome.result
            if outcome.error is not None:
                errors.append(outcome.error)
                # Wait a moment, because the rank that failed first may report after ranks that noticed its failure.
                end_s = min(end_s, time.monotonic() + 4 * GRACE_S)
    if errors:
        errors.sort(key=lambda error: isinstance(error, RankFailedError))
        try:
            raise errors[0]
        finally:
            del errors, outcome  # break the reference cycle of error and frame, which would keep descriptors open
    if waiting:
        raise DeadlineError(_timeout_message(list(waiting.values()), len(ranks), timeout_s))
    return [results[rank.rank] for rank in ranks]


def _timeout_message(ranks: list[_RankProcess], size: int, timeout_s: float) -> str:
    for rank in ranks:
        rank.dump_stacks()
    multiprocessing.connection.wait([rank.process.sentinel for rank in ranks], GRACE_S)
    stacks = "\n".join(
        f"--- rank {rank.rank} ---\n{rank.stacks.read_text() if rank.stacks.exists() else 'not started yet'}"
        for rank in ranks
    )
    return f"{some_ranks([rank.rank for rank in ranks])} of {size} still running after {timeout_s:g} s\n{stacks}"


def _describe_exit(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        memory = ", usually because memory ran out" if exitcode == -signal.SIGKILL else ""
        return f"killed by signal {-exitcode} ({signal.Signals(-exitcode).name}){memory}"
    return f"exit code {exitcode}"


def _rank_main(
    inherited: _Inherited, job: bytes, outcome: Any, stacks: str, timeout_s: float, filters: list[Any]
) -> None:
    inherited.apply()
    torch.set_num_threads(1)
    # In place, because Python's own warning code keeps a reference to this list.
    cast(list[Any], warnings.filters)[:] = filters
    with Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        outcome.send_bytes(_STARTED)
        outcome.send_bytes(_run_job(job, timeout_s))
        faulthandler.unregister(signal.SIGUSR1)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_job(job: bytes, timeout_s: float) -> bytes:
    """Run the pickled job and return its pickled `_Outcome`. An error that does not pickle becomes a `WorldError`."""
    try:
        fn, args, surroundings = pickle.loads(job)
        with contextlib.ExitStack() as around:
            for surrounding in surroundings:
                around.enter_context(surrounding())
            world = around.enter_context(open_world(timeout_s, device="cpu"))
            result = fn(world, *args)
        return pickle.dumps(_Outcome(result))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            message = pickle.dumps(_Outcome(None, error, trace))
            pickle.loads(message)
        except Exception:
            message = pickle.dumps(_Outcome(None, WorldError(f"{type(error).__name__}: {error}"), trace))
        return message
