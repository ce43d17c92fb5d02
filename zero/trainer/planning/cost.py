"""Estimate of the time of a step from a plan and rates, by arithmetic alone.

A deferred update overlaps with the next forward. So a step with lazy updates takes max(C_forward, O) + C_backward,
where C is the time to compute and O the time to move and update offloaded state. Gathers overlap with the compute of
other units, and reductions overlap with backward. Updates of state on the device overlap with nothing. With several
microbatches the first forward overlaps with the update, and at stages that keep parameters also with the gather; the
last backward overlaps with the reduction of the summed gradients.

The estimate is for comparing settings. It leaves out the start of the first unit, differences between units, and that
copies, disk and compute slow each other down.
"""

from dataclasses import dataclass

from zero.engine.plan import Plan
from zero.engine.traffic import Load, traffic
from zero.tracker.report.scale import duration_unit
from zero.trainer.planning.tracing import Work


def seconds_text(seconds: float) -> str:
    """Return a time with its unit: three significant digits below 100, whole numbers from 100 on."""
    unit, name = duration_unit(seconds)
    value = seconds / unit
    return f"{f'{value:.3g}' if value < 100 else f'{value:,.0f}'} {name}"


@dataclass(frozen=True)
class Rates:
    """Rates at which one rank moves and computes, per second.

    Attributes:
        flops: floating point operations in matrix products, forward and backward.
        attention_flops: floating point operations in fused attention.
        memory_bytes: bytes read and written by all other operators.
        launch_s: seconds of overhead for each operator; not a rate.
        copy_bytes: bytes copied between host memory and the device, both directions together.
        disk_bytes: bytes read and written in turns, both together; this rank's share of its node's disk.
        link_bytes, wire_bytes: bytes received in a collective from ranks of the same node, and of other nodes.
        update_numel, host_update_numel: parameters that the optimizer updates, on the device and by the host's threads.
        source: text about the origin of these numbers.
    """

    flops: float
    attention_flops: float
    memory_bytes: float
    launch_s: float
    copy_bytes: float
    disk_bytes: float
    link_bytes: float
    wire_bytes: float
    update_numel: float
    host_update_numel: float
    source: str


def compute_seconds(work: Work, rates: Rates) -> float:
    """Return the estimated seconds of `work`, the sum of its parts, each at its rate."""
    return (
        work.flops / rates.flops
        + work.attention_flops / rates.attention_flops
        + work.nbytes / rates.memory_bytes
        + work.launches * rates.launch_s
    )


def step_seconds(plan: Plan, rates: Rates, forward: Work, backward: Work) -> float:
    """Return the predicted seconds of one step.

    Args:
        forward, backward: work of one microbatch; recomputation counts as backward.
    """
    moved, count, on_cpu = traffic(plan), plan.accumulate, plan.world.compute.shares_memory
    numel = sum(plan.update_numel(unit) for unit in plan.units)
    written_bytes = 2 * plan.flat_dtype.itemsize * sum(unit.trainable.P for unit in plan.units)
    forward_s = compute_seconds(forward, rates)
    backward_s = compute_seconds(backward + Work(nbytes=written_bytes), rates)  # copies into flat tensors
    hidden_numel = 0 if on_cpu else moved.offloaded_numel  # on a CPU these updates take cores away from compute
    update_s = hidden_numel / (rates.host_update_numel if plan.offload.compute == "host" else rates.update_numel)
    offload_s = max(_moving(moved.update, rates, on_cpu)[0], update_s)
    in_place_s = max(0, numel - hidden_numel) / rates.update_numel

    def beside(compute_s: float, load: Load, others_s: float = 0.0) -> float:
        hidden_s, exposed_s = _moving(load, rates, on_cpu)
        return max(compute_s, hidden_s, others_s) + exposed_s

    late_s, serial_s = (offload_s, 0.0) if plan.update == "lazy" else (0.0, offload_s)
    first_s = beside(forward_s, moved.forward + moved.first, late_s)
    middle_s = (count - 1) * (beside(forward_s, moved.forward) + beside(backward_s, moved.backward))
    last_s = beside(backward_s, moved.backward + moved.last)
    return first_s + middle_s + last_s + serial_s + in_place_s


def _moving(load: Load, rates: Rates, on_cpu: bool) -> tuple[float, float]:
    """Return the seconds of transfers that overlap with compute, and of those that do not.

    Transfers by disk, copy and network run at the same time, so the slowest counts. On a CPU the cores themselves copy
    data for other ranks, so that time does not overlap.
    """
    disk_s, copy_s = load.disk / rates.disk_bytes, load.copy / rates.copy_bytes
    link_s = (load.link - load.wire) / rates.link_bytes + load.wire / rates.wire_bytes
    return (max(disk_s, copy_s), link_s) if on_cpu else (max(link_s, disk_s, copy_s), 0.0)
