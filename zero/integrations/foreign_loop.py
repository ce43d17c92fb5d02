"""An `Engine` for another library's training loop, which makes the optimizer and decides when a step ends."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zero.core.optim import Transform
from zero.core.precision import Precision
from zero.core.suggest import meant
from zero.distributed.world import World
from zero.engine.plan import Plan
from zero.errors import ConfigError
from zero.settings import Settings
from zero.user_loop.engine import Engine
from zero.user_loop.optimizers import Optimizer, PassedOptimizer
from zero.user_loop.shard import shard

STATE_FOLDER = "zero"
"""The folder in each of the loop's checkpoints that holds the sharded training state."""

PLAN_SETTINGS = (
    *("stage", "precision", "offload", "units", "bucket", "prefetch", "keep", "activations", "rows", "compile"),
    *("update", "gather", "reduce", "shard", "weights"),
)


def check_plan_settings(settings: Mapping[str, Any], elsewhere: str) -> None:
    """Raise ConfigError for a key of `zero={...}` that is no setting of the engine.

    Args:
        elsewhere: where the loop takes its own settings.
    """
    for key in settings:
        if key not in PLAN_SETTINGS:
            raise ConfigError(
                f"zero={{{key!r}: ...}} is not a setting of the engine{meant(key, PLAN_SETTINGS) or '.'} Choose "
                f"from {', '.join(PLAN_SETTINGS)}, or write it in {elsewhere}."
            )


def check_precision(loop: str, settings: Mapping[str, Any], names: tuple[str, str]) -> None:
    """Raise ConfigError if `settings` have another precision than the loop. "fp32" of the loop counts as not set.

    Args:
        names: names of both settings in the message; the second is a format string for the precision.
    """
    precision = settings.get("precision")
    if precision is None or loop == "fp32":
        return
    compute = (precision if isinstance(precision, Precision) else Precision(precision)).compute
    if Precision(loop).compute != compute:
        raise ConfigError(f"{names[0]} and {names[1].format(precision)} have different values. Leave out one of them.")


def new_engine(
    model: nn.Module,
    passed: torch.optim.Optimizer | None,
    world: World,
    settings: Mapping[str, Any],
    *,
    precision: str,
    accumulate: int,
    clip: float | None,
    rows: int = 1,
) -> Engine:
    """Return an engine that takes over `model`. Collective.

    Args:
        passed: the loop's optimizer, whose parameter groups are used; None: nothing is trained.
        settings: arguments of `Plan`, and `weights` of `zero.init`, by name.
        precision: the precision if `settings` have none.
        accumulate: number of microbatches of a step, by which gradients are divided.
        clip: the largest gradient norm; None: no clipping.
        rows: number of samples in a microbatch, for speeds.
    """
    optimizer = Optimizer.of_nothing() if passed is None else Optimizer.of(passed)
    if passed is optimizer:
        passed = None
    arguments = {"precision": precision} | {key: value for key, value in settings.items() if key != "weights"}

    def make_plan(transform: Transform) -> Plan:
        return Plan(model, optimizer=transform, world=world, accumulate=accumulate, **arguments)

    state = shard(model, optimizer, make_plan, clip=clip, world=world, weights=settings.get("weights"))
    batch = {"global": "auto", "micro": rows, "accumulate": accumulate}
    return Engine(
        Settings.read({"batch": batch}).on(world.size),
        state,
        optimizer,
        passed=None if passed is None else PassedOptimizer(passed),
        lr_scheduler=None,
        managed=False,  # the loop ends steps, because the last step of an epoch may have fewer microbatches
        run_log=None,
    )
