"""From settings to the objects of the engine: one function each, nothing but names on both sides."""

from collections.abc import Callable

from torch import nn

from zero import optim, schedule
from zero.config import Adam, AdamW, Config, Constant, LinearWarmup, Lion, WarmupLinear
from zero.errors import ConfigError
from zero.optim import Schedule, Transform
from zero.placement import Room
from zero.plan import Plan
from zero.precision import LossScaling, Precision
from zero.stage import Stage
from zero.world import World


def build_plan(
    config: Config,
    model: nn.Module,
    world: World,
    *,
    room: Room | None = None,
    activation_bytes: int = 0,
    remat_bytes: Callable[[], int] | None = None,
) -> Plan:
    """The plan of a run whose batch is solved for this world.

    Args:
        room, activation_bytes, remat_bytes: see `Plan`.

    Raises:
        ConfigError: what only the model can tell, such as a class of `zero.units` that it does not have; or an auto
            that was not settled (see `zero/planning`).
    """
    if config.zero.stage == "auto":
        raise ConfigError("zero.stage=auto was not settled; write `config = zero.planning.settle(config, ...)` first")
    _, _, accumulate = config.batch.solved(world.size).numbers()
    return Plan(
        model,
        optimizer=build_optimizer(config),
        stage=Stage(config.zero.stage),
        precision=build_precision(config),
        offload=config.offload.asked(),
        world=world,
        units=None if config.zero.units == "auto" else list(config.zero.units),
        prefetch=config.zero.prefetch,
        activations=config.zero.activations,
        update=config.zero.update,
        accumulate=accumulate,
        room=room,
        activation_bytes=activation_bytes,
        remat_bytes=remat_bytes,
    )


def build_optimizer(config: Config) -> Transform:
    """The transform with its schedule, clipping and decay."""
    chosen = config.optim
    decay = optim.decay_matrices if chosen.decay == "matrices" else _decay_all
    lr, clip, weight_decay = build_schedule(config), chosen.clip, chosen.weight_decay
    if isinstance(chosen, AdamW | Adam):
        make = optim.adamw if isinstance(chosen, AdamW) else optim.adam
        betas = {"beta1": chosen.beta1, "beta2": chosen.beta2}
        return make(lr, **betas, eps=chosen.eps, weight_decay=weight_decay, clip=clip, decay=decay)
    if isinstance(chosen, Lion):
        return optim.lion(lr, beta1=chosen.beta1, beta2=chosen.beta2, weight_decay=weight_decay, clip=clip, decay=decay)
    return optim.sgd(
        lr, momentum=chosen.momentum, nesterov=chosen.nesterov, weight_decay=weight_decay, clip=clip, decay=decay
    )


def build_schedule(config: Config) -> Schedule:
    """Step to learning rate."""
    chosen, lr = config.schedule, config.optim.lr
    if isinstance(chosen, Constant):
        return schedule.constant(lr)
    if isinstance(chosen, LinearWarmup):
        return schedule.linear_warmup(lr, config.warmup)
    make = schedule.warmup_linear if isinstance(chosen, WarmupLinear) else schedule.warmup_cosine
    return make(lr, config.warmup, config.steps, final=chosen.final * lr)


def build_precision(config: Config) -> Precision:
    """The dtypes; loss scaling for fp16 only."""
    chosen = config.precision
    scale = LossScaling(**chosen.scale.model_dump()) if chosen.compute == "fp16" else None
    return Precision(chosen.compute, reduce=chosen.reduce, scale=scale)


def _decay_all(name: str, shape: tuple[int, ...]) -> bool:
    return True
