"""The compute device: side streams with events, one arena of host memory, and memory readings.

On a CPU the streams are no-ops.

Work that should overlap with compute is enqueued inside `with device.aside("gather")`. Entering waits for all compute
enqueued so far (so a buffer is never overwritten while a kernel still reads it), leaving gives an `Event` that the
compute stream waits for before it uses the result. On a CPU everything happens in program order and an event is empty.
"""

import ctypes
import mmap
import re
import resource
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch import Tensor

ALIGNMENT = 4096
"""Bytes: what direct file access asks of an address, and a page of memory."""

_ONE_AT_A_TIME = threading.Lock()
"""Held while torch's default number of threads, which is the process's, is another for a moment."""

MEMORY_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""Limit and use of a group in the first version of cgroups."""


class Event:
    """A point on a side stream. `wait()` makes the current stream wait for it; the host does not block."""

    def __init__(self, event: "torch.cuda.Event | None" = None) -> None:
        self._event = event

    def record(self) -> None:
        """Mark the point that the current stream has reached."""
        if self._event is not None:
            self._event.record()

    def finish(self) -> None:
        """Return when the device has passed the marked point."""
        if self._event is not None:
            self._event.synchronize()

    def wait(self) -> None:
        """Let the current stream go on only after the marked point."""
        if self._event is not None:
            self._event.wait()


class Clock:
    """Reads off moments while a step runs, and says afterwards how many seconds they came after this clock was made.

    On a GPU most moments are events on a stream, and nothing waits for one before it is asked for its seconds.
    """

    def __init__(self, device: torch.device) -> None:
        self._main: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._zero = self._event(self._main)
            self._zero.synchronize()  # so that the host's zero is the device's
        self._zero_s = time.perf_counter()

    def host(self) -> float:
        """Now, on the host."""
        return time.perf_counter()

    def here(self) -> "float | torch.cuda.Event":
        """When the current stream gets here."""
        return self.host() if self._main is None else self._event(torch.cuda.current_stream(self._main.device))

    def main(self) -> "float | torch.cuda.Event":
        """When the stream that computes gets here: the one that was current when this clock was made."""
        return self.host() if self._main is None else self._event(self._main)

    def seconds(self, moment: "float | torch.cuda.Event") -> float:
        if isinstance(moment, float):
            return moment - self._zero_s
        moment.synchronize()
        return float(self._zero.elapsed_time(moment)) / 1e3

    def _event(self, stream: "torch.cuda.Stream") -> "torch.cuda.Event":
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


class Device:
    """One rank's compute device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._streams: dict[str, torch.cuda.Stream] = {}

    @contextmanager
    def aside(self, name: str) -> Iterator[Event]:
        """Enqueue on the side stream `name` what the body launches; yields the event that marks its end."""
        if not self._on_gpu:
            yield Event()
            return
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = torch.cuda.Stream(self.device, priority=-1)
        event = Event(torch.cuda.Event())
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield event
            event.record()

    def mark(self) -> Event:
        """The point that the current stream has reached."""
        event = Event(torch.cuda.Event() if self._on_gpu else None)
        event.record()
        return event

    def clock(self) -> Clock:
        """A clock that starts now, which on a GPU waits for what is under way."""
        return Clock(self.device)

    @property
    def shares_memory(self) -> bool:
        """The device computes in host memory."""
        return not self._on_gpu

    def is_home_of(self, tensor: Tensor) -> bool:
        """Kernels of this device can work on `tensor` where it lies."""
        return tensor.device.type == self.device.type

    @contextmanager
    def paging(self, name: str, after: Event, *, now: bool = False) -> Iterator[None]:
        """Let the body copy between tiers and compute on a stream of its own, from `after` on; the host waits at the
        end, and with `now` also before, because the host itself computes. For threads beside the one that trains.
        """
        if not self._on_gpu:
            yield
            return
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = torch.cuda.Stream(self.device)
        if now:
            after.finish()
        with torch.cuda.stream(stream):
            after.wait()
            yield
            stream.synchronize()

    def free_bytes(self) -> int:
        """Bytes of the GPU that nobody uses; 0 on a CPU, whose memory is the host's."""
        if not self._on_gpu:
            return 0
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + cached

    def total_bytes(self) -> int:
        """All memory of the GPU; 0 on a CPU."""
        return int(torch.cuda.get_device_properties(self.device).total_memory) if self._on_gpu else 0

    def peak_bytes(self) -> int:
        """Most bytes that tensors ever took on the GPU; 0 on a CPU, where the host reading says it."""
        return torch.cuda.max_memory_allocated(self.device) if self._on_gpu else 0


class Arena:
    """Host memory of one rank in one piece: page aligned, and pinned where there is a GPU.

    Torch's own pinned memory rounds every block up to a power of two; one mapping that is registered once does not.
    Nothing is resident before it is touched, except what is pinned.

    Args:
        nbytes: size; `take` hands it out.
        pin: register it with CUDA, so that copies run beside compute.
    """

    def __init__(self, nbytes: int, device: torch.device, *, pin: bool = True) -> None:
        self._bytes = torch.frombuffer(_mapping(max(nbytes, ALIGNMENT)), dtype=torch.uint8)
        self._taken, self.nbytes = 0, nbytes
        self.pinned = pin and device.type == "cuda" and nbytes > 0 and self._register()

    def take(self, nbytes: int) -> Tensor:
        """The next `nbytes` as (nbytes,) uint8, page aligned.

        Raises:
            MemoryError: the arena was planned too small, which is a mistake of ours.
        """
        start = self._taken
        self._taken = round_up(start + nbytes, ALIGNMENT)
        if self._taken > round_up(self.nbytes, ALIGNMENT):
            raise MemoryError(f"the arena of {self.nbytes} bytes has no {nbytes} left")
        return self._bytes[start : start + nbytes]

    def close(self) -> None:
        """Unpin. The memory itself goes with its last tensor."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self.pinned = False

    def _register(self) -> bool:
        code = torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self.nbytes, 0)
        if int(code) != 0:
            warnings.warn(
                f"{self.nbytes / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {int(code)}); copies "
                "will not overlap with compute. Raise `ulimit -l`, or set offload.pin=false",
                stacklevel=3,
            )
            return False
        return True


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


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


def work_alone() -> None:
    """Let kernels that this thread starts run in this thread only: for threads beside the one that trains.

    Torch keeps the number by thread and also as the default of later threads, which must not change: a thread that
    ends at once sets it back. One thread at a time, or the second would take the first one's 1 for the default.
    """
    with _ONE_AT_A_TIME:
        default = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(default,))
        restore.start()
        restore.join(timeout=60)


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
    for folder, limit, used in _cgroups():
        try:
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))  # given up when needed
            free = min(free, int((folder / limit).read_text()) - int((folder / used).read_text()) + cached)
        except (OSError, ValueError):  # no such group, or its limit is "max"
            continue
    return max(free, 0)


def _cgroups() -> Iterator[tuple[Path, str, str]]:
    """(folder, file of the limit, file of the use) of each group that this process may be in, with those around it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == "" or "memory" in names.split(","):
            root = Path("/sys/fs/cgroup") if names == "" else Path("/sys/fs/cgroup/memory")
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


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, not copied; they keep it alive."""
    if not tensor.numel():
        return memoryview(b"")
    octets = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    octets.tensor = tensor  # type: ignore[attr-defined]  # one without a name would be freed before it is read
    return memoryview(octets).cast("B")
