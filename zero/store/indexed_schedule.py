"""The scheduler of read-ahead and write-behind, with indexes so that its cost hardly grows with the number of groups.

`tests/store/specification.py` defines the right decisions as a pure function, and tests check it for every order of
events. That function examines everything at each event. Here operations are indexed by page. Operations that can start
are in a heap ordered by turn, and the others know which operations they wait for, so an event costs O(log operations).
`tests/store/test_indexed_schedule.py` compares the two.
"""

from zero.store.base import Page
from zero.store.events import (
    Action,
    Copy,
    Expect,
    Finished,
    GroupPhase,
    Modify,
    Move,
    PageTransfer,
    Read,
    StoreEvent,
    Work,
    Write,
)
from zero.store.loaded_groups import LoadedGroups
from zero.store.page_operations import OperationQueue, PageOperation, PageOperations


class IndexedSchedule:
    """The state of the scheduler and its decisions. It is the specification's `State`, but changed in place.

    Args:
        slots: the number of groups that fit in memory.
        workers: the most actions in progress at once.
        read_ahead: the most groups in slots that no operation needs yet.

    Attributes:
        running: the actions in progress.
    """

    def __init__(self, *, slots: int, workers: int, read_ahead: int) -> None:
        self._workers = workers
        self._loaded, self._operations = LoadedGroups(slots, read_ahead), PageOperations()
        self._unloaded, self._ready, self._dirty, self._queued = (OperationQueue() for _ in range(4))
        self.running: set[Action] = set()

    @property
    def is_quiet(self) -> bool:
        """Return whether no operation is queued or in progress; groups that were read ahead may be in slots."""
        return not self._operations and not self.running

    def advance(self, event: StoreEvent) -> list[Action]:
        """Process one event and return the actions to start now, in order of urgency."""
        actions: list[Action] = []
        match event:
            case Expect(groups):
                self._loaded.expect(groups)
            case Modify():
                self._modify(event)
            case PageTransfer():
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

    def would_start(self, event: PageTransfer) -> bool:
        """Return whether `event`, submitted with `here`, would start at once."""
        if event.writes:
            return not self._operations.is_touched(event.page) and not self._is_being_read(event.page)
        return not self._operations.is_written(event.page)

    # -- events --------------------------------------------------------------------------------------------------------

    def _modify(self, event: Modify) -> None:
        group, number = event.group, event.number
        written = group.pages + group.out
        self._operations.submit(PageOperation(event, (event.priority, number)), written, group.beside)
        self._loaded.outdate(written, group)
        if event.in_place:
            self._wait_in(self._ready, number)
            return
        held = self._loaded.claim(group, number)
        if held is None:
            self._wait_in(self._unloaded, number)
        elif held.phase is GroupPhase.READY:
            self._wait_in(self._ready, number)

    def _transfer(self, event: PageTransfer, actions: list[Action]) -> None:
        written, read = ((event.page,), ()) if event.writes else ((), (event.page,))
        self._operations.submit(PageOperation(event, ((), event.number)), written, read)
        self._loaded.outdate(written, None)
        if event.here and self._can_start(event.number):
            actions.append(Move(event.number, event.page, event.writes))
        else:
            self._wait_in(self._queued, event.number)

    def _finished(self, action: Action) -> None:
        self.running.discard(action)
        match action:
            case Read(group):
                loaded_for = self._loaded.arrived(group)
                if loaded_for is not None:
                    self._wait_in(self._ready, loaded_for)
            case Work(number, group, int(_)):
                self._loaded[group].phase = GroupPhase.DIRTY
                self._operations[number].turn = (), number  # a write of an earlier step comes first
                self._wait_in(self._dirty, number)
                for later in self._operations[number].before:
                    if later in self._operations:
                        self._may_copy(later)
            case Write(number, group):
                self._loaded[group].phase = GroupPhase.LEAVING
                self._loaded.release_if_written(group)
                self._end(number)
            case Copy(number, _, group):
                self._loaded[group].readers -= 1
                self._loaded.release_if_written(group)
                self._end(number)
            case _:
                self._end(action.number)

    def _end(self, number: int) -> None:
        for later in self._operations.end(number):
            if self._operations[later].after:
                self._may_copy(later)
                continue
            for queue in (self._unloaded, self._ready, self._queued):
                if later in queue.members:
                    queue.push(self._operations[later].turn, later)

    # -- actions to start when a worker is free, the most urgent first -------------------------------------------------

    def _move(self, number: int) -> Action | None:
        event, source = self._operations[number].event, self._operations[number].source
        assert isinstance(event, PageTransfer)
        if source is not None:
            return Copy(number, event.page, source, self._loaded[source].slot)
        return Move(number, event.page, event.writes) if self._can_start(number) else None

    def _work(self, number: int) -> Action | None:
        if not self._can_start(number):
            return None
        event = self._operations[number].event
        assert isinstance(event, Modify)
        if event.in_place:
            return Work(number, event.group, None)
        held = self._loaded[event.group]
        held.phase = GroupPhase.WORKING
        return Work(number, event.group, held.slot)

    def _next_read_or_write(self) -> Action | None:
        """Return a read or a write of a group: the kind with fewer running actions, or a read if they are equal."""
        reads = sum(isinstance(action, Read) for action in self.running)
        writes = sum(isinstance(action, Write) for action in self.running)
        if reads <= writes:
            return self._next_read() or self._dirty.take(self._write)
        return self._dirty.take(self._write) or self._next_read()

    def _write(self, number: int) -> Action:
        group = self._operations[number].group
        self._loaded[group].phase = GroupPhase.WRITING
        return Write(number, group, self._loaded[group].slot)

    def _next_read(self) -> Action | None:
        """Return the read of a group for an operation, else the read of an announced group."""
        needed = self._unloaded.take(self._load) if self._unloaded.members and self._has_slot() else None
        return needed or self._loaded.next_ahead(self._operations.is_written)

    def _load(self, number: int) -> Action | None:
        group = self._operations[number].group
        if group in self._loaded or not self._can_start(number):
            return None
        if not self._loaded.free:
            self._give_up_one()
        return self._loaded.read(group, number)

    def _has_slot(self) -> bool:
        """Return whether a slot is free, or `_give_up_one` can free one."""
        if self._loaded.free or self._loaded.ready_ahead():
            return True
        if self.running or self._dirty.members:
            return False
        return any(held.number in self._ready.members for held in self._loaded.values())

    def _give_up_one(self) -> None:
        """Free the slot of the group read ahead, in phase READY, that is needed last.

        If there is none, all slots hold groups that were read ahead and whose own modifications must come after the
        next modification, which cannot start without a slot. Then the group whose turn is last of these is unloaded
        again.
        """
        if self._loaded.release_last_ahead():
            return
        held = (held.number for held in self._loaded.values() if held.number in self._ready.members)
        _, number = max(self._operations[number].turn for number in held if number is not None)
        self._ready.members.discard(number)
        self._wait_in(self._unloaded, number)
        self._loaded.release(self._operations[number].group)

    # -- what an operation waits for -----------------------------------------------------------------------------------

    def _wait_in(self, queue: OperationQueue, number: int) -> None:
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
        if number not in self._queued.members or operation.source is not None:
            return
        group = self._operations.only_modification_before(number)
        held = None if group is None else self._loaded.get(group)
        if held is not None and held.phase in (GroupPhase.DIRTY, GroupPhase.WRITING):
            operation.source = group
            held.readers += 1
            self._queued.push(operation.turn, number)

    def _can_start(self, number: int) -> bool:
        """Return whether all conflicting operations have ended and no page that it writes is being read ahead."""
        operation = self._operations[number]
        if operation.after:
            return False
        event = operation.event
        if isinstance(event, Modify):
            return not any(map(self._is_being_read, event.group.pages + event.group.out))
        return not (event.writes and self._is_being_read(event.page))

    def _is_being_read(self, page: Page) -> bool:
        return any(isinstance(action, Read) and page in action.group.pages for action in self.running)
