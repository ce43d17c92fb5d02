"""Checkpoints of a run: when it saves, which checkpoints it keeps, and which one it resumes from.

A run saves every `checkpoint.every` steps, and when a stop is requested. With `checkpoint.async` a thread writes a copy
of the state during the next steps. Every rank sends with each step whether its file is written, so all ranks publish
the checkpoint after the same step.

A run that is restarted after a failure continues from its own newest checkpoint, or else from the checkpoint that it
started from. A file in the run's folder (`STARTS`) records every start and every published checkpoint. A new run in a
folder with checkpoints must continue from the newest of them, otherwise it raises an error. So the newest checkpoint is
always the latest of a single history.
"""

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero.checkpoint import Checkpoint, Root, Saving, open_at, open_first, open_latest, snapshot_bytes
from zero.checkpoint.open import LineageText, lineage_of
from zero.checkpoint.save import by_rank_0, check_shared
from zero.core.sizes import size_text
from zero.distributed.world import World
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.errors import CheckpointError
from zero.platform.device import free_host_bytes
from zero.platform.files import appearing, naming
from zero.platform.run_files import writing
from zero.platform.step_folders import FOLDER, is_step, last_save_s, step_of
from zero.progress import Progress
from zero.tracker import Tracker
from zero.trainer.config import Config
from zero.trainer.resume import differences

STARTS = "starts.jsonl"
"""File in the run's folder with a JSON line for each start, {"from": folder or null, "step": number, "machines":
"one" or "several"}, and for each save, {"saved": folder}."""

MARGIN_BYTES = 2**28
"""Host memory left free beside a copy of the state, for writing the copy and for training."""

STOP_REQUESTED, NOTHING_TO_WRITE = 1, 2
"""Bits of the flag that each rank sends with a step."""


class Saver:
    """The checkpoints of one run. Creating it is collective.

    Attributes:
        last_published: folder of the newest checkpoint published since this start; None: none yet.

    Args:
        folder: the run's folder.
        tracker: shows notes, saved checkpoints and the progress of a save.
        facts: returns the facts that a checkpoint stores in addition to the state.
        stop_requested: returns whether this rank was requested to stop.
        began_from: the checkpoint that the run continues from, with all its bytes verified; None for a fresh start.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        folder: Path,
        tracker: Tracker,
        *,
        facts: Callable[[], Mapping[str, Any]],
        stop_requested: Callable[[], bool],
        began_from: Checkpoint | None = None,
    ) -> None:
        self._keys, self._world, self._tracker = config.checkpoint, plan.world, tracker
        digest = hashlib.sha256(json.dumps(config.plain(), sort_keys=True).encode()).hexdigest()
        self._facts = lambda: {**facts(), "digest of the config": digest}
        self._stop_requested, self._folder, self.root = stop_requested, folder, Root(root_of(config, folder))
        self._under_way: Saving | None = None
        self.last_published: Path | None = None
        self._valid = set() if began_from is None else {began_from.folder.absolute()}
        several = self._world.nodes > 1
        if config.checkpoint.every > 0 and several and config.mode == "train":
            check_shared(self._world, self.root.path)
        if began_from is not None:
            for line in differences(began_from.facts, self._facts()):
                tracker.note(line)
        if config.mode == "train":
            by_rank_0(self._world, lambda: record_start(folder, began_from, several=several))

    def flag(self) -> float:
        """Return the flag that this rank sends with a step: a sum of `STOP_REQUESTED` and `NOTHING_TO_WRITE`."""
        written = self._under_way is None or self._under_way.is_written
        return STOP_REQUESTED * self._stop_requested() + NOTHING_TO_WRITE * written

    def is_due(self, number: int, last: int) -> bool:
        """Return whether to save after step `number`."""
        return self._keys.every > 0 and (number % self._keys.every == 0 or number == last)

    def publish_if_written(self, flags: tuple[float, ...]) -> None:
        """Publish the save in progress if every rank's flag says that its file is written."""
        if self._under_way is not None and all(int(flag) & NOTHING_TO_WRITE for flag in flags):
            self.finish()

    def save(self, state: State) -> None:
        """Save the state; with `checkpoint.async` only start the save. Collective.

        Raises:
            CheckpointError: this save or the one before it failed, and `checkpoint.on_failure` is stop.
        """
        state.runtime.settle()
        self.finish()
        with self._tolerating_failures():
            self._under_way = Saving(
                state, self.root, self._facts(), behind=self._fits_beside(state), progress=self._tracker.progress
            )
            if not self._keys.async_:
                self.finish()

    def finish(self) -> None:
        """Wait for the save in progress, if any, and publish it. Collective.

        Raises:
            CheckpointError: as `save`.
        """
        saving, self._under_way = self._under_way, None
        if saving is None:
            return
        with self._tolerating_failures():
            self.last_published = path = saving.finish()
            self._valid.add(path.absolute())
            self._tracker.note(f"saved {path}")
            self._tracker.saved(path, step_of(path.name) or 0)
            by_rank_0(self._world, lambda: self._keep(path))

    def abandon(self) -> None:
        """Abandon the save in progress without publishing it, because the run has failed."""
        if self._under_way is not None:
            self._under_way.abandon()

    @contextlib.contextmanager
    def _tolerating_failures(self) -> Iterator[None]:
        """Turn a failed save into a warning with `checkpoint.on_failure=continue`."""
        try:
            yield
        except CheckpointError as error:
            if self._keys.on_failure != "continue":
                raise
            self._tracker.note(f"warning: not saved, but training continues: {error}")

    def _keep(self, published: Path) -> None:
        self.root.retain(self._keys.keep, self._keys.keep_every, lambda path: path.absolute() in self._valid)
        with naming(self._folder / STARTS, "writing it"):
            _record(self._folder, {"saved": str(published.absolute())})

    def _fits_beside(self, state: State) -> bool:
        """Return whether every rank's machine has memory for a copy of the state; False without `checkpoint.async`."""
        if not self._keys.async_:
            return False
        needs, free = snapshot_bytes(state, self.root), free_host_bytes() // self._world.local_size
        fits = "False" not in self._world.gather_texts(str(needs + MARGIN_BYTES < free), "room for a copy")
        if not fits:
            self._tracker.note(
                "checkpoint.async: training waits for this save, because some rank has no memory for a copy of "
                f"{size_text(needs)} ({size_text(free)} free on this rank)"
            )
        return fits


def root_of(config: Config, folder: Path) -> Path:
    """Return the folder of the checkpoints of the run in `folder`."""
    return Path(config.checkpoint.dir) if config.checkpoint.dir is not None else folder / FOLDER


def find(config: Config, world: World, folder: Path, tracker: Tracker, *, restarts: int = 0) -> Checkpoint | None:
    """Return the checkpoint that the run in `folder` continues from; None for a fresh start. Collective.

    Args:
        tracker: shows rejected checkpoints, the chosen one, and the progress of its verification.
        restarts: how often this run was started again after a failure.

    Raises:
        CheckpointError: no checkpoint exists although `resume` names one, or all are damaged, or the folder has
            checkpoints that are newer than those that this run would save, or of another run.
    """
    root = root_of(config, folder).absolute()
    trains = config.mode == "train"
    lines = by_rank_0(world, lambda: _clean(root, folder, restarts)) if trains else []
    if lines:
        checkpoint, rejected = _again(config, world, root, lines, tracker.progress)
    elif config.resume == "none":
        checkpoint, rejected = None, []
    elif config.resume == "latest":
        checkpoint, rejected = _newest(config, world, folder, tracker.progress)
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


def _newest_roots(config: Config, folder: Path) -> list[Path]:
    """Return the folders that `resume=latest` searches, the one with the latest save first.

    They are this run's own folder of checkpoints, if it has any or `checkpoint.dir` is set; otherwise those of the runs
    beside this one.
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
    step, folders = -1 if checkpoint is None else checkpoint.step, Root(root).folders()
    if rejected and checkpoint is not None and checkpoint.folder.parent.absolute() == root:
        return
    if newer := [path for number, path in folders.items() if number > step]:
        begins = "without a checkpoint" if checkpoint is None else f"from step {step}"
        raise CheckpointError(
            f"{newer[-1]}: exists, but this run starts {begins}, so a later resume=latest would load "
            "this old checkpoint. Set another checkpoint.dir, or resume=latest."
        )
    if checkpoint is None:  # then `root` has none
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
        return lineage_of(folder, Root(folder.parent).read_manifest(folder))
    return None


# -- the record of starts and saves ------------------------------------------------------------------------------------


def record_start(folder: Path, checkpoint: Checkpoint | None, *, several: bool = False) -> None:
    """Record that the run in `folder` starts from a checkpoint, or from none.

    Args:
        several: whether the ranks are on several machines.
    """
    began, step = (None, None) if checkpoint is None else (str(checkpoint.folder.absolute()), checkpoint.step)
    with writing(folder / STARTS):
        _record(folder, {"from": began, "step": step, "machines": "several" if several else "one"})


def last_saved(folder: Path) -> Path | None:
    """Return the newest checkpoint that the run in `folder` has published and that still exists."""
    saved = [Path(line["saved"]) for line in _recorded(folder) if "saved" in line]
    return next((path for path in reversed(saved) if path.exists()), None)


def _record(folder: Path, line: Mapping[str, Any]) -> None:
    lines = [*_recorded(folder), line]
    with appearing(folder / STARTS, replaces=True) as unfinished:  # a full disk would cut short a line that is appended
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _clean(root: Path, folder: Path, restarts: int) -> list[dict[str, Any]]:
    """Remove unpublished folders of dead runs from `root`; returns the recorded starts and saves of this run."""
    Root(root).sweep()
    path = folder / STARTS
    with naming(path, "reading it"):
        if not restarts:
            path.unlink(missing_ok=True)  # of an earlier run in the same folder
        return _recorded(folder)


def _recorded(folder: Path) -> list[dict[str, Any]]:
    path, lines = folder / STARTS, []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # earlier versions appended to lines that were cut short
            lines.append(json.loads(text))
    return lines


def _again(
    config: Config, world: World, root: Path, lines: Sequence[Mapping[str, Any]], progress: Progress
) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint to continue from after a failure, and a line about each rejected one.

    The first valid one is chosen of: this run's own checkpoints, the newest first; the checkpoint that the run started
    from; older checkpoints beside that one, unless `resume` names a step. Every checkpoint in `root` that is newer than
    the start is the run's own, see `_refuse_newer`.
    """
    began = lines[0]["from"]
    step = -1 if began is None else lines[0]["step"]
    suspects = _suspects(lines)
    named = config.resume not in ("none", "latest") and is_step(Path(config.resume))
    if named:
        suspects.pop(Path(began), None)  # the user has named this checkpoint, so no other may be used

    def candidates() -> list[str]:
        folders = [path for number, path in reversed(Root(root).folders().items()) if number > step]
        if began is not None:
            beside = {} if named else Root(Path(began).parent).folders()
            folders += [Path(began), *(path for number, path in reversed(beside.items()) if number < step)]
        return [str(folder) for folder in folders]

    folders = [Path(folder) for folder in by_rank_0(world, candidates)]
    return open_first(world, folders, suspect=suspects, progress=progress)


def _suspects(lines: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """Return the checkpoints from which two starts of this run have failed without a save since, and the reason.

    Only starts on one machine count, because of several machines one is more likely to have failed than the checkpoint.
    """
    failed: Counter[str] = Counter()
    for line in lines:
        if "saved" in line:
            failed.clear()
        elif line["from"] is not None and line.get("machines") != "several":
            failed[line["from"]] += 1
    return {Path(folder): "two starts from it have failed" for folder, count in failed.items() if count > 1}
