"""Turns what steps return into rows of metrics and a summary: speed since the last row, totals, peaks over ranks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import NamedTuple

import torch

from zero.device import Device, host_peak_bytes
from zero.plan import Plan
from zero.step import Metrics
from zero.world import World


class Summary(NamedTuple):
    """How a run ended; losses in nats per token, peaks the largest over ranks, plan for one rank."""

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
    data_digest: str


class Meter:
    """Counts steps and seconds on one rank. `row` is collective, everything else is local.

    So a summary can be made when the other ranks are gone.

    Attributes:
        steps, skipped: since the start; `steps` counts the skipped ones too.
        last: metrics of the newest step.
        train_loss, val_loss: the newest; NaN before the first.
        best_train_loss, best_val_loss: the lowest.
    """

    def __init__(self, world: World, *, tokens_per_step: int) -> None:
        self._world, self._device, self._tokens_per_step = world, Device(world.device), tokens_per_step
        self._start_s = self._since_s = time.perf_counter()
        self._since_step = 0
        self.steps = self.skipped = 0
        self.last: Metrics | None = None
        self.train_loss = self.val_loss = float("nan")
        self.best_train_loss = self.best_val_loss = inf
        self._peaks_bytes = (0, 0)

    @property
    def tokens(self) -> int:
        """Tokens trained on, over all ranks."""
        return self.steps * self._tokens_per_step

    @property
    def seconds(self) -> float:
        """Since this meter was made."""
        return time.perf_counter() - self._start_s

    def count(self, metrics: Metrics) -> None:
        """One more step has been made."""
        self.steps += 1
        self.skipped += metrics.skipped
        self.last, self.train_loss = metrics, metrics.loss
        self.best_train_loss = min(self.best_train_loss, metrics.loss)

    def validated(self, loss: float) -> None:
        """A validation has been made."""
        self.val_loss = loss
        self.best_val_loss = min(self.best_val_loss, loss)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time of the body does not count as training."""
        begin_s = time.perf_counter()
        yield
        self._since_s += time.perf_counter() - begin_s

    def row(self, *, validated: bool) -> dict[str, float | int | None]:
        """A row for the tracker, with a validation loss if it is new; see `tracker.ROW`. Collective."""
        now_s, last = time.perf_counter(), self.last
        step_s = (now_s - self._since_s) / max(1, self.steps - self._since_step)
        self._since_s, self._since_step = now_s, self.steps
        self._peaks_bytes = device_bytes, host_bytes = self._largest(self._own_peaks_bytes())
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
            "memory/device_peak_bytes": device_bytes,
            "memory/host_peak_bytes": host_bytes,
        }

    def summary(self, plan: Plan, data_digest: str, exit_reason: str) -> Summary:
        """How far the run has come; peaks over all ranks up to the last row, over this rank up to now."""
        peaks_bytes = zip(self._peaks_bytes, self._own_peaks_bytes(), strict=True)
        device_bytes, host_bytes = (max(pair) for pair in peaks_bytes)
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
            parameters_numel=plan.numel,
            device_peak_bytes=device_bytes,
            host_peak_bytes=host_bytes,
            plan_bytes=plan.bytes,
            data_digest=data_digest,
        )

    def _own_peaks_bytes(self) -> tuple[int, int]:
        """(device, host): the most that this rank ever held."""
        return self._device.peak_bytes(), host_peak_bytes()

    def _largest(self, mine: tuple[int, int]) -> tuple[int, int]:
        """The same over all ranks. Collective."""
        everyone = torch.zeros(self._world.size, 2, dtype=torch.float64, device=self._world.device)
        everyone[self._world.rank] = torch.tensor(mine, dtype=torch.float64)
        self._world.all_reduce(everyone, what="memory peaks").wait()
        device, host = everyone.amax(dim=0).tolist()
        return int(device), int(host)
