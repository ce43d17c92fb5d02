"""Optimizers as functions of one page.

A `Transform` is a record: which moments a parameter has, and `update`, which moves one page of parameters in place.
It knows nothing of ranks, stores or files: what changes from step to step arrives by value in `Hyper`, so
an update may run long after the step that decided it.

The law here is the cut test: any cut at multiples of 64 elements gives the same bits, whatever the number of threads.
torch's fused kernels keep it, because they hand out work in units of 64 elements (not at other cuts: the tail of their
vector loop rounds differently). Elementwise operators are cut anywhere by threads, so the ones used here round once:
`add(alpha=)` and `lerp` round once or twice as the compiler likes, in the loop and in its tail.

Letters: K elements of one page.
Source: Kingma and Ba 2015, "Adam"; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization";
Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (Lion); Duchi et al. 2011, "Adaptive Subgradient
Methods for Online Learning and Stochastic Optimization".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from zero.errors import ConfigError
from zero.schedule import Schedule


class Hyper(NamedTuple):
    """What one update needs besides tensors, captured by value when the step decides it."""

    step: int
    """1 for the first update; skipped steps do not count."""
    lr: float
    weight_decay: float
    divisor: float
    """Gradients are divided by it once, in fp32: ranks x accumulate x loss scale / clip coefficient."""


Update = Callable[[Tensor, Tensor, tuple[Tensor, ...], Hyper], None]
Decay = Callable[[str, tuple[int, ...]], bool]


def decay_matrices(name: str, shape: tuple[int, ...]) -> bool:
    """The usual mask: weights with 2 or more dimensions decay, biases and norms do not."""
    return len(shape) >= 2


@dataclass(frozen=True)
class Transform:
    """An optimizer as data. Make one with `adamw`, `adam`, `sgd`, `lion` or `adagrad`.

    `update(param_K, grad_K, moments_K, hyper)` works in place on (K,) fp32 tensors of one device, none of which
    requires a gradient; K is a multiple of 64, moments come in the order of `moments`. It may destroy `grad_K`.
    Moments are zeros before the first update.

    Raises:
        ConfigError: a negative or non-finite setting.
    """

    name: str
    moments: tuple[str, ...]
    update: Update
    lr: float | Schedule
    """Or a function of the step, 1 for the first update: see `schedule.py`."""
    clip: float | None = None
    """The largest global gradient norm, None for no clipping."""
    weight_decay: float = 0.0
    decay: Decay = decay_matrices
    """(name, shape) -> whether `weight_decay` applies to that parameter."""

    def __post_init__(self) -> None:
        if not callable(self.lr):
            _require("lr", self.lr, 0 <= self.lr < inf, "0 or more")
        if self.clip is not None:
            _require("clip", self.clip, 0 < self.clip < inf, "more than 0, or none")
        _require("weight_decay", self.weight_decay, 0 <= self.weight_decay < inf, "0 or more")

    def lr_at(self, step: int) -> float:
        """The learning rate of update `step`, 1 for the first.

        Raises:
            ConfigError: the schedule gave a negative or non-finite number.
        """
        lr = self.lr(step) if callable(self.lr) else self.lr
        _require(f"lr at step {step}", lr, 0 <= lr < inf, "0 or more: check the schedule")
        return lr


def adamw(
    lr: float | Schedule,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    clip: float | None = None,
    decay: Decay = decay_matrices,
) -> Transform:
    """Adam with decoupled weight decay: parameters shrink by lr x weight_decay, moments never see it."""
    update = partial(_adam, torch._fused_adamw_, _beta("beta1", beta1), _beta("beta2", beta2), _eps(eps))
    return Transform("adamw", ("mu", "nu"), update, lr, clip, weight_decay, decay)


def adam(
    lr: float | Schedule,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip: float | None = None,
    decay: Decay = decay_matrices,
) -> Transform:
    """Adam with L2 weight decay: weight_decay x parameter is added to the gradient."""
    update = partial(_adam, torch._fused_adam_, _beta("beta1", beta1), _beta("beta2", beta2), _eps(eps))
    return Transform("adam", ("mu", "nu"), update, lr, clip, weight_decay, decay)


def sgd(
    lr: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    clip: float | None = None,
    decay: Decay = decay_matrices,
) -> Transform:
    """Stochastic gradient descent with L2 weight decay, as `torch.optim.SGD`: without momentum there are no moments."""
    _require("momentum", momentum, 0 <= momentum < inf, "0 or more")
    if nesterov and not momentum:
        raise ConfigError("optim.nesterov=true looks ahead along the momentum, which is 0; set optim.momentum")
    update = partial(_sgd, momentum, nesterov)
    return Transform("sgd", ("mu",) if momentum else (), update, lr, clip, weight_decay, decay)


def lion(
    lr: float | Schedule,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
    clip: float | None = None,
    decay: Decay = decay_matrices,
) -> Transform:
    """The sign of a momentum as the direction, decoupled weight decay; wants a third to a tenth of AdamW's lr."""
    update = partial(_lion, _beta("beta1", beta1), _beta("beta2", beta2))
    return Transform("lion", ("mu",), update, lr, clip, weight_decay, decay)


def adagrad(
    lr: float | Schedule,
    *,
    lr_decay: float = 0.0,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    clip: float | None = None,
    decay: Decay = decay_matrices,
) -> Transform:
    """Steps divided by the root of the sum of all squared gradients, L2 weight decay, as `torch.optim.Adagrad`.

    Args:
        lr_decay: the rate of step t is lr / (1 + (t - 1) x lr_decay).
    """
    _require("lr_decay", lr_decay, 0 <= lr_decay < inf, "0 or more")
    update = partial(_adagrad, lr_decay, _eps(eps))
    return Transform("adagrad", ("nu",), update, lr, clip, weight_decay, decay)


def _adam(
    kernel: Callable[..., None],
    beta1: float,
    beta2: float,
    eps: float,
    param_K: Tensor,
    grad_K: Tensor,
    moments_K: tuple[Tensor, ...],
    hyper: Hyper,
) -> None:
    mu_K, nu_K = moments_K
    kernel(
        [param_K],
        [grad_K],
        [mu_K],
        [nu_K],
        [],
        [_scalar(hyper.step, param_K)],
        lr=hyper.lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=hyper.weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=_divisor(hyper, param_K),
    )


def _sgd(
    momentum: float, nesterov: bool, param_K: Tensor, grad_K: Tensor, moments_K: tuple[Tensor, ...], hyper: Hyper
) -> None:
    torch._fused_sgd_(
        [param_K],
        [grad_K],
        list(moments_K),
        lr=hyper.lr,
        momentum=momentum,
        weight_decay=hyper.weight_decay,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=hyper.step == 1,
        grad_scale=_divisor(hyper, param_K),
    )


def _lion(
    beta1: float, beta2: float, param_K: Tensor, grad_K: Tensor, moments_K: tuple[Tensor, ...], hyper: Hyper
) -> None:
    (mu_K,) = moments_K
    if hyper.divisor != 1.0:
        grad_K.div_(hyper.divisor)
    # The sign of beta1 mu + (1 - beta1) grad, divided by 1 - beta1: one temporary less.
    direction_K = (mu_K * (beta1 / (1 - beta1))).add_(grad_K).sign_()
    if hyper.weight_decay:
        param_K.mul_(1 - hyper.lr * hyper.weight_decay)
    param_K.sub_(direction_K.mul_(hyper.lr))
    mu_K.mul_(beta2).add_(grad_K.mul_(1 - beta2))


def _adagrad(
    lr_decay: float, eps: float, param_K: Tensor, grad_K: Tensor, moments_K: tuple[Tensor, ...], hyper: Hyper
) -> None:
    (nu_K,) = moments_K
    if hyper.divisor != 1.0:
        grad_K.div_(hyper.divisor)
    if hyper.weight_decay:
        grad_K.add_(param_K * hyper.weight_decay)
    nu_K.add_(grad_K.square())
    lr = hyper.lr / (1 + (hyper.step - 1) * lr_decay)
    param_K.sub_(grad_K.mul_(lr).div_(nu_K.sqrt().add_(eps)))


def _divisor(hyper: Hyper, like: Tensor) -> Tensor | None:
    return None if hyper.divisor == 1.0 else _scalar(hyper.divisor, like)


def _scalar(value: float, like: Tensor) -> Tensor:
    # `full` and not `tensor`: on a GPU it is one launch, where a copy from the host would wait for the device.
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _beta(key: str, value: float) -> float:
    return _require(key, value, 0 <= value < 1, "at least 0 and less than 1")


def _eps(value: float) -> float:
    return _require("eps", value, 0 <= value < inf, "0 or more")


def _require(key: str, value: float, holds: bool, wanted: str) -> float:
    """`holds` is false for NaN too, because every comparison with NaN is."""
    if not holds:
        raise ConfigError(f"optim.{key}={value}; it must be {wanted}")
    return value
