"""Pages on a disk: the nvme tier.

All pages of a store lie in one nameless file (`ScratchFile`), each in whole blocks of its own. Memory holds for each
page how often it was written and the CRC-32 of what was written; a read must find exactly that. So a page that was
damaged, went elsewhere or never reached the disk is not delivered, and nothing on the disk is believed that this
process did not write.

Reads and writes are complete when they return. Different pages may be moved by different threads at once: the system
calls and the checksum let the interpreter go. `PrefetchStore` brings the threads, `probe` measures how many are best.
"""

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zero.errors import StoreError
from zero.store.base import Done, Page, Store, Ticket
from zero.store.files import REQUEST_BYTES, Files, ScratchFile, memory_of, named, round_up


@dataclass(slots=True)
class _Entry:
    """What memory knows of a page. `version` counts writes; `crc` is None while the page holds nothing to be read."""

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
    """Pages in a nameless file in `folder`.

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
        self._verify = verify
        self._entries: dict[Page, _Entry] | None = {}
        self._lock = threading.Lock()
        self._allocated_bytes = 0
        self._file = ScratchFile(Path(folder), files or Files(), request_bytes=request_bytes)
        try:
            self._file.reserve(capacity_bytes)
        except BaseException:
            self.close()
            raise

    def allocate(self, page: Page, numel: int, dtype: torch.dtype) -> None:
        with self._lock:
            entries = self._open()
            if page in entries:
                raise StoreError(f"{page} is allocated already")
            entry = _Entry(self._allocated_bytes, numel, dtype)
            end_bytes = entry.offset + round_up(entry.nbytes)
            self._file.reserve(end_bytes)
            entries[page] = entry
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
        with _naming(page, entry, "reading"):
            self._file.read(memory, entry.offset)
        if entry.version != version:
            raise _bad(page, entry, "it was written while it was read")
        if self._verify and zlib.crc32(memory) != crc:
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
            with _naming(page, entry, "writing"):
                self._file.write(memory, entry.offset)
        except StoreError as error:
            entry.lost = f"it is lost since a write failed (version {version}): {error.__cause__ or error}"
            raise
        crc = zlib.crc32(memory) if self._verify else 0
        with self._lock:
            if entry.version != version:
                raise _bad(page, entry, "two writes at once")
            entry.crc = crc
        return Done()

    def in_place(self, page: Page) -> Tensor | None:
        self._find(page)
        return None

    @property
    def allocated_bytes(self) -> int:
        self._open()
        return self._allocated_bytes

    def close(self) -> None:
        self._entries = None
        self._file.close()

    def _open(self) -> dict[Page, _Entry]:
        if self._entries is None:
            raise StoreError("this store is closed")
        return self._entries

    def _find(self, page: Page) -> _Entry:
        try:
            return self._open()[page]
        except KeyError:
            raise StoreError(f"{page} was never allocated") from None

    def _matching(self, page: Page, other: Tensor) -> _Entry:
        entry = self._find(page)
        if other.shape != (entry.numel,) or other.dtype != entry.dtype:
            raise StoreError(
                f"{page} holds {(entry.numel,)} {entry.dtype}, the other side is {tuple(other.shape)} {other.dtype}"
            )
        if other.device.type != "cpu" or not other.is_contiguous():
            raise StoreError(f"{page} moves only from and to contiguous host memory, the other side is {other.device}")
        return entry


@contextmanager
def _naming(page: Page, entry: _Entry, doing: str) -> Iterator[None]:
    """Errors of the file get the page's name."""
    try:
        yield
    except OSError as error:
        raise _bad(page, entry, f"{named(error)} while {doing}") from error


def _bad(page: Page, entry: _Entry, what: str) -> StoreError:
    return StoreError(f"page {page.kind} {page.number} of unit {page.unit} at offset {entry.offset}: {what}")
