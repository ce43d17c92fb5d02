"""Groups of parameters that share settings, and the values of these at each step.

A **group** is the parameters that share `Settings`. Its learning rate, decay and momenta are numbers, functions of the
step, or read at each step from a dict that the user holds, as the `param_groups` of torch; so is whether it trains.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from math import inf
from typing import Any, SupportsFloat

from zero.core.lr_schedule import Schedule
from zero.core.suggest import meant
from zero.core.updates import Settings
from zero.errors import ConfigError

Mask = Callable[[str, tuple[int, ...]], bool]
Number = float | Schedule


def decay_matrices(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter has 2 or more dimensions: weights decay, biases and norms do not."""
    return len(shape) >= 2


@dataclass(frozen=True)
class Group:
    """Parameters with settings of their own; a setting that is None is as in the optimizer's call.

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

    def problem(self, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Return a message about a name, a pattern or a function that fits none of these parameters; None: all fit."""
        if callable(self.takes):
            taken = any(self.takes(name, shape) for name, shape in shapes.items())
            return None if taken else f"takes none of the model's {len(shapes)} parameters"
        for pattern in sorted(self._names):
            if pattern not in shapes and not any(fnmatchcase(name, pattern) for name in shapes):
                return f"takes {pattern!r}, and no parameter is named so{meant(pattern, shapes)}"
        return None

    @property
    def masked(self) -> bool:
        """Return whether the optimizer's mask decides which of its parameters decay."""
        return self.weight_decay is None and "weight_decay" not in self.live

    def now(self) -> dict[str, Any]:
        """Return lr, weight_decay, betas and trains as they are now."""
        values = {"lr": self.lr, "weight_decay": self.weight_decay, "betas": self.betas, "trains": self.trains}
        if "momentum" in self.live:
            values["betas"] = (self.live["momentum"],)
        return values | {key: self.live[key] for key in values if key in self.live}

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset([self.takes] if isinstance(self.takes, str) else self.takes)  # type: ignore[arg-type]

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(name for name in self._names if {*"*?["} & {*name})


def number_of(groups: tuple[Group, ...], decay: Mask, name: str, shape: tuple[int, ...]) -> int:
    """Return the number of a parameter's settings: 2 i without decay, 2 i + 1 with it, i = 0 where no group has it."""
    for number, group in enumerate(groups, 1):
        if group.has(name, shape):
            return 2 * number + (decay(name, shape) if group.masked else True)
    return int(decay(name, shape))


def settings_at(group: Group, default: Group, betas: tuple[str, ...], decays: bool, where: str, step: int) -> Settings:
    """Return the settings of a group at a step; what the group leaves out is the default group's.

    Args:
        betas: their names in the optimizer.
        decays: the half of the group that has weight decay.
        where: the group in a message.

    Raises:
        ConfigError: a number out of range, or another number of betas.
    """
    values = default.now() | {key: value for key, value in group.now().items() if value is not None}

    def at(key: str, value: Any) -> float:
        return float(check_setting(key, value(step) if callable(value) else value, f"{where}{key} at step {step}"))

    if len(values["betas"]) != len(betas):
        wanted = f"({', '.join(betas)})" if betas else "none"
        raise ConfigError(f"optim.{where}betas={values['betas']}; this optimizer has {wanted}")
    trains = values["trains"]
    return Settings(
        at("lr", values["lr"]),
        at("weight_decay", values["weight_decay"]) if decays else 0.0,
        tuple(at(key, value) for key, value in zip(betas, values["betas"], strict=True)),
        bool(trains(step) if callable(trains) else trains),
        step,
    )


def as_tuple(groups: Sequence[Group]) -> tuple[Group, ...]:
    if isinstance(groups, Group):
        raise ConfigError("optim.groups is one Group. Pass a list: groups=[zero.Group(...)].")
    return tuple(groups)


def check_setting(key: str, value: float, where: str = "") -> float:
    """Return a rate, a decay or a momentum that an update takes; `where` replaces `key` in the message."""
    if key in ("lr", "weight_decay"):
        return require(
            where or key, value, lambda number: 0 <= number < inf, "0 or more and finite: check the schedule"
        )
    return require(where or key, value, lambda number: 0 <= number < 1, "at least 0 and less than 1")


def require(key: str, value: float, holds: Callable[[float], bool], wanted: str) -> float:
    """Return `value` if it `holds`, which must be false for NaN, as every comparison with NaN is."""
    if not isinstance(value, SupportsFloat):
        raise ConfigError(f"optim.{key}={value!r} is a {type(value).__name__}; it must be a number")
    if not holds(value):
        raise ConfigError(f"optim.{key}={value}; it must be {wanted}")
    return value
