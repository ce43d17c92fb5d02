"""Options in files of the user, which `hydra.searchpath` adds, checked before Hydra reads them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from zero.core import schema
from zero.errors import SettingError, one_line
from zero.trainer.config import Config, is_section, keys, unknown_key

_NAME = re.compile(r"[\w-]+")
_GLOBAL = re.compile(r"# *@package +_global_\s")
_NOT_SETTINGS = ("defaults", "hydra", "ds_config")


def folders_of(places: object) -> list[Path]:
    """Return the folders of `hydra.searchpath`.

    Raises:
        SettingError: it is not a list, or a folder does not exist.
    """
    if not isinstance(places, list):
        raise SettingError(f"hydra.searchpath={places}: must be a list. Write 'hydra.searchpath=[{places}]'.")
    folders = [Path(str(place).removeprefix("file://")) for place in places if not str(place).startswith("pkg://")]
    for folder in folders:
        if not folder.is_dir():
            raise SettingError(f"hydra.searchpath: {folder} is not a folder.")
    return folders


def chosen(choices: Mapping[str, str], folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield (group, file) for each choice that a file in one of the folders makes an option."""
    for group, option in choices.items():
        paths = [folder / group / f"{option}.yaml" for folder in folders] if _NAME.fullmatch(option) else []
        yield from [(group, path) for path in paths if path.is_file()][:1]


def check(path: Path, group: str) -> None:
    """Check the syntax, the package line and the keys of an option's file.

    Args:
        group: the folder that holds it.

    Raises:
        SettingError: one line that begins with the path.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = yaml.safe_load(text) or {}
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SettingError(f"{path}{line}: {one_line(error.problem)}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingError(f"{path} cannot be read: {one_line(error)}") from None
    is_global = bool(_GLOBAL.match(text))
    if not is_global and (group in ("experiment", "debug") or group not in Config.model_fields):
        raise SettingError(f"{path}: the first line must be # @package _global_")
    if not isinstance(content, dict):
        raise SettingError(f"{path}: must hold keys with values, such as steps: 100")
    if dotted := next((key for key in content if "." in str(key)), ""):
        raise SettingError(f"{path}: {dotted}: a key has no dots. Write the section, and its keys indented below it.")
    settings = {str(key): value for key, value in content.items() if key not in _NOT_SETTINGS}
    for key in schema.flat(settings if is_global else {group: settings}):
        if key not in keys() and not is_section(key):
            raise SettingError(f"{path}: {unknown_key(key)}")
