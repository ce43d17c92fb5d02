"""The speed and the log of a run: rows of metrics for console, disk and W&B.

The folder of a run gets the same files as for train.py (config.yaml, metrics.jsonl, summary.json), so `zero-train
report FOLDER` makes the same page of it.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from zero.checkpoint.agreement import by_rank_0
from zero.checkpoint.format.json_values import to_json
from zero.distributed.world import World
from zero.engine.metrics import Metrics
from zero.engine.state import State
from zero.platform.files import naming
from zero.settings import Settings
from zero.tracker import RUNNING, Lines, Tracker, open_tracker, write_summary
from zero.tracker.earlier_starts import earlier_starts
from zero.tracker.meter import Meter
from zero.tracker.views.jsonl import unused_folder
from zero.user_loop.optimizers import Optimizer, optimizer_settings

log = logging.getLogger("zero")

RECORDED_SECTIONS = ("zero", "offload", "batch", "precision", "tracker")
"""Sections of the settings that are recorded, because they apply to any model and loop."""
WARM_UP_STEPS = 2
"""Number of first steps that the speed does not include."""


class Throughput:
    """Timer that measures samples per second during steps, as DeepSpeed's `engine.tput_timer` does.

    The engine starts it at the first forward of a step and stops it when the update is decided. Time between two steps
    does not count. The update is applied during the next forward, so its time counts in the next step.

    Args:
        rows: number of samples of a step, over all ranks.

    Attributes:
        global_step_count: number of steps.
        epoch_count: number of calls of `update_epoch_count`.
        total_elapsed_time: seconds of all steps except the first two.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.epoch_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._began_s = 0.0

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1

    def start(self) -> None:
        """Start a step."""
        self._began_s = time.perf_counter()

    def stop(self) -> None:
        """End a step."""
        if self.global_step_count >= WARM_UP_STEPS:
            self.total_elapsed_time += time.perf_counter() - self._began_s
        self.global_step_count += 1

    def avg_samples_per_sec(self) -> float:
        """Return samples per second over all steps except the first two; minus infinity before, as in DeepSpeed."""
        steps = self.global_step_count - WARM_UP_STEPS
        return self._rows * steps / self.total_elapsed_time if steps > 0 else float("-inf")


class RunLog:
    """The log of one run: rows of metrics and files. The constructor, `log_step` and `log_checkpoint` are collective.

    Files are opened at the first step or checkpoint, because only then it is known whether the run continues a
    checkpoint. If it does, rows are appended. Otherwise a folder with rows of another run stays as it is, and a new
    folder below it is used.

    Args:
        settings: JSON values for config.yaml and W&B.
        folder: the folder that rank 0 writes, created if missing; None: only lines on the console.
        tokens_per_row: number of tokens of a sample; with 1, the files count samples as tokens.
    """

    def __init__(
        self, config: Settings, settings: Mapping[str, Any], state: State, folder: Path | None, tokens_per_row: int
    ) -> None:
        plan, store = state.plan, state.runtime.store
        self._config, self._settings, self._plan = config, settings, plan
        self._folder = folder if plan.world.rank == 0 else None
        self._tokens_per_row = tokens_per_row
        tokens = config.batch.numbers()[0] * tokens_per_row
        self._meter = partial(Meter, plan.world, plan, tokens_per_step=tokens, traffic=lambda: store.traffic)
        self._has_begun, self._present = False, state.runtime.present
        self.start_from(0, 0, 0)
        make_folder(plan.world, self._folder)
        self.tracker = Tracker()

    @property
    def run_id(self) -> str | None:
        """W&B's run id, which checkpoints record; None without W&B."""
        self._begin()
        return self.tracker.run_id

    def start_from(
        self, steps: int, skipped: int, rows: int, *, continues: bool = False, run_id: str | None = None
    ) -> None:
        """Set the counts of steps, of skipped steps, and of samples over all ranks.

        Args:
            steps, skipped, rows: the counts.
            continues: whether to append to the run of a loaded checkpoint.
            run_id: W&B's run id of that run.
        """
        self._continues, self._run_id = continues, run_id
        self.meter = self._meter(steps=steps, tokens=rows * self._tokens_per_row, skipped=skipped)
        if self._has_begun:
            self._look_back()

    def log_step(self, metrics: Metrics, *, has_loss: bool, rows: int) -> None:
        """Count a step of `rows` samples over all ranks, and write a row of metrics every `tracker.every` steps."""
        self._begin()
        self.meter.plan, self.meter.moved_bytes = self._present()
        self.meter.count(metrics, rows * self._tokens_per_row)
        if self.meter.steps % self._config.tracker.every == 0:
            row = self.meter.row(validated=False) | ({} if has_loss else {"train/loss": None})
            self._write_summary(RUNNING)
            self.tracker.log(row)

    def log_checkpoint(self, path: Path) -> None:
        """Report a saved checkpoint to the tracker's views."""
        self._begin()
        self.tracker.saved(path, self.meter.steps)

    def close(self, status: str | None) -> None:
        """Close the log. `status` is the exit reason for summary.json; None leaves the file unchanged."""
        if status is not None and self._has_begun:
            self._write_summary(status)
        with self.tracker:
            self.tracker.finish(self.meter.summary("", status or RUNNING)._asdict())

    def _begin(self) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        world = self._plan.world
        by_rank_0(world, self._write_settings)
        if self._continues:
            self._look_back()
        self.tracker = open_tracker(self._config.tracker, self._folder, steps=None)
        if self._folder is None and world.rank == 0:
            self.tracker = Tracker([Lines(None, sys.stdout)])
        facts = {"plan_bytes": self._plan.bytes, "ranks": world.size, "parameters_numel": self._plan.numel}
        self.tracker.begin(self._settings, facts, self._run_id)

    def _look_back(self) -> None:
        if self._folder is not None:
            self.meter.go_on(earlier_starts(self._folder, self.meter.steps))

    def _write_settings(self) -> None:
        if self._folder is None:
            return
        if not self._continues:
            with naming(self._folder, "looking for rows in it"):
                self._folder = unused_folder(self._folder)
        path = self._folder / "config.yaml"
        with naming(path, "writing it"):
            path.write_text(yaml.safe_dump(dict(self._settings), sort_keys=False))

    def _write_summary(self, status: str) -> None:
        if self._folder is not None:
            write_summary(self._folder, self.meter.summary("", status)._asdict())


def make_folder(world: World, folder: Path | None) -> None:
    """Create `folder` on rank 0, unless it is None or exists. Collective.

    Raises:
        CheckpointError: the folder cannot be created; raised on every rank.
    """

    def make() -> None:
        if folder is not None:
            with naming(folder, "making it"):
                folder.mkdir(parents=True, exist_ok=True)

    by_rank_0(world, make)


def run_settings(config: Settings, optimizer: Optimizer) -> dict[str, Any]:
    """Return the settings of a run as JSON values: `RECORDED_SECTIONS` of the config, and the optimizer's groups."""
    groups = {str(number): group for number, group in enumerate(optimizer_settings(optimizer.param_groups))}
    chosen = {"kind": optimizer.kind, "clip": config.optim.clip, "groups": groups}
    sections = {key: value for key, value in config.plain().items() if key in RECORDED_SECTIONS}
    return {"mode": "train", **sections, "optimizer": json.loads(json.dumps(to_json(chosen), default=str))}
