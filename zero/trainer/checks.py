"""Checks of a run's settings that need neither torch nor child processes."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zero.core import suggest
from zero.core.offload import Offload
from zero.errors import ConfigError
from zero.platform import step_folders
from zero.platform.run_files import folders_of, in_memory, takes_files
from zero.trainer import launch
from zero.trainer.config import Config, read
from zero.trainer.data import check_data
from zero.trainer.data.source import SyntheticConfig, TextConfig, TokenisedConfig, TokensConfig
from zero.trainer.models.hf_config import HFConfig

RUNS_NOTHING = ("plan", "doctor", "explain")
"""Modes that only print an answer; they neither train nor evaluate."""


def parse_config(raw: Mapping[str, Any]) -> Config:
    """Return the settings in `raw` after all checks that need neither torch nor child processes.

    Raises:
        ConfigError: a setting is wrong; the message has one line.
        MachineError: launch.device=cuda, and torch, which is then imported, finds no GPU.
    """
    config = read(raw)
    if config.mode in RUNS_NOTHING:
        if isinstance(config.data, TokensConfig):
            config.check_tokens()
        return config
    launch.check_device(config.launch.device)
    config.on(launch.count_ranks(config.launch.ranks, config.launch.device))
    if isinstance(config.model, HFConfig):
        config.model.check()  # first, because the data's tokenizer may be the model's
    check_data(config.source(), config.model.seq, config.val.path)
    config.check_tokens()
    _check_path(config.offload)
    _check_checkpoints(config)
    return config


def notes_on(config: Config) -> list[str]:
    """Return warnings about settings that are probably mistakes."""
    offload = config.offload
    uses_disk = "nvme" in offload.kinds or ("auto" in offload.kinds and offload.path is not None)
    note = in_memory(folders_of(offload.paths)) if uses_disk and config.mode not in ("doctor", "explain") else ""
    starts = launch.notes_on_start(config.launch.device) if config.mode not in RUNS_NOTHING else []
    return [*starts, *([note] if note else []), *_notes_on_validation(config)]


def _notes_on_validation(config: Config) -> Iterator[str]:
    """Yield warnings about validation data that also trains, and about a share for validation that is not used."""
    data, held = config.data, config.val.path
    if held is None or config.mode != "train" or isinstance(data, SyntheticConfig):
        return
    place = Path(held).resolve()
    if isinstance(data, TokenisedConfig):
        sources = [source for _, source in data.sources.values()] or [data]
        trained, parts = [path for source in sources for path in source.places], [place, *place.parents]
    else:  # data.skip may leave out a folder within
        trained, parts = [str(data.root) if isinstance(data, TextConfig) else str(data.path)], [place]
    if any(Path(path).resolve() in parts for path in trained):
        yield f"val.path={held} is training data too, so val/loss is too low. Give other data, or remove val.path."
    if data.holdout != type(data).model_fields["holdout"].default:
        yield f"data.holdout={data.holdout:g} has no effect beside val.path. Remove one of them."


def _check_path(offload: Offload) -> None:
    """Raise ConfigError unless files can be created in each folder of offload.path. The plan checks the free space."""
    if offload.path is None and "nvme" not in offload.kinds:
        return
    for folder in folders_of(offload.paths):
        if not folder.exists():
            raise ConfigError(f"offload.path={folder} does not exist. Give a folder on a fast local disk.")
        if not folder.is_dir():
            raise ConfigError(f"offload.path={folder} is not a folder. Give a folder on a fast local disk.")
        if not takes_files(folder):
            raise ConfigError(f"offload.path={folder} is not writable. Give a folder where this user may write.")


def _check_checkpoints(config: Config) -> None:
    """Raise ConfigError unless the checkpoint to resume exists and checkpoint.dir can be written."""
    words = ("latest", "best", "none")
    if config.resume not in words and not Path(config.resume).exists():
        instead = "" if "/" in config.resume else suggest.meant(config.resume, words)
        instead = instead or ". Give latest, best, or the folder of a step, a run or several."
        raise ConfigError(f"resume={config.resume} does not exist{instead}")
    if config.resume not in words and (nothing := step_folders.missing(Path(config.resume))):
        raise ConfigError(f"resume={nothing}")
    if config.checkpoint.dir is None:
        return
    folder = Path(config.checkpoint.dir)
    inside = folder if os.path.lexists(folder) else folder.absolute().parent
    if not inside.is_dir():
        problem = "is not a folder" if os.path.lexists(inside) else "does not exist"
        problem = problem if inside == folder else f"{inside} {problem}"
        raise ConfigError(f"checkpoint.dir={folder}: {problem}. Give a folder on a disk that all ranks share.")
    if not takes_files(inside):
        raise ConfigError(
            f"checkpoint.dir={folder}: {inside} is not writable. Give a folder where this user may write."
        )
