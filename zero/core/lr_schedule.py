"""Step -> learning rate, as plain functions.

`step` counts updates from 1: the first update is made with `schedule(1)`. A warm-up rises from `start` at step 1 to lr
at step `warmup`, in a straight line or with the logarithm of the step; without a `start` the line comes from 0 at the
step before the first. A decay then leads from the peak, which may last `hold` more steps, to `final` at step `total`,
and stays there; with a `hold` of -1 it is a step ahead, and the peak is passed. A cycle rises and falls once, and may
decay after that; the momentum of `cycled_momentum` moves against it. Every schedule is `partial` of a function of
this file, so it can be printed, pickled and sent to another process.

Source: Goyal et al. 2017, section 2.2 (warm-up); Loshchilov and Hutter 2017, "SGDR", equation 5 (cosine); Smith 2018,
"A disciplined approach to neural network hyper-parameters" (range test, one cycle).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, cos, inf, log, pi
from typing import Literal, NamedTuple, SupportsFloat

from zero.errors import ConfigError

Schedule = Callable[[int], float]
Curve = Literal["linear", "log"]


def constant(lr: float) -> Schedule:
    """The same learning rate at every step."""
    return partial(_constant, _rate("lr", lr))


def linear_warmup(lr: float, warmup: int, *, start: float | None = None, curve: Curve = "linear") -> Schedule:
    """A rise over `warmup` steps, then `lr` for good. `warmup` 0 is `constant`.

    Args:
        start: learning rate of step 1; None: a line from 0 before it, and 0 for the logarithm.
        curve: "linear", or "log": steep at first, as the logarithm of the step.
    """
    return partial(_warmup, _rise(lr, warmup, start, curve))


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
    """Warm-up, `hold` steps more at the peak, then a straight line to `final` (a learning rate) at step `total`.

    Raises:
        ConfigError: a negative or non-finite rate, a `final` above lr, or no step between the peak and `total`.
    """
    return partial(_decayed, _straight, _rise(lr, warmup, start, curve), _fall(lr, warmup, hold, total, final))


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
    """Warm-up, `hold` steps more at the peak, then half a cosine to `final` (a learning rate) at step `total`.

    Raises:
        ConfigError: a negative or non-finite rate, a `final` above lr, or no step between the peak and `total`.
    """
    return partial(_decayed, _half_cosine, _rise(lr, warmup, start, curve), _fall(lr, warmup, hold, total, final))


def lr_range(lr: float, every: int, *, rate: float = 1.0, stairs: bool = False) -> Schedule:
    """A test of learning rates: `lr` at step 1, and `rate` x lr more with each `every` steps, evenly or in stairs."""
    return partial(_lr_range, _rate("lr", lr), _rate("rate", rate), _steps("every", every, least=1), stairs)


class Cycle(NamedTuple):
    """The shape of one cycle: `rise` steps up, `fall` steps down, then a decay over each `decay_every` steps.

    `stairs` is into how many equal stairs each half is cut, 0 for none; `decay_every` 0: no decay.
    """

    rise: int
    fall: int
    stairs: tuple[int, int] = (0, 0)
    decay_every: int = 0


def one_cycle(lr: float, start: float, cycle: Cycle, *, decay_rate: float = 0.0) -> Schedule:
    """From `start` up to `lr` and down again; then start / (1 + decay_rate x intervals of the decay).

    Raises:
        ConfigError: a negative or non-finite rate, or a half of the cycle without a step.
    """
    return partial(_one_cycle, _rate("start", start), _rate("lr", lr), _checked(cycle), _rate("decay_rate", decay_rate))


def cycled_momentum(
    low: float,
    high: float,
    cycle: Cycle,
    *,
    decay_rate: float = 0.0,
    first: float | None = None,
    steps: int | None = None,
) -> Schedule:
    """The momentum that goes with it: from `high` down to `low` and up again; then high x (1 + decay_rate x intervals).

    Args:
        first: momentum of the first step, in place of `high`.
        steps: how many will be made; None: unknown.

    Raises:
        ConfigError: as `one_cycle`; or the decay brings it to 1 within `steps`.
    """
    bounds = _rate("momentum_max", high), _rate("momentum_min", low)
    if steps and decay_rate and cycle.decay_every and high:
        left = (1 / high - 1) / decay_rate * cycle.decay_every  # steps of the decay
        reached = cycle.rise + cycle.fall + 1 + ceil(left)
        if reached <= steps:
            raise ConfigError(
                f"schedule.momentum_decay_rate={decay_rate:g} brings the momentum from {high:g} to 1 at step {reached}"
                "; leave it out, or set schedule.decay_every higher"
            )
    first = high if first is None else _rate("momentum_start", first)
    return partial(_cycled_momentum, *bounds, _checked(cycle), _rate("momentum_decay_rate", decay_rate), first)


class _Rise(NamedTuple):
    """A warm-up, checked."""

    lr: float
    warmup: int
    start: float | None
    curve: Curve


class _Fall(NamedTuple):
    """A decay, checked: from the peak at one step to `final` at another."""

    peak: int
    total: int
    final: float


def _constant(lr: float, step: int) -> float:
    return lr


def _warmup(rise: _Rise, step: int) -> float:
    lr, warmup, start, curve = rise
    if step >= warmup:
        return lr
    if curve == "log":
        done = log(step) / log(warmup)
    elif start is None:
        return lr * step / warmup
    else:
        done = (step - 1) / (warmup - 1)
    return (start or 0.0) + (lr - (start or 0.0)) * done


def _decayed(left: Callable[[float], float], rise: _Rise, fall: _Fall, step: int) -> float:
    """`left` gives the share of the decay that is left, from the share that is done."""
    peak, total, final = fall
    if step < max(peak, rise.warmup):
        return _warmup(rise, step)
    return final + (rise.lr - final) * left(min(1.0, (step - peak) / (total - peak)))


def _straight(done: float) -> float:
    return 1 - done


def _half_cosine(done: float) -> float:
    return (1 + cos(pi * done)) / 2


def _lr_range(lr: float, rate: float, every: int, stairs: bool, step: int) -> float:
    intervals = (step - 1) // every if stairs else (step - 1) / every
    return lr * (1 + rate * intervals)


def _one_cycle(start: float, lr: float, cycle: Cycle, decay_rate: float, step: int) -> float:
    return _along(start, lr, cycle, step) / (1 + decay_rate * _decays(cycle, step))


def _cycled_momentum(high: float, low: float, cycle: Cycle, decay_rate: float, first: float, step: int) -> float:
    if step == 1:
        return first
    return _along(high, low, cycle, step) * (1 + decay_rate * _decays(cycle, step))


def _along(end: float, middle: float, cycle: Cycle, step: int) -> float:
    """`end` at both ends of the cycle and after it, `middle` between its halves."""
    done, left = step - 1, cycle.rise + cycle.fall - (step - 1)
    rises = done <= cycle.rise
    at, half, stairs = (done, cycle.rise, cycle.stairs[0]) if rises else (left, cycle.fall, cycle.stairs[1])
    if at <= 0:
        return end
    return end + (middle - end) * ((at * stairs // half) / stairs if stairs else at / half)


def _decays(cycle: Cycle, step: int) -> float:
    """Intervals of the decay until `step`."""
    after = step - 1 - cycle.rise - cycle.fall
    return after / cycle.decay_every if cycle.decay_every and after > 0 else 0.0


def _rate(key: str, value: float) -> float:
    if not isinstance(value, SupportsFloat) or not 0 <= value < inf:
        raise ConfigError(f"schedule.{key}={value!r}; it must be a number, 0 or more and finite")
    return value


def _rise(lr: float, warmup: int, start: float | None, curve: Curve) -> _Rise:
    if curve not in ("linear", "log"):
        raise ConfigError(f"schedule.curve={curve}; it must be linear or log")
    return _Rise(_rate("lr", lr), _steps("warmup", warmup), None if start is None else _rate("start", start), curve)


def _steps(key: str, value: int, least: int = 0) -> int:
    if not isinstance(value, SupportsFloat) or value < least:
        raise ConfigError(f"schedule.{key}={value!r}; it must be {least} or more steps")
    return value


def _fall(lr: float, warmup: int, hold: int, total: int, final: float) -> _Fall:
    peak = warmup + _steps("hold", hold, least=-1)
    if _steps("total", total) <= peak:
        raise ConfigError(
            f"schedule.total={total} is not after the peak at step {peak} (schedule.warmup={warmup}, hold={hold}); "
            "a decay needs steps of its own"
        )
    final = _rate("final", final)
    if final > lr:
        raise ConfigError(f"final={final:g} is above lr={lr:g}: it is a learning rate, and not a share of lr")
    return _Fall(peak, total, final)


def _checked(cycle: Cycle) -> Cycle:
    for key, value, least in (
        ("rise", cycle.rise, 1),
        ("fall", cycle.fall, 1),
        ("rise_stairs", cycle.stairs[0], 0),
        ("fall_stairs", cycle.stairs[1], 0),
        ("decay_every", cycle.decay_every, 0),
    ):
        _steps(key, value, least)
    return cycle
