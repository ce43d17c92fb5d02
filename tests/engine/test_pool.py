"""Buffers change hands without anybody seeing it; the order of visits says what comes next."""

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings, strategies as st

from zero.engine.gather.visit_order import CollectiveLog, VisitOrder
from zero.engine.memory.pool import Buffer, Pool
from zero.platform.device import Device

CPU = Device(torch.device("cpu"))


def pool(**counts: int) -> Pool:
    return Pool([int(numel[1:]) for numel, count in counts.items() for _ in range(count)], torch.float32, CPU)


def drop_ahead(made: Pool) -> None:
    for buffer in made.buffers:
        buffer.ahead = False
        made.drop_extra(buffer)


class Arrival:
    """A gather under way: lands a value when waited for."""

    def __init__(self, buffer: Buffer, value: float) -> None:
        self.flat, self.value, self.waits = buffer.flat, value, 0

    def wait(self) -> None:
        self.waits += 1
        self.flat.fill_(self.value)


def test_a_unit_keeps_its_buffer_until_another_takes_it():
    made = pool(n4=2)
    first, second = made.take(0, 4), made.take(1, 4)
    assert made.find(0) is first
    assert made.take(0, 4) is first
    assert made.take(2, 4) is second, "the least recently used"
    assert made.find(1) is None


def test_a_unit_uses_the_first_elements_of_any_buffer():
    made = pool(n8=2)
    first, second = made.take(0, 3), made.take(1, 8)
    assert (first.flat.numel(), first.numel, second.flat.numel()) == (3, 8, 8)
    first.pins += 1
    assert made.take(2, 2) is second
    assert second.flat.numel() == 2
    assert (made.find(0), made.find(1)) == (first, None)


def test_an_interrupt_leaves_no_version_valid(monkeypatch):
    made = pool(n8=1)
    made.take(0, 8).version = 7
    monkeypatch.setattr(Buffer, "resize", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        made.take(1, 4)
    assert made.buffers[0].version == -1


def test_a_pinned_buffer_is_never_taken_and_the_extra_one_is_dropped_when_let_go():
    made = pool(n4=1)
    first = made.take(0, 4)
    first.pins += 1
    assert not made.has_room_for(1)
    extra = made.take(1, 4)
    assert extra is not first
    assert made.overflowed == 1
    extra.pins += 1
    assert made.holding(extra.flat[1:]) is extra
    assert made.allocated_bytes == 2 * 4 * 4
    made.unpin(extra)
    assert made.find(1) is None
    assert made.holding(extra.flat) is None
    assert made.allocated_bytes == 4 * 4
    made.unpin(first)
    assert made.find(0) is first
    assert made.pinned == 0


def test_what_was_gathered_ahead_stays_until_it_is_dropped():
    made = pool(n4=1)
    made.take(0, 4).ahead = True
    assert made.pinned == 1
    assert not made.has_room_for(1)
    drop_ahead(made)
    assert made.pinned == 0
    assert made.has_room_for(1)


def test_what_is_on_its_way_arrives_before_the_buffer_changes_hands():
    """A gather that nobody waited for must not arrive on top of what comes next."""
    made = pool(n4=1)
    buffer = made.take(0, 4)
    arrival = Arrival(buffer, 5.0)
    buffer.arrivals.append(arrival)
    assert made.take(1, 4) is buffer
    assert arrival.waits == 1
    buffer.land()
    assert arrival.waits == 1


def test_a_view_that_outlives_the_pin_keeps_its_values():
    """The view keeps the memory too, and the buffer gets fresh memory."""
    made = pool(n4=1)
    buffer = made.take(0, 4)
    buffer.flat.fill_(1.0)
    view = buffer.flat[1:3].view(2, 1)
    assert buffer.is_seen
    assert made.take(1, 4) is buffer
    assert made.renewed == 1
    buffer.flat.fill_(2.0)
    assert view.flatten().tolist() == [1.0, 1.0]
    assert made.holding(view) is None
    assert made.holding(buffer.flat) is buffer
    del view
    assert not buffer.is_seen
    made.take(2, 4)
    assert made.renewed == 1


def test_a_view_of_the_same_units_older_version_is_kept_as_well():
    made = pool(n4=1)
    buffer = made.take(0, 4)
    view = buffer.flat[:2]
    made.take(0, 4).flat.fill_(3.0)
    assert view.tolist() == [0.0, 0.0]


def test_renewed_memory_is_freed_with_its_last_view():
    made = pool(n4=1)
    buffer = made.take(0, 4)
    view = buffer.flat[1:]
    old = weakref.ref(buffer.flat)
    made.take(1, 4)
    del view
    gc.collect()
    assert old() is None


def test_a_buffer_made_in_inference_mode_can_be_kept_for_backward():
    made = pool(n4=1)
    seen = made.take(0, 4).flat[:1]
    with torch.inference_mode():
        buffer = made.take(1, 4)
        buffer.pins += 1
        extra = made.take(2, 4)
    assert seen.numel() == 1
    assert made.renewed == made.overflowed == 1
    assert not buffer.flat.is_inference()
    assert not extra.flat.is_inference()


def test_a_unit_without_elements_takes_a_buffer_like_any_other():
    made = pool(n4=1)
    assert made.take(0, 0).flat.numel() == 0
    assert made.holding(torch.empty(0)) is None
    assert made.take(2, 4).flat.numel() == 4


def test_after_an_error_nobody_holds_anything():
    made = pool(n4=1)
    made.take(0, 4).pins += 1
    made.take(1, 4).pins += 2
    made.reset()
    assert made.pinned == 0
    assert made.allocated_bytes == 4 * 4


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "pin", "unpin", "ahead", "drop"]), st.integers(0, 4)), max_size=40))
def test_whatever_is_asked_a_unit_is_in_one_buffer_and_a_pinned_one_keeps_its_unit(script):
    """Random scripts against a list of who should be where."""
    made = pool(n4=2)
    pinned: dict[int, list[Buffer]] = {}
    for what, unit in script:
        buffer = made.find(unit)
        if what == "take" and not pinned.get(unit):
            made.take(unit, 4)
        elif what == "pin" and buffer is not None:
            buffer.pins += 1
            pinned.setdefault(unit, []).append(buffer)
        elif what == "unpin" and pinned.get(unit):
            made.unpin(pinned[unit].pop())
        elif what == "ahead" and buffer is not None:
            buffer.ahead = True
        elif what == "drop":
            drop_ahead(made)
        for held, buffers in pinned.items():
            assert all(made.find(held) is pinned_buffer and pinned_buffer.unit == held for pinned_buffer in buffers)
        homes = [made.find(index) for index in range(5)]
        assert len({id(home) for home in homes if home is not None}) == sum(home is not None for home in homes)
        assert all(home is None or home in made.buffers for home in homes)
        assert sum(not pool_buffer.extra for pool_buffer in made.buffers) == 2
    for pinned_buffer in [pinned_buffer for buffers in pinned.values() for pinned_buffer in buffers]:
        made.unpin(pinned_buffer)
    drop_ahead(made)
    assert made.pinned == 0
    assert not any(pool_buffer.extra for pool_buffer in made.buffers)


# -- visits ------------------------------------------------------------------------------------------------------------


def told(order: VisitOrder, units: str, ahead: int = 1) -> list[str]:
    return ["".join(map(str, order.visit(int(unit), ahead))) for unit in units]


def test_the_first_round_only_records():
    order = VisitOrder()
    order.begin()
    assert told(order, "0121") == ["", "", "", ""]
    order.begin()
    assert told(order, "0121") == ["1", "2", "1", ""]


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [(0, ["", "", "", "", ""]), (2, ["12", "20", "10", "0", ""]), (9, ["12", "20", "10", "0", ""])],
)
def test_as_many_as_asked_nearest_first_and_never_the_unit_itself(ahead, expected):
    order = VisitOrder()
    order.begin()
    told(order, "01210")
    order.begin()
    assert told(order, "01210", ahead) == expected


def test_a_round_that_deviates_finds_its_place_again():
    order = VisitOrder()
    order.begin()
    told(order, "012345")
    order.begin()
    assert told(order, "0245") == ["1", "3", "5", ""]
    order.begin()
    assert told(order, "0945") == ["2", "", "5", ""]


def test_a_broken_round_is_not_expected():
    order = VisitOrder()
    order.begin()
    told(order, "012")
    order.begin()
    told(order, "02")
    order.forget()
    order.begin()
    assert told(order, "012") == ["1", "2", ""]


def test_a_round_without_visits_changes_nothing():
    order = VisitOrder()
    order.begin()
    told(order, "01")
    order.begin()
    order.begin()
    assert told(order, "01") == ["1", ""]


def test_the_log_tells_orders_apart():
    """Same collectives in the same order: same number. Anything else: another."""

    def fingerprint(*names: str) -> int:
        log = CollectiveLog()
        log.note("before")
        log.clear()
        for name in names:
            log.note(name)
        return log.fingerprint

    assert fingerprint("a", "b") == fingerprint("a", "b")
    assert len({fingerprint(*names) for names in [(), ("a",), ("b",), ("a", "b"), ("b", "a"), ("a", "b", "b")]}) == 6


def test_a_buffer_with_an_owner_is_taken_by_no_other_unit():
    made = Pool([4], torch.float32, CPU, {2: 3})
    own = made.take(2, 3)
    assert own.owner == 2
    assert made.take(0, 4) is made.take(1, 4) is not own
    assert made.find(2) is own
    made.find(1).pins += 1
    assert made.has_room_for(2)
    assert not made.has_room_for(0)
    assert made.allocated_bytes == 7 * 4
