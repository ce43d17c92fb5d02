"""Resolution of settings that are auto, such as `zero.stage` and `batch.micro`, each with the reason.

Rank 0 decides by the least memory that any rank has free, and sends the settings to the other ranks.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from zero.core.activations import KEEP, REMAT
from zero.core.activations.rows import ALL_ROWS
from zero.core.offload import PRESETS
from zero.core.sizes import size_text
from zero.core.stage import Stage
from zero.distributed.world import World
from zero.errors import ConfigError
from zero.progress import Progress
from zero.tracker import Tracker
from zero.trainer.config import Config, read
from zero.trainer.planning.choices import (
    STAGES,
    Choice,
    best,
    choices,
    largest,
    nearest_choice,
    planned,
    recomputes,
    with_activations,
    with_compute,
)
from zero.trainer.planning.cost import Rates, seconds_text, step_seconds
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.probes import between_ranks, measured_rates, with_disk_or_without
from zero.trainer.planning.rates import assumed
from zero.trainer.planning.resolve_activations import resolve_activations
from zero.trainer.planning.traces.activations import ActivationTraces


class Resolved(NamedTuple):
    """The settings of a run without auto.

    Attributes:
        step_s: predicted seconds of one step; None if no rates were measured, because no settings had to be compared.
        micro: rows of a microbatch if they were chosen here; else 0.
    """

    config: Config
    step_s: float | None
    micro: int


def resolve_auto(config: Config, activations: ActivationTraces | None, world: World, tracker: Tracker) -> Resolved:
    """Return the settings with stage, offload, batch and activations resolved. Collective, unless nothing is auto.

    A batch that fits in one microbatch is one microbatch. If `zero.stage` is a number, `offload=auto` stays: the plan
    places each state on the fastest tier with room.

    Args:
        config: settings before `config.on(world.size)`, which would fix the microbatch.
        activations: the traces of the model; None only if nothing is auto.
        tracker: shows the choices and their reasons, and on rank 0 the progress of probes and comparisons.

    Raises:
        ConfigError: on every rank: nothing fits. The message has the numbers and the setting to change.
    """
    if world.compute.shares_memory and config.offload.compute == "auto":
        config = with_compute(config, "device")
    settled = "auto" not in (config.zero.stage, config.zero.activations, config.zero.rows, config.offload.compute)
    several_microbatches = config.batch.is_open and config.batch_on(world.size).numbers()[1] > 1
    if settled and not several_microbatches:
        return _resolved(config, config.on(world.size), None)
    tracker.waiting("values of auto")
    links = between_ranks(world) if config.zero.stage == "auto" else {}
    machine = replace(Machine.of(config, world), links=links)
    message: dict[str, Any] = {}
    if world.rank == 0:
        try:
            assert activations is not None
            choose = _choose_activations if config.zero.activations == "auto" else _choose
            chosen, reasons, rates = choose(config, machine, activations, tracker.progress)
            step_s = None if rates is None else _predicted(chosen, machine, activations, rates)
            message = {"config": chosen.plain(), "reasons": reasons, "step_s": step_s}
        except ConfigError as error:
            message = {"refusal": str(error)}
    message = json.loads(world.share(json.dumps(message)))
    if "refusal" in message:
        raise ConfigError(message["refusal"])
    for line in message["reasons"]:
        tracker.note(line)
    return _resolved(config, read(message["config"]).on(world.size), message["step_s"])


def _resolved(given: Config, config: Config, step_s: float | None) -> Resolved:
    return Resolved(config, step_s, config.batch.numbers()[1] if given.batch.is_open else 0)


def _choose_activations(
    config: Config, machine: Machine, activations: ActivationTraces, progress: Progress
) -> tuple[Config, list[str], Rates | None]:
    """Choose all other settings as if every unit were recomputed; then keep the activations of as many units as fit.

    Returns:
        As `_choose`.

    Raises:
        ConfigError: nothing fits even if every unit is recomputed.
    """
    least = with_activations(config, REMAT.name)
    chosen, reasons, compared_by = _choose(least, machine, activations.resolved(least), progress)

    def rates() -> Rates:
        if compared_by is not None:
            return compared_by
        if machine.paper:
            return assumed(chosen, machine)
        kept = activations.resolved(with_activations(chosen, KEEP.name))
        return measured_rates(chosen, machine, largest(chosen, machine, kept), disk=False, progress=progress)

    settled, reason = resolve_activations(chosen, machine, activations, rates)
    return settled, [*reasons, f"auto: zero.activations: {reason}"], compared_by


def _predicted(config: Config, machine: Machine, activations: ActivationTraces, rates: Rates) -> float:
    """Return the predicted seconds of a step with these settings, whose batch is in numbers."""
    rows = config.batch_on(machine.ranks).numbers()[1]
    plan = planned(config, machine.world, machine.room, activations)
    traced = activations.resolved(config).of(rows, machine.device)
    return step_seconds(plan, rates, traced.forward, traced.backward)


def _choose(
    config: Config, machine: Machine, activations: ActivationTraces, progress: Progress
) -> tuple[Config, list[str], Rates | None]:
    """Return the best settings, the reasons (a line each), and the rates that settings were compared by, or None."""
    level = config.zero.stage
    rates, notes = None, list[str]()
    presets: tuple[str, ...] = ("config",)
    if level == "auto" or config.offload.compute == "auto":
        traced = largest(config, machine, activations)
        if level == "auto" and config.offload.kinds == PRESETS["auto"]:
            presets = ("none", "cpu", "nvme", "infinity", "auto")
            machine, rates, notes = with_disk_or_without(config, machine, traced, progress)
        else:
            rates = measured_rates(config, machine, traced, disk="nvme" in config.offload.kinds, progress=progress)
    candidates = choices(
        config,
        machine,
        activations,
        rates or assumed(config, machine),
        stages=STAGES if level == "auto" else (Stage(level),),
        presets=presets,
        progress=progress,
    )
    winner = best(candidates)
    if winner is None:
        raise ConfigError(nearest_choice(candidates).refusal or "")
    stage = [] if rates is None else _stage_reasons(winner, candidates, rates.source)
    chosen = *_batch_reasons(winner, config, machine), *_rows_reasons(winner, config)
    reasons = [*(f"auto: {note}" for note in notes), *stage, *chosen]
    return winner.config, reasons, rates


def _stage_reasons(winner: Choice, candidates: Sequence[Choice], source: str) -> list[str]:
    others = [choice for choice in candidates if choice is not winner and choice.fits]
    text = f"{len(others) + 1} of {len(candidates)} settings fit"
    if others:
        second = min(others, key=lambda choice: choice.seconds)
        text += f". Next: {' '.join(second.keys)} at {seconds_text(second.seconds)} a step and "
        text += size_text(second.memory_bytes)
    return [
        f"auto: {' '.join(winner.keys)}: {seconds_text(winner.seconds)} a step predicted, "
        f"{size_text(winner.memory_bytes)} per rank. {text}",
        f"auto: rates {source}",
    ]


def _batch_reasons(winner: Choice, config: Config, machine: Machine) -> list[str]:
    """Return a line with the reason for several microbatches; [] if there is one, or if the user has set them."""
    rows, micro, accumulate = winner.config.batch.numbers()
    if config.batch.micro != "auto" or config.batch.accumulate != "auto" or accumulate == 1:
        return []
    activations, limit = winner.plan.activation_bytes, machine.limit_bytes(winner.config.offload)
    return [
        f"auto: batch.micro={micro} batch.accumulate={accumulate}: the largest microbatch of {rows} rows a step that "
        f"fits. Its activations take {size_text(activations)} of the {size_text(limit)} that a rank may take"
    ]


def _rows_reasons(winner: Choice, config: Config) -> list[str]:
    """Return a line about the rows of a chunk, if they were chosen and a unit is recomputed."""
    if config.zero.rows != "auto" or not recomputes(config):
        return []
    rows, micro = winner.config.zero.rows, winner.config.batch.numbers()[1]
    what = f"in chunks of {rows}, as many" if rows != ALL_ROWS else "at once, as many"
    return [f"auto: zero.rows={rows}: recomputed blocks run on {micro} rows {what} as fit"]
