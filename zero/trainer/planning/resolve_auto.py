"""Replace `auto` by numbers: `zero.stage=auto`, `batch.micro=auto`, each with the reason.

Rank 0 decides by the least that any rank has free, and sends its decision to the others.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from zero.core.placement import PRESETS, budget_bytes, size_text
from zero.core.stage import Stage
from zero.distributed.world import World
from zero.errors import ConfigError
from zero.progress import Progress
from zero.tracker import Tracker
from zero.trainer.config import Config, read
from zero.trainer.planning.activations import Activations
from zero.trainer.planning.choices import STAGES, Choice, best, choices, largest, nearest, planned, with_activations
from zero.trainer.planning.cost import Rates, seconds_text, step_seconds
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.rates import assumed, between_ranks, measured, with_disk_or_without
from zero.trainer.planning.resolve_activations import resolve_activations


class Resolved(NamedTuple):
    """A run without `auto`.

    Attributes:
        step_s: predicted for one step; None where no rates were measured, as no settings had to be compared.
    """

    config: Config
    step_s: float | None


def resolve_auto(
    config: Config, model: nn.Module, world: World, tracker: Tracker, activations: Activations | None = None
) -> Resolved:
    """The same run with stage, offload and batch as numbers. Collective, unless nothing is auto.

    A run whose batch fits in one microbatch gets exactly that. Where `zero.stage` is given only the batch is resolved,
    and `offload=auto` stays what it is: the plan places each kind on the fastest tier with room.

    Args:
        config: not yet solved for this world: `config.on(world.size)` would fix the microbatch.
        model: built under `zero.empty()`.
        tracker: is told what was chosen and why, and on rank 0 the number of rates measured, then of settings compared.
        activations: of this model, if others use them too: then they are counted once.

    Raises:
        ConfigError: on every rank: nothing fits; with the numbers and the key to change.
    """
    settled = config.zero.stage != "auto" and config.zero.activations != "auto"
    several = config.batch.is_open and config.batch.solved(world.size).numbers()[1] > 1
    if settled and not several:  # only one microbatch could be chosen
        return Resolved(config.on(world.size), None)
    links = between_ranks(world) if config.zero.stage == "auto" else {}
    machine = replace(Machine.of(config, world), links=links)
    message: dict[str, Any] = {}
    progress = tracker.progress
    if world.rank == 0:
        try:
            counted = activations or Activations(config, model)
            if config.zero.activations == "auto":
                chosen, reasons, rates = _with_activations(config, machine, model, counted, progress)
            else:
                chosen, reasons, rates = _choose(config, machine, model, counted, progress)
            step_s = None if rates is None else _predicted(chosen, machine, model, counted, rates)
            message = {"config": chosen.plain(), "reasons": reasons, "step_s": step_s}
        except ConfigError as refused:
            message = {"refusal": str(refused)}
    message = json.loads(world.share(json.dumps(message)))
    if "refusal" in message:
        raise ConfigError(message["refusal"])
    for line in message["reasons"]:
        tracker.note(line)
    return Resolved(read(message["config"]).on(world.size), message["step_s"])


def _with_activations(
    config: Config, machine: Machine, model: nn.Module, activations: Activations, progress: Progress
) -> tuple[Config, list[str], Rates | None]:
    """All else is chosen as if every unit were computed again; then as many units as fit keep their activations.

    Returns:
        As `_choose`.

    Raises:
        ConfigError: nothing fits, even so.
    """
    least = with_activations(config, "remat")
    chosen, reasons, compared_by = _choose(least, machine, model, activations.resolved(least), progress)

    def rates() -> Rates:
        if compared_by is not None:
            return compared_by
        if machine.paper:
            return assumed(chosen, machine)
        kept = activations.resolved(with_activations(chosen, "keep"))
        return measured(chosen, machine, largest(chosen, machine, kept), disk=False, progress=progress)

    settled, reason = resolve_activations(chosen, machine, model, activations, rates)
    return settled, [*reasons, f"auto: zero.activations: {reason}"], compared_by


def _predicted(config: Config, machine: Machine, model: nn.Module, activations: Activations, rates: Rates) -> float:
    """Seconds of a step with these settings, whose batch is solved."""
    rows = config.batch.solved(machine.ranks).numbers()[1]
    plan = planned(config, model, machine.world, machine.room, activations)
    traced = activations.resolved(config).of(rows, machine.device)
    return step_seconds(plan, rates, traced.forward, traced.backward)


def _choose(
    config: Config, machine: Machine, model: nn.Module, activations: Activations, progress: Progress
) -> tuple[Config, list[str], Rates | None]:
    """The best settings, the reasons in a line each, and the rates that settings were compared by, if they were.

    Raises:
        ConfigError: none fits.
    """
    level = config.zero.stage
    staged, stages = level == "auto", STAGES if level == "auto" else (Stage(level),)
    anything = staged and config.offload.kinds == PRESETS["auto"]
    presets = ("none", "cpu", "nvme", "infinity", "auto") if anything else ("config",)
    rates, notes = None, list[str]()
    if anything:
        traced = largest(config, machine, activations)
        machine, rates, notes = with_disk_or_without(config, machine, traced, progress)
    elif staged:
        disk = "nvme" in config.offload.kinds
        rates = measured(config, machine, largest(config, machine, activations), disk=disk, progress=progress)
    found = choices(
        config,
        machine,
        model,
        rates or assumed(config, machine),
        stages=stages,
        presets=presets,
        activations=activations,
        progress=progress,
    )
    winner = best(found)
    if winner is None:
        raise ConfigError(nearest(found).refusal or "")
    stage = [] if rates is None else _stage_reasons(winner, found, rates.source)
    reasons = [*(f"auto: {line}" for line in notes), *stage, *_batch_reasons(winner, config, machine)]
    return winner.config, reasons, rates


def _stage_reasons(winner: Choice, found: Sequence[Choice], source: str) -> list[str]:
    others = [one for one in found if one is not winner and one.fits]
    text = f"{len(others) + 1} of {len(found)} settings fit"
    if others:
        near = min(others, key=lambda one: one.seconds)
        keys, takes = " ".join(near.keys), size_text(near.memory_bytes)
        text += f"; next: {keys} at {seconds_text(near.seconds)} a step and {takes}"
    keys, takes = " ".join(winner.keys), size_text(winner.memory_bytes)
    return [
        f"auto: {keys}: {seconds_text(winner.seconds)} a step predicted, {takes} per rank; {text}",
        f"auto: rates {source}",
    ]


def _batch_reasons(winner: Choice, config: Config, machine: Machine) -> list[str]:
    """Empty if the whole batch fits at once, as expected."""
    rows, micro, accumulate = winner.config.batch.numbers()
    if config.batch.micro != "auto" or config.batch.accumulate != "auto" or accumulate == 1:
        return []
    room, offload = machine.room, winner.config.offload
    on_gpu = machine.device == "cuda"
    may_bytes = budget_bytes(*((offload.device_budget, room.device) if on_gpu else (offload.host_budget, room.host)))
    activations = size_text(winner.plan.activation_bytes)
    return [
        f"auto: batch.micro={micro} batch.accumulate={accumulate}: the largest microbatch of {rows} rows a step that "
        f"fits; its activations take {activations} of the {size_text(may_bytes)} that a rank may take"
    ]
