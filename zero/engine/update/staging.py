"""Copy pages of host memory to the GPU before their update, and back after it, through a ring of slots.

Reading a page needs no gradient. A slot that an update has finished with gets the pages of a later update at once, in
the order of the coming updates. So the pages of the next forward's first units arrive during backward, and a skipped
step keeps them. The copies back run during the next forward and backward.

The host only launches: the streams "pages in" and "pages out" order all copies. A page that something else has written
since its copy, for example a load, is copied again. With a slot for each part only gradients are copied in.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from zero.core.sizes import round_up
from zero.engine.plan import Part
from zero.platform.device import PASSED, Device, Event
from zero.store import PageGroup, PageKind, PrefetchStore


class _Slot:
    """Device memory for the pages of one part.

    Attributes:
        tensors: the pages of the part on the device, in the order of `Part.lent`.
        arrived: the event at the end of the last copies in or out, after which an update may begin.
        group: the first group of the part whose present values the slot has, also after an update; or None.
        versions: the number of writes to each of `Part.pages` when they were copied in.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.tensors: Sequence[Tensor] = ()
        self.arrived: Event = PASSED
        self.group: PageGroup | None = None
        self.versions: Sequence[int] = ()

    def open(self, device: Device, pages: Sequence[Tensor]) -> None:
        """Set `tensors` for `pages`; a page on the device is its own tensor."""
        tensors, end = [], 0
        for page_K in pages:
            if not device.is_home_of(page_K):
                start, end = end, round_up(end + page_K.nbytes)
                page_K = self._memory[start : start + page_K.nbytes].view(page_K.dtype)
            tensors.append(page_K)
        self.tensors = tensors


class Staging:
    """A ring of slots in device memory for parts whose pages are in host memory.

    Args:
        store: has the pages.
        slots: device memory, each (slot_bytes,) uint8.

    Attributes:
        updated: the event at the end of the last update that was launched, when gathers can read its parameters.
        allocated_bytes: the size of all slots.
    """

    def __init__(self, device: Device, store: PrefetchStore, slots: Sequence[Tensor]) -> None:
        self._device, self._store = device, store
        self._free = deque(map(_Slot, slots))
        self.allocated_bytes = sum(memory.nbytes for memory in slots)
        self._staged: dict[PageGroup, _Slot] = {}  # by the part's first group
        self._order: list[Part] = []
        self._next = 0  # the index in `_order` of the next part to copy in
        self.updated: Event = PASSED
        self._left = device.mark()  # the end of all copies out so far; at first, of the making of `slots`

    def expect(self, parts: list[Part]) -> None:
        """Start to copy in the parts that will be updated next, again and again in this order.

        They are always the same parts.
        """
        if [part.groups for part in parts] != [part.groups for part in self._order]:
            self._order = parts
            missing = (place for place, part in enumerate(parts) if part.groups[0] not in self._staged)
            self._next = next(missing, 0)
        self._read_ahead()

    @contextmanager
    def opened(self, part: Part, ready: Event) -> Iterator[Sequence[Tensor]]:
        """Yield the pages of `part` on the device, in the order of `Part.lent`, and copy them back after the block.

        The block launches the update on the current stream.

        Args:
            ready: the event at the end of the work that makes the gradient.
        """
        slot = self._take(part)
        try:
            self._complete(slot, part, ready).wait()
            slot.group = None
            yield slot.tensors
            pairs = zip(part.groups[0].all, part.lent or (), slot.tensors, strict=True)
            changed = [
                (page.kind, page_K, tensor) for page, page_K, tensor in pairs if page not in part.groups[0].beside
            ]
            # gathers wait for parameters only, so these do not queue behind other pages
            self.updated = self._send("parameters out", [pair for kind, *pair in changed if kind == PageKind.PARAM])
            others = [pair for kind, *pair in changed if kind != PageKind.PARAM]
            self._left = slot.arrived = self._send("pages out", others, self.updated)
            slot.group = part.groups[0]
        finally:
            self._free.append(slot)
        self._read_ahead()

    def _complete(self, slot: _Slot, part: Part, ready: Event) -> Event:
        """Copy the gradient in, if it is in host memory; return the event at the end of all copies in."""
        group = part.groups[0]
        with self._device.aside("gradients in", after=slot.arrived) as complete:
            ready.wait()
            self._copy_in(slot, part, slice(len(group.pages), len(group.pages) + len(group.beside)))
        return complete

    def _send(self, name: str, pairs: Sequence[Sequence[Tensor]], before: Event = PASSED) -> Event:
        """Copy pages out on the stream `name`; return the event at the end of these copies and of `before`."""
        with self._device.aside(name) as left:
            for page_K, tensor in pairs:
                if tensor is not page_K:
                    self._device.copy(page_K, tensor)
            before.wait()
        return left

    def _take(self, part: Part) -> _Slot:
        """Remove the slot of `part`; if its pages were not copied in, or were written since, copy them now."""
        slot = self._staged.pop(part.groups[0], None) or self._unused()
        self._read(slot, part)
        return slot

    def _unused(self) -> _Slot:
        """Return a free slot, or that of the part that was copied in last, which is needed last."""
        if self._free:
            return self._free.popleft()
        group, slot = self._staged.popitem()
        self._next = next(place for place, part in enumerate(self._order) if part.groups[0] == group)
        return slot

    def _read_ahead(self) -> None:
        while self._free and len(self._staged) < len(self._order):
            part = self._order[self._next]
            self._next = (self._next + 1) % len(self._order)
            if part.groups[0] not in self._staged:
                self._read(self._free[0], part)
                self._staged[part.groups[0]] = self._free.popleft()

    def _read(self, slot: _Slot, part: Part) -> None:
        """Copy the pages of `part` in, unless the slot has their present values."""
        group, versions = part.groups[0], self._store.versions(part.pages)
        if (slot.group, slot.versions) == (group, versions):
            return
        slot.group = None  # stays None if the copies fail
        slot.open(self._device, part.lent or ())
        with self._device.aside("pages in", after=self._left) as slot.arrived:
            self._copy_in(slot, part, slice(len(group.pages)))
        slot.group, slot.versions = group, versions

    def _copy_in(self, slot: _Slot, part: Part, pages: slice) -> None:
        for tensor, page_K in [*zip(slot.tensors, part.lent or (), strict=True)][pages]:
            if tensor is not page_K:
                self._device.copy(tensor, page_K)
