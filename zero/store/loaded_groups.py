"""The groups in slots: loaded for an operation, or announced and read ahead."""

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from zero.store.base import Page
from zero.store.events import GroupPhase, PageGroup, Read


class LoadedGroup:
    """A group in a slot.

    Attributes:
        number: the number of the operation that it is loaded for; None if it was read ahead.
        readers: the number of reads that copy from the slot, or will once a worker is free.
        stale: whether a page was written by an operation while the group was being read ahead.
    """

    __slots__ = ("number", "phase", "readers", "slot", "stale")

    def __init__(self, slot: int, number: int | None) -> None:
        self.slot, self.number, self.readers = slot, number, 0
        self.phase, self.stale = GroupPhase.READING, False


class LoadedGroups(dict[PageGroup, LoadedGroup]):
    """The groups in slots.

    Args:
        slots: the number of slots.
        read_ahead: the most groups that no operation needs yet.

    Attributes:
        free: the free slots, a heap.
    """

    def __init__(self, slots: int, read_ahead: int) -> None:
        super().__init__()
        self._ahead_limit = read_ahead
        self.free = list(range(slots))
        self._expected: dict[PageGroup, int] = {}  # group -> its position
        self._ahead: dict[PageGroup, LoadedGroup] = {}  # the groups that were read ahead
        self._ahead_with: dict[Page, list[PageGroup]] = {}

    def read(self, group: PageGroup, number: int | None) -> Read:
        """Take a free slot for a group; `number` is that of its operation, or None to read it ahead."""
        held = self[group] = LoadedGroup(heappop(self.free), number)
        if number is None:
            self._ahead[group] = held
            for page in group.pages:
                self._ahead_with.setdefault(page, []).append(group)
        return Read(group, held.slot)

    def release(self, group: PageGroup) -> None:
        """Free the slot of a group."""
        self._forget_ahead(group)
        heappush(self.free, self.pop(group).slot)

    def release_if_written(self, group: PageGroup) -> None:
        """Free the slot of a group that is written, unless a read still copies from it, or will."""
        held = self[group]
        if not held.readers and held.phase is GroupPhase.LEAVING:
            self.release(group)

    def arrived(self, group: PageGroup) -> int | None:
        """Note that a group has been read, or free its slot if it is stale or no longer expected.

        Returns:
            The number of the operation that it was read for, if there is one.
        """
        held = self[group]
        if held.stale or (held.number is None and group not in self._expected):
            self.release(group)
            return None
        held.phase = GroupPhase.READY
        return held.number

    # -- read-ahead ----------------------------------------------------------------------------------------------------

    def expect(self, groups: Iterable[PageGroup]) -> None:
        """Replace the announced groups, and free the slots of groups that are not announced any more."""
        self._expected = {group: place for place, group in enumerate(dict.fromkeys(groups))}
        for group in self.ready_ahead():
            if group not in self._expected:
                self.release(group)

    def claim(self, group: PageGroup, number: int) -> LoadedGroup | None:
        """Keep a group that was read ahead for an operation; return None if it has to be read again."""
        held = self.get(group)
        if held is None or held.number is not None or held.stale:
            return None
        self._forget_ahead(group)
        held.number = number
        return held

    def outdate(self, written: Sequence[Page], modified: PageGroup | None) -> None:
        """Drop groups that were read ahead with pages that an operation writes.

        The group that it modifies, if any, is not dropped, and not expected any more.
        """
        for page in written:
            for group in [group for group in self._ahead_with.get(page, ()) if group != modified]:
                if self._ahead[group].phase is GroupPhase.READING:
                    self._ahead[group].stale = True
                else:
                    self.release(group)
        if modified is not None:
            self._expected.pop(modified, None)

    def next_ahead(self, is_written: Callable[[Page], bool]) -> Read | None:
        """Read ahead the first announced group that is not in a slot, if a slot may be used for that.

        The group waits while an operation writes one of its pages. The groups after it are needed later, so they wait
        as well.
        """
        if not self.free or len(self._ahead) >= self._ahead_limit:
            return None
        group = next((group for group in self._expected if group not in self), None)
        if group is None or any(map(is_written, group.pages)):
            return None
        return self.read(group, None)

    def release_last_ahead(self) -> bool:
        """Free the slot of the group of `ready_ahead` that is needed last; return whether there was one."""
        ready = self.ready_ahead()
        if ready:
            self.release(max(ready, key=self._expected.__getitem__))
        return bool(ready)

    def ready_ahead(self) -> list[PageGroup]:
        """Return the groups that were read ahead and have arrived, whose slots can be freed without a write."""
        return [group for group, held in self._ahead.items() if held.phase is GroupPhase.READY]

    def _forget_ahead(self, group: PageGroup) -> None:
        if self._ahead.pop(group, None) is not None:
            for page in group.pages:
                self._ahead_with[page].remove(group)
                if not self._ahead_with[page]:
                    del self._ahead_with[page]
