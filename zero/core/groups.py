"""Groups of parameters with settings of their own, and the values of these settings at each step.

A **group** is a set of parameters with the same `GroupSettings`: learning rate, weight decay, momenta,
whether it trains.
Each setting is a constant, a function of the step, or an entry of a dict that the user holds and that is read at each
step, like an entry of torch's `param_groups`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from math import inf
from typing import Any

from zero.core import checks
from zero.core.lr_schedule import Schedule
from zero.core.suggest import meant
from zero.core.updates import GroupSettings
from zero.errors import ConfigError

Mask = Callable[[str, tuple[int, ...]], bool]
Number = float | Schedule
LIVE = "lr", "weight_decay", "betas", "momentum", "trains"
"""The entries of a `live` dict that are read."""


def decay_matrices(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter decays by default: weights of 2 or more dimensions do, biases and norms do not."""
    return len(shape) >= 2


@dataclass(frozen=True)
class Group:
    """A set of parameters with settings of their own; a setting of None is the optimizer's.

        slow, late = zero.Group(["embed.*"], lr=1e-4), zero.Group(["head.*"], trains=lambda step: step > 100)
        optimizer = zero.adamw(1e-3, groups=[slow, late])

    A parameter that several groups match belongs to the first of them.

    Args:
        takes: the group's parameters: names, patterns such as "blocks.*.bias", or a function of (name, shape) that
            returns whether a parameter belongs to the group.
        lr: learning rate, a number or a function of the step; None: the optimizer's.
        weight_decay: weight decay of every parameter of the group, a number or a function of the step; None: the
            optimizer's, for the parameters that its `decay` function selects.
        betas: decay rates of the moments in the optimizer's order, each a number or a function of the step; (momentum,)
            for SGD. None: the optimizer's.
        trains: whether the parameters are updated, a bool or a function of the step.
        live: a dict that is read at each step. Its entries lr, weight_decay, betas, momentum and trains override the
            arguments above. The dict may be one of torch's `param_groups`, which have further entries.

    Raises:
        ConfigError: an argument has another type, or `live` has entries that are not read.
    """

    takes: Collection[str] | Mask
    lr: Number | None = None
    weight_decay: Number | None = None
    betas: tuple[Number, ...] | None = None
    trains: bool | Callable[[int], bool] = True
    live: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not callable(self.takes):
            checks.patterns("takes of a Group", [self.takes] if isinstance(self.takes, str) else self.takes)
        if not callable(self.trains):
            checks.boolean("trains of a Group", self.trains)
        if not isinstance(self.live, Mapping):
            raise ConfigError(f"live of a Group is {self.live!r}. Pass a dict with {', '.join(LIVE)}.")
        for entry in self.live:
            if entry not in LIVE and "params" not in self.live:
                raise ConfigError(f"live of a Group has {entry!r}, which is not read. Write {', '.join(LIVE)}.")

    def has(self, name: str, shape: tuple[int, ...]) -> bool:
        if callable(self.takes):
            return bool(self.takes(name, shape))
        return name in self._names or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def problem(self, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Return a message if a name, a pattern or the function in `takes` matches no parameter; None: all match.

        Args:
            shapes: name -> shape of every parameter.
        """
        if callable(self.takes):
            taken = any(self.takes(name, shape) for name, shape in shapes.items())
            return None if taken else f"takes none of the model's {len(shapes)} parameters"
        for pattern in sorted(self._names):
            if pattern not in shapes and not any(fnmatchcase(name, pattern) for name in shapes):
                return f"takes {pattern!r}, but no parameter matches it{meant(pattern, shapes)}"
        return None

    @property
    def masked(self) -> bool:
        """Return whether the optimizer's `decay` function selects the parameters of this group that decay."""
        return self.weight_decay is None and "weight_decay" not in self.live

    def now(self) -> dict[str, Any]:
        """Return lr, weight_decay, betas and trains; the current entries of `live` override the arguments."""
        values = {"lr": self.lr, "weight_decay": self.weight_decay, "betas": self.betas, "trains": self.trains}
        live = {key: self.live[key] for key in LIVE if key in self.live}
        if None in live.values():
            unset = next(key for key, value in live.items() if value is None)
            raise ConfigError(f"live of a Group has {unset}=None. Write a value, or leave the entry out.")
        if "momentum" in live:
            values["betas"] = (live.pop("momentum"),)
        return values | live

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset([self.takes] if isinstance(self.takes, str) else self.takes)  # type: ignore[arg-type]

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(name for name in self._names if {*"*?["} & {*name})


def number_of(groups: tuple[Group, ...], decay: Mask, name: str, shape: tuple[int, ...]) -> int:
    """Return the index of a parameter's settings: 2 i without weight decay, 2 i + 1 with it.

    i numbers the groups from 1; 0 is for parameters that no group matches.
    """
    for number, group in enumerate(groups, 1):
        if group.has(name, shape):
            return 2 * number + (decay(name, shape) if group.masked else True)
    return int(decay(name, shape))


def settings_at(
    group: Group,
    default: Group,
    betas: tuple[str, ...],
    others: tuple[int, ...],
    decays: bool,
    where: str,
    step: int,
) -> GroupSettings:
    """Return the settings of a group at `step`; a setting that the group does not have is taken from `default`.

    Args:
        betas: the names of the optimizer's betas.
        others: numbers of betas that the group may have for another optimizer; then the betas of `default` are used.
        decays: True: the settings of parameters that decay. False: the same with a weight decay of 0.
        where: prefix of a setting's name in messages, such as "groups[0].".

    Raises:
        ConfigError: a setting is out of range, or the number of betas is not the optimizer's.
    """
    values = default.now() | {key: value for key, value in group.now().items() if value is not None}

    def at(key: str, value: Any) -> float:
        return float(check_setting(key, value(step) if callable(value) else value, f"{where}{key} at step {step}"))

    if not isinstance(values["betas"], list | tuple):
        raise ConfigError(f"optim.{where}betas={values['betas']!r}: must be a list of numbers. Write [0.9].")
    if len(values["betas"]) in others:
        values["betas"] = default.betas
    if len(values["betas"]) != len(betas):
        wanted = f"the betas ({', '.join(betas)})" if betas else "no betas"
        raise ConfigError(f"optim.{where}betas={values['betas']}: this optimizer has {wanted}")
    trains = values["trains"](step) if callable(values["trains"]) else values["trains"]
    return GroupSettings(
        at("lr", values["lr"]),
        at("weight_decay", values["weight_decay"]) if decays else 0.0,
        tuple(at(key, value) for key, value in zip(betas, values["betas"], strict=True)),
        checks.boolean(f"optim.{where}trains at step {step}", trains),
        step,
    )


def as_tuple(groups: Sequence[Group]) -> tuple[Group, ...]:
    checks.instance("optim.groups", groups, list | tuple, "Pass a list: groups=[zero.Group(...)].")
    for number, group in enumerate(groups):
        checks.instance(f"optim.groups[{number}]", group, Group, "Write zero.Group(names, lr=1e-4).")
    return tuple(groups)


def check_setting(key: str, value: float, where: str = "") -> float:
    """Return `value`, a learning rate, a weight decay or a momentum, or raise ConfigError if it is out of range.

    Args:
        key: "lr", "weight_decay", or a momentum such as "beta1".
        where: the name of the setting in the message, if it is not `key`.
    """
    where = f"optim.{where or key}"
    if key in ("lr", "weight_decay"):
        wanted = "finite and 0 or more. Check the schedule."
        return checks.number(where, value, lambda number: 0 <= number < inf, wanted)
    return checks.number(where, value, lambda number: 0 <= number < 1, "at least 0 and less than 1")
