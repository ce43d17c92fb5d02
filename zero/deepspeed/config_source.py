"""Where a DeepSpeed configuration comes from, and what of it is known: a flat record, or one line of suggest.

DeepSpeed takes a dict, the path of a JSON file, or that file in base64; here the JSON itself is taken as well. Key by
key it is then compared with the table in `keys`.
"""

import base64
import binascii
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from zero.core import suggest
from zero.deepspeed.config_keys import ALIASES, FEATURES, KEYS, OPTIMIZERS, SCHEDULERS, Feature, Key, Kind
from zero.errors import ConfigError

AUTO = "auto"
"""What Hugging Face's trainer fills in. Here nobody does: it is our own auto, or the default."""


class Written(NamedTuple):
    """A configuration as it was written, and what to call it in messages."""

    name: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Given:
    """What is known of a configuration: dotted key -> value; the names of those that were "auto"; the lines to say."""

    values: Mapping[str, Any]
    autos: frozenset[str]
    notes: tuple[str, ...]
    optimizer: Kind | None
    scheduler: Kind | None

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key; the default where it is left out, null or "auto"."""
        return self.values.get(name, default)

    def below(self, section: str) -> dict[str, Any]:
        """What is given directly below a section."""
        prefix = f"{section}."
        return {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}


# From what was passed to a mapping


def read_source(raw: Mapping[str, Any] | str | os.PathLike[str]) -> Written:
    """The configuration behind `raw`.

    Raises:
        ConfigError: no file, no JSON, no object, or a key that stands there twice.
    """
    if isinstance(raw, Mapping):
        return Written("ds_config", raw)
    if isinstance(raw, str) and raw.lstrip().startswith("{"):
        return _parsed("ds_config", raw)
    path = Path(raw).expanduser()
    if os.path.isfile(path):  # False as well for what is too long for a name
        try:
            return _parsed(path.name, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"ds_config={path}: cannot be read as text: {error}") from None
    try:
        text = base64.urlsafe_b64decode(str(raw)).decode()
    except (binascii.Error, ValueError):
        raise ConfigError(
            f"ds_config={suggest.shown(raw)} is no file; give the path of a JSON file, a dict, or JSON"
        ) from None
    return _parsed("ds_config", text)


def _parsed(name: str, text: str) -> Written:
    try:
        found = json.loads(text, object_pairs_hook=_without_twins)
    except json.JSONDecodeError as error:
        if find_spec("hjson") is not None:
            return _parsed_loosely(name, text)
        raise ConfigError(f"{name}: line {error.lineno}, column {error.colno}: no JSON: {error.msg}") from None
    except ValueError:
        raise ConfigError(f"{name}: holds a number of thousands of digits") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested deeper than any configuration") from None
    except _TwinKeyError as twin:
        raise ConfigError(f"{name}: the key {suggest.shown(twin)} stands twice in one section; remove one") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: holds {suggest.shown(found)}; it must be an object of keys, {{...}}")
    return Written(name, found)


def _parsed_loosely(name: str, text: str) -> Written:
    """JSON with comments and the like, as DeepSpeed reads it."""
    hjson = import_module("hjson")
    try:
        found = hjson.loads(text, object_pairs_hook=_without_twins)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(f"{name}: line {error.lineno}, column {error.colno}: no JSON: {error.msg}") from None
    except _TwinKeyError as twin:
        raise ConfigError(f"{name}: the key {suggest.shown(twin)} stands twice in one section; remove one") from None
    return Written(name, found)


class _TwinKeyError(Exception):
    pass


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwinKeyError(key)
        found[key] = value
    return found


# From a mapping to what is known


def check(settings: Mapping[str, Any]) -> Given:
    """What the table knows of it.

    Raises:
        ConfigError: an unknown key, a value that its key does not take, or one that asks for other numbers.
    """
    found = _Found()
    for typed, name, value in _walk(settings, "", ""):
        if name in _FEATURES:
            found.notes += _feature(_FEATURES[name], typed, value)
        else:
            found.take(_PLAIN[name], typed, value)
    optimizer = _kind("optimizer", found, OPTIMIZERS, lower=True)
    scheduler = _kind("scheduler", found, SCHEDULERS)
    return Given(found.values, frozenset(found.autos), tuple(found.notes), optimizer, scheduler)


_PLAIN: Mapping[str, Key] = MappingProxyType({key.name: key for key in KEYS})
_FEATURES: Mapping[str, Feature] = MappingProxyType({feature.name: feature for feature in FEATURES})


class _Found:
    """What was read so far."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.autos: set[str] = set()
        self.notes: list[str] = []

    def take(self, key: Key, typed: str, value: Any) -> None:
        if key.name in self.values or key.name in self.autos:
            raise ConfigError(f"{typed} says again what another spelling of {key.name} says; remove one")
        if value is None:
            return
        if value == AUTO:
            self.autos.add(key.name)
            return
        self.values[key.name] = _value(key, typed, value)
        if key.why and not key.only:
            self.notes.append(f"{typed} has no meaning here: {key.why}")


def _walk(node: Mapping[str, Any], typed_prefix: str, prefix: str) -> Iterator[tuple[str, str, Any]]:
    """(as typed, as in the table, value) of every key."""
    for key, value in node.items():
        typed, name = f"{typed_prefix}{suggest.shown(key)}", f"{prefix}{key}"
        name = ALIASES.get(name, name)
        if name in _PLAIN or name in _FEATURES:
            yield typed, name, value
        elif name not in _KNOWN:
            raise ConfigError(suggest.unknown(typed, _KNOWN))
        else:
            yield from _walk(_section(typed, value), f"{typed}.", f"{name}.")


def _section(typed: str, value: Any) -> Mapping[str, Any]:
    if value is None or value == AUTO:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{typed}={suggest.shown(value)}: must be a section of keys")
    return value


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


_KNOWN = tuple(dict.fromkeys([*_PLAIN, *_FEATURES, *(section for name in _PLAIN for section in _above(name))]))


def _value(key: Key, typed: str, value: Any) -> Any:
    try:
        found = key.takes.read(value)
    except (ValueError, OverflowError):
        raise ConfigError(f"{typed}={suggest.shown(value)}: must be {key.takes.words}") from None
    if key.only and found not in key.only:
        raise ConfigError(f"{typed}={suggest.shown(value)} cannot be had: {key.why}")
    return found


def _feature(feature: Feature, typed: str, value: Any) -> Iterator[str]:
    """What is said of a section that is switched on.

    Raises:
        ConfigError: it would change the numbers of a run, or holds a key that it does not have.
    """
    section = _section(typed, value)
    if feature.keys is not None:
        names = [f"{typed}.{name}" for name in feature.keys.split()]
        for key in section:
            if f"{typed}.{key}" not in names:
                raise ConfigError(suggest.unknown(f"{typed}.{suggest.shown(key)}", names))
    switch = section.get(feature.on) if feature.on else bool(section)
    if switch is None or switch == AUTO:
        return
    if type(switch) is not bool:
        raise ConfigError(f"{typed}.{feature.on}={suggest.shown(switch)}: must be true or false")
    if switch and feature.refused:
        raise ConfigError(f"{typed} cannot be had: {feature.why}")
    if switch:
        yield f"{typed} has no meaning here: {feature.why}"


def _kind(section: str, found: _Found, kinds: Mapping[str, Kind], *, lower: bool = False) -> Kind | None:
    """The type of an optimizer or a schedule, None where there is none; its `params` are read as its own keys."""
    wanted, params = found.values.get(f"{section}.type"), found.values.pop(f"{section}.params", None)
    if wanted is None:
        if params is not None:
            raise ConfigError(f"{section}.params without {section}.type; there are {', '.join(kinds)}")
        return None
    name = wanted.lower() if lower else wanted
    if name not in kinds:
        said = suggest.nearest(wanted, kinds)
        raise ConfigError(f"{section}.type={suggest.shown(wanted)} does not exist here; {said}")
    prefix = f"{section}.params."
    own = {f"{prefix}{key.name}": key for key in kinds[name].keys}
    for key, value in _section(f"{section}.params", params).items():
        typed = f"{prefix}{suggest.shown(key)}"
        if key == "max_grad_norm":
            raise ConfigError(f"{typed}: the norm is limited by gradient_clipping, beside {section}")
        if typed not in own:
            raise ConfigError(suggest.unknown(typed, list(own)))
        found.take(own[typed]._replace(name=typed), typed, value)
    for key in kinds[name].required:
        if f"{prefix}{key}" not in {*found.values, *found.autos}:
            raise ConfigError(f"{section}.type={wanted} needs {prefix}{key}")
    return kinds[name]
