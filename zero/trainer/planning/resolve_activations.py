"""Replace `zero.activations=auto` unit by unit: as few units are computed again as the memories allow.

The first units of forward do not keep theirs, because theirs are kept longest: as many as cost no time and as the host
holds send theirs there, and those after them are computed again.

All else was settled as if every unit were computed again, and stays so: activations get what the state leaves, and
push none of it to a slower tier.
"""

from bisect import bisect_left
from collections.abc import Callable

from torch import nn

from zero.core.placement import budget_bytes
from zero.core.sizes import MiB
from zero.engine.plan import Plan
from zero.errors import ConfigError
from zero.trainer.config import Config
from zero.trainer.planning.activations import Activations
from zero.trainer.planning.choices import planned, with_activations
from zero.trainer.planning.cost import Rates
from zero.trainer.planning.machine import Machine

CPU_LIBRARIES_BYTES = 16 * MiB
"""Of the memory of a process that computes on a CPU, what is left to matrix products, code and threads, which no plan
counts: 5 to 8 MB in `benchmarks/activations.py`. A GPU's libraries have `offload.reserve`.
"""


def resolve_activations(
    config: Config, machine: Machine, model: nn.Module, activations: Activations, rates: Callable[[], Rates]
) -> tuple[Config, str]:
    """The same settings with something for each unit, and what that is in words.

    Args:
        config: computes every unit again, and fits; its batch is solved.
        activations: of this model: what was counted for others is not counted again.
        rates: asked only where something has to leave the device.

    Raises:
        ConfigError: it does not fit after all.
    """
    names = activations.unit_names
    least = planned(config, model, machine.world, machine.room, activations)

    def of(count: int, sent: int) -> Config:
        """With `count` units that do not keep theirs, the first `sent` of which send theirs to the host."""
        listed = [f"{name}:{'offload' if number < sent else 'remat'}" for number, name in enumerate(names[:count])]
        return config if count == len(names) and not sent else with_activations(config, listed or "keep")

    def fits(count: int, sent: int) -> bool:
        try:
            plan = planned(of(count, sent), model, machine.world, machine.room, activations)
        except ConfigError:
            return False
        return _state_of(plan) == _state_of(least) and _leaves_room(plan, config, machine)

    count = sent = 0
    if not fits(0, 0):
        sent = 0 if machine.device == "cpu" else _most_sent(config, machine, activations, least, rates())
        while sent and not fits(len(names), sent):  # what is on its way back takes more than what is computed again
            sent -= 1
        # that all units leave nothing fits, as was just seen; and the fewer keep theirs, the less is taken
        count = 1 + bisect_left(range(1, len(names)), True, key=lambda count: fits(count, sent))
    sent = min(count, sent)
    again = count - sent
    beside = f", {sent} {'sends' if sent == 1 else 'send'} theirs to host memory beside forward" if sent else ""
    return of(count, sent), (
        f"{again} of {len(names)} units {'is' if again == 1 else 'are'} computed again in backward{beside}, "
        "as few as fit"
    )


def _most_sent(config: Config, machine: Machine, activations: Activations, least: Plan, rates: Rates) -> int:
    """How many units, from the first on, a GPU's copy engine can send to the host while forward computes.

    Backward takes longer than forward, so what hides beside the one hides beside the other. And no more than the host
    holds beside what is there in any case.
    """
    rows = config.batch.solved(machine.ranks).numbers()[1]
    room_bytes = budget_bytes(config.offload.host_budget, machine.room.host) - least.placement.bytes["host"]

    def is_too_much(count: int) -> bool:
        settings = with_activations(config, [f"{name}:offload" for name in activations.unit_names[:count]])
        traced = activations.resolved(settings).of(rows, machine.device)
        copy_s, forward_s = traced.host_bytes / rates.copy_bytes, traced.forward.flops / rates.flops
        return copy_s > forward_s or traced.host_bytes > room_bytes

    return bisect_left(range(1, len(activations.unit_names) + 1), True, key=is_too_much)


def _leaves_room(plan: Plan, config: Config, machine: Machine) -> bool:
    """Libraries have memory, too; a GPU's were counted before anything was placed."""
    if machine.device != "cpu":
        return True
    taken_bytes = plan.placement.bytes["device"] + plan.placement.bytes["host"]
    return taken_bytes + CPU_LIBRARIES_BYTES <= budget_bytes(config.offload.host_budget, machine.room.host)


def _state_of(plan: Plan) -> tuple[object, ...]:
    """Where everything but activations is, and the buffers that it passes through."""
    placed = plan.placement
    return placed.param, placed.grad, dict(placed.optimizer), plan.secondary, plan.arena_slots
