"""The ranges of a unit's elements that are updated together, and the pages that hold their state.

Pages of one kind that adjoin in memory are one tensor, so one launch updates them, or one copy moves them to a GPU.
"""

from itertools import groupby
from typing import NamedTuple, cast

from torch import Tensor

from zero.core.kept import Pass
from zero.core.layout import pages
from zero.engine.model import UnitSpec
from zero.engine.plan.plan import Plan
from zero.store import Page, PageGroup, PrefetchStore


class Part(NamedTuple):
    """A range of the elements that this rank updates of a unit, with the groups of pages that hold its state.

    A group has the pages of one number, one of each kind. Neighbouring groups in memory are one part.
    """

    start: int
    stop: int
    first: int
    """The index of its first element in the unit's trainable flat."""
    groups: tuple[PageGroup, ...]
    staged: bool
    """Whether a GPU updates it and its pages are in host memory, see `zero.engine.update.staging`."""
    lent: tuple[Tensor, ...] | None
    """The pages in memory, those of one kind as one tensor, in the order of `PageGroup.all`; None if the store's
    threads update the part."""
    by_host: bool = False
    """Whether the host updates it, although the device is a GPU."""
    turn: int = 0
    """The index of the pass, see `PageTable.passes`."""
    tables: tuple[Tensor, ...] = ()
    """`zero.core.fused.tables` for the kernel that updates the part; empty without a kernel."""

    @property
    def on_device(self) -> bool:
        """Whether the training thread updates the pages in place."""
        return self.lent is not None and not self.staged

    @property
    def pages(self) -> tuple[Page, ...]:
        """The pages that the update reads and writes."""
        return tuple(page for group in self.groups for page in group.pages)


def parts_of(plan: Plan, store: PrefetchStore, unit: UnitSpec) -> list[Part]:
    """Return the parts of the elements that this rank updates of a unit, pass by pass in their order."""
    return [
        part._replace(turn=turn)
        for turn, now in enumerate(plan.passes.of(unit))
        for part in _parts_of(plan, store, unit, now)
    ]


def _parts_of(plan: Plan, store: PrefetchStore, unit: UnitSpec, now: Pass) -> list[Part]:
    device, shard_start = plan.world.compute, 0 if plan.facts.full_update else unit.trainable.shard(plan.rank)[0]
    parts = []
    for number, (start, stop) in enumerate(pages(plan.sizes.update_numel(unit), plan.pages.page_numel)):
        group = PageGroup(
            unit.index,
            number,
            tuple(Page(unit.index, kind, number) for kind in plan.passes.state_kinds(now)),
            tuple(Page(unit.index, kind, number) for kind in plan.passes.read_kinds(now)),
            tuple(Page(unit.index, kind, number) for kind in plan.passes.written_kinds(now)),
        )
        lent = [store.in_place(page) for page in group.all]
        in_memory = all(page_K is not None for page_K in lent)
        on_device = len(group.all) == len(group.pages) and all(
            page_K is not None and device.is_home_of(page_K) for page_K in lent
        )
        by_host = (unit.index, number) in plan.slots.by_host
        staged = in_memory and not on_device and not device.shares_memory and not by_host and plan.slots.staging > 0
        tensors = cast(tuple[Tensor, ...], tuple(lent)) if on_device or staged else None
        parts.append(Part(start, stop, shard_start + start, (group,), staged, tensors, by_host))

    def run(part: Part) -> tuple[bool, int]:
        """Return equal values for parts that may be joined: a slot of staging has room for `staged_pages` pages."""
        return part.on_device, part.groups[0].number // plan.slots.staged_pages if part.staged else -1

    return [joined for _, alike in groupby(parts, run) for joined in _joined(store, [*alike])]


def _joined(store: PrefetchStore, parts: list[Part]) -> list[Part]:
    """Return parts that follow each other as one if their pages are adjacent in memory; else `parts`."""
    if parts[0].lent is None:
        return parts
    groups = [group for part in parts for group in part.groups]
    views = [store.in_place_views(pages) for pages in zip(*(group.all for group in groups), strict=True)]
    if any(len(adjacent) > 1 for adjacent in views):
        return parts
    lent = tuple(view for [view] in views)
    return [parts[0]._replace(stop=parts[-1].stop, groups=tuple(groups), lent=lent)]
