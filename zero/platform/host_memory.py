"""Host memory: mappings, the free bytes, and the peak of this process."""

import ctypes
import mmap
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch import Tensor

LIMITS_AND_USE = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes"),
    2: (("memory.max", "memory.high"), "memory.current"),
}
"""The files with the limits and with the use of memory of a group, by the version of cgroups. Beyond `high` the kernel
slows a process down until it frees memory."""


def aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (numel,) zeros; on the host they have a memory mapping of their own.

    A mapping is page aligned, so that direct I/O can read files into it, and it keeps large, long-lived buffers from
    fragmenting the heap.
    """
    if device.type != "cpu" or numel == 0:
        return torch.zeros(numel, dtype=dtype, device=device)
    return torch.frombuffer(map_anonymous(numel * dtype.itemsize), dtype=dtype, count=numel)


def map_anonymous(nbytes: int) -> mmap.mmap:
    """Return a mapping of new zeros of this process alone."""
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def give_back_memory() -> None:
    """Return freed memory to the system, if malloc is glibc's.

    With raised thresholds, as set by `launch.malloc`, malloc keeps freed memory in pieces, which later allocations
    cannot always use.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_host_bytes() -> int:
    """Return the bytes of host memory that this process can still allocate: available in the system and its cgroups."""
    free = psutil.virtual_memory().available
    for folder, limit, used in memory_groups():
        try:
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))  # freed on demand
            free = min(free, int((folder / limit).read_text()) - int((folder / used).read_text()) + cached)
        except (OSError, ValueError):  # the files do not exist, or the limit is "max"
            continue
    return max(free, 0)


def host_total_bytes() -> int:
    """Return the bytes of host memory of this machine."""
    return int(psutil.virtual_memory().total)


def memory_groups(top: Path = Path("/")) -> Iterator[tuple[Path, str, str]]:
    """Yield (folder, name of a limit's file, name of the usage's file) of this process's memory cgroups and parents.

    Args:
        top: a folder in place of `/`, for tests.
    """
    try:
        lines = (top / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names == "" or "memory" in names.split(","):
            root = top / "sys/fs/cgroup" / ("memory" if names else "")
            limits, used = LIMITS_AND_USE[1 if names else 2]
            inner = root / path.lstrip("/")
            for folder in (inner, *inner.parents):
                if folder == root or root in folder.parents:
                    yield from ((folder, limit, used) for limit in limits)


def host_peak_bytes() -> int:
    """Return the peak of this process's resident host memory in bytes.

    VmHWM is read, because `getrusage` also counts the memory that the parent had when it forked this process.
    """
    peak_kib = re.search(r"^VmHWM:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * (int(peak_kib[1]) if peak_kib else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
