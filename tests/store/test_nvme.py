"""Pages on a disk: the right bits, or one typed error that names page, offset and cause; and nothing left behind."""

import contextlib
import errno
import gc
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.common.held import open_files
from tests.conftest import LONG_S
from tests.faults.disks import Call, FaultyFiles, drop, fail, flip, misplace, short
from zero.errors import RankFailedError, StoreError
from zero.store import NvmeStore, Page, Store, probe
from zero.testing import StoreContract, run_processes

NUMEL = 2048 + 64  # two blocks and a part of one
PAGES = [Page(0, kind, number) for kind in ("master", "mu") for number in (0, 1)]


@contextlib.contextmanager
def whatever_is_warned():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def noise(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def aligned_buffers() -> int:
    return Path("/proc/self/maps").read_text().count("/dev/zero")


STORES = {
    "as usual": dict,
    "without checksums": lambda: {"verify": False},
    "reserved ahead": lambda: {"capacity_bytes": 2**20},
    "where the switch to direct is refused": lambda: {"files": FaultyFiles(direct="switch")},
    "where direct transfers are refused": lambda: {"files": FaultyFiles(direct="transfer")},
    "where transfers stop early": lambda: {"files": FaultyFiles(short(127 * 512), on=True)},
}


class TestNvmeStore(StoreContract):
    @pytest.fixture(autouse=True, params=STORES)
    def _opened(self, tmp_path: Path, request: pytest.FixtureRequest):
        self.folder, self.options = tmp_path, STORES[request.param]
        yield
        assert not os.listdir(tmp_path)

    def open(self) -> Store:
        with whatever_is_warned():
            return NvmeStore(self.folder, **self.options())


@pytest.mark.parametrize("direct", ["switch", "transfer"])
def test_a_file_system_without_direct_io_is_a_warning(tmp_path, direct):
    with pytest.warns(UserWarning, match="no direct I/O here"):
        NvmeStore(tmp_path, files=FaultyFiles(direct=direct)).close()


@pytest.mark.parametrize("direct", ["yes", "switch", "transfer"])
def test_a_file_loses_its_name_at_once(tmp_path, direct):
    files = FaultyFiles(direct=direct)
    with whatever_is_warned():
        store = NvmeStore(tmp_path, files=files)
    with contextlib.closing(store):
        assert not os.listdir(tmp_path)
        holds_what_is_written(store)
    assert not files.held


def holds_what_is_written(store: Store) -> None:
    page, source, into = Page(9, "mu", 9), noise(NUMEL, 9), torch.empty(NUMEL)
    store.allocate(page, NUMEL, torch.float32)
    store.write(page, source).wait()
    store.read(page, into).wait()
    assert same(into, source)


@pytest.mark.parametrize("request_bytes", [4096, 2**22])
@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 1025, 2 * 2048 + 64])
@pytest.mark.parametrize("start", [0, 1, 64])
def test_any_length_from_and_to_any_address(tmp_path, monkeypatch, request_bytes, numel, start):
    monkeypatch.setattr("zero.platform.scratch_file.REQUEST_BYTES", request_bytes)
    with contextlib.closing(NvmeStore(tmp_path)) as store:
        pages = [Page(0, "mu", number) for number in range(3)]
        for page in pages:
            store.allocate(page, numel, torch.float32)
        for number, page in enumerate(pages):
            store.write(page, noise(start + numel, number)[start:]).wait()
        for number, page in enumerate(pages):
            around = torch.full((start + numel + 5,), -1.0)
            store.read(page, around[start : start + numel]).wait()
            assert same(around[start : start + numel], noise(start + numel, number)[start:])
            assert (around[:start] == -1).all()
            assert (around[start + numel :] == -1).all()


def test_only_contiguous_host_memory_is_moved(tmp_path):
    with contextlib.closing(NvmeStore(tmp_path)) as store:
        page = Page(0, "mu", 0)
        store.allocate(page, 64, torch.float32)
        for tensor in (torch.zeros(128)[::2], torch.zeros(64, device="meta"), torch.zeros(8, 8)):
            for move in (store.read, store.write):
                with pytest.raises(StoreError, match="mu"):
                    move(page, tensor)


# The fault loop: every call of a store's life fails in turn, once and for ever.

FAULTS = {
    "EIO": fail(errno.EIO),
    "ENOSPC": fail(errno.ENOSPC),
    "EINVAL": fail(errno.EINVAL),
    "EBADF": fail(errno.EBADF),
    "short by all": short(0),
    "short by most": short(1000),
    "short by some": short(4096),
    "a bit": flip(12_345),
    "drop": drop(),
    "elsewhere": misplace(4096),
    "far away": misplace(2**20),
}
REFUSED = re.compile(r"offload\.path=|, .* has .* free|^what was written")
NAMED = re.compile(
    r"^page (master|mu) \d of unit 0 at offset \d+ of the file in \S+: "
    r"(E[A-Z]+ \(|the checksum differs|its data was lost by E)"
)


def live(folder: Path, files: FaultyFiles) -> int:
    """Open, allocate, write, read, write again, read again, close. How many errors there were, all of them typed.

    A page that is delivered holds what was last written with success; a page whose write failed is not delivered.
    """
    errors = 0
    try:
        store = NvmeStore(folder, capacity_bytes=2 * 12288, files=files)
    except StoreError as error:
        one_line(error, REFUSED)
        return 1
    with contextlib.closing(store):
        held = {}
        for page in PAGES:
            try:
                store.allocate(page, NUMEL, torch.float32)
                held[page] = torch.zeros(NUMEL)
            except StoreError as error:
                one_line(error, REFUSED)
                errors += 1
        for turn in range(2):
            for number, page in enumerate(list(held)):
                source = noise(NUMEL, 10 * turn + number)
                try:
                    store.write(page, source).wait()
                    held[page] = source
                except StoreError as error:
                    one_line(error, NAMED)
                    held[page] = None
                    errors += 1
            for page, expected in held.items():
                into = noise(NUMEL, 99)
                try:
                    store.read(page, into).wait()
                    assert expected is not None, f"{page} is delivered, and its write had failed"
                    assert same(into, expected)
                except StoreError as error:
                    one_line(error, NAMED)
                    errors += 1
    return errors


def one_line(error: StoreError, pattern: re.Pattern) -> None:
    assert pattern.search(str(error)), str(error)
    assert "\n" not in str(error)


DISKS = {
    "": {},
    "refuses the switch to direct": {"direct": "switch"},
    "refuses direct transfers": {"direct": "transfer"},
}


@pytest.mark.parametrize(
    ("name", "disk"), [(name, [*DISKS][number % len(DISKS)]) for number, name in enumerate(FAULTS)]
)
def test_the_nth_call_fails(tmp_path, name, disk):
    buffers = aligned_buffers()
    with whatever_is_warned():
        undisturbed = FaultyFiles(**DISKS[disk])
        assert live(tmp_path, undisturbed) == 0
        assert undisturbed.count > 20
        for at in range(1, undisturbed.count + 1):
            for on in (False, True):
                files = FaultyFiles(FAULTS[name], at=at, on=on, **DISKS[disk])
                live(tmp_path, files)
                assert not files.held, f"call {at} failing leaves a descriptor open"
    gc.collect()
    assert (open_files(tmp_path), aligned_buffers()) == ([], buffers)
    assert not any(path.stat().st_size for path in tmp_path.iterdir())  # a name stays if it cannot be unlinked


@pytest.mark.parametrize("nbytes", [1, 7, 511, 512])
def test_a_disk_that_moves_a_few_bytes_at_a_time_is_slow_and_right(tmp_path, nbytes):
    with whatever_is_warned():
        store = NvmeStore(tmp_path, files=FaultyFiles(short(nbytes), on=True))
        holds_what_is_written(store)
        store.close()


def test_a_page_whose_write_failed_is_lost_until_it_is_written_again(tmp_path):
    with contextlib.closing(NvmeStore(tmp_path, files=FaultyFiles(fail(errno.EIO), at=3, only="pwrite"))) as store:
        for page in PAGES[:2]:
            store.allocate(page, 3072, torch.float32)
        first, second, into = noise(3072, 1), noise(3072, 2), torch.empty(3072)
        expected = (
            r"page master 1 of unit 0 at offset 12288 of the file in \S+: EIO \(Input/output error\) while writing"
        )
        store.write(PAGES[0], first)
        with pytest.raises(StoreError, match=expected) as failed:
            store.write(PAGES[1], first)
        assert isinstance(failed.value.__cause__, OSError)
        for _ in range(2):
            with pytest.raises(
                StoreError, match=r"master 1 of unit 0 at offset 12288 of the file in \S+: its data was lost by EIO"
            ):
                store.read(PAGES[1], into)
        store.write(PAGES[1], second)
        store.read(PAGES[1], into)
        assert same(into, second)


def test_an_interrupted_write_is_a_lost_page(tmp_path):
    def interrupt(call: Call):
        raise KeyboardInterrupt

    with contextlib.closing(NvmeStore(tmp_path, files=FaultyFiles(interrupt, at=2, only="pwrite"))) as store:
        store.allocate(PAGES[0], NUMEL, torch.float32)
        with pytest.raises(KeyboardInterrupt):
            store.write(PAGES[0], noise(NUMEL, 1))
        with pytest.raises(StoreError, match="is not complete"):
            store.read(PAGES[0], torch.empty(NUMEL))
        holds_what_is_written(store)


class Gate:
    """Holds the first transfer with this name, once it is armed, until it is let go."""

    def __init__(self, name: str) -> None:
        self.armed = False
        self._name = name
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, call: Call) -> None:
        if self.armed and call.name == self._name:
            self.armed = False
            self.reached.set()
            assert self.go_on.wait(10)


@pytest.fixture
def crew():
    with ThreadPoolExecutor(8) as crew:
        yield crew


def test_what_is_under_way_when_a_store_is_closed_ends_well(tmp_path, crew):
    """And its descriptor stays its own until then."""
    gate = Gate("pread")
    files = FaultyFiles(before=gate)
    store, source, into = NvmeStore(tmp_path, files=files), noise(NUMEL, 1), torch.empty(NUMEL)
    store.allocate(PAGES[0], NUMEL, torch.float32)
    store.write(PAGES[0], source)
    gate.armed = True
    reading = crew.submit(store.read, PAGES[0], into)
    assert gate.reached.wait(10)
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.read(PAGES[0], into)
    assert len(files.held) == 1
    gate.go_on.set()
    reading.result(10)
    assert same(into, source)
    assert not files.held


@pytest.mark.parametrize("direct", ["yes", "transfer"])
def test_threads_move_different_pages_of_two_stores_in_one_folder_at_once(tmp_path, crew, direct):
    (tmp_path / "junk").write_bytes(b"somebody else's")
    with whatever_is_warned():
        stores = [NvmeStore(tmp_path, files=FaultyFiles(direct=direct)) for _ in range(2)]
    pages = [Page(0, "mu", number) for number in range(32)]
    for store in stores:
        for page in pages:
            store.allocate(page, NUMEL, torch.float32)

    def round_trip(number: int) -> bool:
        store, page, into = stores[number % 2], pages[number // 2], torch.empty(NUMEL)
        for turn in range(5):
            source = noise(NUMEL, 1000 * turn + number)
            store.write(page, source)
            store.read(page, into)
            if not same(into, source):
                return False
        return True

    assert all(crew.map(round_trip, range(64), timeout=LONG_S))
    for store in stores:
        store.close()
    assert os.listdir(tmp_path) == ["junk"]
    assert (tmp_path / "junk").read_bytes() == b"somebody else's"


# Folders that cannot be used.


BAD_FOLDERS = {
    "missing": ("no", "no file can be made: ENOENT"),
    "a file": ("file", "ENOTDIR"),
    "below a file": ("file/folder", "ENOTDIR"),
    "a device": ("/dev/null", "ENOTDIR"),
    "a link to nowhere": ("dangling", "ENOENT"),
    "a link to itself": ("loop", "ELOOP"),
    "a name too long": ("n" * 300, "ENAMETOOLONG"),
    "where nobody may make files": ("/proc/self", "no file can be made"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
@pytest.mark.parametrize("use", [NvmeStore, probe])
def test_a_bad_folder_is_refused_in_one_line(tmp_path, use, name):
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    folder, cause = BAD_FOLDERS[name]
    with pytest.raises(StoreError, match=cause) as refused:
        use(tmp_path / folder)
    one_line(refused.value, re.compile("offload.path"))
    assert not open_files(tmp_path)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENOSPC])
def test_a_folder_where_no_file_can_be_made_is_refused_by_cause(tmp_path, code):
    with pytest.raises(StoreError, match=rf"offload\.path={tmp_path}: no file can be made: {errno.errorcode[code]} \("):
        NvmeStore(tmp_path, files=FaultyFiles(fail(code), on=True, only="open"))


@pytest.mark.parametrize(
    ("fault", "name", "cause"),
    [(flip(3), "pwrite", "differently"), (flip(3), "pread", "differently"), (drop(), "pwrite", "the transfer ended")],
)
def test_a_disk_that_returns_something_else_is_refused_at_once(tmp_path, fault, name, cause):
    with pytest.raises(StoreError, match=f"offload.path={tmp_path}: the first block .*{cause}"):
        NvmeStore(tmp_path, files=FaultyFiles(fault, only=name))


def test_too_little_space_is_refused_with_both_numbers(tmp_path):
    free_bytes = shutil.disk_usage(tmp_path).free
    with pytest.raises(StoreError, match=r"needs [\d.]+ GiB, .* has [\d.]+ GiB free\. Set offload.path") as refused:
        NvmeStore(tmp_path, capacity_bytes=4 * free_bytes)
    assert str(tmp_path) in str(refused.value)


# The system's own limits, in processes of their own.


def refusal_of(call, *args, **named) -> str:
    with pytest.raises(StoreError) as refused:
        call(*args, **named)
    return str(refused.value)


def writes_beyond_the_limit_of_a_file(world, folder: Path) -> None:
    with whatever_is_warned():
        stores = [NvmeStore(folder, files=FaultyFiles(direct=direct)) for direct in ("yes", "switch")]
    for store in stores:
        for number in (0, 1):
            store.allocate(Page(0, "mu", number), 2048, torch.float32)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    source, into = torch.ones(2048), torch.empty(2048)
    for store in stores:
        store.write(Page(0, "mu", 0), source)
        code = "EINVAL" if store is stores[0] else "EFBIG"  # direct I/O cannot go on inside a block
        refused = refusal_of(store.write, Page(0, "mu", 1), source)
        assert re.fullmatch(rf"page mu 1 of unit 0 at offset 8192 of the file in .*: {code} \(.*while writing", refused)
        assert f"its data was lost by {code}" in refusal_of(store.read, Page(0, "mu", 1), into)
        store.read(Page(0, "mu", 0), into)
        assert torch.equal(into, source)
        assert "EFBIG" in refusal_of(store.allocate, Page(0, "mu", 2), 2048, torch.float32)
        store.close()


@pytest.mark.process
def test_a_real_short_write_at_the_limit_of_a_files_size(tmp_path):
    run_processes(1, writes_beyond_the_limit_of_a_file, tmp_path)
    assert not os.listdir(tmp_path)


def opens_a_thousand_pages(world, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    store = NvmeStore(folder, capacity_bytes=1000 * 4096)
    pages = [Page(0, "mu", number) for number in range(1000)]
    for page in pages:
        store.allocate(page, 64, torch.float32)
        store.write(page, torch.full((64,), float(page.number)))
    into = torch.empty(64)
    for page in pages:
        store.read(page, into)
        assert (into == page.number).all()
    assert len(open_files(folder)) == 1
    store.close()
    assert not open_files(folder)
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(65 - len(os.listdir("/proc/self/fd")))]
    assert "EMFILE" in refusal_of(NvmeStore, folder)
    for descriptor in taken:
        os.close(descriptor)


@pytest.mark.process
def test_a_thousand_pages_need_one_descriptor(tmp_path):
    run_processes(1, opens_a_thousand_pages, tmp_path)


def is_killed(world, folder: Path) -> None:
    store = NvmeStore(folder, capacity_bytes=2**28)
    store.allocate(Page(0, "mu", 0), 2048, torch.float32)
    store.write(Page(0, "mu", 0), torch.ones(2048))
    print(shutil.disk_usage(folder).free, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
def test_nothing_is_left_after_a_kill(tmp_path, capfd):
    with pytest.raises(RankFailedError, match="killed by signal 9"):
        run_processes(1, is_killed, tmp_path)
    assert os.listdir(tmp_path) == []
    held = int(capfd.readouterr().out.split()[-1])
    assert shutil.disk_usage(tmp_path).free - held > 2**27  # others use this disk at the same time


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory) -> list[str]:
    """A command to put before another, so that it sees 1 MiB of tmpfs on the folder that is its last argument."""
    folder = tmp_path_factory.mktemp("small")
    mount = 'mount -t tmpfs -o size=1m small "$0" && exec "$@"'
    before = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, str(folder)]
    try:
        tried = subprocess.run([*before, "true"], capture_output=True, text=True, timeout=LONG_S, check=False)
    except OSError as error:
        pytest.skip(f"no user namespaces here: {error}")
    if tried.returncode:
        pytest.skip(f"no user namespaces here: {tried.stderr.strip()}")
    return before


@pytest.mark.process
def test_a_real_full_disk(small_disk):
    """In a process of its own, because only it sees this disk."""
    code = "import sys; from tests.store.test_nvme import fills_the_disk; fills_the_disk(sys.argv[1])"
    command = [*small_disk, sys.executable, "-c", code, small_disk[-1]]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert run.returncode == 0, run.stderr


def fills_the_disk(folder: str) -> None:
    assert re.search(r"needs 2\.0 MiB.*1020\.0 KiB free", refusal_of(NvmeStore, folder, capacity_bytes=2**21))
    with whatever_is_warned():
        store = NvmeStore(folder, capacity_bytes=2**19)
    pages, into = [Page(0, "mu", number) for number in range(64)], torch.empty(4096)
    for page in pages[:32]:
        store.allocate(page, 4096, torch.float32)
    Path(folder, "others").write_bytes(bytes(2**19))
    for page in pages[:32]:  # its space was reserved
        store.write(page, torch.full((4096,), float(page.number)))
    for page in pages[:32]:
        store.read(page, into)
        assert (into == page.number).all()
    assert "needs 16.0 KiB" in refusal_of(store.allocate, pages[32], 4096, torch.float32)
    Path(folder, "others").unlink()
    store.allocate(pages[32], 4096, torch.float32)
    store.write(pages[32], into)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    assert "EROFS (Read-only file system)" in refusal_of(NvmeStore, folder)


# The probe.


class SlowDisk:
    """A clock that only transfers move on: each takes as long as a disk of this speed needs for it."""

    def __init__(self, bytes_per_s: float) -> None:
        self.now_s = 0.0
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self.closed = threading.Event()

    def __call__(self) -> float:
        return self.now_s

    def before(self, call: Call) -> None:
        if call.name == "close":
            self.closed.set()
        if call.name in ("pread", "pwrite"):
            with self._lock:
                self.now_s += len(call.args[1]) / self._bytes_per_s


@pytest.mark.parametrize(("bytes_per_s", "slowest_s"), [(5e9, 3.0), (1e9, 3.0), (1e8, 3.0), (2e7, 3.0)])
def test_the_probe_keeps_to_three_seconds(tmp_path, bytes_per_s, slowest_s):
    disk = SlowDisk(bytes_per_s)
    rate = probe(tmp_path, size_bytes=2**26, files=FaultyFiles(before=disk.before), clock=disk)
    assert disk.now_s < slowest_s
    assert 2 * rate == pytest.approx(bytes_per_s, rel=0.01)
    assert disk.closed.wait(10)


def test_the_probe_returns_in_time_when_the_disk_hangs(tmp_path):
    gate, closed = Gate("pwrite"), threading.Event()

    def before(call: Call) -> None:
        gate.armed = gate.armed or (call.name == "fallocate")
        gate(call)
        if call.name == "close":
            closed.set()

    assert probe(tmp_path, size_bytes=2**23, files=FaultyFiles(before=before), limit_s=0.9) == 0.0
    assert gate.reached.is_set()
    gate.go_on.set()
    assert closed.wait(10)


def test_the_probe_reads_what_was_written_and_moves_every_block_as_often(tmp_path):
    moved = {"pwrite": [], "pread": []}

    def before(call: Call) -> None:
        if call.name in moved:
            moved[call.name].append(call.args[2] // 2**22)

    probe(tmp_path, size_bytes=2**24, files=FaultyFiles(before=before), clock=lambda: 0.0)
    assert sorted(moved["pread"]) == sorted([0] + 4 * [0, 1])  # the first block is tried out
    assert sorted(moved["pwrite"]) == sorted([0, 0, 1] + 4 * [2, 3])


@pytest.mark.parametrize("name", ["open", "fallocate", "pwrite", "pread"])
def test_a_probe_that_fails_says_so(tmp_path, name):
    files = FaultyFiles(fail(errno.EIO), at=1 if name in ("open", "fallocate") else 2, only=name)
    with pytest.raises(StoreError, match=r"offload\.path=.*EIO"):
        probe(tmp_path, size_bytes=2**23, files=files)
    assert not files.held
    assert not os.listdir(tmp_path)


def test_a_probe_leaves_nothing(tmp_path):
    files, told = FaultyFiles(), []
    assert probe(tmp_path, size_bytes=2**24, files=files, progress=lambda _, done, total: told.append(done / total)) > 0
    assert told == [0, 1 / 3, 1]
    assert not files.held
    assert not os.listdir(tmp_path)
