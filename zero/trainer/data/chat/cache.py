"""Chats encoded once, and cached in a file of tokens with an index.

A token is a uint32, whose highest bit says whether it trains. The index has three int64 for each chat: the end of its
tokens, the number of its first token that trains, and a hash of its record that holds it out for validation. So added
chats do not move others, and the length of rows may change without encoding again.
"""

import hashlib
import json
import os
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero.errors import ConfigError, MachineError
from zero.progress import Progress
from zero.trainer.data.cached import ABOUT_FILE, agreed_folder, published
from zero.trainer.data.chat.encoder import COMPARED, TRAINS_BIT, ChatEncoder
from zero.trainer.data.chat.records import Chat, Record, chat_files, chat_of, records
from zero.trainer.data.source import ChatConfig, drawn
from zero.trainer.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from zero.distributed.world import World
    from zero.trainer.data.chat.chats import Chats

CACHE_FORMAT = "chat 1"
"""Name and version of the cached format, part of the hash that names the folder."""

TOKENS_FILE, INDEX_FILE = "tokens.bin", "index.bin"
DRAWS = 2**48


def check_chats(config: ChatConfig) -> None:
    """Raise ConfigError unless the tokenizer and the first chats can be read.

    Raises:
        ConfigError: the message has one line and names the key as the user types it.
    """
    _checked(config)


def _checked(config: ChatConfig) -> ChatEncoder:
    """Return the encoder, with which the first chats were read."""
    end = Tokenizer(config.tokenizer, config.end).end
    if not config.root.exists():
        raise ConfigError(f"data.path={config.path} does not exist. Give a JSONL or Parquet file of chats.")
    encoder = ChatEncoder(config.tokenizer, config.template, end)
    first = [(chat_of(record)[1], record.where) for record in islice(records(config.root), COMPARED)]
    if not first:
        raise ConfigError(f"data.path={config.path} holds no chat.")
    encoder.compare(first)
    encoder.encode(*first[0])
    return encoder


def open_chats(
    config: ChatConfig, seq: int, seed: int, rows: int, world: "World | None", progress: Progress
) -> "Chats":
    """Open the cached chats; rank 0 makes them first if they are missing. Collective.

    Args:
        rows: rows of a global batch.

    Raises:
        ConfigError: as `check_chats`; or a chat cannot be read, or none has a token that trains.
        MachineError: the chats or the cache cannot be read or written, for example because the disk is full.
    """
    from zero.distributed.world import World
    from zero.trainer.data.chat.chats import ChatPlace, Chats
    from zero.trainer.data.tokens import TokenFile, file_digest

    tokenizer = Tokenizer(config.tokenizer, config.end)
    find = partial(_found_or_made, config, tokenizer)
    folder = agreed_folder(world or World.solo(), "tokens of data=chat", TOKENS_FILE, find, progress)
    index = array("q", (folder / INDEX_FILE).read_bytes())
    about = json.loads((folder / ABOUT_FILE).read_text())
    train, held, counts, start = list[ChatPlace](), list[ChatPlace](), Counter[str](), 0
    lengths, draws = list[int](), list[int]()
    for end, first, draw in zip(index[::3], index[1::3], index[2::3], strict=True):
        place, start = ChatPlace(start, min(end - start, seq + 1)), end
        lengths.append(end - place.start)
        counts["longer than a row"] += lengths[-1] > seq + 1
        if first > seq or (lengths[-1] > seq + 1 and config.long == "drop"):
            counts["left out"] += 1
            continue
        (held if draw < config.holdout * DRAWS else train).append(place)
        draws.append(draw)
    if not held and len(train) > 1:
        held.append(train.pop(draws.index(min(draws))))
    for share, places in (("training", train), ("validation", held)):
        if not places:
            raise ConfigError(
                f"data.path={config.path} leaves no chat for {share}: {len(index) // 3} chats with tokens that train, "
                f"{counts['left out']} of them left out because of model.seq={seq}."
            )
    digest = hashlib.sha256(f"{file_digest(folder / TOKENS_FILE)} {file_digest(folder / INDEX_FILE)}".encode())
    digest.update(f" {config.holdout} {config.pack} {config.long}".encode())
    return Chats(
        TokenFile(str(folder / TOKENS_FILE), "uint32"),
        train,
        held,
        seq=seq,
        seed=seed,
        rows=rows,
        packed=config.pack,
        pad=tokenizer.end,
        vocab_size=tokenizer.vocab,
        digest=digest.hexdigest(),
        decode_tokens=lambda numbers: tokenizer.decode(numbers.tolist()),
        about=_about(about, counts, len(train), len(held), lengths),
        all_lengths=lengths,
    )


def _about(about: dict[str, Any], counts: Counter[str], train: int, held: int, lengths: Iterable[int]) -> str:
    """Return a line about the chats."""
    formats = ", ".join(about["formats"])
    mask = "the template's marks" if about["marks"] else "the assistant's turns"
    texts = [f": {train:,} chats to train and {held:,} to validate ({formats}), trained on {mask}"]
    texts += [f"{about['empty']:,} without a token that trains"] * (about["empty"] > 0)
    texts += [f"{about['only last']:,} of which only the last turn trains"] * (about["only last"] > 0)
    texts += [f"{counts['longer than a row']:,} longer than a row"] * (counts["longer than a row"] > 0)
    texts += [f"{counts['left out']:,} left out"] * (counts["left out"] > 0)
    lengths = sorted(lengths)
    middle, most = (lengths[int(share * (len(lengths) - 1))] for share in (0.5, 0.9))
    return ", ".join([*texts, f"tokens: median {middle:,}, nine of ten up to {most:,}, most {lengths[-1]:,}"])


def _found_or_made(config: ChatConfig, tokenizer: Tokenizer, progress: Progress) -> Path:
    try:
        encoder = _checked(config)
        folder = config.cached.absolute() / _name(config, tokenizer, encoder, progress)
        if not folder.is_dir():
            published(folder, TOKENS_FILE, partial(_make, config, encoder, progress=progress))
    except OSError as error:
        raise MachineError(f"data=chat: {error.filename or config.cached}: {error.strerror}") from error
    return folder


def _name(config: ChatConfig, tokenizer: Tokenizer, encoder: ChatEncoder, progress: Progress) -> str:
    """Return the folder's name: a hash of all bytes of the chats, the tokenizer and its template."""
    import tokenizers
    import transformers

    versions = tokenizers.__version__, transformers.__version__, sys.byteorder
    digest = hashlib.sha256(json.dumps([CACHE_FORMAT, *versions, tokenizer.end, encoder.template]).encode())
    for name in (tokenizer.file.name, "tokenizer_config.json", "special_tokens_map.json"):
        if (settings := tokenizer.file.with_name(name)).is_file():
            digest.update(hashlib.sha256(settings.read_bytes()).digest())
    files, done = chat_files(config.root), 0
    total = sum(file.stat().st_size for file in files)
    for file in files:
        key = "" if file == config.root else file.relative_to(config.root).as_posix()
        digest.update(f"{len(os.fsencode(key))} {file.stat().st_size} ".encode() + os.fsencode(key))
        with file.open("rb") as read:
            while block := read.read(2**22):
                digest.update(block)
                done += len(block)
                progress("comparing chats", min(done, total), total)
    return "chat-" + digest.hexdigest()[:32]


def _make(config: ChatConfig, encoder: ChatEncoder, folder: Path, *, progress: Progress) -> None:
    """Encode all chats into the folder's files."""
    formats, end, number = Counter[str](), 0, 0
    about = {"empty": 0, "only last": 0}
    first: Record | None = None
    with ExitStack() as closing:
        tokens, index = (closing.enter_context((folder / name).open("wb")) for name in (TOKENS_FILE, INDEX_FILE))
        for record, chat in _compared(config, encoder, formats):
            first, number = first or record, number + 1
            encoded = encoder.encode(chat, record.where)
            trains = [False, *encoded.trains[1:]]
            about["only last"] += encoded.only_last and any(trains)
            if not any(trains):
                about["empty"] += 1
                continue
            pairs = zip(encoded.tokens, trains, strict=True)
            tokens.write(array("I", [token | TRAINS_BIT * mark for token, mark in pairs]).tobytes())
            end += len(trains)
            draw = int(drawn(json.dumps(dict(record.fields), sort_keys=True, default=str).encode()) * DRAWS)
            index.write(array("q", [end, trains.index(True), draw]).tobytes())
            if number % 100 == 0:
                progress("encoding chats", number, number + 1)
    if not end:
        where = first.where if first else config.path
        raise ConfigError(
            f"data.path: {where}, and all others: no token of an assistant. Check the roles, or the chat template."
        )
    told = about | {"formats": [*formats], "marks": encoder.marks, "chats": str(config.root.absolute())}
    (folder / ABOUT_FILE).write_text(json.dumps(told, indent=2))


def _compared(config: ChatConfig, encoder: ChatEncoder, formats: Counter[str]) -> Iterator[tuple[Record, Chat]]:
    """Yield all records with their chats. Before the first one, the masks of the first ones are compared."""

    def read() -> Iterator[tuple[Record, Chat]]:
        for record in records(config.root):
            name, chat = chat_of(record)
            formats[name] += 1
            yield record, chat

    every = read()
    early = [*islice(every, COMPARED)]
    encoder.compare([(chat, record.where) for record, chat in early])
    yield from early
    yield from every
