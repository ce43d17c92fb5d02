"""The scheduler of read-ahead and write-behind, with indexes so that its cost hardly grows with the number of groups.

`tests/store/specification.py` defines the right decisions as a pure function, and tests check it for every order of
events. That function examines everything at each event. Here operations are indexed by page, those that can start are
in a heap ordered by turn, and the others know which operations they wait for, so an event costs O(log operations).
`tests/store/test_indexed_schedule.py` compares the two.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from zero.store.base import Page
from zero.store.events import (
    Action,
    Copy,
    Event,
    Expect,
    Finished,
    GroupPhase,
    Modify,
    Move,
    PageGroup,
    Read,
    Transfer,
    Work,
    Write,
)

Turn = tuple[int, ...]


class _Operation:
    """A modification or a transfer that has not ended.

    Attributes:
        turn: sort key; of the operations that can start, the one with the smallest turn starts first.
        after: numbers of earlier operations that must end before this one starts.
        before: numbers of later operations that have this one in their `after`.
        source: the group from whose slot a read is copied once a worker is free; the group's write may have ended by
            then.
    """

    __slots__ = ("after", "before", "event", "source", "turn")

    def __init__(self, event: Modify | Transfer, turn: tuple[Turn, int]) -> None:
        self.event, self.turn = event, turn
        self.after: set[int] = set()
        self.before: tuple[int, ...] = ()
        self.source: PageGroup | None = None


class _Held:
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


class _Queue:
    """Operations in one of the four queues where they wait to be started.

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


class Schedule:
    """The state of the scheduler and its decisions. It is the specification's `State`, but changed in place.

    Args:
        slots: the number of groups that fit in memory.
        workers: the most actions in progress at once.
        read_ahead: the most groups in slots that no operation needs yet.

    Attributes:
        running: the actions in progress.
    """

    def __init__(self, *, slots: int, workers: int, read_ahead: int) -> None:
        self._workers, self._ahead_limit = workers, read_ahead
        self._free = list(range(slots))
        self._expected: dict[PageGroup, int] = {}  # group -> its position
        self._loaded: dict[PageGroup, _Held] = {}
        self._ahead: dict[PageGroup, _Held] = {}  # the loaded groups that were read ahead
        self._ahead_with: dict[Page, list[PageGroup]] = {}
        self._operations: dict[int, _Operation] = {}
        self._touching: dict[Page, tuple[tuple[int, bool], ...]] = {}  # page -> (operation, whether it writes the page)
        self._unloaded, self._ready, self._dirty, self._queued = _Queue(), _Queue(), _Queue(), _Queue()
        self.running: set[Action] = set()

    @property
    def is_quiet(self) -> bool:
        """Return whether no operation is queued or in progress; groups that were read ahead may be in slots."""
        return not self._operations and not self.running

    def advance(self, event: Event) -> list[Action]:
        """Process one event and return the actions to start now, in order of urgency."""
        actions: list[Action] = []
        match event:
            case Expect(groups):
                self._expect(groups)
            case Modify():
                self._modify(event)
            case Transfer():
                self._transfer(event, actions)
            case Finished(action):
                self._finished(action)
        for _ in range(self._workers - len(self.running)):
            following = self._queued.take(self._move) or self._ready.take(self._work) or self._next_read_or_write()
            if following is None:
                break
            self.running.add(following)
            actions.append(following)
        return actions

    def would_start(self, event: Transfer) -> bool:
        """Return whether `event`, submitted with `here`, would start at once."""
        if event.writes:
            return event.page not in self._touching and not self._is_being_read(event.page)
        return not self._is_written(event.page)

    # -- events --------------------------------------------------------------------------------------------------------

    def _expect(self, groups: Iterable[PageGroup]) -> None:
        self._expected = {group: place for place, group in enumerate(dict.fromkeys(groups))}
        for group, held in [*self._ahead.items()]:
            if held.phase is GroupPhase.READY and group not in self._expected:
                self._release(group)

    def _modify(self, event: Modify) -> None:
        group, number = event.group, event.number
        self._enter(_Operation(event, (event.priority, number)), group.pages + group.out, group.beside)
        self._expected.pop(group, None)
        if event.in_place:
            self._wait_in(self._ready, number)
            return
        held = self._loaded.get(group)
        if held is None or held.number is not None or held.stale:
            self._wait_in(self._unloaded, number)
            return
        self._forget_ahead(group)
        held.number = number
        if held.phase is GroupPhase.READY:
            self._wait_in(self._ready, number)

    def _transfer(self, event: Transfer, actions: list[Action]) -> None:
        operation, pages = _Operation(event, ((), event.number)), (event.page,)
        self._enter(operation, *((pages, ()) if event.writes else ((), pages)))
        if event.here and self._can_start(event.number):
            actions.append(Move(event.number, event.page, event.writes))
        else:
            self._wait_in(self._queued, event.number)

    def _enter(self, operation: _Operation, written: Sequence[Page], read: Sequence[Page]) -> None:
        """Add an operation behind every conflicting one, and drop read-ahead groups with pages that it writes."""
        event, number = operation.event, operation.event.number
        self._operations[number] = operation
        for pages, writes in ((written, True), (read, False)):
            for page in pages:
                others = self._touching.get(page, ())
                for other, wrote in others:
                    if (writes or wrote) and other != number and other not in operation.after:
                        operation.after.add(other)
                        self._operations[other].before += (number,)
                self._touching[page] = (*others, (number, writes))
        modified = event.group if isinstance(event, Modify) else None
        for page in written:
            for group in [group for group in self._ahead_with.get(page, ()) if group != modified]:
                if self._ahead[group].phase is GroupPhase.READING:
                    self._ahead[group].stale = True
                else:
                    self._release(group)

    def _finished(self, action: Action) -> None:
        self.running.discard(action)
        match action:
            case Read(group):
                self._arrived(group)
            case Work(number, group, int(_)):
                self._loaded[group].phase = GroupPhase.DIRTY
                self._operations[number].turn = (), number  # a write of an earlier step comes first
                self._wait_in(self._dirty, number)
                for later in self._operations[number].before:
                    if later in self._operations:
                        self._may_copy(later)
            case Write(number, group):
                self._loaded[group].phase = GroupPhase.LEAVING
                self._leave(group)
                self._end(number)
            case Copy(number, _, group):
                self._loaded[group].readers -= 1
                self._leave(group)
                self._end(number)
            case _:
                self._end(action.number)

    def _arrived(self, group: PageGroup) -> None:
        held = self._loaded[group]
        if held.stale or (held.number is None and group not in self._expected):
            self._release(group)
            return
        held.phase = GroupPhase.READY
        if held.number is not None:
            self._wait_in(self._ready, held.number)

    def _leave(self, group: PageGroup) -> None:
        """Free the slot of a group that is written, unless a read still copies from it, or will."""
        held = self._loaded[group]
        if not held.readers and held.phase is GroupPhase.LEAVING:
            self._release(group)

    def _end(self, number: int) -> None:
        operation = self._operations.pop(number)
        event = operation.event
        for page in (event.page,) if isinstance(event, Transfer) else event.group.all:
            others = tuple(touch for touch in self._touching.pop(page, ()) if touch[0] != number)
            if others:
                self._touching[page] = others
        for later in operation.before:
            if later not in self._operations:  # `later` was a copy from the slot and ended first
                continue
            self._operations[later].after.discard(number)
            if self._operations[later].after:
                self._may_copy(later)
                continue
            for queue in (self._unloaded, self._ready, self._queued):
                if later in queue.members:
                    queue.push(self._operations[later].turn, later)

    # -- actions to start when a worker is free, the most urgent first -------------------------------------------------

    def _move(self, number: int) -> Action | None:
        event, source = self._operations[number].event, self._operations[number].source
        assert isinstance(event, Transfer)
        if source is not None:
            return Copy(number, event.page, source, self._loaded[source].slot)
        return Move(number, event.page, event.writes) if self._can_start(number) else None

    def _work(self, number: int) -> Action | None:
        if not self._can_start(number):
            return None
        event = self._modify_of(number)
        if event.in_place:
            return Work(number, event.group, None)
        held = self._loaded[event.group]
        held.phase = GroupPhase.WORKING
        return Work(number, event.group, held.slot)

    def _next_read_or_write(self) -> Action | None:
        """Return a read or a write of a group: the way that fewer running actions go, or a read if they are equal."""
        reads = sum(isinstance(action, Read) for action in self.running)
        writes = sum(isinstance(action, Write) for action in self.running)
        if reads <= writes:
            return self._next_read() or self._next_ahead() or self._dirty.take(self._write)
        return self._dirty.take(self._write) or self._next_read() or self._next_ahead()

    def _write(self, number: int) -> Action:
        group = self._modify_of(number).group
        self._loaded[group].phase = GroupPhase.WRITING
        return Write(number, group, self._loaded[group].slot)

    def _next_read(self) -> Action | None:
        return self._unloaded.take(self._load) if self._unloaded.members and self._has_slot() else None

    def _load(self, number: int) -> Action | None:
        group = self._modify_of(number).group
        if group in self._loaded or not self._can_start(number):
            return None
        if not self._free:
            self._give_up_one()
        return self._read(group, number)

    def _next_ahead(self) -> Action | None:
        if not self._free or len(self._ahead) >= self._ahead_limit:
            return None
        group = next((group for group in self._expected if group not in self._loaded), None)
        if group is None or any(self._is_written(page) for page in group.pages):
            return None  # the groups after one that an operation writes are needed later, so they wait as well
        return self._read(group, None)

    def _has_slot(self) -> bool:
        """Return whether a slot is free, or `_give_up_one` can free one."""
        if self._free or any(held.phase is GroupPhase.READY for held in self._ahead.values()):
            return True
        if self.running or self._dirty.members:
            return False
        return any(held.number in self._ready.members for held in self._loaded.values())

    def _give_up_one(self) -> None:
        """Free the slot of the group read ahead, in phase READY, that is needed last.

        If there is none, all slots hold groups that were read ahead and whose own modifications must come after the
        next modification, which cannot start without a slot. Then the one of these groups whose turn is last is
        unloaded again.
        """
        ahead = [group for group, held in self._ahead.items() if held.phase is GroupPhase.READY]
        if ahead:
            self._release(max(ahead, key=self._expected.__getitem__))
            return
        held = (held.number for held in self._loaded.values() if held.number in self._ready.members)
        _, number = max(self._operations[number].turn for number in held if number is not None)
        self._ready.members.discard(number)
        self._wait_in(self._unloaded, number)
        self._release(self._modify_of(number).group)

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def _wait_in(self, queue: _Queue, number: int) -> None:
        queue.members.add(number)
        operation = self._operations[number]
        if not operation.after:
            queue.push(operation.turn, number)
        elif queue is self._queued:
            self._may_copy(number)

    def _may_copy(self, number: int) -> None:
        """Queue a read that waits only for a write from a slot, to be copied from that slot.

        The slot stays until the read ends.
        """
        operation = self._operations[number]
        if number in self._queued.members and operation.source is None:
            operation.source = self._written_by(number)
            if operation.source is not None:
                self._loaded[operation.source].readers += 1
                self._queued.push(operation.turn, number)

    def _written_by(self, number: int) -> PageGroup | None:
        """Return the group from whose slot a read can be copied: it waits only for that group's write. Else None."""
        operation = self._operations[number]
        if not isinstance(operation.event, Transfer) or operation.event.writes or len(operation.after) != 1:
            return None
        (before,) = (self._operations[number].event for number in operation.after)
        if not isinstance(before, Modify):
            return None
        held = self._loaded.get(before.group)
        return before.group if held is not None and held.phase in (GroupPhase.DIRTY, GroupPhase.WRITING) else None

    def _can_start(self, number: int) -> bool:
        """Return whether all conflicting operations have ended and no page that this one writes is being read ahead."""
        operation = self._operations[number]
        if operation.after:
            return False
        event = operation.event
        if isinstance(event, Modify):
            return not any(map(self._is_being_read, event.group.pages + event.group.out))
        return not (event.writes and self._is_being_read(event.page))

    def _is_written(self, page: Page) -> bool:
        return any(writes for _, writes in self._touching.get(page, ()))

    def _is_being_read(self, page: Page) -> bool:
        return any(isinstance(action, Read) and page in action.group.pages for action in self.running)

    def _modify_of(self, number: int) -> Modify:
        event = self._operations[number].event
        assert isinstance(event, Modify)
        return event

    def _read(self, group: PageGroup, number: int | None) -> Action:
        held = self._loaded[group] = _Held(heappop(self._free), number)
        if number is None:
            self._ahead[group] = held
            for page in group.pages:
                self._ahead_with.setdefault(page, []).append(group)
        return Read(group, held.slot)

    def _release(self, group: PageGroup) -> None:
        self._forget_ahead(group)
        heappush(self._free, self._loaded.pop(group).slot)

    def _forget_ahead(self, group: PageGroup) -> None:
        if self._ahead.pop(group, None) is not None:
            for page in group.pages:
                self._ahead_with[page].remove(group)
                if not self._ahead_with[page]:
                    del self._ahead_with[page]
