"""Write and read a file of a checkpoint: plain safetensors, piece by piece, in bounded memory.

A file is a header, computed from the list of parts, and the bytes of the parts. The writer knows names, dtypes and
shapes when it begins, and never seeks back. The reader computes every offset from the manifest and does not trust the
file's own header. Hashes are computed from the bytes in memory before they are written, never by reading them back. A
read returns only bytes whose CRC-32 matches.

Writes bypass the page cache if the file system allows it, because a state larger than memory would evict everything
else from the cache, and because on a fast disk copying into the cache takes as long as hashing.
"""

import contextlib
import ctypes
import errno
import mmap
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Self

from zero.checkpoint.files.disk import Disk
from zero.checkpoint.format.hashes import (
    CRC_BYTES,
    DIGEST_BYTES,
    HASH_BLOCK_BYTES,
    SPAN_BYTES,
    FileHash,
    crc_of,
    hash_block,
    joined_crc,
)
from zero.errors import CheckpointError, if_it_fails
from zero.platform.files import naming, transfer_all
from zero.platform.safetensors_files import ALIGN_BYTES, FilePart, header, offsets

WRITE_BYTES = 4 * 2**20
"""Maximum number of bytes that one system call writes."""

HASH_THREADS = 3
"""Number of threads that hash and do I/O: two keep two cores hashing while the third waits for the disk."""

CLOSED = -1


class _OpenFile:
    """A file descriptor that is closed at the end of a `with` block."""

    _disk: Disk
    _path: Path
    _fd: int

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, CLOSED
        if fd != CLOSED:
            with contextlib.suppress(OSError):  # the file was only read, or will be removed
                self._disk.close(fd)


class ShardWriter(_OpenFile):
    """Writer of a new file, from its first to its last byte. Only one thread may call it.

    Bytes are copied into blocks, and threads hash and write the full blocks. At most `HASH_THREADS` + 1 blocks, 64 MiB,
    are in memory. An error in a thread is raised by a later call, at the latest by `finish`. After an error the caller
    removes the file.

    Args:
        path: the new file, which must not exist.
        parts: the tensors of the file, in this order.
        behind: a function that `finish` calls before each block; with it, all blocks stay in memory until `finish`
            hashes and writes them in its own thread. None: threads write blocks as soon as they are full.

    Raises:
        CheckpointError: from any method, if a file call fails; the writer is then closed.
    """

    def __init__(
        self, disk: Disk, path: Path, parts: Sequence[FilePart], *, behind: Callable[[], None] | None = None
    ) -> None:
        self._disk = disk
        self._path = path
        self._behind = behind
        begin = header(parts)
        self._nbytes = len(begin) + sum(part.nbytes for part in parts)
        self._given = 0
        self._block: mmap.mmap | None = None  # aligned, and the system gets the memory back at once
        self._running: deque[tuple[mmap.mmap, Callable[[], FileHash]]] = deque()
        self._hashes: list[FileHash] = []
        with naming(path, "making it"):
            self._fd = disk.create(path)
        self._threads = ThreadPoolExecutor(HASH_THREADS, "zero-shard")  # starts no thread before the first block
        self._direct = False
        with if_it_fails(self.close):
            with contextlib.suppress(OSError):  # without direct I/O, writes go through the page cache
                disk.direct(self._fd, True)
                self._direct = True
            self.write(memoryview(bytearray(begin)))

    def write(self, view: memoryview) -> None:
        """Append the bytes of a contiguous, writable view of any format and length.

        The bytes are copied, so the caller may overwrite the memory of `view` at once.
        """
        with if_it_fails(self.close), view.cast("B") as octets:
            done = 0
            while done < len(octets):
                block = self._block = self._block or self._next_block()
                filled = self._given % HASH_BLOCK_BYTES
                count = min(len(octets) - done, HASH_BLOCK_BYTES - filled)
                run = ctypes.c_char * count
                # releases the GIL, which an assignment to a slice would hold
                ctypes.memmove(run.from_buffer(block, filled), run.from_buffer(octets, done), count)
                done += count
                self._given += count
                if filled + count == HASH_BLOCK_BYTES:
                    work = partial(self._settle, block, HASH_BLOCK_BYTES, self._given)
                    self._running.append((block, self._threads.submit(work).result if self._behind is None else work))
                    self._block = None

    def finish(self) -> FileHash:
        """Write the remaining bytes, fsync the file and close it.

        Returns:
            The hashes of the file. Its bytes are durable, but its name is not until the folder is fsynced.
        """
        with if_it_fails(self.close):
            if self._given != self._nbytes:
                raise CheckpointError(f"{self._path}: {self._given} bytes were passed, but the file has {self._nbytes}")
            while self._running:
                if self._behind is not None:
                    self._behind()
                self._collect()
            if self._block is not None:  # after all other blocks: an end that is not aligned turns direct I/O off
                self._hashes.append(self._settle(self._block, self._given % HASH_BLOCK_BYTES, self._given))
            with naming(self._path, "synchronising"):
                self._disk.fsync(self._fd)  # never repeated: after a failure the kernel drops the unwritten bytes
            self._forget(self._nbytes)
            self._release()
            fd, self._fd = self._fd, CLOSED
            with naming(self._path, "closing"):
                self._disk.close(fd)
        return joined_crc(self._hashes)

    def close(self) -> None:
        """Stop the threads and close the file. Does nothing after `finish`."""
        self._release()  # first, because a thread that still writes could hit another file with the same descriptor
        super().close()

    def _release(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._running.clear()
        self._block = None

    def _next_block(self) -> mmap.mmap:
        if self._behind is None and len(self._running) > HASH_THREADS:
            return self._collect()
        return mmap.mmap(-1, HASH_BLOCK_BYTES)

    def _collect(self) -> mmap.mmap:
        """Keep the hashes of the oldest block when it is written, and return the block."""
        block, result = self._running.popleft()
        self._hashes.append(result())
        return block

    def _settle(self, block: mmap.mmap, nbytes: int, end: int) -> FileHash:
        """Hash and write the first `nbytes` of a block, which end at byte `end` of the file."""
        with memoryview(block) as whole, whole[:nbytes] as view:
            hashes = hash_block(view)
            with naming(self._path, f"writing at offset {end - nbytes}"):
                transfer_all(self._pwrite, self._fd, view, end - nbytes)
        if not self._direct:
            self._forget(end)
        return hashes

    def _pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        """Write part of `view` at `offset` with one system call; return the number of bytes written.

        Whole pages bypass the page cache. Direct I/O is turned off for the end of the file, and after the file system
        has rejected it (EINVAL).
        """
        direct, request = self._direct, view[:WRITE_BYTES]
        whole = len(request) // ALIGN_BYTES * ALIGN_BYTES
        if direct and whole:
            try:
                return self._disk.pwrite(fd, request[:whole], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        if direct:
            self._disk.direct(fd, False)
            self._direct = False
        return self._disk.pwrite(fd, request, offset)

    def _forget(self, nbytes: int) -> None:
        with contextlib.suppress(OSError):  # an optimization, which may fail
            self._disk.forget(self._fd, nbytes)


class ShardReader(_OpenFile):
    """Reader of byte ranges of a file, which returns only bytes that match their hashes. Not thread-safe.

    Args:
        expected: the size from the manifest, and the hashes from the rank's index.
        parts: the tensors of the file in order, from the manifest.

    Raises:
        CheckpointError: there is no such regular file, it has another size, or its header does not list `parts`.
    """

    def __init__(self, disk: Disk, path: Path, expected: FileHash, parts: Sequence[FilePart]) -> None:
        self._disk = disk
        self._path = path
        self._expected = expected
        self._parts = parts
        self._fd = CLOSED
        self.reopen()
        with if_it_fails(self.close):
            self._check_header()

    def reopen(self) -> None:
        """Open the file again after `close`; its header is not read again. Does nothing if the file is open."""
        if self._fd == CLOSED:
            with naming(self._path, "opening"):
                self._fd = self._disk.open(self._path)
            self._span = memoryview(bytearray(min(SPAN_BYTES, self._expected.size)))
            self._held = -1  # number of the MiB that `_span` caches; -1: none

    def close(self) -> None:
        """Close the file and free the cached MiB."""
        super().close()
        self._span = memoryview(b"")

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of the file from `offset` on.

        Every MiB that overlaps the range is read whole, and its CRC-32 is compared. The last MiB that was needed only
        in part is cached, so that consecutive small reads do not read it twice.

        Raises:
            CheckpointError: the file is damaged; the message has the offset, and the contents of `into` are undefined.
        """
        with into.cast("B") as octets:
            end = offset + len(octets)
            for span in range(offset // SPAN_BYTES, -(-end // SPAN_BYTES)):
                start, stop = self._ends(span)
                low, high = max(start, offset), min(stop, end)
                target = octets[low - offset : high - offset]
                if span == self._held or high - low < stop - start:
                    target[:] = self._hold(span)[low - start : high - start]
                else:
                    self._load(span, target)

    def check(self, number: int) -> None:
        """Read block `number`, of 16 MiB, and compare it with its CRC-32s and its SHA-256.

        Raises:
            CheckpointError: the block is damaged; the message names the first damaged MiB.
        """
        start, stop = number * HASH_BLOCK_BYTES, min((number + 1) * HASH_BLOCK_BYTES, self._expected.size)
        digest = sha256()
        self._held = -1
        for span in range(start // SPAN_BYTES, -(-stop // SPAN_BYTES)):
            first, last = self._ends(span)
            with self._span[: last - first] as piece:
                self._load(span, piece)
                digest.update(piece)
        expected = self._expected.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        self._compare("SHA-256", start, stop, digest.digest(), expected)

    def _check_header(self) -> None:
        with naming(self._path, "asking for its size"):
            nbytes = self._disk.size(self._fd)
        begin = header(self._parts)
        wanted = len(begin) + sum(part.nbytes for part in self._parts)
        if not nbytes == self._expected.size == wanted:
            raise CheckpointError(
                f"{self._path}: has {nbytes} bytes, the manifest says {self._expected.size}, its tensors have {wanted}"
            )
        actual = bytearray(len(begin))
        self.read(0, memoryview(actual))
        if actual != begin:
            raise CheckpointError(f"{self._path}: its header and the manifest list different tensors")

    def _ends(self, span: int) -> tuple[int, int]:
        return span * SPAN_BYTES, min((span + 1) * SPAN_BYTES, self._expected.size)

    def _hold(self, span: int) -> memoryview:
        """Return MiB number `span` of the file, read from disk unless it is cached."""
        start, stop = self._ends(span)
        if span != self._held:
            self._held = -1
            self._load(span, self._span[: stop - start])
            self._held = span
        return self._span

    def _load(self, span: int, into: memoryview) -> None:
        with naming(self._path, f"reading at offset {span * SPAN_BYTES}"):
            transfer_all(self._disk.pread, self._fd, into, span * SPAN_BYTES)
        expected = self._expected.crcs[span * CRC_BYTES : (span + 1) * CRC_BYTES]
        self._compare("CRC-32", *self._ends(span), crc_of(into), expected)

    def _compare(self, what: str, start: int, stop: int, actual: bytes, expected: bytes) -> None:
        if actual == expected:
            return
        begins = zip(self._parts, offsets(self._parts), strict=True)
        damaged = next((part.key for part, begin in begins if begin + part.nbytes > start), None)
        where = "in its header" if damaged is None else f"in {damaged!r} or after it"
        raise CheckpointError(
            f"{self._path}: bytes {start} to {stop} are damaged ({what} is {actual.hex()}, saved as {expected.hex()}), "
            f"{where}"
        )
