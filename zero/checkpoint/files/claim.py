"""Claims of folders: which unpublished folders belong to a save that was killed.

A save holds a shared lock (`flock`) on its folder. The names of its unpublished folders contain a hash
of this machine's boot ID. The system releases the lock when the process ends, however it ends. So a folder with this
hash belongs to a dead save if a process of the same boot gets an exclusive lock.

The hash is needed because many shared file systems keep locks of folders local to one machine. Folders from another
machine, or from before a reboot, are therefore kept.
"""

import contextlib
import fcntl
import secrets
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

from zero.checkpoint.files.disk import Disk

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Claim:
    """A shared lock on `folder`, held until `release`. Without locks, no `Root.sweep_dead` removes the save's files."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._disk, self._fd = disk, _lock(folder, disk, fcntl.LOCK_SH) if _boot() else None

    def nonce(self) -> str:
        """Return 16 hexadecimal digits for the name of an unpublished folder."""
        return secrets.token_hex(8) if self._fd is None else _boot() + secrets.token_hex(4)

    def release(self) -> None:
        """Release the lock, also if a forked process still has its descriptor."""
        if self._fd is not None:
            _unlock(self._fd, self._disk)
            self._fd = None


def is_of_this_boot(nonce: str) -> bool:
    """Return whether a process of this boot of this machine made a name with `nonce` while it held the lock."""
    return bool(_boot()) and nonce.startswith(_boot())


@contextlib.contextmanager
def unclaimed(folder: Path, disk: Disk) -> Iterator[bool]:
    """Yield whether no process of this machine saves in `folder`. No process can claim it during the block."""
    fd = _lock(folder, disk, fcntl.LOCK_EX)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            _unlock(fd, disk)


def _lock(folder: Path, disk: Disk, operation: int) -> int | None:
    with contextlib.suppress(OSError):  # another process has locked it, or the file system has no locks
        return disk.lock(folder, operation)
    return None


def _unlock(fd: int, disk: Disk) -> None:
    with contextlib.suppress(OSError):  # a lock that remains only keeps files longer
        disk.unlock(fd)


@cache
def _boot() -> str:
    with contextlib.suppress(OSError):
        return sha256(BOOT_ID.read_bytes()).hexdigest()[:8]
    return ""
