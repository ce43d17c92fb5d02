"""The disk tier: pages in one unlinked file, each checked by length and CRC-32 when it is read.

All pages of a store are in one unlinked file (`ScratchFile`), each in blocks of its own. The CRC-32 of each page's last
write is kept in memory, and a read must match it. So a read raises an error if the page was damaged, was written to
another place, or never reached the disk.

Reads and writes are complete when they return. Different threads may move different pages at once, because the system
calls and the checksum release the GIL. `PrefetchStore` has the threads.
"""

import itertools
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from zlib_ng.zlib_ng import crc32  # zlib's takes five times as long: 1.5 cores on a fast disk

from zero.core.sizes import round_up
from zero.errors import StoreError, if_it_fails
from zero.platform.files import Files, memory_of, named
from zero.platform.handle import Done
from zero.platform.scratch_file import REQUEST_BYTES, ScratchFile
from zero.progress import Progress, silent
from zero.store.base import Page, Pages, Store, Ticket, check_matching

_PROBE_BYTES = 256 * 2**20
_ROUNDS = 4
"""Number of times that a probe moves each block if time suffices."""


@dataclass(slots=True)
class _Entry:
    """The location of a page and the checksum of its last write; `lost` says why the page cannot be read."""

    offset: int
    numel: int
    dtype: torch.dtype
    is_written: bool = False
    crc: int = 0
    lost: str = ""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class NvmeStore(Store):
    """Pages in an unlinked file in `folder`.

    Args:
        capacity_bytes: bytes to reserve now; pages beyond them reserve more when they are allocated.
        verify: compare the checksum of every page that is read; False: only errors that the system reports are noticed.
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
        files: Files | None = None,
    ) -> None:
        self._folder, self._verify = Path(folder), verify
        self._entries = Pages[_Entry]()
        self._lock = threading.Lock()
        self._end_bytes = self._allocated_bytes = 0
        self._holes: list[tuple[int, int]] = []  # offset and bytes of freed pages
        self._file = ScratchFile(self._folder, files or Files())
        with if_it_fails(self.close):
            self._file.reserve(capacity_bytes)

    def allocate_all(self, sizes: Mapping[Page, tuple[int, torch.dtype]]) -> None:
        with self._lock:
            entries, end_bytes = dict[Page, _Entry](), self._end_bytes
            for page, (numel, dtype) in sizes.items():
                self._entries.check_new(page)
                entries[page] = _Entry(end_bytes, numel, dtype)
                end_bytes += round_up(entries[page].nbytes)
            self._file.reserve(end_bytes)
            self._allocated_bytes += end_bytes - self._end_bytes
            self._end_bytes = end_bytes
            self._entries.update(entries)

    def rename(self, page: Page, name: Page) -> None:
        with self._lock:
            self._entries.rename(page, name)

    def free(self, page: Page) -> None:
        """Remove a page. `trim` returns its space to the file system."""
        with self._lock:
            entry = self._entries.take(page)
            self._allocated_bytes -= round_up(entry.nbytes)
            self._holes.append((entry.offset, round_up(entry.nbytes)))

    def trim(self) -> None:
        with self._lock:
            while self._holes:
                self._file.give_back(*self._holes.pop())

    def read(self, page: Page, into: Tensor) -> Ticket:
        entry = self._matching(page, into)
        if entry.lost:
            raise self._bad(page, entry, entry.lost)
        if not entry.is_written:
            into.zero_()
            return Done()
        memory = memory_of(into)
        try:
            self._file.read(memory, entry.offset)
        except OSError as error:
            raise self._bad(page, entry, f"{named(error)} while reading") from error
        if self._verify and crc32(memory) != entry.crc:
            raise self._bad(page, entry, "the checksum differs, so the disk returned other data than was written")
        return Done()

    def write(self, page: Page, source: Tensor) -> Ticket:
        entry = self._matching(page, source)
        memory = memory_of(source)
        entry.is_written, entry.lost = True, "its last write is not complete"
        try:
            self._file.write(memory, entry.offset)
        except OSError as error:
            entry.lost = f"its data was lost by {named(error)} while writing"
            raise self._bad(page, entry, f"{named(error)} while writing") from error
        entry.crc, entry.lost = crc32(memory) if self._verify else 0, ""
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
            raise StoreError(f"{page}: the tensor on {tensor.device} must be contiguous and on the CPU")
        return entry

    def _bad(self, page: Page, entry: _Entry, problem: str) -> StoreError:
        return StoreError(f"{page} at offset {entry.offset} of the file in {self._folder}: {problem}")


def probe(
    folder: str | Path,
    *,
    size_bytes: int = _PROBE_BYTES,
    threads: int = 4,
    limit_s: float = 3.0,
    files: Files | None = None,
    clock: Callable[[], float] = time.monotonic,
    progress: Progress = silent,
) -> float:
    """Measure a disk with threads that alternate between reads and writes, as an update does, in a temporary file.

    Args:
        size_bytes: bytes of the store that will be used; the file of the measurement is not larger.
        limit_s: seconds for all requests, even if the disk hangs.
        files: the file system.
        clock: returns the time in seconds.

    Returns:
        Bytes per second that are read while as many are written; 0 if the disk did not finish anything in time.

    Raises:
        StoreError: as `NvmeStore`, or the disk reports an error.
    """
    file = ScratchFile(Path(folder), files or Files())
    blocks = max(1, min(size_bytes, _PROBE_BYTES) // REQUEST_BYTES // 2)
    try:
        file.reserve(2 * blocks * REQUEST_BYTES)
        begin_s = clock()
        run = partial(_run, threads=threads, clock=clock, end_s=begin_s + limit_s)
        progress("measuring the disk", 0, 3)
        # written first, because reads of blocks that were never written do not reach the disk
        filled, _ = run(
            lambda number, memory: file.write(memory, number * REQUEST_BYTES), blocks, stop_s=begin_s + limit_s / 3
        )

        def read_or_write(number: int, memory: memoryview) -> None:
            block = number // 2 % filled
            if number % 2:
                file.write(memory, (blocks + block) * REQUEST_BYTES)
            else:
                file.read(memory, block * REQUEST_BYTES)

        progress("measuring the disk", 1, 3)
        moved, seconds = run(read_or_write, 2 * _ROUNDS * filled, stop_s=begin_s + limit_s * 2 / 3)
        progress("measuring the disk", 3, 3)
        return moved * REQUEST_BYTES / 2 / max(seconds, 1e-9)
    except OSError as error:
        raise StoreError(f"offload.path={folder}: {named(error)} while measuring its speed") from error
    finally:
        file.close()


def _run(
    move: Callable[[int, memoryview], None],
    count: int,
    *,
    threads: int,
    clock: Callable[[], float],
    stop_s: float,
    end_s: float,
) -> tuple[int, float]:
    """Execute numbered requests in threads until `stop_s`; return how many ended, and the seconds that they took.

    The number is 0 if a request is still running at `end_s`. The threads are daemons because a disk may hang.
    """
    numbers, moved, failures = itertools.count(), itertools.count(), list[BaseException]()

    def work(memory: memoryview) -> None:
        try:
            while clock() < stop_s and (number := next(numbers)) < count:
                move(number, memory)
                next(moved)
        except BaseException as error:
            failures.append(error)

    noise = os.urandom(REQUEST_BYTES)  # a disk may be faster with zeros
    memories = [memoryview(mmap.mmap(-1, REQUEST_BYTES)) for _ in range(threads)]
    for memory in memories:
        memory[:] = noise
    start_s = clock()
    workers = [threading.Thread(target=work, args=(memory,), daemon=True) for memory in memories]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join(max(0.0, end_s - clock()))
    if failures:
        raise failures[0]
    is_late = any(thread.is_alive() for thread in workers)
    return 0 if is_late else next(moved), clock() - start_s
