"""The schedule of read-ahead and write-behind, as one pure function: (state, event) -> (state, actions).

Memory has a few **slots**; a **group** of pages sleeps in a store, and wakes in a slot to be changed:

    asleep -> READING -> READY -> WORKING -> WRITING -> asleep

A group is **due** when somebody has asked for its modification. One that is only expected is read ahead and waits,
READY; it is clean, so its slot can be taken back for free. Beside groups there are **transfers**: single pages that
are read or written.

What was asked for is an **operation** until it ends, and operations that touch one page with at least one write keep
the order in which they were asked for. A page that a group is writing back is still in its slot, so a read that comes
next is a copy from there, and the slot stays until it ends. Read-ahead is not asked for: it never starts on a page that
somebody is to write, and a write that is asked for makes what was read ahead of it stale.

Nothing here waits, reads a clock or knows a thread, so every order of events can be searched;
`tests/store/test_schedule.py` does. Each event costs O(awake + due).
"""

from bisect import bisect
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple, TypeVar

from zero.store.base import Page

T = TypeVar("T")

# -- what there is -----------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Pages that one piece of work needs together: one stretch of a unit's master and moments, for example."""

    unit: int
    number: int
    pages: tuple[Page, ...]
    """Read, changed and written back."""
    beside: tuple[Page, ...] = ()
    """Only read, just before the work: never read ahead."""
    out: tuple[Page, ...] = ()
    """Only written, after the work."""

    def __str__(self) -> str:
        return f"group {self.number} of unit {self.unit}"


class Phase(Enum):
    """Where an awake group is on its way through a slot."""

    READING = "reading"
    READY = "ready"
    WORKING = "working"
    WRITING = "writing"
    LEAVING = "leaving"
    """Written; somebody still copies from the slot."""


class Awake(NamedTuple):
    """A group in a slot."""

    slot: int
    phase: Phase
    number: int | None
    """The operation it is awake for; None: read ahead."""
    stale: bool = False
    """Somebody is to write one of its pages while it is being read ahead: drop it when the read ends."""


# -- what happens, and what is to be done ------------------------------------------------------------------------------


class Expect(NamedTuple):
    """These groups will be due, in this order; replaces what was expected before."""

    groups: tuple[Group, ...]


class Due(NamedTuple):
    """A group is to be modified."""

    number: int
    """Of the operation: larger than every earlier one."""
    group: Group
    priority: tuple[int, ...]
    """Smallest first."""
    lent: bool = False
    """The store lends all its pages: no slot, no read, no write."""


class Asked(NamedTuple):
    """A page is to be read or written."""

    number: int
    page: Page
    writes: bool
    here: bool = False
    """If it can start at once, then in the asking thread: it takes no worker."""


class Read(NamedTuple):
    """Bring the group's `pages` into the slot."""

    group: Group
    slot: int


class Work(NamedTuple):
    """Read what is `beside`, then do the work. Without a slot: on the lent pages."""

    number: int
    group: Group
    slot: int | None


class Write(NamedTuple):
    """Write `pages` and `out` back. The worker that did the work goes on with it."""

    number: int
    group: Group
    slot: int


class Move(NamedTuple):
    """Carry out a transfer."""

    number: int
    page: Page
    writes: bool


class Copy(NamedTuple):
    """Carry out a read from the slot that the page is being written from."""

    number: int
    page: Page
    group: Group
    slot: int


Action = Read | Work | Write | Move | Copy


class Finished(NamedTuple):
    """An action has ended well."""

    action: Action


Event = Expect | Due | Asked | Finished


# -- the state ---------------------------------------------------------------------------------------------------------


class Operation(NamedTuple):
    """What was asked for and has not ended."""

    event: Due | Asked
    touched: frozenset[Page]
    written: frozenset[Page]
    after: frozenset[int]
    """Earlier operations that must end before this one starts."""


Turn = tuple[tuple[int, ...], int]
"""Priority and number of a due group: what sorts first goes first."""


class State(NamedTuple):
    """Everything the schedule knows. A value: the mappings are replaced, never changed."""

    workers: int
    read_ahead: int
    free: tuple[int, ...]
    """Slots that nobody has, in order."""
    expected: tuple[Group, ...]
    awake: Mapping[Group, Awake]
    asked: Mapping[int, Operation]
    """By number, so in the order of asking."""
    asleep: tuple[Turn, ...]
    """Due groups that need a slot and a read."""
    ready: tuple[Turn, ...]
    """Due groups whose pages are in a slot, or lent."""
    queued: tuple[int, ...]
    """Transfers that have not started."""
    running: frozenset[Action]
    """What workers do now."""

    @property
    def is_quiet(self) -> bool:
        """Nothing is due, queued or under way; groups that were read ahead may lie READY."""
        return not self.asked and not self.running


def start(*, slots: int, workers: int, read_ahead: int) -> State:
    """Nothing asked for yet.

    Args:
        slots: how many groups fit in memory.
        workers: most actions under way at once.
        read_ahead: most groups in slots that are not due.
    """
    return State(workers, read_ahead, tuple(range(slots)), (), {}, {}, (), (), (), frozenset())


def advance(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Take in one event; returns the actions to start now, in order of urgency."""
    actions: tuple[Action, ...] = ()
    match event:
        case Expect(groups):
            state = _expect(state, groups)
        case Due():
            state = _due(state, event)
        case Asked():
            state, actions = _asked(state, event)
        case Finished(action):
            state, actions = _finished(state, action)
    return _start(state, actions)


# -- events ------------------------------------------------------------------------------------------------------------


def _expect(state: State, groups: tuple[Group, ...]) -> State:
    state = state._replace(expected=tuple(dict.fromkeys(groups)))
    dropped = _read_ahead_of(state) - set(state.expected)
    return _release(state, dropped) if dropped else state


def _due(state: State, event: Due) -> State:
    group, turn = event.group, (event.priority, event.number)
    written = frozenset(group.pages + group.out)
    state = _enter(state, event, written.union(group.beside), written)
    state = state._replace(expected=_without(state.expected, group))
    held = state.awake.get(group)
    if event.lent:
        return state._replace(ready=_with(state.ready, turn))
    if held is None or held.number is not None or held.stale:
        return state._replace(asleep=_with(state.asleep, turn))
    state = _hold(state, group, held._replace(number=event.number))
    return state._replace(ready=_with(state.ready, turn)) if held.phase is Phase.READY else state


def _asked(state: State, event: Asked) -> tuple[State, tuple[Action, ...]]:
    touched = frozenset((event.page,))
    state = _enter(state, event, touched, touched if event.writes else frozenset())
    if event.here and _can_start(state, event.number):
        return state, (_plain(event),)
    return state._replace(queued=(*state.queued, event.number)), ()


def _enter(state: State, event: Due | Asked, touched: frozenset[Page], written: frozenset[Page]) -> State:
    """Queue up behind every conflicting operation, and drop what was read ahead of a write."""
    after = [
        number
        for number, (_, touched_too, written_too, _) in state.asked.items()
        if not touched.isdisjoint(touched_too)
        and not (written.isdisjoint(touched_too) and touched.isdisjoint(written_too))
    ]
    state = state._replace(asked={**state.asked, event.number: Operation(event, touched, written, frozenset(after))})
    own = event.group if isinstance(event, Due) else None
    for group, held in state.awake.items():
        if held.number is None and group != own and not written.isdisjoint(group.pages):
            reading = held.phase is Phase.READING
            state = _hold(state, group, held._replace(stale=True)) if reading else _release(state, {group})
    return state


def _finished(state: State, action: Action) -> tuple[State, tuple[Action, ...]]:
    state = state._replace(running=state.running - {action})
    match action:
        case Read(group):
            return _arrived(state, group), ()
        case Work(number, group, int(slot)):
            write = Write(number, group, slot)
            state = _hold(state, group, state.awake[group]._replace(phase=Phase.WRITING))
            return state._replace(running=state.running | {write}), (write,)
        case Write(number, group, slot):
            held = state.awake[group]._replace(phase=Phase.LEAVING)
            return _end(_left(_hold(state, group, held), group), number), ()
        case Copy(number, _, group):
            return _end(_left(state, group), number), ()
    return _end(state, action.number), ()


def _left(state: State, group: Group) -> State:
    """Free the slot of a group that is written, unless somebody still copies from it."""
    held = state.awake[group]
    copied = any(isinstance(action, Copy) and action.slot == held.slot for action in state.running)
    return state if copied or held.phase is not Phase.LEAVING else _release(state, {group})


def _arrived(state: State, group: Group) -> State:
    held = state.awake[group]
    if held.stale or (held.number is None and group not in state.expected):
        return _release(state, {group})
    state = _hold(state, group, held._replace(phase=Phase.READY))
    if held.number is None:
        return state
    return state._replace(ready=_with(state.ready, _turn(state, held.number)))


# -- what to start when a worker is free, the most urgent first --------------------------------------------------------


def _start(state: State, actions: tuple[Action, ...]) -> tuple[State, tuple[Action, ...]]:
    for _ in range(state.workers - len(state.running)):
        state, action = (
            _next_move(state) or _next_work(state) or _next_read(state) or _next_ahead(state) or (state, None)
        )
        if action is None:
            break
        state = state._replace(running=state.running | {action})
        actions = (*actions, action)
    return state, actions


def _next_move(state: State) -> tuple[State, Action] | None:
    for number in state.queued:
        event = state.asked[number].event
        assert isinstance(event, Asked)
        action = _plain(event) if _can_start(state, number) else _copy(state, event)
        if action is not None:
            return state._replace(queued=_without(state.queued, number)), action
    return None


def _next_work(state: State) -> tuple[State, Action] | None:
    number = _first(state, (number for _, number in state.ready))
    if number is None:
        return None
    due = _due_event(state, number)
    state = state._replace(ready=_without(state.ready, _turn(state, number)))
    if due.lent:
        return state, Work(number, due.group, None)
    held = state.awake[due.group]
    return _hold(state, due.group, held._replace(phase=Phase.WORKING)), Work(number, due.group, held.slot)


def _next_read(state: State) -> tuple[State, Action] | None:
    number = _first(state, (number for _, number in state.asleep))
    if number is None:
        return None
    state = state if state.free else _give_up_one(state)
    if not state.free:
        return None
    state = state._replace(asleep=_without(state.asleep, _turn(state, number)))
    return _read(state, _due_event(state, number).group, number)


def _next_ahead(state: State) -> tuple[State, Action] | None:
    if not state.free or sum(held.number is None for held in state.awake.values()) >= state.read_ahead:
        return None
    group = next((group for group in state.expected if group not in state.awake), None)
    if group is None:
        return None
    pages = frozenset(group.pages)
    if any(not pages.isdisjoint(written) for _, _, written, _ in state.asked.values()):
        return None  # the ones after it wait as well: they are needed later
    return _read(state, group, None)


def _give_up_one(state: State) -> State:
    """Free a slot whose group is clean: the one read ahead that is needed last.

    If there is none, nothing runs and yet a due group cannot start, then all slots are held by due groups that were
    read ahead and must come after it: one of them goes back to sleep.
    """
    ahead = _read_ahead_of(state)
    if ahead:
        return _release(state, {max(ahead, key=state.expected.index)})
    held = [turn for turn in state.ready if not _due_event(state, turn[1]).lent]
    if state.running or not held:
        return state
    state = state._replace(ready=_without(state.ready, held[-1]), asleep=_with(state.asleep, held[-1]))
    return _release(state, {_due_event(state, held[-1][1]).group})


# -- small moves -------------------------------------------------------------------------------------------------------


def _can_start(state: State, number: int) -> bool:
    """Every earlier conflicting operation has ended, and nothing that is being read ahead would be overwritten."""
    _, _, written, after = state.asked[number]
    return state.asked.keys().isdisjoint(after) and not any(
        isinstance(action, Read) and not written.isdisjoint(action.group.pages) for action in state.running
    )


def _plain(event: Asked) -> Move:
    return Move(event.number, event.page, event.writes)


def _copy(state: State, event: Asked) -> Copy | None:
    """The read as a copy from a slot, if all that it waits for is that its page is written from there."""
    before = [state.asked[number].event for number in state.asked[event.number].after if number in state.asked]
    if event.writes or len(before) != 1 or not isinstance(before[0], Due):
        return None
    held = state.awake.get(before[0].group)
    if held is None or held.phase is not Phase.WRITING:
        return None
    return Copy(event.number, event.page, before[0].group, held.slot)


def _first(state: State, numbers: Iterable[int]) -> int | None:
    return next((number for number in numbers if _can_start(state, number)), None)


def _read(state: State, group: Group, number: int | None) -> tuple[State, Action]:
    slot, *free = state.free
    state = _hold(state._replace(free=tuple(free)), group, Awake(slot, Phase.READING, number))
    return state, Read(group, slot)


def _hold(state: State, group: Group, held: Awake) -> State:
    return state._replace(awake={**state.awake, group: held})


def _release(state: State, groups: set[Group]) -> State:
    awake = {group: held for group, held in state.awake.items() if group not in groups}
    free = sorted([*state.free, *(state.awake[group].slot for group in groups)])
    return state._replace(awake=awake, free=tuple(free))


def _end(state: State, number: int) -> State:
    asked = dict(state.asked)
    del asked[number]
    return state._replace(asked=asked)


def _read_ahead_of(state: State) -> set[Group]:
    """The groups that lie READY and are not due."""
    return {group for group, held in state.awake.items() if held.number is None and held.phase is Phase.READY}


def _due_event(state: State, number: int) -> Due:
    event = state.asked[number].event
    assert isinstance(event, Due)
    return event


def _turn(state: State, number: int) -> Turn:
    return _due_event(state, number).priority, number


def _with(turns: tuple[Turn, ...], turn: Turn) -> tuple[Turn, ...]:
    place = bisect(turns, turn)
    return (*turns[:place], turn, *turns[place:])


def _without(items: tuple[T, ...], item: T) -> tuple[T, ...]:
    if item not in items:
        return items
    place = items.index(item)
    return items[:place] + items[place + 1 :]
