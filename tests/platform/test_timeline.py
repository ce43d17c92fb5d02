"""A recording shows a step as it happened, and changes nothing."""

import contextlib
import itertools
import json
from collections import Counter

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

import zero
from tests.common.small import KiB, Setting, slice_of, small_batch
from tests.faults.disks import ThrottledStore
from zero.engine.whole.read import digest
from zero.platform.tape import Tape
from zero.platform.timeline import (
    EXPOSED,
    TIMELINE_ROWS,
    Mark,
    RowSeconds,
    Span,
    Timeline,
    computing,
    from_trace,
    length,
    shares,
    to_trace,
)
from zero.store import MemoryStore
from zero.testing import run_ranks

TOLERANCE_S = 1e-9  # of sums of doubles

# -- arithmetic --------------------------------------------------------------------------------------------------------

SPANS = (
    Span("compute", "forward", 0.0, 4.0),
    Span(EXPOSED, "gather", 4.0, 5.0),
    Span("compute", "backward", 5.0, 8.0),
    Span(EXPOSED, "page in, update, page out", 8.0, 10.0),
    Span("gather", "gather a", 1.0, 4.5),
    Span("gather", "gather b", 2.0, 5.0),
    Span("reduce", "reduce a", 4.0, 9.0),
    Span("page in", "page in a", 7.0, 8.5),
    Span("page in", "page in b", 8.0, 9.0),
    Span("update", "update a", 9.0, 9.5),
    Span("page out", "page out a", 9.5, 12.0),
)


def test_a_row_is_exposed_where_the_training_thread_stands_still_for_it():
    told = shares(SPANS)
    assert tuple(told) == TIMELINE_ROWS
    assert told["gather"] == RowSeconds(4.0, 1.0)
    assert told["reduce"] == RowSeconds(5.0, 0.0)  # the thread stood still meanwhile, but not for this
    assert told["page in"] == RowSeconds(2.0, 1.0)
    assert told["update"] == RowSeconds(0.5, 0.5)
    assert told["page out"] == RowSeconds(2.5, 0.5)
    assert told["compute"] == RowSeconds(7.0, 0.0)
    assert told["page out"].hidden_s == 2.0
    assert Timeline(SPANS).step_s == 10.0


NAMES = st.lists(st.sampled_from([row for row in TIMELINE_ROWS if row != "compute"]), min_size=1, max_size=3)


@st.composite
def spans_on_a_grid(draw) -> list[Span]:
    """Spans of whole seconds within 0 to 12."""
    spans = []
    for _ in range(draw(st.integers(0, 12))):
        begin, end = sorted(draw(st.tuples(st.integers(0, 12), st.integers(0, 12))))
        row = draw(st.sampled_from([*TIMELINE_ROWS, EXPOSED]))
        name = ", ".join(draw(NAMES)) if row == EXPOSED else row
        spans.append(Span(row, name, float(begin), float(end), rank=draw(st.integers(0, 1))))
    return spans


@given(spans_on_a_grid())
def test_shares_are_what_counting_seconds_gives(spans):
    def holds(rank: int, at: int, row: str) -> bool:
        return any(span.rank == rank and span.row == row and span.begin_s <= at < span.end_s for span in spans)

    def stood(rank: int, at: int, row: str) -> bool:
        names = (
            span.name for span in spans if span.rank == rank and span.row == EXPOSED and span.begin_s <= at < span.end_s
        )
        return any(row in name.split(", ") for name in names)

    cells = list(itertools.product(range(2), range(12)))
    for row, (busy_s, exposed_s) in shares(spans).items():
        assert busy_s == sum(holds(*cell, row) for cell in cells)
        assert exposed_s == sum(holds(*cell, row) and stood(*cell, row) for cell in cells)


@given(spans_on_a_grid(), st.lists(st.integers(0, 14), max_size=5).map(sorted), st.integers(0, 12))
def test_compute_is_the_rest_of_the_step_named_by_the_mark_that_ends_it(spans, times, step):
    exposed = [(span.begin_s, span.end_s) for span in spans]
    marks = [Mark(float(at), f"mark {number}", "a") for number, at in enumerate(times)]
    stretches = computing(exposed, marks, float(step), rank=3)
    for at in range(step):
        free = not any(begin <= at < end for begin, end in exposed)
        current_spans = [span for span in stretches if span.begin_s <= at < span.end_s]
        assert len(current_spans) == free
        if current_spans:
            name = next((mark.name for mark in marks if mark.at_s > at), "rest")
            assert current_spans[0].name == name
            assert current_spans[0].rank == 3
    assert all(0 <= span.begin_s < span.end_s <= step for span in stretches)


# -- traces ------------------------------------------------------------------------------------------------------------


@given(spans_on_a_grid())
def test_a_trace_says_what_the_spans_say(spans):
    trace = json.loads(json.dumps(to_trace(spans)))
    assert sorted(from_trace(trace)) == sorted(spans)
    drawn = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {(event["cat"], event["pid"]) for event in drawn} == {(span.row, span.rank) for span in spans}
    for trace_event, other in itertools.combinations(drawn, 2):  # viewers lose slices of one thread that overlap
        if (trace_event["pid"], trace_event["tid"]) == (other["pid"], other["tid"]):
            first, second = sorted((trace_event, other), key=lambda event: (event["ts"], event["ts"] + event["dur"]))
            assert first["ts"] + first["dur"] <= second["ts"]


def test_a_trace_is_in_microseconds_with_rank_row_and_unit(tmp_path):
    path = tmp_path / "trace.json"
    Timeline([Span("gather", "gather blocks.3", 0.25, 0.75, "blocks.3", 2)]).write(path)
    *names, event = json.loads(path.read_text())["traceEvents"]
    assert {name["args"].get("name") for name in names} == {"rank 2", "gather", None}
    assert event["ts"] == 250_000
    assert event["dur"] == 500_000
    assert (event["name"], event["pid"], event["args"]) == ("gather blocks.3", 2, {"unit": "blocks.3"})
    assert Timeline.read(path).spans == (Span("gather", "gather blocks.3", 0.25, 0.75, "blocks.3", 2),)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}'])
def test_what_is_no_trace_is_refused(text, tmp_path):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError):
        Timeline.read(tmp_path / "trace.json")


# -- the tape ----------------------------------------------------------------------------------------------------------


class TwoStreams:
    """A device with a stream aside, on which everything takes one second more; moments mean nothing before the end."""

    def __init__(self) -> None:
        self.now = 0.0
        self.is_over = False

    def host(self):
        return ("host", self.now)

    def here(self):
        return ("aside", self.now + 1.0)

    def main(self):
        return ("main", self.now)

    def seconds(self, moment) -> float:
        assert self.is_over, "asking for seconds waits for the device"
        return moment[1]


class Arrival:
    def __init__(self, clock: TwoStreams) -> None:
        self._clock = clock

    def wait(self) -> None:
        self._clock.now += 2.0


def test_work_is_timed_where_it_runs_and_exposure_where_compute_runs():
    clock = TwoStreams()
    tape = Tape(lambda: clock, rank=1, streams=True)
    with tape.record(profile=False) as timeline:
        [handle] = tape.under_way("gather", "a", lambda: [Arrival(clock)])
        with tape.forward("a", "a"):
            clock.now += 3.0
        with tape.stream_standing("gather", "a"):
            handle.wait()
        clock.now += 1.0
        tape.passed("norm")
        clock.is_over = True
    assert timeline.spans == (
        Span("compute", "forward a", 0.0, 3.0, "a", 1),
        Span("gather", "gather a", 1.0, 6.0, "a", 1),
        Span(EXPOSED, "gather", 3.0, 5.0, "a", 1),
        Span(EXPOSED, "gather", 3.0, 5.0, "a", 1),
        Span("compute", "norm", 5.0, 6.0, "", 1),
    )


def test_what_is_under_way_at_the_end_is_cut_off_there():
    clock = TwoStreams()
    tape = Tape(lambda: clock, rank=0, streams=False)
    paging = tape.of_store(["a"])("read", 0, "mu", 7)
    with paging, tape.record(profile=False) as timeline:  # it began before: not seen
        late = tape.of_store(["a"])("write", 0, "mu", 7)
        late.__enter__()
        clock.now, clock.is_over = 5.0, True
    late.__exit__(None, None, None)
    assert set(timeline.spans) == {
        Span("compute", "rest", 0.0, 5.0),
        Span("page out", "page out a mu 7", 0.0, 5.0, "a"),
    }


def test_one_recording_at_a_time_and_a_failure_ends_it():
    clock = TwoStreams()
    clock.is_over = True
    tape = Tape(lambda: clock, rank=0, streams=False)
    failing = tape.record(profile=False)
    with tape.record(profile=False), pytest.raises(zero.ZeroError, match="recorded already"), failing:
        pass
    with contextlib.suppress(KeyError), tape.record(profile=False) as broken:
        clock.now += 1.0
        raise KeyError
    assert broken.step_s > 0
    with tape.record(profile=False):
        pass


# -- steps -------------------------------------------------------------------------------------------------------------

NVME = (("optimizer", "nvme"), ("param", "nvme"), ("grad", "nvme"))
PLAIN = Setting(clip=1.0, precision="bf16")
PAGED = PLAIN.but(offload=NVME, page_bytes=4 * KiB, ahead=0)


def record_steps(world: zero.World, setting: Setting, steps: int) -> tuple[Timeline, Counter[str], zero.State]:
    """A recording of `steps` steps, with everything that they ask of the store and nothing else; and their gathers."""
    state, step = setting.start(world)
    store, log = state.runtime.store, state.runtime.log
    for number in range(2):
        state, _ = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
    store.drain()
    noted: list[str] = []
    note = log.note
    log.note = lambda what: (noted.append(what), note(what))
    with zero.record(state) as timeline:
        for number in range(2, 2 + steps):
            state, _ = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
        store.drain()
    gathers = Counter(what.replace(" of", "", 1) for what in noted if what.startswith("gather of"))
    return timeline, gathers, state


def counts(timeline: Timeline, row: str) -> Counter[str]:
    return Counter(span.name for span in timeline.spans if span.row == row)


def check_laws(timeline: Timeline, rank: int) -> None:
    """Check the laws of every recording on a host."""
    step_s = timeline.step_s
    assert {span.rank for span in timeline.spans} == {rank}
    assert all(0 <= span.begin_s < span.end_s <= step_s for span in timeline.spans)
    of = {row: [(s.begin_s, s.end_s) for s in timeline.spans if s.row == row] for row in (*TIMELINE_ROWS, EXPOSED)}
    shares = timeline.hidden()
    assert sum(end - begin for begin, end in of["compute"]) == pytest.approx(shares["compute"].busy_s, abs=TOLERANCE_S)
    assert shares["compute"].busy_s + length(of[EXPOSED]) == pytest.approx(step_s, abs=TOLERANCE_S)
    assert length([*of["compute"], *of[EXPOSED]]) == pytest.approx(step_s, abs=TOLERANCE_S)
    for busy_s, exposed_s in shares.values():
        assert 0 <= exposed_s <= busy_s + TOLERANCE_S
    names = {row for span in timeline.spans if span.row == EXPOSED for row in span.name.split(", ")}
    assert names <= set(TIMELINE_ROWS) - {"compute"}


@pytest.mark.parametrize("update", ["lazy", "serial"])
def test_every_page_moves_and_every_unit_is_updated_once_a_step(update):
    def rank_main(world):
        setting = PAGED.but(update=update, clip=1.0)
        timeline, gathers, state = record_steps(world, setting, steps=2)
        state.runtime.store.close()
        return timeline, gathers, state.plan

    timeline, gathers, plan = run_ranks(1, rank_main)[0]
    check_laws(timeline, 0)
    trained = {unit.index for unit in plan.units if unit.trainable.P}
    pages = [page for page in plan.pages.store_pages() if plan.pages.is_updated(page) or page.kind == "param"]
    assert pages
    names = {unit.index: unit.name for unit in plan.units}
    for row in ("page in", "page out"):
        moved = counts(timeline, row)
        for unit, kind, number in pages:
            # a gather brings parameters in, too
            times = moved[f"{row} {names[unit]} {kind} {number}"]
            assert times > 2 if (kind, row) == ("param", "page in") else times == 2
    groups = {f"update {names[page.unit]} {page.number}" for page in pages}
    assert {page.unit for page in pages} == trained
    assert counts(timeline, "update") == dict.fromkeys(groups, 2)
    assert counts(timeline, "gather") == gathers
    assert set(gathers) >= {f"gather {names[index]}" for index in trained}


@pytest.mark.parametrize("stage", range(4))
def test_collectives_are_spans(stage):
    """On two ranks: as many spans as calls of the world, for the units that they name."""

    def rank_main(world):
        called: list[str] = []
        gather, reduce_scatter = world.gather, world.reduce_scatter

        def told_gather(shard_S, full_P, *, what=""):
            called.append(f"reduce {what}" if "gradient" in what or "norms" in what else f"gather {what}")
            return gather(shard_S, full_P, what=what)

        def told_reduce(*args, what="", **keywords):
            called.append(f"reduce {what}")
            return reduce_scatter(*args, what=what, **keywords)

        setting = PLAIN.but(stage=stage)
        state, step = setting.start(world)
        batches = [slice_of(small_batch(number, 12), world, 1) for number in range(3)]
        state, _ = step(state, batches[0])
        state, _ = step(state, batches[1])
        world.gather, world.reduce_scatter = told_gather, told_reduce
        with zero.record(state) as timeline:
            state, _ = step(state, batches[2])
        return timeline, Counter(called), state.plan

    for rank, (timeline, called, plan) in enumerate(run_ranks(2, rank_main)):
        check_laws(timeline, rank)
        expected = Counter()
        for name, count in called.items():
            expected[name.replace("the gradient of ", "")] += count
        trained = [unit.name for unit in plan.units if unit.trainable.P]
        # embedding, two trained blocks and the norm; the frozen flat of a unit is gathered with the rest of it
        assert counts(timeline, "reduce") == {name: n for name, n in expected.items() if name.startswith("reduce")}
        assert set(counts(timeline, "gather")) == {name for name in expected if name.startswith("gather")}
        assert counts(timeline, "update") == {f"update {name}": 1 for name in trained}
        assert not counts(timeline, "page in")


def test_whoever_stands_still_does_so_for_something_that_is_under_way():
    """The rows account for all exposed time: what is left over is the waking of threads, on a busy machine in one
    recording of several."""

    def unexplained(timeline: Timeline) -> float:
        of_step = [(span.begin_s, span.end_s) for span in timeline.spans if span.row != EXPOSED]
        return 1 - length(of_step) / timeline.step_s

    def rank_main(world):
        told = []
        for _ in range(4):
            timeline, _, state = record_steps(world, PAGED, steps=1)
            state.runtime.store.close()
            check_laws(timeline, world.rank)
            told.append(unexplained(timeline))
        return min(told)

    assert max(run_ranks(2, rank_main)) < 0.05


def test_compute_is_named_by_unit_and_direction():
    def rank_main(world):
        timeline, _, _ = record_steps(world, PLAIN, steps=1)
        return {(span.name, span.unit) for span in timeline.spans if span.row == "compute"}

    told = run_ranks(2, rank_main)[0]
    assert {("forward blocks.0", "blocks.0"), ("forward head", "embed"), ("backward blocks.1", "blocks.1")} <= told
    assert {("backward embed", "embed"), ("norm", ""), ("forward", "")} <= told
    assert ("backward blocks.2", "blocks.2") not in told  # frozen: no gradient says when it ends


def test_a_merged_unit_is_named_by_its_first_and_last():
    def rank_main(world):
        timeline, _, _ = record_steps(world, PLAIN.but(bucket=3 * KiB // 2), steps=1)
        return {(span.name, span.unit) for span in timeline.spans}

    told, (first, last) = run_ranks(2, rank_main)[0], ("embed to blocks.1", "blocks.2 to head")
    assert {("forward blocks.1", first), ("forward norm", last), (f"backward {first}", first)} <= told
    assert {(f"{row} {unit}", unit) for row in ("gather", "reduce", "update") for unit in (first, last)} <= told


@pytest.mark.parametrize(
    ("ranks", "setting"),
    [(2, PAGED.but(ahead=None)), (2, PLAIN.but(activations="remat")), (1, PLAIN.but(stage=0))],
)
def test_recording_changes_no_bit(ranks, setting):
    def rank_main(world, recording):
        state, step = setting.start(world)
        for number in range(4):
            with zero.record(state) if recording and world.rank == 0 else contextlib.nullcontext():
                state, _ = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
        told = digest(state)
        state.runtime.store.close()
        return told

    assert run_ranks(ranks, rank_main, True) == run_ranks(ranks, rank_main, False)


def test_steps_after_a_recording_are_not_recorded(monkeypatch):
    def rank_main(world):
        timeline, _, state = record_steps(world, PAGED, steps=1)
        spans, tape = timeline.spans, state.runtime.tape
        monkeypatch.setattr(tape, "_clock", None)
        _, step = state, zero.make_step(state.plan, lambda model, batch: model(batch[:, 0]).float().square().mean())
        state, _ = step(state, [small_batch(9, 6)])
        state.runtime.store.drain()
        assert timeline.spans is spans
        assert tape._recording is None
        old = state
        state, _ = step(state, [small_batch(10, 6)])
        with pytest.raises(zero.ZeroError, match="already consumed"), zero.record(old):
            pass
        state.runtime.store.close()

    run_ranks(1, rank_main)


def test_ranges_for_the_profiler_speak_the_same_words():
    def rank_main(world):
        state, step = PAGED.start(world)
        batches = [[small_batch(number, 6)] for number in range(2)]
        state, _ = step(state, batches[0])
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        cpu = [torch.profiler.ProfilerActivity.CPU]
        profiler = torch.profiler.profile(activities=cpu, experimental_config=everywhere)
        with profiler as profile, zero.record(state, profile=True):
            state, _ = step(state, batches[1])
            state.runtime.store.drain()
        state.runtime.store.close()
        return {event.key for event in profile.key_averages()}

    told = run_ranks(1, rank_main)[0]
    assert {"forward blocks.1", "gather blocks.1", "page in blocks.1 mu 0", "update blocks.1 0"} <= told


# -- what it is for ----------------------------------------------------------------------------------------------------


class Slow(nn.Module):
    """A block whose forward takes a while on any machine."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(150):
            x = torch.tanh(self.linear(x))
        return x


def hidden_page_s(update: str) -> float:
    """Of one step on a slow disk."""

    def rank_main(world):
        with zero.empty():
            model = nn.Sequential(*(Slow() for _ in range(4)))
        offload = zero.Offload("nvme", page_bytes=128 * KiB, threads=2, ahead=0)
        plan = zero.Plan(model, optimizer=zero.adamw(1e-3, clip=1.0), world=world, update=update, offload=offload)
        store = zero.open_store(plan, disk=ThrottledStore(MemoryStore(torch.device("cpu")), 20e6))
        state, step = zero.init(plan, store), zero.make_step(plan, lambda model, x: model(x).square().mean())
        state, _ = step(state, [torch.ones(64, 128)])
        with zero.record(state) as timeline:
            state, _ = step(state, [torch.ones(64, 128)])
        store.drain()
        store.close()
        check_laws(timeline, 0)
        told = timeline.hidden()
        return told["page in"].hidden_s + told["page out"].hidden_s, told["page in"].busy_s

    hidden_s, busy_s = run_ranks(1, rank_main)[0]
    assert busy_s > 0
    return hidden_s


def test_a_lazy_update_hides_what_a_serial_one_shows():
    lazy_s, serial_s = hidden_page_s("lazy"), hidden_page_s("serial")
    assert lazy_s > 2 * serial_s
    assert lazy_s > 0.01


# -- totals of a world -------------------------------------------------------------------------------------------------


def test_a_world_counts_what_came_from_other_ranks():
    def rank_main(world):
        before = world.traffic
        full_P, S = torch.zeros(12), 12 // world.size
        world.gather(torch.ones(S), full_P).wait()
        gathered = world.traffic
        world.reduce_scatter(full_P, torch.empty(12), torch.empty(S)).wait()
        reduced = world.traffic
        world.all_reduce(torch.ones(5, dtype=torch.float64)).wait()
        return before, gathered, reduced, world.traffic

    ((_, _, _, alone),) = run_ranks(1, rank_main)
    assert alone[:2] == (0, 0)
    for before, gathered, reduced, after in run_ranks(3, rank_main):
        assert before == (0, 0, 0.0, 0)
        assert gathered[:2] == (2 * 16, 0)
        assert reduced[:2] == (2 * 16, 2 * 16)
        assert after[:2] == (2 * 16, 2 * 16 + 2 * 40)
        assert 0 < gathered.wait_s < reduced.wait_s < after.wait_s
