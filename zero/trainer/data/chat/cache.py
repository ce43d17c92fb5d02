"""Chats encoded once, and cached in a file of tokens with an index.

A token is a uint32, whose highest bit says whether it trains. The index has three int64 for each chat: the end of its
tokens, the number of its first token that trains, and a hash of its record that holds it out for validation. So added
chats do not move others, and the length of rows may change without encoding again.
"""

import hashlib
import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero.errors import ConfigError, MachineError
from zero.progress import Progress
from zero.trainer.data.cached import ABOUT_FILE, agreed_folder, published
from zero.trainer.data.chat.encoder import COMPARED, TRAINS_BIT, ChatEncoder
from zero.trainer.data.chat.formats import Chat, chat_of
from zero.trainer.data.files import TextFile, drawn
from zero.trainer.data.records import READERS, Record, files_at, hash_files, is_dataset, of_dataset, of_file
from zero.trainer.data.source import ChatConfig
from zero.trainer.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from zero.distributed.world import World
    from zero.trainer.data.chat.chats import Chats

CACHE_FORMAT = "chat 3"
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
    for place in config.places:
        _files(place)  # raises ConfigError
    encoder = ChatEncoder(config.tokenizer, config.template, end)
    first = [(chat_of(record)[1], record.where) for record in islice(_records(config), COMPARED)]
    if not first:
        raise ConfigError(f"{config.label} holds no chat.")
    encoder.compare(first)
    encoder.encode(*first[0])
    return encoder


def open_chats(config: ChatConfig, seq: int, seed: int, world: "World | None", progress: Progress) -> "Chats":
    """Open the cached chats; rank 0 makes them first if they are missing. Collective.

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
    if not held and len(train) > 1 and config.holdout > 0:
        held.append(train.pop(draws.index(min(draws))))
    for share, places, wanted in (("training", train, config.holdout < 1), ("validation", held, config.holdout > 0)):
        if wanted and not places:
            raise ConfigError(
                f"{config.label} leaves no chat for {share}: {len(index) // 3} chats with tokens that train, "
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
        packed=config.pack,
        pad=tokenizer.end,
        vocab_size=tokenizer.vocab,
        digest=digest.hexdigest(),
        decode_tokens=lambda numbers: tokenizer.decode(numbers.tolist()),
        about=_about(about, counts, len(train), len(held), lengths),
        all_lengths=lengths,
        has_turns=about["with turns"] > 0,
    )


def _about(about: dict[str, Any], counts: Counter[str], train: int, held: int, lengths: Iterable[int]) -> str:
    """Return a line about the chats."""
    formats = ", ".join(about["formats"])
    answers = "the assistant's turns" if {"messages", "conversations"} & {*about["formats"]} else "the completions"
    mask = "the template's marks" if about["marks"] else answers
    counts_of = {"to train": train, "to validate": held}
    shares = " and ".join(f"{count:,} chats {share}" for share, count in counts_of.items() if count)
    texts = [f": {shares} ({formats}), trained on {mask}"]
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
    hash_files(digest, [file for place in config.places for file in _files(place)], "comparing chats", progress)
    return "chat-" + digest.hexdigest()[:32]


def _files(place: str) -> list[TextFile]:
    """Return the files of a place.

    Raises:
        ConfigError: there are none of records.
    """
    files = files_at(place, lambda path: path.suffix in READERS)
    if not files or not (is_dataset(place) or all(file.path.suffix in READERS for file in files)):
        raise ConfigError(f"data.path={place} holds no {', '.join(READERS)}. Write one chat in a line of JSON.")
    return files


def _records(config: ChatConfig) -> Iterator[Record]:
    for place in config.places:
        if is_dataset(place):
            yield from of_dataset(place)
        else:
            yield from chain.from_iterable(of_file(file.path) for file in _files(place))


def _make(config: ChatConfig, encoder: ChatEncoder, folder: Path, *, progress: Progress) -> None:
    """Encode all chats into the folder's files."""
    formats, end, number = Counter[str](), 0, 0
    about = {"empty": 0, "only last": 0, "with turns": 0}
    first: Record | None = None
    with ExitStack() as closing:
        tokens, index = (closing.enter_context((folder / name).open("wb")) for name in (TOKENS_FILE, INDEX_FILE))
        for record, chat in _compared(config, encoder, formats):
            first, number = first or record, number + 1
            encoded = encoder.encode(chat, record.where)
            trains = [False, *encoded.trains[1:]]
            about["with turns"] += chat.texts is None
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
        where = first.where if first else config.label
        raise ConfigError(
            f"data.path: {where}, and all others: no token of an assistant. Check the roles, or the chat template."
        )
    told = about | {
        "formats": [*formats],
        "marks": encoder.marks,
        "chats": [str(Path(place).absolute()) for place in config.places],
    }
    (folder / ABOUT_FILE).write_text(json.dumps(told, indent=2))


def _compared(config: ChatConfig, encoder: ChatEncoder, formats: Counter[str]) -> Iterator[tuple[Record, Chat]]:
    """Yield all records with their chats. Before the first one, the masks of the first ones are compared."""

    def read() -> Iterator[tuple[Record, Chat]]:
        for record in _records(config):
            name, chat = chat_of(record)
            formats[name] += 1
            yield record, chat

    every = read()
    early = [*islice(every, COMPARED)]
    encoder.compare([(chat, record.where) for record, chat in early])
    yield from early
    yield from every
