"""Sentences about a run whose memory runs short: the moves that it would make, and what they cost."""

from collections.abc import Callable, Iterator
from itertools import islice

from zero.core.placement import TIERS, Room
from zero.core.sizes import size_text
from zero.engine.lower import device_bytes, lower_plans
from zero.engine.model import first_to_last
from zero.engine.plan import Plan
from zero.errors import ConfigError
from zero.trainer.planning.choices import bytes_by_tier
from zero.trainer.planning.cost import seconds_text

TRIED_MOVES = 3
"""The number of moves that a step which runs out of memory tries, of which the sentence speaks."""

TAKEN = 0.05
"""The share of a plan's memory that another program takes, for the sentence about pressure."""

NAMES = {"device": "the GPU", "host": "host memory", "nvme": "disks"}


def moves_of_retry(plan: Plan, seconds: Callable[[Plan], float]) -> Iterator[str]:
    """Yield the moves that a step which runs out of a GPU's memory tries first, with what they save and cost."""
    if plan.facts.device_is_host or plan.world.size > 1:
        return
    moves = []
    for text, lower in islice(lower_plans(plan, seconds), TRIED_MOVES):
        saved = device_bytes(plan) - device_bytes(lower)
        less = f"{size_text(saved)} less on the GPU, " if saved > 0 else ""  # activations are not counted
        moves.append(f"{text} ({less}then {seconds_text(seconds(lower))} a step)")
    if moves:
        yield f"if a step runs out of memory, it is made again with {', or then '.join(moves)}"


def moves_of_pressure(plan: Plan, room: Room) -> Iterator[str]:
    """Yield what moves first if another program takes memory that the plan holds, see `offload.pressure`.

    Args:
        room: bytes of each memory that a rank may use.
    """
    used = bytes_by_tier(plan)
    for memory in TIERS[:2]:
        if not used.get(memory):
            continue
        try:
            lower = plan.moved(plan.arrangement, room._replace(**{memory: int((1 - TAKEN) * used[memory])}))
        except ConfigError:
            continue  # nothing of the state can move
        now, then = bytes_by_tier(plan), bytes_by_tier(lower)
        there = [NAMES[tier] for tier in TIERS if then.get(tier, 0) > now.get(tier, 0)]
        yield f"if {NAMES[memory]} runs short, {_moving(plan, lower)} to {' and '.join(there)} first"


def _moving(plan: Plan, lower: Plan) -> str:
    """Return the name and the verb of the pages whose tiers differ."""
    tiers, later = plan.placement.optimizer, lower.placement.optimizer
    units = sorted({unit for unit, number in tiers if later.get((unit, number)) != tiers[unit, number]})
    if not units or tiers.keys() != later.keys():
        return "parameters or gradients move"
    names = first_to_last([plan.units[units[0]].members[0], plan.units[units[-1]].members[-1]])
    return f"the optimizer's pages of {names} move"
