"""Settings of the data, and checks of its files.

Does not import torch, so that a wrong folder is reported at once. The checks read at most the beginning of a data file.
"""

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from zero.core.schema import Section
from zero.core.setting_types import Needed, PathText, PlainText, Reads, Rows, key, validate_names
from zero.errors import ConfigError
from zero.trainer.data.tokenizer import Tokenizer

SAVED = "dataset_info.json"
"""The file that `save_to_disk` of `datasets` writes in the folder of a dataset."""

HEAD_BYTES = 8000  # length of the beginning that decides whether a file is text, as in git


Holdout = Annotated[float, Field(gt=0, le=0.5)]


def _folders(value: object) -> tuple[str, ...]:
    names = validate_names(value)
    if any("/" in name for name in names):
        raise ValueError("must be names of folders, without /")
    return names


Folders = Annotated[tuple[str, ...], Reads("a list such as [a, b]", _folders)]


class TextConfig(Section):
    """Settings of data=text: every text file under a folder, with bytes as tokens."""

    section_key = "data"

    name: Literal["text"] = key("text", "kind of data")
    folder: PathText | None = key(
        None, "folder; null: the sources of the Python standard library", example="/usr/share/doc"
    )
    skip: Folders = key(
        # encodings consists of tables of characters, pydoc_data of one long string
        ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"),
        "names of folders to leave out; those with a leading dot always are",
        example="[build,dist]",
    )
    holdout: Holdout = key(0.05, "share of whole files kept for validation", example="0.1")

    vocab: ClassVar[int] = 256

    @property
    def root(self) -> Path:
        return Path(sysconfig.get_path("stdlib") if self.folder is None else self.folder)


class TokensConfig(Section):
    """Settings of data=tokens: a file of token numbers, of which only the rows in use are read."""

    section_key = "data"

    name: Literal["tokens"] = key("tokens", "kind of data")
    path: Needed = key(
        None,
        "file of token numbers in this machine's byte order; required",
        example="train.bin model.vocab=50304",
    )
    dtype: Literal["uint16", "uint32"] = key(
        "uint16", "type of one token number in the file", example="uint32 data.path=train.bin model.vocab=50304"
    )
    vocab: Annotated[int, Field(ge=1, le=2**32)] = key(
        50_304,
        "number of different tokens; larger numbers in the file are refused",
        unit="tokens",
        example="256 data.path=train.bin",
    )
    validation_path: PathText | None = key(
        None,
        "a second file, for validation; null: the end of the first",
        example="held.bin data.path=train.bin model.vocab=50304",
    )
    holdout: Holdout = key(
        0.05,
        "share of the file's end kept for validation, without a second file",
        example="0.1 data.path=train.bin model.vocab=50304",
    )

    @model_validator(mode="after")
    def _file_can_be_read(self) -> Self:
        if self.path is None:
            raise ConfigError("data=tokens needs data.path=FILE, a file of token numbers")
        if self.dtype == "uint16" and self.vocab > 2**16:
            raise ConfigError(f"data.vocab={self.vocab} does not fit data.dtype=uint16. Set data.dtype=uint32.")
        return self

    @property
    def item_bytes(self) -> int:
        return 2 if self.dtype == "uint16" else 4

    def lengths(self) -> tuple[int, int]:
        """Return the number of tokens for training and for validation."""
        paths = (self.path, *([] if self.validation_path is None else [self.validation_path]))
        train, *held = (Path(path).stat().st_size // self.item_bytes for path in paths)
        end = round(train * self.holdout)
        return (train, held[0]) if held else (train - end, end)


class SyntheticConfig(Section):
    """Settings of data=synthetic: sequences computed on demand, the same on every machine, without files."""

    section_key = "data"

    name: Literal["synthetic"] = key("synthetic", "kind of data")
    vocab: Rows = key(256, "number of different tokens", unit="tokens", example="64")


class TokenisedConfig(Section):
    """Settings of data that a Hugging Face tokenizer encodes once, and that is cached as tokens."""

    section_key = "data"

    path: Needed
    tokenizer: Needed = key(
        None,
        "a tokenizer.json or a folder with one; null: that of model.path, with model=hf",
        example="path/to/llama data.path=texts",
    )
    end: PlainText | None = key(
        None,
        "the token after each document; null: the end of text of the tokenizer's settings",
        example="'</s>' data.path=texts data.tokenizer=path/to/llama",
    )
    holdout: Holdout = key(
        0.05,
        "share of whole documents kept for validation",
        example="0.1 data.path=texts data.tokenizer=path/to/llama",
    )
    cache: PathText | None = key(
        None,
        "folder where the tokens are kept, on a disk that all ranks share; null: functional-zero in the user's cache",
        example="tokens data.path=texts data.tokenizer=path/to/llama",
    )

    @property
    def root(self) -> Path:
        return Path(self.path)

    @property
    def cached(self) -> Path:
        if self.cache is not None:
            return Path(self.cache)
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "functional-zero" / "tokens"

    @property
    def vocab(self) -> int:
        """Vocabulary size, read from the tokenizer's file.

        Raises:
            ConfigError: there is no readable tokenizer.
        """
        return Tokenizer(self.tokenizer, self.end).vocab


class HFTextConfig(TokenisedConfig):
    """Settings of data=hf: texts encoded once with a Hugging Face tokenizer and cached as tokens."""

    name: Literal["hf"] = key("hf", "kind of data")
    path: Needed = key(
        None,
        "a folder of text and JSONL files, one such file, or a folder that datasets.save_to_disk made; required",
        example="texts data.tokenizer=path/to/llama",
    )
    column: PlainText = key(
        "text",
        "field of a line of JSONL, or column of a dataset, with the text",
        example="body data.path=texts data.tokenizer=path/to/llama",
    )

    @model_validator(mode="after")
    def _has_a_path(self) -> Self:
        if self.path is None:
            raise ConfigError("data=hf needs data.path=FOLDER, a folder of text or JSONL files")
        return self


class ChatConfig(TokenisedConfig):
    """Settings of data=chat: chats, or prompts with completions, of which the assistant's tokens are trained."""

    name: Literal["chat"] = key("chat", "kind of data")
    path: Needed = key(
        None,
        "a JSONL or Parquet file, a folder of such files, or one that datasets.save_to_disk made; required",
        example="chats.jsonl model=hf model.path=path/to/llama",
    )
    template: PathText | None = key(
        None,
        "file with a chat template (Jinja); null: that of the tokenizer",
        example="chatml.jinja data.path=chats.jsonl model=hf model.path=path/to/llama",
    )
    pack: bool = key(
        True,
        "put several chats into a row, each with attention to itself alone; false: one in a row, padded",
        example="false data.path=chats.jsonl model=hf model.path=path/to/llama",
    )
    long: Literal["cut", "drop"] = key(
        "cut",
        "what happens to chats that are longer than a row: cut at the right, or dropped",
        example="drop data.path=chats.jsonl model=hf model.path=path/to/llama",
    )

    @model_validator(mode="after")
    def _has_chats(self) -> Self:
        if self.path is None:
            raise ConfigError("data=chat needs data.path=FILE, a JSONL or Parquet file of chats")
        return self


DataConfig = Annotated[
    TextConfig | TokensConfig | HFTextConfig | ChatConfig | SyntheticConfig, Field(discriminator="name")
]


def drawn(octets: bytes) -> float:
    """Hash bytes to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(octets).digest()[:6], "big") / 2**48


class TextFile(NamedTuple):
    """A text file below the root folder of the data."""

    path: Path
    key: str
    """Path below the root, with forward slashes."""
    size: int

    @property
    def draw(self) -> float:
        """Hash of the key in [0, 1). It depends on the key alone, so that adding a file does not move other files."""
        return drawn(os.fsencode(self.key))


class Split(NamedTuple):
    """Files for training and files for validation; of a single file, the last `tail` bytes are for validation."""

    train: list[TextFile]
    held: list[TextFile]
    tail: int = 0


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if not head or b"\0" in head:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def text_files(root: Path, skip: Sequence[str] = ()) -> Iterator[TextFile]:
    """Yield the text files below the root, in the same order on every machine; unreadable files raise OSError.

    Args:
        skip: names of folders that are left out.
    """
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in skip and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_file() and _is_text(path):
                yield TextFile(path, path.relative_to(root).as_posix(), path.stat().st_size)


def split_files(files: list[TextFile], holdout: float) -> Split:
    """Hold out for validation each file whose `draw` is below `holdout`: at least one file and never all.

    If there is one file only, its end is held out.
    """
    if len(files) == 1:
        return Split(files, [], tail=max(1, round(files[0].size * holdout)))
    by_draw = sorted(file.draw for file in files)
    below = min(max(holdout, by_draw[1]), by_draw[-1]) if files else holdout
    return Split([file for file in files if file.draw >= below], [file for file in files if file.draw < below])


def check_text(config: TextConfig, row: int) -> None:
    """Raise ConfigError unless the folder has `row` tokens for training and `row` tokens for validation."""
    root = config.root
    if not root.exists():
        raise ConfigError(f"data.folder={root} does not exist. Give a folder with text files.")
    if not root.is_dir():
        raise ConfigError(f"data.folder={root} is not a folder. Give the folder that holds this file.")
    files, train, held = [], 0, 0
    for file in text_files(root, config.skip):
        files.append(file)
        if file.draw < config.holdout:
            held += file.size
        else:
            train += file.size
        if min(train, held) > row:
            return  # without walking a large folder to its end
    if not files:
        raise ConfigError(
            f"data.folder={root} holds no text file. The search skips folders named {', '.join(config.skip)}."
        )
    split = split_files(files, config.holdout)
    train = sum(file.size for file in split.train) - split.tail
    check_length(f"data.folder={root}", train, sum(file.size for file in split.held) + split.tail, row)


def check_tokens(config: TokensConfig, row: int) -> None:
    """Raise ConfigError for a missing file, a size that is no multiple of the dtype's, or fewer tokens than a row."""
    for name, path in (("path", config.path), ("validation_path", config.validation_path)):
        if path is None:
            continue
        file = Path(path)
        if not file.is_file():
            raise ConfigError(f"data.{name}={path} is not a file. Give a file of {config.dtype} tokens.")
        if file.stat().st_size % config.item_bytes:
            raise ConfigError(
                f"data.{name}={path} has {file.stat().st_size} bytes, "
                f"not a multiple of {config.item_bytes}: it does not hold {config.dtype}"
            )
    check_length(f"data.path={config.path}", *config.lengths(), row)


def check_length(what: str, train: int, held: int, row: int) -> None:
    """Raise ConfigError if training or validation has fewer than `row` tokens.

    Args:
        what: the setting that the message begins with.
        train: number of tokens for training.
        held: number of tokens for validation.
        row: tokens of a row.
    """
    for share, length in (("training", train), ("validation", held)):
        if length < row:
            raise ConfigError(
                f"{what} leaves {length} tokens for {share}, fewer than one row of {row}. "
                "Give more data, another data.holdout or a smaller model.seq."
            )
