"""A GPU that is none: every decision of the engine is the one it makes for a GPU, and its memory is the host's.

    with zero.testing.simulated_gpu():
        world = zero.World.from_env()

What lies in the arena, which on a GPU is pinned memory of the host, is host memory here, and everything else is the
device's: what travels between tiers is copied as it would be, and kernels are the CPU's. With `races` every operator is
checked: see `races` for what orders it, and `streams` for when it runs.
"""

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import zero.testing.streams as simulation
from zero.platform.device import Clock, Device, Event, GiB, Moment, aligned_zeros, work_alone
from zero.testing.handoffs import Watched, watching
from zero.testing.operators import (
    LOOKS,
    WAITS,
    Form,
    flops_of,
    form_of,
    fresh_tensors,
    results_of,
    tensors_of,
)
from zero.testing.streams import Gate, Handed, Marker, Streams, quietly, thread

ROOT = str(Path(__file__).parents[2])
LIBRARY, HERE = f"{ROOT}/zero/", str(Path(__file__).parent)
DOORS = ("zero/platform/device.py", "zero/platform/cuda.py", "zero/platform/timeline.py")
PASSED_ON = {
    ("zero/distributed/world.py", "wait"),
    ("zero/store/workers.py", "wait"),
    ("zero/store/prefetch.py", "drain"),
    ("zero/engine/update.py", "wait"),
}
"""Functions that only pass a wait on."""


class Site(NamedTuple):
    """A wait in the code: which kind, and where it is asked for."""

    kind: str
    file: str
    line: int


class Copied(NamedTuple):
    """A copy between the host and the device."""

    stream: str
    to_host: bool
    nbytes: int


@dataclass(frozen=True)
class Settings:
    """What `simulated_gpu` is asked for."""

    memory_bytes: int
    races: bool
    order: str
    seed: int
    without: Site | None

    @property
    def is_watching(self) -> bool:
        """Every operator is looked at."""
        return self.races or self.order != "program"


class Simulation:
    """What has been seen of the devices that were made within one `simulated_gpu`.

    Attributes:
        gpus: one for each rank.
        sites: the waits that were made, if operators were watched.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.gpus: list[SimulatedGpu] = []
        self.sites: set[Site] = set()

    @property
    def counts(self) -> Counter[str]:
        """Launches, waits of the host, bytes each way: of all devices."""
        return sum((gpu.streams.counts for gpu in self.gpus), Counter())

    def finish(self) -> None:
        """Raise what nobody could be told before."""
        for gpu in self.gpus:
            if gpu.streams.found:
                raise gpu.streams.found[0]

    def make(self) -> "SimulatedGpu":
        if not self.settings.is_watching:
            self.gpus.append(SimulatedGpu(self.settings.memory_bytes))
        else:
            self.gpus.append(WatchedGpu(self))
            if thread.watching is not None:
                thread.gpu = self.gpus[-1]
        return self.gpus[-1]


class SimulatedGpu(Device):
    """A device with memory of its own, by which memory of the host is told from it.

    Args:
        memory_bytes: what it has.
        order, seed: see `streams`.
    """

    kind = "cuda"
    shares_memory = False
    piece_numel, sum_numel, batch_bytes = 1 << 26, 1 << 22, 16 << 20

    def __init__(self, memory_bytes: int, order: str = "program", seed: int = 0) -> None:
        super().__init__(torch.device("cpu"))
        self._memory_bytes = memory_bytes
        self.streams = Streams(order, seed)
        self._host_memory: dict[int, int] = {}  # where pieces of it begin, and where they end
        self._pinned: set[int] = set()
        self._lock = threading.Lock()

    @property
    def host(self) -> Device:
        return _HostOf(self)

    def sum_of_squares(self, flat: Tensor) -> Tensor:
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square_()

    def is_home_of(self, tensor: Tensor) -> bool:
        return self._piece_of_host(tensor) is None

    def bring(self, tensor: Tensor) -> Tensor:
        if self.is_home_of(tensor):
            return tensor
        there = torch.empty_like(tensor)
        self.copy(there, tensor)
        return there

    def adopt(self, memory: Tensor) -> None:
        """Memory of the host, for as long as a tensor looks at it."""
        first = memory.data_ptr()
        with self._lock:
            self._host_memory = {**self._host_memory, first: first + memory.nbytes}
        weakref.finalize(memory.untyped_storage(), self._forget, first).atexit = False

    def pin(self, memory: Tensor) -> bool:
        self._pinned.add(memory.untyped_storage().data_ptr())
        return True

    def unpin(self, memory: Tensor) -> None:
        self._pinned.discard(memory.untyped_storage().data_ptr())

    def give_back_memory(self) -> None:
        """Nothing, as on a GPU."""

    def free_bytes(self) -> int:
        return self._memory_bytes

    def total_bytes(self) -> int:
        return self._memory_bytes

    @property
    def is_quiet(self) -> bool:
        """Nothing is under way, as far as the thread that asks knows."""
        return True

    def _piece_of_host(self, tensor: Tensor) -> int | None:
        address = tensor.untyped_storage().data_ptr()
        return next((first for first, stop in self._host_memory.items() if first <= address < stop), None)

    def _forget(self, first: int) -> None:
        with self._lock:
            self._host_memory = {one: stop for one, stop in self._host_memory.items() if one != first}


class _HostOf(Device):
    """The host beside a simulated GPU, where it updates what it holds."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        super().__init__(gpu.device)
        self._gpu = gpu

    def is_home_of(self, tensor: Tensor) -> bool:
        return not self._gpu.is_home_of(tensor)

    def bring(self, tensor: Tensor) -> Tensor:
        if self.is_home_of(tensor):
            return tensor
        here = self.zeros(tensor.numel(), tensor.dtype).view(tensor.shape)
        here.copy_(tensor)
        return here

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        here = aligned_zeros(numel, dtype, self.device)
        if numel:
            self._gpu.adopt(here)
        return here


class SimulatedEvent(Event):
    """A point of a simulated stream."""

    def __init__(self, gpu: "WatchedGpu") -> None:
        self._gpu, self._marker = gpu, Marker()

    def record(self) -> None:
        self._gpu.streams.record(self._marker)

    def finish(self) -> None:
        if self._gpu.is_there("finish"):
            self._gpu.streams.await_(self._marker)

    def wait(self) -> None:
        if self._gpu.is_there("wait"):
            self._gpu.streams.hold_back(self._marker)


class SimulatedClock(Clock):
    """The simulation's time."""

    def __init__(self, gpu: "WatchedGpu") -> None:
        self._streams = gpu.streams
        gpu.streams.await_all()
        self._zero_s = self._streams.host.time_s

    def host(self) -> float:
        return self._streams.host.time_s

    def here(self) -> Moment:
        return max(self._streams.current.agent.time_s, self._streams.host.time_s)

    def main(self) -> Moment:
        return max(self._streams.main.agent.time_s, self._streams.host.time_s)


class WatchedGpu(SimulatedGpu, Watched):
    """A simulated GPU with streams, of which every operator is told.

    Attributes:
        copies: between it and the host, in the order in which they were launched.
    """

    def __init__(self, simulation: Simulation) -> None:
        settings = simulation.settings
        super().__init__(settings.memory_bytes, settings.order, settings.seed)
        self.simulation = simulation
        self.handed = Handed(self.streams)
        self.gate = Gate(is_held=simulation.settings.order == "late")
        self.copies: list[Copied] = []

    @contextmanager
    def aside(self, name: str, *, after: Event | None = None) -> Iterator[Event]:
        streams = self.streams
        before, event = Marker(), SimulatedEvent(self)
        streams.record(before)
        with streams.on(streams.stream(f"the stream {name!r}")):
            if after is not None:
                after.wait()
            elif self.is_there("aside"):
                streams.hold_back(before)
            try:
                yield event
            finally:
                event.record()

    def event(self) -> Event:
        return SimulatedEvent(self)

    def mark(self) -> Event:
        event = SimulatedEvent(self)
        event.record()
        return event

    def join(self) -> None:
        if self.is_there("join"):
            self.streams.await_all()

    def clock(self) -> Clock:
        return SimulatedClock(self)

    @contextmanager
    def paging(self, name: str, after: Event, *, now: bool = False, end: Event | None = None) -> Iterator[None]:
        stream = self.streams.stream(f"the stream of {name!r}")
        if now:
            after.finish()
        with self.streams.on(stream):
            after.wait()
            try:
                yield
            finally:
                if end is not None:
                    end.record()
                elif self.is_there("paging"):
                    self.streams.await_stream(stream)

    def unpin(self, memory: Tensor) -> None:
        self.streams.counts["unpinned in use"] += not self.is_quiet
        super().unpin(memory)

    def prepare_thread(self) -> None:
        work_alone()
        thread.beside = True
        self.attend()

    def copy(self, into: Tensor, source: Tensor) -> None:
        before, thread.asynchronous = thread.asynchronous, True
        try:
            into.copy_(source)
        finally:
            thread.asynchronous = before

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        found = super().zeros(numel, dtype)
        self.streams.touch(self.streams.current.agent, [], [found], f"zeros{_at()}")
        return found

    def numbers(self, tensor: Tensor) -> list[Any]:
        self.streams.await_stream(self.streams.current)
        with quietly():
            return tensor.tolist()

    @property
    def is_quiet(self) -> bool:
        return self.streams.is_quiet

    # -- what is watched -----------------------------------------------------------------------------------------------

    def is_there(self, kind: str) -> bool:
        """A wait is made; it is not the one that is left out."""
        site = Site(kind, *_asked_at())
        self.simulation.sites.add(site)
        return site != self.simulation.settings.without

    def operate(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One operator: note what it touches, and run it now or later.

        Raises:
            RaceError: nothing orders it after another one.
            AssertionError: it was given memory of the host and of the device.
        """
        form = form_of(operator)
        if form.name in WAITS:
            self.streams.await_stream(self.streams.current)
        if form.looks:
            result = operator(*args, **kwargs)
            if form.allocates:
                self.streams.allocated(fresh_tensors(result))
            return result
        reads, writes = (tensors_of(form, args, kwargs, written=written) for written in (False, True))
        homes = {self.is_home_of(tensor) for tensor in (*reads, *writes) if tensor.dim()}  # numbers may lie anywhere
        if homes == {False}:
            return self._on_host(form, operator, args, kwargs, reads, writes)
        self._note(form, reads, writes, flops_of(operator, args, kwargs), mixed=len(homes) == 2)
        result = self._run(form, operator, args, kwargs, writes)
        if len(homes) == 2 and not self._is_asynchronous(reads, writes):
            self.streams.await_stream(self.streams.current)
        return result

    def touch_on_host(self, tensor: Tensor, *, writes: bool) -> None:
        """The host itself moves bytes between its memory and something else, such as a file."""
        streams = self.streams
        streams.takes(streams.host, tensor.nbytes / simulation.HOST_BYTES_PER_S, launched=False)
        if self.is_home_of(tensor):
            return  # files move no memory of the device: this is the host's own, of which nothing is known here
        what = f"{'a read from' if writes else 'a write to'} a file{_at()}"
        streams.touch(streams.host, *(([], [tensor]) if writes else ([tensor], [])), what)

    def _on_host(
        self,
        form: Form,
        operator: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        reads: list[Tensor],
        writes: list[Tensor],
    ) -> Any:
        streams, moved = self.streams, sum(tensor.nbytes for tensor in (*reads, *writes))
        streams.takes(streams.host, moved / simulation.HOST_BYTES_PER_S, launched=False)
        streams.touch(streams.host, reads, writes, f"{form.name}{_at()}")
        result = operator(*args, **kwargs)
        for fresh in () if form.in_place else fresh_tensors(result):
            if fresh.untyped_storage().data_ptr() not in self._host_memory and fresh.numel():
                self.adopt(fresh)
        return result

    def _note(self, form: Form, reads: list[Tensor], writes: list[Tensor], flops: int, *, mixed: bool) -> None:
        streams, agent = self.streams, self.streams.current.agent
        written = sum(tensor.nbytes for tensor in writes)
        seconds = (written + sum(tensor.nbytes for tensor in reads)) / simulation.DEVICE_BYTES_PER_S
        if mixed:
            if form.name not in COPIES:
                raise AssertionError(f"{form.name} got memory of the host and of the device{_at()}")
            seconds = written / simulation.LINK_BYTES_PER_S
            self.copies.append(Copied(agent.name, any(not self.is_home_of(tensor) for tensor in writes), written))
            streams.counts["bytes to the host" if self.copies[-1].to_host else "bytes from the host"] += written
        streams.counts["launches"] += 1
        streams.takes(agent, max(seconds, flops / simulation.FLOPS_PER_S))
        streams.touch(agent, reads, writes, f"{form.name}{_at()}")

    def _run(self, form: Form, operator: Any, args: Sequence[Any], kwargs: dict[str, Any], writes: list[Tensor]) -> Any:
        streams = self.streams
        if streams.is_late() and form.in_place:
            streams.launch(lambda: operator(*args, **kwargs), writes)
            return results_of(form, args, kwargs)
        if not streams.is_late():
            streams.launch(lambda: None, ())
        result = operator(*args, **kwargs)
        fresh = [] if form.in_place else fresh_tensors(result)
        streams.touch(streams.current.agent, [], fresh, f"{form.name}{_at()}")
        if streams.is_late():
            streams.launch(lambda: _again(operator, args, kwargs, fresh), fresh)
        return result

    def _is_asynchronous(self, reads: list[Tensor], writes: list[Tensor]) -> bool:
        away = [piece for tensor in (*reads, *writes) if (piece := self._piece_of_host(tensor)) is not None]
        return thread.asynchronous and all(piece in self._pinned for piece in away)


COPIES = frozenset(("aten::copy_", "aten::_foreach_copy_", "aten::_to_copy", "aten::clone"))
"""What may have one end in memory of the host and the other on the device."""


def _again(operator: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]) -> None:
    """Compute what was computed too early once more, now from what its arguments hold."""
    for tensor, value in zip(results, fresh_tensors(operator(*args, **kwargs)), strict=True):
        tensor.data.copy_(value)


def _asked_at() -> tuple[str, int]:
    """The file and line in the library of whoever asks; doors and what passes a wait on are left out."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        is_ours = file.startswith(LIBRARY) and not file.startswith(HERE)
        if is_ours and not file.endswith(DOORS) and (file[len(ROOT) + 1 :], frame.f_code.co_name) not in PASSED_ON:
            return file[len(ROOT) + 1 :], frame.f_lineno
        frame = frame.f_back
    return "", 0


def _at() -> str:
    file, line = _asked_at()
    return f" ({file}:{line})" if file else ""


_SETTINGS: list[Settings] = []
"""Of the blocks that this process is in."""


def surroundings() -> Settings | None:
    """What a new process has to be told, so that its worlds have what those of this one have."""
    return _SETTINGS[-1] if _SETTINGS else None


@contextmanager
def within(settings: Settings | None) -> Iterator[None]:
    """The surroundings of another process."""
    if settings is None:
        yield
        return
    with _simulated(settings):
        yield


@contextmanager
def simulated_gpu(
    memory_bytes: int = 64 * GiB,
    *,
    races: bool = False,
    order: str = "program",
    seed: int = 0,
    without: Site | None = None,
) -> Iterator[Simulation]:
    """Worlds that are made in the block have a simulated GPU, those of `run_ranks` and `run_processes` too.

    Args:
        memory_bytes: what each GPU has.
        races: look for accesses to the same bytes that nothing orders.
        order: when what is launched on side streams runs: "program", "late" or "random".
        seed: of random moments.
        without: a wait that is left out, for tests of the simulation.

    Yields:
        What is seen.

    Raises:
        RaceError: there is a race; usually from where it is, as the operator is called.
    """
    with _simulated(Settings(memory_bytes, races, order, seed, without)) as seen:
        yield seen


@contextmanager
def _simulated(settings: Settings) -> Iterator[Simulation]:
    seen = Simulation(settings)
    before, Device.stand_in = Device.stand_in, seen.make
    _SETTINGS.append(settings)
    try:
        with watching() if seen.settings.is_watching else nullcontext():
            yield seen
        seen.finish()
    finally:
        _SETTINGS.pop()
        Device.stand_in = before


def count_launches(run: Callable[[], object]) -> Counter[str]:
    """What `run` would launch on a GPU: operators by name, called from outside of operators, in all threads."""
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as told:
        run()
    return Counter(event.name for event in told.events() if event.name.startswith("aten::") and _is_launch(event))


def _is_launch(event: "torch.autograd.profiler_util.FunctionEvent") -> bool:
    around = event.cpu_parent
    while around is not None and not around.name.startswith("aten::"):
        around = around.cpu_parent
    return around is None and event.name not in LOOKS
