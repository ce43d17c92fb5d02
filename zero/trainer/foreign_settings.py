"""Error messages for settings of other programs, such as DeepSpeed and Lightning, from foreign_settings.yaml."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

from zero.core import suggest
from zero.trainer.config import Config, keys

_OFF = ("false", "no", "off", "none", "0")


@cache
def foreign_settings() -> Mapping[str, Mapping[str, str]]:
    """Return the tables of the YAML file: `type` has the settings to type for a word, `reason` why none exist."""
    words: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return words


@cache
def _texts() -> Mapping[str, str]:
    return {_bare(name): text for table in foreign_settings().values() for name, text in table.items()}


def _bare(name: str) -> str:
    """Return a name without what programs write differently: adamw_8bit or adamw8bit, [a,b] or a,b."""
    return name.lower().translate(str.maketrans("", "", "-_[] "))


def foreign_message(word: str) -> str:
    """Return the error message for a setting of another program; "" for other words of a command line."""
    key, _, value = word.lstrip("+").partition("=")
    table = _texts()
    section, _, name = _bare(key).rpartition(".")
    if _bare(word) in table and "=" in word:
        name, wrong = _bare(word), f"{suggest.shown(word)} does not exist"
    elif (
        key not in keys()
        and name in table
        and (section not in Config.model_fields or table[name].startswith(f"{section}."))
    ):
        wrong = f"{suggest.shown(key)} is not a setting"
    else:
        return ""
    text = table[name]
    if text in foreign_settings()["reason"].values():
        return f"{wrong}. {text}"
    if "{}" not in text and value.lower() in _OFF:
        return f"{wrong}. Leave it out."
    settings = [suggest.typed(setting.replace("{}", value or "VALUE")) for setting in text.split()]
    return f"{wrong}. Did you mean {' '.join(settings)}?"
