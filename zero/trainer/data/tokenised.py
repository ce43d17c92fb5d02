"""Texts tokenised once with a Hugging Face tokenizer, and cached in files that `data=tokens` can read.

The name of the cached folder is a hash of the texts, the tokenizer and the settings. Rank 0 finds or makes the folder
while the other ranks wait, so every rank reads the same bytes, and so does a resumed run.

A document is a text file, a line of a JSONL file, or a row of a folder of `datasets`. Each document is encoded
separately, without special tokens, and followed by the end-of-text token. Whole documents are held out for validation,
chosen by a hash of the file's name or of the text. So added documents do not move others, and copies of a text stay
together. If training or validation would have no document, the last tokens of all are held out instead.

Memory holds one batch, or the longest line or row. A text file is encoded in pieces that end at the end of a line.

Settings are checked without importing torch or `datasets`.
"""

import hashlib
import json
import os
import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zero.core.suggest import some
from zero.errors import ConfigError, MachineError, in_short
from zero.platform.installed import require_hf
from zero.progress import Progress
from zero.trainer.data.cached import ABOUT_FILE, agreed_folder, published
from zero.trainer.data.json_lines import json_lines
from zero.trainer.data.source import SAVED, HFTextConfig, TextFile, TokensConfig, check_length, drawn, text_files
from zero.trainer.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from zero.distributed.world import World
    from zero.trainer.data.windows import Windows

VERSION = 1
"""Version of the cached format, part of the hash that names the folder."""

TRAIN_FILE, HELD_FILE = "train.bin", "held.bin"
RECORDS = (".jsonl", ".ndjson", ".json")
SPLITS = "dataset_dict.json"
"""The file that `save_to_disk` writes in a folder that contains several datasets."""

TEXT = ("str", "string", "large_string")
"""Names of the text types of Python and of `datasets`."""

PIECE = 2**16
BATCH_CHARS = 2**20
"""Characters that are encoded as one text (PIECE) and in one call (BATCH_CHARS). Until it is written, a token takes
53-100 bytes of memory."""

CHAT = "set data=chat for chats"

ROWS_PER_READ = 256


def open_hf(config: HFTextConfig, seq: int, seed: int, world: "World | None", progress: Progress) -> "Windows":
    """Open the cached tokens of data=hf; rank 0 makes them first if they are missing. Collective.

    Raises:
        ConfigError: as `check_hf`; or a text cannot be read, or there are too few tokens.
        MachineError: the texts or the cache cannot be read or written, for example because the disk is full.
    """
    from zero.distributed.world import World
    from zero.trainer.data.tokens import open_tokens

    tokenizer = Tokenizer(config.tokenizer, config.end)
    make = partial(_found_or_made, config, tokenizer)
    folder = agreed_folder(world or World.solo(), "tokens of data=hf", TRAIN_FILE, make, progress)
    held = folder / HELD_FILE
    tokens = TokensConfig(
        path=str(folder / TRAIN_FILE),
        dtype="uint16" if tokenizer.vocab <= 2**16 else "uint32",
        vocab=tokenizer.vocab,
        validation_path=str(held) if held.is_file() else None,
        holdout=config.holdout,
    )
    check_length(f"data.path={config.path}", *tokens.lengths(), seq + 1)
    return open_tokens(tokens, seq, seed, decode=lambda numbers: tokenizer.decode(numbers.tolist()))


def check_hf(config: HFTextConfig) -> None:
    """Raise ConfigError unless the tokenizer and the first document can be read.

    Raises:
        ConfigError: the message has one line and names the key as the user types it.
    """
    Tokenizer(config.tokenizer, config.end)
    if not config.root.exists():
        raise ConfigError(
            f"data.path={config.path} does not exist. Give a folder of text or JSONL files, or one that "
            "datasets.save_to_disk made: nothing is fetched from the hub."
        )
    if (config.root / SPLITS).is_file():
        folders = sorted(path.parent.name for path in config.root.glob(f"*/{SAVED}"))
        raise ConfigError(
            f"data.path={config.path} holds the splits {', '.join(folders)}. Give the folder of one split."
        )
    if _is_saved(config.root):
        _check_saved(config)
    elif next(_documents(config), None) is None:
        raise _no_text(config)


# The folder of the tokens


def _found_or_made(config: HFTextConfig, tokenizer: Tokenizer, progress: Progress) -> Path:
    try:
        check_hf(config)
        folder = config.cached.absolute() / _name(config, tokenizer, progress)
        if not folder.is_dir():
            published(folder, TRAIN_FILE, lambda unfinished: _make(config, tokenizer, unfinished, progress))
    except OSError as error:
        raise MachineError(f"data=hf: {error.filename or config.cached}: {error.strerror}") from error
    return folder


def _name(config: HFTextConfig, tokenizer: Tokenizer, progress: Progress) -> str:
    """Return the folder's name: a hash of all bytes of the texts and the tokenizer, and of the settings that matter."""
    import tokenizers

    settings = [VERSION, tokenizers.__version__, sys.byteorder, PIECE, tokenizer.end, config.column, config.holdout]
    digest = hashlib.sha256(json.dumps(settings).encode())
    digest.update(hashlib.sha256(tokenizer.file.read_bytes()).digest())
    files = list(_files(config))
    done, total = 0, sum(file.size for file in files)
    for file in files:
        digest.update(f"{len(os.fsencode(file.key))} {file.size} ".encode() + os.fsencode(file.key))
        with file.path.open("rb") as read:
            while block := read.read(2**22):
                digest.update(block)
                done += len(block)
                progress("comparing texts", min(done, total), total)
    return digest.hexdigest()[:32]


def _make(config: HFTextConfig, tokenizer: Tokenizer, folder: Path, progress: Progress) -> None:
    typecode = "H" if tokenizer.vocab <= 2**16 else "I"
    total, done, documents = sum(file.size for file in _files(config)), 0, 0
    with ExitStack() as closing:
        train, held = (closing.enter_context((folder / name).open("wb")) for name in (TRAIN_FILE, HELD_FILE))
        for batch in _batches(_documents(config)):
            for piece, numbers in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
                tokens = array(typecode, numbers + [tokenizer.end] * piece.ends)
                (held if piece.draw < config.holdout else train).write(tokens.tobytes())
                done += len(piece.text)
                documents += piece.ends
            progress("tokenising", min(done, total - 1), total)  # `done` counts characters, `total` bytes
        progress("tokenising", total, total)
        sizes = train.tell(), held.tell()
    if not any(sizes):
        raise _no_text(config)
    if not sizes[0]:
        (folder / HELD_FILE).replace(folder / TRAIN_FILE)
    elif not sizes[1]:
        (folder / HELD_FILE).unlink()
    about = {"texts": str(config.root.absolute()), "tokenizer": str(tokenizer.file.absolute()), "documents": documents}
    (folder / ABOUT_FILE).write_text(json.dumps(about, indent=2))


# Documents


class _Piece(NamedTuple):
    """A part of the text of a document."""

    text: str
    draw: float
    """Hash of the document, in [0, 1): documents below `data.holdout` are for validation."""
    ends: bool
    """Whether this is the last piece of the document."""


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _files(config: HFTextConfig) -> Iterator[TextFile]:
    """Yield the files of the texts, in the same order on every machine."""
    root = config.root
    if root.is_dir() and not _is_saved(root):
        yield from text_files(root)
        return
    for path in [root] if root.is_file() else sorted(path for path in root.iterdir() if path.is_file()):
        yield TextFile(path, path.name, path.stat().st_size)


def _documents(config: HFTextConfig) -> Iterator[_Piece]:
    if _is_saved(config.root):
        yield from _of_dataset(config)
        return
    for file in _files(config):
        yield from _of_records(file, config) if file.path.suffix in RECORDS else _of_text(file)


def _of_text(file: TextFile) -> Iterator[_Piece]:
    try:
        with file.path.open(encoding="utf-8", newline="") as read:
            piece = read.read(PIECE) + read.readline(PIECE)
            while piece:
                following = read.read(PIECE)
                following += read.readline(PIECE) if following else ""
                yield _Piece(piece, file.draw, not following)
                piece = following
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"data.path: {file.path} is not UTF-8 ({in_short(error)}). Recode the file or move it."
        ) from error


def _of_records(file: TextFile, config: HFTextConfig) -> Iterator[_Piece]:
    for where, record in json_lines(file.path, f"{{{config.column!r}: ..}}"):
        if not isinstance(record.get(config.column), str):
            raise _no_text_in(config, where, {name: type(value).__name__ for name, value in record.items()})
        yield from _of_value(record[config.column], where)


def _of_dataset(config: HFTextConfig) -> Iterator[_Piece]:
    require_hf("datasets", "data=hf needs")
    import datasets

    try:
        rows = datasets.load_from_disk(str(config.root)).with_format(None).select_columns([config.column])
    except Exception as error:  # a damaged folder raises errors of Arrow, the file system or datasets
        raise ConfigError(f"data.path={config.path}: datasets cannot read it: {in_short(error)}") from error
    number = 0
    for batch in rows.iter(batch_size=ROWS_PER_READ):
        for value in batch[config.column]:
            if value is None:
                raise _no_text_in(config, f"{config.path}, row {number}", {config.column: "NoneType"})
            yield from _of_value(value, f"{config.path}, row {number}")
            number += 1


def _of_value(value: str, where: str) -> Iterator[_Piece]:
    if value:
        try:
            yield _Piece(value, drawn(value.encode()), True)
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"data.path: {where} holds a lone surrogate, which is not valid text: {in_short(error)}"
            ) from error


def _is_saved(root: Path) -> bool:
    return (root / SAVED).is_file()


def _check_saved(config: HFTextConfig) -> None:
    try:
        features = json.loads((config.root / SAVED).read_bytes())["features"]
        columns = {
            name: str(about.get("dtype", about.get("_type"))) if isinstance(about, dict) else type(about).__name__
            for name, about in features.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"data.path={config.path}: {SAVED} was not written by datasets ({in_short(error)})"
        ) from error
    if columns.get(config.column) not in TEXT:
        raise _no_text_in(config, config.path, columns)
    require_hf("datasets", "data=hf needs")


def _no_text_in(config: HFTextConfig, where: str, columns: Mapping[str, str]) -> ConfigError:
    """Return the error for a record or a dataset whose `data.column` is missing or holds no text.

    Args:
        where: the record or dataset, for the message.
        columns: type of each column, by name.
    """
    texts = [name for name, dtype in columns.items() if dtype in TEXT]
    known = f"Columns of text: {some(texts)}." if texts else f"No column holds text: {CHAT}."
    dtype = columns.get(config.column)
    if dtype is None:
        return ConfigError(f"data.column={config.column} is not a column of {where}. {known}")
    advice = "Remove this record." if dtype == "NoneType" else known
    return ConfigError(f"data.path: {where}: data.column={config.column} holds {dtype}, not text. {advice}")


def _no_text(config: HFTextConfig) -> ConfigError:
    return ConfigError(f"data.path={config.path} holds no text. Give a folder of text or JSONL files.")
