"""Make the file calls that only checkpoints need: folders, names and fsync.

Each is a method of `Disk`, so that a test can fail, drop or model it. Any user may have made a checkpoint's folder: new
files and folders belong to their owner alone, and opening a file neither follows a link nor blocks.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zero.errors import CheckpointError
from zero.platform.files import FILE_MODE, Files, move, naming

FOLDER_MODE = 0o700


class Disk(Files):
    """The calls of the system; each raises OSError as the system does."""

    def make_folder(self, path: Path) -> None:
        os.mkdir(path, FOLDER_MODE)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)

    def size(self, fd: int) -> int:
        """Return the size of a regular file in bytes; raise OSError for anything else."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return status.st_size

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_folder(self, path: Path) -> None:
        """Make the names in a folder durable: all that were made, renamed or removed before this call."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def forget(self, fd: int, nbytes: int) -> None:
        """Ask the page cache to drop the file's first `nbytes`, except pages that are not yet written."""
        os.posix_fadvise(fd, 0, nbytes, os.POSIX_FADV_DONTNEED)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a folder; raise FileExistsError if the new name exists.

        If the name is taken after the check, the system itself rejects a file and a folder that is not empty.
        """
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        try:
            os.rename(f"{old}/", new)  # with the slash, ENOTDIR for a file, which could replace a file
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from error

    def names(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)

    def mode(self, path: Path) -> int:
        """Return `st_mode`; of a link, that of the link itself."""
        return os.lstat(path).st_mode


@contextmanager
def closing(disk: Disk, fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        disk.close(fd)


def write_text(disk: Disk, path: Path, text: str) -> None:
    """Write a new file and synchronise it; an error names the path."""
    with naming(path, "writing it"), closing(disk, disk.create(path)) as fd:
        move(disk.pwrite, fd, memoryview(text.encode()), 0)
        disk.fsync(fd)


def read_bytes(disk: Disk, path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes; an error names the path."""
    with naming(path, "reading it"), closing(disk, disk.open(path)) as fd:
        nbytes = disk.size(fd)
        if nbytes > limit:
            raise CheckpointError(f"{path}: has {nbytes} bytes, at most {limit} are read")
        memory = bytearray(nbytes)
        move(disk.pread, fd, memoryview(memory), 0)
    return bytes(memory)
