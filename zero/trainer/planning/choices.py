"""Every stage and preset that a machine could train a model with: memory, whether it fits, time of a step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from zero.core.offload import PRESETS
from zero.core.placement import NO_LIMIT, DoesNotFit, Room, budget_bytes
from zero.core.stage import Stage
from zero.distributed.world import World
from zero.engine.plan import Plan
from zero.engine.traffic import traffic
from zero.errors import ConfigError
from zero.progress import Progress, reported, silent
from zero.settings.build import build_plan
from zero.settings.step_sections import Batch
from zero.trainer.config import Config
from zero.trainer.planning.activations import Activations
from zero.trainer.planning.cost import Rates, step_seconds
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.tracing import Traced

STAGES = tuple(Stage(level) for level in range(4))

ALIKE = 0.02
"""Predictions that differ by less than this share count as equal: then fewer bytes moved and held decide."""


@dataclass(frozen=True)
class Choice:
    """One stage and preset with the largest microbatch that fits.

    Attributes:
        config: complete, with the batch as numbers.
        preset: of offload; "config" for the offload of the config.
        plan: on the machine; if it does not fit, on a machine without limits and with fewest buffers.
        refusal: why it does not fit, in one line; None if it does.
        lacks: the memories that are too small for one rank, and how many bytes more it would need.
        seconds: predicted for one step.
        moved_bytes: between ranks and between tiers, by one rank in one step.
    """

    config: Config
    preset: str
    plan: Plan
    refusal: str | None
    lacks: Mapping[str, int]
    seconds: float
    moved_bytes: float

    @property
    def fits(self) -> bool:
        return self.refusal is None

    @property
    def memory_bytes(self) -> int:
        """Bytes on the device and the host, the scarce memories."""
        return sum(nbytes for tier, nbytes in bytes_by_tier(self.plan).items() if tier != "nvme")

    @property
    def keys(self) -> tuple[str, ...]:
        """Settings to type for it."""
        _, micro, accumulate = self.config.batch.numbers()
        offload = () if self.preset == "config" else (f"offload={self.preset}",)
        batch = f"batch.micro={micro}", f"batch.accumulate={accumulate}"
        return f"zero.stage={self.plan.stage.level}", *offload, *batch


def bytes_by_tier(plan: Plan) -> dict[str, int]:
    """Add up the bytes that one rank needs of each memory; a device that is the CPU counts as the host."""
    needs = {tier: sum(kinds.values()) for tier, kinds in plan.bytes.items()}
    if plan.world.compute.shares_memory:
        needs["host"] = needs.pop("device") + needs.get("host", 0)
    return needs


def choices(
    config: Config,
    machine: Machine,
    model: nn.Module,
    rates: Rates,
    *,
    stages: Sequence[Stage] = STAGES,
    presets: Sequence[str] = ("none", "cpu", "nvme", "infinity"),
    activations: Activations | None = None,
    progress: Progress = silent,
) -> list[Choice]:
    """Plan every stage with every preset, each with the largest microbatch that fits.

    Args:
        config: `zero.stage` is ignored; presets replace its offload, but "config" leaves it as it is.
        activations: of this model, if they were counted before.
        progress: receives the number of settings planned so far.
    """
    activations = activations or Activations(config, model)
    settings = ((with_setting(config, stage, preset), preset) for stage in stages for preset in presets)
    possible = [(setting, preset) for setting, preset in settings if setting is not None]
    listed = reported(possible, "settings to choose from", progress)
    return [plan_choice(setting, preset, machine, model, rates, activations) for setting, preset in listed]


def best(candidates: Sequence[Choice]) -> Choice | None:
    """Return the fastest that fits.

    Of those alike the one that moves the fewest bytes, then the one that holds the fewest, then the lowest stage.
    """
    fitting = [choice for choice in candidates if choice.fits]
    if not fitting:
        return None
    fastest_s = min(choice.seconds for choice in fitting)
    alike = [choice for choice in fitting if choice.seconds <= fastest_s * (1 + ALIKE)]
    return min(alike, key=lambda choice: (choice.moved_bytes, choice.memory_bytes, choice.plan.stage.level))


def nearest(candidates: Sequence[Choice]) -> Choice:
    """Return the one that lacks the fewest bytes."""
    return min(candidates, key=lambda choice: sum(choice.lacks.values()))


def plan_choice(
    config: Config, preset: str, machine: Machine, model: nn.Module, rates: Rates, activations: Activations
) -> Choice:
    """Plan one setting with the largest microbatch that fits, or with the smallest if none does."""
    refusal, lacks = None, dict[str, int]()
    solved, plan = _largest_that_fits(config, machine, model, activations)
    rows = solved.batch.numbers()[1]
    if isinstance(plan, ConfigError):
        refusal = str(_advised(plan, activations.resolved(solved), rows, machine.device))
        plan = _unlimited(solved, machine, model, activations)
        lacks = _lacks(plan, solved, machine)
    traced = activations.of(rows, machine.device)
    seconds = step_seconds(plan, rates, traced.forward, traced.backward)
    moved = traffic(plan).of_step(plan.accumulate)
    moved_bytes = moved.disk + moved.copy + moved.link
    return Choice(solved, preset, plan, refusal, lacks, seconds, moved_bytes)


def _largest_that_fits(
    config: Config, machine: Machine, model: nn.Module, activations: Activations
) -> tuple[Config, Plan | ConfigError]:
    """Solve the batch and plan with it.

    A plan of a large model takes a quarter of a second, so the smallest microbatch is tried second: where it does not
    fit, none does.
    """
    room_bytes = machine.room.device if machine.device == "cuda" else machine.room.host
    *larger, smallest = batches(config, machine.ranks)
    larger = [batch for batch in larger if activations.bytes(batch.numbers()[1], machine.device) <= room_bytes]

    def attempt(batch: Batch) -> tuple[Config, Plan | ConfigError]:
        solved = config.model_copy(update={"batch": batch})
        try:
            return solved, planned(solved, model, machine.world, machine.room, activations)
        except ConfigError as refused:
            return solved, refused

    first, *others = *larger, smallest
    tried = attempt(first)
    if isinstance(tried[1], Plan) or not others:
        return tried
    least = attempt(others[-1])
    if isinstance(least[1], ConfigError):
        return least
    return next((other for other in map(attempt, others[:-1]) if isinstance(other[1], Plan)), least)


def largest(config: Config, machine: Machine, activations: Activations) -> Traced:
    """Trace the largest microbatch that may be chosen, whether or not it fits; a probe takes its shapes from it."""
    return activations.of(next(batches(config, machine.ranks)).numbers()[1], machine.device)


def with_activations(config: Config, activations: str | Sequence[str]) -> Config:
    """Return the same settings with another `zero.activations`."""
    value = activations if isinstance(activations, str) else tuple(activations)
    return config.model_copy(update={"zero": config.zero.model_copy(update={"activations": value})})


def planned(config: Config, model: nn.Module, world: World, room: Room | None, activations: Activations) -> Plan:
    """Plan these settings, whose batch is solved.

    Args:
        room: bytes on each tier; None: what is free here and now.
        activations: of this model, be it with other settings of `zero.activations`.

    Raises:
        DoesNotFit: see `Plan`.
    """
    rows = config.batch.solved(world.size).numbers()[1]
    counts = activations.resolved(config).planned(rows, world.compute.kind)
    return build_plan(config, model, world, room=room, check_writes=config.debug.check_writes, **counts)


def plan_of_run(config: Config, model: nn.Module, world: World, activations: Activations) -> Plan:
    """Plan a run, whose settings have no auto left, with what is free here and now.

    Raises:
        DoesNotFit: with settings that would lower the activations.
    """
    try:
        return planned(config, model, world, None, activations)
    except DoesNotFit as error:
        raise _advised(error, activations.resolved(config), config.batch.numbers()[1], world.compute.kind) from None


def _advised(error: ConfigError, activations: Activations, rows: int, device: str) -> ConfigError:
    """Add settings that would lower the activations, where those are more than half of what does not fit."""
    if not isinstance(error, DoesNotFit) or 2 * error.activation_bytes <= error.needs_bytes:
        return error
    needs_bytes, now_bytes = error.needs_bytes, error.activation_bytes
    smaller = [way for way, nbytes in activations.lighter(rows, device).items() if nbytes < now_bytes]
    ways = [*smaller, *error.ways]
    return DoesNotFit(error.problem, ways, needs_bytes=needs_bytes, activation_bytes=now_bytes)


def batches(config: Config, ranks: int) -> Iterator[Batch]:
    """Yield the batch as numbers, the largest microbatch first; several where only `batch.global` is set."""
    batch = config.batch
    if not batch.is_open:
        yield batch.solved(ranks)
        return
    rows = batch.solved(ranks).numbers()[1]
    for accumulate in range(1, rows + 1):
        if rows % accumulate == 0:
            yield batch.model_copy(update={"accumulate": accumulate}).solved(ranks)


def with_setting(config: Config, stage: Stage, preset: str) -> Config | None:
    """Return the settings with another stage and preset; None where the two do not go together."""
    offload = config.offload
    if preset != "config":
        offload = offload.model_copy(update=dict(zip(("optimizer", "param", "grad"), PRESETS[preset], strict=True)))
    try:
        offload.at(parameters_sharded=stage.parameters)
    except ConfigError:
        return None
    zero = config.zero.model_copy(update={"stage": stage.level})
    return config.model_copy(update={"zero": zero, "offload": offload})


def _unlimited(config: Config, machine: Machine, model: nn.Module, activations: Activations) -> Plan:
    """Plan without limits, with as few slots for pages as a plan has that does not fit otherwise."""
    free: dict[str, int | None] = {"device_budget": None, "host_budget": None}
    if config.offload.read_ahead is None:
        free["read_ahead"] = 0
    config = config.model_copy(update={"offload": config.offload.model_copy(update=free)})
    return planned(config, model, machine.world, NO_LIMIT, activations)


def _lacks(plan: Plan, config: Config, machine: Machine) -> dict[str, int]:
    """Map each memory that is too small for a plan to the bytes that it lacks."""
    room, offload, needs = machine.room, config.offload, bytes_by_tier(plan)
    rooms = {
        "device": budget_bytes(offload.device_budget, room.device),
        "host": budget_bytes(offload.host_budget, room.host),
        "nvme": room.disk or 0,
    }
    return {tier: needs[tier] - has for tier, has in rooms.items() if needs.get(tier, 0) > has}
