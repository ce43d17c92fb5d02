"""A Hugging Face tokenizer loaded from its file: texts to token numbers and back, without torch or the network."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero.errors import ConfigError, in_short
from zero.platform.installed import require_hf

FILE, SETTINGS = "tokenizer.json", "tokenizer_config.json"

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Usual end-of-text tokens, tried if the tokenizer's settings name none."""


class Tokenizer:
    """A tokenizer that never adds special tokens, truncates or pads, even if its file says so.

    Args:
        path: a tokenizer.json, or a folder with one.
        end: the token that ends a text; None: the one in the tokenizer's settings, or a usual one (`ENDS`).

    Attributes:
        file: path of the tokenizer.json.
        vocab: the largest token number, plus 1.
        end: number of the token that ends a text.

    Raises:
        ConfigError: the file cannot be read or has no tokens, or no token is known to end a text.
    """

    def __init__(self, path: str, end: str | None = None) -> None:
        self.file = _find(path)
        self._inner = _load(self.file)
        self._inner.no_truncation()
        self._inner.no_padding()
        numbers = self._inner.get_vocab(with_added_tokens=True)
        if not numbers:
            raise ConfigError(f"data.tokenizer={path} has no tokens. Train the tokenizer first.")
        self.vocab = max(numbers.values()) + 1  # numbers may have gaps
        self.end = _end(path, self.file, end, numbers)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token numbers of each text, computed on all cores."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the text of token numbers, including special tokens. Numbers that the tokenizer lacks are skipped."""
        return self._inner.decode(list(numbers), skip_special_tokens=False)


def _find(path: str) -> Path:
    place = Path(path)
    file = place / FILE if place.is_dir() else place
    if file.is_file():
        return file
    if place.is_dir():
        raise ConfigError(f"data.tokenizer={path} holds no {FILE}. Write one with save_pretrained of a fast tokenizer.")
    raise ConfigError(
        f"data.tokenizer={path} does not exist. Give a {FILE} or a folder with one: nothing is fetched from the hub."
    )


def _load(file: Path) -> Any:
    require_hf("tokenizers", "data=hf needs")
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"data.tokenizer={file} is not a tokenizer: {in_short(error)}") from error


def _end(path: str, file: Path, end: str | None, numbers: dict[str, int]) -> int:
    if end is not None:
        if end not in numbers:
            raise ConfigError(
                f"data.end={end} is not a token of data.tokenizer={path}. Give the token that ends a text."
            )
        return numbers[end]
    for name in (_end_of_text(file.with_name(SETTINGS)), *ENDS):
        if name in numbers:
            return numbers[name]
    raise ConfigError(f"data.tokenizer={path} does not say which token ends a text. Set data.end=TOKEN.")


def _end_of_text(settings: Path) -> str:
    """Return the end-of-text token in the tokenizer's settings file; "" if it has none."""
    if not settings.is_file():
        return ""
    try:
        token = json.loads(settings.read_bytes()).get("eos_token") or ""
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"data.tokenizer: {settings} cannot be read: {in_short(error)}") from error
    return str(token.get("content", "") if isinstance(token, dict) else token)
