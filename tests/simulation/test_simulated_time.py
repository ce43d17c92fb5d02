"""When simulated operations begin: in the order in which they are ready, and one at a time on each resource."""

import random

import pytest

from tests.simulation.simulated_time import CORES, START, Moment, SimulatedTime, latest


def test_copies_of_two_streams_share_a_link_and_not_with_the_other_direction():
    clock = SimulatedTime()
    copies = [clock.operation(START, 2.0, way) for way in ("in", "in", "out")]
    assert [clock.seconds(copy) for copy in copies] == [2.0, 4.0, 2.0]


def test_what_is_ready_first_is_served_first_whichever_was_recorded_first():
    clock = SimulatedTime()
    second = clock.operation(clock.operation(START, 3.0), 1.0, "link")
    first = clock.operation(clock.operation(START, 2.0), 5.0, "link")
    assert (clock.seconds(second), clock.seconds(first)) == (8.0, 7.0)


def test_what_is_recorded_after_a_look_at_the_clock_queues_behind_what_was_seen():
    clock = SimulatedTime()
    assert clock.seconds(clock.operation(START, 4.0, "link")) == 4.0
    assert clock.seconds(clock.operation(START, 1.0, "link")) == 5.0


def test_an_urgent_operation_interrupts_all_but_urgent_ones():
    clock = SimulatedTime()
    running, queued = (clock.operation(START, seconds, "kernels") for seconds in (10.0, 1.0))
    first, second = (clock.operation(clock.operation(START, 2.0), 3.0, "kernels", urgent=True) for _ in range(2))
    assert [clock.seconds(moment) for moment in (first, second, running, queued)] == [5.0, 8.0, 16.0, 17.0]


def test_cores_serve_as_many_as_there_are_and_earlier_work_first():
    clock = SimulatedTime(2)
    first = [clock.operation(START, 2.0, CORES, work=1)]
    first.append(clock.operation(first[0], 2.0, CORES, work=1))
    others = [clock.operation(START, 3.0, CORES, work=work) for work in (2, 3, 4)]
    assert [clock.seconds(moment) for moment in (*first, *others)] == [2.0, 4.0, 3.0, 6.0, 7.0]


@pytest.mark.parametrize("seed", range(20))
def test_a_resource_rests_only_while_nothing_waits_for_it(seed):
    """On random graphs: nobody overtakes, nothing overlaps, and the order of the records changes no time."""
    draw, clock = random.Random(seed), SimulatedTime()
    operations: list[tuple[Moment, Moment, float, str]] = []
    for _ in range(60):
        ends = [end for _, end, *_ in operations] or [START]
        after = latest(draw.choice(ends), draw.choice(ends))
        seconds, resource = draw.uniform(0.1, 3.0), draw.choice(["", "in", "out", "kernels"])
        operations.append((after, clock.operation(after, seconds, resource), seconds, resource))
    timed = [
        (clock.seconds(after), clock.seconds(end) - seconds, clock.seconds(end), resource)
        for after, end, seconds, resource in operations
    ]
    for ready_s, begin_s, _, resource in timed:
        if not resource:
            assert begin_s == pytest.approx(ready_s)
            continue
        before = sorted(other for other in timed if other[3] == resource and other[1] < begin_s)
        assert all(end_s <= begin_s + 1e-9 and earlier_s <= ready_s for earlier_s, _, end_s, _ in before)
        if begin_s > ready_s + 1e-9:
            served = [(start_s, end_s) for _, start_s, end_s, _ in before if end_s > ready_s]
            busy_s = sum(end_s - max(start_s, ready_s) for start_s, end_s in served)
            assert busy_s == pytest.approx(begin_s - ready_s)
