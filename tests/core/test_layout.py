"""A flat tensor is its parameters, end to end, with zeros between them; einops' pack is the independent oracle."""

import itertools
import sys
from itertools import pairwise

import einops
import pytest
import torch
from hypothesis import given, settings, strategies as st

from zero.core.fused import tables
from zero.core.layout import VECTOR, Layout, Slot, pages
from zero.errors import LayoutError

SMALL = st.lists(st.integers(0, 5), max_size=3).map(tuple)
AROUND_A_VECTOR = st.sampled_from([63, 64, 65, 130]).map(lambda size: (size,))
SHAPES = st.lists(st.one_of(SMALL, AROUND_A_VECTOR), max_size=6)
WORLDS = st.sampled_from([1, 2, 3, 4, 7, 8, 64])


@st.composite
def layouts(draw) -> Layout:
    shapes = {f"p{i}": shape for i, shape in enumerate(draw(SHAPES))}
    groups = {name: draw(st.integers(0, 2)) for name in shapes}
    return Layout.of(shapes, world_size=draw(WORLDS), groups=groups)


@st.composite
def ranges(draw) -> tuple[Layout, int, int]:
    layout = draw(layouts())
    edges = sorted({0, layout.P, *(slot.offset for slot in layout.slots), *(slot.stop for slot in layout.slots)})
    place = st.one_of(st.sampled_from(edges), st.integers(0, layout.P))
    start, stop = sorted([draw(place), draw(place)])
    return layout, start, stop


def tensors_for(layout: Layout) -> dict[str, torch.Tensor]:
    """Numbers 1, 2, 3, ... in order, so that no two elements are equal and none is a gap's zero."""
    values = torch.arange(1.0, layout.numel + 1).split([slot.numel for slot in layout.slots])
    return {slot.name: part.view(slot.shape) for slot, part in zip(layout.slots, values, strict=True)}


def flat_of(layout: Layout) -> torch.Tensor:
    """The numbers of `tensors_for`, written through the views of a flat tensor of zeros."""
    flat, tensors = torch.zeros(layout.P), tensors_for(layout)
    for name, view in layout.views(flat).items():
        view.copy_(tensors[name])
    return flat


def owners(layout: Layout) -> list[Slot | None]:
    """The slot of each element of the flat, None in a gap."""
    owner: list[Slot | None] = [None] * layout.P
    for slot in layout.slots:
        for i in range(slot.offset, slot.stop):
            assert owner[i] is None, "two slots overlap"
            owner[i] = slot
    return owner


@settings(deadline=None)
@given(layouts())
def test_every_slot_and_shard_starts_at_a_whole_vector(layout):
    """Uneven sizes, no elements at all, more ranks than parameters: padding makes every cut a legal one."""
    assert layout.S * layout.world_size == layout.P
    assert layout.S % VECTOR == 0
    assert all(slot.offset % VECTOR == 0 for slot in layout.slots)
    assert (layout.P == 0) == (layout.numel == 0)
    assert layout.P - layout.numel < VECTOR * (len(layout.slots) + layout.world_size)
    shards = [layout.shard(rank) for rank in range(layout.world_size)]
    assert [start for start, _ in shards] == [0, *(stop for _, stop in shards[:-1])]
    assert shards[-1][1] == layout.P


@settings(deadline=None)
@given(layouts(), WORLDS)
def test_offsets_do_not_depend_on_the_world(layout, world_size):
    """So that a checkpoint's ranges mean the same whoever reads them."""
    shapes = {slot.name: slot.shape for slot in layout.slots}
    groups = {slot.name: slot.group for slot in layout.slots}
    assert Layout.of(shapes, world_size=world_size, groups=groups).slots == layout.slots


@settings(deadline=None)
@given(layouts())
def test_views_are_einops_unpack(layout):
    flat, tensors = flat_of(layout), tensors_for(layout)
    packed, _ = einops.pack([*tensors.values(), torch.empty(0)], "*")
    inside = torch.tensor([slot is not None for slot in owners(layout)], dtype=torch.bool)
    assert torch.equal(flat[inside], packed)
    assert flat[~inside].eq(0).all()
    views = layout.views(flat)
    assert list(views) == [slot.name for slot in layout.slots]
    for name, view in views.items():
        assert view.is_contiguous()
        assert torch.equal(view, tensors[name])


@settings(deadline=None)
@given(layouts())
def test_gaps_are_what_no_slot_covers(layout):
    empty = [i for i, slot in enumerate(owners(layout)) if slot is None]
    assert [i for start, stop in layout.gaps for i in range(start, stop)] == empty
    assert all(start < stop for start, stop in layout.gaps)


@settings(deadline=None)
@given(ranges())
def test_pieces_are_the_elements_of_a_range(case):
    """The pieces of a range, put at their places, are that range."""
    layout, start, stop = case
    tensors, flat = tensors_for(layout), flat_of(layout)
    seen = torch.zeros(stop - start)
    for slot, first, last, at in layout.pieces(start, stop):
        assert first < last
        seen[at : at + last - first] = tensors[slot.name].flatten()[first:last]
    assert torch.equal(seen, flat[start:stop])


@settings(deadline=None)
@given(ranges())
def test_segments_are_the_longest_runs_of_one_group(case):
    layout, start, stop = case
    groups, last = [], None
    for slot in owners(layout):
        last = slot.group if slot else last
        groups.append(last)
    segments = layout.segments(start, stop)
    assert [group for a, b, group in segments for _ in range(a, b)] == groups[start:stop]
    for before, after in pairwise(segments):
        assert before.stop == after.start
        assert before.settings != after.settings
        assert after.start % VECTOR == 0
    assert all(a < b for a, b, _ in segments)


@settings(deadline=None)
@given(st.integers(0, 50_000), st.integers(1, 8).map(lambda n: 1024 * n))
def test_pages_cover_a_shard_in_whole_pages_and_a_rest(numel, page_numel):
    cut = pages(numel, page_numel)
    assert [i for start, stop in cut for i in range(start, stop)] == list(range(numel))
    assert all(stop - start == page_numel for start, stop in cut[:-1])
    assert all(0 < stop - start <= page_numel for start, stop in cut[-1:])


def test_a_view_writes_through_from_inside_a_larger_buffer():
    """Gathered flats are slices of a pool's buffers: views point where the slice does."""
    layout = Layout.of({"a": (2, 3), "b": ()}, world_size=3)
    buffer = torch.zeros(layout.P + 128)
    views = layout.views(buffer[64 : 64 + layout.P])
    views["a"].fill_(1)
    views["b"].fill_(2)
    assert buffer.nonzero().flatten().tolist() == [64, 65, 66, 67, 68, 69, 128]


def test_ten_elements_on_three_ranks():
    layout = Layout.of({"w": (2, 5)}, world_size=3)
    assert (layout.numel, layout.P, layout.S) == (10, 192, 64)
    assert layout.gaps == ((10, 192),)
    assert [layout.shard(rank) for rank in range(3)] == [(0, 64), (64, 128), (128, 192)]


def test_no_parameters_is_an_empty_flat():
    layout = Layout.of({}, world_size=4)
    assert (layout.P, layout.S, layout.gaps, layout.pieces(0, 0), layout.segments(0, 0)) == (0, 0, (), [], ())
    assert layout.views(torch.empty(0)) == {}


TWO = Layout.of({"a": (4,), "b": (2, 2)}, world_size=2)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (r"\[0, 129\) is not a range", lambda: TWO.pieces(0, 129)),
        (r"\[5, 4\) is not a range", lambda: TWO.segments(5, 4)),
    ],
)
def test_what_is_no_layout_is_refused_with_what_was_seen(words, call):
    with pytest.raises(LayoutError, match=words):
        call()


def lines_run(slots: int, numel: int) -> int:
    """Return the number of lines of Python that make the tables of a kernel, iterations of comprehensions included."""
    layout = Layout.of({str(number): (numel,) for number in range(slots)}, world_size=1)
    expected = tables(layout, 0, layout.P, 1024)  # a layout computes sizes and keys once
    lines, before = itertools.count(), sys.gettrace()

    def watch(frame, event, argument):
        next(lines) if event == "line" else None
        return watch

    sys.settrace(watch)
    try:
        again = tables(layout, 0, layout.P, 1024)
    finally:
        sys.settrace(before)
    assert all(map(torch.equal, again, expected))
    return next(lines)


def test_the_tables_of_a_kernel_take_time_for_each_slot_and_none_for_its_elements():
    few = lines_run(1000, 64)
    assert few > 1000
    assert lines_run(8000, 64) < 9 * few
    assert lines_run(1000, 64 * 1024) == few
