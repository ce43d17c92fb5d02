"""Folders of torch.distributed.checkpoint, written and read by its own library, without a process group.

Its writer keeps every tensor of a file until the file is complete, so each tensor gets a file of its own: one of them
is in memory at a time, twice over while it is written or read.

Its reader unpickles `.metadata` without restriction. Here the file may name the record types of DCP itself, torch's
dtypes and sizes, and nothing else; its tensors are read with `weights_only`. Still, read none but folders you trust.
"""

import pickle
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from zero.checkpoint.manifest import ITEM_BYTES
from zero.errors import CheckpointError
from zero.exchange.pickled import TRUST
from zero.exchange.stream import Source, Stream, refused_by_the_system

METADATA = ".metadata"

_DTYPES = {f"torch.{name}": getattr(torch, name) for name in ITEM_BYTES}
_RECORDS = ("Metadata", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
_ALLOWED = {
    **{f"{metadata.__name__}.{name}": getattr(metadata, name) for name in _RECORDS},
    **{
        f"{metadata.__name__}.{name}": getattr(metadata, name)
        for name in ("TensorProperties", "MetadataIndex", "_MEM_FORMAT_ENCODING")
    },
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
        stream = self._tensors[index.fqn]
        whole, done = torch.empty(stream.numel, dtype=stream.dtype), 0
        for block in stream.blocks(index.fqn):
            whole[done : done + block.numel()] = block
            done += block.numel()
        return whole.view(stream.shape)


class _Reader(torch_checkpoint.FileSystemReader):
    """Reads with metadata that was read before, and checked."""

    def __init__(self, folder: Path, found: Any) -> None:
        super().__init__(folder)
        self._found = found

    def read_metadata(self, *_: Any, **__: Any) -> Any:
        return self._found


class _Unpickler(pickle.Unpickler):
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
        with refused_by_the_system(folder), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            torch_checkpoint.save(planned, storage_writer=writer, planner=_Planner(tensors), no_dist=True)
    except torch_checkpoint.CheckpointException as error:
        raise _first(folder, error) from error


def read(folder: Path) -> Source:
    """Find the tensors of a folder, whatever they were cut into.

    Raises:
        CheckpointError: its metadata asks for something else than tensors, or is damaged.
    """
    found = _metadata(folder / METADATA)
    entries = found.state_dict_metadata.items()
    tensors = {name: one for name, one in entries if isinstance(one, metadata.TensorStorageMetadata)}
    streams = {}
    for name, one in tensors.items():
        dtype, shape = one.properties.dtype, tuple(one.size)
        if dtype not in _DTYPES.values():
            raise CheckpointError(f"{folder}: {name!r} is {dtype}, which a checkpoint does not hold")
        streams[name] = Stream.of(dtype, shape, partial(_whole, folder, found, name, dtype, shape))
    return Source(streams, left=tuple(f"{name} (bytes)" for name, _ in entries if name not in tensors))


def _whole(folder: Path, found: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    try:
        values = torch.empty(shape, dtype=dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            torch_checkpoint.load({name: values}, storage_reader=_Reader(folder, found), no_dist=True)
    except torch_checkpoint.CheckpointException as error:
        raise _first(folder, error) from error
    except Exception as error:  # a crafted size or offset may raise anything
        raise _refused(f"{folder}: {name}", error) from error
    return values


def _metadata(path: Path) -> Any:
    with refused_by_the_system(path), path.open("rb") as file:
        try:
            found = _Unpickler(file).load()
            if not isinstance(found, metadata.Metadata) or not isinstance(found.state_dict_metadata, dict):
                raise TypeError("it is no metadata of DCP")
            for info in found.storage_data.values():
                name = info.relative_path
                if type(name) is not str or Path(name).name != name or info.transform_descriptors:
                    raise TypeError(f"{str(name)[:100]!r} is no plain file of this folder")
            found.storage_meta = metadata.StorageMeta()
        except OSError:
            raise
        except Exception as error:  # a damaged or crafted pickle may raise anything
            raise _refused(str(path), error) from error
    return found


def _first(folder: Path, error: Any) -> CheckpointError:
    """What went wrong on the one rank that there is."""
    cause = next(iter(error.failures.values()))[0]
    return cause if isinstance(cause, CheckpointError) else _refused(str(folder), cause)


def _refused(what: str, error: BaseException) -> CheckpointError:
    lines = str(error).strip().splitlines()
    return CheckpointError(f"{what}: refused: {lines[0][:200] if lines else type(error).__name__}; {TRUST}")
