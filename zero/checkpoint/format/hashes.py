"""Compute the checksums of a checkpoint's files: the SHA-256 of each 16 MiB block, and the CRC-32 of each MiB.

Blocks are hashed independently of each other, so threads and ranks can divide them. The CRCs cover smaller spans, so
that a small read can be verified and damage located.

    file    |     block 0     |     block 1     |  ..  |        digests = SHA-256 of each block, the last may be shorter
            | MiB | MiB | ..  | MiB | ..        |           crcs    = CRC-32 of each MiB, the last may be shorter
"""

from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from zlib_ng.zlib_ng import crc32  # zlib.crc32 takes five times as long

HASH_BLOCK_BYTES = 16 * 2**20
SPAN_BYTES = 2**20

DIGEST_BYTES = 32
CRC_BYTES = 4
"""Size of a stored CRC-32, which is big-endian."""


class FileHash(NamedTuple):
    """Size in bytes, concatenated SHA-256 digests and concatenated CRC-32s of a file or of one block."""

    size: int
    digests: bytes
    crcs: bytes


def crc_of(view: memoryview | bytearray) -> bytes:
    """Return the CRC-32 of a span of at most 1 MiB as 4 bytes."""
    return crc32(view).to_bytes(CRC_BYTES, "big")


def hash_block(block: memoryview) -> FileHash:
    """Compute both hashes of one block. Releases the GIL.

    Both are computed MiB by MiB, so that the second hash reads the bytes from the CPU's cache.
    """
    digest = sha256()
    crcs = []
    with block.cast("B") as raw:
        for start in range(0, len(raw), SPAN_BYTES):
            with raw[start : start + SPAN_BYTES] as span:
                crcs.append(crc_of(span))
                digest.update(span)
    return FileHash(block.nbytes, digest.digest(), b"".join(crcs))


def joined_crc(blocks: Iterable[FileHash]) -> FileHash:
    """Combine the hashes of a file's blocks, in order, into the hash of the file; all blocks but the last are full."""
    hashes = list(blocks)
    digests, crcs = (b"".join(part) for part in ([block.digests for block in hashes], [block.crcs for block in hashes]))
    return FileHash(sum(block.size for block in hashes), digests, crcs)
