"""`zero.track`: metrics, console output, charts, timeline and report for a user's own training loop."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import yaml
from torch import Tensor

from zero.checkpoint.agreement import by_rank_0
from zero.checkpoint.files.publish import own_root
from zero.core.checks import type_text
from zero.engine.arguments import check_folder, check_type, numbers_by_name
from zero.engine.metrics import Metrics
from zero.engine.state import State
from zero.engine.whole import measured
from zero.errors import ConfigError, one_line, with_class
from zero.platform.files import naming
from zero.platform.installed import from_here
from zero.platform.timeline import Timeline
from zero.tracker import Tracker, open_tracker
from zero.tracker.earlier_starts import earlier_starts
from zero.tracker.meter import Meter
from zero.tracker.report import run as report
from zero.tracker.run_record import NOTHING, RunRecord, Unit
from zero.tracker.settings import TrackerSettings
from zero.tracker.step_recorder import StepRecorder
from zero.tracker.track_arguments import plain_settings, speed_unit, tracker_settings
from zero.tracker.views.jsonl import FINISHED, unused_folder


def track(
    state: State,
    folder: str | os.PathLike[str],
    *,
    samples: int | None = None,
    tokens: int | None = None,
    steps: int | None = None,
    every: int = 10,
    tracker: str | Iterable[str] | Mapping[str, Any] = "jsonl",
    config: Mapping[str, Any] = NOTHING,
    flops: float | None = None,
    timeline: bool = True,
) -> "Track":
    """Track the steps of your own training loop: metrics, console output, timeline and report, as train.py has them.

        with zero.track(state, "runs/vit", samples=64, tracker="tensorboard") as track:
            for batch in loader:
                state, metrics = step(state, [batch])
                track(state, metrics)

    Rank 0 writes these files to the folder: config.yaml, metrics.jsonl with a row of metrics every `every` steps,
    summary.json, trace.json with the timeline of one step, and at the end report.html, which `zero-train report FOLDER`
    can write again. Rows are printed too; with `steps`, a terminal shows a progress bar. Collective: every rank enters
    and leaves the block, calls `track` after every step, and enters each pause.

    Args:
        state: the state before the first step. If it was loaded from a checkpoint, its steps are counted.
        folder: the run folder, created if missing. If `state` continues a run, rows are appended. Otherwise a folder
            with rows of another run is left unchanged, and `run-2`, `run-3`, ... below it is used; see `Track.folder`.
            A world with coordinates, such as {"tp": 1}, has a folder of its own in it, tp-1.
        samples: number of samples in all microbatches of a step on this rank, equal on all ranks. Speed is then in
            samples per second.
        tokens: number of tokens instead of samples. Speed is then in tokens per second, and the loss is assumed to be
            in nats per token. Without `samples` and `tokens`, speed is only the time of a step.
        steps: number of steps of the whole run, for the progress bar and the remaining time; None: unknown.
        every: number of steps between two rows, at least 1.
        tracker: "jsonl", "wandb" or "tensorboard", several of them, or the settings of `tracker` in docs/config.md as a
            mapping, such as {"name": "wandb", "project": "vit", "tags": ["first"]}.
        config: your settings, for the report, W&B and TensorBoard; values that JSON does not have are written as text.
        flops: floating-point operations of forward and backward for one sample or token; None: MFU is not computed.
        timeline: whether to record one of the first steps and write it to trace.json.

    Raises:
        ConfigError: an unknown or invalid setting, or one that looks like a secret.
        StaleStateError: `state` is spent.
        CheckpointError (entering the block, on every rank): the folder cannot be created.
        MachineError (in the block): a file cannot be written.
    """
    check_type(state, State, "zero.track", "with zero.track(state, folder) as track:")
    check_folder(folder, "zero.track", "with zero.track(state, folder) as track:")
    settings = tracker_settings(tracker, every)
    unit, count = speed_unit(samples, tokens, steps, config, flops)
    per_step = count * state.plan.world.size
    plain = plain_settings(config, state.plan, {unit: per_step, "steps": steps})
    own = own_root(Path(folder), state.plan.world).path
    return Track(state, own, settings, unit, per_step, flops, steps=steps, config=plain, records=timeline)


class Track:
    """The tracker of a user's own loop, returned by `zero.track`: a context manager that is called after each step.

    Leaving the block writes summary.json and the report, also after an exception.

    Attributes:
        folder: the run folder that is used; inside the block it is the same on every rank.
    """

    def __init__(
        self,
        state: State,
        folder: Path,
        settings: TrackerSettings,
        unit: Unit,
        per_step: int,
        flops: float | None,
        *,
        steps: int | None,
        config: Mapping[str, Any],
        records: bool,
    ) -> None:
        self._state, self._runtime, self._world, self.folder = state, state.runtime, state.plan.world, folder
        self._settings, self._unit, self._steps, self._config = settings, unit, steps, config
        store = self._runtime.store
        self._meter = Meter(
            self._world,
            state.plan,
            tokens_per_step=per_step,
            traffic=lambda: store.traffic,
            steps=state.tried,
            tokens=state.tried * per_step,
            skipped=state.skipped,
            flops_per_token=None if flops is None else float(flops),
        )
        self._begun_at = self._meter.steps
        self._recorder = StepRecorder(self._world, self._runtime.tape, self._meter.interval, wanted=records)
        self._checkpoint: Path | None = None
        self._tracker = Tracker()
        self._is_open = False

    def __enter__(self) -> "Track":
        self.folder = Path(by_rank_0(self._world, self._make_folder))
        folder = self.folder if self._world.rank == 0 else None
        if folder is not None and self._begun_at:
            self._meter.go_on(earlier_starts(folder, self._begun_at))
        self._tracker = open_tracker(self._settings, folder, steps=self._steps)
        plan = self._state.plan
        facts = {"plan_bytes": plan.bytes, "ranks": self._world.size, "parameters_numel": plan.numel}
        self._tracker.begin(self._config, facts | {"torch": str(torch.__version__)})
        self._tracker.note(f"folder {from_here(self.folder)}")
        self._record = RunRecord(folder, self._meter, self._tracker, lambda: self._checkpoint, unit=self._unit)
        self._is_open = True
        return self

    def __call__(self, state: State, metrics: Metrics, val: Mapping[str, float | Tensor] = NOTHING) -> None:
        """Count a step, and write a row of metrics every `every` steps. Collective: call it after every step.

        Args:
            state: the state after the step.
            metrics: the results of the step. Numbers that `loss_fn` returned beside the loss are in the row as
                `train/NAME`.
            val: this rank's results of an evaluation after the step, by name, such as {"loss": 2.3, "accuracy": 0.5}.
                Their means over ranks are in the row as `val/NAME`. A call with `val` always writes a row.

        Raises:
            ConfigError: the call is outside of the block or is not the only call after one step, or a value of `val` is
                not a number.
        """
        check_type(state, State, "track", "track(state, metrics)")
        if not isinstance(metrics, Metrics):
            raise ConfigError(
                f"track takes Metrics as its second argument, not {type_text(metrics)}. Write track(state, metrics)."
            )
        if not isinstance(val, Mapping):
            raise ConfigError(
                f'track takes a dict of numbers as its third argument, not {type_text(val)}. Write {{"loss": 2.3}}.'
            )
        self._check_open("track")
        self._check_next(state.tried)
        numbers = numbers_by_name(val, "of an evaluation")
        self._recorder.end(self._write_timeline)
        self._state = state
        self._meter.plan, self._meter.moved_bytes = self._runtime.present()
        self._meter.count(metrics)
        if numbers or self._meter.steps % self._settings.every == 0:
            self._log(self._mean(numbers))
        self._recorder.begin(self._meter.steps - self._begun_at)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager for an evaluation or a save, whose time and traffic do not count in the step's statistics.

        Collective: every rank enters it. Deferred updates of the last step are applied on entry, so that their time
        counts in that step.
        """
        self._recorder.drop()
        self._runtime.finish_step()
        with self._meter.interval.paused():
            yield

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the progress of a long operation. Pass this method as `progress=` to `zero.save` and similar functions.

        Args:
            what: the operation, in a few words.
            done, total: amounts in the same unit; `done == total` ends the operation.
        """
        self._tracker.progress(what, done, total)

    def saved(self, checkpoint: str | os.PathLike[str]) -> None:
        """Record a checkpoint in summary.json, and as a W&B artifact if the setting `artifacts` is on.

        Args:
            checkpoint: the folder that `zero.save` returned.
        """
        self._check_open("track.saved")
        self._checkpoint = Path(checkpoint)
        self._tracker.saved(self._checkpoint, self._meter.steps)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        with ExitStack() as at_last:  # closes the views even if this block raises
            at_last.push(lambda _, failed, __: self._tracker.__exit__(error_type, failed or error, trace))
            self._recorder.drop()
            if error is None:
                self._end()
            else:
                self._fail(error)

    def _check_open(self, call: str) -> None:
        if not self._is_open:
            raise ConfigError(f"{call} was called outside of its block. Write with zero.track(state, folder) as track:")

    def _check_next(self, step: int) -> None:
        """Raise ConfigError unless this is the first call after exactly one step."""
        counted = self._meter.steps
        if step != counted + 1:
            raise ConfigError(
                f"track has counted {counted} steps, and this state is at step {step}. Call track(state, metrics) once "
                "after every step, and load a checkpoint before the block. For fewer rows pass every=10 to zero.track."
            )

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _log(self, val: Mapping[str, float]) -> None:
        if "loss" in val:
            self._meter.validated(val["loss"])
        last = self._meter.results.last
        aux = {} if last is None else last.aux
        further = {f"train/{name}": value for name, value in aux.items()}
        further |= {f"val/{name}": value for name, value in val.items()}
        self._record.log(validated="loss" in val, further=further)

    def _mean(self, numbers: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the mean of each number over ranks, by name. Collective; all ranks must have the same names."""
        if not numbers:
            return {}
        names = sorted(numbers)
        sums = torch.stack([numbers[name].to(self._world.device, torch.float64) for name in names])
        self._world.all_reduce(sums, what=f"evaluation: {', '.join(names)}").wait()
        return dict(zip(names, (sums / self._world.size).tolist(), strict=True))

    def _write_timeline(self, timeline: Timeline) -> None:
        with self._record.writing_trace():
            timeline.write(self.folder / "trace.json")

    # -- files ---------------------------------------------------------------------------------------------------------

    def _make_folder(self) -> str:
        folder, settings = self.folder, yaml.safe_dump(dict(self._config), sort_keys=False, allow_unicode=True)
        with naming(folder, "making it"):
            folder.mkdir(parents=True, exist_ok=True)
            folder = folder if self._begun_at else unused_folder(folder)
            (folder / "config.yaml").write_text(settings, encoding="utf-8")
        return str(folder)

    def _end(self) -> None:
        """Write the row of the last steps, and the final files of a run that ended without an exception. Collective."""
        if self._meter.steps_since_row:
            self._log({})
        if self._world.rank == 0:
            self._record.further["measured_bytes"] = {} if self._state.spent_ else measured(self._state)
        summary = self._record.write(FINISHED)
        self._record.write_report(one_line)
        self._tracker.finish(self._record.counted(summary))

    def _fail(self, error: BaseException) -> None:
        """Write the final files of a run that failed. Not collective, because other ranks may have ended already."""
        self._record.write_failure("stopped by SIGINT" if isinstance(error, KeyboardInterrupt) else with_class(error))
        if self._world.rank == 0:
            with suppress(Exception):
                report.write_run(self.folder)
