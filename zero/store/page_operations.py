"""Operations that have not ended, and the order of operations on one page if at least one writes.

Operations are indexed by page, and each knows which earlier operations it waits for, so an event costs O(log
operations).
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush

from zero.store.base import Page
from zero.store.events import Action, Modify, PageGroup, PageTransfer

Turn = tuple[int, ...]


class PageOperation:
    """Unfinished work on a group, or a page transfer.

    Attributes:
        turn: sort key; of the operations that can start, the one with the smallest turn starts first.
        after: numbers of earlier operations that must end before this one starts.
        before: numbers of later operations that have this one in their `after`.
        source: the group from whose slot a read is copied once a worker is free; the group's write may have ended by
            then.
    """

    __slots__ = ("after", "before", "event", "source", "turn")

    def __init__(self, event: Modify | PageTransfer, turn: tuple[Turn, int]) -> None:
        self.event, self.turn = event, turn
        self.after: set[int] = set()
        self.before: tuple[int, ...] = ()
        self.source: PageGroup | None = None

    @property
    def group(self) -> PageGroup:
        """Return the group of a modification."""
        assert isinstance(self.event, Modify)
        return self.event.group


class PageOperations(dict[int, PageOperation]):
    """The operations that have not ended, by number."""

    def __init__(self) -> None:
        super().__init__()
        self._touching: dict[Page, tuple[tuple[int, bool], ...]] = {}  # page -> (operation, whether it writes the page)

    def submit(self, operation: PageOperation, written: Sequence[Page], read: Sequence[Page]) -> None:
        """Add an operation, to start after every conflicting one has ended."""
        number = operation.event.number
        self[number] = operation
        for pages, writes in ((written, True), (read, False)):
            for page in pages:
                others = self._touching.get(page, ())
                for other, wrote in others:
                    if (writes or wrote) and other != number and other not in operation.after:
                        operation.after.add(other)
                        self[other].before += (number,)
                self._touching[page] = (*others, (number, writes))

    def end(self, number: int) -> Iterator[int]:
        """Remove an operation, and yield the numbers of operations that waited for it and have not ended."""
        operation = self.pop(number)
        event = operation.event
        for page in (event.page,) if isinstance(event, PageTransfer) else event.group.all:
            others = tuple(touch for touch in self._touching.pop(page, ()) if touch[0] != number)
            if others:
                self._touching[page] = others
        for later in operation.before:
            if later in self:  # else it was a copy from the slot and ended first
                self[later].after.discard(number)
                yield later

    def is_touched(self, page: Page) -> bool:
        return page in self._touching

    def is_written(self, page: Page) -> bool:
        return any(writes for _, writes in self._touching.get(page, ()))

    def only_modification_before(self, number: int) -> PageGroup | None:
        """Return the group that is modified by the only operation that a read of a page waits for; else None."""
        operation = self[number]
        if not isinstance(operation.event, PageTransfer) or operation.event.writes or len(operation.after) != 1:
            return None
        (before,) = (self[number].event for number in operation.after)
        return before.group if isinstance(before, Modify) else None


class OperationQueue:
    """One of the four queues of operations that wait to be started.

    An operation that waits for other operations is only in `members`. `push` adds it to the heap when it waits for
    none.
    """

    def __init__(self) -> None:
        self.members: set[int] = set()
        self._line: list[tuple[tuple[Turn, int], int]] = []

    def push(self, turn: tuple[Turn, int], number: int) -> None:
        heappush(self._line, (turn, number))

    def take(self, start: Callable[[int], Action | None]) -> Action | None:
        """Remove the first operation for which `start` returns an action, and return that action."""
        passed, action = [], None
        while self._line and action is None:
            entry = heappop(self._line)
            if entry[1] in self.members:  # otherwise a duplicate entry of an operation that left
                action = start(entry[1])
                if action is None:
                    passed.append(entry)
                else:
                    self.members.discard(entry[1])
        for entry in passed:
            heappush(self._line, entry)
        return action
