"""Files of torch.save: written as a stream, and read without running the code they may hold.

A `.pt` file is a zip whose `data.pkl` names the tensors and whose other records are their bytes, stored as they are.
torch.save wants all tensors in memory at once; here the pickle is written from names and sizes alone, and the bytes
follow block by block. Two names of one tensor share a record, so a tie stays a tie.

A pickle is a program. Reading allows it to build tensors, numbers and containers, and refuses all else by name; still,
read none but files that you trust: torch's own unpickler and allocator stand behind this. Every record of the zip has
a CRC-32, which torch writes and does not look at; here it is compared.
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
"""The class that torch.save names for values of a dtype, of those that a checkpoint may hold; float8 has none."""

ALIGN_BYTES = 64
"""Of each record, as torch.save does it: so that a mapped file holds aligned tensors."""

TRUST = "only tensors are read from such a file, and only from one that you trust"

_LOCAL_HEADER_BYTES, _ZIP64_BYTES = 30, 20


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Record:
    """Stands for the storage that a record of the zip will be."""

    key: str
    stream: Stream


@dataclass(frozen=True)
class _Whole:
    """Stands for a tensor that is all of a record, and is pickled as torch.save pickles that tensor."""

    record: _Record

    def __reduce__(self) -> Any:
        shape = self.record.stream.shape
        stride = torch.empty(shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (self.record, 0, shape, stride, False, OrderedDict())


class _Pickler(pickle.Pickler):
    """Writes of a record what torch.save writes of the storage."""

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
        CheckpointError: a tensor of a dtype that torch.save has no class for.
    """
    for name, stream in tensors.items():
        if stream.dtype not in STORAGES:
            raise CheckpointError(f"{name} is {stream.dtype}, which is not written here; export --to hf holds it")
    own = [name for name in tensors if name not in ties]
    wholes = {name: _Whole(_Record(str(number), tensors[name])) for number, name in enumerate(own)}
    text = BytesIO()
    _Pickler(text, protocol=2).dump(OrderedDict((name, wholes[ties.get(name, name)]) for name in tensors))
    folder = re.sub(r"[^A-Za-z0-9_-]", "_", path.stem)
    with new_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{folder}/data.pkl", text.getvalue())
        archive.writestr(f"{folder}/byteorder", "little")
        for name in own:
            record = wholes[name].record
            place = _aligned(f"{folder}/data/{record.key}", file.tell())
            with archive.open(place, "w", force_zip64=True) as out:
                put(out, record.stream, name)
        archive.writestr(f"{folder}/version", "3\n")


def _aligned(name: str, offset: int) -> zipfile.ZipInfo:
    """A record whose header begins at `offset` and is as long as it takes."""
    place = zipfile.ZipInfo(name)
    begin = offset + _LOCAL_HEADER_BYTES + len(name) + 4 + _ZIP64_BYTES
    padding = -begin % ALIGN_BYTES
    place.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding  # the field that torch pads with
    return place


# -- reading -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> Source:
    """Find the tensors of a state dict, or of dicts in dicts: their names are joined by dots.

    Raises:
        CheckpointError: it wants to build something else than tensors, is damaged, or holds none.
    """
    found: dict[str, Tensor] = {}
    left: list[str] = []
    try:
        for name, value in _leaves(restricted(path, compare=True), ""):
            if name in found:
                raise CheckpointError(f"{path}: has {name!r} twice, as a name and as names joined by dots")
            if isinstance(value, Tensor):
                found[name] = value
            else:
                left.append(f"{name} ({type(value).__name__})")
    except RecursionError as error:
        raise CheckpointError(f"{path}: its dicts are nested without end; a state dict was expected") from error
    if not found:
        raise CheckpointError(f"{path}: holds no tensor with a name; a state dict was expected")
    streams = {name: stream_of(value, f"{path}: {name!r}") for name, value in found.items()}
    first = {_identity(value): name for name, value in reversed(found.items()) if value.numel()}
    owners = {name: first.get(_identity(value), name) for name, value in found.items()}
    return Source(streams, {name: one for name, one in owners.items() if one != name}, left=tuple(left))


def restricted(path: Path, *, compare: bool = False) -> Any:
    """What a file holds, its tensors mapped and not read.

    Args:
        compare: read all of it once, and compare its records with their CRC-32.

    Raises:
        CheckpointError: it wants to build something else than tensors, numbers and containers, or is damaged.
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
    """Compare what torch.save wrote with its CRC-32; what it wrote before torch 1.6 has none.

    Raises:
        ValueError: a record is damaged. Or whatever a damaged zip makes of its reader.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{damaged!r} is damaged: it has another CRC-32")
    file.seek(0)


def stream_of(value: Any, what: str) -> Stream:
    """A tensor as it lies in a mapped file.

    Raises:
        CheckpointError: it is none that a checkpoint can hold.
    """
    plain = type(value) in (Tensor, Parameter) and value.layout is torch.strided and value.is_cpu
    if not plain or value.dtype not in STORAGES:
        seen = f"{value.layout}, {value.dtype}, {value.device}" if isinstance(value, Tensor) else type(value).__name__
        raise CheckpointError(f"{what}: is {seen}, not a dense tensor of a dtype that a checkpoint holds")
    return Stream.of(value.dtype, tuple(value.shape), lambda: value)


def refused(what: str, error: BaseException) -> CheckpointError:
    """torch explains itself on many lines, and how to switch the restriction off; its unpickler had said it in one."""
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
