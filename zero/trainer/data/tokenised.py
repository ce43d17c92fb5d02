"""Texts tokenised once with a Hugging Face tokenizer, and cached in files that `data=tokens` can read.

The name of the cached folder is a hash of the texts, the tokenizer and the settings. Rank 0 finds or makes the folder
while the other ranks wait, so every rank reads the same bytes, and so does a resumed run.

A document is a text file, or a record of JSON, CSV, TSV, Parquet or a dataset. Each document is encoded
separately, without special tokens, and followed by the end-of-text token. Whole documents are held out for validation,
chosen by a hash of the file's name or of the text. So added documents do not move others, and copies of a text stay
together. If training or validation would have no document, the last tokens of all are held out instead.

Memory holds one batch, the longest line or row, or a whole list of JSON. A text file is encoded in pieces that end at
the end of a line.

Settings are checked without importing torch or `datasets`.
"""

import hashlib
import json
import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zero.core.suggest import some
from zero.errors import ConfigError, MachineError, in_short
from zero.platform.installed import require_hf
from zero.progress import Progress
from zero.trainer.data.cached import ABOUT_FILE, agreed_folder, published
from zero.trainer.data.files import TextFile, drawn, is_text
from zero.trainer.data.records import READERS, SAVED, Record, files_at, hash_files, is_dataset, of_dataset, of_file
from zero.trainer.data.source import HFTextConfig, TokensConfig
from zero.trainer.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from zero.distributed.world import World
    from zero.trainer.data.windows import Windows

VERSION = 2
"""Version of the cached format, part of the hash that names the folder."""

TRAIN_FILE, HELD_FILE = "train.bin", "held.bin"
TEXT = ("str", "string", "large_string")
"""Names of the text types of Python and of `datasets`."""

PIECE = 2**16
BATCH_CHARS = 2**20
"""Characters that are encoded as one text (PIECE) and in one call (BATCH_CHARS). Until it is written, a token takes
53-100 bytes of memory."""

CHAT = "set data=chat for chats"


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
    ).model_copy(update={"holdout": config.holdout})
    return open_tokens(
        tokens,
        seq,
        seed,
        held_path=str(held) if held.is_file() else None,
        decode=lambda numbers: tokenizer.decode(numbers.tolist()),
        what=config.label,
    )


def check_hf(config: HFTextConfig) -> None:
    """Raise ConfigError unless the tokenizer and the first document can be read.

    Raises:
        ConfigError: the message has one line and names the key as the user types it.
    """
    Tokenizer(config.tokenizer, config.end)
    for place in config.places:
        if (Path(place) / SAVED).is_file():
            _check_saved(config, Path(place))
        elif next(_documents(config, place), None) is None:
            raise _no_text(f"data.path={place}")


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
    hash_files(digest, _files(config), "comparing texts", progress)
    return digest.hexdigest()[:32]


def _make(config: HFTextConfig, tokenizer: Tokenizer, folder: Path, progress: Progress) -> None:
    typecode = "H" if tokenizer.vocab <= 2**16 else "I"
    total, done, documents = sum(file.size for file in _files(config)), 0, 0
    with ExitStack() as closing:
        train, held = (closing.enter_context((folder / name).open("wb")) for name in (TRAIN_FILE, HELD_FILE))
        for batch in _batches(chain.from_iterable(_documents(config, place) for place in config.places)):
            for piece, numbers in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
                tokens = array(typecode, numbers + [tokenizer.end] * piece.ends)
                (held if piece.draw < config.holdout else train).write(tokens.tobytes())
                done += len(piece.text)
                documents += piece.ends
            progress("tokenising", min(done, total - 1), total)  # `done` counts characters, `total` bytes
        progress("tokenising", total, total)
        sizes = train.tell(), held.tell()
    if not any(sizes):
        raise _no_text(config.label)
    if not sizes[0] and config.holdout < 1:
        (folder / HELD_FILE).replace(folder / TRAIN_FILE)
    elif not sizes[1] and config.holdout > 0:
        (folder / HELD_FILE).unlink()
    about = {
        "texts": [str(Path(place).absolute()) for place in config.places],
        "tokenizer": str(tokenizer.file.absolute()),
        "documents": documents,
    }
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


def _files(config: HFTextConfig) -> list[TextFile]:
    return [file for place in config.places for file in files_at(place, _is_read)]


def _is_read(path: Path) -> bool:
    return path.suffix in READERS or is_text(path)


def _documents(config: HFTextConfig, place: str) -> Iterator[_Piece]:
    if is_dataset(place):
        yield from _of_records(of_dataset(place, (config.column,)), config)
        return
    for file in files_at(place, _is_read):
        if file.path.suffix in READERS:
            yield from _of_records(of_file(file.path, (config.column,)), config)
        else:
            yield from _of_text(file)


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


def _of_records(records: Iterator[Record], config: HFTextConfig) -> Iterator[_Piece]:
    for record in records:
        value = record.fields.get(config.column)
        if not isinstance(value, str):
            raise _no_text_in(config, record.where, {name: type(each).__name__ for name, each in record.fields.items()})
        yield from _of_value(value, record.where)


def _of_value(value: str, where: str) -> Iterator[_Piece]:
    if value:
        try:
            yield _Piece(value, drawn(value.encode()), True)
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"data.path: {where} holds a lone surrogate, which is not valid text: {in_short(error)}"
            ) from error


def _check_saved(config: HFTextConfig, root: Path) -> None:
    try:
        features = json.loads((root / SAVED).read_bytes())["features"]
        columns = {
            name: str(about.get("dtype", about.get("_type"))) if isinstance(about, dict) else type(about).__name__
            for name, about in features.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"data.path={root}: {SAVED} was not written by datasets ({in_short(error)})") from error
    if columns.get(config.column) not in TEXT:
        raise _no_text_in(config, str(root), columns)
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


def _no_text(label: str) -> ConfigError:
    return ConfigError(f"{label} holds no text. Give a folder of text or JSONL files.")
