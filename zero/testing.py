"""Many ranks in one test: as threads of this process, or as processes of their own. And what a store must pass.

Thread ranks meet at a board. The last one to come does the copying for all, so an operation is complete exactly when
every rank has started it, as on a real network, and handles can be waited for in any order. Sums are the world's own.
Ranks that run different operations, shapes or dtypes are refused at once, by name.
"""

import contextlib
import faulthandler
import gc
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
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zero.errors import DeadlineError, RankFailedError, StoreError, WorldError
from zero.failure import GRACE_S, by_rank, first_line, some_ranks
from zero.store import Page, Store, Ticket
from zero.world import Handle, World, signature_of

# ------------------------------------------------------------------------------------------------- ranks as threads


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
        self.meetings: dict[int, _Meeting] = {}
        self.last_op = ["nothing"] * size
        self.left: set[int] = set()
        self.failure: tuple[int, BaseException] | None = None

    def arrive(self, rank: int, number: int, op: str, seat: _Seat, move: _Move) -> _Meeting:
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
        self._number = 0

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

    def _gather(self, shard_S: Tensor, full_P: Tensor, op: str) -> Handle:
        return self._meet(op, _Seat(shard_S, full_P), _move_gather)

    def _exchange(self, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        return self._meet(op, _Seat(full_P, recv_P), _move_exchange)

    def _broadcast(self, flat: Tensor, source: int, op: str) -> Handle:
        return self._meet(op, _Seat(flat, flat), lambda seats: _move_broadcast(seats, source))

    def _meet(self, op: str, seat: _Seat, move: _Move) -> Handle:
        self._number += 1
        meeting = self._board.arrive(self.rank, self._number, op, seat, move)
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


# ----------------------------------------------------------------------------------------------- ranks as processes

START_S = 90.0
"""How long processes may take to import what they need, on a busy machine."""

_STARTED = b"started"


def run_processes(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run fn(world, *args) in `size` fresh gloo processes of one thread each; return their results in rank order.

    `fn` must be importable by name, its arguments and results must pickle. The parent hosts the store on a free port
    of its own, so calls do not meet and any rank may die. The parent's warning filters hold in the ranks too.

    Raises:
        Exception: what the first failing rank raised, with its rank and traceback as a note.
        RankFailedError: a rank was killed, or left without a result.
        DeadlineError: a rank was still running `timeout_s` after the last one had started, with the stacks of all
            that were.
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
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        arguments = (env, job, child_end, str(self.stacks), timeout_s, list(warnings.filters))
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
    return f"{some_ranks([rank.rank for rank in ranks])} of {size} still running after {timeout_s:g} s\n{stacks}"


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        memory = ", most often for memory" if exitcode == -signal.SIGKILL else ""
        return f"killed by signal {-exitcode} ({signal.Signals(-exitcode).name}){memory}"
    return f"exit code {exitcode}"


def _rank_main(
    env: dict[str, str], job: bytes, outcome: Any, stacks: str, timeout_s: float, filters: list[Any]
) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ.update(env)
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
        fn, args = pickle.loads(job)
        with World.from_env(timeout_s, device="cpu") as world:
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


# ------------------------------------------------------------------------------------------------ what a store promises


class StoreContract:
    """The laws of `zero.store.Store`, as pytest tests. A tier passes them by inheriting:

    class TestMemoryStore(StoreContract):
        def open(self) -> Store:
            return MemoryStore(torch.device("cpu"))

    Pages are compared by their bytes, so that no NaN, signed zero or denormal number is lost. Tickets are waited for
    out of order, because a tier may finish in any order.
    """

    sizes = (64, 2048, 2048 * 5, 2048 * 3 + 64, 100_032)
    """Elements of a page: one vector, whole blocks of 4 KiB, and last pages of a shard, which are ragged."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def open(self) -> Store:
        """An empty store."""
        raise NotImplementedError

    def test_a_fresh_page_holds_zeros(self) -> None:
        with contextlib.closing(self.open()) as store:
            for page, numel, dtype in self._allocated(store):
                into = torch.ones(numel, dtype=dtype)
                store.read(page, into).wait()
                assert not into.any()

    def test_a_page_holds_what_was_written_bit_for_bit(self) -> None:
        with contextlib.closing(self.open()) as store:
            pages = self._allocated(store)
            sources = {page: self._noise(numel, dtype, seed) for seed, (page, numel, dtype) in enumerate(pages)}
            self._write(store, sources)
            self._holds(store, sources)

    def test_the_last_write_wins_and_leaves_other_pages_alone(self) -> None:
        with contextlib.closing(self.open()) as store:
            pages = self._allocated(store)
            sources = {page: self._noise(numel, dtype, seed) for seed, (page, numel, dtype) in enumerate(pages)}
            self._write(store, sources)
            for seed, (page, numel, dtype) in enumerate(pages[::3]):
                sources[page] = self._noise(numel, dtype, 1000 + seed)
                store.write(page, sources[page]).wait()
            self._holds(store, sources)

    def test_a_read_sees_the_write_before_it_whether_or_not_that_was_waited_for(self) -> None:
        """The first reads of a step are the last writes of the one before."""
        with contextlib.closing(self.open()) as store:
            page, numel = Page(0, "mu", 0), self.sizes[-1]
            store.allocate(page, numel, torch.float32)
            for seed in range(20):
                source, into = self._noise(numel, torch.float32, seed), torch.empty(numel)
                writing, reading = store.write(page, source), store.read(page, into)
                reading.wait()
                writing.wait()
                assert _bytes_of(into) == _bytes_of(source)

    def test_what_was_copied_is_nobody_elses(self) -> None:
        """Once waited for, neither side of a read or a write is connected to the page."""
        with contextlib.closing(self.open()) as store:
            page = Page(0, "mu", 0)
            store.allocate(page, 2048, torch.float32)
            source, into = self._noise(2048, torch.float32, 1), torch.empty(2048)
            kept = source.clone()
            store.write(page, source).wait()
            source.zero_()
            store.read(page, into).wait()
            into.zero_()
            self._holds(store, {page: kept})

    def test_a_ticket_may_be_waited_for_twice(self) -> None:
        with contextlib.closing(self.open()) as store:
            page = Page(0, "mu", 0)
            store.allocate(page, 64, torch.float32)
            for ticket in (store.write(page, torch.ones(64)), store.read(page, torch.empty(64))):
                ticket.wait()
                ticket.wait()

    def test_a_page_in_place_is_the_page_itself(self) -> None:
        """Where a store lends pages at all."""
        with contextlib.closing(self.open()) as store:
            page = Page(0, "mu", 0)
            store.allocate(page, 2048, torch.float32)
            lent = store.in_place(page)
            if lent is None:
                return
            assert (lent.shape, lent.dtype) == ((2048,), torch.float32)
            source = self._noise(2048, torch.float32, 1)
            lent.copy_(source)
            self._holds(store, {page: source})
            source = self._noise(2048, torch.float32, 2)
            store.write(page, source).wait()
            assert _bytes_of(lent) == _bytes_of(source)

    def test_two_stores_share_nothing(self) -> None:
        with contextlib.closing(self.open()) as one, contextlib.closing(self.open()) as other:
            page = Page(0, "mu", 0)
            for store, value in ((one, 1.0), (other, 2.0)):
                store.allocate(page, 64, torch.float32)
                store.write(page, torch.full((64,), value)).wait()
            self._holds(one, {page: torch.ones(64)})

    def test_bytes_are_counted(self) -> None:
        with contextlib.closing(self.open()) as store:
            assert store.allocated_bytes == 0
            for number, (numel, dtype) in enumerate(((2048, torch.float32), (4096, torch.bfloat16))):
                store.allocate(Page(0, "mu", number), numel, dtype)
                assert store.allocated_bytes == 8192 * (number + 1)

    def test_what_does_not_fit_is_refused_and_changes_nothing(self) -> None:
        with contextlib.closing(self.open()) as store:
            page, source = Page(0, "mu", 0), self._noise(64, torch.float32, 1)
            store.allocate(page, 64, torch.float32)
            store.write(page, source).wait()
            other = torch.zeros(128), torch.zeros(32), torch.zeros(64, dtype=torch.bfloat16)
            _refused(partial(store.allocate, page, 64, torch.float32))
            for tensor in other:
                _refused(partial(_finish, store.read, page, tensor))
                _refused(partial(_finish, store.write, page, tensor))
            self._holds(store, {page: source})

    def test_an_unknown_page_is_refused(self) -> None:
        with contextlib.closing(self.open()) as store:
            store.allocate(Page(1, "mu", 2), 64, torch.float32)
            for page in (Page(0, "mu", 2), Page(1, "nu", 2), Page(1, "mu", 0)):
                _refused(partial(_finish, store.read, page, torch.empty(64)))
                _refused(partial(_finish, store.write, page, torch.empty(64)))
                _refused(partial(store.in_place, page))

    def test_a_closed_store_refuses_everything_but_closing(self) -> None:
        store, page = self.open(), Page(0, "mu", 0)
        store.allocate(page, 64, torch.float32)
        store.close()
        store.close()
        _refused(partial(store.allocate, Page(1, "mu", 0), 64, torch.float32))
        _refused(partial(_finish, store.read, page, torch.empty(64)))
        _refused(partial(_finish, store.write, page, torch.zeros(64)))
        _refused(partial(store.in_place, page))
        _refused(lambda: store.allocated_bytes)

    def _allocated(self, store: Store) -> list[tuple[Page, int, torch.dtype]]:
        """Pages of every size and dtype, under keys that differ in one field each."""
        made = [
            (Page(unit, kind, number), numel, dtype)
            for unit, dtype in enumerate(self.dtypes)
            for kind in ("master", "mu")
            for number, numel in enumerate(self.sizes)
        ]
        for page, numel, dtype in made:
            store.allocate(page, numel, dtype)
        return made

    def _write(self, store: Store, sources: Mapping[Page, Tensor]) -> None:
        """All writes are under way at once, and are waited for from the last to the first."""
        for ticket in reversed([store.write(page, source) for page, source in sources.items()]):
            ticket.wait()

    def _holds(self, store: Store, expected: Mapping[Page, Tensor]) -> None:
        """The same for reads."""
        found = {page: torch.empty_like(source) for page, source in expected.items()}
        for ticket in reversed([store.read(page, into) for page, into in found.items()]):
            ticket.wait()
        for page, into in found.items():
            assert _bytes_of(into) == _bytes_of(expected[page]), page

    def _noise(self, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
        """Random bits: every kind of number that the dtype has."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.cpu().view(torch.uint8).tolist())


def _finish(start: Callable[[Page, Tensor], Ticket], page: Page, tensor: Tensor) -> None:
    """A store may refuse at once, or when the ticket is waited for."""
    start(page, tensor).wait()


def _refused(call: Callable[[], Any]) -> None:
    try:
        call()
    except StoreError:
        return
    raise AssertionError("a StoreError was expected")
