"""Ranks as processes that communicate over gloo, with a time limit that ends in every rank's stack."""

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
import torch.distributed as dist

from zero.distributed.failure import GRACE_S, some_ranks
from zero.distributed.world import World
from zero.errors import DeadlineError, RankFailedError, WorldError
from zero.testing.simulated_gpu import current_settings, with_settings

START_S = 90.0
"""Seconds that processes may take to import their modules, on a busy machine."""

PRELOADED = (
    "zero.trainer.loop",
    "zero.trainer.planning",
    "zero.tracker.report.run",
    "rich.console",
    "pytest",
    "hypothesis",
)
"""Modules that most ranks import. Those that are not installed are skipped."""

_STARTED = b"started"
_STREAMS = (1, 2)  # standard output and standard error


def run_processes(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run `fn(world, *args)` in `size` new processes, one thread each, that communicate over gloo.

    The calling process hosts torch's key-value store on a free port, so that calls do not interfere and any rank may
    die. Ranks use the caller's warning filters, environment, working folder and output, and its `simulated_gpu`.

    A rank is forked from a server process that has imported torch and never used it, so only the first call waits for
    the imports. Variables that libraries read during their import therefore have the values of the first call.

    Args:
        size: number of ranks.
        fn: a function that can be imported by name; gets the rank's `zero.World`.
        args: further arguments of `fn`; they must pickle, and so must its result.
        timeout_s: seconds that ranks may run after the last one has started; also the timeout of their collectives.

    Returns:
        The results in rank order.

    Raises:
        Exception: what the first failing rank raised, with its rank and traceback as a note. If that does not pickle:
            a `WorldError` with its text.
        RankFailedError: a rank was killed, or ended without a result.
        DeadlineError: a rank was still running when the time was over; with the stacks of all such ranks.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = _fork_context()
    job = pickle.dumps((fn, args, current_settings()))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_RankProcess(context, rank, size, store.port, folder, job, timeout_s) for rank in range(size)]
        try:
            return _collect(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.kill()


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """In the block, `zero.trainer.launch` forks ranks from the server of `run_processes`, so that they start at once.

    Not for tests of malloc's settings, which a process reads when it begins; or of a launcher that dies: forked ranks
    are only certain to end while their launcher lives, and one that is stopped (SIGSTOP) would stay.
    """
    _fork_context()
    with patch.object(multiprocessing.context.SpawnContext, "Process", _ForkedProcess):
        yield


class _ForkedProcess(multiprocessing.context.ForkServerProcess):
    """A process that is forked, in place of a new interpreter."""

    def start(self) -> None:
        with _inherited(os.environ) as inherited:
            process: Any = self
            process._target, process._args = _run_inheriting, (inherited, process._target, process._args)
            super().start()


def _run_inheriting(inherited: "_Inherited", fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    inherited.apply()
    fn(*args)


def _fork_context() -> Any:
    """Return the context of a running fork server, which finds modules on the same path as this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOADED])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), PYTHONSAFEPATH="1"):
        forkserver.ensure_running()
    return context


class _Inherited(NamedTuple):
    """The environment of a new process: its parent's, and not the fork server's, which is that of the first call."""

    environ: dict[str, str]
    streams: list[Connection]
    """Standard output and error, as connections, because descriptors pickle only as such."""

    def apply(self) -> None:
        """Use them in this process, and end it when its parent ends."""
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
    """The result of a rank, or its error and traceback."""

    result: Any = None
    error: BaseException | None = None
    trace: str = ""


class _RankProcess:
    """One rank, seen from the parent: its process, the pipe for its outcome, the file for the stacks of its threads."""

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
            "MASTER_ADDR": "127.0.0.1",
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
        """Return the rank's outcome, or None for the message that it has started."""
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
    """Return results in rank order, or raise the error that caused the others."""
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
                # Ranks that noticed the failure may report before the rank that caused it: wait a moment for that one.
                end_s = min(end_s, time.monotonic() + 4 * GRACE_S)
    if errors:
        errors.sort(key=lambda error: isinstance(error, RankFailedError))
        try:
            raise errors[0]
        finally:
            del errors, outcome  # they hold the error, which holds this frame, and so every descriptor
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
        fn, args, settings = pickle.loads(job)
        with with_settings(settings), World.from_env(timeout_s, device="cpu") as world:
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
