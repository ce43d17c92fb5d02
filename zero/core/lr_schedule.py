"""Learning rates and momenta as functions of the step.

`step` counts updates from 1: the first update uses `schedule(1)`.

* A warm-up rises from `start` at step 1 to lr at step `warmup`, linearly or with the logarithm of the step. Without a
  `start` a linear warm-up begins one step earlier at 0: its rate at step s is lr x s / warmup.
* A decay falls from lr to `final` at step `total` and stays there. Before it lr may last `hold` more steps. With a
  `hold` of -1 the decay begins one step earlier, so that lr itself is never used.
* A cycle rises and falls once, and may decay afterwards. `CycledMomentum` falls while the learning rate rises.

Every schedule can be printed, pickled and sent to another process.

Source: Goyal et al. 2017, section 2.2 (warm-up); Loshchilov and Hutter 2017, "SGDR", equation 5 (cosine); Smith 2018,
"A disciplined approach to neural network hyper-parameters" (range test, one cycle).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, log, pi
from typing import Literal, get_args

from zero.core import checks
from zero.errors import ConfigError

Schedule = Callable[[int], float]
Curve = Literal["linear", "log"]


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """Make a schedule that is `factor` times another one."""
    return _Scaled(schedule, factor)


def linear_warmup(lr: float, warmup: int, *, start: float | None = None, curve: Curve = "linear") -> Schedule:
    """Make a schedule that rises to `lr` over `warmup` steps and stays there. With a `warmup` of 0 it is constant.

    Args:
        start: learning rate of step 1; None: lr / warmup for curve="linear", 0 for curve="log".
        curve: "linear", or "log", which rises with the logarithm of the step: steep at first.
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
    """Make a schedule of a warm-up, `hold` more steps at the peak, then a linear decay to `final` at step `total`.

    `final` is a learning rate. `start` and `curve` are those of `linear_warmup`.

    Raises:
        ConfigError: `final` is above lr, or `total` is not after the peak.
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
    """Make a schedule of a warm-up, `hold` more steps at the peak, then half a cosine to `final` at step `total`.

    `final` is a learning rate. `start` and `curve` are those of `linear_warmup`.

    Raises:
        ConfigError: `final` is above lr, or `total` is not after the peak.
    """
    return _Decay(_Warmup(lr, warmup, start, curve), hold, total, final, cosine=True)


@dataclass(frozen=True)
class LrRangeSchedule:
    """A learning-rate range test: `lr` at step 1, then `rate` x lr more for every `every` steps.

    With `stairs` the rate changes once per `every` steps, otherwise evenly at every step.
    """

    lr: float
    every: int
    rate: float = 1.0
    stairs: bool = False

    def __call__(self, step: int) -> float:
        intervals = (step - 1) // self.every if self.stairs else (step - 1) / self.every
        return self.lr * (1 + self.rate * intervals)


@dataclass(frozen=True)
class Cycle:
    """The lengths of a one-cycle schedule: a value rises for `rise` steps, falls for `fall` steps, and then decays.

    Attributes:
        stairs: numbers of equal stairs that the rise and the fall have; 0: the value changes at every step.
        decay_every: steps in one interval of the decay; 0: no decay.
    """

    rise: int
    fall: int
    stairs: tuple[int, int] = (0, 0)
    decay_every: int = 0

    def between(self, end: float, middle: float, step: int) -> float:
        """Return the value at `step`: `end` at both ends of the cycle and after it, `middle` at its turning point."""
        done, left = step - 1, self.rise + self.fall - (step - 1)
        rises = done <= self.rise
        at, half, stairs = (done, self.rise, self.stairs[0]) if rises else (left, self.fall, self.stairs[1])
        if at <= 0:
            return end
        return end + (middle - end) * ((at * stairs // half) / stairs if stairs else at / half)

    def decays(self, step: int) -> float:
        """Return the number of intervals of the decay, with a fraction, that have passed at `step`."""
        after = step - 1 - self.rise - self.fall
        return after / self.decay_every if self.decay_every and after > 0 else 0.0


@dataclass(frozen=True)
class OneCycleSchedule:
    """A learning rate that rises from `start` to `lr` and falls back to `start` in one cycle, then decays.

    After the cycle the rate is start / (1 + decay_rate x passed intervals of the decay).
    """

    lr: float
    start: float
    cycle: Cycle
    decay_rate: float = 0.0

    def __call__(self, step: int) -> float:
        return self.cycle.between(self.start, self.lr, step) / (1 + self.decay_rate * self.cycle.decays(step))


@dataclass(frozen=True)
class CycledMomentum:
    """A momentum that falls from `high` to `low` and rises back to `high` in one cycle, then changes with the decay.

    After the cycle the momentum is high x (1 + decay_rate x passed intervals of the decay). `first`, if given, is the
    momentum of step 1.
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
class _Scaled:
    schedule: Schedule
    factor: float

    def __call__(self, step: int) -> float:
        return self.factor * self.schedule(step)


@dataclass(frozen=True)
class _Warmup:
    lr: float
    steps: int
    start: float | None
    curve: Curve

    def __post_init__(self) -> None:
        checks.one_of("schedule.curve", self.curve, get_args(Curve))

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
    """A warm-up followed by a decay, which is linear or half a cosine."""

    warmup: _Warmup
    hold: int
    total: int
    final: float
    cosine: bool

    def __post_init__(self) -> None:
        if self.total <= self.peak:
            raise ConfigError(
                f"schedule.total={self.total}: no step is left for a decay after the peak at step {self.peak} "
                f"(schedule.warmup={self.warmup.steps}, hold={self.hold}). Raise schedule.total."
            )
        if self.final > self.warmup.lr:
            raise ConfigError(
                f"final={self.final:g} is above lr={self.warmup.lr:g}. Give a learning rate, not a share of lr."
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
