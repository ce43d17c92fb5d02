"""Read and write safetensors as Hugging Face does: files of limited size, and an index.

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json      {"metadata": {"total_size": .., "ties": {..}}, "weight_map": {name: file}}

A safetensors file cannot have two names for the same bytes. So the values of a tied tensor are written once for each of
its names, because a strict load needs all of them. Other libraries ignore the key `ties`, which this library adds.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zero.errors import CheckpointError
from zero.formats.stream import Stream, TensorSource, new_file, put
from zero.platform.safetensors_files import INDEX, FilePart, StoredWeights, by_width, header

SINGLE = "model.safetensors"


def write(folder: Path, tensors: Mapping[str, Stream], ties: Mapping[str, str], shard_bytes: int) -> None:
    """Write files of at most `shard_bytes` of values each; a larger tensor gets a file of its own.

    Args:
        folder: an existing, empty folder.
        ties: alias of a tied tensor -> name of the tensor; both are in `tensors`.
    """
    files = names_by_file(tensors, shard_bytes)
    weight_map = {}
    for number, names in enumerate(files, 1):
        file_name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_file(folder / file_name, {name: tensors[name] for name in names})
        weight_map.update(dict.fromkeys(names, file_name))
    metadata: dict[str, Any] = {"total_size": sum(stream.nbytes for stream in tensors.values())}
    if ties:
        metadata["ties"] = dict(ties)
    with new_file(folder / INDEX) as file:
        file.write(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True).encode())


def write_file(path: Path, tensors: Mapping[str, Stream]) -> None:
    """Write tensors into one new file."""
    parts = sorted((FilePart(name, stream.dtype, stream.shape) for name, stream in tensors.items()), key=by_width)
    with new_file(path) as file:
        file.write(header(parts, align_bytes=8, metadata={"format": "pt"}))  # transformers requires this metadata
        for part in parts:
            put(file, tensors[part.key], part.key)


def read(path: Path) -> TensorSource:
    """Return the tensors of a file, or of a folder with an index or a single file; their values are read later.

    Raises:
        CheckpointError: there are no such files, or index and files contradict each other.
    """
    if not path.is_file() and not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            raise CheckpointError(f"{path}: has neither {INDEX} nor {SINGLE}. Give a folder that has one, or a file.")
        path /= SINGLE
    stored = StoredWeights(path)
    tensors = {
        name: Stream.read_by(stored.dtype(name), stored.shape(name), partial(stored.read, name))
        for name in sorted(stored)
    }
    return TensorSource(tensors, ties=stored.ties)


def names_by_file(tensors: Mapping[str, Stream], shard_bytes: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    filled = 0
    for name, stream in tensors.items():
        if files[-1] and filled + stream.nbytes > shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += stream.nbytes
    return files
