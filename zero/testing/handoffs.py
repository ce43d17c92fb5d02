"""How threads and ranks hand over to one another, as a simulated GPU is told of it.

What orders threads of the host are the store's tickets: a job comes after whoever asked for it, after what the schedule
had before it on the same pages and the same slot, and before whoever waits for its ticket. Collectives are a stream of
their own, the network's: they begin where the current stream is, and a stream that waits for one goes on after it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero.distributed.world import Handle, ProcessWorld, World
from zero.store.base import Page, Ticket
from zero.store.prefetch import PrefetchStore
from zero.store.schedule import Action, Asked, Copy, Due, Move, Work
from zero.store.workers import WorkerPool
from zero.testing.races import Known
from zero.testing.streams import NETWORK_BYTES_PER_S, Gate, Handed, Marker, Streams, quietly, thread
from zero.testing.threads import ThreadWorld


class Watched(ABC):
    """A device that is told.

    Attributes:
        streams: what it keeps of streams and threads.
        handed: what threads have handed over.
        gate: where its store's threads may be held back.
    """

    streams: Streams
    handed: Handed
    gate: Gate

    def attend(self) -> None:
        """This thread works with this device from here on."""
        thread.gpu = self
        if thread.watching is None:
            thread.watching = _Watching()
            thread.watching.__enter__()

    @abstractmethod
    def operate(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One operator."""

    @abstractmethod
    def touch_on_host(self, tensor: Tensor, *, writes: bool) -> None:
        """The host itself moves bytes between `tensor` and something else, such as a file."""

    @abstractmethod
    def is_there(self, kind: str) -> bool:
        """A wait is made; it is not the one that is left out."""

    @abstractmethod
    def is_home_of(self, tensor: Tensor) -> bool:
        """It is memory of the device."""


class _Watching(TorchDispatchMode):
    """Tells the thread's device of every operator."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if thread.quiet or thread.gpu is None:
            return operator(*args, **(kwargs or {}))
        return thread.gpu.operate(operator, args, kwargs or {})


def _leave_thread() -> None:
    thread.watching = thread.gpu = None


@contextmanager
def watching() -> Iterator[None]:
    """In the block simulated GPUs are told of operators, and of what threads and ranks hand over."""
    wrapped: list[tuple[type, str, Callable[[Any], Any]]] = [
        (WorkerPool, "_run", _run),
        (WorkerPool, "ask", _ask),
        (WorkerPool, "do_here", _do_here),
        (WorkerPool, "await_end", _await_end),
        (WorkerPool, "drain", _drain),
        (WorkerPool, "leave", _leave),
        (WorkerPool, "_wait", _wait),
        (PrefetchStore, "_carry_out", _carry_out),
        (PrefetchStore, "_copy", _copy),
        (World, "__enter__", _enter),
        (World, "__exit__", _exit),
    ]
    wrapped += [(World, name, _between_hosts) for name in ("agree", "barrier", "gather_texts", "share")]
    wrapped += [(kind, name, way) for kind in (ThreadWorld, ProcessWorld) for name, way in COLLECTIVES.items()]
    with ExitStack() as undo:
        for kind, name, way in wrapped:
            undo.enter_context(patch.object(kind, name, way(getattr(kind, name))))
        thread.watching = undo.enter_context(_Watching())
        undo.callback(_leave_thread)
        yield


# -- the store ---------------------------------------------------------------------------------------------------------


class _Job:
    """A job, and what was known to whoever asked for it."""

    def __init__(self, job: Callable[..., None], known: Known, time_s: float) -> None:
        self.job, self.known, self.time_s = job, known, time_s

    def __call__(self, *args: Any) -> None:
        self.job(*args)


def _run(original: Any) -> Any:
    def run(workers: WorkerPool) -> None:
        """A thread of the store ends unwatched: with what torch would let go of after its last line of Python, the
        interpreter's end, which waits for that line alone, would end the process by a signal."""
        try:
            original(workers)
        finally:
            watching = thread.watching
            _leave_thread()
            if watching is not None:
                watching.__exit__(None, None, None)

    return run


def _ask(original: Any) -> Any:
    def ask(workers: WorkerPool, event: Due | Asked, job: Callable[..., None]) -> Ticket:
        host = None if thread.gpu is None else thread.gpu.streams.host
        return original(workers, event, job if host is None else _Job(job, dict(host.known), host.time_s))

    return ask


def _do_here(original: Any) -> Any:
    def do_here(workers: WorkerPool, event: Asked, job: Callable[..., None]) -> None:
        if thread.gpu is None:
            return original(workers, event, job)
        done = thread.gpu.handed
        return original(workers, event, lambda: done.between([(id(workers), event.page)], job))

    return do_here


def _await_end(original: Any) -> Any:
    def await_end(workers: WorkerPool, ticket: Any) -> None:
        gpu = thread.gpu
        there = gpu is None or gpu.is_there("ticket")
        if there or not gpu.gate.is_held:  # the order of the program holds even where a wait is left out
            original(workers, ticket)
        if gpu is not None and there:
            gpu.handed.hear((id(workers), ticket.event.number))

    return await_end


def _wait(original: Any) -> Any:
    def wait(workers: WorkerPool, *what: Any) -> None:
        with nullcontext() if thread.gpu is None else thread.gpu.gate.opened():
            original(workers, *what)

    return wait


def _drain(original: Any) -> Any:
    def drain(workers: WorkerPool) -> None:
        original(workers)
        gpu = thread.gpu
        if gpu is not None and gpu.is_there("drain"):
            gpu.handed.hear_all(id(workers))

    return drain


def _leave(original: Any) -> Any:
    def leave_(workers: WorkerPool) -> None:
        with nullcontext() if thread.gpu is None else thread.gpu.gate.opened():
            original(workers)
        if thread.gpu is not None:
            thread.gpu.handed.hear_all(id(workers))  # its threads have ended

    return leave_


def _carry_out(original: Any) -> Any:
    def carry_out(store: PrefetchStore, action: Action, job: Any) -> None:
        gpu = thread.gpu
        if gpu is None:
            return original(store, action, job)
        gpu.gate.pass_through()
        if isinstance(job, _Job):
            gpu.streams.host.hear(job.known, job.time_s)
        workers = id(store._workers)
        keys: list[Any] = [(workers, page) for page in _pages(action)]
        if not isinstance(action, Move) and action.slot is not None:
            keys.append((workers, "slot", action.slot))
        gpu.handed.between(keys, lambda: original(store, action, job))
        if isinstance(action, Work | Move | Copy):
            gpu.handed.say((workers, action.number))
        return None

    return carry_out


def _pages(action: Action) -> Sequence[Page]:
    if isinstance(action, Move | Copy):
        return (action.page,)
    return (*action.group.pages, *action.group.beside, *action.group.out)


def _copy(original: Any) -> Any:
    def copy(store: PrefetchStore, page: Page, tensor: Tensor, writes: bool) -> None:
        if thread.gpu is not None and store.in_place(page) is None:
            thread.gpu.touch_on_host(tensor, writes=not writes)
            with quietly():
                return original(store, page, tensor, writes)
        return original(store, page, tensor, writes)

    return copy


# -- the other ranks ---------------------------------------------------------------------------------------------------


def _enter(original: Any) -> Any:
    def enter(world: World) -> Any:
        if isinstance(world.compute, Watched):
            world.compute.attend()
        return original(world)

    return enter


def _exit(original: Any) -> Any:
    def exit_(world: World, *error: Any) -> Any:
        try:
            return original(world, *error)
        finally:
            thread.gpu = None

    return exit_


def _between_hosts(original: Any) -> Any:
    """Small tensors of the host, which on a GPU travel over gloo: no stream has to do with them."""

    def between_hosts(*args: Any, **kwargs: Any) -> Any:
        with quietly():
            return original(*args, **kwargs)

    return between_hosts


def _gather(original: Any) -> Any:
    def gather(world: World, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
        if aside or not _is_watched(world, full_P):
            with quietly():
                return original(world, shard_S, full_P, op, aside=aside)
        return _collective(world, op, shard_S, full_P, lambda into: original(world, shard_S, into, op))

    return gather


def _exchange(original: Any) -> Any:
    def exchange(world: World, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
        if not _is_watched(world, recv_P):
            return original(world, full_P, recv_P, op)
        return _collective(world, op, full_P, recv_P, lambda into: original(world, full_P, into, op))

    return exchange


def _broadcast(original: Any) -> Any:
    def broadcast(world: World, flat: Tensor, source: int, op: str) -> Handle:
        if not _is_watched(world, flat) or world.rank == source:
            return original(world, flat, source, op)
        return _collective(world, op, flat[:0], flat, lambda into: original(world, into, source, op))

    return broadcast


COLLECTIVES = {"_gather": _gather, "_exchange": _exchange, "_broadcast": _broadcast}


def _is_watched(world: World, tensor: Tensor) -> bool:
    gpu = world.compute
    return thread.gpu is gpu and isinstance(gpu, Watched) and not thread.quiet and gpu.is_home_of(tensor)


class _Arrival:
    """A collective under way: what waits for it goes on after it. Its memory stays until then."""

    def __init__(self, gpu: Watched, marker: Marker, started: Handle, memory: Sequence[Tensor]) -> None:
        self._gpu, self._marker, self._started, self._memory = gpu, marker, started, memory

    def wait(self) -> None:
        if self._gpu.is_there("collective"):
            self._gpu.streams.hold_back(self._marker)
        with quietly():
            self._started.wait()


def _collective(world: World, op: str, source: Tensor, into: Tensor, start: Callable[[Tensor], Handle]) -> Handle:
    """Start it on the network's stream. Where side streams are late, so is what arrives."""
    gpu = world.compute
    assert isinstance(gpu, Watched)
    streams = gpu.streams
    before, marker = Marker(), Marker()
    streams.allocated([source, into])
    streams.record(before)
    lane = streams.collective()
    with streams.on(lane):
        streams.hold_back(before)
        streams.run(lane, lane.launched)  # what is sent is read now: the other side needs it
        streams.takes(lane.agent, into.nbytes / NETWORK_BYTES_PER_S)
        arriving = _without(into, source)
        streams.touch(lane.agent, [source], arriving, op)
        with quietly():
            arrived = torch.empty_like(into) if streams.is_late() else into
            if streams.is_late() and not source.numel():
                arrived.copy_(into)
            started = start(arrived)
        if streams.is_late():
            streams.launch(lambda: _land(started, arrived, into), arriving)
        streams.record(marker)
    return _Arrival(gpu, marker, started, (source, into))


def _land(started: Handle, arrived: Tensor, into: Tensor) -> None:
    started.wait()
    into.data.copy_(arrived)


def _without(into: Tensor, source: Tensor) -> list[Tensor]:
    """What of `into` is not `source`, if that lies in it: there its own bytes stay as they are."""
    first = (source.data_ptr() - into.data_ptr()) // max(into.element_size(), 1)
    if not source.numel() or not 0 <= first < into.numel():
        return [into]
    return [part for part in (into[:first], into[first + source.numel() :]) if part.numel()]
