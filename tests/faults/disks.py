"""A file system with chosen faults, and a store with a fixed bandwidth.

`FaultyFiles` and `FaultyDisk` take the place of the file system in stores and checkpoints. They count calls and pass
some of them to a `Fault`:

    store = NvmeStore(folder, files=FaultyFiles(fail(errno.EIO), at=7))                     # the 7th call, once
    store = NvmeStore(folder, files=FaultyFiles(drop(), at=2, only="pwrite", on=True))     # all writes from the 2nd

`ThrottledStore` gives a tier a fixed bandwidth, so that measurements do not depend on the machine's disk. `Drive` is a
drive made of memory, with one bandwidth for reads and one for writes.
"""

import errno
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from zero.checkpoint.files.disk import Disk
from zero.platform.files import Files
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
    """The call raises OSError with this errno and does nothing; close and unlock still close the descriptor."""

    def fault(call: Call) -> Any:
        if call.name in ("close", "unlock"):
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


class _Faulty:
    """A real file system, except for chosen calls.

    Args:
        fault: takes the place of the chosen calls; every call is counted.
        at: number of the first chosen call, counted from 1 among the calls in `only`.
        on: choose every later call, too; otherwise only this one.
        only: names of the calls that count, separated by spaces, such as "pread pwrite"; empty for all.
        direct: "yes" if direct I/O works; "switch" or "transfer" if that call rejects it.
        before: called with each call before it is made, in the same thread, for example for a delay.

    Attributes:
        count: number of calls so far, of those in `only`.
        calls: (name, arguments) of every call, with the length of a buffer in its place.
        failed: names of the chosen calls.
        held: open descriptors.
    """

    _base: type[Files]

    def __init__(
        self,
        fault: Fault = Call.through,
        *,
        at: int = 1,
        on: bool = False,
        only: str = "",
        direct: str = "yes",
        before: Callable[[Call], object] = lambda call: None,
    ) -> None:
        self.count = 0
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.failed: list[str] = []
        self.held: set[int] = set()
        self._fault, self._at, self._on, self._only, self._before = fault, at, on, only.split(), before
        self._refuses_direct, self._direct = direct, set[int]()
        self._lock = threading.Lock()

    def do(self, name: str, *args: Any) -> Any:
        call = Call(name, args, partial(self._really, name))
        self._before(call)
        with self._lock:
            self.calls.append((name, tuple(len(arg) if isinstance(arg, memoryview) else arg for arg in args)))
            counts = not self._only or name in self._only
            self.count += counts
            if not counts or self.count < self._at or (self.count > self._at and not self._on):
                chosen = False
            else:
                chosen = True
                self.failed.append(name)
        return self._fault(call) if chosen else call.through()

    def _really(self, name: str, *args: Any) -> Any:
        fd = args[0]
        refuses = {
            "direct": self._refuses_direct == "switch" and args[-1] is True,
            "pread": fd in self._direct and self._refuses_direct == "transfer",
            "pwrite": fd in self._direct and self._refuses_direct == "transfer",
        }
        if refuses.get(name):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if name == "close":
            self.held.discard(fd)
            self._direct.discard(fd)
        result = getattr(self._base, name)(self, *args)
        if name == "direct":
            (self._direct.add if args[1] else self._direct.discard)(fd)
        if name in ("open", "create"):
            self.held.add(result)
        return result


def _counted(name: str) -> Any:
    return lambda self, *args: self.do(name, *args)


def _faulty(base: type[Files]) -> Any:
    calls = {name: _counted(name) for name in dir(base) if not name.startswith("_")}
    return type(f"Faulty{base.__name__}", (_Faulty, base), {**calls, "_base": base})


FaultyFiles = _faulty(Files)
"""The file system of a store."""

FaultyDisk = _faulty(Disk)
"""The file system of checkpoints."""


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

    def allocate_all(self, sizes: Mapping[Page, tuple[int, torch.dtype]]) -> None:
        self._inner.allocate_all(sizes)

    def rename(self, page: Page, name: Page) -> None:
        self._inner.rename(page, name)

    def free(self, page: Page) -> None:
        self._inner.free(page)

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


class Door:
    """A way in or out of a drive. Requests pass one after another at `bytes_per_s`, and each at `alone_bytes_per_s`.

    Unused time is not saved up.
    """

    def __init__(self, bytes_per_s: float, alone_bytes_per_s: float) -> None:
        self._bytes_per_s, self._alone_bytes_per_s = bytes_per_s, alone_bytes_per_s
        self._lock, self._free_s = threading.Lock(), 0.0

    def pass_through(self, call: Callable[[], int], nbytes: int) -> int:
        """Make the call, and return its result when so many bytes are through."""
        begin_s = time.monotonic()
        with self._lock:
            self._free_s = max(self._free_s, begin_s) + nbytes / self._bytes_per_s
            end_s = max(self._free_s, begin_s + nbytes / self._alone_bytes_per_s)
        result = call()
        time.sleep(max(0.0, end_s - time.monotonic()))
        return result


class Drive(Files):
    """The file system of a drive made of memory, which reads and writes at the same time, at rates of their own.

    A request that is alone reaches half the rate, as the requests of one thread do on a fast drive.
    """

    def __init__(self, read_bytes_per_s: float = math.inf, write_bytes_per_s: float = math.inf) -> None:
        self._out, self._in = (Door(rate, rate / 2) for rate in (read_bytes_per_s, write_bytes_per_s))

    def open(self, path: Path, flags: int = 0) -> int:
        return os.memfd_create(path.name)

    def unlink(self, path: Path) -> None:
        pass

    def free_bytes(self, path: Path) -> int:
        return psutil.virtual_memory().available

    def direct(self, fd: int, on: bool) -> None:
        """Do nothing: memory has no cache."""

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        return self._out.pass_through(partial(super().pread, fd, view, offset), len(view))

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return self._in.pass_through(partial(super().pwrite, fd, view, offset), len(view))


def _copy_of(buffer: memoryview) -> memoryview:
    """A copy of the bytes, aligned for direct I/O."""
    copy = memoryview(mmap.mmap(-1, len(buffer)))
    copy[:] = buffer
    return copy


def _invert(buffer: memoryview, bit: int) -> None:
    bit %= 8 * len(buffer)
    buffer[bit // 8] ^= 1 << bit % 8
