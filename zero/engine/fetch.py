"""What fills a gathered buffer: the shards of all ranks, from memory or from the store.

Every rank starts the same collectives in the same order. Where a disk has to be waited for, or an update by the
store's threads, a gather starts when the buffer is first waited for, which is the same moment for all ranks;
otherwise it starts when the buffer is requested. Either way it runs beside what computes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from zero.distributed.routes import Routes
from zero.distributed.world import Handle
from zero.engine.plan import Plan
from zero.engine.transfer import load
from zero.engine.unit_state import UnitState
from zero.platform.device import PASSED, Device
from zero.store import Page, PageKind, PrefetchStore, Ticket

Fetch = Callable[[UnitState, Tensor, Sequence[Ticket], bool], Sequence[Handle]]
"""(unit, its buffer, tickets of its update, whether the host may have to wait for them) to what to wait for."""


def gathering(routes: Routes) -> Fetch:
    """Fill a buffer (trainable P + frozen P,) with the shards that all ranks hold in memory, or those of this node."""

    def fetch(unit: UnitState, full: Tensor, tickets: Sequence[Ticket], changing: bool) -> list[Handle]:
        split = unit.spec.trainable.P
        shards, fulls = (unit.shard_S, unit.frozen_S), (full[:split], full[split:])
        return [
            _gather(routes, unit, number, shard_S, full_P)()
            for number, (shard_S, full_P) in enumerate(zip(shards, fulls, strict=True))
            if shard_S is not None and shard_S.numel()
        ]

    return fetch


def reading(plan: Plan, routes: Routes, store: PrefetchStore) -> Fetch:
    """Fill a buffer with the shards that all ranks hold on disk; this rank's range is read at once, page by page."""
    device = plan.world.compute

    def fetch(unit: UnitState, full: Tensor, tickets: Sequence[Ticket], changing: bool) -> list[Handle]:
        return [handle for shard in _paged_shards(plan, routes, unit, full) for handle in read(shard)]

    def read(shard: _PagedShard) -> list[Handle]:
        reads = [
            load(store, device, page, shard.own_S[a:b])
            for page, (a, b) in zip(shard.pages, plan.cut(shard.own_S.numel()), strict=True)
        ]
        if plan.world.size == 1:
            return list(reads)

        def gather() -> list[Handle]:
            for ticket in reads:
                ticket.wait()
            return [shard.gather()]

        return [_Later(device, gather)]

    return fetch


def lending(plan: Plan, routes: Routes, store: PrefetchStore) -> Fetch:
    """Fill a buffer with the shards that all ranks hold in host memory, which the device itself copies from.

    A rank's own range is one copy where its pages lie back to back.
    """
    device = plan.world.compute

    def fetch(unit: UnitState, full: Tensor, tickets: Sequence[Ticket], changing: bool) -> list[Handle]:
        def copy_and_gather(shard: _PagedShard) -> list[Handle]:
            for ticket in tickets:
                ticket.wait()
            place = shard.own_S
            for view in store.in_place_views(shard.pages):
                device.copy(place[: view.numel()], view)
                place = place[view.numel() :]
            if plan.world.size == 1:
                return []
            return [shard.gather()]

        found: list[Handle] = []
        for shard in _paged_shards(plan, routes, unit, full):
            found += [_Later(device, partial(copy_and_gather, shard))] if changing else copy_and_gather(shard)
        return found

    return fetch


class _PagedShard(NamedTuple):
    """The pages of this rank's range of a flat, the memory that they are read into, and what starts to gather it."""

    pages: list[Page]
    own_S: Tensor
    gather: Callable[[], Handle]


def _paged_shards(plan: Plan, routes: Routes, unit: UnitState, full: Tensor) -> list[_PagedShard]:
    split = unit.spec.trainable.P
    parts = (
        (PageKind.PARAM, unit.spec.trainable, full[:split]),
        (PageKind.FROZEN, unit.spec.frozen, full[split:]),
    )
    found = []
    for number, (kind, layout, full_P) in enumerate(parts):
        pages = [Page(unit.index, kind, n) for n in range(len(plan.cut(layout.S)))]
        start, stop = layout.shard(plan.rank)
        own_S = full_P[start:stop]
        if layout.S:
            found.append(_PagedShard(pages, own_S, _gather(routes, unit, number, own_S, full_P)))
    return found


def _gather(routes: Routes, unit: UnitState, number: int, own_S: Tensor, full_P: Tensor) -> Callable[[], Handle]:
    """What starts to gather the unit as it is now: flat 0 is the trainable one, 1 the frozen one."""
    secondary, current = unit.secondary[number], unit.secondary_versions[number] == unit.versions[number]
    return partial(routes.gather, own_S, full_P, secondary=secondary, current=current, what=unit.spec.name)


class _Later:
    """What starts when it is first waited for, and then runs beside what was enqueued since it was requested."""

    def __init__(self, device: Device, start: Callable[[], Sequence[Handle]]) -> None:
        self._device, self._start = device, start
        self._ready = PASSED
        self._started: Sequence[Handle] | None = None

    def wait(self) -> None:
        if self._started is None:
            with self._device.aside("gather", after=PASSED) as self._ready:  # which requested it
                self._started = self._start()
        for handle in self._started:
            handle.wait()
        self._ready.wait()
