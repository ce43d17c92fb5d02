"""Ranks as threads of this process.

The last rank to start a collective copies the data of all ranks. So a collective is complete exactly when every rank
has started it, as on a real network, and handles can be waited for in any order. `World` itself computes sums. If ranks
start different operations, or the same one with different shapes or dtypes, an error that names them is raised at once.
"""

import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from zero.distributed.failure import GRACE_S, by_rank, first_line, some_ranks
from zero.distributed.operations import signature_of
from zero.distributed.transport import Transport
from zero.distributed.world import World
from zero.errors import ConfigError, DeadlineError, RankFailedError, WorldError
from zero.platform.handle import Handle, Then


class _Buffers(NamedTuple):
    """One rank's tensors in a collective: `source` is sent, `target` receives; both may be the same tensor."""

    source: Tensor
    target: Tensor
    alike: Tensor | None = None
    """A tensor whose shape and dtype are the same on all ranks; None: `target`."""


_Move = Callable[[list[_Buffers]], None]


@dataclass
class _Collective:
    """One collective, with a description and the buffers of each rank; the buffers are dropped when it is done."""

    signatures: dict[int, str] = field(default_factory=dict)
    buffers: dict[int, _Buffers] = field(default_factory=dict)
    done: bool = False


class _Shared:
    """The shared state of thread ranks: one lock, unfinished collectives, ranks that have left, the first failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.generator_lock = threading.RLock()
        self.collectives: dict[tuple[Any, ...], _Collective] = {}
        self.last_op = ["nothing"] * size
        self.left: set[int] = set()
        self.failure: tuple[int, BaseException] | None = None

    def start(
        self, rank: int, ranks: Sequence[int], number: tuple[Any, ...], op: str, buffers: _Buffers, move: _Move
    ) -> _Collective:
        """Start collective `number` of `ranks` on `rank`. The last rank to start it copies the data of all ranks."""
        with self.changed:
            self.raise_failure(rank, op)
            self.last_op[rank] = op
            collective = self.collectives.setdefault(number, _Collective())
            collective.signatures[rank] = signature_of(op, buffers.target if buffers.alike is None else buffers.alike)
            collective.buffers[rank] = buffers
            if len(set(collective.signatures.values())) > 1:
                different = WorldError(f"the ranks run different operations: {by_rank(collective.signatures)}")
                self.fail(rank, different)
                raise different
            if len(collective.buffers) == len(ranks):
                # the modes of this thread, such as selective recomputation, must not see the data of other ranks move
                with torch.no_grad(), _disable_current_modes():
                    move([collective.buffers[r] for r in ranks])
                collective.done = True
                collective.buffers.clear()
                del self.collectives[number]
                self.changed.notify_all()
        return collective

    def wait(self, rank: int, ranks: Sequence[int], collective: _Collective, op: str, timeout_s: float) -> None:
        """Wait until the collective is done.

        Raises:
            WorldError, RankFailedError: a rank has left or failed, so that the collective cannot be completed.
            DeadlineError: the collective was not done after `timeout_s` seconds.
        """

        def is_over() -> bool:
            gone = self.left.intersection(ranks) - collective.signatures.keys()
            return collective.done or self.failure is not None or bool(gone)

        with self.changed:
            self.changed.wait_for(is_over, timeout_s)
            if collective.done:
                return
            self.raise_failure(rank, op)
            missing = [r for r in ranks if r not in collective.signatures]
            gone = [r for r in missing if r in self.left]
            if gone:
                error = WorldError(f"{some_ranks(gone)} left the world while rank {rank} was in {op}")
            else:
                last = ", ".join(f"rank {r} (last in {self.last_op[r]})" for r in missing)
                error = DeadlineError(f"rank {rank} waited {timeout_s:g} s in {op}. Missing: {last}")
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
        raise RankFailedError(f"rank {first} failed first: {cause} (rank {rank} was in {op})") from error


class Threads(Transport):
    """Threads of this process as ranks, seen from one of them. Each rank needs its own copy of a module.

    Raises, in collectives:
        WorldError: ranks run different operations, or a rank has left the world.
        RankFailedError: another rank has failed; the message has its error.
        DeadlineError: a rank did not start the collective within the timeout.
    """

    def __init__(self, rank: int, shared: _Shared, *, timeout_s: float) -> None:
        super().__init__(rank, shared.size, device="cpu", timeout_s=timeout_s)
        self._shared = shared
        self._numbers = Counter[tuple[str, bool]]()  # (order, aside) -> number of collectives started

    @classmethod
    def all_ranks(cls, size: int, *, nodes: int = 1, timeout_s: float = 120.0) -> "list[Threads]":
        """Return the ranks of a new run, see `run_ranks`; each is used by one thread.

        Raises:
            ConfigError: `nodes` does not divide `size`.
        """
        if size % nodes:
            raise ConfigError(f"{size} ranks do not divide by {nodes} nodes")
        shared = _Shared(size)
        ranks = [cls(rank, shared, timeout_s=timeout_s) for rank in range(size)]
        for rank in ranks:
            rank.local_size = size // nodes
        return ranks

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        if not self._shared.generator_lock.acquire(timeout=self.timeout_s):
            raise DeadlineError(f"exclusive block: rank {self.rank} waited {self.timeout_s:g} s for another rank")
        try:
            yield
        finally:
            self._shared.generator_lock.release()

    def fail(self, error: BaseException) -> None:
        self._shared.fail(self.ranks[self.rank], error)

    def close(self, *, keep_default: bool) -> None:
        self._shared.leave(self.ranks[self.rank])

    def gather(self, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        return self._start(op, _Buffers(shard_S, full_P), _move_gather, aside=aside)

    def all_to_all(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        return self._start(op, _Buffers(full_P, recv_P), _move_all_to_all)

    def reshard(self, source: Tensor, into: Tensor, before: Sequence[int], after: Sequence[int], op: str) -> Handle:
        move = partial(_move_parts, before=before, after=after)
        return self._start(op, _Buffers(source, into, alike=source.new_empty(1)), move)

    def reduce_scatter(self, full_P: Tensor, recv_S: Tensor, op: str) -> Handle:
        return self._start(op, _Buffers(full_P, recv_S), _move_sum)

    def broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        return self._start(op, _Buffers(flat, flat), lambda buffers: _move_broadcast(buffers, source))

    def _start(self, op: str, buffers: _Buffers, move: _Move, *, aside: bool = False) -> Handle:
        self._numbers[self.order, aside] += 1
        rank, number = self.ranks[self.rank], (self.order, self.ranks, aside, self._numbers[self.order, aside])
        collective = self._shared.start(rank, self.ranks, number, op, buffers, move)
        return Then(lambda: self._shared.wait(rank, self.ranks, collective, op, self.timeout_s))


def _move_gather(buffers: list[_Buffers]) -> None:
    for _, full_P, _ in buffers:
        rows = full_P if full_P.dim() == 2 else full_P.view(len(buffers), -1)
        for (shard_S, *_), slot_S in zip(buffers, rows, strict=True):
            if shard_S.data_ptr() != slot_S.data_ptr():
                slot_S.copy_(shard_S)


def _move_all_to_all(buffers: list[_Buffers]) -> None:
    size = len(buffers)
    for r, (_, recv_P, _) in enumerate(buffers):
        for (full_P, *_), slot_S in zip(buffers, recv_P.view(size, -1), strict=True):
            slot_S.copy_(full_P.view(size, -1)[r])


def _move_parts(buffers: list[_Buffers], *, before: Sequence[int], after: Sequence[int]) -> None:
    for (source, _, _), first in zip(buffers, before, strict=False):
        for (_, into, _), start in zip(buffers, after, strict=False):
            a, b = max(first, start), min(first + source.numel(), start + into.numel())
            if a < b:
                into[a - start : b - start].copy_(source[a - first : b - first])


def _move_sum(buffers: list[_Buffers]) -> None:
    """Add around a ring, as backends do: the sum for rank r begins with the chunk of rank r + 1."""
    size = len(buffers)
    for r, (_, recv_S, _) in enumerate(buffers):
        chunks = [buffers[(r + k) % size].source.view(size, -1)[r] for k in range(1, size + 1)]
        recv_S.copy_(chunks[0])
        for chunk in chunks[1:]:
            recv_S.add_(chunk)


def _move_broadcast(buffers: list[_Buffers], source: int) -> None:
    for r, (_, flat, _) in enumerate(buffers):
        if r != source:
            flat.copy_(buffers[source].source)


def run_ranks(size: int, fn: Callable[..., Any], *args: Any, nodes: int = 1, timeout_s: float = 120.0) -> list[Any]:
    """Run `fn(world, *args)` in `size` threads of this process, one for each rank.

    Args:
        size: number of ranks.
        fn: the function. Its first argument is the rank's `World`. Each rank must make or copy its own model.
        args: further arguments of `fn`, shared by all ranks.
        nodes: number of simulated machines, with an equal number of ranks on each.
        timeout_s: maximum seconds of the run; also the timeout of collectives.

    Returns:
        The results in rank order.

    Raises:
        BaseException: the error of the first rank that failed, with its rank as a note. Ranks that wait for that rank
            stop at once.
        DeadlineError: ranks were still running at the time limit; the message has their stacks.
    """
    ranks = Threads.all_ranks(size, nodes=nodes, timeout_s=timeout_s)
    shared, worlds = ranks[0]._shared, [World(rank) for rank in ranks]
    results: list[Any] = [None] * size

    core = _current_core() if size > 2 else None

    def run(world: World) -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})
        with contextlib.suppress(BaseException), world:
            results[world.rank] = fn(world, *args)

    threads = [threading.Thread(target=run, args=(world,), name=f"rank {world.rank}", daemon=True) for world in worlds]
    with _no_collection():
        for thread in threads:
            thread.start()
        _await_ranks(shared, threads, timeout_s)
    if shared.failure is not None:
        rank, error = shared.failure
        error.add_note(f"raised on rank {rank} of {size}")
        raise error
    return results


def _current_core() -> int | None:
    """Return the CPU core of the calling thread, to which all ranks are pinned, so that other processes have the rest.

    Python's global lock (GIL) lets only one rank run at a time anyway, and passing it between cores slows 8 ranks down
    by a quarter.
    """
    return ctypes.CDLL(None).sched_getcpu() if sys.platform == "linux" else None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable automatic garbage collection in the block, because it could deadlock thread ranks.

    Reading torch's random state, as activation checkpointing does, can start a garbage collection while the thread
    holds the generator's lock. The collection releases the GIL. Another rank that reads its random state then takes the
    GIL and waits forever for the generator's lock.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _await_ranks(shared: _Shared, threads: list[threading.Thread], timeout_s: float) -> None:
    """Wait until all ranks have ended, or until one has failed and the others have had time to notice.

    If neither happens within `timeout_s` seconds, record a DeadlineError as the failure.
    """
    size = len(threads)
    with shared.changed:
        shared.changed.wait_for(lambda: shared.failure is not None or len(shared.left) == size, timeout_s)
        if shared.failure is None and len(shared.left) < size:
            late = sorted(set(range(size)) - shared.left)
            stacks = "\n".join(f"--- rank {r} ---\n{_stack(threads[r])}" for r in late)
            message = f"{some_ranks(late)} of {size} still running after {timeout_s:g} s"
            shared.fail(late[0], DeadlineError(f"{message}\n{stacks}"))
    end_s = time.monotonic() + GRACE_S
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "ended just now\n"
