"""Compute from a plan how many bytes a step moves on one rank. The tracker's meter measures the actual traffic."""

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from zero.core.layout import VECTOR
from zero.core.placement import Tier
from zero.distributed.transport import common_numels
from zero.engine.model import UnitSpec
from zero.engine.plan.held import tier_counts
from zero.engine.plan.page_table import UnitPage
from zero.engine.plan.plan import Plan
from zero.store import PARAMETER_KINDS, Page, PageKind


class Load(NamedTuple):
    """Bytes that one rank moves, by medium and direction."""

    disk_read: float = 0
    disk_write: float = 0
    copy_in: float = 0
    """Bytes copied from host memory to a GPU."""
    copy_out: float = 0
    """Bytes copied from a GPU to host memory."""
    link: float = 0
    """Bytes received from other ranks."""
    wire: float = 0
    """The part of `link` that is received from ranks of other nodes."""
    memory: float = 0
    """Bytes of the device's own memory that expanding codes reads and writes."""

    def __add__(self, other: object) -> "Load":
        assert isinstance(other, Load)
        return Load(*map(operator.add, self, other))

    def times(self, count: float) -> "Load":
        return Load(*(nbytes * count for nbytes in self))

    @property
    def back(self) -> "Load":
        """The same bytes in the other direction."""
        return Load(self.disk_write, self.disk_read, self.copy_out, self.copy_in)

    @property
    def by_medium(self) -> dict[str, float]:
        """The bytes by medium, both directions together."""
        disk, copy = self.disk_read + self.disk_write, self.copy_in + self.copy_out
        return {"disk": disk, "copy": copy, "link": self.link, "wire": self.wire}


class PlannedTraffic(NamedTuple):
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
    activations: Load
    """Bytes of each microbatch's activations that are copied back in backward; forward copies them out."""
    states: Load
    """Bytes of the optimizer state that the update reads, and writes again. They can be read ahead."""
    host_numel: float
    """The number of parameters that the host updates beside a GPU."""

    def of_step(self, microbatches: int) -> Load:
        """Return the bytes of a whole step with this number of microbatches."""
        each = self.forward + self.backward + self.activations + self.activations.back
        return self.update + each.times(microbatches) + self.first + self.last


class _Updated(NamedTuple):
    """Pages that one processor updates, by the bytes that bringing them to the device once takes."""

    states: Load = Load()
    params: Load = Load()
    grads: Load = Load()

    def plus(self, kind: str, moved: Load) -> "_Updated":
        return self._replace(**{kind: getattr(self, kind) + moved})


_KNOWN: WeakKeyDictionary[Plan, PlannedTraffic] = WeakKeyDictionary()


def traffic(plan: Plan) -> PlannedTraffic:
    """Return the bytes that a step of `plan` moves on one rank."""
    if plan not in _KNOWN:
        _KNOWN[plan] = _traffic(plan)
    return _KNOWN[plan]


def _traffic(plan: Plan) -> PlannedTraffic:
    grads, host_numel = Load(), 0.0
    updated = {False: _Updated(), True: _Updated()}  # by whether the host updates
    passing: dict[int, Load] = {}  # by unit: parameters and secondary shards read from the store
    for pages, units in plan.pages.equal_units:
        passed = Load()
        # the kind whose pages are counted to get `host_numel`: it has one page in each updated group
        kinds = plan.passes.state_kinds(plan.passes.of(units[0])[0])
        counted = next((kind for kind in kinds if kind != PageKind.PARAM), "param")
        for page in pages:
            if page.kind in (*PARAMETER_KINDS, PageKind.SECONDARY):
                tier = plan.tier(Page(units[0].index, page.kind, page.number))
                passed += _read(tier, page.spec.nbytes, plan.world.compute.shares_memory)
            for (tier, by_host), count in _counts(plan, page, units).items():
                moved = _read(tier, page.spec.nbytes, plan.world.compute.shares_memory).times(count)
                if plan.pages.is_updated(page):
                    updated[by_host] = updated[by_host].plus("states", moved)
                if page.kind == PageKind.PARAM:
                    updated[by_host] = updated[by_host].plus("params", moved)
                if page.kind == PageKind.GRAD:
                    grads += moved
                    if page.number < plan.pages.updated_pages(units[0]):
                        updated[by_host] = updated[by_host].plus("grads", moved)
                if by_host and page.kind == counted:  # may have several elements for each parameter
                    host_numel += count * (page.spec.numel * VECTOR // plan.passes.kept.numel(page.kind, VECTOR))
        passing |= dict.fromkeys((unit.index for unit in units), passed)
    trainable_numel = sum(unit.trainable.P for unit in plan.units)
    reduction = _sum(plan, trainable_numel)
    last = reduction if plan.facts.local_sum else Load()
    if plan.facts.full_update:
        last += _gather(plan, plan.facts.grad_dtype.itemsize * trainable_numel)
    first, forward, backward = _gathers(plan, passing)
    count = plan.accumulate
    # The first microbatch writes its gradients. Each later one reads the sum so far and writes the new sum. After the
    # last one the gradients are reduced over ranks, and only the range that this rank updates is written.
    single = grads.times(plan.facts.first_grad_dtype.itemsize / plan.facts.grad_dtype.itemsize)
    sums = single + grads.times(count - 2) if count > 1 else Load()
    arriving = (sums + sums.back + updated[False].grads.back + updated[True].grads.back).times(1 / count)
    return PlannedTraffic(
        update=_update_by_device(plan, updated[False])
        + _update_by_host(plan, updated[True], host_numel)
        + _matrices(plan),
        forward=forward,
        backward=backward + arriving + (Load() if plan.facts.local_sum else reduction),
        first=first,
        last=last,
        activations=Load(copy_in=plan.host_activation_bytes),
        states=updated[False].states + _on_disk(updated[True].states),
        host_numel=host_numel,
    )


def _counts(plan: Plan, page: UnitPage, units: Sequence[UnitSpec]) -> Mapping[tuple[Tier, bool], int]:
    """Return the number of these units whose page is on a tier, and updated by the host or not."""
    by_host = plan.slots.by_host
    if not by_host:
        tiers = tier_counts(page, units, plan.pages, plan.placement)
        return {(tier, False): count for tier, count in tiers.items()}
    pages = [Page(unit.index, page.kind, page.number) for unit in units]
    return Counter((plan.tier(page), (page.unit, page.number) in by_host) for page in pages)


def _update_by_device(plan: Plan, pages: _Updated) -> Load:
    """Return the bytes of the device's update: states and gradients are read, states and new parameters are written.

    States that have slots of their own on a GPU are not read.
    """
    states, params, grads = pages
    reads = plan.precision.master.reads_params
    read = grads if plan.slots.keeps_staged else states + grads + params.times(reads)
    return read + (states + params).back


def _update_by_host(plan: Plan, pages: _Updated, numel: float) -> Load:
    """Return the bytes of the host's update beside a GPU.

    Pages in host memory do not move, but gradients and parameters on the device do.
    """
    states, params, grads = pages
    reads = plan.precision.master.reads_params
    on_disk = _on_disk(states + grads + params.times(reads)) + _on_disk((states + params).back)
    grad_bytes = 0 if grads != Load() else numel * plan.facts.grad_dtype.itemsize
    param_bytes = 0 if params != Load() else numel * plan.precision.compute.itemsize
    return on_disk + Load(copy_in=param_bytes, copy_out=grad_bytes + param_bytes * reads)


def _matrices(plan: Plan) -> Load:
    """Return the bytes of directions that the rank receives, to orthogonalize whole matrices and after that."""
    link = wire = 0
    nodes = [rank // plan.world.local_size for rank in range(plan.facts.sharers)]
    for unit in plan.units if not plan.facts.full_update else ():
        if unit.matrices:
            even, whole = unit.trainable.cuts, unit.owners
            for before, after in ((even, whole), (whole, even)):
                numels = common_numels(after, before, plan.rank)
                link += sum(numels) - numels[plan.rank]
                wire += sum(numel for node, numel in zip(nodes, numels, strict=True) if node != nodes[plan.rank])
    return Load(link=2 * link, wire=2 * wire)


def _on_disk(load: Load) -> Load:
    """Return the part of `load` between host memory and disk."""
    return Load(load.disk_read, load.disk_write)


def _gathers(plan: Plan, passing: Mapping[int, Load]) -> tuple[Load, Load, Load]:
    """Return the loads of gathers on a rank: the first forward's further bytes, each forward's, each backward's.

    Units that are still in gathered buffers from the pass before are not counted, except in the first forward of a step
    if the update has changed them.

    Args:
        passing: the bytes that each unit's gather reads from the store, by unit index.
    """
    loads = {unit.index: passing[unit.index] + _gather_of(plan, unit) for unit in plan.units}
    if plan.facts.resident:
        return Load() if plan.facts.full_update else sum(loads.values(), Load()), Load(), Load()
    forward, backward, still = plan.sizes.gathers()

    def of(gathers: Mapping[int, int]) -> Load:
        return sum((loads[index].times(count) for index, count in gathers.items()), Load())

    first = of({index: 1 for index in still if plan.units[index].trainable.slots})
    if plan.facts.keeps_secondary:  # frozen parameters cross nodes only once per run
        trainable_numel = sum(unit.trainable.P for unit in plan.units)
        wire = _gather(plan, plan.precision.compute.itemsize * trainable_numel).wire
        first += Load(link=wire, wire=wire)
    return first, of(forward), of(backward)


def _gather_of(plan: Plan, unit: UnitSpec) -> Load:
    """Return the bytes that a rank receives in a gather of a unit; with secondary shards only those of its own node."""
    gather = _gather(plan, sum(flat.dtype(plan.precision.compute).itemsize * flat.stored.P for flat in unit.flats))
    gather = Load(link=gather.link - gather.wire) if plan.facts.keeps_secondary else gather
    return gather._replace(memory=_expanding_bytes(plan, unit))


def _expanding_bytes(plan: Plan, unit: UnitSpec) -> float:
    """Return the bytes of memory that are read and written to expand a unit's packed parameters."""
    form, device = plan.precision.frozen, plan.world.compute
    if form is None or unit.packed is None:
        return 0.0
    in_a_kernel = form.vector_bytes / VECTOR + plan.precision.compute.itemsize
    each = form.moved_bytes if device.shares_memory else in_a_kernel
    return each * sum(slot.numel for slot in unit.packed.values.slots)


def _gather(plan: Plan, full_bytes: int) -> Load:
    """Return the bytes that a rank receives when flat tensors of `full_bytes` in total are all-gathered."""
    return Load(**plan.facts.gather_route.received(plan.world, full_bytes)._asdict())


def _sum(plan: Plan, numel: int) -> Load:
    """Return the bytes that a rank receives when flat tensors of `numel` elements in total are reduce-scattered.

    If each node has a copy of the state, this includes the exchange that gives every copy the sum.
    """
    sent_bytes, travels_bytes = plan.facts.flat_dtype.itemsize, plan.precision.reduce.itemsize
    return Load(**plan.facts.sum_route.received(plan.world, numel, sent_bytes, travels_bytes)._asdict())


def _read(tier: Tier, nbytes: int, device_is_host: bool) -> Load:
    """Return the bytes that bringing one page from its tier to the device takes."""
    if tier == "device" or (tier == "host" and device_is_host):
        return Load()
    return Load(disk_read=nbytes if tier == "nvme" else 0, copy_in=0 if device_is_host else nbytes)
