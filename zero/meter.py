"""Turns what steps return into rows of metrics and a summary: speed since the last row, totals, peaks over ranks.

What the store moved is read from its running totals. A step lasts as long as the rank that waited longest, and drives
wear by what all ranks write: seconds are the slowest rank's, bytes are everyone's.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

import torch

from zero.device import Device, host_peak_bytes
from zero.plan import Plan
from zero.step import Metrics
from zero.store import Traffic
from zero.world import World

LIFE_BYTES = 600e12
"""What a usual drive of 1 TB is rated to take in its life (TBW)."""


class Moved(NamedTuple):
    """Traffic of one rank within some steps. `busy_s`: something was under way; `wait_s`: a step stood still for it."""

    read_bytes: float = 0
    write_bytes: float = 0
    read_s: float = 0.0
    write_s: float = 0.0
    busy_s: float = 0.0
    wait_s: float = 0.0

    @classmethod
    def of(cls, traffic: Traffic) -> "Moved":
        return cls(*(getattr(traffic, name) for name in cls._fields))

    def minus(self, before: "Moved") -> "Moved":
        return Moved(*(now - then for now, then in zip(self, before, strict=True)))

    def plus(self, more: "Moved") -> "Moved":
        return Moved(*(one + other for one, other in zip(self, more, strict=True)))


class Summary(NamedTuple):
    """How a run ended; losses in nats per token, peaks the largest over ranks, plan for one rank.

    What was written is of all ranks up to the last row, first values included; `endurance` is None without a file.
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
    device_peak_bytes: int
    host_peak_bytes: int
    plan_bytes: dict[str, dict[str, int]]
    offload_written_bytes: int
    endurance: str | None
    data_digest: str


class Meter:
    """Counts steps and seconds on one rank. `row` is collective, everything else is local.

    So a summary can be made when the other ranks are gone.

    Args:
        tokens_per_step: over all ranks.
        traffic: the totals of this rank's store.
        steps, tokens, skipped: what the run that this one goes on from had behind it.

    Attributes:
        steps, tokens, skipped: since the start, over all ranks; `steps` counts the skipped ones too.
        last: metrics of the newest step.
        train_loss, val_loss: the newest; NaN before the first.
        best_train_loss, best_val_loss: the lowest.
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
    ) -> None:
        self._world, self._device, self._plan = world, Device(world.device), plan
        self._tokens_per_step, self._traffic = tokens_per_step, traffic
        self._start_s = self._since_s = time.perf_counter()
        self._start = self._since = Moved.of(traffic())
        self.steps = self._since_step = self._steps_before = steps
        self.tokens, self.skipped = tokens, skipped
        self.last: Metrics | None = None
        self.train_loss = self.val_loss = float("nan")
        self.best_train_loss = self.best_val_loss = inf
        self._peaks_bytes = (0, 0)
        self._written_bytes = self._trained_bytes = 0  # by all ranks up to the last row; since the first step only

    @property
    def seconds(self) -> float:
        """Since this meter was made."""
        return time.perf_counter() - self._start_s

    def count(self, metrics: Metrics) -> None:
        """One more step has been made."""
        self.steps += 1
        self.tokens += self._tokens_per_step
        self.skipped += metrics.skipped
        self.last, self.train_loss = metrics, metrics.loss
        self.best_train_loss = min(self.best_train_loss, metrics.loss)

    def validated(self, loss: float) -> None:
        """A validation has been made."""
        self.val_loss = loss
        self.best_val_loss = min(self.best_val_loss, loss)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Neither the time of the body nor what it moves belongs to a step."""
        begin_s, before = time.perf_counter(), Moved.of(self._traffic())
        yield
        self._since_s += time.perf_counter() - begin_s
        self._since = self._since.plus(Moved.of(self._traffic()).minus(before))

    def row(self, *, validated: bool) -> dict[str, float | int | None]:
        """A row for the tracker, with a validation loss if it is new; see `tracker.ROW`. Collective."""
        now_s, now, last = time.perf_counter(), Moved.of(self._traffic()), self.last
        steps = max(1, self.steps - self._since_step)
        step_s = (now_s - self._since_s) / steps
        moved = self._collect(now)
        self._since_s, self._since_step, self._since = now_s, self.steps, now
        device_bytes, host_bytes = self._peaks_bytes
        return {
            "step": self.steps,
            "tokens": self.tokens,
            "train/loss": self.train_loss,
            "train/grad_norm": None if last is None else last.grad_norm,
            "train/lr": None if last is None else last.lr,
            "train/loss_scale": None if last is None else last.loss_scale,
            "train/skipped": self.skipped,
            "val/loss": self.val_loss if validated else None,
            "speed/step_s": step_s,
            "speed/tokens_per_s": self._tokens_per_step / step_s,
            **offload_figures(moved, steps=steps, step_s=step_s, numel=self._plan.numel),
            "memory/device_peak_bytes": device_bytes,
            "memory/host_peak_bytes": host_bytes,
        }

    def summary(self, data_digest: str, exit_reason: str) -> Summary:
        """How far the run has come; peaks and bytes of all ranks up to the last row, of this rank up to now."""
        peaks_bytes = zip(self._peaks_bytes, self._own_peaks_bytes(), strict=True)
        device_bytes, host_bytes = (max(pair) for pair in peaks_bytes)
        now = Moved.of(self._traffic())
        trained_bytes = max(self._trained_bytes, int(now.minus(self._start).write_bytes))
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
            device_peak_bytes=device_bytes,
            host_peak_bytes=host_bytes,
            plan_bytes=self._plan.bytes,
            offload_written_bytes=max(self._written_bytes, int(now.write_bytes)),
            endurance=self._endurance(trained_bytes / max(1, self.steps - self._steps_before)),
            data_digest=data_digest,
        )

    def _endurance(self, step_bytes: float) -> str | None:
        return endurance(step_bytes) if any(self._plan.bytes.get("nvme", {}).values()) else None

    def _collect(self, now: Moved) -> list[Moved]:
        """Learn the peaks and totals of all ranks; gives what each of them moved since the last row. Collective."""
        mine = (*self._own_peaks_bytes(), now.write_bytes, now.minus(self._start).write_bytes, *now.minus(self._since))
        everyone = torch.zeros(self._world.size, len(mine), dtype=torch.float64, device=self._world.device)
        everyone[self._world.rank] = torch.tensor(mine, dtype=torch.float64)
        self._world.all_reduce(everyone, what="memory peaks and traffic").wait()
        device, host, written, trained = everyone[:, :4].T
        self._peaks_bytes = int(device.max()), int(host.max())
        self._written_bytes, self._trained_bytes = int(written.sum()), int(trained.sum())
        return [Moved(*rank) for rank in everyone[:, 4:].tolist()]

    def _own_peaks_bytes(self) -> tuple[int, int]:
        """(device, host): the most that this rank ever held."""
        return self._device.peak_bytes(), host_peak_bytes()


def offload_figures(ranks: Sequence[Moved], *, steps: int, step_s: float, numel: int) -> dict[str, float | int | None]:
    """What paging cost over `steps` steps of `step_s` each: totals over ranks, waiting of the rank that waited most.

    Where nothing moves, nothing waits: all is hidden, and there are no rates.
    """
    read_bytes, write_bytes = (int(sum(moved[key] for moved in ranks)) for key in (0, 1))
    read_s, write_s = (max(moved[key] for moved in ranks) for key in (2, 3))
    wait_s = max(moved.wait_s for moved in ranks) / steps
    hidden = [1 - moved.wait_s / moved.busy_s for moved in ranks if moved.busy_s > 0]
    return {
        "speed/compute_s": max(0.0, step_s - wait_s),
        "speed/hidden_fraction": max(0.0, min(hidden, default=1.0)),
        "offload/read_bytes": read_bytes,
        "offload/write_bytes": write_bytes,
        "offload/wait_s": wait_s,
        "offload/read_gbps": read_bytes / read_s / 1e9 if read_s > 0 else None,
        "offload/write_gbps": write_bytes / write_s / 1e9 if write_s > 0 else None,
        "offload/bytes_per_param": (read_bytes + write_bytes) / steps / numel,
    }


def endurance(step_bytes: float) -> str:
    """How long a drive lives that takes `step_bytes` at each step."""
    if step_bytes < 1:
        return "nothing was written yet"
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))
    size, name = next((size, name) for size, name in units if step_bytes >= size)
    return (
        f"{step_bytes / size:.3g} {name} written per step by all ranks; "
        f"a 1 TB drive rated {LIFE_BYTES / 1e12:.0f} TBW lasts {LIFE_BYTES / step_bytes:,.0f} steps"
    )
