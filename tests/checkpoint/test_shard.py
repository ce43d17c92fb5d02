"""One rank's file: safetensors reads it, it loads whole or raises, and the calls of `Disk` are safe."""

import contextlib
import errno
import hashlib
import os
import random
import re
import stat
import struct
import threading
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings, strategies as st
from safetensors import safe_open
from torch import Tensor

from tests.conftest import SEED
from tests.faults.disks import Call, Fault, FaultyDisk, drop, fail, flip, misplace, short
from zero.checkpoint.files import shard
from zero.checkpoint.files.disk import Disk
from zero.checkpoint.files.shard import ShardReader, ShardWriter
from zero.checkpoint.format.hashes import FileHash
from zero.errors import CheckpointError
from zero.platform.files import memory_of
from zero.platform.safetensors_files import DTYPE_NAMES, FilePart, by_width, header, offsets

MIB = 2**20
NAME = "rank-00000-of-00001.safetensors"


def noise(nbytes: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def bytes_part(nbytes: int, key: str = "a") -> FilePart:
    return FilePart(key, torch.uint8, (nbytes,))


def write(path: Path, parts: list[FilePart], data: bytes, disk: Disk | None = None) -> FileHash:
    with ShardWriter(disk or Disk(), path, parts) as writer:
        writer.write(memoryview(bytearray(data)))
        return writer.finish()


def hash_of(whole: bytes) -> FileHash:
    """The contract's words in the standard library's."""
    digests = [hashlib.sha256(whole[start : start + 16 * MIB]).digest() for start in range(0, len(whole), 16 * MIB)]
    crcs = [struct.pack(">I", zlib.crc32(whole[start : start + MIB])) for start in range(0, len(whole), MIB)]
    return FileHash(len(whole), b"".join(digests), b"".join(crcs))


def verify(reader: ShardReader, hashes: FileHash) -> None:
    for block in range(-(-hashes.size // (16 * MIB))):
        reader.check(block)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / NAME


@pytest.fixture(autouse=True)
def _no_descriptor_is_left():
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) == before


# The format: safetensors is the judge.


def tensor_of(part: FilePart, seed: int) -> Tensor:
    octets = torch.frombuffer(bytearray(noise(part.nbytes, seed) or b"\0"), dtype=torch.uint8)[: part.nbytes]
    if part.dtype == torch.bool:
        octets = octets & 1
    return octets.view(part.dtype).reshape(part.shape)


def octets_of(tensor: Tensor) -> bytes:
    return bytes(memory_of(tensor.contiguous()))


def is_read_by_safetensors(path: Path, parts: list[FilePart]) -> None:
    tensors = {part.key: tensor_of(part, seed) for seed, part in enumerate(parts)}
    path.unlink(missing_ok=True)
    file_hash = write(path, parts, b"".join(octets_of(tensors[part.key]) for part in parts))
    assert file_hash == hash_of(path.read_bytes())
    with safe_open(path, "pt") as opened:
        assert sorted(opened.keys()) == sorted(tensors)
        for part in parts:
            read = opened.get_tensor(part.key)
            assert (read.dtype, tuple(read.shape)) == (part.dtype, part.shape)
            assert octets_of(read) == octets_of(tensors[part.key])
    with ShardReader(Disk(), path, file_hash, parts) as reader:
        for part, offset in zip(parts, offsets(parts), strict=True):
            into = bytearray(part.nbytes)
            reader.read(offset, memoryview(into))
            assert into == octets_of(tensors[part.key])
        verify(reader, file_hash)


MANY = [
    FilePart("step", torch.int64, ()),
    FilePart("order", torch.int64, (3, 5)),
    FilePart("h.0.weight", torch.float32, (17, 3)),
    FilePart("scale", torch.float32, ()),
    FilePart("nothing", torch.float32, (0, 7)),
    FilePart("half", torch.float16, (5,)),
    FilePart("brain", torch.bfloat16, (2, 3, 5)),
    FilePart("mask", torch.bool, (13,)),
    FilePart("größe", torch.uint8, (1,)),
    FilePart("none", torch.bool, (0,)),
]

a_part = st.builds(
    FilePart, st.text(max_size=8), st.sampled_from(list(DTYPE_NAMES)), st.lists(st.integers(0, 4)).map(tuple)
)
some_parts = st.lists(
    a_part.filter(lambda part: part.key.isprintable() and part.nbytes < 10_000), max_size=12, unique_by=lambda p: p.key
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=some_parts.map(lambda parts: sorted(parts, key=by_width)))
@example(parts=MANY)
@example(parts=[])
def test_safetensors_reads_the_tensors_that_were_written(path, parts):
    is_read_by_safetensors(path, parts)


def test_a_header_longer_than_a_mib_is_read_and_checked(path):
    is_read_by_safetensors(
        path, [FilePart(f"h.{number}.{'weight' * 8}", torch.float32, (1,)) for number in range(12_000)]
    )
    assert path.stat().st_size > MIB


def test_the_data_begins_at_a_whole_page():
    for count in (0, 1, 30, 100, 1000):
        parts = [bytes_part(5, str(number)) for number in range(count)]
        begin = header(parts)
        assert len(begin) % 4096 == 0
        assert offsets(parts) == tuple(len(begin) + 5 * number for number in range(count))


# The writer.


def test_however_the_data_is_cut_the_file_and_its_hash_are_the_same(tmp_path):
    rng, nbytes = random.Random(SEED), 17 * MIB + 4321
    data, parts = noise(nbytes, SEED), [bytes_part(nbytes)]
    whole = header(parts) + data
    for case in range(6):
        path = tmp_path / str(case)
        most = rng.choice([1000, 70_000, MIB, 5 * MIB, 20 * MIB])
        with ShardWriter(Disk(), path, parts) as writer:
            done = 0
            while done < nbytes:
                count = min(rng.randint(0, most), nbytes - done)
                piece = bytearray(data[done : done + count])
                writer.write(memoryview(bytearray(piece)))
                piece[:] = bytes(count)  # it was taken, so it may be reused
                done += count
            file_hash = writer.finish()
        assert path.read_bytes() == whole, f"ZERO_TEST_SEED={SEED}, case {case}"
        assert file_hash == hash_of(whole), f"ZERO_TEST_SEED={SEED}, case {case}"
        path.unlink()


def test_any_contiguous_memory_is_written(path):
    source = torch.randn(6, 5)
    part = FilePart("w", torch.float32, (6, 5))
    with ShardWriter(Disk(), path, [part]) as writer:
        writer.write(memoryview(source.numpy()))  # two dimensions, format "f"
        file_hash = writer.finish()
    into = torch.zeros(6, 5)
    with ShardReader(Disk(), path, file_hash, [part]) as reader:
        reader.read(offsets([part])[0], memoryview(into.numpy()))
    assert torch.equal(into, source)


@pytest.mark.parametrize("given_bytes", [0, 99, 101])
def test_all_bytes_must_come_and_no_others(path, given_bytes):
    with pytest.raises(CheckpointError, match=rf"{NAME}: \d+ bytes were passed, but the file has \d+"):
        write(path, [bytes_part(100)], bytes(given_bytes))


def test_a_file_that_exists_is_never_written_into(path):
    path.write_bytes(b"published")
    with pytest.raises(CheckpointError, match="EEXIST"):
        ShardWriter(Disk(), path, [bytes_part(1)])
    assert path.read_bytes() == b"published"


@pytest.mark.parametrize("direct", [True, False])
def test_the_file_is_written_in_large_requests_then_synchronised_then_closed(path, direct):
    disk = FaultyDisk(direct="yes" if direct else "switch")
    nbytes = 22 * MIB
    file_hash = write(path, [bytes_part(nbytes)], noise(nbytes, SEED), disk)
    names = [name for name, _ in disk.calls]
    assert names[-3:] == ["fsync", "forget", "close"]
    assert (names.count("fsync"), names.count("forget")) == (1, 1 if direct else 3)
    assert {args[1] for name, args in disk.calls if name == "pwrite"} == {4 * MIB, 2 * MIB + 4096}
    assert file_hash == hash_of(path.read_bytes())


@pytest.mark.parametrize("refuses", ["yes", "switch", "transfer"])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, 16 * MIB - 4096, 40 * MIB + 513])
def test_any_length_past_the_page_cache_or_through_it(path, nbytes, refuses):
    data = noise(nbytes, SEED)
    disk = FaultyDisk(direct=refuses)
    file_hash = write(path, [bytes_part(nbytes)], data, disk)
    assert path.read_bytes() == header([bytes_part(nbytes)]) + data
    assert file_hash == hash_of(header([bytes_part(nbytes)]) + data)


def resident_bytes(kind: str) -> int:
    return 1024 * int(re.search(rf"^{kind}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


def test_memory_is_bounded_however_large_the_file_is(path):
    """300 MB through less than 96 MiB, in both directions."""
    page, pages = bytearray(noise(3_000_000, SEED)), 100
    part, into = bytes_part(pages * len(page)), memoryview(bytearray(len(page)))
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew
    before = resident_bytes("VmRSS")
    with ShardWriter(Disk(), path, [part]) as writer:
        for _ in range(pages):
            writer.write(memoryview(bytearray(page)))
        file_hash = writer.finish()
    with ShardReader(Disk(), path, file_hash, [part]) as reader:
        verify(reader, file_hash)
        for number in range(pages):
            reader.read(4096 + number * len(page), into)
            assert into == page
    assert resident_bytes("VmHWM") - before < 96 * MIB
    assert file_hash.size > 300e6


# The reader.


def test_any_range_in_any_order_reads_what_was_written(path):
    rng, nbytes = random.Random(SEED), 3 * MIB + 77
    parts, data = [bytes_part(nbytes)], noise(nbytes, SEED)
    file_hash = write(path, parts, data)
    whole = header(parts) + data
    edges = [at + by for at in (0, 4096, MIB, 2 * MIB, 3 * MIB, len(whole)) for by in (-1, 0, 1)]
    with ShardReader(Disk(), path, file_hash, parts) as reader:
        for case in range(400):
            start, end = sorted(min(max(rng.choice([*edges, rng.randrange(len(whole))]), 0), len(whole)) for _ in "se")
            into = bytearray(end - start)
            reader.read(start, memoryview(into))
            assert into == whole[start:end], f"ZERO_TEST_SEED={SEED}, case {case}: {start} to {end}"


def test_small_reads_in_order_read_the_file_once(path):
    nbytes = 5 * MIB
    file_hash = write(path, [bytes_part(nbytes)], noise(nbytes, 0))
    disk = FaultyDisk()
    with ShardReader(disk, path, file_hash, [bytes_part(nbytes)]) as reader:
        for start in range(4096, file_hash.size, 10_000):
            reader.read(start, memoryview(bytearray(min(10_000, file_hash.size - start))))
    assert sum(args[1] for name, args in disk.calls if name == "pread") == file_hash.size


def test_a_manifest_that_lies_about_the_file_is_refused(path):
    parts = [bytes_part(100)]
    file_hash = write(path, parts, bytes(100))
    for lie, others, said in [
        (file_hash._replace(size=4195), parts, "has 4196 bytes, the manifest says 4195, its tensors have 4196"),
        (file_hash._replace(crcs=b""), parts, "bytes 0 to 4196 are damaged"),
        (file_hash, [bytes_part(99)], "has 4196 bytes, the manifest says 4196, its tensors have 4195"),
        (file_hash, [bytes_part(100, "b")], "its header and the manifest list different tensors"),
        (file_hash, [FilePart("a", torch.int8, (100,))], "its header and the manifest list different tensors"),
        (file_hash, [FilePart("a", torch.uint8, (10, 10))], "its header and the manifest list different tensors"),
        (file_hash, [FilePart("a", torch.float64, (2**70,))], "its tensors have"),
    ]:
        with pytest.raises(CheckpointError, match=f"{NAME}: .*{said}"):
            ShardReader(Disk(), path, lie, others)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "nothing"])
def test_only_a_regular_file_is_read(path, kind):
    real = path.with_name("real")
    file_hash = write(real, [bytes_part(10)], bytes(10))
    make: dict[str, Callable[[], Any]] = {
        "link": lambda: path.symlink_to(real),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "nothing": lambda: None,
    }
    make[kind]()
    said = {"link": "ELOOP", "nothing": "ENOENT"}.get(kind, "not a regular file")
    with pytest.raises(CheckpointError, match=f"{NAME}: .*{said}"):
        ShardReader(Disk(), path, file_hash, [bytes_part(10)])


# Damage.


def overwrite(path: Path, whole: bytes) -> None:
    with path.open("r+b") as opened:
        opened.write(whole)
        opened.truncate()


def refusal_of(call: Callable[[], Any], note: str) -> str:
    said = ""
    try:
        call()
    except CheckpointError as error:
        said = str(error)
    assert said, f"{note}: not refused"
    assert "\n" not in said
    return said


def test_damage_raises_with_its_place(path):
    rng, nbytes = random.Random(SEED), MIB + 4321
    parts, data = [bytes_part(nbytes)], noise(nbytes, SEED)
    file_hash = write(path, parts, data)
    whole = header(parts) + data
    for case in range(100):
        spoiled, at = bytearray(whole), rng.randrange(len(whole))
        spoiled[at] ^= 1 << rng.randrange(8)
        note = f"ZERO_TEST_SEED={SEED}, case {case}: a bit of byte {at}"
        start, end = rng.randint(0, at), rng.randint(at + 1, len(whole))

        def open_and_read(start: int = start, end: int = end) -> None:
            with ShardReader(Disk(), path, file_hash, parts) as reader:
                reader.read(start, memoryview(bytearray(end - start)))

        overwrite(path, whole)
        with ShardReader(Disk(), path, file_hash, parts) as opened_before:
            overwrite(path, spoiled)
            said = refusal_of(partial(verify, opened_before, file_hash), note), refusal_of(open_and_read, note)
        first = at // MIB * MIB
        place = f"{path}: bytes {first} to {min(first + MIB, len(whole))} are damaged (CRC-32 is "
        assert all(line.startswith(place) for line in said), f"{note}: {said}"


def test_damage_that_crc_32_does_not_see_sha_256_does(path):
    """The CRC's own polynomial, laid over the data, changes nothing in it."""
    data = noise(1000, SEED)
    file_hash = write(path, [bytes_part(1000)], data)
    spoiled = bytearray(path.read_bytes())
    polynomial = int(f"{0x104C11DB7:033b}"[::-1], 2).to_bytes(5, "little")
    spoiled[4500:4505] = bytes(a ^ b for a, b in zip(spoiled[4500:4505], polynomial, strict=True))
    path.write_bytes(spoiled)
    assert hash_of(spoiled).crcs == file_hash.crcs
    with (
        ShardReader(Disk(), path, file_hash, [bytes_part(1000)]) as reader,
        pytest.raises(
            CheckpointError, match=rf"{NAME}: bytes 0 to 5096 are damaged \(SHA-256 is [0-9a-f]{{64}}, saved as"
        ),
    ):
        verify(reader, file_hash)


# Every call of a file's life fails in turn, once and for ever.

FAULTS: dict[str, Fault] = {
    "EIO": fail(errno.EIO),
    "short by all": short(0),
    "short by some": short(200_000),
    "a bit": flip(2**16),
    "drop": drop(),
    "elsewhere": misplace(-4096),
}
SAID = [
    r"E[A-Z]+ \(.+\) while (making it|opening|asking for its size|synchronising|closing)",
    r"E[A-Z]+ \(.+\) while (writing|reading) at offset \d+",
    r"bytes \d+ to \d+ are damaged \(CRC-32",
    r"has \d+ bytes, the manifest says \d+, its tensors have \d+$",
]


def live(path: Path, disk: Disk, data: bytes) -> int:
    """Write, open, verify, read in order. How many errors there were, all typed; what is delivered is right."""
    parts, errors = [bytes_part(len(data))], 0
    path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def counting():
        nonlocal errors
        said = ""
        try:
            yield
        except CheckpointError as error:
            said = str(error)
            errors += 1
        if said:
            assert "\n" not in said
            assert any(re.match(f"{path}: {pattern}", said) for pattern in SAID), said

    with counting():
        file_hash = write(path, parts, data, disk)
        assert file_hash == hash_of(header(parts) + data)
        with ShardReader(disk, path, file_hash, parts) as reader:
            with counting():
                verify(reader, file_hash)
            for start in range(0, len(data), 700_000):
                into = bytearray(len(data[start : start + 700_000]))
                with counting():
                    reader.read(4096 + start, memoryview(into))
                    assert into == data[start : start + 700_000]
    return errors


@pytest.mark.parametrize(
    ("name", "direct"), [(name, ("yes", "switch")[number % 2]) for number, name in enumerate(FAULTS)]
)
def test_the_nth_call_fails(path, monkeypatch, name, direct):
    monkeypatch.setattr(shard, "WRITE_BYTES", 2**18)  # more calls
    data = noise(MIB + 9000, SEED)
    undisturbed = FaultyDisk(direct=direct)
    assert live(path, undisturbed, data) == 0
    count = len(undisturbed.calls)
    assert {called for called, _ in undisturbed.calls} >= {
        "create", "direct", "pwrite", "fsync", "forget", "close", "open", "size", "pread"
    }  # fmt: skip
    errors = 0
    for at in range(1, count + 1):
        for on in (False, True):
            disk = FaultyDisk(FAULTS[name], at=at, on=on, direct=direct)
            errors += live(path, disk, data)
            assert not disk.held, f"call {at} failing leaves a descriptor open"
    if name == "short by some":
        assert errors == 0  # what is short is completed, everything else shows
    else:
        assert errors >= count // 2


@pytest.mark.parametrize(("name", "on"), [("EIO", False), ("drop", True)])
def test_a_failing_thread_is_heard(path, name, on):
    """Three blocks, some of them under way when one fails."""
    data = noise(33 * MIB, SEED)
    for at in (1, 6, 9):
        disk = FaultyDisk(FAULTS[name], at=at, on=on, only="pwrite")
        assert live(path, disk, data) > 0
        assert not disk.held


def test_a_disk_that_moves_a_few_bytes_at_a_time_is_slow_and_right(path):
    assert live(path, FaultyDisk(short(7), at=1, on=True), noise(9000, SEED)) == 0


def test_a_full_disk_says_where_and_what_to_do(path):
    disk = FaultyDisk(fail(errno.ENOSPC), at=2, on=True, only="pwrite")
    said = rf"^{re.escape(str(path))}: ENOSPC \(.*\) while writing at offset 0. Free space there, or choose "
    with pytest.raises(CheckpointError, match=said + "a folder on another disk") as full:
        write(path, [bytes_part(9 * MIB)], bytes(9 * MIB), disk)
    assert isinstance(full.value.__cause__, OSError)
    assert not disk.held


def test_a_failed_fsync_is_final(path):
    disk = FaultyDisk(fail(errno.EIO), at=1, on=True, only="fsync")
    with ShardWriter(disk, path, [bytes_part(1)]) as writer:
        writer.write(memoryview(bytearray(b"1")))
        with pytest.raises(CheckpointError, match=r"EIO .* while synchronising"):
            writer.finish()
    assert [name for name, _ in disk.calls].count("fsync") == 1
    assert not disk.held


def test_a_descriptor_is_not_closed_under_a_transfer(path):
    """Its number may already be another file's."""
    started, closed, early = threading.Event(), threading.Event(), []

    class SlowDisk(FaultyDisk):
        def pwrite(self, fd: int, view: memoryview, offset: int) -> int:
            started.set()
            early.append(closed.wait(0.3))  # as long as the transfer takes
            return super().pwrite(fd, view, offset)

        def close(self, fd: int) -> None:
            closed.set()
            super().close(fd)

    disk = SlowDisk()
    with ShardWriter(disk, path, [bytes_part(20 * MIB)]) as writer:
        writer.write(memoryview(bytearray(17 * MIB)))
        assert started.wait(10)
    assert closed.is_set()
    assert early
    assert not any(early)


def test_an_interrupt_closes_the_file(path):
    def interrupt(call: Call) -> Any:
        raise KeyboardInterrupt

    disk = FaultyDisk(interrupt, at=1, only="pwrite")
    with pytest.raises(KeyboardInterrupt):
        write(path, [bytes_part(1)], b"1", disk)
    assert not disk.held


# The door.


@pytest.mark.parametrize("there", ["folder", "full folder", "file", "link", "dead link"])
def test_nothing_is_renamed_onto_something(tmp_path, there, monkeypatch):
    disk, old, new, other = Disk(), tmp_path / "old", tmp_path / "new", tmp_path / "other"
    (old / "inside").mkdir(parents=True)
    other.mkdir()
    make: dict[str, Callable[[], Any]] = {
        "folder": new.mkdir,
        "full folder": lambda: (new / "inside").mkdir(parents=True),
        "file": lambda: new.write_bytes(b"file"),
        "link": lambda: new.symlink_to(other),
        "dead link": lambda: new.symlink_to(tmp_path / "nowhere"),
    }
    make[there]()
    with pytest.raises(FileExistsError):
        disk.rename(old, new)
    if there != "folder":  # taken between the question and the answer: then the system says so
        monkeypatch.setattr(os.path, "lexists", lambda path: False)
        with pytest.raises(FileExistsError if there == "full folder" else NotADirectoryError):
            disk.rename(old, new)
    assert (old / "inside").is_dir()


def test_only_a_folder_is_renamed(tmp_path):
    disk, old, new = Disk(), tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"file")
    with pytest.raises(NotADirectoryError):
        disk.rename(old, new)
    old.unlink()
    (tmp_path / "folder").mkdir()
    old.symlink_to(tmp_path / "folder")
    with pytest.raises(NotADirectoryError):
        disk.rename(old, new)
    disk.rename(tmp_path / "folder", new)
    assert disk.names(tmp_path) == ["new", "old"]


def test_no_link_is_followed_into_a_file(tmp_path):
    (tmp_path / "real").write_bytes(b"real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for call in (Disk().open, Disk().create):
        with pytest.raises(OSError):
            call(tmp_path / "link")
    assert stat.S_ISLNK(Disk().mode(tmp_path / "link"))
    assert (tmp_path / "real").read_bytes() == b"real"
