"""What an optimizer computes: one page of parameters, moved in place.

Every update keeps the cut test: any cut at multiples of 64 elements gives the same bits, whatever the number of
threads. torch's fused kernels keep it, because they hand out work in units of 64 elements (not at other cuts: the tail
of their vector loop rounds differently). Elementwise operators are cut anywhere by threads, so the ones used here round
once: `add(alpha=)` and `lerp` round once or twice as the compiler likes, in the loop and in its tail.

Letters: K elements of one page.
Source: Kingma and Ba 2015, "Adam"; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization";
Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (Lion); Duchi et al. 2011, "Adaptive Subgradient
Methods for Online Learning and Stochastic Optimization".
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Settings(NamedTuple):
    """What one group is updated with at one step."""

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, ...] = ()
    """As many as the optimizer has: two for Adam and Lion, the momentum for SGD."""
    trains: bool = True
    """A group that does not keeps its parameters and moments, and its gradient does not count in the norm."""
    step: int = 1
    """1 for the group's first update: neither skipped steps count, nor those in which it did not train."""


Tensors = list[Tensor]
Numbers = Mapping[float, Tensor]
"""What kernels read from memory, as 0-dim fp32 tensors of one device."""
Update = Callable[[Tensors, Tensors, tuple[Tensors, ...], Settings, float, Numbers], None]
NO_NUMBERS: Numbers = MappingProxyType({})


def adam(
    kernel: Callable[..., None],
    eps: float,
    params: Tensors,
    grads: Tensors,
    moments: tuple[Tensors, ...],
    now: Settings,
    divisor: float,
    numbers: Numbers = NO_NUMBERS,
) -> None:
    (mus, nus), (beta1, beta2) = moments, now.betas
    kernel(
        params,
        grads,
        mus,
        nus,
        [],
        [_scalar(now.step, params[0], numbers)] * len(params),
        lr=now.lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=now.weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=_divisor(divisor, params[0], numbers),
    )


def sgd(
    nesterov: bool,
    params: Tensors,
    grads: Tensors,
    moments: tuple[Tensors, ...],
    now: Settings,
    divisor: float,
    numbers: Numbers = NO_NUMBERS,
) -> None:
    (momentum,) = now.betas
    torch._fused_sgd_(
        params,
        grads,
        moments[0] if momentum else [],
        lr=now.lr,
        momentum=momentum,
        weight_decay=now.weight_decay,
        dampening=0.0,
        nesterov=nesterov and momentum > 0,
        maximize=False,
        is_first_step=now.step == 1,
        grad_scale=_divisor(divisor, params[0], numbers),
    )


def lion(
    params: Tensors,
    grads: Tensors,
    moments: tuple[Tensors, ...],
    now: Settings,
    divisor: float,
    numbers: Numbers = NO_NUMBERS,
) -> None:
    (mus,), (beta1, beta2) = moments, now.betas
    if divisor != 1.0:
        torch._foreach_div_(grads, divisor)
    # The sign of beta1 mu + (1 - beta1) grad, divided by 1 - beta1: one temporary less.
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


def adagrad(
    lr_decay: float,
    eps: float,
    params: Tensors,
    grads: Tensors,
    moments: tuple[Tensors, ...],
    now: Settings,
    divisor: float,
    numbers: Numbers = NO_NUMBERS,
) -> None:
    (nus,) = moments
    if divisor != 1.0:
        torch._foreach_div_(grads, divisor)
    if now.weight_decay:
        torch._foreach_add_(grads, torch._foreach_mul(params, now.weight_decay))
    torch._foreach_add_(nus, torch._foreach_mul(grads, grads))
    roots = torch._foreach_sqrt(nus)
    torch._foreach_add_(roots, eps)
    torch._foreach_mul_(grads, now.lr / (1 + (now.step - 1) * lr_decay))
    torch._foreach_div_(grads, roots)
    torch._foreach_sub_(params, grads)


def ema(
    update: Update,
    decay: float,
    params: Tensors,
    grads: Tensors,
    moments: tuple[Tensors, ...],
    now: Settings,
    divisor: float,
    numbers: Numbers = NO_NUMBERS,
) -> None:
    *own, means = moments
    update(params, grads, tuple(own), now, divisor, numbers)
    torch._foreach_mul_(means, decay)
    torch._foreach_add_(means, torch._foreach_mul(params, 1 - decay))


def on_device(value: float, device: torch.device) -> Tensor:
    """0-dim fp32. `full` and not `tensor`: on a GPU it is one launch, where a copy from the host would wait for it."""
    return torch.full((), value, dtype=torch.float32, device=device)


def made_with(update: Any) -> list[Any]:
    """The numbers that an optimizer's update was made with."""
    given = update.args if isinstance(update, partial) else ()
    return [
        one
        for arg in given
        for one in (made_with(arg) if isinstance(arg, partial) else [arg])
        if isinstance(one, float | int)
    ]


def _divisor(divisor: float, like: Tensor, numbers: Numbers) -> Tensor | None:
    return None if divisor == 1.0 else _scalar(divisor, like, numbers)


def _scalar(value: float, like: Tensor, numbers: Numbers) -> Tensor:
    made = numbers.get(float(value))
    return made if made is not None and made.device == like.device else on_device(value, like.device)
