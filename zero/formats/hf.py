"""Safetensors in the layout of Hugging Face: files of limited size, and an index that says what is in which.

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json      {"metadata": {"total_size": .., "ties": {..}}, "weight_map": {name: file}}

Safetensors has no two names for the same bytes, so a tied weight is written once under each of its names: every name
of the model is there, which is what a strict load asks for. `ties` is ours; others leave it alone.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from zero.checkpoint.shard import NAMES
from zero.errors import CheckpointError, in_short
from zero.formats.stream import Source, Stream, new_file, put, refused_by_the_system

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_DTYPES = {word: dtype for dtype, word in NAMES.items()}


def write(folder: Path, tensors: Mapping[str, Stream], ties: Mapping[str, str], shard_bytes: int) -> int:
    """Write files of at most `shard_bytes` of values each, but for a tensor that is larger by itself.

    Args:
        folder: exists and is empty.

    Returns:
        How many files.
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
    return len(files)


def read(path: Path) -> Source:
    """Find the tensors of a folder with an index or a single file, or of one file.

    Raises:
        CheckpointError: no such files, or index and files contradict each other.
    """
    if path.is_file():
        return Source(_in_file(path))
    if not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            raise CheckpointError(f"{path}: holds neither {INDEX} nor {SINGLE}; give the folder or file that does")
        return Source(_in_file(path / SINGLE))
    weight_map, ties = _index(path / INDEX)
    there = {name: _in_file(path / name) for name in dict.fromkeys(weight_map.values())}
    for name, file in weight_map.items():
        if name not in there[file]:
            raise CheckpointError(f"{path / file}: lacks {name!r}, which {INDEX} says it holds")
    return Source({name: there[file][name] for name, file in weight_map.items()}, ties=ties)


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
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # then each is aligned to its width
    with new_file(path) as file:
        file.write(_header(names, tensors))
        for name in names:
            put(file, tensors[name], name)


def _header(names: Sequence[str], tensors: Mapping[str, Stream]) -> bytes:
    listed: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers opens no file without it
    start = 0
    for name in names:
        one = tensors[name]
        listed[name] = {"dtype": NAMES[one.dtype], "shape": one.shape, "data_offsets": [start, start + one.nbytes]}
        start += one.nbytes
    text = json.dumps(listed, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _index(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Name -> file, and the ties; file names lead nowhere else."""
    try:
        with refused_by_the_system(path):
            body = json.loads(path.read_bytes())
        weight_map, ties = body["weight_map"], body.get("metadata", {}).get("ties", {})
        texts = [text for pair in (*weight_map.items(), *ties.items()) for text in pair]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no index of safetensors ({type(error).__name__})") from error
    if not weight_map or not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"{path}: is no index of safetensors: it maps names to other things than files")
    for name in weight_map.values():
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", name):
            raise CheckpointError(f"{path}: {name!r} is no name of a safetensors file in this folder")
    return weight_map, ties


def _in_file(path: Path) -> dict[str, Stream]:
    """The file is mapped, so that a tensor costs memory only as far as it is read."""
    try:
        with refused_by_the_system(path):
            file = safe_open(path, framework="pt")
        found = {}
        for name in file.keys():  # noqa: SIM118 - no mapping
            told = file.get_slice(name)
            dtype = _DTYPES.get(told.get_dtype())
            if dtype is None:
                raise CheckpointError(f"{path}: {name!r} is {told.get_dtype()}, which a checkpoint does not hold")
            found[name] = Stream.of(dtype, tuple(told.get_shape()), partial(file.get_tensor, name))
    except SafetensorError as error:
        raise CheckpointError(f"{path}: is no whole safetensors file ({in_short(error)})") from error
    return found
