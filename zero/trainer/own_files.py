"""Check a file of settings of the user's own, which `hydra.searchpath` makes an option, before Hydra reads it.

Hydra's errors name neither the file nor the line, and it copies everything that a YAML alias repeats.
"""

import re
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from zero.core import suggest
from zero.errors import SettingError
from zero.trainer.config import Config, keys, unknown_key

MAX_BYTES, MAX_VALUES = 2**20, 10_000
"""Limits of a file, and of the values in it once its aliases are written out. The default run has 110 values."""

_HEADER, _GLOBAL = re.compile(r"(#\s*@.*)?"), re.compile(r"#\s*@package +_global_")
"""Lines of Hydra's header, which ends at any other comment, and its line for a file of several sections."""
_NOT_SETTINGS = ("defaults", "hydra", "ds_config")


def check(path: Path, group: str, options: Callable[[str], list[str]]) -> list[tuple[str, str]]:
    """Check syntax, package, list of defaults and keys of one file; returns the (group, option) that it chooses.

    Args:
        group: the folder that holds it.
        options: the names that a group has; empty where there is no such group.

    Raises:
        SettingError: one line with file and line number.
    """
    text, root = _parsed(path)
    header = takewhile(_HEADER.fullmatch, map(str.strip, text.splitlines()))
    is_global = any(map(_GLOBAL.fullmatch, header))
    if not is_global and (group in ("experiment", "debug") or group not in Config.model_fields):
        raise SettingError(f"{path}, line 1: the first line must be # @package _global_")
    if root is None:
        return []
    if not isinstance(root, MappingNode):
        raise _error(path, root, "the file must hold keys with values, such as steps: 100")
    chosen: list[tuple[str, str]] = []
    for key, value in root.value:
        if key.value == "defaults" and isinstance(value, SequenceNode):
            chosen += _defaults(path, group, value, options)
    _check_keys(path, root, "" if is_global else f"{group}.", options)
    return chosen


def _parsed(path: Path) -> tuple[str, Node | None]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SettingError(f"{path}: the file has more than 1 MiB; a file of settings has a few lines")
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        expanded = 0 if root is None else _count(root, {})
    except yaml.MarkedYAMLError as error:
        is_bracket_or_quote = any(word in str(error.context) for word in ("flow", "quoted"))
        mark = error.context_mark if is_bracket_or_quote else error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise SettingError(f"{path}{line}: {suggest.shown(error.problem)}") from None
    except UnicodeDecodeError:
        raise SettingError(f"{path}: the file must be UTF-8 text") from None
    except (OSError, yaml.YAMLError) as error:
        raise SettingError(f"{path} cannot be read: {suggest.shown(error)}") from None
    except RecursionError:
        raise SettingError(f"{path}: values are nested too deeply, or an alias repeats itself") from None
    if expanded > MAX_VALUES:
        raise SettingError(
            f"{path}: its aliases make more than {MAX_VALUES} values; write out the values that you need"
        )
    return text, root


def _count(node: Node, counted: dict[int, int]) -> int:
    """The values in `node` once aliases are written out. RecursionError where one repeats itself."""
    if id(node) not in counted:
        parts = [part for pair in node.value for part in pair] if isinstance(node, MappingNode) else node.value
        counted[id(node)] = 1 + sum(_count(part, counted) for part in parts) if not isinstance(node, ScalarNode) else 1
    return counted[id(node)]


def _defaults(
    path: Path, group: str, entries: SequenceNode, options: Callable[[str], list[str]]
) -> Iterator[tuple[str, str]]:
    """The options that the list of defaults chooses."""
    overrides = False
    for entry in entries.value:
        if isinstance(entry, ScalarNode):
            name, option = group, entry.value
            if option == "_self_":
                continue
            if overrides:
                raise _error(path, entry, f"write - {option} above the entries that begin with override")
            if "/" in option:
                continue
        elif isinstance(entry, MappingNode) and len(entry.value) == 1 and isinstance(entry.value[0][1], ScalarNode):
            (typed, value) = entry.value[0]
            *words, named = typed.value.split() or [""]
            name, option = named.lstrip("/"), value.value
            is_override = words == ["override"]
            if (options(name) and not is_override) or (is_override and not named.startswith("/")):
                raise _error(path, typed, f"write - override /{name}: {option}")
            overrides |= is_override
            if name.startswith("hydra/") or value.tag.endswith(":null"):
                continue
        else:
            continue
        if not options(name):
            known = [section for section in Config.model_fields if options(section)]
            raise _error(path, entry, f"there is no group {name}{suggest.meant(name, known)}")
        if option not in options(name):
            raise _error(path, entry, f"{name}={option} does not exist; {suggest.nearest(option, options(name))}")
        yield name, option


def _check_keys(path: Path, section: MappingNode, prefix: str, options: Callable[[str], list[str]]) -> None:
    names = set[str]()
    for key, value in section.value:
        name = f"{prefix}{key.value}"
        if not isinstance(key.value, str):
            raise _error(path, key, "a key must be a word")
        if name in names:
            raise _error(path, key, f"{name} is there twice")
        names.add(name)
        if name in _NOT_SETTINGS or (key.value == "defaults" and "." not in prefix.rstrip(".")):
            continue
        if key.value.startswith("override "):
            raise _error(path, key, f"write - {key.value} in the list under defaults:")
        if "." in key.value:
            raise _error(path, key, f"a key has no dots; write {key.value.replace('.', ': {', 1)}: ...}}")
        if name in keys():
            continue
        if not any(known.startswith(f"{name}.") for known in keys()):
            raise _error(path, key, unknown_key(name))
        if isinstance(value, MappingNode):
            _check_keys(path, value, f"{name}.", options)
        elif options(name) and isinstance(value, ScalarNode):
            raise _error(path, key, f"write - override /{name}: {value.value or 'OPTION'} in the list under defaults:")
        else:
            raise _error(path, key, f"{name} is a section; write its keys on the next lines, indented")


def _error(path: Path, node: Node, text: str) -> SettingError:
    return SettingError(f"{path}, line {node.start_mark.line + 1}: {text}")
