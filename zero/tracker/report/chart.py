"""Charts as SVG text: lines, stacked bars, timelines, small multiples. Pure functions.

Colours are names of CSS variables, so that the page can define them for its light and dark themes. There is no script:
the exact value of a mark is in its `<title>`, which browsers show on hovering and screen readers read. Missing values
are gaps in a line, and a point between two gaps is drawn as a dot. Coordinates are pixels of a box that is `WIDTH` or
twice as wide, and that the page may stretch.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

import zero.tracker.report.svg as svg
from zero.tracker.report.scale import Scale, duration_unit, finite_values, linear, logarithmic, number_text, size

COLOURS = ("blue", "amber", "green", "purple", "teal", "rose", "slate")
"""Colours that a page must define as CSS variables, such as `--blue`. It must also define `--ink`, `--soft`, `--line`,
`--grid` and `--card`."""

FEW, SOME = 24, 240
"""A line of up to FEW points shows a dot at each point; a line of up to SOME points shows their values on hovering."""

MOST_LANES = 6

MANY = 700
"""The number of points above which a line is thinned to the lowest and the highest point of about each pixel."""

Point = tuple[object, object]


class Series(NamedTuple):
    """A line through (x, y) points in the given order; values that are not finite numbers are gaps."""

    name: str
    points: Sequence[Point]
    colour: str = "blue"
    style: Literal["line", "dots"] = "line"


class BarPart(NamedTuple):
    """A segment of a stacked bar; `shade` is its opacity. Segments with the same name share an entry in the legend."""

    name: str
    value: float
    colour: str
    shade: float = 1.0


class Bar(NamedTuple):
    """A stacked bar."""

    name: str
    parts: Sequence[BarPart]


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


class Panel(NamedTuple):
    """One of several small charts with the same axes; `note` is written in its top right corner."""

    name: str
    points: Sequence[Point]
    colour: str = "blue"
    note: str = ""


# The four charts


def lines(
    series: Sequence[Series],
    *,
    title: str,
    x_name: str = "step",
    log: bool = False,
    log_x: bool = False,
    from_zero: bool = False,
    binary: bool = False,
    width: float = svg.WIDTH,
    height: float = 236.0,
) -> str:
    """Return a line chart of one or several series.

    Args:
        title: for screen readers.
        log, log_x: whether the y and the x axis are logarithmic; values that are not positive are then gaps.
        from_zero: the y axis contains zero.
        binary: y is in bytes.
        width, height: size of the box in pixels; a long legend increases the height.
    """
    legend, top = svg.legend([(line.name, line.colour, 1.0) for line in series] if len(series) > 1 else [], width)
    right = width - 18
    height = max(height, top + 120)
    top, bottom = top + 10, height - 44
    y_values = [y for line in series for _, y in line.points]
    y = logarithmic(y_values, bottom, top) if log else linear(
        y_values, bottom, top, from_zero=from_zero, binary=binary, count=4 if height < 200 else 5
    )  # fmt: skip
    left = 12 + max(svg.text_width(name, svg.LARGEST) for _, name in y.ticks)
    x_values = [x for line in series for x, _ in line.points]
    inset = 14 * any(line.style == "dots" for line in series)  # keeps dots off the axis
    x = logarithmic(x_values, left, right) if log_x else linear(
        x_values, left + inset, right - inset, snug=True, whole=_is_whole(x_values), count=max(2, round(width / 90))
    )  # fmt: skip
    labels = [_label(line, x, y, size if binary else number_text, x_name) for line in series]
    grid = svg.grid(x, y, left, right, bottom, x_name)
    body = [grid, *(_line(line, x, y, binary, x_name) for line in series), legend]
    if not any(x.shows(at) and y.shows(value) for line in series for at, value in line.points):
        body.append(svg.text_element((left + right) / 2, (top + bottom) / 2, "nothing was measured", "middle"))
    return svg.document(width, height, f"{title}: {'; '.join(labels)}", body)


def bars(rows: Sequence[Bar], *, title: str, order: Sequence[str] = ()) -> str:
    """Return a chart of horizontal stacked bars in bytes, each with its total; negative parts are left out.

    Args:
        order: names of parts in the order of the legend; other parts follow.
    """
    kept = [
        Bar(
            bar.name,
            [part._replace(value=value) for part in bar.parts if (value := finite_values(part.value) or 0.0) > 0],
        )
        for bar in rows
    ]
    shown = {part.name: (part.name, part.colour, part.shade) for bar in kept for part in bar.parts}
    in_order = dict.fromkeys(name for name in [*order, *shown] if name in shown)
    legend, top = svg.legend([shown[name] for name in in_order], svg.WIDTH)
    top += 8
    left = 14 + max((min(150.0, svg.text_width(bar.name, svg.LARGEST)) for bar in kept), default=0.0)
    totals = [min(1e300, sum(part.value for part in bar.parts)) for bar in kept]
    right = svg.WIDTH - 16 - max((svg.text_width(size(total), svg.LARGEST) for total in totals), default=0.0)
    x = linear([0, *totals], left, right, binary=True, count=4, snug=True)
    bottom = top + 32 * max(1, len(kept))
    body = [svg.ticks_below(x, top, bottom), legend]
    for index, (bar, total) in enumerate(zip(kept, totals, strict=True)):
        y = top + 32 * index + 5
        body.append(svg.text_element(left - 8, y + 15, svg.fit_text(bar.name, 150, svg.LARGEST), "end", "tick name"))
        end = 0.0
        for part in bar.parts:
            begin, end = end, end + part.value
            width = max(0.75, x.at(end) - x.at(begin) - 1)
            body.append(
                f'<rect x="{x.at(begin):.2f}" y="{y:.2f}" width="{width:.2f}" height="22" rx="2.5" '
                f'style="fill:var(--{part.colour});fill-opacity:{part.shade:g}">'
                f"<title>{svg.escape(f'{bar.name}, {part.name}: {size(part.value)}')}</title></rect>"
            )
        body.append(svg.text_element(x.at(total) + 7, y + 15, size(total), "start"))
    label = "; ".join(f"{bar.name} {size(total)}" for bar, total in zip(kept, totals, strict=True))
    return svg.document(svg.WIDTH, bottom + 24, f"{title}: {label}", body)


def timeline(rows: Sequence[TimelineRow], *, title: str) -> str:
    """Return a timeline: rows of spans, with time from left to right. Overlapping spans have separate lanes."""
    kept = [row._replace(spans=sorted(_known_spans(row.spans))) for row in rows]
    first = min((span.begin_s for row in kept for span in row.spans), default=0.0)
    last = max((span.end_s for row in kept for span in row.spans), default=0.0)
    unit, unit_name = duration_unit(last - first, least=2)
    left = 14 + max((svg.text_width(row.name, 12.5) for row in kept), default=0.0)
    x = linear([0, (last - first) / unit], left, 2 * svg.WIDTH - 18, snug=True, from_zero=True, count=10)
    body, y = [], 10.0
    for row in kept:
        drawn = [(x.at((span.begin_s - first) / unit), x.at((span.end_s - first) / unit), span) for span in row.spans]
        lanes = _lanes(drawn)
        height = max(24.0, 13.0 * len(lanes))
        body.append(svg.text_element(left - 8, y + height / 2 + 4, row.name, "end", "name"))
        for index, lane in enumerate(lanes):
            tall = height / len(lanes)
            body += [_span(*placed, y + index * tall, tall - 1, row.colour, unit, unit_name) for placed in lane]
        y += height + 8
        body.append(svg.rule("grid", left, y - 4, 2 * svg.WIDTH - 18, y - 4))
    label = "; ".join(f"{row.name} {len(row.spans)} spans" for row in kept)
    axis = [svg.ticks_below(x, 4, y), svg.text_element(2 * svg.WIDTH - 18, y + 32, unit_name, "end")]
    return svg.document(2 * svg.WIDTH, y + 38, f"{title}: {label}", [*axis, *body])


def multiples(panels: Sequence[Panel], *, title: str, log: bool = False) -> str:
    """Return a grid of small charts with the same axes, one per panel. The lines of the other panels are in grey."""
    columns = min((4, 5, 3), key=lambda count: -len(panels) % count)  # the fewest empty cells in the last row
    tall, below, top, bottom = 132.0, 46.0, 26.0, 128.0
    y_values = [y for panel in panels for _, y in panel.points]
    y = logarithmic(y_values, bottom, top) if log else linear(y_values, bottom, top, count=3)
    left = 10 + max(svg.text_width(name, svg.LARGEST) for _, name in y.ticks)
    wide = (2 * svg.WIDTH - left) / columns
    right = wide - 16
    x_values = [x for panel in panels for x, _ in panel.points]
    x = linear(x_values, 0.0, right, snug=True, whole=_is_whole(x_values), count=3)
    all_lines = "".join(_path(panel.points, x, y, "ghost", "", MANY // 8) for panel in panels)
    name = f"others-{zlib.crc32(all_lines.encode()):08x}"
    body = [f'<defs><g id="{name}">{all_lines}</g></defs>']
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        body += [
            f'<g transform="translate({left + column * wide:.2f} {row * (tall + below):.2f})">',
            svg.text_element(
                0, 12, svg.fit_text(panel.name, right - svg.text_width(panel.note) - 8, 12.5), "start", "name"
            ),
            svg.text_element(right, 12, panel.note, "end"),
            svg.panel_grid(x, y, right, bottom, first=column == 0),
            f'<use href="#{name}"/>' if len(panels) > 1 else "",
            _path(panel.points, x, y, "line", f"stroke:var(--{panel.colour})", MANY // 4),
            _dots(panel, x, y, 2.2, "step", few=1),
            "</g>",
        ]
    rows = -(-len(panels) // columns)
    return svg.document(2 * svg.WIDTH, max(1, rows) * (tall + below) - 18, f"{title}: {len(panels)} charts", body)


# Lines and points


def _line(line: Series, x: Scale, y: Scale, binary: bool, x_name: str) -> str:
    if line.style == "dots":
        return _dots(line, x, y, 3.4, x_name, few=len(line.points), binary=binary)
    dots = _dots(line, x, y, 2.4, x_name, few=FEW, binary=binary)
    return _path(line.points, x, y, "line", f"stroke:var(--{line.colour})", MANY) + dots


def _path(points: Sequence[Point], x: Scale, y: Scale, css_class: str, style: str, limit: int) -> str:
    """Return an SVG path through the points that have coordinates, with gaps; a point between two gaps is left out."""
    runs = [_thin(run, limit) for run in _runs(points, x, y) if len(run) > 1]
    if not runs:
        return ""
    way = "".join("M" + "L".join(f"{px:.2f} {py:.2f}" for px, py in run) for run in runs)
    return f'<path class="{css_class}" d="{way}"' + (f' style="{style}"/>' if style else "/>")


def _dots(
    line: Series | Panel, x: Scale, y: Scale, radius: float, x_name: str, *, few: int, binary: bool = False
) -> str:
    """Return SVG dots that show values on hovering. With more than `few` points, dots with neighbours are invisible."""
    shown = [(at, value) for at, value in line.points if x.shows(at) and y.shows(value)]
    single = {run[0] for run in _runs(line.points, x, y) if len(run) == 1}
    circles = []
    for at, value in shown:
        place = x.at(at), y.at(value)
        visible = len(shown) <= few or place in single
        if not visible and len(shown) > SOME:
            continue
        style = f'r="{radius}" style="fill:var(--{line.colour})"' if visible else 'r="5" class="felt"'
        text = f"{x_name} {number_text(at)}: {size(value) if binary else number_text(value, 5)}"
        circles.append(
            f'<circle cx="{place[0]:.2f}" cy="{place[1]:.2f}" {style}><title>{svg.escape(text)}</title></circle>'
        )
    return "".join(circles)


def _runs(points: Sequence[Point], x: Scale, y: Scale) -> Iterator[list[tuple[float, float]]]:
    """Yield each series of points without a gap, as coordinates."""
    for has_place, run in groupby(points, key=lambda point: x.shows(point[0]) and y.shows(point[1])):
        if has_place:
            yield [(x.at(at), y.at(value)) for at, value in run]


def _thin(run: list[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """Return about `limit` of the points: both ends, and the lowest and highest point of each interval."""
    if len(run) <= limit:
        return run
    stride = -(-2 * len(run) // limit)
    kept = [run[0]]
    for begin in range(1, len(run) - 1, stride):
        stretch = run[begin : min(begin + stride, len(run) - 1)]
        ends = min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])
        kept += sorted(set(ends))
    return [*kept, run[-1]]


def _is_whole(values: Iterable[object]) -> bool:
    """Return whether all numbers are integers, so that the axis needs integer ticks."""
    return all(value is None or value.is_integer() for value in map(finite_values, values))


def _label(line: Series, x: Scale, y: Scale, write: Callable[[object], str], x_name: str) -> str:
    """Return a phrase about a series for screen readers: its first and last point."""
    shown = [(at, value) for at, value in line.points if x.shows(at) and y.shows(value)]
    if not shown:
        return f"{line.name} was not measured"
    (first_x, first_y), (last_x, last_y) = shown[0], shown[-1]
    begin = f"{write(first_y)} at {x_name} {number_text(first_x)}"
    return f"{line.name} from {begin} to {write(last_y)} at {number_text(last_x)}"


# Spans


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
