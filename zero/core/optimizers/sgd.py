"""Stochastic gradient descent with momentum, as torch's."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from zero.core import checks
from zero.core.groups import Group, Mask, Number, as_tuple, decay_matrices
from zero.core.lr_schedule import Schedule
from zero.core.optim import Fused, Transform, make_transform
from zero.core.optimizers.rule import PLAIN, Rule
from zero.core.updates import GroupSettings, PageBatch

if TYPE_CHECKING:
    import triton.language as tl

    from zero.core.tile import Tile
from zero.errors import ConfigError


def sgd(
    lr: Number,
    *,
    momentum: Number = 0.0,
    nesterov: bool = False,
    weight_decay: Number = 0.0,
    clip: float | None = None,
    decay: Mask = decay_matrices,
    groups: Sequence[Group] = (),
) -> Transform:
    """Make stochastic gradient descent with L2 weight decay, as `torch.optim.SGD`; other arguments as in `adamw`.

    Args:
        momentum: 0 or more and less than 1; a number or a function of the step. With 0 no moment is stored.
        nesterov: use Nesterov momentum.

    Raises:
        ConfigError: as `adamw`, or `nesterov` without a momentum.
    """
    nesterov = checks.boolean("optim.nesterov", nesterov)
    has_momentum = bool(momentum) or any(any(group.now()["betas"] or ()) for group in as_tuple(groups))
    if nesterov and not has_momentum:
        raise ConfigError("optim.nesterov=true looks ahead along the momentum, which is 0. Set optim.momentum.")
    moments, update, betas = ("mu",) if has_momentum else (), partial(_update, nesterov), {"momentum": momentum}
    fused = Fused(_nesterov_tile if nesterov else _momentum_tile if has_momentum else _tile, _numbers)
    return make_transform(
        "sgd", moments, update, (nesterov,), lr, betas, weight_decay, clip, decay, groups, fused=fused
    )


def _update(nesterov: bool, batch: PageBatch) -> None:
    (momentum,) = batch.settings.betas
    torch._fused_sgd_(
        batch.params,
        batch.grads,
        batch.moments[0] if momentum else [],
        lr=batch.settings.lr,
        momentum=momentum,
        weight_decay=batch.settings.weight_decay,
        dampening=0.0,
        nesterov=nesterov and momentum > 0,
        maximize=False,
        is_first_step=batch.settings.step == 1,
        grad_scale=batch.grad_scale(),
    )


def _numbers(now: GroupSettings) -> tuple[float, ...]:
    return now.lr, now.weight_decay, *now.betas, float(now.step == 1)


def _tile(param: "Tile", gradient: "Tile", numbers: "Tile") -> "Tile":
    return param - (gradient + param * tl.load(numbers + 1)) * tl.load(numbers)


def _momentum_tile(param: "Tile", gradient: "Tile", numbers: "Tile", mean: "Tile") -> "tuple[Tile, Tile]":
    gradient = gradient + param * tl.load(numbers + 1)
    new = _accumulated(gradient, numbers, mean)
    return _descend(param, gradient, new, numbers, mean, new)


def _nesterov_tile(param: "Tile", gradient: "Tile", numbers: "Tile", mean: "Tile") -> "tuple[Tile, Tile]":
    gradient = gradient + param * tl.load(numbers + 1)
    new = _accumulated(gradient, numbers, mean)
    return _descend(param, gradient, gradient + new * tl.load(numbers + 2), numbers, mean, new)


def _accumulated(gradient: "Tile", numbers: "Tile", mean: "Tile") -> "Tile":
    return tl.where(tl.load(numbers + 3) != 0.0, gradient, mean * tl.load(numbers + 2) + gradient)


def _descend(
    param: "Tile", gradient: "Tile", ahead: "Tile", numbers: "Tile", mean: "Tile", new: "Tile"
) -> "tuple[Tile, Tile]":
    """Step along `ahead`, or along the gradient while the momentum is 0."""
    has_momentum = tl.load(numbers + 2) != 0.0
    return param - tl.where(has_momentum, ahead, gradient) * tl.load(numbers), tl.where(has_momentum, new, mean)


def _build(chosen: Any, lr: Schedule, momentum: Schedule | None, shared: Mapping[str, Any]) -> Transform:
    return sgd(lr, momentum=momentum or chosen.momentum, nesterov=chosen.nesterov, **shared)


SGD = Rule(sgd, _build, torch.optim.SGD, ("nesterov",), {**PLAIN, "dampening": 0})
