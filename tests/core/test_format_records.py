"""A packed format is one file: a record from outside of the package trains, saves and loads like those inside."""

import pytest
import torch
from torch import Tensor

import zero
from tests.common.small import Setting, Small, slice_of, small_batch, small_loss
from zero.core.formats import PACKED_FORMATS, PackedFormat
from zero.core.layout import VECTOR
from zero.engine.whole.read import full_state_dict
from zero.testing import run_ranks

PACKED = "blocks.0.linear.weight", "blocks.1.linear.weight", "blocks.2.linear.weight"


class Half(PackedFormat):
    """A 16-bit format of the user's own: bf16 without a scale, a row for each 128 values."""

    name, block, head_bytes, vector_bytes, moved_bytes = "half", 2 * VECTOR, 0, 2 * VECTOR, 4.0

    def is_finite(self, codes: Tensor) -> bool:
        return bool(codes.view(torch.bfloat16).isfinite().all())

    def _encode(self, values: Tensor, rows: Tensor) -> None:
        rows.copy_(values.bfloat16().view(torch.uint8))

    def _expanded(self, rows: Tensor) -> Tensor:
        return rows.view(torch.bfloat16).float()


def frozen_base() -> Small:
    model = Small(width=37)
    for name in PACKED:
        model.get_parameter(name).requires_grad_(False)
    return model


def first_values() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {name: value.detach() for name, value in frozen_base().named_parameters()}


def trained(world: zero.World, setting: Setting, weights: dict[str, Tensor], folder=None):
    plan = setting.plan(world, frozen_base)
    state, step = zero.init(plan, zero.open_store(plan), weights=weights), zero.make_step(plan, small_loss)
    for number in range(3):
        state, metrics = step(state, slice_of(small_batch(number, 6), world, 1))
    if folder is not None:
        zero.save(state, folder)
        state.close()
        state, _ = setting.start(world, frozen_base)
        state = zero.load(state, zero.open_latest(world, folder)[0])
    return full_state_dict(state, "param"), metrics.loss, metrics.grad_norm


@pytest.fixture(autouse=True)
def _in_the_table(monkeypatch):
    monkeypatch.setitem(PACKED_FORMATS, "half", Half())


@pytest.mark.parametrize("size", [1, 2])
def test_a_format_from_outside_has_the_bits_of_its_values_at_every_stage_and_tier(size, tmp_path):
    setting = Setting(clip=0.5)
    weights = first_values()
    rounded = {name: value.bfloat16().float() if name in PACKED else value for name, value in weights.items()}
    expected = run_ranks(size, trained, setting, rounded)[0]
    packed = setting.but(frozen="half")
    others = packed.but(stage=0), packed.but(stage=3), packed.but(offload=(("preset", "infinity"),))
    for number, other in enumerate(others):
        values, *numbers = run_ranks(size, trained, other, weights, tmp_path / str(number))[0]
        assert tuple(numbers) == expected[1:]
        assert all(torch.equal(values[name], value) for name, value in expected[0].items())
