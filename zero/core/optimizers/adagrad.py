"""Adagrad, as torch's: steps divided by the root of the sum of squared gradients.

Source: Duchi et al. 2011, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization".
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zero.core.groups import Group, Mask, Number, decay_matrices
from zero.core.lr_schedule import Schedule
from zero.core.optim import Fused, Transform, constant, make_transform
from zero.core.optimizers.rule import PLAIN, Rule
from zero.core.updates import GroupSettings, PageBatch

if TYPE_CHECKING:
    import triton.language as tl

    from zero.core.tile import Tile


def adagrad(
    lr: Number,
    *,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: Number = 0.0,
    clip: float | None = None,
    decay: Mask = decay_matrices,
    groups: Sequence[Group] = (),
) -> Transform:
    """Make Adagrad, as `torch.optim.Adagrad`: steps divided by the root of the sum of squared gradients.

    Other arguments as in `adamw`.

    Args:
        lr_decay: the learning rate of step t is lr / (1 + (t - 1) x lr_decay); 0 or more.
    """
    constants = constant("lr_decay", lr_decay), constant("eps", eps)
    update, fused = partial(_update, *constants), Fused(_tile, partial(_numbers, *constants))
    return make_transform("adagrad", ("nu",), update, constants, lr, {}, weight_decay, clip, decay, groups, fused=fused)


def _update(lr_decay: float, eps: float, batch: PageBatch) -> None:
    params, grads, now = batch.params, batch.grads, batch.settings
    (nus,) = batch.moments
    batch.divide_grads()
    if now.weight_decay:
        torch._foreach_add_(grads, torch._foreach_mul(params, now.weight_decay))
    torch._foreach_add_(nus, torch._foreach_mul(grads, grads))
    roots = torch._foreach_sqrt(nus)
    torch._foreach_add_(roots, eps)
    torch._foreach_mul_(grads, now.lr / (1 + (now.step - 1) * lr_decay))
    torch._foreach_div_(grads, roots)
    torch._foreach_sub_(params, grads)


def _numbers(lr_decay: float, eps: float, now: GroupSettings) -> tuple[float, ...]:
    return now.lr / (1 + (now.step - 1) * lr_decay), now.weight_decay, eps


def _tile(param: "Tile", gradient: "Tile", numbers: "Tile", square: "Tile") -> "tuple[Tile, Tile]":
    decay = tl.load(numbers + 1)
    gradient = tl.where(decay != 0.0, gradient + param * decay, gradient)
    square = square + gradient * gradient
    return param - tl.div_rn(gradient * tl.load(numbers), tl.sqrt_rn(square) + tl.load(numbers + 2)), square


def _build(chosen: Any, lr: Schedule, _momentum: Schedule | None, shared: Mapping[str, Any]) -> Transform:
    return adagrad(lr, eps=chosen.eps, **shared)


ADAGRAD = Rule(
    adagrad,
    _build,
    torch.optim.Adagrad,
    ("eps", "lr_decay"),
    {**PLAIN, "initial_accumulator_value": 0},
)
