"""Write and read the JSON texts of a checkpoint: the manifest, and the index of each file.

A manifest grows by 100 bytes per file, and not with the size of the tensors, because the hashes of a file are in its
index. Each text is one JSON object in ASCII. The last line of the manifest is the SHA-256 of all lines before it:

    {"facts":{...},"files":[{"index_sha256":"<64 hex digits>","size":8192},..],"finite":true,
     "flats":[{"copies":1,"kinds":{"mu":"float32",..},"sharers":2,"tensors":[{"name":"w","shape":[7,5]},..]},..],
     "format":3,"step":20,"world":2,
    "sha256":"<64 hex digits>"}

    {"crcs":"<8 hex digits for each MiB>","digests":"<64 for each 16 MiB>","random":{...}}

Hashes detect damage, but not a deliberate change, because anybody can recompute them. So the type of every value is
checked, no text names a path, and a file must have the length and the header that are computed from the list of
tensors.
"""

import json
import reprlib
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from zero.checkpoint.format.hashes import CRC_BYTES, DIGEST_BYTES, HASH_BLOCK_BYTES, SPAN_BYTES, FileHash
from zero.checkpoint.format.manifest import ITEM_BYTES, MAX_INT, File, Index, Manifest, SavedFlat, files_of
from zero.core.layout import Layout
from zero.errors import CheckpointError

FORMAT = 3
"""The format version that this library writes and reads."""

CAP_BYTES = 64 * 2**20
"""Maximum size of a manifest."""

_Digits = Annotated[str, Field(pattern="^[0-9a-f]*$")]
_REPR = reprlib.Repr()
_REPR.maxstring = 80


class Schema(BaseModel):
    """Base class of JSON objects that are validated without conversion of types; other keys are an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _TensorText(Schema):
    name: Annotated[str, Field(min_length=1, max_length=4096)]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(max_length=64)]


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
        ("digests", body.digests, DIGEST_BYTES, HASH_BLOCK_BYTES),
    ):
        if len(digits) != 2 * nbytes * -(-size // unit_bytes):
            raise CheckpointError(f"{key} of the index: {len(digits)} digits do not fit a file of {size} bytes")
    hashes = FileHash(size, bytes.fromhex(body.digests), bytes.fromhex(body.crcs))
    return Index(hashes, None if body.random is None else body.random.model_dump())


def _flat_to_json(flat: SavedFlat) -> dict[str, Any]:
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


def _flat_of(flat: _FlatText, where: str, world: int) -> SavedFlat:
    if flat.sharers * flat.copies > world:
        raise CheckpointError(
            f"{where}: {flat.copies} copies on {flat.sharers} ranks each need more than {world} ranks"
        )
    shapes = {tensor.name: tensor.shape for tensor in flat.tensors}
    if len(shapes) < len(flat.tensors):
        raise CheckpointError(f"{where}: lists a tensor twice")
    return SavedFlat(flat.kinds, Layout.of(shapes, world_size=flat.sharers), flat.copies)


TextSchema = TypeVar("TextSchema", bound=BaseModel)


def checked_json(schema: type[TextSchema], body: Any, what: str) -> TextSchema:
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
