"""Learning rates and momenta as functions of the step.

`step` counts updates from 1: the first update is made with `schedule(1)`. A warm-up rises from `start` at step 1 to lr
at step `warmup`, in a straight line or with the logarithm of the step; without a `start` the line comes from 0 at the
step before the first. A decay then leads from the peak, which may last `hold` more steps, to `final` at step `total`,
and stays there; with a `hold` of -1 it is a step ahead, and the peak is passed. A cycle rises and falls once, and may
decay after that; the momentum of `CycledMomentum` moves against it. Every schedule can be printed, pickled and sent to
another process.

Source: Goyal et al. 2017, section 2.2 (warm-up); Loshchilov and Hutter 2017, "SGDR", equation 5 (cosine); Smith 2018,
"A disciplined approach to neural network hyper-parameters" (range test, one cycle).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, log, pi
from typing import Literal

from zero.errors import ConfigError

Schedule = Callable[[int], float]
Curve = Literal["linear", "log"]


def linear_warmup(lr: float, warmup: int, *, start: float | None = None, curve: Curve = "linear") -> Schedule:
    """Make a rise over `warmup` steps, then `lr` for good. `warmup` 0 is a constant.

    Args:
        start: learning rate of step 1; None: a line from 0 before it, and 0 for the logarithm.
        curve: "linear", or "log": steep at first, as the logarithm of the step.
    """
    return _Warmup(lr, warmup, start, curve)


def warmup_linear(
    lr: float,
    warmup: int,
    total: int,
    final: float = 0.0,
    *,
    hold: int = 0,
    start: float | None = None,
    curve: Curve = "linear",
) -> Schedule:
    """Make a warm-up, `hold` steps more at the peak, then a straight line to `final` (a learning rate) at step `total`.

    Raises:
        ConfigError: a `final` above lr, or no step between the peak and `total`.
    """
    return _Decay(_Warmup(lr, warmup, start, curve), hold, total, final, cosine=False)


def warmup_cosine(
    lr: float,
    warmup: int,
    total: int,
    final: float = 0.0,
    *,
    hold: int = 0,
    start: float | None = None,
    curve: Curve = "linear",
) -> Schedule:
    """Make a warm-up, `hold` steps more at the peak, then half a cosine to `final` (a learning rate) at step `total`.

    Raises:
        ConfigError: a `final` above lr, or no step between the peak and `total`.
    """
    return _Decay(_Warmup(lr, warmup, start, curve), hold, total, final, cosine=True)


@dataclass(frozen=True)
class LrRange:
    """A test of learning rates: `lr` at step 1, and `rate` x lr more every `every` steps, evenly or in stairs."""

    lr: float
    every: int
    rate: float = 1.0
    stairs: bool = False

    def __call__(self, step: int) -> float:
        intervals = (step - 1) // self.every if self.stairs else (step - 1) / self.every
        return self.lr * (1 + self.rate * intervals)


@dataclass(frozen=True)
class Cycle:
    """One cycle: `rise` steps up, `fall` steps down, then a decay over each `decay_every` steps.

    `stairs` is the number of equal stairs in each half, 0 for none; `decay_every` 0: no decay.
    """

    rise: int
    fall: int
    stairs: tuple[int, int] = (0, 0)
    decay_every: int = 0

    def between(self, end: float, middle: float, step: int) -> float:
        """Return `end` at both ends of the cycle and after it, `middle` between its halves."""
        done, left = step - 1, self.rise + self.fall - (step - 1)
        rises = done <= self.rise
        at, half, stairs = (done, self.rise, self.stairs[0]) if rises else (left, self.fall, self.stairs[1])
        if at <= 0:
            return end
        return end + (middle - end) * ((at * stairs // half) / stairs if stairs else at / half)

    def decays(self, step: int) -> float:
        """Return the intervals of the decay until `step`."""
        after = step - 1 - self.rise - self.fall
        return after / self.decay_every if self.decay_every and after > 0 else 0.0


@dataclass(frozen=True)
class OneCycle:
    """A cycle from `start` to `lr` and back; then start / (1 + decay_rate x intervals of the decay)."""

    lr: float
    start: float
    cycle: Cycle
    decay_rate: float = 0.0

    def __call__(self, step: int) -> float:
        return self.cycle.between(self.start, self.lr, step) / (1 + self.decay_rate * self.cycle.decays(step))


@dataclass(frozen=True)
class CycledMomentum:
    """The momentum of a cycle: from `high` to `low` and back; then high x (1 + decay_rate x intervals).

    `first` is the momentum of the first step, in place of `high`.
    """

    low: float
    high: float
    cycle: Cycle
    decay_rate: float = 0.0
    first: float | None = None

    def __call__(self, step: int) -> float:
        if step == 1 and self.first is not None:
            return self.first
        return self.cycle.between(self.high, self.low, step) * (1 + self.decay_rate * self.cycle.decays(step))


@dataclass(frozen=True)
class _Warmup:
    lr: float
    steps: int
    start: float | None
    curve: Curve

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.lr
        if self.curve == "log":
            done = log(step) / log(self.steps)
        elif self.start is None:
            return self.lr * step / self.steps
        else:
            done = (step - 1) / (self.steps - 1)
        start = self.start or 0.0
        return start + (self.lr - start) * done


@dataclass(frozen=True)
class _Decay:
    """A warm-up and a decay, in a straight line or half a cosine."""

    warmup: _Warmup
    hold: int
    total: int
    final: float
    cosine: bool

    def __post_init__(self) -> None:
        if self.total <= self.peak:
            raise ConfigError(
                f"schedule.total={self.total} is not after the peak at step {self.peak} "
                f"(schedule.warmup={self.warmup.steps}, hold={self.hold}); a decay needs steps of its own"
            )
        if self.final > self.warmup.lr:
            raise ConfigError(
                f"final={self.final:g} is above lr={self.warmup.lr:g}: it is a learning rate, and not a share of lr"
            )

    @property
    def peak(self) -> int:
        return self.warmup.steps + self.hold

    def __call__(self, step: int) -> float:
        if step < max(self.peak, self.warmup.steps):
            return self.warmup(step)
        done = min(1.0, (step - self.peak) / (self.total - self.peak))
        left = (1 + cos(pi * done)) / 2 if self.cosine else 1 - done
        return self.final + (self.warmup.lr - self.final) * left
