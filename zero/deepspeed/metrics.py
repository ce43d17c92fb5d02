"""What an engine reports: facts and counts to a script, its speed, and rows to a console, a folder and W&B.

With a folder a loop leaves what a run of train.py leaves (config.yaml, metrics.jsonl, summary.json), so
`zero-train report FOLDER` makes the same page of it, and W&B shows the same rows.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from zero.checkpoint.disk import naming
from zero.checkpoint.json_values import to_json
from zero.checkpoint.save import by_rank_0
from zero.deepspeed.optimizers import Optimizer, settings_of
from zero.distributed.world import World, default_group
from zero.engine.state import State
from zero.engine.step import Metrics
from zero.settings import Settings
from zero.tracker import RUNNING, Lines, Tracker, open_tracker, write_summary
from zero.tracker.earlier import earlier
from zero.tracker.jsonl import unused_folder
from zero.tracker.meter import Meter

log = logging.getLogger("zero")

SECTIONS = ("zero", "offload", "batch", "precision", "tracker")
"""Sections of a config that also hold for a model and a loop of the user's own."""
WARM_UP_STEPS = 2
"""Steps at the beginning that a speed leaves out."""


class EngineInfo(nn.Module):
    """The part of an engine that only reports; see also `public_names`.

    Attributes:
        module: the model, which runs on gathered parameters.
        json: keys of the configuration, dotted, and what they say.
        device: the device of this rank.
        local_rank: the index of this rank's GPU; the rank itself where there is none.
        global_rank: the rank, from 0.
        world_size, dp_world_size: the number of ranks.
        global_samples: rows of all steps, on all ranks.
    """

    def __init__(self, config: Settings, state: State, optimizer: Optimizer, json: Mapping[str, Any]) -> None:
        super().__init__()
        self.json = json
        self.config, self.plan, self.optimizer, self._state = config, state.plan, optimizer, state
        self.module, world = state.model, self.plan.world
        self.device, self.global_rank = world.device, world.rank
        self.local_rank = world.rank if world.device.index is None else world.device.index
        self.world_size = self.dp_world_size = world.size
        self.metrics: Metrics | None = None
        self._steps_before = self.global_samples = 0
        self._warned: set[str] = set()

    @property
    def global_steps(self) -> int:
        """Steps tried, skipped ones included, and those of a checkpoint that was loaded without its optimizer."""
        return self._steps_before + self._state.tried

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because a gradient was not finite."""
        return self._state.skipped

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss; 1 except in fp16."""
        return self._state.scale.scale

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped because a gradient was not finite."""
        return self.metrics is not None and self.metrics.skipped

    @property
    def data_parallel_group(self) -> Any:
        """Torch's group of all ranks; None where `torch.distributed` is not open."""
        return default_group()

    def gradient_accumulation_steps(self) -> int:
        """Microbatches of a step."""
        return self.plan.accumulate

    def train_micro_batch_size_per_gpu(self) -> int:
        """Rows of a microbatch on one rank."""
        return self.config.batch.numbers()[1]

    def train_batch_size(self) -> int:
        """Rows of a step on all ranks."""
        return self.config.batch.numbers()[0]

    def get_batch_info(self) -> tuple[int, int, int]:
        """Rows of a step, rows of a microbatch on one rank, microbatches of a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's mean gradient before clipping; None before the first step."""
        return self.metrics.grad_norm if self.metrics is not None else None

    def _warn_once(self, line: str) -> None:
        """Log a warning on rank 0, the first time."""
        if line not in self._warned and self.global_rank == 0:
            log.warning("%s", line)
        self._warned.add(line)

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group.

        Args:
            lr: it holds until a scheduler writes the next one.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def steps_per_print(self) -> int:
        """Steps from one row to the next."""
        return self.config.tracker.every

    def get_mom(self) -> list[Any]:
        """The betas, or else the momentum, of each group."""
        groups = self.optimizer.param_groups
        return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in groups]

    def zero_optimization_stage(self) -> int:
        """The stage, 0 to 3."""
        return self.plan.stage.level

    def gradient_clipping(self) -> float:
        """The largest gradient norm; 0 for none."""
        return self.plan.optimizer.clip or 0.0

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.plan.precision.compute == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.plan.precision.compute == torch.bfloat16


class Throughput:
    """Rows a second: DeepSpeed's `engine.tput_timer`, a clock that runs while a step does.

    The engine starts it at the first forward of a step and stops it where the update is decided, when every rank has
    waited for the norm. What a loop does between two steps is not counted; the update is, in the next forward.

    Args:
        rows: rows of a step, on all ranks.

    Attributes:
        epoch_count, micro_step_count, global_step_count: calls of `update_epoch_count`, stops in this epoch, steps.
        total_elapsed_time: seconds of all steps but the first two.
    """

    def __init__(self, rows: int) -> None:
        self.batch_size, self.start_step = rows, WARM_UP_STEPS
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self._began_s: float | None = None

    def update_epoch_count(self) -> None:
        """Begin another epoch."""
        self.epoch_count, self.micro_step_count = self.epoch_count + 1, 0

    def start(self) -> None:
        """Start the clock."""
        self._began_s = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Stop the clock; it has no effect on one that is stopped.

        Args:
            global_step: a whole step has ended.
            report_speed: for old calls; rows of metrics have the speed.
        """
        if self._began_s is None:
            return
        if self.global_step_count >= self.start_step:
            self.total_elapsed_time += time.perf_counter() - self._began_s
        self._began_s = None
        self.micro_step_count += 1
        self.global_step_count += global_step

    def avg_samples_per_sec(self) -> float:
        """Rows a second over all steps but the first two; minus infinity before one has ended, as in DeepSpeed."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if steps > 0 else float("-inf")


class RunLog:
    """The rows and files of one run. Making one, `log_step` and `log_checkpoint` are collective.

    Files begin with the first step or checkpoint, when it is known whether a loaded checkpoint goes on: only then are
    rows appended to those of an earlier start. Otherwise a folder with rows of another run is left as it is, and a new
    one below it is used.

    Args:
        settings: JSON values for config.yaml and W&B.
        folder: made if it is missing, written by rank 0; None for lines on the console only.
        tokens_per_row: what a row of the batch counts as; with 1, files count rows where they say tokens.
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
        self._run_id: str | None = None
        self._has_begun = self._continues = False
        self.start_from(0, 0, 0)
        make_folder(plan.world, self._folder)
        self.tracker = Tracker()

    @property
    def run_id(self) -> str | None:
        """W&B's name of the run, for a checkpoint; None without W&B."""
        self._begin()
        return self.tracker.run_id

    def start_from(self, steps: int, skipped: int, rows: int) -> None:
        """Count on from these numbers of steps, of skipped ones and of rows on all ranks."""
        self.meter = self._meter(steps=steps, tokens=rows * self._tokens_per_row, skipped=skipped)
        if self._has_begun:
            self._look_back()

    def continue_run(self, run_id: str | None) -> None:
        """Append to the run of a checkpoint that was loaded; `run_id` is W&B's name of it."""
        self._continues, self._run_id = True, run_id

    def log_step(self, metrics: Metrics, *, has_loss: bool, rows: int) -> None:
        """Count a step of `rows` on all ranks, and write a row of metrics if one is due; null for the loss if none."""
        self._begin()
        self.meter.count(metrics, rows * self._tokens_per_row)
        if self.meter.steps % self._config.tracker.every == 0:
            row = self.meter.row(validated=False) | ({} if has_loss else {"train/loss": None})
            self._write_summary(RUNNING)
            self.tracker.log(row)

    def log_checkpoint(self, path: Path) -> None:
        """Report a published checkpoint."""
        self._begin()
        self.tracker.saved(path, self.meter.steps)

    def close(self, how: str | None) -> None:
        """End the rows. `how` is the state of the run for summary.json; None if it is not known."""
        if how is not None and self._has_begun:
            self._write_summary(how)
        with self.tracker:
            self.tracker.finish(self.meter.summary("", how or RUNNING)._asdict())

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
        """The files know what this start, or this step, goes on from."""
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

    def _write_summary(self, how: str) -> None:
        if self._folder is not None:
            write_summary(self._folder, self.meter.summary("", how)._asdict())


def make_folder(world: World, folder: Path | None) -> None:
    """Make rank 0's folder if there is one, and it is missing. Collective.

    Raises:
        CheckpointError: it cannot be made; on every rank.
    """

    def make() -> None:
        if folder is not None:
            with naming(folder, "making it"):
                folder.mkdir(parents=True, exist_ok=True)

    by_rank_0(world, make)


def run_settings(config: Settings, optimizer: Optimizer) -> dict[str, Any]:
    """The settings of a run as JSON values: sections of the config that hold for any loop, and the optimizer's."""
    groups = {str(number): group for number, group in enumerate(settings_of(optimizer.param_groups))}
    own = {"kind": optimizer.kind, "clip": config.optim.clip, "groups": groups}
    sections = {key: value for key, value in config.plain().items() if key in SECTIONS}
    return {"mode": "train", **sections, "optimizer": json.loads(json.dumps(to_json(own), default=str))}
