"""Step -> learning rate, as plain functions.

`step` counts updates from 1: the first update is made with `schedule(1)`. A warm-up rises in a straight line from
lr / warmup at step 1 to lr at step `warmup`; a decay then leads to `final` at step `total` and stays there. Every
schedule is `partial` of a function of this file, so it can be printed, pickled and sent to another process.

Source: Goyal et al. 2017, section 2.2 (warm-up); Loshchilov and Hutter 2017, "SGDR", equation 5 (cosine).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import cos, inf, pi

from zero.errors import ConfigError

Schedule = Callable[[int], float]


def constant(lr: float) -> Schedule:
    """The same learning rate at every step."""
    return partial(_constant, _rate("lr", lr))


def linear_warmup(lr: float, warmup: int) -> Schedule:
    """A straight rise over `warmup` steps, then `lr` for good. `warmup` 0 is `constant`."""
    return partial(_warmup, _rate("lr", lr), _warmup_steps(warmup))


def warmup_linear(lr: float, warmup: int, total: int, final: float = 0.0) -> Schedule:
    """Warm-up, then a straight line from `lr` at step `warmup` to `final` (a learning rate) at step `total`.

    Raises:
        ConfigError: a negative or non-finite rate, or `total` not larger than `warmup`.
    """
    return partial(_warmup_linear, _rate("lr", lr), *_span(warmup, total), _rate("final", final))


def warmup_cosine(lr: float, warmup: int, total: int, final: float = 0.0) -> Schedule:
    """Warm-up, then half a cosine from `lr` at step `warmup` to `final` (a learning rate) at step `total`.

    Raises:
        ConfigError: a negative or non-finite rate, or `total` not larger than `warmup`.
    """
    return partial(_warmup_cosine, _rate("lr", lr), *_span(warmup, total), _rate("final", final))


def _constant(lr: float, step: int) -> float:
    return lr


def _warmup(lr: float, warmup: int, step: int) -> float:
    return lr * step / warmup if step < warmup else lr


def _warmup_linear(lr: float, warmup: int, total: int, final: float, step: int) -> float:
    if step < warmup:
        return _warmup(lr, warmup, step)
    left = 1 - _progress(warmup, total, step)
    return final + (lr - final) * left


def _warmup_cosine(lr: float, warmup: int, total: int, final: float, step: int) -> float:
    if step < warmup:
        return _warmup(lr, warmup, step)
    left = (1 + cos(pi * _progress(warmup, total, step))) / 2
    return final + (lr - final) * left


def _progress(warmup: int, total: int, step: int) -> float:
    return min(1.0, (step - warmup) / (total - warmup))


def _rate(key: str, value: float) -> float:
    if not 0 <= value < inf:
        raise ConfigError(f"schedule.{key}={value}; a learning rate must be 0 or more and finite")
    return value


def _warmup_steps(warmup: int) -> int:
    if warmup < 0:
        raise ConfigError(f"schedule.warmup={warmup}; it must be 0 or more steps")
    return warmup


def _span(warmup: int, total: int) -> tuple[int, int]:
    if total <= _warmup_steps(warmup):
        raise ConfigError(
            f"schedule.total={total} is not after schedule.warmup={warmup}; a decay needs steps of its own"
        )
    return warmup, total
