"""Read DeepSpeed's universal checkpoints, as `ds_to_universal.py` of 0.19 writes them.

    zero/<name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt    {"param": values}, or at stage 3 the flat values alone
    *_model_states.pt                                          shapes, ties, buffers, frozen parameters, steps

All files are pickles; `torch_file.restricted` reads them.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero.checkpoint.contents import BUFFER, FROZEN, PARAMETER
from zero.errors import CheckpointError
from zero.formats.stream import Stream, TensorSource, shape_in
from zero.formats.torch_file import restricted, stream_of

MOMENT_FILES = {"mu": "exp_avg", "nu": "exp_avg_sq"}
"""This library's name of a moment -> DeepSpeed's name."""

MALFORMED = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError)


def read(folder: Path) -> TensorSource:
    """Return the parameters, moments, frozen parameters and buffers of a folder; their values are read later.

    Raises:
        CheckpointError: the folder is not a universal checkpoint, or a file has objects that are not allowed.
    """
    homes = {path.parent.name: path.parent for path in sorted(folder.glob("zero/*/fp32.pt"))}
    states = _states(folder)
    if not homes or not states:
        lacking = "*_model_states.pt" if homes else "zero/<name>/fp32.pt"
        raise CheckpointError(
            f"{folder}: has no {lacking}. Convert it with deepspeed.checkpoint.ds_to_universal first."
        )
    first = states[0]
    try:
        trained_shapes = _shapes(folder, *first["param_shapes"])
        frozen_shapes = _shapes(folder, first.get("frozen_param_shapes") or {})
        ties = {str(name): str(owner) for name, owner in (first.get("shared_params") or {}).items()}
        buffers = _buffers(folder, first)
        fragments = [state.get("frozen_param_fragments") or {} for state in states]
        frozen = {name: _joined(folder, name, shape, fragments) for name, shape in frozen_shapes.items()}
        steps, skipped = first.get("global_steps"), int(first.get("skipped_steps") or 0)
        stated = None if steps is None else int(steps) - skipped
        if skipped < 0 or (stated or 0) < 0:
            raise ValueError(f"{skipped} of {steps} steps were skipped")
    except MALFORMED as error:
        raise CheckpointError(f"{folder}: its *_model_states.pt are not those of DeepSpeed 0.19") from error
    shapes = {**frozen_shapes, **trained_shapes}
    trained = {name: home for name, home in homes.items() if name in trained_shapes}
    tensors, moments, kinds = {}, {}, {}
    for name, home in homes.items():
        if name not in ties and name not in buffers:
            tensors[name] = _stream(home / "fp32.pt", shapes.get(name))
            kinds[name] = PARAMETER if name in trained else FROZEN
    for name, home in trained.items():
        for kind, theirs in MOMENT_FILES.items():
            if (home / f"{theirs}.pt").is_file():
                moments[name, kind] = _stream(home / f"{theirs}.pt", shapes[name])
    for kind, others in ((FROZEN, frozen), (BUFFER, buffers)):
        tensors.update({name: stream for name, stream in others.items() if name not in tensors})
        kinds.update(dict.fromkeys(others, kind))
    counts = _updates(folder, trained)
    step = max(counts.values(), default=stated)
    updates = {name: count for name, count in counts.items() if count != step}
    ties = {name: owner for name, owner in ties.items() if owner in tensors}
    return TensorSource(tensors, ties, moments, kinds, step=step, updates=updates, skipped=skipped)


def _states(folder: Path) -> list[Mapping[str, Any]]:
    """Return the contents of the *_model_states.pt files, in rank order."""
    states = []
    for path in sorted(
        folder.glob("*_model_states.pt"), key=lambda path: [int(n) for n in re.findall(r"\d+", path.name)]
    ):
        state = restricted(path, compare=True)
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{path}: holds a {type(state).__name__}, not the states of a model")
        states.append(state)
    return states


def _shapes(folder: Path, *groups: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: shape_in(shape, f"{folder}: {name!r}") for group in groups for name, shape in group.items()}


def _buffers(folder: Path, state: Mapping[str, Any]) -> dict[str, Stream]:
    module = state.get("module") or {}
    names = [name for name in state.get("buffer_names") or () if name in module]
    return {name: stream_of(module[name], f"{folder}: {name!r}") for name in names}


def _stream(path: Path, shape: tuple[int, ...] | None) -> Stream:
    """Check a file and return a stream that opens the file again to read it, so that 1,000 files do not stay open."""
    stream = stream_of(_values(path, compare=True), str(path))
    if shape is not None and prod(shape) != stream.numel:
        raise CheckpointError(f"{path}: has {stream.numel} elements, the model's shape is {shape}")
    return Stream.of(stream.dtype, stream.shape if shape is None else shape, partial(_values, path))


def _values(path: Path, *, compare: bool = False) -> Tensor:
    value = restricted(path, compare=compare)
    tensor = value.get("param") if isinstance(value, Mapping) else value
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"{path}: holds no tensor, nor one under `param`")
    return tensor


def _joined(folder: Path, name: str, shape: tuple[int, ...], fragments: Sequence[Mapping[str, Any]]) -> Stream:
    """Return the values of a parameter that is frozen at stage 3: the parts in the ranks' files, without padding.

    Args:
        fragments: name -> this parameter's part, for each rank; the last part is padded.
    """
    parts = [fragment[name] for fragment in fragments if name in fragment]
    streams = [stream_of(part, f"{folder}: {name!r}") for part in parts]
    numel = sum(stream.numel for stream in streams)
    if len({stream.dtype for stream in streams}) != 1:
        raise CheckpointError(f"{folder}: {name!r} is frozen, and no *_model_states.pt has its values in one dtype")
    if not 0 <= numel - prod(shape) < len(parts):
        raise CheckpointError(f"{folder}: {name!r} is of shape {shape}, and its parts have {numel} elements")
    return Stream.of(streams[0].dtype, shape, lambda: torch.cat([part.flatten() for part in parts])[: prod(shape)])


def _updates(folder: Path, trained: Mapping[str, Path]) -> dict[str, int]:
    """Return the number of updates of each parameter that has a step.pt."""
    paths = {name: home / "step.pt" for name, home in trained.items()}
    try:
        return {name: int(restricted(path, compare=True)) for name, path in paths.items() if path.is_file()}
    except MALFORMED as error:
        raise CheckpointError(f"{folder}: a step.pt holds no number") from error
