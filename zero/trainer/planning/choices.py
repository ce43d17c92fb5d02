"""Plans for every stage and offload preset on a machine: memory, whether it fits, and the predicted time of a step."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from zero.core.activations import ACTIVATIONS
from zero.core.activations.rows import ALL_ROWS, halvings
from zero.core.offload import PRESETS, Offload
from zero.core.placement import NO_LIMIT, DoesNotFit, Room, budget_bytes
from zero.core.stage import Stage
from zero.distributed.world import World
from zero.engine.plan import Plan, traffic
from zero.errors import ConfigError
from zero.progress import Progress, reported, silent
from zero.settings.build import build_plan
from zero.settings.step_sections import Batch
from zero.trainer.config import Config
from zero.trainer.planning.cost import ALIKE, Rates, step_seconds
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.traces.activations import ActivationTraces
from zero.trainer.planning.traces.tracing import Traced

STAGES = tuple(Stage(level) for level in range(4))


@dataclass(frozen=True)
class Choice:
    """One stage and offload preset with the largest microbatch that fits.

    Attributes:
        config: all settings, with the batch as numbers.
        preset: the offload preset; "config" for the offload settings of the user.
        plan: the plan on the machine; if it does not fit, a plan without memory limits and with the fewest buffers.
        refusal: why the choice does not fit, in one line; None if it fits.
        lacks: missing bytes of one rank, by memory, for each memory that is too small.
        seconds: predicted seconds of one step.
        moved_bytes: bytes that one rank moves in one step, between ranks and between tiers.
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
        """Bytes that one rank needs on the device and in host memory, the scarce memories."""
        return sum(nbytes for tier, nbytes in bytes_by_tier(self.plan).items() if tier != "nvme")

    @property
    def keys(self) -> tuple[str, ...]:
        """Settings to type for this choice."""
        _, micro, accumulate = self.config.batch.numbers()
        offload = () if self.preset == "config" else (f"offload={self.preset}",)
        if self.config.offload.host_share:
            offload = *offload, f"offload.compute={self.config.offload.compute}"
        batch = f"batch.micro={micro}", f"batch.accumulate={accumulate}"
        rows = (f"zero.rows={self.config.zero.rows}",) if self.config.zero.rows != ALL_ROWS else ()
        return f"zero.stage={self.plan.facts.stage.level}", *offload, *batch, *rows


def bytes_by_tier(plan: Plan) -> dict[str, int]:
    """Return the bytes that one rank needs on each tier; if the CPU is the device, its bytes count as host memory."""
    needs = {tier: sum(kinds.values()) for tier, kinds in plan.bytes.items()}
    if plan.world.compute.shares_memory:
        needs["host"] = needs.pop("device") + needs.get("host", 0)
    return needs


def choices(
    config: Config,
    machine: Machine,
    activations: ActivationTraces,
    rates: Rates,
    *,
    stages: Sequence[Stage] = STAGES,
    presets: Sequence[str] = ("none", "cpu", "nvme", "infinity"),
    progress: Progress = silent,
) -> list[Choice]:
    """Plan every stage with every offload preset, each with the largest microbatch that fits.

    Args:
        config: settings of the run. `zero.stage` is ignored. Presets replace the offload settings, except "config",
            which keeps them.
        activations: the traces of the model.
        progress: called with the number of settings planned so far.
    """
    settings = ((with_setting(config, stage, preset), preset) for stage in stages for preset in presets)
    possible = [(setting, preset) for setting, preset in settings if setting is not None]
    listed = reported(possible, "settings to choose from", progress)
    return [plan_choice(setting, preset, machine, activations, rates) for setting, preset in listed]


def best(candidates: Sequence[Choice]) -> Choice | None:
    """Return the fastest choice that fits; None if none does.

    Of choices whose predicted times differ by less than `ALIKE`, the one that moves the fewest bytes is taken, then the
    one that holds the fewest bytes, then the one of the lowest stage.
    """
    fitting = [choice for choice in candidates if choice.fits]
    if not fitting:
        return None
    fastest_s = min(choice.seconds for choice in fitting)
    alike = [choice for choice in fitting if choice.seconds <= fastest_s * (1 + ALIKE)]
    return min(alike, key=lambda choice: (choice.moved_bytes, choice.memory_bytes, choice.plan.facts.stage.level))


def nearest_choice(candidates: Sequence[Choice]) -> Choice:
    """Return the choice that lacks the fewest bytes of memory."""
    return min(candidates, key=lambda choice: sum(choice.lacks.values()))


def plan_choice(config: Config, preset: str, machine: Machine, activations: ActivationTraces, rates: Rates) -> Choice:
    """Return the choice for these settings with the largest microbatch that fits, or with the smallest if none does.

    With `offload.compute=auto` the host updates the share of offloaded state with which a step is predicted to be the
    fastest; none if that gains less than `ALIKE`.
    """
    if config.offload.compute == "auto":
        if config.offload.kinds == PRESETS["none"]:
            return plan_choice(with_compute(config, "device"), preset, machine, activations, rates)
        return _fastest_share(
            lambda share: plan_choice(with_compute(config, share), preset, machine, activations, rates)
        )
    refusal, lacks = None, dict[str, int]()
    solved, plan = _largest_that_fits(config, machine, activations)
    rows = solved.batch.numbers()[1]
    if isinstance(plan, ConfigError):
        refusal = str(_advised(plan, activations.resolved(solved), rows, machine.device))
        plan = _unlimited(solved, machine, activations)
        lacks = _lacks(plan, solved, machine)
    traced = activations.of(rows, machine.device)
    seconds = step_seconds(plan, rates, traced.forward, traced.backward)
    moved = traffic(plan).of_step(plan.accumulate).by_medium
    moved_bytes = moved["disk"] + moved["copy"] + moved["link"]
    return Choice(solved, preset, plan, refusal, lacks, seconds, moved_bytes)


def _fastest_share(choose: Callable[[float], Choice]) -> Choice:
    """Return the choice with the best share of updates by the host.

    The seconds of a step are the largest of several sums, each of which is nearly linear in the share, so the search
    looks to both sides of the best share so far. One processor makes all updates if parameters or gradients are on the
    GPU, because their copies would queue behind those of other pages.
    """
    tried = {share: choose(share) for share in (0.0, 1.0)}
    facts = tried[0.0].plan.facts

    def rank(share: float) -> tuple[bool, float]:
        return not tried[share].fits, tried[share].seconds

    for step in (1 / 2, 1 / 4, 1 / 8, 1 / 16) if facts.params_offloaded and facts.grads_offloaded else ():
        middle = min(tried, key=rank)
        tried |= {
            share: choose(share) for share in (middle - step, middle + step) if 0 < share < 1 and share not in tried
        }
    fastest = tried[min(tried, key=rank)]
    on_device = tried[0.0]
    return on_device if on_device.fits and on_device.seconds <= fastest.seconds * (1 + ALIKE) else fastest


def _largest_that_fits(
    config: Config, machine: Machine, activations: ActivationTraces
) -> tuple[Config, Plan | ConfigError]:
    """Return the settings with the largest microbatch that fits and their plan, or with the smallest and its error.

    With `zero.rows=auto` a microbatch is tried in smaller and smaller chunks before a smaller one. A plan of a large
    model takes a quarter of a second. So the smallest microbatch is tried second: if it does not fit, none does.
    """
    room_bytes = machine.room.device if machine.device == "cuda" else machine.room.host

    def may_fit(solved: Config) -> bool:
        traces = activations.resolved(solved)
        return traces.bytes(solved.batch.numbers()[1], machine.device) <= room_bytes

    def attempt(solved: Config) -> tuple[Config, Plan | ConfigError]:
        try:
            return solved, planned(solved, machine.world, machine.room, activations)
        except ConfigError as refused:
            return solved, refused

    *every, smallest = (
        with_rows(config.model_copy(update={"batch": batch}), chunk)
        for batch in batches(config, machine.ranks)
        for chunk in _chunks(config, batch.numbers()[1])
    )
    larger = filter(may_fit, every)
    tried = attempt(next(larger, smallest))
    if isinstance(tried[1], Plan) or tried[0] is smallest:
        return tried
    least = attempt(smallest)
    if isinstance(least[1], ConfigError):
        return least
    return next((other for other in map(attempt, larger) if isinstance(other[1], Plan)), least)


def _chunks(config: Config, micro: int) -> list[int]:
    """Return the values of `zero.rows` to try with a microbatch of `micro` rows, those with the most bytes first."""
    if config.zero.rows != "auto":
        return [config.zero.rows]
    return halvings(micro) if recomputes(config) else [ALL_ROWS]


def recomputes(config: Config) -> bool:
    """Return whether a policy of the settings recomputes units."""
    return any(ACTIVATIONS[name].recomputes for name in config.zero.activations_by_pattern.values())


def largest(config: Config, machine: Machine, activations: ActivationTraces) -> Traced:
    """Return the trace of the largest microbatch that may be chosen, even if it does not fit. Probes use its shapes."""
    return activations.of(next(batches(config, machine.ranks)).numbers()[1], machine.device)


def with_activations(config: Config, activations: str | Sequence[str]) -> Config:
    """Return the same settings with another `zero.activations`, and with all rows at once if nothing is recomputed."""
    value = activations if isinstance(activations, str) else tuple(activations)
    config = config.changed("zero", activations=value)
    return config if recomputes(config) else config.changed("zero", rows=ALL_ROWS)


def with_rows(config: Config, rows: int) -> Config:
    """Return the settings with a number in place of `zero.rows=auto`, and with the comparison of rows."""
    if config.zero.rows != "auto":
        return config
    return config.changed("zero", rows=rows).changed("debug", check_rows=config.debug.check_rows or rows != ALL_ROWS)


def with_compute(config: Config, compute: str | float) -> Config:
    """Return the same settings with another `offload.compute`: a processor, or the share of the host."""
    return config.changed("offload", compute=Offload(compute=compute).compute)


def planned(config: Config, world: World, room: Room | None, activations: ActivationTraces) -> Plan:
    """Return the plan of these settings.

    Args:
        config: settings of the run; the batch is solved for the ranks of `world` if it is not yet.
        room: free bytes of one rank on each tier; None: the bytes that are free on this machine now.
        activations: the traces of the model, also from other settings of `zero.activations`.

    Raises:
        DoesNotFit: see `Plan`.
    """
    rows = config.batch_on(world.size).numbers()[1]
    counts = activations.resolved(config).planned(rows, world.compute.kind)
    return build_plan(
        config,
        activations.model,
        world,
        room=room,
        check_writes=config.debug.check_writes,
        check_rows=config.debug.check_rows,
        splitting=activations.splitting(config, world),
        **counts,
    )


def plan_of_run(config: Config, world: World, activations: ActivationTraces) -> Plan:
    """Return the plan of a run for the memory that is free on this machine now. The settings have no auto left.

    Raises:
        DoesNotFit: the message includes settings that would lower the activations.
    """
    try:
        return planned(config, world, None, activations)
    except DoesNotFit as error:
        raise _advised(error, activations.resolved(config), config.batch.numbers()[1], world.compute.kind) from None


def _advised(error: ConfigError, activations: ActivationTraces, rows: int, device: str) -> ConfigError:
    """Return the error with advice that lowers the activations, if they are more than half of what does not fit."""
    if not isinstance(error, DoesNotFit) or 2 * error.activation_bytes <= error.needs_bytes:
        return error
    needs_bytes, now_bytes = error.needs_bytes, error.activation_bytes
    smaller = [way for way, nbytes in activations.lighter(rows, device).items() if nbytes < now_bytes]
    ways = [*smaller, *error.ways]
    return DoesNotFit(error.problem, ways, needs_bytes=needs_bytes, activation_bytes=now_bytes)


def batches(config: Config, ranks: int) -> Iterator[Batch]:
    """Yield the possible batches as numbers, the largest microbatch first; several if only `batch.global` is set."""
    batch = config.batch_on(ranks)
    if not config.batch.is_open:
        yield batch
        return
    rows, micro, _ = batch.numbers()
    for accumulate in range(1, micro + 1):
        if micro % accumulate == 0:
            yield Batch(**{"global": rows, "micro": micro // accumulate, "accumulate": accumulate})


def with_setting(config: Config, stage: Stage, preset: str) -> Config | None:
    """Return the settings with another stage and offload preset; None if these two contradict each other."""
    if preset != "config":
        config = config.changed("offload", **dict(zip(("optimizer", "param", "grad"), PRESETS[preset], strict=True)))
    try:
        config.offload.at(parameters_sharded=stage.parameters)
    except ConfigError:
        return None
    return config.changed("zero", stage=stage.level)


def _unlimited(config: Config, machine: Machine, activations: ActivationTraces) -> Plan:
    """Return a plan without memory limits, but with the fewest page slots, as a plan has when memory is short."""
    free: dict[str, int | None] = {"device_budget": None, "host_budget": None}
    if config.offload.ahead is None:
        free["ahead"] = 0
    return planned(config.changed("offload", **free), machine.world, NO_LIMIT, activations)


def _lacks(plan: Plan, config: Config, machine: Machine) -> dict[str, int]:
    """Return the missing bytes of one rank, by memory, for each memory that is too small for the plan."""
    room, offload, needs = machine.room, config.offload, bytes_by_tier(plan)
    rooms = {
        "device": budget_bytes(offload.device_budget, room.device),
        "host": budget_bytes(offload.host_budget, room.host),
        "nvme": room.disk or 0,
    }
    return {tier: needs[tier] - has for tier, has in rooms.items() if needs.get(tier, 0) > has}
