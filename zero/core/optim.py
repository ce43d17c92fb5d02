"""Optimizers as functions that update pages of parameters; `zero.core.optimizers` has one in each file.

A `Transform` is a record of the names of the moments, a function from parameters to groups, and `update`, which updates
pages of parameters and moments in place. It knows nothing of ranks, stores or files. Numbers that change from step to
step are passed by value in `Hyper`, so an update may run long after the step that decided it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple

from torch import Tensor

from zero.core import checks
from zero.core.decision import Decision
from zero.core.groups import (
    Group,
    Mask,
    Number,
    as_tuple,
    check_setting,
    number_of,
    settings_at,
)
from zero.core.layout import Layout
from zero.core.matrices import Matrices, MatrixRule
from zero.core.moments import Bf16Moments, EightBitMoments, Moments
from zero.core.tile import full_name
from zero.core.updates import GroupSettings, PageUpdate
from zero.errors import ConfigError


class Hyper(NamedTuple):
    """All numbers that the updates of one step need, copied by value when the step decides the updates."""

    step: int
    """1 for the first update; skipped steps do not count."""
    divisor: float
    """Divisor of the gradients, applied once in fp32: ranks x accumulate x loss scale / clip coefficient."""
    groups: tuple[GroupSettings, ...]
    decision: Decision | None = None
    """The step's decision on the device, if the host has not waited for it; `divisor` is that without clipping then."""
    table: Tensor | None = None
    """The numbers of all groups on the device, see `zero.core.fused`."""

    @property
    def lr(self) -> float:
        """The learning rate of the default group."""
        return self.groups[0].lr


class Fused(NamedTuple):
    """An update in the kernel of `zero.platform.tiles`, which compiles the function `tile` into itself."""

    tile: Callable[..., Any]
    """Function of a module in Triton's language, whose name `tl` it gets from the kernel. It takes parameters,
    gradients, a pointer to the numbers, and at most two moments; it returns the updated parameters and moments."""
    numbers: Callable[[GroupSettings], tuple[float, ...]]
    """Function from a group's settings to the numbers that `tile` reads: at most 8."""
    average: float | None = None
    """The decay of a running mean of the parameters, the last moment, which `tile` does not get; None: no mean."""

    @property
    def rule(self) -> str:
        """The full name of `tile`, by which the kernel finds it."""
        return full_name(self.tile)


FP32_MOMENTS = Moments()
MOMENTUM, SQUARES = "mu", "nu"
"""The moments that are a mean of gradients, and a mean or a sum of their squares, in every optimizer that has them."""


@dataclass(frozen=True)
class Transform:
    """An optimizer as data. Make one with `zero.adamw` or another function of `zero.core.optimizers`.

    Moments start as zeros, except those in `copies`, which start as copies of the parameters.

    Raises:
        ConfigError: `clip` is not more than 0.
    """

    name: str
    moments: tuple[str, ...]
    update: PageUpdate
    constants: tuple[float, ...]
    """Numbers such as eps that are fixed in `update`, for comparison between ranks."""
    groups: tuple[Callable[[int], GroupSettings], ...]
    """Function from the step, 1 for the first update, to the settings, by group number; the default group is first."""
    group: Callable[[str, tuple[int, ...]], int]
    """Function from the (name, shape) of a parameter to the number of its group."""
    clip: float | None = None
    """Largest global gradient norm; None: no clipping."""
    copies: tuple[str, ...] = ()
    given_groups: tuple[Group, ...] = ()
    kept: Moments = FP32_MOMENTS
    """The storage format of moments between updates; moments in `copies` are always stored in fp32."""
    matrix_rule: MatrixRule | None = None
    """The update of whole matrices; `update` is for all other parameters. None: there are no other updates."""
    fused: Fused | None = None
    """The rule of `update` in the kernel of a GPU; None if it has none."""

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
        """Return the number of a parameter's group. Embeddings are never updated as matrices, whatever their name."""
        number = self.group(name, shape)
        rule = self.matrix_rule
        return number + rule.groups if embedding and rule and self.takes_matrices(number) else number

    def takes_matrices(self, group: int) -> bool:
        """Return whether the parameters of a group are updated as whole matrices."""
        return self.matrix_rule is not None and group < self.matrix_rule.groups

    def matrices_of(self, layout: Layout, group: int) -> tuple[Matrices, ...]:
        """Return the batches of matrices of a flat of one group's parameters; empty if they are no matrices."""
        rule = self.matrix_rule
        return tuple(rule.batches(layout)) if rule is not None and self.takes_matrices(group) else ()

    def moments_of(self, group: int) -> tuple[str, ...]:
        """Return the moments of the parameters of a group."""
        return (MOMENTUM, *self.copies) if self.takes_matrices(group) else self.moments

    def check_groups(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every group, and every name and pattern in it, matches a parameter.

        Args:
            shapes: name -> shape of all parameters.

        Raises:
            ConfigError: a group, or a name or pattern in it, matches no parameter, or a setting for matrices
                does not fit.
        """
        if self.matrix_rule is not None and (problem := self.matrix_rule.problem(shapes)):
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
            "optim": f"{self.name} clip={self.clip} {self.matrix_rule or ''}".rstrip(),
            "optim settings": f"{self.constants} {[tuple(group(1)[1:]) for group in self.groups]}",
            "optim.lr": str([group(1).lr for group in self.groups]),
            "optim.moments": str(self.kept),
        }


def with_moments(transform: Transform, dtype: str = "bf16", *, seed: int = 0) -> Transform:
    """Store the moments of an optimizer in another dtype; updates still compute in fp32.

    A moment takes 4 bytes per parameter in fp32, 2 in bf16, and 1 1/64 in 8 bits, where 64 elements share an exponent;
    in memory, on disk and in transfers. bf16 and 8 bits are rounded stochastically, with random bits that depend on
    seed, step, parameter and element only, see `zero.core.moments`. The average of `with_ema` stays in fp32.

    Args:
        transform: an optimizer, from `adamw` or a similar function.
        dtype: "fp32", "bf16" or "8bit".
        seed: the seed of the random bits; the same on every rank.

    Raises:
        ConfigError: `dtype` is none of these, or `seed` is not a whole number.
    """
    check_transform(transform, "zero.with_moments")
    checks.whole("seed of zero.with_moments", seed, None)
    forms = {"fp32": FP32_MOMENTS, "bf16": Bf16Moments(seed), "8bit": EightBitMoments(seed)}
    return replace(transform, kept=forms[checks.one_of("optim.moments", dtype, forms)])


def check_transform(value: object, call: str) -> None:
    if not isinstance(value, Transform):
        raise ConfigError(f"{call} takes an optimizer, not a {type(value).__name__}. Write {call}(zero.adamw(lr)).")


def make_transform(
    name: str,
    moments: tuple[str, ...],
    update: PageUpdate,
    constants: tuple[float, ...],
    lr: Number,
    betas: Mapping[str, Number],
    weight_decay: Number,
    clip: float | None,
    decay: Mask,
    groups: Sequence[Group],
    *,
    others: tuple[int, ...] = (),
    fused: Fused | None = None,
) -> Transform:
    """Make a transform with two numbers for each group i: 2 i without weight decay and 2 i + 1 with it.

    Group 0 has the parameters that none of `groups` matches.

    Args:
        betas: the numbers by which moments decay, by the names of their settings.
        others: the numbers of betas that a group may have as well, for updates that are not made here.
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
    return Transform(name, moments, update, constants, settings, group_of, clip, given_groups=groups, fused=fused)


def constant(key: str, value: float) -> float:
    """Return a constant of an optimizer, which must be 0 or more."""
    return checks.number(f"optim.{key}", value, lambda number: 0 <= number < inf, "0 or more")
