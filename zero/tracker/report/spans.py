"""The timeline of a step as SVG text. See `chart` for colours."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import zero.tracker.report.svg as svg
from zero.tracker.report.scale import duration_unit, finite_values, linear, number_text

MOST_LANES = 6


class ChartSpan(NamedTuple):
    """An interval of time; `label` is written on it if there is room."""

    begin_s: float
    end_s: float
    name: str
    label: str = ""
    shade: float = 1.0


class TimelineRow(NamedTuple):
    """A row of a timeline: spans of one name and colour. Overlapping spans are drawn below each other."""

    name: str
    spans: Sequence[ChartSpan]
    colour: str


def timeline(rows: Sequence[TimelineRow], *, title: str, width: float = 2 * svg.WIDTH) -> str:
    """Return a timeline: rows of spans, with time from left to right. Overlapping spans have separate lanes."""
    kept = [row._replace(spans=sorted(_known_spans(row.spans))) for row in rows]
    first = min((span.begin_s for row in kept for span in row.spans), default=0.0)
    last = max((span.end_s for row in kept for span in row.spans), default=0.0)
    unit, unit_name = duration_unit(last - first, least=2)
    left = 14 + max((svg.text_width(row.name, svg.LARGEST) for row in kept), default=0.0)
    right = width - svg.MARGIN
    x = linear([0, (last - first) / unit], left, right, snug=True, from_zero=True, count=round(width / 110))
    body, y = [], 10.0
    for row in kept:
        drawn = [(x.at((span.begin_s - first) / unit), x.at((span.end_s - first) / unit), span) for span in row.spans]
        lanes = _lanes(drawn)
        height = max(24.0, 13.0 * len(lanes))
        body.append(svg.text_element(left - 8, y + height / 2 + 4, row.name, "end", "tick name"))
        for index, lane in enumerate(lanes):
            tall = height / len(lanes)
            body += [_span(*placed, y + index * tall, tall - 1, row.colour, unit, unit_name) for placed in lane]
        y += height + 8
        body.append(svg.rule("grid", left, y - 4, right, y - 4))
    label = "; ".join(f"{row.name} {len(row.spans)} spans" for row in kept)
    axis = [svg.ticks_below(x, 4, y, width), svg.text_element(right, y + 32, unit_name, "end")]
    return svg.document(width, y + 38, f"{title}: {label}", [*axis, *body])


def _known_spans(spans: Iterable[ChartSpan]) -> Iterator[ChartSpan]:
    """Yield the spans whose times are finite and whose end is not before their begin."""
    for span in spans:
        begin_s, end_s = finite_values(span.begin_s), finite_values(span.end_s)
        if begin_s is not None and end_s is not None and end_s >= begin_s:
            yield span._replace(begin_s=begin_s, end_s=end_s)


def _lanes(drawn: Iterable[tuple[float, float, ChartSpan]]) -> list[list[tuple[float, float, ChartSpan]]]:
    """Distribute spans over at most `MOST_LANES` lanes so that they do not overlap.

    If no lane is free, use the lane that becomes free first. Of neighbours in a lane that are too short to be seen,
    only the first is kept.
    """
    lanes: list[list[tuple[float, float, ChartSpan]]] = [[]]
    for begin, end, span in drawn:
        free = next((lane for lane in lanes if not lane or lane[-1][1] <= begin + 0.01), None)
        if free is None and len(lanes) < MOST_LANES:
            lanes.append(free := [])
        lane = min(lanes, key=lambda lane: lane[-1][1]) if free is None else free
        if not lane or end - begin >= 0.3 or begin - lane[-1][0] >= 0.5:
            lane.append((begin, end, span))
    return lanes


def _span(
    begin: float, end: float, span: ChartSpan, y: float, height: float, colour: str, unit: float, unit_name: str
) -> str:
    width = max(0.75, end - begin - 0.5)
    text = f"{span.name}: {number_text((span.end_s - span.begin_s) / unit, 3)} {unit_name}"
    fits = height >= 12 and svg.text_width(span.label, 10.5) + 6 <= width
    label = svg.text_element(begin + width / 2, y + height / 2 + 3.5, span.label, "middle", "on") if fits else ""
    return (
        f'<rect x="{begin:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="{min(2.5, width / 3):.2f}" '
        f'style="fill:var(--{colour});fill-opacity:{span.shade:g}"><title>{svg.escape(text)}</title></rect>{label}'
    )
