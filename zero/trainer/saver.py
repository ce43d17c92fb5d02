"""When a run saves, which checkpoints it keeps, and which one it resumes from.

A run saves every so many steps, and when a stop is requested. Behind training (`checkpoint.async`) a thread writes a
copy; every rank says with each step whether its file is written, so all publish it after the same step.

A run that was started again after a failure goes on from what it saved itself, else from what it began from: its
folder has a line for every start and every checkpoint that it published. A run that is new in a folder of checkpoints
goes on from the newest of them or is refused, so that what is newest there is always the latest of one history.
"""

import contextlib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero.checkpoint import Checkpoint, Root, Saving, begin, open_at, open_first, open_latest, snapshot_bytes
from zero.checkpoint.disk import naming
from zero.checkpoint.manifest import step_name
from zero.checkpoint.save import by_rank_0, check_shared
from zero.core.placement import size_text
from zero.distributed.world import World
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.errors import CheckpointError
from zero.platform.device import free_host_bytes
from zero.platform.run_files import writing
from zero.platform.step_folders import FOLDER, is_step, last_save_s, step_of
from zero.progress import Progress
from zero.tracker import Tracker
from zero.trainer.config import Config
from zero.trainer.resume import differences

STARTS = "starts.jsonl"
"""In the run's folder: each start, as {"from": folder or null, "step": number, "machines": "one" or "several"}, and
each save, as {"saved": folder}."""

MARGIN_BYTES = 2**28
"""Beside a copy of the state, what writing it takes and what training may still want."""

STOP_REQUESTED, NOTHING_TO_WRITE = 1, 2
"""Bits of the flag that each rank sends with a step."""


class Saver:
    """Saves one run. Creating one is collective.

    Attributes:
        last_published: the newest checkpoint that this start of the run has published.

    Args:
        folder: of the run.
        tracker: shows lines for the user, each checkpoint, and how far a save is.
        facts: what a checkpoint holds beside the state.
        stop_requested: whether a stop of this rank was requested.
        began_from: the checkpoint that the run goes on from, with all its bytes verified.
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
        self._valid = set() if began_from is None else {began_from.folder.absolute()}  # and what this run publishes
        several = self._world.nodes > 1
        if config.checkpoint.every > 0 and several and config.mode == "train":
            check_shared(self._world, self.root.path)
        if began_from is not None:
            for line in differences(began_from.facts, self._facts(), began_from.step, began_from.skipped):
                tracker.note(line)
        if config.mode == "train":
            by_rank_0(self._world, lambda: record_start(folder, began_from, several=several))

    def flag(self) -> float:
        """The flag that this rank sends with a step: a sum of the bits above."""
        written = self._under_way is None or self._under_way.is_written
        return STOP_REQUESTED * self._stop_requested() + NOTHING_TO_WRITE * written

    def is_due(self, number: int, last: int) -> bool:
        """A checkpoint belongs after step `number`."""
        return self._keys.every > 0 and (number % self._keys.every == 0 or number == last)

    def publish_if_written(self, flags: tuple[float, ...]) -> None:
        """After a step: publish what was written behind it, if every rank has sent that its file is written."""
        if self._under_way is not None and all(int(flag) & NOTHING_TO_WRITE for flag in flags):
            self.finish()

    def save(self, state: State) -> None:
        """Save now, or begin to. Collective.

        Raises:
            CheckpointError: this save or the one before it failed, and `checkpoint.on_failure` is stop.
        """
        state.runtime.settle()
        self.finish()
        with self._tolerating_failures():
            self._under_way = begin(
                state, self.root, self._facts(), behind=self._fits_beside(state), progress=self._tracker.progress
            )
            if not self._keys.async_:
                self.finish()

    def finish(self) -> None:
        """Return when nothing is under way. Collective.

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
        """The run has failed: publish nothing more."""
        if self._under_way is not None:
            self._under_way.abandon()

    @contextlib.contextmanager
    def _tolerating_failures(self) -> Iterator[None]:
        """A failed save ends the run, or with `checkpoint.on_failure=continue` becomes a warning."""
        try:
            yield
        except CheckpointError as error:
            if self._keys.on_failure != "continue":
                raise
            self._tracker.note(f"warning: not saved, training goes on: {error}")

    def _keep(self, published: Path) -> None:
        self.root.retain(self._keys.keep, self._keys.keep_every, lambda one: one.absolute() in self._valid)
        with naming(self._folder / STARTS, "writing it"):
            _record(self._folder, {"saved": str(published.absolute())})

    def _fits_beside(self, state: State) -> bool:
        """Whether a copy has room on every rank's machine."""
        if not self._keys.async_:
            return False
        needs, free = snapshot_bytes(state.plan), free_host_bytes() // self._world.local_size
        fits = "False" not in self._world.gather_texts(str(needs + MARGIN_BYTES < free), "room for a copy")
        if not fits:
            self._tracker.note(
                f"checkpoint.async: a copy of {size_text(needs)} has no room on every rank ({size_text(free)} free "
                "here), so training waits for this save"
            )
        return fits


def root_of(config: Config, folder: Path) -> Path:
    """The folder of the checkpoints of the run in `folder`."""
    return Path(config.checkpoint.dir) if config.checkpoint.dir is not None else folder / FOLDER


def find(config: Config, world: World, folder: Path, tracker: Tracker, *, restarts: int = 0) -> Checkpoint | None:
    """The checkpoint that the run in `folder` goes on from, opened; None for a fresh start. Collective.

    Args:
        tracker: shows what was rejected and what was chosen, and how far the check of a checkpoint is.
        restarts: how often this run was started again after a failure.

    Raises:
        CheckpointError: there is none although `resume` names one, or all are damaged, or what this run saves would be
            older than what is there already.
    """
    own = root_of(config, folder).absolute()
    trains = config.mode == "train"
    lines = by_rank_0(world, lambda: _clean(own, folder, restarts)) if trains else []
    if lines:
        found, rejected = _again(config, world, own, lines, tracker.progress)
    elif config.resume == "none":
        found, rejected = None, []
    elif config.resume == "latest":
        found, rejected = _newest(config, world, folder, tracker.progress)
    else:
        found, rejected = open_at(world, Path(config.resume), tracker.progress)
    if trains and not lines:
        by_rank_0(world, lambda: _refuse_newer(own, found, rejected))
    if found is not None:
        return _chosen(found, rejected, tracker.note, "resuming from" if trains else "evaluating")
    if config.mode == "eval":
        raise CheckpointError("mode=eval resume=latest: there is no checkpoint; give resume=PATH of a step or a run")
    if config.resume == "latest":
        tracker.note("resume=latest: there is no checkpoint, so this run starts afresh")
    return None


def open_named(path: Path, world: World, note: Callable[[str], None]) -> Checkpoint:
    """As `open_at`; `note` receives what was rejected and what was chosen."""
    return _chosen(*open_at(world, path), note, "reading")


def _chosen(found: Checkpoint, rejected: Sequence[str], note: Callable[[str], None], verb: str) -> Checkpoint:
    for line in rejected:
        note(f"rejected {line}")
    note(f"{verb} {found.folder}")
    if not found.manifest.finite:
        note(f"warning: {found.folder} holds values that are NaN or infinite")
    return found


def _newest(config: Config, world: World, folder: Path, progress: Progress) -> tuple[Checkpoint | None, list[str]]:
    for root in by_rank_0(world, lambda: [str(one) for one in _newest_roots(config, folder)]):
        found, rejected = open_latest(world, root, progress=progress)
        if found is not None:
            return found, rejected
    return None, []


def _newest_roots(config: Config, folder: Path) -> list[Path]:
    """Where `latest` looks: in `checkpoint.dir`, or in the runs beside this one, the one that saved last first."""
    own = root_of(config, folder)
    if config.checkpoint.dir is not None or last_save_s(own) > 0:
        return [own]
    saves = {root: last_save_s(root) for root in _roots_beside(folder.absolute())}
    return sorted((root for root in saves if saves[root] > 0), key=lambda root: saves[root], reverse=True)


def _roots_beside(folder: Path) -> list[Path]:
    """Of the runs in runs/<date>/<time>/ and runs/<date>/<time>/<number>/, if this is one; other folders may belong to
    anything."""
    dates = [date for date in folder.parents[:2] if _is_date(date)]
    days = [day for date in dates for day in date.parent.glob("*") if _is_date(day)]
    return sorted({root for day in days for pattern in ("*", "*/*") for root in day.glob(f"{pattern}/{FOLDER}")})


def _is_date(path: Path) -> bool:
    return re.fullmatch(r"\d{4}-\d{2}-\d{2}", path.name) is not None


def _refuse_newer(own: Path, found: Checkpoint | None, rejected: Sequence[str]) -> None:
    """Refuse a folder with newer checkpoints, except those that were found damaged on the way to `found`."""
    step = -1 if found is None else found.step
    walked_here = bool(rejected) and found is not None and found.folder.parent.absolute() == own
    newer = [one for one in Root(own).steps() if one > step]
    if newer and not walked_here:
        begins = "begins anew" if found is None else f"goes on from step {step}"
        raise CheckpointError(
            f"{own / step_name(newer[-1])}: is there already, this run {begins}, and resume=latest would prefer it to "
            "what this run saves; set another checkpoint.dir, or resume=latest"
        )


# -- the record of starts and saves ------------------------------------------------------------------------------------


def record_start(folder: Path, checkpoint: Checkpoint | None, *, several: bool = False) -> None:
    """Record that the run in `folder` starts from a checkpoint; None: from none.

    Args:
        several: on several machines.
    """
    began, step = (None, None) if checkpoint is None else (str(checkpoint.folder.absolute()), checkpoint.step)
    with writing(folder / STARTS):
        _record(folder, {"from": began, "step": step, "machines": "several" if several else "one"})


def last_saved(folder: Path) -> Path | None:
    """The newest checkpoint that the run in `folder` has published, if it is still there."""
    saved = [Path(one["saved"]) for one in _recorded(folder) if "saved" in one]
    return next((one for one in reversed(saved) if one.exists()), None)


def _record(folder: Path, line: Mapping[str, Any]) -> None:
    with (folder / STARTS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _clean(root: Path, folder: Path, restarts: int) -> list[dict[str, Any]]:
    """Remove what a dead run left in the root that this run will write in; returns what this run has recorded."""
    Root(root).sweep()
    path = folder / STARTS
    with naming(path, "reading it"):
        if not restarts:
            path.unlink(missing_ok=True)  # an earlier run's in the same folder
        return _recorded(folder)


def _recorded(folder: Path) -> list[dict[str, Any]]:
    path = folder / STARTS
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be half written


def _again(
    config: Config, world: World, own: Path, lines: Sequence[Mapping[str, Any]], progress: Progress
) -> tuple[Checkpoint | None, list[str]]:
    """After a failure: the newest valid one that this run saved, or else what it began from, or one older than that.

    Whatever is in its root and newer than what it began from, the run has saved itself: see `_refuse_newer`.
    """
    began = lines[0]["from"]
    step = -1 if began is None else lines[0]["step"]
    suspects = _suspects(lines)
    named = config.resume not in ("none", "latest") and is_step(Path(config.resume))
    if named:
        suspects.pop(Path(began), None)  # nothing else will do

    def candidates() -> list[str]:
        found = [own / step_name(one) for one in reversed(Root(own).steps()) if one > step]
        if began is not None:
            beside = Path(began).parent
            older = () if named else (one for one in reversed(Root(beside).steps()) if one < step)
            found += [Path(began), *(beside / step_name(one) for one in older)]
        return [str(one) for one in found]

    folders = by_rank_0(world, candidates)
    return open_first(world, [Path(one) for one in folders], suspect=suspects, progress=progress)


def _suspects(lines: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """Checkpoints that two starts of this run have gone from and failed, without saving anything since.

    Of starts on one machine: where there are several, one of them is more likely to have failed than a checkpoint.
    """
    failed: Counter[str] = Counter()
    for line in lines:
        if "saved" in line:
            failed.clear()
        elif line["from"] is not None and line.get("machines") != "several":
            failed[line["from"]] += 1
    return {Path(one): "two starts from it have failed" for one, count in failed.items() if count > 1}
