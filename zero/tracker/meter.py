"""The counts of a run, its rows of metrics, and its final summary, from the results of steps."""

import statistics
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero.checkpoint.format.facts import versions
from zero.core.placement import TIERS
from zero.core.precision import DTYPES
from zero.core.sizes import size_text
from zero.distributed.world import World
from zero.engine.metrics import Metrics
from zero.engine.plan import Plan, between_steps, traffic as planned_traffic
from zero.platform.gpu_peaks import peak_flops
from zero.store import Traffic
from zero.tracker.earlier_starts import EarlierStarts
from zero.tracker.interval import Interval, figures
from zero.tracker.step_results import StepResults
from zero.tracker.views.view import NO_CHART, ROW

LIFE_BYTES = 600e12
"""Bytes that may be written to a typical 1 TB drive by its rated endurance (TBW)."""

ENDLESS_STEPS = 1e9
"""Number of steps above which a drive's endurance is not printed."""

TIME_KEYS = (
    *(key for key in ROW if key.startswith("speed/") and key not in NO_CHART),
    "comm/wait_s", "comm/slowest_rank", "comm/slowest_s", "offload/wait_s",
)  # fmt: skip
"""Keys that are null in a row whose steps were all recorded, because recorded steps are not timed."""


class Summary(NamedTuple):
    """Results of a run. Losses are in nats per token, peaks are the largest over ranks, the plan is that of one rank.

    Speeds are medians over the rows except the first, because it is slower; `mfu` is None if the device's peak FLOP/s
    is unknown. `wait_s` is the time that the slowest rank waited for pages or other ranks, `seconds` the duration of
    the run. `offload_written_bytes` is summed over ranks until the last row and includes the initial values.
    `endurance` says how many steps a drive lasts; None if nothing is on disk.

    Counts, best losses and `seconds` include earlier starts of a resumed run; all other values are of this start.
    """

    exit_reason: str
    steps: int
    tokens: int
    seconds: float
    train_loss: float
    best_train_loss: float
    val_loss: float
    best_val_loss: float
    best_val_step: int | None
    skipped: int
    ranks: int
    parameters_numel: int
    trainable_numel: int
    tokens_per_s: float | None
    mfu: float | None
    wait_s: float
    device_peak_bytes: int
    host_peak_bytes: int
    plan_bytes: dict[str, dict[str, int]]
    plan_step_bytes: dict[str, float]
    """Bytes that one rank moves in a step according to the plan, by the fields of `zero.engine.plan.traffic.Load`."""
    offload_written_bytes: int
    endurance: str | None
    data_digest: str
    checkpoint: str | None
    """The path of the newest checkpoint that this start has saved."""
    versions: dict[str, str | None]


class Meter:
    """Counter of the steps, tokens, losses and seconds of a run, on one rank. Only `row` is collective.

    Args:
        tokens_per_step: number of tokens of a step, over all ranks.
        traffic: function that returns the totals of this rank's store.
        steps, tokens, skipped: counts in the checkpoint that the run resumes from.
        flops_per_token: floating-point operations of forward and backward for one token; None: unknown.
        peak_flops: peak FLOP/s of one rank's device; None: looked up by the device's name.

    Attributes:
        interval: time and traffic since the last row; its context managers leave parts of them out.
        steps, tokens: counts since the start of the run, over all ranks; `steps` includes skipped steps.
        results: losses and skipped steps.
        plan, moved_bytes: the present plan, and the bytes that moves of the state have made; set after a step.
        val_loss: newest validation loss; NaN before the first.
        worse_validations: number of the last validations of this start that did not lower the loss.
    """

    def __init__(
        self,
        world: World,
        plan: Plan,
        *,
        tokens_per_step: int,
        traffic: Callable[[], Traffic],
        steps: int = 0,
        tokens: int = 0,
        skipped: int = 0,
        flops_per_token: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        peak = (peak_flops or _peak_flops(world, plan) or 0.0) * world.size
        self._mfu_of_token = flops_per_token / peak if flops_per_token and peak else None
        self.plan, self._tokens_per_step, self.moved_bytes = plan, tokens_per_step, 0
        self._constants: dict[str, Any] = {  # values that every summary has
            "ranks": world.size,
            "parameters_numel": plan.numel,
            "trainable_numel": plan.facts.splitting.trainable_numel,
            "plan_step_bytes": planned_traffic(plan).of_step(plan.accumulate).by_medium if plan.facts.trains else {},
            "versions": versions(),
        }
        self.interval = Interval(world, traffic)
        self.steps, self.tokens, self.results = steps, tokens, StepResults(skipped)
        self._steps_before, self._logged = steps, (steps, tokens, 0)
        self.val_loss, self.worse_validations = nan, 0
        self._earlier = EarlierStarts()  # best losses so far, and the seconds of earlier starts
        self._timed: list[tuple[float, float]] = []  # tokens per second and seconds waited of each row with timed steps

    @property
    def steps_since_row(self) -> int:
        """Number of steps that no row has yet."""
        return self.steps - self._logged[0]

    @property
    def so_far(self) -> EarlierStarts:
        """Best losses and seconds so far, for a later start that resumes the run from here."""
        best_train_loss = min(self._earlier.best_train_loss, self.results.best_loss)
        return self._earlier._replace(
            best_train_loss=best_train_loss, seconds=self._earlier.seconds + self.interval.seconds
        )

    def go_on(self, *earlier: EarlierStarts) -> None:
        """Include the earlier starts of the run. Of several sources, the lowest losses and the most seconds count."""
        starts = (self._earlier, *earlier)
        val_loss, val_step = min((start.best_val_loss, start.best_val_step) for start in starts)
        best_train_loss = min(start.best_train_loss for start in starts)
        self._earlier = EarlierStarts(best_train_loss, val_loss, val_step, max(start.seconds for start in starts))

    def count(self, metrics: Metrics, tokens: int | None = None) -> None:
        """Count a step.

        Args:
            metrics: results of the step.
            tokens: number of tokens of the step, over all ranks; None: `tokens_per_step`.
        """
        self.steps += 1
        self.tokens += self._tokens_per_step if tokens is None else tokens
        self.results.count(metrics)

    def validated(self, loss: float) -> None:
        """Store a validation loss for the next row and the summary."""
        self.val_loss = loss
        self.worse_validations += 1
        if loss < self._earlier.best_val_loss:
            self.worse_validations = 0
            self._earlier = self._earlier._replace(best_val_loss=loss, best_val_step=self.steps)

    def row(self, *, validated: bool) -> dict[str, float | int | None]:
        """Return a row of metrics about the steps since the last row, with the keys of `tracker.ROW`. Collective.

        Args:
            validated: whether the row includes the newest validation loss.
        """
        last, plan, (begun, begun_tokens, moved_before) = self.results.last, self.plan, self._logged
        steps = max(1, self.steps - begun)
        timed, step_s, totals = self.interval.end(steps)
        timed = timed if self.steps > begun else 0
        moved = figures(totals, steps=steps, timed=max(1, timed), step_s=step_s, numel=self.plan.numel)
        tokens_per_s = (self.tokens - begun_tokens) / steps / step_s
        self._logged = self.steps, self.tokens, self.moved_bytes
        if timed:
            self._timed.append((tokens_per_s, float(moved["speed/stall_fraction"] or 0) * step_s * timed))
        device_bytes, host_bytes = self.interval.peaks_bytes
        row = {
            "step": self.steps,
            "tokens": self.tokens,
            "train/loss": self.results.loss,
            "train/grad_norm": None if last is None else last.grad_norm,
            "train/lr": None if last is None else last.lr,
            "train/loss_scale": None if last is None else last.loss_scale,
            "train/skipped": self.results.skipped,
            "val/loss": self.val_loss if validated else None,
            "speed/steps": self.steps - begun,
            "speed/step_s": step_s,
            "speed/tokens_per_s": tokens_per_s,
            "speed/mfu": self._mfu(tokens_per_s),
            **moved,
            "offload/moved_bytes": self.moved_bytes - moved_before,
            "memory/device_peak_bytes": device_bytes,
            "memory/host_peak_bytes": host_bytes,
            **{f"memory/{tier}_bytes": between_steps(plan.bytes).get(tier, 0) for tier in TIERS},
        }
        return row if timed else row | dict.fromkeys(TIME_KEYS)

    def summary(self, data_digest: str, exit_reason: str, checkpoint: Path | None = None) -> Summary:
        """Return the results so far. Of other ranks, peaks and bytes are those of the last row."""
        device_bytes, host_bytes = self.interval.peaks_now()
        written_bytes, trained_bytes = self.interval.written_now()
        step_bytes = trained_bytes / max(1, self.steps - self._steps_before)
        speeds = [tokens_per_s for tokens_per_s, _ in self._timed]
        tokens_per_s = statistics.median(speeds[1:] or speeds) if speeds else None
        so_far, plan_bytes = self.so_far, self.plan.bytes
        return Summary(
            exit_reason=exit_reason,
            steps=self.steps,
            tokens=self.tokens,
            seconds=so_far.seconds,
            train_loss=self.results.loss,
            best_train_loss=so_far.best_train_loss,
            val_loss=self.val_loss,
            best_val_loss=so_far.best_val_loss,
            best_val_step=None if so_far.best_val_step == inf else int(so_far.best_val_step),
            skipped=self.results.skipped,
            tokens_per_s=tokens_per_s,
            mfu=self._mfu(tokens_per_s),
            wait_s=sum((wait_s for _, wait_s in self._timed), 0.0),
            device_peak_bytes=device_bytes,
            host_peak_bytes=host_bytes,
            offload_written_bytes=written_bytes,
            endurance=endurance(step_bytes) if "nvme" in plan_bytes else None,
            plan_bytes=plan_bytes,
            data_digest=data_digest,
            checkpoint=None if checkpoint is None else str(checkpoint),
            **self._constants,
        )

    def _mfu(self, tokens_per_s: float | None) -> float | None:
        return None if tokens_per_s is None or self._mfu_of_token is None else tokens_per_s * self._mfu_of_token


def _peak_flops(world: World, plan: Plan) -> float | None:
    product = world.compute.product()
    if not product:
        return None
    compute = next(name for name, dtype in DTYPES.items() if dtype == plan.precision.compute)
    if compute == "fp32" and torch.get_float32_matmul_precision() != "highest":
        compute = "tf32"
    return peak_flops(product, compute)


def endurance(step_bytes: float) -> str:
    """Return text about a drive's endurance: how many steps that write `step_bytes` a 1 TB drive lasts."""
    if step_bytes < 1:
        return "nothing was written yet"
    written, steps = f"{size_text(int(step_bytes))} written per step by all ranks", LIFE_BYTES / step_bytes
    if steps > ENDLESS_STEPS:
        return written
    return f"{written}. A 1 TB drive rated {LIFE_BYTES / 1e12:.0f} TBW lasts {steps:,.0f} steps"
