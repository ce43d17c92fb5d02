"""Estimate of the time of a step from a plan and rates, by arithmetic alone.

A pass is a forward or a backward of a microbatch. In a pass the processor, each direction of PCIe and of the disks,
host memory and the links work at the same time, so the slowest sets its time. The deferred update runs in the first
forward: a unit computes only after its own update and gather, so the first unit's transfers and the last unit's compute
are exposed (`beside`). Pages that are read ahead and written behind move in later passes than the first forward
(`Ahead`).

The estimate is for comparing settings. It spreads compute over units by their parameters, and leaves out that copies,
disk and compute slow each other down. On a CPU, updates in memory and collectives overlap with nothing.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from zero.core.layout import VECTOR
from zero.engine.plan import Load, Plan, traffic
from zero.tracker.report.scale import duration_unit
from zero.trainer.planning.traces.operators import OperatorWork

ALIKE = 0.02
"""Relative difference below which two predicted times count as equal."""

UPDATE_BYTES = 30
"""Bytes of memory that an update reads and writes per parameter, with fp32 master and moments."""


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
        copy_in_bytes, copy_out_bytes: bytes copied from host memory to the device, and back.
        disk_read_bytes, disk_write_bytes: bytes read while others are written; this rank's share of its node's disks.
        host_bytes: bytes read and written in host memory; this rank's share of its node's.
        link_bytes, wire_bytes: bytes received in a collective from ranks of the same node, and of other nodes.
        update_numel, host_update_numel: parameters that the optimizer updates, on the device and by the host's threads.
        source: text about the origin of these numbers.
    """

    flops: float
    attention_flops: float
    memory_bytes: float
    launch_s: float
    copy_in_bytes: float
    copy_out_bytes: float
    disk_read_bytes: float
    disk_write_bytes: float
    host_bytes: float
    link_bytes: float
    wire_bytes: float
    update_numel: float
    host_update_numel: float
    source: str


def compute_seconds(work: OperatorWork, rates: Rates) -> float:
    """Return the estimated seconds of `work`, the sum of its parts, each at its rate."""
    return (
        work.flops / rates.flops
        + work.attention_flops / rates.attention_flops
        + work.nbytes / rates.memory_bytes
        + work.launches * rates.launch_s
        + work.exchanged_bytes / rates.link_bytes
    )


class Ahead(NamedTuple):
    """Shares of the state for which there are slots, so that this state is read before the update and written after it.

    Attributes:
        on_device: slots on the device, for pages of host memory.
        on_host: slots in host memory, for pages of disks.
    """

    on_device: float = 0.0
    on_host: float = 0.0

    @staticmethod
    def of(plan: Plan) -> "Ahead":
        pages = max(sum(map(plan.sizes.update_numel, plan.units)) / plan.pages.page_numel, 1)
        by_device = max(pages - len(plan.slots.by_host), 1)
        staged = plan.slots.staging * plan.slots.staged_pages
        return Ahead(min(staged / by_device, 1), min(plan.slots.read_ahead / pages, 1))


def step_seconds(
    plan: Plan,
    rates: Rates,
    forward: OperatorWork,
    backward: OperatorWork,
    *,
    ahead: Ahead | None = None,
    tokens: float = 1.0,
) -> float:
    """Return the predicted seconds of one step, in the steady state of a run.

    Args:
        forward, backward: work of one microbatch; recomputation counts as backward.
        ahead: slots for pages that are read ahead; None: those of the plan.
        tokens: factor of the tokens of each microbatch, to see what more or fewer would take.
    """
    moved, ahead = traffic(plan), ahead or Ahead.of(plan)
    written_bytes = 2 * plan.facts.flat_dtype.itemsize * sum(unit.trainable.P for unit in plan.units)
    forward_s = compute_seconds(forward, rates) * tokens
    # gradients are copied into flat tensors
    backward_s = compute_seconds(backward, rates) * tokens + written_bytes / rates.memory_bytes
    activations = moved.activations.times(tokens)
    passes = [
        (forward_s, moved.forward + activations.back),
        (backward_s, moved.backward + activations),
    ] * plan.accumulate
    passes[0] = (forward_s, passes[0][1] + moved.first)
    passes[-1] = (backward_s, passes[-1][1] + moved.last)
    passes = [(compute_s + load.memory / rates.memory_bytes, load) for compute_s, load in passes]
    if plan.world.compute.shares_memory:  # the CPU's cores copy data for other ranks
        passes = [(compute_s + _link_seconds(load, rates), load._replace(link=0, wire=0)) for compute_s, load in passes]
    (first_s, first), *later = passes
    later_s = sum(max(compute_s, *busy_seconds(load, rates).values()) for compute_s, load in later)
    copied, on_disk = ahead.on_device * moved.states.copy_in, ahead.on_host * moved.states.disk_read
    early = Load(disk_read=on_disk, disk_write=on_disk, copy_in=copied, copy_out=copied)

    update_s, in_place_s = _update_seconds(plan, moved.host_numel, rates)
    moving_s = _added(busy_seconds(moved.update, rates), update_s)
    if plan.update == "serial":
        in_place_s, moving_s, early = in_place_s + max(moving_s.values()), {}, Load()
    elif not plan.world.compute.shares_memory:  # a GPU's updates take turns with the kernels of the first forward
        first_s, in_place_s = first_s + in_place_s, 0.0
    total_numel = sum(unit.full_numel for unit in plan.units) or 1
    shares = [unit.full_numel / total_numel for unit in plan.units] or [1.0]
    waits_s, early_s = _added(busy_seconds(first, rates), moving_s), busy_seconds(early, rates)
    opening_s = max(beside(shares, wait_s, early_s.get(name, 0.0), first_s) for name, wait_s in waits_s.items())
    whole = sum((load for _, load in passes), moved.update)
    return max(opening_s + later_s + in_place_s, *busy_seconds(whole, rates).values())


def beside(shares: Sequence[float], moving_s: float, early_s: float, compute_s: float) -> float:
    """Return the seconds of a pass whose units compute in turn, each after its own transfers.

    Args:
        shares: each unit's share of the transfers and of the computation, in the order of the pass.
        moving_s, compute_s: seconds of all transfers, and of all computation.
        early_s: seconds of transfers that were done before the pass.
    """
    ends = accumulate(shares, initial=0.0)
    return max(max(0.0, moving_s * end - early_s) + compute_s * (1 - begin) for begin, end in pairwise(ends))


def busy_seconds(load: Load, rates: Rates) -> dict[str, float]:
    """Return the seconds for which `load` keeps each medium busy, by its name in `LIMITS`."""
    moved = load.copy_in + load.copy_out + load.disk_read + load.disk_write
    return {
        "PCIe in": load.copy_in / rates.copy_in_bytes,
        "PCIe out": load.copy_out / rates.copy_out_bytes,
        "disk reads": load.disk_read / rates.disk_read_bytes,
        "disk writes": load.disk_write / rates.disk_write_bytes,
        "host memory": moved / rates.host_bytes,
        "links": _link_seconds(load, rates),
    }


LIMITS: Mapping[str, tuple[str, ...]] = {
    "compute": ("flops", "attention_flops", "memory_bytes", "launch_s"),
    "the update on the device": ("update_numel",),
    "the update on the host": ("host_update_numel",),
    "PCIe in": ("copy_in_bytes",),
    "PCIe out": ("copy_out_bytes",),
    "disk reads": ("disk_read_bytes",),
    "disk writes": ("disk_write_bytes",),
    "host memory": ("host_bytes",),
    "links": ("link_bytes", "wire_bytes"),
}
"""Parts of a machine that may limit a step -> their fields in `Rates`."""

DISK_RATES = (*LIMITS["disk reads"], *LIMITS["disk writes"])
"""The fields in `Rates` of a node's disks."""

HIDDEN = ("PCIe in", "PCIe out", "disk reads", "disk writes", "host memory", "links", "the update on the host")
"""Parts of a machine that can work beside compute."""


def limits(seconds: Callable[[Rates], float], rates: Rates) -> dict[str, float]:
    """Return the share of a step that each part of the machine sets, the largest first; below 1 % is left out.

    A share is the relative growth of the step over that of the part's times, for a part that is 1 % slower. The shares
    add up to one, unless two parts set the same time.
    """
    before_s, growth = seconds(rates), 0.01
    shares = {}
    for name, fields in LIMITS.items():
        times = {field: 1 + growth if field == "launch_s" else 1 / (1 + growth) for field in fields}
        shares[name] = (seconds(scaled_work(rates, times)) / before_s - 1) / growth
    return {name: share for name, share in sorted(shares.items(), key=lambda item: -item[1]) if share >= 0.01}


def break_even(seconds: Callable[[Rates, float], float], rates: Rates) -> float:
    """Return the factor of a microbatch's tokens from which compute hides all transfers but for `ALIKE`.

    1: it hides them already; infinity: no number of tokens below 2**20 times as many hides them.

    Args:
        seconds: the seconds of a step by rates and a factor of tokens.
    """
    unbound = scaled_work(rates, {field: math.inf for name in HIDDEN for field in LIMITS[name]})

    def hides(factor: float) -> bool:
        return seconds(rates, factor) <= (1 + ALIKE) * seconds(unbound, factor)

    if hides(1):
        return 1.0
    low, high = 0.0, 20.0  # bounds of the logarithm
    if not hides(2**high):
        return math.inf
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if hides(2**middle) else (middle, high)
    return 2.0**high


def scaled_work(rates: Rates, times: Mapping[str, float]) -> Rates:
    """Return the rates with some of them multiplied, by their names."""
    values: dict[str, Any] = {name: getattr(rates, name) * factor for name, factor in times.items()}
    return replace(rates, **values)


def _update_seconds(plan: Plan, host_numel: float, rates: Rates) -> tuple[dict[str, float], float]:
    """Return the seconds of updates beside the first forward, by part of the machine, and of updates beside nothing."""
    numel, products_s = sum(plan.sizes.update_numel(unit) for unit in plan.units), plan.sizes.matrix_flops / rates.flops
    return {
        "the update on the host": host_numel / rates.host_update_numel,
        "host memory": host_numel * _update_bytes(plan) / rates.host_bytes,
    }, max(0, numel - host_numel) / rates.update_numel + products_s


def _update_bytes(plan: Plan) -> float:
    """Return the bytes of memory that an update reads and writes for each parameter: state, parameter, gradient."""
    kept = plan.passes.kept
    state_bytes = sum(dtype.itemsize * kept.numel(kind, VECTOR) for kind, dtype in kept.dtypes.items()) / VECTOR
    return 2 * (state_bytes + plan.precision.compute.itemsize) + plan.facts.grad_dtype.itemsize


def _added(seconds: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds.get(name, 0.0) + others.get(name, 0.0) for name in {**seconds, **others}}


def _link_seconds(load: Load, rates: Rates) -> float:
    return (load.link - load.wire) / rates.link_bytes + load.wire / rates.wire_bytes
