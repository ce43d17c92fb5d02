"""Adagrad, as torch's: steps divided by the root of the sum of squared gradients.

Source: Duchi et al. 2011, "Adaptive Subgradient Methods for Online Learning and Stochastic Optimization".
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from zero.core.groups import Group, Mask, Number, decay_matrices
from zero.core.lr_schedule import Schedule
from zero.core.optim import Transform, constant, make_transform
from zero.core.optimizers.rule import PLAIN, Rule
from zero.core.updates import PageBatch


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
    update = partial(_update, lr_decay, eps)
    return make_transform("adagrad", ("nu",), update, constants, lr, {}, weight_decay, clip, decay, groups)


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


def _build(chosen: Any, lr: Schedule, _momentum: Schedule | None, shared: Mapping[str, Any]) -> Transform:
    return adagrad(lr, eps=chosen.eps, **shared)


ADAGRAD = Rule(
    adagrad,
    _build,
    torch.optim.Adagrad,
    ("eps", "lr_decay"),
    {**PLAIN, "initial_accumulator_value": 0},
)
