"""A file's hashes do not depend on who hashed which block, are those of hashlib and zlib, and place damage."""

import random
import struct
import zlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from zero.checkpoint import hashes
from zero.checkpoint.hashes import BLOCK_BYTES, CRC_BYTES, SPAN_BYTES, FileHash, hash_block, joined

SMALL_BLOCK, SMALL_SPAN = 64, 16
LAW = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])  # one patch for all examples


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 bytes and spans of 16: a thousand bytes go through everything."""
    monkeypatch.setattr(hashes, "BLOCK_BYTES", SMALL_BLOCK)
    monkeypatch.setattr(hashes, "SPAN_BYTES", SMALL_SPAN)


def expected(data: bytes, block_bytes: int, span_bytes: int) -> FileHash:
    """By the sentence that defines it, with the standard library, in one thread."""
    digests = [sha256(data[at : at + block_bytes]).digest() for at in range(0, len(data), block_bytes)]
    crcs = [struct.pack(">I", zlib.crc32(data[at : at + span_bytes])) for at in range(0, len(data), span_bytes)]
    return FileHash(len(data), b"".join(digests), b"".join(crcs))


def hashed(data: bytes) -> FileHash:
    """A block at a time, by threads that finish in any order."""
    blocks = [memoryview(data)[at : at + hashes.BLOCK_BYTES] for at in range(0, len(data), hashes.BLOCK_BYTES)]
    with ThreadPoolExecutor(2) as threads:
        return joined(threads.map(hash_block, blocks))


@LAW
@given(st.binary(max_size=9 * SMALL_BLOCK))
def test_the_hash_is_the_standard_librarys(small_blocks, data):
    assert hashed(data) == expected(data, SMALL_BLOCK, SMALL_SPAN)


@LAW
@given(st.binary(min_size=1, max_size=5 * SMALL_BLOCK), st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_changes_the_sha_of_its_block_and_the_crc_of_its_span_only(small_blocks, data, place, bit):
    place %= len(data)
    damaged = bytearray(data)
    damaged[place] ^= 1 << bit
    before, after = hashed(data), hashed(bytes(damaged))
    assert changed(before.digests, after.digests, 32) == [place // SMALL_BLOCK]
    assert changed(before.crcs, after.crcs, CRC_BYTES) == [place // SMALL_SPAN]


def changed(before: bytes, after: bytes, each: int) -> list[int]:
    """The numbers of the hashes that differ."""
    assert len(before) == len(after)
    return [at // each for at in range(0, len(before), each) if before[at : at + each] != after[at : at + each]]


def test_swapped_blocks_change_the_sha(small_blocks):
    first, second = b"a" * SMALL_BLOCK, b"b" * SMALL_BLOCK
    assert hashed(first + second).digests != hashed(second + first).digests


@pytest.mark.parametrize("size", [0, 1, SPAN_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES + 3 * SPAN_BYTES + 5])
def test_real_blocks_are_16_mib_and_real_spans_one(size):
    data = random.Random(size).randbytes(size)
    assert hashed(data) == expected(data, 16 * 2**20, 2**20)


def test_views_of_any_format_count_in_bytes(small_blocks):
    numbers = array("d", range(8))
    assert hash_block(memoryview(numbers)) == expected(numbers.tobytes(), SMALL_BLOCK, SMALL_SPAN)


def test_a_block_is_not_longer_than_a_block(small_blocks):
    with pytest.raises(ValueError, match="a block of 65 bytes; at most 64"):
        hash_block(memoryview(bytes(SMALL_BLOCK + 1)))
