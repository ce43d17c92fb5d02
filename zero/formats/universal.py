"""DeepSpeed's universal checkpoints, as `ds_to_universal.py` of 0.19 writes them.

    zero/<name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt    {"param": values}, or of stage 3 the flat values alone
    *_model_states.pt                                          shapes, ties, buffers, frozen parameters, steps

All are pickles: see `pickled` for what is read of them. Without the last one, what has no moments may be a parameter, a
frozen one or a buffer, and values that are flat stay flat.
"""

import re
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero.checkpoint.contents import BUFFER, FROZEN, PARAMETER
from zero.errors import CheckpointError
from zero.formats.stream import Source, Stream, shape_of
from zero.formats.torch_file import restricted, stream_of

MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
"""Ours and theirs; they have no others."""


def read(folder: Path) -> Source:
    """Find parameters, moments, frozen parameters and buffers.

    Raises:
        CheckpointError: no universal checkpoint, a file that holds other things than tensors, or steps that differ.
    """
    homes = {path.parent.name: path.parent for path in sorted(folder.glob("zero/*/fp32.pt"))}
    if not homes:
        raise CheckpointError(
            f"{folder}: has no zero/<name>/fp32.pt; convert with deepspeed.checkpoint.ds_to_universal first"
        )
    try:
        states = _States(folder)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: its *_model_states.pt do not say what DeepSpeed 0.19's say") from error
    trained = {name: home for name, home in homes.items() if states.may_be_trained(name, home)}
    tensors, moments, kinds = {}, {}, {}
    for name, home in homes.items():
        if name not in states.ties and name not in states.buffers:
            tensors[name] = _stream(home / "fp32.pt", states.shapes.get(name))
            if states.known:
                kinds[name] = PARAMETER if name in trained else FROZEN
    for name, home in trained.items():
        for kind, theirs in MOMENTS.items():
            if (home / f"{theirs}.pt").is_file():
                moments[name, kind] = _stream(home / f"{theirs}.pt", states.shapes.get(name))
    for kind, others in ((FROZEN, states.frozen), (BUFFER, states.buffers)):
        tensors.update({name: stream for name, stream in others.items() if name not in tensors})
        kinds.update(dict.fromkeys(others, kind))
    step = _step(folder, trained)
    return Source(
        tensors,
        ties={name: owner for name, owner in states.ties.items() if owner in tensors},
        moments=moments,
        kinds=kinds,
        step=states.step if step is None else step,
        skipped=states.skipped,
    )


class _States:
    """What the model's files say of the others; empty where there are none."""

    def __init__(self, folder: Path) -> None:
        paths = folder.glob("*_model_states.pt")
        in_rank_order = sorted(paths, key=lambda path: [int(digits) for digits in re.findall(r"\d+", path.name)])
        found = [_mapping(restricted(path, compare=True), path) for path in in_rank_order]
        first: Mapping[str, Any] = found[0] if found else {}
        self.known = bool(first.get("param_shapes"))
        trained = _shapes(folder, *(first.get("param_shapes") or ()))
        frozen = _shapes(folder, first.get("frozen_param_shapes") or {})
        self.trained = set(trained)
        self.shapes = {**frozen, **trained}
        self.ties = {str(name): str(owner) for name, owner in (first.get("shared_params") or {}).items()}
        module = first.get("module") or {}
        names = [name for name in first.get("buffer_names") or () if name in module]
        self.buffers = {name: stream_of(module[name], f"{folder}: {name!r}") for name in names}
        fragments = [one.get("frozen_param_fragments") or {} for one in found]
        self.frozen = {name: _joined(folder, name, shape, fragments) for name, shape in frozen.items()}
        self.skipped = int(first.get("skipped_steps") or 0)
        steps = first.get("global_steps")
        self.step = None if steps is None else int(steps) - self.skipped
        if self.skipped < 0 or (self.step or 0) < 0:
            raise ValueError(f"{self.skipped} of {steps} steps were skipped")

    def may_be_trained(self, name: str, home: Path) -> bool:
        return name in self.trained if self.known else (home / "exp_avg.pt").is_file()


def _shapes(folder: Path, *groups: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: shape_of(shape, f"{folder}: {name!r}") for group in groups for name, shape in group.items()}


def _mapping(value: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, not the states of a model")
    return value


def _stream(path: Path, shape: tuple[int, ...] | None) -> Stream:
    """Opened to see its sizes, and again to be read: a thousand files are not kept open."""
    found = stream_of(_values(path, compare=True), str(path))
    if shape is not None and prod(shape) != found.numel:
        raise CheckpointError(f"{path}: has {found.numel} elements, the model's shape is {shape}")
    return Stream.of(found.dtype, found.shape if shape is None else shape, partial(_values, path))


def _values(path: Path, *, compare: bool = False) -> Tensor:
    value = restricted(path, compare=compare)
    found = value.get("param") if isinstance(value, Mapping) else value
    if not isinstance(found, Tensor):
        raise CheckpointError(f"{path}: holds no tensor, nor one under `param`")
    return found


def _joined(folder: Path, name: str, shape: tuple[int, ...], fragments: list[Mapping[str, Any]]) -> Stream:
    """A frozen parameter of stage 3: each rank's file has a part, and the last is padded to the length of the rest."""
    parts = [stream_of(one[name], f"{folder}: {name!r}").cut for one in fragments if name in one]
    dtypes = {one[name].dtype for one in fragments if name in one}
    found = sum(one[name].numel() for one in fragments if name in one)
    if len(dtypes) != 1:
        raise CheckpointError(f"{folder}: {name!r} is frozen, and no *_model_states.pt has its values in one dtype")
    if not 0 <= found - prod(shape) < len(parts):
        raise CheckpointError(f"{folder}: {name!r} is of shape {shape}, and its parts have {found} elements")

    def whole() -> Tensor:
        return torch.cat([block for cut in parts for block in cut()])[: prod(shape)]

    return Stream.of(dtypes.pop(), shape, whole)


def _step(folder: Path, trained: Mapping[str, Path]) -> int | None:
    try:
        found = {
            int(restricted(home / "step.pt", compare=True)) for home in trained.values() if (home / "step.pt").is_file()
        }
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: a step.pt holds no number") from error
    if len(found) > 1:
        raise CheckpointError(f"{folder}: its parameters are at different steps: {sorted(found)[:5]}; give --step")
    return found.pop() if found else None
