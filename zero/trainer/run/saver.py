"""Saves of a run: when it saves, and which checkpoints it keeps.

A run saves every `checkpoint.every` steps, and when a stop is requested. With `checkpoint.async` a thread writes a copy
of the state during the next steps. Every rank sends with each step whether its file is written, so all ranks publish
the checkpoint after the same step.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zero.checkpoint import Checkpoint, Root, Saving, snapshot_bytes
from zero.checkpoint.agreement import by_rank_0, check_shared
from zero.core.sizes import size_text
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.errors import CheckpointError
from zero.platform.host_memory import free_host_bytes
from zero.platform.step_folders import step_of
from zero.tracker import Tracker
from zero.trainer.config import Config
from zero.trainer.run.best import best_in, mark
from zero.trainer.run.refusals import differences
from zero.trainer.run.starts import record_saved, record_start, root_of

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
        self._is_best = False  # of the save under way
        self.last_published: Path | None = None
        self._valid = set() if began_from is None else {began_from.folder.absolute()}
        several = self._world.nodes > 1
        if config.checkpoint.saves and several and config.mode == "train":
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

    def save(self, state: State, *, best: bool = False) -> None:
        """Save the state; with `checkpoint.async` only start the save. Collective.

        Args:
            best: whether this is the best state so far, with `checkpoint.best`.

        Raises:
            CheckpointError: this save or the one before it failed, and `checkpoint.on_failure` is stop.
        """
        state.runtime.settle()
        self.finish()
        self._is_best = best
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
        if self._is_best:
            mark(published)
        best, every = best_in(self.root.path), self._keys.keep_every

        def spared(step: int) -> bool:
            return (every is not None and step % every == 0) or (best is not None and step == step_of(best.name))

        self.root.retain(self._keys.keep, spared, lambda path: path.absolute() in self._valid)
        record_saved(self._folder, published)

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
