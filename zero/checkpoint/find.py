"""Find the newest valid checkpoint in a folder.

The newest checkpoint was published last, even if a run went back and the checkpoint's step is not the largest. A
checkpoint that is not valid is rejected with a message, and the checkpoint before it is opened.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero.checkpoint.agreement import by_rank_0
from zero.checkpoint.files.listing import Listing, parts_in, read_manifest
from zero.checkpoint.files.publish import own_root
from zero.checkpoint.format.facts import lineage_of
from zero.checkpoint.open import open_checkpoint
from zero.checkpoint.tensors import Checkpoint
from zero.core.suggest import some
from zero.distributed.world import World
from zero.engine.arguments import check_folder, check_type
from zero.errors import CheckpointError
from zero.platform.step_folders import is_step, missing, root_at
from zero.progress import Progress, silent


def open_latest(world: World, path: Path | str, *, progress: Progress = silent) -> tuple[Checkpoint | None, list[str]]:
    """Open the valid checkpoint under `path` that was published last. Collective.

    That checkpoint may have fewer steps than others, because the run went back to an earlier one. Checkpoints of
    earlier versions count as older than all others, in the order of their steps. With coordinates the call is
    collective among all ranks of the run, and each rank opens the newest step that all have.

    Args:
        world: the ranks that divide the verification among themselves.
        path: the folder of checkpoints, the `root` of `save`; or one checkpoint.
        progress: called with the number of bytes that this rank has verified.

    Returns:
        (checkpoint, rejected): the newest valid checkpoint, or None if `path` has no checkpoints; and a line about each
        newer checkpoint that is not valid.

    Raises:
        ConfigError: `world` is not a World, or `path` not a path.
        CheckpointError: there are checkpoints, but none is valid, or none has the world's coordinates, or they are of
            runs that did not continue from one another.
    """
    check_type(world, World, "zero.open_latest", "checkpoint, rejected = zero.open_latest(world, folder)")
    check_folder(path, "zero.open_latest", "checkpoint, rejected = zero.open_latest(world, folder)")
    if world.coordinates:
        folders = _common_folders(world, own_root(Path(path), world).path)
        opened = open_first(world, folders, progress=progress)
    else:
        opened = newest(world, Path(path), progress=progress)
    if opened[0] is None and (parts := by_rank_0(world, lambda: parts_in(Path(path)))):
        raise CheckpointError(
            f"{path}: has checkpoints in {some(parts)}, of other coordinates than {dict(world.coordinates)}. Open the "
            "world with their dimensions, or train anew in another folder."
        )
    return opened


def _common_folders(world: World, root: Path) -> list[Path]:
    """Return the folders of the steps that all coordinates have saved, the last published first.

    Collective among all ranks of the run.

    Args:
        root: the checkpoints of this world's coordinates.

    Raises:
        CheckpointError: the parent of `root` is one checkpoint or holds some itself, or no step was saved by all
            coordinates.
    """
    path = root.parent

    def listed() -> dict[str, Any]:
        try:
            if is_step(path) or Listing(path).steps():
                raise CheckpointError(f"{path}: is of one coordinate or of none. Pass the folder that zero.save got.")
            return {"folders": {step: str(folder) for step, folder in published_last([root])}}  # keys become texts
        except CheckpointError as error:  # raised after the collective, because other coordinates wait in it
            return {"error": str(error)}

    own = by_rank_0(world, listed)
    every = [json.loads(text) for text in world.whole.gather_texts(json.dumps(own), "steps of checkpoints")]
    for report in every:
        if "error" in report:
            raise CheckpointError(report["error"])
    common = set.intersection(*(set(report["folders"]) for report in every))
    if any(report["folders"] for report in every) and not common:
        raise CheckpointError(f"{path}: no step was saved by all ranks. Restore one, or train anew in another folder.")
    return [Path(own["folders"][step]) for step in every[0]["folders"] if step in common]


def published_last(roots: Iterable[Path], *, mixed: bool = False) -> list[tuple[int, Path]]:
    """Return step and folder of all checkpoints in `roots`, the last published first.

    Checkpoints without a lineage follow all others, sorted by their steps. A checkpoint whose manifest cannot be read
    counts as published after the checkpoint before it in its root, so that it is opened and rejected with a message.

    Args:
        mixed: allow checkpoints of several lineages.

    Raises:
        CheckpointError: there are checkpoints of several lineages.
    """
    order: list[tuple[int, int, Path]] = []
    newest = dict[str, tuple[int, int, Path]]()
    for root in roots:
        saved_ns = 0
        for step, folder in Listing(root).folders().items():
            try:
                lineage = lineage_of(folder, read_manifest(folder))
            except CheckpointError:
                lineage = None
            else:
                saved_ns = 0 if lineage is None else lineage.saved_ns
            order.append((saved_ns, step, folder))
            if lineage is not None:
                newest[lineage.name] = max(order[-1], newest.get(lineage.name, order[-1]))
    if len(newest) > 1 and not mixed:
        (*_, last), (*_, other), *_ = sorted(newest.values(), reverse=True)
        raise CheckpointError(
            f"{last} and {other}: two runs saved them, and neither continued from the other. Open one of the two, or "
            "move the checkpoints of one run to another folder."
        )
    return [(step, folder) for _, step, folder in sorted(order, reverse=True)]


def open_first(
    world: World, folders: Sequence[Path], *, suspect: Mapping[Path, str] | None = None, progress: Progress = silent
) -> tuple[Checkpoint | None, list[str]]:
    """Open the first valid checkpoint of `folders`; also return a line about each one rejected before it. Collective.

    Args:
        folders: the newest first; the same list on every rank.
        suspect: folder -> the reason to reject it without reading it.

    Raises:
        CheckpointError: there are folders, but none is a valid checkpoint.
    """
    rejected: list[str] = []
    for folder in folders:
        if suspect and folder in suspect:
            rejected.append(f"{folder}: {suspect[folder]}")
            continue
        checkpoint, fault = None, ""
        try:
            checkpoint = open_checkpoint(world, folder, progress=progress)
        except CheckpointError as error:
            fault = str(error)
        if world.coordinates:  # damaged on one is rejected by all
            number = "" if checkpoint is None else checkpoint.manifest.facts.get("save")
            texts = world.whole.gather_texts(json.dumps([fault, number]), "reports of a checkpoint")
            faults, numbers = zip(*map(json.loads, texts), strict=True)
            mixed = f"{folder}: other coordinates hold another save of this step" if len({*numbers}) > 1 else ""
            fault = next(filter(None, faults), mixed)
        if checkpoint is not None and not fault:
            return checkpoint, rejected
        rejected.append(fault)
    if rejected:
        raise CheckpointError(
            f"{folders[0].parent}: none of its {len(rejected)} checkpoints is valid. Restore one from a copy. The "
            f"newest: {rejected[0]}"
        )
    return None, rejected


def open_at(world: World, path: Path, progress: Progress = silent) -> tuple[Checkpoint, list[str]]:
    """Open `path` if it is one checkpoint, else the newest valid checkpoint of that run or folder. Collective.

    Returns:
        The checkpoint, and a line about each newer checkpoint that is not valid.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    if path.is_symlink():  # its target has the step in its name, and a link may name another one later
        path = path.parent / path.readlink()
    checkpoint, rejected = newest(world, root_at(path), progress=progress)
    if checkpoint is None:
        raise CheckpointError(by_rank_0(world, lambda: missing(path)))
    return checkpoint, rejected


def newest(
    world: World, folder: Path, *, below: bool = False, mixed: bool = False, progress: Progress = silent
) -> tuple[Checkpoint | None, list[str]]:
    """Open `folder` if it is one checkpoint, else the valid checkpoint in it that was published last. Collective.

    Args:
        below: also search the subfolders of `folder`, one for each tag.
        mixed: allow checkpoints of several lineages.

    Returns:
        The checkpoint, None if there is none; and a line about each newer checkpoint that is not valid.

    Raises:
        CheckpointError: there are checkpoints, but none is valid, or they are of several lineages.
    """
    if by_rank_0(world, lambda: is_step(folder)):
        return open_checkpoint(world, folder, progress=progress), []

    def newest_first() -> list[str]:
        roots = [folder, *(path for path in folder.glob("*") if path.is_dir())] if below else [folder]
        return [str(path) for _, path in published_last(roots, mixed=mixed)]

    return open_first(world, [Path(path) for path in by_rank_0(world, newest_first)], progress=progress)
