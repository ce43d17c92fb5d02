"""Ranks that are processes of their own, over gloo, with a hard limit and a dump of every stack when it runs out."""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
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
import torch.multiprocessing

from zero.distributed.failure import GRACE_S, some_ranks
from zero.distributed.world import World
from zero.errors import DeadlineError, RankFailedError, WorldError
from zero.testing.simulated_gpu import surroundings, within

START_S = 90.0
"""How long processes may take to import what they need, on a busy machine."""

PRELOADED = (
    "zero.trainer.loop",
    "zero.trainer.planning",
    "zero.trainer.report.run",
    "rich.console",
    "omegaconf",
    "pytest",
    "hypothesis",
)
"""What most ranks need, as far as it is installed."""

_STARTED = b"started"
_STREAMS = (1, 2)  # standard output and standard error


def run_processes(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run fn(world, *args) in `size` fresh gloo processes of one thread each; return their results in rank order.

    `fn` must be importable by name, its arguments and results must pickle. The parent hosts the store on a free port
    of its own, so calls do not meet and any rank may die. The parent's warning filters hold in the ranks too.

    A rank is forked from a server that has imported torch and never used it, so that only the first call waits for the
    imports. What libraries read from the environment as they are imported is that of the first call; else ranks
    have the environment, the folder and the output of now.

    Raises:
        Exception: what the first failing rank raised, with its rank and traceback as a note.
        RankFailedError: a rank was killed, or left without a result.
        DeadlineError: a rank was still running `timeout_s` after the last one had started, with the stacks of all
            that were.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = _forking()
    job = pickle.dumps((fn, args, surroundings()))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_RankProcess(context, rank, size, store.port, folder, job, timeout_s) for rank in range(size)]
        try:
            return _collect(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.kill()


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Ranks that `zero.trainer.launch` starts in here are forked as those of `run_processes` are, and start at once.

    Not for what malloc is told as a process begins, nor for ranks that are stopped (SIGSTOP), nor for a parent that
    dies: only one that lives ends such ranks whatever they are in.
    """
    real = torch.multiprocessing.start_processes

    def start_processes(fn: Callable[..., Any], args: tuple[Any, ...], **how: Any) -> Any:
        with _surroundings(os.environ) as around:
            return real(_in_surroundings, (around, fn, args), **{**how, "start_method": _forking().get_start_method()})

    with patch.object(torch.multiprocessing, "start_processes", start_processes):
        yield


def _in_surroundings(rank: int, around: "_Surroundings", fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    around.enter()
    fn(rank, *args)


def _forking() -> Any:
    """The context whose server runs and finds modules where this process does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOADED])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), PYTHONSAFEPATH="1"):
        forkserver.ensure_running()
    return context


class _Surroundings(NamedTuple):
    """What a new process would have of its parent, and a forked one has of the server: those of the first call."""

    environ: dict[str, str]
    streams: list[Connection]
    """Standard output and error. A connection is what a descriptor can travel as."""

    def enter(self) -> None:
        threading.Thread(target=_leave_with_parent, daemon=True).start()
        os.environ.clear()
        os.environ.update(self.environ)
        for stream, descriptor in zip(self.streams, _STREAMS, strict=True):
            os.dup2(stream.fileno(), descriptor)
            stream.close()


@contextlib.contextmanager
def _surroundings(environ: Mapping[str, str]) -> Iterator[_Surroundings]:
    with contextlib.ExitStack() as stack:
        streams = [Connection(os.dup(descriptor), readable=False) for descriptor in _STREAMS]
        for stream in streams:
            stack.enter_context(stream)
        yield _Surroundings(dict(environ), streams)


class _Outcome(NamedTuple):
    result: Any = None
    error: BaseException | None = None
    trace: str = ""


class _RankProcess:
    """One rank as the parent sees it: a process, the pipe that its outcome comes through, the file of its stacks."""

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
        with _surroundings(env) as around:
            arguments = (around, job, child_end, str(self.stacks), timeout_s, list(warnings.filters))
            self.process = context.Process(target=_rank_main, args=arguments, name=f"rank {rank}", daemon=False)
            self.process.start()
        child_end.close()

    def receive(self) -> "_Outcome | None":
        """The next word from the rank; None when it has only started."""
        try:
            message = self.outcome.recv_bytes()
        except EOFError:
            self.process.join(GRACE_S)
            how = _how(self.process.exitcode)
            return _Outcome(error=RankFailedError(f"rank {self.rank} left without a result: {how}"))
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
    """Results in rank order, or the error that explains the others."""
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
                # The ranks that only noticed may speak first, the cause gets a moment to follow.
                end_s = min(end_s, time.monotonic() + 4 * GRACE_S)
    if errors:
        errors.sort(key=lambda error: isinstance(error, RankFailedError))
        try:
            raise errors[0]
        finally:
            del errors, outcome  # they hold the error, which holds this frame, and so every descriptor
    if waiting:
        raise DeadlineError(_late(list(waiting.values()), len(ranks), timeout_s))
    return [results[rank.rank] for rank in ranks]


def _late(ranks: list[_RankProcess], size: int, timeout_s: float) -> str:
    for rank in ranks:
        rank.dump_stacks()
    multiprocessing.connection.wait([rank.process.sentinel for rank in ranks], GRACE_S)
    stacks = "\n".join(
        f"--- rank {rank.rank} ---\n{rank.stacks.read_text() if rank.stacks.exists() else 'had not started yet'}"
        for rank in ranks
    )
    return f"{some_ranks([rank.rank for rank in ranks])} of {size} still running after {timeout_s:g} s\n{stacks}"


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        memory = ", most often for memory" if exitcode == -signal.SIGKILL else ""
        return f"killed by signal {-exitcode} ({signal.Signals(-exitcode).name}){memory}"
    return f"exit code {exitcode}"


def _rank_main(
    around: _Surroundings, job: bytes, outcome: Any, stacks: str, timeout_s: float, filters: list[Any]
) -> None:
    around.enter()
    torch.set_num_threads(1)
    # In place: the interpreter's own warning code holds on to this very list.
    cast(list[Any], warnings.filters)[:] = filters
    with Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        outcome.send_bytes(_STARTED)
        outcome.send_bytes(_outcome(job, timeout_s))
        faulthandler.unregister(signal.SIGUSR1)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _outcome(job: bytes, timeout_s: float) -> bytes:
    """What a rank sends home: its result, or its error and traceback, as far as they pickle."""
    try:
        fn, args, settings = pickle.loads(job)
        with within(settings), World.from_env(timeout_s, device="cpu") as world:
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
