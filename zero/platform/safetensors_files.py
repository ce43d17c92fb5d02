"""Tensors of safetensors files, read one by one as they are asked for.

A folder is read by its index, or without one by the headers of all its files. Each file is opened once, and a tensor is
read from its own bytes: a mapped file would stay in memory as far as it has been read, which for a model is all of it.
"""

import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero.errors import CheckpointError, PlanError, in_short
from zero.platform.device import aligned_zeros, memory_of

INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MOST_HEADER_BYTES = 100_000_000  # safetensors itself opens no file with a longer one
_MOST_READ_BYTES = 2**30  # the system reads no more than 2 GiB at once


class _Piece(NamedTuple):
    """Where one tensor lies."""

    file: "_File"
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class StoredWeights(Mapping[str, Tensor]):
    """The tensors of a folder or a file by name. Each look-up reads; nothing is kept.

    Raises:
        PlanError: there is nothing to read.
        CheckpointError: files that are no safetensors, or that lack what the index says they hold.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pieces: dict[str, _Piece] = {}
        for file, names in _files(path).items():
            found = _pieces_of(_File(file))
            missing = [name for name in names or () if name not in found]
            if missing:
                raise CheckpointError(f"{file}: lacks {missing[0]!r}, which {INDEX} says it holds")
            self._pieces |= found if names is None else {name: found[name] for name in names}

    def __getitem__(self, name: str) -> Tensor:
        piece = self._pieces[name]
        tensor = aligned_zeros(math.prod(piece.shape), piece.dtype, torch.device("cpu"))
        piece.file.read_into(memory_of(tensor), piece.start)
        return tensor.view(piece.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces

    def nbytes(self, name: str) -> int:
        """Of a tensor as it is stored; nothing is read."""
        piece = self._pieces[name]
        return math.prod(piece.shape) * piece.dtype.itemsize


class _File:
    """One open file, closed when nobody refers to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        weakref.finalize(self, os.close, self._number)
        self.nbytes = os.fstat(self._number).st_size

    def read_into(self, memory: memoryview, start: int) -> None:
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._number, [memory[done : done + _MOST_READ_BYTES]], start + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {error.strerror}") from error
            if not count:
                raise CheckpointError(f"{self.path}: ends at byte {start + done}, in the middle of a tensor")
            done += count


def _files(path: Path) -> dict[Path, list[str] | None]:
    """File to the names that are to be taken from it, None for all."""
    if path.is_file():
        return {path: None}
    if not path.is_dir():
        raise PlanError(f"weights={path}: there is no such file or folder")
    if (path / INDEX).is_file():
        return _indexed(path)
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise PlanError(f"weights={path}: the folder holds no file that ends in .safetensors")
    return dict.fromkeys(found)


def _indexed(folder: Path) -> dict[Path, list[str] | None]:
    files: dict[Path, list[str] | None] = {}
    try:
        for name, file in json.loads((folder / INDEX).read_bytes())["weight_map"].items():
            if Path(file).name != file:
                raise CheckpointError(f"{folder / INDEX}: {file!r} is no name of a file in this folder")
            names = files.setdefault(folder / file, [])
            assert names is not None
            names.append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / INDEX}: is no index of safetensors ({type(error).__name__})") from error
    return files


def _pieces_of(file: _File) -> dict[str, _Piece]:
    """What a header says, compared with the file's length."""
    try:
        length = int.from_bytes(_bytes(file, 0, 8), "little")
        if length > min(file.nbytes - 8, _MOST_HEADER_BYTES):
            raise ValueError("a header longer than the file")
        header = json.loads(_bytes(file, 8, length))
        return {name: _piece(file, 8 + length, name, told) for name, told in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {in_short(error)}"
        raise CheckpointError(f"{file.path}: is no whole safetensors file ({what})") from error


def _bytes(file: _File, start: int, nbytes: int) -> bytes:
    read = bytearray(nbytes)
    file.read_into(memoryview(read), start)
    return bytes(read)


def _piece(file: _File, data: int, name: str, told: Mapping[str, Any]) -> _Piece:
    if told["dtype"] not in _DTYPES:
        raise CheckpointError(f"{file.path}: {name!r} is {told['dtype']}; quantised weights are not read")
    dtype, shape = _DTYPES[told["dtype"]], tuple(torch.Size(told["shape"]))
    start, stop = told["data_offsets"]
    if min(shape, default=0) < 0 or not 0 <= start <= stop <= file.nbytes - data:
        raise ValueError("a tensor beyond the end")
    if stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("sizes that contradict each other")
    return _Piece(file, dtype, shape, data + start)
