"""The keys of `scheduler.params`: a class for each type of scheduler, with DeepSpeed's defaults."""

import logging
from collections.abc import Container, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from zero.core.schema import Section
from zero.core.setting_types import Natural, NonNegative, Whole
from zero.core.suggest import shown
from zero.deepspeed.config.key_types import Fractions, GroupRates, PeakRates, means, to
from zero.errors import ConfigError

log = logging.getLogger("zero")


def _known_curve(value: Any) -> Any:
    if value in ("log", "linear"):
        return value
    log.warning("scheduler.params.warmup_type=%s is neither log nor linear: log is used, as in DeepSpeed", shown(value))
    return "log"


class ScheduleKeys(Section):
    """Keys that all schedulers have.

    Attributes:
        name: the corresponding schedule of this library.
        required: keys without a default.
        peak_key: the key of the highest learning rate; "" if that is the optimizer's learning rate.
    """

    section_key: ClassVar[str] = "scheduler.params"
    name: ClassVar[str]
    required: ClassVar[tuple[str, ...]] = ()
    peak_key: ClassVar[str] = ""

    last_batch_iteration: Literal[-1] = means("only -1: a run that continues knows its step", -1)

    @property
    def peak(self) -> float | tuple[float, ...] | None:
        """The highest learning rate, of all groups or of each; None if that is the optimizer's learning rate."""
        return getattr(self, self.peak_key) if self.peak_key else None

    @property
    def by_group(self) -> dict[str, tuple[float, ...]]:
        """The keys with a number for each group of the optimizer."""
        return {name: value for name in type(self).model_fields if isinstance(value := getattr(self, name), tuple)}

    def check(self, autos: Container[str] = ()) -> None:
        """Raise ConfigError if a required key is missing; `autos` are the dotted keys with the value "auto"."""
        for name in self.required:
            if getattr(self, name) is None and f"{self.section_key}.{name}" not in autos:
                raise ConfigError(f"{self.section_key}.{name} is missing, and has no default")


class RiseKeys(ScheduleKeys):
    """Keys that all schedulers with a warm-up have."""

    warmup_num_steps: Whole = means("`schedule.warmup`", 1000)
    warmup_type: Annotated[Literal["log", "linear"], BeforeValidator(_known_curve)] = to("schedule.curve", "log")


class WarmupKeys(RiseKeys):
    """Keys of `WarmupLR`."""

    name: ClassVar[str] = "linear_warmup"
    peak_key: ClassVar[str] = "warmup_max_lr"

    warmup_min_lr: GroupRates = means("`schedule.start`, as a share of the peak", 0.0)
    warmup_max_lr: PeakRates | None = means("`optim.lr`")


class WarmupDecayKeys(WarmupKeys):
    """Keys of `WarmupDecayLR`."""

    name: ClassVar[str] = "warmup_linear"
    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    warmup_max_lr: PeakRates | None = means("`optim.lr`", 1e-3)
    total_num_steps: Whole | None = means("`schedule.total`")


class WarmupCosineKeys(RiseKeys):
    """Keys of `WarmupCosineLR`."""

    name: ClassVar[str] = "warmup_cosine"
    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    total_num_steps: Whole | None = means("`schedule.total`")
    warmup_min_ratio: NonNegative = means("`schedule.start`", 0.0)
    cos_min_ratio: NonNegative = to("schedule.final", 1e-4)


class OneCycleKeys(ScheduleKeys):
    """Keys of `OneCycle`."""

    name: ClassVar[str] = "one_cycle"
    required: ClassVar[tuple[str, ...]] = ("cycle_min_lr", "cycle_max_lr")
    peak_key: ClassVar[str] = "cycle_max_lr"

    cycle_min_lr: GroupRates | None = means("`schedule.start`, as a share of the peak")
    cycle_max_lr: PeakRates | None = means("`optim.lr`")
    decay_lr_rate: NonNegative = to("schedule.decay_rate", 0.0)
    cycle_first_step_size: Whole = to("schedule.rise", 2000)
    cycle_second_step_size: Natural | None = to("schedule.fall")
    cycle_first_stair_count: Natural = to("schedule.rise_stairs", 0)
    cycle_second_stair_count: Natural | None = to("schedule.fall_stairs")
    decay_step_size: Natural = to("schedule.decay_every", 0)
    cycle_momentum: bool = to("schedule.momentum", True)
    cycle_min_mom: Fractions = to("schedule.momentum_min", 0.8)
    cycle_max_mom: Fractions = to("schedule.momentum_max", 0.9)
    decay_mom_rate: NonNegative = to("schedule.momentum_decay_rate", 0.0)


class LRRangeKeys(ScheduleKeys):
    """Keys of `LRRangeTest`."""

    name: ClassVar[str] = "lr_range"
    peak_key: ClassVar[str] = "lr_range_test_min_lr"

    lr_range_test_min_lr: PeakRates | None = means("`optim.lr`", 1e-3)
    lr_range_test_step_size: Whole = to("schedule.every", 2000)
    lr_range_test_step_rate: NonNegative = to("schedule.rate", 1.0)
    lr_range_test_staircase: bool = to("schedule.stairs", False)


SCHEDULER_KEYS: Mapping[str, type[ScheduleKeys]] = {
    "WarmupLR": WarmupKeys,
    "WarmupDecayLR": WarmupDecayKeys,
    "WarmupCosineLR": WarmupCosineKeys,
    "OneCycle": OneCycleKeys,
    "LRRangeTest": LRRangeKeys,
}
