"""Which model of transformers, and how long its rows are. No torch here: a missing folder is refused without it."""

import json
from dataclasses import dataclass
from pathlib import Path

from zero.errors import ConfigError
from zero.trainer.data.tokenizer import FILE, SETTINGS


@dataclass(frozen=True, kw_only=True)
class HFConfig:
    """A model of transformers.

    Raises:
        ConfigError: a folder without a readable config.json.
    """

    path: str
    """A folder, or a model type such as llama, which is built with all its defaults and fresh weights."""
    seq: int = 256
    """Tokens of a training row."""

    @property
    def has_tokenizer(self) -> bool:
        """The folder says how texts become tokens."""
        return any((Path(self.path).expanduser() / name).is_file() for name in (FILE, SETTINGS))

    def check(self) -> None:
        """Refuse what has no settings."""
        folder = Path(self.path).expanduser()
        if "/" in self.path and not folder.is_dir():
            raise ConfigError(f"model.path={self.path} does not exist; give a folder with config.json, or a model type")
        if not folder.is_dir():
            return
        try:
            told = json.loads((folder / "config.json").read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={self.path}: no readable config.json in it ({error})") from error
        if not isinstance(told, dict):
            raise ConfigError(f"model.path={self.path}: its config.json is no record of settings")
