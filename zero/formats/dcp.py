"""Read and write folders of torch.distributed.checkpoint (DCP), without a process group.

DCP's writer keeps every tensor of a file in memory until the file is complete. So each tensor is written to a file of
its own, and only one tensor is in memory at a time. A read needs up to three times the memory of one tensor.

DCP's reader unpickles `.metadata` without restriction and trusts it: if the pieces of a tensor leave a hole, it returns
uninitialised memory, and it casts a piece of another dtype. So this module reads the pieces itself, with
`weights_only`. It checks that each piece has the dtype and shape in the metadata, and that the pieces cover the tensor
exactly. The pickled metadata may only use DCP's own record classes and torch's dtypes and sizes. Still, read only
folders that you trust.
"""

import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import partial
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from zero.errors import CheckpointError
from zero.formats.stream import Stream, TensorSource
from zero.formats.torch_file import check_records, refused
from zero.platform.files import naming
from zero.platform.safetensors_files import DTYPE_NAMES

METADATA_FILE = ".metadata"

_DTYPES = {str(dtype): dtype for dtype in DTYPE_NAMES}
_RECORDS = "Metadata StorageMeta TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
_RECORDS += "MetadataIndex _MEM_FORMAT_ENCODING"
_ALLOWED = {
    **{f"{metadata.__name__}.{name}": getattr(metadata, name) for name in _RECORDS.split()},
    f"{filesystem.__name__}._StorageInfo": filesystem._StorageInfo,
    **_DTYPES,
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "collections.OrderedDict": OrderedDict,
    # The metadata has the path of the save. Pure paths cannot access files.
    **{f"{module}.PosixPath": PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{f"{module}.WindowsPath": PureWindowsPath for module in ("pathlib", "pathlib._local")},
}


class _Planner(torch_checkpoint.DefaultSavePlanner):
    """A save planner that plans with meta tensors and reads each tensor's values only when DCP writes them."""

    def __init__(self, tensors: Mapping[str, Stream]) -> None:
        super().__init__()
        self._tensors = tensors

    def lookup_object(self, index: Any) -> Tensor:
        return self._tensors[index.fqn].whole(index.fqn)


class _Piece(NamedTuple):
    """A rectangular part of a tensor, and `home`, its location: relative path of a file, offset and length."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    home: Any


class _Unpickler(pickle._Unpickler):
    """An unpickler that allows only the classes in `_ALLOWED`.

    It derives from the pickle module's Python implementation, because the implementation in C allocates memory for as
    many objects as a damaged file claims to have.
    """

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _ALLOWED:
            raise pickle.UnpicklingError(f"its pickle asks for {module[:60]}.{name[:60]}")
        return _ALLOWED[f"{module}.{name}"]


def write(folder: Path, tensors: Mapping[str, Stream]) -> None:
    """Write a flat state dict; a tied tensor is written once under each of its names.

    Args:
        folder: an existing, empty folder.
    """
    planned = {name: torch.empty(it.shape, dtype=it.dtype, device="meta") for name, it in tensors.items()}
    writer = torch_checkpoint.FileSystemWriter(folder, single_file_per_rank=False)
    try:
        with naming(folder), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            torch_checkpoint.save(planned, storage_writer=writer, planner=_Planner(tensors), no_dist=True)
    except torch_checkpoint.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]  # `failures` has one rank
        raise (cause if isinstance(cause, CheckpointError) else refused(str(folder), cause)) from error


def read(folder: Path) -> TensorSource:
    """Return the tensors of a DCP folder, saved by any number of ranks; their values are read later.

    Raises:
        CheckpointError: the metadata is damaged, or uses classes that tensors do not need.
    """
    saved = _metadata(folder / METADATA_FILE)
    streams, left = {}, []
    for name, entry in saved.state_dict_metadata.items():
        if isinstance(entry, metadata.TensorStorageMetadata):
            streams[name] = _stream(folder, name, entry, saved.storage_data)
        else:
            left.append(f"{name} (bytes)")
    return TensorSource(streams, left=tuple(left))


def _stream(folder: Path, name: str, entry: Any, stored: Mapping[Any, Any]) -> Stream:
    what = f"{folder}: {name!r}"
    try:
        dtype, shape = entry.properties.dtype, tuple(torch.Size(entry.size))
        pieces = [_piece(chunk, stored.get(metadata.MetadataIndex(name, chunk.offsets))) for chunk in entry.chunks]
    except Exception as error:  # malicious metadata may raise any exception
        raise refused(what, error) from error
    if dtype not in _DTYPES.values():
        raise CheckpointError(f"{what}: a checkpoint cannot hold {repr(dtype)[:80]}")
    if not is_whole(shape, pieces):
        raise CheckpointError(f"{what}: its pieces overlap or leave a hole in its shape {shape}. Save it again.")
    if any(piece.home is None and 0 not in piece.sizes for piece in pieces):
        raise CheckpointError(f"{what}: no file has one of its pieces. Save it again.")
    return Stream.of(dtype, shape, partial(_whole, folder, what, dtype, shape, pieces))


def _piece(chunk: Any, home: Any) -> _Piece:
    return _Piece(tuple(torch.Size(chunk.offsets)), tuple(torch.Size(chunk.sizes)), home)  # raises for non-integers


def is_whole(shape: tuple[int, ...], pieces: Iterable[_Piece]) -> bool:
    """Return whether every element of a tensor of `shape` is in exactly one piece, and no piece exceeds the tensor."""
    boxes = [(start, sizes) for start, sizes, _ in pieces]
    if any(not len(start) == len(sizes) == len(shape) or min(sizes, default=0) < 0 for start, sizes in boxes):
        return False
    boxes = [(start, sizes) for start, sizes in boxes if 0 not in sizes]
    if any(not 0 <= a <= end - n for start, sizes in boxes for a, n, end in zip(start, sizes, shape, strict=True)):
        return False
    if sum(prod(sizes) for _, sizes in boxes) != prod(shape):
        return False
    starts = torch.tensor([start for start, _ in boxes], dtype=torch.int64).view(len(boxes), len(shape))
    stops = starts + torch.tensor([sizes for _, sizes in boxes], dtype=torch.int64).view_as(starts)
    overlaps = (((starts < stop) & (start < stops)).all(-1).sum() for start, stop in zip(starts, stops, strict=True))
    return all(count == 1 for count in overlaps)  # each piece overlaps itself


def _whole(folder: Path, what: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[_Piece]) -> Tensor:
    try:
        values = torch.empty(shape, dtype=dtype)
        for start, sizes, home in pieces:
            if 0 in sizes:
                continue
            with (folder / home.relative_path).open("rb") as file:
                file.seek(home.offset)
                octets = io.BytesIO(file.read(home.length))
            check_records(octets)
            part = torch.load(octets, map_location="cpu", weights_only=True).detach()
            if (part.dtype, tuple(part.shape)) != (dtype, sizes):
                raise TypeError(f"a piece is {part.dtype} of shape {tuple(part.shape)}, not {dtype} of {sizes}")
            values[tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))] = part
    except Exception as error:  # a malicious size or offset may raise any exception
        raise refused(what, error) from error
    return values


def _metadata(path: Path) -> Any:
    with naming(path), path.open("rb") as file:
        try:
            saved = _Unpickler(io.BytesIO(file.read())).load()
            if not isinstance(saved, metadata.Metadata) or not isinstance(saved.state_dict_metadata, dict):
                raise TypeError("the pickle is not metadata of DCP")
            if not all(type(name) is str for name in saved.state_dict_metadata):
                raise TypeError("a tensor's name is not text")
            homes = {(info.relative_path, info.offset) for info in saved.storage_data.values()}
            if len(homes) < len(saved.storage_data):
                raise TypeError("two tensors have the same place in a file")
            for info in saved.storage_data.values():
                name = info.relative_path
                if type(name) is not str or Path(name).name != name or info.transform_descriptors:
                    raise TypeError(f"{str(name)[:100]!r} is not a plain file in this folder")
        except OSError:
            raise
        except Exception as error:  # a damaged or malicious pickle may raise any exception
            raise refused(str(path), error) from error
    return saved
