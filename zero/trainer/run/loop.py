"""One rank's part of a training run: its steps, and the reports, validations and saves between them.

The loop over the steps is in train.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zero.checkpoint import Checkpoint
from zero.engine.make_step import make_forward, record
from zero.engine.metrics import Metrics
from zero.engine.pressure import Pressure
from zero.engine.state import State
from zero.errors import NumericsError, Preempted
from zero.tracker import Tracker
from zero.tracker.meter import Meter, Summary
from zero.tracker.run_record import RECORDED, RunRecord
from zero.tracker.views.jsonl import CUT_SHORT, EVALUATED, FINISHED, PATIENCE_REACHED, STOPPED
from zero.trainer.config import Config, defaults_for
from zero.trainer.data.lengths import counted_lengths
from zero.trainer.data.windows import Data, slice_of
from zero.trainer.launch import describe, preempted, save_on_sigint
from zero.trainer.planning import against_measured, measured
from zero.trainer.run.evaluate import sample_text, validation_loss
from zero.trainer.run.resume import starts_before
from zero.trainer.run.saver import STOP_REQUESTED, Saver
from zero.trainer.run.task import Task

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
        self._last = min(config.steps, config.debug.stop_at or config.steps)
        self._meter = Meter(
            self._world,
            plan,
            tokens_per_step=config.batch.numbers()[0] * config.model.seq,
            traffic=lambda: store.traffic,
            steps=0 if checkpoint is None else checkpoint.step,
            tokens=before.get("tokens", 0),
            skipped=self._state.skipped,
            flops_per_token=task.flops_per_token,
        )
        if checkpoint is not None and config.mode == "train":
            self._meter.go_on(*starts_before(checkpoint, folder, config, data.digest))
        known = {
            "plan_bytes": plan.bytes,
            "ranks": plan.world.size,
            "parameters_numel": plan.numel,
            "data_digest": data.digest,
            "torch": str(torch.__version__),
        }
        tracker.begin(config.plain(), known, before.get("wandb"))
        self._saver = saver = Saver(
            config, plan, folder, tracker, facts=self._facts, stop_requested=preempted, began_from=checkpoint
        )
        self._record = RunRecord(
            folder if self._world.rank == 0 else None,
            self._meter,
            tracker,
            lambda: saver.last_published,
            data_digest=data.digest,
        )
        self._record.further["measured_bytes"] = measured(state)
        if example := data.example():
            self._record.further["example"] = example
        if lengths := data.lengths():
            self._record.further["lengths"] = {"counts": counted_lengths(lengths), "row": config.model.seq + 1}
        state.runtime.pressure = Pressure(plan, note=self.note_move)
        if predicted_s is not None:
            self._record.further["plan_step_s"] = predicted_s
        self._recorded, self._stopping = 0, False
        self._cross_entropy = make_forward(plan, task.cross_entropy)
        self._logits = make_forward(plan, task.logits)

    def note_move(self, line: str) -> None:
        """Print a line about a move of the state or a step that was made again, and keep it for the summary."""
        self._tracker.note(line)
        self._record.further["moves"] = [*self._record.further.get("moves", []), line]

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
        if self._config.checkpoint.saves:
            save_on_sigint(announces=self._world.rank == 0)
        if self._config.val.at_start and first == 1:
            self._validate()
            self._log(validated=True)
        self._recorded = step_to_record(first - 1 + RECORDED, self._last, self._is_followed)
        self._tracker.waiting("the first step")
        for number in range(first, self._last + 1):
            yield number
            if number == first:
                every = self._config.tracker.every
                self._tracker.waiting(f"the row of step {min(-(-number // every) * every, self._last)}")
            if self._stopping or self._is_out_of_patience:
                return

    def microbatches(self) -> tuple[torch.Tensor, ...]:
        """Return this rank's microbatches of the next step, (micro, seq + 1) tokens each, or its slices of them.

        They depend on the seed and on the tokens of the steps before alone, also of earlier starts.
        """
        sequence = self._config.zero.sequence
        group, place = divmod(self._world.rank, sequence)
        _, micro, accumulate = self._config.batch.numbers()
        count = accumulate * micro
        first = group * count + (0 if self._config.debug.overfit else self._meter.tokens // self._config.model.seq)
        batch = self._data.rows(first, first + count)
        rows = slice_of(batch, place, sequence).to(self._world.device)
        return rows.split(count // self._state.plan.accumulate)  # a step that ran out of memory may have halved `micro`

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
                with self._record.writing_trace():
                    timeline.write(self._folder / "trace.json")
                    if profile is not None:
                        profile.export_chrome_trace(str(self._folder / "profile.json"))
            self._world.barrier("a step was recorded")  # else the next step would wait for these files

    def after(self, state: State, metrics: Metrics) -> None:
        """Count a step; save, validate and log a row of metrics if they are due. Collective.

        Raises:
            NumericsError: `MOST_SKIPPED` steps in a row were skipped.
        """
        self._state = state
        self._meter.plan, self._meter.moved_bytes = state.runtime.present()
        self._meter.count(metrics)
        number = self._meter.steps
        self._check_skipped(number)
        self._stopping = number < self._last and any(int(flag) & STOP_REQUESTED for flag in metrics.rank_flags)
        validating = not self._stopping and self._is_validated(number)
        if validating or self._stopping or self._is_followed(number):  # their time would include this step's updates
            self._state.runtime.finish_step()
        with self._meter.interval.clock_stopped():
            self._saver.publish_if_written(metrics.rank_flags)
        if validating:
            self._validate()
        best = validating and self._config.checkpoint.best is not None and self._meter.so_far.best_val_step == number
        if best or self._stopping or self._saver.is_due(number, number if self._is_out_of_patience else self._last):
            with self._meter.interval.paused():
                self._saver.save(self._state, best=best)
        if validating or self._stopping or number % self._config.tracker.every == 0:
            self._log(validated=validating)

    def end(self) -> Summary:
        """Finish saves, generate the sample or evaluate, and write summary.json and report.html. Collective."""
        exit_reason = self._finish()
        held = self._record.further["measured_bytes"] = measured(self._state)
        summary = self._record.write(exit_reason)
        if self._world.rank == 0:
            self._tracker.note(against_measured(self._state.plan, held))
        self._record.write_report(describe, defaults_for)
        if summary.endurance:
            self._tracker.note(summary.endurance)
        self._tracker.finish(summary._asdict(), Preempted.exit_code if exit_reason == STOPPED else 0)
        return summary

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None:
            self._saver.abandon()
            self._record.write_failure(describe(error))

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
            self._record.further["sample"] = text
            self._tracker.note(f"sample:\n{text.rstrip()}")
        if self._meter.steps < self._last:
            loss, step = self._meter.so_far.best_val_loss, self._meter.so_far.best_val_step
            self._tracker.note(f"val.patience: the validation loss was lowest at step {step:g}, {loss:.4f}")
            return PATIENCE_REACHED
        return FINISHED if self._last == self._config.steps else CUT_SHORT

    def _check_skipped(self, number: int) -> None:
        """Raise NumericsError if the last `MOST_SKIPPED` steps were skipped."""
        results = self._meter.results
        if results.skipped_in_a_row < MOST_SKIPPED - 1:  # of all steps but this one, for which nobody has waited yet
            return
        last = results.last
        if last is not None and results.skipped_in_a_row >= MOST_SKIPPED:
            self._log(validated=False)
            raise NumericsError(
                f"step {number}: the last {MOST_SKIPPED} steps were skipped, because the gradient of "
                f"{last.nonfinite_unit} is not finite (loss scale {last.loss_scale:g}). Lower optim.lr, use "
                "precision=bf16, or resume from an older checkpoint."
            )

    @property
    def _is_out_of_patience(self) -> bool:
        """Whether the last `val.patience` validations of this start have not lowered the loss."""
        patience = self._config.val.patience
        return patience is not None and self._meter.worse_validations >= patience

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

    def _log(self, *, validated: bool) -> None:
        shares = self._data.shares(self._meter.tokens // self._config.model.seq)
        further = {f"data/{name}": share for name, share in shares.items()}
        self._record.log(validated=validated, further=further)

    def _facts(self) -> dict[str, Any]:
        """Return the facts that a checkpoint stores in addition to the state."""
        return {
            "config": self._config.plain(),
            "data": self._data.digest,
            "turns": self._data.has_turns,
            "tokens": self._meter.tokens,
            "wandb": self._tracker.run_id,
            "so far": self._meter.so_far.facts(),
        }


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
