"""The manifest of a checkpoint: what each file holds and hashes to; a text that does not add up is refused.

A manifest says where each tensor's elements lie and what each file hashes to. Its text is one JSON object in ASCII,
and the last line is the hash of all lines before it:

    {"entries":[...],"facts":{...},"files":[...],"finite":true,"format":1,"step":20,"world":2,
    "sha256":"<64 hex digits>"}

The hash finds damage; it does not stop who recomputes it. So nothing in the text is believed: a manifest that `check`
lets pass describes tensors that are covered once, by ranges that fill their files without overlap or hole, and names
no path. No file is opened here.
"""

import json
import math
import re
import reprlib
import struct
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, NamedTuple, NoReturn

from zero.checkpoint.hashes import SPAN_BYTES, FileHash
from zero.errors import CheckpointError
from zero.platform.safetensors_files import LENGTH_BYTES, MOST_HEADER_BYTES, NAMES

FORMAT = 1
"""What this library writes, and the newest format that it reads."""

CAP_BYTES = 64 * 2**20
"""No manifest is longer: about seven terabytes of state. Read no more than this and one byte."""

ITEM_BYTES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in NAMES}
"""The dtypes that a checkpoint may hold, and the bytes of one element."""

MAX_WORLD = 99_999
MAX_STEP = 9_999_999_999

_MAX_INT = 2**63 - 1
_MAX_AXES = 64
_MAX_NAME = 4096
_MAX_DEPTH = 32
_MAX_FACT_BITS = 4096  # Python refuses to read integers of more than 4300 digits
_REPR = reprlib.Repr()
_REPR.maxstring = 80
# Types are checked by hand beside the geometry: each line names the tensor, the rank or the file and the range that was
# expected, for values read from text and for values made in memory. A schema's paths would have to be translated back.
_LAST_LINE = re.compile(rb'"sha256":"([0-9a-f]{64})"\}\n')
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair: it can be read from JSON and can be printed nowhere
_LAST_LINE_BYTES = len('"sha256":""}\n') + 64


class Piece(NamedTuple):
    """Elements [start, stop) of a tensor, row by row, in the file of `rank`, `offset` bytes from the file's start."""

    rank: int
    start: int
    stop: int
    offset: int


class Entry(NamedTuple):
    """A tensor, whole, and the pieces it is cut into: they cover [0, numel) in order; an empty tensor has none.

    `kind` is "parameter" (the fp32 master, or the parameter itself), a moment's name such as "exp_avg", "frozen" or
    "buffer". `dtype` is a key of `ITEM_BYTES`. No two entries of a manifest have the same name and kind.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"tensor {_short(self.name)} ({self.kind})"


class Manifest(NamedTuple):
    """One checkpoint. `files` has one hash a rank; `finite`: no element of it is NaN or infinite.

    `facts` are JSON values that mean nothing here: keys are strings, lists are not tuples, floats are finite.
    """

    format: int
    step: int
    world: int
    entries: tuple[Entry, ...]
    files: tuple[FileHash, ...]
    finite: bool
    facts: dict[str, Any]

    def contents(self) -> tuple[tuple[tuple[Entry, Piece], ...], ...]:
        """For each rank, the pieces in its file, in the order of their bytes."""
        found: list[list[tuple[Entry, Piece]]] = [[] for _ in range(self.world)]
        for entry in self.entries:
            for piece in entry.pieces:
                found[piece.rank].append((entry, piece))
        return tuple(tuple(sorted(pieces, key=lambda held: held[1].offset)) for pieces in found)


def file_name(rank: int, world: int) -> str:
    """rank-00001-of-00002.safetensors

    Raises:
        CheckpointError: `rank` is not in a world of `world`, or the world has more than five digits.
    """
    _integer(world, "the world", 1, MAX_WORLD)
    _integer(rank, "the rank", 0, world - 1)
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def step_name(step: int) -> str:
    """step-0000000020

    Raises:
        CheckpointError: `step` is negative or has more than ten digits.
    """
    return f"step-{_integer(step, 'the step', 0, MAX_STEP):010d}"


def step_of(name: str) -> int | None:
    """The step that a folder's name says; None for every name that `step_name` does not give."""
    found = re.fullmatch(r"step-([0-9]{10})", name)
    return int(found[1]) if found else None


def to_text(manifest: Manifest) -> str:
    """Write it down; equal manifests have equal texts.

    Raises:
        CheckpointError: `check` refuses it, or the text is longer than `CAP_BYTES`.
    """
    check(manifest)
    body = manifest._asdict()
    body["entries"] = [
        entry._asdict() | {"pieces": [piece._asdict() for piece in entry.pieces]} for entry in manifest.entries
    ]
    body["files"] = [_file_to_json(file) for file in manifest.files]
    head = json.dumps(body, sort_keys=True, allow_nan=False, separators=(",", ":"))[:-1] + ",\n"
    text = f'{head}"sha256":"{sha256(head.encode("ascii")).hexdigest()}"}}\n'
    if len(text) > CAP_BYTES:
        raise CheckpointError(
            f"the manifest would have {len(text)} bytes, at most {CAP_BYTES}; use fewer ranks or facts"
        )
    return text


def from_text(text: bytes | str) -> Manifest:
    """Read what `to_text` wrote; nothing in it is trusted.

    Raises:
        CheckpointError: it is damaged, of a newer format, or says what cannot be true; one line, naming the tensor or
            the file.
    """
    body = _parse(_vouched(text))
    if "format" not in body:
        raise CheckpointError("the manifest names no format")
    if _integer(body["format"], "the format", 1) > FORMAT:
        raise CheckpointError(f"the manifest has format {_short(body['format'])}, this library reads up to {FORMAT}")
    body = _object(body, (*Manifest._fields, "sha256"), "the manifest")
    del body["sha256"]
    entries = _array(body.pop("entries"), "the list of tensors")
    files = _array(body.pop("files"), "the list of files")
    manifest = Manifest(
        entries=tuple(_entry_of(value, number) for number, value in enumerate(entries)),
        files=tuple(_file_of(value, number) for number, value in enumerate(files)),
        **body,
    )
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Refuse a manifest that no checkpoint can have.

    Raises:
        CheckpointError: one line, naming the tensor or the file.
    """
    if _integer(manifest.format, "the format", 1) > FORMAT:
        raise CheckpointError(f"the manifest has format {_short(manifest.format)}, this library reads up to {FORMAT}")
    _integer(manifest.step, "the step", 0, MAX_STEP)
    world = _integer(manifest.world, "the world", 1, MAX_WORLD)
    if type(manifest.finite) is not bool:
        raise CheckpointError(f"`finite` is {_short(manifest.finite)}; expected true or false")
    if len(manifest.files) != world:
        raise CheckpointError(f"the manifest lists {len(manifest.files)} files for a world of {world}")
    for rank, file in enumerate(manifest.files):
        _check_file(file, file_name(rank, world))
    seen = set()
    for entry in manifest.entries:
        _check_entry(entry, world)
        if (entry.name, entry.kind) in seen:
            raise CheckpointError(f"{entry} is listed twice")
        seen.add((entry.name, entry.kind))
    for rank, pieces in enumerate(manifest.contents()):
        _check_filled(pieces, manifest.files[rank].size, file_name(rank, world))
    if type(manifest.facts) is not dict:
        raise CheckpointError(f"`facts` is {_short(manifest.facts)}; expected an object")
    _check_fact(manifest.facts, "facts", _MAX_DEPTH)


def _check_file(file: FileHash, name: str) -> None:
    _integer(file.size, f"{name}: its size", LENGTH_BYTES)
    if type(file.sha256) is not str or not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
        raise CheckpointError(f"{name}: its SHA-256 is {_short(file.sha256)}; expected 64 hex digits")
    spans = -(-file.size // SPAN_BYTES)
    if len(file.crcs) != spans:
        raise CheckpointError(f"{name}: {len(file.crcs)} CRCs for {file.size} bytes; expected {spans}")
    for crc in file.crcs:
        _integer(crc, f"{name}: a CRC-32", 0, 2**32 - 1)


def _check_entry(entry: Entry, world: int) -> None:
    _text(entry.name, "a tensor's name")
    if type(entry.kind) is not str or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", entry.kind):
        raise CheckpointError(f"tensor {_short(entry.name)}: its kind is {_short(entry.kind)}; expected a short word")
    what = str(entry)  # once: there may be a hundred thousand pieces
    if type(entry.dtype) is not str or entry.dtype not in ITEM_BYTES:
        raise CheckpointError(f"{what}: its dtype is {_short(entry.dtype)}; known: {', '.join(ITEM_BYTES)}")
    if len(entry.shape) > _MAX_AXES:
        raise CheckpointError(f"{what}: {len(entry.shape)} axes; at most {_MAX_AXES}")
    for size in entry.shape:
        _integer(size, f"{what}: an axis", 0)
    numel, stop = entry.numel, 0
    for piece in entry.pieces:
        _integer(piece.rank, f"{what}: the rank of a piece", 0, world - 1)
        _integer(piece.start, f"{what}: the start of a piece", 0)
        _integer(piece.stop, f"{what}: the stop of a piece", 0)
        _integer(piece.offset, f"{what}: the offset of a piece", LENGTH_BYTES)
        if piece.start != stop or piece.stop <= piece.start:
            raise CheckpointError(f"{what}: a piece is [{piece.start}, {piece.stop}); it must begin at {stop}")
        stop = piece.stop
    if stop != numel:
        raise CheckpointError(f"{what}: its pieces cover {stop} of {numel} elements of shape {_short(entry.shape)}")


def _check_filled(pieces: Iterable[tuple[Entry, Piece]], size: int, name: str) -> None:
    """Header, then pieces from end to end of the file."""
    stop, last = None, None
    for entry, piece in pieces:
        if stop is None:
            _check_header(piece.offset, name)
        elif piece.offset < stop:
            raise CheckpointError(f"{name}: {entry} begins at byte {piece.offset}, inside {last}, which ends at {stop}")
        elif piece.offset > stop:
            raise CheckpointError(f"{name}: bytes {stop} to {piece.offset}, before {entry}, belong to no tensor")
        stop, last = piece.offset + (piece.stop - piece.start) * entry.item_bytes, entry
    if stop is None:
        _check_header(size, name)
    elif stop != size:
        raise CheckpointError(f"{name}: {last} ends at byte {stop} of a file of {size} bytes")


def _check_header(end: int, name: str) -> None:
    if end > LENGTH_BYTES + MOST_HEADER_BYTES:
        raise CheckpointError(f"{name}: a header of {end} bytes; at most {LENGTH_BYTES + MOST_HEADER_BYTES}")


def _check_fact(value: Any, where: str, depth: int) -> None:
    if depth == 0:
        raise CheckpointError(f"{where} is nested more than {_MAX_DEPTH} deep")
    if type(value) is dict:
        for name, inner in value.items():
            _text(name, f"a name in {where}", longest=None)
            _check_fact(inner, f"{where[:80]}.{_short(name)}", depth - 1)
    elif type(value) is list:
        for inner in value:
            _check_fact(inner, where, depth - 1)
    elif type(value) is str:
        _text(value, where, longest=None)
    elif type(value) is int:
        if value.bit_length() > _MAX_FACT_BITS:
            raise CheckpointError(f"{where} is an integer of {value.bit_length()} bits; at most {_MAX_FACT_BITS}")
    elif type(value) is float:
        if not math.isfinite(value):
            raise CheckpointError(f"{where} is {value}, which JSON cannot say; write null or a string")
    elif value is not None and type(value) is not bool:
        raise CheckpointError(f"{where} is a {type(value).__name__}; expected a JSON value (a list, not a tuple)")


def _vouched(text: bytes | str) -> str:
    """The text, if its last line is the hash of the rest."""
    if len(text) > CAP_BYTES:
        raise CheckpointError(f"the manifest has more than {CAP_BYTES} bytes")
    try:
        raw = text.encode("ascii") if isinstance(text, str) else bytes(text)
        plain = raw.decode("ascii")
    except UnicodeError:
        raise CheckpointError("the manifest is damaged: it is not ASCII") from None
    last = _LAST_LINE.fullmatch(raw, max(0, len(raw) - _LAST_LINE_BYTES))
    if last is None:
        raise CheckpointError("the manifest is cut short or damaged: its last line is not a hash")
    if sha256(memoryview(raw)[: last.start()]).hexdigest().encode() != last[1]:
        raise CheckpointError("the manifest is damaged: it does not match the hash in its last line")
    return plain


def _parse(text: str) -> dict[str, Any]:
    """Always an object: JSON that ends as the last line does can be nothing else."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_float=_finite_float, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError("the manifest is nested too deep") from None
    except ValueError as error:
        raise CheckpointError(f"the manifest is not JSON: {_short(str(error))}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointError(f"the manifest says {_short(name)} twice in one object")
        found[name] = value
    return found


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise CheckpointError(f"the manifest has a number that is too large: {_short(text)}")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise CheckpointError(f"the manifest has {text}, which is not JSON")


def _entry_of(value: Any, number: int) -> Entry:
    found = _object(value, Entry._fields, f"tensor number {number}")
    name = f"tensor {_short(found['name'])}"
    pieces = _array(found.pop("pieces"), f"{name}: the list of pieces")
    shape = _array(found.pop("shape"), f"{name}: its shape")
    read = tuple(Piece(**_object(piece, Piece._fields, f"{name}: a piece")) for piece in pieces)
    return Entry(shape=tuple(shape), pieces=read, **found)


def _file_to_json(file: FileHash) -> dict[str, Any]:
    """CRCs as eight hex digits each, one after the other: half as long as a list, and read at once."""
    return {"size": file.size, "sha256": file.sha256, "crcs": struct.pack(f">{len(file.crcs)}I", *file.crcs).hex()}


def _file_of(value: Any, number: int) -> FileHash:
    found = _object(value, FileHash._fields, f"file number {number}")
    crcs = found["crcs"]
    if type(crcs) is not str or len(crcs) % 8 or not re.fullmatch(r"[0-9a-f]*", crcs):
        raise CheckpointError(f"file number {number}: its CRCs are {_short(crcs)}; expected eight hex digits for each")
    return FileHash(found["size"], found["sha256"], struct.unpack(f">{len(crcs) // 8}I", bytes.fromhex(crcs)))


def _object(value: Any, names: tuple[str, ...], what: str) -> dict[str, Any]:
    """A copy of the object, which has exactly these names."""
    if type(value) is not dict:
        raise CheckpointError(f"{what} is {_short(value)}; expected an object")
    missing = [name for name in names if name not in value]
    unknown = [name for name in value if name not in names]
    if missing or unknown:
        raise CheckpointError(f"{what} lacks {_short(missing)} and has unknown {_short(unknown)}")
    return dict(value)


def _array(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise CheckpointError(f"{what} is {_short(value)}; expected an array")
    return value


def _integer(value: Any, what: str, low: int, high: int = _MAX_INT) -> int:
    if type(value) is not int or not low <= value <= high:  # true is not 1
        raise CheckpointError(f"{what} is {_short(value)}; expected an integer from {low} to {high}")
    return value


def _text(value: Any, what: str, longest: int | None = _MAX_NAME) -> None:
    if type(value) is not str or _HALF.search(value):
        raise CheckpointError(f"{what} is {_short(value)}; expected text")
    if longest is not None and not 1 <= len(value) <= longest:
        raise CheckpointError(f"{what} has {len(value)} characters; expected 1 to {longest}")


def _short(value: object) -> str:
    """On one line, and no longer than a reader wants, however deep and large the value is."""
    if type(value) is int and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = _REPR.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
