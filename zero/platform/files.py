"""The file system calls of stores and checkpoints, and files that appear whole.

All calls go through `Files`, so that a test can make any of them fail (`tests/faults`). `transfer_all` repeats a call
until a whole buffer has been transferred. `appearing` writes under another name, syncs and renames.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zero.errors import CheckpointError

if TYPE_CHECKING:  # the command line reads its files before it imports torch
    from torch import Tensor


MOST_BYTES = 2**30
"""Maximum size of one system call. Linux transfers at most 2 GiB in one call."""

FILE_MODE = 0o600
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags to open a file for reading without following a link or blocking, because another user may have put it there."""

RENAME_EXCHANGE = 2
"""A flag of renameat2, from linux/fs.h."""

PUNCH_HOLE = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE with FALLOC_FL_KEEP_SIZE, from linux/falloc.h."""

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

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Make a hole of bytes [offset, offset + nbytes) of the file, which frees their disk space."""
        call = ctypes.CDLL(None, use_errno=True).fallocate64
        call.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64
        if call(fd, PUNCH_HOLE, offset, nbytes):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

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

    def exchange(self, first: Path, second: Path) -> None:
        """Exchange the names of two files or folders in one call; raise OSError if the file system cannot do that."""
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
        paths = [os.fsencode(path.absolute()) for path in (first, second)]
        if call is None or call(-1, paths[0], -1, paths[1], RENAME_EXCHANGE):
            code = ctypes.get_errno() or errno.ENOSYS
            raise OSError(code, os.strerror(code), str(first))


def transfer_all(call: Transfer, fd: int, block: memoryview, offset: int) -> None:
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
