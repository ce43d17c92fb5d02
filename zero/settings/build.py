"""The engine's objects made from settings: plan, optimizer, schedule with its auto lengths, precision."""

from typing import Any

from torch import nn

from zero.core import lr_schedule
from zero.core.groups import decay_matrices
from zero.core.lr_schedule import Schedule
from zero.core.optim import Transform
from zero.core.optimizers import OPTIMIZERS, with_ema, with_moments
from zero.core.precision import Precision
from zero.core.stage import Stage
from zero.distributed.world import World
from zero.engine.model import Splitting
from zero.engine.plan import Plan, split_for
from zero.errors import ConfigError
from zero.settings import Settings
from zero.settings.schedule import DecayFields, LrRangeSection, OneCycleSection, WarmupFields, WarmupLinearSection


def build_plan(config: Settings, model: nn.Module, world: World, **overrides: Any) -> Plan:
    """Make the plan of a run.

    Args:
        overrides: arguments of `Plan` that replace the config's, or that no config has, such as `room`; None and False
            do not replace anything.

    Raises:
        ConfigError: a setting does not fit the model, such as a class in `zero.units` that it does not have; or
            `zero.stage` is still "auto", which `zero.trainer.planning.resolve_auto` replaces.
    """
    if config.zero.stage == "auto":
        raise ConfigError(
            "zero.stage=auto is not resolved to a stage yet. Call `zero.trainer.planning.resolve_auto` first."
        )
    sharding = config.zero
    arguments: dict[str, Any] = {
        "stage": Stage(config.zero.stage),
        "precision": build_precision(config),
        "offload": config.offload,
        "units": None if sharding.units == "auto" else list(sharding.units),
        "bucket": sharding.bucket,
        "prefetch": sharding.prefetch,
        "keep": sharding.keep,
        "activations": sharding.activations_by_pattern,
        "rows": sharding.rows,
        "compile": sharding.compile,
        "update": sharding.update,
        "accumulate": config.batch_on(world.size).numbers()[2],
        "gather": sharding.gather,
        "reduce": sharding.reduce,
        "shard": sharding.shard,
    }
    arguments |= {name: value for name, value in overrides.items() if value is not None and value is not False}
    if "optimizer" not in arguments:
        arguments["optimizer"] = build_optimizer(config)
    return Plan(model, world=world, **arguments)


def build_splitting(config: Settings, model: nn.Module, world: World) -> Splitting:
    """Return the units and sites of the plan of a run."""
    units = None if config.zero.units == "auto" else list(config.zero.units)
    precision, bucket, shard = build_precision(config), config.zero.bucket, config.zero.shard
    return split_for(
        model, build_optimizer(config), world, precision=precision, units=units, bucket=bucket, shard=shard
    )


def build_optimizer(config: Settings) -> Transform:
    """Make the optimizer with its schedule, clipping, decay and, if set, the moving average of the parameters."""
    transform, ema = _build_transform(config), config.optim.ema
    if config.optim.moments != "fp32":
        transform = with_moments(transform, config.optim.moments, seed=config.seed)
    return transform if ema is None else with_ema(transform, ema)


def _build_transform(config: Settings) -> Transform:
    chosen = config.optim
    decay = decay_matrices if chosen.decay == "matrices" else lambda name, shape: True
    shared: dict[str, Any] = {"weight_decay": chosen.weight_decay, "clip": chosen.clip, "decay": decay}
    return OPTIMIZERS[chosen.name].build(chosen, build_schedule(config), _cycled_momentum(config), shared)


def build_schedule(config: Settings) -> Schedule:
    """Make the function from the step to the learning rate."""
    chosen, lr = config.schedule, config.optim.lr
    if isinstance(chosen, WarmupFields):
        start = None if chosen.start is None else chosen.start * lr
        if isinstance(chosen, DecayFields):
            make = lr_schedule.warmup_linear if isinstance(chosen, WarmupLinearSection) else lr_schedule.warmup_cosine
            final, hold = chosen.final * lr, chosen.hold
            return make(lr, config.warmup, config.decayed, final, hold=hold, start=start, curve=chosen.curve)
        return lr_schedule.linear_warmup(lr, config.warmup, start=start, curve=chosen.curve)
    if isinstance(chosen, OneCycleSection):
        return lr_schedule.OneCycleSchedule(lr, chosen.start * lr, _cycle(config, chosen), chosen.decay_rate)
    if isinstance(chosen, LrRangeSection):
        return lr_schedule.LrRangeSchedule(lr, chosen.every, chosen.rate, chosen.stairs)
    return lr_schedule.linear_warmup(lr, 0)


def _cycled_momentum(config: Settings) -> Schedule | None:
    chosen = config.schedule
    if not isinstance(chosen, OneCycleSection) or not chosen.momentum:
        return None
    low, high, cycle = chosen.momentum_min, chosen.momentum_max, _cycle(config, chosen)
    momentum = lr_schedule.CycledMomentum(low, high, cycle, chosen.momentum_decay_rate, chosen.momentum_start)
    if momentum(config.steps) >= 1:
        raise ConfigError(
            f"schedule.momentum_decay_rate={chosen.momentum_decay_rate:g} brings the momentum to 1 within "
            f"steps={config.steps}. Leave it out, or raise schedule.decay_every."
        )
    return momentum


def _cycle(config: Settings, chosen: OneCycleSection) -> lr_schedule.Cycle:
    rise = max(1, config.steps // 2) if chosen.rise == "auto" else chosen.rise
    down = chosen.rise_stairs if chosen.fall_stairs is None else chosen.fall_stairs
    return lr_schedule.Cycle(rise, chosen.fall or rise, (chosen.rise_stairs, down), chosen.decay_every)


def build_precision(config: Settings) -> Precision:
    """Make the `Precision` of a run, with loss scaling for fp16 only."""
    chosen = config.precision
    scale = chosen.scale if chosen.compute == "fp16" else None
    return Precision(
        chosen.compute,
        reduce=chosen.reduce,
        scale=scale,
        master=chosen.master,
        frozen=chosen.frozen,
        coded=chosen.coded,
    )
