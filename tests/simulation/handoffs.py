"""Record the order of jobs of the store and of collectives for the race detector of a simulated GPU.

The methods of `WorkerPool`, `Executor`, `BounceBuffers`, `World` and its transports through which threads and ranks
synchronize are wrapped. A job of the store is ordered after the call that submitted it and after earlier jobs on the
same pages and the same slot, and before the end of a wait for its ticket. A collective runs on a stream of its own, the
network. It is ordered after the work enqueued on the current stream so far, and before later work of a stream that
waits for it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.simulation.races import Past
from tests.simulation.streams import Handoffs, Key, Marker, Streams, thread, untraced
from zero.checkpoint import Saving
from zero.distributed.agreement import Hosts
from zero.distributed.transport import Processes, Transport
from zero.distributed.world import World
from zero.platform.device import Device
from zero.platform.handle import Handle, Then
from zero.platform.modes import DeviceMode
from zero.store.base import Page, Ticket
from zero.store.bounce_buffers import BounceBuffers
from zero.store.events import Action, Copy, Modify, Move, PageTransfer, Read, Work
from zero.store.executor import Executor
from zero.store.workers import WorkerPool
from zero.testing.thread_world import Threads


class InstrumentedDevice(Device, ABC):
    """A device that records every operator, every synchronization between threads and every collective.

    Attributes:
        streams: the device's streams, and the threads that use it, with their vector clocks.
        handoffs: vector clocks that threads pass to each other.
    """

    streams: Streams
    handoffs: Handoffs

    def attach_thread(self) -> None:
        """Send the operators of the calling thread to this device from now on."""
        thread.gpu = self
        if thread.mode is None:
            thread.mode = _TracingMode()
            thread.mode.__enter__()

    @abstractmethod
    def dispatch(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record one call of a torch operator, execute it now or later, and return its result."""

    @abstractmethod
    def access_on_host(self, tensor: Tensor, *, writes: bool) -> None:
        """Record that the host reads or writes `tensor` without a torch operator, such as for file I/O."""

    @abstractmethod
    def keeps_wait(self, name: str) -> bool:
        """Record a wait in the calling line of code; return False if a test removes this wait."""


class _TracingMode(DeviceMode):
    """A dispatch mode that passes every operator of a thread to the thread's simulated device."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if thread.is_untraced or thread.gpu is None:
            return operator(*args, **(kwargs or {}))
        return thread.gpu.dispatch(operator, args, kwargs or {})


def _detach_thread() -> None:
    thread.mode = thread.gpu = None


@contextmanager
def instrumentation() -> Iterator[None]:
    """Wrap torch's operators and the methods of stores and worlds until the end of the block.

    A wrapper of a method has the arguments (object, original method, *arguments of the method).
    """
    wrapped: list[tuple[type, str, Callable[..., Any]]] = [
        (WorkerPool, "_run", _run),
        (WorkerPool, "submit", _submit),
        (WorkerPool, "do_here", _do_here),
        (WorkerPool, "await_end", _await_end),
        (WorkerPool, "drain", _drain),
        (WorkerPool, "leave", _leave),
        (Executor, "carry_out", _carry_out),
        (Executor, "_copy", _copy),
        (BounceBuffers, "borrowed", _borrowed),
        (Saving, "_start", _start),
        (Saving, "_write_behind", _write_behind),
        (Saving, "_end_copies", _end_copies),
        (Saving, "_await_copies", _await_copies),
        (World, "__enter__", _enter),
        (World, "__exit__", _exit),
    ]
    wrapped += [(Hosts, name, _between_hosts) for name in ("agree", "barrier", "gather_texts", "share")]
    wrapped += [(transport, name, wrap) for transport in (Threads, Processes) for name, wrap in COLLECTIVES.items()]
    with ExitStack() as undo:
        for owner, name, wrap in wrapped:
            undo.enter_context(patch.object(owner, name, partialmethod(wrap, getattr(owner, name))))
        thread.mode = undo.enter_context(_TracingMode())
        undo.callback(_detach_thread)
        yield


# -- the store ---------------------------------------------------------------------------------------------------------


class _Job:
    """A job of the store, and the work that happens before it: all of the submitting thread so far."""

    def __init__(self, job: Callable[..., None], past: Past) -> None:
        self.job, self.past = job, past

    def __call__(self, *args: Any) -> None:
        self.job(*args)


def _run(workers: WorkerPool, original: Any) -> None:
    """Run a thread of the store, and remove the dispatch mode before the thread ends.

    Otherwise torch would remove it after the thread's last line of Python. Python's exit waits only for that line, so
    the process could be killed by a signal.
    """
    with _leaving():
        original(workers)


@contextmanager
def _leaving() -> Iterator[None]:
    """Remove the thread's dispatch mode at the end of the block."""
    try:
        yield
    finally:
        mode = thread.mode
        _detach_thread()
        if mode is not None:
            mode.__exit__(None, None, None)


def _submit(workers: WorkerPool, original: Any, event: Modify | PageTransfer, job: Callable[..., None]) -> Ticket:
    host = None if thread.gpu is None else thread.gpu.streams.host
    return original(workers, event, job if host is None else _Job(job, host.now()))


def _do_here(workers: WorkerPool, original: Any, event: PageTransfer, job: Callable[..., None]) -> None:
    if thread.gpu is None:
        return original(workers, event, job)
    handoffs = thread.gpu.handoffs
    return original(workers, event, lambda: handoffs.ordered([(id(workers.executor), event.page)], job))


def _await_end(workers: WorkerPool, original: Any, ticket: Any) -> None:
    gpu = thread.gpu
    original(workers, ticket)  # also if a test removes the wait, so that the job is recorded before later work
    if gpu is not None and gpu.keeps_wait("ticket"):
        with workers.executor.watch(
            "wait"
        ):  # a wait in simulated time, also if the job has ended by the machine's clock
            gpu.handoffs.acquire((id(workers.executor), ticket.event.number))


def _drain(workers: WorkerPool, original: Any) -> None:
    original(workers)
    gpu = thread.gpu
    if gpu is not None and gpu.keeps_wait("drain"):
        gpu.handoffs.acquire_all(id(workers.executor))


def _leave(workers: WorkerPool, original: Any) -> None:
    original(workers)
    if thread.gpu is not None:
        thread.gpu.handoffs.acquire_all(id(workers.executor))  # because all threads of the pool have ended


def _carry_out(executor: Executor, original: Any, action: Action, job: Any) -> None:
    gpu = thread.gpu
    if gpu is None:
        return original(executor, action, job)
    gpu.streams.begin_action()
    if isinstance(job, _Job):
        gpu.streams.host.join(job.past)
    keys: list[Key] = [(id(executor), page) for page in _pages(action)]
    if not isinstance(action, Move) and action.slot is not None:
        keys.append((id(executor), "slot", action.slot))
        if isinstance(action, Read) or not action.group.pages:
            gpu.handoffs.take_over(keys[-1], executor.slots[action.slot])
    gpu.handoffs.ordered(keys, lambda: original(executor, action, job))
    if isinstance(action, Work | Move | Copy):
        gpu.handoffs.release((id(executor), action.number))
    return None


def _pages(action: Action) -> Sequence[Page]:
    if isinstance(action, Move | Copy):
        return (action.page,)
    return action.group.all


def _copy(executor: Executor, original: Any, page: Page, tensor: Tensor, writes: bool) -> None:
    if thread.gpu is not None and executor._inner.in_place(page) is None:
        thread.gpu.access_on_host(tensor, writes=not writes)
        with untraced():
            return original(executor, page, tensor, writes)
    return original(executor, page, tensor, writes)


@contextmanager
def _borrowed(buffers: BounceBuffers, original: Any) -> Iterator[Tensor]:
    with original(buffers) as memory:
        key = (id(buffers), "bounce", memory.data_ptr())
        if thread.gpu is not None:
            thread.gpu.handoffs.acquire(key)
        try:
            yield memory
        finally:
            if thread.gpu is not None:
                thread.gpu.handoffs.release(key)


# -- a save in a thread of its own -------------------------------------------------------------------------------------


def _start(saving: Saving, original: Any) -> None:
    if thread.gpu is not None:
        thread.gpu.handoffs.release((id(saving), "start"))
    original(saving)


def _write_behind(saving: Saving, original: Any) -> None:
    gpu = saving._world.compute
    if not isinstance(gpu, InstrumentedDevice):
        original(saving)
        return
    with _leaving():
        gpu.attach_thread()
        gpu.handoffs.acquire((id(saving), "start"))
        original(saving)


def _end_copies(saving: Saving, original: Any) -> None:
    if thread.gpu is not None:
        thread.gpu.handoffs.release((id(saving), "copies"))
    original(saving)


def _await_copies(saving: Saving, original: Any) -> None:
    original(saving)
    if thread.gpu is not None and thread.gpu.keeps_wait("ticket"):
        thread.gpu.handoffs.acquire((id(saving), "copies"))


# -- the other ranks ---------------------------------------------------------------------------------------------------


def _enter(world: World, original: Any) -> Any:
    if isinstance(world.compute, InstrumentedDevice):
        world.compute.attach_thread()
    return original(world)


def _exit(world: World, original: Any, *error: Any) -> Any:
    try:
        return original(world, *error)
    finally:
        thread.gpu = None


def _between_hosts(hosts: Hosts, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a collective of small host tensors unrecorded, because with a GPU it uses gloo and no stream."""
    with untraced():
        return original(hosts, *args, **kwargs)


def _gather(here: Transport, original: Any, shard_S: Tensor, full_P: Tensor, op: str, *, aside: bool = False) -> Handle:
    if aside or not _is_traced(here, full_P):
        with untraced():
            return original(here, shard_S, full_P, op, aside=aside)
    return _collective(here, op, shard_S, full_P, lambda into: original(here, shard_S, into, op))


def _all_to_all(here: Transport, original: Any, full_P: Tensor, recv_P: Tensor, op: str) -> Handle:
    if not _is_traced(here, recv_P):
        return original(here, full_P, recv_P, op)
    return _collective(here, op, full_P, recv_P, lambda into: original(here, full_P, into, op))


def _reshard(
    here: Transport, original: Any, source: Tensor, into: Tensor, before: Sequence[int], after: Sequence[int], op: str
) -> Handle:
    if not _is_traced(here, into):
        return original(here, source, into, before, after, op)
    return _collective(here, op, source, into, lambda late: original(here, source, late, before, after, op))


def _broadcast(here: Transport, original: Any, flat: Tensor, source: int, op: str) -> Handle:
    if not _is_traced(here, flat) or here.rank == source:
        return original(here, flat, source, op)
    return _collective(here, op, flat[:0], flat, lambda into: original(here, into, source, op))


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "gather": _gather,
    "all_to_all": _all_to_all,
    "reshard": _reshard,
    "reduce_scatter": _all_to_all,
    "broadcast": _broadcast,
}


def _is_traced(here: Transport, tensor: Tensor) -> bool:
    return thread.gpu is here.compute and not thread.is_untraced and here.compute.is_home_of(tensor)


def _collective(here: Transport, op: str, source: Tensor, into: Tensor, start: Callable[[Tensor], Handle]) -> Handle:
    """Start a collective on a simulated stream of its own, the network; return the handle to wait for.

    On deferred streams, the result is also written to `into` as late as the waits allow.

    Args:
        source: the tensor that this rank sends.
        into: the tensor that receives the result.
        start: starts the real collective, which writes its result into the argument.
    """
    gpu = here.compute
    assert isinstance(gpu, InstrumentedDevice)
    streams = gpu.streams
    before, marker = Marker(), Marker()
    streams.allocated([source, into])
    streams.record(before)
    network = streams.collective()
    with streams.on(network):
        streams.wait_on_stream(before)
        streams.run(network, network.launched)  # compute `source` now, because the other ranks need its values
        streams.add_time(network.agent, into.nbytes / streams.rates.network_bytes_per_s, "network")
        arriving = _outside(into, source)
        streams.access(network.agent, [source], arriving, op)
        with untraced():
            arrived = torch.empty_like(into) if streams.is_deferred() else into
            if streams.is_deferred() and not source.numel():
                arrived.copy_(into)
            started = start(arrived)
        if streams.is_deferred():
            streams.launch(lambda: _deliver(started, arrived, into), arriving)
        streams.record(marker)

    def arrive() -> None:
        if gpu.keeps_wait("collective"):
            streams.wait_on_stream(marker)
        with untraced():
            started.wait()

    return Then(arrive, (source, into))


def _deliver(started: Handle, arrived: Tensor, into: Tensor) -> None:
    started.wait()
    into.data.copy_(arrived)


def _outside(into: Tensor, source: Tensor) -> list[Tensor]:
    """Return the parts of `into` that a collective writes: an in-place gather does not write the part `source`."""
    if into.dim() == 2:
        return [row for row in into.unbind() if row.data_ptr() != source.data_ptr()]
    first = (source.data_ptr() - into.data_ptr()) // max(into.element_size(), 1)
    if not source.numel() or not 0 <= first < into.numel():
        return [into]
    return [part for part in (into[:first], into[first + source.numel() :]) if part.numel()]
