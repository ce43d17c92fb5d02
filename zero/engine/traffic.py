"""Compute from a plan how many bytes a step moves on one rank. The tracker's meter measures the actual traffic."""

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
    """Bytes that one rank moves, by medium."""

    disk: float = 0
    """Bytes read from or written to disk."""
    copy: float = 0
    """Bytes copied between host memory and a GPU."""
    link: float = 0
    """Bytes received from other ranks."""
    wire: float = 0
    """The part of `link` that is received from ranks of other nodes."""

    def __add__(self, other: object) -> "Load":
        assert isinstance(other, Load)
        return Load(*map(operator.add, self, other))

    def times(self, count: float) -> "Load":
        return Load(*(nbytes * count for nbytes in self))


class Traffic(NamedTuple):
    """The bytes that a step moves on one rank, by phase."""

    update: Load
    """Bytes of the update, once per step."""
    forward: Load
    """Bytes of each microbatch's forward."""
    backward: Load
    """Bytes of each microbatch's backward."""
    first: Load
    """Further bytes of the first forward: gathers of resident units, and of units that later forwards find gathered."""
    last: Load
    """Further bytes of the last backward: the reduction of local sums of microbatches, and the all-gather of sums."""
    offloaded_numel: int
    """The number of parameters that the store's threads update."""

    def of_step(self, microbatches: int) -> Load:
        """Return the bytes of a whole step with this number of microbatches."""
        return self.update + (self.forward + self.backward).times(microbatches) + self.first + self.last


def traffic(plan: Plan) -> Traffic:
    """Return the bytes that a step of `plan` moves on one rank."""
    by_kind: dict[str, Load] = defaultdict(Load)
    passing: dict[int, Load] = defaultdict(Load)  # by unit: parameters and secondary shards read from the store
    offloaded_numel, updated_grads = 0, Load()
    device_is_host = plan.world.compute.shares_memory
    # the kind whose pages are counted to get `offloaded_numel`: it has one page in each updated group
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
    # The first microbatch writes its gradients. Each later one reads the sum so far and writes the new sum. After the
    # last one the gradients are reduced over ranks, and only the range that this rank updates is written.
    summing = single.times(2) + grads.times(2 * count - 4) if count > 1 else Load()
    arriving = (summing + updated_grads).times(1 / count)
    kept = Load(copy=plan.host_activation_bytes)  # copied out in forward, back in backward
    return Traffic(
        # states are read and written, new parameters written, gradients read
        update=states.times(2) + params.times(1 + (PageKind.PARAM in plan.state_kinds)) + updated_grads,
        forward=forward + kept,
        backward=backward + kept + arriving + (Load() if plan.local_sum else reduction),
        first=first,
        last=last,
        offloaded_numel=offloaded_numel,
    )


def _gathers(plan: Plan, passing: Mapping[int, Load]) -> tuple[Load, Load, Load]:
    """Return the bytes that gathers move on a rank: further ones of the first forward, of each forward and backward.

    Units that are still in gathered buffers from the pass before are not counted. In the first forward of a step they
    are counted if the update has changed them.

    Args:
        passing: the bytes that each unit's gather reads from the store, by unit index.
    """
    after_forward, after_backward = plan.gathered_at_turns()
    loads = {unit.index: passing[unit.index] + _gather_of(plan, unit) for unit in plan.units}

    def all_but(still: set[int]) -> Load:
        return sum((load for index, load in loads.items() if index not in still), Load())

    if plan.resident:
        return Load() if plan.full_update else all_but(set()), Load(), Load()
    changed = {unit.index for unit in plan.units if unit.trainable.slots}
    first = all_but(loads.keys() - (after_backward & changed))
    if plan.keeps_secondary:  # frozen parameters cross nodes only once per run
        trainable_numel = sum(unit.trainable.P for unit in plan.units)
        wire = _gather(plan, plan.precision.compute.itemsize * trainable_numel).wire
        first += Load(link=wire, wire=wire)
    return first, all_but(after_backward), all_but(after_forward)


def _gather_of(plan: Plan, unit: UnitSpec) -> Load:
    """Return the bytes that a rank receives in a gather of a unit; with secondary shards only those of its own node."""
    gather = _gather(plan, plan.precision.compute.itemsize * unit.full_numel)
    return Load(link=gather.link - gather.wire) if plan.keeps_secondary else gather


def _gather(plan: Plan, full_bytes: int) -> Load:
    """Return the bytes that a rank receives when flat tensors of `full_bytes` in total are all-gathered."""
    size, local, nodes = plan.world.size, plan.world.local_size, plan.world.nodes
    if plan.sharers < size:
        return Load(link=full_bytes * (local - 1) / local)
    between = nodes - 1 if plan.gathers_by_node else size - local
    return Load(link=full_bytes * (size - 1) / size, wire=full_bytes * between / size)


def _sum(plan: Plan, numel: int) -> Load:
    """Return the bytes that a rank receives when flat tensors of `numel` elements in total are reduce-scattered.

    If each node has a copy of the state, this includes the exchange that gives every copy the sum.
    """
    size, local, nodes, sent_bytes = plan.world.size, plan.world.local_size, plan.world.nodes, plan.flat_dtype.itemsize
    if plan.sums_natively:  # around a ring over all ranks, of which two links of each node are wires
        received = numel * sent_bytes * (size - 1) / size
        return Load(link=received, wire=received / local if nodes > 1 else 0)
    if not plan.sums_by_node:
        return Load(*(numel * sent_bytes * others / size for others in (0, 0, size - 1, size - local)))
    back_bytes = torch.float32.itemsize if plan.sharers < size else 0  # each copy of the state gets the sum
    wire = numel * (plan.precision.reduce.itemsize + back_bytes) * (nodes - 1) / size
    return Load(link=numel * sent_bytes * (local - 1) / local + wire, wire=wire)


def _moved(tier: Tier, nbytes: int, device_is_host: bool) -> Load:
    """Return the bytes that moving one page once between its tier and the device takes."""
    if tier == "device" or (tier == "host" and device_is_host):
        return Load()
    return Load(disk=nbytes if tier == "nvme" else 0, copy=0 if device_is_host else nbytes)
