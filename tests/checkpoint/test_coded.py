"""A checkpoint holds codes as they are: they load at any setting to the bit, and other formats read their values."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.common.small import Setting, opened, slice_of, small_batch
from tests.engine.test_coded import CODED, INFINITY, build, expanded
from zero.checkpoint import load, open_checkpoint, save
from zero.core.formats import PACKED_FORMATS, PackedFormat
from zero.distributed.world import World
from zero.engine.whole.read import full_state_dict
from zero.errors import CheckpointError
from zero.formats.exports import export_checkpoint, whole_parameters
from zero.testing import run_ranks

NF4 = Setting(precision="bf16", frozen="nf4")


def stepped(world, state, step, numbers):
    for number in numbers:
        state, _ = step(state, slice_of(small_batch(number, 12), world, 1))
    return state


def full(state) -> dict[str, Tensor]:
    kinds = ("param", "compute", *state.plan.optimizer.moments)
    return {f"{kind} {name}": value for kind in kinds for name, value in full_state_dict(state, kind).items()}


def saved(world, setting, folder, steps=2, make=build):
    with opened(world, setting, make) as (state, step):
        state = stepped(world, state, step, range(steps))
        path = save(state, folder)
        return path, full(state), full(stepped(world, state, step, (steps, steps + 1)))


def loaded(world, setting, path, steps=(), **options):
    with opened(world, setting.but(seed=7), build) as (state, step):
        state = load(state, open_checkpoint(world, path), **options)
        return full(stepped(world, state, step, steps))


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert torch.equal(value, expected[name]), name


OTHERS = [
    NF4.but(stage=0),
    NF4.but(stage=2, bucket=2**16),
    NF4.but(offload=INFINITY, page_bytes=4096),
    NF4.but(units=("Small",)),
]


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_codes_load_at_any_setting(number, tmp_path: Path):
    """A run that goes on elsewhere ends as the one that never stopped."""
    [(path, there, after), *_] = run_ranks(2, saved, OTHERS[number - 1], tmp_path)
    for actual in run_ranks(2, loaded, OTHERS[number], path):
        assert_same(actual, there)
    assert_same(run_ranks(2, loaded, OTHERS[number], path, (2, 3))[0], after)
    for world in (1, 3):
        assert_same(run_ranks(world, loaded, OTHERS[number], path)[0], there)


def test_a_checkpoint_holds_the_codes_and_not_the_values(tmp_path: Path):
    [(path, _, _), *_] = run_ranks(2, saved, NF4, tmp_path)
    [entries] = run_ranks(1, lambda world: open_checkpoint(world, path).manifest.entries)
    kinds = {entry.name: entry.kind for entry in entries if entry.name in CODED}
    assert kinds == dict.fromkeys(CODED, "nf4")
    [(dtype, numel)] = {(entry.dtype, entry.numel) for entry in entries if entry.kind == "nf4"}
    assert (dtype, numel) == ("uint8", PACKED_FORMATS["nf4"].nbytes(13 * 13))


@pytest.mark.parametrize(("wrote", "reads"), [("nf4", "compute"), ("compute", "nf4"), ("nf4", "int8"), ("int8", "nf4")])
def test_another_form_of_frozen_parameters_reads_the_values(wrote, reads, tmp_path: Path):
    [(path, there, _), *_] = run_ranks(2, saved, NF4.but(frozen=wrote), tmp_path)
    expected = {name: there[f"param {name}"] for name in CODED}
    if wrote != "compute":  # codes are read in fp32
        first = run_ranks(1, first_values, NF4.but(frozen="compute", precision="fp32"))[0]
        expected = {name: expanded(first, wrote, "fp32")[name] for name in CODED}
    if reads != "compute":
        expected = expanded(expected, reads, "bf16")
    for actual in run_ranks(1, loaded, NF4.but(frozen=reads), path):
        for name in CODED:
            assert torch.equal(actual[f"param {name}"], expected[name].bfloat16().float()), name


def first_values(world, setting):
    with opened(world, setting, build) as (state, _):
        return full_state_dict(state)


@pytest.mark.parametrize("offload", [(), INFINITY])
def test_partial_keeps_codes_to_the_bit(offload, tmp_path: Path):
    [(path, there, _), *_] = run_ranks(2, saved, NF4, tmp_path)
    setting = NF4.but(offload=offload, bucket=2**20)  # a flat with kept and loaded codes
    [own, _] = run_ranks(2, first_values, setting.but(seed=7))
    for actual in run_ranks(2, partial(loaded, partial=["blocks.1.linear.weight"]), setting, path):
        for name in CODED:
            expected = own[name] if name == "blocks.1.linear.weight" else there[f"param {name}"]
            assert torch.equal(actual[f"param {name}"], expected), name


def test_an_export_has_the_values(tmp_path: Path):
    [(path, there, _), *_] = run_ranks(2, saved, NF4, tmp_path)
    exported = whole_parameters(run_ranks(1, open_checkpoint, path)[0])
    for name in CODED:
        assert torch.equal(exported[name].bfloat16().float(), there[f"param {name}"])


def test_codes_of_as_many_bytes_and_another_shape_are_refused_with_both_shapes(tmp_path: Path):
    """13 x 13 and 12 x 14 values have codes of 107 bytes."""

    def bent() -> torch.nn.Module:
        model = build()
        model.blocks[1].linear.weight = torch.nn.Parameter(torch.zeros(12, 14), requires_grad=False)
        return model

    [(path, _, _), *_] = run_ranks(1, saved, NF4, tmp_path)

    line = r"blocks.1.linear.weight \(13, 13\) for \(12, 14\) is of another shape than in the model"
    with opened(World.solo(), NF4, bent) as (state, _), pytest.raises(CheckpointError, match=line):
        load(state, open_checkpoint(World.solo(), path))


def half() -> torch.nn.Module:
    """A model whose codes have values in the middle of two numbers of bf16."""
    model = build()
    torch.nn.init.constant_(model.blocks[1].linear.weight, 1 + 2**-8)
    return model


def test_values_of_codes_are_rounded_as_a_gather_rounds_them(tmp_path: Path):
    """A run goes on from a base in bf16, or an export, with the bits that it was trained on."""
    name = "blocks.1.linear.weight"
    [(path, there, _)] = run_ranks(1, saved, NF4, tmp_path, 1, half)
    assert torch.equal(there[f"param {name}"], torch.ones(13, 13))  # the even neighbour
    [actual] = run_ranks(1, loaded, NF4.but(frozen="compute"), path)
    assert torch.equal(actual[f"param {name}"], there[f"param {name}"])
    [checkpoint] = run_ranks(1, open_checkpoint, path)
    export_checkpoint(checkpoint, "torch", tmp_path / "base.pt", dtype=torch.bfloat16)
    assert torch.equal(torch.load(tmp_path / "base.pt")[name].float(), there[f"param {name}"])


def test_codes_of_a_base_that_is_not_finite_are_not_loaded(tmp_path: Path, monkeypatch):
    def damaged() -> torch.nn.Module:
        model = build()
        torch.nn.init.constant_(model.blocks[1].linear.weight, torch.inf)
        return model

    with monkeypatch.context() as patch:
        patch.setattr(PackedFormat, "is_finite", lambda self, codes: True)
        [(path, _, _)] = run_ranks(1, saved, NF4, tmp_path, 0, damaged)
    with pytest.raises(CheckpointError, match=r"blocks.1.linear.weight has a value that is NaN, infinite or above"):
        run_ranks(1, loaded, NF4, path)


def test_a_parameter_that_trains_now_begins_with_its_values(tmp_path: Path):
    name = "blocks.1.linear.weight"

    def unfrozen() -> torch.nn.Module:
        model = build()
        model.get_parameter(name).requires_grad_(True)
        return model

    [(path, there, _)] = run_ranks(1, saved, NF4, tmp_path)
    with opened(World.solo(), NF4, unfrozen) as (state, _):
        checkpoint = open_checkpoint(World.solo(), path)
        with pytest.raises(CheckpointError) as caught:
            load(state, checkpoint)
        assert str(caught.value).endswith(
            f"mu/{name}, nu/{name} are missing; {name} uint8 is of another dtype than in the model. If you expect "
            "that, name them in partial=[...] of zero.load, or in checkpoint.partial, and those of another dtype in "
            "convert=[...] of zero.load, or in checkpoint.convert."
        )
        state = load(state, checkpoint, partial=[f"[mn]u/{name}"], convert=[name])
        assert torch.equal(full_state_dict(state)[name], there[f"param {name}"])
