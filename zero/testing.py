"""Many ranks in one test: as threads of this process, or as processes of their own.

Thread ranks meet at a board. The last one to come does the copying for all, so an operation is complete exactly when
every rank has started it, as on a real network, and handles can be waited for in any order. What a network lets pass
in silence is refused here: ranks that run different operations, shapes or dtypes.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zero.errors import DeadlineError, RankFailedError, WorldError
from zero.world import Handle, World


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
