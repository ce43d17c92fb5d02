"""Part 1: the machine, and how fast it copies, multiplies and writes. Needs only torch."""

import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gpu_parts.devices import Gpu
from gpu_parts.run import Budget, Emit, Row, error_text
from gpu_parts.sizes import Sizes

GiB = 2**30
TURNS = 4
"""Turns in which each rate is measured, after one to warm up. The best counts: the others waited for something."""


def measure_machine(gpu: Gpu, sizes: Sizes, disk: Path, emit: Emit, budget: Budget) -> None:
    """Emit facts, then rates one by one, so that an error in one does not affect the others."""
    facts = gpu.facts() | _facts_of_the_host(disk)
    for what, value in facts.items():
        emit({"kind": "fact", "what": what, "value": value})
    for what, unit, rate in (
        ("host to GPU, pinned", "GB/s", lambda: _copy_gbps(gpu, sizes, "in", pinned=True)),
        ("GPU to host, pinned", "GB/s", lambda: _copy_gbps(gpu, sizes, "out", pinned=True)),
        ("both ways at once, pinned, together", "GB/s", lambda: _copy_gbps(gpu, sizes, "both", pinned=True)),
        ("host to GPU, not pinned", "GB/s", lambda: _copy_gbps(gpu, sizes, "in", pinned=False)),
        ("GPU to host, not pinned", "GB/s", lambda: _copy_gbps(gpu, sizes, "out", pinned=False)),
        ("within the GPU, read and written", "GB/s", lambda: _device_copy_gbps(gpu, sizes)),
        (f"product of two {sizes.product} x {sizes.product}, bf16", "TFLOP/s", lambda: _product_tflops(gpu, sizes)),
        ("locking host memory", "GB/s", lambda: sizes.copy_bytes / gpu.lock_s(sizes.copy_bytes) / 1e9),
        ("writing a file, to the disk", "GB/s", lambda: _disk_gbps(disk, sizes)[0]),
        ("reading it again, not from memory", "GB/s", lambda: _disk_gbps(disk, sizes)[1]),
    ):
        emit({"kind": "rate", "what": what, "unit": unit, **_rated(rate)})


def _rated(rate: Callable[[], float]) -> Row:
    try:
        return {"rate": rate()}
    except (RuntimeError, OSError) as error:
        return {"error": error_text(error)}


def _facts_of_the_host(disk: Path) -> Row:
    memory = dict(line.split(":") for line in _text("/proc/meminfo").splitlines())
    total, free = (int(memory.get(key, "0 kB").split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    space = os.statvfs(disk)
    models = [line.split(":")[1].strip() for line in _text("/proc/cpuinfo").splitlines() if line.startswith("model n")]
    return {
        "host": f"{len(os.sched_getaffinity(0))} cores{f' of {models[0]}' if models else ''}",
        "host memory": f"{total / GiB:.1f} GiB, {free / GiB:.1f} available",
        "disk": f"{space.f_bavail * space.f_frsize / GiB:.1f} GiB free, {_file_system(disk)}",
        "torch": f"{torch.__version__}, Python {platform.python_version()}, {sys.platform}",
    }


def _text(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def _file_system(folder: Path) -> str:
    """Return the type of the file system of `folder`. On a tmpfs, the disk would be memory."""
    mounts = [(line.split()[1], line.split()[2]) for line in _text("/proc/mounts").splitlines()]
    around = {str(folder.resolve()), *map(str, folder.resolve().parents)}
    return max(
        (mount for mount in mounts if mount[0] in around), key=lambda mount: len(mount[0]), default=("", "unknown")
    )[1]


def best_s(gpu: Gpu, run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several turns."""
    times = []
    for _ in range(1 + TURNS):
        begin = gpu.moment()
        run()
        times.append(gpu.seconds(begin, gpu.moment()))
    return max(min(times[1:]), 1e-9)


def _copy_gbps(gpu: Gpu, sizes: Sizes, way: str, *, pinned: bool) -> float:
    host = gpu.host_buffer(sizes.copy_bytes, pinned=pinned)
    on_device = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=gpu.device)
    if way != "both":
        into, source = (on_device, host) if way == "in" else (host, on_device)
        return sizes.copy_bytes / best_s(gpu, lambda: into.copy_(source, non_blocking=pinned)) / 1e9
    other, also = gpu.host_buffer(sizes.copy_bytes, pinned=True), torch.zeros_like(on_device)

    def both() -> None:
        with gpu.aside():
            on_device.copy_(host, non_blocking=True)
        other.copy_(also, non_blocking=True)
        gpu.finish()

    return 2 * sizes.copy_bytes / best_s(gpu, both) / 1e9


def _device_copy_gbps(gpu: Gpu, sizes: Sizes) -> float:
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=gpu.device)
    into = torch.empty_like(source)
    return 2 * sizes.copy_bytes / best_s(gpu, lambda: into.copy_(source)) / 1e9


def _product_tflops(gpu: Gpu, sizes: Sizes) -> float:
    """Multiply random numbers, because zeros would be faster; return TFLOP/s."""
    left, right = torch.randn(2, sizes.product, sizes.product, device=gpu.device).bfloat16().unbind()
    return 2 * sizes.product**3 / best_s(gpu, lambda: left @ right) / 1e12


def _disk_gbps(folder: Path, sizes: Sizes) -> tuple[float, float]:
    """Return the rates (of writing with fsync, of reading after a drop from the page cache), in GB/s."""
    block = memoryview(os.urandom(min(sizes.disk_bytes, 2**24)))
    path = folder / f".disk-{os.getpid()}"
    try:
        with path.open("wb", buffering=0) as file:
            begin_s = time.perf_counter()
            for _ in range(sizes.disk_bytes // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            written_s = time.perf_counter() - begin_s
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with path.open("rb", buffering=0) as file:
            begin_s = time.perf_counter()
            while file.read(len(block)):
                pass
            read_s = time.perf_counter() - begin_s
    finally:
        path.unlink(missing_ok=True)
    return sizes.disk_bytes / written_s / 1e9, sizes.disk_bytes / read_s / 1e9
