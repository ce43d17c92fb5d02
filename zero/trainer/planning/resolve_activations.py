"""Resolution of `zero.activations=auto` for each unit: as few units are recomputed as memory allows.

Units at the beginning of forward do not keep their activations, because their activations would be held longest. The
first of these units offload their activations to host memory, as many as the copies can overlap with forward and host
memory can hold. The rest of these units are recomputed in backward.

All other settings were chosen as if every unit were recomputed, and do not change: activations get the memory that the
state leaves free.
"""

from bisect import bisect_left
from collections.abc import Callable

from zero.core.activations import KEEP, OFFLOAD, REMAT
from zero.core.placement import budget_bytes
from zero.core.sizes import MiB
from zero.engine.plan import Plan
from zero.errors import ConfigError
from zero.trainer.config import Config
from zero.trainer.planning.choices import planned, with_activations
from zero.trainer.planning.cost import Rates
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.traces.activations import ActivationTraces

CPU_LIBRARIES_BYTES = 16 * MiB
"""Memory left free for matrix products, code and threads of a process on a CPU, which no plan counts: 5 to 8 MB in
`benchmarks/activations.py`. For a GPU's libraries `offload.reserve` is left free."""


def resolve_activations(
    config: Config, machine: Machine, activations: ActivationTraces, rates: Callable[[], Rates]
) -> tuple[Config, str]:
    """Return the settings with an activation policy for each unit, and a sentence about them.

    Args:
        config: settings that fit with every unit recomputed; the batch is in numbers.
        activations: the traces of the model.
        rates: called only if some units cannot keep their activations.

    Raises:
        ConfigError: `config` does not fit after all.
    """
    names = activations.site_names
    least = planned(config, machine.world, machine.room, activations)

    def of(count: int, sent: int) -> Config:
        """Return the settings where the first `sent` of `count` units offload, and the rest of these are recomputed."""
        listed = [f"{name}:{(OFFLOAD if number < sent else REMAT).name}" for number, name in enumerate(names[:count])]
        return config if count == len(names) and not sent else with_activations(config, listed or KEEP.name)

    def fits(count: int, sent: int) -> bool:
        try:
            plan = planned(of(count, sent), machine.world, machine.room, activations)
        except ConfigError:
            return False
        return _state_of(plan) == _state_of(least) and _leaves_room(plan, config, machine)

    count = sent = 0
    if not fits(0, 0):
        sent = 0 if machine.device == "cpu" else _largest_offload(config, machine, activations, least, rates())
        while sent and not fits(len(names), sent):  # in backward an offloaded unit takes more than a recomputed one
            sent -= 1
        # `count = len(names)` fits, and a larger `count` never takes more memory
        count = 1 + bisect_left(range(1, len(names)), True, key=lambda count: fits(count, sent))
    sent = min(count, sent)
    beside = f", {sent} sent to host memory beside forward" if sent else ""
    return of(count, sent), f"units computed again in backward: {count - sent} of {len(names)}{beside}, as few as fit"


def _largest_offload(config: Config, machine: Machine, activations: ActivationTraces, least: Plan, rates: Rates) -> int:
    """Return how many units, from the first on, can copy their activations to the host while a GPU computes forward.

    The copies back overlap as well, because backward takes longer than forward. Host memory must hold the activations
    beside the state.
    """
    rows = config.batch_on(machine.ranks).numbers()[1]
    room_bytes = budget_bytes(config.offload.host_budget, machine.room.host) - least.placement.bytes["host"]

    def is_too_much(count: int) -> bool:
        settings = with_activations(config, [f"{name}:{OFFLOAD.name}" for name in activations.site_names[:count]])
        traced = activations.resolved(settings).of(rows, machine.device)
        copy_s, forward_s = traced.host_bytes / rates.copy_out_bytes, traced.forward.flops / rates.flops
        return copy_s > forward_s or traced.host_bytes > room_bytes

    return bisect_left(range(1, len(activations.site_names) + 1), True, key=is_too_much)


def _leaves_room(plan: Plan, config: Config, machine: Machine) -> bool:
    """Return whether the plan leaves `CPU_LIBRARIES_BYTES` free on a CPU.

    True on a GPU, where `offload.reserve` was subtracted before anything was placed.
    """
    if machine.device != "cpu":
        return True
    needs_bytes = plan.placement.bytes["device"] + plan.placement.bytes["host"]
    return needs_bytes + CPU_LIBRARIES_BYTES <= machine.limit_bytes(config.offload)


def _state_of(plan: Plan) -> tuple[object, ...]:
    """Return the placement of everything but activations, and the buffers it uses, to compare plans."""
    placed = plan.placement
    return placed.param, placed.grad, dict(placed.optimizer), plan.facts.secondary, plan.slots.arena
