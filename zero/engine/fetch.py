"""Fill a gathered buffer with the shards of all ranks, from memory or from the store.

Every rank starts the same collectives in the same order. A gather that needs a read from a disk, or an update by the
store's threads, starts when the buffer is first waited for, which is the same call on all ranks; otherwise it starts
when the buffer is requested. Either way it runs beside compute.
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
"""(unit, its buffer, tickets of its update, whether they may not have ended) to handles to wait for."""


def gathering(routes: Routes) -> Fetch:
    """Return a Fetch of shards in device memory; a buffer is (trainable P + frozen P,)."""

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
    """Return a Fetch of shards on disks; the read of this rank's pages starts at once."""
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
    """Return a Fetch of shards in host memory, which the device copies from: adjacent pages in one copy."""
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

        handles: list[Handle] = []
        for shard in _paged_shards(plan, routes, unit, full):
            handles += [_Later(device, partial(copy_and_gather, shard))] if changing else copy_and_gather(shard)
        return handles

    return fetch


class _PagedShard(NamedTuple):
    """This rank's range of a flat: its pages, the memory that they are read into, and a function that gathers it."""

    pages: list[Page]
    own_S: Tensor
    gather: Callable[[], Handle]


def _paged_shards(plan: Plan, routes: Routes, unit: UnitState, full: Tensor) -> list[_PagedShard]:
    split = unit.spec.trainable.P
    parts = (
        (PageKind.PARAM, unit.spec.trainable, full[:split]),
        (PageKind.FROZEN, unit.spec.frozen, full[split:]),
    )
    shards = []
    for number, (kind, layout, full_P) in enumerate(parts):
        pages = [Page(unit.index, kind, n) for n in range(len(plan.cut(layout.S)))]
        start, stop = layout.shard(plan.rank)
        own_S = full_P[start:stop]
        if layout.S:
            shards.append(_PagedShard(pages, own_S, _gather(routes, unit, number, own_S, full_P)))
    return shards


def _gather(routes: Routes, unit: UnitState, number: int, own_S: Tensor, full_P: Tensor) -> Callable[[], Handle]:
    """Return a function that gathers the unit as it is now: flat 0 is the trainable one, 1 the frozen one."""
    secondary, current = unit.secondary[number], unit.secondary_versions[number] == unit.versions[number]
    return partial(routes.gather, own_S, full_P, secondary=secondary, current=current, what=unit.spec.name)


class _Later:
    """A gather that starts when it is first waited for, beside what was enqueued since it was requested."""

    def __init__(self, device: Device, start: Callable[[], Sequence[Handle]]) -> None:
        self._device, self._start = device, start
        self._ready = PASSED
        self._started: Sequence[Handle] | None = None

    def wait(self) -> None:
        if self._started is None:
            with self._device.aside("gather", after=PASSED) as self._ready:  # it was requested on that stream
                self._started = self._start()
        for handle in self._started:
            handle.wait()
        self._ready.wait()
