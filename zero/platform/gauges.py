"""Fast readings of free host memory, for the end of every step: tens of microseconds.

Source: the kernel's documentation of /proc/meminfo and of memory cgroups (v1 and v2).
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from zero.platform.host_memory import memory_groups

MEMINFO_BYTES = 256
"""Bytes from the beginning of /proc/meminfo that include MemAvailable."""


class _Group:
    """The open files of a memory cgroup: its limit, which may change, its use, and statistics that are slow to read."""

    def __init__(self, folder: Path, limit: str, used: str) -> None:
        self._limit, self._used = (os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC) for name in (limit, used))
        self._stat = os.open(folder / "memory.stat", os.O_RDONLY | os.O_CLOEXEC)

    def free_bytes(self, near_bytes: int) -> int | None:
        """Return the bytes below the limit, or None without a limit.

        Args:
            near_bytes: below so many bytes, files in the page cache are subtracted from the use: the kernel frees
                those that were not used lately on demand.
        """
        limit = os.pread(self._limit, 32, 0)
        if limit.startswith(b"max"):
            return None
        free = int(limit) - int(os.pread(self._used, 32, 0))
        if free < near_bytes and (cached := re.search(rb"^inactive_file (\d+)", os.pread(self._stat, 4096, 0), re.M)):
            free += int(cached[1])
        return free

    def close(self) -> None:
        for fd in (self._limit, self._used, self._stat):
            os.close(fd)


class HostGauge:
    """The host memory that this process can still allocate.

    Args:
        top: a folder in place of `/`, for tests.
    """

    def __init__(self, top: Path = Path("/")) -> None:
        self._meminfo = os.open(top / "proc/meminfo", os.O_RDONLY | os.O_CLOEXEC)
        self._groups = list[_Group]()
        for folder, limit, used in memory_groups(top):
            with suppress(OSError):  # a group without these files, such as the root
                self._groups.append(_Group(folder, limit, used))

    def free_bytes(self, near_bytes: int) -> int:
        """Return the least free bytes of the machine and of this process's memory cgroups.

        Args:
            near_bytes: see `_Group.free_bytes`.
        """
        available = re.search(rb"MemAvailable:\s+(\d+)", os.pread(self._meminfo, MEMINFO_BYTES, 0))
        free = 1024 * int(available[1]) if available else 2**62
        for group in self._groups:
            below_limit = group.free_bytes(near_bytes)
            free = free if below_limit is None else min(free, below_limit)
        return max(free, 0)

    def close(self) -> None:
        """Close the files."""
        os.close(self._meminfo)
        for group in self._groups:
            group.close()
