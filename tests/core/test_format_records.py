"""A format of state is a record: one from outside of the package trains, saves and loads like those inside."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import zero
from tests.common.small import Setting, Small, slice_of, small_batch, small_loss
from zero.core.formats import PACKED_FORMATS, PackedFormat
from zero.core.layout import VECTOR, SlotPiece
from zero.core.moments import Moments
from zero.core.optim import Transform
from zero.engine.whole.read import full_state_dict
from zero.testing import run_ranks

PACKED = "blocks.0.linear.weight", "blocks.1.linear.weight", "blocks.2.linear.weight"

INFINITY = (("preset", "infinity"),)


class Half(PackedFormat):
    """A 16-bit format of the user's own: bf16 without a scale, a row for each 128 values."""

    name, block, head_bytes, vector_bytes, moved_bytes = "half", 2 * VECTOR, 0, 2 * VECTOR, 4.0

    def is_finite(self, codes: Tensor) -> bool:
        return bool(codes.view(torch.bfloat16).isfinite().all())

    def _encode(self, values: Tensor, rows: Tensor) -> None:
        rows.copy_(values.bfloat16().view(torch.uint8))

    def _expanded(self, rows: Tensor) -> Tensor:
        return rows.view(torch.bfloat16).float()


class NearestMoments(Moments):
    """Moments in 16 bits of the user's own: bf16, rounded to the nearest."""

    dtype = saved = torch.bfloat16

    @contextmanager
    def opened(
        self, kept: Sequence[Tensor], places: Sequence[Sequence[SlotPiece]], key: str
    ) -> Iterator[Sequence[Tensor]]:
        values = [page.float() for page in kept]
        yield values
        torch._foreach_copy_(list(kept), values)

    def page_of(self, values_K: Tensor) -> Tensor:
        return values_K.bfloat16()


def adamw_in_nearest(lr: float, **how: object) -> Transform:
    return replace(zero.adamw(lr, **how), kept=NearestMoments())


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
    moments = {f"mu {name}": value for name, value in full_state_dict(state, "mu").items()}
    return full_state_dict(state, "param") | moments, metrics.loss, metrics.grad_norm


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
    others = packed.but(stage=0), packed.but(stage=3), packed.but(offload=INFINITY)
    for number, other in enumerate(others):
        values, *numbers = run_ranks(size, trained, other, weights, tmp_path / str(number))[0]
        assert tuple(numbers) == expected[1:]
        assert all(torch.equal(values[name], value) for name, value in expected[0].items())


@pytest.mark.parametrize("size", [1, 2])
def test_moments_in_a_format_from_outside_have_the_same_bits_at_every_stage_and_tier(size, tmp_path):
    setting = Setting(clip=0.5, precision="bf16", optimizer=adamw_in_nearest)
    weights = first_values()
    values, *numbers = run_ranks(size, trained, setting.but(stage=0), weights)[0]
    others = setting.but(stage=3), setting.but(offload=(("preset", "cpu"),)), setting.but(offload=INFINITY)
    for number, other in enumerate(others):
        others_values, *others_numbers = run_ranks(size, trained, other, weights, tmp_path / str(number))[0]
        assert others_numbers == numbers
        assert all(torch.equal(others_values[name], value) for name, value in values.items())
    fp32 = run_ranks(size, trained, setting.but(optimizer=zero.adamw), weights)[0][0]
    moments = [name for name in values if name.startswith("mu ")]
    assert all(torch.equal(values[name], values[name].bfloat16().float()) for name in moments)
    assert not all(torch.equal(values[name], fp32[name]) for name in moments)
