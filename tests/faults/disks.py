"""A file system with chosen faults, and a store with a fixed bandwidth.

`FaultyFiles` takes the place of the file system in a store. It counts calls and passes some of them to a `Fault`:

    store = NvmeStore(folder, files=FaultyFiles(fail(errno.EIO), at=7))                     # the 7th call, once
    store = NvmeStore(folder, files=FaultyFiles(drop(), at=2, only="pwrite", on=True))     # all writes from the 2nd

`ThrottledStore` gives a tier a fixed bandwidth, so that measurements do not depend on the machine's disk.
"""

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero.platform.files import READ, Files
from zero.platform.handle import Done
from zero.store.base import Page, Store, Ticket


@dataclass(frozen=True)
class Call:
    """A store's call of the file system: its name, its arguments, and the function that really makes it."""

    name: str
    args: tuple[Any, ...]
    make: Callable[..., Any]

    def through(self) -> Any:
        return self.make(*self.args)


Fault = Callable[[Call], Any]
"""Takes the place of a call: returns a value of the same kind, or raises OSError."""


def fail(code: int) -> Fault:
    """The call raises OSError with this errno and does nothing, except that close still closes the descriptor."""

    def fault(call: Call) -> Any:
        if call.name == "close":
            call.through()
        raise OSError(code, os.strerror(code))

    return fault


def short(nbytes: int) -> Fault:
    """A read or write stops after at most `nbytes`; the bytes after that are garbage, in the file or in memory."""

    def fault(call: Call) -> Any:
        if call.name == "pwrite":
            fd, buffer, offset = call.args
            copy = _copy_of(buffer)
            copy[nbytes:] = b"\xa5" * len(copy[nbytes:])
            return min(nbytes, call.make(fd, copy, offset))
        count = call.through()
        if call.name == "pread":
            _, buffer, _ = call.args
            buffer[nbytes:] = b"\xa5" * len(buffer[nbytes:])
            return min(nbytes, count)
        return count

    return fault


def flip(bit: int) -> Fault:
    """A read or write inverts one bit: number `bit` modulo its number of bits."""

    def fault(call: Call) -> Any:
        if call.name == "pwrite":
            fd, buffer, offset = call.args
            copy = _copy_of(buffer)
            _invert(copy, bit)
            return call.make(fd, copy, offset)
        count = call.through()
        if call.name == "pread":
            _invert(call.args[1], bit)
        return count

    return fault


def drop() -> Fault:
    """A write does not reach the disk but reports success; a read leaves memory unchanged but reports success."""

    def fault(call: Call) -> Any:
        if call.name in ("pwrite", "pread"):
            return len(call.args[1])
        return call.through()

    return fault


def misplace(by_bytes: int) -> Fault:
    """A read or write takes place at another offset: that of another page."""

    def fault(call: Call) -> Any:
        if call.name in ("pwrite", "pread"):
            fd, buffer, offset = call.args
            return call.make(fd, buffer, max(0, offset + by_bytes))
        return call.through()

    return fault


class FaultyFiles(Files):
    """The real file system, except for chosen calls.

    Args:
        fault: takes the place of the chosen calls. None: every call is made and counted.
        at: number of the first chosen call, counted from 1 among the calls in `only`.
        on: choose every later call, too; otherwise only this one.
        only: names of the calls that count, separated by spaces, such as "pread pwrite"; empty for all.
        direct: "yes" if direct I/O works; "switch" or "transfer" if that call rejects it.
        before: called with each call before it is made, in the same thread, for example for a delay.

    Attributes:
        count: number of calls so far, of those in `only`.
        held: open descriptors.
    """

    def __init__(
        self,
        fault: Fault | None = None,
        *,
        at: int = 1,
        on: bool = False,
        only: str = "",
        direct: str = "yes",
        before: Callable[[Call], None] | None = None,
    ) -> None:
        self.count = 0
        self.held: set[int] = set()
        self._fault = fault
        self._at = at
        self._on = on
        self._only = only.split()
        self._refuses_direct = direct
        self._before = before
        self._direct: set[int] = set()
        self._lock = threading.Lock()

    def free_bytes(self, path: Path) -> int:
        return self._do("free_bytes", super().free_bytes, path)

    def open(self, path: Path, flags: int = READ) -> int:
        return self._do("open", self._really_open, path, flags)

    def unlink(self, path: Path) -> None:
        self._do("unlink", super().unlink, path)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        self._do("fallocate", super().fallocate, fd, offset, nbytes)

    def direct(self, fd: int, on: bool) -> None:
        self._do("direct", self._really_direct, fd, on)

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        return self._do("pread", self._really_pread, fd, view, offset)

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return self._do("pwrite", self._really_pwrite, fd, view, offset)

    def close(self, fd: int) -> None:
        self._do("close", self._really_close, fd)

    def _do(self, name: str, make: Callable[..., Any], *args: Any) -> Any:
        call = Call(name, args, make)
        if self._before is not None:
            self._before(call)
        return self._fault(call) if self._chosen(name) and self._fault is not None else call.through()

    def _chosen(self, name: str) -> bool:
        if self._only and name not in self._only:
            return False
        with self._lock:
            self.count += 1
            return self.count == self._at or (self._on and self.count > self._at)

    def _really_open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        self.held.add(fd)
        return fd

    def _really_direct(self, fd: int, on: bool) -> None:
        if on and self._refuses_direct == "switch":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        super().direct(fd, on)
        (self._direct.add if on else self._direct.discard)(fd)

    def _really_pread(self, fd: int, view: memoryview, offset: int) -> int:
        self._check_direct(fd)
        return super().pread(fd, view, offset)

    def _really_pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        self._check_direct(fd)
        return super().pwrite(fd, view, offset)

    def _check_direct(self, fd: int) -> None:
        if fd in self._direct and self._refuses_direct == "transfer":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def _really_close(self, fd: int) -> None:
        self.held.discard(fd)
        self._direct.discard(fd)
        super().close(fd)


class ThrottledStore(Store):
    """A store with the bandwidth of a device that reads and writes `bytes_per_s` in total.

    Reads and writes get their turns on one clock, in the order in which they begin, and return at the end of their
    turn. So each of eight threads gets an eighth. Unused time is not saved up. `in_place` always returns None.

    Args:
        inner: the store that is throttled.
        bytes_per_s: bandwidth of reads and writes together.
        clock: returns the time in seconds, as time.monotonic does.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        inner: Store,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_s = 0.0

    def allocate(self, page: Page, numel: int, dtype: torch.dtype) -> None:
        self._inner.allocate(page, numel, dtype)

    def read(self, page: Page, into: Tensor) -> Ticket:
        end_s = self._turn(into.nbytes)
        self._inner.read(page, into).wait()
        self._await(end_s)
        return Done()

    def write(self, page: Page, source: Tensor) -> Ticket:
        end_s = self._turn(source.nbytes)
        self._inner.write(page, source).wait()
        self._await(end_s)
        return Done()

    def in_place(self, page: Page) -> Tensor | None:
        self._inner.in_place(page)  # refuses an unknown page
        return None

    @property
    def allocated_bytes(self) -> int:
        return self._inner.allocated_bytes

    def close(self) -> None:
        self._inner.close()

    def _turn(self, nbytes: int) -> float:
        """The time at which this read or write ends."""
        with self._lock:
            self._free_s = max(self._free_s, self._clock()) + nbytes / self._bytes_per_s
            return self._free_s

    def _await(self, end_s: float) -> None:
        left_s = end_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)


def _copy_of(buffer: memoryview) -> memoryview:
    """A copy of the bytes, aligned for direct I/O."""
    copy = memoryview(mmap.mmap(-1, len(buffer)))
    copy[:] = buffer
    return copy


def _invert(buffer: memoryview, bit: int) -> None:
    bit %= 8 * len(buffer)
    buffer[bit // 8] ^= 1 << bit % 8
