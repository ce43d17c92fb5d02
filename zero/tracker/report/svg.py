"""SVG text that all charts share: axes, legends, rules, words of an estimated width, and the document around them."""

import html
import re
from collections.abc import Iterable

from zero.tracker.report.scale import Scale

WIDTH, NARROW = 560.0, 400.0
"""Widths of charts in pixels: of half a page, and of a phone."""

MARGIN = 18.0
"""Pixels to the right of the axes of a line chart."""

SMALLEST, SMALLEST_WIDE = 0.53, 0.75
"""The smallest factor by which a chart shrinks before it scrolls instead, so that its text stays legible. SMALLEST is
for charts of `WIDTH`, which must fit 360 pixels, SMALLEST_WIDE for wider charts, which scroll on a phone anyway."""

LARGEST = 15.5
"""Font size in pixels of ticks and legends on a narrow page, where charts shrink."""


def escape(value: object) -> str:
    """Escape text for HTML, SVG and attributes. Characters that XML cannot hold become U+FFFD."""
    return html.escape(_NOT_XML.sub("\ufffd", str(value)))


_NOT_XML = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufdcf\ufdf0-\ufffd\U00010000-\U0010fffd]")


def grid(x: Scale, y: Scale, left: float, right: float, bottom: float, x_name: str) -> str:
    """Return the axes of a line chart: a rule and a number at each tick."""
    parts = []
    for value, name in y.ticks:
        at, css_class = y.at(value), "axis" if value == y.ticks[0][0] else "grid"
        parts += [rule(css_class, left, at, right, at), text_element(left - 7, at + 4, name, "end")]
    for value, name in x.ticks:
        at = x.at(value)
        parts += [rule("axis", at, bottom, at, bottom + 4), _tick_below(at, bottom + 21, name, right + MARGIN)]
    return "".join(parts) + text_element(right, bottom + 39, x_name, "end")


def _tick_below(x: float, y: float, name: str, width: float) -> str:
    """Return the number of a tick, centred below it if it then ends before `width`, the right edge of the chart."""
    is_cut = x + 0.6 * text_width(name, LARGEST) > width  # more than a half, because fonts differ
    return text_element(width, y, name, "end") if is_cut else text_element(x, y, name, "middle")


def panel_grid(x: Scale, y: Scale, right: float, bottom: float, *, first: bool) -> str:
    """Return the axes of a small chart, with the numbers of the y axis if it is the first of its row."""
    parts = []
    for value, name in y.ticks:
        at, css_class = y.at(value), "axis" if value == y.ticks[0][0] else "grid"
        parts += [rule(css_class, 0, at, right, at), text_element(-6, at + 4, name, "end") if first else ""]
    for value, name in x.ticks[:1] + x.ticks[-1:] if len(x.ticks) > 1 else x.ticks:
        anchor = "start" if x.at(value) < 12 else "end" if x.at(value) > right - 12 else "middle"
        parts.append(text_element(x.at(value), bottom + 15, name, anchor))
    return "".join(parts)


def ticks_below(x: Scale, top: float, bottom: float, width: float) -> str:
    """Return a rule from `top` to `bottom` at each tick, with its number below, in a chart of `width` pixels."""
    at = [(x.at(value), name) for value, name in x.ticks]
    return "".join(rule("grid", px, top, px, bottom) + _tick_below(px, bottom + 16, name, width) for px, name in at)


def shape_style(colour: str, shade: float = 1.0, *, hatched: bool = False) -> str:
    """Return the CSS of a filled shape; a hatched one needs `hatching(colour)` in its document."""
    return f"fill:url(#hatch-{colour})" if hatched else f"fill:var(--{colour});fill-opacity:{shade:g}"


def hatching(colour: str) -> str:
    """Return the definition of a pattern of diagonal stripes."""
    return (
        f'<defs><pattern id="hatch-{colour}" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect x="0" y="0" width="6" height="6" style="{shape_style(colour, 0.16)}"/>'
        f'<rect x="0" y="0" width="2" height="6" style="fill:var(--{colour})"/></pattern></defs>'
    )


def legend(entries: Iterable[tuple[str, str]], width: float) -> tuple[str, float]:
    """Return the legend as SVG, in as many lines as needed, and its height in pixels.

    Args:
        entries: names, and the CSS of their marks.
    """
    parts: list[str] = []
    x, y = 10.0, 14.0
    for name, style in entries:
        name = fit_text(name, width - 60, LARGEST)
        taken = 34 + text_width(name, LARGEST)
        if x > 10 and x + taken > width:
            x, y = 10.0, y + 19
        parts.append(f'<rect x="{x:.2f}" y="{y - 9:.2f}" width="10" height="10" rx="2.5" style="{style}"/>')
        parts.append(text_element(x + 16, y, name, "start"))
        x += taken
    return "".join(parts), y + 6 if parts else 0.0


def rule(css_class: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{css_class}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'


def text_element(x: float, y: float, text: str, anchor: str, css_class: str = "tick") -> str:
    return f'<text class="{css_class}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def text_width(text: str, font_size: float = 11.5) -> float:
    """Return the estimated width of `text` in pixels; letters of wide scripts, such as Chinese, count more."""
    return sum(1.05 if ord(letter) > 0x2E7F else 0.58 for letter in text) * font_size


def fit_text(text: str, width: float, font_size: float = 11.5) -> str:
    """Return `text`, shortened with an ellipsis if it is wider than `width` pixels."""
    if text_width(text, font_size) <= width:
        return text
    while text and text_width(text + "…", font_size) > width:
        text = text[:-1]
    return text + "…"


def document(width: float, height: float, label: str, body: Iterable[str]) -> str:
    least = (SMALLEST if width <= WIDTH else SMALLEST_WIDE) * width
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" viewBox="0 0 {width:g} {height:g}" '
        f'style="min-width:{least:.0f}px" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'
    )
