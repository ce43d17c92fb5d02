"""The declaration of one setting (`key`), and types of values with the texts that describe them.

A setting is declared once, by the code that uses it. Its texts are printed in errors, by mode=explain and in
docs/config.md. Pydantic's own types are not used because they report a mistake in `int | "auto"` as two errors, and
read 0.5 as a size of 0 bytes.
"""

import os
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, ByteSize, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, core_schema

from zero.core.activations import ACTIVATIONS
from zero.core.suggest import alternatives, meant

MOST = 2**53
"""The largest whole number that all readers of JSON and YAML read exactly."""


def key(
    default: Any,
    text: str,
    *,
    unit: str | None = None,
    trades: str | None = None,
    example: str | None = None,
    **field: Any,
) -> Any:
    """Declare one setting of a section.

    Args:
        text: the setting's meaning, a sentence without a full stop.
        unit: the unit of a number.
        trades: the cost and the benefit of changing it.
        example: a value as typed; other settings that it needs may follow.
        **field: an alias or bounds, as pydantic's Field takes them.
    """
    texts = {"unit": unit, "trades": trades, "example": example}
    extra: dict[str, Any] = {name: value for name, value in texts.items() if value}
    return Field(default, description=text, json_schema_extra=extra, **field)


@dataclass(frozen=True)
class Reads:
    """A type of setting: the function that reads a typed value, and the words for the values that it accepts.

    `read` returns the value to keep, or raises ValueError; if the error has no message, the message is "must be ..."
    with the words. `write` returns the text that a user types for a kept value.
    """

    words: str
    read: Callable[[Any], Any]
    write: Callable[[Any], Any] = lambda kept: kept

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        write = core_schema.plain_serializer_function_ser_schema(self.write)
        return core_schema.no_info_plain_validator_function(self._read, serialization=write)

    def _read(self, value: object) -> Any:
        try:
            return self.read(value)
        except ValueError as error:
            raise ValueError(str(error) or f"must be {self.words}") from None


# Numbers


def or_auto(
    words: str, read: Callable[[Any], Any], auto: Any = "auto", write: Callable[[Any], Any] = lambda kept: kept
) -> Reads:
    """Return the type of values that `read` accepts, or of the word auto, which becomes `auto`."""
    return Reads(
        f"{words}, or auto",
        lambda value: auto if value == "auto" else read(value),
        lambda value: "auto" if value is None else write(value),
    )


def whole_or_auto(least: int, largest: int = MOST, auto: Any = "auto") -> Reads:
    """Return the type of whole numbers in a range, or of the word auto. `True` and `2.0` are rejected."""

    def read(value: object) -> int:
        if type(value) is not int or value < least:
            raise ValueError
        if value > largest:
            raise ValueError(f"must be at most {largest}")
        return value

    return or_auto(f"a whole number from {least}", read, auto)


def words_in_fp32(value: float) -> float:
    if value < 1e-37:
        raise ValueError("is 0 in fp32, the dtype of updates")
    return value


Count = Annotated[int | Literal["auto"], whole_or_auto(1)]
Steps = Annotated[int | Literal["auto"], whole_or_auto(0)]
ChunkRows = Annotated[int | Literal["auto"], whole_or_auto(0)]
ThreadCount = Annotated[int | Literal["auto"], whole_or_auto(1, 4096)]
Ranks = Annotated[int | Literal["auto"], whole_or_auto(1, 2**20)]
Whole = Annotated[int, Field(ge=1, le=MOST)]
Natural = Annotated[int, Field(ge=0, le=MOST)]
Rows = Annotated[int, Field(ge=1, le=2**31)]
Positive = Annotated[float, Field(gt=0, le=1e37), AfterValidator(words_in_fp32)]
Rate = Annotated[float, Field(gt=0, le=1000), AfterValidator(words_in_fp32)]
NonNegative = Annotated[float, Field(ge=0, le=1000)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]

# Sizes

_SIZE = re.compile(r"\d{1,18}|\d{1,18}(\.\d{1,9})? ?[a-zA-Z]{1,5}")
_BYTES: TypeAdapter[ByteSize] = TypeAdapter(ByteSize)
_MOST_BYTES = 2**60


def bytes_of(value: object) -> int:
    # pydantic's ByteSize ignores text after the unit, and reads 0.5 as 0 bytes
    if not (type(value) is int or (isinstance(value, str) and _SIZE.fullmatch(value))):
        raise ValueError
    try:
        nbytes = int(_BYTES.validate_python(value))
    except ValidationError:
        raise ValueError from None
    if not 0 <= nbytes <= _MOST_BYTES:
        raise ValueError
    return nbytes


def memory_bytes(value: object) -> int:
    """Return the bytes of a size; reject a bare 80, because the user means 80GiB, but accept 80B."""
    nbytes = bytes_of(value)
    if nbytes >= 2**20 or re.fullmatch(r"\d+B", str(value)):
        return nbytes
    if str(value).isdigit():
        raise ValueError(f"is {nbytes} bytes. Write a unit, such as 80GiB.")
    raise ValueError("must be at least 1MiB. See the memory of a run with mode=plan.")


Size = Annotated[int, Reads("a size in bytes such as 4MiB, or 0", bytes_of)]
Memory = Annotated[int | Literal["auto"], or_auto("a size such as 80GiB", memory_bytes)]

# Words


def validate_text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be text")
    if not value.strip():
        raise ValueError("must not be empty. Leave the key out, or write null.")
    if not value.isprintable():
        raise ValueError("must be printable text")
    return value


def _place(value: object) -> str:
    text = validate_text(value)
    if len(text.encode()) > 4095 or any(len(part.encode()) > 255 for part in text.split("/")):
        raise ValueError("is too long for a path")
    if "*" in text or "?" in text:
        raise ValueError("is a pattern, but must be one path. Give the folder of the files.")
    return os.path.expanduser(text)


def validate_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        is_word = isinstance(value, str) and re.fullmatch(r"[\w.*/-]+", value)
        raise ValueError(f"must be a list: [{value}]" if is_word else "")
    return tuple(validate_text(name) for name in value)


def validate_paths(value: object) -> str | tuple[str, ...]:
    if not isinstance(value, list | tuple):
        return _place(value)
    if not value:
        raise ValueError("must not be empty")
    return _unique(tuple(_place(path) for path in value))


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"has {name} twice")
    return names


Adjust = Literal["original", "match_rms_adamw"]
"""Factors of the learning rate for a matrix that is updated as a whole."""

EXCLUDED = "*embed*", "*wte*", "*wpe*", "*lm_head*", "head.*", "*.head.*", "output.*", "*classifier*", "*score*"
"""Patterns of the names of embeddings and output layers, which are not updated as matrices."""


def _activations(value: object) -> str | tuple[str, ...]:
    if not isinstance(value, list | tuple):
        words = (*ACTIVATIONS, "auto")
        if value not in words:
            hint = meant(str(value), words)
            raise ValueError(f"must be one of {', '.join(words)}{hint}" if hint else "")
        return str(value)
    if not value:
        raise ValueError("must not be empty")
    entries = tuple(validate_text(entry) for entry in value)
    for entry in entries:
        pattern, _, word = entry.rpartition(":")
        if not pattern or word not in ACTIVATIONS:
            raise ValueError(
                f"has {entry}. Write UNITS:WORD, such as blocks.0:remat, with {alternatives([*ACTIVATIONS])}."
            )
    _unique(tuple(entry.rpartition(":")[0] for entry in entries))
    return entries


UnitActivations = Annotated[
    str | tuple[str, ...],
    Reads(f"{alternatives([*ACTIVATIONS, 'auto'])}, or a list such as [blocks.0:remat]", _activations),
]
COMPILE_OPTIONS = ("backend", "mode", "dynamic", "fullgraph")
"""The arguments of `torch.compile` that `zero.compile` passes on."""


def _compile(value: object) -> bool | dict[str, Any]:
    if isinstance(value, bool):
        return value
    if not isinstance(value, Mapping) or not value:
        raise ValueError
    for name in value:
        if name not in COMPILE_OPTIONS:
            raise ValueError(f"has {name}, but takes {', '.join(COMPILE_OPTIONS)}{meant(str(name), COMPILE_OPTIONS)}")
    return dict(value)


Compile = Annotated[
    bool | dict[str, Any], Reads("true, false, or arguments of torch.compile such as {mode: max-autotune}", _compile)
]
PathText = Annotated[str, Reads("a path", _place)]
PathOrPaths = Annotated[
    str | tuple[str, ...], Reads("a path, or a list of paths such as [/nvme0, /nvme1]", validate_paths)
]
Needed = Annotated[str, Reads("a path, or null", lambda value: value if value is None else _place(value))]
"""A path without a default. Its section rejects null with a message of its own."""
NeededPaths = Annotated[
    str | tuple[str, ...],
    Reads("a path, a list of paths, or null", lambda value: value if value is None else validate_paths(value)),
]
"""Paths without a default. Their section rejects null with a message of its own."""
PlainText = Annotated[str, Reads("text", validate_text)]
Names = Annotated[tuple[str, ...], Reads("a list such as [a, b]", validate_names)]

# In words


def words(field: FieldInfo) -> str:
    """Return a description of a setting's values, such as "a whole number from 1, or null"."""
    return _words(field.annotation, field.metadata)


def _words(annotation: Any, metadata: Iterable[Any]) -> str:
    for note in metadata:
        if isinstance(note, Reads):
            return note.words
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        return _words(annotation, [*_flat(inner), *metadata])
    if get_origin(annotation) is Literal:
        *others, last = map(str, get_args(annotation))
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(annotation) in (Union, types.UnionType):
        (inner,) = (member for member in get_args(annotation) if member is not type(None))
        return _words(inner, metadata) + ", or null"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return " ".join([names[annotation], ", ".join(_bounds(metadata))]).strip()


def _flat(metadata: Iterable[Any]) -> Iterator[Any]:
    for note in metadata:
        yield from note.metadata if isinstance(note, FieldInfo) else [note]


def _bounds(metadata: Iterable[Any]) -> Iterator[str]:
    """Yield descriptions of bounds below a million; larger ones are limits of the type and are not described."""
    words = {"ge": "from", "gt": "above", "le": "at most", "lt": "below"}
    for note in metadata:
        for bound, word in words.items():
            limit = getattr(note, bound, None)
            if limit is not None and limit < 1e6:
                yield f"{word} {limit:g}"
