"""Execute one action of the schedule: move pages between the inner store and slots, and run the work on them.

A page that the inner store lends (`in_place`) is never copied to a slot: the work gets the page itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero.core.sizes import round_up
from zero.errors import StoreError
from zero.store.base import Page, Store, Watch, watch_nothing
from zero.store.events import Action, Copy, Move, PageGroup, Read, Work, Write
from zero.store.traffic_counter import TrafficCounter


class Executor:
    """The pages and slots of a store. The schedule gives no slot and no page to two actions at a time.

    Args:
        inner: the store of the pages.
        slots: host memory for loaded groups: 1-D uint8, of equal size.
        sizes: elements and dtype of each page.
        meter: the counter of the bytes that are moved.

    Attributes:
        watch: called around every action.
    """

    def __init__(
        self,
        inner: Store,
        slots: Sequence[Tensor],
        sizes: Mapping[Page, tuple[int, torch.dtype]],
        meter: TrafficCounter,
    ) -> None:
        self._inner, self._sizes, self.slots, self.meter = inner, sizes, tuple(slots), meter
        self.watch: Watch = watch_nothing
        self._layouts: dict[PageGroup, GroupLayout] = {}
        self._opened: list[tuple[Tensor, ...]] = [()] * len(slots)  # the pages in each slot

    def layout(self, group: PageGroup) -> "GroupLayout":
        """Return the layout of a group in memory.

        Raises:
            StoreError: a page is unknown, or the group is larger than a slot.
        """
        layout = self._layouts.get(group)
        if layout is None:
            layout = self._layouts[group] = self._new_layout(group)
        return layout

    def carry_out(self, action: Action, job: Callable[..., None]) -> None:
        """Execute one action; `job` is that of its operation."""
        match action:
            case Move():
                job()
            case Copy(_, page, group, slot):
                job(self._opened[slot][group.all.index(page)])
            case Read(group, slot):
                self._opened[slot] = self.layout(group).open(self.slots[slot])
                self._move_all(group, self.layout(group).reads, self._opened[slot], writes=False)
            case Work(_, group, slot):
                opened = self.layout(group).open(None) if slot is None else self._opened[slot]
                self._move_all(group, self.layout(group).beside, opened, writes=False)
                with self.watch(_action_on(group), group.unit, group.number):
                    job(opened)
            case Write(_, group, slot):
                self._move_all(group, self.layout(group).writes, self._opened[slot], writes=True)

    def move(self, page: Page, tensor: Tensor, writes: bool, slot_K: Tensor | None = None) -> None:
        """Read a page into `tensor`, or write it from `tensor`.

        Args:
            slot_K: the page in a slot, if it is still there because it is written now or was just written.
        """
        with self.watch("write" if writes else "read", *page):
            if slot_K is not None:
                tensor.copy_(slot_K)
                return
            with self.meter.moving(tensor.nbytes, writes):
                self._copy(page, tensor, writes)

    def copy_in_caller(self, page: Page, tensor: Tensor, writes: bool) -> None:
        """Copy a page in place to or from `tensor` in the calling thread; its bytes do not count as traffic."""
        with self.watch("wait"), self.watch("write" if writes else "read", *page):
            self._copy(page, tensor, writes)

    def forget_layouts(self) -> None:
        """Free the layouts, which have views of pages in place."""
        self._layouts.clear()

    def close(self) -> None:
        """Free the layouts, and close the inner store."""
        self.forget_layouts()
        self._inner.close()

    def _move_all(
        self, group: PageGroup, numbers: tuple[int, ...], opened: tuple[Tensor, ...], *, writes: bool
    ) -> None:
        for number in numbers:
            self.move(group.all[number], opened[number], writes)

    def _copy(self, page: Page, tensor: Tensor, writes: bool) -> None:
        (self._inner.write if writes else self._inner.read)(page, tensor).wait()

    def _new_layout(self, group: PageGroup) -> "GroupLayout":
        """Lay out the pages of a group one after another from the slot's start, without the pages in place."""
        places, end = [], 0
        for page in group.all:
            (numel, dtype), view = self._sizes[page], self._inner.in_place(page)
            nbytes = numel * dtype.itemsize if view is None else 0
            places.append(_Place(slice(end, end + nbytes), dtype, view))
            end += round_up(nbytes)
        room = self.slots[0].nbytes if self.slots else 0
        if end > room:
            raise StoreError(f"{group} takes {end} bytes of memory, but a slot of the arena has {room}")
        moving = [number for number, place in enumerate(places) if place.view is None]
        beside, out = len(group.pages), len(group.pages) + len(group.beside)
        return GroupLayout(
            tuple(places),
            reads=tuple(number for number in moving if number < beside),
            beside=tuple(number for number in moving if beside <= number < out),
            writes=tuple(number for number in moving if not beside <= number < out),
        )


def _action_on(group: PageGroup) -> str:
    """Return the name of the work on a group for `Watch`: without `pages` it only reads `beside` or writes `out`."""
    if group.pages:
        return "work"
    return "read" if group.beside else "write"


class _Place(NamedTuple):
    """The location of one page while its group is loaded: in the slot, or in place."""

    part: slice
    """Range of bytes in the slot."""
    dtype: torch.dtype
    view: Tensor | None
    """The page itself if it is in place; it then takes no bytes of the slot."""


class GroupLayout(NamedTuple):
    """The layout of a group in memory: each page's location, and the indexes of the pages that each action moves."""

    places: tuple[_Place, ...]
    reads: tuple[int, ...]
    beside: tuple[int, ...]
    writes: tuple[int, ...]

    @property
    def is_in_place(self) -> bool:
        return not (self.reads or self.beside or self.writes)

    def open(self, slot: Tensor | None) -> tuple[Tensor, ...]:
        """Return the pages as tensors: views of the slot, or the pages in place."""
        opened = []
        for part, dtype, view in self.places:
            if view is None:
                assert slot is not None
                view = slot[part].view(dtype)
            opened.append(view)
        return tuple(opened)
