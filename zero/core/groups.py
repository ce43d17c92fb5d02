"""Which parameters share settings, and what these are at each step.

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


def number_of(groups: tuple[Group, ...], decay: Mask, name: str, shape: tuple[int, ...]) -> int:
    """Of a parameter's settings: 2 i without decay and 2 i + 1 with it, i = 0 where no group has it."""
    for number, group in enumerate(groups, 1):
        if group.has(name, shape):
            return 2 * number + (decay(name, shape) if group.masked else True)
    return int(decay(name, shape))


def settings_of(group: Group, default: Group, betas: tuple[str, ...], decays: bool, where: str, step: int) -> Settings:
    """What a group, or else the default one, says of a step.

    Args:
        betas: what the optimizer calls them.
        decays: the half of the group that does.
        where: of the group in a message.

    Raises:
        ConfigError: a number out of range, or not as many betas.
    """
    given = default.given() | {key: value for key, value in group.given().items() if value is not None}

    def at(key: str, value: Any) -> float:
        return float(in_range(f"{where}{key} at step {step}", value(step) if callable(value) else value, key))

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


def without_momentum(settings: Callable[[int], Settings], step: int) -> Settings:
    """Refuse a momentum that begins later: nothing was set aside for it to be kept in."""
    now = settings(step)
    if any(now.betas):
        raise ConfigError(
            f"optim.momentum={now.betas[0]} at step {step}, and 0 at the beginning, so there is no moment to keep it "
            "in; begin with any momentum above 0, which may be changed before the first step"
        )
    return now


def listed(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Refuse one that is in no list."""
    if isinstance(groups, Group):
        raise ConfigError("optim.groups is one Group; pass a list: groups=[zero.Group(...)]")
    return tuple(groups)


def in_range(key: str, value: float, kind: str | None = None) -> float:
    """Refuse a rate, a decay or a momentum that no update takes; `kind` says which it is, where `key` says where."""
    if (kind or key) in ("lr", "weight_decay"):
        return require(key, value, is_finite, "0 or more and finite: check the schedule")
    return require(key, value, is_share, "at least 0 and less than 1")


def is_finite(value: float) -> bool:
    return 0 <= value < inf


def is_share(value: float) -> bool:
    return 0 <= value < 1


def require(key: str, value: float, holds: Callable[[float], bool], wanted: str) -> float:
    """`holds` is to be false for NaN too, as every comparison with NaN is."""
    if not isinstance(value, SupportsFloat):
        raise ConfigError(f"optim.{key}={value!r} is a {type(value).__name__}; it must be a number")
    if not holds(value):
        raise ConfigError(f"optim.{key}={value}; it must be {wanted}")
    return value
