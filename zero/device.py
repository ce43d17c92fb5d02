"""The compute device: side streams with events, and memory readings. On a CPU the streams are no-ops.

Work that should overlap with compute is enqueued inside `with device.aside("gather")`. Entering waits for all compute
enqueued so far (so a buffer is never overwritten while a kernel still reads it), leaving gives an `Event` that the
compute stream waits for before it uses the result. On a CPU everything happens in program order and an event is empty.
"""

import ctypes
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class Event:
    """A point on a side stream. `wait()` makes the current stream wait for it; the host does not block."""

    def __init__(self, event: "torch.cuda.Event | None" = None) -> None:
        self._event = event

    def record(self) -> None:
        """Mark the point that the current stream has reached."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Let the current stream go on only after the marked point."""
        if self._event is not None:
            self._event.wait()


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

    def peak_bytes(self) -> int:
        """Most bytes that tensors ever took on the GPU; 0 on a CPU, where the host reading says it."""
        return torch.cuda.max_memory_allocated(self.device) if self._on_gpu else 0


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
    """The bytes of a contiguous tensor in host memory, not copied; valid while the tensor lives."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
