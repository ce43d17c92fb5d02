"""The table of one rank's pages in the store, with their sizes.

A page holds K elements of one kind of one unit. Kinds are the master, the moments, and offloaded parameters and
gradients. Each secondary shard (copies of shards of other nodes) is a single page, which stays in memory; its number
is that of the flat in `UnitSpec.flats`.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch

from zero.core.layout import pages
from zero.core.placement import Tier
from zero.core.sizes import round_up
from zero.engine.model import UnitSpec
from zero.engine.plan.facts import Facts
from zero.engine.plan.passes import Passes
from zero.engine.plan.sizes import Sizes
from zero.store import PARAMETER_KINDS, Page, PageKind


class PageSpec(NamedTuple):
    """The number of elements of one page and their dtype."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of the page rounded up to whole blocks."""
        return round_up(self.nbytes)


class UnitPage(NamedTuple):
    """A page of a unit with its size; `kind` and `number` are those of its `Page`."""

    kind: str
    number: int
    spec: PageSpec


class PageTable:
    """The pages of one rank.

    Args:
        page_numel: K, the number of elements of a page; the last page of a range may have fewer.

    Attributes:
        sizes: the sizes of the ranges that are cut into pages, and of the buffers.
        passes: the passes of an update over its pages.
    """

    def __init__(self, facts: Facts, page_numel: int) -> None:
        self.facts, self.page_numel = facts, page_numel
        self.sizes, self.passes = Sizes(facts), Passes(facts)

    @cached_property
    def grad_dtypes(self) -> dict[str, torch.dtype]:
        """The kinds of pages of an offloaded gradient and their dtypes.

        "first_grad", only on the nvme tier, holds the gradient of the first microbatch until the next one, in a
        narrower dtype than the sum. In memory it uses the first bytes of the sum's page instead.
        """
        apart = self.facts.grad_tier == "nvme" and self.facts.first_grad_dtype != self.facts.grad_dtype
        dtypes: dict[str, torch.dtype] = {PageKind.GRAD: self.facts.grad_dtype}
        return dtypes | {PageKind.FIRST_GRAD: self.facts.first_grad_dtype} if apart else dtypes

    def is_updated(self, page: Page | UnitPage) -> bool:
        """Return whether a page holds the master or a moment."""
        return page.kind in self.passes.kept.dtypes

    def cut(self, numel: int) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) of each page of a range of `numel` elements."""
        return pages(numel, self.page_numel)

    def grad_ranges(self, unit: UnitSpec) -> tuple[tuple[int, int], ...]:
        """Return the (start, stop) of each page of a unit's gradient; the pages that this rank updates come first."""
        extents = self._grad_extents(unit, self.facts.rank)
        return tuple((a + first, b + first) for first, last in extents for a, b in self.cut(last - first))

    def updated_pages(self, unit: UnitSpec) -> int:
        """Return the number of pages of each kind, gradients included, that this rank updates of a unit."""
        return len(self.cut(self.sizes.update_numel(unit)))

    def _grad_extents(self, unit: UnitSpec, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of a gradient that are cut into pages separately.

        The first is the range that `rank` updates. If the gradient is larger, the ranges before and after it follow.
        """
        numel = self.sizes.grad_numel(unit)
        if numel == self.sizes.update_numel(unit):
            return ((0, numel),)
        start, stop = unit.trainable.shard(rank)
        return (start, stop), (0, start), (stop, numel)

    def store_pages(self) -> dict[Page, PageSpec]:
        """Return every page of this rank with its size, unit by unit in the order of forward."""
        return self._store_pages

    @cached_property
    def _store_pages(self) -> dict[Page, PageSpec]:
        return {page: spec for unit in self.facts.units for page, spec in self.pages_of(unit)}

    @cached_property
    def equal_units(self) -> tuple[tuple[tuple[UnitPage, ...], tuple[UnitSpec, ...]], ...]:
        """The pages of a unit, and all units that are cut into the same pages. The blocks of a model are such units."""
        units: dict[object, list[UnitSpec]] = {}
        for unit in self.facts.units:
            flats = tuple((flat.kind, flat.form, flat.stored.P, flat.stored.S) for flat in unit.flats)
            sizes = unit.trainable.P, unit.trainable.S, bool(unit.trainable.slots), bool(unit.matrices), flats
            units.setdefault(sizes, []).append(unit)
        return tuple((tuple(self._pages_of(equal[0])), tuple(equal)) for equal in units.values())

    def pages_of(self, unit: UnitSpec) -> Iterator[tuple[Page, PageSpec]]:
        """Yield every page of one unit with its size."""
        for kind, number, spec in self._pages_of(unit):
            yield Page(unit.index, kind, number), spec

    def _pages_of(self, unit: UnitSpec) -> Iterator[UnitPage]:
        cuts, passes = self.cut(self.sizes.update_numel(unit)), self.passes.of(unit)
        ranges = {kind: cuts for now in passes for kind in self.passes.state_kinds(now)}
        dtypes = dict(self.passes.kept.dtypes)
        if self.facts.grads_offloaded and unit.trainable.slots:
            for kind, dtype in self.grad_dtypes.items():
                ranges[kind], dtypes[kind] = self.grad_ranges(unit), dtype
        if self.facts.params_offloaded:
            ranges |= {flat.kind: self.cut(flat.stored.S) for flat in unit.flats}
            dtypes |= {flat.kind: flat.dtype(self.facts.precision.compute) for flat in unit.flats}
        for kind, cuts in ranges.items():
            for number, (start, stop) in enumerate(cuts):
                yield UnitPage(kind, number, PageSpec(self.passes.kept.numel(kind, stop - start), dtypes[kind]))
        for number, flat in enumerate(unit.flats):
            if numel := self.sizes.secondary_numel(flat.stored):
                spec = PageSpec(numel, flat.dtype(self.facts.precision.compute))
                yield UnitPage(PageKind.SECONDARY, number, spec)

    def copied_pages(self) -> int:
        """Return the number of pages of frozen parameters that are copied through the arena from a disk to a GPU."""
        if self.facts.param_tier != "nvme" or self.facts.device_is_host:
            return 0
        return sum(len(self.cut(flat.stored.S)) for unit in self.facts.units for flat in unit.flats[1:])

    # -- bytes ---------------------------------------------------------------------------------------------------------

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot of the arena: all pages of one number that an update needs, each rounded up to blocks."""
        dtypes = self.passes.kept.dtypes | {
            PageKind.GRAD: self.facts.grad_dtype,
            PageKind.PARAM: self.facts.precision.compute,
        }
        sizes = {
            (self.passes.kinds_of(now), min(self.page_numel, self.sizes.update_numel(unit)))
            for unit in self.facts.units
            for now in self.passes.of(unit)
        }
        groups = [
            sum(round_up(dtypes[kind].itemsize * self.passes.kept.numel(kind, numel)) for kind in kinds)
            for kinds, numel in sizes
        ]
        pages = (page for pages, _ in self.equal_units for page in pages)
        moving = (page.spec.block_bytes for page in pages if page.kind != PageKind.SECONDARY)
        return max([*groups, *moving])

    def bytes_on(self, spec: PageSpec, tier: Tier) -> int:
        """Return the bytes that a page takes on a tier."""
        return spec.block_bytes if self.facts.is_offloaded(tier) else spec.nbytes

    def param_bytes(self) -> int:
        """Return the bytes of this rank's parameters, in pages or in device memory."""
        if self.facts.params_offloaded:
            return self._bytes_of(self.facts.param_tier, *PARAMETER_KINDS)
        flats = [flat for unit in self.facts.units for flat in unit.flats]
        return sum(flat.dtype(self.facts.precision.compute).itemsize * self.sizes.kept_numel(flat) for flat in flats)

    def grad_bytes(self) -> int:
        """Return the bytes of this rank's gradients, in pages or in device memory."""
        if self.facts.grads_offloaded:
            return self._bytes_of(self.facts.grad_tier, *self.grad_dtypes)
        return self.facts.grad_dtype.itemsize * sum(self.sizes.grad_numel(unit) for unit in self.facts.units)

    def most_grad_bytes(self) -> int:
        """Return `grad_bytes` of the rank where it is largest.

        Rounding up to blocks makes it differ between ranks, and all ranks must place pages alike.
        """
        if not self.facts.grads_offloaded:
            return self.grad_bytes()
        sizes = [dtype.itemsize for dtype in self.grad_dtypes.values()]

        def paged(numel: int) -> int:
            full, rest = divmod(numel, self.page_numel)
            return sum(full * round_up(self.page_numel * size) + round_up(rest * size) for size in sizes)

        counts = {units[0]: len(units) for _, units in self.equal_units if units[0].trainable.slots}
        return max(
            sum(count * paged(b - a) for unit, count in counts.items() for a, b in self._grad_extents(unit, rank))
            for rank in range(self.facts.sharers)
        )

    def secondary_bytes(self, tier: Tier) -> int:
        """Return the bytes of this rank's secondary shards on a tier."""
        return self._bytes_of(tier, PageKind.SECONDARY) if tier == self.facts.secondary else 0

    def _bytes_of(self, tier: Tier, *kinds: str) -> int:
        """Return the bytes that all pages of some kinds take on a tier."""
        return sum(
            len(units) * self.bytes_on(page.spec, tier)
            for pages, units in self.equal_units
            for page in pages
            if page.kind in kinds
        )
