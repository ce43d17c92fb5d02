"""What fills a gathered buffer: the shards of all ranks, out of memory or out of the store.

Every rank starts the same collectives in the same order. Reads of the store are local, so they start when the buffer
is asked for; where there are other ranks, their gather starts when the buffer is first waited for.
"""

from collections.abc import Callable

from torch import Tensor

from zero.device import Device
from zero.layout import Layout, pages
from zero.store import Page, PrefetchStore, Ticket
from zero.transfer import load
from zero.unit_state import UnitState
from zero.world import Handle, World

Fetch = Callable[[UnitState, Tensor], list[Handle]]


def gathering(world: World) -> Fetch:
    """Fill a buffer (trainable P + frozen P,) with the shards that all ranks hold in memory."""

    def fetch(unit: UnitState, full: Tensor) -> list[Handle]:
        split = unit.spec.trainable.P
        return [
            world.gather(shard_S, full_P, what=unit.spec.name)
            for shard_S, full_P in ((unit.shard_S, full[:split]), (unit.frozen_S, full[split:]))
            if shard_S is not None and shard_S.numel()
        ]

    return fetch


def reading(world: World, device: Device, store: PrefetchStore, page_numel: int) -> Fetch:
    """Fill a buffer with the shards that all ranks hold in their stores, each one's own straight into its place."""

    def fetch(unit: UnitState, full: Tensor) -> list[Handle]:
        split = unit.spec.trainable.P
        parts = (("param", unit.spec.trainable, full[:split]), ("frozen", unit.spec.frozen, full[split:]))
        return [one for kind, layout, full_P in parts if layout.S for one in arriving(unit, kind, layout, full_P)]

    def arriving(unit: UnitState, kind: str, layout: Layout, full_P: Tensor) -> list[Handle]:
        start, stop = layout.shard(world.rank)
        own_S = full_P[start:stop]
        tickets = [
            load(store, device, Page(unit.index, kind, number), own_S[a:b])
            for number, (a, b) in enumerate(pages(layout.S, page_numel))
        ]
        if world.size == 1:
            return list(tickets)
        return [_ReadThenGather(tickets, lambda: world.gather(own_S, full_P, what=unit.spec.name))]

    return fetch


class _ReadThenGather:
    """This rank's own range is being read; when it is there, the others' are gathered."""

    def __init__(self, tickets: list[Ticket], gather: Callable[[], Handle]) -> None:
        self._tickets, self._gather = tickets, gather
        self._gathered: Handle | None = None

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()
        if self._gathered is None:
            self._gathered = self._gather()
        self._gathered.wait()
