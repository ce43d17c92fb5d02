"""One rank's file of a checkpoint: plain safetensors, written and read piece by piece in bounded memory.

A file is a header, which follows from its parts alone, and the parts' bytes one after the other. So the writer needs
to know names, dtypes and shapes when it begins, and never goes back; and the reader knows every byte's place without
believing the file. Hashes are taken from memory on the way to the disk, never by reading back: they are of what was
meant to be written. A read delivers only bytes whose CRC-32 is right.

Writing goes past the page cache where the file system agrees: a state larger than memory must not push everything else
out of it, and on a fast disk the cache's copies and pages cost as much as the hashes.

A shard knows names, dtypes, shapes and byte ranges, not what they mean.
"""

import contextlib
import errno
import mmap
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Self

from zero.checkpoint.disk import Disk, move, naming
from zero.checkpoint.hashes import (
    BLOCK_BYTES,
    CRC_BYTES,
    DIGEST_BYTES,
    SPAN_BYTES,
    FileHash,
    crc_of,
    hash_block,
    joined,
)
from zero.errors import CheckpointError, if_it_fails
from zero.platform.safetensors_files import ALIGN_BYTES, Part, header, offsets

REQUEST_BYTES = 4 * 2**20
"""The most that one call writes."""

THREADS = 3
"""Two to keep two cores hashing while the third waits for the disk."""


class _OpenFile:
    """A descriptor that `with` closes however it is left."""

    _disk: Disk
    _path: Path
    _fd: int | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closing again is free."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):  # nothing was written, or the file is no good already
                self._disk.close(fd)

    def _open(self) -> int:
        if self._fd is None:
            raise CheckpointError(f"{self._path}: is closed")
        return self._fd


class ShardWriter(_OpenFile):
    """Writes a new file from its first to its last byte, by one thread.

    What comes is copied into blocks; threads hash and write those that are full, each to its own place. At most
    `THREADS` + 1 blocks are kept, 64 MiB. An error of a thread shows in a later call, in `finish` at the latest.

    `with` closes the descriptor however it is left. What a writer that failed leaves under its name is the caller's to
    remove.

    Args:
        path: does not exist yet.
        parts: what will be written, in this order.

    Raises:
        CheckpointError: from any call, when the system refuses; then the writer is closed, and the file is no good.
    """

    def __init__(self, disk: Disk, path: Path, parts: Sequence[Part]) -> None:
        self._disk = disk
        self._path = path
        begin = header(parts)
        self._nbytes = len(begin) + sum(part.nbytes for part in parts)
        self._given = 0
        self._block: mmap.mmap | None = None  # a mapping is aligned, and goes back to the system
        self._free: list[mmap.mmap] = []
        self._running: deque[tuple[mmap.mmap, Future[FileHash]]] = deque()
        self._hashes: list[FileHash] = []
        with naming(path, "making it"):
            self._fd = disk.create(path)
        self._threads = ThreadPoolExecutor(THREADS, "zero-shard")  # starts none before there is work
        self._direct = False
        with if_it_fails(self.close):
            with contextlib.suppress(OSError):  # then by way of the page cache
                disk.direct(self._fd, True)
                self._direct = True
            self._append(memoryview(begin))

    def write(self, view: memoryview) -> None:
        """The next bytes of the data; parts follow each other without holes. The view may be reused at once.

        Args:
            view: contiguous, of any format and length: how the data is cut does not matter.
        """
        self._open()
        with if_it_fails(self.close), view.cast("B") as octets:
            if self._given + len(octets) > self._nbytes:
                raise CheckpointError(f"{self._path}: {self._given + len(octets)} bytes came, {self._nbytes} belong in")
            self._append(octets)

    def finish(self) -> FileHash:
        """Force the file to the disk and close it.

        Returns:
            What the disk was given. Only now is it on the disk; its name is not until its folder is synchronised.
        """
        fd = self._open()
        with if_it_fails(self.close):
            if self._given != self._nbytes:
                raise CheckpointError(f"{self._path}: {self._given} bytes came, {self._nbytes} belong in")
            while self._running:
                self._collect()
            if self._block is not None:  # by itself: its end may have to go through the page cache
                self._hashes.append(self._settle(fd, self._block, self._given % BLOCK_BYTES, self._given))
            with naming(self._path, "synchronising"):
                self._disk.fsync(fd)  # never again when it fails: the system forgets what it could not write
            self._forget(fd, self._nbytes)
            self._release()
            self._fd = None
            with naming(self._path, "closing"):
                self._disk.close(fd)
        return joined(self._hashes)

    def close(self) -> None:
        """Give up, unless it is finished."""
        self._release()  # first: a number that was closed under a running transfer may already be another file's
        super().close()

    def _release(self) -> None:
        """Wait for the threads; memory is free again."""
        self._threads.shutdown(cancel_futures=True)
        self._running.clear()
        self._free.clear()
        self._block = None

    def _append(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            block = self._block = self._block or self._next_block()
            filled = self._given % BLOCK_BYTES
            count = min(len(view) - done, BLOCK_BYTES - filled)
            block[filled : filled + count] = view[done : done + count]
            done += count
            self._given += count
            if filled + count == BLOCK_BYTES:
                self._running.append(
                    (block, self._threads.submit(self._settle, self._open(), block, BLOCK_BYTES, self._given))
                )
                self._block = None

    def _next_block(self) -> mmap.mmap:
        if len(self._running) > THREADS:
            self._collect()
        return self._free.pop() if self._free else mmap.mmap(-1, BLOCK_BYTES)

    def _collect(self) -> None:
        """Wait for the oldest block; its memory is used again."""
        block, future = self._running.popleft()
        self._hashes.append(future.result())
        self._free.append(block)

    def _settle(self, fd: int, block: mmap.mmap, nbytes: int, end: int) -> FileHash:
        """Hash and write a block that ends at `end`. Runs in a thread."""
        with memoryview(block) as whole, whole[:nbytes] as view:
            found = hash_block(view)
            move(self._pwrite, fd, view, end - nbytes, self._path, "writing")
        if not self._direct:
            self._forget(fd, end)
        return found

    def _pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        """One request. Direct ones are whole pages; the file's end, and whatever is refused, takes the other way."""
        direct = self._direct
        count = min(len(view), REQUEST_BYTES)
        whole = count // ALIGN_BYTES * ALIGN_BYTES
        if direct and whole:
            try:
                return self._disk.pwrite(fd, view[:whole], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        if direct:
            self._disk.direct(fd, False)
            self._direct = False
        return self._disk.pwrite(fd, view[:count], offset)

    def _forget(self, fd: int, nbytes: int) -> None:
        with contextlib.suppress(OSError):  # a favour; whether the bytes are on the disk, fsync says
            self._disk.forget(fd, nbytes)


class ShardReader(_OpenFile):
    """Reads any range of a file, and delivers only what its hashes confirm. One thread at a time.

    Args:
        expected: size and hashes, from the rank's index.
        parts: what the manifest says that the file holds, in the file's order.

    Raises:
        CheckpointError: no such regular file, another size, a header that is not that of `parts`.
    """

    def __init__(self, disk: Disk, path: Path, expected: FileHash, parts: Sequence[Part]) -> None:
        self._disk = disk
        self._path = path
        self._expected = expected
        self._parts = parts
        self._span = memoryview(bytearray(min(SPAN_BYTES, expected.size)))
        self._held = -1  # which span that is
        with naming(path, "opening"):
            self._fd = disk.open(path)
        with if_it_fails(self.close):
            self._check_size()
            self._check_header(parts)

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into`, all of it, with what begins `offset` bytes from the beginning of the file.

        All MiB that the range touches are read and compared with their CRC-32. The last one that was needed in part
        is kept: small reads in order do not read it twice.

        Raises:
            CheckpointError: damage, with the bytes' place; then what `into` holds is no good.
        """
        self._open()
        with into.cast("B") as octets:
            end = offset + len(octets)
            if not 0 <= offset <= end <= self._expected.size:
                raise CheckpointError(f"{self._path}: bytes {offset} to {end} are not in its {self._expected.size}")
            for span in range(offset // SPAN_BYTES, -(-end // SPAN_BYTES)):
                start, stop = self._ends(span)
                low, high = max(start, offset), min(stop, end)
                target = octets[low - offset : high - offset]
                if span == self._held or high - low < stop - start:
                    target[:] = self._hold(span)[low - start : high - start]
                else:
                    self._load(span, target)

    def check(self, number: int, block: memoryview) -> None:
        """Read one block, and compare it with all its hashes.

        Args:
            block: room for `BLOCK_BYTES`.

        Raises:
            CheckpointError: damage; the line names the first MiB that is not as it was written.
        """
        start = number * BLOCK_BYTES
        with block[: min(BLOCK_BYTES, self._expected.size - start)] as piece:
            move(self._disk.pread, self._open(), piece, start, self._path, "reading")
            hashes = hash_block(piece)
        for place in range(0, len(hashes.crcs), CRC_BYTES):
            self._compare_span(start // SPAN_BYTES + place // CRC_BYTES, hashes.crcs[place : place + CRC_BYTES])
        expected = self._expected.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        self._compare("SHA-256", start, start + hashes.size, hashes.digests, expected)

    def verify(self) -> None:
        """Read all of it once, and compare it with all its hashes."""
        block = memoryview(bytearray(min(BLOCK_BYTES, self._expected.size)))
        for number in range(-(-self._expected.size // BLOCK_BYTES)):
            self.check(number, block)

    def _check_size(self) -> None:
        with naming(self._path, "asking for its size"):
            nbytes = self._disk.size(self._open())
        if nbytes != self._expected.size:
            raise CheckpointError(f"{self._path}: has {nbytes} bytes, the manifest says {self._expected.size}")

    def _check_header(self, parts: Sequence[Part]) -> None:
        try:
            begin = header(parts)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {error}") from error
        nbytes = len(begin) + sum(part.nbytes for part in parts)
        if nbytes != self._expected.size:
            raise CheckpointError(f"{self._path}: has {self._expected.size} bytes, the manifest's parts have {nbytes}")
        found = bytearray(len(begin))
        self.read(0, memoryview(found))
        if found != begin:
            raise CheckpointError(f"{self._path}: its header does not list the parts that the manifest does")

    def _ends(self, span: int) -> tuple[int, int]:
        return span * SPAN_BYTES, min((span + 1) * SPAN_BYTES, self._expected.size)

    def _hold(self, span: int) -> memoryview:
        """A whole span, read if it is not the last one that was asked for."""
        start, stop = self._ends(span)
        if span != self._held:
            self._held = -1
            self._load(span, self._span[: stop - start])
            self._held = span
        return self._span

    def _load(self, span: int, into: memoryview) -> None:
        move(self._disk.pread, self._open(), into, span * SPAN_BYTES, self._path, "reading")
        self._compare_span(span, crc_of(into))

    def _compare_span(self, span: int, crc: bytes) -> None:
        self._compare("CRC-32", *self._ends(span), crc, self._expected.crcs[span * CRC_BYTES : (span + 1) * CRC_BYTES])

    def _compare(self, what: str, start: int, stop: int, actual: bytes, expected: bytes) -> None:
        if actual != expected:
            raise CheckpointError(
                f"{self._path}: bytes {start} to {stop} are damaged ({what} is {actual.hex()}, saved as "
                f"{expected.hex()}), {self._lies_at(start)}"
            )

    def _lies_at(self, place: int) -> str:
        """What a MiB that begins there damages, in words."""
        begins = offsets(self._parts)
        inside = (part for part, begin in zip(self._parts, begins, strict=True) if begin + part.nbytes > place)
        first = next(inside, None)
        return "in its header" if first is None else f"in {first.key!r} or after it"
