"""Optimizers as functions of one page.

A `Transform` is a record: which moments a parameter has, which group it belongs to, and `update`, which moves one page
of parameters in place. It knows nothing of ranks, stores or files: what changes from step to step arrives by value in
`Hyper`, so an update may run long after the step that decided it.

A **group** is the parameters that share `Settings`. Its learning rate, decay and momenta are numbers, functions of the
step, or read at each step from a dict that the user holds, as the `param_groups` of torch; so is whether it trains.

Every update keeps the cut test: any cut at multiples of 64 elements gives the same bits, whatever the number of
threads. torch's fused kernels keep it, because they hand out work in units of 64 elements (not at other cuts: the tail
of their vector loop rounds differently). Elementwise operators are cut anywhere by threads, so the ones used here round
once: `add(alpha=)` and `lerp` round once or twice as the compiler likes, in the loop and in its tail.

Letters: K elements of one page.
Source: Kingma and Ba 2015, "Adam"; Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization";
Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms" (Lion); Duchi et al. 2011, "Adaptive Subgradient
Methods for Online Learning and Stochastic Optimization".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple, SupportsFloat

import torch
from torch import Tensor

from zero.core.lr_schedule import Schedule
from zero.core.moments import Bf16Moments, EightBitMoments, Moments
from zero.core.suggest import meant, own_arguments
from zero.errors import ConfigError


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


class Hyper(NamedTuple):
    """Every number that one step's updates need besides tensors, captured by value when the step decides them."""

    step: int
    """1 for the first update; skipped steps do not count."""
    divisor: float
    """Gradients are divided by it once, in fp32: ranks x accumulate x loss scale / clip coefficient."""
    groups: tuple[Settings, ...]
    numbers: Mapping[float, Tensor] = MappingProxyType({})
    """Of those above what kernels read from memory, as 0-dim fp32 tensors of one device: made once for all updates."""

    @property
    def lr(self) -> float:
        """Of the default group."""
        return self.groups[0].lr


Tensors = list[Tensor]
Numbers = Mapping[float, Tensor]
Update = Callable[[Tensors, Tensors, tuple[Tensors, ...], Settings, float, Numbers], None]
NO_NUMBERS: Numbers = MappingProxyType({})
FP32_MOMENTS = Moments()
SQUARES = "nu"
"""What every optimizer calls a mean or sum of squares."""
Mask = Callable[[str, tuple[int, ...]], bool]
Number = float | Schedule


def decay_matrices(name: str, shape: tuple[int, ...]) -> bool:
    """The usual mask: weights with 2 or more dimensions decay, biases and norms do not."""
    return len(shape) >= 2


@dataclass(frozen=True)
class Group:
    """Parameters with settings of their own; what is None is as in the optimizer's call.

        slow, late = zero.Group(["embed.*"], lr=1e-4), zero.Group(["head.*"], trains=lambda step: step > 100)
        optimizer = zero.adamw(1e-3, groups=[slow, late])

    The first group that takes a parameter has it.

    Args:
        takes: names of parameters, or patterns such as "blocks.*.bias", or a function of (name, shape).
        lr: learning rate, a number or a function of the step; None: the optimizer's.
        weight_decay: of all that it takes, likewise; None: the optimizer's, and its mask says what decays.
        betas: in the order of the optimizer's; SGD has its momentum there. None: the optimizer's.
        trains: whether it is updated at all, or a function of the step.
        live: a dict that is read at each step; what it has of lr, weight_decay, betas, momentum and trains wins.
    """

    takes: Collection[str] | Mask
    lr: Number | None = None
    weight_decay: Number | None = None
    betas: tuple[Number, ...] | None = None
    trains: bool | Callable[[int], bool] = True
    live: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        if callable(self.takes):
            return bool(self.takes(name, shape))
        return name in self._names or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def stranger(self, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """What of it fits none of these parameters, as a message; None: everything fits."""
        if callable(self.takes):
            taken = any(self.takes(name, shape) for name, shape in shapes.items())
            return None if taken else f"takes none of the model's {len(shapes)} parameters"
        for one in sorted(self._names):
            if one not in shapes and not any(fnmatchcase(name, one) for name in shapes):
                return f"takes {one!r}, and no parameter is named so{meant(one, shapes)}"
        return None

    @property
    def masked(self) -> bool:
        """Whether the optimizer's mask says what of it decays."""
        return self.weight_decay is None and "weight_decay" not in self.live

    def given(self) -> dict[str, Any]:
        """lr, weight_decay, betas and trains as they are now."""
        now = {"lr": self.lr, "weight_decay": self.weight_decay, "betas": self.betas, "trains": self.trains}
        if "momentum" in self.live:
            now["betas"] = (self.live["momentum"],)
        return now | {key: self.live[key] for key in now if key in self.live}

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset([self.takes] if isinstance(self.takes, str) else self.takes)  # type: ignore[arg-type]

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(name for name in self._names if {*"*?["} & {*name})


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
            _require("clip", self.clip, lambda clip: 0 < clip < inf, "more than 0, or none")

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
            "optim settings": f"{_numbers(self.update)} {[tuple(group(1)[1:]) for group in self.groups]}",
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
    update, betas = partial(_adam, torch._fused_adamw_, _eps(eps)), {"beta1": beta1, "beta2": beta2}
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
    update, betas = partial(_adam, torch._fused_adam_, _eps(eps)), {"beta1": beta1, "beta2": beta2}
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
    remembers = bool(momentum) or any(any(group.given()["betas"] or ()) for group in _listed(groups))
    if nesterov and not remembers:
        raise ConfigError("optim.nesterov=true looks ahead along the momentum, which is 0; set optim.momentum")
    moments, update, betas = ("mu",) if remembers else (), partial(_sgd, nesterov), {"momentum": momentum}
    made = _transform("sgd", moments, update, lr, betas, weight_decay, clip, decay, groups)
    return made if remembers else replace(made, groups=tuple(partial(_without_momentum, one) for one in made.groups))


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
    return _transform("lion", ("mu",), _lion, lr, {"beta1": beta1, "beta2": beta2}, weight_decay, clip, decay, groups)


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
    _require("lr_decay", lr_decay, _is_finite, "0 or more")
    update = partial(_adagrad, lr_decay, _eps(eps))
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
    _require("ema", decay, _is_share, "at least 0 and less than 1")
    return replace(
        transform,
        moments=(*transform.moments, "ema"),
        copies=(*transform.copies, "ema"),
        update=partial(_ema, transform.update, decay),
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
    groups, default = _listed(groups), Group((), lr, weight_decay, tuple(betas.values()))
    for key, value in {"lr": lr, "weight_decay": weight_decay, **betas}.items():
        if not callable(value):
            _in_range(key, value)
    settings = tuple(
        partial(_settings, group, default, tuple(betas), decays, f"groups[{i - 1}]." if i else "")
        for i, group in enumerate((default, *groups))
        for decays in (False, True)
    )
    return Transform(name, moments, update, settings, partial(_number, groups, decay), clip, given_groups=groups)


def _number(groups: tuple[Group, ...], decay: Mask, name: str, shape: tuple[int, ...]) -> int:
    for number, group in enumerate(groups, 1):
        if group.has(name, shape):
            return 2 * number + (decay(name, shape) if group.masked else True)
    return int(decay(name, shape))


def _settings(group: Group, default: Group, betas: tuple[str, ...], decays: bool, where: str, step: int) -> Settings:
    given = default.given() | {key: value for key, value in group.given().items() if value is not None}

    def at(key: str, value: Any) -> float:
        return float(_in_range(f"{where}{key} at step {step}", value(step) if callable(value) else value, key))

    if len(given["betas"]) != len(betas):
        wanted = f"({', '.join(betas)})" if betas else "none"
        raise ConfigError(f"optim.{where}betas={given['betas']}; this optimizer has {wanted}")
    trains = given["trains"](step) if callable(given["trains"]) else given["trains"]
    return Settings(
        at("lr", given["lr"]),
        at("weight_decay", given["weight_decay"]) if decays else 0.0,
        tuple(at(key, value) for key, value in zip(betas, given["betas"], strict=True)),
        bool(trains),
        step,
    )


def _without_momentum(settings: Callable[[int], Settings], step: int) -> Settings:
    """Refuse a momentum that begins later: nothing was set aside for it to be kept in."""
    now = settings(step)
    if any(now.betas):
        raise ConfigError(
            f"optim.momentum={now.betas[0]} at step {step}, and 0 at the beginning, so there is no moment to keep it "
            "in; begin with any momentum above 0, which may be changed before the first step"
        )
    return now


def _adam(
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


def _sgd(
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


def _lion(
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


def _adagrad(
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


def _ema(
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


def _divisor(divisor: float, like: Tensor, numbers: Numbers) -> Tensor | None:
    return None if divisor == 1.0 else _scalar(divisor, like, numbers)


def _scalar(value: float, like: Tensor, numbers: Numbers) -> Tensor:
    made = numbers.get(float(value))
    return made if made is not None and made.device == like.device else on_device(value, like.device)


def on_device(value: float, device: torch.device) -> Tensor:
    """0-dim fp32. `full` and not `tensor`: on a GPU it is one launch, where a copy from the host would wait for it."""
    return torch.full((), value, dtype=torch.float32, device=device)


def _numbers(update: Any) -> list[Any]:
    """What an optimizer's update was made with."""
    given = update.args if isinstance(update, partial) else ()
    return [
        one
        for arg in given
        for one in (_numbers(arg) if isinstance(arg, partial) else [arg])
        if isinstance(one, float | int)
    ]


def _listed(groups: Sequence[Group]) -> tuple[Group, ...]:
    if isinstance(groups, Group):
        raise ConfigError("optim.groups is one Group; pass a list: groups=[zero.Group(...)]")
    return tuple(groups)


def _in_range(key: str, value: float, kind: str | None = None) -> float:
    if (kind or key) in ("lr", "weight_decay"):
        return _require(key, value, _is_finite, "0 or more and finite: check the schedule")
    return _require(key, value, _is_share, "at least 0 and less than 1")


def _eps(value: float) -> float:
    return _require("eps", value, _is_finite, "0 or more")


def _is_finite(value: float) -> bool:
    return 0 <= value < inf


def _is_share(value: float) -> bool:
    return 0 <= value < 1


def _require(key: str, value: float, holds: Callable[[float], bool], wanted: str) -> float:
    """`holds` is to be false for NaN too, as every comparison with NaN is."""
    if not isinstance(value, SupportsFloat):
        raise ConfigError(f"optim.{key}={value!r} is a {type(value).__name__}; it must be a number")
    if not holds(value):
        raise ConfigError(f"optim.{key}={value}; it must be {wanted}")
    return value
