"""An engine for another library's loop: that library made the optimizer, and says when a step ends."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zero.core.optim import Transform
from zero.core.precision import Precision
from zero.core.suggest import meant
from zero.deepspeed.engine import Engine
from zero.deepspeed.initialization import shard
from zero.deepspeed.optimizers import Optimizer, PassedOptimizer
from zero.distributed.world import World
from zero.engine.plan import Plan
from zero.errors import ConfigError
from zero.settings import Settings

STATE_FOLDER = "zero"
"""In each checkpoint of the loop: the training state, as `zero.save` writes it."""

PLAN_SETTINGS = (
    *("stage", "precision", "offload", "units", "prefetch", "activations", "compile", "update"),
    *("gather", "reduce", "shard", "weights"),
)


def check_settings(settings: Mapping[str, Any], written: str, others: str) -> None:
    """Refuse what is no argument of `new_engine`.

    Args:
        settings: of the user.
        written: how they are written, with `{}` for the name.
        others: who says the rest.

    Raises:
        ConfigError: one line, with the nearest name.
    """
    for key in settings:
        if key not in PLAN_SETTINGS:
            raise ConfigError(
                f"{written.format(key)} is no setting of the engine{meant(key, PLAN_SETTINGS)}; there are "
                f"{', '.join(PLAN_SETTINGS)}, and {others} the rest"
            )


def check_precision(loop: str, settings: Mapping[str, Any], names: tuple[str, str]) -> None:
    """Refuse two precisions that differ: `loop` is the loop's, whose default "fp32" gives way. `names` are theirs."""
    given = settings.get("precision")
    if given is None or loop == "fp32":
        return
    compute = (given if isinstance(given, Precision) else Precision(given)).compute
    if Precision(loop).compute != compute:
        raise ConfigError(f"{names[0]} and {names[1].format(given)}: leave out one of them")


def new_engine(
    model: nn.Module,
    given: torch.optim.Optimizer | None,
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
        given: its groups are used, and its `step` is refused; None: nothing trains.
        settings: arguments of `Plan`, and `weights` of `zero.init`, by name.
        precision: where `settings` have none.
        accumulate: gradients are divided by it.
        clip: the largest gradient norm; None for none.
        rows: of a microbatch, for speeds.

    Raises:
        ConfigError, PlanError: one line.
    """
    optimizer = Optimizer.of_nothing() if given is None else Optimizer.of(given)
    how = {"precision": precision} | {key: value for key, value in settings.items() if key != "weights"}

    def make_plan(transform: Transform) -> Plan:
        return Plan(model, optimizer=transform, world=world, accumulate=accumulate, **how)

    state = shard(model, optimizer, make_plan, clip=clip, world=world, weights=settings.get("weights"))
    batch = {"global": "auto", "micro": rows, "accumulate": accumulate}
    return Engine(
        Settings.read({"batch": batch}).on(world.size),
        state,
        optimizer,
        passed=None if given is None else PassedOptimizer(given),
        lr_scheduler=None,
        managed=False,  # the loop says when a step ends: the last one of an epoch may have fewer microbatches
        run_log=None,
    )
