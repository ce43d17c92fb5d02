"""Many ranks in one test: as threads of this process, or as processes of their own.

Thread ranks meet at a board. The last one to come does the copying for all, so an operation is complete exactly when
every rank has started it, as on a real network, and handles can be waited for in any order. What a network lets pass
in silence is refused here: ranks that run different operations, shapes or dtypes.
"""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero.errors import DeadlineError, RankFailedError, WorldError
from zero.world import GRACE_S, Handle, World


@dataclass
class _Meeting:
    """One operation: what it is, and each rank's tensors as they come."""

    signatures: dict[int, str] = field(default_factory=dict)
    tensors: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    done: bool = False


class _Board:
    """What thread ranks share: a lock, the meetings under way, the first failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.generator_lock = threading.RLock()
        self.meetings: dict[int, _Meeting] = {}
        self.last_op = ["nothing yet"] * size
        self.failure: tuple[int, BaseException] | None = None

    def post(self, rank: int, number: int, op: str, signature: str, tensors: tuple[Tensor, Tensor], move: "_Move"):
        with self.changed:
            self.raise_failure(rank, op)
            self.last_op[rank] = op
            meeting = self.meetings.setdefault(number, _Meeting())
            meeting.signatures[rank] = signature
            meeting.tensors[rank] = tensors
            if len(set(meeting.signatures.values())) > 1:
                self.fail(rank, WorldError(_disagreement(meeting.signatures)))
                self.raise_failure(rank, op)
            if len(meeting.tensors) == self.size:
                with torch.no_grad():
                    move([meeting.tensors[r] for r in range(self.size)])
                meeting.done = True
                meeting.tensors.clear()
                del self.meetings[number]
                self.changed.notify_all()
        return meeting

    def fail(self, rank: int, error: BaseException) -> None:
        with self.changed:
            if self.failure is None:
                self.failure = (rank, error)
            self.changed.notify_all()

    def raise_failure(self, rank: int, op: str) -> None:
        if self.failure is None:
            return
        first, error = self.failure
        if type(error) is WorldError:
            raise WorldError(*error.args)
        raise RankFailedError(
            f"rank {first} failed first: {type(error).__name__}: {error}; rank {rank} was in {op}"
        ) from error


_Move = Callable[[list[tuple[Tensor, Tensor]]], None]


class _BoardHandle:
    def __init__(self, world: "ThreadWorld", meeting: _Meeting, op: str) -> None:
        self._world, self._meeting, self._op = world, meeting, op

    def wait(self) -> None:
        world, board = self._world, self._world.board
        with board.changed:
            board.changed.wait_for(lambda: self._meeting.done or board.failure is not None, world.timeout_s)
            if self._meeting.done:
                return
            board.raise_failure(world.rank, self._op)
            absent = [r for r in range(world.size) if r not in self._meeting.signatures]
            error = DeadlineError(
                f"rank {world.rank} waited {world.timeout_s:g} s in {self._op}; not arrived: "
                + "; ".join(f"rank {r} (last seen in {board.last_op[r]})" for r in absent)
            )
            board.fail(world.rank, error)
            raise error


class ThreadWorld(World):
    """One rank of a world whose ranks are threads of this process. Each rank needs its own copy of a module."""

    def __init__(self, rank: int, board: _Board, *, timeout_s: float = 60.0) -> None:
        super().__init__(rank, board.size, device="cpu", timeout_s=timeout_s)
        self.board = board
        self._number = 0

    @classmethod
    def of(cls, size: int, *, timeout_s: float = 60.0) -> "list[ThreadWorld]":
        """All ranks of a new world."""
        board = _Board(size)
        return [cls(rank, board, timeout_s=timeout_s) for rank in range(size)]

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        if not self.board.generator_lock.acquire(timeout=self.timeout_s):
            raise DeadlineError(f"rank {self.rank} waited {self.timeout_s:g} s for another rank's exclusive block")
        try:
            yield
        finally:
            self.board.generator_lock.release()

    def fail(self, error: BaseException) -> None:
        self.board.fail(self.rank, error)

    def _gather(self, shard_S: Tensor, full_P: Tensor, op: str) -> Handle:
        return self._post(op, shard_S, full_P, _move_gather)

    def _exchange(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        return self._post(op, full_P, recv_P, _move_exchange)

    def _broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        return self._post(op, flat, flat, lambda tensors: _move_broadcast(tensors, source))

    def _post(self, op: str, source: Tensor, target: Tensor, move: _Move) -> Handle:
        self._number += 1
        signature = f"{op}, {target.numel()} elements of {target.dtype}"
        meeting = self.board.post(self.rank, self._number, op, signature, (source, target), move)
        return _BoardHandle(self, meeting, op)


def _move_gather(tensors: list[tuple[Tensor, Tensor]]) -> None:
    for _, full_P in tensors:
        for (shard_S, _), slot_S in zip(tensors, full_P.view(len(tensors), -1), strict=True):
            if shard_S.data_ptr() != slot_S.data_ptr():
                slot_S.copy_(shard_S)


def _move_exchange(tensors: list[tuple[Tensor, Tensor]]) -> None:
    size = len(tensors)
    for r, (_, recv_P) in enumerate(tensors):
        for (full_P, _), slot_S in zip(tensors, recv_P.view(size, -1), strict=True):
            slot_S.copy_(full_P.view(size, -1)[r])


def _move_broadcast(tensors: list[tuple[Tensor, Tensor]], source: int) -> None:
    for r, (_, flat) in enumerate(tensors):
        if r != source:
            flat.copy_(tensors[source][0])


def _disagreement(signatures: dict[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank in sorted(signatures):
        ranks.setdefault(signatures[rank], []).append(rank)
    seen = "; ".join(f"{signature} on ranks {where}" for signature, where in ranks.items())
    return f"the ranks run different operations: {seen}"


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run fn(world, *args) on `size` thread ranks and return their results in rank order.

    Raises:
        Exception: what the first failing rank raised, with its rank as a note; the others are released at once.
        DeadlineError: a rank was still running after `timeout_s`.
    """
    worlds = ThreadWorld.of(size, timeout_s=timeout_s)
    board = worlds[0].board
    results: list[Any] = [None] * size

    def run(world: ThreadWorld) -> None:
        try:
            results[world.rank] = fn(world, *args)
        except BaseException as error:
            world.fail(error)

    threads = [threading.Thread(target=run, args=(world,), name=f"rank {world.rank}", daemon=True) for world in worlds]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late and board.failure is None:
        raise DeadlineError(f"ranks {late} of {size} were still running after {timeout_s:g} s")
    if board.failure is not None:
        rank, error = board.failure
        error.add_note(f"raised on rank {rank} of {size}")
        raise error
    return results


def run_processes(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run fn(world, *args) in `size` fresh gloo processes of one thread each; return their results in rank order.

    `fn` must be importable by name, its arguments and results must pickle. The parent hosts the store on a free port
    of its own, so calls do not meet and any rank may die. The parent's warning filters hold in the ranks too.

    Raises:
        Exception: what the first failing rank raised, with its rank and traceback as a note.
        RankFailedError: a rank was killed, or left without a result.
        DeadlineError: a rank was still running after `timeout_s`, with the stacks of all that were.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    job = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_RankProcess(context, rank, size, store.port, folder, job, timeout_s) for rank in range(size)]
        try:
            return _collect(ranks, timeout_s)
        finally:
            for rank in ranks:
                rank.kill()


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
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        arguments = (env, job, child_end, str(self.stacks), timeout_s, list(warnings.filters))
        self.process = context.Process(target=_rank_main, args=arguments, name=f"rank {rank}", daemon=True)
        self.process.start()
        child_end.close()

    def receive(self) -> tuple[Any, BaseException | None]:
        """The result, or what ended the rank."""
        try:
            result, error, trace = pickle.loads(self.outcome.recv_bytes())
        except EOFError:
            self.process.join(GRACE_S)
            return None, RankFailedError(f"rank {self.rank} left without a result: {_how(self.process.exitcode)}")
        if error is not None:
            error.add_note(f"raised on rank {self.rank}:\n{trace}")
        return result, error

    def dump_stacks(self) -> None:
        if self.stacks.exists() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(GRACE_S)
        self.outcome.close()


def _collect(ranks: list[_RankProcess], timeout_s: float) -> list[Any]:
    """Results in rank order, or the error that explains the others."""
    end_s = time.monotonic() + timeout_s
    waiting = {rank.outcome: rank for rank in ranks}
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    while waiting and (ready := multiprocessing.connection.wait(list(waiting), max(0.0, end_s - time.monotonic()))):
        for outcome in ready:
            rank = waiting.pop(outcome)
            results[rank.rank], error = rank.receive()
            if error is not None:
                errors.append(error)
                # The ranks that only noticed get a little longer to say so, the cause may be among them.
                end_s = min(end_s, time.monotonic() + 4 * GRACE_S)
    if errors:
        causes = [error for error in errors if not isinstance(error, RankFailedError)]
        raise (causes or errors)[0]
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
    return f"ranks {[rank.rank for rank in ranks]} of {size} were still running after {timeout_s:g} s\n{stacks}"


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        memory = ", most often for memory" if exitcode == -signal.SIGKILL else ""
        return f"killed by signal {-exitcode} ({signal.Signals(-exitcode).name}){memory}"
    return f"exit code {exitcode}"


def _rank_main(
    env: dict[str, str], job: bytes, outcome: Any, stacks: str, timeout_s: float, filters: list[Any]
) -> None:
    os.environ.update(env)
    with Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        torch.set_num_threads(1)
        warnings.filters[:] = filters
        outcome.send_bytes(_outcome(job, timeout_s))


def _outcome(job: bytes, timeout_s: float) -> bytes:
    """What a rank sends home: its result, or its error and traceback, as far as they pickle."""
    try:
        fn, args = pickle.loads(job)
        with World.from_env(timeout_s, device="cpu") as world:
            result = fn(world, *args)
        return pickle.dumps((result, None, ""))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            message = pickle.dumps((None, error, trace))
            pickle.loads(message)
        except Exception:
            message = pickle.dumps((None, RankFailedError(f"{type(error).__name__}: {error}"), trace))
        return message
