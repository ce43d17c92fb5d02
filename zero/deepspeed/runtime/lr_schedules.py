"""DeepSpeed's five schedulers, which write the learning rate into the optimizer's groups, as torch's do.

The engine steps a scheduler after each update that was not skipped, as DeepSpeed does. The rates are DeepSpeed
0.19.8's: `last_batch_iteration` is -1 at first, and the n-th update is made with the rates of iteration n - 2, so a
warm-up makes two updates with its first rate. Parameters are passed by name; `config_keys` has their defaults.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from zero.core.lr_schedule import Cycle
from zero.deepspeed import config_keys

SECOND_BETA = 0.99
"""The second beta that DeepSpeed's OneCycle sets."""


class Scheduler(Protocol):
    """The part of a scheduler that an engine uses; torch's have it."""

    def step(self, *args: Any, **kwargs: Any) -> None: ...

    def get_last_lr(self) -> Sequence[float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class _Schedule(ABC):
    """The common part of DeepSpeed's schedulers.

    Args:
        optimizer: its groups get the rates.
        last_batch_iteration: updates made, minus 1.
        **keys: DeepSpeed's parameters.

    Raises:
        ConfigError: a parameter is unknown, or has no default and is missing.
    """

    declared: ClassVar[type[config_keys.Schedule]]
    keys: config_keys.Schedule

    def __init__(self, optimizer: torch.optim.Optimizer, *, last_batch_iteration: int = -1, **keys: Any) -> None:
        self.keys = self.declared(**keys)
        self.keys.check({f"{self.keys.section_key}.{name}" for name in keys if name == self.keys.peak_key})
        self.optimizer, self.last_batch_iteration = optimizer, last_batch_iteration
        self._own_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._write()

    @abstractmethod
    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at `last_batch_iteration`."""

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group as it was written last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Write the settings of the next update.

        Args:
            last_batch_iteration: the iteration to go to; None: the next.
        """
        following = self.last_batch_iteration + 1
        self.last_batch_iteration = following if last_batch_iteration is None else last_batch_iteration
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Return `last_batch_iteration` by its name."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, and write the settings of the next update."""
        self.last_batch_iteration = int(sd["last_batch_iteration"])
        self._write()

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, lr in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


class _Rise(_Schedule):
    keys: config_keys.Rise

    @property
    def warmup_num_steps(self) -> int:
        """Iterations of the warm-up, at least 2."""
        return max(2, self.keys.warmup_num_steps)

    def _risen(self) -> float:
        """Return the share of the warm-up that is done: 0 to 1."""
        done, steps = self.last_batch_iteration, self.warmup_num_steps
        if not 0 <= done < steps:
            return float(done >= steps)
        return math.log(done + 1) / math.log(steps) if self.keys.warmup_type == "log" else done / steps


class WarmupLR(_Rise):
    """A rise from the lowest rate to the highest, which then holds; without a highest, to that of each group."""

    declared = config_keys.Warmup
    keys: config_keys.Warmup

    def get_lr(self) -> list[float]:
        low, peak, share = self.keys.warmup_min_lr, self.keys.warmup_max_lr, self._share()
        return [low + ((own if peak is None else peak) - low) * share for own in self._own_lrs]

    def _share(self) -> float:
        return self._risen()


class WarmupDecayLR(WarmupLR):
    """A rise, then a straight line to the lowest rate. If the decay has no iteration, the rate drops at once."""

    declared = config_keys.WarmupDecay
    keys: config_keys.WarmupDecay

    def _share(self) -> float:
        done, rise, total = self.last_batch_iteration, self.warmup_num_steps, self.keys.total_num_steps or 0
        return self._risen() if done < rise else max(0.0, (total - done) / max(1, total - rise))


class WarmupCosineLR(_Rise):
    """Shares of each group's rate: a rise to all of it, then half a cosine. The first update is made with 0."""

    declared = config_keys.WarmupCosine
    keys: config_keys.WarmupCosine

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
    """A rise and a fall of the rate, while the first beta moves the other way, then a decay.

    The first update is made with the lowest beta. Momentum without betas stays as it is.
    """

    declared = config_keys.OneCycle
    keys: config_keys.OneCycle

    @property
    def _cycle(self) -> Cycle:
        keys = self.keys
        rise, fall = keys.cycle_first_step_size, keys.cycle_second_step_size
        stairs, fall_stairs = keys.cycle_first_stair_count, keys.cycle_second_stair_count
        halves = rise, rise if fall is None else fall
        return Cycle(*halves, (stairs, stairs if fall_stairs is None else fall_stairs), keys.decay_step_size)

    @property
    def _step(self) -> int:
        """The step of `core.lr_schedule` with the same rate."""
        return self.last_batch_iteration + 2

    def _height(self) -> float:
        """Return the share of the way from the lowest rate to the highest."""
        cycle, step = self._cycle, self._step
        return cycle.between(0.0, 1.0, step) if step <= cycle.rise + cycle.fall else 0.0

    def get_lr(self) -> list[float]:
        low, peak, height = self.keys.cycle_min_lr or 0.0, self.keys.cycle_max_lr, self._height()
        decay = 1 + self.keys.decay_lr_rate * self._cycle.decays(self._step)
        return [(low + ((own if peak is None else peak) - low) * height) / decay for own in self._own_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group at `last_batch_iteration`; None if they stay as they are."""
        if not self.keys.cycle_momentum or "betas" not in self.optimizer.defaults:
            return None
        low, high = self.keys.cycle_min_mom, self.keys.cycle_max_mom
        growth = 1 + self.keys.decay_mom_rate * self._cycle.decays(self._step)
        beta = low if self.last_batch_iteration < 0 else (high - (high - low) * self._height()) * growth
        return [(beta, SECOND_BETA)] * len(self._own_lrs)

    def _write(self) -> None:
        super()._write()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas


class LRRangeTest(_Schedule):
    """A range test: rates rise from the lowest, without a limit."""

    declared = config_keys.LRRange
    keys: config_keys.LRRange

    def get_lr(self) -> list[float]:
        keys, intervals = self.keys, (self.last_batch_iteration + 1) / self.keys.lr_range_test_step_size
        growth = math.floor(intervals) if keys.lr_range_test_staircase else intervals
        low, share = keys.lr_range_test_min_lr, 1 + keys.lr_range_test_step_rate * growth
        return [(own if low is None else low) * share for own in self._own_lrs]


SCHEDULES = {
    schedule.__name__.lower(): schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
"""`type` of a config in lower case -> class."""
