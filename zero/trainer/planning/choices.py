"""Every stage and preset that a machine could train a model with: memory, whether it fits, time per step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from zero.core.placement import NO_LIMIT, PRESETS, Room, budget_bytes
from zero.core.stage import Stage
from zero.distributed.world import World
from zero.engine.plan import Plan
from zero.engine.traffic import traffic
from zero.errors import ConfigError
from zero.progress import Progress, reported, silent
from zero.settings.build import build_plan
from zero.settings.step_sections import Batch
from zero.trainer.config import Config
from zero.trainer.planning.activations import Activations, Taken
from zero.trainer.planning.cost import Rates, step_seconds
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.tracing import Traced

STAGES = tuple(Stage(level) for level in range(4))

ALIKE = 0.02
"""Predictions that differ by less than this share are the same: then what moves and takes less is better."""


@dataclass(frozen=True)
class Choice:
    """One setting.

    Attributes:
        config: complete, with the batch as numbers.
        preset: of offload; "config" for the offload of the config.
        plan: what it takes on the machine; where it does not fit, on a machine without limits and with fewest buffers.
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
        """On the device and on the host, which are what is scarce."""
        return sum(nbytes for tier, nbytes in bytes_by_tier(self.plan).items() if tier != "nvme")

    @property
    def keys(self) -> tuple[str, ...]:
        """What to type for it."""
        _, micro, accumulate = self.config.batch.numbers()
        offload = () if self.preset == "config" else (f"offload={self.preset}",)
        batch = f"batch.micro={micro}", f"batch.accumulate={accumulate}"
        return f"zero.stage={self.plan.stage.level}", *offload, *batch


def bytes_by_tier(plan: Plan) -> dict[str, int]:
    """Bytes that a plan takes of each memory of one rank. Where the CPU computes, the device's are the host's."""
    taken = {tier: sum(kinds.values()) for tier, kinds in plan.bytes.items()}
    if plan.world.compute.shares_memory:
        taken["host"] = taken.pop("device") + taken.get("host", 0)
    return taken


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
    """Every stage with every preset, each with the largest microbatch that fits, in that order.

    Args:
        config: `zero.stage` is ignored; presets replace its offload, but "config" leaves it as it is.
        activations: of this model, if they were counted before.
        progress: is given the number of settings planned so far.
    """
    activations = activations or Activations(config, model)
    settings = ((with_setting(config, stage, preset), preset) for stage in stages for preset in presets)
    possible = [(setting, preset) for setting, preset in settings if setting is not None]
    listed = reported(possible, "settings to choose from", progress)
    return [choice(setting, preset, machine, model, rates, activations) for setting, preset in listed]


def best(found: Sequence[Choice]) -> Choice | None:
    """The fastest that fits; of those alike what moves least, between ranks and tiers, then what takes least memory.

    Of equals the lowest stage.
    """
    fitting = [one for one in found if one.fits]
    if not fitting:
        return None
    fastest_s = min(one.seconds for one in fitting)
    alike = [one for one in fitting if one.seconds <= fastest_s * (1 + ALIKE)]
    return min(alike, key=lambda one: (one.moved_bytes, one.memory_bytes, one.plan.stage.level))


def nearest(found: Sequence[Choice]) -> Choice:
    """The one that lacks least memory, where nothing fits."""
    return min(found, key=lambda one: sum(one.lacks.values()))


def choice(
    config: Config, preset: str, machine: Machine, model: nn.Module, rates: Rates, activations: Activations
) -> Choice:
    """One setting with the largest microbatch that fits, or with the smallest if none does."""

    def taken(batch: Batch) -> Taken:
        return activations.planned(batch.numbers()[1], machine.device)

    def attempt(batch: Batch) -> tuple[Config, Plan | ConfigError]:
        solved = config.model_copy(update={"batch": batch})
        # to say what would be lighter takes traces, and no other refusal is shown
        lighter = partial(activations.lighter, batch.numbers()[1], machine.device) if batch is smallest else dict
        try:
            return solved, build_plan(solved, model, machine.world, room=machine.room, lighter=lighter, **taken(batch))
        except ConfigError as refused:
            return solved, refused

    room_bytes = machine.room.device if machine.device == "cuda" else machine.room.host
    *larger, smallest = batches(config, machine.ranks)  # most that are too large are so without a plan
    larger = [batch for batch in larger if taken(batch)["activation_bytes"] <= room_bytes]
    largest, *others = *larger, smallest
    solved, plan = attempt(largest)
    if others and isinstance(plan, ConfigError):
        solved, plan = attempt(others[-1])
        if isinstance(plan, Plan):  # one fits, so which is the largest?
            tried = ((solved, plan) for solved, plan in map(attempt, others[:-1]) if isinstance(plan, Plan))
            solved, plan = next(tried, (solved, plan))
    traced = activations.of(solved.batch.numbers()[1], machine.device)
    refusal, lacks = None, dict[str, int]()
    if isinstance(plan, ConfigError):
        refusal = str(plan)
        plan = _unlimited(solved, machine, model, taken(solved.batch))
        lacks = _lacks(plan, solved, machine)
    seconds = step_seconds(plan, rates, traced.forward, traced.backward)
    moved = traffic(plan).of_step(plan.accumulate)
    moved_bytes = moved.disk + moved.copy + moved.link
    return Choice(solved, preset, plan, refusal, lacks, seconds, moved_bytes)


def largest(config: Config, machine: Machine, activations: Activations) -> Traced:
    """The largest microbatch that may be chosen, whether or not it fits: what a probe takes its shapes from."""
    return activations.of(next(batches(config, machine.ranks)).numbers()[1], machine.device)


def with_activations(config: Config, activations: str | Sequence[str]) -> Config:
    """The same settings with another `zero.activations`."""
    chosen = activations if isinstance(activations, str) else tuple(activations)
    return config.model_copy(update={"zero": config.zero.model_copy(update={"activations": chosen})})


def planned(config: Config, model: nn.Module, world: World, room: Room, activations: Activations | None = None) -> Plan:
    """The plan with these settings, whose batch is solved.

    Args:
        activations: of this model, if they were counted before, be it with other settings of `zero.activations`.

    Raises:
        ConfigError: it does not fit.
    """
    rows = config.batch.solved(world.size).numbers()[1]
    counted = Activations(config, model) if activations is None else activations.resolved(config)
    return build_plan(config, model, world, room=room, **counted.planned(rows, world.compute.kind))


def batches(config: Config, ranks: int) -> Iterator[Batch]:
    """The batch as numbers, the largest microbatch first; several where `batch.micro` and `.accumulate` are free."""
    batch = config.batch
    if not batch.is_open:
        yield batch.solved(ranks)
        return
    most = batch.solved(ranks).numbers()[1]
    for accumulate in range(1, most + 1):
        if most % accumulate == 0:
            yield batch.model_copy(update={"accumulate": accumulate}).solved(ranks)


def with_setting(config: Config, stage: Stage, preset: str) -> Config | None:
    """The settings with another stage and preset; None where the two do not go together."""
    offload = config.offload
    if preset != "config":
        offload = offload.model_copy(update=dict(zip(("optimizer", "param", "grad"), PRESETS[preset], strict=True)))
    try:
        offload.at(parameters_sharded=stage.parameters)
    except ConfigError:
        return None
    zero = config.zero.model_copy(update={"stage": stage.level})
    return config.model_copy(update={"zero": zero, "offload": offload})


def _unlimited(config: Config, machine: Machine, model: nn.Module, taken: Taken) -> Plan:
    free: dict[str, int | None] = {"device_budget": None, "host_budget": None}
    if config.offload.read_ahead is None:
        free["read_ahead"] = 0  # as a plan does that does not fit otherwise
    config = config.model_copy(update={"offload": config.offload.model_copy(update=free)})
    return build_plan(config, model, machine.world, room=NO_LIMIT, **taken)


def _lacks(plan: Plan, config: Config, machine: Machine) -> dict[str, int]:
    """Which memories a plan without limits does not fit in."""
    room, offload, needs = machine.room, config.offload, bytes_by_tier(plan)
    rooms = {
        "device": budget_bytes(offload.device_budget, room.device),
        "host": budget_bytes(offload.host_budget, room.host),
        "nvme": room.disk or 0,
    }
    return {tier: needs[tier] - has for tier, has in rooms.items() if needs.get(tier, 0) > has}
