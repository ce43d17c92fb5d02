"""Whole fp32 weights out of a checkpoint, by the names of DeepSpeed's `zero_to_fp32`.

One process is enough, however many ranks have saved; `scripts/export` does the same for a shell.
"""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zero.checkpoint import Checkpoint, newest
from zero.distributed.world import SoloWorld
from zero.errors import CheckpointError, ConfigError
from zero.formats.export_checkpoint import export, whole


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Parameters in fp32 and buffers, under every name of the model, on the CPU.

    Args:
        tag: None: the newest checkpoint of all tags.
        lazy_mode: for old calls, which say `.contiguous()` to every value; a tensor has that, too.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return whole(_newest(checkpoint_dir, tag), frozen=not exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | PathLike[str], tag: str | None = None
) -> nn.Module:
    """The model with these values, on the device that it is on; what the checkpoint lacks stays as it is."""
    values: Mapping[str, Any] = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.load_state_dict(values, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | PathLike[str],
    output_dir: str | PathLike[str],
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write `pytorch_model.bin` in `output_dir`, one file; or with `safe_serialization` that folder, as safetensors.

    Raises:
        ConfigError: files of another size, or without the frozen parameters; or what is to be written exists.
    """
    if exclude_frozen_parameters or max_shard_size not in ("5GB", None):
        raise ConfigError(
            "convert_zero_checkpoint_to_fp32_state_dict: for max_shard_size= see scripts/export --shard-size; "
            "exclude_frozen_parameters= is an argument of get_fp32_state_dict_from_zero_checkpoint alone"
        )
    found, folder = _newest(checkpoint_dir, tag), Path(output_dir)
    if safe_serialization:
        export(found, "hf", folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    export(found, "torch", folder / "pytorch_model.bin")


def _newest(folder: str | PathLike[str], tag: str | None) -> Checkpoint:
    root = Path(folder) if tag is None else Path(folder) / tag
    found, _ = newest(SoloWorld(), root, below=tag is None)
    if found is None:
        raise CheckpointError(
            f"{root}: there is no checkpoint; give the folder that engine.save_checkpoint was given; one of "
            "DeepSpeed's is read by its own zero_to_fp32, or comes here by scripts/import --from deepspeed"
        )
    return found
