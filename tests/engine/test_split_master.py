"""A run whose masters are split is the run whose masters are whole: values, metrics, edits and files, to the bit."""

import contextlib
import hashlib
import itertools
from pathlib import Path

import pytest
import torch

import zero
from tests.common.small import KiB, Setting, in_bf16, slice_of, small_batch, small_loss
from zero.checkpoint import load, open_checkpoint, save
from zero.engine.whole.read import digest, full_state_dict
from zero.testing import run_ranks

EVERYWHERE = [
    (stage, preset) for stage in range(4) for preset in ("none", "cpu", "nvme", "infinity")[: 3 + (stage == 3)]
]
"""Every stage with every preset that it may have."""


def ties(name: str, tensor: torch.Tensor) -> None:
    """First values of which half lie exactly between two bf16 numbers, below an even one or an odd one."""
    generator = torch.Generator().manual_seed(len(name))
    tensor.copy_(torch.randn(tensor.shape, generator=generator) / 8)
    bits = tensor.view(-1).view(torch.int32)
    bits[::2] = bits[::2] & ~0xFFFF | 0x8000


@contextlib.contextmanager
def opened(world, setting):
    plan = setting.plan(world)
    with contextlib.closing(zero.open_store(plan)) as store:
        yield zero.init(plan, store, weights=ties), zero.make_step(plan, small_loss)
        store.drain()


def check_rounding(state) -> None:
    """Check that the model computes with the master, rounded with halves up in magnitude."""
    masters, compute = full_state_dict(state), full_state_dict(state, "compute")
    for name, master in masters.items():
        assert torch.equal(compute[name], in_bf16(master)), name


def edited(state):
    """A tie goes into one parameter; gradients and moments stay."""
    with zero.gathered(state, ["blocks.0.linear.weight"], modify=True) as full:
        [value] = full.values()
        bits = value.view(-1).view(torch.int32)
        bits[::3] = bits[::3] & ~0xFFFF | 0x8000


def run(world, setting, folder):
    """Digests at the start, after training, an edit and more training; metrics; the bytes of the last checkpoint."""
    with opened(world, setting) as (state, step):
        check_rounding(state)
        records = [digest(state)]
        for number in range(4):
            state, metrics = step(state, slice_of(small_batch(number, 12), world, setting.accumulate))
            records.append(metrics)
            if number == 1:
                edited(state)
                records.append(digest(state))
        check_rounding(state)
        path = save(state, folder)
        files = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.glob("*.safetensors"))]
        return [*records, digest(state), files], path


@pytest.mark.parametrize(
    ("size", "stage", "preset"), [(1 + number % 2, *place) for number, place in enumerate(EVERYWHERE)][::2]
)
def test_split_and_whole_are_the_same_run(size, stage, preset, tmp_path: Path):
    """A state that either saved is loaded with any preset of any stage."""
    setting = Setting(
        stage=stage,
        precision="bf16",
        clip=0.5,
        accumulate=1 + stage % 2,
        offload=(("preset", preset),),
        page_bytes=(4, 8)[size - 1] * KiB,
        update=("lazy", "serial")[stage % 2],
    )
    told = {
        master: run_ranks(size, run, setting.but(master=master), tmp_path / master) for master in ("split", "whole")
    }
    assert [records for records, _ in told["split"]] == [records for records, _ in told["whole"]]
    [*_, saved, _], path = told["whole"][0]  # a file has the buffers of rank 0
    for master, other in itertools.product(("split", "whole"), EVERYWHERE):
        there = setting.but(stage=other[0], offload=(("preset", other[1]),), master=master)
        if (other[0] + EVERYWHERE.index(other)) % 3 == stage % 3:  # a third of them for each
            assert set(run_ranks(size, loaded, there, path)) == {saved}, there


def loaded(world, setting, path):
    with opened(world, setting) as (state, _):
        state = load(state, open_checkpoint(world, path))
        check_rounding(state)
        return digest(state)
