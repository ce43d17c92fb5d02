"""Safetensors files: make the header of a new file, and read tensors one by one.

    length of the header, 8 bytes | header: JSON, padded with spaces | the values of one tensor after the other

The tensors of a folder are found in its index, or without an index in the headers of all its files. Each file is opened
once. Values are read with `pread` and not memory-mapped, because the pages of a mapped file stay in memory, and in the
end that is the whole model.
"""

import itertools
import json
import math
import os
import re
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zero.core.sizes import BLOCK_BYTES
from zero.errors import CheckpointError, PlanError, in_short
from zero.platform.files import Files, memory_of, naming, transfer_all
from zero.platform.host_memory import aligned_zeros

INDEX = "model.safetensors.index.json"

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Each dtype that a checkpoint can store -> its name in safetensors."""

LENGTH_BYTES = 8
"""Size of the number at the beginning of a file, which is the length of the header."""

MOST_HEADER_BYTES = 100_000_000
"""Maximum size of a header that the safetensors library opens."""

ALIGN_BYTES = BLOCK_BYTES
"""Alignment of the data in a checkpoint's files, so that they can be memory-mapped and read by direct I/O."""

_DTYPES = {word: dtype for dtype, word in DTYPE_NAMES.items()}


# -- writing -----------------------------------------------------------------------------------------------------------


class FilePart(NamedTuple):
    """One tensor's entry in the header of a safetensors file: its key, dtype and shape."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def by_width(part: FilePart) -> int:
    """Return a sort key that puts parts with the largest elements first, so that each part is aligned to its dtype."""
    return -part.dtype.itemsize


def header(
    parts: Sequence[FilePart], *, align_bytes: int = ALIGN_BYTES, metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of a file before its data: the length of the header, and the header.

    Args:
        parts: the tensors, sorted `by_width`, with different keys and dtypes in `DTYPE_NAMES`.
        align_bytes: the header is padded so that the data begins at a multiple of this.
        metadata: key -> text, stored in the header.

    Raises:
        CheckpointError: the header is longer than safetensors allows.
    """
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    for part, start in zip(parts, _starts(parts), strict=False):
        name = DTYPE_NAMES[part.dtype]
        entries[part.key] = {"dtype": name, "shape": list(part.shape), "data_offsets": [start, start + part.nbytes]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    nbytes = -(-(LENGTH_BYTES + len(text)) // align_bytes) * align_bytes - LENGTH_BYTES
    if nbytes > MOST_HEADER_BYTES:
        raise CheckpointError(f"{len(parts)} parts need a header of {nbytes} bytes, but safetensors allows 100,000,000")
    return nbytes.to_bytes(LENGTH_BYTES, "little") + text.ljust(nbytes)


def offsets(parts: Sequence[FilePart]) -> tuple[int, ...]:
    """Return the offset in bytes of each part in a checkpoint's file."""
    begin = len(header(parts))
    return tuple(begin + start for start in _starts(parts)[:-1])


def _starts(parts: Sequence[FilePart]) -> list[int]:
    """Return the offset in bytes of each part after the header, followed by the size of the data."""
    return list(itertools.accumulate((part.nbytes for part in parts), initial=0))


# -- reading -----------------------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """The location of one tensor: bytes [start, stop) of a file."""

    file: "_File"
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class RangedWeights(Mapping[str, Tensor]):
    """Tensors by name, of which a part can be read alone."""

    fresh: frozenset[str] = frozenset()
    """Names of parameters that have no stored values, because the model makes their first values itself."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a tensor, flattened in row-major order, (stop - start,)."""


class StoredWeights(RangedWeights):
    """A mapping from names to the tensors of a folder or a file. Each look-up reads the tensor again; none is cached.

    Attributes:
        ties: alias of a tied tensor -> name of the tensor, from the index of an export.

    Raises:
        PlanError: there is no such file or folder, or the folder has no safetensors files.
        CheckpointError: a file is not valid safetensors, or lacks a tensor that the index lists.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ties: Mapping[str, str] = {}
        self._pieces: dict[str, _Piece] = {}
        for file, names in self._files().items():
            pieces = _pieces_of(_File(file))
            missing = [name for name in names or () if name not in pieces]
            if missing:
                raise CheckpointError(f"{file}: lacks {missing[0]!r}, which {INDEX} lists for this file")
            self._pieces |= pieces if names is None else {name: pieces[name] for name in names}

    def __getitem__(self, name: str) -> Tensor:
        return self.read(name, 0, math.prod(self.shape(name))).view(self.shape(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def dtype(self, name: str) -> torch.dtype:
        return self._pieces[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._pieces[name].shape

    def nbytes(self, name: str) -> int:
        """Return the size of a stored tensor in bytes, without reading the tensor."""
        return self._pieces[name].stop - self._pieces[name].start

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Read elements [start, stop) of a tensor flattened in row-major order; return a 1-D CPU tensor.

        Raises:
            CheckpointError: the file cannot be read; the message has the offset.
        """
        piece = self._pieces[name]
        values = aligned_zeros(stop - start, piece.dtype, torch.device("cpu"))
        piece.file.read_into(memory_of(values), piece.start + start * piece.dtype.itemsize)
        return values

    def _files(self) -> Mapping[Path, list[str] | None]:
        """Return file -> names of the tensors to read from it; None means all of the file's tensors."""
        path = self.path
        if path.is_file():
            return {path: None}
        if not path.is_dir():
            raise PlanError(f"weights={path}: there is no such file or folder")
        if (path / INDEX).is_file():
            weight_map, self.ties = _read_index(path / INDEX)
            files: dict[Path, list[str]] = {}
            for name, file in weight_map.items():
                files.setdefault(path / file, []).append(name)
            return files
        unindexed = sorted(path.glob("*.safetensors"))
        if not unindexed:
            raise PlanError(f"weights={path}: the folder holds no file that ends in .safetensors")
        return dict.fromkeys(unindexed)


class _File:
    """An open file, closed when the last reference to this object is deleted."""

    def __init__(self, path: Path) -> None:
        self.path, self._files = path, Files()
        with naming(path, "opening"):
            self._fd = self._files.open(path, os.O_RDONLY)  # follows links, as in download caches
        weakref.finalize(self, os.close, self._fd)
        self.nbytes = os.fstat(self._fd).st_size

    def read_into(self, memory: memoryview, start: int) -> None:
        with naming(self.path, f"reading at offset {start}"):
            transfer_all(self._files.pread, self._fd, memory, start)

    def read(self, start: int, nbytes: int) -> bytes:
        memory = bytearray(nbytes)
        self.read_into(memoryview(memory), start)
        return bytes(memory)


def _read_index(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dicts: tensor name -> file name, and alias -> stored name for tied tensors.

    Raises:
        CheckpointError: the file is not a valid index, or names a file outside of its folder.
    """
    try:
        with naming(path):
            body = json.loads(path.read_bytes())
        weight_map, ties = body["weight_map"], body.get("metadata", {}).get("ties", {})
        texts = [text for pair in (*weight_map.items(), *ties.items()) for text in pair]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not an index of safetensors ({type(error).__name__})") from error
    if not weight_map or not all(isinstance(text, str) for text in texts):
        raise CheckpointError(
            f"{path}: is not an index of safetensors: it maps names to values that are not file names"
        )
    for name in weight_map.values():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", name):
            raise CheckpointError(f"{path}: {name!r} is not the name of a safetensors file in this folder")
    return weight_map, ties


def _pieces_of(file: _File) -> dict[str, _Piece]:
    """Return name -> location of the tensors in a file, from its header.

    Raises:
        CheckpointError: the file is not valid safetensors.
    """
    try:
        with safe_open(file.path, "pt"):  # checks that the header is consistent and fits the file's size
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file.path} is not a complete safetensors file ({in_short(error)})") from error
    length = int.from_bytes(file.read(0, LENGTH_BYTES), "little")
    entries = json.loads(file.read(LENGTH_BYTES, length))
    begin = LENGTH_BYTES + length
    return {name: _piece(file, begin, name, entry) for name, entry in entries.items() if name != "__metadata__"}


def _piece(file: _File, begin: int, name: str, entry: Mapping[str, Any]) -> _Piece:
    if entry["dtype"] not in _DTYPES:
        raise CheckpointError(f"{file.path}: {name!r} is {entry['dtype']}, but must be one of {', '.join(_DTYPES)}")
    start, stop = entry["data_offsets"]
    return _Piece(file, _DTYPES[entry["dtype"]], tuple(entry["shape"]), begin + start, begin + stop)
