"""The disk tier: pages in one unlinked file, each checked by version, length and CRC-32 when it is read.

All pages of a store lie in one unlinked file (`ScratchFile`), each in whole blocks of its own. For each page memory
holds the number of writes and the CRC-32 of the last one, and a read must match both. So a page that was damaged, was
written elsewhere or never reached the disk is not delivered.

Reads and writes are complete when they return. Different threads may move different pages at once: the system calls and
the checksum release the interpreter's lock. `PrefetchStore` has the threads, `probe` measures the best number.
"""

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32  # zlib's own takes five times as long, a core and a half on a fast disk

from zero.core.sizes import round_up
from zero.errors import StoreError, if_it_fails
from zero.platform.files import REQUEST_BYTES, Files, ScratchFile, memory_of, named
from zero.platform.handle import Done
from zero.store.base import Page, Pages, Store, Ticket, check_matching

_PROBE_BYTES = 256 * 2**20


@dataclass(slots=True)
class _Entry:
    """A page's place and checksum. `version` counts writes; `crc` is None while the page cannot be read."""

    folder: Path
    offset: int
    numel: int
    dtype: torch.dtype
    version: int = 0
    crc: int | None = 0
    lost: str = ""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class NvmeStore(Store):
    """Pages in an unlinked file in `folder`.

    Args:
        capacity_bytes: reserved now; pages beyond it reserve more as they are allocated.
        verify: compare the checksum of every page that is read. Without it, only what the system reports is noticed.
        request_bytes: the largest size of a system call, a multiple of 4 KiB.
        files: the file system.

    Raises:
        StoreError: `folder` cannot be used, or has not enough space: one line that names `offload.path`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        capacity_bytes: int = 0,
        verify: bool = True,
        request_bytes: int = REQUEST_BYTES,
        files: Files | None = None,
    ) -> None:
        self._folder, self._verify = Path(folder), verify
        self._entries = Pages[_Entry]()
        self._lock = threading.Lock()
        self._allocated_bytes = 0
        self._file = ScratchFile(Path(folder), files or Files(), request_bytes=request_bytes)
        with if_it_fails(self.close):
            self._file.reserve(capacity_bytes)

    def allocate(self, page: Page, numel: int, dtype: torch.dtype) -> None:
        with self._lock:
            self._entries.check_new(page)
            entry = _Entry(self._folder, self._allocated_bytes, numel, dtype)
            end_bytes = entry.offset + round_up(entry.nbytes)
            self._file.reserve(end_bytes)
            self._entries[page] = entry
            self._allocated_bytes = end_bytes

    def read(self, page: Page, into: Tensor) -> Ticket:
        entry = self._matching(page, into)
        version, crc = entry.version, entry.crc
        if crc is None:
            raise _bad(page, entry, entry.lost)
        if version == 0:
            into.zero_()
            return Done()
        memory = memory_of(into)
        try:
            self._file.read(memory, entry.offset)
        except OSError as error:
            raise _bad(page, entry, f"{named(error)} while reading") from error
        if entry.version != version:
            raise _bad(page, entry, "it was written while it was read")
        if self._verify and crc32(memory) != crc:
            raise _bad(
                page, entry, f"checksum differs (version {version}); what the disk holds is not what was written"
            )
        return Done()

    def write(self, page: Page, source: Tensor) -> Ticket:
        entry = self._matching(page, source)
        memory = memory_of(source)
        with self._lock:
            entry.version += 1
            version = entry.version
            entry.crc, entry.lost = None, f"its last write (version {version}) is not complete"
        try:
            self._file.write(memory, entry.offset)
        except OSError as error:
            entry.lost = f"lost since {named(error)} while writing (version {version})"
            raise _bad(page, entry, f"{named(error)} while writing") from error
        crc = crc32(memory) if self._verify else 0
        with self._lock:
            if entry.version != version:
                raise _bad(page, entry, "two writes at once")
            entry.crc = crc
        return Done()

    def in_place(self, page: Page) -> Tensor | None:
        self._entries[page]  # raises StoreError for an unknown page
        return None

    @property
    def allocated_bytes(self) -> int:
        self._entries.check_open()
        return self._allocated_bytes

    def close(self) -> None:
        self._entries.close()
        self._file.close()

    def _matching(self, page: Page, tensor: Tensor) -> _Entry:
        entry = self._entries[page]
        check_matching(page, entry.numel, entry.dtype, tensor)
        if not tensor.is_cpu or not tensor.is_contiguous():
            raise StoreError(f"{page} moves only from and to contiguous host memory, the tensor is on {tensor.device}")
        return entry


def _bad(page: Page, entry: _Entry, what: str) -> StoreError:
    return StoreError(f"{page} at offset {entry.offset} of the file in {entry.folder}: {what}")


class Speed(NamedTuple):
    """The fastest way to use a disk, and its rates in 1e9 bytes per second.

    The rates are those of reading and writing in turns, as an update does; so both are the same.
    """

    read_gbps: float
    write_gbps: float
    threads: int = 4
    request_bytes: int = REQUEST_BYTES


Report = Callable[[int, int], None]


def probe(
    folder: str | Path,
    *,
    size_bytes: int = _PROBE_BYTES,
    limit_s: float = 3.0,
    files: Files | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: Report = lambda done, total: None,
) -> Speed:
    """Measure a disk with 2 and 4 threads and requests of 1 and 4 MiB, on a file that is deleted again.

    Args:
        size_bytes: of the later store; a small one is not worth a long measurement.
        limit_s: seconds until the result, even if the disk hangs.
        files: the file system.
        clock: the time in seconds.
        progress: called with the number of turns that are done, and of all.

    Returns:
        The fastest way; of ways within 5 % the one with the fewest threads. The default way, and rates of 0, if the
        disk did not finish anything in time.

    Raises:
        StoreError: as `NvmeStore`, and if the disk reports an error.
    """
    start_s = clock()
    file = ScratchFile(Path(folder), files or Files())
    try:
        file.reserve(max(2 * REQUEST_BYTES, min(size_bytes, _PROBE_BYTES)) // REQUEST_BYTES * REQUEST_BYTES)
        race = _Race(file, clock, start_s + limit_s)
        return _best(race.run(start_s + limit_s / 3, progress))
    except OSError as error:
        raise StoreError(f"offload.path={folder}: {named(error)} while measuring its speed") from error
    finally:
        file.close()


class _Race:
    """Threads that move numbered requests until all are moved or their time is up."""

    def __init__(self, file: ScratchFile, clock: Callable[[], float], end_s: float) -> None:
        self._file = file
        self._clock = clock
        self._end_s = end_s
        self._noise = os.urandom(REQUEST_BYTES)  # a disk may be faster with zeros

    def run(self, filled_by_s: float, progress: Report) -> list[Speed]:
        """Return the speed of every way that ended in time.

        The blocks are written first, because a file system reads blocks that were never written without the disk. Then
        every way gets two turns, because the speed of a disk varies.
        """
        requests = self._file.reserved_bytes // REQUEST_BYTES
        ways = [(threads, request_bytes) for threads in (2, 4) for request_bytes in (2**20, REQUEST_BYTES)]
        total = 3 * len(ways)  # two turns each; the first writes take a third of the time
        progress(0, total)
        half_bytes = self._go(4, REQUEST_BYTES, requests, self._fill, filled_by_s)[0] // 2 * REQUEST_BYTES
        moved: dict[tuple[int, int], list[tuple[int, float]]] = {way: [] for way in ways}
        for done, (threads, request_bytes) in enumerate(ways * 2):
            progress(len(ways) + done, total)
            now_s = self._clock()
            stop_s = now_s + (self._end_s - now_s) / (2 * len(ways) - done + 1)
            count = 2 * half_bytes // request_bytes
            turn = self._go(threads, request_bytes, count, partial(self._mix, half_bytes), stop_s)
            if not turn[0]:
                break
            moved[threads, request_bytes].append(turn)
        progress(total, total)
        return [_speed(*way, turns) for way, turns in moved.items() if turns]

    def _fill(self, number: int, memory: memoryview) -> None:
        self._file.write(memory, number * len(memory))

    def _mix(self, half_bytes: int, number: int, memory: memoryview) -> None:
        """Read from the one half and write to the other, in turns."""
        offset = number // 2 * len(memory)
        if number % 2:
            self._file.write(memory, half_bytes + offset)
        else:
            self._file.read(memory, offset)

    def _go(
        self,
        threads: int,
        request_bytes: int,
        count: int,
        move: Callable[[int, memoryview], None],
        stop_s: float,
    ) -> tuple[int, float]:
        """Return the requests that were moved and the seconds; 0 if one is still under way when all time is over."""
        numbers, made, failures = itertools.count(), itertools.count(), list[BaseException]()

        def work(memory: memoryview) -> None:
            try:
                while self._clock() < stop_s and (number := next(numbers)) < count:
                    move(number, memory)
                    next(made)
            except BaseException as error:
                failures.append(error)

        memories = [memoryview(mmap.mmap(-1, request_bytes)) for _ in range(threads)]
        for memory in memories:
            memory[:] = self._noise[:request_bytes]
        start_s = self._clock()
        workers = [threading.Thread(target=work, args=(memory,), daemon=True) for memory in memories]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join(max(0.0, self._end_s - self._clock()))
        if failures:
            raise failures[0]
        is_late = any(thread.is_alive() for thread in workers)
        return 0 if is_late else next(made), self._clock() - start_s


def _speed(threads: int, request_bytes: int, turns: list[tuple[int, float]]) -> Speed:
    nbytes = sum(requests for requests, _ in turns) * request_bytes
    gbps = nbytes / max(sum(seconds for _, seconds in turns), 1e-9) / 1e9
    return Speed(gbps / 2, gbps / 2, threads, request_bytes)


def _best(speeds: list[Speed]) -> Speed:
    if not speeds:
        return Speed(0.0, 0.0)
    fastest = max(speed.read_gbps for speed in speeds)
    near = [speed for speed in speeds if speed.read_gbps >= 0.95 * fastest]
    return min(near, key=lambda speed: (speed.threads, -speed.read_gbps))
