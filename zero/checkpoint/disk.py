"""The file calls that only checkpoints make: folders, names and what makes them last.

A test can fail, forget or model every single call. A checkpoint's folder may have been put there by anybody: what is
made belongs to its owner alone and did not exist before; what is opened is never reached through a link at its last
name, and never blocks.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from zero.errors import CheckpointError
from zero.platform import files
from zero.platform.files import FILE_MODE, Files, Transfer

FOLDER_MODE = 0o700


class Disk(Files):
    """The calls themselves; each raises OSError as the system does. `open` never follows a link, and never blocks."""

    def make_folder(self, path: Path) -> None:
        """Its parent exists, itself it does not."""
        os.mkdir(path, FOLDER_MODE)

    def create(self, path: Path) -> int:
        """A descriptor to write a new file with."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)

    def size(self, fd: int) -> int:
        """How many bytes a regular file has; of anything else, OSError."""
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return found.st_size

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_folder(self, path: Path) -> None:
        """Make the names in it last: what was made, renamed or removed there before this call."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def forget(self, fd: int, nbytes: int) -> None:
        """Ask the page cache to write out the file's first `nbytes` and keep those no longer that are written out."""
        call = getattr(os, "posix_fadvise", None)
        if call is not None:
            call(fd, 0, nbytes, os.POSIX_FADV_DONTNEED)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a folder; FileExistsError where the new name exists.

        Between the question and the answer somebody else may take the name; the system itself refuses a folder that is
        not empty, and a file.
        """
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
        try:
            os.rename(f"{old}/", new)  # the slash: of a file, ENOTDIR, for a file would replace a file
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new)) from error

    def names(self, path: Path) -> list[str]:
        """What the folder holds, sorted as text."""
        return sorted(os.listdir(path))

    def remove_folder(self, path: Path) -> None:
        """It is empty."""
        os.rmdir(path)

    def mode(self, path: Path) -> int:
        """Type and rights, as `stat.S_ISDIR` and its like take them; of a link, the link's own (always 0777)."""
        try:
            return os.lstat(path).st_mode
        except ValueError as error:  # a name that no file can have: with a NUL in it
            raise OSError(errno.EINVAL, str(error), str(path)) from error


def naming(path: Path, what: str) -> AbstractContextManager[None]:
    """Turn an OSError into a CheckpointError of one line that names the path, and what to do where a disk is full."""
    return files.naming(path, what, if_full="; free space there, or set checkpoint.dir to another disk")


def move(call: Transfer, fd: int, block: memoryview, offset: int, path: Path, what: str) -> None:
    """`pread` or `pwrite` all of `block`; an error names the path and the offset."""
    files.move(call, fd, block, offset, lambda place: naming(path, f"{what} at offset {place}"))


@contextmanager
def closing(disk: Disk, fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        disk.close(fd)


def write_text(disk: Disk, path: Path, text: str) -> None:
    """Write a new file and synchronise it; an error names the path."""
    with naming(path, "writing it"), closing(disk, disk.create(path)) as fd:
        move(disk.pwrite, fd, memoryview(text.encode()), 0, path, "writing")
        disk.fsync(fd)


def read_bytes(disk: Disk, path: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes; an error names the path."""
    with naming(path, "reading it"), closing(disk, disk.open(path)) as fd:
        nbytes = disk.size(fd)
        if nbytes > limit:
            raise CheckpointError(f"{path}: has {nbytes} bytes, at most {limit} are read")
        memory = bytearray(nbytes)
        move(disk.pread, fd, memoryview(memory), 0, path, "reading")
    return bytes(memory)
