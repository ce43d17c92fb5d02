"""The compute device, as the engine uses it: streams with events, memory, readings; and host memory, which all have.

What is here is a CPU, whose streams are no-ops: everything happens in program order. `cuda` is a GPU.

Work that should overlap with compute is enqueued inside `with device.aside("gather")`. Entering waits for all compute
enqueued so far (so a buffer is never overwritten while a kernel still reads it), leaving gives an `Event` that the
compute stream waits for before it uses the result. Where what has to be over first is known, entering waits for that
event instead (`after`), and the work also runs beside what was enqueued since.
"""

import ctypes
import mmap
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil
import torch
from torch import Tensor

from zero.core.sizes import BLOCK_BYTES, round_up

MEMORY_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""Limit and use of a group in the first version of cgroups."""


class Event:
    """A point that a stream has reached; of a CPU, where all is done in program order, it is always passed."""

    def record(self) -> None:
        """Mark the point that the current stream has reached."""

    def finish(self) -> None:
        """Return when the device has passed the marked point."""

    def wait(self) -> None:
        """Let the current stream go on only after the marked point; the host does not block."""


PASSED = Event()
"""One that has: there is nothing to wait for."""

Moment = object
"""When a stream gets somewhere, on a clock; a float is a moment of the host."""


class Clock:
    """Reads off moments while a step runs, and says afterwards how many seconds they came after this clock was made.

    On a GPU most moments are events on a stream, and nothing waits for one before it is asked for its seconds.
    """

    def __init__(self) -> None:
        self._zero_s = time.perf_counter()

    def host(self) -> float:
        """Now, on the host."""
        return time.perf_counter()

    def here(self) -> Moment:
        """When the current stream gets here."""
        return self.host()

    def main(self) -> Moment:
        """When the stream that computes gets here: the one that was current when this clock was made."""
        return self.host()

    def seconds(self, moment: Moment) -> float:
        assert isinstance(moment, float)
        return moment - self._zero_s


class Copied:
    """Bytes that went between a GPU and host memory, by whichever thread."""

    def __init__(self) -> None:
        self.nbytes, self._lock = 0, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


class Device:
    """One rank's compute device, and whatever about it the engine's decisions depend on: here a CPU.

    Attributes:
        kind: what plans know it as.
        device: where its tensors are, as torch says it.
        backend: what connects ranks that compute on such, as torch.distributed names it.
        shares_memory: it computes in host memory.
        bound: what a process group has to itself: the GPU, None on a CPU.
        piece_numel: elements that an update takes at a time: on a CPU what stays in its cache, else all there are.
        sum_numel: elements that a sum over ranks takes at a time, in scratch of its own.
        batch_bytes: of small tensors that are copied at once, which have to wait for one another.
        copied: counts what `copy` moves between host memory and the GPU, both ways; nothing on a CPU.
    """

    stand_in: ClassVar["Callable[[], Device] | None"] = None
    """Makes another device than the one that a world asks for: see `zero.testing.simulated_gpu`."""

    kind: ClassVar[Literal["cpu", "cuda"]] = "cpu"
    backend: ClassVar[str] = "gloo"
    shares_memory = True
    bound: torch.device | None = None
    piece_numel = 256 * 1024
    sum_numel = 65_536
    batch_bytes = 0

    def __init__(self, device: torch.device, copied: "Copied | None" = None) -> None:
        self.device = device
        self.copied = Copied() if copied is None else copied

    def name(self) -> str:
        """The same for every process that sees this GPU and for no other GPU; "" of a CPU, which may be shared."""
        return ""

    def product(self) -> str:
        """What the GPU is called; "" of a CPU."""
        return ""

    # -- streams -------------------------------------------------------------------------------------------------------

    @contextmanager
    def aside(self, name: str, *, after: Event | None = None) -> Iterator[Event]:
        """Enqueue on the side stream `name` what the body launches; yields the event that marks its end.

        Args:
            after: begin when it has passed; None: when all has that the current stream was given so far. `PASSED`
                where the body itself waits for whatever it needs.
        """
        yield Event()

    def event(self) -> Event:
        """One that somebody will record."""
        return Event()

    def mark(self) -> Event:
        """The point that the current stream has reached."""
        event = self.event()
        event.record()
        return event

    def join(self) -> None:
        """Return when everything that was enqueued on any stream is done."""

    def clock(self) -> Clock:
        """A clock that starts now, which on a GPU waits for what is under way."""
        return Clock()

    @contextmanager
    def paging(self, name: str, after: Event, *, now: bool = False, end: Event | None = None) -> Iterator[None]:
        """Let the body copy between tiers and compute on a stream of its own, from `after` on. For threads beside the
        one that trains.

        Args:
            now: the host waits for `after`, because the host itself computes.
            end: recorded at the end; None: the host waits there.
        """
        yield

    def prepare_thread(self) -> None:
        """For a thread beside the one that trains, before anything else that it does."""
        work_alone()

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def sum_of_squares(self, flat: Tensor) -> Tensor:
        """Of (n,), 0-dim fp64, in chunks that are added in order; integers are exact.

        An fp32 number's square cannot overflow in fp64.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        squares = torch.empty(min(self.sum_numel, flat.numel()), dtype=torch.float64, device=self.device)
        for chunk in flat.split(self.sum_numel):
            wide = squares[: chunk.numel()].copy_(chunk)
            total += torch.dot(wide, wide)
        return total

    def _copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)

    # -- memory --------------------------------------------------------------------------------------------------------

    def is_home_of(self, tensor: Tensor) -> bool:
        """Kernels of this device can work on `tensor` where it lies."""
        return tensor.device.type == self.device.type

    @property
    def host(self) -> "Device":
        """The host as a device that computes: itself where it is that already."""
        return self

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) zeros that stay for good, or for long: see `aligned_zeros`."""
        return aligned_zeros(numel, dtype, self.device)

    def numbers(self, tensor: Tensor) -> list[Any]:
        """The numbers in `tensor`, as nested lists; the host waits for the current stream."""
        return tensor.tolist()

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copy between tiers, in order with what the current stream does; the host does not wait where it need not."""
        if self.is_home_of(into) != self.is_home_of(source):
            self.copied.add(into.nbytes)
        self._copy(into, source)

    def bring(self, tensor: Tensor) -> Tensor:
        """`tensor` itself where kernels of this device can work on it, else a copy that they can."""
        if self.is_home_of(tensor):
            return tensor
        here = self.room_for(tensor)
        self.copy(here, tensor)
        return here

    def room_for(self, tensor: Tensor) -> Tensor:
        """`tensor` itself where kernels of this device can work on it, else memory for what it will hold."""
        return tensor if self.is_home_of(tensor) else torch.empty_like(tensor, device=self.device)

    def adopt(self, memory: Tensor) -> None:
        """Register host memory that tiers use."""

    def pin(self, memory: Tensor) -> bool:
        """Lock host memory, (n,) uint8, for copies beside compute; whether that was of use, and succeeded."""
        return False

    def unpin(self, memory: Tensor) -> None:
        """The opposite of a `pin` that succeeded."""

    def give_back_memory(self) -> None:
        """Return to the system what was freed where this device computes."""
        give_back_memory()

    def free_bytes(self) -> int:
        """Bytes of the GPU that nobody uses; 0 on a CPU, whose memory is the host's."""
        return 0

    def total_bytes(self) -> int:
        """All memory of the GPU; 0 on a CPU."""
        return 0

    def peak_bytes(self) -> int:
        """Most bytes that tensors ever took on the GPU; 0 on a CPU, where the host reading says it."""
        return 0


class Arena:
    """Host memory of one rank in one piece: page aligned, and pinned where there is a GPU.

    Torch's own pinned memory rounds every block up to a power of two; one mapping that is registered once does not.
    Nothing is resident before it is touched, except what is pinned.

    Args:
        nbytes: size; `take` hands it out.
        pin: register it with the device, so that copies run beside compute.
    """

    def __init__(self, nbytes: int, device: Device, *, pin: bool = True) -> None:
        memory = _mapping(max(nbytes, BLOCK_BYTES))
        if not device.shares_memory:
            _advise(memory)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._taken, self.nbytes, self._device = 0, nbytes, device
        device.adopt(self._bytes)
        if pin and not device.shares_memory:  # by all of torch's threads: to pin it touches it too, in one
            self._bytes[:nbytes:BLOCK_BYTES].zero_()
        self.pinned = pin and nbytes > 0 and device.pin(self._bytes[:nbytes])

    def take(self, nbytes: int) -> Tensor:
        """The next `nbytes` as (nbytes,) uint8, page aligned.

        Raises:
            MemoryError: the arena was planned too small, which is a mistake of ours.
        """
        start = self._taken
        self._taken = round_up(start + nbytes)
        if self._taken > round_up(self.nbytes):
            raise MemoryError(f"the arena of {self.nbytes} bytes has no {nbytes} left")
        return self._bytes[start : start + nbytes]

    def close(self) -> None:
        """Unpin, when nothing is on its way any more. The memory itself goes with its last tensor."""
        if self.pinned:
            try:
                self._device.join()
            finally:
                self.pinned = False
                self._device.unpin(self._bytes)


def aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(numel,) zeros; on the host in a mapping of their own.

    Such memory is page aligned, so files are read straight into it, and large buffers that stay for good do not cut the
    heap into pieces.
    """
    if device.type != "cpu" or numel == 0:
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(_mapping(numel * dtype.itemsize), dtype=dtype, count=numel)


def _mapping(nbytes: int) -> mmap.mmap:
    """Zeros of this process alone, resident where they were touched."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _advise(memory: mmap.mmap) -> None:
    """For memory that a GPU reads by its address: a forked child, such as a data loader's worker, gets none of it, or
    the first write after the fork would give this process another page; and large pages, which are quick to pin.
    """
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        value = getattr(mmap, advice, None)  # Linux has them
        if value is not None:
            with suppress(OSError):  # a kernel without large pages
                memory.madvise(value)


def work_alone() -> None:
    """Let kernels that this thread starts run in this thread only: for threads beside the one that trains.

    `torch.set_num_threads` also sets the number of every thread that starts its first kernel meanwhile, for good: its
    sums would be others. OpenMP's call sets this thread's number alone. Without OpenMP the thread keeps the default.
    """
    torch.get_num_threads()  # the first call of a thread sets its number to the default
    set_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_threads is not None:
        set_threads(1)


def give_back_memory() -> None:
    """Return what was freed to the system; nothing where malloc is not glibc's.

    With its thresholds raised, as `launch.malloc` does, malloc keeps what was freed, in pieces that do not always fit.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_host_bytes() -> int:
    """Host memory that a process may still take: what the system has available, within its cgroup's limits."""
    free = psutil.virtual_memory().available
    for folder, limit, used in memory_groups():
        try:
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))  # given up when needed
            free = min(free, int((folder / limit).read_text()) - int((folder / used).read_text()) + cached)
        except (OSError, ValueError):  # no such group, or its limit is "max"
            continue
    return max(free, 0)


def memory_groups(top: Path = Path("/")) -> Iterator[tuple[Path, str, str]]:
    """(folder, file of the limit, file of the use) of each memory cgroup of this process, and of those around it.

    Args:
        top: a folder in place of `/`.
    """
    try:
        lines = (top / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == "" or "memory" in names.split(","):
            root = top / "sys/fs/cgroup" / ("memory" if names else "")
            files = ("memory.max", "memory.current") if names == "" else MEMORY_FILES_V1
            inner = root / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder == root or root in folder.parents:
                    yield folder, *files


def host_peak_bytes() -> int:
    """Most resident host memory that this process ever had.

    On Linux from /proc: `getrusage` also counts what the parent had when it started this process.
    """
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status.read_text(), re.MULTILINE) if status.exists() else None
    if found:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)
