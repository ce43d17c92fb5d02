"""The file calls of stores and checkpoints, and one unlinked file that is read and written in blocks.

`Files` is the only way to the file system, so a test can fail any call (`tests/faults`). `move` repeats a call until a
whole buffer has moved. `ScratchFile` knows descriptors, alignment and request sizes; it does not know what a page is.

The file loses its name as soon as it is open: nothing is left behind however the process ends, nothing of an earlier
run can be read by mistake, and two runs may share a folder. Transfers go past the page cache (`O_DIRECT`) where the
file system agrees, so that state that was put on a disk does not come back as memory.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from zero.core.sizes import BLOCK_BYTES, round_up, size_text
from zero.errors import CheckpointError, StoreError, if_it_fails

REQUEST_BYTES = 4 * 2**20
"""The size of one call: large enough that Python's share of its time does not show."""

MOST_BYTES = 2**30
"""The largest size of one call: no system moves more than 2 GiB."""

FILE_MODE = 0o600
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Never through a link, and never blocking: a checkpoint's folder may have been put there by anybody."""

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

Transfer = Callable[[int, memoryview, int], int]
"""`Files.pread` or `Files.pwrite`: descriptor, memory and offset to the bytes that were moved."""


class Files:
    """The calls themselves; each raises OSError as the system does, and moves as much as one call moves."""

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that an ordinary user may still write there."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def open(self, path: Path, flags: int = READ) -> int:
        """Return a descriptor; a file that this makes belongs to its owner alone."""
        return os.open(path, flags | os.O_CLOEXEC, FILE_MODE)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def fallocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Give the file real blocks there."""
        os.posix_fallocate(fd, offset, nbytes)

    def direct(self, fd: int, on: bool) -> None:
        """Let transfers go past the page cache or not; raises OSError, or the transfer does with EINVAL."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)

    def pread(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view[:MOST_BYTES]], offset)

    def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return os.pwrite(fd, view[:MOST_BYTES], offset)

    def close(self, fd: int) -> None:
        """Close a descriptor; it is gone even when this raises."""
        os.close(fd)


def move(call: Transfer, fd: int, block: memoryview, offset: int) -> None:
    """Repeat `call` until all of `block` has moved.

    Raises:
        OSError: as the system says, or EIO at the end of the file.
    """
    done = 0
    while done < len(block):
        count = call(fd, block[done:], offset + done)
        if count <= 0:
            raise OSError(errno.EIO, f"nothing more after {done} of {len(block)} bytes")
        done += count


@contextlib.contextmanager
def naming(path: Path, what: str = "") -> Iterator[None]:
    """Turn an OSError of an action, such as "writing", into a CheckpointError of one line that names the path."""
    try:
        yield
    except OSError as error:
        doing = f" while {what}" if what else ""
        advice = "; free space there, or choose a folder on another disk" if error.errno in NO_SPACE else ""
        raise CheckpointError(f"{path}: {named(error)}{doing}{advice}") from error


class ScratchFile:
    """A file without a name in `folder`; its space is free again when it is closed, or when the process dies.

    Different parts may be read and written by different threads at once. Offsets are multiples of `BLOCK_BYTES`; the
    rest of the last block of a transfer is not kept.

    Attributes:
        reserved_bytes: room that the file has.

    Raises:
        StoreError: no file can be made, written and read back there, in one line that names `offload.path`.
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
        """Give the file room up to `end_bytes`, so that a full disk is noticed before the training.

        Raises:
            StoreError: there is not so much space, with both numbers.
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
        """Fill `memory`, all of it. Raises OSError."""
        with self._using() as fd:
            for start, piece, block in self._requests(memory):
                move(self._files.pread, fd, block, offset + start)
                if block is not piece:
                    piece[:] = block[: len(piece)]

    def write(self, memory: memoryview, offset: int) -> None:
        """Write `memory`, all of it. Raises OSError."""
        with self._using() as fd:
            for start, piece, block in self._requests(memory):
                if block is not piece:
                    block[: len(piece)] = piece
                    block[len(piece) :] = bytes(len(block) - len(piece))
                move(self._files.pwrite, fd, block, offset + start)

    def close(self) -> None:
        """Reject new transfers; the last one that is still under way closes the descriptor.

        A number that was closed under a running transfer may already be another file's.
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
        with contextlib.suppress(OSError):  # the descriptor is gone in any case, and the bytes are scratch
            self._files.close(self._fd)

    def _requests(self, memory: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
        """Yield (start, piece of `memory`, block to move), where the block is the piece itself or an aligned buffer."""
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
        """Return whole blocks of a buffer that belongs to this thread."""
        buffer = getattr(self._bounce, "buffer", None)
        if buffer is None:
            buffer = self._bounce.buffer = mmap.mmap(-1, REQUEST_BYTES)  # resident only as far as it is used
        return memoryview(buffer)[: round_up(nbytes)]

    def _try_out(self) -> None:
        """Write and read one block, past the page cache if the file system agrees, so that a refusal shows now."""
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
                text = f"offload.path={self._folder}: direct I/O is refused here, pages go through the page cache"
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
    """Open a file that loses its name at once."""
    path = folder / f".zero-{secrets.token_hex(16)}"
    fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    with if_it_fails(partial(files.close, fd)):
        files.unlink(path)
    return fd


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, not copied; they keep it alive."""
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
        f"the state store needs {size_text(needs_bytes)}, {folder} has {size_text(free_bytes)} free{cause}. Set "
        "offload.path to a folder with more space, or keep less there."
    )
