"""Translation of a scheduler's keys to the settings `schedule`, and to the settings of `optim` that it overrides."""

from typing import Any

from zero.core import suggest
from zero.deepspeed.config.key_types import moved
from zero.deepspeed.config.optimizer_keys import LionKeys
from zero.deepspeed.config.schedule_keys import (
    OneCycleKeys,
    RiseKeys,
    ScheduleKeys,
    WarmupCosineKeys,
    WarmupDecayKeys,
    WarmupKeys,
)
from zero.deepspeed.config.source import CheckedConfig
from zero.errors import ConfigError
from zero.settings import Settings


def _peak(config: CheckedConfig, scheduler: ScheduleKeys) -> float | tuple[float, ...] | None:
    return None if f"scheduler.params.{scheduler.peak_key}" in config.autos else scheduler.peak


def check_one_schedule(scheduler: ScheduleKeys | None) -> None:
    """Raise ConfigError if a scheduler has numbers for each group, because settings have one schedule."""
    if scheduler is None:
        return
    for name, numbers in scheduler.by_group.items():
        key = f"{scheduler.section_key}.{name}"
        raise ConfigError(
            f"{key}={suggest.shown(numbers)}: lists are for zero.initialize, which has groups. Write a number."
        )


def _has_betas(config: CheckedConfig) -> bool:
    return config.optimizer is None or isinstance(config.optimizer, LionKeys)


def scheduler_of(config: CheckedConfig) -> tuple[str, dict[str, Any]] | None:
    """Return the scheduler's type and arguments. A peak of "auto" is each group's rate, other "auto" are defaults."""
    scheduler = config.scheduler
    if scheduler is None:
        return None
    for name in ("warmup_num_steps", *scheduler.required):
        if f"scheduler.params.{name}" in config.autos and name != scheduler.peak_key:
            raise ConfigError(f"scheduler.params.{name}=auto: write the number, because nothing fills it in")
    arguments = scheduler.model_dump(exclude_unset=True)
    if f"scheduler.params.{scheduler.peak_key}" in config.autos:
        arguments[scheduler.peak_key] = None
    return str(config.keys.scheduler.type), arguments


def schedule_settings(config: CheckedConfig) -> dict[str, Any]:
    scheduler = config.scheduler
    if scheduler is None:
        return {} if config.optimizer is None else {"name": "constant"}
    settings = {"name": scheduler.name, **moved(scheduler, "schedule")}
    if isinstance(scheduler, RiseKeys):
        return settings | _rise(config, scheduler)
    if isinstance(scheduler, OneCycleKeys):
        settings["start"] = _start(config, scheduler, scheduler.cycle_min_lr or 0.0)
        if not _has_betas(config):
            settings["momentum"] = False
        elif scheduler.cycle_momentum:
            settings["momentum_start"] = scheduler.cycle_min_mom  # as in DeepSpeed's first update
    return settings


def _start(config: CheckedConfig, scheduler: ScheduleKeys, lowest: Any) -> float:
    """Return the lowest rate as a share of the peak. `check_one_schedule` has made sure that both are numbers."""
    peak: Any = _peak(config, scheduler)
    return float(lowest / (peak or _lr(config)))


def _lr(config: CheckedConfig) -> float:
    """Return the optimizer's learning rate; this library's default if it is "auto" or there is no optimizer."""
    if config.optimizer is not None and "optimizer.params.lr" not in config.autos:
        return config.optimizer.lr
    return Settings.read({"optim": {"name": config.optimizer.name if config.optimizer else "adamw"}}).optim.lr


def _rise(config: CheckedConfig, scheduler: RiseKeys) -> dict[str, Any]:
    """Return the settings of a warm-up and its decay.

    DeepSpeed makes its first two updates at the first rate, this library's schedules make one, so they reach every rate
    one step earlier. A logarithmic warm-up reaches its peak in step `warmup_num_steps`, a linear warm-up one step
    later. A linear decay begins in step `warmup_num_steps` + 1, a cosine decay one step earlier.
    """
    is_log, is_auto = scheduler.warmup_type == "log", "scheduler.params.warmup_num_steps" in config.autos
    settings: dict[str, Any] = {"warmup": "auto" if is_auto else max(2, scheduler.warmup_num_steps) + (not is_log)}
    if isinstance(scheduler, WarmupKeys):
        if scheduler.warmup_min_lr and _peak(config, scheduler) is None and config.optimizer is None:
            raise ConfigError("scheduler.params.warmup_min_lr needs warmup_max_lr, or an optimizer with its rate")
        settings["start"] = _start(config, scheduler, scheduler.warmup_min_lr)
    if isinstance(scheduler, WarmupDecayKeys):
        settings |= {"final": settings["start"], "hold": int(is_log)}
        if scheduler.total_num_steps is not None:
            settings["total"] = scheduler.total_num_steps + 1
    if isinstance(scheduler, WarmupCosineKeys):
        settings |= {"start": scheduler.warmup_min_ratio, "hold": int(is_log) - 1}
        if scheduler.total_num_steps is not None:
            settings["total"] = scheduler.total_num_steps
    return settings


def optim_of_schedule(config: CheckedConfig) -> dict[str, Any]:
    """Return the settings of `optim` that a scheduler overrides: its peak as learning rate, and OneCycle's beta2."""
    scheduler, lr = config.scheduler, None if config.optimizer is None else config.optimizer.lr
    peak = None if scheduler is None else _peak(config, scheduler)
    if scheduler is None or peak is None:
        return {}
    if scheduler.peak_key not in scheduler.model_fields_set or lr not in (None, peak):
        key = f"scheduler.params.{scheduler.peak_key}"
        rates = f"{peak:g}" if isinstance(peak, float) else suggest.shown(peak)
        config.notes.append(f"{key} is {rates}, and wins over optimizer.params.lr, as in DeepSpeed")
    is_cycle = isinstance(scheduler, OneCycleKeys) and scheduler.cycle_momentum and _has_betas(config)
    return {"lr": peak, "beta2": 0.99} if is_cycle else {"lr": peak}
