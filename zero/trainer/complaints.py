"""Error messages for overrides of a command line: unknown keys and options, and what the user probably meant."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero.core import suggest
from zero.trainer.config import is_section, keys
from zero.trainer.explain import explanations, options_with
from zero.trainer.foreign_settings import foreign_message
from zero.trainer.option_files import CONF, PRESET_GROUPS, groups, options_of


def complaint(
    word: str, key: str, value: Any, folders: Sequence[Path], *, is_sweep: bool = False, is_delete: bool = False
) -> str:
    """Return the error message for an override that cannot be composed, such as an unknown setting; "" if it can.

    Args:
        word: the override as typed.
        key, value: the override's key or group, and its parsed value.
        folders: folders of option files beside conf/.
        is_sweep: whether the override has several values, one for each run.
        is_delete: whether the override removes the key.
    """
    if key.startswith("hydra") or key == "ds_config":
        return ""
    options = options_of(key, folders)
    if (message := foreign_message(word)) and (options or not is_sweep):
        return message
    if is_sweep:
        return f"{word} is a list of runs. Add -m to run them one after another."
    if options and is_delete and key not in PRESET_GROUPS:
        return f"{word}: a run needs one option of {key}. Choose from {', '.join(options)}."
    if options and isinstance(value, list):
        return f"{word}: a run has one option of {key}. Add -m for a run with each: {key}={','.join(map(str, value))}"
    if options and value is not None and str(value) not in options:
        missing = f"{key}={suggest.shown(value)} does not exist. {suggest.nearest(str(value), options)}"
        return _of_a_path(key, str(value)) or missing
    if options or key in keys() or is_section(key):
        return ""
    having = [group for group in sorted(groups()) if "." not in key and str(value) in options_of(group)]
    if hint := suggest.meant(key, having):  # gpt_7b shows that modle=gpt_7b means model, not mode
        return f"{key} is not a setting{hint}"
    return unknown_setting(key, word.partition("=")[2])


def unknown_setting(key: str, value: str) -> str:
    """Return the error message for an unknown key, with the most similar key and the option that this key needs."""
    by_key = {entry.key: entry for entry in explanations()}
    likely = by_key.get(suggest.likely_key(key, list(by_key)))
    if likely and not likely.example.startswith(f"{likely.key}="):  # the default option lacks the key
        settings = [likely.example.split()[0], suggest.typed(f"{likely.key}={value}")]
        return f"{key} is not a setting. Did you mean {' '.join(settings)}?"
    message = suggest.unknown(key, list(by_key))
    return f"{message} mode=explain lists all." if message.endswith("setting.") else message


def _of_a_path(group: str, value: str) -> str:
    """Return the error message for a path given as the option of a group; "" for a value that is not a path.

    The message lists the keys of the group that take a path.
    """
    if "/" not in value and not Path(value).exists():
        return ""
    takes = [entry.key for entry in explanations() if entry.group == group and entry.takes.startswith("a path")]
    is_path = f"{group}={suggest.shown(value)} is a path, not an option of {group}"
    return f"{is_path}. Keys that take a path: {', '.join(takes)}." if takes else ""


def of_another_option(key: str) -> str:
    """Return the error message for a key that the chosen option of its group does not have."""
    group = key.split(".")[0]
    having = suggest.alternatives(options_with(key, CONF))
    return f"{key} is a setting of {group}={having} only. Choose such an option, or leave it out."
