"""A page that opens anywhere: one HTML file with `style.css` inside, without script and without network.

A `str` that is not `Html` is text, and is escaped where it enters the page. The page's policy forbids the browser to
load or run anything, in case an escape is missing.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from zero.tracker.report.chart import escape
from zero.tracker.report.scale import UNKNOWN

NOTHING: Mapping[int, str] = {}
STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


class Html(str):
    """Markup, which is not escaped."""


class Fact(NamedTuple):
    """A number with its name and a note."""

    name: str
    value: str
    note: str = ""


def page(title: str, *, kicker: str, status: Html, parts: Iterable[Html]) -> str:
    """Return a whole document.

    Args:
        title: its heading; user text.
        kicker: the line above it.
        status: beside the heading; see `pill`.
        parts: sections.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<header><p>{escape(kicker)}</p><h1>{escape(title)}</h1>{status}</header>"
        f"{''.join(parts)}</main></body></html>\n"
    )


def section(heading: str, *blocks: Html, note: str = "") -> Html:
    """Return blocks under a heading; empty without a block."""
    if not any(blocks):
        return Html()
    text = f"<p class='note'>{escape(note)}</p>" if note else ""
    return Html(f"<section><h2>{escape(heading)}</h2>{text}{''.join(blocks)}</section>")


def pill(text: str, mood: str) -> Html:
    """Return a status in a word; `mood` is good, bad or open."""
    return Html(f'<span class="pill {escape(mood)}">{escape(text)}</span>')


def verbatim(text: str, mood: str = "plain") -> Html:
    """Return lines exactly as a program wrote them."""
    return Html(f'<pre class="said {escape(mood)}">{escape(text)}</pre>')


def facts(entries: Iterable[Fact]) -> Html:
    """Return numbers side by side, without the unknown ones."""
    cells = "".join(
        f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}</dd><p>{escape(fact.note)}</p></div>"
        for fact in entries
        if fact.value != UNKNOWN
    )
    return Html(f'<dl class="facts">{cells}</dl>') if cells else Html()


def figure(svg: str, caption: str, note: str = "") -> Html:
    """Return a chart under its name."""
    more = f"<small>{escape(note)}</small>" if note else ""
    return Html(f'<figure><figcaption>{escape(caption)}{more}</figcaption><div class="wide">{svg}</div></figure>')


def side_by_side(*blocks: Html, layout: Literal["even", "lead", "three"] = "even") -> Html:
    """Return blocks in columns where there is room.

    Args:
        layout: even: two equal ones; lead: the first block wide on the left, all others on the right; three: three.
    """
    return Html(f'<div class="columns {layout}">{"".join(blocks)}</div>') if any(blocks) else Html()


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    marked: Mapping[int, str] = NOTHING,
) -> Html:
    """Return a table.

    Args:
        head: names of the columns; empty where the first column names the others.
        rows: cells; text, or Html.
        numbers: columns that are aligned to the right.
        marked: number of a row to its mark: best or total.
    """
    right = set(numbers)
    top = "".join(f"<th scope='col' {_class(index, right)}>{_inside(name)}</th>" for index, name in enumerate(head))
    top = f"<thead><tr>{top}</tr></thead>" if head else ""
    body = "".join(
        (f'<tr class="{marked[number]}">' if number in marked else "<tr>")
        + "".join(f"<td {_class(index, right)}>{_inside(cell)}</td>" for index, cell in enumerate(row))
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return Html(f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>')


def code(text: str) -> Html:
    """Return a key, a path or a value as it was typed."""
    return Html(f"<code>{escape(text)}</code>")


def with_bar(text: str, share: float, colour: str = "blue") -> Html:
    """Return a number with its share of the largest drawn below it."""
    width = 100 * max(0.0, min(1.0, share))
    return Html(f'{escape(text)}<i class="bar" style="width:{width:.1f}%;background:var(--{colour})"></i>')


def links(folder: Path, names: Iterable[str]) -> Html:
    """Return links to those of the files that exist, relative to the page."""
    existing = [name for name in names if (folder / name).exists()]
    return Html(" ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in existing))


def _class(column: int, right: set[int]) -> str:
    return 'class="num"' if column in right else ""


def _inside(cell: str) -> str:
    return cell if isinstance(cell, Html) else escape(cell)
