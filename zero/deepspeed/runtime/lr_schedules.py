"""DeepSpeed's five schedulers, which write the learning rate into the optimizer's groups, as torch's do.

The engine steps a scheduler after each update that was not skipped, as DeepSpeed does. The rates are DeepSpeed
0.19.8's: `last_batch_iteration` is -1 at first, and the n-th update is made with the rates of iteration n - 2, so a
warm-up makes two updates with its first rate.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zero.errors import ConfigError

log = logging.getLogger("zero")

Rates = float | Sequence[float] | None
"""A rate for all groups, or a list with one for each; None: each group's own learning rate."""
SECOND_BETA = 0.99
"""The second beta that DeepSpeed's OneCycle sets."""


class Scheduler(Protocol):
    """The part of a scheduler that an engine uses; torch's have it."""

    def step(self, *args: Any, **kwargs: Any) -> None: ...

    def get_last_lr(self) -> Sequence[float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class _Schedule:
    """The common part of DeepSpeed's schedulers; a subclass has `get_lr`.

    Attributes:
        optimizer: `get_lr` is written into its groups.
        last_batch_iteration: updates made, minus 1.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        self.optimizer, self.last_batch_iteration = optimizer, last_batch_iteration
        self._write()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group at `last_batch_iteration`."""
        raise NotImplementedError

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


class WarmupLR(_Schedule):
    """A rise from the lowest rate to the highest, which then holds.

    Args:
        optimizer: its groups get the rates.
        warmup_min_lr: the lowest rate.
        warmup_max_lr: the highest rate.
        warmup_num_steps: iterations of the rise, at least 2.
        warmup_type: "log" or "linear".
        last_batch_iteration: -1 for a new run.

    Raises:
        ConfigError: a value that DeepSpeed does not take.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.min_lrs = _of_each_group(optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = _of_each_group(optimizer, "warmup_max_lr", warmup_max_lr)
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        share = self._share() if self.last_batch_iteration >= 0 else 0.0
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _share(self) -> float:
        return _risen(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then a straight line to the lowest rate.

    Args:
        optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration: as `WarmupLR`'s.
        total_num_steps: the iteration of the lowest rate. If the decay has no iteration, the rate drops at once.

    Raises:
        ConfigError: a value that DeepSpeed does not take.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_of_no_decay(total_num_steps, self.warmup_num_steps)

    def _share(self) -> float:
        done, rise, total = self.last_batch_iteration, self.warmup_num_steps, self.total_num_steps
        if done < rise:
            return super()._share()
        return max(0.0, (total - done) / max(1, total - rise))


class WarmupCosineLR(_Schedule):
    """Shares of each group's rate: a rise to all of it, then half a cosine.

    Args:
        optimizer: its groups get the rates; the first update is made with 0.
        total_num_steps: as `WarmupDecayLR`'s.
        warmup_min_ratio: the share at which the rise begins.
        warmup_num_steps, warmup_type, last_batch_iteration: as `WarmupLR`'s.
        cos_min_ratio: the last share.

    Raises:
        ConfigError: a value that DeepSpeed does not take.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps, warmup_type)
        self.org_lrs = _of_each_group(optimizer, "lr", None)
        super().__init__(optimizer, last_batch_iteration)
        _warn_of_no_decay(total_num_steps, self.warmup_num_steps)

    def get_lr_ratio(self) -> float:
        """Return the share of each group's rate at `last_batch_iteration`."""
        done, rise = self.last_batch_iteration, self.warmup_num_steps
        if done < 0:
            return 0.0
        if done < rise:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * _risen(done, rise, self.warmup_type)
        decayed = min(1.0, (done - rise + 1) / max(1, self.total_num_steps - rise))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * decayed)) / 2)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]


class OneCycle(_Schedule):
    """A rise and a fall of the rate, while the first beta moves the other way, then a decay.

    Args:
        optimizer: its groups get the rates, and the betas if it has any.
        cycle_min_lr, cycle_max_lr: the rate at both ends, and between the halves.
        decay_lr_rate, decay_mom_rate: after n intervals of the decay the rate is divided by 1 + `decay_lr_rate` n, and
            beta is multiplied by 1 + `decay_mom_rate` n.
        cycle_first_step_size: iterations of the first half.
        cycle_second_step_size: iterations of the second half; None: as many.
        cycle_first_stair_count, cycle_second_stair_count: equal stairs of each half; 0: none; None: as many as in the
            first half.
        decay_step_size: iterations of an interval of the decay; 0: no decay.
        cycle_momentum: whether betas are set.
        cycle_min_mom, cycle_max_mom: the first beta between the halves, and at both ends. The first update is made with
            the lowest.
        last_batch_iteration: -1 for a new run.

    Raises:
        ConfigError: a value that DeepSpeed does not take.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        first, second = cycle_first_step_size, cycle_second_step_size
        self.first_step_size, self.second_step_size = first, first if second is None else second
        if first <= 0 or self.second_step_size < 0:
            raise ConfigError(
                f"OneCycle(cycle_first_step_size={first}, cycle_second_step_size={second}): the first must be above "
                "0, the second 0 or more"
            )
        self.total_size = self.first_step_size + self.second_step_size
        self.first_stair_count = self.second_stair_count = cycle_first_stair_count
        if cycle_second_stair_count is not None:
            self.second_stair_count = cycle_second_stair_count
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = _of_each_group(optimizer, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = _of_each_group(optimizer, "cycle_max_lr", cycle_max_lr)
        self.min_moms = _of_each_group(optimizer, "cycle_min_mom", cycle_min_mom)
        self.max_moms = _of_each_group(optimizer, "cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            log.warning("OneCycle: cycle_momentum has no effect, because the groups of this optimizer have no betas")
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        height, decay = self._height(), 1 + self.decay_lr_rate * self._decays()
        return [(low + (high - low) * height) / decay for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group at `last_batch_iteration`; None without `cycle_momentum`."""
        if not self.cycle_momentum:
            return None
        height, growth = self._height(), 1 + self.decay_mom_rate * self._decays()
        pairs = zip(self.min_moms, self.max_moms, strict=True)
        return [((high - (high - low) * height) * growth, SECOND_BETA) for low, high in pairs]

    def _height(self) -> float:
        """Return the share of the way from the lowest rate to the highest."""
        done = self.last_batch_iteration + 1
        if done >= self.total_size:
            return 0.0
        if done <= self.first_step_size:
            at, size, stairs = done, self.first_step_size, self.first_stair_count
        else:
            at, size, stairs = self.total_size - done, self.second_step_size, self.second_stair_count
        return math.floor(at * stairs / size) / stairs if stairs else at / size

    def _decays(self) -> float:
        """Return the intervals of the decay so far."""
        after = self.last_batch_iteration + 1 - self.total_size
        return after / self.decay_step_size if self.decay_step_size and after > 0 else 0.0

    def _write(self) -> None:
        super()._write()
        if not self.cycle_momentum:
            return
        is_first = self.last_batch_iteration < 0
        betas = [(low, SECOND_BETA) for low in self.min_moms] if is_first else self.get_mom()
        for group, pair in zip(self.optimizer.param_groups, betas or (), strict=True):
            group["betas"] = pair


class LRRangeTest(_Schedule):
    """A range test: rates rise from the lowest, without a limit.

    Args:
        optimizer: its groups get the rates.
        lr_range_test_min_lr: the first rate.
        lr_range_test_step_size: iterations of an interval.
        lr_range_test_step_rate: the growth in each interval, as a share of the first rate.
        lr_range_test_staircase: whether it grows at the end of each interval only.
        last_batch_iteration: -1 for a new run.

    Raises:
        ConfigError: a value that DeepSpeed does not take.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        if lr_range_test_step_size <= 0:
            raise ConfigError(f"LRRangeTest(lr_range_test_step_size={lr_range_test_step_size}): must be above 0")
        self.min_lr = _of_each_group(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        intervals = (self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(intervals) if self.staircase else intervals)
        return [lr * growth for lr in self.min_lr]


SCHEDULES = {
    schedule.__name__: schedule for schedule in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
"""`type` of a config -> class."""


def _of_each_group(optimizer: torch.optim.Optimizer, key: str, rates: Rates) -> list[float]:
    groups = optimizer.param_groups
    if rates is None:
        return [float(group["lr"]) for group in groups]
    if not isinstance(rates, Sequence):
        return [rates] * len(groups)
    if len(rates) != len(groups):
        raise ConfigError(f"{key}={list(rates)}: the optimizer has {len(groups)} groups, each needs its value")
    return list(rates)


def _warmup(steps: int, curve: str) -> tuple[int, str]:
    if type(steps) is not int or steps <= 0:
        raise ConfigError(f"warmup_num_steps={steps}: must be a whole number from 1")
    if curve not in ("log", "linear"):
        raise ConfigError(f"warmup_type={curve}: must be log or linear")
    return max(2, steps), curve


def _risen(done: int, steps: int, curve: str) -> float:
    """Return the share of a rise that is done: 0 to 1."""
    if done >= steps:
        return 1.0
    return math.log(done + 1) / math.log(steps) if curve == "log" else done / steps


def _warn_of_no_decay(total: int, warmup: int) -> None:
    if total < warmup:
        log.warning(
            "total_num_steps=%s is less than warmup_num_steps=%s: the rate drops without a decay", total, warmup
        )
