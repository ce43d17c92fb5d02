"""The two things that can compute here: a GPU, and a simulated one that gives the same answers as far as it has any.

Everything that only a GPU can say is asked here, so that the parts are the same for both. None is "not on a simulated
GPU"; the pages show it as a dash.
"""

import contextlib
import os
import platform
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
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
"""Of free host memory, what plans leave to libraries and to first values: a system out of memory ends everything."""

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch")
COPIES = ("cudaMemcpy", "cudaMemset", "cuMemcpy", "cuMemset")


class Gpu:
    """One GPU of CUDA.

    Attributes:
        name: as torch has it; of a simulated one, that it is that.
    """

    simulated = False

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        torch.cuda.set_device(self.device)
        self.name = torch.cuda.get_device_name(self.device)

    # -- what it is ----------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What is to be known of it, in the order in which it is shown."""
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "GPU": self.name,
            "GPUs": torch.cuda.device_count(),
            "GPU memory": f"{properties.total_memory / GiB:.1f} GiB, {self.free_bytes() / GiB:.1f} free",
            "compute capability": f"{properties.major}.{properties.minor}, {properties.multi_processor_count} SMs",
            "CUDA of torch": str(torch.version.cuda),
            **_told_by_the_driver(),
        }

    def peak_flops(self, dtype: str) -> float | None:
        from zero.platform.peak_flops import peak_flops

        return peak_flops(self.name, dtype)

    def world(self) -> Any:
        """A world of one rank that computes here."""
        from zero.distributed.world import World

        return World.from_env(device="cuda")

    def room(self, host_bytes: int | None, folder: Path) -> Any:
        """What a plan may take."""
        from zero.core.placement import Offload, Room, usable_bytes
        from zero.platform.device import free_host_bytes

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
        """Seconds that it takes to lock fresh host memory, as the store's arena is."""
        memory, begin_s = torch.empty(nbytes, dtype=torch.uint8), time.perf_counter()
        code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0))
        seconds = time.perf_counter() - begin_s
        if code:
            raise RuntimeError(f"cudaHostRegister: CUDA error {code}")
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        return seconds

    def forget(self) -> None:
        """Give back what was freed, so that the next system finds an empty GPU."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def fill_gaps(self) -> None:
        """Let the allocator's blocks grow in place, where nearly all memory will be taken; before anything is."""
        with contextlib.suppress(
            RuntimeError, AttributeError
        ):  # not every driver can, and the door is a private one, and then it goes without
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")

    def begin_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """The most that tensors took since `begin_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    # -- time ----------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Return when all that was launched is done."""
        torch.cuda.synchronize(self.device)

    def moment(self) -> Any:
        """When the current stream gets here; nothing waits for it before it is asked for."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What the body launches goes on beside what comes after it."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            yield

    # -- looking at a step ---------------------------------------------------------------------------------------------

    def launches(self, run: Run) -> dict[str, int | None]:
        """Calls of CUDA's runtime in all threads, as torch.profiler sees them."""
        with self._profile() as told:
            run()
        found = Counter(event.name for event in told.events())
        kinds = {"launches": LAUNCHES, "copies": COPIES, "waits": WAITS}
        return {kind: sum(n for name, n in found.items() if name.startswith(names)) for kind, names in kinds.items()}

    def syncs(self, run: Run) -> int | None:
        """Operators of torch that made the host wait, as its sync debug mode warns of them: numbers that are read off
        the GPU, copies that block. Waits for events and streams that a program asks for are not among them."""
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(one.message) for one in told)

    def hazards(self, run: Run) -> list[str] | None:
        """Accesses from two streams that nothing orders, as torch's sanitizer sees them.

        It looks at tensors by their first address, and here all are views of a few flats: it misses some, and may name
        some that touch other bytes. It would stop at the first; all are wanted.
        """
        import torch.cuda._sanitizer as sanitizer

        found: Counter[str] = Counter()
        launched = sanitizer.EventHandler._handle_kernel_launch

        def collect(handler: Any, *args: Any) -> list[Any]:
            found.update(map(_hazard_text, launched(handler, *args)))
            return []

        with patch.object(sanitizer.EventHandler, "_handle_kernel_launch", collect):
            sanitizer.enable_cuda_sanitizer()
            try:
                run()
                self.finish()
            finally:
                sanitizer.cuda_sanitizer.disable()
        return [f"{count} x {text}" for text, count in found.most_common()]

    def trace(self, run: Run, path: Path) -> None:
        """Run under torch.profiler, and write a Chrome trace; with gzip where the name says so."""
        with self._profile() as told:
            run()
        told.export_chrome_trace(str(path))

    def _profile(self) -> Any:
        both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        return profile(activities=both, experimental_config=_ExperimentalConfig(profile_all_threads=True))


class Simulated(Gpu):
    """`zero.testing.simulated_gpu`: every decision is a GPU's, and memory and kernels are the CPU's."""

    simulated = True

    def __init__(self) -> None:
        self.device, self.name = torch.device("cpu"), "none: a simulated one"

    def facts(self) -> dict[str, Any]:
        return {"GPU": self.name, "CPU": platform.processor() or platform.machine()}

    def peak_flops(self, dtype: str) -> float | None:
        return None

    def world(self) -> Any:
        from zero.distributed.world import World
        from zero.testing import simulated_gpu

        with simulated_gpu():
            return World.from_env(device="cpu")

    def room(self, host_bytes: int | None, folder: Path) -> Any:
        """Little, so that the models of a dry run lie on all tiers."""
        from zero.core.placement import Room

        return Room(600_000, 1_000_000, _free_disk_bytes(folder))

    def free_bytes(self) -> int:
        return 0

    def host_buffer(self, nbytes: int, *, pinned: bool) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def lock_s(self, nbytes: int) -> float:
        """Fresh memory is touched, which is most of it on a GPU too."""
        begin_s = time.perf_counter()
        torch.zeros(nbytes, dtype=torch.uint8)
        return time.perf_counter() - begin_s

    def forget(self) -> None:
        """Nothing is kept."""

    def fill_gaps(self) -> None:
        """The host's allocator does what it does."""

    def begin_peak(self) -> None:
        """Nothing is counted."""

    def peak_bytes(self) -> int | None:
        return None

    def finish(self) -> None:
        """Everything is in program order."""

    def moment(self) -> Any:
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(end - begin)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def launches(self, run: Run) -> dict[str, int | None]:
        """Operators that would launch something."""
        from zero.testing.simulated_gpu import count_launches

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


def _told_by_the_driver() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; nothing where there is none."""
    asked = {
        "driver": "driver_version",
        "PCIe": "pcie.link.gen.max,pcie.link.width.max",
        "power limit": "power.limit",
        "clock": "clocks.max.sm",
    }
    query = ",".join(asked.values())
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = dict(zip(query.split(","), (one.strip() for one in told.strip().split(",")), strict=False))
    names = {"pcie.link.gen.max": "generation {}", "pcie.link.width.max": "x{}"}
    return {
        what: ", ".join(names.get(key, "{}").format(values.get(key, "?")) for key in keys.split(","))
        for what, keys in asked.items()
    }


def _hazard_text(error: Any) -> str:
    """One finding of the sanitizer: both accesses, each with the line of this library that made it."""
    return f"{_access_text(error.current_access)}, and no wait after {_access_text(error.previous_access)}"


def _access_text(access: Any) -> str:
    ours = [frame for frame in access.stack_trace if frame.filename.startswith(LIBRARY)]
    where = f" at zero/{ours[-1].filename.removeprefix(LIBRARY)}:{ours[-1].lineno}" if ours else ""
    kind = "write" if access.type.name == "WRITE" else "read"
    return f"{kind} by {str(access.operator).split('(')[0]}{where}"


def _free_disk_bytes(folder: Path) -> int:
    told = os.statvfs(folder)
    return told.f_bavail * told.f_frsize
