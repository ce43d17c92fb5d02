"""A page that opens anywhere: one HTML file with its style inside, without script and without network.

Whatever is not `Html` is text, and is escaped where it enters the page. Its policy forbids the browser to load or run
anything, should an escape ever be missing.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from zero.trainer.report.chart import words
from zero.trainer.report.scale import UNKNOWN

NOTHING: Mapping[int, str] = MappingProxyType({})


class Html(str):
    """A piece of a page: markup that needs no escape."""


class Fact(NamedTuple):
    """A number worth seeing first, with what it is and what else to know."""

    name: str
    value: str
    note: str = ""


def page(title: str, *, kicker: str, status: Html, parts: Iterable[Html]) -> str:
    """A whole document.

    Args:
        title: its heading; user text.
        kicker: the line above it.
        status: what stands beside it; see `pill`.
        parts: sections.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        '<meta name="color-scheme" content="light dark"/>'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>"
        f"<title>{words(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<header><p>{words(kicker)}</p><h1>{words(title)}</h1>{status}</header>"
        f"{''.join(parts)}</main></body></html>\n"
    )


def section(heading: str, *blocks: Html, note: str = "") -> Html:
    """Blocks under a heading; nothing at all without a block."""
    if not any(blocks):
        return Html()
    said = f"<p class='note'>{words(note)}</p>" if note else ""
    return Html(f"<section><h2>{words(heading)}</h2>{said}{''.join(blocks)}</section>")


def pill(text: str, kind: str) -> Html:
    """How something ended, in a word; `kind` is good, bad or open."""
    return Html(f'<span class="pill {words(kind)}">{words(text)}</span>')


def said(text: str, kind: str = "plain") -> Html:
    """Lines exactly as a program wrote them."""
    return Html(f'<pre class="said {words(kind)}">{words(text)}</pre>')


def facts(entries: Iterable[Fact]) -> Html:
    """Numbers side by side; those that nobody knows are left out."""
    cells = "".join(
        f"<div><dt>{words(fact.name)}</dt><dd>{words(fact.value)}</dd><p>{words(fact.note)}</p></div>"
        for fact in entries
        if fact.value != UNKNOWN
    )
    return Html(f'<dl class="facts">{cells}</dl>') if cells else Html()


def figure(svg: str, caption: str, note: str = "") -> Html:
    """A chart under its name."""
    more = f"<small>{words(note)}</small>" if note else ""
    return Html(f"<figure><figcaption>{words(caption)}{more}</figcaption>{svg}</figure>")


def side_by_side(*blocks: Html, layout: Literal["even", "lead", "three"] = "even") -> Html:
    """Blocks in columns where there is room.

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
    """A table.

    Args:
        rows: cells; text, or Html.
        numbers: columns that stand to the right.
        marked: number of a row that stands out -> how: best or total.
    """
    right = set(numbers)
    kind = ['class="num"' if index in right else "" for index in range(len(head))]
    top = "".join(f'<th scope="col" {kind[index]}>{_inside(name)}</th>' for index, name in enumerate(head))
    body = "".join(
        (f'<tr class="{marked[number]}">' if number in marked else "<tr>")
        + "".join(f"<td {kind[index]}>{_inside(cell)}</td>" for index, cell in enumerate(row))
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return Html(f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>')


def code(text: str) -> Html:
    """A key, a path, a value as it was typed."""
    return Html(f"<code>{words(text)}</code>")


def with_bar(text: str, share: float, colour: str = "blue") -> Html:
    """A number with its share of the largest drawn below it."""
    width = 100 * max(0.0, min(1.0, share))
    return Html(f'{words(text)}<i class="bar" style="width:{width:.1f}%;background:var(--{colour})"></i>')


def links(folder: Path, names: Iterable[str]) -> Html:
    """Those of the files that exist, relative to the page."""
    found = [name for name in names if (folder / name).exists()]
    return Html(" ".join(f'<a href="{words(name)}">{words(name)}</a>' for name in found))


def _inside(cell: str) -> str:
    return cell if isinstance(cell, Html) else words(cell)


_LIGHT = """
--paper:#f6f7f8;--card:#ffffff;--ink:#1b2127;--soft:#5d6873;--line:#d9dee3;--grid:#eceff2;
--blue:#2f6f9f;--green:#3f9a6d;--amber:#c07f2e;--purple:#8a4f9e;--teal:#2b8f9c;--rose:#c2555a;--slate:#7d8894;
--good:#1f7a4d;--good-paper:#e3f4ea;--bad:#b3363c;--bad-paper:#fbe9e9;--open:#8a6116;--open-paper:#fbf1dc;
--on:#ffffff;--shadow:0 1px 2px rgba(20,30,40,.05),0 4px 14px rgba(20,30,40,.04);
"""
_DARK = """
--paper:#101418;--card:#181d22;--ink:#e7ebef;--soft:#98a4b0;--line:#333c45;--grid:#242b32;
--blue:#6db1e2;--green:#68c596;--amber:#e2a655;--purple:#c28fd8;--teal:#5cc2cf;--rose:#e88b8d;--slate:#8f9ba7;
--good:#7ad3a3;--good-paper:#173226;--bad:#f09a9c;--bad-paper:#3a1f21;--open:#e9c274;--open-paper:#352a14;
--on:#101418;--shadow:none;
"""

STYLE = (
    ":root{color-scheme:light dark;"
    + _LIGHT
    + "}@media (prefers-color-scheme:dark){:root{"
    + _DARK
    + "}}"
    + """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
  font:15px/1.5 Inter,-apple-system,"Segoe UI",ui-sans-serif,system-ui,"Helvetica Neue",Arial,sans-serif}
main{max-width:1180px;margin:0 auto;padding:40px 28px 64px}
header{display:flex;flex-wrap:wrap;align-items:center;gap:2px 14px;margin-bottom:20px}
header p{flex-basis:100%;margin:0;color:var(--soft);font-size:13px;letter-spacing:.02em}
h1{margin:0;font-size:22px;font-weight:650;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{margin:0 0 14px;font-size:16px;font-weight:650;letter-spacing:-.005em}
section{margin-top:16px;padding:22px 24px;background:var(--card);border:1px solid var(--line);border-radius:12px;
  box-shadow:var(--shadow)}
.note{margin:-8px 0 14px!important;color:var(--soft);font-size:13.5px;max-width:80ch}
.pill{padding:2px 11px;border-radius:99px;font-size:13px;font-weight:600;white-space:nowrap}
.pill.good{color:var(--good);background:var(--good-paper)}
.pill.bad{color:var(--bad);background:var(--bad-paper)}
.pill.open{color:var(--open);background:var(--open-paper)}
.said{margin:0 0 16px;padding:10px 14px;border-radius:8px;background:var(--paper);white-space:pre-wrap;
  overflow-wrap:anywhere;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.said.bad{color:var(--bad);background:var(--bad-paper)}
.said.open{color:var(--open);background:var(--open-paper)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:18px 20px;margin:0}
.facts dt{color:var(--soft);font-size:13px}
.facts dd{margin:0;font-size:23px;font-weight:600;letter-spacing:-.015em;font-variant-numeric:tabular-nums}
.facts p{margin:0;color:var(--soft);font-size:12.5px;min-height:1.5em}
section>*+*{margin-top:22px}
section>h2+*,section>.note+*{margin-top:0}
.columns{display:grid;grid-template-columns:1fr 1fr;gap:22px 34px;align-items:start}
.columns.lead{grid-template-columns:1.36fr 1fr}
.columns.lead>*{grid-column:2}
.columns.lead>:first-child{grid-column:1;grid-row:span 2}
.columns.three{grid-template-columns:1fr 1fr 1fr}
@media (max-width:860px){.columns.columns{grid-template-columns:minmax(0,1fr)}.columns.columns>*{grid-column:1}}
figure{min-width:0;overflow-x:auto;margin-left:0;margin-right:0;margin-bottom:0}
.columns>figure{margin:0}
figcaption{font-size:13.5px;font-weight:600;margin-bottom:6px}
figcaption small{font-weight:400;font-size:12.5px;color:var(--soft);margin-left:8px}
.chart{display:block;width:100%;height:auto}
.chart text{font-family:inherit;font-variant-numeric:tabular-nums}
.tick{fill:var(--soft);font-size:11.5px}
.name{fill:var(--ink);font-size:12.5px}
.on{fill:var(--on);font-size:10.5px;pointer-events:none}
.line{fill:none;stroke-width:1.9;stroke-linejoin:round;stroke-linecap:round}
.ghost{fill:none;stroke:var(--slate);stroke-opacity:.28;stroke-width:1}
.felt{fill:transparent}
.grid{stroke:var(--grid)}
.axis{stroke:var(--line)}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th{padding:0 14px 7px 0;text-align:left;font-weight:500;color:var(--soft);border-bottom:1px solid var(--line);
  white-space:nowrap;vertical-align:bottom}
td{padding:5.5px 14px 5.5px 0;border-bottom:1px solid var(--grid);vertical-align:top;overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
th:last-child,td:last-child{padding-right:0}
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.best td{background:var(--good-paper)}
.best td:first-child{box-shadow:inset 3px 0 var(--good)}
.total td{font-weight:600;border-top:1px solid var(--line)}
td:first-child,th:first-child{padding-left:10px}
td:first-child,td:first-child code{overflow-wrap:break-word}
.bar{display:block;height:3px;margin:3px 0 0 auto;border-radius:2px;opacity:.75}
code{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
a{color:var(--blue);text-decoration:none;margin-right:14px}
a:hover{text-decoration:underline}
.soft{color:var(--soft)}
footer{margin-top:18px;padding:0 4px;color:var(--soft);font-size:13px}
@media (max-width:640px){main{padding:24px 14px}section{padding:16px}td+td:not(.num){min-width:6.5em}}
@media print{body{background:none}section{break-inside:avoid;box-shadow:none}}
"""
)
