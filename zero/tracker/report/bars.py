"""Charts of bars as SVG text: stacked bars of bytes, and a histogram. See `chart` for colours and gaps."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import zero.tracker.report.svg as svg
from zero.tracker.report.scale import finite_values, linear, logarithmic, number_text, size


class BarPart(NamedTuple):
    """A segment of a stacked bar; `shade` is its opacity. Segments with the same name share an entry in the legend.

    A hatched segment was not measured.
    """

    name: str
    value: float
    colour: str
    shade: float = 1.0
    hatched: bool = False

    @property
    def style(self) -> str:
        return svg.shape_style(self.colour, self.shade, hatched=self.hatched)


class Bar(NamedTuple):
    """A stacked bar."""

    name: str
    parts: Sequence[BarPart]


def bars(
    rows: Sequence[Bar],
    *,
    title: str,
    order: Sequence[str] = (),
    write: Callable[[object], str] = size,
    pitch: float = 32.0,
) -> str:
    """Return a chart of horizontal stacked bars, each with its total; negative parts are left out.

    Args:
        order: names of parts in the order of the legend, which is left out if there is one part; other parts follow.
        write: formats a value; the axis is in bytes if it is `size`.
        pitch: pixels from one bar to the next.
    """
    kept = [
        Bar(
            bar.name,
            [part._replace(value=value) for part in bar.parts if (value := finite_values(part.value) or 0.0) > 0],
        )
        for bar in rows
    ]
    shown = {part.name: (part.name, part.style) for bar in kept for part in bar.parts}
    in_order = dict.fromkeys(name for name in [*order, *shown] if name in shown)
    legend, top = svg.legend([shown[name] for name in in_order] if len(shown) > 1 else [], svg.WIDTH)
    top += 8
    left = 14 + max((min(150.0, svg.text_width(bar.name, svg.LARGEST)) for bar in kept), default=0.0)
    totals = [min(1e300, sum(part.value for part in bar.parts)) for bar in kept]
    right = svg.WIDTH - 16 - max((svg.text_width(write(total), svg.LARGEST) for total in totals), default=0.0)
    x = linear([0, *totals], left, right, binary=write is size, from_zero=True, count=4, snug=True)
    bottom, tall = top + pitch * max(1, len(kept)), pitch - 10
    hatched = dict.fromkeys(part.colour for bar in kept for part in bar.parts if part.hatched)
    body = [*map(svg.hatching, hatched), svg.ticks_below(x, top, bottom, svg.WIDTH), legend]
    for index, (bar, total) in enumerate(zip(kept, totals, strict=True)):
        y = top + pitch * index + 5
        middle = y + tall / 2 + 4
        body.append(svg.text_element(left - 8, middle, svg.fit_text(bar.name, 150, svg.LARGEST), "end", "tick name"))
        end = 0.0
        for part in bar.parts:
            begin, end = end, end + part.value
            width = max(0.75, x.at(end) - x.at(begin) - 1)
            text = f"{bar.name}, {part.name}: {write(part.value)}"
            body.append(_bar(x.at(begin), y, width, tall, part.style, text, 2.5))
        body.append(svg.text_element(x.at(total) + 7, middle, write(total), "start"))
    label = "; ".join(f"{bar.name} {write(total)}" for bar, total in zip(kept, totals, strict=True))
    return svg.document(svg.WIDTH, bottom + 24, f"{title}: {label}", body)


def histogram(
    counts: Sequence[tuple[float, float, float]], *, title: str, x_name: str, limit: float | None = None
) -> str:
    """Return a histogram on a logarithmic axis.

    Args:
        counts: (from, to, count) of each interval, with 0 < from < to, in ascending order.
        limit: where a dashed line is drawn; None: nowhere.
    """
    top, bottom, right = 24.0, 192.0, svg.WIDTH - svg.MARGIN
    y = linear([0, *(count for _, _, count in counts)], bottom, top, from_zero=True, whole=True, count=4)
    left = 12 + max(svg.text_width(name, svg.LARGEST) for _, name in y.ticks)
    edges = [edge for first, last, _ in counts for edge in (first, last)]
    x = logarithmic([*edges, *([] if limit is None else [limit])], left, right)
    body = [svg.grid(x, y, left, right, bottom, x_name)]
    for first, last, count in counts:
        begin, width = x.at(first), max(0.75, x.at(last) - x.at(first) - 1)
        text = f"{number_text(first, 9)} to {number_text(last - 1, 9)} {x_name}: {number_text(count, 9)}"
        body.append(
            _bar(begin, y.at(count), width, bottom - y.at(count), svg.shape_style("blue"), text, 1.5) if count else ""
        )
    if limit is not None:
        at = x.at(limit)
        body.append(f'<line class="limit" x1="{at:.2f}" y1="{top - 8:.2f}" x2="{at:.2f}" y2="{bottom:.2f}"/>')
        before = at > svg.WIDTH / 2
        text = f"a row: {number_text(limit, 9)}"
        body.append(svg.text_element(at - 6 if before else at + 6, top - 10, text, "end" if before else "start"))
    total = number_text(sum(count for _, _, count in counts), 9)
    return svg.document(svg.WIDTH, bottom + 44, f"{title}: {total} in {len(counts)} intervals", body)


def _bar(x: float, y: float, width: float, height: float, style: str, text: str, radius: float) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" rx="{radius:g}" style="{style}">'
        f"<title>{svg.escape(text)}</title></rect>"
    )
