"""The schedule that the store runs takes the same actions as its specification, event by event."""

import random
import time
from typing import Any

import pytest

from tests.store import specification
from tests.store.test_schedule import SCENARIOS, due, get, put
from zero.store.events import Expect, Finished, PageGroup
from zero.store.indexed_schedule import IndexedSchedule

PAGES, IN_PLACE = "abcdefgh", 2


def groups_of(draw: random.Random) -> list[PageGroup]:
    """Some with pages of their own, some that share them."""
    made = [PageGroup(0, number, (page,)) for number, page in enumerate("abc")]
    made += [PageGroup(IN_PLACE, number, tuple(draw.sample(PAGES, 2))) for number in range(2)]
    made.append(PageGroup(3, 0, (), ("a",)))
    for number in range(4):
        pages = draw.sample(PAGES, draw.randrange(1, 6))
        cuts = sorted(draw.choices(range(1, len(pages) + 1), k=2))
        made.append(
            PageGroup(1, number, tuple(pages[: cuts[0]]), tuple(pages[cuts[0] : cuts[1]]), tuple(pages[cuts[1] :]))
        )
    return made


def drawn(draw: random.Random, groups: list[PageGroup]) -> Any:
    kind = draw.random()
    if kind < 0.1:
        return Expect(
            tuple(page_group for page_group in draw.choices(groups, k=draw.randrange(6)) if page_group.unit != IN_PLACE)
        )
    if kind < 0.6:
        group = draw.choice(groups)
        return due(group, draw.randrange(4), in_place=group.unit == IN_PLACE)
    return draw.choice([get, put])(draw.choice(PAGES), here=draw.random() < 0.3)


@pytest.mark.parametrize("seed", range(30))
def test_a_random_trace_is_that_of_the_specification(seed):
    draw = random.Random(seed)
    sizes = {"slots": draw.randrange(1, 5), "workers": draw.randrange(1, 4), "read_ahead": draw.randrange(4)}
    print(f"seed {seed}, {sizes}")
    groups, number = groups_of(draw), 0
    state, schedule = specification.start(**sizes), IndexedSchedule(**sizes)
    under_way: list[Any] = []
    for _ in range(400):
        if under_way and (draw.random() < 0.6 or len(state.operations) > 12):
            event = Finished(under_way.pop(draw.randrange(len(under_way))))
        else:
            event = drawn(draw, groups)
            if not isinstance(event, Expect):
                number += 1
                event = event._replace(number=number)
        if isinstance(event, specification.PageTransfer) and event.here:
            moved = specification.advance(state, event)[1][:1]
            starts = any(isinstance(action, specification.Move) and action.number == event.number for action in moved)
            assert schedule.would_start(event) == starts
            if not starts:
                continue  # nobody asks then: see `Crew.do_here`
        state, actions = specification.advance(state, event)
        assert tuple(schedule.advance(event)) == actions, event
        assert schedule.running == state.running
        assert schedule.is_quiet == state.is_quiet
        under_way += actions


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("seed", range(3))
def test_so_is_a_trace_of_each_scenario_that_is_searched(scenario, seed):
    draw = random.Random(f"{scenario.name} {seed}")
    sizes = {"slots": scenario.slots, "workers": scenario.workers, "read_ahead": scenario.read_ahead}
    state, schedule = specification.start(**sizes), IndexedSchedule(**sizes)
    waiting, under_way, number = list(scenario.events), [], 0
    while waiting or under_way:
        if waiting and (not under_way or draw.random() < 0.5):
            event = waiting.pop(draw.randrange(len(waiting)))
            if not isinstance(event, Expect):
                number += 1
                event = event._replace(number=number)
        else:
            event = Finished(under_way.pop(draw.randrange(len(under_way))))
        state, actions = specification.advance(state, event)
        assert tuple(schedule.advance(event)) == actions
        under_way += actions
    assert schedule.is_quiet


@pytest.mark.alone
@pytest.mark.parametrize("behind", [False, True], ids=["in time", "the disk is behind"])
def test_an_event_costs_the_same_however_many_groups_are_due(behind):
    """Asking for eight times as many groups, and carrying them out, takes eight times as long and not 64."""

    def seconds(count: int) -> float:
        schedule = IndexedSchedule(slots=8, workers=2, read_ahead=4)
        groups = [PageGroup(number // 100, number % 100, (f"{number}m", f"{number}v")) for number in range(count)]
        begin_s = time.perf_counter()
        under_way = schedule.advance(Expect(tuple(groups)))
        for number, group in enumerate(groups):
            under_way += schedule.advance(due(group, number)._replace(number=number + 1))
            while under_way and not behind:
                under_way += schedule.advance(Finished(under_way.pop()))
        while under_way:
            under_way += schedule.advance(Finished(under_way.pop()))
        assert schedule.is_quiet
        return time.perf_counter() - begin_s

    best = {count: min(seconds(count) for _ in range(3)) for count in (1000, 8000)}
    assert best[8000] < 2 * 8 * best[1000], best
