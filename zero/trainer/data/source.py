"""Settings of the data, and checks of its files.

Does not import torch, so that a wrong folder is reported at once. The checks read at most the beginning of a data file.
"""

import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from zero.core.schema import Section
from zero.core.setting_types import (
    Needed,
    NeededPaths,
    PathText,
    PlainText,
    Reads,
    Rows,
    key,
    validate_names,
    validate_paths,
    validate_text,
)
from zero.core.suggest import shown
from zero.errors import ConfigError
from zero.trainer.data.files import files_below, split_files, text_files
from zero.trainer.data.records import READERS
from zero.trainer.data.tokenizer import Tokenizer

Holdout = Annotated[float, Field(gt=0, le=0.5)]
"""A share for validation. Behind the settings it is 0 for data that all trains, and 1 for data that does not train."""


def _folders(value: object) -> tuple[str, ...]:
    names = validate_names(value)
    if any("/" in name for name in names):
        raise ValueError("must be names of folders, without /")
    return names


def _mix(value: object) -> dict[str, dict[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError
    sources = {}
    for name, source in value.items():
        if not isinstance(source, Mapping) or "path" not in source or source.keys() - {"path", "weight"}:
            raise ValueError(f"has {name} without a path and a weight. Write {{{name}: {{path: PATH, weight: 2}}}}.")
        weight = source.get("weight", 1)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e9:
            raise ValueError(f"has {name} with the weight {weight}, which is no number above 0")
        sources[validate_text(name)] = {"path": validate_paths(source["path"]), "weight": weight}
    return sources


Mix = Annotated[
    dict[str, dict[str, Any]], Reads("sources such as {code: {path: PATH, weight: 2}, prose: {path: PATH}}", _mix)
]

Folders = Annotated[tuple[str, ...], Reads("a list such as [a, b]", _folders)]


class TextConfig(Section):
    """Settings of data=text: every text file under a folder, with bytes as tokens."""

    section_key = "data"
    place_key: ClassVar = "folder"

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
    place_key: ClassVar = "path"

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
    holdout: Holdout = key(
        0.05,
        "share of the file's end kept for validation",
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
        count = Path(self.path).stat().st_size // self.item_bytes
        held = round(count * self.holdout)
        return count - held, held


class SyntheticConfig(Section):
    """Settings of data=synthetic: sequences computed on demand, the same on every machine, without files."""

    section_key = "data"
    place_key: ClassVar = None

    name: Literal["synthetic"] = key("synthetic", "kind of data")
    vocab: Rows = key(256, "number of different tokens", unit="tokens", example="64")


class TokenisedConfig(Section):
    """Settings of data that a Hugging Face tokenizer encodes once, and that is cached as tokens."""

    section_key = "data"
    place_key: ClassVar = "path"
    needs: ClassVar[str]

    name: str
    path: NeededPaths
    mix: Mix | None = key(
        None,
        "sources in place of `path`, with the weight of each in the rows",
        example="{code:{path:code,weight:2},prose:{path:texts}} data.tokenizer=path/to/llama",
    )
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

    @model_validator(mode="after")
    def _has_files(self) -> Self:
        if (self.path is None) == (self.mix is None):
            what = f"data.path={self.needs}" if self.path is None else "data.path or data.mix, not both"
            raise ConfigError(f"data={self.name} needs {what}")
        return self

    @property
    def sources(self) -> "dict[str, tuple[float, Self]]":
        """The weight and the settings of each source of `mix`, by name."""
        return {
            name: (source["weight"], self.model_copy(update={"path": source["path"], "mix": None}))
            for name, source in (self.mix or {}).items()
        }

    @property
    def label(self) -> str:
        """The paths as a setting, for messages."""
        return f"data.path={self.path if isinstance(self.path, str) else shown(self.path)}"

    @property
    def places(self) -> tuple[str, ...]:
        """The paths, or names on the hub, of the files."""
        return (self.path,) if isinstance(self.path, str) else self.path

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

    needs: ClassVar = "FOLDER, texts or records in JSON, CSV or Parquet"

    name: Literal["hf"] = key("hf", "kind of data")
    path: NeededPaths = key(
        None,
        "files of text, JSON, CSV, TSV or Parquet, folders of them, folders that datasets.save_to_disk made, or names "
        "on the hub; one or a list",
        example="texts data.tokenizer=path/to/llama",
    )
    column: PlainText = key(
        "text",
        "field of a record, or column of a table, with the text",
        example="body data.path=texts data.tokenizer=path/to/llama",
    )


class ChatConfig(TokenisedConfig):
    """Settings of data=chat: chats, or prompts with completions, of which the assistant's tokens are trained."""

    needs: ClassVar = "FILE, chats in JSON, CSV or Parquet"

    name: Literal["chat"] = key("chat", "kind of data")
    path: NeededPaths = key(
        None,
        "files of JSON, CSV, TSV or Parquet, folders of them, folders that datasets.save_to_disk made, or names on the "
        "hub; one or a list",
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


AnyData = TextConfig | TokensConfig | HFTextConfig | ChatConfig | SyntheticConfig
DataConfig = Annotated[AnyData, Field(discriminator="name")]


def apart(config: AnyData, held: str) -> tuple[AnyData, AnyData]:
    """Return the settings of data that all trains, and of other data that is all for validation.

    Args:
        held: the path of the other data.

    Raises:
        ConfigError: the data is not read from files.
    """
    if config.place_key is None:
        raise ConfigError(f"val.path: data={config.name} reads no files. Remove val.path.")
    other = {config.place_key: held, "holdout": 1.0} | ({"mix": None} if isinstance(config, TokenisedConfig) else {})
    return config.model_copy(update={"holdout": 0.0}), config.model_copy(update=other)


def check_text(config: TextConfig, row: int) -> None:
    """Raise ConfigError unless the folder has `row` tokens for training and `row` tokens for validation."""
    root = config.root
    if not root.exists():
        raise ConfigError(f"data.folder={root} does not exist. Give a folder with text files.")
    if not root.is_dir():
        is_file = ConfigError(f"data.folder={root} is not a folder. Give the folder that holds this file.")
        raise _holds_records(root) if root.suffix in READERS else is_file
    files, train, held, records = [], 0, 0, True
    for file in text_files(root, config.skip):
        files.append(file)
        records = records and file.path.suffix in READERS
        if file.draw < config.holdout:
            held += file.size
        else:
            train += file.size
        if min(train, held) > row and not records:
            return  # without walking a large folder to its end
    if records and any(files_below(root, lambda path: path.suffix in READERS, config.skip)):
        raise _holds_records(root)
    if not files:
        skipped = ", ".join(config.skip)
        raise ConfigError(f"data.folder={root} holds no text file. The search skips folders named {skipped}.")
    split = split_files(files, config.holdout)
    train = sum(file.size for file in split.train) - split.tail
    check_length(f"data.folder={root}", train, sum(file.size for file in split.held) + split.tail, row, config.holdout)


def _holds_records(place: Path) -> ConfigError:
    instead = f"Type data=hf data.path={place}, with data.tokenizer=FOLDER or model=hf."
    return ConfigError(f"data.folder={place} holds records ({', '.join(READERS)}), not text. {instead}")


def check_tokens(config: TokensConfig, row: int) -> None:
    """Raise ConfigError for a missing file, a size that is no multiple of the dtype's, or fewer tokens than a row."""
    file = Path(config.path)
    if not file.is_file():
        raise ConfigError(f"data.path={file} is not a file. Give a file of {config.dtype} tokens.")
    if file.stat().st_size % config.item_bytes:
        raise ConfigError(
            f"data.path={file} has {file.stat().st_size} bytes, "
            f"not a multiple of {config.item_bytes}: it does not hold {config.dtype}"
        )
    check_length(f"data.path={file}", *config.lengths(), row, config.holdout)


def check_length(what: str, train: int, held: int, row: int, holdout: float) -> None:
    """Raise ConfigError if training or validation has fewer than `row` tokens.

    Args:
        what: the setting that the message begins with.
        train: number of tokens for training.
        held: number of tokens for validation.
        row: tokens of a row.
        holdout: the share for validation; 0: there is none, 1: there is nothing else.
    """
    for share, length, wanted in (("training", train, holdout < 1), ("validation", held, holdout > 0)):
        if wanted and length < row:
            raise ConfigError(
                f"{what} leaves {length} tokens for {share}, fewer than one row of {row}. "
                "Give more data, another data.holdout or a smaller model.seq."
            )
