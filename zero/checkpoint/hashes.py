"""Compute the checksums of a checkpoint's files: the SHA-256 of each 16 MiB block, and the CRC-32 of each MiB.

Threads and ranks hash blocks independently. The CRCs are finer, to check a small read and to locate damage.

    file    |     block 0     |     block 1     |  ..  |        digests = SHA-256 of each block, the last may be shorter
            | MiB | MiB | ..  | MiB | ..        |           crcs    = CRC-32 of each MiB, the last may be shorter
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32  # zlib's own takes five times as long

BLOCK_BYTES = 16 * 2**20
SPAN_BYTES = 2**20

DIGEST_BYTES = 32
CRC_BYTES = 4
"""Bytes of a CRC-32, big-endian."""


class FileHash(NamedTuple):
    """Size in bytes, concatenated digests and concatenated CRCs of a file or of one block."""

    size: int
    digests: bytes
    crcs: bytes


def crc_of(view: memoryview | bytearray) -> bytes:
    """Return the CRC-32 of at most a MiB."""
    return crc32(view).to_bytes(CRC_BYTES, "big")


def hash_block(block: memoryview) -> FileHash:
    """Hash one block, a MiB at a time, so that the second pass finds it in the cache. Releases the GIL."""
    digest = sha256()
    crcs = []
    with block.cast("B") as raw:
        for start in range(0, len(raw), SPAN_BYTES):
            with raw[start : start + SPAN_BYTES] as span:
                crcs.append(crc_of(span))
                digest.update(span)
    return FileHash(block.nbytes, digest.digest(), b"".join(crcs))


def joined(blocks: Iterable[FileHash]) -> FileHash:
    """Return the hash of a file from those of its blocks, in order; every block but the last is full."""
    hashes = list(blocks)
    digests, crcs = (b"".join(part) for part in ([block.digests for block in hashes], [block.crcs for block in hashes]))
    return FileHash(sum(block.size for block in hashes), digests, crcs)
