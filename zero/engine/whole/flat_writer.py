"""Write a flat tensor to this rank's memory and pages, in order; each rank keeps its own range of it.

The values arrive slot by slot in fp32, codes as bytes. The writer asks for the part of a slot that this rank keeps, in
chunks, rounds it, and puts it where the unit's state is: a shard, a resident buffer, or pages of the store.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from zero.core.layout import Layout, Slot, pages
from zero.core.master import rounded
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.platform.device import Device
from zero.store import Page, PageKind, Store

CHUNK = 1 << 22
"""Most elements that are asked for at once: 16 MiB in fp32. Chunks begin at multiples of it in their slot."""

ZEROS = torch.zeros(64)
"""The chunk of zeros that fills gaps between slots."""


class FlatWriter:
    """A writer of one kind of a unit's values, and of further kinds that begin with the same values.

    Args:
        kind: "param" (also writes the master, if the precision has one), "frozen", "codes", or a moment's name.
        copies: further kinds.

    Attributes:
        layout: the layout of the flat tensor.
        start, stop: the range of the flat tensor that this rank keeps.
    """

    def __init__(self, plan: Plan, store: Store, unit: UnitState, kind: str, *, copies: Sequence[str] = ()) -> None:
        self.layout = unit.spec.stored(kind)
        self._sinks = [sink for each in (kind, *copies) for sink in _sinks(plan, store, unit, each, self.layout)]
        self.start, self.stop = min(sink.start for sink in self._sinks), max(sink.stop for sink in self._sinks)
        self._at = self.start

    def write_all(self, values: Callable[[Slot, int, int], Tensor]) -> None:
        """Write the whole flat tensor; `values` is a function from a slot and (start, stop) in it, as for `write`."""
        for slot in self.layout.slots:
            self.write(slot, partial(values, slot))
        self.close()

    def write(self, slot: Slot, values: Callable[[int, int], Tensor]) -> None:
        """Write the part of `slot` that this rank keeps; call it for the layout's slots in order.

        Args:
            values: function from (start, stop) in the slot to these values, (stop - start,), of any dtype.
        """
        self._fill_gap(slot.offset)
        first, last = max(self.start - slot.offset, 0), min(self.stop - slot.offset, slot.numel)
        while first < last:
            end = min((first // CHUNK + 1) * CHUNK, last)
            self._take(values(first, end))
            first = end

    def close(self) -> None:
        """Write the zeros after the last slot."""
        self._fill_gap(self.layout.P)

    def _fill_gap(self, stop: int) -> None:
        stop = min(stop, self.stop)
        while self._at < stop:
            self._take(ZEROS[: stop - self._at])

    def _take(self, values: Tensor) -> None:
        for sink in self._sinks:
            sink.take(values, self._at)
        self._at += values.numel()


class _Sink:
    """A receiver that cuts one range of a flat tensor into pages.

    Args:
        start, stop: the range, in elements of the flat tensor.
        page_numel: the size of a page.
        keep: called for each complete page with its number and its values, (K,), which are overwritten afterwards.
        host: the device whose memory holds the page that is being filled.
        dtype: the dtype of the values.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        page_numel: int,
        keep: Callable[[int, Tensor], None],
        host: Device,
        dtype: torch.dtype,
    ) -> None:
        self.start, self.stop = start, stop
        self._cuts, self._keep = pages(stop - start, page_numel), keep
        self._page_K = host.zeros(min(page_numel, stop - start), dtype)
        self._number = 0

    def take(self, values: Tensor, at: int) -> None:
        """Keep the part in this range of `values`, (n,), which are elements [at, at + n) of the flat tensor."""
        first, last = max(self.start - at, 0), min(self.stop - at, values.numel())
        while first < last:
            a, b = (self.start + edge for edge in self._cuts[self._number])
            count = min(last - first, b - at - first)
            begin = at + first - a
            self._page_K[begin : begin + count].copy_(values[first : first + count])
            first += count
            if at + first == b:
                self._keep(self._number, self._page_K[: b - a])
                self._number += 1


def _sinks(plan: Plan, store: Store, unit: UnitState, kind: str, layout: Layout) -> list[_Sink]:
    """Return the sinks that write values of one kind to this rank's memory and pages."""
    shard, full = layout.shard(plan.rank), (0, layout.P)
    updated = full if plan.facts.full_update else shard
    wanted: list[tuple[tuple[int, int], Callable[[int, Tensor], None]]] = []
    flat = next((flat for flat in unit.spec.flats if flat.kind == kind), None)
    if flat is None:
        wanted.append((updated, _to_pages(store, unit.index, kind, plan.optimizer.form(kind).page_of)))
    elif plan.facts.params_offloaded:
        narrow = partial(rounded, dtype=flat.dtype(plan.precision.compute))
        wanted.append((shard, _to_pages(store, unit.index, kind, narrow)))
    elif unit.resident is not None:
        wanted.append((full, _to_memory(flat.of(unit.resident.flat), plan.pages.page_numel)))
    else:
        kept = unit.shards[unit.spec.flats.index(flat)]
        assert kept is not None
        wanted.append((full if kept.numel() == layout.P else shard, _to_memory(kept, plan.pages.page_numel)))
    master = plan.precision.master
    if kind == PageKind.PARAM and master.kind is not None:
        wanted.append((updated, _to_pages(store, unit.index, master.kind, master.page_of)))
    dtype = torch.float32 if flat is None else flat.dtype(torch.float32)
    return [_Sink(*extent, plan.pages.page_numel, keep, plan.world.compute.host, dtype) for extent, keep in wanted]


def _to_memory(flat: Tensor, page_numel: int) -> Callable[[int, Tensor], None]:
    parts = flat.split(page_numel)

    def keep(number: int, page_K: Tensor) -> None:
        parts[number].copy_(rounded(page_K, flat.dtype))

    return keep


def _to_pages(store: Store, unit: int, kind: str, page_of: Callable[[Tensor], Tensor]) -> Callable[[int, Tensor], None]:
    """Return a function that writes fp32 values to pages of the store; `page_of` converts them to the page's format."""

    def keep(number: int, page_K: Tensor) -> None:
        store.write(Page(unit, kind, number), page_of(page_K)).wait()

    return keep
