"""Every order of events, for small sizes: the schedule keeps its laws in each, and no mutant of it does.

The search knows nothing of how the schedule works. It keeps its own books: which operations were submitted, what each
page holds (the numbers of the operations that wrote it), what each slot holds, which actions are under way.
"""

import gc
from collections import Counter, deque
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.store import specification as schedule
from zero.store.events import (
    Copy,
    Expect,
    Finished,
    GroupPhase,
    Modify,
    Move,
    PageGroup,
    PageTransfer,
    Read,
    Work,
    Write,
)

# Pages are opaque to the schedule: letters are quick to hash.
A = PageGroup(0, 0, ("a",))
B = PageGroup(0, 1, ("b",))
C = PageGroup(1, 0, ("c",))
WITH_GRADIENT = PageGroup(2, 0, ("d", "e"), ("g",), ("p",))
ONLY_READ = PageGroup(4, 0, (), ("a",))
OVERLAPPING = PageGroup(3, 0, ("f",), ("p", "a"), ("h",))


class Broken(AssertionError):
    """A law does not hold."""


class Scenario(NamedTuple):
    """Sizes, and events that come in every order."""

    name: str
    slots: int
    workers: int
    read_ahead: int
    events: tuple[Any, ...]


def due(group: PageGroup, priority: int = 0, *, in_place: bool = False) -> Modify:
    return Modify(0, group, (priority,), in_place)


def get(page: str, *, here: bool = False) -> PageTransfer:
    return PageTransfer(0, page, False, here)


def put(page: str, *, here: bool = False) -> PageTransfer:
    return PageTransfer(0, page, True, here)


SCENARIOS = [
    Scenario(f"{name}; {slots} slots, {workers} workers, read_ahead {read_ahead}", slots, workers, read_ahead, events)
    for name, events, sizes in [
        (
            "groups that overlap",
            (Expect((OVERLAPPING, A)), due(A), due(OVERLAPPING), due(WITH_GRADIENT)),
            [(1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2)],
        ),
        (
            "transfers on a group's page",
            (Expect((A, B)), due(A), put("a"), get("a"), due(A)),
            [(1, 1, 1), (1, 2, 1), (2, 2, 1)],
        ),
        (
            "expectations that change",
            (Expect((A, B, C)), Expect((C, B)), due(B, 1), due(C, 0), put("c")),
            [(1, 1, 1), (2, 1, 2), (2, 2, 1)],
        ),
        (
            "three groups, one of them due twice",
            (Expect((A, B, C)), due(A, 1), due(A, 1), due(B, 0), due(C, 2)),
            [(1, 2, 1), (2, 1, 0), (2, 2, 2)],
        ),
        (
            "pages in place, and transfers in the asking thread",
            (due(A, 1, in_place=True), put("a", here=True), get("a", here=True), due(A, in_place=True)),
            [(1, 1, 1), (1, 2, 1)],
        ),
        (
            "pages beside and out",
            (Expect((WITH_GRADIENT, A)), put("g"), due(WITH_GRADIENT), get("p"), due(A)),
            [(1, 1, 1), (1, 2, 1)],
        ),
        (
            "reads of what is being written",
            (due(A), get("a"), get("a"), due(A), put("a")),
            [(1, 1, 1), (1, 3, 1), (2, 2, 1)],
        ),
        (
            "reads of two groups that are being written",
            (due(A), due(B), get("a"), get("b")),
            [(2, 2, 1)],
        ),
        (
            "a group that is only read, wanted twice",
            (due(ONLY_READ), due(ONLY_READ, 1), due(A), get("a"), due(ONLY_READ)),
            [(1, 2, 1), (2, 3, 1)],
        ),
        (
            "reads and writes of groups take turns",
            (due(A), due(B), due(C)),
            [(3, 2, 0), (3, 3, 0)],
        ),
        (
            "a slot that is to be written, beside one that waits for what has none",
            (Expect((OVERLAPPING,)), due(C), due(WITH_GRADIENT), due(OVERLAPPING)),
            [(2, 1, 1)],
        ),
        (
            "reads of what goes out",
            (due(WITH_GRADIENT), get("p"), due(WITH_GRADIENT), due(B)),
            [(1, 2, 1), (1, 3, 1), (2, 3, 1)],
        ),
    ]
    for slots, workers, read_ahead in sizes
]


# -- the books ---------------------------------------------------------------------------------------------------------


class Touch(NamedTuple):
    reads: frozenset[Any]
    writes: frozenset[Any]

    def conflicts(self, other: "Touch") -> bool:
        mine, its = self.writes, other.writes
        return not (mine.isdisjoint(its) and mine.isdisjoint(other.reads) and its.isdisjoint(self.reads))


class Lies(NamedTuple):
    """The contents of each slot."""

    group: PageGroup
    held: tuple[tuple[int, ...], ...]
    """The writes that each page had when it was read."""
    worked: int | None = None
    """The operation that changed it, until that is written."""


class Node(NamedTuple):
    """One reachable situation: the schedule's state beside the search's own books.

    What a page holds is named by the numbers of the operations that have written it.
    """

    state: Any
    left: tuple[Any, ...]
    """Events that have not come."""
    count: int
    """Operations submitted so far."""
    open: dict[int, Any]
    """Operations that have not ended."""
    claims: dict[Any, tuple[int, ...]]
    """By page: the operations that write it, in the order of asking."""
    disk: dict[Any, tuple[int, ...]]
    """By page: the operations that have written it."""
    memory: dict[int, Lies]
    """By slot."""
    owed: dict[int, int]
    """By read: the slot that it copies from, as its page is written and was there when it asked."""
    under_way: frozenset[Any]
    here: frozenset[int]
    """Transfers that the asking thread carries out."""
    worked: frozenset[int]
    trail: tuple[Any, ...]
    """Events so far."""

    @classmethod
    def first(cls, scenario: Scenario) -> "Node":
        state = schedule.start(slots=scenario.slots, workers=scenario.workers, read_ahead=scenario.read_ahead)
        none: frozenset[Any] = frozenset()
        return cls(state, scenario.events, 0, {}, {}, {}, {}, {}, none, none, none, ())

    @property
    def key(self) -> Any:
        """Equal for situations with the same future."""
        state = self.state
        return (
            self.left,
            state.free,
            state.expected,
            frozenset(state.loaded.items()),
            frozenset((number, operation.after) for number, operation in state.operations.items()),
            state.unloaded,
            state.ready,
            state.dirty,
            state.queued,
            state.running,
            self.under_way,
            tuple(self.open.items()),
            frozenset(self.disk.items()),
            frozenset(self.memory.items()),
            frozenset(self.owed.items()),
        )

    def seen_by(self, number: int, pages: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the contents that an operation must see: all that was submitted before it, and nothing else."""
        return tuple(tuple(other for other in self.claims.get(page, ()) if other < number) for page in pages)

    def holds(self, pages: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(self.disk.get(page, ()) for page in pages)

    def written(self, number: int, pages: tuple[Any, ...]) -> "Node":
        """The operation has written these pages and ends."""
        check(self.holds(pages) == self.seen_by(number, pages), "writes in the order of asking")
        disk = self.disk | {page: (*self.disk.get(page, ()), number) for page in pages}
        return self._replace(disk=disk).ended(number)

    def ended(self, number: int) -> "Node":
        return self._replace(open={other: event for other, event in self.open.items() if other != number})

    def vacated(self, slot: int) -> "Node":
        """Empty a slot whose contents have been written and are not to be copied."""
        lies = self.memory.get(slot)
        if lies is None or lies.worked in self.open or slot in self.owed.values():
            return self
        return self._replace(memory={other: lies for other, lies in self.memory.items() if other != slot})

    def is_clear(self, number: int) -> bool:
        """No earlier operation that is open, and no action under way, conflicts."""
        mine = touched_by(self.open[number])
        return not any(
            other < number and mine.conflicts(touched_by(event)) for other, event in self.open.items()
        ) and not any(mine.conflicts(touched_now(action)) for action in self.under_way)

    def writer_before(self, number: int) -> int | None:
        """The group's operation whose write is all that this read waits for."""
        mine = touched_by(self.open[number])
        earlier = [o for o, event in self.open.items() if o < number and mine.conflicts(touched_by(event))]
        kept = [lies.worked for lies in self.memory.values()]
        return earlier[0] if len(earlier) == 1 and earlier[0] in kept and not mine.writes else None

    def owing(self, write: Write) -> dict[int, int]:
        """The reads that wait for nothing but this write, which is about to end."""
        reads = [number for number, event in self.open.items() if isinstance(event, PageTransfer)]
        reads = [number for number in reads if not self.has_started(number)]
        return {number: write.slot for number in reads if self.writer_before(number) == write.number}

    def has_started(self, number: int) -> bool:
        return number in self.worked or any(
            not isinstance(action, Read) and action.number == number for action in self.under_way
        )


def check(law: bool, words: str) -> None:
    if not law:
        raise Broken(words)


@cache
def touched_by(event: Any) -> Touch:
    """Return the pages and slots that an operation touches between its submission and its end."""
    if isinstance(event, Modify):
        return Touch(frozenset(event.group.beside), frozenset(event.group.pages + event.group.out))
    page = frozenset((event.page,))
    return Touch(frozenset(), page) if event.writes else Touch(page, frozenset())


@cache
def touched_now(action: Any) -> Touch:
    """Return the pages and slots that an action touches while it is under way."""
    match action:
        case Read(group):
            return Touch(frozenset(group.pages), frozenset())
        case Work(_, group, slot):
            return Touch(frozenset(group.beside), frozenset(group.pages + group.out if slot is None else ()))
        case Write(_, group):
            return Touch(frozenset(), frozenset(group.pages + group.out))
        case Copy():
            return Touch(frozenset(), frozenset())
    return touched_by(action)


# -- one step ----------------------------------------------------------------------------------------------------------


def following(node: Node, advance: Any) -> Iterator[Node]:
    """Every situation that one event leads to."""
    for place, event in enumerate(node.left):
        if event in node.left[:place]:
            continue  # the same event again: the same situations
        rest = node._replace(left=node.left[:place] + node.left[place + 1 :])
        if isinstance(event, Expect):
            yield taken(rest, event, advance)
            continue
        number = node.count + 1
        event = event._replace(number=number)
        claims = dict(node.claims)
        for page in touched_by(event).writes:
            claims[page] = (*claims.get(page, ()), number)
        yield taken(rest._replace(count=number, open=node.open | {number: event}, claims=claims), event, advance)
    for action in node.under_way:
        yield taken(ended(node._replace(under_way=node.under_way - {action}), action), Finished(action), advance)


def taken(node: Node, event: Any, advance: Any) -> Node:
    """The schedule takes in an event, which is in the books already."""
    state, actions = advance(node.state, event)
    after = node._replace(state=state, trail=(*node.trail, event))
    for action in actions:
        after = begun(after, action, event)
    check_order(after, event, actions)
    check_state(node, after, event)
    return after


def begun(node: Node, action: Any, event: Any) -> Node:
    """An action begins: may it, and does it find what it must?"""
    memory, here = node.memory, node.here
    in_use = {other.slot for other in node.under_way if not isinstance(other, Move)}
    for other in node.under_way:
        check(not touched_now(action).conflicts(touched_now(other)), "conflicting actions never run at once")
    match action:
        case Read(group, slot):
            lies = memory.get(slot)
            check(slot not in in_use and (lies is None or lies.worked is None), "a slot has one owner")
            memory = memory | {slot: Lies(group, node.holds(group.pages))}
            number = node.state.loaded[group].number
            check(number is None or node.is_clear(number), "a modification waits for its turn")
            check(number is not None or is_untouched(node, group), "what is to be written is not read ahead")
        case Work(number, group, slot):
            check(
                node.open[number] == Modify(number, group, node.open[number].priority, slot is None),
                "what was submitted",
            )
            check(not node.has_started(number), "work runs once")
            check(node.is_clear(number), "work waits for its turn")
            check(node.holds(group.beside) == node.seen_by(number, group.beside), "work sees what is beside")
            held = node.holds(group.pages) if slot is None else memory[slot].held
            check(slot is None or (slot not in in_use and memory[slot].group == group), "work has its slot")
            check(held == node.seen_by(number, group.pages), "work sees what was written before")
        case Write(number, group, slot):
            check(memory[slot] == (group, memory[slot].held, number), "what is written was worked on")
            owners = {other.slot for other in node.under_way if not isinstance(other, Move | Copy)}
            check(slot not in owners, "a slot has one owner, beside those that copy from it")
        case Move(number, page, writes):
            check(node.open[number][:3] == (number, page, writes), "what was submitted")
            check(not node.has_started(number), "a transfer runs once")
            check(node.is_clear(number), "a transfer waits for its turn")
            check(number not in node.owed, "what was in memory when it was asked for is not read from the disk")
            check(writes or node.holds((page,)) == node.seen_by(number, (page,)), "a transfer reads what was written")
            here = (
                here | {number} if isinstance(event, PageTransfer) and event.here and event.number == number else here
            )
        case Copy(number, page, group, slot):
            check(node.open[number][:3] == (number, page, False), "what was submitted")
            check(not node.has_started(number), "a transfer runs once")
            check(page in group.pages + group.out, "a copy finds its page")
            if number in node.owed:
                writer = memory[slot].worked
                check(slot == node.owed[number] and node.is_clear(number), "a copy finds its page where it was written")
                held = node.holds((page,))[0]
            else:
                writer = node.writer_before(number)
                check(writer is not None, "a copy waits for its turn")
                held = (*node.holds((page,))[0], writer)
            check(memory[slot] == (group, memory[slot].held, writer), "a copy finds its page where it is written from")
            check(held == node.seen_by(number, (page,))[0], "a copy reads what was written")
    return node._replace(memory=memory, here=here, under_way=node.under_way | {action})


def ended(node: Node, action: Any) -> Node:
    """An action has ended: what is true now?"""
    match action:
        case Read(group, slot):
            check(node.memory[slot] == (group, node.holds(group.pages), None), "nobody writes what is being read")
        case Work(number, group, None):
            return node._replace(worked=node.worked | {number}).written(number, group.pages + group.out)
        case Work(number, group, slot):
            memory = node.memory | {slot: node.memory[slot]._replace(worked=number)}
            return node._replace(worked=node.worked | {number}, memory=memory)
        case Write(number, group, slot):
            owed = node._replace(under_way=node.under_way | {action}).owing(action)
            after = node._replace(owed=node.owed | owed).written(number, group.pages + group.out)
            return after.vacated(slot)
        case Move(number, page, True):
            return node.written(number, (page,))
        case Move(number):
            return node.ended(number)
        case Copy(number, _, _, slot):
            owed = {other: place for other, place in node.owed.items() if other != number}
            return node._replace(owed=owed).ended(number).vacated(slot)
    return node


# -- laws --------------------------------------------------------------------------------------------------------------

MOVE, WORK, READ, AHEAD, WRITE = range(5)
"""Actions that can start, the most urgent first; reads and writes take turns."""


def startable(node: Node) -> list[tuple[Any, ...]]:
    """Return the actions that a free worker could start: the urgency and the turn of each."""
    state, actions = node.state, []
    ahead = [group for group, held in state.loaded.items() if held.number is None]
    idle = [group for group in ahead if state.loaded[group].phase is GroupPhase.READY]
    actions += [(WRITE, number) for number in unwritten(node)]
    for number, event in node.open.items():
        copies = isinstance(event, PageTransfer) and (node.writer_before(number) or number in node.owed)
        if node.has_started(number) or not (node.is_clear(number) or copies):
            continue
        if isinstance(event, PageTransfer):
            actions.append((MOVE, number))
            continue
        held = state.loaded.get(event.group)
        if event.in_place or (held is not None and held.number == number and held.phase is GroupPhase.READY):
            actions.append((WORK, event.priority, number))
        elif held is None and (state.free or idle):
            actions.append((READ, event.priority, number))
    nearest = next((group for group in state.expected if group not in state.loaded), None)
    if nearest is not None and state.free and len(ahead) < state.read_ahead and is_untouched(node, nearest):
        actions.append((AHEAD,))
    return actions


def unwritten(node: Node) -> list[int]:
    """The modifications in slots that nobody writes yet."""
    writing = [action.slot for action in node.under_way if isinstance(action, Write)]
    return [lies.worked for slot, lies in node.memory.items() if slot not in writing and lies.worked in node.open]


def is_untouched(node: Node, group: PageGroup) -> bool:
    return all(touched_by(event).writes.isdisjoint(group.pages) for event in node.open.values())


def check_order(after: Node, event: Any, actions: tuple[Any, ...]) -> None:
    """The most urgent is started first, ways take turns, and no worker idles."""
    urgent: list[tuple[Any, ...]] = []
    written: list[tuple[Any, ...]] = []
    rest = startable(after)
    waiting = {
        Read: any(first in (READ, AHEAD) for first, *_ in rest),
        Write: any(first == WRITE for first, *_ in rest),
    }
    running = Counter(type(action) for action in after.under_way if action not in actions)
    for action in actions:
        if isinstance(action, Read):
            check(not waiting[Write] or running[Read] <= running[Write], "a write has its turn")
        if isinstance(action, Write):
            check(not waiting[Read] or running[Write] < running[Read], "a read has its turn")
        if isinstance(action, Read | Write):
            check(all(first not in (MOVE, WORK) for first, *_ in rest), "what others wait for is started first")
        running[type(action)] += 1
        number = after.state.loaded[action.group].number if isinstance(action, Read) else action.number
        match action:
            case Move() | Copy() if number not in after.here:
                urgent.append((MOVE, number))
            case Work():
                urgent.append((WORK, after.open[number].priority, number))
            case Write():
                written.append((WRITE, number))
            case Read() if number is not None:
                urgent.append((READ, after.open[number].priority, number))
            case Read(group):
                nearer = after.state.expected[: after.state.expected.index(group)]
                check(all(other in after.state.loaded for other in nearer), "the nearest group is read first")
                urgent.append((AHEAD,))
    check(urgent == sorted(urgent) and written == sorted(written), "the most urgent is started first")
    for started, others in ((urgent, [turn for turn in rest if turn[0] != WRITE]), (written, rest)):
        others = [turn for turn in others if (turn[0] == WRITE) is (started is written)]
        check(not started or not others or max(started) <= min(others), "what is started is more urgent")
    check(not rest or len(at_workers(after)) == after.state.workers, "no worker idles while something can start")


def at_workers(node: Node) -> list[Any]:
    return [action for action in node.under_way if not (isinstance(action, Move) and action.number in node.here)]


def check_state(before: Node, after: Node, event: Any) -> None:
    """Check the laws of every situation."""
    state = after.state
    check(len(at_workers(after)) <= state.workers, "no more actions than workers")
    slots = sorted([*state.free, *(held.slot for held in state.loaded.values())])
    check(
        slots == sorted([*before.state.free, *(held.slot for held in before.state.loaded.values())]), "slots are kept"
    )
    check(len(set(slots)) == len(slots), "a slot has one owner")
    ahead = [group for group, held in state.loaded.items() if held.number is None]
    check(len(ahead) <= state.read_ahead, "no more read ahead than allowed")
    idle = [group for group in ahead if state.loaded[group].phase is GroupPhase.READY]
    check(set(idle) <= set(state.expected), "what lies read ahead is expected")
    check(bool(after.under_way or not after.open), f"something goes on until all is done: {sorted(after.open)} wait")
    if isinstance(event, Modify) and (held := before.state.loaded.get(event.group)) and not (held.number or held.stale):
        check(state.loaded[event.group].slot == held.slot, "what was read ahead is used")
    for group, held in before.state.loaded.items():
        if held.phase is not GroupPhase.READY or group in state.loaded:
            continue
        check(
            held.number is None or not (before.under_way or unwritten(before)),
            "a group that is to be modified keeps its slot while anything goes on or is to be written",
        )
        if held.number is None and group in state.expected and is_untouched(after, group):
            later = all(state.expected.index(other) < state.expected.index(group) for other in idle)
            check(later, "what is needed last is given up first")
    if not after.left and not after.under_way:
        check(state.is_quiet and not state.queued and not state.unloaded and not state.ready, "it ends")
        check(after.disk == after.claims, "everything that was submitted is written")


def search(scenario: Scenario, advance: Any = schedule.advance) -> Iterator[int]:
    """Every situation that can be reached, breadth first; after each, says how many are known.

    Raises:
        Broken: a law does not hold, or the schedule itself fails.
    """
    first = Node.first(scenario)
    seen, queue = {first.key}, deque([first])
    while queue:
        node = queue.popleft()
        try:
            for after in following(node, advance):
                if (key := after.key) not in seen:
                    seen.add(key)
                    queue.append(after)
        except (AssertionError, LookupError, ValueError, TypeError, AttributeError) as error:
            raise Broken(f"{type(error).__name__} {error}; one event after {node.trail}") from error
        check(len(seen) < 100_000, "the search ends")
        yield len(seen)


@pytest.fixture(autouse=True)
def _no_collection():
    """The collector would look through every situation again and again, and there is nothing for it to find."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_order_of_events_keeps_the_laws(scenario: Scenario):
    print(f"{max(search(scenario))} situations")


# -- mutants: they test the tests --------------------------------------------------------------------------------------

MUTANTS = {
    "a change is not written": [
        (
            "return state._replace(dirty=tuple(sorted((*state.dirty, number)))), ()",
            "return _end(_release(state, {group}), number), ()",
        )
    ],
    "a slot is free before its write has ended": [
        (
            "return _hold(state, group, held._replace(phase=GroupPhase.WRITING)), Write(number, group, held.slot)",
            "return _release(state, {group}), Write(number, group, held.slot)",
        ),
        ("held = state.loaded[group]._replace(phase=GroupPhase.LEAVING, waiting=waiting)", "pass"),
        ("return _end(_left(_hold(state, group, held), group), number), ()", "return _end(state, number), ()"),
    ],
    "an operation ends before its write": [
        (
            "return _hold(state, group, held._replace(phase=GroupPhase.WRITING)), Write(number, group, held.slot)",
            "return _end(_hold(state, group, held), number), Write(number, group, held.slot)",
        ),
        (
            "return _end(_left(_hold(state, group, held), group), number), ()",
            "return _left(_hold(state, group, held), group), ()",
        ),
    ],
    "a write does not wait for earlier reads": [("written.isdisjoint(touched_too) and ", "")],
    "a read does not wait for earlier writes": [(" and touched.isdisjoint(written_too)", "")],
    "nothing waits": [("state.operations.keys().isdisjoint(after) and not any(", "not any(")],
    "a write does not wait for what is being read ahead": [("isinstance(action, Read) and", "False and")],
    "what is to be written is read ahead": [("if any(not pages.isdisjoint(written)", "if any(False")],
    "a write leaves what was read ahead": [("if held.number is None and group != own and", "if False and")],
    "a write leaves what is being read ahead": [("held._replace(stale=True)", "held")],
    "a group that becomes due is read again": [(" and group != own", "")],
    "a group that is due again takes over": [("held is None or held.number is not None or", "held is None or")],
    "a group that becomes due takes stale pages": [(" or held.stale:", ":")],
    "a stale read counts": [("if held.stale or (", "if (")],
    "what is not expected any more arrives": [(" and group not in state.expected):", " and False):")],
    "what is not expected any more stays": [("dropped = _read_ahead_of(state)", "dropped = set()")],
    "one more is read ahead": [(">= state.read_ahead", "> state.read_ahead")],
    "one more worker": [("range(state.workers -", "range(1 + state.workers -")],
    "first come, first served": [("place = bisect(turns, turn)", "place = len(turns)")],
    "what is needed first is given up": [("max(ahead, key=", "min(ahead, key=")],
    "a slot is taken while it is being read into": [(" and held.phase is GroupPhase.READY}", "}")],
    "nothing is given up": [("state = state if state.free else _give_up_one(state)", "")],
    "no last resort": [("if state.running or state.dirty or not held:", "if True:")],
    "the last resort comes first": [("if state.running or state.dirty or not held:", "if state.dirty or not held:")],
    "the last resort comes before a write": [
        ("if state.running or state.dirty or not held:", "if state.running or not held:")
    ],
    "work before transfers": [("_next_move(state) or _next_work(state)", "_next_work(state) or _next_move(state)")],
    "reads before work": [
        ("_next_work(state) or _next_read_or_write(state)", "_next_read_or_write(state) or _next_work(state)")
    ],
    "reads before writes": [("return read or write if reads <= writes", "return read or write if True")],
    "writes before reads": [("return read or write if reads <= writes", "return read or write if reads < writes")],
    "the last is written first": [("number = state.dirty[0]", "number = state.dirty[-1]")],
    "read-ahead before reads": [("_next_read(state) or _next_ahead(state)", "_next_ahead(state) or _next_read(state)")],
    "a transfer stays queued": [("state._replace(queued=_without(state.queued, number)), action", "state, action")],
    "a slot is free while somebody copies from it": [("return state if copied or wanted", "return state if wanted")],
    "a slot is free while somebody is to copy from it": [
        ("return state if copied or wanted", "return state if copied")
    ],
    "what is written is read from the disk": [
        ("(phase=GroupPhase.LEAVING, waiting=waiting)", "(phase=GroupPhase.LEAVING)")
    ],
    "a read is of a slot that others are written from": [(" and copy.group == group", "")],
    "a slot that was copied from is never free": [("_end(_left(state, group), number), ()", "_end(state, number), ()")],
    "a copy before the work": [
        ("if held is None or held.phase not in (GroupPhase.DIRTY, GroupPhase.WRITING):", "if held is None:")
    ],
    "a write as a copy": [("if event.writes or len(before)", "if len(before)")],
    "a copy overtakes": [("len(before) != 1", "not before")],
    "no copies": [("action = _copy(state, event) or (", "action = (")],
    "work stays ready": [("state = state._replace(ready=_without(state.ready, _turn(state, number)))", "")],
    "what is needed last is read ahead first": [
        ("for group in state.expected if", "for group in reversed(state.expected) if")
    ],
    "a transfer in the asking thread does not wait": [
        ("if event.here and _can_start(state, event.number):", "if event.here:")
    ],
    "what goes out is not a write": [
        ("written = frozenset(group.pages + group.out)", "written = frozenset(group.pages)")
    ],
    "what is beside is not a read": [("written.union(group.beside)", "written")],
    "a slot is given twice": [("_hold(state._replace(free=tuple(free))", "_hold(state")],
}


def mutated(changes: list[tuple[str, str]]) -> Any:
    """`advance` of a schedule with a mistake in it; its classes are the real ones."""
    source = Path(schedule.__file__).read_text()
    source = source[source.index("def advance(") :]
    for right, wrong in changes:
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    names = dict(vars(schedule))
    exec("from __future__ import annotations\n" + source, names)
    return names["advance"]


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_caught(name: str):
    """Scenarios are searched side by side: most mistakes show after few events, in some of them."""
    advance = mutated(MUTANTS[name])
    with pytest.raises(Broken) as caught:
        deque(zip_longest(*(search(scenario, advance) for scenario in SCENARIOS)), maxlen=0)
    print(caught.value)
