"""Optimizers as functions of one page.

A `Transform` is a record: which moments a parameter has, which group it belongs to, and `update`, which moves one page
of parameters in place. It knows nothing of ranks, stores or files: what changes from step to step arrives by value in
`Hyper`, so an update may run long after the step that decided it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import NamedTuple

import torch

from zero.core import updates
from zero.core.groups import (
    Group,
    Mask,
    Number,
    decay_matrices,
    in_range,
    is_finite,
    is_share,
    listed,
    number_of,
    require,
    settings_of,
    without_momentum,
)
from zero.core.moments import Bf16Moments, EightBitMoments, Moments
from zero.core.suggest import own_arguments
from zero.core.updates import NO_NUMBERS, Numbers, Settings, Update
from zero.errors import ConfigError


class Hyper(NamedTuple):
    """Every number that one step's updates need besides tensors, captured by value when the step decides them."""

    step: int
    """1 for the first update; skipped steps do not count."""
    divisor: float
    """Gradients are divided by it once, in fp32: ranks x accumulate x loss scale / clip coefficient."""
    groups: tuple[Settings, ...]
    numbers: Numbers = NO_NUMBERS
    """Of those above what kernels read from memory, as 0-dim fp32 tensors of one device: made once for all updates."""

    @property
    def lr(self) -> float:
        """Of the default group."""
        return self.groups[0].lr


FP32_MOMENTS = Moments()
SQUARES = "nu"
"""What every optimizer calls a mean or sum of squares."""


@dataclass(frozen=True)
class Transform:
    """An optimizer as data. Make one with `adamw`, `adam`, `sgd`, `lion` or `adagrad`.

    `update(params, grads, moments, settings, divisor, numbers)` works in place on lists of (K,) fp32 tensors of one
    device, none of which requires a gradient; each K is a multiple of 64, and there is a list for each of `moments`. It
    may destroy `grads`; `numbers` are those of `Hyper`. Moments are zeros before the first update, except `copies`,
    which begin as the parameters.

    Raises:
        ConfigError: a negative or non-finite setting.
    """

    name: str
    moments: tuple[str, ...]
    update: Update
    groups: tuple[Callable[[int], Settings], ...]
    """By number, a function of the step, 1 for the first update; the first is the default group's."""
    group: Callable[[str, tuple[int, ...]], int]
    """(name, shape) -> the number of its group."""
    clip: float | None = None
    """The largest global gradient norm, None for no clipping."""
    copies: tuple[str, ...] = ()
    given_groups: tuple[Group, ...] = ()
    """The groups as they were given."""
    kept: Moments = FP32_MOMENTS
    """How moments are kept between updates; `copies` in fp32 always."""

    def __post_init__(self) -> None:
        if self.clip is not None:
            require("clip", self.clip, lambda clip: 0 < clip < inf, "more than 0, or none")

    def form(self, kind: str) -> Moments:
        """How a moment is kept."""
        if kind in self.copies:
            return FP32_MOMENTS
        return self.kept.of_squares() if kind == SQUARES else self.kept

    def check_groups(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a group whose function takes no parameter, or with a name or pattern that fits none.

        Args:
            shapes: of all parameters, by name.

        Raises:
            ConfigError: there is one; with the nearest name, where there is one.
        """
        for number, group in enumerate(self.given_groups):
            stranger = group.stranger(shapes)
            if stranger:
                raise ConfigError(f"optim.groups[{number}] {stranger}")

    def hyper_at(self, step: int, divisor: float) -> Hyper:
        """What update `step` is made with, as far as that can be known before the norm.

        Raises:
            ConfigError: a schedule or a dict gave a number out of range.
        """
        return Hyper(step, divisor, tuple(group(step) for group in self.groups))

    def fields(self) -> dict[str, str]:
        """What all ranks must agree on."""
        return {
            "optim": f"{self.name} clip={self.clip}",
            "optim settings": f"{updates.made_with(self.update)} {[tuple(group(1)[1:]) for group in self.groups]}",
            "optim.lr": str([group(1).lr for group in self.groups]),
            "optim.moments": str(self.kept),
        }


@own_arguments()
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
    """AdamW: Adam with decoupled weight decay: parameters shrink by lr x weight_decay, moments never see it.

    Args:
        lr: learning rate, 0 or more: a number, or a function of the step, which is 1 for the first update.
        beta1: decay of the mean of gradients, 0 or more and less than 1; a number or a function of the step.
        beta2: decay of the mean of squared gradients; likewise.
        eps: added to the root of that mean, 0 or more.
        weight_decay: 0 or more; a number or a function of the step.
        clip: the largest global norm of the gradient, more than 0; None: no clipping.
        decay: (name, shape) of a parameter to whether it decays; by default those of 2 or more dimensions do.
        groups: parameters with settings of their own; what no group takes has those of this call.

    Raises:
        ConfigError: a setting that is not a number or is out of range.
    """
    update, betas = partial(updates.adam, torch._fused_adamw_, _eps(eps)), {"beta1": beta1, "beta2": beta2}
    return _transform("adamw", ("mu", "nu"), update, lr, betas, weight_decay, clip, decay, groups)


@own_arguments()
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
    """Adam with L2 weight decay: weight_decay x parameter is added to the gradient.

    Args:
        lr: learning rate, 0 or more: a number, or a function of the step, which is 1 for the first update.
        beta1: decay of the mean of gradients, 0 or more and less than 1; a number or a function of the step.
        beta2: decay of the mean of squared gradients; likewise.
        eps: added to the root of that mean, 0 or more.
        weight_decay: 0 or more; a number or a function of the step.
        clip: the largest global norm of the gradient, more than 0; None: no clipping.
        decay: (name, shape) of a parameter to whether it decays; by default those of 2 or more dimensions do.
        groups: parameters with settings of their own; what no group takes has those of this call.

    Raises:
        ConfigError: a setting that is not a number or is out of range.
    """
    update, betas = partial(updates.adam, torch._fused_adam_, _eps(eps)), {"beta1": beta1, "beta2": beta2}
    return _transform("adam", ("mu", "nu"), update, lr, betas, weight_decay, clip, decay, groups)


@own_arguments()
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
    """Stochastic gradient descent with L2 weight decay, as `torch.optim.SGD`: without momentum there are no moments.

    Args:
        lr: learning rate, 0 or more: a number, or a function of the step, which is 1 for the first update.
        momentum: 0 or more and less than 1; a number or a function of the step.
        nesterov: look ahead along the momentum.
        weight_decay: 0 or more; a number or a function of the step.
        clip: the largest global norm of the gradient, more than 0; None: no clipping.
        decay: (name, shape) of a parameter to whether it decays; by default those of 2 or more dimensions do.
        groups: parameters with settings of their own; what no group takes has those of this call.

    Raises:
        ConfigError: a setting that is not a number or is out of range; `nesterov` without a momentum.
    """
    remembers = bool(momentum) or any(any(group.given()["betas"] or ()) for group in listed(groups))
    if nesterov and not remembers:
        raise ConfigError("optim.nesterov=true looks ahead along the momentum, which is 0; set optim.momentum")
    moments, update, betas = ("mu",) if remembers else (), partial(updates.sgd, nesterov), {"momentum": momentum}
    made = _transform("sgd", moments, update, lr, betas, weight_decay, clip, decay, groups)
    return made if remembers else replace(made, groups=tuple(partial(without_momentum, one) for one in made.groups))


@own_arguments()
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
    """Lion: the sign of a momentum as the direction, and decoupled weight decay; lr is a third to a tenth of AdamW's.

    Args:
        lr: learning rate, 0 or more: a number, or a function of the step, which is 1 for the first update.
        beta1: share of the momentum in the direction, 0 or more and less than 1; a number or a function of the step.
        beta2: decay of the momentum; likewise.
        weight_decay: 0 or more; a number or a function of the step.
        clip: the largest global norm of the gradient, more than 0; None: no clipping.
        decay: (name, shape) of a parameter to whether it decays; by default those of 2 or more dimensions do.
        groups: parameters with settings of their own; what no group takes has those of this call.

    Raises:
        ConfigError: a setting that is not a number or is out of range.
    """
    betas = {"beta1": beta1, "beta2": beta2}
    return _transform("lion", ("mu",), updates.lion, lr, betas, weight_decay, clip, decay, groups)


@own_arguments()
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
    """Adagrad: steps divided by the root of the sum of squared gradients; L2 weight decay, as `torch.optim.Adagrad`.

    Args:
        lr: learning rate, 0 or more: a number, or a function of the step, which is 1 for the first update.
        lr_decay: the rate of step t is lr / (1 + (t - 1) x lr_decay); 0 or more.
        eps: added to that root, 0 or more.
        weight_decay: 0 or more; a number or a function of the step.
        clip: the largest global norm of the gradient, more than 0; None: no clipping.
        decay: (name, shape) of a parameter to whether it decays; by default those of 2 or more dimensions do.
        groups: parameters with settings of their own; what no group takes has those of this call.

    Raises:
        ConfigError: a setting that is not a number or is out of range.
    """
    require("lr_decay", lr_decay, is_finite, "0 or more")
    update = partial(updates.adagrad, lr_decay, _eps(eps))
    return _transform("adagrad", ("nu",), update, lr, {}, weight_decay, clip, decay, groups)


def with_ema(transform: Transform, decay: float = 0.999) -> Transform:
    """The same optimizer, and a running mean of the parameters, ema = decay x ema + (1 - decay) x parameter per update.

    It is a moment, "ema": it is kept where the others are, and is read with `full_state_dict(state, "ema")`.

    Args:
        transform: an optimizer, from `adamw` and its family.
        decay: 0 or more and less than 1.

    Raises:
        ConfigError: `decay` is out of range.
    """
    require("ema", decay, is_share, "at least 0 and less than 1")
    return replace(
        transform,
        moments=(*transform.moments, "ema"),
        copies=(*transform.copies, "ema"),
        update=partial(updates.ema, transform.update, decay),
    )


def with_moments(transform: Transform, dtype: str = "bf16", *, seed: int = 0) -> Transform:
    """The same optimizer with its moments kept in another dtype; it still computes in fp32.

    In bf16 they take 2 bytes per parameter each instead of 4, on their tier and on every way; in 8 bits 1 1/64, the
    64th for an exponent that 64 elements share. They are rounded stochastically, with bits that depend on seed, step,
    parameter and element alone: see `zero.core.moments`. A running mean of the parameters, from `with_ema`, stays in
    fp32.

    Args:
        transform: an optimizer, from `adamw` and its family.
        dtype: "fp32", "bf16" or "8bit".
        seed: of the random bits; the same on every rank.

    Raises:
        ConfigError: another dtype.
    """
    forms = {"fp32": FP32_MOMENTS, "bf16": Bf16Moments(seed), "8bit": EightBitMoments(seed)}
    if dtype not in forms:
        raise ConfigError(f"optim.moments={dtype}: it is fp32, bf16 or 8bit")
    return replace(transform, kept=forms[dtype])


def _transform(
    name: str,
    moments: tuple[str, ...],
    update: Update,
    lr: Number,
    betas: Mapping[str, Number],
    weight_decay: Number,
    clip: float | None,
    decay: Mask,
    groups: Sequence[Group],
) -> Transform:
    """Each group twice, what does not decay and what does: number 2 i and 2 i + 1 of group i, the default one first."""
    if not callable(decay):
        raise ConfigError(
            f"decay={decay!r}: it must be a function of a parameter's name and shape. Write decay=lambda name, shape: "
            "True for all of them."
        )
    groups, default = listed(groups), Group((), lr, weight_decay, tuple(betas.values()))
    for key, value in {"lr": lr, "weight_decay": weight_decay, **betas}.items():
        if not callable(value):
            in_range(key, value)
    settings = tuple(
        partial(settings_of, group, default, tuple(betas), decays, f"groups[{i - 1}]." if i else "")
        for i, group in enumerate((default, *groups))
        for decays in (False, True)
    )
    return Transform(name, moments, update, settings, partial(number_of, groups, decay), clip, given_groups=groups)


def _eps(value: float) -> float:
    return require("eps", value, is_finite, "0 or more")
