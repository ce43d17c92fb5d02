"""DeepSpeed's five schedulers, which write the learning rate into the optimizer's groups, as torch's do.

The engine calls a scheduler's `step` after each update that was not skipped, as DeepSpeed does. The learning rates are
those of DeepSpeed 0.19.8: `last_batch_iteration` is -1 at first, and the n-th update uses the rates of iteration n - 2,
so a warm-up makes two updates with its first rate. Parameters are passed by name; `schedule_keys` has their defaults.
Bounds of rates and momentums are numbers, or lists with a number for each group.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from zero.core.lr_schedule import Cycle
from zero.core.suggest import shown
from zero.deepspeed.config import schedule_keys
from zero.errors import ConfigError

SECOND_BETA = 0.99
"""The second beta that DeepSpeed's OneCycle sets."""


class _Schedule(ABC):
    """Base class of DeepSpeed's schedulers.

    Args:
        optimizer: the optimizer whose groups get the learning rates.
        last_batch_iteration: number of updates made, minus 1.
        **keys: parameters of DeepSpeed's scheduler.

    Raises:
        ConfigError: a parameter is unknown, has no default and is missing, or is a list of another length than the
            number of groups.
    """

    declared: ClassVar[type[schedule_keys.ScheduleKeys]]
    keys: schedule_keys.ScheduleKeys

    def __init__(self, optimizer: torch.optim.Optimizer, *, last_batch_iteration: int = -1, **keys: Any) -> None:
        self.keys = self.declared(**keys)
        self.keys.check({f"{self.keys.section_key}.{name}" for name in keys if name == self.keys.peak_key})
        count = len(optimizer.param_groups)
        for name, numbers in self.keys.by_group.items():
            if len(numbers) != count:
                key = f"{self.keys.section_key}.{name}={shown(numbers)}"
                raise ConfigError(f"{key}: must have one number for each of the optimizer's {count} groups")
        self.optimizer, self.last_batch_iteration = optimizer, last_batch_iteration
        self._own_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._write()

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at `last_batch_iteration`."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rate that was last written into each group."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Write the learning rates of the next update into the groups.

        Args:
            last_batch_iteration: the iteration to continue from; None: the next iteration.
        """
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Return a dict with `last_batch_iteration`."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, and write the learning rates of the next update into the groups."""
        self.last_batch_iteration = int(sd["last_batch_iteration"])
        self._write()

    def _of_groups(self, bound: float | tuple[float, ...] | None) -> Sequence[float]:
        """Return a bound for each group; None is each group's own rate."""
        if bound is None:
            return self._own_lrs
        return bound if isinstance(bound, tuple) else [bound] * len(self._own_lrs)

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


class _Rise(_Schedule):
    keys: schedule_keys.RiseKeys

    @property
    def warmup_num_steps(self) -> int:
        """Number of iterations of the warm-up, at least 2."""
        return max(2, self.keys.warmup_num_steps)

    def _risen(self) -> float:
        """Return the progress of the warm-up, from 0 to 1."""
        done, steps = self.last_batch_iteration, self.warmup_num_steps
        if not 0 <= done < steps:
            return float(done >= steps)
        return math.log(done + 1) / math.log(steps) if self.keys.warmup_type == "log" else done / steps


class WarmupLR(_Rise):
    """A warm-up from `warmup_min_lr` to `warmup_max_lr`, by default each group's own rate, then a constant rate."""

    declared = schedule_keys.WarmupKeys
    keys: schedule_keys.WarmupKeys

    def get_lr(self) -> list[float]:
        share = self._share()
        bounds = zip(self._of_groups(self.keys.warmup_min_lr), self._of_groups(self.keys.warmup_max_lr), strict=True)
        return [low + (peak - low) * share for low, peak in bounds]

    def _share(self) -> float:
        return self._risen()


class WarmupDecayLR(WarmupLR):
    """A warm-up, then a linear decay to `warmup_min_lr`. If the decay has no iterations, the rate drops at once."""

    declared = schedule_keys.WarmupDecayKeys
    keys: schedule_keys.WarmupDecayKeys

    def _share(self) -> float:
        done, rise, total = self.last_batch_iteration, self.warmup_num_steps, self.keys.total_num_steps or 0
        return self._risen() if done < rise else max(0.0, (total - done) / max(1, total - rise))


class WarmupCosineLR(_Rise):
    """A warm-up to each group's own rate, then a cosine decay. The first update has a learning rate of 0."""

    declared = schedule_keys.WarmupCosineKeys
    keys: schedule_keys.WarmupCosineKeys

    def get_lr(self) -> list[float]:
        ratio = self._ratio()
        return [lr * ratio for lr in self._own_lrs]

    def _ratio(self) -> float:
        done, rise, total = self.last_batch_iteration, self.warmup_num_steps, self.keys.total_num_steps or 0
        first, least = self.keys.warmup_min_ratio, self.keys.cos_min_ratio
        if done < 0:
            return 0.0
        if done < rise:
            return first + (1 - first) * self._risen()
        decayed = min(1.0, (done - rise + 1) / max(1, total - rise))
        return max(0.0, least + (1 - least) * (1 + math.cos(math.pi * decayed)) / 2)


class OneCycle(_Schedule):
    """A rise and fall of the learning rate, during which the first beta falls and rises, then a decay.

    The first update uses the lowest beta, where `get_mom` already returns the highest, as in DeepSpeed. The momentum of
    optimizers without betas is not changed.
    """

    declared = schedule_keys.OneCycleKeys
    keys: schedule_keys.OneCycleKeys

    @property
    def _cycle(self) -> Cycle:
        keys = self.keys
        rise, fall = keys.cycle_first_step_size, keys.cycle_second_step_size
        stairs, fall_stairs = keys.cycle_first_stair_count, keys.cycle_second_stair_count
        halves = rise, rise if fall is None else fall
        return Cycle(*halves, (stairs, stairs if fall_stairs is None else fall_stairs), keys.decay_step_size)

    @property
    def _step(self) -> int:
        """The step at which the schedules of `core.lr_schedule` have the same learning rate."""
        return self.last_batch_iteration + 2

    def _height(self) -> float:
        """Return the position in the cycle: 0 at the lowest rate, 1 at the highest."""
        cycle, step = self._cycle, self._step
        return cycle.between(0.0, 1.0, step) if step <= cycle.rise + cycle.fall else 0.0

    def get_lr(self) -> list[float]:
        height, decay = self._height(), 1 + self.keys.decay_lr_rate * self._cycle.decays(self._step)
        lows = self._of_groups(self.keys.cycle_min_lr or 0.0)
        peaks = self._of_groups(self.keys.cycle_max_lr)
        return [(low + (peak - low) * height) / decay for low, peak in zip(lows, peaks, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group at `last_batch_iteration`; None if they stay as they are."""
        if not self.keys.cycle_momentum or "betas" not in self.optimizer.defaults:
            return None
        height, growth = self._height(), 1 + self.keys.decay_mom_rate * self._cycle.decays(self._step)
        bounds = zip(self._of_groups(self.keys.cycle_min_mom), self._of_groups(self.keys.cycle_max_mom), strict=True)
        return [((high - (high - low) * height) * growth, SECOND_BETA) for low, high in bounds]

    def _write(self) -> None:
        super()._write()
        lowest = self._of_groups(self.keys.cycle_min_mom)
        for group, betas, low in zip(self.optimizer.param_groups, self.get_mom() or (), lowest, strict=False):
            group["betas"] = (low, SECOND_BETA) if self.last_batch_iteration < 0 else betas


class LRRangeTest(_Schedule):
    """A learning-rate range test: rates rise from `lr_range_test_min_lr` without a limit."""

    declared = schedule_keys.LRRangeKeys
    keys: schedule_keys.LRRangeKeys

    def get_lr(self) -> list[float]:
        keys, intervals = self.keys, (self.last_batch_iteration + 1) / self.keys.lr_range_test_step_size
        growth = math.floor(intervals) if keys.lr_range_test_staircase else intervals
        share = 1 + keys.lr_range_test_step_rate * growth
        return [low * share for low in self._of_groups(keys.lr_range_test_min_lr)]


SCHEDULES = {
    schedule.__name__.lower(): schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
"""`type` of a config in lower case -> class."""

VALID_LR_SCHEDULES = [schedule.__name__ for schedule in SCHEDULES.values()]
"""Names of the schedulers, which Accelerate compares with an object's class."""
