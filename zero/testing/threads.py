"""Ranks that are threads of this process.

Thread ranks meet at a board. The last one to come does the copying for all, so an operation is complete exactly when
every rank has started it, as on a real network, and handles can be waited for in any order. Sums are the world's own.
Ranks that run different operations, shapes or dtypes are refused at once, by name.
"""

import contextlib
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.distributed.failure import GRACE_S, by_rank, first_line, some_ranks
from zero.distributed.world import Handle, World, signature_of
from zero.errors import DeadlineError, RankFailedError, WorldError


class _Seat(NamedTuple):
    """One rank at a meeting: what it gives, where it receives; both may be the same tensor."""

    source: Tensor
    target: Tensor


_Move = Callable[[list[_Seat]], None]


@dataclass
class _Meeting:
    """One operation: how each rank described it, and its seats until the last rank has come."""

    signatures: dict[int, str] = field(default_factory=dict)
    seats: dict[int, _Seat] = field(default_factory=dict)
    done: bool = False


class _Board:
    """What thread ranks share: one lock, the meetings under way, who has left, the first failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.generator_lock = threading.RLock()
        self.meetings: dict[tuple[bool, int], _Meeting] = {}
        self.last_op = ["nothing"] * size
        self.left: set[int] = set()
        self.failure: tuple[int, BaseException] | None = None

    def arrive(self, rank: int, number: tuple[bool, int], op: str, seat: _Seat, move: _Move) -> _Meeting:
        """Take a seat at meeting `number`; the last rank to come moves everyone's data."""
        with self.changed:
            self.raise_failure(rank, op)
            self.last_op[rank] = op
            meeting = self.meetings.setdefault(number, _Meeting())
            meeting.signatures[rank] = signature_of(op, seat.target)
            meeting.seats[rank] = seat
            if len(set(meeting.signatures.values())) > 1:
                different = WorldError(f"the ranks run different operations: {by_rank(meeting.signatures)}")
                self.fail(rank, different)
                raise different
            if len(meeting.seats) == self.size:
                with torch.no_grad():
                    move([meeting.seats[r] for r in range(self.size)])
                meeting.done = True
                meeting.seats.clear()
                del self.meetings[number]
                self.changed.notify_all()
        return meeting

    def await_all(self, rank: int, meeting: _Meeting, op: str, timeout_s: float) -> None:
        """Return when the meeting is done."""

        def settled() -> bool:
            return meeting.done or self.failure is not None or bool(self.left - meeting.signatures.keys())

        with self.changed:
            self.changed.wait_for(settled, timeout_s)
            if meeting.done:
                return
            self.raise_failure(rank, op)
            absent = [r for r in range(self.size) if r not in meeting.signatures]
            gone = [r for r in absent if r in self.left]
            if gone:
                error = WorldError(f"{some_ranks(gone)} left the world; rank {rank} was in {op}")
            else:
                last = "; ".join(f"rank {r}, last seen in {self.last_op[r]}" for r in absent)
                error = DeadlineError(f"rank {rank} waited {timeout_s:g} s in {op}; not there: {last}")
            self.fail(rank, error)
            raise error

    def leave(self, rank: int) -> None:
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()

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
            raise WorldError(str(error))
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise RankFailedError(f"rank {first} failed first: {cause}; rank {rank} was in {op}") from error


class _BoardHandle:
    def __init__(self, await_all: Callable[[], None]) -> None:
        self._await_all = await_all

    def wait(self) -> None:
        self._await_all()


class ThreadWorld(World):
    """One rank of a world whose ranks are threads of this process. Each rank needs its own copy of a module."""

    def __init__(self, rank: int, board: _Board, *, timeout_s: float = 60.0) -> None:
        super().__init__(rank, board.size, device="cpu", timeout_s=timeout_s)
        self._board = board
        self._numbers = {False: 0, True: 0}  # of operations, and of those aside from their order

    @classmethod
    def all_ranks(cls, size: int, *, timeout_s: float = 60.0) -> "list[ThreadWorld]":
        """A new world, seen from each of its ranks; `run_ranks` gives each to a thread."""
        board = _Board(size)
        return [cls(rank, board, timeout_s=timeout_s) for rank in range(size)]

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        if not self._board.generator_lock.acquire(timeout=self.timeout_s):
            raise DeadlineError(f"rank {self.rank} waited {self.timeout_s:g} s for another rank's exclusive block")
        try:
            yield
        finally:
            self._board.generator_lock.release()

    def fail(self, error: BaseException) -> None:
        self._board.fail(self.rank, error)

    def close(self) -> None:
        self._board.leave(self.rank)

    def _gather(self, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        return self._meet(op, _Seat(shard_S, full_P), _move_gather, aside=aside)

    def _exchange(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        return self._meet(op, _Seat(full_P, recv_P), _move_exchange)

    def _broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        return self._meet(op, _Seat(flat, flat), lambda seats: _move_broadcast(seats, source))

    def _meet(self, op: str, seat: _Seat, move: _Move, *, aside: bool = False) -> Handle:
        self._numbers[aside] += 1
        meeting = self._board.arrive(self.rank, (aside, self._numbers[aside]), op, seat, move)
        return _BoardHandle(lambda: self._board.await_all(self.rank, meeting, op, self.timeout_s))


def _move_gather(seats: list[_Seat]) -> None:
    for _, full_P in seats:
        for (shard_S, _), slot_S in zip(seats, full_P.view(len(seats), -1), strict=True):
            if shard_S.data_ptr() != slot_S.data_ptr():
                slot_S.copy_(shard_S)


def _move_exchange(seats: list[_Seat]) -> None:
    size = len(seats)
    for r, (_, recv_P) in enumerate(seats):
        for (full_P, _), slot_S in zip(seats, recv_P.view(size, -1), strict=True):
            slot_S.copy_(full_P.view(size, -1)[r])


def _move_broadcast(seats: list[_Seat], source: int) -> None:
    for r, (_, flat) in enumerate(seats):
        if r != source:
            flat.copy_(seats[source].source)


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Run fn(world, *args) on `size` thread ranks and return their results in rank order.

    Raises:
        BaseException: what the first failing rank raised, with its rank as a note; the others are released at once.
        DeadlineError: a rank was still running after `timeout_s`, with the stacks of all that were.
    """
    worlds = ThreadWorld.all_ranks(size, timeout_s=timeout_s)
    board = worlds[0]._board
    results: list[Any] = [None] * size

    def run(world: ThreadWorld) -> None:
        if size > 2:
            _stay_on_one_core()
        with contextlib.suppress(BaseException), world:
            results[world.rank] = fn(world, *args)

    threads = [threading.Thread(target=run, args=(world,), name=f"rank {world.rank}", daemon=True) for world in worlds]
    with _no_collection():
        for thread in threads:
            thread.start()
        _await_ranks(board, threads, timeout_s)
    if board.failure is not None:
        rank, error = board.failure
        error.add_note(f"raised on rank {rank} of {size}")
        raise error
    return results


def _stay_on_one_core() -> None:
    """This thread, and those that it starts. Python's lock lets one rank run at a time anyway, and to hand it from core
    to core takes 8 ranks a quarter of their time.
    """
    if sys.platform == "linux":
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No automatic garbage collection in here. torch's random state can start one (as a checkpoint saves it) while it
    holds the generator's lock; the collection lets Python's lock go, and the next rank to save its state takes that one
    and waits for the other for ever.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _await_ranks(board: _Board, threads: list[threading.Thread], timeout_s: float) -> None:
    """Return when all ranks have left, or when one has failed and the others have had the time to notice."""
    size = len(threads)
    with board.changed:
        board.changed.wait_for(lambda: board.failure is not None or len(board.left) == size, timeout_s)
        if board.failure is None and len(board.left) < size:
            late = sorted(set(range(size)) - board.left)
            stacks = "\n".join(f"--- rank {r} ---\n{_stack(threads[r])}" for r in late)
            message = f"{some_ranks(late)} of {size} still running after {timeout_s:g} s"
            board.fail(late[0], DeadlineError(f"{message}\n{stacks}"))
    end_s = time.monotonic() + GRACE_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "has just ended\n"
