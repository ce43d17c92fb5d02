"""What a checkpoint's file is recognised by: a SHA-256 that two threads can compute, and a CRC-32 of each MiB.

The SHA-256 is taken over the digests of 16 MiB blocks: blocks do not wait for each other, and a reader may take them in
any order. The CRCs are finer, so that a small read can be checked and damage can be placed.

    file    |     block 0     |     block 1     |  ..  |        sha256 = SHA-256(digest 0 + digest 1 + ..)
            | MiB | MiB | ..  | MiB | ..        |           crcs   = CRC-32 of each MiB, the last one may be shorter
"""

import mmap
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32  # zlib's own takes five times as long

BLOCK_BYTES = 16 * 2**20
SPAN_BYTES = 2**20

_THREADS = 2


class FileHash(NamedTuple):
    """Bytes of a file, hex SHA-256 over the digests of its blocks, CRC-32 of each of its MiB."""

    size: int
    sha256: str
    crcs: tuple[int, ...]


class BlockHash(NamedTuple):
    """SHA-256 digest of at most `BLOCK_BYTES`, and the CRC-32 of each of their MiB."""

    digest: bytes
    crcs: tuple[int, ...]


def hash_block(block: memoryview) -> BlockHash:
    """Hash one block, a MiB at a time so that the second pass finds it in the cache. Other threads run meanwhile."""
    if block.nbytes > BLOCK_BYTES:
        raise ValueError(f"a block of {block.nbytes} bytes; at most {BLOCK_BYTES}")
    digest = sha256()
    crcs = []
    with block.cast("B") as raw:
        for start in range(0, len(raw), SPAN_BYTES):
            with raw[start : start + SPAN_BYTES] as span:
                crcs.append(crc32(span))
                digest.update(span)
    return BlockHash(digest.digest(), tuple(crcs))


def hash_of(size: int, blocks: Iterable[BlockHash]) -> FileHash:
    """The hash of a file of `size` bytes from those of its blocks, in order; every block but the last is full."""
    digest = sha256()
    crcs: list[int] = []
    for block in blocks:
        digest.update(block.digest)
        crcs += block.crcs
    return FileHash(size, digest.hexdigest(), tuple(crcs))


class Hasher:
    """Hashes a stream of bytes while its owner does something else with them.

    What is passed to `update` is copied and may be overwritten at once. Two blocks are kept, 32 MiB: a thread hashes
    each one that is full, and `update` waits for the older one when both are. A stream of less than a block starts no
    thread and touches as much memory as it has bytes.
    """

    def __init__(self) -> None:
        self._size = 0
        self._filled = 0
        self._block: mmap.mmap | None = None  # a mapping goes back to the system; malloc might keep it
        self._free: list[mmap.mmap] = []
        self._running: deque[tuple[mmap.mmap, Future[BlockHash]]] = deque()
        self._done: list[BlockHash] = []
        self._threads: ThreadPoolExecutor | None = None
        self._used_up = False

    def update(self, view: memoryview) -> None:
        """Take the next bytes of the stream: a contiguous view of any format.

        Raises:
            ValueError: after `result`.
        """
        if self._used_up:
            raise ValueError("this hasher has given its result; make another one")
        with view.cast("B") as raw:
            taken = 0
            while taken < len(raw):
                block = self._block = self._block or self._next_block()
                count = min(len(raw) - taken, BLOCK_BYTES - self._filled)
                block[self._filled : self._filled + count] = raw[taken : taken + count]
                taken += count
                self._filled += count
                self._size += count
                if self._filled == BLOCK_BYTES:
                    self._send(block)

    def result(self) -> FileHash:
        """The hash of everything; the memory and the threads are free again. A hasher gives one result.

        Raises:
            ValueError: the second time.
        """
        if self._used_up:
            raise ValueError("this hasher has given its result; make another one")
        self._used_up = True
        last = []
        if self._block is not None:
            with memoryview(self._block) as whole, whole[: self._filled] as view:
                last.append(hash_block(view))
        while self._running:
            self._collect()
        if self._threads is not None:
            self._threads.shutdown()
        self._threads, self._block, self._free = None, None, []
        return hash_of(self._size, [*self._done, *last])

    def _next_block(self) -> mmap.mmap:
        if len(self._running) == _THREADS:
            self._collect()
        return self._free.pop() if self._free else mmap.mmap(-1, BLOCK_BYTES)

    def _send(self, block: mmap.mmap) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "zero-hash")
        self._running.append((block, self._threads.submit(_hash_whole, block)))
        self._block, self._filled = None, 0

    def _collect(self) -> None:
        """Wait for the oldest block; its memory is used again."""
        block, future = self._running.popleft()
        self._done.append(future.result())
        self._free.append(block)


def _hash_whole(block: mmap.mmap) -> BlockHash:
    with memoryview(block) as view:
        return hash_block(view)
