"""Lion: steps along the sign of a momentum.

Source: Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms".
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zero.core.groups import Group, Mask, Number, decay_matrices
from zero.core.lr_schedule import Schedule
from zero.core.optim import Fused, Transform, make_transform
from zero.core.optimizers.rule import Rule
from zero.core.updates import GroupSettings, PageBatch

if TYPE_CHECKING:
    import triton.language as tl

    from zero.core.tile import Tile


def lion(
    lr: Number,
    *,
    beta1: Number = 0.9,
    beta2: Number = 0.99,
    weight_decay: Number = 0.0,
    clip: float | None = None,
    decay: Mask = decay_matrices,
    groups: Sequence[Group] = (),
) -> Transform:
    """Make Lion: steps along the sign of a momentum, with decoupled weight decay. Other arguments as in `adamw`.

    Args:
        lr: learning rate, usually a third to a tenth of AdamW's.
        beta1: weight of the momentum in the direction of the step, beside 1 - beta1 for the gradient; 0 or more and
            less than 1; a number or a function of the step.
        beta2: decay of the momentum, 0 or more and less than 1; a number or a function of the step.
    """
    betas = {"beta1": beta1, "beta2": beta2}
    return make_transform(
        "lion", ("mu",), _update, (), lr, betas, weight_decay, clip, decay, groups, fused=Fused(_tile, _numbers)
    )


def _update(batch: PageBatch) -> None:
    params, grads, now = batch.params, batch.grads, batch.settings
    (mus,), (beta1, beta2) = batch.moments, now.betas
    batch.divide_grads()
    # sign(beta1 mu + (1 - beta1) grad), computed from the sum divided by 1 - beta1 to save a temporary tensor.
    directions = torch._foreach_mul(mus, beta1 / (1 - beta1))
    torch._foreach_add_(directions, grads)
    torch._foreach_sign_(directions)
    if now.weight_decay:
        torch._foreach_mul_(params, 1 - now.lr * now.weight_decay)
    torch._foreach_mul_(directions, now.lr)
    torch._foreach_sub_(params, directions)
    torch._foreach_mul_(mus, beta2)
    torch._foreach_mul_(grads, 1 - beta2)
    torch._foreach_add_(mus, grads)


def _numbers(now: GroupSettings) -> tuple[float, ...]:
    beta1, beta2 = now.betas
    return now.lr, 1 - now.lr * now.weight_decay, beta1 / (1 - beta1), beta2, 1 - beta2


def _tile(param: "Tile", gradient: "Tile", numbers: "Tile", mean: "Tile") -> "tuple[Tile, Tile]":
    direction = mean * tl.load(numbers + 2) + gradient
    sign = (direction > 0).to(tl.float32) - (direction < 0).to(tl.float32)
    new = param * tl.load(numbers + 1) - sign * tl.load(numbers)
    return new, mean * tl.load(numbers + 3) + gradient * tl.load(numbers + 4)


def _build(chosen: Any, lr: Schedule, momentum: Schedule | None, shared: Mapping[str, Any]) -> Transform:
    return lion(lr, beta1=momentum or chosen.beta1, beta2=chosen.beta2, **shared)


LION = Rule(lion, _build)
