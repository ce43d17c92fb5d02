"""A recording of one step: the time of every operation, and the share that was hidden behind compute.

A `Span` is one operation from its begin to its end, in one of these rows:

    compute    computation of the training thread; on a GPU, of the main stream, with the launches
    gather     the all-gather of a unit, from its start until the end of the wait for it
    reduce     the reduction of a gradient, or of the numbers at the end of a step, from start to end of the wait
    page in    the transfer of one page from the store
    update     a part of the optimizer's update
    page out   the transfer of one page to the store
    exposed    the training thread waits for the rows in the span's name, or does their work itself

Each moment of the step is in either `compute` or `exposed`. A row is **busy** while at least one of its spans is in
progress. **Exposed** is the part of that time in which the training thread waited for the row; the rest is **hidden**.
A wait for the store counts as a wait for all three of its rows, so the sum of exposed times may exceed the step's time.

The engine and the store report their operations to a `Tape`. It records moments, and converts them to seconds after the
step, so that a recording never waits for a device while a step runs.

Source: Holistic Trace Analysis (Meta 2023), "communication computation overlap".
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zero.errors import StaleStateError
from zero.platform.handle import Handle, Then
from zero.platform.run_files import publish

if TYPE_CHECKING:  # it imports torch, which reading a timeline does not need
    from zero.platform.device import Clock

ROWS = ("gather", "compute", "reduce", "page in", "update", "page out")
EXPOSED = "exposed"

STORE_ROWS = {"read": "page in", "work": "update", "write": "page out"}
"""Name of a store's operation -> its row."""

ALL_STORE_ROWS = ", ".join(STORE_ROWS.values())

Interval = tuple[float, float]
"""(begin, end) in seconds, with begin <= end."""


class Span(NamedTuple):
    """An operation with its begin and end, in seconds since the recording began."""

    row: str
    name: str
    """Text in a trace viewer, with the unit: "gather blocks.3". In row `exposed`: the rows that were waited for."""
    begin_s: float
    end_s: float
    unit: str = ""
    rank: int = 0


class Share(NamedTuple):
    """The seconds in which a row was busy, and the part of them in which the training thread waited for the row."""

    busy_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        return self.busy_s - self.exposed_s


class Timeline:
    """One recording: the spans of one or several ranks, sorted by their begin.

    Attributes:
        spans: the recorded spans; empty until the recording has ended.
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self.spans = tuple(sorted(spans, key=lambda span: (span.begin_s, span.end_s)))

    @property
    def step_s(self) -> float:
        """Return the duration of the recording in seconds."""
        return max((span.end_s for span in self.spans if span.row in ("compute", EXPOSED)), default=0.0)

    def hidden(self) -> dict[str, Share]:
        """Return busy and exposed seconds of every row in `ROWS`, summed over the ranks."""
        return shares(self.spans)

    def write(self, path: Path) -> None:
        """Write a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

        Raises:
            MachineError: the file cannot be written.
        """
        publish(path, json.dumps(to_trace(self.spans), separators=(",", ":")) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Timeline":
        """Read a trace that `write` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is not a trace of this library.
        """
        return cls(from_trace(json.loads(path.read_text())))


# -- arithmetic of intervals -------------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge overlapping intervals; return disjoint, non-empty intervals in ascending order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif begin < end:
            merged.append((begin, end))
    return merged


def intersection(ours: Iterable[Interval], theirs: Iterable[Interval]) -> list[Interval]:
    """Return the time after 0 that both lists of intervals cover, as disjoint intervals in ascending order."""
    first, second = union(ours), union(theirs)
    end = max((stop for _, stop in first + second), default=0.0)
    return outside(outside(first, end) + outside(second, end), end)


def outside(intervals: Iterable[Interval], end: float) -> list[Interval]:
    """Return the parts of (0, end) that none of `intervals` covers, in ascending order."""
    free, begin = [], 0.0
    for start, stop in [*union(intervals), (end, end)]:
        if begin < min(start, end):
            free.append((begin, min(start, end)))
        begin = max(begin, stop)
    return free


def length(intervals: Iterable[Interval]) -> float:
    """Return the total time that at least one interval covers, in seconds."""
    return sum(end - begin for begin, end in union(intervals))


def shares(spans: Sequence[Span]) -> dict[str, Share]:
    """Return busy and exposed seconds of each row, summed over the ranks."""
    shares = {row: Share(0.0, 0.0) for row in ROWS}
    for rank in {span.rank for span in spans}:
        of_rank = [span for span in spans if span.rank == rank]
        exposed = [span for span in of_rank if span.row == EXPOSED]
        for row, before in shares.items():
            under_way = [(span.begin_s, span.end_s) for span in of_rank if span.row == row]
            waited = [(span.begin_s, span.end_s) for span in exposed if row in span.name.split(", ")]
            exposed_s = length(intersection(under_way, waited))
            shares[row] = Share(before.busy_s + length(under_way), before.exposed_s + exposed_s)
    return shares


class Mark(NamedTuple):
    """The end of a computation, which began at the previous mark."""

    at_s: float
    name: str
    unit: str


def computing(exposed: Iterable[Interval], marks: Sequence[Mark], step_s: float, rank: int) -> list[Span]:
    """Return the spans of row `compute`: the time of the step that `exposed` does not cover, cut at the marks.

    Each span has the name and unit of the mark at its end. After the last mark, the name is "rest".
    """
    spans, begin = [], 0.0
    free = outside(exposed, step_s)
    for mark in [*marks, Mark(step_s, "rest", "")]:
        stretch, begin = (begin, min(mark.at_s, step_s)), max(begin, mark.at_s)
        spans += [Span("compute", mark.name, a, b, mark.unit, rank) for a, b in intersection([stretch], free)]
    return spans


# -- traces ------------------------------------------------------------------------------------------------------------


def to_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """Convert spans to a Chrome trace. A rank is a process, a row is a thread; overlapping spans get more threads."""
    named: list[dict[str, Any]] = []
    drawn: list[dict[str, Any]] = []
    lanes: dict[tuple[int, str], list[float]] = {}  # (rank, row) -> the end of the last span of each thread
    order = (*ROWS, EXPOSED)
    for span in sorted(spans, key=lambda span: (span.rank, order.index(span.row), span.begin_s)):
        ends = lanes.setdefault((span.rank, span.row), [])
        lane = next((number for number, end_s in enumerate(ends) if end_s <= span.begin_s), len(ends))
        tid = 1000 * order.index(span.row) + lane
        if lane == len(ends):
            ends.append(0.0)
            named += _names(span, tid)
        ends[lane] = span.end_s
        ts, dur = (round(seconds * 1e6, 3) for seconds in (span.begin_s, span.end_s - span.begin_s))
        where = {"ph": "X", "pid": span.rank, "tid": tid, "ts": ts, "dur": dur}
        drawn.append({"name": span.name, "cat": span.row, **where, "args": {"unit": span.unit}})
    return {"traceEvents": [*named, *drawn], "displayTimeUnit": "ms"}


def _names(span: Span, tid: int) -> list[dict[str, Any]]:
    """Return the metadata events that set the name and position of a rank and a row in a trace viewer."""
    of_process = {"ph": "M", "pid": span.rank, "tid": tid, "name": "process_name"}
    return [
        {**of_process, "args": {"name": f"rank {span.rank}"}},
        {**of_process, "name": "thread_name", "args": {"name": span.row}},
        {**of_process, "name": "thread_sort_index", "args": {"sort_index": tid}},
    ]


def from_trace(trace: Mapping[str, Any]) -> list[Span]:
    """Return the spans of a trace that `to_trace` made.

    Raises:
        ValueError: `to_trace` did not make this trace.
    """
    try:
        events = trace["traceEvents"]
        rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        return [
            Span(
                rows[e["pid"], e["tid"]],
                e["name"],
                e["ts"] / 1e6,
                (e["ts"] + e["dur"]) / 1e6,
                e["args"]["unit"],
                e["pid"],
            )
            for e in events
            if e["ph"] == "X"
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a trace of a timeline: {type(error).__name__}: {error}") from error


# -- recording ---------------------------------------------------------------------------------------------------------


class Tape:
    """The recorder to which a run reports its operations. Outside of `record` its methods record nothing.

    Args:
        clock: makes a clock for one recording.
        streams: whether the device has streams besides the compute stream.
    """

    def __init__(self, clock: "Callable[[], Clock]", *, rank: int, streams: bool) -> None:
        self._clock, self._rank, self._streams = clock, rank, streams
        self._recording: _Recording | None = None
        self._yields = False

    @contextmanager
    def record(self, *, profile: bool = False, yields: bool = False) -> Iterator[Timeline]:
        """Record the operations in the block: see `zero.record`.

        Args:
            profile: also name the operations in torch's profiler.
            yields: let another recording replace this one, whose timeline then stays empty.

        Raises:
            StaleStateError: another recording is running, which does not yield.
        """
        if self._recording is not None and not self._yields:
            raise StaleStateError("this run is being recorded already. End that recording first.")
        timeline = Timeline()
        recording = self._recording = _Recording(self._clock(), self._rank, profile)
        self._yields = yields
        try:
            yield timeline
        finally:
            if self._recording is recording:
                self._recording = None
                timeline.spans = Timeline(recording.end()).spans

    def doing(self, row: str, unit: str) -> AbstractContextManager[None]:
        """Record that the training thread itself does the work of `row` in the block."""
        return _NOTHING if (recording := self._recording) is None else recording.doing(row, unit)

    def standing(self, rows: str, unit: str = "") -> AbstractContextManager[None]:
        """Record that the training thread waits for `rows` in the block."""
        return _NOTHING if (recording := self._recording) is None else recording.standing(rows, unit)

    def stream_standing(self, rows: str, unit: str = "") -> AbstractContextManager[None]:
        """Record that the compute stream waits for `rows` on another stream, if the device has streams."""
        return self.standing(rows, unit) if self._streams else _NOTHING

    def streaming(self, row: str, unit: str) -> AbstractContextManager[None]:
        """Record that the current stream, a side stream, does the work of `row`, if the device has streams."""
        return recording.streaming(row, unit) if self._streams and (recording := self._recording) else _NOTHING

    def under_way(self, row: str, unit: str, start: Callable[[], Sequence[Handle]]) -> Sequence[Handle]:
        """Call `start`, which starts asynchronous operations, and record them; return the handles to wait for."""
        return start() if (recording := self._recording) is None else [recording.under_way(row, unit, start)]

    def forward(self, path: str, unit: str) -> AbstractContextManager[None]:
        """Record that a site's forward runs in the block, which may contain the forwards of inner sites."""
        return _NOTHING if (recording := self._recording) is None else recording.forward(path, unit)

    def passed(self, name: str, unit: str = "") -> None:
        """Record that the computation since the previous mark ends here; `name` and `unit` describe it."""
        if (recording := self._recording) is not None:
            recording.passed(f"{name} {unit}" if unit else name, unit)

    def of_store(self, units: Sequence[str]) -> Callable[..., AbstractContextManager[None]]:
        """Return the callback (a `Watch`) to which a store reports its operations; `units` has its units' names."""

        def watch(what: str, unit: int = -1, *part: object) -> AbstractContextManager[None]:
            if (recording := self._recording) is None:
                return _NOTHING
            if what == "wait":
                return recording.standing(ALL_STORE_ROWS, "")
            return recording.paging(STORE_ROWS[what], units[unit], part)

        return watch


_NOTHING = nullcontext()


class _Entry:
    """A span during a recording, whose begin and end are moments of the clock."""

    def __init__(self, row: str, name: str, unit: str, begin: Any) -> None:
        self.row, self.name, self.unit, self.begin = row, name, unit, begin
        self.end: Any = None  # None until the span has ended


class _Recording:
    """A recording in progress. Threads append to its lists without a lock, because `list.append` is atomic."""

    def __init__(self, clock: "Clock", rank: int, profile: bool) -> None:
        self.clock, self._rank, self._profile = clock, rank, profile
        self._entries: list[_Entry] = []
        self._marks: list[tuple[Any, str, str]] = []
        self._sites = [("", "")]  # (path, unit) of the sites whose forward is running, the innermost last

    @contextmanager
    def doing(self, row: str, unit: str) -> Iterator[None]:
        name = f"{row} {unit}"
        with self.standing(row, unit), self._during(row, name, unit, self.clock.here):
            yield

    @contextmanager
    def standing(self, rows: str, unit: str) -> Iterator[None]:
        with self._range(f"{rows} {unit}"), self._during(EXPOSED, rows, unit, self.clock.main):
            yield

    @contextmanager
    def paging(self, row: str, unit: str, part: Sequence[object]) -> Iterator[None]:
        name = " ".join(map(str, (row, unit, *part)))
        with self._range(name), self._during(row, name, unit, self.clock.host):
            yield

    def streaming(self, row: str, unit: str) -> AbstractContextManager[None]:
        return self._during(row, f"{row} {unit}", unit, self.clock.here)

    def under_way(self, row: str, unit: str, start: Callable[[], Sequence[Handle]]) -> Handle:
        """Start several operations, recorded as one span; return one handle that waits for all, the last one first."""
        entry = self._add(row, f"{row} {unit}", unit, self.clock.here())
        with self.standing(row, unit):
            handles = start()

        def wait() -> None:
            with self.standing(row, unit):
                for handle in reversed(handles):
                    handle.wait()
            entry.end = self.clock.here()

        return Then(wait)

    @contextmanager
    def forward(self, path: str, unit: str) -> Iterator[None]:
        self._pass_site()
        self._sites.append((path, unit))
        try:
            with self._range(f"forward {path}"):
                yield
        finally:
            self._pass_site()
            self._sites.pop()

    def _pass_site(self) -> None:
        path, unit = self._sites[-1]
        self.passed(f"forward {path}" if path else "forward", unit)

    def passed(self, name: str, unit: str) -> None:
        self._marks.append((self.clock.main(), name, unit))

    def end(self) -> list[Span]:
        """Return all spans of the recording; spans that have not ended end now."""
        step_s = self.clock.seconds(self.clock.main())
        spans = [span for entry in tuple(self._entries) if (span := self._span(entry, step_s)).begin_s < span.end_s]
        marks = [Mark(self.clock.seconds(at), name, unit) for at, name, unit in tuple(self._marks)]
        exposed = [(span.begin_s, span.end_s) for span in spans if span.row == EXPOSED]
        return [*spans, *computing(exposed, marks, step_s, self._rank)]

    def _span(self, entry: _Entry, step_s: float) -> Span:
        end = entry.end  # read once, because its thread may set it meanwhile
        begin_s, end_s = self.clock.seconds(entry.begin), step_s if end is None else self.clock.seconds(end)
        return Span(entry.row, entry.name, max(begin_s, 0.0), min(end_s, step_s), entry.unit, self._rank)

    @contextmanager
    def _during(self, row: str, name: str, unit: str, moment: Callable[[], Any]) -> Iterator[None]:
        entry = self._add(row, name, unit, moment())
        try:
            yield
        finally:
            entry.end = moment()

    def _add(self, row: str, name: str, unit: str, begin: Any) -> _Entry:
        entry = _Entry(row, name, unit, begin)
        self._entries.append(entry)
        return entry

    def _range(self, name: str) -> AbstractContextManager[Any]:
        if not self._profile:
            return _NOTHING
        from torch.profiler import record_function  # reading a timeline needs no torch

        return record_function(name)
