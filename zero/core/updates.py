"""Optimizer updates of pages of parameters and moments, in place.

Every update gives the same bits for any cut of a flat tensor at multiples of 64 elements and for any number of threads.
The fused kernels of torch do so because they split work into units of 64 elements (at other cuts the tail of their
vector loop rounds differently). Elementwise operators are split between threads anywhere, so only operators that round
once are used here. `add(alpha=)` and `lerp` may round once or twice, differently in the vector loop and in its tail.

Letters: K elements of one page.
Source: Kingma and Ba 2015, "Adam"; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; Chen et al.
2023, "Symbolic Discovery of Optimization Algorithms" (Lion); Duchi et al. 2011, "Adaptive Subgradient Methods for
Online Learning and Stochastic Optimization".
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

Tensors = list[Tensor]
Numbers = Mapping[float, Tensor]
"""Number -> the 0-dim fp32 tensor on the device from which kernels read it."""
NO_NUMBERS: Numbers = MappingProxyType({})


class Settings(NamedTuple):
    """Optimizer settings of one group at one step."""

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, ...] = ()
    """Two for Adam and Lion, the momentum for SGD, none for Adagrad."""
    trains: bool = True
    """False: parameters and moments of the group do not change, and its gradient does not count in the norm."""
    step: int = 1
    """1 for the group's first update; skipped steps and steps in which the group does not train are not counted."""


class PageBatch(NamedTuple):
    """Pages of one group on one device that are updated together; no tensor requires a gradient.

    Args:
        params: fp32, updated in place; each K is a multiple of 64.
        grads: fp32, may be overwritten.
        moments: for each moment a list as long as `params`, updated in place.
        divisor: gradients are divided by it.
        numbers: device tensors of the step and the divisor, if they exist already.
        factor: factor of the learning rate for matrices of one shape, see `zero.core.muon`.
    """

    params: Tensors
    grads: Tensors
    moments: tuple[Tensors, ...]
    settings: Settings
    divisor: float
    numbers: Numbers = NO_NUMBERS
    factor: float = 1.0

    def scalar(self, value: float) -> Tensor:
        made = self.numbers.get(float(value))
        device = self.params[0].device
        return made if made is not None and made.device == device else on_device(value, device)

    def grad_scale(self) -> Tensor | None:
        return None if self.divisor == 1.0 else self.scalar(self.divisor)

    def divide_grads(self) -> None:
        if self.divisor != 1.0:
            torch._foreach_div_(self.grads, self.divisor)


Update = Callable[[PageBatch], None]


def adam(kernel: Callable[..., None], eps: float, batch: PageBatch) -> None:
    (mus, nus), (beta1, beta2) = batch.moments, batch.settings.betas
    kernel(
        batch.params,
        batch.grads,
        mus,
        nus,
        [],
        [batch.scalar(batch.settings.step)] * len(batch.params),
        lr=batch.settings.lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=batch.settings.weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=batch.grad_scale(),
    )


def sgd(nesterov: bool, batch: PageBatch) -> None:
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


def lion(batch: PageBatch) -> None:
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


def adagrad(lr_decay: float, eps: float, batch: PageBatch) -> None:
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


def ema(update: Update, decay: float, batch: PageBatch) -> None:
    *moments, means = batch.moments
    update(batch._replace(moments=tuple(moments)))
    average(decay, means, batch.params)


def average(decay: float, means: Tensors, params: Tensors) -> None:
    """Take the parameters into their running means."""
    torch._foreach_mul_(means, decay)
    torch._foreach_add_(means, torch._foreach_mul(params, 1 - decay))


def on_device(value: float, device: torch.device) -> Tensor:
    """Make a 0-dim fp32 tensor with `full`: one launch on a GPU, where `torch.tensor` would wait for a copy."""
    return torch.full((), value, dtype=torch.float32, device=device)
