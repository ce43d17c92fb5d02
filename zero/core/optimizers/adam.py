"""Adam, with L2 weight decay, and AdamW, with decoupled weight decay.

Source: Kingma and Ba 2015, "Adam"; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
"""

from collections.abc import Callable, Mapping, Sequence
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


def adamw(
    lr: Number,
    *,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eps: float = 1e-8,
    weight_decay: Number = 0.01,
    clip: float | None = None,
    decay: Mask = decay_matrices,
    groups: Sequence[Group] = (),
) -> Transform:
    """Make AdamW: Adam with decoupled weight decay, which subtracts lr x weight_decay x parameter.

    Args:
        lr: learning rate, 0 or more: a number, or a function of the step, which is 1 for the first update.
        beta1: decay of the mean of gradients, 0 or more and less than 1; a number or a function of the step.
        beta2: decay of the mean of squared gradients, 0 or more and less than 1; a number or a function of the step.
        eps: added to the root of the mean of squared gradients, 0 or more.
        weight_decay: 0 or more; a number or a function of the step.
        clip: the largest global norm of the gradient, more than 0; None: no clipping.
        decay: function of (name, shape) that returns whether a parameter decays; by default, parameters of 2 or more
            dimensions do.
        groups: groups of parameters with settings of their own; parameters in no group have the settings of this call.

    Raises:
        ConfigError: a setting is not a number or is out of range.
    """
    shared = {"weight_decay": weight_decay, "clip": clip, "decay": decay, "groups": groups}
    return of_adamw(lr, {"beta1": beta1, "beta2": beta2}, eps, shared)


def adam(
    lr: Number,
    *,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eps: float = 1e-8,
    weight_decay: Number = 0.0,
    clip: float | None = None,
    decay: Mask = decay_matrices,
    groups: Sequence[Group] = (),
) -> Transform:
    """Make Adam with L2 weight decay: weight_decay x parameter is added to the gradient. Arguments as in `adamw`."""
    shared = {"weight_decay": weight_decay, "clip": clip, "decay": decay, "groups": groups}
    return _make("adam", torch._fused_adam_, _tile, lr, {"beta1": beta1, "beta2": beta2}, eps, shared)


def of_adamw(
    lr: Number, betas: Mapping[str, Number], eps: float, shared: Mapping[str, Any], others: tuple[int, ...] = ()
) -> Transform:
    """Make AdamW, alone or beside another update.

    Args:
        shared: the arguments `weight_decay`, `clip`, `decay` and `groups` of `adamw`.
        others: see `make_transform`.
    """
    return _make("adamw", torch._fused_adamw_, _decoupled_tile, lr, betas, eps, shared, others)


def _make(
    name: str,
    kernel: Callable[..., None],
    tile: Callable[..., Any],
    lr: Number,
    betas: Mapping[str, Number],
    eps: float,
    shared: Mapping[str, Any],
    others: tuple[int, ...] = (),
) -> Transform:
    update = partial(_update, kernel, constant("eps", eps))
    fused = Fused(tile, partial(_numbers, name == "adamw", eps))
    return make_transform(name, ("mu", "nu"), update, (eps,), lr, betas, **shared, others=others, fused=fused)


def _update(kernel: Callable[..., None], eps: float, batch: PageBatch) -> None:
    (mus, nus), (beta1, beta2) = batch.moments, batch.settings.betas
    kernel(
        batch.params,
        batch.grads,
        mus,
        nus,
        [],
        [batch.step()] * len(batch.params),
        lr=batch.settings.lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=batch.settings.weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=batch.grad_scale(),
    )


def _numbers(decoupled: bool, eps: float, now: GroupSettings) -> tuple[float, ...]:
    lr, decay, (beta1, beta2) = now.lr, now.weight_decay, now.betas
    step_size, by_bias = lr / (1 - beta1**now.step), (1 - beta2**now.step) ** -0.5
    shrink = lr * decay if decoupled else decay
    return step_size, shrink, beta1, 1 - beta1, beta2, 1 - beta2, by_bias, eps


def _tile(param: "Tile", gradient: "Tile", numbers: "Tile", mean: "Tile", square: "Tile") -> "tuple[Tile, Tile, Tile]":
    return _descend(param, gradient + param * tl.load(numbers + 1), numbers, mean, square)


def _decoupled_tile(
    param: "Tile", gradient: "Tile", numbers: "Tile", mean: "Tile", square: "Tile"
) -> "tuple[Tile, Tile, Tile]":
    return _descend(param - param * tl.load(numbers + 1), gradient, numbers, mean, square)


def _descend(
    param: "Tile", gradient: "Tile", numbers: "Tile", mean: "Tile", square: "Tile"
) -> "tuple[Tile, Tile, Tile]":
    mean = mean * tl.load(numbers + 2) + gradient * tl.load(numbers + 3)
    square = square * tl.load(numbers + 4) + gradient * tl.load(numbers + 5) * gradient
    root = tl.sqrt_rn(square) * tl.load(numbers + 6) + tl.load(numbers + 7)
    return param - tl.div_rn(mean * tl.load(numbers), root), mean, square


def _build(
    make: Callable[..., Transform],
    chosen: Any,
    lr: Schedule,
    momentum: Schedule | None,
    shared: Mapping[str, Any],
) -> Transform:
    return make(lr, beta1=momentum or chosen.beta1, beta2=chosen.beta2, eps=chosen.eps, **shared)


_NEEDS = {**PLAIN, "amsgrad": False}
ADAM = Rule(adam, partial(_build, adam), torch.optim.Adam, ("eps",), {**_NEEDS, "decoupled_weight_decay": False})
ADAMW = Rule(adamw, partial(_build, adamw), torch.optim.AdamW, ("eps",), _NEEDS)
