"""A GPU as the compute device: CUDA streams and events, pinned host memory, memory readings."""

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from zero.core.layout import VECTOR
from zero.errors import MachineError, in_short
from zero.platform.device import Clock, Device, Event, Moment, work_alone
from zero.platform.numa import bind_near

log = logging.getLogger("zero")

TILE_NUMEL = 1024
"""Elements that a program of a kernel processes: eight for each of its threads."""


class CudaEvent(Event):
    """A CUDA event."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()

    def record(self) -> None:
        self._event.record()

    def finish(self) -> None:
        self._event.synchronize()

    def wait(self) -> None:
        self._event.wait()


class CudaClock(Clock):
    """A clock whose moments are CUDA events with timing."""

    def __init__(self, device: torch.device) -> None:
        self._main = torch.cuda.current_stream(device)
        self._zero = self._event(self._main)
        self._zero.synchronize()  # so that the host's clock starts at the same time
        super().__init__()

    def here(self) -> Moment:
        return self._event(torch.cuda.current_stream(self._main.device))

    def main(self) -> Moment:
        return self._event(self._main)

    def seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment - self._zero_s
        assert isinstance(moment, torch.cuda.Event)
        moment.synchronize()
        return float(self._zero.elapsed_time(moment)) / 1e3

    def _event(self, stream: "torch.cuda.Stream") -> "torch.cuda.Event":
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


class Cuda(Device):
    """One GPU.

    Attributes:
        streams: its side streams by name.
    """

    kind = "cuda"
    backend = "cpu:gloo,cuda:nccl"
    shares_memory = False
    piece_numel = 1 << 24
    """Limit of the fp32 copies that an update makes: 64 MiB of gradients, or six times that with 8-bit moments.

    A kernel on this many elements still takes several times as long as its launch.
    """
    sum_numel = 1 << 22
    batch_bytes = 16 << 20

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.bound = device
        if _has_kernels(device):
            self.tile_numel = TILE_NUMEL
        self.streams: dict[str, torch.cuda.Stream] = {}

    def name(self) -> str:
        return f"{socket.gethostname()} {torch.cuda.get_device_properties(self.device).uuid}"

    def product(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @contextmanager
    def aside(self, name: str, *, after: Event | None = None) -> Iterator[Event]:
        stream = _stream(self, name, priority=-1)
        event = CudaEvent()
        if after is None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            if after is not None:
                after.wait()
            try:
                yield event
            finally:
                event.record()  # also after an error, because a wait for an unrecorded event returns at once

    def event(self) -> Event:
        return CudaEvent()

    def join(self) -> None:
        torch.cuda.synchronize(self.device)

    def clock(self) -> Clock:
        return CudaClock(self.device)

    @contextmanager
    def paging(self, name: str, after: Event, *, now: bool = False) -> Iterator[None]:
        stream = _stream(self, name)
        if now:
            after.finish()
        with torch.cuda.stream(stream):
            after.wait()
            try:
                yield
            finally:
                stream.synchronize()

    def prepare_thread(self) -> None:
        """Make this rank's GPU the thread's current one.

        The default is GPU 0, on which every rank would then create a CUDA context of half a gigabyte.
        """
        torch.cuda.set_device(self.device)
        work_alone()

    def sum_of_squares(self, flat: Tensor) -> Tensor:
        """Sum the squares in fp64 with one kernel. The square of the norm may differ in the last bit of fp64."""
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square_()

    @property
    def host(self) -> Device:
        return Device(torch.device("cpu"), self.copied)

    def upload(self, values: Tensor) -> Tensor:
        return values.pin_memory().to(self.device, non_blocking=True)

    def leave(self, tensor: Tensor) -> tuple[Tensor, Event]:
        there = torch.empty_like(tensor, device="cpu", pin_memory=True)
        there.copy_(tensor, non_blocking=True)
        return there, self.mark()

    def _copy(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source, non_blocking=_is_ordered(into) and _is_ordered(source))

    def pin(self, memory: Tensor) -> bool:
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(code) != 0:
            with suppress(RuntimeError):  # the next launch raises the pending error and clears it
                torch.zeros(1, device=self.device)
            warnings.warn(
                f"{memory.nbytes / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {int(code)}), so "
                "copies will not overlap with compute. Raise `ulimit -l`, or set offload.pin=false.",
                stacklevel=4,
            )
            return False
        return True

    def unpin(self, memory: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def give_back_memory(self, *, cached: bool = False) -> None:
        if cached:  # otherwise torch's caching allocator reuses freed GPU memory
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)  # also begins the use of CUDA, so that there are counts
        # read once: `memory_reserved` and `memory_allocated` sort two hundred counts each
        counts = torch.cuda.memory_stats_as_nested_dict(self.device)
        reserved, allocated = (counts[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
        return int(free + reserved - allocated)

    def total_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


def _stream(gpu: Cuda, name: str, priority: int = 0) -> "torch.cuda.Stream":
    if name not in gpu.streams:
        gpu.streams[name] = torch.cuda.Stream(gpu.device, priority=priority)
    return gpu.streams[name]


@cache
def _has_kernels(device: torch.device) -> bool:
    """Return whether Triton compiles and launches a kernel on this GPU; warn if it is installed and does not.

    Triton compiles its launcher with a C compiler, which an image for running programs may lack.
    """
    if device.index is None or not torch.cuda.is_available() or find_spec("triton") is None:
        return False  # a device without a number is only planned for
    try:
        import_module("zero.platform.kernels")
        total, chunks_WS = torch.zeros(VECTOR, device=device), torch.zeros(1, VECTOR, device=device)
        torch.ops.zero.add_in_order(total, chunks_WS, chunks_WS[0], 0, False, TILE_NUMEL)
        torch.cuda.synchronize(device)
    except Exception as error:  # an error of an import, a compiler, a cache or a driver
        warnings.warn(f"Triton does not work, so an update takes more launches: {in_short(error)}", stacklevel=2)
        return False
    return True


def compute_device(device: torch.device) -> Device:
    """Return the `Device` for a torch device, or its stand-in."""
    if Device.stand_in is not None:
        return Device.stand_in()
    return Cuda(device) if device.type == "cuda" else Device(device)


def count_gpus() -> int:
    """Return the number of GPUs.

    Raises:
        MachineError: torch finds none.
    """
    count = torch.cuda.device_count()
    if not count:
        raise MachineError(
            'launch.device=cuda, and torch finds no GPU. Use launch.device=cpu, or auto (in Python: device="cpu").'
        )
    return count


def claim_device(name: str | None, local_rank: int) -> torch.device:
    """Choose the device of this process: the CPU, the only GPU, or GPU `local_rank`, which becomes torch's current one.

    Where there are several NUMA nodes, this process is bound to the GPU's, see `zero.platform.numa`.

    Args:
        name: "cpu", "cuda", or None for CUDA if torch finds a GPU.

    Raises:
        MachineError: there is no such GPU.
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name != "cuda":
        return torch.device(name)
    count = count_gpus()
    if local_rank >= count > 1:
        raise MachineError(
            f"LOCAL_RANK is {local_rank} and this machine has {count} GPUs. Type launch.ranks={count}, or "
            "launch.device=cpu."
        )
    number = 0 if count == 1 else local_rank  # CUDA_VISIBLE_DEVICES may show each rank one GPU
    torch.cuda.set_device(number)
    gpu: Any = torch.cuda.get_device_properties(number)  # torch does not declare all of its attributes
    if line := bind_near(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"):
        torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
        log.info(line)
    return torch.device("cuda", number)


def _is_ordered(tensor: Tensor) -> bool:
    """Return whether a copy of `tensor` may be asynchronous: it is on the GPU, or pinned.

    Pageable host memory could change before the driver reads it.
    """
    return tensor.is_cuda or tensor.is_pinned()
