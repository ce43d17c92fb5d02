"""The contents of a checkpoint: the tensors of each flat, the ranks that share the flat, and the files.

Byte offsets are not stored, because `held` computes them. `Layout.of` places the tensors in a flat. The flat is cut
into one equal part for each of its sharers, and each part again into one for each of the copies. Files 0 to world - 1
have each rank's part of the flats that training changes, once for each kind in alphabetical order, sorted by dtype, the
widest first. If there are frozen flats, file world + rank has the rank's part of those, so that checkpoints of a run
can share this file. An index has the hashes of one file and the state of its rank's random generators.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field

from zero.checkpoint.format.hashes import FileHash
from zero.core.formats import PACKED_FORMATS
from zero.core.layout import Layout, Slot
from zero.platform.safetensors_files import DTYPE_NAMES, LENGTH_BYTES, FilePart, by_width

ITEM_BYTES = {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in DTYPE_NAMES}
"""Name of each dtype that a checkpoint can store -> bytes of one element."""

PACKED_SHAPES = "coded"
"""The fact of a manifest that has the shapes of the parameters in a packed format, by name."""

MAX_INT = 2**63 - 1


def frozen_kinds() -> frozenset[str]:
    """Return the kinds of values that steps do not change: frozen parameters, and the names of packed formats."""
    return frozenset(("frozen", *PACKED_FORMATS))


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


class SavedFlat(NamedTuple):
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
        return bool(self.layout.slots) and frozen_kinds().issuperset(self.kinds)

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

    size: Annotated[int, Field(ge=LENGTH_BYTES, le=MAX_INT)]
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
    flats: tuple[SavedFlat, ...]
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


def entries(flats: Iterable[SavedFlat]) -> tuple[Entry, ...]:
    return tuple(
        Entry(slot.name, kind, dtype, slot.shape, number, slot.offset)
        for number, flat in enumerate(flats)
        for kind, dtype in flat.kinds.items()
        for slot in flat.layout.slots
    )


def files_of(flats: Iterable[SavedFlat], rank: int, world: int) -> range:
    """Return the numbers of the files that a rank writes."""
    return range(rank, world * (2 if any(flat.frozen for flat in flats) else 1), world)


def held(flats: Iterable[SavedFlat], file: int, world: int) -> list[Held]:
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
