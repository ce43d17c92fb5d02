"""Write files of torch.save as a stream, and read them without running code in them.

A `.pt` file is a zip whose `data.pkl` names the tensors and whose other records are their bytes, not compressed.
torch.save needs all tensors in memory; this writer makes the pickle from names and sizes alone, and the bytes follow
block by block. Tied tensors share a record.

A pickle is a program. Reading allows tensors, numbers and containers, and rejects other classes by name. Still, read
only files that you trust, because this relies on torch's unpickler and allocator. torch writes a CRC-32 of each record
and never compares it; this module does.
"""

import pickle
import re
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zero.errors import CheckpointError
from zero.formats.stream import Source, Stream, new_file, put
from zero.platform.files import naming
from zero.platform.safetensors_files import NAMES

_CLASSES = torch.storage._dtype_to_storage_type_map()

STORAGES = {dtype: getattr(torch, _CLASSES[dtype]) for dtype in NAMES if dtype in _CLASSES}
"""Each dtype that a checkpoint may hold -> the class that torch.save names for it; float8 has none."""

ALIGN_BYTES = 64
"""The alignment of each record, as in torch.save: a mapped file holds aligned tensors."""

TRUST = "only tensors are read from such a file, and only from one that you trust"

_LOCAL_HEADER_BYTES, _ZIP64_BYTES = 30, 20


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """The storage that a record of the zip will hold."""

    key: str
    stream: Stream


@dataclass(frozen=True)
class _Whole:
    """A tensor that is all of a record; pickled as torch.save pickles the tensor."""

    record: _Record

    def __reduce__(self) -> Any:
        shape = self.record.stream.shape
        stride = torch.empty(shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (self.record, 0, shape, stride, False, OrderedDict())


class _Pickler(pickle.Pickler):
    """Pickles a record as torch.save pickles the storage."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Record):
            return None
        return ("storage", STORAGES[value.stream.dtype], value.key, "cpu", value.stream.numel)


def write(path: Path, tensors: Mapping[str, Stream], ties: Mapping[str, str]) -> None:
    """Write a state dict that torch.load reads.

    Args:
        path: does not exist.
        ties: further name -> name; both are in `tensors`.

    Raises:
        CheckpointError: torch.save has no class for a tensor's dtype.
    """
    for name, stream in tensors.items():
        if stream.dtype not in STORAGES:
            raise CheckpointError(f"{name} is {stream.dtype}, which is not written here; export --to hf holds it")
    owners = [name for name in tensors if name not in ties]
    wholes = {name: _Whole(_Record(str(number), tensors[name])) for number, name in enumerate(owners)}
    text = BytesIO()
    _Pickler(text, protocol=2).dump(OrderedDict((name, wholes[ties.get(name, name)]) for name in tensors))
    folder = re.sub(r"[^A-Za-z0-9_-]", "_", path.stem)
    with new_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{folder}/data.pkl", text.getvalue())
        archive.writestr(f"{folder}/byteorder", "little")
        for name in owners:
            record = wholes[name].record
            place = _aligned(f"{folder}/data/{record.key}", file.tell())
            with archive.open(place, "w", force_zip64=True) as out:
                put(out, record.stream, name)
        archive.writestr(f"{folder}/version", "3\n")


def _aligned(name: str, offset: int) -> zipfile.ZipInfo:
    """Make the entry of a record at `offset`, padded so that its data are aligned."""
    place = zipfile.ZipInfo(name)
    begin = offset + _LOCAL_HEADER_BYTES + len(name) + 4 + _ZIP64_BYTES
    padding = -begin % ALIGN_BYTES
    place.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding  # torch's field
    return place


# -- reading -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Source:
    """Find the tensors of a state dict, or of nested dicts, whose names are joined by dots.

    Raises:
        CheckpointError: the file is damaged, names other classes than tensors, or holds none.
    """
    tensors: dict[str, Tensor] = {}
    left: list[str] = []
    try:
        for name, value in _leaves(restricted(path, compare=True), ""):
            if name in tensors:
                raise CheckpointError(f"{path}: has {name!r} twice, as a name and as names joined by dots")
            if isinstance(value, Tensor):
                tensors[name] = value
            else:
                left.append(f"{name} ({type(value).__name__})")
    except RecursionError as error:
        raise CheckpointError(f"{path}: its dicts are nested without end; a state dict was expected") from error
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensor with a name; a state dict was expected")
    streams = {name: stream_of(value, f"{path}: {name!r}") for name, value in tensors.items()}
    first = {_identity(value): name for name, value in reversed(tensors.items()) if value.numel()}
    owners = {name: first.get(_identity(value), name) for name, value in tensors.items()}
    return Source(streams, {name: owner for name, owner in owners.items() if owner != name}, left=tuple(left))


def restricted(path: Path, *, compare: bool = False) -> Any:
    """Return the contents of a file, with tensors mapped and not read.

    Args:
        compare: read all records once, and compare their CRC-32.

    Raises:
        CheckpointError: the file is damaged, or names other classes than tensors, numbers and containers.
    """
    with naming(path), path.open("rb") as file:
        try:
            if compare:
                check_records(file)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except OSError:
            raise
        except Exception as error:  # a damaged or crafted pickle may raise anything
            raise refused(str(path), error) from error


def check_records(file: IO[bytes]) -> None:
    """Compare the records of a zip with their CRC-32; files from before torch 1.6 have none.

    Raises:
        ValueError: a record is damaged. A damaged zip may raise any other exception.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged!r} is damaged: it has another CRC-32")
    file.seek(0)


def stream_of(value: Any, what: str) -> Stream:
    """Make a stream of a mapped tensor.

    Raises:
        CheckpointError: a checkpoint cannot hold it.
    """
    plain = type(value) in (Tensor, Parameter) and value.layout is torch.strided and value.is_cpu
    if not plain or value.dtype not in STORAGES:
        form = f"{value.layout}, {value.dtype}, {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointError(f"{what}: is {form}, not a dense tensor of a dtype that a checkpoint holds")
    return Stream.of(value.dtype, tuple(value.shape), lambda: value)


def refused(what: str, error: BaseException) -> CheckpointError:
    """Make a one-line error of torch's, which has many lines and explains how to switch the restriction off."""
    cause = error.__context__ if isinstance(error, pickle.UnpicklingError) and error.__context__ else error
    asked = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)|class (\S+) was not", str(cause))
    line = str(cause).strip().split("\n")[0].strip()[:200]
    if asked:
        line = f"its pickle asks for {(asked[1] or asked[2])[:100]}"
    elif not line or not isinstance(cause, pickle.UnpicklingError):
        line = f"{type(cause).__name__}: {line}".removesuffix(": ")
    return CheckpointError(f"{what}: refused: {line}; {TRUST}")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _identity(value: Tensor) -> Any:
    return value.data_ptr(), value.dtype, value.shape, value.stride()
