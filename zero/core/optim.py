"""Optimizers as functions that update pages of parameters.

A `Transform` is a record of the names of the moments, a function from parameters to groups, and `update`, which updates
pages of parameters and moments in place. It knows nothing of ranks, stores or files. Numbers that change from step to
step are passed by value in `Hyper`, so an update may run long after the step that decided it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from zero.core import checks, updates
from zero.core.groups import (
    Group,
    Mask,
    Number,
    as_tuple,
    check_setting,
    decay_matrices,
    number_of,
    settings_at,
)
from zero.core.layout import Layout
from zero.core.moments import Bf16Moments, EightBitMoments, Moments
from zero.core.muon import Matrices, Muon
from zero.core.setting_types import EXCLUDED, Adjust
from zero.core.updates import NO_NUMBERS, Numbers, Settings, Update
from zero.errors import ConfigError


class Hyper(NamedTuple):
    """All numbers that the updates of one step need, copied by value when the step decides the updates."""

    step: int
    """1 for the first update; skipped steps do not count."""
    divisor: float
    """Divisor of the gradients, applied once in fp32: ranks x accumulate x loss scale / clip coefficient."""
    groups: tuple[Settings, ...]
    numbers: Numbers = NO_NUMBERS
    """Device tensors of numbers that fused kernels read from memory, made once for all updates of a step."""
    table: Tensor | None = None
    """The numbers of all groups on a device with kernels of its own, see `zero.core.fused`."""

    @property
    def lr(self) -> float:
        """The learning rate of the default group."""
        return self.groups[0].lr


FP32_MOMENTS = Moments()
MOMENTUM, SQUARES = "mu", "nu"
"""The moments that are a mean of gradients, and a mean or a sum of their squares, in every optimizer that has them."""


@dataclass(frozen=True)
class Transform:
    """An optimizer as data. Make one with `adamw`, `adam`, `sgd`, `lion`, `adagrad` or `muon`.

    Moments start as zeros, except those in `copies`, which start as copies of the parameters.

    Raises:
        ConfigError: `clip` is not more than 0.
    """

    name: str
    moments: tuple[str, ...]
    update: Update
    constants: tuple[float, ...]
    """Numbers such as eps that are fixed in `update`, for comparison between ranks."""
    groups: tuple[Callable[[int], Settings], ...]
    """Function from the step, 1 for the first update, to the settings, by group number; the default group is first."""
    group: Callable[[str, tuple[int, ...]], int]
    """Function from the (name, shape) of a parameter to the number of its group."""
    clip: float | None = None
    """Largest global gradient norm; None: no clipping."""
    copies: tuple[str, ...] = ()
    given_groups: tuple[Group, ...] = ()
    kept: Moments = FP32_MOMENTS
    """The storage format of moments between updates; moments in `copies` are always stored in fp32."""
    muon: Muon | None = None
    """The parameters that Muon updates; `update` is for the others. None: Muon updates none."""

    def __post_init__(self) -> None:
        if self.clip is not None:
            checks.number("optim.clip", self.clip, lambda clip: 0 < clip < inf, "more than 0, or none")

    def form(self, moment: str) -> Moments:
        """Return the storage format of a moment."""
        if moment in self.copies:
            return FP32_MOMENTS
        return self.kept.of_squares() if moment == SQUARES else self.kept

    def forms(self, moments: Iterable[str]) -> dict[str, Moments]:
        """Return the storage formats of moments, by name."""
        return {moment: self.form(moment) for moment in moments}

    def group_of(self, name: str, shape: tuple[int, ...], *, embedding: bool) -> int:
        """Return the number of a parameter's group. Muon does not update those of embeddings, whatever their name."""
        number = self.group(name, shape)
        return number + self.muon.groups if embedding and self.muon and self.orthogonalizes(number) else number

    def orthogonalizes(self, group: int) -> bool:
        """Return whether Muon updates the parameters of a group."""
        return self.muon is not None and group < self.muon.groups

    def matrices_of(self, layout: Layout, group: int) -> tuple[Matrices, ...]:
        """Return the batches of matrices of a flat of one group's parameters; empty if Muon does not update them."""
        return tuple(self.muon.batches(layout)) if self.muon is not None and self.orthogonalizes(group) else ()

    def moments_of(self, group: int) -> tuple[str, ...]:
        """Return the moments of the parameters of a group."""
        return (MOMENTUM, *self.copies) if self.orthogonalizes(group) else self.moments

    def check_groups(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every group, and every name and pattern in it, matches a parameter.

        Args:
            shapes: name -> shape of all parameters.

        Raises:
            ConfigError: a group, or a name or pattern in it, matches no parameter, or `blocks` of Muon does not fit.
        """
        if self.muon is not None and (problem := self.muon.problem(shapes)):
            raise ConfigError(problem)
        for number, group in enumerate(self.given_groups):
            problem = group.problem(shapes)
            if problem:
                raise ConfigError(f"optim.groups[{number}] {problem}")

    def hyper_at(self, step: int, divisor: float) -> Hyper:
        """Return the numbers of update `step` that are known before the gradient norm is.

        Raises:
            ConfigError: a schedule or a `live` dict returned a number out of range, or a momentum above 0 for an
                optimizer that was made without momentum, so that no moment is stored for it.
        """
        groups = tuple(group(step) for group in self.groups)
        if self.moments == self.copies and any(any(now.betas) for now in groups):
            raise ConfigError("optim.momentum was 0 at the beginning. Begin with any momentum above 0.")
        return Hyper(step, divisor, groups)

    def fields(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks, as name -> text."""
        return {
            "optim": f"{self.name} clip={self.clip} {self.muon or ''}".rstrip(),
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
        momentum: 0 or more and less than 1; a number or a function of the step. With 0 no moment is stored.
        nesterov: use Nesterov momentum.

    Raises:
        ConfigError: as `adamw`, or `nesterov` without a momentum.
    """
    nesterov = checks.boolean("optim.nesterov", nesterov)
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
    """Make Lion: steps along the sign of a momentum, with decoupled weight decay. Other arguments as in `adamw`.

    Args:
        lr: learning rate, usually a third to a tenth of AdamW's.
        beta1: weight of the momentum in the direction of the step, beside 1 - beta1 for the gradient; 0 or more and
            less than 1; a number or a function of the step.
        beta2: decay of the momentum, 0 or more and less than 1; a number or a function of the step.
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
        lr_decay: the learning rate of step t is lr / (1 + (t - 1) x lr_decay); 0 or more.
    """
    constants = _checked("lr_decay", lr_decay), _checked("eps", eps)
    update = partial(updates.adagrad, lr_decay, eps)
    return _transform("adagrad", ("nu",), update, constants, lr, {}, weight_decay, clip, decay, groups)


def muon(
    lr: Number,
    *,
    momentum: Number = 0.95,
    nesterov: bool = True,
    weight_decay: Number = 0.1,
    adjust: Adjust = "original",
    blocks: Mapping[str, int] | None = None,
    exclude: Sequence[str] = EXCLUDED,
    adamw_lr: Number | None = None,
    beta1: Number = 0.9,
    beta2: Number = 0.95,
    eps: float = 1e-8,
    clip: float | None = None,
    decay: Mask = decay_matrices,
    groups: Sequence[Group] = (),
) -> Transform:
    """Make Muon for matrices, as `torch.optim.Muon`, and AdamW for all other parameters.

    Its one moment per matrix is a momentum, whose matrices are orthogonalized in bf16 before they are subtracted, see
    `zero.core.muon`. Other arguments as in `adamw`.

    Args:
        lr: learning rate of the matrices.
        momentum: decay of the momentum, 0 or more and less than 1; a number or a function of the step.
        nesterov: use Nesterov momentum.
        adjust: factor of the learning rate for a matrix: "original", the root of rows / columns if that is above 1; or
            "match_rms_adamw", 0.2 times the root of the larger one, with which AdamW's learning rates fit.
        blocks: number of matrices in a parameter, one below the other, by patterns of names, such as {"*.qkv.weight":
            3}. Parameters of 3 and more dimensions that no pattern matches go to AdamW.
        exclude: patterns of the names of matrices that AdamW updates, such as embeddings.
        adamw_lr: learning rate of AdamW; None: `lr`.
        beta1, beta2, eps: settings of AdamW.
        groups: as in `adamw`; one beta is Muon's momentum, two are AdamW's.

    Raises:
        ConfigError: a setting is not a number or is out of range, or a number of matrices is not 1 or more.
    """
    checks.one_of("optim.adjust", adjust, get_args(Adjust))
    exclude, nesterov = checks.patterns("optim.exclude", exclude), checks.boolean("optim.nesterov", nesterov)
    if not isinstance(blocks or {}, Mapping):
        raise ConfigError(
            f"optim.blocks={blocks!r}: must be a dict of patterns and numbers, such as {{'*.qkv.weight': 3}}"
        )
    for pattern, count in (blocks or {}).items():
        checks.text("a pattern of optim.blocks", pattern)
        if type(count) is not int or count < 1:
            raise ConfigError(f"optim.blocks: {pattern!r} has {count!r} matrices, but must have 1 or more")
    shared: dict[str, Any] = {"weight_decay": weight_decay, "clip": clip, "decay": decay, "groups": groups}
    betas, update = {"beta1": beta1, "beta2": beta2}, partial(updates.adam, torch._fused_adamw_, _checked("eps", eps))
    rest_lr = lr if adamw_lr is None else adamw_lr
    rest = _transform("adamw", (MOMENTUM, SQUARES), update, (eps,), rest_lr, betas, **shared, others=(1,))
    matrices = _transform("muon", (MOMENTUM,), update, (), lr, {"momentum": momentum}, **shared, others=(2,))
    chosen = Muon(len(matrices.groups), nesterov, adjust, tuple((blocks or {}).items()), exclude)
    group = partial(_group_of, chosen, matrices.group, rest.group)
    return replace(rest, name="muon", groups=(*matrices.groups, *rest.groups), group=group, muon=chosen)


def with_ema(transform: Transform, decay: float = 0.999) -> Transform:
    """Add an exponential moving average of the parameters: ema = decay x ema + (1 - decay) x parameter per update.

    The average is a moment named "ema", stored on the tier of the other moments; `full_state_dict(state, "ema")` reads
    it.

    Args:
        transform: an optimizer, from `adamw` or one of the others.
        decay: 0 or more and less than 1.

    Raises:
        ConfigError: `decay` is out of range, or the optimizer has an average already.
    """
    check_setting("ema", decay)
    _check_transform(transform, "zero.with_ema")
    if "ema" in transform.copies:
        raise ConfigError("optim.ema: this optimizer has an average already. Call zero.with_ema once.")
    return replace(
        transform,
        moments=(*transform.moments, "ema"),
        copies=(*transform.copies, "ema"),
        update=partial(updates.ema, transform.update, decay),
        muon=transform.muon and replace(transform.muon, ema=decay),
        constants=(*transform.constants, decay),
    )


def with_moments(transform: Transform, dtype: str = "bf16", *, seed: int = 0) -> Transform:
    """Store the moments of an optimizer in another dtype; updates still compute in fp32.

    A moment takes 4 bytes per parameter in fp32, 2 in bf16, and 1 1/64 in 8 bits, where 64 elements share an exponent;
    in memory, on disk and in transfers. bf16 and 8 bits are rounded stochastically, with random bits that depend on
    seed, step, parameter and element only, see `zero.core.moments`. The average of `with_ema` stays in fp32.

    Args:
        transform: an optimizer, from `adamw` or one of the others.
        dtype: "fp32", "bf16" or "8bit".
        seed: the seed of the random bits; the same on every rank.

    Raises:
        ConfigError: `dtype` is none of these, or `seed` is not a whole number.
    """
    _check_transform(transform, "zero.with_moments")
    checks.whole("seed of zero.with_moments", seed, None)
    forms = {"fp32": FP32_MOMENTS, "bf16": Bf16Moments(seed), "8bit": EightBitMoments(seed)}
    return replace(transform, kept=forms[checks.one_of("optim.moments", dtype, forms)])


def _check_transform(value: object, call: str) -> None:
    if not isinstance(value, Transform):
        raise ConfigError(f"{call} takes an optimizer, not a {type(value).__name__}. Write {call}(zero.adamw(lr)).")


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
    others: tuple[int, ...] = (),
) -> Transform:
    """Make a transform with two numbers for each group i: 2 i without weight decay and 2 i + 1 with it.

    Group 0 has the parameters that none of `groups` matches.
    """
    if not callable(decay):
        raise ConfigError(
            f"decay={decay!r}: must be a function of a parameter's name and shape. Write decay=lambda name, shape: "
            "True for all of them."
        )
    groups, default = as_tuple(groups), Group((), lr, weight_decay, tuple(betas.values()))
    for key, value in {"lr": lr, "weight_decay": weight_decay, **betas}.items():
        if not callable(value):
            check_setting(key, value)
    settings = tuple(
        partial(settings_at, group, default, tuple(betas), others, decays, f"groups[{i - 1}]." if i else "")
        for i, group in enumerate((default, *groups))
        for decays in (False, True)
    )
    group_of = partial(number_of, groups, decay)
    return Transform(name, moments, update, constants, settings, group_of, clip, given_groups=groups)


GroupOf = Callable[[str, tuple[int, ...]], int]


def _group_of(muon: Muon, matrices: GroupOf, rest: GroupOf, name: str, shape: tuple[int, ...]) -> int:
    return matrices(name, shape) if muon.takes(name, shape) else muon.groups + rest(name, shape)


def _checked(key: str, value: float) -> float:
    return checks.number(f"optim.{key}", value, lambda number: 0 <= number < inf, "0 or more")
