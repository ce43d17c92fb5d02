"""The compute device as the engine sees it: streams with events, memory and memory readings.

The device in this file is a CPU, whose streams do nothing, because all work runs in program order. `cuda` has the GPU.

Work that should overlap with compute is enqueued inside `with device.aside("gather")`. The side stream first waits for
all compute enqueued so far, so that a buffer is never overwritten while a kernel still reads it. The block yields an
`Event`, for which the compute stream waits before it uses the result. With an event as `after`, the side stream waits
for that event only.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Literal

import torch
from torch import Tensor

from zero.errors import ConfigError
from zero.platform.host_memory import aligned_zeros, give_back_memory


def torch_device(name: torch.device | str) -> torch.device:
    """Return torch's device of a name.

    Raises:
        ConfigError: torch has no such device.
    """
    try:
        return torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f'device={name!r}: torch has no such device. Write device="cpu" or device="cuda".') from None


class Event:
    """A point in the work of a stream. On a CPU it has always been reached, because work runs in program order."""

    def record(self) -> None:
        """Mark the point that the current stream has reached."""

    def finish(self) -> None:
        """Block the host until the device has reached the marked point."""

    def wait(self) -> None:
        """Make the current stream wait for the marked point; the host does not block."""


PASSED = Event()
"""An event that has been reached; a wait for it does nothing."""

Moment = object
"""A point in time on a clock: an event of a stream, or a float for a time of the host."""


class Clock:
    """A clock that records moments while a step runs, and later converts them to seconds since the clock's start.

    On a GPU most moments are events on a stream, and only `seconds` waits for them.
    """

    def __init__(self) -> None:
        self._zero_s = time.perf_counter()

    def host(self) -> Moment:
        """Return the current time of the host."""
        return time.perf_counter()

    def here(self) -> Moment:
        """Return the moment at which the current stream reaches this point."""
        return self.host()

    def main(self) -> Moment:
        """Return the moment at which the compute stream reaches this point.

        The compute stream is the one that was current when the clock was made.
        """
        return self.host()

    def seconds(self, moment: Moment) -> float:
        assert isinstance(moment, float)
        return moment - self._zero_s


class Copied:
    """A thread-safe counter of the bytes copied between a GPU and host memory."""

    def __init__(self) -> None:
        self.nbytes, self._lock = 0, threading.Lock()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


class Device:
    """One rank's compute device, with the operations and facts that the engine needs. This class is a CPU.

    Attributes:
        kind: name of the device in plans.
        device: the torch.device.
        backend: backend of torch.distributed for such devices.
        shares_memory: True if the device computes in host memory.
        bound: the GPU to which a process group is bound (`device_id` of torch.distributed); None on a CPU.
        piece_numel: number of elements that an update processes at a time; on a CPU, so many that they stay in cache.
        sum_numel: number of elements that a sum over ranks processes at a time.
        tile_numel: number of elements that a program of `zero.platform.kernels` processes, a power of two from 64; 0 if
            the device does not run these kernels.
        batch_bytes: maximum total size of small tensors that are copied together.
        copied: counter of the bytes that `copy` moves between host memory and the GPU; stays 0 on a CPU.
    """

    stand_in: ClassVar["Callable[[], Device] | None"] = None
    """Function that makes the device of every world in place of the real one, for example a simulated one."""

    kind: ClassVar[Literal["cpu", "cuda"]] = "cpu"
    backend: ClassVar[str] = "gloo"
    shares_memory = True
    bound: torch.device | None = None
    piece_numel = 256 * 1024
    sum_numel = 65_536
    tile_numel = 0
    batch_bytes = 0

    def __init__(self, device: torch.device, copied: "Copied | None" = None) -> None:
        self.device = device
        self.copied = Copied() if copied is None else copied

    def name(self) -> str:
        """Return a name of this GPU that is unique and the same in every process; "" for a CPU, which may be shared."""
        return ""

    def product(self) -> str:
        """Return the model of the GPU; "" for a CPU."""
        return ""

    # -- streams -------------------------------------------------------------------------------------------------------

    @contextmanager
    def aside(self, name: str, *, after: Event | None = None) -> Iterator[Event]:
        """Enqueue the launches of the block on the side stream `name`; yield the event that marks their end.

        Args:
            after: event for which the side stream waits first; None: all work of the current stream so far. Pass
                `PASSED` if the block itself waits for everything that it needs.
        """
        yield Event()

    def event(self) -> Event:
        """Return a new event, not recorded yet."""
        return Event()

    def mark(self) -> Event:
        """Record a new event at the point that the current stream has reached, and return it."""
        event = self.event()
        event.record()
        return event

    def join(self) -> None:
        """Block the host until all work enqueued on any stream is done."""

    def clock(self) -> Clock:
        """Start a clock. On a GPU the host waits until all work enqueued on the current stream is done."""
        return Clock()

    @contextmanager
    def paging(self, name: str, after: Event, *, now: bool = False) -> Iterator[None]:
        """Run the copies and kernels of a store's thread in the block on a stream of their own, after `after`.

        The host waits for their end.

        Args:
            now: True if the host itself computes in the block, so that it must wait for `after`, too.
        """
        yield

    def prepare_thread(self) -> None:
        """Prepare a thread other than the training thread to use this device. The thread calls this first."""
        work_alone()

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def sum_of_squares(self, flat: Tensor) -> Tensor:
        """Return the sum of the squares of `flat`, (n,), as a 0-dim fp64 tensor.

        Chunks are added in a fixed order. fp64 is used because the square of an fp32 number cannot overflow in it, and
        sums of squares of small integers are exact.
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
        """Return whether kernels of this device can access `tensor` where it is."""
        return tensor.device.type == self.device.type

    @property
    def host(self) -> "Device":
        """Return the device for computations in host memory: on a CPU, this device."""
        return self

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) zeros for a buffer that is used for a long time: see `aligned_zeros`."""
        return aligned_zeros(numel, dtype, self.device)

    def on_host(self, tensor: Tensor) -> Tensor:
        """Return `tensor` in host memory; the host waits for the current stream."""
        return tensor.cpu()

    def leave(self, tensor: Tensor) -> tuple[Tensor, Event]:
        """Start to copy a small `tensor` to host memory; return the copy, and the event after which it is there."""
        return tensor.cpu(), self.mark()

    def copy(self, into: Tensor, source: Tensor) -> None:
        """Copy `source` to `into` on the current stream; the host does not wait if both are on the GPU or pinned."""
        if self.is_home_of(into) != self.is_home_of(source):
            self.copied.add(into.nbytes)
        self._copy(into, source)

    def bring(self, tensor: Tensor) -> Tensor:
        """Return `tensor` if kernels of this device can access it, else a copy in this device's memory."""
        if self.is_home_of(tensor):
            return tensor
        here = self.room_for(tensor)
        self.copy(here, tensor)
        return here

    def upload(self, values: Tensor) -> Tensor:
        """Return a small host tensor on this device, copied on the current stream; the host does not wait."""
        return values

    def room_for(self, tensor: Tensor) -> Tensor:
        """Return `tensor` if kernels of this device can access it, else an uninitialized tensor in its memory."""
        return tensor if self.is_home_of(tensor) else torch.empty_like(tensor, device=self.device)

    def adopt(self, memory: Tensor) -> None:
        """Tell the device that `memory` is host memory; only a simulated GPU needs this."""

    def pin(self, memory: Tensor) -> bool:
        """Pin host memory, (n,) uint8, so that copies overlap with compute; return False if it is not pinned."""
        return False

    def unpin(self, memory: Tensor) -> None:
        """Undo a `pin` that returned True."""

    def give_back_memory(self, *, cached: bool = False) -> None:
        """Return freed memory of this device to the system.

        Args:
            cached: also the memory of a GPU that torch's allocator keeps for reuse.
        """
        give_back_memory()

    def free_bytes(self) -> int:
        """Return the free bytes of the GPU; 0 on a CPU, whose memory is the host's."""
        return 0

    def total_bytes(self) -> int:
        """Return the memory of the GPU; 0 on a CPU."""
        return 0

    def peak_bytes(self) -> int:
        """Return the peak of the bytes allocated for tensors on the GPU; 0 on a CPU: see `host_peak_bytes`."""
        return 0


def work_alone() -> None:
    """Limit CPU kernels called by this thread to one thread; for threads other than the training thread.

    `torch.set_num_threads` would also apply to threads that run their first kernel later, and so change the order of
    their sums. `omp_set_num_threads` applies to this thread only. Without OpenMP this function does nothing.
    """
    torch.get_num_threads()  # first, because the first call in a thread resets its number of threads to the default
    set_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_threads is not None:
        set_threads(1)
