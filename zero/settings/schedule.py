"""Settings of each learning-rate schedule."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from zero.core.schema import Section
from zero.core.setting_types import MOST, Count, Fraction, Natural, NonNegative, Share, Steps, Whole, key
from zero.errors import ConfigError


class ConstantSection(Section):
    """The peak learning rate throughout."""

    name: Literal["constant"] = key("constant", "kind of schedule")


class WarmupFields(Section):
    """Fields of every schedule with a warm-up."""

    warmup: Steps = key("auto", "steps until the peak; auto: a twentieth of `steps`", unit="steps", example="20")
    start: Share | None = key(
        None,
        "learning rate of the first step, as a share of the peak; null: a line from 0 before it, and 0 for curve=log",
        example="0.01",
    )
    curve: Literal["linear", "log"] = key(
        "linear", "shape of the rise: linear, or log (as the logarithm of the step: steep at first)", example="log"
    )


class DecayFields(WarmupFields):
    """Fields of every schedule with a decay."""

    hold: Annotated[int, Field(ge=-1, le=MOST)] = key(
        0, "steps that the peak lasts before the decay; -1: the decay is a step ahead", unit="steps", example="100"
    )
    total: Whole | None = key(
        None, "step of the last learning rate, which may lie beyond the run; null: `steps`", unit="steps", example="400"
    )
    final: Share = key(0.1, "learning rate after the last step, as a share of the peak", example="0")


class LinearWarmupSection(WarmupFields):
    """Up from zero in a line, then the peak."""

    name: Literal["linear_warmup"] = key("linear_warmup", "kind of schedule")


class WarmupLinearSection(DecayFields):
    """Up in a line, then down in a line over the rest of `steps`."""

    name: Literal["warmup_linear"] = key("warmup_linear", "kind of schedule")


class WarmupCosineSection(DecayFields):
    """Up in a line, then down along half a cosine over the rest of `steps`."""

    name: Literal["warmup_cosine"] = key("warmup_cosine", "kind of schedule")


class OneCycleSection(Section):
    """Up to the peak and down again while the momentum goes down and up; then a decay."""

    name: Literal["one_cycle"] = key("one_cycle", "kind of schedule")
    start: Share = key(0.1, "learning rate at both ends of the cycle, as a share of the peak", example="0.04")
    rise: Count = key("auto", "steps up to the peak; auto: half of `steps`", unit="steps", example="50")
    fall: Whole | None = key(None, "steps down from the peak; null: as many", unit="steps", example="80")
    rise_stairs: Natural = key(0, "stairs on the way up; 0: none, it moves at every step", unit="stairs", example="5")
    fall_stairs: Natural | None = key(None, "stairs on the way down; null: as many", unit="stairs", example="5")
    decay_every: Natural = key(
        0, "steps of one interval of the decay after the cycle; 0: no decay", unit="steps", example="10"
    )
    decay_rate: NonNegative = key(
        0.0,
        "after n intervals the learning rate is that of the cycle's end over 1 + decay_rate x n",
        example="0.5 schedule.decay_every=10",
    )
    momentum: bool = key(
        True,
        "whether momentum (or beta1) moves against the learning rate, in place of the optimizer's",
        example="false",
    )
    momentum_min: Fraction = key(0.8, "momentum at the peak of the learning rate", example="0.85")
    momentum_max: Fraction = key(0.9, "momentum at both ends of the cycle", example="0.95")
    momentum_start: Fraction | None = key(None, "momentum of the first step; null: momentum_max", example="0.8")
    momentum_decay_rate: NonNegative = key(
        0.0,
        "after n intervals of the decay the momentum is momentum_max x (1 + momentum_decay_rate x n)",
        example="0.001 schedule.decay_every=10",
    )

    @model_validator(mode="after")
    def _bounds_are_in_order(self) -> Self:
        if self.momentum_min > self.momentum_max:
            raise ConfigError(
                f"schedule.momentum_min={self.momentum_min:g} is above schedule.momentum_max={self.momentum_max:g}"
            )
        return self


class LrRangeSection(Section):
    """A test of learning rates: up from optim.lr for as long as it runs."""

    name: Literal["lr_range"] = key("lr_range", "kind of schedule")
    every: Whole = key(10, "steps of one interval", unit="steps", example="20")
    rate: NonNegative = key(1.0, "after n intervals the learning rate is optim.lr x (1 + rate x n)", example="5")
    stairs: bool = key(False, "whether it moves once per interval only", example="true")


ScheduleSection = Annotated[
    ConstantSection
    | LinearWarmupSection
    | WarmupLinearSection
    | WarmupCosineSection
    | OneCycleSection
    | LrRangeSection,
    Field(discriminator="name"),
]
