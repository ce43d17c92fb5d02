"""Choose full values: the state of a source, the names that a call means, and the kinds of value that they have."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Protocol, cast

from torch import Tensor

from zero.core.layout import Layout
from zero.core.suggest import meant, some
from zero.engine.arguments import check_type
from zero.engine.full_flat import layouts_of
from zero.engine.model import ParameterPlaceholder
from zero.engine.state import State
from zero.errors import ConfigError


class Source(Protocol):
    """An object with a `state`: a `State`, a `Step` before its `finish`, or an engine of `zero.initialize`."""

    @property
    def state(self) -> State: ...


def state_of(source: Source, call: str, line: str) -> State:
    """Return the state of a source.

    Raises:
        ConfigError: `source` has none; the message names `call` and its correct use, `line`.
    """
    state = getattr(source, "state", source)
    check_type(state, State, call, line)
    return cast(State, state)


def names_of(state: State, patterns: Iterable[str] | None, kind: str) -> list[str]:
    """Return the full names that match `patterns`, in the plan's order; None matches all.

    Raises:
        ConfigError: the run has no values of this kind, or a name or pattern matches no parameter.
    """
    moments = state.plan.optimizer.moments
    if kind not in ("param", "compute", "grad", *moments):
        raise ConfigError(
            f"kind={kind!r} does not exist here. Choose from {', '.join(['param', 'compute', 'grad', *moments])}."
        )
    names = (name for unit in state.plan.units for layout in layouts_of(unit, kind) for name in slot_names(layout))
    held = dict.fromkeys(names)  # an ordered set
    if patterns is None:
        return list(held)
    chosen = set()
    for pattern in patterns:
        fitting = [pattern] if pattern in held else [name for name in held if fnmatchcase(name, pattern)]
        if not fitting:
            raise ConfigError(_unknown(state, pattern, kind, list(held)))
        chosen.update(fitting)
    return [name for name in held if name in chosen]


def name_of(state: State, name: str | Tensor, kind: str) -> str:
    """Return the full name of one parameter; raise ConfigError if `name` is a pattern or not a parameter's name."""
    name = text_of(name)
    if names_of(state, [name], kind) != [name]:
        raise ConfigError(f"{name} is a pattern. Name one parameter, or use zero.gathered.")
    return name


def text_of(name: str | Tensor) -> str:
    """Return the full name of a parameter that was given instead of its name, else `name`."""
    return name.full_name if isinstance(name, ParameterPlaceholder) else str(name)


def _unknown(state: State, name: str, kind: str, held: list[str]) -> str:
    if name in (slot.name for unit in state.plan.units for slot in unit.frozen_slots):
        return f"{name} is frozen: it has no {kind}"
    aliases, rule = state.plan.facts.splitting.aliases(), state.plan.optimizer.matrix_rule
    if name in aliases and rule is not None:
        return f"{name} is a matrix of {rule.title}: it has no {kind}"
    for full_name, names in aliases.items():
        if name in names:
            return f"{name} is tied to {full_name}. Use the name {full_name}."
    return f"no parameter is named {name}{meant(name, held) or f'. There are {some(held)}'}"


def slot_names(layout: Layout) -> list[str]:
    return [slot.name for slot in layout.slots]
