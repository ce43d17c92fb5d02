"""Write files in the format of torch.save block by block, and read them without executing code from them.

A `.pt` file is a zip archive. Its record `data.pkl` lists the tensors, and the other records are their uncompressed
bytes. torch.save needs all tensors in memory. This writer makes the pickle from names, dtypes and shapes alone, and
then writes the bytes block by block. Tied tensors share a record.

Unpickling can execute code. So only tensors, numbers and containers are unpickled, and files with other classes are
rejected. Still, read only files that you trust, because this relies on torch's unpickler and allocator. torch stores a
CRC-32 of each record but never compares it; this module does.
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
from zero.formats.stream import Stream, TensorSource, new_file, put
from zero.platform.files import naming
from zero.platform.safetensors_files import DTYPE_NAMES

_CLASSES = torch.storage._dtype_to_storage_type_map()

STORAGES = {dtype: getattr(torch, _CLASSES[dtype]) for dtype in DTYPE_NAMES if dtype in _CLASSES}
"""Each dtype that a checkpoint can store -> the storage class in torch.save's pickle; float8 dtypes have none."""

STORAGE_ALIGN_BYTES = 64
"""Alignment of each record in the file, as in torch.save, so that memory-mapped tensors are aligned."""

TRUST = "Such a file may hold only tensors, and you must trust its author."

_LOCAL_HEADER_BYTES, _ZIP64_BYTES = 30, 20


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """A record of the zip archive: its key, and the values to write into it."""

    key: str
    stream: Stream


@dataclass(frozen=True)
class _Whole:
    """A tensor that consists of all values of a record; its pickle is the one that torch.save makes of a tensor."""

    record: _Record

    def __reduce__(self) -> Any:
        shape = self.record.stream.shape
        stride = torch.empty(shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (self.record, 0, shape, stride, False, OrderedDict())


class _Pickler(pickle.Pickler):
    """A pickler that writes a `_Record` as torch.save writes a storage."""

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Record):
            return None
        return ("storage", STORAGES[value.stream.dtype], value.key, "cpu", value.stream.numel)


def write(path: Path, tensors: Mapping[str, Stream], ties: Mapping[str, str]) -> None:
    """Write a state dict that torch.load reads.

    Args:
        path: the new file, which must not exist.
        ties: alias of a tied tensor -> name of the tensor; both are in `tensors`.

    Raises:
        CheckpointError: torch.save has no storage class for a tensor's dtype, or a file call failed.
    """
    for name, stream in tensors.items():
        if stream.dtype not in STORAGES:
            raise CheckpointError(f"{name}: torch.save cannot write {stream.dtype}. Export with --to hf.")
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
    """Return the zip entry of a record whose local header begins at `offset`, padded so that its data is aligned."""
    place = zipfile.ZipInfo(name)
    begin = offset + _LOCAL_HEADER_BYTES + len(name) + 4 + _ZIP64_BYTES
    padding = -begin % STORAGE_ALIGN_BYTES
    place.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding  # the padding field of torch.save
    return place


# -- reading -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> TensorSource:
    """Return the tensors of a state dict, or of nested dicts, whose keys are joined by dots; values are read later.

    Raises:
        CheckpointError: the file is damaged, has objects that are not allowed, or has no tensor.
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
        raise CheckpointError(f"{path}: not a state dict, because its dicts are nested without end") from error
    if not tensors:
        raise CheckpointError(f"{path}: not a state dict, because it has no tensor with a name")
    streams = {name: stream_of(value, f"{path}: {name!r}") for name, value in tensors.items()}
    first = {_identity(value): name for name, value in reversed(tensors.items()) if value.numel()}
    owners = {name: first.get(_identity(value), name) for name, value in tensors.items()}
    return TensorSource(streams, {name: owner for name, owner in owners.items() if owner != name}, left=tuple(left))


def restricted(path: Path, *, compare: bool = False) -> Any:
    """Unpickle a file of torch.save with an allowed list of classes; tensors are memory-mapped and not read.

    Args:
        compare: read all records once, and compare their CRC-32.

    Raises:
        CheckpointError: the file is damaged, or has objects other than tensors, numbers and containers.
    """
    with naming(path), path.open("rb") as file:
        try:
            if compare:
                check_records(file)
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except OSError:
            raise
        except Exception as error:  # a damaged or malicious pickle may raise any exception
            raise refused(str(path), error) from error


def check_records(file: IO[bytes]) -> None:
    """Compare the records of a zip archive with their CRC-32.

    Does nothing for a file in the format that torch wrote before 1.6, which is not a zip archive and has no CRC-32.

    Raises:
        ValueError: a record is damaged. A damaged archive may raise any other exception.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged!r} is damaged: its CRC-32 is not the stored one")
    file.seek(0)


def stream_of(value: Any, what: str) -> Stream:
    """Make a stream of a memory-mapped tensor.

    Raises:
        CheckpointError: `value` is not a dense CPU tensor of a dtype that a checkpoint can store.
    """
    plain = type(value) in (Tensor, Parameter) and value.layout is torch.strided and value.is_cpu
    if not plain or value.dtype not in STORAGES:
        form = f"{value.layout}, {value.dtype}, {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointError(f"{what}: is {form}, not a dense tensor of a dtype that a checkpoint holds")
    return Stream.of(value.dtype, tuple(value.shape), lambda: value)


def refused(what: str, error: BaseException) -> CheckpointError:
    """Return a CheckpointError with one line in place of torch's long message, which advises to allow all classes."""
    cause = error.__context__ if isinstance(error, pickle.UnpicklingError) and error.__context__ else error
    asked = re.search(r"GLOBAL (\S+) (?:was not an allowed|whose module)|class (\S+) was not", str(cause))
    line = str(cause).strip().split("\n")[0].strip()[:200]
    if asked:
        line = f"its pickle asks for {(asked[1] or asked[2])[:100]}"
    elif not line or not isinstance(cause, pickle.UnpicklingError):
        line = f"{type(cause).__name__}: {line}".removesuffix(": ")
    return CheckpointError(f"{what}: rejected: {line}. {TRUST}")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _identity(value: Tensor) -> Any:
    return value.data_ptr(), value.dtype, value.shape, value.stride()
