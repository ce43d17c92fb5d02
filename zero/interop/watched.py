"""What a loop of the user's own shows and leaves behind.

A line every few steps; with a folder also what a run of train.py leaves (config.yaml, metrics.jsonl, summary.json), so
`scripts/report FOLDER` makes the same page of it, and W&B shows the same rows.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from zero.checkpoint.disk import naming
from zero.checkpoint.save import told as told_by_all
from zero.config import Config
from zero.meter import Meter
from zero.passes import Metrics
from zero.plan import Plan
from zero.store import PrefetchStore
from zero.tracker import RUNNING, Lines, Tracker, open_tracker, write_summary


class Watched:
    """The rows of one run. Making one and `stepped` are collective.

    Args:
        folder: made if it is missing, written by rank 0; None for lines on the console only.
        tokens_per_row: what a row of the batch counts as. 1 counts rows where the files say tokens.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        store: PrefetchStore,
        folder: Path | None,
        *,
        tokens_per_row: int = 1,
    ) -> None:
        self._every, self._folder = config.tracker.every, folder if plan.world.rank == 0 else None
        self._tokens = config.batch.numbers()[0] * tokens_per_row
        self._meter = partial(Meter, plan.world, plan, tokens_per_step=self._tokens, traffic=lambda: store.traffic)
        self.resumed(0, 0)

        def begin() -> dict[str, Any]:
            if self._folder is not None:
                with naming(self._folder, "making it"):
                    self._folder.mkdir(parents=True, exist_ok=True)
                    (self._folder / "config.yaml").write_text(yaml.safe_dump(config.plain(), sort_keys=False))
            return {}

        told_by_all(plan.world, begin)
        self.tracker = open_tracker(config, self._folder, endless=True)
        if folder is None and plan.world.rank == 0:
            self.tracker = Tracker([Lines(None, sys.stdout)])
        facts = {"plan_bytes": plan.bytes, "ranks": plan.world.size, "parameters_numel": plan.numel}
        self.tracker.begin(config, facts)

    def resumed(self, steps: int, skipped: int) -> None:
        """The run goes on from one that had these steps behind it."""
        self.meter = self._meter(steps=steps, tokens=steps * self._tokens, skipped=skipped)

    def stepped(self, metrics: Metrics, *, has_loss: bool) -> None:
        """One more step was made; without a loss if nobody has told it one."""
        self.meter.count(metrics)
        if self.meter.steps % self._every == 0:
            row = self.meter.row(validated=False) | ({} if has_loss else {"train/loss": None})
            self._summarise(RUNNING)
            self.tracker.log(row)

    def saved(self, path: Path) -> None:
        """A checkpoint was published."""
        self.tracker.saved(path, self.meter.steps)

    def close(self) -> None:
        """The loop is over."""
        self._summarise("finished")
        with self.tracker:
            self.tracker.finish(self.meter.summary("", "finished")._asdict())

    def _summarise(self, how: str) -> None:
        if self._folder is not None:
            write_summary(self._folder, self.meter.summary("", how)._asdict())
