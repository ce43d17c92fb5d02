"""Reading of a DeepSpeed configuration, and the check of its keys against the declarations in `keys`.

A configuration is a dict, JSON, or the path of a JSON file, which may have comments if `hjson` is installed.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from zero.core import checks, schema, suggest
from zero.core.schema import Section
from zero.core.setting_types import MOST
from zero.deepspeed.config.keys import Keys, Named
from zero.deepspeed.config.optimizer_keys import OPTIMIZER_KEYS, OptimizerKeys
from zero.deepspeed.config.schedule_keys import SCHEDULER_KEYS, ScheduleKeys
from zero.deepspeed.config.unsupported_keys import IGNORED_KEYS, REJECTED
from zero.errors import ConfigError

AUTO = "auto"
"""A value that Hugging Face's Trainer replaces. Here it means this library's auto, or the key's default."""

_Kind = TypeVar("_Kind", bound=Section)


@dataclass
class CheckedConfig:
    """A configuration whose keys were checked.

    Attributes:
        keys: the values of all keys.
        optimizer, scheduler: the values of `params` of the configured type; None if no type is configured.
        autos: dotted keys with the value "auto"; `keys` has their defaults.
        notes: lines to print for the user, such as a list of the ignored keys.
    """

    keys: Keys
    optimizer: OptimizerKeys | None
    scheduler: ScheduleKeys | None
    autos: set[str]
    notes: list[str] = field(default_factory=list)


def check(written: Mapping[str, Any]) -> CheckedConfig:
    """Check the keys of a configuration, and return their values.

    Raises:
        ConfigError: a key is unknown, a value is invalid, or an unsupported key would change the numbers of a run.
    """
    autos, ignored = set[str](), list[str]()
    keys = Keys(**_known(written, "", autos, ignored))
    optimizer = _params("optimizer", keys.optimizer, OPTIMIZER_KEYS)
    scheduler = _params("scheduler", keys.scheduler, SCHEDULER_KEYS)
    if scheduler is not None:
        scheduler.check(autos)
    notes = [f"ignored, because they set how bytes move or what is printed: {', '.join(ignored)}"] if ignored else []
    return CheckedConfig(keys, optimizer, scheduler, autos, notes)


def _known(node: Mapping[str, Any], prefix: str, autos: set[str], ignored: list[str]) -> dict[str, Any]:
    """Return a section without comments, nulls, and keys that are ignored or "auto"; add these to the two arguments."""
    kept: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{suggest.shown(key)}"
        if str(key).startswith(_COMMENTS) or value is None:
            continue
        if name in REJECTED or name in IGNORED_KEYS:
            switch = value.get("enabled", value) if isinstance(value, Mapping) else value
            if not switch or switch == AUTO:
                continue
            if name in REJECTED:
                raise ConfigError(f"{name} is not supported: {REJECTED[name]}")
            ignored.append(name)
        elif name not in _KNOWN:
            raise ConfigError(suggest.unknown(name, _KNOWN))
        elif value == AUTO:
            autos.add(name)
        elif isinstance(value, Mapping):
            if section := _known(value, f"{name}.", autos, ignored):
                kept[key] = section
        else:
            is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= MOST
            kept[key] = int(value) if is_whole else value  # JSON reads 1e5 as a float
    return kept


def _params(section: str, named: Named, kinds: Mapping[str, type[_Kind]]) -> _Kind | None:
    if named.type is None:
        if named.params:
            raise ConfigError(f"{section}.params: {section}.type is missing. Choose from {', '.join(kinds)}.")
        return None
    if not isinstance(named.params, Mapping):
        raise ConfigError(f"{section}.params={suggest.shown(named.params)}: must be a section of keys")
    kind = {name.lower(): kind for name, kind in kinds.items()}.get(named.type.lower())
    if kind is None:
        hint = suggest.nearest(named.type, kinds, cutoff=0.65)  # high, because names of four letters are alike
        raise ConfigError(f"{section}.type={suggest.shown(named.type)} does not exist here. {hint}")
    return kind(**named.params)


def _all_known() -> Iterator[str]:
    for key in schema.schema_keys(Keys):
        if key not in ("optimizer.params", "scheduler.params"):
            yield key
    for kind in (*OPTIMIZER_KEYS.values(), *SCHEDULER_KEYS.values()):
        yield from schema.schema_keys(kind, kind.section_key)
    yield from (*IGNORED_KEYS, *REJECTED)


_COMMENTS = ("_", "//", "#")
_KEYS = tuple(_all_known())
_SECTIONS = {name[:at] for name in _KEYS for at, letter in enumerate(name) if letter == "."}
_KNOWN = (*sorted(_SECTIONS), *_KEYS)


# Reading the configuration from a file, JSON or a dict


def read_source(raw: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[str, Mapping[str, Any]]:
    """Return the configuration's name for messages, and its keys as they were written.

    Raises:
        ConfigError: `raw` is not the path of a file, or its text is not JSON or not an object.
    """
    if isinstance(raw, Mapping):
        return "ds_config", raw
    if isinstance(raw, str) and raw.lstrip().startswith("{"):
        return _parsed("ds_config", raw)
    instead = "Pass the path of a JSON file, a dict, or JSON."
    path = Path(checks.instance("ds_config", raw, str | os.PathLike, instead)).expanduser()
    if not os.path.isfile(path):  # also False if the text is too long for a path
        raise ConfigError(f"ds_config={suggest.shown(raw)} is not a file. {instead}")
    try:
        return _parsed(path.name, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"ds_config={path}: cannot be read as text: {error}") from None


def _parsed(name: str, text: str) -> tuple[str, Mapping[str, Any]]:
    try:
        try:
            settings = json.loads(text)
        except json.JSONDecodeError:
            if find_spec("hjson") is None:
                raise
            settings = import_module("hjson").loads(text)
    except ValueError as error:
        hint = "" if find_spec("hjson") else ". Comments and trailing commas need hjson: pip install hjson"
        raise ConfigError(f"{name}: not JSON: {error}{hint}") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{name}: must be an object of keys, {{...}}, not {suggest.shown(settings)}")
    return name, settings
