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
    as_tuple,
    check_setting,
    decay_matrices,
    number_of,
    require,
    settings_at,
)
from zero.core.moments import Bf16Moments, EightBitMoments, Moments
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
    """The numbers that kernels read from memory, made once for all updates of a step."""

    @property
    def lr(self) -> float:
        """The learning rate of the default group."""
        return self.groups[0].lr


FP32_MOMENTS = Moments()
SQUARES = "nu"
"""The moment of every optimizer that is a mean or a sum of squares."""


@dataclass(frozen=True)
class Transform:
    """An optimizer as data. Make one with `adamw`, `adam`, `sgd`, `lion` or `adagrad`.

    Moments are zeros before the first update, except `copies`, which begin as the parameters.

    Raises:
        ConfigError: `clip` is not more than 0.
    """

    name: str
    moments: tuple[str, ...]
    update: Update
    constants: tuple[float, ...]
    """The numbers that `update` was made with, for comparison between ranks."""
    groups: tuple[Callable[[int], Settings], ...]
    """By number, a function of the step, 1 for the first update; the first is the default group's."""
    group: Callable[[str, tuple[int, ...]], int]
    """(name, shape) of a parameter -> the number of its group."""
    clip: float | None = None
    """The largest global gradient norm, None for no clipping."""
    copies: tuple[str, ...] = ()
    given_groups: tuple[Group, ...] = ()
    kept: Moments = FP32_MOMENTS
    """The form of moments between updates; `copies` are always kept in fp32."""

    def __post_init__(self) -> None:
        if self.clip is not None:
            require("clip", self.clip, lambda clip: 0 < clip < inf, "more than 0, or none")

    def form(self, moment: str) -> Moments:
        """Return the form in which a moment is kept."""
        if moment in self.copies:
            return FP32_MOMENTS
        return self.kept.of_squares() if moment == SQUARES else self.kept

    def check_groups(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every group, name and pattern fits a parameter.

        Args:
            shapes: the shapes of all parameters by name.

        Raises:
            ConfigError: a group fits none, or one of its names does not.
        """
        for number, group in enumerate(self.given_groups):
            problem = group.problem(shapes)
            if problem:
                raise ConfigError(f"optim.groups[{number}] {problem}")

    def hyper_at(self, step: int, divisor: float) -> Hyper:
        """Return the numbers of update `step`, as far as they are known before the norm.

        Raises:
            ConfigError: a schedule or a dict gave a number out of range, or a momentum that begins later.
        """
        groups = tuple(group(step) for group in self.groups)
        if self.moments == self.copies and any(any(now.betas) for now in groups):
            raise ConfigError("optim.momentum was 0 at the beginning. Begin with any momentum above 0.")
        return Hyper(step, divisor, groups)

    def fields(self) -> dict[str, str]:
        """Return everything that all ranks must agree on."""
        return {
            "optim": f"{self.name} clip={self.clip}",
            "optim settings": f"{self.constants} {[tuple(group(1)[1:]) for group in self.groups]}",
            "optim.lr": str([group(1).lr for group in self.groups]),
            "optim.moments": str(self.kept),
        }


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
    """Make AdamW: Adam whose parameters shrink by lr x weight_decay, which its moments never see.

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
    constants, betas = (_checked("eps", eps),), {"beta1": beta1, "beta2": beta2}
    update = partial(updates.adam, torch._fused_adamw_, eps)
    return _transform("adamw", ("mu", "nu"), update, constants, lr, betas, weight_decay, clip, decay, groups)


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
    constants, betas = (_checked("eps", eps),), {"beta1": beta1, "beta2": beta2}
    update = partial(updates.adam, torch._fused_adam_, eps)
    return _transform("adam", ("mu", "nu"), update, constants, lr, betas, weight_decay, clip, decay, groups)


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
        momentum: 0 or more and less than 1; a number or a function of the step. 0 keeps no moment.
        nesterov: look ahead along the momentum.

    Raises:
        ConfigError: as `adamw`, or `nesterov` without a momentum.
    """
    has_momentum = bool(momentum) or any(any(group.now()["betas"] or ()) for group in as_tuple(groups))
    if nesterov and not has_momentum:
        raise ConfigError("optim.nesterov=true looks ahead along the momentum, which is 0. Set optim.momentum.")
    moments, update, betas = ("mu",) if has_momentum else (), partial(updates.sgd, nesterov), {"momentum": momentum}
    return _transform("sgd", moments, update, (nesterov,), lr, betas, weight_decay, clip, decay, groups)


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
    """Make Lion: steps along the sign of a momentum, and decoupled weight decay. Other arguments as in `adamw`.

    Args:
        lr: a third to a tenth of AdamW's.
        beta1: share of the momentum in the direction, 0 or more and less than 1; a number or a function of the step.
        beta2: decay of the momentum; likewise.
    """
    betas = {"beta1": beta1, "beta2": beta2}
    return _transform("lion", ("mu",), updates.lion, (), lr, betas, weight_decay, clip, decay, groups)


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
        lr_decay: the rate of step t is lr / (1 + (t - 1) x lr_decay); 0 or more.
    """
    constants = _checked("lr_decay", lr_decay), _checked("eps", eps)
    update = partial(updates.adagrad, lr_decay, eps)
    return _transform("adagrad", ("nu",), update, constants, lr, {}, weight_decay, clip, decay, groups)


def with_ema(transform: Transform, decay: float = 0.999) -> Transform:
    """Add a running mean of the parameters, ema = decay x ema + (1 - decay) x parameter per update.

    The mean is a moment, "ema", on the tier of the others; `full_state_dict(state, "ema")` reads it.

    Args:
        transform: an optimizer, from `adamw` and its family.
        decay: 0 or more and less than 1.

    Raises:
        ConfigError: `decay` is out of range.
    """
    check_setting("ema", decay)
    return replace(
        transform,
        moments=(*transform.moments, "ema"),
        copies=(*transform.copies, "ema"),
        update=partial(updates.ema, transform.update, decay),
        constants=(*transform.constants, decay),
    )


def with_moments(transform: Transform, dtype: str = "bf16", *, seed: int = 0) -> Transform:
    """Keep the moments of an optimizer in another dtype; updates still compute in fp32.

    In bf16 each moment takes 2 bytes per parameter instead of 4, on its tier and on every way; in 8 bits 1 1/64, the
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
        raise ConfigError(f"optim.moments={dtype}: must be fp32, bf16 or 8bit")
    return replace(transform, kept=forms[dtype])


def _transform(
    name: str,
    moments: tuple[str, ...],
    update: Update,
    constants: tuple[float, ...],
    lr: Number,
    betas: Mapping[str, Number],
    weight_decay: Number,
    clip: float | None,
    decay: Mask,
    groups: Sequence[Group],
) -> Transform:
    """Make a transform with two groups for each group i: 2 i without weight decay and 2 i + 1 with it."""
    if not callable(decay):
        raise ConfigError(
            f"decay={decay!r}: it must be a function of a parameter's name and shape. Write decay=lambda name, shape: "
            "True for all of them."
        )
    groups, default = as_tuple(groups), Group((), lr, weight_decay, tuple(betas.values()))
    for key, value in {"lr": lr, "weight_decay": weight_decay, **betas}.items():
        if not callable(value):
            check_setting(key, value)
    settings = tuple(
        partial(settings_at, group, default, tuple(betas), decays, f"groups[{i - 1}]." if i else "")
        for i, group in enumerate((default, *groups))
        for decays in (False, True)
    )
    group_of = partial(number_of, groups, decay)
    return Transform(name, moments, update, constants, settings, group_of, clip, given_groups=groups)


def _checked(key: str, value: float) -> float:
    return require(key, value, lambda number: 0 <= number < inf, "0 or more")
