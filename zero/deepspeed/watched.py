"""What a loop of the user's own shows and leaves behind.

A line every few steps; with a folder also what a run of train.py leaves (config.yaml, metrics.jsonl, summary.json), so
`scripts/report FOLDER` makes the same page of it, and W&B shows the same rows.
"""

import logging
import sys
from collections.abc import Mapping
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import yaml

from zero.checkpoint.disk import naming
from zero.checkpoint.save import by_rank_0
from zero.engine.plan import Plan
from zero.engine.step import Metrics
from zero.store import PrefetchStore
from zero.trainer.config import Config
from zero.trainer.meter import Meter
from zero.trainer.tracker import RUNNING, Lines, Tracker, open_tracker, write_summary

log = logging.getLogger("zero")

ROWS = "metrics.jsonl"


class Watched:
    """The rows of one run. Making one, `stepped` and `saved` are collective.

    Rows begin with the first step or checkpoint, when it is known whether a loaded checkpoint goes on: only then do
    they follow those of an earlier start. Else a folder of another run, over or not, is left as it is, and a new one
    below it taken.

    Args:
        settings: plain values for config.yaml and W&B: those of the config that are true of this loop, and its own.
        folder: made if it is missing, written by rank 0; None for lines on the console only.
        tokens_per_row: what a row of the batch counts as. 1 counts rows where the files say tokens.
    """

    def __init__(
        self,
        config: Config,
        settings: Mapping[str, Any],
        plan: Plan,
        store: PrefetchStore,
        folder: Path | None,
        *,
        tokens_per_row: int = 1,
    ) -> None:
        self._config, self._settings, self._plan = config, settings, plan
        self._folder = folder if plan.world.rank == 0 else None
        self._tokens = config.batch.numbers()[0] * tokens_per_row
        self._meter = partial(Meter, plan.world, plan, tokens_per_step=self._tokens, traffic=lambda: store.traffic)
        self._run_id: str | None = None
        self._has_begun = self._goes_on = False
        self.resumed(0, 0)
        by_rank_0(plan.world, self._make_folder)
        self.tracker = Tracker()

    @property
    def run_id(self) -> str | None:
        """W&B's, for a checkpoint to remember."""
        self._begin()
        return self.tracker.run_id

    def resumed(self, steps: int, skipped: int) -> None:
        """Steps are counted from here on."""
        self.meter = self._meter(steps=steps, tokens=steps * self._tokens, skipped=skipped)

    def goes_on(self, run_id: str | None) -> None:
        """It is the run of the checkpoint that was loaded, and W&B knows it as `run_id`."""
        self._goes_on, self._run_id = True, run_id

    def stepped(self, metrics: Metrics, *, has_loss: bool) -> None:
        """One more step was made; without a loss if nobody has told it one."""
        self._begin()
        self.meter.count(metrics)
        if self.meter.steps % self._config.tracker.every == 0:
            row = self.meter.row(validated=False) | ({} if has_loss else {"train/loss": None})
            self._summarise(RUNNING)
            self.tracker.log(row)

    def saved(self, path: Path) -> None:
        """A checkpoint was published."""
        self._begin()
        self.tracker.saved(path, self.meter.steps)

    def close(self, how: str | None) -> None:
        """The loop is over; None: nobody knows how it ended."""
        if how is not None and self._has_begun:
            self._summarise(how)
        with self.tracker:
            self.tracker.finish(self.meter.summary("", how or RUNNING)._asdict())

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        world = self._plan.world
        by_rank_0(world, self._write_settings)
        self.tracker = open_tracker(self._config, self._folder, endless=True)
        if self._folder is None and world.rank == 0:
            self.tracker = Tracker([Lines(None, sys.stdout)])
        facts = {"plan_bytes": self._plan.bytes, "ranks": world.size, "parameters_numel": self._plan.numel}
        self.tracker.begin(self._settings, facts, self._run_id)

    def _make_folder(self) -> None:
        if self._folder is not None:
            with naming(self._folder, "making it"):
                self._folder.mkdir(parents=True, exist_ok=True)

    def _write_settings(self) -> None:
        if self._folder is None:
            return
        if not self._goes_on:
            with naming(self._folder, "looking for rows in it"):
                self._folder = _claimed(self._folder)
        path = self._folder / "config.yaml"
        with naming(path, "writing it"):
            path.write_text(yaml.safe_dump(dict(self._settings), sort_keys=False))

    def _summarise(self, how: str) -> None:
        if self._folder is not None:
            write_summary(self._folder, self.meter.summary("", how)._asdict())


def _claimed(folder: Path) -> Path:
    """The folder, or where another run writes or wrote its rows the first below it where none does."""
    place = next(filter(_claim, chain([folder], (folder / f"run-{number}" for number in count(2)))))
    if place != folder:
        log.warning(
            "%s is for the rows of another run, and no checkpoint goes on with it: these go to %s", folder, place
        )
    return place


def _claim(place: Path) -> bool:
    """Make the file of its rows; False where one is. Of two loops that begin at once only one makes it."""
    place.mkdir(parents=True, exist_ok=True)
    try:
        (place / ROWS).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
