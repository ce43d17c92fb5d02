"""The unlinked file of a store's pages: descriptors, alignment and request sizes, without knowledge of the pages.

The file is unlinked as soon as it is open. So no file is left however the process ends, data of an earlier run cannot
be read by mistake, and two runs may use the same folder. Transfers bypass the page cache (`O_DIRECT`) if the file
system supports it, so that state offloaded to a disk takes no host memory.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from zero.core.sizes import BLOCK_BYTES, round_up, size_text
from zero.errors import StoreError, if_it_fails
from zero.platform.files import NO_SPACE, Files, named, transfer_all

REQUEST_BYTES = 4 * 2**20
"""Size of one transfer: large enough that Python's overhead per call is negligible."""


class ScratchFile:
    """An unlinked file in `folder`, whose space is freed when it is closed or the process dies.

    Several threads may transfer different parts at the same time. Offsets are multiples of `BLOCK_BYTES`. A write
    overwrites whole blocks, so it may destroy the bytes between the end of its data and the end of the last block.

    Attributes:
        reserved_bytes: disk space reserved for the file.

    Raises:
        StoreError: a file cannot be made, written and read back there; the message is one line and names
            `offload.path`.
    """

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder = folder
        self._files = files
        self.reserved_bytes = 0
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self._bounce = threading.local()
        self._direct = True
        try:
            self._fd = open_and_unlink(folder, files)
        except OSError as error:
            raise _refused(folder, "no file can be made", error) from error
        with if_it_fails(self.close):
            self._try_out()

    def reserve(self, end_bytes: int) -> None:
        """Reserve disk space for the first `end_bytes` bytes, so that a full disk is noticed before training starts.

        Raises:
            StoreError: the disk has less free space; the message has both numbers.
        """
        with self._using() as fd:
            more_bytes = end_bytes - self.reserved_bytes
            if more_bytes <= 0:
                return
            free_bytes = 0
            try:
                free_bytes = self._files.free_bytes(self._folder)
                if more_bytes > free_bytes:
                    raise _no_space(self._folder, more_bytes, free_bytes)
                self._files.fallocate(fd, self.reserved_bytes, more_bytes)
            except OSError as error:
                if error.errno in NO_SPACE:
                    raise _no_space(self._folder, more_bytes, free_bytes, error) from error
                raise _refused(self._folder, f"no {size_text(more_bytes)} can be reserved", error) from error
            self.reserved_bytes = end_bytes

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return the disk space of a part of the file, if the file system can."""
        with self._using() as fd, contextlib.suppress(OSError):
            self._files.punch(fd, offset, nbytes)

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill all of `memory` with the bytes of the file from `offset` on. Raises OSError."""
        with self._using() as fd:
            for start, piece, block in self._requests(memory):
                transfer_all(self._files.pread, fd, block, offset + start)
                if block is not piece:
                    piece[:] = block[: len(piece)]

    def write(self, memory: memoryview, offset: int) -> None:
        """Write all of `memory` to the file at `offset`. Raises OSError."""
        with self._using() as fd:
            for start, piece, block in self._requests(memory):
                if block is not piece:
                    block[: len(piece)] = piece
                    block[len(piece) :] = bytes(len(block) - len(piece))
                transfer_all(self._files.pwrite, fd, block, offset + start)

    def close(self) -> None:
        """Reject new transfers, and close the descriptor after the last running transfer.

        A descriptor that is closed during a transfer could be reused for another file, which the transfer would then
        access.
        """
        with self._lock:
            last = not self._closed and not self._users
            self._closed = True
        if last:
            self._release()

    @contextlib.contextmanager
    def _using(self) -> Iterator[int]:
        with self._lock:
            if self._closed:
                raise StoreError("this store is closed")
            self._users += 1
        try:
            yield self._fd
        finally:
            with self._lock:
                self._users -= 1
                last = self._closed and not self._users
            if last:
                self._release()

    def _release(self) -> None:
        self._bounce = threading.local()
        with contextlib.suppress(OSError):  # the descriptor is closed in any case, and the data is not needed
            self._files.close(self._fd)

    def _requests(self, memory: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
        """Yield (start, piece of `memory`, block to transfer); the block is the piece itself or an aligned buffer."""
        nbytes = len(memory)
        if not self._direct:
            straight_bytes = nbytes
        elif nbytes and ctypes.addressof(ctypes.c_char.from_buffer(memory)) % BLOCK_BYTES == 0:
            straight_bytes = nbytes // BLOCK_BYTES * BLOCK_BYTES
        else:
            straight_bytes = 0
        for begin, stop, straight in ((0, straight_bytes, True), (straight_bytes, nbytes, False)):
            for start in range(begin, stop, REQUEST_BYTES):
                piece = memory[start : min(start + REQUEST_BYTES, stop)]
                yield start, piece, piece if straight else self._aligned(len(piece))

    def _aligned(self, nbytes: int) -> memoryview:
        """Return an aligned buffer of this thread, of `nbytes` rounded up to whole blocks."""
        buffer = getattr(self._bounce, "buffer", None)
        if buffer is None:
            buffer = self._bounce.buffer = mmap.mmap(-1, REQUEST_BYTES)  # takes memory only as far as it is used
        return memoryview(buffer)[: round_up(nbytes)]

    def _try_out(self) -> None:
        """Write and read one block, so that an unusable folder is noticed now; turn direct I/O off if it fails."""
        try:
            try:
                self._files.direct(self._fd, True)
                self._check_first_block()
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False
                self._files.direct(self._fd, False)
                self._check_first_block()
                text = f"offload.path={self._folder}: no direct I/O here, so pages go through the page cache"
                warnings.warn(f"{text} (same bits)", stacklevel=4)
        except OSError as error:
            raise _refused(self._folder, "the first block cannot be written and read", error) from error

    def _check_first_block(self) -> None:
        pattern = secrets.token_bytes(BLOCK_BYTES)
        block = bytearray(BLOCK_BYTES)
        self.write(memoryview(bytearray(pattern)), 0)
        self.read(memoryview(block), 0)
        if block != pattern:
            raise StoreError(f"offload.path={self._folder}: the first block reads differently than it was written")


def open_and_unlink(folder: Path, files: Files) -> int:
    """Create a file, unlink it at once and return its descriptor."""
    path = folder / f".zero-{secrets.token_hex(16)}"
    fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    with if_it_fails(partial(files.close, fd)):
        files.unlink(path)
    return fd


def _refused(folder: Path, what: str, error: OSError) -> StoreError:
    return StoreError(f"offload.path={folder}: {what}: {named(error)}. Set offload.path to a folder on a local disk.")


def _no_space(folder: Path, needs_bytes: int, free_bytes: int, error: OSError | None = None) -> StoreError:
    cause = f" ({named(error)})" if error else ""
    return StoreError(
        f"the state store needs {size_text(needs_bytes)}, but {folder} has {size_text(free_bytes)} free{cause}. Set "
        "offload.path to a folder with more space, or keep less there."
    )
