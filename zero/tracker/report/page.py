"""Building blocks of a self-contained HTML page, with `style.css` inlined and without scripts and network requests.

Every `str` that is not `Html` is text and is escaped. In case an escape is missing, the page's content security policy
forbids the browser to load or run anything.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from zero.tracker.report.scale import UNKNOWN
from zero.tracker.report.svg import escape

NO_MARKS: Mapping[int, str] = {}
PILLS = {"finished": "good", "failed": "bad", "stopped": "open", "running": "open"}
"""The mood of the label of each status; see `pill`."""

STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


class Html(str):
    """HTML markup, which is inserted into a page without escaping."""


class Fact(NamedTuple):
    """A value with its name above and a note below."""

    name: str
    value: str
    note: str = ""


def page(title: str, *, kicker: str, status: Html, parts: Iterable[Html]) -> str:
    """Return a complete HTML document.

    Args:
        title: the heading, as text.
        kicker: the line above the heading.
        status: the label beside the heading; see `pill`.
        parts: the sections; see `section`.
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
    """Return a section: blocks under a heading. If all blocks are empty, the result is empty."""
    if not any(blocks):
        return Html()
    text = f"<p class='note'>{escape(note)}</p>" if note else ""
    return Html(f"<section><h2>{escape(heading)}</h2>{text}{''.join(blocks)}</section>")


def pill(text: str, mood: str) -> Html:
    """Return a coloured label with a status; `mood` is good, bad or open."""
    return Html(f'<span class="pill {escape(mood)}">{escape(text)}</span>')


def verbatim(text: str, mood: str = "plain") -> Html:
    """Return preformatted text, such as a program's output; `mood` is plain, good, bad or open."""
    return Html(f'<pre class="said {escape(mood)}">{escape(text)}</pre>')


def marked(parts: Iterable[tuple[str, bool]]) -> Html:
    """Return preformatted text whose parts are marked or not."""
    inside = "".join(f"<mark>{escape(text)}</mark>" if mark else escape(text) for text, mark in parts)
    return Html(f'<pre class="said plain">{inside}</pre>')


def facts(entries: Iterable[Fact]) -> Html:
    """Return facts side by side, without those whose value is unknown."""
    cells = "".join(
        f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.value)}</dd><p>{escape(fact.note)}</p></div>"
        for fact in entries
        if fact.value != UNKNOWN
    )
    return Html(f'<dl class="facts">{cells}</dl>') if cells else Html()


def figure(svg: str, caption: str, note: str = "") -> Html:
    """Return a chart with its caption above."""
    more = f"<small>{escape(note)}</small>" if note else ""
    return Html(f'<figure><figcaption>{escape(caption)}{more}</figcaption><div class="wide">{svg}</div></figure>')


def by_window(wide: str, narrow: str) -> str:
    """Return two drawings of a chart: the page shows `narrow` on a phone and `wide` elsewhere."""
    return f'<div class="on-wide">{wide}</div><div class="on-narrow">{narrow}</div>'


def together(*blocks: Html) -> Html:
    """Return blocks below each other as one block."""
    return Html(f"<div class='stack'>{''.join(blocks)}</div>") if any(blocks) else Html()


def note(text: str) -> Html:
    """Return a paragraph of explanation."""
    return Html(f"<p class='about'>{escape(text)}</p>") if text else Html()


def side_by_side(*blocks: Html, layout: Literal["even", "lead", "three"] = "even") -> Html:
    """Return blocks in columns, if the page is wide enough.

    Args:
        layout: "even": two equal columns; "lead": the first block in a wide left column, all others in a right column;
            "three": three columns.
    """
    return Html(f'<div class="columns {layout}">{"".join(blocks)}</div>') if any(blocks) else Html()


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    marked: Mapping[int, str] = NO_MARKS,
) -> Html:
    """Return a table.

    Args:
        head: names of the columns; empty if the first column names the rows.
        rows: cells of each row, text or `Html`.
        numbers: indices of the columns that are aligned to the right.
        marked: index of a row -> its CSS class, best or total.
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
    """Return a key, a path or a value in monospace."""
    return Html(f"<code>{escape(text)}</code>")


def with_bar(text: str, share: float, colour: str = "blue") -> Html:
    """Return a number with a bar below it whose length is `share`, 0 to 1, of the cell's width."""
    width = 100 * max(0.0, min(1.0, share))
    return Html(f'{escape(text)}<i class="bar" style="width:{width:.1f}%;background:var(--{colour})"></i>')


def links(folder: Path, names: Iterable[str]) -> Html:
    """Return links to the files `names` that exist in `folder`, relative to the page."""
    existing = [name for name in names if (folder / name).exists()]
    return Html(" ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in existing))


def _class(column: int, right: set[int]) -> str:
    return 'class="num"' if column in right else ""


def _inside(cell: str) -> str:
    return cell if isinstance(cell, Html) else escape(cell)
