"""Several disks as one: each takes pages in proportion to its rate, and one that fails is named."""

import itertools
import runpy
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st

import zero
from tests.common.small import KiB, Setting, slice_of, small_batch, small_loss, train_small, wide
from tests.faults.disks import ThrottledStore
from zero.engine.open_store import ROOM_SHARE
from zero.engine.plan.placing import thread_count
from zero.engine.whole.read import digest
from zero.errors import SettingError, StoreError
from zero.platform.host_memory import aligned_zeros
from zero.platform.run_files import free_by_file_system
from zero.store import MemoryStore, NvmeStore, Page, PageGroup, PrefetchStore, Store, Tiers, spread
from zero.testing import run_ranks

PAGE_BYTES, COUNT = 64 * KiB, 60


PAGES = st.lists(st.sampled_from([1, 2, 3, 4, 16]), min_size=1, max_size=3)
"""Of one kind in one unit: in blocks, so that the last page of a unit may be shorter."""


@settings(deadline=None)
@given(
    st.lists(PAGES, min_size=1, max_size=5),
    st.integers(1, 40),
    st.lists(st.floats(0.05, 20), min_size=1, max_size=5),
)
def test_every_disk_has_its_share_of_every_kind_at_any_time(kinds, units, rates):
    """None would have been done sooner with the last page of another."""
    pages = {
        Page(unit, f"kind {kind}", number): 4096 * blocks
        for unit in range(units)
        for kind, sizes in enumerate(kinds)
        for number, blocks in enumerate(sizes)
    }
    where = spread(pages, rates)
    taken = {page.kind: [0] * len(rates) for page in pages}
    for page, nbytes in pages.items():
        taken[page.kind][int(where[page])] += nbytes
        done_s = taken[page.kind][int(where[page])] / rates[int(where[page])]
        for disk, rate in enumerate(rates):
            assert disk == int(where[page]) or done_s <= (taken[page.kind][disk] + nbytes) / rate


def test_disks_that_are_alike_take_turns():
    where = spread({Page(0, "mu", number): 4096 for number in range(6)}, [1.0, 1.0])
    assert "".join(where.values()) == "010101"


def test_disks_that_are_alike_take_turns_with_every_kind():
    """The pages that a phase reads, such as parameters in backward, and those of an update, are on both disks."""
    kinds = {"param": 2, "low": 2, "mu": 4, "nu": 4, "grad": 4}
    where = spread({Page(unit, kind, 0): 4096 * size for unit in range(6) for kind, size in kinds.items()}, [1.0, 1.0])
    for kind in kinds:
        assert "".join(where[Page(unit, kind, 0)] for unit in range(6)) in ("010101", "101010")
    for unit in range(6):
        assert len({where[Page(unit, kind, 0)] for kind in kinds}) == 2


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.05, 20), st.integers(1, 64)), min_size=2, max_size=4),
    st.integers(1, 40),
)
def test_what_a_disk_has_no_room_for_goes_to_the_others(disks, units):
    """No disk takes more than its room, and no full disk more than its rate."""
    rates, room = [rate for rate, _ in disks], [4096 * 4 * pages for _, pages in disks]
    pages = {Page(unit, kind, 0): 4096 * 4 for unit in range(units) for kind in ("mu", "nu")}
    where = spread(pages, rates, room)
    taken = [sum(n for page, n in pages.items() if where[page] == str(disk)) for disk in range(len(disks))]
    if sum(taken) > sum(room):
        return
    assert all(used <= most for used, most in zip(taken, room, strict=True))
    below = [used / rate for used, rate, most in zip(taken, rates, room, strict=True) if used < most]
    for time_s, (other, rate) in itertools.product(below, zip(taken, rates, strict=True)):
        assert other / rate <= time_s + 3 * 4096 * 4 * (1 / rate + 1 / min(rates)), (
            "a full disk took more than its rate"
        )


def update_s(disks: int) -> float:
    """Seconds for one update of all groups, on disks of 20 MB/s each."""
    pages = [Page(0, "mu", number) for number in range(COUNT)]
    inner = MemoryStore(torch.device("cpu"))
    stores: dict[str, Store] = {str(disk): ThrottledStore(inner, 20e6) for disk in range(disks)}
    where = spread(dict.fromkeys(pages, PAGE_BYTES), [1.0] * disks)
    slots = [aligned_zeros(PAGE_BYTES, torch.uint8, torch.device("cpu")) for _ in range(7)]
    store = PrefetchStore(Tiers(stores, where.__getitem__), slots, threads=4, read_ahead=3)
    groups = [PageGroup(0, number, (page,)) for number, page in enumerate(pages)]
    for page in pages:
        store.allocate(page, PAGE_BYTES // 4, torch.float32)
    store.expect(groups)
    begin_s = time.perf_counter()
    for number, group in enumerate(groups):
        store.modify(group, lambda tensors: None, (number,))
    store.drain()
    taken_s = time.perf_counter() - begin_s
    store.close()
    return taken_s


@pytest.mark.alone
def test_two_disks_take_at_most_055_of_the_time_of_one():
    one_s, two_s = (min(update_s(disks) for _ in range(3)) for disks in (1, 2))
    print(f"{two_s / one_s:.3f}")
    assert two_s <= 0.55 * one_s


@pytest.mark.alone
def test_one_rank_fills_four_drives():
    """Drives of 7 GB/s in and 3 out, at a fiftieth of their rates, as `benchmarks/drives.py` measures them."""
    threads = thread_count(zero.Offload("nvme", path=["/a", "/b", "/c", "/d"]))
    options = SimpleNamespace(
        drives=4, read_gbps=0.14, write_gbps=0.06, page_mib=1, kinds=3, groups=120, no_verify=False
    )
    program = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks/drives.py"))
    reached = program["rates"](options, threads)
    print(threads, reached)
    assert reached["read"] >= 0.9 * 4 * 0.14e9
    assert min(reached["write"], reached["modify"]) >= 0.9 * 4 * 0.06e9


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.mkdir()
    return paths


def train_on(world: zero.World, setting: Setting, folders: list[Path]):
    plan = setting.plan(world, wide)
    plan.offload = plan.offload.model_copy(update={"path": tuple(str(folder) for folder in folders)})
    store = zero.open_store(plan)
    state, step, metrics = zero.init(plan, store, seed=setting.seed), zero.make_step(plan, small_loss), []
    for number in range(3):
        state, step_metrics = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
        metrics.append(step_metrics)
    result = digest(state), metrics
    store.drain()
    store.close()
    return result


@pytest.mark.parametrize("preset", ["nvme", "infinity"])
def test_the_number_of_disks_changes_no_bit(preset, folders):
    setting = Setting(precision="bf16", clip=0.5, page_bytes=4 * KiB)
    expected = run_ranks(2, train_small, setting, 3, wide)
    setting = setting.but(offload=(("preset", preset),))
    for count in (1, 2):
        assert run_ranks(2, train_on, setting, folders[:count]) == expected


def test_disks_that_could_not_be_measured_in_time_take_equal_shares(folders, monkeypatch):
    """A probe that got no answer returns 0."""
    monkeypatch.setattr("zero.engine.open_store.PROBED_BYTES", 1)
    monkeypatch.setattr("zero.engine.open_store.probe", lambda folder, **options: 0.0)
    setting = Setting(offload=(("preset", "nvme"),), clip=0.5, page_bytes=4 * KiB)
    expected = run_ranks(1, train_small, setting.but(offload=()), 3, wide)
    assert run_ranks(1, train_on, setting, folders) == expected


def free(monkeypatch, *pages: int) -> None:
    """As if the folders were on disks of their own, with room for so many pages."""
    monkeypatch.setattr(
        "zero.engine.open_store.free_by_file_system",
        lambda folders: [([folder], 4 * KiB * room) for folder, room in zip(folders, pages, strict=True)],
    )


def on_disk(world: zero.World, setting: Setting, folders: list[Path]) -> list[int]:
    """Pages of a store in each of the folders."""
    plan = setting.plan(world, wide)
    plan.offload = plan.offload.model_copy(update={"path": tuple(str(folder) for folder in folders)})
    store = zero.open_store(plan)
    disks = store.inner.stores["nvme"].stores
    page_counts = [disk.allocated_bytes // (4 * KiB) for disk in disks.values()]
    store.close()
    return page_counts


def test_a_disk_with_little_room_takes_what_it_has_room_for(folders, monkeypatch):
    """Its equal share does not fit, but by its rate it takes less; or with the same rate the other takes more."""
    monkeypatch.setattr("zero.engine.open_store.PROBED_BYTES", 1)
    monkeypatch.setattr("zero.engine.open_store.LEAST_PROBED_BYTES", 1)
    rates = {"a": 4.0, "b": 1.0}
    monkeypatch.setattr("zero.engine.open_store.probe", lambda folder, **options: rates[folder.name])
    setting = Setting(offload=(("preset", "nvme"),), page_bytes=4 * KiB)
    fast, slow = run_ranks(1, on_disk, setting, folders)[0]
    count = fast + slow
    assert abs(slow - count / 5) <= 3
    free(monkeypatch, count, count // 4)
    assert run_ranks(1, on_disk, setting, folders)[0] == [fast, slow]
    rates["a"] = 1.0
    free(monkeypatch, count, count // 4)
    assert sum(page_counts := run_ranks(1, on_disk, setting, folders)[0]) == count
    assert count / 4 * ROOM_SHARE - 3 <= page_counts[1] <= count // 4
    free(monkeypatch, count - count // 4, count // 4)  # not a page more than all of it
    assert run_ranks(1, on_disk, setting, folders)[0] == [count - count // 4, count // 4]


def test_too_little_room_in_all_folders_together_is_refused_with_every_folder(folders, tmp_path, monkeypatch):
    monkeypatch.setattr("zero.engine.open_store.PROBED_BYTES", 1)
    monkeypatch.setattr(
        "zero.engine.open_store.probe", lambda folder, **how: pytest.fail("measured before it was refused")
    )
    free(monkeypatch, 2, 1)
    setting = Setting(offload=(("preset", "nvme"),), page_bytes=4 * KiB)
    told = rf"needs .* KiB, but only 8.0 KiB in {folders[0]}, 4.0 KiB in {folders[1]} are free. Set offload.path to"
    with pytest.raises(StoreError, match=told):
        run_ranks(1, on_disk, setting, folders)
    with pytest.raises(StoreError, match=r"missing: no file can be made: ENOENT"):
        run_ranks(1, on_disk, setting, [*folders, tmp_path / "missing"])


def test_two_names_of_one_folder_have_all_its_room(tmp_path, monkeypatch):
    setting = Setting(offload=(("preset", "nvme"),), page_bytes=4 * KiB)
    count = sum(run_ranks(1, on_disk, setting, [tmp_path, tmp_path])[0])
    need = count + count // 4
    monkeypatch.setattr("zero.engine.open_store.free_by_file_system", lambda folders: [(folders, need * 4 * KiB)])
    assert sum(run_ranks(1, on_disk, setting, [tmp_path, tmp_path])[0]) == count


def test_folders_on_one_disk_share_what_it_has_free(folders, tmp_path):
    [(those, free_bytes)] = free_by_file_system(folders)
    assert those == folders
    assert free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


def test_a_disk_that_fails_is_named(tmp_path):
    """A page that one of them lost is reported with the folder that it was in."""
    folders = {"0": tmp_path / "good", "1": tmp_path / "bad"}
    for folder in folders.values():
        folder.mkdir()
    pages = [Page(0, "mu", number) for number in range(4)]
    disks = {name: NvmeStore(folder) for name, folder in folders.items()}
    store = Tiers(disks, spread(dict.fromkeys(pages, 4096), [1.0, 1.0]).__getitem__)
    source = torch.arange(1024.0)
    for page in pages:
        store.allocate(page, 1024, torch.float32)
        store.write(page, source).wait()
    disks["1"]._entries[pages[1]].crc ^= 1  # as if the disk had changed a bit
    store.read(pages[0], torch.empty(1024)).wait()
    with pytest.raises(StoreError, match=rf"mu 1 of unit 0 .* in {tmp_path / 'bad'}: the checksum differs"):
        store.read(pages[1], torch.empty(1024)).wait()
    store.close()


def test_a_list_of_paths_is_a_setting(tmp_path):
    assert zero.Offload("nvme", path=["/a", "/b"]).paths == ("/a", "/b")
    assert zero.Offload("nvme").paths == (".",)
    with pytest.raises(SettingError, match="has /a twice"):
        zero.Offload("nvme", path=["/a", "/a"])
    with pytest.raises(SettingError, match=r"offload\.path"):
        zero.Offload("nvme", path=[])
