"""The devices of a simulated GPU: one that knows host memory by its addresses, and one that records all operations."""

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from tests.simulation.handoffs import InstrumentedDevice
from tests.simulation.live_memory import LiveMemory
from tests.simulation.operators import (
    SYNCHRONIZING,
    OperatorInfo,
    in_place_results,
    matmul_flops,
    operator_info,
    tensor_arguments,
    tensors_in,
)
from tests.simulation.simulated_time import CORES, RATES, Moment, Rates, latest
from tests.simulation.streams import Handoffs, Marker, Streams, thread, untraced
from zero.core.moments import permutation
from zero.platform.device import Clock, Device, Event, work_alone
from zero.platform.host_memory import aligned_zeros

ROOT = str(Path(__file__).parents[2])
LIBRARY, RANKS = f"{ROOT}/zero/", f"{ROOT}/zero/testing/"
DEVICE_FILES = ("zero/platform/device.py", "zero/platform/cuda.py", "zero/platform/tape.py")
"""Files that define waits. The line of a wait is that of a caller outside of these files."""
FORWARDING = {
    ("zero/platform/handle.py", "wait"),
    ("zero/distributed/traffic.py", "wait"),
    ("zero/store/workers.py", "wait"),
    ("zero/store/prefetch.py", "drain"),
}
"""(file, function) of functions that only forward a wait. The line of the wait is that of their caller, too."""

CACHED_TENSORS = 48
"""Tensors that an update of one piece reads and writes."""

COPIES = frozenset(("aten::copy_", "aten::_foreach_copy_", "aten::_to_copy", "aten::clone"))
"""Operators that may have one argument on the host and another on the device."""


class WaitSite(NamedTuple):
    """A wait in the library's code: the method that waits, and the file and line of the call."""

    name: str
    file: str
    line: int


class CopyRecord(NamedTuple):
    """A copy between host and device: its stream, direction and bytes, and whether the host memory is pinned."""

    stream: str
    to_host: bool
    nbytes: int
    pinned: bool


class SimulatedGpu(Device):
    """A CPU that acts as a GPU: it knows by their addresses which tensors are in host memory.

    Args:
        memory_bytes: size of the simulated GPU's memory.
        order, seed, rates: see `Streams`.
        fused: run the kernels of `zero.platform.kernels`, in the interpreter of Triton.
    """

    kind = "cuda"
    shares_memory = False
    piece_numel, sum_numel, batch_bytes = 1 << 24, 1 << 22, 16 << 20

    def __init__(
        self, memory_bytes: int, order: str = "program", seed: int = 0, rates: Rates = RATES, *, fused: bool = False
    ) -> None:
        super().__init__(torch.device("cpu"))
        if fused:
            import_module("zero.platform.kernels")
            self.tile_numel = 4096
        self._uploaded: list[Tensor] = []
        self._memory_bytes = memory_bytes
        self.streams = Streams(order, seed, rates)
        self._host_memory: dict[int, int] = {}  # address of a block of host memory -> address of its end
        self._pinned: set[int] = set()
        self._lock = threading.Lock()

    @property
    def host(self) -> Device:
        return _SimulatedHost(self)

    def sum_of_squares(self, flat: Tensor) -> Tensor:
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square_()

    def is_home_of(self, tensor: Tensor) -> bool:
        return self._piece_of_host(tensor) is None

    def adopt(self, memory: Tensor) -> None:
        """Treat `memory` as host memory until its storage is freed."""
        first = memory.data_ptr()
        with self._lock:
            self._host_memory = {**self._host_memory, first: first + memory.nbytes}
        weakref.finalize(memory.untyped_storage(), self._forget, first).atexit = False

    def pin(self, memory: Tensor) -> bool:
        self._pinned.add(memory.untyped_storage().data_ptr())
        return True

    def unpin(self, memory: Tensor) -> None:
        self._pinned.discard(memory.untyped_storage().data_ptr())

    def upload(self, values: Tensor) -> Tensor:
        self._uploaded.append(values)  # on a GPU the allocator keeps pinned memory until its copies are done
        self.adopt(values)
        self.pin(values)
        here = self.room_for(values)
        self._copy(here, values)  # as on a GPU, `copied` does not count it
        return here

    def leave(self, tensor: Tensor) -> tuple[Tensor, Event]:
        there = self.host.zeros(tensor.numel(), tensor.dtype).view(tensor.shape)
        self.pin(there)
        self._copy(there, tensor)
        return there, self.mark()

    def give_back_memory(self, *, cached: bool = False) -> None:
        """Do nothing, as on a GPU."""

    def free_bytes(self) -> int:
        return self._memory_bytes

    def total_bytes(self) -> int:
        return self._memory_bytes

    @property
    def is_idle(self) -> bool:
        """Return whether the calling thread has waited for all work of the device; True without a record of races."""
        return self.streams.is_idle

    def _piece_of_host(self, tensor: Tensor) -> int | None:
        address = tensor.untyped_storage().data_ptr()
        return next((first for first, stop in self._host_memory.items() if first <= address < stop), None)

    def _forget(self, first: int) -> None:
        with self._lock:
            self._host_memory = {start: stop for start, stop in self._host_memory.items() if start != first}


class _SimulatedHost(Device):
    """The device for computations in host memory, such as updates, beside a simulated GPU."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__(gpu.device, gpu.copied)
        self._gpu = gpu

    def is_home_of(self, tensor: Tensor) -> bool:
        return not self._gpu.is_home_of(tensor)

    def room_for(self, tensor: Tensor) -> Tensor:
        return tensor if self.is_home_of(tensor) else self.zeros(tensor.numel(), tensor.dtype).view(tensor.shape)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        with untraced():
            on_host = aligned_zeros(numel, dtype, self.device)
        if numel:
            self._gpu.adopt(on_host)
        return on_host


class SimulatedEvent(Event):
    """An event of a simulated stream."""

    def __init__(self, gpu: "InstrumentedGpu") -> None:
        self._gpu, self._marker = gpu, Marker()

    def record(self) -> None:
        self._gpu.streams.record(self._marker)

    def finish(self) -> None:
        if self._gpu.keeps_wait("finish"):
            self._gpu.streams.synchronize_marker(self._marker)

    def wait(self) -> None:
        if self._gpu.keeps_wait("wait"):
            self._gpu.streams.wait_on_stream(self._marker)


class SimulatedClock(Clock):
    """A clock of the simulated time of streams and threads."""

    def __init__(self, gpu: "InstrumentedGpu") -> None:
        self._streams = gpu.streams
        gpu.streams.synchronize()
        self._zero = self._streams.host.moment

    def host(self) -> Moment:
        return self._streams.host.moment

    def here(self) -> Moment:
        return latest(self._streams.current.agent.moment, self.host())

    def main(self) -> Moment:
        return latest(self._streams.main.agent.moment, self.host())

    def seconds(self, moment: object) -> float:
        assert isinstance(moment, Moment)
        return self._streams.seconds(moment) - self._streams.seconds(self._zero)


class InstrumentedGpu(SimulatedGpu, InstrumentedDevice):
    """A simulated GPU with streams, which records every operator, wait and copy.

    Args:
        sites: a set to which each executed wait is added.
        without: a wait to skip.
        limited: whether allocations beyond `memory_bytes` raise torch.OutOfMemoryError.

    Attributes:
        copies: the copies between host and device, in the order of their launches.
        memory: the live bytes of the device.
    """

    def __init__(
        self,
        memory_bytes: int,
        order: str,
        seed: int,
        rates: Rates,
        *,
        sites: set[WaitSite],
        without: WaitSite | None,
        fused: bool = False,
        limited: bool = False,
    ) -> None:
        super().__init__(memory_bytes, order, seed, rates, fused=fused)
        self._limited, self.memory = limited, LiveMemory(memory_bytes if limited else None)
        self._sites, self._without = sites, without
        self.handoffs = Handoffs(self.streams)
        self.copies: list[CopyRecord] = []

    @contextmanager
    def aside(self, name: str, *, after: Event | None = None) -> Iterator[Event]:
        streams = self.streams
        before, event = Marker(), SimulatedEvent(self)
        streams.record(before)
        with streams.on(streams.stream(f"the stream {name!r}", urgent=True)):
            if after is not None:
                after.wait()
            elif self.keeps_wait("aside"):
                streams.wait_on_stream(before)
            try:
                yield event
            finally:
                event.record()

    def event(self) -> Event:
        return SimulatedEvent(self)

    def join(self) -> None:
        if self.keeps_wait("join"):
            self.streams.synchronize()

    def clock(self) -> Clock:
        return SimulatedClock(self)

    @contextmanager
    def paging(self, name: str, after: Event, *, now: bool = False) -> Iterator[None]:
        stream = self.streams.new_stream(f"the stream of {name!r}")
        if now:
            after.finish()
        with self.streams.on(stream):
            after.wait()
            try:
                yield
            finally:
                if self.keeps_wait("paging"):
                    self.streams.synchronize(stream)

    def free_bytes(self) -> int:
        limit = self.memory.limit_bytes
        return self._memory_bytes if limit is None else max(0, limit - self.memory.nbytes)

    def peak_bytes(self) -> int:
        return self.memory.peak_bytes

    def adopt(self, memory: Tensor) -> None:
        super().adopt(memory)
        self.memory.release(memory)

    def unpin(self, memory: Tensor) -> None:
        self.streams.counts["unpinned in use"] += not self.is_idle
        super().unpin(memory)

    def prepare_thread(self) -> None:
        work_alone()
        thread.is_worker = True
        self.attach_thread()

    def _copy(self, into: Tensor, source: Tensor) -> None:
        with patch.object(thread, "asynchronous", True):
            into.copy_(source)

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        zeros = super().zeros(numel, dtype)
        self.memory.hold([zeros])
        self.streams.access(self.streams.current.agent, [], [zeros], f"zeros{_location()}")
        return zeros

    def on_host(self, tensor: Tensor) -> Tensor:
        self.streams.synchronize(self.streams.current)
        with untraced():
            return tensor.clone()

    # -- recording -----------------------------------------------------------------------------------------------------

    def keeps_wait(self, name: str) -> bool:
        site = WaitSite(name, *_calling_line())
        self._sites.add(site)
        return site != self._without

    def dispatch(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Record one call of a torch operator, execute it now or later, and return its result.

        Raises:
            RaceError: the call races with an earlier access.
            AssertionError: the arguments are on both host and device, and the operator is not a copy.
        """
        info = operator_info(operator)
        if info.name in SYNCHRONIZING:
            self.streams.synchronize(self.streams.current)
        if info.without_kernel:
            result = operator(*args, **kwargs)
            if info.allocates and self._is_like_one_of_the_host(args, kwargs):
                self._adopt_all(result)
                _cache.hold(tensors_in(result))
            elif info.allocates:
                self.memory.hold(tensors_in(result))
                self.streams.allocated(tensors_in(result))
            return result
        reads, writes = (tensor_arguments(info, args, kwargs, written=written) for written in (False, True))
        homes = {self.is_home_of(tensor) for tensor in (*reads, *writes) if not _may_be_anywhere(tensor)}
        if homes == {False}:
            self._record_on_host(info, reads, writes)
            result = operator(*args, **kwargs)
            if not info.in_place:
                self._adopt_all(result)
                _cache.hold(tensors_in(result))
            return result
        self._record(info, reads, writes, matmul_flops(operator, args, kwargs), mixed=len(homes) == 2)
        result = self._execute(info, operator, args, kwargs, writes)
        if len(homes) == 2 and not self._is_asynchronous(reads, writes):
            self.streams.synchronize(self.streams.current)
        return result

    def access_on_host(self, tensor: Tensor, *, writes: bool) -> None:
        """Record that the host reads or writes `tensor` without a torch operator, such as for file I/O."""
        streams = self.streams
        resource = "bytes from files" if writes else "bytes to files"
        streams.counts[resource] += tensor.nbytes
        seconds = tensor.nbytes / streams.rates.disk_bytes_per_s
        streams.add_time(streams.host, seconds, resource, memory_bytes=tensor.nbytes)
        if self.is_home_of(tensor):
            return  # temporary host memory that was not registered, because file I/O cannot access device memory
        what = f"{'a read from' if writes else 'a write to'} a file{_location()}"
        streams.access(streams.host, *(([], [tensor]) if writes else ([tensor], [])), what)

    def _record_on_host(self, info: OperatorInfo, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Record the time and the accesses of an operator that the host executes."""
        streams, moved = self.streams, sum(tensor.nbytes for tensor in (*reads, *writes))
        missed = _cache.missed(reads, writes) if streams.rates.memory_bytes_per_s < inf else 0
        cores = CORES if streams.rates.cores and thread.is_worker else ""
        streams.add_time(streams.host, moved / streams.rates.host_bytes_per_s, cores, memory_bytes=missed)
        streams.access(streams.host, reads, writes, f"{info.name}{_location()}")

    def _is_like_one_of_the_host(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether an allocation takes its device from a tensor in host memory, as `empty_like` can."""
        return any(not self.is_home_of(tensor) for tensor in tensors_in(args)) and kwargs.get("device") is None

    def _adopt_all(self, result: Any) -> None:
        for fresh in tensors_in(result):
            if fresh.untyped_storage().data_ptr() not in self._host_memory and fresh.numel():
                self.adopt(fresh)

    def _record(
        self, info: OperatorInfo, reads: list[Tensor], writes: list[Tensor], flops: int, *, mixed: bool
    ) -> None:
        """Record a launch on the current stream, with its time and its accesses.

        Args:
            mixed: whether the arguments are on both host and device.
        """
        streams, agent, rates = self.streams, self.streams.current.agent, self.streams.rates
        written = sum(tensor.nbytes for tensor in writes)
        seconds = (written + sum(tensor.nbytes for tensor in reads)) / rates.device_bytes_per_s
        resource, copied = "kernels", 0
        if mixed:
            if info.name not in COPIES:
                raise AssertionError(f"{info.name} has arguments both on the host and on the device{_location()}")
            seconds, copied = written / rates.link_bytes_per_s, written
            to_host = any(not self.is_home_of(tensor) for tensor in writes)
            self.copies.append(CopyRecord(agent.name, to_host, written, self._is_pinned(reads, writes)))
            resource = "bytes to the host" if self.copies[-1].to_host else "bytes from the host"
            streams.counts[resource] += written
        streams.counts["launches"] += 1
        urgent = streams.current.urgent and resource == "kernels"
        seconds = max(seconds, flops / rates.flops_per_s)
        streams.add_time(agent, seconds, resource, urgent=urgent, memory_bytes=copied)
        streams.access(agent, reads, writes, f"{info.name}{_location()}")

    def _execute(
        self, info: OperatorInfo, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], writes: list[Tensor]
    ) -> Any:
        """Run an operator on the current stream and return its result.

        On a deferred stream, the values are computed later. An in-place operator runs only then. Any other operator
        runs now, for a result of the right shape, and again later, for the values.
        """
        streams = self.streams
        if streams.is_deferred() and info.in_place:
            streams.launch(lambda: operator(*args, **kwargs), writes)
            return in_place_results(info, args, kwargs)
        if not streams.is_deferred():
            streams.launch(lambda: None, ())
        result = operator(*args, **kwargs)
        fresh = [] if info.in_place else tensors_in(result)
        self.memory.hold(fresh)
        streams.access(streams.current.agent, [], fresh, f"{info.name}{_location()}")
        if streams.is_deferred():
            streams.launch(lambda: _recompute(operator, args, kwargs, fresh), fresh)
        return result

    def _is_asynchronous(self, reads: list[Tensor], writes: list[Tensor]) -> bool:
        return thread.asynchronous and self._is_pinned(reads, writes)

    def _is_pinned(self, reads: list[Tensor], writes: list[Tensor]) -> bool:
        """Return whether those of the tensors that are in host memory are in pinned memory."""
        pieces = [piece for tensor in (*reads, *writes) if (piece := self._piece_of_host(tensor)) is not None]
        return all(piece in self._pinned for piece in pieces)


class _Cache(threading.local):
    """The cache of one thread: the tensors that its last operators read and wrote, as many as one piece has."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], bool] = {}  # (address, bytes) -> whether it was written

    def missed(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> int:
        """Return the bytes that an operator moves between the cache and memory; a write is counted at its first."""
        nbytes = 0
        for tensor, written in [*((tensor, False) for tensor in reads), *((tensor, True) for tensor in writes)]:
            key = tensor.data_ptr(), tensor.nbytes
            before = self._recent.pop(key, None)
            nbytes += tensor.nbytes * ((before is None and not written) + (written and not before))
            self._recent[key] = written or bool(before)
        self._evict()
        return nbytes

    def hold(self, results: Sequence[Tensor]) -> None:
        """Note new results, which have not been in memory."""
        self._recent |= {(tensor.data_ptr(), tensor.nbytes): True for tensor in results}
        self._evict()

    def _evict(self) -> None:
        while len(self._recent) > CACHED_TENSORS:
            self._recent.pop(next(iter(self._recent)))


_cache = _Cache()


def _may_be_anywhere(tensor: Tensor) -> bool:
    """Return whether device and host each have such a tensor: a number, or the table of random bits."""
    return not tensor.dim() or tensor.untyped_storage().data_ptr() == permutation(tensor.device).data_ptr()


def _recompute(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]) -> None:
    """Run the operator again, when its stream has reached it, and copy the values into the results of the first run."""
    for tensor, value in zip(results, tensors_in(operator(*args, **kwargs)), strict=True):
        tensor.data.copy_(value)


def _calling_line() -> tuple[str, int]:
    """Return (file, line) of the innermost caller in the library that is not in `DEVICE_FILES` or `FORWARDING`.

    Without such a caller, return ("", 0).
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        is_library = file.startswith(LIBRARY) and not file.startswith(RANKS)
        relative = file[len(ROOT) + 1 :]
        if is_library and not file.endswith(DEVICE_FILES) and (relative, frame.f_code.co_name) not in FORWARDING:
            return relative, frame.f_lineno
        frame = frame.f_back
    return "", 0


def _location() -> str:
    file, line = _calling_line()
    return f" ({file}:{line})" if file else ""
