"""An engine for another library's loop, which makes the optimizer and decides when a step ends."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zero.core.optim import Transform
from zero.core.precision import Precision
from zero.deepspeed.engine import Engine
from zero.deepspeed.initialization import shard
from zero.deepspeed.optimizers import Optimizer, PassedOptimizer
from zero.distributed.world import World
from zero.engine.plan import Plan
from zero.errors import ConfigError
from zero.settings import Settings

STATE_FOLDER = "zero"
"""The folder in each checkpoint of the loop that has the training state."""

PLAN_SETTINGS = (
    *("stage", "precision", "offload", "units", "prefetch", "activations", "compile", "update"),
    *("gather", "reduce", "shard", "weights"),
)


def check_precision(loop: str, settings: Mapping[str, Any], names: tuple[str, str]) -> None:
    """Raise ConfigError if the loop's precision, unless "fp32", and that of `settings` differ. `names` are both."""
    precision = settings.get("precision")
    if precision is None or loop == "fp32":
        return
    compute = (precision if isinstance(precision, Precision) else Precision(precision)).compute
    if Precision(loop).compute != compute:
        raise ConfigError(f"{names[0]} and {names[1].format(precision)}: leave out one of them")


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
    """Take `model` over. Collective.

    Args:
        passed: the optimizer whose groups are used; None: nothing trains.
        settings: arguments of `Plan`, and `weights` of `zero.init`, by name.
        precision: the precision if `settings` have none.
        accumulate: the divisor of gradients.
        clip: the largest gradient norm; None for none.
        rows: rows of a microbatch, for speeds.
    """
    optimizer = Optimizer.of_nothing() if passed is None else Optimizer.of(passed)
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
        managed=False,  # the loop ends steps: the last one of an epoch may have fewer microbatches
        run_log=None,
    )
