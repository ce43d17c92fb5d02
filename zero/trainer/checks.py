"""From plain settings to a `Config`, refused as far as possible without torch, a process or a folder."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero.core import suggest
from zero.core.placement import Offload
from zero.errors import ConfigError
from zero.platform import step_folders
from zero.platform.run_files import folders_of, in_memory, takes_files
from zero.trainer import launch
from zero.trainer.config import Config, read
from zero.trainer.data import check_data
from zero.trainer.data.source import TokensConfig
from zero.trainer.models.hf_config import HFConfig

RUNS_NOTHING = ("plan", "doctor", "explain")
"""Modes that print an answer."""

RANKS_PER_CORE = 4
"""Above this limit a run warns, because ranks start slowly and take much memory."""

START_S, START_MIB = 2.5, 250
"""Core seconds and MiB that a rank takes to import torch, measured with torch 2.13 for CPUs."""


def parse_config(raw: Mapping[str, Any]) -> Config:
    """Everything that can be refused without torch, a process or a folder.

    Raises:
        ConfigError: one line.
    """
    config = read(raw)
    if config.mode in RUNS_NOTHING:  # nothing is run, and a doctor is asked because something may be wrong
        if isinstance(config.data, TokensConfig):
            config.check_tokens()
        return config
    config.on(launch.count_ranks(config.launch.ranks, config.launch.device))
    if isinstance(config.model, HFConfig):
        config.model.check()  # before the data, whose tokenizer may be the model's
    check_data(config.source(), config.model.seq)
    config.check_tokens()
    _check_path(config.offload)
    _check_checkpoints(config)
    return config


def notes_on(config: Config) -> list[str]:
    """Settings that are accepted and probably mistakes."""
    offload = config.offload
    uses_disk = "nvme" in offload.kinds or ("auto" in offload.kinds and offload.path is not None)
    notes = [in_memory(folders_of(offload.paths)) if uses_disk and config.mode not in ("doctor", "explain") else ""]
    if config.mode not in RUNS_NOTHING:
        notes.append(_crowded(config.launch.ranks))
    return [note for note in notes if note]


def _crowded(ranks: int | str) -> str:
    """A warning about more ranks than a machine starts within seconds; "" where there are fewer."""
    cores = launch.cores()
    if ranks == "auto" or int(ranks) <= RANKS_PER_CORE * cores or launch.under_torchrun():
        return ""
    return (
        f"launch.ranks={ranks} on {cores} core{'s' * (cores != 1)}: to start, each rank takes about {START_S:g} s of a "
        f"core and {START_MIB} MiB; at most launch.ranks={RANKS_PER_CORE * cores} start here within seconds"
    )


def _check_path(offload: Offload) -> None:
    """Whether a file can be made where it is wanted. Whether it has room there is known with the plan."""
    if offload.path is None and "nvme" not in offload.kinds:
        return
    for folder in folders_of(offload.paths):
        if not folder.exists():
            raise ConfigError(f"offload.path={folder} does not exist; give a folder on a fast local disk")
        if not folder.is_dir():
            raise ConfigError(f"offload.path={folder} is not a folder; give the folder that the file is to be made in")
        if not takes_files(folder):
            raise ConfigError(f"offload.path={folder} is not writable; give a folder where this user may make a file")


def _check_checkpoints(config: Config) -> None:
    """Whether there is something to go on from, and whether a checkpoint can be made where it is wanted."""
    if config.resume not in ("none", "latest") and not Path(config.resume).expanduser().exists():
        instead = "" if "/" in config.resume else suggest.meant(config.resume, ("latest", "none"))
        instead = instead or "; give latest, or the folder of a step, a run or several"
        raise ConfigError(f"resume={config.resume} does not exist{instead}")
    if config.resume not in ("none", "latest") and (nothing := step_folders.missing(Path(config.resume).expanduser())):
        raise ConfigError(f"resume={nothing}")
    if config.checkpoint.dir is None:
        return
    folder = Path(config.checkpoint.dir).expanduser()
    inside = folder if os.path.lexists(folder) else folder.absolute().parent
    if not inside.is_dir():
        what = "is not a folder" if os.path.lexists(inside) else "does not exist"
        what = what if inside == folder else f"{inside} {what}"
        raise ConfigError(f"checkpoint.dir={folder}: {what}; give a folder on a disk that all ranks share")
    if not takes_files(inside):
        raise ConfigError(f"checkpoint.dir={folder}: {inside} is not writable; give a folder where this user may write")
