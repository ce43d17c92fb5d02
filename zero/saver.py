"""When a run saves, what it keeps, and where it goes on from.

A run saves every so many steps, and when it is asked to stop. Behind training (`checkpoint.async`) a thread writes a
copy; every rank says with each step whether its file is written, so all publish it after the same step.
"""

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero.checkpoint import Checkpoint, Root, Saving, begin, open_checkpoint, open_latest, snapshot_bytes
from zero.checkpoint.manifest import step_of
from zero.checkpoint.save import told
from zero.config import Config
from zero.device import free_host_bytes
from zero.errors import CheckpointError
from zero.progress import Progress, silent
from zero.state import State
from zero.world import World

FOLDER = "checkpoints"
"""Of a run, inside its folder."""

STARTS = "starts.jsonl"
"""In the run's folder: where each of its starts went on from."""

ASKED_TO_STOP, NOTHING_TO_WRITE = 1, 2
"""Bits of what each rank says with a step."""


class Saver:
    """Saves one run.

    Args:
        folder: of the run.
        facts: what a checkpoint is to remember beside the state.
        note: tells a person.
        progress: shows how far a save is.
        asked_to_stop: whether this rank was.
        began_from: what the run goes on from, whose bytes were all compared.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        folder: Path,
        *,
        facts: Callable[[], Mapping[str, Any]],
        note: Callable[[str], None],
        progress: Progress = silent,
        asked_to_stop: Callable[[], bool],
        began_from: Checkpoint | None = None,
    ) -> None:
        self._keys, self._world, self._facts, self._note = config.checkpoint, world, facts, note
        self._progress, self._asked_to_stop = progress, asked_to_stop
        self.root = Root(root_of(config, folder))
        self._under_way: Saving | None = None
        self._valid = set() if began_from is None else {began_from.folder}  # and what this run publishes

    def word(self) -> float:
        """What this rank says with a step: sums of the bits above."""
        written = self._under_way is None or self._under_way.is_written
        return ASKED_TO_STOP * self._asked_to_stop() + NOTHING_TO_WRITE * written

    def is_due(self, number: int, last: int) -> bool:
        """A checkpoint belongs after step `number`."""
        return self._keys.every > 0 and (number % self._keys.every == 0 or number == last)

    def publish_if_written(self, words: tuple[float, ...]) -> None:
        """After a step: publish what was written behind it, if every rank has said so."""
        if self._under_way is not None and all(int(word) & NOTHING_TO_WRITE for word in words):
            self.finish()

    def save(self, state: State) -> None:
        """Save now, or begin to. Collective.

        Raises:
            CheckpointError: this save or the one before it failed, and `checkpoint.on_failure` says to stop.
        """
        self.finish()
        with _Failures(self._keys.on_failure):
            self._under_way = begin(
                state, self.root, self._facts(), behind=self._fits_beside(state), progress=self._progress
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
        with _Failures(self._keys.on_failure):
            path = saving.finish()
            self._valid.add(path)
            self._note(f"saved {path}")
            told(self._world, self._retain)

    def abandon(self) -> None:
        """The run has failed: what was not published never will be."""
        if self._under_way is not None:
            self._under_way.abandon()

    def _retain(self) -> dict[str, Any]:
        if self._world.rank == 0:
            self.root.retain(self._keys.keep, self._keys.keep_every, lambda folder: folder in self._valid)
        return {}

    def _fits_beside(self, state: State) -> bool:
        """Whether a copy has room on every rank's machine."""
        if not self._keys.async_:
            return False
        needs, free = snapshot_bytes(state.plan), free_host_bytes() // self._world.local_size
        fits = all(text == "True" for text in self._world.gather_texts(str(needs < free), "room for a copy"))
        if not fits:
            self._note(
                f"checkpoint.async: a copy of {needs / 2**20:,.0f} MiB has no room on every rank ({free / 2**20:,.0f} "
                "MiB free here), so training waits for this save"
            )
        return fits


class _Failures:
    """What a failed save does: `stop` lets it end the run, `continue` warns."""

    def __init__(self, on_failure: str) -> None:
        self._goes_on = on_failure == "continue"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        if self._goes_on and isinstance(error, CheckpointError):
            warnings.warn(f"not saved, training goes on: {error}", stacklevel=3)
            return True
        return False


def root_of(config: Config, folder: Path) -> Path:
    """Where the checkpoints of the run in `folder` lie."""
    return Path(config.checkpoint.dir) if config.checkpoint.dir is not None else folder / FOLDER


def find(
    config: Config,
    world: World,
    folder: Path,
    note: Callable[[str], None],
    progress: Progress = silent,
    *,
    restarts: int = 0,
) -> Checkpoint | None:
    """The checkpoint that `resume` means, opened; None for a fresh start. Collective.

    Args:
        restarts: how often this run was started again: then it goes on from what it saved itself, if it did.

    Raises:
        CheckpointError: there is none where the user named one, or there are only damaged ones.
    """
    own = root_of(config, folder)
    if config.mode == "train":
        told(world, lambda: _swept(own) if world.rank == 0 else {})
    if restarts and _last_save_s(own) > 0:
        found, rejected = open_latest(world, own, suspect=_suspects(folder), progress=progress)
        return found and _chosen(found, rejected, note)
    if config.resume == "none":
        return None
    if config.resume != "latest":
        return open_named(Path(config.resume), world, note, progress)
    roots = _newest_roots(config, folder)
    for root in (Path(text) for text in world.share("\n".join(map(str, roots))).splitlines()):
        found, rejected = open_latest(world, root, progress=progress)
        if found is not None:
            return _chosen(found, rejected, note)
    note("resume=latest: there is no checkpoint, so this run starts afresh")
    return None


def open_named(path: Path, world: World, note: Callable[[str], None], progress: Progress = silent) -> Checkpoint:
    """The checkpoint at `path`, a step's folder, or the newest valid one of a run or a root. Collective.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    inside = path / FOLDER
    if step_of(path.name) is not None:
        return _chosen(open_checkpoint(world, path, progress=progress), (), note)
    found, rejected = open_latest(world, inside if inside.is_dir() else path, progress=progress)
    if found is None:
        raise CheckpointError(f"resume={path}: there is no checkpoint; give a step, a run or a folder of checkpoints")
    return _chosen(found, rejected, note)


def _swept(root: Path) -> dict[str, Any]:
    """What a dead run left in the folder that this run will write in is put in order before anything is read."""
    Root(root).sweep()
    return {}


def _chosen(found: Checkpoint, rejected: Sequence[str], note: Callable[[str], None]) -> Checkpoint:
    for line in rejected:
        note(f"rejected {line}")
    note(f"resuming from {found.folder}")
    return found


def record_start(folder: Path, step: int | None) -> None:
    """Remember that the run in `folder` starts from the checkpoint of `step`; None: from nothing."""
    with (folder / STARTS).open("a") as file:
        file.write(json.dumps({"from": step}) + "\n")


def _suspects(folder: Path) -> dict[int, str]:
    """Checkpoints that two starts of this run have gone from and failed, without saving a newer one."""
    path = folder / STARTS
    lines = path.read_text().splitlines() if path.exists() else []
    starts = Counter(json.loads(line)["from"] for line in lines)
    return {step: "two starts from it have failed" for step, count in starts.items() if step is not None and count > 1}


def _newest_roots(config: Config, folder: Path) -> list[Path]:
    """Where `latest` looks: in `checkpoint.dir`, or in the runs beside this one, the one that saved last first."""
    own = root_of(config, folder)
    if config.checkpoint.dir is not None or _last_save_s(own) > 0:
        return [own]
    runs = folder.absolute().parent.parent
    roots = sorted({*runs.glob(f"*/{FOLDER}"), *runs.glob(f"*/*/{FOLDER}")}, key=_last_save_s, reverse=True)
    return [root for root in roots if _last_save_s(root) > 0]


def _last_save_s(root: Path) -> float:
    """When something was published there; 0: never."""
    steps = (path for path in root.glob("step-*") if step_of(path.name) is not None)
    return max((path.lstat().st_mtime for path in steps), default=0.0)
