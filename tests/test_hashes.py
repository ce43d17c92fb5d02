"""A file's hash does not depend on how its bytes came, is what hashlib and zlib say, and places damage."""

import mmap
import random
import threading
import zlib
from array import array
from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zero.checkpoint import hashes
from zero.checkpoint.hashes import BLOCK_BYTES, SPAN_BYTES, FileHash, Hasher, hash_block, hash_of

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
    crcs = [zlib.crc32(data[at : at + span_bytes]) for at in range(0, len(data), span_bytes)]
    return FileHash(len(data), sha256(b"".join(digests)).hexdigest(), tuple(crcs))


def hashed(data: bytes, cuts: list[int]) -> FileHash:
    """By a Hasher, cut there, through one buffer that is overwritten after every update."""
    hasher = Hasher()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    buffer = bytearray(len(data))
    for start, stop in pairwise(edges):
        buffer[: stop - start] = data[start:stop]
        hasher.update(memoryview(buffer)[: stop - start])
        buffer[:] = b"\xee" * len(buffer)
    return hasher.result()


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("zero-hash")]


@LAW
@given(st.binary(max_size=9 * SMALL_BLOCK), st.lists(st.integers(0, 10_000), max_size=12))
def test_the_hash_is_the_standard_librarys_however_the_stream_is_cut(small_blocks, data, cuts):
    assert hashed(data, cuts) == expected(data, SMALL_BLOCK, SMALL_SPAN)


@LAW
@given(st.binary(max_size=9 * SMALL_BLOCK))
def test_blocks_hashed_alone_make_the_same_hash(small_blocks, data):
    blocks = [memoryview(data)[at : at + SMALL_BLOCK] for at in range(0, len(data), SMALL_BLOCK)]
    assert hash_of(len(data), map(hash_block, blocks)) == expected(data, SMALL_BLOCK, SMALL_SPAN)


@LAW
@given(st.binary(min_size=1, max_size=5 * SMALL_BLOCK), st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_changes_the_sha_and_the_crc_of_its_span_only(small_blocks, data, place, bit):
    place %= len(data)
    damaged = bytearray(data)
    damaged[place] ^= 1 << bit
    before, after = hashed(data, []), hashed(bytes(damaged), [])
    assert before.sha256 != after.sha256
    changed = [span for span, (a, b) in enumerate(zip(before.crcs, after.crcs, strict=True)) if a != b]
    assert changed == [place // SMALL_SPAN]


def test_swapped_blocks_change_the_sha(small_blocks):
    first, second = b"a" * SMALL_BLOCK, b"b" * SMALL_BLOCK
    assert hashed(first + second, []).sha256 != hashed(second + first, []).sha256


@pytest.mark.parametrize("size", [0, 1, SPAN_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES + 3 * SPAN_BYTES + 5])
def test_real_blocks_are_16_mib_and_real_spans_one(size):
    data = random.Random(size).randbytes(size)
    assert hashed(data, [size // 3]) == expected(data, 16 * 2**20, 2**20)


def test_views_of_any_format_count_in_bytes(small_blocks):
    numbers = array("d", range(100))
    hasher = Hasher()
    hasher.update(memoryview(numbers))
    assert hasher.result() == expected(numbers.tobytes(), SMALL_BLOCK, SMALL_SPAN)


def test_a_stream_of_less_than_a_block_starts_no_thread(small_blocks):
    before = our_threads()
    hasher = Hasher()
    hasher.update(memoryview(bytes(SMALL_BLOCK - 1)))
    assert our_threads() == before
    hasher.result()


def test_threads_end_with_the_result(small_blocks):
    before = our_threads()
    hasher = Hasher()
    hasher.update(memoryview(bytes(5 * SMALL_BLOCK)))
    started = [thread for thread in our_threads() if thread not in before]
    assert started
    hasher.result()
    assert not any(thread.is_alive() for thread in started)


def test_threads_end_with_a_hasher_that_is_forgotten(small_blocks):
    before = our_threads()
    hasher = Hasher()
    hasher.update(memoryview(bytes(5 * SMALL_BLOCK)))
    started = [thread for thread in our_threads() if thread not in before]
    assert started
    del hasher
    for thread in started:
        thread.join(30)
        assert not thread.is_alive()


def test_no_more_than_two_blocks_are_kept_and_both_are_hashed_at_once(small_blocks, monkeypatch):
    """The gate opens when two threads stand in it: with one block in memory, or one thread, it never would."""
    made = []
    real_map, real_hash = mmap.mmap, hashes.hash_block
    gate = threading.Barrier(2, timeout=30)

    class Counted:
        @staticmethod
        def mmap(fileno, length):
            made.append(length)
            return real_map(fileno, length)

    def meet(block):
        gate.wait()
        return real_hash(block)

    monkeypatch.setattr(hashes, "mmap", Counted)
    monkeypatch.setattr(hashes, "hash_block", meet)
    data = random.Random(0).randbytes(8 * SMALL_BLOCK)
    assert hashed(data, []) == expected(data, SMALL_BLOCK, SMALL_SPAN)
    assert made == [SMALL_BLOCK, SMALL_BLOCK]


def test_what_fails_in_a_thread_fails_in_the_caller(small_blocks, monkeypatch):
    def fail(block):
        raise MemoryError("no digest")

    monkeypatch.setattr(hashes, "hash_block", fail)
    hasher = Hasher()
    hasher.update(memoryview(bytes(2 * SMALL_BLOCK)))
    with pytest.raises(MemoryError, match="no digest"):
        hasher.result()


def test_a_hasher_gives_one_result(small_blocks):
    hasher = Hasher()
    hasher.result()
    with pytest.raises(ValueError, match="has given its result"):
        hasher.result()
    with pytest.raises(ValueError, match="has given its result"):
        hasher.update(memoryview(b"more"))


def test_a_block_is_not_longer_than_a_block(small_blocks):
    with pytest.raises(ValueError, match="a block of 65 bytes; at most 64"):
        hash_block(memoryview(bytes(SMALL_BLOCK + 1)))
