"""The only door to the file system for checkpoints, so that a test can fail, forget or model every single call.

A checkpoint's folder may have been put there by anybody, so the door is narrow: what is made belongs to its owner
alone and did not exist before; what is opened is never reached through a link at its last name, and never blocks.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from zero.errors import CheckpointError
from zero.platform.files import named

FOLDER_MODE = 0o700
FILE_MODE = 0o600
DIRECT = getattr(os, "O_DIRECT", 0)

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Disk:
    """The calls themselves; each raises OSError as the system does, and moves as much as one call moves."""

    def make_folder(self, path: Path) -> None:
        """Its parent exists, itself it does not."""
        os.mkdir(path, FOLDER_MODE)

    def create(self, path: Path) -> int:
        """A descriptor to write a new file with."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)

    def open(self, path: Path) -> int:
        """A descriptor to read with; it may turn out to be anything but a link, see `size`."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def size(self, fd: int) -> int:
        """How many bytes a regular file has; of anything else, OSError."""
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        return found.st_size

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return os.pwrite(fd, view, offset)

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view], offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fsync_folder(self, path: Path) -> None:
        """Make the names in it last: what was made, renamed or removed there before this call."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def direct(self, fd: int, on: bool) -> None:
        """Whether transfers go past the page cache; where they cannot, OSError, or EINVAL from the transfer."""
        if on and not DIRECT:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | DIRECT if on else flags & ~DIRECT)

    def forget(self, fd: int, nbytes: int) -> None:
        """Ask the page cache to write out the file's first `nbytes` and keep those no longer that are written out."""
        call = getattr(os, "posix_fadvise", None)
        if call is not None:
            call(fd, 0, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self, fd: int) -> None:
        """The descriptor is gone, even when this raises."""
        os.close(fd)

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

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """It is empty."""
        os.rmdir(path)

    def free_bytes(self, path: Path) -> int:
        """What an ordinary user may still write there."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def mode(self, path: Path) -> int:
        """Type and rights, as `stat.S_ISDIR` and its like take them; of a link, the link's own (always 0777)."""
        try:
            return os.lstat(path).st_mode
        except ValueError as error:  # a name that no file can have: with a NUL in it
            raise OSError(errno.EINVAL, str(error), str(path)) from error


@contextlib.contextmanager
def naming(path: Path, what: str) -> Iterator[None]:
    """What the system refuses, said of this path, as a CheckpointError."""
    try:
        yield
    except OSError as error:
        cure = "; free space there, or set checkpoint.dir to another disk" if error.errno in _NO_SPACE else ""
        raise CheckpointError(f"{path}: {named(error)} while {what}{cure}") from error


def move(
    call: Callable[[int, memoryview, int], int], fd: int, block: memoryview, offset: int, path: Path, what: str
) -> None:
    """`pread` or `pwrite` all of `block`: each call moves as much as it likes, and the next goes on from there."""
    done = 0
    while done < len(block):
        with naming(path, f"{what} at offset {offset + done}"):
            count = call(fd, block[done:], offset + done)
            if count <= 0:
                raise OSError(errno.EIO, f"nothing more after {done} of {len(block)} bytes")
        done += count
