"""Checkpoints of one run share the file of frozen values; each of them stays complete by itself."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

import zero
from tests.checkpoint.test_coded import NF4, assert_same, full, stepped
from tests.common.small import Setting, Small, opened
from tests.engine.test_coded import build
from zero.checkpoint import Root, Saving, load, open_checkpoint, save, snapshot_bytes
from zero.checkpoint.files.disk import Disk
from zero.distributed.world import World
from zero.testing import run_processes, run_ranks

BF16 = Setting(precision="bf16")


def files_of(folder: Path) -> dict[str, int]:
    """Name -> inode of the files with frozen values and of their indexes."""
    return {path.name: path.stat().st_ino for path in folder.glob("frozen-*")}


def train_and_save(world, setting, root: Path):
    """Save after steps 2, 3 and 4; return the folders and the values then."""
    folders, values = [], []
    with opened(world, setting, build) as (state, step):
        state = stepped(world, state, step, (0,))
        for number in (1, 2, 3):
            state = stepped(world, state, step, (number,))
            folders.append(save(state, root))
            values.append(full(state))
    return folders, values


def restored(world, setting, folder):
    with opened(world, setting.but(seed=7), build) as (state, _):
        return full(load(state, open_checkpoint(world, folder)))


@pytest.mark.parametrize(
    "setting", [NF4, BF16, NF4.but(offload=(("preset", "infinity"),))], ids=["nf4", "bf16", "disk"]
)
def test_frozen_values_are_on_the_disk_once_and_every_step_is_complete_alone(setting, tmp_path: Path):
    folders, values = run_ranks(2, train_and_save, setting, tmp_path / "root")[0]
    first = files_of(folders[0])
    assert len(first) == 4, "two ranks, a file and an index each"
    assert all(files_of(folder) == first for folder in folders)
    frozen = sum(path.stat().st_size for path in folders[0].glob("frozen-*"))
    stored = {path.stat().st_ino: path.stat().st_size for folder in folders for path in folder.iterdir()}
    apparent = sum(path.stat().st_size for folder in folders for path in folder.iterdir())
    assert sum(stored.values()) == apparent - 2 * frozen
    for folder in folders[:2]:
        shutil.rmtree(folder)
    copy = tmp_path / "copied"
    shutil.copytree(folders[2], copy)
    for size, path in ((2, folders[2]), (1, copy), (3, copy)):
        assert_same(run_ranks(size, restored, setting, path)[0], values[2])


def resume_and_save(world, setting, folder: Path, root: Path):
    with opened(world, setting.but(seed=7), build) as (state, step):
        state = load(state, open_checkpoint(world, folder))
        return save(stepped(world, state, step, (4,)), root)


def test_a_resumed_run_goes_on_with_the_file_of_its_checkpoint(tmp_path: Path):
    root = tmp_path / "root"
    folders, _ = run_processes(2, train_and_save, NF4, root)[0]
    first = files_of(folders[0])
    for folder in (root, tmp_path / "of another run"):
        assert files_of(run_processes(2, resume_and_save, NF4, folders[2], folder)[0]) == first
    for size, setting in ((1, NF4), (2, BF16)):
        fresh = files_of(run_ranks(size, resume_and_save, setting, folders[1], root)[0])
        assert set(fresh.values()).isdisjoint(first.values()), "another number of ranks, or another form"


def test_an_edit_of_frozen_values_is_in_the_next_checkpoint(tmp_path: Path):
    world, name = World.solo(), "blocks.0.linear.weight"
    with opened(world, BF16, build) as (state, step):
        before = save(state, tmp_path)
        zero.set_full(state, "blocks.0.gain", torch.tensor(0.5))
        state = stepped(world, state, step, (0,))
        assert files_of(save(state, tmp_path)) == files_of(before), "an edit of what trains"
        zero.set_full(state, name, torch.full((13, 13), 0.5))
        state = stepped(world, state, step, (1,))
        after = save(state, tmp_path)
        assert set(files_of(before).values()).isdisjoint(files_of(after).values())
    assert bool((restored(world, BF16, after)[f"param {name}"] == 0.5).all())
    assert not bool((restored(world, BF16, before)[f"param {name}"] == 0.5).all())


def every_part_trains() -> torch.nn.Module:
    return Small().requires_grad_(True)


def frozen_bias() -> torch.nn.Module:
    model = every_part_trains()
    model.blocks[0].linear.bias.requires_grad_(False)
    return model


def load_with_a_frozen_bias(world, path: Path, root: Path):
    with opened(world, BF16, frozen_bias) as (state, _):
        name = "blocks.0.linear.bias"
        state = load(state, open_checkpoint(world, path), partial=[f"[mn]u/{name}"], convert=[name])
        return files_of(save(state, root))


def test_a_parameter_that_trained_in_the_checkpoint_may_be_frozen_on_one_rank_of_several(tmp_path: Path):
    def all_train(world):
        with opened(world, BF16, every_part_trains) as (state, _):
            return save(state, tmp_path / "trained")

    path = run_ranks(3, all_train)[0]
    assert not files_of(path)
    assert len(run_ranks(3, load_with_a_frozen_bias, path, tmp_path / "root")[0]) == 6


class NoLinks(Disk):
    def __init__(self, code: int = errno.EPERM, times: int = 99) -> None:
        self.code, self.times, self.asked = code, times, 0

    def link(self, old: Path, new: Path) -> None:
        self.asked += 1
        if self.asked <= self.times:
            raise OSError(self.code, os.strerror(self.code))
        super().link(old, new)


@pytest.mark.parametrize(("behind", "code"), [(False, errno.EIO), (True, errno.EIO), (False, errno.EPERM)])
def test_a_link_that_fails_once_costs_one_copy(behind, code, tmp_path: Path, monkeypatch):
    """The system refuses links to files of other users, as if the disk had no links."""
    if code == errno.EPERM:
        monkeypatch.setattr(NoLinks, "owner", lambda disk, path: os.geteuid() + 1)
    world, root = World.solo(), Root(tmp_path / "root", NoLinks(code, times=1))
    with opened(world, NF4, build) as (state, step):
        folders = []
        for number in range(3):
            state = stepped(world, state, step, (number,))
            folders.append(Saving(state, root, behind=behind).finish())
        values = full(state)
    assert files_of(folders[0]) != files_of(folders[1]) == files_of(folders[2])
    assert_same(restored(world, NF4, folders[2]), values)


def test_a_file_that_was_cut_short_is_written_anew(tmp_path: Path):
    world = World.solo()
    with opened(world, NF4, build) as (state, step):
        (path,) = save(state, tmp_path).glob("frozen-*.safetensors")
        os.truncate(path, 100)
        state = stepped(world, state, step, (0,))
        folder, values = save(state, tmp_path), full(state)
    assert_same(restored(world, NF4, folder), values)


def test_a_disk_without_links_gets_whole_files_and_is_asked_once(tmp_path: Path):
    world, root = World.solo(), Root(tmp_path / "root", NoLinks())
    with opened(world, NF4, build) as (state, step):
        folders = []
        for number in range(3):
            state = stepped(world, state, step, (number,))
            folders.append(save(state, root))
        values = full(state)
        assert snapshot_bytes(state, root) > snapshot_bytes(state, Root(root.path)), "the frozen values are copied"
    assert root.disk.asked == 1
    assert len({inode for folder in folders for inode in files_of(folder).values()}) == 6
    assert_same(restored(world, NF4, folders[2]), values)


@pytest.mark.parametrize("behind", [False, True])
def test_a_checkpoint_that_was_removed_or_replaced_is_not_linked(behind, tmp_path: Path):
    world = World.solo()
    with opened(world, BF16, build) as (state, step):
        first = save(state, tmp_path)
        with opened(world, BF16.but(seed=9), build) as (other, _):
            assert save(other, tmp_path) == first, "the same step of another run"
        replaced = files_of(first)
        for number in range(2):
            state = stepped(world, state, step, (number,))
            folder = Saving(state, tmp_path, behind=behind).finish()
            assert set(files_of(folder).values()).isdisjoint(replaced.values())
            values = full(state)
            assert_same(restored(world, BF16, folder), values)
            shutil.rmtree(folder)
