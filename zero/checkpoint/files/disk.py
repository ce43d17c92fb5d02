"""File system calls that only checkpoints need: making, linking and renaming without replacing.

Each call is a method of `Disk`, so that a test can make it fail, skip it or simulate it. Another user may have made a
checkpoint's folder. So only their owner can access new files and folders, and opening a file neither follows a symbolic
link nor blocks.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero.errors import CheckpointError
from zero.platform.files import FILE_MODE, Files, naming, transfer_all

FOLDER_MODE = 0o700


class Disk(Files):
    """Thin wrappers of system calls; each raises the OSError of its call."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, FOLDER_MODE)

    def lock(self, path: Path, operation: int) -> int:
        """Lock a folder without waiting; return the descriptor that `unlock` takes."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def unlock(self, fd: int) -> None:
        """Unlock a folder, also if a forked process has the descriptor, and close it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)

    def size(self, fd: int) -> int:
        """Return the size of a regular file in bytes; raise OSError for anything else."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return status.st_size

    def forget(self, fd: int, nbytes: int) -> None:
        """Ask the system to drop the file's first `nbytes` from the page cache; pages not yet written to disk stay."""
        os.posix_fadvise(fd, 0, nbytes, os.POSIX_FADV_DONTNEED)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a folder; raise FileExistsError if the new name exists.

        If another process takes the new name after the check, the system call still fails for a file and for a folder
        that is not empty.
        """
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        try:
            os.rename(f"{old}/", new)  # the slash: if `old` is a file, raise ENOTDIR instead of replacing a file
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from error

    def link(self, old: Path, new: Path) -> None:
        """Give a file a second name; its bytes are on the disk once."""
        os.link(old, new, follow_symlinks=False)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


@contextmanager
def closing(disk: Disk, fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        disk.close(fd)


def write_text(disk: Disk, path: Path, text: str) -> None:
    """Write a new file and fsync it.

    Raises:
        CheckpointError: a file call failed; the message names the path.
    """
    with naming(path, "writing it"), closing(disk, disk.create(path)) as fd:
        transfer_all(disk.pwrite, fd, memoryview(text.encode()), 0)
        disk.fsync(fd)


def read_bytes(disk: Disk, path: Path, limit: int) -> bytes:
    """Read a whole file.

    Raises:
        CheckpointError: the file is larger than `limit` bytes, or a file call failed; the message names the path.
    """
    with naming(path, "reading it"), closing(disk, disk.open(path)) as fd:
        nbytes = disk.size(fd)
        if nbytes > limit:
            raise CheckpointError(f"{path}: has {nbytes} bytes, more than the limit of {limit}")
        memory = bytearray(nbytes)
        transfer_all(disk.pread, fd, memoryview(memory), 0)
    return bytes(memory)
