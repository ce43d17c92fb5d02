"""Export a checkpoint to other formats: full parameters and buffers, under every name in the model's state dict.

Values are read block by block, and their CRC-32 is compared. The new file or folder is written under a temporary name
and renamed when it is complete.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from zero.checkpoint import Checkpoint, Listing, Tensors, open_at, shape_of, weights_of
from zero.checkpoint.contents import BUFFER, PARAMETER, weight_kinds
from zero.checkpoint.format.manifest import Entry
from zero.core import checks
from zero.core.formats import PACKED_FORMATS
from zero.core.master import rounded
from zero.core.suggest import some
from zero.distributed.world import World
from zero.errors import CheckpointError, ConfigError
from zero.formats.adapter import names_of_peft, refuse_adapters, write as write_adapter
from zero.formats.safetensors_folder import write as write_hf
from zero.formats.stream import Stream, counted
from zero.formats.torch_file import write as write_torch
from zero.platform.files import appearing, naming
from zero.platform.step_folders import is_step
from zero.progress import Progress, silent

EXPORT_FORMATS = ("hf", "torch", "dcp", "peft")


class Exported(NamedTuple):
    """Summary of an export.

    Attributes:
        tensors: number of names of tensors written; each name of a tied tensor counts.
        nbytes: bytes of their values; a tied tensor counts for each of its names.
        ties: alias of a tied tensor -> name under which the checkpoint has it.
    """

    tensors: int
    nbytes: int
    ties: Mapping[str, str]


def open_newest(path: str | PathLike[str], progress: Progress = silent) -> tuple[Checkpoint, list[str]]:
    """Open `path` if it is one checkpoint, else the newest valid checkpoint of that run or folder of checkpoints.

    Returns:
        The checkpoint, and a line about each newer checkpoint that is not valid.

    Raises:
        CheckpointError: there is no valid checkpoint; the message names others beside a damaged one.
    """
    checks.instance("path", path, str | PathLike, "Pass the folder of a checkpoint or of a run.")
    try:
        return open_at(World.solo(), Path(path), progress)
    except CheckpointError as error:
        step = Path(path)
        others = [folder.name for folder in Listing(step.parent).folders().values() if folder.name != step.name]
        if not (is_step(step) and others):
            raise
        problem = str(error).removesuffix(".")
        raise CheckpointError(f"{problem}. Other checkpoints beside it: {some(others[::-1])}.") from error


def export_checkpoint(
    checkpoint: Checkpoint,
    to: str,
    out: str | PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    weights: str = PARAMETER,
    shard_bytes: int = 5 * 10**9,
    adapter: Mapping[str, object] = MappingProxyType({}),
    complete: Callable[[Path], None] = lambda folder: None,
    progress: Progress = silent,
) -> Exported:
    """Write the parameters and buffers of a checkpoint in another format.

    Args:
        to: "hf", "dcp" or "peft" (the adapter alone), which make a folder, or "torch", which makes a file.
        out: path of the new folder or file; it must not exist, but its parent must.
        dtype: dtype of all parameters, frozen ones included. Buffers keep their dtype.
        weights: "ema" to write the exponential moving average of the trained parameters in place of the parameters.
        shard_bytes: maximum bytes of values in one file of "hf".
        adapter: peft's settings for "peft", such as r and lora_alpha; without them there is no adapter_config.json.
        complete: called with a new folder before any tensor is written, to write other files into it.
        progress: called with the number of bytes of values that were read. A tied tensor counts for each of its names,
            for "torch" once.

    Raises:
        CheckpointError: the checkpoint is damaged or has no such `weights`, `dtype` cannot represent a value, or a file
            call failed. Nothing is left of the export.
        ConfigError: the format is unknown, `out` exists, an adapter is trained for "hf", or for "peft" there is none or
            other parameters are trained.
    """
    checks.instance("checkpoint", checkpoint, Checkpoint, "Pass zero.formats.open_newest(folder)[0].")
    checks.instance("dtype", dtype, torch.dtype, "Pass torch.bfloat16.")
    out = Path(checks.instance("out", out, str | PathLike, "Pass the path of a new folder or file."))
    if to not in EXPORT_FORMATS:
        raise ConfigError(f"--to {to} does not exist. Choose from {', '.join(EXPORT_FORMATS)}.")
    if os.path.lexists(out):
        raise ConfigError(f"--out {out}: exists already. Give another name.")
    with Tensors(checkpoint) as files, naming(out), appearing(out) as unfinished:
        if to != "torch":
            unfinished.mkdir()
            complete(unfinished)
        tensors, ties = _streams(checkpoint, files, dtype, weights_of(checkpoint, weights))
        trained = [entry.name for entry in checkpoint.manifest.entries if entry.kind == PARAMETER]
        if to == "hf":
            refuse_adapters(trained)
        elif to == "peft":
            tensors, ties = names_of_peft(tensors, trained), {}
        written = [name for name in tensors if to != "torch" or name not in ties]  # torch.save's format stores ties
        watched = counted([tensors[name] for name in written], "exporting", progress)
        tensors |= dict(zip(written, watched, strict=True))
        if to == "hf":
            write_hf(unfinished, tensors, ties, shard_bytes)
        elif to == "peft":
            write_adapter(unfinished, tensors, adapter)
        elif to == "torch":
            write_torch(unfinished, tensors, ties)
        else:
            from zero.formats.dcp import write as write_dcp  # here, because the import takes 0.5 s and 50 MB

            write_dcp(unfinished, tensors)
    return Exported(len(tensors), sum(stream.nbytes for stream in tensors.values()), ties)


def whole_parameters(checkpoint: Checkpoint, *, frozen: bool = True) -> dict[str, Tensor]:
    """Return all parameters, in fp32, and buffers by name. The names of a tied tensor share one tensor.

    Args:
        frozen: include frozen parameters.
    """
    left = (
        set()
        if frozen
        else {entry.name for entry in checkpoint.manifest.entries if entry.kind in weight_kinds() - {PARAMETER}}
    )
    with Tensors(checkpoint) as files:
        streams, ties = _streams(checkpoint, files, torch.float32, weights_of(checkpoint, PARAMETER))
        names = [name for name in streams if ties.get(name, name) not in left]
        values = {name: streams[name].whole(name) for name in names if name not in ties}
    return {name: values[ties.get(name, name)] for name in names}


def _streams(
    checkpoint: Checkpoint, files: Tensors, dtype: torch.dtype, trained: Mapping[str, Entry]
) -> tuple[dict[str, Stream], dict[str, str]]:
    """Return name -> stream of values for every name in the model, and alias -> saved name of tied tensors.

    Args:
        files: the open checkpoint, from which the streams read.
        dtype: dtype of the parameters in the streams.
        trained: entries to read in place of the parameters of the same names.
    """
    streams = {}
    for entry in checkpoint.manifest.entries:
        if entry.kind in {*weight_kinds(), BUFFER}:
            entry = trained.get(entry.name, entry) if entry.kind == PARAMETER else entry
            shape = shape_of(checkpoint, entry)
            cast: Callable[[Tensor, torch.dtype], Tensor] = rounded
            stream = Stream.read_by(getattr(torch, entry.dtype), shape, partial(files.read, entry))
            if entry.kind in PACKED_FORMATS:
                read = PACKED_FORMATS[entry.kind].values_of(partial(files.read, entry), prod(shape))
                stream, cast = Stream.read_by(torch.float32, shape, read), Tensor.to  # rounds as a gather does
            streams[entry.name] = stream if entry.kind == BUFFER else stream.to(dtype, entry.name, cast)
    ties = checkpoint.manifest.facts.get("ties", {})
    if not isinstance(ties, dict) or not all(isinstance(owner, str) and owner in streams for owner in ties.values()):
        raise CheckpointError(f"{checkpoint.folder}: its manifest ties names to tensors that it does not hold")
    ties = {name: owner for name, owner in ties.items() if name not in streams}
    return {**streams, **{name: streams[owner] for name, owner in ties.items()}}, ties
