"""All-gather a unit's shards into its buffer, from device memory or from the store.

Every rank must start the same collectives in the same order. An all-gather that first needs a read from disk, or an
update by the store's threads, is a `Later`: it starts after the work of the unit before is launched, or when the buffer
is waited for. These are the same points of the program on all ranks. Other all-gathers start when the buffer is
requested. All all-gathers overlap with compute.

Codes of frozen parameters arrive as bytes behind the parameters of the buffer, and a `Later` expands them. It starts
after the work of the unit before is launched, so on a GPU it runs beside that work.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor

from zero.distributed.routes import Routes
from zero.distributed.world import Handle
from zero.engine.gather.expand import Expander
from zero.engine.memory import load_page
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.platform.device import PASSED, Device
from zero.store import Page, PrefetchStore, Ticket

Fetch = Callable[[UnitState, Tensor, Sequence[Ticket], bool], Sequence[Handle]]
"""A function that starts to fill a unit's buffer and returns the handles to wait for.

Its arguments are the unit, the buffer, the tickets of the unit's update, and whether that update may still be running.
"""


def gathering(plan: Plan, routes: Routes) -> Fetch:
    """Return a Fetch for shards in device memory."""
    shards_of = partial(_shards, plan, routes, Expander(plan))

    def fetch(unit: UnitState, full: Tensor, tickets: Sequence[Ticket], changing: bool) -> list[Handle]:
        handles: list[Handle] = []
        for shard in shards_of(unit, full):
            kept = unit.shards[shard.number]
            assert kept is not None
            own_S = kept if kept.numel() == shard.own_S.numel() else kept[slice(*shard.extent)]
            handles += shard.arrived([shard.gather(own_S)])
        return handles

    return fetch


def reading(plan: Plan, routes: Routes, store: PrefetchStore) -> Fetch:
    """Return a Fetch for shards on disk; the read of this rank's pages starts immediately."""
    device, shards_of = plan.world.compute, partial(_shards, plan, routes, Expander(plan))

    def fetch(unit: UnitState, full: Tensor, tickets: Sequence[Ticket], changing: bool) -> list[Handle]:
        return [handle for shard in shards_of(unit, full) for handle in shard.arrived(read(shard))]

    def read(shard: _Shard) -> list[Handle]:
        reads = [
            load_page(store, device, page, shard.own_S[a:b])
            for page, (a, b) in zip(shard.pages, plan.pages.cut(shard.own_S.numel()), strict=True)
        ]
        if plan.world.size == 1:
            return list(reads)

        def gather() -> list[Handle]:
            for ticket in reads:
                ticket.wait()
            return [shard.gather(shard.own_S)]

        return [Later(device, gather)]

    return fetch


def lending(plan: Plan, routes: Routes, store: PrefetchStore) -> Fetch:
    """Return a Fetch for shards in host memory. The device copies them, adjacent pages in one copy."""
    device, shards_of = plan.world.compute, partial(_shards, plan, routes, Expander(plan))

    def fetch(unit: UnitState, full: Tensor, tickets: Sequence[Ticket], changing: bool) -> list[Handle]:
        def copy_and_gather(shard: _Shard) -> list[Handle]:
            for ticket in tickets:
                ticket.wait()
            place = shard.own_S
            for view in store.in_place_views(shard.pages):
                device.copy(place[: view.numel()], view)
                place = place[view.numel() :]
            if plan.world.size == 1:
                return []
            return [shard.gather(shard.own_S)]

        handles: list[Handle] = []
        for shard in shards_of(unit, full):
            started = [Later(device, partial(copy_and_gather, shard))] if changing else copy_and_gather(shard)
            handles += shard.arrived(started)
        return handles

    return fetch


class _Shard(NamedTuple):
    """This rank's shard of a stored flat.

    Attributes:
        number: the number of the flat in `UnitSpec.flats`.
        extent: the (start, stop) of the shard in the flat.
        pages: the pages of the shard where parameters are offloaded.
        own_S: (S,) the part of the gathered buffer for the shard.
        gather: starts the all-gather of the flat from the shard, (S,).
        arrived: maps the handles of the flat's arrival to those of the parameters' values.
    """

    number: int
    extent: tuple[int, int]
    pages: list[Page]
    own_S: Tensor
    gather: Callable[[Tensor], Handle]
    arrived: Callable[[Sequence[Handle]], Sequence[Handle]]


def _shards(plan: Plan, routes: Routes, expander: Expander, unit: UnitState, full: Tensor) -> list[_Shard]:
    """Return the shards of the unit's flats that are not empty."""
    shards = []
    for number, flat in enumerate(unit.spec.flats):
        if not flat.stored.S:
            continue
        full_P, arrived = flat.of(full), _unchanged
        if flat.form is not None:
            room = full[unit.spec.full_numel :].view(torch.uint8)
            full_P = room if room.numel() else cast(Tensor, unit.shards[number])  # see `Sizes.buffer_numel`
            expand = partial(expander.expand, unit.index, flat, full_P, flat.of(full))
            arrived = partial(_expanding, plan.world.compute, expand)
        extent = flat.stored.shard(plan.rank)
        pages = [Page(unit.index, flat.kind, n) for n in range(len(plan.pages.cut(flat.stored.S)))]
        gather = partial(
            routes.gather,
            full_P=full_P,
            secondary=unit.secondary[number],
            current=unit.secondary_is_current(number),  # read now, because a later start gathers this version
            what=unit.spec.name,
        )
        shards.append(_Shard(number, extent, pages, full_P[slice(*extent)], gather, arrived))
    return shards


def _unchanged(handles: Sequence[Handle]) -> Sequence[Handle]:
    return handles


def _expanding(device: Device, expand: Callable[[], None], handles: Sequence[Handle]) -> Sequence[Handle]:
    """Return the handle of the expansion of a flat in a packed format, which waits for `handles`."""

    def start() -> list[Handle]:
        for handle in handles:
            handle.wait()
        expand()
        return []

    return [Later(device, start)]


class Later:
    """Handle of an all-gather or expansion that starts in `start`, or in the first `wait`, on the gather stream.

    It does not wait for the compute stream. Compute that used the buffer was enqueued before `Pool.take` returned it,
    so the gather stream has waited for it at the request, in `Gathers.start`. Until `Buffer.land` no compute uses the
    buffer. Temporaries of an expansion are allocated and freed on the gather stream alone.
    """

    def __init__(self, device: Device, start: Callable[[], Sequence[Handle]]) -> None:
        self._device, self._ready = device, PASSED
        self._start: Callable[[], Sequence[Handle]] | None = start  # dropped with the tensors that it holds
        self._started: Sequence[Handle] = ()

    def start(self) -> None:
        """Wait for the store's threads, then start the all-gather, unless it has started."""
        if self._start is not None:
            with self._device.aside("gather", after=PASSED) as self._ready:
                self._started, self._start = self._start(), None

    def wait(self) -> None:
        self.start()
        for handle in self._started:
            handle.wait()
        self._ready.wait()
