"""Read the tensors of an open checkpoint; every MiB is compared with its CRC-32 again."""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero.checkpoint.contents import PARAMETER
from zero.checkpoint.files.disk import Disk, read_bytes
from zero.checkpoint.files.shard import ShardReader
from zero.checkpoint.format.facts import numbers_of
from zero.checkpoint.format.manifest import PACKED_SHAPES, Entry, Index, Manifest, file_name, held, index_name
from zero.checkpoint.format.texts import index_cap_bytes, index_from_text
from zero.core.formats import PACKED_FORMATS
from zero.errors import CheckpointError
from zero.platform.files import memory_of
from zero.platform.safetensors_files import offsets

OPEN_FILES = 128
"""Maximum number of files that `Tensors` keeps open. Each takes a file descriptor and 1 MiB of memory."""


TensorOffsets = dict[tuple[str, str], tuple[int, int]]
"""(name, kind) of a tensor -> (number of its first element in a file, byte offset of that element there)."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, every byte of which has been compared with its hashes.

    Attributes:
        facts: the `facts` that were passed to `save`.
        step: number of steps tried before the save, skipped steps included.
    """

    folder: Path
    manifest: Manifest
    disk: Disk

    @property
    def facts(self) -> Mapping[str, Any]:
        return dict(self.manifest.facts.get("given", {}))

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def skipped(self) -> int:
        """Return the number of steps that were skipped because a gradient was not finite."""
        return numbers_of(self.folder, self.manifest).scale.skipped


def weights_of(checkpoint: Checkpoint, weights: str) -> dict[str, Entry]:
    """Return name -> entry of the tensors of kind `weights`, "parameter" or "ema", to be used as the parameters.

    Raises:
        CheckpointError: the checkpoint has no tensors of that kind.
    """
    by_name = {entry.name: entry for entry in checkpoint.manifest.entries if entry.kind == weights}
    if not by_name and weights != PARAMETER:
        raise CheckpointError(
            f"{checkpoint.folder} has no {weights}. Train with optim.ema=0.999, or in Python with zero.with_ema."
        )
    return by_name


def shape_of(checkpoint: Checkpoint, entry: Entry) -> tuple[int, ...]:
    """Return the shape of an entry's tensor; of codes, which are one string of bytes, the shape of their parameter.

    Raises:
        CheckpointError: the manifest has no shape that fits the codes.
    """
    if entry.kind not in PACKED_FORMATS:
        return entry.shape
    shapes = checkpoint.manifest.facts.get(PACKED_SHAPES)
    shape = shapes.get(entry.name) if isinstance(shapes, dict) else None
    shape = tuple(shape) if isinstance(shape, list) else ()
    sizes = all(type(size) is int and size >= 0 for size in shape)
    if not sizes or PACKED_FORMATS[entry.kind].nbytes(math.prod(shape)) != entry.numel:
        raise CheckpointError(f"{checkpoint.folder}: its manifest has no shape for the codes of {entry.name}")
    return shape


class Tensors(AbstractContextManager["Tensors"]):
    """Reader of a checkpoint's tensors, used in a `with` block.

    Files are opened when they are first needed. The last `OPEN_FILES` of them stay open until the end of the block. The
    index and the header of each file are read once.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._files = dict[int, tuple[ShardReader, TensorOffsets]]()
        self._open = dict[int, ShardReader]()  # the most recently used file is last

    def __exit__(self, *_: object) -> None:
        for reader in self._open.values():
            reader.close()

    def read(self, entry: Entry, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of a tensor flattened in row-major order; return a 1-D CPU tensor as saved."""
        values = torch.empty(stop - start, dtype=getattr(torch, entry.dtype))
        if start < stop:
            manifest = self._checkpoint.manifest
            flat = manifest.flats[entry.flat]
            for rank, first, last in flat.holders(entry.start + start, entry.start + stop):
                reader, places = self._file(rank + manifest.world * flat.frozen)
                begin, offset = places[entry.name, entry.kind]
                part = values[first - entry.start - start : last - entry.start - start]
                reader.read(offset + (first - entry.start - begin) * values.itemsize, memory_of(part))
        return values

    def _file(self, number: int) -> tuple[ShardReader, TensorOffsets]:
        if number not in self._files:
            self._files[number] = reader_of(self._checkpoint, number)
        reader, places = self._files[number]
        self._open.pop(number, None)
        self._open[number] = reader
        reader.reopen()
        if len(self._open) > OPEN_FILES:
            self._open.pop(next(iter(self._open))).close()
        return reader, places


def reader_of(checkpoint: Checkpoint, number: int) -> tuple[ShardReader, TensorOffsets]:
    manifest = checkpoint.manifest
    pieces = held(manifest.flats, number, manifest.world)
    parts = [piece.part for piece in pieces]
    path = checkpoint.folder / file_name(number, manifest.world)
    reader = ShardReader(checkpoint.disk, path, index_of(checkpoint, number).hashes, parts)
    begins = zip(pieces, offsets(parts), strict=True)
    return reader, {(piece.slot.name, piece.kind): (piece.start, offset) for piece, offset in begins}


def index_of(checkpoint: Checkpoint, number: int) -> Index:
    """Read the index of a file.

    Raises:
        CheckpointError: the index does not match its hash in the manifest, or is not valid.
    """
    manifest, file = checkpoint.manifest, checkpoint.manifest.files[number]
    path = checkpoint.folder / index_name(number, manifest.world)
    text = read_bytes(checkpoint.disk, path, index_cap_bytes(file.size))
    if sha256(text).hexdigest() != file.index_sha256:
        raise CheckpointError(f"{path}: is damaged: it does not match the hash in the manifest")
    try:
        return index_from_text(text, file.size)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
