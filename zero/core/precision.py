"""Which dtype each thing has, and how large the loss is made so that fp16 gradients do not vanish.

Parameters are kept, and gradients added, in fp32 (the master); the model computes in `compute`; ranks exchange
gradients in `reduce`. Loss scaling is a pure automaton: `LossScaling` is the rule, `LossScale` the state, and
`advance` makes the next state from the last one and whether the step's gradients were finite.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2; hysteresis as in DeepSpeed's and
Megatron-LM's dynamic scalers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import NamedTuple

import torch

from zero.core.suggest import meant
from zero.errors import ConfigError

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


class LossScale(NamedTuple):
    """Where the automaton stands; four numbers to save and to compare."""

    scale: float
    """The loss is multiplied, and gradients divided, by it."""
    good_steps: int
    """Finite steps since the last overflow or growth."""
    hysteresis_left: int
    """Overflows until the scale halves, counting the one that halves it."""
    skipped: int
    """Steps skipped since the start."""


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """The rule. A non-finite step uses up hysteresis, then halves the scale each time; `window` finite steps in a
    row double it and refill the hysteresis. A static scale never moves.

    Raises:
        ConfigError: not 0 < minimum <= initial <= maximum < infinity, or a window or hysteresis below 1.
    """

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    maximum: float = 2.0**24
    static: float | None = None

    def __post_init__(self) -> None:
        if self.static is not None:
            if not 0 < self.static < inf:
                raise ConfigError(f"precision.scale.static={self.static}; it must be more than 0, or none for dynamic")
        elif not 0 < self.minimum <= self.initial <= self.maximum < inf:
            raise ConfigError(
                f"precision.scale: minimum={self.minimum}, initial={self.initial}, maximum={self.maximum}; "
                "they must be more than 0, finite and in this order"
            )
        for key in ("window", "hysteresis"):
            if getattr(self, key) < 1:
                raise ConfigError(f"precision.scale.{key}={getattr(self, key)}; it must be 1 or more")

    def start(self) -> LossScale:
        """The state before the first step."""
        scale = self.initial if self.static is None else self.static
        return LossScale(scale, good_steps=0, hysteresis_left=self.hysteresis, skipped=0)

    def advance(self, last: LossScale, finite: bool) -> LossScale:
        """The state after a step whose gradients were `finite` on every rank, or were not and it was skipped."""
        if self.static is not None:
            return last if finite else last._replace(skipped=last.skipped + 1)
        if not finite:
            return self._overflow(last)
        if last.good_steps + 1 < self.window:
            return last._replace(good_steps=last.good_steps + 1)
        return LossScale(min(last.scale * 2, self.maximum), 0, self.hysteresis, last.skipped)

    def resumed(self, saved: LossScale, *, dynamic: bool) -> LossScale:
        """Where a run goes on that saved `saved` under a `dynamic` or static rule; what never moved begins anew."""
        if self.static is not None or not dynamic:
            return self.start()._replace(skipped=saved.skipped)
        return saved._replace(scale=min(max(saved.scale, self.minimum), self.maximum))

    def _overflow(self, last: LossScale) -> LossScale:
        if last.hysteresis_left > 1:
            return LossScale(last.scale, 0, last.hysteresis_left - 1, last.skipped + 1)
        return LossScale(max(last.scale / 2, self.minimum), 0, 1, last.skipped + 1)


@dataclass(frozen=True, init=False)
class Precision:
    """The dtypes of a run, named "fp32", "bf16" or "fp16".

    Raises:
        ConfigError: an unknown name, or a loss scale other than 1 where compute is not fp16.
    """

    compute: torch.dtype
    """What the model's parameters are gathered in."""
    reduce: torch.dtype
    """What gradients travel between ranks in; they are added in fp32."""
    scale: LossScaling
    """Dynamic for fp16 unless given, else a static 1."""

    def __init__(self, compute: str = "fp32", *, reduce: str = "fp32", scale: LossScaling | None = None) -> None:
        if scale is None:
            scale = LossScaling() if compute == "fp16" else LossScaling(static=1.0)
        object.__setattr__(self, "compute", _dtype("compute", compute))
        object.__setattr__(self, "reduce", _dtype("reduce", reduce))
        object.__setattr__(self, "scale", scale)
        if self.compute != torch.float16 and scale.static != 1.0:
            raise ConfigError(f"precision.scale is for fp16; {compute} has fp32's range, so remove it")

    @property
    def master(self) -> torch.dtype:
        """What the optimizer updates: fp32 always."""
        return torch.float32

    @property
    def has_master(self) -> bool:
        """Whether the master is a tensor of its own, because compute is a half type."""
        return self.compute != self.master


def _dtype(key: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        hint = meant(str(name), DTYPES, cutoff=0.3) or f"; known: {', '.join(DTYPES)}"
        raise ConfigError(f"precision.{key}={name}{hint}")
    return DTYPES[name]
