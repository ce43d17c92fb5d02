"""Safetensors in the layout of Hugging Face: files of limited size, and an index that says what is in which.

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json      {"metadata": {"total_size": .., "ties": {..}}, "weight_map": {name: file}}

Safetensors has no two names for the same bytes, so a tied weight is written once under each of its names: every name
of the model is there, which is what a strict load asks for. `ties` is ours; others leave it alone.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zero.errors import CheckpointError
from zero.formats.stream import Source, Stream, new_file, put
from zero.platform.safetensors_files import INDEX, Part, StoredWeights, header, widest_first

SINGLE = "model.safetensors"


def write(folder: Path, tensors: Mapping[str, Stream], ties: Mapping[str, str], shard_bytes: int) -> None:
    """Write files of at most `shard_bytes` of values each, but for a tensor that is larger by itself.

    Args:
        folder: exists and is empty.
    """
    files = _shared_out(tensors, shard_bytes)
    weight_map = {}
    for number, names in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / name, {key: tensors[key] for key in names})
        weight_map.update(dict.fromkeys(names, name))
    metadata: dict[str, Any] = {"total_size": sum(stream.nbytes for stream in tensors.values())}
    if ties:
        metadata["ties"] = dict(ties)
    with new_file(folder / INDEX) as file:
        file.write(json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True).encode())


def read(path: Path) -> Source:
    """Find the tensors of a folder with an index or a single file, or of one file.

    Raises:
        CheckpointError: no such files, or index and files contradict each other.
    """
    if not path.is_file() and not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            raise CheckpointError(f"{path}: holds neither {INDEX} nor {SINGLE}; give the folder or file that does")
        path /= SINGLE
    found = StoredWeights(path)
    tensors = {
        name: Stream.read_by(found.dtype(name), found.shape(name), partial(found.read, name)) for name in sorted(found)
    }
    return Source(tensors, ties=found.ties)


def _shared_out(tensors: Mapping[str, Stream], shard_bytes: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    filled = 0
    for name, stream in tensors.items():
        if files[-1] and filled + stream.nbytes > shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += stream.nbytes
    return files


def _write_file(path: Path, tensors: Mapping[str, Stream]) -> None:
    parts = widest_first([Part(name, one.dtype, one.shape) for name, one in tensors.items()])
    with new_file(path) as file:
        file.write(header(parts, align_bytes=8, metadata={"format": "pt"}))  # transformers opens no file without it
        for part in parts:
            put(file, tensors[part.key], part.key)
