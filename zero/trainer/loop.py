"""One rank's part of a training run: its steps, and the reports, validations and saves between them.

The loop over the steps is in train.py.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zero.checkpoint import Checkpoint, load
from zero.core.sizes import size_text
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.engine.step import Metrics, make_forward, record
from zero.errors import MachineError, NumericsError, Preempted
from zero.tracker import RUNNING, Tracker, write_failure, write_summary
from zero.tracker.earlier import Earlier, earlier
from zero.tracker.jsonl import CUT_SHORT, EVALUATED, FINISHED, STOPPED
from zero.tracker.meter import Meter, Summary
from zero.tracker.report import run as report
from zero.tracker.report.folder import mapping
from zero.trainer.config import Config
from zero.trainer.data.windows import Data, slice_of
from zero.trainer.evaluate import sample_text, validation_loss
from zero.trainer.launch import describe, preempted
from zero.trainer.planning import against_measured, measured
from zero.trainer.resume import refuse_other_model, refuse_other_moments
from zero.trainer.saver import STOP_REQUESTED, Saver
from zero.trainer.task import Task

RECORDED = 3
"""The first step that may be recorded, counted from 1 at each start of a run. In earlier steps the engine learns in
which order units are visited."""

MOST_SKIPPED = 50
"""Number of steps skipped in a row after which a run ends with an error. A loss scale falls from its usual first
value to 1 in 32 skipped steps."""


class Run(contextlib.AbstractContextManager["Run"]):
    """One rank's part of a run. Creating it is collective.

    As a context manager it writes an error of the body into summary.json, and abandons a save in progress.

    Args:
        config: settings with the batch as numbers for this world, see `Config.on`.
        state: the state before the first step.
        folder: the run's folder.
        checkpoint: the checkpoint to continue from; None for a fresh start.
        predicted_s: predicted seconds of a step; None: nothing was predicted.
    """

    def __init__(
        self,
        config: Config,
        state: State,
        task: Task,
        data: Data,
        tracker: Tracker,
        folder: Path,
        checkpoint: Checkpoint | None,
        predicted_s: float | None = None,
    ) -> None:
        self._config, self._state, self._data, self._tracker, self._folder = config, state, data, tracker, folder
        plan, store = state.plan, state.runtime.store
        before = {} if checkpoint is None else checkpoint.facts
        self._world = plan.world
        self._rows, self._micro, self._accumulate = config.batch.numbers()
        self._last = min(config.steps, config.debug.stop_at or config.steps)
        self._meter = Meter(
            self._world,
            plan,
            tokens_per_step=self._rows * config.model.seq,
            traffic=lambda: store.traffic,
            steps=0 if checkpoint is None else checkpoint.step,
            tokens=before.get("tokens", 0),
            skipped=self._state.skipped,
            flops_per_token=task.flops_per_token,
        )
        if checkpoint is not None and config.mode == "train":
            self._meter.go_on(*_behind(checkpoint, folder))
        known = {
            "plan_bytes": plan.bytes,
            "ranks": plan.world.size,
            "parameters_numel": plan.numel,
            "data_digest": data.digest,
            "torch": str(torch.__version__),
        }
        tracker.begin(config.plain(), known, before.get("wandb"))
        self._beside: dict[str, Any] = {"measured_bytes": measured(self._state)}  # further fields of summary.json
        if predicted_s is not None:
            self._beside["plan_step_s"] = predicted_s
        self._skipped_in_a_row = 0
        self._saver = Saver(
            config, plan, folder, tracker, facts=self._facts, stop_requested=preempted, began_from=checkpoint
        )
        self._recorded, self._stopping = 0, False
        self._cross_entropy = make_forward(plan, task.cross_entropy)
        self._logits = make_forward(plan, task.logits)

    def flag(self) -> float:
        """Return the number that this rank sends with each step: the argument `flag` of `zero.make_step`."""
        return self._saver.flag()

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps to train, until any rank is requested to stop; none with `mode=eval`."""
        first = self._meter.steps + 1
        if self._config.mode == "eval":
            return
        if first > self._last:
            self._tracker.note(f"the checkpoint is at step {first - 1} of {self._last}: nothing is left to train")
        self._recorded = step_to_record(first - 1 + RECORDED, self._last, self._is_followed)
        for number in range(first, self._last + 1):
            yield number
            if self._stopping:
                return

    def microbatches(self, number: int) -> tuple[torch.Tensor, ...]:
        """Return this rank's microbatches of step `number`, (micro, seq + 1) tokens each, or its slices of them.

        They depend on seed and step alone.
        """
        sequence = self._config.zero.sequence
        group, place = divmod(self._world.rank, sequence)
        count = self._accumulate * self._micro
        batch = self._data.batch(1 if self._config.debug.overfit else number, group * count, (group + 1) * count)
        return slice_of(batch, place, sequence).to(self._world.device).split(self._micro)

    @contextlib.contextmanager
    def recorded(self, number: int) -> Iterator[None]:
        """Context manager for each step. Rank 0 records a timeline of one step, with `profile` also torch's profile.

        The time of the recorded step does not count on any rank, because recording slows it.
        """
        if number != self._recorded:
            yield
            return
        with self._meter.interval.untimed():
            if self._world.rank != 0:
                yield
            else:
                profiled = self._config.profile
                with _profiler(profiled) as profile, record(self._state, profile=profiled) as timeline:
                    yield
                try:
                    timeline.write(self._folder / "trace.json")
                    if profile is not None:
                        profile.export_chrome_trace(str(self._folder / "profile.json"))
                except (MachineError, RuntimeError) as error:  # the run continues without a trace
                    self._tracker.note(f"warning: no trace: {error}")
            self._world.barrier("a step was recorded")  # otherwise the next step would wait for these files

    def after(self, state: State, metrics: Metrics) -> None:
        """Count a step; save, validate and log a row of metrics if they are due. Collective.

        Raises:
            NumericsError: `MOST_SKIPPED` steps in a row were skipped.
        """
        self._state = state
        self._meter.count(metrics)
        number = self._meter.steps
        self._skipped_in_a_row = (self._skipped_in_a_row + 1) * metrics.skipped
        if self._skipped_in_a_row >= MOST_SKIPPED:
            self._log(validated=False)
            raise NumericsError(
                f"step {number}: the last {MOST_SKIPPED} steps were skipped, because the gradient of "
                f"{metrics.nonfinite_unit} is not finite (loss scale {metrics.loss_scale:g}). Lower optim.lr, use "
                "precision=bf16, or resume from an older checkpoint."
            )
        self._stopping = number < self._last and any(int(flag) & STOP_REQUESTED for flag in metrics.rank_flags)
        saving = self._stopping or self._saver.is_due(number, self._last)
        validating = not self._stopping and self._is_validated(number)
        if saving or validating:  # otherwise their time would include the updates of this step
            self._state.runtime.finish_step()
        with self._meter.interval.standing():
            self._saver.publish_if_written(metrics.rank_flags)
        if saving:
            with self._meter.interval.paused():
                self._saver.save(self._state)
        if validating:
            self._validate()
        if validating or self._stopping or number % self._config.tracker.every == 0:
            self._log(validated=validating)

    def end(self) -> Summary:
        """Finish saves, generate the sample or evaluate, and write summary.json and report.html. Collective."""
        exit_reason = self._finish()
        held = self._beside["measured_bytes"] = measured(self._state)
        summary = self._report(write_summary, exit_reason)
        if self._world.rank == 0:
            self._tracker.note(against_measured(self._state.plan, held))
            try:
                self._tracker.report(report.write(self._folder, Config().plain()))
                self._tracker.note(f"report {self._folder / 'report.html'}")
            except Exception as error:  # the run itself has ended well
                self._tracker.note(f"warning: no report: {describe(error)}")
        if summary.endurance:
            self._tracker.note(summary.endurance)
        self._tracker.finish(summary._asdict(), Preempted.exit_code if exit_reason == STOPPED else 0)
        return summary

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None:
            self._saver.abandon()
            with contextlib.suppress(MachineError):  # the disk may have failed
                self._report(write_failure, describe(error))

    def _finish(self) -> str:
        """Finish the last save and generate the sample, or evaluate with mode=eval; returns the exit reason."""
        if self._config.mode == "eval":
            self._validate()
            of = "" if self._config.val.weights == "parameter" else f" of {self._config.val.weights}"
            self._tracker.note(f"step {self._meter.steps}  validation loss{of} {self._meter.val_loss:.4f}")
            return EVALUATED
        self._saver.finish()
        if self._stopping:
            return STOPPED
        if self._config.sample.tokens and self._data.has_text:
            text = sample_text(partial(self._logits, self._state), self._data, self._world, self._config)
            self._beside["sample"] = text
            self._tracker.note(f"sample:\n{text.rstrip()}")
        return FINISHED if self._last == self._config.steps else CUT_SHORT

    def _report(self, write: Callable[[Path, Mapping[str, Any]], None], exit_reason: str) -> Summary:
        """Return the summary so far; rank 0 also writes it. Not collective, because other ranks may have ended."""
        so_far = self._meter.summary(self._data.digest, exit_reason, self._saver.last_published)
        if self._world.rank == 0:
            write(self._folder, so_far._asdict() | self._beside)
        return so_far

    def _log(self, *, validated: bool) -> None:
        """Log a row of metrics and update summary.json. Collective."""
        row = self._meter.row(validated=validated)
        self._report(write_summary, RUNNING)  # a run that is killed leaves this summary
        self._tracker.log(row)

    def _is_followed(self, number: int) -> bool:
        """Return whether a validation or a save comes between step `number` and the next."""
        return self._is_validated(number) or self._saver.is_due(number, self._last)

    def _is_validated(self, number: int) -> bool:
        every = self._config.val.every
        return number == self._last or (every > 0 and number % every == 0)

    def _validate(self) -> None:
        with self._meter.interval.paused():
            of_chunk = partial(self._cross_entropy, self._state)
            how = {"rows": self._config.val.rows, "sequence": self._config.zero.sequence}
            show = self._tracker.progress
            self._meter.validated(validation_loss(of_chunk, self._data, self._world, **how, progress=show))

    def _facts(self) -> dict[str, Any]:
        """Return the facts that a checkpoint stores in addition to the state."""
        return {
            "config": self._config.plain(),
            "data": self._data.digest,
            "tokens": self._meter.tokens,
            "wandb": self._tracker.run_id,
            "so far": self._meter.so_far.facts(),
        }


def _behind(checkpoint: Checkpoint, folder: Path) -> list[Earlier]:
    """Return the best losses and the seconds of the steps before a checkpoint, from three sources.

    The sources are the checkpoint, the run that saved it, and the run in `folder`. The checkpoint alone does not have
    the last validation loss, because a run saves before it validates. The seconds of the run that saved it are left
    out, because that run may have continued.
    """
    there = earlier(checkpoint.folder.parent.parent, checkpoint.step)._replace(seconds=0.0)
    return [Earlier.of(mapping(checkpoint.facts.get("so far"))), there, earlier(folder, checkpoint.step)]


def resumed(state: State, checkpoint: Checkpoint | None, config: Config, tracker: Tracker) -> State:
    """Return the state loaded from the checkpoint, or `state` if there is no checkpoint. Collective.

    Raises:
        ConfigError, CheckpointError: the checkpoint is of another model or optimizer, or it is damaged.
    """
    if checkpoint is None:
        return state
    trains = config.mode == "train"
    refuse_other_model(config, checkpoint)
    if trains:
        refuse_other_moments(config, state.plan, checkpoint)
    return load(
        state,
        checkpoint,
        partial=config.checkpoint.partial,
        convert=config.checkpoint.convert,
        moments=trains,
        weights=config.val.weights,
        note=tracker.note,
        progress=tracker.progress,
    )


@contextlib.contextmanager
def out_of_memory_explained(config: Config, plan: Plan) -> Iterator[None]:
    """Turn torch's out-of-memory error into one with the bytes planned and held, and settings that need less.

    Raises:
        MachineError: in place of torch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        device = plan.world.compute
        raise MachineError(out_of_memory(config, plan, device.peak_bytes(), device.total_bytes())) from error


def out_of_memory(config: Config, plan: Plan, held_bytes: int, device_bytes: int) -> str:
    """Return the error message for a GPU that ran out of memory although the plan fitted.

    Args:
        config: settings of the run, with every auto resolved.
        held_bytes: the most bytes that tensors took on the device.
        device_bytes: total memory of the device.
    """
    ways = {
        "a smaller batch.micro": config.batch.numbers()[1] > 1,
        "zero.stage=3": plan.world.size > 1 and not plan.stage.parameters,
        "zero.activations=remat": config.zero.activations != "remat",
        "offload=cpu": config.offload.optimizer in ("none", "auto"),
        "more ranks": True,
    }
    planned_bytes = sum(plan.bytes["device"].values())
    return (
        f"the GPU ran out of memory: planned {size_text(planned_bytes)}, taken {size_text(held_bytes)} of "
        f"{size_text(device_bytes)}. Use {', or '.join(way for way, helps in ways.items() if helps)}."
    )


def step_to_record(first: int, last: int, is_followed: Callable[[int], bool]) -> int:
    """Return the first step from `first` on that directly follows another step.

    A step after a validation or a save is not typical, because units may still be gathered. Four steps are tried: if
    any step is not followed by a validation or a save, one of four in a row is not.

    Args:
        is_followed: returns whether a validation or a save comes between a step and the next.
    """
    return next((number for number in range(first, min(first + 3, last) + 1) if not is_followed(number - 1)), first)


def _profiler(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Return torch's profiler for all threads, including the store's; an empty context manager unless `wanted`."""
    if not wanted:
        return contextlib.nullcontext()
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    # Only one cycle is profiled, so no events accumulate; without acc_events torch 2.11 warns that only one is kept
    return torch.profiler.profile(experimental_config=all_threads, acc_events=True)
