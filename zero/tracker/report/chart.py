"""Charts as SVG text: lines, stacked bars, timelines, small multiples. Pure functions.

Colours are names of CSS variables, so that the page can define them for its light and dark themes. There is no script:
the exact value of a mark is in its `<title>`, which browsers show on hovering and screen readers read. Missing values
are gaps in a line, and a point between two gaps is drawn as a dot. Coordinates are pixels of a box that is `WIDTH` or
twice as wide, and that the page may stretch.
"""

import html
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from zero.tracker.report.scale import Scale, duration_unit, finite, linear, logarithmic, number, size

WIDTH = 560.0

SMALLEST, SMALLEST_WIDE = 0.53, 0.75
"""The smallest factor by which a chart shrinks before it scrolls instead, so that its text stays legible. SMALLEST is
for charts of `WIDTH`, which must fit 360 pixels, SMALLEST_WIDE for wider charts, which scroll on a phone anyway."""

LARGEST = 15.5
"""Font size in pixels of ticks and legends on a narrow page, where charts shrink."""

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


class Part(NamedTuple):
    """A segment of a stacked bar; `shade` is its opacity. Segments with the same name share an entry in the legend."""

    name: str
    value: float
    colour: str
    shade: float = 1.0


class Bar(NamedTuple):
    """A stacked bar."""

    name: str
    parts: Sequence[Part]


class Span(NamedTuple):
    """An interval of time; `label` is written on it if there is room."""

    begin_s: float
    end_s: float
    name: str
    label: str = ""
    shade: float = 1.0


class Row(NamedTuple):
    """A row of a timeline: spans of one name and colour. Overlapping spans are drawn below each other."""

    name: str
    spans: Sequence[Span]
    colour: str


class Panel(NamedTuple):
    """One of several small charts with the same axes; `note` is written in its top right corner."""

    name: str
    points: Sequence[Point]
    colour: str = "blue"
    note: str = ""


def escape(value: object) -> str:
    """Escape text for HTML, SVG and attributes. Characters that XML cannot hold become U+FFFD."""
    return html.escape(_NOT_XML.sub("\ufffd", str(value)))


_NOT_XML = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0010fffd]")


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
    width: float = WIDTH,
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
    legend, top = _legend([(line.name, line.colour, 1.0) for line in series] if len(series) > 1 else [], width)
    right = width - 18
    height = max(height, top + 120)
    top, bottom = top + 10, height - 44
    y_values = [y for line in series for _, y in line.points]
    y = logarithmic(y_values, bottom, top) if log else linear(
        y_values, bottom, top, from_zero=from_zero, binary=binary, count=4 if height < 200 else 5
    )  # fmt: skip
    left = 12 + max(_text_width(name, LARGEST) for _, name in y.ticks)
    x_values = [x for line in series for x, _ in line.points]
    inset = 14 * any(line.style == "dots" for line in series)  # keeps dots off the axis
    x = logarithmic(x_values, left, right) if log_x else linear(
        x_values, left + inset, right - inset, snug=True, whole=_is_whole(x_values), count=max(2, round(width / 90))
    )  # fmt: skip
    labels = [_label(line, x, y, size if binary else number, x_name) for line in series]
    body = [_grid(x, y, left, right, bottom, x_name), *(_line(line, x, y, binary, x_name) for line in series), legend]
    if not any(x.shows(at) and y.shows(value) for line in series for at, value in line.points):
        body.append(_text((left + right) / 2, (top + bottom) / 2, "nothing was measured", "middle"))
    return _svg(width, height, f"{title}: {'; '.join(labels)}", body)


def bars(rows: Sequence[Bar], *, title: str, order: Sequence[str] = ()) -> str:
    """Return a chart of horizontal stacked bars in bytes, each with its total; negative parts are left out.

    Args:
        order: names of parts in the order of the legend; other parts follow.
    """
    kept = [
        Bar(bar.name, [part._replace(value=value) for part in bar.parts if (value := finite(part.value) or 0.0) > 0])
        for bar in rows
    ]
    shown = {part.name: (part.name, part.colour, part.shade) for bar in kept for part in bar.parts}
    in_order = dict.fromkeys(name for name in [*order, *shown] if name in shown)
    legend, top = _legend([shown[name] for name in in_order], WIDTH)
    top += 8
    left = 14 + max((min(150.0, _text_width(bar.name, LARGEST)) for bar in kept), default=0.0)
    totals = [min(1e300, sum(part.value for part in bar.parts)) for bar in kept]
    right = WIDTH - 16 - max((_text_width(size(total), LARGEST) for total in totals), default=0.0)
    x = linear([0, *totals], left, right, binary=True, count=4, snug=True)
    bottom = top + 32 * max(1, len(kept))
    body = [_ticks_below(x, top, bottom), legend]
    for index, (bar, total) in enumerate(zip(kept, totals, strict=True)):
        y = top + 32 * index + 5
        body.append(_text(left - 8, y + 15, _fit(bar.name, 150, LARGEST), "end", "tick name"))
        end = 0.0
        for part in bar.parts:
            begin, end = end, end + part.value
            width = max(0.75, x.at(end) - x.at(begin) - 1)
            body.append(
                f'<rect x="{x.at(begin):.2f}" y="{y:.2f}" width="{width:.2f}" height="22" rx="2.5" '
                f'style="fill:var(--{part.colour});fill-opacity:{part.shade:g}">'
                f"<title>{escape(f'{bar.name}, {part.name}: {size(part.value)}')}</title></rect>"
            )
        body.append(_text(x.at(total) + 7, y + 15, size(total), "start"))
    label = "; ".join(f"{bar.name} {size(total)}" for bar, total in zip(kept, totals, strict=True))
    return _svg(WIDTH, bottom + 24, f"{title}: {label}", body)


def timeline(rows: Sequence[Row], *, title: str) -> str:
    """Return a timeline: rows of spans, with time from left to right. Overlapping spans have separate lanes."""
    kept = [row._replace(spans=sorted(_known_spans(row.spans))) for row in rows]
    first = min((span.begin_s for row in kept for span in row.spans), default=0.0)
    last = max((span.end_s for row in kept for span in row.spans), default=0.0)
    unit, unit_name = duration_unit(last - first, least=2)
    left = 14 + max((_text_width(row.name, 12.5) for row in kept), default=0.0)
    x = linear([0, (last - first) / unit], left, 2 * WIDTH - 18, snug=True, from_zero=True, count=10)
    body, y = [], 10.0
    for row in kept:
        drawn = [(x.at((span.begin_s - first) / unit), x.at((span.end_s - first) / unit), span) for span in row.spans]
        lanes = _lanes(drawn)
        height = max(24.0, 13.0 * len(lanes))
        body.append(_text(left - 8, y + height / 2 + 4, row.name, "end", "name"))
        for index, lane in enumerate(lanes):
            tall = height / len(lanes)
            body += [_span(*placed, y + index * tall, tall - 1, row.colour, unit, unit_name) for placed in lane]
        y += height + 8
        body.append(_rule("grid", left, y - 4, 2 * WIDTH - 18, y - 4))
    label = "; ".join(f"{row.name} {len(row.spans)} spans" for row in kept)
    axis = [_ticks_below(x, 4, y), _text(2 * WIDTH - 18, y + 32, unit_name, "end")]
    return _svg(2 * WIDTH, y + 38, f"{title}: {label}", [*axis, *body])


def multiples(panels: Sequence[Panel], *, title: str, log: bool = False) -> str:
    """Return a grid of small charts with the same axes, one per panel. The lines of the other panels are in grey."""
    columns = min((4, 5, 3), key=lambda count: -len(panels) % count)  # the fewest empty cells in the last row
    tall, below, top, bottom = 132.0, 46.0, 26.0, 128.0
    y_values = [y for panel in panels for _, y in panel.points]
    y = logarithmic(y_values, bottom, top) if log else linear(y_values, bottom, top, count=3)
    left = 10 + max(_text_width(name, LARGEST) for _, name in y.ticks)
    wide = (2 * WIDTH - left) / columns
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
            _text(0, 12, _fit(panel.name, right - _text_width(panel.note) - 8, 12.5), "start", "name"),
            _text(right, 12, panel.note, "end"),
            _panel_grid(x, y, right, bottom, first=column == 0),
            f'<use href="#{name}"/>' if len(panels) > 1 else "",
            _path(panel.points, x, y, "line", f"stroke:var(--{panel.colour})", MANY // 4),
            _dots(panel, x, y, 2.2, "step", few=1),
            "</g>",
        ]
    rows = -(-len(panels) // columns)
    return _svg(2 * WIDTH, max(1, rows) * (tall + below) - 18, f"{title}: {len(panels)} charts", body)


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
        text = f"{x_name} {number(at)}: {size(value) if binary else number(value, 5)}"
        circles.append(
            f'<circle cx="{place[0]:.2f}" cy="{place[1]:.2f}" {style}><title>{escape(text)}</title></circle>'
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
    return all(value is None or value.is_integer() for value in map(finite, values))


def _label(line: Series, x: Scale, y: Scale, write: Callable[[object], str], x_name: str) -> str:
    """Return a phrase about a series for screen readers: its first and last point."""
    shown = [(at, value) for at, value in line.points if x.shows(at) and y.shows(value)]
    if not shown:
        return f"{line.name} was not measured"
    (first_x, first_y), (last_x, last_y) = shown[0], shown[-1]
    return f"{line.name} from {write(first_y)} at {x_name} {number(first_x)} to {write(last_y)} at {number(last_x)}"


# Spans


def _known_spans(spans: Iterable[Span]) -> Iterator[Span]:
    """Yield the spans whose times are finite and whose end is not before their begin."""
    for span in spans:
        begin_s, end_s = finite(span.begin_s), finite(span.end_s)
        if begin_s is not None and end_s is not None and end_s >= begin_s:
            yield span._replace(begin_s=begin_s, end_s=end_s)


def _lanes(drawn: Iterable[tuple[float, float, Span]]) -> list[list[tuple[float, float, Span]]]:
    """Distribute spans over at most `MOST_LANES` lanes so that they do not overlap.

    If no lane is free, use the lane that becomes free first. Of neighbours in a lane that are too short to be seen,
    only the first is kept.
    """
    lanes: list[list[tuple[float, float, Span]]] = [[]]
    for begin, end, span in drawn:
        free = next((lane for lane in lanes if not lane or lane[-1][1] <= begin + 0.01), None)
        if free is None and len(lanes) < MOST_LANES:
            lanes.append(free := [])
        lane = min(lanes, key=lambda lane: lane[-1][1]) if free is None else free
        if not lane or end - begin >= 0.3 or begin - lane[-1][0] >= 0.5:
            lane.append((begin, end, span))
    return lanes


def _span(
    begin: float, end: float, span: Span, y: float, height: float, colour: str, unit: float, unit_name: str
) -> str:
    width = max(0.75, end - begin - 0.5)
    text = f"{span.name}: {number((span.end_s - span.begin_s) / unit, 3)} {unit_name}"
    fits = height >= 12 and _text_width(span.label, 10.5) + 6 <= width
    label = _text(begin + width / 2, y + height / 2 + 3.5, span.label, "middle", "on") if fits else ""
    return (
        f'<rect x="{begin:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="{min(2.5, width / 3):.2f}" '
        f'style="fill:var(--{colour});fill-opacity:{span.shade:g}"><title>{escape(text)}</title></rect>{label}'
    )


# Axes, legend, text


def _grid(x: Scale, y: Scale, left: float, right: float, bottom: float, x_name: str) -> str:
    parts = []
    for value, name in y.ticks:
        at, css_class = y.at(value), "axis" if value == y.ticks[0][0] else "grid"
        parts += [_rule(css_class, left, at, right, at), _text(left - 7, at + 4, name, "end")]
    for value, name in x.ticks:
        at = x.at(value)
        parts += [_rule("axis", at, bottom, at, bottom + 4), _text(at, bottom + 21, name, "middle")]
    return "".join(parts) + _text(right, bottom + 39, x_name, "end")


def _panel_grid(x: Scale, y: Scale, right: float, bottom: float, *, first: bool) -> str:
    parts = []
    for value, name in y.ticks:
        at, css_class = y.at(value), "axis" if value == y.ticks[0][0] else "grid"
        parts += [_rule(css_class, 0, at, right, at), _text(-6, at + 4, name, "end") if first else ""]
    for value, name in x.ticks[:1] + x.ticks[-1:] if len(x.ticks) > 1 else x.ticks:
        anchor = "start" if x.at(value) < 12 else "end" if x.at(value) > right - 12 else "middle"
        parts.append(_text(x.at(value), bottom + 15, name, anchor))
    return "".join(parts)


def _ticks_below(x: Scale, top: float, bottom: float) -> str:
    at = [(x.at(value), name) for value, name in x.ticks]
    return "".join(_rule("grid", px, top, px, bottom) + _text(px, bottom + 16, name, "middle") for px, name in at)


def _legend(entries: Iterable[tuple[str, str, float]], width: float) -> tuple[str, float]:
    """Return the legend as SVG, in as many lines as needed, and its height in pixels."""
    parts: list[str] = []
    x, y = 10.0, 14.0
    for name, colour, shade in entries:
        name = _fit(name, width - 60, LARGEST)
        taken = 34 + _text_width(name, LARGEST)
        if x > 10 and x + taken > width:
            x, y = 10.0, y + 19
        parts.append(
            f'<rect x="{x:.2f}" y="{y - 9:.2f}" width="10" height="10" rx="2.5" '
            f'style="fill:var(--{colour});fill-opacity:{shade:g}"/>'
        )
        parts.append(_text(x + 16, y, name, "start"))
        x += taken
    return "".join(parts), y + 6 if parts else 0.0


def _rule(css_class: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{css_class}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'


def _text(x: float, y: float, text: str, anchor: str, css_class: str = "tick") -> str:
    return f'<text class="{css_class}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def _text_width(text: str, font_size: float = 11.5) -> float:
    """Return the estimated width of `text` in pixels; letters of wide scripts, such as Chinese, count more."""
    return sum(1.05 if ord(letter) > 0x2E7F else 0.58 for letter in text) * font_size


def _fit(text: str, width: float, font_size: float = 11.5) -> str:
    """Return `text`, shortened with an ellipsis if it is wider than `width` pixels."""
    if _text_width(text, font_size) <= width:
        return text
    while text and _text_width(text + "…", font_size) > width:
        text = text[:-1]
    return text + "…"


def _svg(width: float, height: float, label: str, body: Iterable[str]) -> str:
    least = (SMALLEST if width <= WIDTH else SMALLEST_WIDE) * width
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width:g} {height:g}" '
        f'style="min-width:{least:.0f}px" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'
    )
