"""Checksums of a checkpoint's files: a SHA-256 that threads and ranks can share, and a CRC-32 of each MiB.

The SHA-256 is taken over the digests of 16 MiB blocks: blocks do not wait for each other, and a reader may take them in
any order. The CRCs are finer, so that a small read can be checked and damage can be placed.

    file    |     block 0     |     block 1     |  ..  |        sha256 = SHA-256(digest 0 + digest 1 + ..)
            | MiB | MiB | ..  | MiB | ..        |           crcs   = CRC-32 of each MiB, the last one may be shorter
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32  # zlib's own takes five times as long

BLOCK_BYTES = 16 * 2**20
SPAN_BYTES = 2**20


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
    found = list(blocks)
    return FileHash(size, sha_of(one.digest for one in found), tuple(crc for one in found for crc in one.crcs))


def sha_of(digests: Iterable[bytes]) -> str:
    """A file's SHA-256, in hex, from the digests of its blocks in order."""
    return sha256(b"".join(digests)).hexdigest()
