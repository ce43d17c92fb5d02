"""The section of a run's page about the recorded step: its timeline, and the shares of it that were exposed."""

import zero.tracker.report.svg as svg
from zero.platform.timeline import TIMELINE_ROWS, Span, Timeline, shares
from zero.tracker.report.folder import RecordedRun
from zero.tracker.report.page import Html, by_window, figure, section, table
from zero.tracker.report.scale import number_text, percent, seconds
from zero.tracker.report.spans import ChartSpan, TimelineRow, timeline

ROW_COLOURS = {"gather": "green", "compute": "blue", "reduce": "amber", "page in": "teal", "update": "purple"}
"""Colours of the rows of a timeline; other rows, such as page out, are rose."""


def step_section(run: RecordedRun) -> Html:
    """Return the section about the recorded step; empty without a trace."""
    spans = [span for span in run.trace if span.rank == min(traced.rank for traced in run.trace)]
    if not spans:
        return Html()
    drawn = {name: [_drawn(span) for span in spans if span.row == name] for name in TIMELINE_ROWS}
    rows = [TimelineRow(name, placed, ROW_COLOURS.get(name, "rose")) for name, placed in drawn.items() if placed]
    drawings = (timeline(rows, title="timeline of one step", width=width) for width in (2 * svg.WIDTH, svg.NARROW))
    head = ["row", "spans", "busy", "hidden", "exposed", "of the step"]
    return section(
        "One step",
        figure(by_window(*drawings), "Timeline", "point at a span for what it is"),
        table(head, _shares(spans), numbers=range(1, 6)),
        note="Exposed: the training thread waited for it. Hidden: the thread did not wait. One wait may be for several "
        "rows. trace.json holds the same for ui.perfetto.dev.",
    )


def _drawn(span: Span) -> ChartSpan:
    return ChartSpan(span.begin_s, span.end_s, span.name, span.unit, 0.6 if "backward" in span.name else 1.0)


def _shares(spans: list[Span]) -> list[tuple[str, ...]]:
    """Return a table of the timeline's rows: number of spans, busy time, and its hidden and exposed parts."""
    step_s = Timeline(spans).step_s
    rows: list[tuple[str, ...]] = []
    for name, share in shares(spans).items():
        part = percent(share.exposed_s / step_s if step_s else None)
        times = ("", "", "") if name == "compute" else (seconds(share.hidden_s), seconds(share.exposed_s), part)
        count = sum(span.row == name for span in spans)
        rows += [(name, number_text(count, 9), seconds(share.busy_s), *times)] if count else []
    return rows
