"""A DeepSpeed configuration as it is read and checked: known keys with their values, or one line about a mistake.

DeepSpeed takes a dict, the path of a JSON file, or that file in base64; here the JSON itself is taken as well. Then
each key is compared with the table in `config_keys`.
"""

import base64
import binascii
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
from zero.deepspeed.config_keys import ALIASES, DEVICE, FEATURES, KEYS, OPTIMIZERS, SCHEDULERS, Feature, Key, Kind
from zero.errors import ConfigError

AUTO = "auto"
"""A value that Hugging Face's trainer fills in. Nothing does so here: it is this library's auto, or the default."""


@dataclass
class CheckedConfig:
    """The known keys of a configuration, as `check` finds them.

    Attributes:
        values: dotted key -> value.
        autos: keys whose value is "auto".
        notes: one line for each key without meaning here.
        optimizer, scheduler: their types; None where there is none.
    """

    values: dict[str, Any] = field(default_factory=dict)
    autos: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    optimizer: Kind | None = None
    scheduler: Kind | None = None

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a key; the default where it is left out, null or "auto"."""
        return self.values.get(name, default)

    def take(self, key: Key, typed: str, value: Any) -> None:
        """Read one key.

        Raises:
            ConfigError: it was there already, or does not take this value.
        """
        if key.name in self.values or key.name in self.autos:
            raise ConfigError(f"{typed}: {key.name} appears twice, in two spellings; remove one")
        if value is None:
            return
        if value == AUTO:
            self.autos.add(key.name)
            return
        if not key.type.accepts(value):
            if key.type.accepts(_unquoted(value)):
                raise ConfigError(f'{typed}="{value}": must be {key.type.words}, without quotes')
            raise ConfigError(f"{typed}={suggest.shown(value)}: must be {key.type.words}")
        found = key.type.read(value)
        if key.only and found not in key.only:
            raise ConfigError(f"{typed}={suggest.shown(value)} is not supported: {key.why}")
        self.values[key.name] = found
        if key.why and not key.only:
            self.note(f"{typed} has no meaning here: {key.why}")

    def note(self, line: str) -> None:
        """One more line for whoever reads what a run says."""
        self.notes.append(line)

    def below(self, section: str) -> dict[str, Any]:
        """Values of the keys of a section, by their own names."""
        prefix = f"{section}."
        return {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}


# From an argument to a mapping


def read_source(raw: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[str, Mapping[str, Any]]:
    """Of the configuration that `raw` is, or names: what messages call it, and its keys as they were written.

    Raises:
        ConfigError: it is not a file, not JSON or not an object, or a key appears twice in a section.
    """
    if isinstance(raw, Mapping):
        return "ds_config", raw
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
            f"ds_config={suggest.shown(raw)} is not a file; give the path of a JSON file, a dict, or JSON"
        ) from None
    return _parsed("ds_config", text)


def _parsed(name: str, text: str) -> tuple[str, Mapping[str, Any]]:
    try:
        found = _loaded(name, text)
    except RecursionError:
        raise ConfigError(f"{name}: nested deeper than any configuration") from None
    except ValueError as error:
        at = vars(error)
        if "lineno" not in at:
            raise ConfigError(f"{name}: holds a number of thousands of digits") from None
        hint = "" if find_spec("hjson") else "; comments and trailing commas need hjson: pip install hjson"
        raise ConfigError(f"{name}: line {at['lineno']}, column {at['colno']}: not JSON: {at['msg']}{hint}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: holds {suggest.shown(found)}; it must be an object of keys, {{...}}")
    return name, found


def _loaded(name: str, text: str) -> Any:
    """JSON; with comments and the like where hjson is installed, as DeepSpeed reads it."""
    section = partial(_without_twins, name)
    try:
        return json.loads(text, object_pairs_hook=section)
    except json.JSONDecodeError:
        if find_spec("hjson") is None:
            raise
        return import_module("hjson").loads(text, object_pairs_hook=section)


def _without_twins(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{name}: the key {suggest.shown(key)} appears twice in one section; remove one")
        found[key] = value
    return found


# From a mapping to known keys


def check(settings: Mapping[str, Any]) -> CheckedConfig:
    """The known keys of a configuration.

    Raises:
        ConfigError: an unknown key, a value that its key does not take, or one that asks for other numbers.
    """
    found = CheckedConfig()
    for typed, name, value in _walk(_without_comments(settings), "", ""):
        if name in _FEATURES:
            found.notes += _feature(_FEATURES[name], typed, value)
        else:
            found.take(_PLAIN[name], typed, value)
    found.optimizer = _kind("optimizer", found, OPTIMIZERS, lower=True)
    found.scheduler = _kind("scheduler", found, SCHEDULERS)
    return found


_PLAIN: Mapping[str, Key] = {key.name: key for key in KEYS}
_FEATURES: Mapping[str, Feature] = {feature.name: feature for feature in FEATURES}


def _without_comments(node: Any) -> Any:
    """A configuration without keys that begin with _, // or #."""
    if not isinstance(node, Mapping):
        return node
    return {key: _without_comments(value) for key, value in node.items() if not str(key).startswith(("_", "//", "#"))}


def _walk(node: Mapping[str, Any], typed_prefix: str, prefix: str) -> Iterator[tuple[str, str, Any]]:
    """(as typed, as in the table, value) of every key."""
    for key, value in node.items():
        typed, name = f"{typed_prefix}{suggest.shown(key)}", f"{prefix}{key}"
        name = ALIASES.get(name, name)
        if name in _PLAIN or name in _FEATURES:
            yield typed, name, value
        elif name == "zero_optimization" and type(value) is bool:  # DeepSpeed's oldest spelling of stages 0 and 1
            yield typed, "zero_optimization.stage", int(value)
        elif name == "max_grad_norm":
            raise ConfigError(f"{typed}: unknown key; gradient_clipping limits the norm")
        elif name not in _KNOWN:
            raise ConfigError(suggest.unknown(typed, _KNOWN))
        else:
            yield from _walk(_section(typed, value, name), f"{typed}.", f"{name}.")


def _section(typed: str, value: Any, name: str = "") -> Mapping[str, Any]:
    """The keys of a section; `name` is its name in the table."""
    if value is None or value == AUTO:
        return {}
    if not isinstance(value, Mapping):
        first = next((key for key in KEYS if name and key.name.startswith(f"{name}.")), None)
        raise ConfigError(f"{typed}={suggest.shown(value)}: must be a section of keys{_example(first, value)}")
    return value


def _example(first: Key | None, value: Any) -> str:
    """The section to write in place of a value: its first key, with that value where the key takes it."""
    if first is None:
        return ""
    taken = json.dumps(value) if first.type.accepts(value) else '"cpu"' if first.type is DEVICE else "..."
    return f', such as {{"{first.name.rpartition(".")[2]}": {taken}}}'


def _unquoted(value: Any) -> Any:
    """The number or word that a text holds; None if it holds none."""
    try:
        return json.loads(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _above(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


_KNOWN = tuple(dict.fromkeys([*_PLAIN, *_FEATURES, *(section for name in _PLAIN for section in _above(name))]))


def _feature(feature: Feature, typed: str, value: Any) -> Iterator[str]:
    """The line about a section that is switched on.

    Raises:
        ConfigError: it would change the numbers of a run, or has an unknown key.
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
        raise ConfigError(f"{typed} is not supported: {feature.why}")
    if switch:
        yield f"{typed} has no meaning here: {feature.why}"


def _kind(section: str, found: CheckedConfig, kinds: Mapping[str, Kind], *, lower: bool = False) -> Kind | None:
    """The type of an optimizer or a schedule, None where there is none; its `params` are read as its own keys."""
    wanted, params = found.values.get(f"{section}.type"), found.values.pop(f"{section}.params", None)
    if wanted is None:
        if params is not None:
            raise ConfigError(f"{section}.params without {section}.type; there are {', '.join(kinds)}")
        return None
    name = wanted.lower() if lower else wanted
    if name not in kinds:
        hint = suggest.nearest(wanted, kinds, cutoff=0.65)  # Muon is no misspelling of lion
        raise ConfigError(f"{section}.type={suggest.shown(wanted)} does not exist here. {hint}")
    prefix = f"{section}.params."
    own = {f"{prefix}{key.name}": key for key in kinds[name].keys}
    for key, value in _section(f"{section}.params", params).items():
        typed = f"{prefix}{suggest.shown(key)}"
        if key == "max_grad_norm":
            raise ConfigError(f"{typed}: gradient_clipping, a key beside {section}, limits the norm")
        if typed not in own:
            raise ConfigError(suggest.unknown(typed, list(own)))
        found.take(own[typed]._replace(name=typed), typed, value)
    for key in kinds[name].required:
        if f"{prefix}{key}" not in {*found.values, *found.autos}:
            raise ConfigError(f"{section}.type={wanted} needs {prefix}{key}")
    return kinds[name]
