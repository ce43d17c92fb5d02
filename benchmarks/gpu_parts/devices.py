"""The device that is measured: a GPU, or a simulated one with the same methods.

Everything that depends on which of the two it is stands here, so that all parts are the same for both. A result of None
means "not available on a simulated GPU"; pages show it as a dash.
"""

import contextlib
import os
import platform
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

GiB = 2**30
Run = Callable[[], object]

LIBRARY = f"{Path(__file__).resolve().parent.parent.parent / 'zero'}{os.sep}"

HOST_RESERVE_BYTES = 8 * GiB
"""Free host memory that plans leave to libraries and initial values: running out of memory would end everything."""

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch")
COPIES = ("cudaMemcpy", "cudaMemset", "cuMemcpy", "cuMemset")


class Gpu:
    """A CUDA GPU: that of this rank, if there are several ranks.

    Args:
        timeout_s: the longest wait for another rank, in seconds.

    Attributes:
        name: torch's name for it.
    """

    simulated = False

    def __init__(self, timeout_s: float = 300.0) -> None:
        self._timeout_s = timeout_s
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(self.device)
        self.name = torch.cuda.get_device_name(self.device)

    # -- what it is ----------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """Return the properties of the device, in the order in which the page shows them."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "GPU": self.name,
            "GPUs": torch.cuda.device_count(),
            "GPU memory": f"{properties.total_memory / GiB:.1f} GiB, {self.free_bytes() / GiB:.1f} free",
            "compute capability": f"{properties.major}.{properties.minor}, {properties.multi_processor_count} SMs",
            "CUDA of torch": str(torch.version.cuda),
            **_driver_facts(),
        }

    def peak_flops(self, dtype: str) -> float | None:
        from zero.platform.gpu_peaks import peak_flops

        return peak_flops(self.name, dtype)

    @cached_property
    def world(self) -> Any:
        """The world of all ranks, which is opened once. It computes on this device."""
        from zero.distributed.world import open_world

        return open_world(self._timeout_s, "cuda")

    def room(self, host_bytes: int | None, folder: Path) -> Any:
        """Return the bytes of each tier that a plan may use."""
        from zero.core.offload import Offload
        from zero.core.placement import Room, usable_bytes
        from zero.platform.host_memory import free_host_bytes

        device = usable_bytes(Offload(), self.free_bytes(), torch.cuda.get_device_properties(self.device).total_memory)
        host = max(0, free_host_bytes() - HOST_RESERVE_BYTES) if host_bytes is None else host_bytes
        return Room(device, host, _free_disk_bytes(folder))

    def free_bytes(self) -> int:
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return int(torch.cuda.mem_get_info(self.device)[0]) + cached

    # -- memory --------------------------------------------------------------------------------------------------------

    def host_buffer(self, nbytes: int, *, pinned: bool) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)

    def lock_s(self, nbytes: int) -> float:
        """Return the seconds that it takes to lock fresh host memory, as the store's arena is."""
        memory, begin_s = torch.empty(nbytes, dtype=torch.uint8), time.perf_counter()
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0))
        seconds = time.perf_counter() - begin_s
        if code:
            raise RuntimeError(f"cudaHostRegister: CUDA error {code}")
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        return seconds

    def free_cached(self) -> None:
        """Return cached memory to the driver, so that the next system finds an empty GPU."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def use_expandable_segments(self) -> None:
        """Let the allocator's blocks grow in place, for models that fill nearly all memory. Call before allocating."""
        # not every driver supports it, and the function is private to torch
        with contextlib.suppress(RuntimeError, AttributeError):
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Return the most bytes that tensors have used since `begin_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    # -- time ----------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until everything that was launched is done."""
        torch.cuda.synchronize(self.device)

    def moment(self) -> Any:
        """Record an event on the current stream and return it. Only `seconds` waits for it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Launch the body on a side stream, in parallel to what follows."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            yield

    # -- inspecting a step ---------------------------------------------------------------------------------------------

    def launches(self, run: Run) -> dict[str, int | None]:
        """Count calls of CUDA's runtime in all threads with torch.profiler."""
        with self._profile() as profiled:
            run()
        counts = Counter(event.name for event in profiled.events())
        columns = {"launches": LAUNCHES, "copies": COPIES, "waits": WAITS}
        return {
            column: sum(n for name, n in counts.items() if name.startswith(names)) for column, names in columns.items()
        }

    def syncs(self, run: Run) -> int | None:
        """Count the torch operators that made the host wait, with torch's sync debug mode: reading a number from the
        GPU, blocking copies. Explicit waits for events and streams are not counted."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)

    def hazards(self, run: Run) -> list[str] | None:
        """Return the races between two streams that torch's sanitizer finds, each with its count.

        The sanitizer identifies a tensor by its first address. Most tensors here are views of a few flat tensors, so
        it misses some races, and may report accesses to different bytes. It would stop at the first race; this method
        collects all.
        """
        import torch.cuda._sanitizer as sanitizer

        races: Counter[str] = Counter()
        launched = sanitizer.EventHandler._handle_kernel_launch

        def collect(handler: Any, *args: Any) -> list[Any]:
            races.update(map(_hazard_text, launched(handler, *args)))
            return []

        with patch.object(sanitizer.EventHandler, "_handle_kernel_launch", collect):
            sanitizer.enable_cuda_sanitizer()
            try:
                run()
                self.finish()
            finally:
                sanitizer.cuda_sanitizer.disable()
        return [f"{count} x {text}" for text, count in races.most_common()]

    def trace(self, run: Run, path: Path) -> None:
        """Run under torch.profiler and write a Chrome trace to `path`, compressed if its name ends in .gz."""
        with self._profile() as profiled:
            run()
        profiled.export_chrome_trace(str(path))

    def _profile(self) -> Any:
        both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        return profile(activities=both, experimental_config=_ExperimentalConfig(profile_all_threads=True))


class Simulated(Gpu):
    """`tests.simulation.simulated_gpu`: the library decides as on a GPU; memory and kernels are the CPU's."""

    simulated = True

    def __init__(self, timeout_s: float = 300.0) -> None:
        self._timeout_s = timeout_s
        self.device, self.name = torch.device("cpu"), "none: a simulated GPU"

    def facts(self) -> dict[str, Any]:
        return {"GPU": self.name, "CPU": platform.processor() or platform.machine()}

    def peak_flops(self, dtype: str) -> float | None:
        return None

    @cached_property
    def world(self) -> Any:
        from zero.distributed.world import open_world
        from tests.simulation import simulated_gpu

        with simulated_gpu():
            return open_world(self._timeout_s, "cpu")

    def room(self, host_bytes: int | None, folder: Path) -> Any:
        """Return few bytes of each tier, so that the models of a dry run use all tiers."""
        from zero.core.placement import Room

        return Room(600_000, 1_000_000, _free_disk_bytes(folder))

    def free_bytes(self) -> int:
        return 0

    def host_buffer(self, nbytes: int, *, pinned: bool) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def lock_s(self, nbytes: int) -> float:
        """Touch fresh memory and return the seconds; on a GPU, too, that is most of the time."""
        begin_s = time.perf_counter()
        torch.zeros(nbytes, dtype=torch.uint8)
        return time.perf_counter() - begin_s

    def free_cached(self) -> None:
        """Do nothing: no memory is cached."""

    def use_expandable_segments(self) -> None:
        """Do nothing: the host's allocator has no such setting."""

    def begin_peak(self) -> None:
        """Do nothing: memory is not counted."""

    def peak_bytes(self) -> int | None:
        return None

    def finish(self) -> None:
        """Do nothing: everything has run in program order."""

    def moment(self) -> Any:
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def launches(self, run: Run) -> dict[str, int | None]:
        """Count the operators that would launch a kernel."""
        from tests.simulation.simulated_gpu import count_launches

        return {"launches": sum(count_launches(run).values()), "copies": None, "waits": None}

    def syncs(self, run: Run) -> int | None:
        run()
        return None

    def hazards(self, run: Run) -> list[str] | None:
        run()
        return None

    def _profile(self) -> Any:
        return profile(
            activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)
        )


def _driver_facts() -> dict[str, str]:
    """Return the properties of the first GPU according to nvidia-smi; empty if that fails."""
    fields = {
        "driver": "driver_version",
        "PCIe": "pcie.link.gen.max,pcie.link.width.max",
        "power limit": "power.limit",
        "clock": "clocks.max.sm",
    }
    query = ",".join(fields.values())
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = dict(zip(query.split(","), (value.strip() for value in output.strip().split(",")), strict=False))
    names = {"pcie.link.gen.max": "generation {}", "pcie.link.width.max": "x{}"}
    return {
        what: ", ".join(names.get(key, "{}").format(values.get(key, "?")) for key in keys.split(","))
        for what, keys in fields.items()
    }


def _hazard_text(error: Any) -> str:
    """Return one race of the sanitizer as text: both accesses, each with the line of this library that launched it."""
    return f"{_access_text(error.current_access)}, and no wait after {_access_text(error.previous_access)}"


def _access_text(access: Any) -> str:
    ours = [frame for frame in access.stack_trace if frame.filename.startswith(LIBRARY)]
    where = f" at zero/{ours[-1].filename.removeprefix(LIBRARY)}:{ours[-1].lineno}" if ours else ""
    operation = "write" if access.type.name == "WRITE" else "read"
    return f"{operation} by {str(access.operator).split('(')[0]}{where}"


def _free_disk_bytes(folder: Path) -> int:
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize
