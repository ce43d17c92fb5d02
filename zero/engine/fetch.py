"""All-gather a unit's shards into its buffer, from device memory or from the store.

Every rank must start the same collectives in the same order. An all-gather that first needs a read from disk, or an
update by the store's threads, is a `Later`: it starts after the work of the unit before is launched, or when the buffer
is waited for. These are the same points of the program on all ranks. Other all-gathers start when the buffer is
requested. All overlap with compute.
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
"""A function that starts to fill a unit's buffer and returns the handles to wait for.

Its arguments are the unit, the buffer, the tickets of the unit's update, and whether that update may still be running.
"""


def gathering(routes: Routes) -> Fetch:
    """Return a Fetch for shards in device memory; a buffer has shape (trainable P + frozen P,)."""

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
    """Return a Fetch for shards on disk; the read of this rank's pages starts immediately."""
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

        return [Later(device, gather)]

    return fetch


def lending(plan: Plan, routes: Routes, store: PrefetchStore) -> Fetch:
    """Return a Fetch for shards in host memory. The device copies them, adjacent pages in one copy."""
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
            handles += [Later(device, partial(copy_and_gather, shard))] if changing else copy_and_gather(shard)
        return handles

    return fetch


class _PagedShard(NamedTuple):
    """This rank's shard of a flat tensor in pages.

    Attributes:
        own_S: (S,) the part of the gathered buffer that the pages are read into.
        gather: starts the all-gather of the flat tensor.
    """

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
    """Return a function that starts the all-gather of one flat tensor of the unit in its present version.

    Args:
        number: 0 for the trainable flat, 1 for the frozen one.
    """
    secondary, current = unit.secondary[number], unit.secondary_versions[number] == unit.versions[number]
    return partial(routes.gather, own_S, full_P, secondary=secondary, current=current, what=unit.spec.name)


class Later:
    """Handle of an all-gather that starts in `start`, or in the first `wait`, on the gather stream.

    It does not wait for work that was enqueued on the compute stream since the request.
    """

    def __init__(self, device: Device, start: Callable[[], Sequence[Handle]]) -> None:
        self._device, self._ready = device, PASSED
        self._start: Callable[[], Sequence[Handle]] | None = start  # dropped with the tensors that it holds
        self._started: Sequence[Handle] = ()

    def start(self) -> None:
        """Wait for the store's threads, then start the all-gather, unless it has started."""
        if self._start is not None:
            with self._device.aside("gather", after=PASSED) as self._ready:  # no event needed: requested on this stream
                self._started, self._start = self._start(), None

    def wait(self) -> None:
        self.start()
        for handle in self._started:
            handle.wait()
        self._ready.wait()
