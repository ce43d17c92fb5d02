"""DeepSpeed's functions that read full fp32 weights from a checkpoint, in one process, however many ranks saved it."""

from os import PathLike
from pathlib import Path

from torch import Tensor, nn

from zero.checkpoint import Checkpoint
from zero.distributed.world import World
from zero.errors import CheckpointError, ConfigError
from zero.formats.exports import export_checkpoint, whole_parameters
from zero.user_loop.checkpoints import open_saved
from zero.user_loop.full_models import folder_of


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return fp32 parameters and buffers of a checkpoint on the CPU, tied ones under each of their names.

    Args:
        checkpoint_dir: the `save_dir` of `engine.save_checkpoint`.
        tag: the folder in `checkpoint_dir`; None: the checkpoint that its file `latest` names.
        exclude_frozen_parameters: leave out parameters that were not trained.
        lazy_mode: ignored, for compatibility with DeepSpeed.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    return whole_parameters(_open(checkpoint_dir, tag), frozen=not exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load the values of a checkpoint into `model`, and return `model`.

    Args:
        model: the model, on any device; values that the checkpoint lacks are not changed.
        checkpoint_dir, tag: as for `get_fp32_state_dict_from_zero_checkpoint`.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    values = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.load_state_dict(values, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | PathLike[str],
    output_dir: str | PathLike[str],
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
) -> None:
    """Write the fp32 weights of a checkpoint to a folder, as `pytorch_model.bin` or as safetensors.

    Args:
        checkpoint_dir, tag: as for `get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: the folder to write.
        max_shard_size: must be "5GB" or None; `zero-train export --shard-size` writes other sizes.
        safe_serialization: write safetensors.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigError: `max_shard_size` is another size, or the files exist.
    """
    if max_shard_size not in ("5GB", None):
        raise ConfigError(f"max_shard_size={max_shard_size!r} is not supported. Use zero-train export --shard-size.")
    opened, folder = _open(checkpoint_dir, tag), Path(output_dir)
    if safe_serialization:
        export_checkpoint(opened, "hf", folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    export_checkpoint(opened, "torch", folder / "pytorch_model.bin")


def _open(folder: str | PathLike[str], tag: str | None) -> Checkpoint:
    opened, _ = open_saved(World.solo(), folder, tag)
    if opened is None:
        raise CheckpointError(f"{folder_of(folder, tag)}: there is no checkpoint. Pass save_dir of save_checkpoint.")
    return opened
