"""Pages in a headless browser: what a reader of a narrow or a wide window would not see.

Pages are frames of one document, which takes one width after another: a browser starts once for a colour scheme.
A browser remembers the scheme that a page chose first, so each start has a profile of its own.
"""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import LONG_S

WIDTHS = (390, 500, 1400)
DARK, LIGHT = "0", "1"
"""As chromium's `preferredColorScheme` has them."""

needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")

_PROBE = """
const shades = text => (text.match(/[\\d.]+/g) || []).map(Number)
const over = (top, below) => [0, 1, 2].map(i => top[i] * (top[3] ?? 1) + below[i] * (1 - (top[3] ?? 1)))
const light = rgb => rgb.map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0)

function look(frame, roots) {
  const view = frame.contentWindow, page = frame.contentDocument, root = page.documentElement
  const style = e => view.getComputedStyle(e), seen = root.clientWidth
  const said = e => e.outerHTML.replace(/\\s+/g, " ").slice(0, 100)
  const scrolls = e => e && (/auto|scroll/.test(style(e).overflowX) || scrolls(e.parentElement))
  const paper = e => { // what is behind the text of e
    const own = shades(style(e).backgroundColor)
    return own.length == 3 || own[3] == 1 || !e.parentElement ? own : over(own, paper(e.parentElement))
  }
  const found = {page: frame.dataset.page, width: seen, cut: [], split: [], pale: [], behind: [], font: 99}
  found.paper = style(page.body).backgroundColor
  found.scrolls = root.scrollWidth - seen
  for (const e of page.querySelectorAll(roots.map(one => `${one}, ${one} *`).join())) {
    if (!e.checkVisibility({visibilityProperty: true, opacityProperty: true})) continue
    const box = e.getBoundingClientRect(), chart = e.closest("svg")
    const has = [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())
    if (box.width && (box.left < -.5 || box.right > seen + .5) && !scrolls(e)) found.cut.push(said(e))
    const hides = e.scrollWidth > e.clientWidth + 1
    if (/auto|scroll/.test(style(e).overflowX) && hides) found.behind.push(said(e.firstElementChild ?? e))
    if (!chart && /hidden|clip/.test(style(e).overflowX) && hides) found.cut.push(said(e))
    if (chart && e.tagName == "text") {
      const frame = chart.getBoundingClientRect()
      if (box.left < frame.left - 1 || box.right > frame.right + 1) found.cut.push(said(e))
      found.font = Math.min(found.font, parseFloat(style(e).fontSize) * e.getCTM().a)
    }
    if (e.matches("td code") && /^[\\w.=]{1,17}$/.test(e.innerText) && e.getClientRects().length > 1)
      found.split.push(e.innerText)
    if (has && !chart) {
      const [ink, below] = [shades(style(e).color), paper(e)]
      const [a, b] = [light(over(ink, below)), light(below)].sort((a, b) => b - a)
      if ((a + .05) / (b + .05) < 3) found.pale.push(`${((a + .05) / (b + .05)).toFixed(1)} ${said(e)}`)
    }
  }
  for (const chart of page.querySelectorAll("svg")) {
    const labels = [...chart.querySelectorAll("text, rect[width='10']")].map(e => [e, e.getBoundingClientRect()])
    labels.forEach(([e, a], i) => labels.slice(i + 1).forEach(([_, b]) => {
      const over = Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0
      if (over && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 2) found.cut.push("overlaps: " + said(e))
    }))
  }
  return found
}
"""


class Seen(NamedTuple):
    """One page in a window of one width.

    Attributes:
        paper: the colour behind everything.
        scrolls: pixels that the page is wider than the window.
        cut: elements that stick out of it, or whose text does not fit them, and no part of the page scrolls to them;
            and labels of a chart that lie on one another.
        split: short words of code in a table that go on in a second line, because their column is too narrow.
        behind: the contents of parts of the page that scroll sideways.
        pale: texts with too little contrast to what is behind them.
        font: the smallest text of a chart, in pixels; 99 without a chart.
    """

    page: str
    width: int
    paper: str
    scrolls: int
    cut: list[str]
    split: list[str]
    pale: list[str]
    behind: list[str]
    font: float


def shown(pages: Sequence[Path], scheme: str, folder: Path, *, roots: Sequence[str] = ("main",)) -> list[Seen]:
    """Each page at each of `WIDTHS`.

    Args:
        scheme: `DARK` or `LIGHT`.
        folder: empty; the browser's own files go there.
        roots: CSS selectors of what is looked at.
    """
    frames = "".join(
        f'<iframe height="900" style="border:0" data-page="{html.escape(page.name)}" src="{page.as_uri()}"></iframe>'
        for page in pages
    )
    script = (
        f'{_PROBE}addEventListener("load", async () => {{\n'
        'const frames = [...document.querySelectorAll("iframe")], all = []\n'
        "for (const one of frames) one.contentDocument.head.append(Object.assign(document.createElement('style'), "
        '{textContent: "* { transition: none !important }"}))\n'  # what moves has arrived
        f"for (const width of {[*WIDTHS]}) {{\n"
        "for (const one of frames) one.width = width\n"
        "await new Promise(done => setTimeout(done, 500))\n"  # of a clock that nobody waits for
        f"for (const one of frames) all.push(look(one, {json.dumps(list(roots))}))}}\n"
        'document.body.innerText = "probe " + JSON.stringify(all) + " end"})'
    )
    document = folder / "frames.html"
    document.write_text(f"<!DOCTYPE html><meta charset='utf-8'><script>{script}</script><body>{frames}")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,900"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={scheme}"]
    command += ["--allow-file-access-from-files", "--virtual-time-budget=3000", "--dump-dom", document.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True).stdout
    match = re.search(r"probe (\[.*\]) end", dom, flags=re.S)
    assert match, dom[-2000:]
    return [Seen(**fields) for fields in json.loads(html.unescape(match[1]))]
