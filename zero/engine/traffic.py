"""The planned traffic of a step, in bytes of one rank: arithmetic only. The meter counts what a step really moves."""

import operator
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch

from zero.core.layout import VECTOR
from zero.core.placement import Tier
from zero.engine.plan import Plan
from zero.engine.unit import UnitSpec
from zero.store import PageKind


class Load(NamedTuple):
    """Bytes that one rank moves."""

    disk: float = 0
    copy: float = 0
    link: float = 0
    """From other ranks."""
    wire: float = 0
    """Of those, from ranks of other nodes."""

    def __add__(self, other: object) -> "Load":
        assert isinstance(other, Load)
        return Load(*map(operator.add, self, other))

    def times(self, count: float) -> "Load":
        return Load(*(nbytes * count for nbytes in self))


class Traffic(NamedTuple):
    """The bytes that a step moves on one rank."""

    update: Load
    """Of states, once."""
    forward: Load
    """In each microbatch's forward."""
    backward: Load
    """In each microbatch's backward."""
    first: Load
    """Beside that in the first forward: the gather of what is resident, and of what later ones find still gathered."""
    last: Load
    """Beside that in the last backward: the reduction of what microbatches added up, and the sum's way to all."""
    offloaded_numel: int
    """Parameters that the store's threads update."""

    def of_step(self, microbatches: int) -> Load:
        """All of it."""
        return self.update + (self.forward + self.backward).times(microbatches) + self.first + self.last


def traffic(plan: Plan) -> Traffic:
    """Count the bytes that a step of `plan` moves on one rank, by tier."""
    by_kind: dict[str, Load] = defaultdict(Load)
    passing: dict[int, Load] = defaultdict(Load)  # by unit, from the store: parameters, and secondary shards
    offloaded_numel, updated_grads = 0, Load()
    device_is_host = plan.world.compute.shares_memory
    # a kind that has one page per update
    counted = next((kind for kind in plan.state_kinds if kind != PageKind.PARAM), PageKind.PARAM)
    for page, spec in plan.store_pages().items():
        moved = _moved(plan.tier(page), spec.nbytes, device_is_host)
        by_kind["state" if plan.is_updated(page) else page.kind] += moved
        if page.kind in (PageKind.PARAM, PageKind.FROZEN, PageKind.SECONDARY):
            passing[page.unit] += moved
        if page.kind == PageKind.GRAD and page.number < plan.updated_pages(plan.units[page.unit]):
            updated_grads += moved
        if page.kind == counted and moved != Load():  # a page may take more than one element for each parameter
            offloaded_numel += spec.numel * VECTOR // plan.kept.numel(counted, VECTOR)
    states, params, grads = by_kind["state"], by_kind[PageKind.PARAM], by_kind[PageKind.GRAD]
    trainable_numel = sum(unit.trainable.P for unit in plan.units)
    reduction = _sum(plan, trainable_numel)
    last = reduction if plan.local_sum else Load()
    if plan.resident and plan.full_update:
        last += _gather(plan, plan.grad_dtype.itemsize * trainable_numel)
    first, forward, backward = _gathers(plan, passing)
    count = plan.accumulate
    single = grads.times(plan.first_grad_dtype.itemsize / plan.grad_dtype.itemsize)
    # the first microbatch writes its gradients, each other one reads what there is and writes the sum; after the last
    # one ranks have added up, and what is updated here is all that is written
    summing = single.times(2) + grads.times(2 * count - 4) if count > 1 else Load()
    arriving = (summing + updated_grads).times(1 / count)
    kept = Load(copy=plan.host_activation_bytes)  # out in forward, in again in backward
    return Traffic(
        # what was read goes back; new parameters out, gradients in
        update=states.times(2) + params.times(1 + (PageKind.PARAM in plan.state_kinds)) + updated_grads,
        forward=forward + kept,
        backward=backward + kept + arriving + (Load() if plan.local_sum else reduction),
        first=first,
        last=last,
        offloaded_numel=offloaded_numel,
    )


def _gathers(plan: Plan, passing: Mapping[int, Load]) -> tuple[Load, Load, Load]:
    """Count what gathers bring a rank: in the first forward beside others, in each forward, and in each backward.

    A pass finds the units that were used last still in gathered buffers, and the first one of those what no update
    has changed.

    Args:
        passing: by unit, what comes from the store.
    """
    after_forward, after_backward = plan.gathered_at_turns()
    loads = {unit.index: passing[unit.index] + _gather_of(plan, unit) for unit in plan.units}

    def all_but(still: set[int]) -> Load:
        return sum((load for index, load in loads.items() if index not in still), Load())

    if plan.resident:
        return Load() if plan.full_update else all_but(set()), Load(), Load()
    changed = {unit.index for unit in plan.units if unit.trainable.slots}
    first = all_but(loads.keys() - (after_backward & changed))
    if plan.keeps_secondary:  # what is frozen crosses the wire once a run
        trainable_numel = sum(unit.trainable.P for unit in plan.units)
        wire = _gather(plan, plan.precision.compute.itemsize * trainable_numel).wire
        first += Load(link=wire, wire=wire)
    return first, all_but(after_backward), all_but(after_forward)


def _gather_of(plan: Plan, unit: UnitSpec) -> Load:
    """Count what a gather of a unit brings a rank; with secondary shards only from its own node."""
    gather = _gather(plan, plan.precision.compute.itemsize * unit.full_numel)
    return Load(link=gather.link - gather.wire) if plan.keeps_secondary else gather


def _gather(plan: Plan, full_bytes: int) -> Load:
    """Count what a gather of flats of `full_bytes` brings a rank."""
    size, local, nodes = plan.world.size, plan.world.local_size, plan.world.nodes
    if plan.sharers < size:
        return Load(link=full_bytes * (local - 1) / local)
    between = nodes - 1 if plan.gathers_by_node else size - local
    return Load(link=full_bytes * (size - 1) / size, wire=full_bytes * between / size)


def _sum(plan: Plan, numel: int) -> Load:
    """Count what the sum of flats of `numel` elements brings a rank."""
    size, local, nodes, sent_bytes = plan.world.size, plan.world.local_size, plan.world.nodes, plan.flat_dtype.itemsize
    if not plan.sums_by_node:
        return Load(*(numel * sent_bytes * others / size for others in (0, 0, size - 1, size - local)))
    back_bytes = torch.float32.itemsize if plan.sharers < size else 0  # each copy of the state gets the sum
    wire = numel * (plan.precision.reduce.itemsize + back_bytes) * (nodes - 1) / size
    return Load(link=numel * sent_bytes * (local - 1) / local + wire, wire=wire)


def _moved(tier: Tier, nbytes: int, device_is_host: bool) -> Load:
    """One page on its way between its tier and the device, once."""
    if tier == "device" or (tier == "host" and device_is_host):
        return Load()
    return Load(disk=nbytes if tier == "nvme" else 0, copy=0 if device_is_host else nbytes)
