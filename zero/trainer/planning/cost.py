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

from zero.engine.plan import Plan
from zero.engine.traffic import Load, traffic
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
    offload_s = max(_seconds(moved.update, rates), update_s)
    numel = sum(plan.update_numel(unit) for unit in plan.units)
    in_place_s = max(0, numel - hidden_numel) / rates.update_numel
    middle_s = (count - 1) * (
        max(forward_s, _seconds(moved.forward, rates)) + max(backward_s, _seconds(moved.backward, rates))
    )
    first_s = max(forward_s, _seconds(moved.forward + moved.first, rates))
    last_s = max(backward_s, _seconds(moved.backward + moved.last, rates))
    if plan.update == "serial":
        return first_s + middle_s + last_s + offload_s + in_place_s
    if plan.update == "eager":
        return max(first_s + middle_s + last_s, offload_s) + in_place_s
    return max(first_s, offload_s) + middle_s + last_s + in_place_s


def _seconds(load: Load, rates: Rates) -> float:
    """All at once: the slowest way decides."""
    return max(load.disk / rates.disk_bytes, load.copy / rates.copy_bytes, load.link / rates.link_bytes)
