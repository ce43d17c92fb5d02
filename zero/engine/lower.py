"""The moves that take less memory of the device, the cheapest first: what a step that ran out of memory tries."""

from collections.abc import Iterator

from zero.core.activations import ACTIVATIONS, KEEP, OFFLOAD, REMAT
from zero.core.offload import Offload
from zero.core.stage import Stage
from zero.engine.plan import Arrangement, Plan
from zero.errors import ZeroError

KEEPING = [KEEP.name, *(name for name, policy in ACTIVATIONS.items() if policy.keeps is not None)]
NEXT = dict.fromkeys(KEEPING, REMAT.name) | {REMAT.name: OFFLOAD.name}
"""The policy of activations that takes less memory of the device, by the policy."""


def lower_plans(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield (text of the move, plan) for each move that lowers the device's peak, in the order in which to try them.

    Each plan is a single move from `plan`: fewer units kept, nothing ahead, activations recomputed and then offloaded,
    the optimizer's pages one tier down, and then parameters and gradients.
    """
    for text, arrangement in _lower(plan):
        try:
            lower = plan.moved(arrangement)
        except ZeroError:  # it does not fit, or the settings contradict each other
            continue
        if "zero.activations" in text or device_bytes(lower) < device_bytes(plan):
            yield text, lower


def device_bytes(plan: Plan) -> int:
    """Return the bytes that the plan holds on the device."""
    return sum(plan.bytes["device"].values())


def _lower(plan: Plan) -> Iterator[tuple[str, Arrangement]]:
    now, offload = plan.arrangement, plan.arrangement.offload
    if now.keep:
        yield "zero.keep=[]", now._replace(keep=())
    if plan.offload.ahead != 0 and plan.slots.staging > 1:
        yield "offload.ahead=0", now._replace(offload=offload.model_copy(update={"ahead": 0}))
    if now.prefetch:
        yield "zero.prefetch=0", now._replace(prefetch=0)
    for policy, lower in NEXT.items():
        if policy in now.activations.values():
            policies = {pattern: lower if name == policy else name for pattern, name in now.activations.items()}
            yield f"zero.activations={lower}", now._replace(activations=policies)
    for tier in ("cpu", "nvme"):
        yield f"offload.optimizer={tier}", _offloaded(now, offload, optimizer=tier)
        yield f"offload.grad={tier}", _offloaded(now, offload, optimizer=tier, grad="cpu")
    alone = plan.world.size == 1  # every stage is the same then
    for tier in ("cpu", "nvme") if alone or now.stage.parameters else ():
        moved = now._replace(stage=Stage(3)) if alone else now
        yield f"offload.param={tier}", _offloaded(moved, offload, optimizer=tier, grad="cpu", param=tier)


def _offloaded(now: Arrangement, offload: Offload, **tiers: str) -> Arrangement:
    return now._replace(offload=offload.model_copy(update=tiers))
