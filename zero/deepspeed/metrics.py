"""The reporting part of an engine: its settings, counts and speed, and rows of metrics for console, disk and W&B.

The folder of a run gets the same files as for train.py (config.yaml, metrics.jsonl, summary.json), so `zero-train
report FOLDER` makes the same page of it.
"""

import json
import logging
import sys
import time
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from zero.checkpoint.agreement import by_rank_0
from zero.checkpoint.format.json_values import to_json
from zero.deepspeed.optimizers import Optimizer, optimizer_settings
from zero.distributed.world import World
from zero.engine.state import State
from zero.engine.step import Metrics
from zero.errors import ConfigError
from zero.platform.files import naming
from zero.platform.threads import BackgroundThread
from zero.settings import Settings
from zero.store import PrefetchStore
from zero.tracker import RUNNING, Lines, Tracker, open_tracker, write_summary
from zero.tracker.earlier import earlier
from zero.tracker.meter import Meter
from zero.tracker.views.jsonl import unused_folder

log = logging.getLogger("zero")

SECTIONS = ("zero", "offload", "batch", "precision", "tracker")
"""Sections of the settings that are recorded, because they apply to any model and loop."""
WARM_UP_STEPS = 2
"""Number of first steps that the speed does not include."""


class EngineInfo(nn.Module):
    """The part of an engine that only reports its settings, counts and metrics.

    Attributes:
        module: the model, which runs on gathered parameters.
        device: the device of this rank.
        local_rank: the index of this rank's GPU; the rank itself where there is none.
        global_rank: the rank, from 0.
        world_size, dp_world_size: the number of ranks.
        global_samples: number of samples of all steps, over all ranks.
        global_steps: number of steps, including skipped steps and those of a checkpoint that was loaded without its
            optimizer.
        skipped_steps: number of steps that were skipped because a gradient was not finite.
        loss_scale: the factor on the next loss; 1 except in fp16.
    """

    def __init__(self, config: Settings, state: State, optimizer: Optimizer, run_log: "RunLog | None") -> None:
        super().__init__()
        self._run_log = run_log
        self.config, self.plan, self.optimizer = config, state.plan, optimizer
        self.module, world = state.model, self.plan.world
        self.device, self.global_rank = world.device, world.rank
        self.local_rank = world.rank if world.device.index is None else world.device.index
        self.world_size = self.dp_world_size = world.size
        self.metrics: Metrics | None = None
        self._steps_before = self.global_samples = 0
        self._keep(state)
        self._warned: set[str] = set()
        self._closing = weakref.finalize(self, _close_in_thread, state.runtime.store, run_log)
        self._closing.atexit = False

    def _keep(self, state: State) -> None:
        """Store a new state, and a copy of its counts, because they may be read after `destroy`."""
        self._state, self.loss_scale = state, state.scale.scale
        self.global_steps, self.skipped_steps = self._steps_before + state.tried, state.skipped

    @property
    def state(self) -> State:
        """The training state, for functions such as `zero.get_full`.

        Raises:
            ConfigError: the engine was destroyed.
        """
        if not self._closing.alive:
            raise ConfigError("this engine was destroyed. Make another with zero.initialize.")
        return self._state

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped because a gradient was not finite."""
        return self.metrics is not None and self.metrics.skipped

    def gradient_accumulation_steps(self) -> int:
        """Return the number of microbatches of a step."""
        return self.plan.accumulate

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples in a microbatch of one rank."""
        return self.config.batch.numbers()[1]

    def train_batch_size(self) -> int:
        """Return the number of samples in a step, over all ranks."""
        return self.config.batch.numbers()[0]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's mean gradient before clipping; None before the first step."""
        return self.metrics.grad_norm if self.metrics is not None else None

    def _warn_once(self, line: str) -> None:
        if line not in self._warned and self.global_rank == 0:
            log.warning("%s", line)
        self._warned.add(line)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group.

        Args:
            lr: the learning rate, until a scheduler writes the next.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def zero_optimization_stage(self) -> int:
        """Return the stage, 0 to 3."""
        return self.plan.facts.stage.level

    def gradient_clipping(self) -> float:
        """Return the largest gradient norm; 0 without clipping."""
        return self.plan.optimizer.clip or 0.0

    def fp16_enabled(self) -> bool:
        """Return whether the model computes in fp16."""
        return self.plan.precision.compute == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Return whether the model computes in bf16."""
        return self.plan.precision.compute == torch.bfloat16

    def zero_optimization(self) -> bool:
        """Return whether the stage is above 0."""
        return self.plan.facts.stage.moments

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded: stages 2 and 3."""
        return self.plan.facts.stage.gradients

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are sharded: stage 3."""
        return self.plan.facts.stage.parameters

    def empty_partition_cache(self) -> None:
        """Do nothing, because gathered parameters are not cached after their use."""


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
        self._has_begun = False
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
            self.meter.go_on(earlier(self._folder, self.meter.steps))

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


def _close(store: PrefetchStore, run_log: RunLog | None) -> None:
    try:
        if run_log is not None:
            run_log.close(None)
    finally:
        store.close()


def _close_in_thread(store: PrefetchStore, run_log: RunLog | None) -> None:
    # in a thread, because Python may collect an engine anywhere, even in the store's threads and under its lock
    BackgroundThread(partial(_close, store, run_log), name="closing").start()


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
    """Return the settings of a run as JSON values: `SECTIONS` of the config, and the optimizer's groups."""
    groups = {str(number): group for number, group in enumerate(optimizer_settings(optimizer.param_groups))}
    chosen = {"kind": optimizer.kind, "clip": config.optim.clip, "groups": groups}
    sections = {key: value for key, value in config.plain().items() if key in SECTIONS}
    return {"mode": "train", **sections, "optimizer": json.loads(json.dumps(to_json(chosen), default=str))}
