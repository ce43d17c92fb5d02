"""The arguments of `zero.track`: checked, and as the settings that config.yaml records."""

import json
import os
from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, SupportsFloat

from zero.core import suggest
from zero.core.checks import type_text
from zero.core.secret import refuse_secrets
from zero.engine.plan import Plan
from zero.errors import ConfigError, one_line
from zero.tracker.report.folder import OWN_LOOP
from zero.tracker.run_record import Unit
from zero.tracker.settings import JsonlSettings, TrackerSettings, WandbSettings

TRACKERS = ("jsonl", "wandb", "tensorboard")


def tracker_settings(tracker: str | Iterable[str] | Mapping[str, Any], every: int) -> TrackerSettings:
    """Return the arguments `tracker` and `every` of `track` as the section `tracker` of a run's settings."""
    if isinstance(tracker, Mapping):
        typed = {"every": every, **tracker}
        if typed.get("name") == "tensorboard":
            typed |= {"name": "jsonl", "tensorboard": True}
        return WandbSettings(**typed) if typed.get("name") == "wandb" else JsonlSettings(**typed)
    if not isinstance(tracker, Iterable):
        raise ConfigError(
            f"tracker is {type_text(tracker)}. Pass one or several of {', '.join(TRACKERS)}, or settings."
        )
    names = [tracker] if isinstance(tracker, str) else list(tracker)
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"tracker={name} does not exist. {suggest.nearest(str(name), TRACKERS)}")
    section = WandbSettings if "wandb" in names else JsonlSettings
    return section(every=every, tensorboard="tensorboard" in names)


def speed_unit(
    samples: int | None, tokens: int | None, steps: int | None, config: Mapping[str, Any], flops: float | None
) -> tuple[Unit, int]:
    """Return the unit of a run's speed, and its number in a step on this rank; 0 without a unit.

    Raises:
        ConfigError: an argument of `track` is wrong, or contradicts another one.
    """
    if samples is not None and tokens is not None:
        raise ConfigError("samples and tokens are two units of one speed. Pass only one of them.")
    unit: Unit = "samples" if samples is not None else "tokens" if tokens is not None else ""
    count = samples if tokens is None else tokens
    for name, value in ((unit, count), ("steps", steps)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name}={value!r}: must be a whole number from 1")
    if not isinstance(config, Mapping):
        raise ConfigError(f"config is {type_text(config)}, not a mapping. Write config=vars(args), or pass a dict.")
    if flops is not None and not unit:
        raise ConfigError("flops is for one sample or one token. Pass samples or tokens, too.")
    if flops is not None and not (isinstance(flops, SupportsFloat) and 0 < float(flops) < inf):
        raise ConfigError(f"flops={flops!r}: must be a number above 0")
    return unit, count or 0


def plain_settings(config: Mapping[str, Any], plan: Plan, counts: Mapping[str, int | None]) -> dict[str, Any]:
    """Return the user's settings and the facts of the plan as plain values, for config.yaml, W&B and TensorBoard.

    Args:
        counts: further facts by name; those that are None or 0, or have no name, are left out.

    Raises:
        ConfigError: a setting has a name that zero uses, looks like a secret, or cannot be written.
    """
    if taken := {"mode", OWN_LOOP} & set(config):
        raise ConfigError(f"config has {taken.pop()}, which zero writes to config.yaml. Give it another name.")
    refuse_secrets(config, os.environ)
    facts = _facts(plan) | {name: count for name, count in counts.items() if name and count}
    try:
        return {"mode": "train", OWN_LOOP: facts, **json.loads(json.dumps(dict(config), default=str))}
    except TypeError as error:
        raise ConfigError(f"config cannot be written as settings: {one_line(error)}") from None


def _facts(plan: Plan) -> dict[str, Any]:
    """Return the facts of a plan for the report, W&B and TensorBoard."""
    tiers = {state: getattr(plan.offload, state) for state in ("optimizer", "param", "grad")}
    return {
        "stage": plan.facts.stage.level,
        "precision": str(plan.precision.compute).removeprefix("torch."),
        "offload": tiers if any(tier != "none" for tier in tiers.values()) else "none",
        "optimizer": plan.optimizer.name,
        "accumulate": plan.accumulate,
        "ranks": plan.world.size,
    }
