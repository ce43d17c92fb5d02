"""How long steps take on a disk that reads and writes at once, by the real schedule on a clock without threads."""

from heapq import heappop, heappush
from itertools import count
from typing import Any

import pytest

from tests.store.test_schedule import due
from zero.store.events import Expect, Finished, PageGroup, Read, Work, Write
from zero.store.indexed_schedule import IndexedSchedule

GROUPS, STEPS = 40, 24


def step_s(slots: int, threads: int, *, read_s: float, write_s: float, forward_s: float, backward_s: float) -> float:
    """Return the mean seconds of the last of several steps, each of which modifies all groups.

    The disk reads one page at a time, and writes one beside it. The forward of a group begins when its work has ended;
    work takes no time.

    Args:
        read_s, write_s: seconds to read all groups, and to write them.
    """
    schedule = IndexedSchedule(slots=slots, workers=threads, read_ahead=slots - threads)
    groups = [PageGroup(number, 0, (f"page {number}",)) for number in range(GROUPS)]
    seconds, free_s = {Read: read_s / GROUPS, Write: write_s / GROUPS}, {Read: 0.0, Write: 0.0}
    events: list[tuple[float, int, Finished]] = []
    order, numbers, now_s = count(), count(1), 0.0
    worked = {*groups}  # no update precedes the first step
    ends_s = []

    def take(event: Any) -> None:
        for action in schedule.advance(event):
            way, end_s = type(action), now_s
            if way is not Work:
                end_s = free_s[way] = max(now_s, free_s[way]) + seconds[way]
            heappush(events, (end_s, next(order), Finished(action)))

    def run() -> None:
        """Go on to the next event."""
        nonlocal now_s
        now_s, _, event = heappop(events)
        if isinstance(event.action, Work):
            worked.add(event.action.group)
        take(event)

    def compute(lasts_s: float) -> None:
        nonlocal now_s
        end_s = now_s + lasts_s
        while events and events[0][0] <= end_s:
            run()
        now_s = end_s

    for _ in range(STEPS):
        take(Expect(tuple(groups)))
        for group in groups:
            while group not in worked:
                run()
            compute(forward_s / GROUPS)
        compute(backward_s)
        worked.clear()
        for group in groups:
            take(due(group, group.unit)._replace(number=next(numbers)))
        ends_s.append(now_s)
    return (ends_s[-1] - ends_s[-13]) / 12


@pytest.mark.parametrize(("read_s", "write_s"), [(1.0, 1.0), (4.0, 4.0), (4.0, 9.0), (9.0, 4.0)])
def test_with_a_slot_for_each_group_the_slower_way_or_compute_is_all(read_s, write_s):
    """Forward takes 1 s and backward 2 s. What is due is read and written behind both."""
    lasted_s = step_s(GROUPS, 4, read_s=read_s, write_s=write_s, forward_s=1.0, backward_s=2.0)
    assert lasted_s == pytest.approx(max(3.0, read_s, write_s), rel=0.06)


@pytest.mark.parametrize("share", [0.25, 0.5])
@pytest.mark.parametrize(("read_s", "write_s"), [(2.0, 2.0), (4.0, 4.0), (4.0, 6.0)])
def test_with_fewer_slots_the_rest_is_behind_forward_alone(share, read_s, write_s):
    """Slots for a share of the groups hide as much in backward."""
    slots = int(share * GROUPS)
    lasted_s = step_s(slots, 4, read_s=read_s, write_s=write_s, forward_s=1.0, backward_s=2.0)
    slower_s = max(read_s, write_s)
    assert lasted_s <= 1.1 * max(slower_s, 3.0, slower_s * (1 - share) + slower_s / GROUPS * 4 + 2.0)
