"""The disk tier: pages in one unlinked file, each checked by version, length and CRC-32 when it is read.

All pages of a store lie in one unlinked file (`ScratchFile`), each in whole blocks of its own. Memory holds for each
page how often it was written and the CRC-32 of what was written; a read must find exactly that. So a page that was
damaged, went elsewhere or never reached the disk is not delivered, and nothing on the disk is believed that this
process did not write.

Reads and writes are complete when they return. Different pages may be moved by different threads at once: the system
calls and the checksum let the interpreter go. `PrefetchStore` brings the threads, `probe` measures how many are best.
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
    """What memory knows of a page. `version` counts writes; `crc` is None while the page holds nothing to be read."""

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
        request_bytes: the most that one system call moves, a multiple of 4 KiB.
        files: the door to the file system.

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
            self._entries.refuse_known(page)
            entry = _Entry(self._folder, self._allocated_bytes, numel, dtype)
            end_bytes = entry.offset + round_up(entry.nbytes)
            self._file.reserve(end_bytes)
            self._entries.add(page, entry)
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
        self._entries[page]  # which refuses what is unknown
        return None

    @property
    def allocated_bytes(self) -> int:
        self._entries.refuse_closed()
        return self._allocated_bytes

    def close(self) -> None:
        self._entries.close()
        self._file.close()

    def _matching(self, page: Page, other: Tensor) -> _Entry:
        entry = self._entries[page]
        check_matching(page, entry.numel, entry.dtype, other)
        if not other.is_cpu or not other.is_contiguous():
            raise StoreError(f"{page} moves only from and to contiguous host memory, the other side is {other.device}")
        return entry


def _bad(page: Page, entry: _Entry, what: str) -> StoreError:
    return StoreError(f"{page} at offset {entry.offset} of the file in {entry.folder}: {what}")


class Speed(NamedTuple):
    """The best way to use a disk, and what it then moves, in 1e9 bytes per second.

    The rates are those of reading and writing at once, in turns, as an update does; so both are the same.
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
    """Try 2 and 4 threads with requests of 1 and 4 MiB, on a file of its own. No store has more by itself.

    Args:
        size_bytes: what will be stored; a small store is not worth a long measurement.
        limit_s: an answer is there after this time even if the disk hangs.
        files, clock: the doors to the file system and to time, in seconds.
        progress: called with how many turns are done, of how many.

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
        race = _Race(file, clock, start_s + limit_s, progress)
        return _best(race.run(start_s + limit_s / 3))
    except OSError as error:
        raise StoreError(f"offload.path={folder}: {named(error)} while measuring its speed") from error
    finally:
        file.close()


class _Moved(NamedTuple):
    requests: int
    time_s: float


_Move = Callable[[int, memoryview], None]


class _Race:
    """Threads that move numbered requests until all are moved or their time is up."""

    def __init__(self, file: ScratchFile, clock: Callable[[], float], end_s: float, progress: Report) -> None:
        self._file = file
        self._clock = clock
        self._end_s = end_s
        self._progress = progress
        self._noise = os.urandom(REQUEST_BYTES)  # a disk may be quick with zeros

    def run(self, filled_by_s: float) -> list[Speed]:
        """First write what is to be read, since blocks that were never written are read without the disk. Then every
        way gets two turns, because a disk has good and bad moments.
        """
        requests = self._file.reserved_bytes // REQUEST_BYTES
        ways = [(threads, request_bytes) for threads in (2, 4) for request_bytes in (2**20, REQUEST_BYTES)]
        total = 3 * len(ways)  # two turns each, and writing first takes a third of the time
        self._progress(0, total)
        half_bytes = self._go(4, REQUEST_BYTES, requests, self._fill, filled_by_s).requests // 2 * REQUEST_BYTES
        turns: dict[tuple[int, int], list[_Moved]] = {way: [] for way in ways}
        for done, (threads, request_bytes) in enumerate(ways * 2):
            self._progress(len(ways) + done, total)
            now_s = self._clock()
            stop_s = now_s + (self._end_s - now_s) / (2 * len(ways) - done + 1)
            count = 2 * half_bytes // request_bytes
            moved = self._go(threads, request_bytes, count, partial(self._mix, half_bytes), stop_s)
            if not moved.requests:
                break
            turns[threads, request_bytes].append(moved)
        self._progress(total, total)
        return [_speed(*way, moves) for way, moves in turns.items() if moves]

    def _fill(self, number: int, memory: memoryview) -> None:
        self._file.write(memory, number * len(memory))

    def _mix(self, half_bytes: int, number: int, memory: memoryview) -> None:
        """Reads from the one half and writes to the other take turns."""
        offset = number // 2 * len(memory)
        if number % 2:
            self._file.write(memory, half_bytes + offset)
        else:
            self._file.read(memory, offset)

    def _go(self, threads: int, request_bytes: int, count: int, move: _Move, stop_s: float) -> _Moved:
        """What was moved, and in which time; nothing, if a request is still under way when all time is over."""
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
        late = any(thread.is_alive() for thread in workers)
        return _Moved(0 if late else next(made), self._clock() - start_s)


def _speed(threads: int, request_bytes: int, moves: list[_Moved]) -> Speed:
    nbytes = sum(moved.requests for moved in moves) * request_bytes
    gbps = nbytes / max(sum(moved.time_s for moved in moves), 1e-9) / 1e9
    return Speed(gbps / 2, gbps / 2, threads, request_bytes)


def _best(speeds: list[Speed]) -> Speed:
    if not speeds:
        return Speed(0.0, 0.0)
    fastest = max(speed.read_gbps for speed in speeds)
    near = [speed for speed in speeds if speed.read_gbps >= 0.95 * fastest]
    return min(near, key=lambda speed: (speed.threads, -speed.read_gbps))
