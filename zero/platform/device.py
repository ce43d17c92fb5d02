"""The compute device, as the engine uses it: streams with events, memory and readings; and host memory.

The device of this file is a CPU, whose streams are no-ops: everything happens in program order. `cuda` is a GPU.

Work that should overlap with compute is enqueued inside `with device.aside("gather")`. Entering waits for all compute
enqueued so far (so a buffer is never overwritten while a kernel still reads it), and yields an `Event` for which the
compute stream waits before it uses the result. With an event as `after`, entering waits for that event only.
"""

import ctypes
import mmap
import re
import resource
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
"""The files with limit and use of a group in cgroups v1."""


class Event:
    """A point that a stream has reached. On a CPU it is always passed, because work is done in program order."""

    def record(self) -> None:
        """Mark the point that the current stream has reached."""

    def finish(self) -> None:
        """Return when the device has passed the marked point."""

    def wait(self) -> None:
        """Let the current stream go on only after the marked point; the host does not block."""


PASSED = Event()
"""An event for which nothing waits."""

Moment = object
"""A time of a stream on a clock; a float is a time of the host."""


class Clock:
    """A clock that takes moments while a step runs, and converts them to seconds since its start afterwards.

    On a GPU most moments are events on a stream; only `seconds` waits for them.
    """

    def __init__(self) -> None:
        self._zero_s = time.perf_counter()

    def host(self) -> float:
        """Return the host's time."""
        return time.perf_counter()

    def here(self) -> Moment:
        """Return the moment at which the current stream gets here."""
        return self.host()

    def main(self) -> Moment:
        """Return the moment at which the compute stream gets here: the current stream of this clock's start."""
        return self.host()

    def seconds(self, moment: Moment) -> float:
        assert isinstance(moment, float)
        return moment - self._zero_s


class Copied:
    """The bytes that all threads copied between a GPU and host memory."""

    def __init__(self) -> None:
        self.nbytes, self._lock = 0, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


class Device:
    """One rank's compute device, and the facts about it that the engine needs: here a CPU.

    Attributes:
        kind: its name in plans.
        device: torch's name for it.
        backend: torch.distributed's name for the connection between such devices.
        shares_memory: it computes in host memory.
        bound: the GPU that a process group has to itself, None on a CPU.
        piece_numel: elements that an update takes at a time: on a CPU as many as stay in its cache.
        sum_numel: elements that a sum over ranks takes at a time.
        batch_bytes: small tensors are copied together up to this size.
        copied: counts the bytes that `copy` moves between host memory and the GPU; none on a CPU.
    """

    stand_in: ClassVar["Callable[[], Device] | None"] = None
    """Makes the device of every world, in place of the real one: see `zero.testing.simulated_gpu`."""

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
        """Return a name that this GPU has in every process, and no other GPU has; "" for a CPU, which may be shared."""
        return ""

    def product(self) -> str:
        """Return the model of the GPU; "" for a CPU."""
        return ""

    # -- streams -------------------------------------------------------------------------------------------------------

    @contextmanager
    def aside(self, name: str, *, after: Event | None = None) -> Iterator[Event]:
        """Enqueue the launches of the body on the side stream `name`; yield the event that marks their end.

        Args:
            after: begin after this event; None: after all work of the current stream so far. `PASSED` if the body
                itself waits for everything it needs.
        """
        yield Event()

    def event(self) -> Event:
        """Return an event to be recorded."""
        return Event()

    def mark(self) -> Event:
        """Record an event at the point that the current stream has reached."""
        event = self.event()
        event.record()
        return event

    def join(self) -> None:
        """Wait until everything that was enqueued on any stream is done."""

    def clock(self) -> Clock:
        """Start a clock; on a GPU that waits for work under way."""
        return Clock()

    @contextmanager
    def paging(self, name: str, after: Event, *, now: bool = False, end: Event | None = None) -> Iterator[None]:
        """Let a thread of the store copy between tiers and compute on a stream of its own, from `after` on.

        Args:
            now: the host waits for `after`, because it computes itself.
            end: recorded at the end; None: the host waits there.
        """
        yield

    def prepare_thread(self) -> None:
        """Prepare a thread beside the one that trains; the first call of such a thread."""
        work_alone()

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def sum_of_squares(self, flat: Tensor) -> Tensor:
        """Sum the squares of (n,) to 0-dim fp64, in chunks that are added in order; integers are exact.

        The square of an fp32 number cannot overflow in fp64.
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
        """Return whether kernels of this device can work on `tensor` in place."""
        return tensor.device.type == self.device.type

    @property
    def host(self) -> "Device":
        """Return the host as a compute device."""
        return self

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) zeros for a long life: see `aligned_zeros`."""
        return aligned_zeros(numel, dtype, self.device)

    def numbers(self, tensor: Tensor) -> list[Any]:
        """Return the numbers in `tensor` as nested lists; the host waits for the current stream."""
        return tensor.tolist()

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copy between tiers in the order of the current stream, without a wait of the host where possible."""
        if self.is_home_of(into) != self.is_home_of(source):
            self.copied.add(into.nbytes)
        self._copy(into, source)

    def bring(self, tensor: Tensor) -> Tensor:
        """Return `tensor` if kernels of this device can work on it, else a copy for them."""
        if self.is_home_of(tensor):
            return tensor
        here = self.room_for(tensor)
        self.copy(here, tensor)
        return here

    def room_for(self, tensor: Tensor) -> Tensor:
        """Return `tensor` if kernels of this device can work on it, else uninitialized memory for its values."""
        return tensor if self.is_home_of(tensor) else torch.empty_like(tensor, device=self.device)

    def adopt(self, memory: Tensor) -> None:
        """Register host memory that tiers use."""

    def pin(self, memory: Tensor) -> bool:
        """Lock host memory, (n,) uint8, for copies beside compute; return whether that has an effect."""
        return False

    def unpin(self, memory: Tensor) -> None:
        """Undo a `pin` that returned True."""

    def give_back_memory(self) -> None:
        """Return freed memory of this device to the system."""
        give_back_memory()

    def free_bytes(self) -> int:
        """Return the free bytes of the GPU; 0 on a CPU, whose memory is the host's."""
        return 0

    def total_bytes(self) -> int:
        """Return the memory of the GPU; 0 on a CPU."""
        return 0

    def peak_bytes(self) -> int:
        """Return the most bytes that tensors ever took on the GPU; 0 on a CPU: see `host_peak_bytes`."""
        return 0


class Arena:
    """Host memory of one rank in one piece: page aligned, and pinned where there is a GPU.

    Torch's own pinned memory rounds every block up to a power of two; one mapping that is registered once does not.
    A page is resident once it is touched or pinned.

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
        if pin and not device.shares_memory:  # touch it with all of torch's threads: pinning would, with one
            self._bytes[:nbytes:BLOCK_BYTES].zero_()
        self.pinned = pin and nbytes > 0 and device.pin(self._bytes[:nbytes])

    def take(self, nbytes: int) -> Tensor:
        """The next `nbytes` as (nbytes,) uint8, page aligned.

        Raises:
            MemoryError: the plan made the arena too small.
        """
        start = self._taken
        self._taken = round_up(start + nbytes)
        if self._taken > round_up(self.nbytes):
            raise MemoryError(f"the arena of {self.nbytes} bytes has no {nbytes} left")
        return self._bytes[start : start + nbytes]

    def close(self) -> None:
        """Unpin after the last copy. The memory itself is freed with its last tensor."""
        if self.pinned:
            try:
                self._device.join()
            finally:
                self.pinned = False
                self._device.unpin(self._bytes)


def aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (numel,) zeros, on the host in a mapping of their own.

    A mapping is page aligned, so files are read straight into it, and large buffers that live long do not fragment the
    heap.
    """
    if device.type != "cpu" or numel == 0:
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(_mapping(numel * dtype.itemsize), dtype=dtype, count=numel)


def _mapping(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _advise(memory: mmap.mmap) -> None:
    """Keep memory that a GPU reads by address out of forked children, and use large pages, which are faster to pin.

    Otherwise the first write after a fork, such as that of a data loader's worker, would move a page of this process.
    """
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
        with suppress(OSError):  # a kernel without large pages
            memory.madvise(advice)


def work_alone() -> None:
    """Let kernels of this thread run in this thread only: for threads beside the one that trains.

    `torch.set_num_threads` would also change every thread that starts its first kernel later, and so its sums.
    OpenMP's call changes this thread alone. Without OpenMP the thread keeps the default.
    """
    torch.get_num_threads()  # a thread's first call sets its number to the default
    set_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_threads is not None:
        set_threads(1)


def give_back_memory() -> None:
    """Return freed memory to the system, if malloc is glibc's.

    With raised thresholds, as by `launch.malloc`, malloc keeps freed memory, in pieces that do not always fit.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_host_bytes() -> int:
    """Return the host memory that this process may still take: available in the system and within its cgroups."""
    free = psutil.virtual_memory().available
    for folder, limit, used in memory_groups():
        try:
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))  # freed when needed
            free = min(free, int((folder / limit).read_text()) - int((folder / used).read_text()) + cached)
        except (OSError, ValueError):  # no such group, or its limit is "max"
            continue
    return max(free, 0)


def memory_groups(top: Path = Path("/")) -> Iterator[tuple[Path, str, str]]:
    """Yield (folder, file of the limit, file of the use) of the memory cgroups of this process and their parents.

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
    """Return the most resident host memory that this process ever had.

    `getrusage` also counts the memory of the parent at the start of this process.
    """
    peak_kib = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * (int(peak_kib[1]) if peak_kib else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
