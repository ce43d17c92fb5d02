"""One run on one rank: where it goes on from, the loop, and what it says and saves on the way."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero.checkpoint import Checkpoint, load
from zero.engine.init import init
from zero.engine.plan import Plan
from zero.engine.step import Metrics, make_forward, make_step, record
from zero.errors import MachineError, NumericsError
from zero.store import PrefetchStore
from zero.tracker import RUNNING, Tracker, write_summary
from zero.tracker.jsonl import CUT_SHORT, EVALUATED, FINISHED, STOPPED
from zero.tracker.meter import Meter, Summary
from zero.trainer.config import Config
from zero.trainer.data.windows import Data
from zero.trainer.evaluate import sample_text, validation_loss
from zero.trainer.planning import against_measured, measured
from zero.trainer.resume import refuse_other_model, refuse_other_moments
from zero.trainer.saver import ASKED_TO_STOP, Saver
from zero.trainer.task import Task

RECORDED = 3
"""Which step after a start is recorded at the earliest: the first ones learn in which order units are visited."""

MOST_SKIPPED = 50
"""Steps skipped in a row that end a run. A loss scale falls from its usual start to 1 in 32."""


class Training:
    """A run whose batch is solved for this world.

    Args:
        folder: of the run.
        checkpoint: what it goes on from; None for a fresh start.
        asked_to_stop: whether a signal has asked this rank to save and return.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        store: PrefetchStore,
        data: Data,
        tracker: Tracker,
        folder: Path,
        task: Task,
        *,
        checkpoint: Checkpoint | None,
        asked_to_stop: Callable[[], bool],
    ) -> None:
        self._config, self._data, self._tracker, self._folder = config, data, tracker, folder
        self._world = plan.world
        self._rows, self._micro, self._accumulate = config.batch.numbers()
        self._last = min(config.steps, config.debug.stop_at or config.steps)
        for line in task.notes if checkpoint is None else ():
            tracker.note(line)
        self._state = init(plan, store, seed=config.seed, weights=task.weights, progress=tracker.progress)
        if checkpoint is not None:
            refuse_other_model(config, checkpoint)
            if config.mode == "train":
                refuse_other_moments(config, plan.optimizer, checkpoint)
            keys, show = config.checkpoint, tracker.progress
            self._state = load(
                self._state,
                checkpoint,
                partial=keys.partial,
                convert=keys.convert,
                moments=config.mode == "train",
                weights=config.val.weights,
                note=tracker.note,
                progress=show,
            )
        self._meter = Meter(
            self._world,
            plan,
            tokens_per_step=self._rows * config.model.seq,
            traffic=lambda: store.traffic,
            steps=0 if checkpoint is None else checkpoint.step,
            tokens=0 if checkpoint is None else checkpoint.facts.get("tokens", 0),
            skipped=self._state.skipped,
            flops_per_token=task.flops_per_token,
        )
        tracker.begin(
            config.plain(),
            {
                "plan_bytes": plan.bytes,
                "ranks": plan.world.size,
                "parameters_numel": plan.numel,
                "data_digest": data.digest,
                "torch": str(torch.__version__),
            },
            None if checkpoint is None else checkpoint.facts.get("wandb"),
        )
        self._measured_bytes = measured(self._state)
        self._skipped_in_a_row = 0
        self._saver = Saver(
            config,
            plan,
            folder,
            facts=self._facts,
            note=tracker.note,
            saved=tracker.saved,
            progress=tracker.progress,
            asked_to_stop=asked_to_stop,
            began_from=checkpoint,
        )
        self._step = make_step(plan, task.loss, flag=self._saver.word)
        self._loss = make_forward(plan, task.loss)
        self._logits = make_forward(plan, task.logits)

    def run(self) -> str:
        """Do what `config.mode` says; returns how it ended."""
        if self._config.mode == "eval":
            self._validate()
            of = "" if self._config.val.weights == "parameter" else f" of {self._config.val.weights}"
            self._tracker.note(f"step {self._meter.steps}  validation loss{of} {self._meter.val_loss:.4f}")
            return EVALUATED
        if self._meter.steps >= self._last:
            self._tracker.note(
                f"the checkpoint is at step {self._meter.steps} of {self._last}: nothing is left to train"
            )
        recorded = step_to_record(self._meter.steps + RECORDED, self._last, self._is_followed)
        for number in range(self._meter.steps + 1, self._last + 1):
            if self._one_step(number, self._recording() if number == recorded else contextlib.nullcontext()):
                self._saver.finish()
                return STOPPED
        self._saver.finish()
        if self._config.sample.tokens:
            self._tracker.note("sample:")
            self._tracker.note(sample_text(partial(self._logits, self._state), self._data, self._world, self._config))
        return FINISHED if self._last == self._config.steps else CUT_SHORT

    def report(self, write: Callable[[Path, Mapping[str, Any]], None], exit_reason: str) -> Summary:
        """What is known of the run, written by rank 0. Not collective: the other ranks may be gone."""
        so_far = self._meter.summary(self._data.digest, exit_reason, self._saver.last_published)
        if self._world.rank == 0:
            write(self._folder, so_far._asdict() | {"measured_bytes": self._measured_bytes})
        return so_far

    def against_plan(self) -> str:
        """What this rank planned to hold, and what it holds between two steps."""
        self._measured_bytes = measured(self._state)
        return against_measured(self._state.plan, self._measured_bytes)

    def abandon(self) -> None:
        """The run has failed."""
        self._saver.abandon()

    def _one_step(self, number: int, around: contextlib.AbstractContextManager[None]) -> bool:
        """Train, save, validate and tell, as it is due; returns whether some rank was asked to stop."""
        with around:
            self._state, metrics = self._step(self._state, self._microbatches(number))
        self._meter.count(metrics)
        self._skipped_in_a_row = (self._skipped_in_a_row + 1) * metrics.skipped
        if self._skipped_in_a_row >= MOST_SKIPPED:
            self._tell(validated=False)  # what it ends with
            raise _hopeless(self._meter.steps, metrics)
        stopping = number < self._last and any(int(word) & ASKED_TO_STOP for word in metrics.rank_flags)
        with self._meter.paused():
            self._saver.publish_if_written(metrics.rank_flags)
            if stopping or self._saver.is_due(number, self._last):
                self._saver.save(self._state)
        validating = not stopping and self._is_validated(number)
        if validating:
            self._validate()
        if validating or stopping or number % self._config.tracker.every == 0:
            self._tell(validated=validating)
        return stopping

    def _tell(self, *, validated: bool) -> None:
        """One row. Collective."""
        row = self._meter.row(validated=validated)
        self.report(write_summary, RUNNING)  # for a run that is killed
        self._tracker.log(row)

    def _is_followed(self, number: int) -> bool:
        """A validation or a save comes between this step and the next."""
        return self._is_validated(number) or self._saver.is_due(number, self._last)

    def _is_validated(self, number: int) -> bool:
        every = self._config.val.every
        return number == self._last or (every > 0 and number % every == 0)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Around the step that rank 0 records, with `profile` by torch, too. It takes longer, so nobody times it."""
        with self._meter.untimed():
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
                except (MachineError, RuntimeError) as error:  # a picture is no reason to stop: the others go on
                    self._tracker.note(f"warning: no trace: {error}")
            self._world.barrier("a step was recorded")  # the next one must not wait for its files

    def _microbatches(self, number: int) -> tuple[torch.Tensor, ...]:
        """This rank's rows of a step, which depend on seed and step alone."""
        count = self._accumulate * self._micro
        first = self._world.rank * count
        batch = self._data.batch(1 if self._config.debug.overfit else number, first, first + count, self._rows)
        return batch.to(self._world.device).split(self._micro)

    def _validate(self) -> None:
        with self._meter.paused():
            of_chunk = partial(self._loss, self._state)
            rows, show = self._config.val.rows, self._tracker.progress
            self._meter.validated(validation_loss(of_chunk, self._data, self._world, rows=rows, progress=show))

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint remembers beside the state."""
        return {
            "config": self._config.plain(),
            "data": self._data.digest,
            "tokens": self._meter.tokens,
            "wandb": self._tracker.run_id,
        }


def step_to_record(first: int, last: int, is_followed: Callable[[int], bool]) -> int:
    """The first one from `first` on that follows a step directly, or `first`: after a validation units may be whole.

    Args:
        is_followed: something comes between this step and the next; where it is not so after each, then not after one
            of four in a row.
    """
    return next((number for number in range(first, min(first + 3, last) + 1) if not is_followed(number - 1)), first)


def _hopeless(step: int, metrics: Metrics) -> NumericsError:
    return NumericsError(
        f"step {step}: the last {MOST_SKIPPED} steps were skipped, because the gradient of {metrics.nonfinite_unit} is "
        f"not finite (loss scale {metrics.loss_scale:g}); lower optim.lr, or use precision=bf16, or resume from an "
        "older checkpoint"
    )


def _profiler(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Torch's, which sees the store's threads too."""
    if not wanted:
        return contextlib.nullcontext()
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(experimental_config=all_threads)
