"""The moves that take less memory of the device, the cheapest first: what a step that ran out of memory tries."""

from collections.abc import Callable, Collection, Iterable, Iterator

from zero.core.activations import ACTIVATIONS, KEEP, OFFLOAD, REMAT
from zero.core.offload import Offload
from zero.core.placement import NO_LIMIT, Room, usable_host_bytes
from zero.core.stage import Stage
from zero.engine.plan import Arrangement, Plan
from zero.errors import ZeroError
from zero.platform.host_memory import free_host_bytes

WORDS = {"device": "none", "host": "cpu", "nvme": "nvme"}
"""The settings of `offload` that name the tiers."""

KEEPING = [KEEP.name, *(name for name, policy in ACTIVATIONS.items() if policy.keeps is not None)]
"""The policies of activations that take more memory than recomputation."""


Seconds = Callable[[Plan], float]
"""Predicts the seconds of a step of a plan."""


def lower_plans(plan: Plan, seconds: Seconds | None = None) -> Iterable[tuple[str, Plan]]:
    """Return (text of the move, plan) for each move that lowers the device's peak, in the order in which to try them.

    Each plan is a single move from `plan`: fewer units kept, nothing ahead, activations recomputed, the optimizer's
    pages one tier down, then gradients and parameters, and at last activations in host memory.

    Args:
        seconds: moves after which a step is faster come first; of those that differ by less than a hundredth of the
            present step, and without `seconds`, the one that is named first above.
    """
    moves = _possible(plan)
    if seconds is None:
        return moves
    now_s = seconds(plan)

    def cost(move: tuple[str, Plan]) -> tuple[bool, float]:
        sends_activations = OFFLOAD.name in move[1].activations.values()
        return sends_activations, round(seconds(move[1]) / now_s, 2)

    return sorted(moves, key=cost)


def halved(plan: Plan, micro: int) -> tuple[str, Plan]:
    """Return (text, plan) of the same steps in twice as many microbatches, of `micro` rows before."""
    count = 2 * plan.accumulate
    text = f"batch.micro={micro // 2} batch.accumulate={count}, from which on sums round otherwise"
    return text, plan.moved(plan.arrangement._replace(accumulate=count))


def _possible(plan: Plan) -> Iterator[tuple[str, Plan]]:
    room = Room(device_bytes(plan), _host_room(plan))
    for text, arrangement in _lower(plan):
        try:
            lower = plan.moved(arrangement, None if "zero.activations" in text else room)
        except ZeroError:  # it does not fit, or the settings contradict each other
            continue
        if "zero.activations" in text or device_bytes(lower) < device_bytes(plan):
            yield text, lower


def device_bytes(plan: Plan) -> int:
    """Return the bytes that the plan holds on the device."""
    return sum(plan.bytes["device"].values())


def _host_room(plan: Plan) -> int:
    """Return the bytes of host memory that the rank may use: those that it holds, and those that are free."""
    held = sum(plan.bytes.get("host", {}).values())
    free = usable_host_bytes(plan.offload, free_host_bytes(), device_is_host=plan.facts.device_is_host)
    return min(held + free // plan.world.whole.local_size, (plan.origin.room or NO_LIMIT).host)


def _lower(plan: Plan) -> Iterator[tuple[str, Arrangement]]:
    now = plan.arrangement
    # what is freed is not for reading ahead, and parameters and gradients stay where they are
    fixed = {"ahead": 0} | {
        kind: WORDS[tier]
        for kind, tier in (("param", plan.placement.param), ("grad", plan.placement.grad))
        if getattr(plan.offload, kind) == "auto"
    }
    offload = now.offload.model_copy(update=fixed)
    still = now._replace(offload=offload)
    if now.keep:
        yield "zero.keep=[]", still._replace(keep=())
    if plan.offload.ahead != 0 and plan.slots.staging > 1:
        yield "offload.ahead=0", still
    if now.prefetch:
        yield "zero.prefetch=0", still._replace(prefetch=0)
    if not {*KEEPING}.isdisjoint(now.activations.values()):
        yield f"zero.activations={REMAT.name}", _with_activations(now, KEEPING, REMAT.name)
    for tier in ("cpu", "nvme"):
        yield f"offload.optimizer={tier}", _offloaded(now, offload, optimizer=tier)
        yield f"offload.optimizer={tier} offload.grad=cpu", _offloaded(now, offload, optimizer=tier, grad="cpu")
    alone = plan.world.size == 1  # every stage is the same then
    for tier in ("cpu", "nvme") if alone or now.stage.parameters else ():
        moved = now._replace(stage=Stage(3)) if alone else now
        stage = "zero.stage=3 " if alone and not now.stage.parameters else ""
        text = f"{stage}offload.optimizer={tier} offload.grad=cpu offload.param={tier}"
        yield text, _offloaded(moved, offload, optimizer=tier, grad="cpu", param=tier)

    if REMAT.name in now.activations.values():  # last: small activations stay on the device then
        yield f"zero.activations={OFFLOAD.name}", _with_activations(now, [REMAT.name], OFFLOAD.name)


def _with_activations(now: Arrangement, policies: Collection[str], lower: str) -> Arrangement:
    names = {pattern: lower if name in policies else name for pattern, name in now.activations.items()}
    return now._replace(activations=names)


def _offloaded(now: Arrangement, offload: Offload, **tiers: object) -> Arrangement:
    return now._replace(offload=offload.model_copy(update=tiers))
