"""Fast readings of free host memory, for the end of every step: tens of microseconds.

Source: the kernel's documentation of /proc/meminfo and of memory cgroups (v1 and v2).
"""

import os
import re
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path

from zero.platform.host_memory import host_total_bytes, memory_groups

MEMINFO_BYTES = 256
"""Bytes from the beginning of /proc/meminfo that include MemAvailable."""


class _Group:
    """The open files of a memory cgroup: its limit, which may change, its use, and statistics that are slow to read."""

    def __init__(self, limit: int, used: int, stat: int) -> None:
        self._limit, self._used, self._stat = limit, used, stat

    def limit_bytes(self) -> int | None:
        """Return the limit, or None."""
        limit = os.pread(self._limit, 32, 0)
        return None if limit.startswith(b"max") else int(limit)

    def free_bytes(self, near_bytes: int) -> int | None:
        """Return the bytes below the limit, or None without a limit.

        Args:
            near_bytes: below so many bytes, files in the page cache are subtracted from the use: the kernel frees
                those that were not used lately on demand.
        """
        if (limit := self.limit_bytes()) is None:
            return None
        free = limit - int(os.pread(self._used, 32, 0))
        if free < near_bytes and (cached := re.search(rb"^inactive_file (\d+)", os.pread(self._stat, 4096, 0), re.M)):
            free += int(cached[1])
        return free


class HostGauge:
    """The host memory that this process can still allocate.

    Args:
        top: a folder in place of `/`, for tests.
    """

    def __init__(self, top: Path = Path("/")) -> None:
        files = self._files = ExitStack()
        weakref.finalize(self, files.close).atexit = False

        def opened(path: Path) -> int:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            files.callback(os.close, fd)
            return fd

        self._meminfo = opened(top / "proc/meminfo")
        self._groups = list[_Group]()
        for folder, *names in memory_groups(top):
            with suppress(OSError):  # a group without these files, such as the root
                self._groups.append(_Group(*(opened(folder / name) for name in (*names, "memory.stat"))))

    def free_bytes(self, near_bytes: int) -> int:
        """Return the least free bytes of the machine and of this process's memory cgroups.

        Args:
            near_bytes: see `_Group.free_bytes`.
        """
        available = re.search(rb"MemAvailable:\s+(\d+)", os.pread(self._meminfo, MEMINFO_BYTES, 0))
        free = 1024 * int(available[1]) if available else 2**62
        for group in self._groups:
            try:
                below_limit = group.free_bytes(near_bytes)
            except OSError:  # the group was removed
                continue
            free = free if below_limit is None else min(free, below_limit)
        return max(free, 0)

    def total_bytes(self) -> int:
        """Return the memory of the machine, or the least limit of this process's memory cgroups."""
        limits = [limit for group in self._groups if (limit := group.limit_bytes()) is not None]
        return min([host_total_bytes(), *limits])

    def close(self) -> None:
        """Close the files."""
        self._files.close()
