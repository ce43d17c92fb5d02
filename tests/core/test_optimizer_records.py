"""An optimizer is one file: a record from outside of the package trains like those inside."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import zero
from tests.common.small import Setting, slice_of, small_batch, small_loss, wide
from zero.core.groups import Group, Number, decay_matrices
from zero.core.optim import Transform, make_transform
from zero.core.optimizers import OPTIMIZERS
from zero.core.updates import PageBatch
from zero.engine.whole.read import digest
from zero.settings.optimizers import Optim
from zero.testing import run_ranks
from zero.user_loop.optimizers import TORCH


def sign_descent(lr: Number, *, beta: Number = 0.9, weight_decay: Number = 0.0, clip: float | None = None) -> Transform:
    """Make an optimizer of the user's own: steps of equal size along the sign of a mean of gradients."""

    def update(batch: PageBatch) -> None:
        batch.divide_grads()
        (means,), (decay,) = batch.moments, batch.settings.betas
        torch._foreach_mul_(means, decay)
        torch._foreach_add_(means, batch.grads)
        steps = torch._foreach_sign(means)
        torch._foreach_mul_(steps, batch.settings.lr)
        torch._foreach_sub_(batch.params, steps)

    groups: Sequence[Group] = ()
    return make_transform("sign", ("mu",), update, (), lr, {"beta": beta}, weight_decay, clip, decay_matrices, groups)


def trained(world: zero.World, setting: Setting) -> tuple[str, float]:
    state, step = setting.start(world, wide, small_loss)
    for number in range(3):
        state, metrics = step(state, slice_of(small_batch(number, 8), world, 1))
    return digest(state), metrics.loss


@pytest.mark.parametrize("size", [1, 2])
def test_an_optimizer_from_outside_gives_the_same_bits_at_every_stage_and_tier(size):
    setting = Setting(optimizer=sign_descent, lr=1e-3, clip=0.5, precision="bf16")
    expected = run_ranks(size, trained, setting.but(stage=0))
    for other in (
        *(setting.but(stage=stage) for stage in (1, 3)),
        *(setting.but(offload=(("preset", preset),)) for preset in ("cpu", "nvme", "infinity")),
    ):
        assert run_ranks(size, trained, other) == expected, other


def test_the_table_of_optimizers_is_that_of_settings_and_of_torch():
    sections: Any = Optim.__args__[0].__args__  # type: ignore[attr-defined]
    assert {section.model_fields["name"].default for section in sections} == set(OPTIMIZERS)
    assert set(TORCH.values()) == {name for name, rule in OPTIMIZERS.items() if rule.torch_class is not None}
    for section in sections:
        chosen = section()
        rule = OPTIMIZERS[chosen.name]
        assert set(rule.constants) <= set(chosen.constants) | {"nesterov", "eps"}
        shared = {"weight_decay": 0.0, "clip": None, "decay": decay_matrices}
        assert (
            rule.build(chosen, lambda step, lr=chosen.lr: lr, None, shared).name
            == rule.make(chosen.lr).name
            == chosen.name
        )
