"""Schedulers write the learning rate into the optimizer's groups: torch's own, or a config's schedule in that shape.

The engine steps a scheduler after each update that was really made, as DeepSpeed does. DeepSpeed's scheduler classes
come last: each is the scheduler of a config with these `params`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from zero.deepspeed.config import Translation, translate
from zero.deepspeed.config_keys import SCHEDULERS
from zero.deepspeed.optimizers import ParamGroup
from zero.settings import Settings
from zero.settings.build import build_optimizer
from zero.settings.schedule import OneCycle as Cycle, Warmup, WarmupCosine


class Scheduler(Protocol):
    """What an engine needs of a scheduler; torch's have it."""

    def step(self, *args: Any, **kwargs: Any) -> None: ...

    def get_last_lr(self) -> Sequence[float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class ConfigScheduler:
    """The schedule that a DeepSpeed configuration names, written into groups.

    A group keeps its own rate's share of the config's peak: half of it stays half, but `warmup_min_lr` is every
    group's. Where the schedule itself names its peak all groups get its rate. DeepSpeed's warm-ups begin before their
    first rate, and so do these: two updates have it, of which a cosine makes the first at 0.

    Args:
        config: the configuration's settings: they give the learning rate and betas of each step; the first step is 1.
    """

    def __init__(self, translation: Translation, config: Settings, groups: Sequence[ParamGroup]) -> None:
        self._groups, self._transform = groups, build_optimizer(config)
        schedule, peak = config.schedule, config.optim.lr
        self._momenta = isinstance(schedule, Cycle) and schedule.momentum
        self._warms_up, self._is_cosine = isinstance(schedule, Warmup), isinstance(schedule, WarmupCosine)
        self._low, one_for_all = 0.0, translation.peak_is_for_all
        if isinstance(schedule, Warmup) and not (self._is_cosine or one_for_all):
            self._low = peak * (schedule.start or 0.0)
        rise = 0.0 if one_for_all else peak - self._low
        self._shares = [(group["lr"] - self._low) / rise if rise else 1.0 for group in groups]
        self.made = 0
        self._write()

    def step(self) -> None:
        """Count an update, and write the settings of the next one."""
        self.made += 1
        self._write()

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [group["lr"] for group in self._groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        """The number of updates."""
        return {"made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.made = int(state_dict["made"])
        self._write()

    def _write(self) -> None:
        hyper = self._transform.groups[0](max(1, self.made) if self._warms_up else self.made + 1)
        lr = 0.0 if self._is_cosine and self.made == 0 else hyper.lr
        for group, share in zip(self._groups, self._shares, strict=True):
            group["lr"] = self._low + (lr - self._low) * share
            if self._momenta and "betas" in group:  # SGD's momentum stays as it is, as in DeepSpeed
                group["betas"] = hyper.betas


def _scheduler(kind: str, optimizer: torch.optim.Optimizer, *values: Any, **named: Any) -> ConfigScheduler:
    """What `zero.initialize` makes of a config with this section `scheduler`, for these groups.

    Args:
        kind: the type of the scheduler.
        optimizer: a torch optimizer; its first group's learning rate is the config's.
        *values: parameters of the schedule, in DeepSpeed's order; None is left out.
        **named: the same by name; `last_batch_iteration`, for a run that goes on, is one less than its updates.

    Raises:
        ConfigError: one line that names the parameter.
    """
    names = (key.name for key in SCHEDULERS[kind].keys)
    params = {**dict(zip(names, values, strict=False)), **named}
    last = params.pop("last_batch_iteration", -1)
    first = optimizer.param_groups[0]
    config = {
        "train_batch_size": 1,
        "optimizer": {"type": "Adam" if "betas" in first else "SGD", "params": {"lr": float(first["lr"])}},
        "scheduler": {"type": kind, "params": {name: one for name, one in params.items() if one is not None}},
    }
    translation = translate(config)
    made = ConfigScheduler(translation, Settings.read(translation.settings), optimizer.param_groups)
    made.load_state_dict({"made": last + 1})
    return made


WarmupLR = partial(_scheduler, "WarmupLR")
WarmupDecayLR = partial(_scheduler, "WarmupDecayLR")
WarmupCosineLR = partial(_scheduler, "WarmupCosineLR")
OneCycle = partial(_scheduler, "OneCycle")
LRRangeTest = partial(_scheduler, "LRRangeTest")
