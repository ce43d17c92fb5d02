"""Read and write the JSON texts of a checkpoint: the manifest, and the index of each file.

The manifest lists the tensors of each flat, the number of ranks that share the flat, and for each file its size and the
hash of its index. An index has the hashes of one file and the state of its rank's random generators. So the manifest
grows by 100 bytes per file, and not with the size of the tensors. Each text is one JSON object in ASCII. The last line
of the manifest is the SHA-256 of all lines before it:

    {"facts":{...},"files":[{"index_sha256":"<64 hex digits>","size":8192},..],"finite":true,
     "flats":[{"copies":1,"kinds":{"mu":"float32",..},"sharers":2,"tensors":[{"name":"w","shape":[7,5]},..]},..],
     "format":3,"step":20,"world":2,
    "sha256":"<64 hex digits>"}

    {"crcs":"<8 hex digits for each MiB>","digests":"<64 for each 16 MiB>","random":{...}}

Byte offsets are not stored, because `held` computes them. `Layout.of` places the tensors in a flat. The flat is cut
into one equal part for each of its `sharers`, and each part again into one for each of the `copies`. Files 0 to
world - 1 have each rank's part of the flats that training changes, once for each kind in alphabetical order, sorted by
dtype, the widest first. If there are frozen flats, file world + rank has the rank's part of those, so that the steps of
a run can share it.

Hashes detect damage, but not a deliberate change, because anybody can recompute them. So the type of every value is
checked, no text names a path, and a file must have the length and the header that are computed from the list of
tensors. This module opens no file.
"""

import json
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from zero.checkpoint.hashes import BLOCK_BYTES, CRC_BYTES, DIGEST_BYTES, SPAN_BYTES, FileHash
from zero.core.codec import CODECS
from zero.core.layout import Layout, Slot
from zero.errors import CheckpointError
from zero.platform.safetensors_files import LENGTH_BYTES, NAMES, FilePart, by_width

FORMAT = 3
"""The format version that this library writes and reads."""

CAP_BYTES = 64 * 2**20
"""Maximum size of a manifest."""

ITEM_BYTES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in NAMES}
"""Name of each dtype that a checkpoint can store -> bytes of one element."""

FROZEN_KINDS = frozenset(("frozen", *CODECS))
"""The kinds of values that steps do not change: frozen parameters, and their codes by the name of the format."""

_MAX_INT = 2**63 - 1
_Digits = Annotated[str, Field(pattern="^[0-9a-f]*$")]
_REPR = reprlib.Repr()
_REPR.maxstring = 80


class Entry(NamedTuple):
    """A tensor, which begins at element `start` of flat number `flat`.

    `kind` is "parameter" (the fp32 master, or the parameter itself), a moment's name such as "mu", "frozen" or
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


class Flat(NamedTuple):
    """A flat tensor that is divided among ranks; each kind of value (parameter, moments) has the same layout.

    Attributes:
        kinds: kind -> dtype, a key of `ITEM_BYTES`.
        layout: offsets of the tensors; `layout.world_size` is the number of ranks that share one copy of the flat.
        copies: number of groups of `layout.world_size` ranks. Each group has the whole flat and writes an equal part.
    """

    kinds: Mapping[str, str]
    layout: Layout
    copies: int

    @property
    def frozen(self) -> bool:
        """Whether the flat has tensors, none of which a step changes."""
        return bool(self.layout.slots) and FROZEN_KINDS.issuperset(self.kinds)

    def share(self, rank: int) -> tuple[int, int]:
        """Return the (start, stop) range of the flat that is in the file of `rank`."""
        copy, part = divmod(rank, self.layout.world_size)
        if copy >= self.copies:
            return 0, 0
        start, stop = self.layout.shard(part)
        return start + (stop - start) * copy // self.copies, start + (stop - start) * (copy + 1) // self.copies

    def holders(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (rank, first, last) in order: the file of `rank` has elements [first, last) of the flat.

        Together they cover [start, stop), which is not empty.
        """
        for part in range(start // self.layout.S, -(-stop // self.layout.S)):
            for copy in range(self.copies):
                rank = copy * self.layout.world_size + part
                first, last = self.share(rank)
                if max(start, first) < min(stop, last):
                    yield rank, max(start, first), min(stop, last)


class Held(NamedTuple):
    """The elements [start, stop) of a tensor, flattened in row-major order, that a file has."""

    flat: int
    kind: str
    dtype: str
    slot: Slot
    start: int
    stop: int

    @property
    def part(self) -> FilePart:
        """Return the safetensors entry: in the tensor's shape if the file has all of its elements, else 1-D."""
        numel = self.stop - self.start
        shape = self.slot.shape if numel == self.slot.numel else (numel,)
        return FilePart(f"{self.kind}/{self.slot.name}", getattr(torch, self.dtype), shape)


class File(NamedTuple):
    """The size in bytes of a file, and the SHA-256 of its index."""

    size: Annotated[int, Field(ge=LENGTH_BYTES, le=_MAX_INT)]
    index_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Manifest(NamedTuple):
    """The contents of a checkpoint's manifest.

    Attributes:
        step: number of steps tried before the save, skipped steps included.
        world: number of ranks.
        files: one entry per rank, then, if flats are frozen, another one per rank.
        finite: no element of the checkpoint is NaN or infinite.
        facts: JSON values that this module does not interpret.
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
        """Return an entry for every tensor, empty tensors included."""
        return entries(self.flats)


class Index(NamedTuple):
    """The hashes of a file, and the state of its rank's random generators (None in a frozen file and an import)."""

    hashes: FileHash
    random: dict[str, Any] | None


def entries(flats: Iterable[Flat]) -> tuple[Entry, ...]:
    return tuple(
        Entry(slot.name, kind, dtype, slot.shape, number, slot.offset)
        for number, flat in enumerate(flats)
        for kind, dtype in flat.kinds.items()
        for slot in flat.layout.slots
    )


def files_of(flats: Iterable[Flat], rank: int, world: int) -> range:
    """Return the numbers of the files that a rank writes."""
    return range(rank, world * (2 if any(flat.frozen for flat in flats) else 1), world)


def held(flats: Iterable[Flat], file: int, world: int) -> list[Held]:
    """List the pieces of tensors in a file, in the order of the file."""
    frozen, rank = divmod(file, world)
    pieces = [
        Held(number, kind, dtype, slot, start, stop)
        for number, flat in enumerate(flats)
        if flat.frozen == bool(frozen)
        for kind, dtype in sorted(flat.kinds.items())
        for slot, start, stop, _ in flat.layout.pieces(*flat.share(rank))
    ]
    return sorted(pieces, key=lambda piece: by_width(piece.part))


def file_name(file: int, world: int) -> str:
    """Return a name such as rank-00001-of-00002.safetensors, or frozen-00001-of-00002.safetensors."""
    return f"{_stem(file, world)}.safetensors"


def index_name(file: int, world: int) -> str:
    """Return a name such as rank-00001-of-00002.json, or frozen-00001-of-00002.json."""
    return f"{_stem(file, world)}.json"


def _stem(file: int, world: int) -> str:
    return f"{'rank' if file < world else 'frozen'}-{file % world:05d}-of-{world:05d}"


def step_name(step: int) -> str:
    """Return a name such as step-0000000020."""
    return f"step-{step:010d}"


# -- the texts ---------------------------------------------------------------------------------------------------------


class Schema(BaseModel):
    """Base class of JSON objects that are validated without conversion of types; other keys are an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _TensorText(Schema):
    name: Annotated[str, Field(min_length=1, max_length=4096)]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=_MAX_INT)]], Field(max_length=64)]


class _FlatText(Schema):
    copies: Annotated[int, Field(ge=1)]
    kinds: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")],
        Annotated[str, Field(pattern=f"^({'|'.join(ITEM_BYTES)})$")],
    ]
    sharers: Annotated[int, Field(ge=1)]
    tensors: list[_TensorText]


class _ManifestText(Schema):
    facts: dict[str, JsonValue]
    files: list[File]
    finite: bool
    flats: list[_FlatText]
    format: Annotated[int, Field(ge=FORMAT, le=FORMAT)]
    sha256: str
    step: Annotated[int, Field(ge=0, le=9_999_999_999)]
    world: Annotated[int, Field(ge=1, le=99_999)]


class _RandomText(Schema):
    python: Annotated[list[int | list[int] | float | None], Field(min_length=3, max_length=3)]
    torch: _Digits
    cuda: _Digits | None


class _IndexText(Schema):
    crcs: _Digits
    digests: _Digits
    random: _RandomText | None


def to_text(manifest: Manifest) -> str:
    """Return a manifest as text; equal manifests have equal texts.

    Raises:
        CheckpointError: `from_text` would reject it, or the text is longer than `CAP_BYTES`.
    """
    body = manifest._asdict()
    body["flats"] = [_flat_to_json(flat) for flat in manifest.flats]
    body["files"] = [file._asdict() for file in manifest.files]
    _manifest_of({**body, "sha256": ""})  # raises for a tuple in it, which json would write as a list
    head = _dumped(body).removesuffix("}") + ",\n"
    text = f'{head}"sha256":"{sha256(head.encode("ascii")).hexdigest()}"}}\n'
    if len(text) > CAP_BYTES:
        raise CheckpointError(
            f"the manifest would have {len(text)} bytes, more than the limit of {CAP_BYTES}. Save fewer facts."
        )
    return text


def from_text(text: bytes) -> Manifest:
    """Parse the text of a manifest and validate every value.

    Raises:
        CheckpointError: the text is damaged, of another format version, or contradicts itself; the message names the
            key.
    """
    head, _, last = text.removesuffix(b"\n").rpartition(b"\n")
    if last != b'"sha256":"%s"}' % sha256(head + b"\n").hexdigest().encode():
        raise CheckpointError("the manifest is damaged or cut short: its last line is not the hash of the others")
    body = _parsed(text)
    if type(body) is dict and type(version := body.get("format")) is int and version != FORMAT:
        raise CheckpointError(
            f"the manifest has format {_short(version)}, but this version of zero reads format {FORMAT}. Load it with "
            "the version that wrote it."
        )
    return _manifest_of(body)


def index_to_text(index: Index) -> str:
    body = {"crcs": index.hashes.crcs.hex(), "digests": index.hashes.digests.hex(), "random": index.random}
    return _dumped(body) + "\n"


def index_cap_bytes(size: int) -> int:
    """Return the maximum size in bytes of the index of a file of `size` bytes.

    An index has 12 hex digits per MiB of the file, and 20 KB for the states of the random generators.
    """
    return 2**17 + 16 * (size // SPAN_BYTES)


def index_from_text(text: bytes, size: int) -> Index:
    """Parse the text of the index of a file of `size` bytes.

    Raises:
        CheckpointError: the text is not a valid index of such a file.
    """
    body = checked_json(_IndexText, _parsed(text), "the index")
    for key, digits, nbytes, unit_bytes in (
        ("crcs", body.crcs, CRC_BYTES, SPAN_BYTES),
        ("digests", body.digests, DIGEST_BYTES, BLOCK_BYTES),
    ):
        if len(digits) != 2 * nbytes * -(-size // unit_bytes):
            raise CheckpointError(f"{key} of the index: {len(digits)} digits do not fit a file of {size} bytes")
    hashes = FileHash(size, bytes.fromhex(body.digests), bytes.fromhex(body.crcs))
    return Index(hashes, None if body.random is None else body.random.model_dump())


def _flat_to_json(flat: Flat) -> dict[str, Any]:
    tensors = [{"name": slot.name, "shape": list(slot.shape)} for slot in flat.layout.slots]
    return {"copies": flat.copies, "kinds": flat.kinds, "sharers": flat.layout.world_size, "tensors": tensors}


def _manifest_of(body: Any) -> Manifest:
    """Validate a parsed manifest and return it."""
    text = checked_json(_ManifestText, body, "the manifest")
    flats = tuple(
        _flat_of(flat, f"flats.{number} of the manifest", text.world) for number, flat in enumerate(text.flats)
    )
    if len(text.files) != text.world * len(files_of(flats, 0, text.world)):
        raise CheckpointError(f"the manifest lists {len(text.files)} files for a world of {text.world}")
    return Manifest(text.format, text.step, text.world, flats, tuple(text.files), text.finite, text.facts)


def _flat_of(flat: _FlatText, where: str, world: int) -> Flat:
    if flat.sharers * flat.copies > world:
        raise CheckpointError(
            f"{where}: {flat.copies} copies on {flat.sharers} ranks each need more than {world} ranks"
        )
    shapes = {tensor.name: tensor.shape for tensor in flat.tensors}
    if len(shapes) < len(flat.tensors):
        raise CheckpointError(f"{where}: lists a tensor twice")
    return Flat(flat.kinds, Layout.of(shapes, world_size=flat.sharers), flat.copies)


T = TypeVar("T", bound=BaseModel)


def checked_json(schema: type[T], body: Any, what: str) -> T:
    """Validate a JSON value and return it as `schema`; `what` names the whole value in the message.

    Raises:
        CheckpointError: a value does not match the schema; the message names the path of the first one.
    """
    try:
        return schema.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = _short(".".join(str(part) for part in first["loc"])).strip("'")
        raise CheckpointError(
            f"{where or 'body'} of {what}: {first['msg']}. The value is {_short(first['input'])}."
        ) from None


def _dumped(body: Mapping[str, Any]) -> str:
    try:
        return json.dumps(body, sort_keys=True, allow_nan=False, separators=(",", ":"))
    except ValueError as error:  # an integer of more than 4300 digits
        raise CheckpointError(f"a fact cannot be written as JSON: {error}") from None


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot be parsed as ASCII JSON: {_short(str(error))}") from None


def _short(value: object) -> str:
    """Describe a value on one line of at most 100 characters, however deep and large it is."""
    text = _REPR.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
