"""Where an engine's checkpoints are: in a folder, or in that of a tag."""

from os import PathLike
from pathlib import Path
from typing import Any

from zero import checkpoint
from zero.checkpoint.load import is_step
from zero.checkpoint.manifest import step_name
from zero.checkpoint.save import told as told_by_all
from zero.world import World


def root_of(folder: str | PathLike[str], tag: str | None) -> Path:
    return Path(folder) if tag is None else Path(folder) / str(tag)


def newest(world: World, folder: Path, *, below: bool) -> tuple[checkpoint.Checkpoint | None, list[str]]:
    """The newest valid checkpoint in `folder`, and `below` in the folders of its tags; why newer ones were rejected."""
    if is_step(folder):
        return checkpoint.open_checkpoint(world, folder), []
    found, notes = checkpoint.open_latest(world, folder)
    if found is not None or not below:
        return found, notes

    def tagged() -> dict[str, Any]:
        tags = [one for one in folder.glob("*") if one.is_dir()] if world.rank == 0 else []
        steps = [(step, str(tag / step_name(step))) for tag in tags for step in checkpoint.Root(tag).steps()]
        return {"newest first": [path for _, path in sorted(steps, reverse=True)]}

    return checkpoint.open_first(world, [Path(path) for path in told_by_all(world, tagged)[0]["newest first"]])
