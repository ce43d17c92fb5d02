"""Charts of lines as SVG text: one chart, and small multiples. Pure functions, as those of `bars` and `spans`.

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
from zero.tracker.report.scale import Scale, finite_values, linear, logarithmic, number_text, size

COLOURS = ("blue", "amber", "green", "purple", "teal", "rose", "slate")
"""Colours that a page must define as CSS variables, such as `--blue`. It must also define `--ink`, `--soft`, `--line`,
`--grid` and `--card`."""

FEW, SOME = 24, 240
"""A line of up to FEW points shows a dot at each point; a line of up to SOME points shows their values on hovering."""

MANY = 700
"""The number of points above which a line is thinned to the lowest and the highest point of about each pixel."""

Point = tuple[object, object]


class Series(NamedTuple):
    """A line through (x, y) points in the given order; values that are not finite numbers are gaps.

    A pale line is behind the others, without dots.
    """

    name: str
    points: Sequence[Point]
    colour: str = "blue"
    style: Literal["line", "dots", "pale"] = "line"


class Panel(NamedTuple):
    """One of several small charts with the same axes; `note` is written in its top right corner."""

    name: str
    points: Sequence[Point]
    colour: str = "blue"
    note: str = ""


# The charts


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
    named = [(line.name, svg.shape_style(line.colour, 0.3 if line.style == "pale" else 1.0)) for line in series]
    legend, top = svg.legend(named if len(series) > 1 else [], width)
    right = width - svg.MARGIN
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
    from_behind = sorted(series, key=lambda line: line.style != "pale")
    body = [grid, *(_line(line, x, y, binary, x_name) for line in from_behind), legend]
    if not any(x.shows(at) and y.shows(value) for line in series for at, value in line.points):
        body.append(svg.text_element((left + right) / 2, (top + bottom) / 2, "nothing was measured", "middle"))
    return svg.document(width, height, f"{title}: {'; '.join(labels)}", body)


def multiples(panels: Sequence[Panel], *, title: str, log: bool = False, width: float = 2 * svg.WIDTH) -> str:
    """Return a grid of small charts with the same axes, one per panel. The lines of the other panels are in grey."""
    choices = (4, 5, 3) if width > svg.WIDTH else (2,)
    columns = min(choices, key=lambda count: -len(panels) % count)  # the fewest empty cells in the last row
    tall, below, top, bottom = 132.0, 46.0, 26.0, 128.0
    y_values = [y for panel in panels for _, y in panel.points]
    y = logarithmic(y_values, bottom, top) if log else linear(y_values, bottom, top, count=3)
    left = 10 + max(svg.text_width(name, svg.LARGEST) for _, name in y.ticks)
    wide = (width - left) / columns
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
    return svg.document(width, max(1, rows) * (tall + below) - 18, f"{title}: {len(panels)} charts", body)


def smoothed(points: Sequence[Point], reach: int) -> list[Point]:
    """Return the means of the known values up to `reach` points before and after each point; gaps stay gaps."""
    values = [finite_values(value) for _, value in points]
    means: list[Point] = []
    for place, (at, _) in enumerate(points):
        near = [value for value in values[max(0, place - reach) : place + reach + 1] if value is not None]
        means.append((at, sum(value / len(near) for value in near) if values[place] is not None else None))
    return means


# Lines and points


def _line(line: Series, x: Scale, y: Scale, binary: bool, x_name: str) -> str:
    if line.style == "dots":
        return _dots(line, x, y, 3.4, x_name, few=len(line.points), binary=binary)
    if line.style == "pale":
        return _path(line.points, x, y, "line pale", f"stroke:var(--{line.colour})", MANY)
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
