"""The folder of a run: its lock against a second run, atomic writes of its files, checks of folders in settings.

Errors have one line and name the path, because Python's error for a failed write does not name the file.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from zero.core.suggest import shown
from zero.errors import ConfigError, MachineError
from zero.platform.files import appearing

MEMORY = ("tmpfs", "ramfs")
"""Types of file systems whose files are in host memory."""

_SPACE = "Free space there, or set hydra.run.dir to a folder on another disk"
_CURES: Mapping[int | None, str] = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: "Raise the limit on the size of a file (ulimit -f)",
    errno.ENOMEM: "Free memory on this machine",
}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Convert an OSError in the block to an error of one line that names the path.

    Raises:
        MachineError: the block raised an OSError; the message has the cause and a remedy.
    """
    try:
        yield
    except OSError as error:
        cure = _CURES.get(error.errno, "Set hydra.run.dir to a folder where this user may write")
        name = errno.errorcode.get(error.errno or 0, error.errno)
        raise MachineError(f"{path} cannot be written: {name} ({error.strerror}). {cure}.") from error


@contextlib.contextmanager
def making(key: str, folder: Path) -> Iterator[None]:
    """Convert an OSError in the block, which makes the folder in setting `key`, to an error that names the setting.

    Raises:
        ConfigError: the folder cannot be made at this path.
        MachineError: the machine is out of disk space or memory.
    """
    try:
        yield
    except OSError as error:
        seen = f"{key}={shown(folder)}"
        if error.errno in _CURES:
            raise MachineError(
                f"{seen}: {error.strerror}. Free space there, or give a folder on another disk."
            ) from error
        inside = error.filename is not None and Path(error.filename).absolute() != folder.absolute()
        where = f"{error.filename}: " if inside else ""
        why = "is not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(f"{seen}: {where}{why}. Give a folder where this user may write.") from error


def hold(key: str, folder: Path) -> int:
    """Make the folder in setting `key` and lock it until the returned descriptor is closed.

    On a file system without locks, two runs can use the same folder.

    Raises:
        ConfigError: the folder cannot be made, or another process has locked it.
        MachineError: the machine is out of disk space or memory.
    """
    with making(key, folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigError(f"{key}={shown(folder)}: another run is writing there. Give another folder.") from None
        except OSError:  # NFS cannot lock a folder
            pass
    return descriptor


def publish(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old or the new contents, and an error leaves no temporary file.

    Raises:
        MachineError: the file cannot be written.
    """
    with writing(path), appearing(path, replaces=True) as unfinished:
        unfinished.write_text(text, encoding="utf-8", errors="replace")


def takes_files(folder: Path) -> bool:
    """Return whether a file can be made in a folder. `os.access` is not used, because for root it is always true."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def folders_of(paths: Sequence[str]) -> list[Path]:
    """Expand ~ and environment variables in paths.

    Raises:
        ConfigError: a variable is not set.
    """
    expanded = [os.path.expandvars(path) for path in paths]
    for path in expanded:
        if missing := re.search(r"\$(\w+|\{[^}]*\})", path):
            raise ConfigError(
                f"offload.path={path}: the environment variable {missing[0]} is not set on {socket.gethostname()}"
            )
    return [Path(path).expanduser() for path in expanded]  # last, because a variable may begin with ~


def free_by_file_system(folders: Sequence[Path]) -> list[tuple[list[Path], int]]:
    """Return (folders, free bytes) for each file system that holds any of `folders`, in the order of `folders`."""
    sharing: dict[int, list[Path]] = {}
    for folder in folders:
        sharing.setdefault(folder.stat().st_dev, []).append(folder)
    return [(group, shutil.disk_usage(group[0]).free) for group in sharing.values()]


def mount_of(mountinfo: str, path: str) -> str:
    """Return the type of the file system that holds `path`, from the text of /proc/self/mountinfo."""
    longest, mount_type = -1, "unknown"
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        if len(fields) < 5 or not right:
            continue
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= longest:
            longest, mount_type = len(point), right.split()[0]
    return mount_type


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds `folder`, or "unknown"."""
    try:
        return mount_of(Path("/proc/self/mountinfo").read_text(errors="replace"), str(folder.resolve()))
    except OSError:
        return "unknown"


def in_memory(folders: Sequence[Path]) -> str:
    """Return a warning about the first folder whose file system is in host memory; "" if there is none."""
    for folder in folders:
        if (mount_type := file_system(folder)) in MEMORY:
            return (
                f"offload.path={folder} is memory, not a disk ({mount_type}): its files take host memory. Use a folder "
                "on a disk, or offload=cpu, which needs no file."
            )
    return ""
