"""A recording of one step: the time of every operation, and the share that was hidden behind compute.

A `Span` is one operation from its begin to its end, in one of these rows:

    compute    computation of the training thread; on a GPU, of the main stream, with the launches
    gather     the all-gather of a unit, from its start until the end of the wait for it
    reduce     the reduction of a gradient, or of the numbers at the end of a step, from start to end of the wait
    page in    the transfer of one page from the store
    update     a part of the optimizer's update
    page out   the transfer of one page to the store
    move       the move of a unit to other tiers by `zero.move`
    exposed    the training thread waits for the rows in the span's name, or does their work itself

Each moment of the step is in either `compute` or `exposed`. A row is **busy** while at least one of its spans is in
progress. **Exposed** is the part of that time in which the training thread waited for the row; the rest is **hidden**.
A wait for the store counts as a wait for all three of its rows, so the sum of exposed times may exceed the step's time.

Source: Holistic Trace Analysis (Meta 2023), "communication computation overlap".
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zero.platform.run_files import publish

if TYPE_CHECKING:  # it imports torch, which reading a timeline does not need
    pass

TIMELINE_ROWS = ("gather", "compute", "reduce", "page in", "update", "page out", "move")
EXPOSED = "exposed"


BeginEnd = tuple[float, float]
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


class RowSeconds(NamedTuple):
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

    def hidden(self) -> dict[str, RowSeconds]:
        """Return busy and exposed seconds of every row in `TIMELINE_ROWS`, summed over the ranks."""
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


def union(intervals: Iterable[BeginEnd]) -> list[BeginEnd]:
    """Merge overlapping intervals; return disjoint, non-empty intervals in ascending order."""
    merged: list[BeginEnd] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif begin < end:
            merged.append((begin, end))
    return merged


def intersection(ours: Iterable[BeginEnd], theirs: Iterable[BeginEnd]) -> list[BeginEnd]:
    """Return the time after 0 that both lists of intervals cover, as disjoint intervals in ascending order."""
    first, second = union(ours), union(theirs)
    end = max((stop for _, stop in first + second), default=0.0)
    return outside(outside(first, end) + outside(second, end), end)


def outside(intervals: Iterable[BeginEnd], end: float) -> list[BeginEnd]:
    """Return the parts of (0, end) that none of `intervals` covers, in ascending order."""
    free, begin = [], 0.0
    for start, stop in [*union(intervals), (end, end)]:
        if begin < min(start, end):
            free.append((begin, min(start, end)))
        begin = max(begin, stop)
    return free


def length(intervals: Iterable[BeginEnd]) -> float:
    """Return the total time that at least one interval covers, in seconds."""
    return sum(end - begin for begin, end in union(intervals))


def shares(spans: Sequence[Span]) -> dict[str, RowSeconds]:
    """Return busy and exposed seconds of each row, summed over the ranks."""
    shares = {row: RowSeconds(0.0, 0.0) for row in TIMELINE_ROWS}
    for rank in {span.rank for span in spans}:
        of_rank = [span for span in spans if span.rank == rank]
        exposed = [span for span in of_rank if span.row == EXPOSED]
        for row, before in shares.items():
            under_way = [(span.begin_s, span.end_s) for span in of_rank if span.row == row]
            waited = [(span.begin_s, span.end_s) for span in exposed if row in span.name.split(", ")]
            exposed_s = length(intersection(under_way, waited))
            shares[row] = RowSeconds(before.busy_s + length(under_way), before.exposed_s + exposed_s)
    return shares


class Mark(NamedTuple):
    """The end of a computation, which began at the previous mark."""

    at_s: float
    name: str
    unit: str


def computing(exposed: Iterable[BeginEnd], marks: Sequence[Mark], step_s: float, rank: int) -> list[Span]:
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
    order = (*TIMELINE_ROWS, EXPOSED)
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
