"""The start of a run: which checkpoint it continues from, and the state and figures in it.

A run that is restarted after a failure continues from its own newest checkpoint, or else from the checkpoint that it
started from. A file in the run's folder records every start and every published checkpoint, see `starts.py`. A new run
in a folder with checkpoints must continue from the newest of them, else the run raises an error. So the newest
checkpoint is always the latest of a single history.
"""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from zero.checkpoint import Checkpoint, Listing, load, open_at, open_first, open_latest
from zero.checkpoint.agreement import by_rank_0
from zero.checkpoint.files.listing import read_manifest
from zero.checkpoint.format.facts import LineageText, lineage_of
from zero.distributed.world import World
from zero.engine.state import State
from zero.errors import CheckpointError
from zero.platform.step_folders import FOLDER, is_step, last_save_s
from zero.progress import Progress
from zero.tracker import Tracker
from zero.tracker.earlier_starts import EarlierStarts, earlier_starts
from zero.tracker.report.folder import mapping
from zero.trainer.config import Config
from zero.trainer.run.best import best_in
from zero.trainer.run.refusals import refuse_other_batch, refuse_other_model, refuse_other_moments
from zero.trainer.run.starts import clean, root_of, suspects


def find(config: Config, world: World, folder: Path, tracker: Tracker, *, restarts: int = 0) -> Checkpoint | None:
    """Return the checkpoint that the run in `folder` continues from; None for a fresh start. Collective.

    Args:
        tracker: shows rejected checkpoints, the chosen one, and the progress of its verification.
        restarts: how often this run was started again after a failure.

    Raises:
        CheckpointError: no checkpoint exists although `resume` names one, or all are damaged, or the folder has
            checkpoints of another run, or newer ones than those that this run would save.
    """
    root = root_of(config, folder).absolute()
    trains = config.mode == "train"
    lines = by_rank_0(world, lambda: clean(root, folder, restarts)) if trains else []
    if lines:
        checkpoint, rejected = _again(config, world, root, lines, tracker.progress)
    elif config.resume == "none":
        checkpoint, rejected = None, []
    elif config.resume == "latest":
        checkpoint, rejected = _newest(config, world, folder, tracker.progress)
    elif config.resume == "best":
        checkpoint, rejected = _best(config, world, folder, tracker.progress), []
    else:
        checkpoint, rejected = open_at(world, Path(config.resume), tracker.progress)
    if trains and not lines:
        by_rank_0(world, lambda: _refuse_newer(root, checkpoint, rejected))
    if checkpoint is not None:
        return _chosen(checkpoint, rejected, tracker.note, "resuming from" if trains else "evaluating")
    if config.mode == "eval":
        raise CheckpointError("mode=eval resume=latest: there is no checkpoint. Give resume=PATH of a step or a run.")
    if config.resume == "latest":
        tracker.note("resume=latest: there is no checkpoint, so this run starts at step 1")
    return None


def open_named(path: Path, world: World, note: Callable[[str], None]) -> Checkpoint:
    """Open a checkpoint as `open_at` does; calls `note` with a line for each rejected checkpoint and the chosen one."""
    return _chosen(*open_at(world, path), note, "reading")


def _chosen(checkpoint: Checkpoint, rejected: Sequence[str], note: Callable[[str], None], verb: str) -> Checkpoint:
    for line in rejected:
        note(f"rejected {line}")
    note(f"{verb} {checkpoint.folder}")
    if not checkpoint.manifest.finite:
        note(f"warning: {checkpoint.folder} holds values that are NaN or infinite")
    return checkpoint


def _newest(config: Config, world: World, folder: Path, progress: Progress) -> tuple[Checkpoint | None, list[str]]:
    for root in by_rank_0(world, lambda: [str(path) for path in _newest_roots(config, folder)]):
        checkpoint, rejected = open_latest(world, root, progress=progress)
        if checkpoint is not None:
            return checkpoint, rejected
    return None, []


def _best(config: Config, world: World, folder: Path, progress: Progress) -> Checkpoint:
    paths = by_rank_0(world, lambda: [str(path) for root in _newest_roots(config, folder) if (path := best_in(root))])
    if not paths:
        raise CheckpointError("resume=best: no run has saved with checkpoint.best. Give latest, or the path of a step.")
    return open_at(world, Path(paths[0]), progress)[0]


def _newest_roots(config: Config, folder: Path) -> list[Path]:
    """Return the folders that `resume=latest` and `resume=best` search, the folder with the latest save first.

    They are this run's own folder of checkpoints, if it has any or `checkpoint.dir` is set; otherwise those of the runs
    beside this run.
    """
    root = root_of(config, folder)
    if config.checkpoint.dir is not None or last_save_s(root) > 0:
        return [root]
    saves = {root: last_save_s(root) for root in _roots_beside(folder.absolute())}
    return sorted((root for root in saves if saves[root] > 0), key=lambda root: saves[root], reverse=True)


def _roots_beside(folder: Path) -> list[Path]:
    """Return the checkpoint folders of runs in runs/<date>/<time>/ and runs/<date>/<time>/<number>/.

    The list is empty if this run is not in such a folder.
    """
    dates = [date for date in folder.parents[:2] if _is_date(date)]
    days = [day for date in dates for day in date.parent.glob("*") if _is_date(day)]
    return sorted({root for day in days for pattern in ("*", "*/*") for root in day.glob(f"{pattern}/{FOLDER}")})


def _is_date(path: Path) -> bool:
    return re.fullmatch(r"\d{4}-\d{2}-\d{2}", path.name) is not None


def _refuse_newer(root: Path, checkpoint: Checkpoint | None, rejected: Sequence[str]) -> None:
    """Raise CheckpointError if `root` has checkpoints that are newer than `checkpoint`, or of another run.

    If checkpoints of `root` were rejected as damaged, do nothing.
    """
    step, folders = -1 if checkpoint is None else checkpoint.step, Listing(root).folders()
    if rejected and checkpoint is not None and checkpoint.folder.parent.absolute() == root:
        return
    if newer := [path for number, path in folders.items() if number > step]:
        begins = "without a checkpoint" if checkpoint is None else f"from step {step}"
        raise CheckpointError(
            f"{newer[-1]}: exists, but this run starts {begins}, so a later resume=latest would load "
            "this old checkpoint. Set another checkpoint.dir, or resume=latest."
        )
    if checkpoint is None:  # then `root` has no checkpoints
        return
    lineage = lineage_of(checkpoint.folder, checkpoint.manifest)
    for other in reversed(folders.values()):
        theirs = _lineage_at(other)
        if theirs is not None and (lineage is None or theirs.name != lineage.name):
            raise CheckpointError(
                f"{other} and {checkpoint.folder}: two runs saved them, so a later resume=latest would raise. "
                "Set another checkpoint.dir, or resume=latest."
            )


def _lineage_at(folder: Path) -> LineageText | None:
    """Return the lineage of the checkpoint in `folder`; None if it has none or its manifest is damaged."""
    with contextlib.suppress(CheckpointError):
        return lineage_of(folder, read_manifest(folder))
    return None


# -- the record of starts and saves ------------------------------------------------------------------------------------


def _again(
    config: Config, world: World, root: Path, lines: Sequence[Mapping[str, Any]], progress: Progress
) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint to continue from after a failure, and a line about each rejected one.

    The first valid one is chosen of: this run's own checkpoints, the newest first; the checkpoint that the run started
    from; older checkpoints beside that checkpoint, unless `resume` names a step. Every checkpoint in `root` that is
    newer than the start is the run's own, see `_refuse_newer`.
    """
    began = lines[0]["from"]
    step = -1 if began is None else lines[0]["step"]
    suspected = suspects(lines)
    named = config.resume not in ("none", "latest", "best") and is_step(Path(config.resume))
    if named:
        suspected.pop(Path(began), None)  # the user has named this checkpoint, so no other may be used

    def candidates() -> list[str]:
        folders = [path for number, path in reversed(Listing(root).folders().items()) if number > step]
        if began is not None:
            beside = {} if named else Listing(Path(began).parent).folders()
            folders += [Path(began), *(path for number, path in reversed(beside.items()) if number < step)]
        return [str(folder) for folder in folders]

    folders = [Path(folder) for folder in by_rank_0(world, candidates)]
    return open_first(world, folders, suspect=suspected, progress=progress)


def resumed(state: State, checkpoint: Checkpoint | None, config: Config, tracker: Tracker) -> State:
    """Return the state loaded from the checkpoint, or `state` if there is no checkpoint. Collective.

    Raises:
        ConfigError, CheckpointError: the checkpoint is of another model or optimizer, or it is damaged.
    """
    if checkpoint is None:
        return state
    trains = config.mode == "train"
    refuse_other_model(config, checkpoint)
    if trains:
        refuse_other_batch(config, checkpoint)
        refuse_other_moments(config, state.plan, checkpoint)
    return load(
        state,
        checkpoint,
        partial=config.checkpoint.partial,
        convert=config.checkpoint.convert,
        moments=trains,
        weights=config.val.weights,
        note=tracker.note,
        progress=tracker.progress,
    )


def starts_before(checkpoint: Checkpoint, folder: Path, config: Config, digest: str) -> list[EarlierStarts]:
    """Return the best losses of the steps before a checkpoint, and the seconds of earlier starts in `folder`.

    All ranks decide by these losses, so they come from the checkpoint. A validation loss on other data is left out.

    Args:
        digest: that of the run's data.
    """
    known, saved = EarlierStarts.of(mapping(checkpoint.facts.get("so far"))), mapping(checkpoint.facts.get("config"))
    rows = mapping(saved.get("val")).get("rows")
    if (checkpoint.facts.get("data"), rows) != (digest, config.val.rows):
        known = known._replace(best_val_loss=inf, best_val_step=inf)
    return [known, EarlierStarts(seconds=earlier_starts(folder, checkpoint.step).seconds)]
