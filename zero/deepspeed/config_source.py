"""Read a DeepSpeed configuration, and check its keys against the tables of `config_keys`.

A configuration is a dict, JSON, or the path of a JSON file, which may have comments if `hjson` is installed.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zero.core import suggest
from zero.deepspeed.config_keys import (
    ALIASES,
    IGNORED,
    IGNORED_FEATURES,
    IGNORED_OPTIMIZER_KEYS,
    KEYS,
    OPTIMIZERS,
    REJECTED_FEATURES,
    SCHEDULERS,
    Key,
    Kind,
)
from zero.errors import ConfigError

AUTO = "auto"
"""A value that Hugging Face's trainer fills in. Here it is this library's auto, or the default."""


@dataclass
class CheckedConfig:
    """The checked keys of a configuration.

    Attributes:
        values: dotted key -> value.
        autos: keys whose value is "auto".
        notes: lines for the user, such as one for each key that is ignored.
        optimizer, scheduler: their types, or None.
    """

    values: dict[str, Any] = field(default_factory=dict)
    autos: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    optimizer: Kind | None = None
    scheduler: Kind | None = None

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key; the default if it is left out, null or "auto"."""
        return self.values.get(name, default)

    def take(self, key: Key, typed: str, value: Any) -> None:
        """Read one key.

        Raises:
            ConfigError: the key is there already, or does not take this value.
        """
        if key.name in self.values or key.name in self.autos:
            raise ConfigError(f"{typed}: {key.name} appears twice, in two spellings. Remove one.")
        if value is None:
            return
        if value == AUTO:
            self.autos.add(key.name)
            return
        if not key.type.accepts(value):
            raise ConfigError(f"{typed}={_shown(value)}: must be {key.type.words}")
        self.values[key.name] = key.type.read(value)
        if key.only and self.values[key.name] not in key.only:
            raise ConfigError(f"{typed}={_shown(value)} is not supported: {key.why}")

    def note(self, line: str) -> None:
        """Add a line for the user."""
        self.notes.append(line)

    def below(self, section: str) -> dict[str, Any]:
        """Return the values in a section by their last names."""
        prefix = f"{section}."
        return {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}


def _shown(value: Any) -> str:
    return f'"{suggest.shown(value)}"' if isinstance(value, str) else suggest.shown(value)


# From an argument to a mapping


def read_source(raw: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[str, Mapping[str, Any]]:
    """Return the configuration's name in messages, and its keys as they were written.

    Raises:
        ConfigError: it is not a file, not JSON or not an object, or a key appears twice in a section.
    """
    if isinstance(raw, Mapping):
        return "ds_config", raw
    if isinstance(raw, str) and raw.lstrip().startswith("{"):
        return _parsed("ds_config", raw)
    path = Path(raw).expanduser()
    if not os.path.isfile(path):  # False too if it is too long for a name
        raise ConfigError(
            f"ds_config={suggest.shown(raw)} is not a file. Pass the path of a JSON file, a dict, or JSON."
        )
    try:
        return _parsed(path.name, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"ds_config={path}: cannot be read as text: {error}") from None


def _parsed(name: str, text: str) -> tuple[str, Mapping[str, Any]]:
    try:
        settings = _loaded(text, partial(_without_twins, name))
    except ValueError as error:
        hint = "" if find_spec("hjson") else "; comments and trailing commas need hjson: pip install hjson"
        raise ConfigError(f"{name}: not JSON: {error}{hint}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{name}: holds {suggest.shown(settings)}; it must be an object of keys, {{...}}")
    return name, settings


def _loaded(text: str, hook: Any) -> Any:
    try:
        return json.loads(text, object_pairs_hook=hook)
    except json.JSONDecodeError:
        if find_spec("hjson") is None:
            raise
        return import_module("hjson").loads(text, object_pairs_hook=hook)


def _without_twins(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for key, value in pairs:
        if key in section:
            raise ConfigError(f"{name}: the key {suggest.shown(key)} appears twice in one section. Remove one.")
        section[key] = value
    return section


# From a mapping to known keys


def check(settings: Mapping[str, Any]) -> CheckedConfig:
    """Return the known keys of a configuration.

    Raises:
        ConfigError: an unknown key, a value that its key does not take, or a key that would change numbers.
    """
    config = CheckedConfig()
    for typed, name, value in _walk(settings, "", ""):
        if name in _FEATURES:
            _check_feature(config, name, typed, value)
        elif name in IGNORED:
            if value is not None and value != AUTO:
                config.note(f"{typed} is ignored: {IGNORED[name]}")
        else:
            config.take(_PLAIN[name], typed, value)
    config.optimizer = _kind("optimizer", config, OPTIMIZERS, lower=True)
    config.scheduler = _kind("scheduler", config, SCHEDULERS)
    return config


_PLAIN: Mapping[str, Key] = {key.name: key for key in KEYS}
_FEATURES = {**IGNORED_FEATURES, **REJECTED_FEATURES}
_SECTIONS = {name[:at] for name in (*_PLAIN, *IGNORED) for at, letter in enumerate(name) if letter == "."}
_COMMENTS = ("_", "//", "#")
_KNOWN = (*_PLAIN, *IGNORED, *_FEATURES, *sorted(_SECTIONS))


def _walk(node: Mapping[str, Any], typed_prefix: str, prefix: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (as typed, as in the tables, value) of every key."""
    for key, value in node.items():
        if str(key).startswith(_COMMENTS):
            continue
        typed, name = f"{typed_prefix}{suggest.shown(key)}", f"{prefix}{key}"
        name = ALIASES.get(name, name)
        if name in _PLAIN or name in IGNORED or name in _FEATURES:
            yield typed, name, value
        elif name == "zero_optimization" and type(value) is bool:  # DeepSpeed's oldest spelling of stages 0 and 1
            yield typed, "zero_optimization.stage", int(value)
        elif name == "max_grad_norm":
            raise ConfigError(f"{typed}: unknown key; gradient_clipping limits the norm")
        elif name not in _SECTIONS:
            raise ConfigError(suggest.unknown(typed, _KNOWN))
        else:
            yield from _walk(_section(typed, value, name), f"{typed}.", f"{name}.")


def _section(typed: str, value: Any, name: str) -> Mapping[str, Any]:
    if value is None or value == AUTO:
        return {}
    if not isinstance(value, Mapping):
        first = next((key.name.removeprefix(f"{name}.") for key in KEYS if key.name.startswith(f"{name}.")), "enabled")
        raise ConfigError(f'{typed}={_shown(value)}: must be a section of keys, such as {{"{first}": ...}}')
    return value


def _check_feature(config: CheckedConfig, name: str, typed: str, value: Any) -> None:
    section = _section(typed, value, name)
    switch = section.get("enabled", section.get("deepcompile", bool(section)))
    if not switch or switch == AUTO:
        return
    if name in REJECTED_FEATURES:
        raise ConfigError(f"{typed} is not supported: {REJECTED_FEATURES[name]}")
    config.note(f"{typed} is ignored: {IGNORED_FEATURES[name]}")


def _kind(section: str, config: CheckedConfig, kinds: Mapping[str, Kind], *, lower: bool = False) -> Kind | None:
    """Return the type of the optimizer or scheduler, or None, and read its `params`."""
    written, params = config.values.get(f"{section}.type"), config.values.pop(f"{section}.params", None)
    if written is None:
        if params is not None:
            raise ConfigError(f"{section}.params without {section}.type; there are {', '.join(kinds)}")
        return None
    kind = kinds.get(written.lower() if lower else written)
    if kind is None:
        hint = suggest.nearest(written, kinds, cutoff=0.65)  # Muon is no misspelling of lion
        raise ConfigError(f"{section}.type={suggest.shown(written)} does not exist here. {hint}")
    prefix = f"{section}.params."
    keys = {f"{prefix}{key.name}": key for key in kind.keys}
    for name, value in _section(f"{section}.params", params, f"{section}.params").items():
        typed = f"{prefix}{suggest.shown(name)}"
        if name == "max_grad_norm":
            raise ConfigError(f"{typed}: gradient_clipping, a key beside {section}, limits the norm")
        if typed in keys:
            config.take(keys[typed]._replace(name=typed), typed, value)
        elif section == "optimizer" and name in IGNORED_OPTIMIZER_KEYS:
            config.note(f"{typed} is ignored: there is one implementation of each optimizer, with fp32 moments")
        elif not str(name).startswith(_COMMENTS):
            raise ConfigError(suggest.unknown(typed, list(keys)))
    for name in kind.required:
        if f"{prefix}{name}" not in {*config.values, *config.autos}:
            raise ConfigError(f"{section}.type={written} needs {prefix}{name}")
    return kind
