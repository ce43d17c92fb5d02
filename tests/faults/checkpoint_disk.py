"""A real disk for checkpoints whose chosen calls fail.

FaultyDisk(fail(errno.EIO), at=7)                        # the 7th call, once
FaultyDisk(drop(), at=2, on=True, only="pwrite")         # all writes from the 2nd on
"""

import errno
import os
import threading
from pathlib import Path
from typing import Any

from tests.faults.crash import Killed
from tests.faults.disks import Call, Fault
from zero.checkpoint.disk import Disk
from zero.platform.files import READ


class FaultyDisk(Disk):
    """A real disk, except that the chosen calls go to a fault. Calls of all threads are counted.

    Args:
        at: number of the first chosen call, from 1, of those in `only`; 0 chooses none.
        on: choose every later call, too.
        only: name of the calls that count; empty for all.
        refuses_direct: "at once", or "at the first transfer".

    Attributes:
        calls: (name, arguments) of every call.
        failed: names of the chosen calls.
        held: open descriptors.
    """

    def __init__(
        self, fault: Fault = Call.through, *, at: int = 0, on: bool = False, only: str = "", refuses_direct: str = ""
    ) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failed: list[str] = []
        self.held: set[int] = set()
        self._fault, self._at, self._on, self._only = fault, at, on, only
        self._refuses_direct, self._is_direct = refuses_direct, False
        self._count = 0
        self._lock = threading.Lock()

    def do(self, name: str, *args: Any) -> Any:
        with self._lock:
            self.calls.append((name, args))
            counts = name == self._only or not self._only
            self._count += counts
            chosen = counts and 0 < self._at <= self._count and (self._on or self._count == self._at)
        if not chosen:
            return self._really(name, *args)
        self.failed.append(name)
        return self._fault(Call(name, args, lambda *args: self._really(name, *args)))

    def _really(self, name: str, *args: Any) -> Any:
        self.held -= {args[0]} if name == "close" else set()
        refused = {"pwrite": self._is_direct and self._refuses_direct, "direct": self._refuses_direct == "at once"}
        if refused.get(name):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        result = getattr(Disk, name)(self, *args)
        if name == "direct":
            self._is_direct = args[1]
        if name in ("open", "create"):
            self.held.add(result)
        return result

    def open(self, path: Path, flags: int = READ) -> int:
        return self.do("open", path)


def _counted(name: str) -> Any:
    return lambda self, *args: self.do(name, *args)


for _name in dir(Disk):
    if not _name.startswith("_") and _name != "open":
        setattr(FaultyDisk, _name, _counted(_name))


def kill(call: Call) -> Any:
    """End the process instead of a call."""
    raise Killed
