"""Export a checkpoint to other formats: full parameters and buffers, under every name of the model.

Values go from the checkpoint's files through their CRC-32 into the new file, a block of a tensor at a time. What is
written appears under its name when it is complete.
"""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zero.checkpoint import Checkpoint, Tensors, open_at, weights_of
from zero.checkpoint.contents import BUFFER, FROZEN, PARAMETER
from zero.checkpoint.manifest import Entry
from zero.distributed.world import SoloWorld
from zero.errors import CheckpointError, ConfigError
from zero.formats.hf import write as write_hf
from zero.formats.stream import Stream, counted
from zero.formats.torch_file import write as write_torch
from zero.platform.files import naming
from zero.progress import Progress, silent

FORMATS = ("hf", "torch", "dcp")


class Exported(NamedTuple):
    """What was written: names, bytes of their values, and further name -> name for what is tied."""

    tensors: int
    nbytes: int
    ties: Mapping[str, str]


def open_newest(path: Path, progress: Progress = silent) -> tuple[Checkpoint, list[str]]:
    """A step as it is; of a run or a folder of checkpoints, the newest valid one, and why newer ones were rejected.

    Raises:
        CheckpointError: there is none, or only damaged ones.
    """
    return open_at(SoloWorld(), path, progress)


def export_checkpoint(
    checkpoint: Checkpoint,
    to: str,
    out: Path,
    *,
    dtype: torch.dtype = torch.float32,
    weights: str = PARAMETER,
    shard_bytes: int = 5 * 10**9,
    progress: Progress = silent,
) -> Exported:
    """Write parameters and buffers.

    Args:
        to: "hf" and "dcp" make a folder, "torch" a file.
        out: does not exist; its parent does.
        dtype: of the parameters, frozen ones too; buffers keep their own.
        weights: "ema" for the running mean of the parameters in their place; frozen ones are as they are.
        shard_bytes: of values in one file of "hf".
        progress: called with the bytes of values that are read; a tie counts for each of its names, for "torch" once.

    Raises:
        CheckpointError: damage, no such `weights`, values that `dtype` has no room for, or what the system refuses;
            nothing is left.
        ConfigError: an unknown format, or `out` exists.
    """
    if to not in FORMATS:
        raise ConfigError(f"--to {to}; known: {', '.join(FORMATS)}")
    if os.path.lexists(out):
        raise ConfigError(f"--out {out}: exists; give a name that does not")
    with Tensors(checkpoint) as files, _appearing(out, folder=to != "torch") as unfinished:
        tensors, ties = _streams(checkpoint, files, dtype, weights_of(checkpoint, weights))
        written = [name for name in tensors if to != "torch" or name not in ties]  # torch's format has ties itself
        watched = counted([tensors[name] for name in written], "exporting", progress)
        tensors |= dict(zip(written, watched, strict=True))
        if to == "hf":
            write_hf(unfinished, tensors, ties, shard_bytes)
        elif to == "torch":
            write_torch(unfinished, tensors, ties)
        else:
            from zero.formats.dcp import write as write_dcp  # half a second and 50 MB, for this format alone

            write_dcp(unfinished, tensors)
    return Exported(len(tensors), sum(stream.nbytes for stream in tensors.values()), ties)


def whole(checkpoint: Checkpoint, *, frozen: bool = True) -> dict[str, Tensor]:
    """Parameters in fp32 and buffers in memory, under every name of the model; what is tied is one tensor.

    Args:
        frozen: with the parameters that nothing trained.
    """
    left = set() if frozen else {one.name for one in checkpoint.manifest.entries if one.kind == FROZEN}
    with Tensors(checkpoint) as files:
        streams, ties = _streams(checkpoint, files, torch.float32, weights_of(checkpoint, PARAMETER))
        names = [name for name in streams if ties.get(name, name) not in left]
        values = {name: streams[name].whole(name) for name in names if name not in ties}
    return {name: values[ties.get(name, name)] for name in names}


def _streams(
    checkpoint: Checkpoint, files: Tensors, dtype: torch.dtype, trained: Mapping[str, Entry]
) -> tuple[dict[str, Stream], dict[str, str]]:
    """Every name of the model, and which of them are further names of others."""
    found = {}
    for one in checkpoint.manifest.entries:
        if one.kind in (PARAMETER, FROZEN, BUFFER):
            entry = trained.get(one.name, one) if one.kind == PARAMETER else one
            stream = Stream.read_by(getattr(torch, entry.dtype), entry.shape, partial(files.read, entry))
            found[entry.name] = stream if entry.kind == BUFFER else stream.to(dtype, entry.name)
    saved_ties = checkpoint.manifest.facts.get("ties", {})
    if not isinstance(saved_ties, dict) or not all(
        isinstance(owner, str) and owner in found for owner in saved_ties.values()
    ):
        raise CheckpointError(f"{checkpoint.folder}: its manifest ties names to tensors that it does not hold")
    ties = {name: owner for name, owner in saved_ties.items() if name not in found}
    return {**found, **{name: found[owner] for name, owner in ties.items()}}, ties


@contextlib.contextmanager
def _appearing(out: Path, *, folder: bool) -> Iterator[Path]:
    """Where to write; it gets its name when the block ends well, and is removed when it does not."""
    unfinished = out.with_name(f".{out.name[:100]}.{secrets.token_hex(8)}")
    try:
        with naming(out):
            if folder:
                unfinished.mkdir()
        yield unfinished
        with naming(out):
            os.rename(unfinished, out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.unlink(missing_ok=True)
        raise
