"""The texts of a checkpoint: the manifest, which lists tensors and files, and the index of each rank's file.

The manifest says which tensors lie in which flat, how many ranks share it, and what the index of each rank hashes to.
An index has the hashes of one rank's file and the state of its generators. So the manifest grows by 100 bytes a rank,
and not with the size of a tensor. Each is one JSON object in ASCII, and the manifest's last line is the hash of all
lines before:

    {"facts":{...},"files":[{"index_sha256":"<64 hex digits>","size":8192},..],"finite":true,
     "flats":[{"copies":1,"kinds":{"mu":"float32",..},"sharers":2,"tensors":[{"name":"w","shape":[7,5]},..]},..],
     "format":2,"step":20,"world":2,
    "sha256":"<64 hex digits>"}

    {"crcs":"<8 hex digits for each MiB>","digests":"<64 for each 16 MiB>","random":{...}}

The place of each byte is not written, because it follows (`held`): tensors lie in a flat as `Layout.of` places them,
sharers cut it into equal parts, copies cut each of those again, and a rank's file has its part of every flat, once for
each kind in alphabetical order, the widest dtype first.

A hash finds damage; it does not stop who recomputes it. So nothing in the text is believed: it names no path, and a
file has to be as long as what follows for it, and to begin with the header that follows. No file is opened here.
"""

import json
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, NoReturn

import torch

from zero.checkpoint.hashes import BLOCK_BYTES, CRC_BYTES, DIGEST_BYTES, SPAN_BYTES, FileHash
from zero.core.layout import Layout, Slot
from zero.errors import CheckpointError
from zero.platform.safetensors_files import LENGTH_BYTES, NAMES, Part, by_width

FORMAT = 2
"""The format that this library writes and reads."""

CAP_BYTES = 64 * 2**20
"""The limit for the text of a manifest. Read no more than this and one byte."""

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
# Types are checked by hand: each line names the tensor, the rank or the file. A schema's paths would have to be
# translated back.
_LAST_LINE = re.compile(rb'"sha256":"([0-9a-f]{64})"\}\n')
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair: it can be read from JSON and can be printed nowhere
_LAST_LINE_BYTES = len('"sha256":""}\n') + 64


class Entry(NamedTuple):
    """A tensor, from element `start` of flat number `flat` on.

    `kind` is "parameter" (the fp32 master, or the parameter itself), a moment's name such as "exp_avg", "frozen" or
    "buffer". No two entries of a manifest have the same name and kind.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    flat: int
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"tensor {_short(self.name)} ({self.kind})"


class Flat(NamedTuple):
    """Tensors in one flat tensor that ranks share, with the same layout for each kind of value.

    Attributes:
        kinds: kind -> dtype, a key of `ITEM_BYTES`.
        layout: where each tensor is, and how many ranks share a copy.
        copies: how many times that many ranks have the flat. They share the writing of it.
    """

    kinds: Mapping[str, str]
    layout: Layout
    copies: int

    def share(self, rank: int) -> tuple[int, int]:
        """The (start, stop) range of the flat that is in the file of `rank`."""
        copy, part = divmod(rank, self.layout.world_size)
        if copy >= self.copies:
            return 0, 0
        start, stop = self.layout.shard(part)
        return start + (stop - start) * copy // self.copies, start + (stop - start) * (copy + 1) // self.copies

    def holders(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(rank, first, last) for each file with elements [first, last) of a range that is not empty, in order."""
        for part in range(start // self.layout.S, -(-stop // self.layout.S)):
            for copy in range(self.copies):
                rank = copy * self.layout.world_size + part
                first, last = self.share(rank)
                if max(start, first) < min(stop, last):
                    yield rank, max(start, first), min(stop, last)


class Held(NamedTuple):
    """Elements [start, stop) of a tensor, row-major, in one rank's file."""

    flat: int
    kind: str
    dtype: str
    slot: Slot
    start: int
    stop: int

    @property
    def part(self) -> Part:
        """In the tensor's shape if that is all of it, else flat."""
        numel = self.stop - self.start
        shape = self.slot.shape if numel == self.slot.numel else (numel,)
        return Part(f"{self.kind}/{self.slot.name}", getattr(torch, self.dtype), shape)


class File(NamedTuple):
    """Bytes of a rank's file, and the SHA-256 of its index."""

    size: int
    index_sha256: str


UNWRITTEN = File(_MAX_INT, "0" * 64)
"""A placeholder that takes as much room in a manifest as any file."""


class Manifest(NamedTuple):
    """One checkpoint. `files` has one a rank; `finite`: no element of it is NaN or infinite.

    `facts` are JSON values that mean nothing here: keys are strings, lists are not tuples, floats are finite.
    """

    format: int
    step: int
    world: int
    flats: tuple[Flat, ...]
    files: tuple[File, ...]
    finite: bool
    facts: dict[str, Any]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every tensor, empty ones too."""
        return entries(self.flats)


class Index(NamedTuple):
    """The hashes of one rank's file, and the state of its generators; None where another program wrote the file."""

    hashes: FileHash
    random: dict[str, Any] | None


def entries(flats: Iterable[Flat]) -> tuple[Entry, ...]:
    return tuple(
        Entry(slot.name, kind, dtype, slot.shape, number, slot.offset)
        for number, flat in enumerate(flats)
        for kind, dtype in flat.kinds.items()
        for slot in flat.layout.slots
    )


def held(flats: Iterable[Flat], rank: int) -> list[Held]:
    """The contents of a rank's file, in the order of their bytes."""
    pieces = [
        Held(number, kind, dtype, slot, start, stop)
        for number, flat in enumerate(flats)
        for kind, dtype in sorted(flat.kinds.items())
        for slot, start, stop, _ in flat.layout.pieces(*flat.share(rank))
    ]
    return sorted(pieces, key=lambda piece: by_width(piece.part))


def file_name(rank: int, world: int) -> str:
    """rank-00001-of-00002.safetensors

    Raises:
        CheckpointError: `rank` is not in a world of `world`, or the world has more than five digits.
    """
    _integer(world, "the world", 1, MAX_WORLD)
    _integer(rank, "the rank", 0, world - 1)
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def index_name(rank: int, world: int) -> str:
    """rank-00001-of-00002.json"""
    return file_name(rank, world).replace(".safetensors", ".json")


def step_name(step: int) -> str:
    """step-0000000020

    Raises:
        CheckpointError: `step` is negative or has more than ten digits.
    """
    return f"step-{_integer(step, 'the step', 0, MAX_STEP):010d}"


def to_text(manifest: Manifest) -> str:
    """Write it down; equal manifests have equal texts.

    Raises:
        CheckpointError: `from_text` would reject it, or the text is longer than `CAP_BYTES`.
    """
    _check_facts(manifest.facts)  # JSON itself would write a tuple as a list
    body = manifest._asdict()
    body["flats"] = [_flat_to_json(flat) for flat in manifest.flats]
    body["files"] = [file._asdict() for file in manifest.files]
    head = json.dumps(body, sort_keys=True, allow_nan=False, separators=(",", ":"))[:-1] + ",\n"
    text = f'{head}"sha256":"{sha256(head.encode("ascii")).hexdigest()}"}}\n'
    if len(text) > CAP_BYTES:
        raise CheckpointError(f"the manifest would have {len(text)} bytes, at most {CAP_BYTES}; save fewer facts")
    from_text(text)
    return text


def from_text(text: bytes | str) -> Manifest:
    """Read what `to_text` wrote; nothing in it is trusted.

    Raises:
        CheckpointError: it is damaged, of another format, or contradicts itself; one line that names the tensor or
            the file.
    """
    body = _parse(_vouched(text))
    if "format" not in body:
        raise CheckpointError("the manifest names no format")
    if _integer(body["format"], "the format", 1) != FORMAT:
        raise CheckpointError(
            f"the manifest has format {_short(body['format'])}, this library reads format {FORMAT}; load it with the "
            "version that wrote it"
        )
    body = _object(body, (*Manifest._fields, "sha256"), "the manifest")
    del body["sha256"]
    _integer(body["step"], "the step", 0, MAX_STEP)
    world = _integer(body["world"], "the world", 1, MAX_WORLD)
    if type(body["finite"]) is not bool:
        raise CheckpointError(f"`finite` is {_short(body['finite'])}; expected true or false")
    files = _array(body.pop("files"), "the list of files")
    if len(files) != world:
        raise CheckpointError(f"the manifest lists {len(files)} files for a world of {world}")
    flats = _array(body.pop("flats"), "the list of flats")
    _check_facts(body["facts"])
    manifest = Manifest(
        flats=tuple(_flat_of(value, f"flat number {number}", world) for number, value in enumerate(flats)),
        files=tuple(_file_of(value, file_name(rank, world)) for rank, value in enumerate(files)),
        **body,
    )
    seen = set[tuple[str, str]]()
    for entry in manifest.entries:
        if (entry.name, entry.kind) in seen:
            raise CheckpointError(f"{entry} is listed twice")
        seen.add((entry.name, entry.kind))
    return manifest


def index_to_text(index: Index) -> str:
    body = {"crcs": index.hashes.crcs.hex(), "digests": index.hashes.digests.hex(), "random": index.random}
    return json.dumps(body, sort_keys=True, allow_nan=False, separators=(",", ":")) + "\n"


def index_cap_bytes(size: int) -> int:
    """The limit for the index of a file of `size` bytes: 12 digits a MiB, and generators of 20 KB."""
    return 2**17 + 16 * (size // SPAN_BYTES)


def index_from_text(text: bytes, size: int) -> Index:
    """Read the index of a file of `size` bytes.

    Raises:
        CheckpointError: the text is not an index; one line. The state of the generators is not checked.
    """
    body = _object(_parse(_ascii(text)), ("crcs", "digests", "random"), "the index")
    crcs = _octets(body["crcs"], CRC_BYTES * -(-size // SPAN_BYTES), "its CRCs")
    digests = _octets(body["digests"], DIGEST_BYTES * -(-size // BLOCK_BYTES), "its digests")
    return Index(FileHash(size, digests, crcs), body["random"])


def _flat_to_json(flat: Flat) -> dict[str, Any]:
    tensors = [{"name": slot.name, "shape": slot.shape} for slot in flat.layout.slots]
    return {"copies": flat.copies, "kinds": flat.kinds, "sharers": flat.layout.world_size, "tensors": tensors}


def _flat_of(value: Any, what: str, world: int) -> Flat:
    body = _object(value, ("copies", "kinds", "sharers", "tensors"), what)
    sharers = _integer(body["sharers"], f"{what}: the number of sharers", 1, world)
    copies = _integer(body["copies"], f"{what}: the number of copies", 1, world // sharers)
    kinds, shapes = body["kinds"], dict[str, Sequence[int]]()
    if type(kinds) is not dict:
        raise CheckpointError(f"{what}: its kinds are {_short(kinds)}; expected an object")
    for kind, dtype in kinds.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", kind):
            raise CheckpointError(f"{what}: a kind is {_short(kind)}; expected a short word")
        if type(dtype) is not str or dtype not in ITEM_BYTES:
            raise CheckpointError(f"{what}: the dtype of {kind} is {_short(dtype)}; known: {', '.join(ITEM_BYTES)}")
    for tensor in _array(body["tensors"], f"{what}: the list of tensors"):
        named = _object(tensor, ("name", "shape"), f"{what}: a tensor")
        name = f"tensor {_short(named['name'])}"
        _text(named["name"], "a tensor's name")
        if named["name"] in shapes:
            raise CheckpointError(f"{name} is listed twice")
        shapes[named["name"]] = shape = _array(named["shape"], f"{name}: its shape")
        if len(shape) > _MAX_AXES:
            raise CheckpointError(f"{name}: {len(shape)} axes; at most {_MAX_AXES}")
        for size in shape:
            _integer(size, f"{name}: an axis", 0)
        _integer(math.prod(shape), f"{name}: its number of elements", 0)
    return Flat(kinds, Layout.of(shapes, world_size=sharers), copies)


def _file_of(value: Any, name: str) -> File:
    file = File(**_object(value, File._fields, name))
    _integer(file.size, f"{name}: its size", LENGTH_BYTES)
    _octets(file.index_sha256, DIGEST_BYTES, f"{name}: the hash of its index")
    return file


def _octets(value: Any, nbytes: int, what: str) -> bytes:
    if type(value) is not str or len(value) != 2 * nbytes or not re.fullmatch(r"[0-9a-f]*", value):
        raise CheckpointError(f"{what}: {_short(value)}; expected {2 * nbytes} hex digits")
    return bytes.fromhex(value)


def _check_facts(facts: Any) -> None:
    if type(facts) is not dict:
        raise CheckpointError(f"`facts` is {_short(facts)}; expected an object")
    _check_fact(facts, "facts", _MAX_DEPTH)


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
    plain = _ascii(text)
    raw = plain.encode()
    last = _LAST_LINE.fullmatch(raw, max(0, len(raw) - _LAST_LINE_BYTES))
    if last is None:
        raise CheckpointError("the manifest is cut short or damaged: its last line is not a hash")
    if sha256(memoryview(raw)[: last.start()]).hexdigest().encode() != last[1]:
        raise CheckpointError("the manifest is damaged: it does not match the hash in its last line")
    return plain


def _ascii(text: bytes | str) -> str:
    try:
        return text.encode("ascii").decode() if isinstance(text, str) else text.decode("ascii")
    except UnicodeError:
        raise CheckpointError("the text is damaged: it is not ASCII") from None


def _parse(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_float=_finite_float, parse_constant=_refuse_constant)
    except RecursionError:
        raise CheckpointError("the text is nested too deep") from None
    except ValueError as error:
        raise CheckpointError(f"the text is not JSON: {_short(str(error))}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise CheckpointError(f"the text says {_short(name)} twice in one object")
        found[name] = value
    return found


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise CheckpointError(f"the text has a number that is too large: {_short(text)}")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise CheckpointError(f"the text has {text}, which is not JSON")


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
