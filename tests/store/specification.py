"""The schedule of the store as one pure function: (state, event) -> (state, actions).

`zero.store.events` has the words. This defines what is right: it is searched in every order of events, and the
schedule that the store runs, `zero.store.indexed_schedule`, takes the same actions. Each event costs
O(loaded groups + operations).
"""

from bisect import bisect
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from zero.store.base import Page
from zero.store.events import (
    Action,
    Copy,
    Expect,
    Finished,
    GroupPhase,
    Modify,
    Move,
    PageGroup,
    PageTransfer,
    Read,
    StoreEvent,
    Work,
    Write,
)

T = TypeVar("T")

# -- the state ---------------------------------------------------------------------------------------------------------


class Loaded(NamedTuple):
    """A group in a slot."""

    slot: int
    phase: GroupPhase
    number: int | None
    """The operation it is loaded for; None: read ahead."""
    stale: bool = False
    """Somebody is to write one of its pages while it is being read ahead: drop it when the read ends."""
    waiting: frozenset[int] = frozenset()
    """Once it is written: reads that had waited for that alone, and are to copy from the slot."""


class Operation(NamedTuple):
    """A modification or a transfer that has not ended."""

    event: Modify | PageTransfer
    touched: frozenset[Page]
    written: frozenset[Page]
    after: frozenset[int]
    """Earlier operations that must end before this one starts."""


Turn = tuple[tuple[int, ...], int]
"""Priority and number of a modification: what sorts first goes first."""


class State(NamedTuple):
    """Everything the schedule knows. A value: the mappings are replaced, never changed."""

    workers: int
    read_ahead: int
    free: tuple[int, ...]
    """Slots that nobody has, in order."""
    expected: tuple[PageGroup, ...]
    loaded: Mapping[PageGroup, Loaded]
    operations: Mapping[int, Operation]
    """By number, so in the order of submission."""
    unloaded: tuple[Turn, ...]
    """Modifications whose groups need a slot and a read."""
    ready: tuple[Turn, ...]
    """Modifications whose pages are in a slot, or in place."""
    dirty: tuple[int, ...]
    """Modifications whose work has ended, and whose pages are still to be written, in the order of submission."""
    queued: tuple[int, ...]
    """Transfers that have not started."""
    running: frozenset[Action]
    """The actions that workers do now."""

    @property
    def is_quiet(self) -> bool:
        """No operation is queued or under way; groups that were read ahead may lie READY."""
        return not self.operations and not self.running


def start(*, slots: int, workers: int, read_ahead: int) -> State:
    """No operation yet.

    Args:
        slots: how many groups fit in memory.
        workers: most actions under way at once.
        read_ahead: most groups in slots that no operation needs yet.
    """
    return State(workers, read_ahead, tuple(range(slots)), (), {}, {}, (), (), (), (), frozenset())


def advance(state: State, event: StoreEvent) -> tuple[State, tuple[Action, ...]]:
    """Take in one event; returns the actions to start now, in order of urgency."""
    actions: tuple[Action, ...] = ()
    match event:
        case Expect(groups):
            state = _expect(state, groups)
        case Modify():
            state = _modify(state, event)
        case PageTransfer():
            state, actions = _transfer(state, event)
        case Finished(action):
            state, actions = _finished(state, action)
    return _start(state, actions)


# -- events ------------------------------------------------------------------------------------------------------------


def _expect(state: State, groups: tuple[PageGroup, ...]) -> State:
    state = state._replace(expected=tuple(dict.fromkeys(groups)))
    dropped = _read_ahead_of(state) - set(state.expected)
    return _release(state, dropped) if dropped else state


def _modify(state: State, event: Modify) -> State:
    group, turn = event.group, (event.priority, event.number)
    written = frozenset(group.pages + group.out)
    state = _enter(state, event, written.union(group.beside), written)
    state = state._replace(expected=_without(state.expected, group))
    held = state.loaded.get(group)
    if event.in_place:
        return state._replace(ready=_with(state.ready, turn))
    if held is None or held.number is not None or held.stale:
        return state._replace(unloaded=_with(state.unloaded, turn))
    state = _hold(state, group, held._replace(number=event.number))
    return state._replace(ready=_with(state.ready, turn)) if held.phase is GroupPhase.READY else state


def _transfer(state: State, event: PageTransfer) -> tuple[State, tuple[Action, ...]]:
    touched = frozenset((event.page,))
    state = _enter(state, event, touched, touched if event.writes else frozenset())
    if event.here and _can_start(state, event.number):
        return state, (_plain(event),)
    return state._replace(queued=(*state.queued, event.number)), ()


def _enter(state: State, event: Modify | PageTransfer, touched: frozenset[Page], written: frozenset[Page]) -> State:
    """Queue up behind every conflicting operation, and drop what was read ahead of a write."""
    after = [
        number
        for number, (_, touched_too, written_too, _) in state.operations.items()
        if not touched.isdisjoint(touched_too)
        and not (written.isdisjoint(touched_too) and touched.isdisjoint(written_too))
    ]
    state = state._replace(
        operations={**state.operations, event.number: Operation(event, touched, written, frozenset(after))}
    )
    own = event.group if isinstance(event, Modify) else None
    for group, held in state.loaded.items():
        if held.number is None and group != own and not written.isdisjoint(group.pages):
            reading = held.phase is GroupPhase.READING
            state = _hold(state, group, held._replace(stale=True)) if reading else _release(state, {group})
    return state


def _finished(state: State, action: Action) -> tuple[State, tuple[Action, ...]]:
    state = state._replace(running=state.running - {action})
    match action:
        case Read(group):
            return _arrived(state, group), ()
        case Work(number, group, int(_)):
            state = _hold(state, group, state.loaded[group]._replace(phase=GroupPhase.DIRTY))
            return state._replace(dirty=tuple(sorted((*state.dirty, number)))), ()
        case Write(number, group):
            copies = {
                queued_number: _copy(state, _transfer_event(state, queued_number)) for queued_number in state.queued
            }
            waiting = frozenset(
                queued_number for queued_number, copy in copies.items() if copy is not None and copy.group == group
            )
            held = state.loaded[group]._replace(phase=GroupPhase.LEAVING, waiting=waiting)
            return _end(_left(_hold(state, group, held), group), number), ()
        case Copy(number, _, group):
            return _end(_left(state, group), number), ()
    return _end(state, action.number), ()


def _left(state: State, group: PageGroup) -> State:
    """Free the slot of a group that is written, unless somebody still copies from it, or is to."""
    held = state.loaded[group]
    copied = any(isinstance(action, Copy) and action.slot == held.slot for action in state.running)
    wanted = not held.waiting.isdisjoint(state.queued)
    return state if copied or wanted or held.phase is not GroupPhase.LEAVING else _release(state, {group})


def _arrived(state: State, group: PageGroup) -> State:
    held = state.loaded[group]
    if held.stale or (held.number is None and group not in state.expected):
        return _release(state, {group})
    state = _hold(state, group, held._replace(phase=GroupPhase.READY))
    if held.number is None:
        return state
    return state._replace(ready=_with(state.ready, _turn(state, held.number)))


# -- what to start when a worker is free, the most urgent first --------------------------------------------------------


def _start(state: State, actions: tuple[Action, ...]) -> tuple[State, tuple[Action, ...]]:
    for _ in range(state.workers - len(state.running)):
        state, action = _next_move(state) or _next_work(state) or _next_read_or_write(state) or (state, None)
        if action is None:
            break
        state = state._replace(running=state.running | {action})
        actions = (*actions, action)
    return state, actions


def _next_move(state: State) -> tuple[State, Action] | None:
    for number in state.queued:
        event = _transfer_event(state, number)
        action = _copy(state, event) or (_plain(event) if _can_start(state, number) else None)
        if action is not None:
            return state._replace(queued=_without(state.queued, number)), action
    return None


def _next_work(state: State) -> tuple[State, Action] | None:
    number = _first(state, (number for _, number in state.ready))
    if number is None:
        return None
    event = _modify_event(state, number)
    state = state._replace(ready=_without(state.ready, _turn(state, number)))
    if event.in_place:
        return state, Work(number, event.group, None)
    held = state.loaded[event.group]
    return _hold(state, event.group, held._replace(phase=GroupPhase.WORKING)), Work(number, event.group, held.slot)


def _next_read_or_write(state: State) -> tuple[State, Action] | None:
    """A read or a write of a group: the way that fewer actions go now."""
    reads = sum(isinstance(action, Read) for action in state.running)
    writes = sum(isinstance(action, Write) for action in state.running)
    read, write = _next_read(state) or _next_ahead(state), _next_write(state)
    return read or write if reads <= writes else write or read


def _next_write(state: State) -> tuple[State, Action] | None:
    if not state.dirty:
        return None
    number = state.dirty[0]
    group, state = _modify_event(state, number).group, state._replace(dirty=state.dirty[1:])
    held = state.loaded[group]
    return _hold(state, group, held._replace(phase=GroupPhase.WRITING)), Write(number, group, held.slot)


def _next_read(state: State) -> tuple[State, Action] | None:
    elsewhere = (
        unloaded_number
        for _, unloaded_number in state.unloaded
        if _modify_event(state, unloaded_number).group not in state.loaded
    )
    number = _first(state, elsewhere)  # a group that is only read may be wanted twice: one after the other
    if number is None:
        return None
    state = state if state.free else _give_up_one(state)
    if not state.free:
        return None
    state = state._replace(unloaded=_without(state.unloaded, _turn(state, number)))
    return _read(state, _modify_event(state, number).group, number)


def _next_ahead(state: State) -> tuple[State, Action] | None:
    if not state.free or sum(held.number is None for held in state.loaded.values()) >= state.read_ahead:
        return None
    group = next((group for group in state.expected if group not in state.loaded), None)
    if group is None:
        return None
    pages = frozenset(group.pages)
    if any(not pages.isdisjoint(written) for _, _, written, _ in state.operations.values()):
        return None  # the ones after it wait as well: they are needed later
    return _read(state, group, None)


def _give_up_one(state: State) -> State:
    """Free a slot whose group is clean: the one read ahead that is needed last.

    If there is none, nothing runs or is to be written, and yet a modification cannot start, then all slots are held by
    groups that were read ahead and whose own modifications must come after it: one of them is unloaded again.
    """
    ahead = _read_ahead_of(state)
    if ahead:
        return _release(state, {max(ahead, key=state.expected.index)})
    held = [turn for turn in state.ready if not _modify_event(state, turn[1]).in_place]
    if state.running or state.dirty or not held:
        return state
    state = state._replace(ready=_without(state.ready, held[-1]), unloaded=_with(state.unloaded, held[-1]))
    return _release(state, {_modify_event(state, held[-1][1]).group})


# -- small moves -------------------------------------------------------------------------------------------------------


def _can_start(state: State, number: int) -> bool:
    """Every earlier conflicting operation has ended, and nothing that is being read ahead would be overwritten."""
    _, _, written, after = state.operations[number]
    return state.operations.keys().isdisjoint(after) and not any(
        isinstance(action, Read) and not written.isdisjoint(action.group.pages) for action in state.running
    )


def _plain(event: PageTransfer) -> Move:
    return Move(event.number, event.page, event.writes)


def _copy(state: State, event: PageTransfer) -> Copy | None:
    """The read as a copy from a slot, if all that it waits for, or did, is that its page is written from there."""
    left = next((group for group, held in state.loaded.items() if event.number in held.waiting), None)
    if left is not None:
        return Copy(event.number, event.page, left, state.loaded[left].slot)
    before = [
        state.operations[number].event for number in state.operations[event.number].after if number in state.operations
    ]
    if event.writes or len(before) != 1 or not isinstance(before[0], Modify):
        return None
    held = state.loaded.get(before[0].group)
    if held is None or held.phase not in (GroupPhase.DIRTY, GroupPhase.WRITING):
        return None
    return Copy(event.number, event.page, before[0].group, held.slot)


def _first(state: State, numbers: Iterable[int]) -> int | None:
    return next((number for number in numbers if _can_start(state, number)), None)


def _read(state: State, group: PageGroup, number: int | None) -> tuple[State, Action]:
    slot, *free = state.free
    state = _hold(state._replace(free=tuple(free)), group, Loaded(slot, GroupPhase.READING, number))
    return state, Read(group, slot)


def _hold(state: State, group: PageGroup, held: Loaded) -> State:
    return state._replace(loaded={**state.loaded, group: held})


def _release(state: State, groups: set[PageGroup]) -> State:
    loaded = {group: held for group, held in state.loaded.items() if group not in groups}
    free = sorted([*state.free, *(state.loaded[group].slot for group in groups)])
    return state._replace(loaded=loaded, free=tuple(free))


def _end(state: State, number: int) -> State:
    operations = dict(state.operations)
    del operations[number]
    return state._replace(operations=operations)


def _read_ahead_of(state: State) -> set[PageGroup]:
    """The groups that are READY and that no operation needs yet."""
    return {group for group, held in state.loaded.items() if held.number is None and held.phase is GroupPhase.READY}


def _transfer_event(state: State, number: int) -> PageTransfer:
    event = state.operations[number].event
    assert isinstance(event, PageTransfer)
    return event


def _modify_event(state: State, number: int) -> Modify:
    event = state.operations[number].event
    assert isinstance(event, Modify)
    return event


def _turn(state: State, number: int) -> Turn:
    return _modify_event(state, number).priority, number


def _with(turns: tuple[Turn, ...], turn: Turn) -> tuple[Turn, ...]:
    place = bisect(turns, turn)
    return (*turns[:place], turn, *turns[place:])


def _without(items: tuple[T, ...], item: T) -> tuple[T, ...]:
    if item not in items:
        return items
    place = items.index(item)
    return items[:place] + items[place + 1 :]
