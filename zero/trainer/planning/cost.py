"""Estimate the time of a step from a plan and rates: arithmetic only.

An update hides behind the next forward, so a lazy step lasts max(C_forward, O) + C_backward, with C the time to compute
and O the time to move and update what is offloaded. Gathers hide behind the compute of other units, and
reductions behind backward. What the device itself updates hides behind nothing. Of several microbatches the
first forward hides the update, and at stages that keep parameters the gather; the last backward hides the reduction of
what microbatches added up to.

It is for comparing settings. What it leaves out: start-up of the first unit, imbalance of units, and that copies, disk
and compute slow each other down.
"""

from dataclasses import dataclass
from typing import NamedTuple

from zero.core.placement import Tier
from zero.engine.plan import Plan
from zero.tracker.report.scale import duration_unit


def seconds_text(seconds: float) -> str:
    """A time with its unit: three digits of it, or all those before the point."""
    unit, name = duration_unit(seconds)
    value = seconds / unit
    return f"{f'{value:.3g}' if value < 100 else f'{value:,.0f}'} {name}"


@dataclass(frozen=True)
class Rates:
    """What one rank moves and computes per second.

    Attributes:
        flops: floating point operations, in forward and backward.
        copy_bytes: between host memory and the device, both ways together.
        disk_bytes: read and written in turns, both together; this rank's share of its node's disk.
        link_bytes: received from other ranks in a collective.
        update_numel, host_update_numel: parameters that the optimizer updates, on the device and by the host's threads.
        source: where these numbers come from.
    """

    flops: float
    copy_bytes: float
    disk_bytes: float
    link_bytes: float
    update_numel: float
    host_update_numel: float
    source: str


class Load(NamedTuple):
    """Bytes that one rank moves."""

    disk: float = 0
    copy: float = 0
    link: float = 0

    def __add__(self, other: object) -> "Load":
        assert isinstance(other, Load)
        return Load(self.disk + other.disk, self.copy + other.copy, self.link + other.link)

    def times(self, count: float) -> "Load":
        return Load(self.disk * count, self.copy * count, self.link * count)

    def seconds(self, rates: Rates) -> float:
        """All at once: the slowest way decides."""
        return max(self.disk / rates.disk_bytes, self.copy / rates.copy_bytes, self.link / rates.link_bytes)


class Traffic(NamedTuple):
    """What a step moves on one rank."""

    update: Load
    """Of states, once."""
    forward: Load
    """In each microbatch's forward."""
    backward: Load
    """In each microbatch's backward."""
    first: Load
    """Beside that in the first forward: the gather of what is resident."""
    last: Load
    """Beside that in the last backward: the reduction of what microbatches added up, and the sum's way to all."""
    offloaded_numel: int
    """Parameters that the store's threads update."""

    def of_step(self, microbatches: int) -> Load:
        """All of it."""
        return self.update + (self.forward + self.backward).times(microbatches) + self.first + self.last


def traffic(plan: Plan) -> Traffic:
    """What a step of `plan` moves on one rank, by tier."""
    states, params, grads, first_grads, offloaded_numel = Load(), Load(), Load(), Load(), 0
    device_is_host = plan.world.compute.shares_memory
    counted = next((kind for kind in plan.state_kinds if kind != "param"), "param")  # there is one per update
    for page, spec in plan.store_pages().items():
        moved = _moved(plan.tier(page), spec.nbytes, device_is_host)
        if page.kind in ("param", "frozen"):
            params += moved
        elif page.kind == "grad":
            grads += moved
        elif page.kind == "first_grad":
            first_grads += moved
        else:
            states += moved
        offloaded_numel += spec.numel if page.kind == counted and moved != Load() else 0
    others = (plan.world.size - 1) / plan.world.size
    compute = plan.precision.compute.itemsize
    whole_numel = sum(unit.trainable.P + unit.frozen.P for unit in plan.units)
    trainable_numel = sum(unit.trainable.P for unit in plan.units)
    gather = Load(link=others * compute * whole_numel)
    reduction = Load(link=others * plan.flat_dtype.itemsize * trainable_numel)
    first, last = Load(), reduction if plan.local_sum else Load()
    if plan.world.size > 1 and plan.resident and plan.full_update:
        last += Load(link=others * plan.grad_dtype.itemsize * trainable_numel)
    elif plan.world.size > 1 and plan.resident:
        first = gather
    gathered = Load() if plan.resident else gather
    count = plan.accumulate
    single = first_grads if "first_grad" in plan.grad_dtypes else grads
    # the first microbatch writes its gradients, each other one reads what there is and writes the sum
    arriving = grads if count == 1 else (single.times(2) + grads.times(2 * count - 3)).times(1 / count)
    return Traffic(
        # what was read goes back; new parameters out, gradients in
        update=states.times(2) + params.times(1 + ("param" in plan.state_kinds)) + grads,
        forward=params + gathered,
        backward=params + gathered + arriving + (Load() if plan.local_sum else reduction),
        first=first,
        last=last,
        offloaded_numel=offloaded_numel,
    )


def step_seconds(plan: Plan, rates: Rates, *, forward_flops: float, backward_flops: float) -> float:
    """Predicted time of one step.

    Args:
        forward_flops, backward_flops: of one microbatch; recomputation counts as backward.
    """
    moved, count = traffic(plan), plan.accumulate
    forward_s, backward_s = forward_flops / rates.flops, backward_flops / rates.flops
    hidden_numel = moved.offloaded_numel
    if plan.world.compute.shares_memory:
        hidden_numel = 0  # the store's threads would take compute's cores
    update_s = hidden_numel / (rates.host_update_numel if plan.offload.compute == "host" else rates.update_numel)
    offload_s = max(moved.update.seconds(rates), update_s)
    numel = sum(plan.update_numel(unit) for unit in plan.units)
    in_place_s = max(0, numel - hidden_numel) / rates.update_numel
    middle_s = (count - 1) * (
        max(forward_s, moved.forward.seconds(rates)) + max(backward_s, moved.backward.seconds(rates))
    )
    first_s = max(forward_s, (moved.forward + moved.first).seconds(rates))
    last_s = max(backward_s, (moved.backward + moved.last).seconds(rates))
    if plan.update == "serial":
        return first_s + middle_s + last_s + offload_s + in_place_s
    if plan.update == "eager":
        return max(first_s + middle_s + last_s, offload_s) + in_place_s
    return max(first_s, offload_s) + middle_s + last_s + in_place_s


def _moved(tier: Tier, nbytes: int, device_is_host: bool) -> Load:
    """One page on its way between its tier and the device, once."""
    if tier == "device" or (tier == "host" and device_is_host):
        return Load()
    return Load(disk=nbytes if tier == "nvme" else 0, copy=0 if device_is_host else nbytes)
