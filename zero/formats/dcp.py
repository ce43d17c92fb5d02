"""Folders of torch.distributed.checkpoint, written by its own library, without a process group.

Its writer keeps every tensor of a file until the file is complete, so each tensor gets a file of its own: one of them
is in memory at a time, twice over while it is written or read.

Its reader unpickles `.metadata` without restriction and believes it: where the pieces of a tensor leave a hole, it
returns what was in memory, and it casts a piece of another dtype. So pieces are read here, with `weights_only`, and
must be what the metadata says and together the whole tensor. The metadata may name the record types of DCP itself,
torch's dtypes and sizes, and nothing else. Still, read none but folders you trust.
"""

import errno
import io
import os
import pickle
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import product
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from zero.errors import CheckpointError
from zero.formats.stream import Source, Stream
from zero.formats.torch_file import check_records, refused
from zero.platform.files import naming
from zero.platform.safetensors_files import NAMES

METADATA = ".metadata"

MOST_AXES = 8
"""Of a tensor that is read: a piece has two to this power corners."""

_DTYPES = {str(dtype): dtype for dtype in NAMES}
_RECORDS = "Metadata StorageMeta TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
_RECORDS += "MetadataIndex _MEM_FORMAT_ENCODING"
_ALLOWED = {
    **{f"{metadata.__name__}.{name}": getattr(metadata, name) for name in _RECORDS.split()},
    f"{filesystem.__name__}._StorageInfo": filesystem._StorageInfo,
    **_DTYPES,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "collections.OrderedDict": OrderedDict,
    # where it was saved: a path that touches no file
    **{f"{module}.PosixPath": PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{f"{module}.WindowsPath": PureWindowsPath for module in ("pathlib", "pathlib._local")},
}


class _Planner(torch_checkpoint.DefaultSavePlanner):
    """Plans with sizes alone, and makes each tensor when it is its turn."""

    def __init__(self, tensors: Mapping[str, Stream]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_object(self, index: Any) -> Tensor:
        return self._tensors[index.fqn].whole(index.fqn)


class _Piece(NamedTuple):
    """A box of a tensor, and where its values are stored."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    home: Any


class _Stretch(io.RawIOBase):
    """A stretch of a file, as a file: one of theirs holds many tensors, each as torch.save writes it."""

    def __init__(self, file: BinaryIO, start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._at = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = (0, self._at, self._nbytes)[whence] + offset
        if at < 0:
            raise OSError(errno.EINVAL, "before the beginning")
        self._at = at
        return at

    def readinto(self, into: Any) -> int:
        self._file.seek(self._start + self._at)
        with memoryview(into) as view:
            count = self._file.readinto(view[: max(0, self._nbytes - self._at)])  # type: ignore[attr-defined]
        self._at += count
        return int(count)


class _Unpickler(pickle._Unpickler):
    """The one in Python: that in C makes room for as many objects as a damaged number says, tens of GB if need be."""

    def find_class(self, module: str, name: str) -> Any:
        found = _ALLOWED.get(f"{module}.{name}")
        if found is None:
            raise pickle.UnpicklingError(f"its pickle asks for {module[:60]}.{name[:60]}")
        return found


def write(folder: Path, tensors: Mapping[str, Stream]) -> None:
    """Write a flat state dict; tied tensors are written under each of their names.

    Args:
        folder: exists and is empty.
    """
    planned = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.items()}
    writer = torch_checkpoint.FileSystemWriter(folder, single_file_per_rank=False)
    try:
        with naming(folder), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            torch_checkpoint.save(planned, storage_writer=writer, planner=_Planner(tensors), no_dist=True)
    except torch_checkpoint.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]  # on the one rank that there is
        raise (cause if isinstance(cause, CheckpointError) else refused(str(folder), cause)) from error


def read(folder: Path) -> Source:
    """Find the tensors of a folder, whatever they were cut into.

    Raises:
        CheckpointError: its metadata asks for something else than tensors, or is damaged.
    """
    found = _metadata(folder / METADATA)
    entries = found.state_dict_metadata.items()
    tensors = {name: one for name, one in entries if isinstance(one, metadata.TensorStorageMetadata)}
    streams = {name: _stream(folder, name, one, found.storage_data) for name, one in tensors.items()}
    return Source(streams, left=tuple(f"{name} (bytes)" for name, _ in entries if name not in tensors))


def _stream(folder: Path, name: str, one: Any, stored: Mapping[Any, Any]) -> Stream:
    what = f"{folder}: {name!r}"
    try:
        dtype, shape = one.properties.dtype, tuple(torch.Size(one.size))
        pieces = [_piece(chunk, stored.get(metadata.MetadataIndex(name, chunk.offsets))) for chunk in one.chunks]
    except Exception as error:  # crafted attributes may raise anything
        raise refused(what, error) from error
    if dtype not in _DTYPES.values():
        raise CheckpointError(f"{what}: is {repr(dtype)[:80]}, which a checkpoint does not hold")
    if not is_whole(shape, pieces):
        raise CheckpointError(f"{what}: its pieces are not every element of its shape {shape} once; save it again")
    if any(piece.home is None and 0 not in piece.sizes for piece in pieces):
        raise CheckpointError(f"{what}: a piece of it is in no file; save it again")
    return Stream.of(dtype, shape, partial(_whole, folder, what, dtype, shape, pieces))


def _piece(chunk: Any, home: Any) -> _Piece:
    """torch.Size takes integers and nothing else."""
    return _Piece(tuple(torch.Size(chunk.offsets)), tuple(torch.Size(chunk.sizes)), home)


def is_whole(shape: tuple[int, ...], pieces: Iterable[_Piece]) -> bool:
    """Whether every element of `shape` is in one piece, and nothing beside them.

    The derivative of a box along every axis is its corners with alternating signs. So boxes add up to the whole exactly
    if their corners do, however many there are.
    """
    boxes = [(start, sizes) for start, sizes, _ in pieces]
    if len(shape) > MOST_AXES or any(len(shape) != len(start) or len(shape) != len(sizes) for start, sizes in boxes):
        return False
    if any(length < 0 for sizes in (shape, *(sizes for _, sizes in boxes)) for length in sizes):
        return False
    return _corners(boxes) == _corners([((0,) * len(shape), shape)])


def _corners(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for start, sizes in boxes:
        for ends in product((0, 1), repeat=len(sizes)):
            corner = tuple(first + end * size for first, end, size in zip(start, ends, sizes, strict=True))
            found[corner] += -1 if sum(ends) % 2 else 1
    return found


def _whole(folder: Path, what: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[_Piece]) -> Tensor:
    try:
        values = torch.empty(shape, dtype=dtype)
        for start, sizes, home in pieces:
            if 0 in sizes:
                continue
            with (folder / home.relative_path).open("rb") as file:
                octets: Any = _Stretch(file, home.offset, home.length)
                check_records(octets)
                part = torch.load(octets, map_location="cpu", weights_only=True).detach()
            if (part.dtype, tuple(part.shape)) != (dtype, sizes):
                raise TypeError(f"a piece is {part.dtype} of shape {tuple(part.shape)}, not {dtype} of {sizes}")
            values[tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))] = part
    except Exception as error:  # a crafted size or offset may raise anything
        raise refused(what, error) from error
    return values


def _metadata(path: Path) -> Any:
    with naming(path), path.open("rb") as file:
        try:
            found = _Unpickler(io.BytesIO(file.read())).load()
            if not isinstance(found, metadata.Metadata) or not isinstance(found.state_dict_metadata, dict):
                raise TypeError("it is not metadata of DCP")
            if not all(type(name) is str for name in found.state_dict_metadata):
                raise TypeError("a tensor's name is not text")
            homes = {(info.relative_path, info.offset) for info in found.storage_data.values()}
            if len(homes) < len(found.storage_data):
                raise TypeError("it has two tensors in one place")
            for info in found.storage_data.values():
                name = info.relative_path
                if type(name) is not str or Path(name).name != name or info.transform_descriptors:
                    raise TypeError(f"{str(name)[:100]!r} is not a plain file in this folder")
        except OSError:
            raise
        except Exception as error:  # a damaged or crafted pickle may raise anything
            raise refused(str(path), error) from error
    return found
