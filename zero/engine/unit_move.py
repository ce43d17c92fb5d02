"""Move one unit of a state from one plan to another: its tensors and pages.

Pages of a kind whose range and cuts are equal in both plans are copied as they are, if their tier changes. Other
values, such as shards that become pages or a flat that is sharded anew, are read from this rank's memory and pages,
gathered over ranks if this rank will keep more of them, and written as a checkpoint's values are.

The old pages keep their contents under other keys until the move is complete, so a unit moves whole or not at all.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from zero.core.layout import Slot
from zero.engine.full_flat import master_of, own_stored, updated_range
from zero.engine.memory import load_page, save_page
from zero.engine.model import UnitSpec
from zero.engine.open_store import allocate, tiers_of
from zero.engine.plan import Plan
from zero.engine.runtime import Runtime
from zero.engine.unit_state import UnitState
from zero.engine.whole import FlatWriter, empty_shards
from zero.store import ASIDE, Page, PageKind, Ticket

WITHOUT_CONTENTS = (PageKind.GRAD, PageKind.FIRST_GRAD, PageKind.SECONDARY)
"""The kinds of pages whose contents are not needed after a step."""

FlatValues = Mapping[str, tuple[int, Tensor]]
"""By kind: the first element of a range of a unit's flat, and the values in it, (n,)."""


class _Form(NamedTuple):
    """The part of a unit's values of one kind that a plan keeps on this rank: elements [start, stop) of the flat.

    `held` is the number of elements of a page, or the name of the memory.
    """

    start: int
    stop: int
    held: int | str


def _form(plan: Plan, unit: UnitSpec, kind: str) -> _Form:
    """Return the form of the values of one kind: a flat's, the master or a moment."""
    layout = unit.stored(kind)
    full, shard = (0, layout.P), layout.shard(plan.rank)
    flat = next((flat for flat in unit.flats if flat.kind == kind), None)
    if flat is None:
        return _Form(*(full if plan.facts.full_update else shard), plan.pages.page_numel)
    if plan.facts.params_offloaded:
        return _Form(*shard, plan.pages.page_numel)
    if plan.facts.is_resident(unit):
        return _Form(*full, "resident")
    return _Form(*(full if plan.sizes.kept_numel(flat) == layout.P else shard), "shard")


def changed_kinds(old: Plan, new: Plan, unit: UnitSpec) -> frozenset[str]:
    """Return the kinds of a unit's values that the plans hold in different ranges, cuts or memories."""
    master = old.precision.master.kind
    flats = [str(flat.kind) for flat in unit.flats]
    changed = {kind for kind in unit.moments if _differ(old, new, unit, [kind])}
    if _differ(old, new, unit, flats):
        changed |= {*flats}
    elif master is not None and _differ(old, new, unit, [master]):
        changed |= {str(PageKind.PARAM)}
    return frozenset(changed | ({master} if master is not None and PageKind.PARAM in changed else set()))


def _differ(old: Plan, new: Plan, unit: UnitSpec, kinds: Iterable[str]) -> bool:
    return any(_form(old, unit, kind) != _form(new, unit, kind) for kind in kinds)


@torch.no_grad()
def own_values(runtime: Runtime, unit: UnitState, kinds: frozenset[str]) -> FlatValues:
    """Return the values of `kinds` on this rank; the master comes as the values of the parameters."""
    return {kind: _own(runtime, unit, kind) for kind in sorted(kinds - {runtime.plan.precision.master.kind})}


def _own(runtime: Runtime, unit: UnitState, kind: str) -> tuple[int, Tensor]:
    plan, layout = runtime.plan, unit.spec.stored(kind)
    shard = layout.shard(plan.rank)[0]
    if kind in plan.optimizer.moments:
        moment = plan.optimizer.form(kind)
        own = moment.values_of(updated_range(runtime, unit, kind, moment.dtype))
    elif kind != PageKind.PARAM:
        number = next(number for number, flat in enumerate(unit.spec.flats) if flat.kind == kind)
        return shard, own_stored(runtime, unit, number)
    elif plan.precision.master.kind is not None:
        own = master_of(runtime, unit)
    else:
        params = unit.own_params(full_update=plan.facts.full_update)
        own = updated_range(runtime, unit, kind, plan.precision.compute) if params is None else params
    return (0 if plan.facts.full_update else shard), own


@torch.no_grad()
def with_room(
    runtime: Runtime, unit: UnitState, new: Plan, values: FlatValues
) -> dict[str, tuple[int, Tensor, Tensor]]:
    """Return `values`, each with room for the values of all ranks, or with itself if this rank will keep no more."""
    master, prepared = runtime.plan.precision.master.kind, dict[str, tuple[int, Tensor, Tensor]]()
    for kind, (start, own) in values.items():
        wanted = [_form(new, unit.spec, kind)]
        if kind == PageKind.PARAM and master is not None:
            wanted.append(_form(new, unit.spec, master))
        if start > min(form.start for form in wanted) or start + own.numel() < max(form.stop for form in wanted):
            own = runtime.plan.world.compute.bring(own.contiguous())
            prepared[kind] = start, own, own.new_zeros(unit.spec.stored(kind).P)
        else:
            prepared[kind] = start, own, own
    return prepared


@torch.no_grad()
def gather_values(runtime: Runtime, unit: UnitState, prepared: Mapping[str, tuple[int, Tensor, Tensor]]) -> FlatValues:
    """Return the values with those of other ranks, where there is room for them. Collective."""
    complete = dict[str, tuple[int, Tensor]]()
    for kind, (start, own, full) in prepared.items():
        if full is not own:
            runtime.routes.gather(own, full, what=f"{kind} of {unit.spec.name}").wait()
        complete[kind] = (start, own) if full is own else (0, full)
    return complete


class UnitMove:
    """The move of one unit from the runtime's plan to the plan `new`: `start`, `wait`, then `commit`; or `undo`.

    Args:
        unit: has no deferred update.
        kinds: from `changed_kinds`.
        values: from `gather_values`.
    """

    def __init__(self, runtime: Runtime, unit: UnitState, new: Plan, kinds: frozenset[str], values: FlatValues) -> None:
        self._runtime, self._plan, self._store, self._unit, self._new = runtime, runtime.plan, runtime.store, unit, new
        self._kinds, self._values = kinds, values
        self._before = unit.resident, unit.shards
        self._aside: list[Page] = []
        self._made: list[Page] = []
        self._tickets: list[Ticket] = []

    @property
    def index(self) -> int:
        return self._unit.index

    def start(self) -> None:
        """Make the unit's new pages and tensors, and start to fill them. Not collective."""
        store, new, unit = self._store, self._new, self._unit
        before, after = (dict(plan.pages.pages_of(unit.spec)) for plan in (self._plan, new))
        equal = {page for page, spec in before.items() if spec == after.get(page) and page.kind not in self._kinds}
        staying = {page for page in equal if tiers_of(store).is_at_home(page)}
        for page in before.keys() - staying:
            store.rename(page, _aside(page))
            self._aside.append(page)
        for _, pages in groupby((page for page in after if page not in staying), key=lambda page: page.kind):
            together = [*pages]
            allocate(new, store, together)
            self._made += together
        self._copy([page for page in self._made if page in equal and page.kind not in WITHOUT_CONTENTS])
        if _differ(self._plan, new, unit.spec, [flat.kind for flat in unit.spec.flats]):
            unit.resident, unit.shards = empty_shards(new, unit.spec)
        for kind, (start, values) in self._values.items():
            FlatWriter(new, store, unit, kind).write_all(partial(_range_of, values, start))

    def wait(self) -> None:
        """Wait until the old pages have been copied."""
        for ticket in self._tickets:
            ticket.wait()

    def commit(self) -> None:
        """Free the old pages and tensors."""
        for page in self._aside:
            self._store.free(_aside(page))
        specs = self._new.pages.store_pages()
        self._runtime.moved_bytes += sum(specs[page].nbytes for page in self._made)
        if self._unit.shards is not self._before[1]:
            kept = [*self._unit.shards] if self._unit.resident is None else [self._unit.resident.flat]
            self._runtime.moved_bytes += sum(flat.nbytes for flat in kept if flat is not None)
        self._unit.mark_changed(resident=True)

    def undo(self) -> None:
        """Free the new pages and tensors, and use the old ones again. Call it when the store's threads have ended."""
        self._unit.resident, self._unit.shards = self._before
        for page in self._made:
            self._store.free(page)
        for page in self._aside:
            self._store.rename(_aside(page), page)

    def _copy(self, pages: Sequence[Page]) -> None:
        """Start to copy pages from their old tier, all at the same time."""
        store, device = self._store, self._new.world.compute
        through: list[tuple[Page, Tensor, Ticket]] = []
        for page in pages:
            old_K, new_K = store.in_place(_aside(page)), store.in_place(page)
            if old_K is not None and new_K is not None:
                device.copy(new_K, old_K)
            elif new_K is not None:
                read = store.read if device.host.is_home_of(new_K) else partial(load_page, store, device)
                self._tickets.append(read(_aside(page), new_K))
            elif old_K is not None:
                write = store.write if device.host.is_home_of(old_K) else partial(save_page, store, device)
                self._tickets.append(write(page, old_K))
            else:
                spec = self._new.pages.store_pages()[page]
                page_K = device.host.zeros(spec.numel, spec.dtype)
                through.append((page, page_K, store.read(_aside(page), page_K)))
        for page, page_K, ticket in through:
            ticket.wait()
            self._tickets.append(store.write(page, page_K))


def _aside(page: Page) -> Page:
    return page._replace(unit=page.unit + ASIDE)


def _range_of(values: Tensor, first: int, slot: Slot, start: int, stop: int) -> Tensor:
    """Return elements [start, stop) of a parameter from values that begin with element `first` of the flat."""
    return values[slot.offset + start - first : slot.offset + stop - first]


def order_of_units(runtime: Runtime, old: Plan, new: Plan) -> list[int]:
    """Return the indices of the units in an order in which no memory exceeds both plans by much. Collective."""
    now, then = ([_unit_bytes(plan, index) for index in range(len(runtime.units))] for plan in (old, new))
    total, limits = sum(now, Counter()), sum(now, Counter()) | sum(then, Counter())
    left, order = {*range(len(now))}, list[int]()

    def excess(index: int) -> tuple[int, int]:
        return max(
            total[tier] - now[index][tier] + then[index][tier] - limits[tier] for tier in ("device", "host")
        ), index

    while left:
        index = min(left, key=excess)
        total = total - now[index] + then[index]
        left.remove(index)
        order.append(index)
    return [int(index) for index in json.loads(old.world.share(json.dumps(order)))]


def _unit_bytes(plan: Plan, index: int) -> Counter[str]:
    """Return the bytes of a unit's values in each memory."""
    nbytes, unit = Counter[str](), plan.units[index]
    for page, spec in plan.pages.pages_of(unit):
        nbytes[plan.tier(page)] += plan.pages.bytes_on(spec, plan.tier(page))
    if not plan.facts.params_offloaded:
        compute = plan.precision.compute
        nbytes["device"] += sum(plan.sizes.kept_numel(flat) * flat.dtype(compute).itemsize for flat in unit.flats)
    if plan.facts.device_is_host:
        nbytes["host"] += nbytes.pop("device", 0)
    del nbytes["nvme"]
    return nbytes
