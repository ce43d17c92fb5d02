"""Computation of metric rows and of the final summary from the results of steps.

Bytes moved and seconds waited are differences of counters that run since the start. Bytes are summed over ranks;
seconds are those of the slowest rank, because it determines the duration of a step.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, fields
from math import inf, nan
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zero.checkpoint.save import versions
from zero.core.precision import DTYPES
from zero.core.sizes import size_text
from zero.distributed.world import Collectives, World
from zero.engine.plan import Plan, traffic as planned_traffic
from zero.engine.step import Metrics
from zero.platform.device import host_peak_bytes
from zero.platform.peak_flops import peak_flops
from zero.store import Traffic
from zero.tracker.earlier import Earlier
from zero.tracker.view import NO_CHART, ROW

LIFE_BYTES = 600e12
"""Bytes that may be written to a typical 1 TB drive by its rated endurance (TBW)."""

ENDLESS_STEPS = 1e9
"""Number of steps above which a drive's endurance is not printed."""

TOTALS = (*(field.name for field in fields(Traffic)), *(f"comm_{name}" for name in Collectives._fields), "copy_bytes")
"""Names of a rank's counters: the fields of `Traffic` and of `Collectives`, and the bytes of `Device.copied`."""

WRITTEN = TOTALS.index("write_bytes")

WAITS = torch.tensor([name.endswith(("wait_s", "busy_s")) for name in TOTALS], device="cpu")
"""(len(TOTALS),) bool: whether each total is a time of waits or transfers (`wait_s`, `busy_s`)."""

TIMES = (
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
    skipped: int
    ranks: int
    parameters_numel: int
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
    """Counter of the steps, tokens, seconds and bytes of a run, on one rank.

    Only `row` is collective, so that a summary can still be made after other ranks have failed.

    Args:
        tokens_per_step: number of tokens of a step, over all ranks.
        traffic: function that returns the totals of this rank's store.
        steps, tokens, skipped: counts in the checkpoint that the run resumes from.
        flops_per_token: floating-point operations of forward and backward for one token; None: unknown.
        peak_flops: peak FLOP/s of one rank's device; None: looked up by the device's name.

    Attributes:
        steps, tokens, skipped: counts since the start of the run, over all ranks; `steps` includes skipped steps.
        last: metrics of the newest step; None before the first.
        train_loss, val_loss: newest losses; NaN before the first.
        best_train_loss, best_val_loss: lowest losses; infinite before the first.
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
        self._world, self._device, self._plan = world, world.compute, plan
        self._tokens_per_step, self._traffic = tokens_per_step, traffic
        peak = (peak_flops or _peak_flops(world, plan) or 0.0) * world.size
        self._mfu_of_token = flops_per_token / peak if flops_per_token and peak else None
        self._nvme_bytes = sum(plan.bytes.get("nvme", {}).values())
        self._planned_bytes = planned_traffic(plan).of_step(plan.accumulate).by_medium if plan.facts.trains else {}
        self._versions = versions()
        self._start_s = self._since_s = time.perf_counter()
        self._before_s = 0.0  # seconds of earlier starts
        self._start = self._since = self._totals()
        self.steps = self._since_step = self._steps_before = steps
        self._untimed = 0  # number of untimed steps since the last row
        self.tokens, self.skipped = tokens, skipped
        self._since_tokens = tokens
        self.last: Metrics | None = None
        self.train_loss = self.val_loss = float("nan")
        self.best_train_loss = self.best_val_loss = inf
        self._peaks_bytes = (0, 0)
        self._written_bytes = self._trained_bytes = 0  # by all ranks until the last row; since the first step only
        self._speeds: list[float] = []
        self._wait_s = 0.0

    @property
    def seconds(self) -> float:
        """Seconds since this meter was made, plus those of earlier starts."""
        return self._before_s + time.perf_counter() - self._start_s

    @property
    def so_far(self) -> Earlier:
        """Best losses and seconds so far, for a later start that resumes the run from here."""
        return Earlier(self.best_train_loss, self.best_val_loss, self.seconds)

    def go_on(self, *behind: Earlier) -> None:
        """Include the earlier starts of the run. Of several sources, the lowest losses and the most seconds count."""
        self.best_train_loss = min(self.best_train_loss, *(source.best_train_loss for source in behind))
        self.best_val_loss = min(self.best_val_loss, *(source.best_val_loss for source in behind))
        self._before_s = max(self._before_s, *(source.seconds for source in behind))

    def count(self, metrics: Metrics, tokens: int | None = None) -> None:
        """Count a step.

        Args:
            metrics: results of the step.
            tokens: number of tokens of the step, over all ranks; None: `tokens_per_step`.
        """
        self.steps += 1
        self.tokens += self._tokens_per_step if tokens is None else tokens
        self.skipped += metrics.skipped
        self.last, self.train_loss = metrics, metrics.loss
        self.best_train_loss = min(self.best_train_loss, metrics.loss)

    def validated(self, loss: float) -> None:
        """Store a validation loss for the next row and the summary."""
        self.val_loss = loss
        self.best_val_loss = min(self.best_val_loss, loss)

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager whose time and traffic do not count in the steps.

        The store must be idle on entry, because writes of the last step that end inside would not count either.
        """
        return self._left_out(torch.ones_like(WAITS))

    def standing(self) -> AbstractContextManager[None]:
        """Return a context manager whose time does not count in the steps.

        Its traffic counts, because it is caused by updates of the last step.
        """
        return self._left_out(WAITS)

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Context manager for a recorded step, on all ranks. Its time does not count, because recording slows it."""
        with self.standing():
            yield
        self._untimed += 1

    @contextmanager
    def _left_out(self, which: Tensor) -> Iterator[None]:
        """Context manager that leaves out its time, and its part of the totals whose entry in `which` is 1."""
        begin_s, before = time.perf_counter(), self._totals()
        yield
        self._since_s += time.perf_counter() - begin_s
        self._since = self._since + (self._totals() - before) * which

    def row(self, *, validated: bool) -> dict[str, float | int | None]:
        """Return a row of metrics about the steps since the last row, with the keys of `tracker.ROW`. Collective.

        Args:
            validated: whether the row includes the newest validation loss.
        """
        now_s, now, last = time.perf_counter(), self._totals(), self.last
        begun, steps = self._since_step, max(1, self.steps - self._since_step)
        timed = steps - self._untimed
        step_s = (now_s - self._since_s) / timed if timed else nan
        moved = figures(self._collect(now), steps=steps, timed=max(1, timed), step_s=step_s, numel=self._plan.numel)
        tokens_per_s = (self.tokens - self._since_tokens) / steps / step_s
        self._since_s, self._since_step, self._since, self._untimed = now_s, self.steps, now, 0
        self._since_tokens = self.tokens
        if timed:
            self._speeds.append(tokens_per_s)
            self._wait_s += float(moved["speed/stall_fraction"] or 0) * step_s * timed
        device_bytes, host_bytes = self._peaks_bytes
        row = {
            "step": self.steps,
            "tokens": self.tokens,
            "train/loss": self.train_loss,
            "train/grad_norm": None if last is None else last.grad_norm,
            "train/lr": None if last is None else last.lr,
            "train/loss_scale": None if last is None else last.loss_scale,
            "train/skipped": self.skipped,
            "val/loss": self.val_loss if validated else None,
            "speed/steps": self.steps - begun,
            "speed/step_s": step_s,
            "speed/tokens_per_s": tokens_per_s,
            "speed/mfu": self._mfu(tokens_per_s),
            **moved,
            "memory/device_peak_bytes": device_bytes,
            "memory/host_peak_bytes": host_bytes,
            "memory/nvme_bytes": self._nvme_bytes,
        }
        return row if timed else row | dict.fromkeys(TIMES)

    def summary(self, data_digest: str, exit_reason: str, checkpoint: Path | None = None) -> Summary:
        """Return the results so far. Peaks and bytes of other ranks are those of the last row, of this rank current."""
        device_bytes, host_bytes = map(max, self._peaks_bytes, self._peaks_of_rank())
        written_bytes, before_bytes = (int(totals[WRITTEN]) for totals in (self._totals(), self._start))
        trained_bytes = max(self._trained_bytes, written_bytes - before_bytes)
        step_bytes = trained_bytes / max(1, self.steps - self._steps_before)
        tokens_per_s = statistics.median(self._speeds[1:] or self._speeds) if self._speeds else None
        return Summary(
            exit_reason=exit_reason,
            steps=self.steps,
            tokens=self.tokens,
            seconds=self.seconds,
            train_loss=self.train_loss,
            best_train_loss=self.best_train_loss,
            val_loss=self.val_loss,
            best_val_loss=self.best_val_loss,
            skipped=self.skipped,
            ranks=self._world.size,
            parameters_numel=self._plan.numel,
            tokens_per_s=tokens_per_s,
            mfu=self._mfu(tokens_per_s),
            wait_s=self._wait_s,
            device_peak_bytes=device_bytes,
            host_peak_bytes=host_bytes,
            plan_bytes=self._plan.bytes,
            plan_step_bytes=self._planned_bytes,
            offload_written_bytes=max(self._written_bytes, written_bytes),
            endurance=endurance(step_bytes) if self._nvme_bytes else None,
            data_digest=data_digest,
            checkpoint=None if checkpoint is None else str(checkpoint),
            versions=self._versions,
        )

    def _mfu(self, tokens_per_s: float | None) -> float | None:
        return None if tokens_per_s is None or self._mfu_of_token is None else tokens_per_s * self._mfu_of_token

    def _totals(self) -> Tensor:
        """Return (len(TOTALS),) fp64 the current totals of this rank."""
        counts = *astuple(self._traffic()), *self._world.traffic, self._device.copied.nbytes
        return torch.tensor(counts, dtype=torch.float64, device="cpu")

    def _collect(self, now: Tensor) -> dict[str, Tensor]:
        """Exchange peaks and totals between all ranks. Collective.

        Returns:
            For each of `TOTALS`, (W,) the count of every rank since the last row.
        """
        peaks_bytes = torch.tensor(self._peaks_of_rank(), dtype=torch.float64, device="cpu")
        values = torch.cat((peaks_bytes, now[WRITTEN : WRITTEN + 1], now - self._start, now - self._since))
        everyone = torch.zeros(self._world.size, len(values), dtype=torch.float64, device=self._world.device)
        everyone[self._world.rank] = values.to(self._world.device)
        self._world.all_reduce(everyone, what="memory peaks and traffic").wait()
        peaks, written, trained, moved = everyone.cpu().split((2, 1, len(TOTALS), len(TOTALS)), dim=1)
        device, host = peaks.amax(dim=0)
        self._peaks_bytes = int(device), int(host)
        self._written_bytes, self._trained_bytes = int(written.sum()), int(trained[:, WRITTEN].sum())
        return dict(zip(TOTALS, moved.T, strict=True))

    def _peaks_of_rank(self) -> tuple[int, int]:
        """Return the peaks of this rank as (device, host)."""
        return self._device.peak_bytes(), host_peak_bytes()


def figures(
    moved: Mapping[str, Tensor], *, steps: int, timed: int, step_s: float, numel: int
) -> dict[str, float | int | None]:
    """Return the values of a row about offload and communication, by key of `tracker.ROW`.

    Without traffic the hidden fraction is 1 and rates are None.

    Args:
        moved: for each of TOTALS, (W,) the count of every rank in `steps` steps; waits count in timed steps only.
        timed: number of steps whose time counts, each of `step_s` seconds.
    """
    read_bytes, write_bytes = (int(moved[name].sum()) for name in ("read_bytes", "write_bytes"))
    received = {
        f"comm/{name}": int(moved[f"comm_{name}"].sum()) for name in ("gather_bytes", "reduce_bytes", "wire_bytes")
    }
    read_s, write_s = (float(moved[name].max()) for name in ("read_s", "write_s"))
    waits_s = moved["comm_wait_s"] / timed
    slowest = int(waits_s.argmin()) if len(waits_s) > 1 else None
    stood_s = float((moved["wait_s"] + moved["comm_wait_s"]).max()) / timed
    busy = moved["busy_s"] > 0
    hidden = 1 - moved["wait_s"][busy] / moved["busy_s"][busy]
    return {
        "speed/compute_s": max(0.0, step_s - stood_s),
        "speed/stall_fraction": min(1.0, stood_s / step_s),
        "speed/hidden_fraction": max(0.0, min(hidden.tolist(), default=1.0)),
        **received,
        "comm/wait_s": float(waits_s.max()),
        "comm/slowest_rank": slowest,
        "comm/slowest_s": None if slowest is None else step_s - float(waits_s[slowest]),
        "offload/read_bytes": read_bytes,
        "offload/write_bytes": write_bytes,
        "offload/copy_bytes": int(moved["copy_bytes"].sum()),
        "offload/wait_s": float(moved["wait_s"].max()) / timed,
        "offload/read_gbps": read_bytes / read_s / 1e9 if read_s > 0 else None,
        "offload/write_gbps": write_bytes / write_s / 1e9 if write_s > 0 else None,
        "offload/bytes_per_param": (read_bytes + write_bytes) / steps / numel,
    }


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
