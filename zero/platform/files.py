"""The file system calls of stores and checkpoints, files that appear whole, and the unlinked file of a store's pages.

All calls go through `Files`, so that a test can make any of them fail (`tests/faults`). `move` repeats a call until a
whole buffer has been transferred. `appearing` writes under another name, syncs and renames. `ScratchFile` handles
descriptors, alignment and request sizes; it does not know the pages of a store.

The scratch file is unlinked as soon as it is open. So no file is left however the process ends, data of an earlier run
cannot be read by mistake, and two runs may use the same folder. Transfers bypass the page cache (`O_DIRECT`) if the
file system supports it, so that state offloaded to a disk takes no host memory.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import shutil
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zero.core.sizes import BLOCK_BYTES, round_up, size_text
from zero.errors import CheckpointError, StoreError, if_it_fails

if TYPE_CHECKING:  # the command line reads its files before it imports torch
    from torch import Tensor

REQUEST_BYTES = 4 * 2**20
"""Size of one transfer: large enough that Python's overhead per call is negligible."""

MOST_BYTES = 2**30
"""Maximum size of one system call. Linux transfers at most 2 GiB in one call."""

FILE_MODE = 0o600
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags to open a file for reading without following a link or blocking, because another user may have put it there."""

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Transfer = Callable[[int, memoryview, int], int]
"""A function such as `Files.pread` or `Files.pwrite`: (descriptor, memory, offset) -> number of bytes transferred."""


class Files:
    """Thin wrappers of system calls. Each raises the OSError of its call; a transfer may be shorter than requested."""

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that an ordinary user can still write to the file system of `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def open(self, path: Path, flags: int = READ) -> int:
        """Open a file and return its descriptor; only the owner can access a file that this creates."""
        return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Reserve disk space for bytes [offset, offset + nbytes) of the file."""
        os.posix_fallocate(fd, offset, nbytes)

    def direct(self, fd: int, on: bool) -> None:
        """Switch direct I/O, which bypasses the page cache, on or off.

        If the file system does not support it, this call raises OSError, or the next transfer raises EINVAL.
        """
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view[:MOST_BYTES]], offset)

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return os.pwrite(fd, view[:MOST_BYTES], offset)

    def close(self, fd: int) -> None:
        """Close a descriptor; it is closed even if this raises an error."""
        os.close(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_folder(self, path: Path) -> None:
        """Make all names durable that were created, renamed or removed in a folder before this call."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def mode(self, path: Path) -> int:
        """Return `st_mode` of a path; for a symbolic link, the mode of the link itself."""
        return os.lstat(path).st_mode

    def owner(self, path: Path) -> int:
        """Return the number of the user who owns a path; of a symbolic link, the owner of the link itself."""
        return os.lstat(path).st_uid

    def replace(self, old: Path, new: Path) -> None:
        """Rename a file or folder; a file at the new name is replaced."""
        os.replace(old, new)


def move(call: Transfer, fd: int, block: memoryview, offset: int) -> None:
    """Repeat `call` until all of `block` has been transferred.

    Raises:
        OSError: from the call, or EIO if it transfers no bytes, as at the end of a file.
    """
    done = 0
    while done < len(block):
        count = call(fd, block[done:], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, f"the transfer ended after {done} of {len(block)} bytes")
        done += count


@contextlib.contextmanager
def naming(path: Path, what: str = "") -> Iterator[None]:
    """Convert an OSError in the block to a CheckpointError of one line, with the path and `what`, such as "writing"."""
    try:
        yield
    except OSError as error:
        doing = f" while {what}" if what else ""
        advice = ". Free space there, or choose a folder on another disk." if error.errno in NO_SPACE else ""
        raise CheckpointError(f"{path}: {named(error)}{doing}{advice}") from error


@contextlib.contextmanager
def appearing(path: Path, *, replaces: bool = False, files: Files | None = None) -> Iterator[Path]:
    """Yield a new path beside `path`, where the block makes a file or a folder, which then gets the name `path`.

    Before the rename all of it is synced. So a crash leaves the old or the new content under `path`, and an exception
    leaves the old one and no other file.

    Args:
        replaces: replace a file at `path`. By default raise FileExistsError if anything exists there.
        files: a replacement for the file system calls, for tests.
    """
    unfinished = path.with_name(f".{path.name[:100]}.{secrets.token_hex(8)}")
    try:
        yield unfinished
        give_name(unfinished, path, replaces=replaces, files=files)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def give_name(unfinished: Path, path: Path, *, replaces: bool = False, files: Files | None = None) -> None:
    """Sync a file, or a folder with everything in it, rename it to `path`, and sync the folder of both.

    Args:
        replaces, files: as in `appearing`.
    """
    files = files or Files()
    sync(unfinished, files)
    if not replaces and path.name in files.names(path.parent):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    files.replace(unfinished, path)
    files.fsync_folder(path.parent)


def sync(path: Path, files: Files) -> None:
    """Make the content of a file durable, or that of a folder and everything in it."""
    if stat.S_ISDIR(files.mode(path)):
        for name in files.names(path):
            sync(path / name, files)
        files.fsync_folder(path)
        return
    fd = files.open(path)
    try:
        files.fsync(fd)
    finally:
        files.close(fd)


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

    def read(self, memory: memoryview, offset: int) -> None:
        """Fill all of `memory` with the bytes of the file from `offset` on. Raises OSError."""
        with self._using() as fd:
            for start, piece, block in self._requests(memory):
                move(self._files.pread, fd, block, offset + start)
                if block is not piece:
                    piece[:] = block[: len(piece)]

    def write(self, memory: memoryview, offset: int) -> None:
        """Write all of `memory` to the file at `offset`. Raises OSError."""
        with self._using() as fd:
            for start, piece, block in self._requests(memory):
                if block is not piece:
                    block[: len(piece)] = piece
                    block[len(piece) :] = bytes(len(block) - len(piece))
                move(self._files.pwrite, fd, block, offset + start)

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


def memory_of(tensor: "Tensor") -> memoryview:
    """Return a memoryview of the bytes of a contiguous CPU tensor, without a copy; the view keeps the tensor alive."""
    if not tensor.numel():
        return memoryview(b"")
    octets = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    octets.tensor = tensor  # type: ignore[attr-defined]  # a temporary tensor would be freed before it is read
    return memoryview(octets).cast("B")


def named(error: OSError) -> str:
    """Return the error's name and text: "EIO (Input/output error)"."""
    return f"{errno.errorcode.get(error.errno or 0, error.errno)} ({error.strerror})"


def _refused(folder: Path, what: str, error: OSError) -> StoreError:
    return StoreError(f"offload.path={folder}: {what}: {named(error)}. Set offload.path to a folder on a local disk.")


def _no_space(folder: Path, needs_bytes: int, free_bytes: int, error: OSError | None = None) -> StoreError:
    cause = f" ({named(error)})" if error else ""
    return StoreError(
        f"the state store needs {size_text(needs_bytes)}, but {folder} has {size_text(free_bytes)} free{cause}. Set "
        "offload.path to a folder with more space, or keep less there."
    )
