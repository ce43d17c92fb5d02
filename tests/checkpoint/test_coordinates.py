"""A checkpoint beside other parallelism holds the coordinates of its ranks, and each coordinate loads its own."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zero
from tests.conftest import LONG_S
from tests.engine.test_beside import KINDS, Pair, grid, opened, pair_loss, rows_of
from zero.engine.whole.read import digest
from zero.errors import CheckpointError
from zero.testing import run_processes, run_ranks


def saved(_: zero.World, kind: str, folder: Path, steps: int) -> tuple[str, str]:
    mesh = grid(kind)
    with zero.World.from_mesh(mesh, "dp", timeout_s=LONG_S) as world:
        state, step = opened(world, kind, mesh)
        for number in range(steps):
            state, _ = step(state, [rows_of(number, 0)])
            path = zero.save(state, folder)
        return digest(state), str(path)


def loaded(_: zero.World, kind: str, folder: Path, shape: tuple[int, int]) -> tuple[str, int, str]:
    """Return the digest and step of the newest checkpoint, and the error of loading another coordinate's."""
    mesh = grid(kind, shape)
    with zero.World.from_mesh(mesh, "dp", timeout_s=LONG_S) as world:
        state, _ = opened(world, kind, mesh, stage=1)
        checkpoint, _ = zero.open_latest(world, folder)
        assert checkpoint is not None
        state = zero.load(state, checkpoint)
        other = folder / f"{KINDS[kind]}-{1 - world.coordinates[KINDS[kind]]}" / checkpoint.folder.name
        with pytest.raises(CheckpointError) as error:
            zero.load(state, zero.open_checkpoint(world, other))
        return digest(state), state.step, str(error.value)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_loads_its_own_coordinate_on_another_number_of_ranks(kind: str, tmp_path: Path):
    folder, name = tmp_path / "checkpoints", KINDS[kind]
    before = run_processes(4, saved, kind, folder, 2, timeout_s=LONG_S)
    assert [Path(path).relative_to(folder).as_posix() for _, path in before[:2]] == [
        f"{name}-{rank}/step-0000000002" for rank in range(2)
    ]
    for rank, (bits, step, error) in enumerate(run_processes(2, loaded, kind, folder, (1, 2), timeout_s=LONG_S)):
        assert (bits, step) == (before[rank][0], 2)
        assert f"has coordinates {{'{name}': {1 - rank}}}, but this rank {{'{name}': {rank}}}" in error


def common_steps(whole: zero.World, folder: Path, what: str) -> Any:
    """Save and open on two coordinates that are threads."""
    world = whole.part([whole.rank], f"dp {whole.rank}")
    world.coordinates = {"tp": whole.rank}
    with whole.exclusive():
        model = Pair(whole.rank)
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=world)
    state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, pair_loss)
    for _ in range(2):
        state, _ = step(state, [torch.ones(2, 5)])
        zero.save(state, folder)
    whole.barrier()
    if whole.rank == 1:
        newest = folder / "tp-1" / "step-0000000002"
        if what == "missing":
            newest.rename(folder / "elsewhere")
        if what == "damaged":
            file = next(newest.glob("*.safetensors"))
            *content, last = file.read_bytes()
            file.write_bytes(bytes([*content, last ^ 1]))
        if what == "mixed":
            newest.rename(folder / "elsewhere")
    whole.barrier()
    if what == "mixed":
        zero.save(state, folder)
    whole.barrier()
    if what == "mixed" and whole.rank == 1:
        shutil.rmtree(newest)
        (folder / "elsewhere").rename(newest)
    whole.barrier()
    checkpoint, rejected = zero.open_latest(world, folder / "tp-0" if what == "named" else folder)
    return checkpoint and checkpoint.step, len(rejected)


@pytest.mark.parametrize(
    ("what", "opened_step"), [("whole", (2, 0)), ("missing", (1, 0)), ("damaged", (1, 1)), ("mixed", (1, 1))]
)
def test_all_coordinates_open_the_newest_step_that_all_have(what: str, opened_step: Any, tmp_path: Path):
    assert run_ranks(2, common_steps, tmp_path / "checkpoints", what) == [opened_step] * 2


def test_the_folder_of_another_coordinate_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tp-0: is of one coordinate or of none\. Pass the folder"):
        run_ranks(2, common_steps, tmp_path / "checkpoints", "named")


def unnamed(whole: zero.World, folder: Path) -> None:
    world = whole.part([whole.rank], f"dp {whole.rank}")
    with whole.exclusive():
        model = Pair(0)
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=world, norm_groups=[whole.part([0, 1], "tp")])
    zero.save(zero.init(plan, zero.open_store(plan)), folder)


def test_a_world_without_coordinates_saves_no_part_of_a_model(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r": worlds without coordinates would write to one name\. Open the world"):
        run_ranks(2, unnamed, tmp_path)
    assert not [*tmp_path.iterdir()]


def as_one(world: zero.World, folder: Path, *, saves: bool) -> Any:
    """Save or open a checkpoint on the only rank of a norm group."""
    with world.exclusive(), zero.empty():
        model = Pair(0)
    alone = world.part([world.rank], "tp")
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=world, norm_groups=[alone], replicated=["equal.*"])
    state = zero.init(plan, zero.open_store(plan))
    return zero.save(state, folder).name if saves else zero.open_latest(world, folder)


def test_a_norm_group_of_one_rank_begins_and_saves_as_without_it(tmp_path: Path):
    assert run_ranks(2, partial(as_one, saves=True), tmp_path / "checkpoints") == ["step-0000000000"] * 2


def test_checkpoints_of_coordinates_are_not_passed_over_without_them(tmp_path: Path):
    run_ranks(2, common_steps, tmp_path / "checkpoints", "whole")
    with pytest.raises(CheckpointError, match=r"has checkpoints in tp-0, tp-1, of other coordinates than \{\}\."):
        run_ranks(1, partial(as_one, saves=False), tmp_path / "checkpoints")


def tracked(whole: zero.World, folder: Path) -> str:
    world = whole.part([whole.rank], f"dp {whole.rank}")
    world.coordinates = {"tp": whole.rank}
    with whole.exclusive():
        model = Pair(0)
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=world)
    state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, pair_loss)
    with zero.track(state, folder, timeline=False) as track:
        state, metrics = step(state, [torch.ones(2, 5)])
        track(state, metrics)
    return track.folder.relative_to(folder).as_posix()


def test_each_coordinate_tracks_into_a_folder_of_its_own(tmp_path: Path):
    assert run_ranks(2, tracked, tmp_path / "run") == ["tp-0", "tp-1"]
    assert all((tmp_path / "run" / name / "metrics.jsonl").exists() for name in ("tp-0", "tp-1"))
