#!/usr/bin/env python3
"""Make the pictures of docs/img again: a run in a terminal, its report, and the page of a sweep.

    benchmarks/pictures.py                  all of them, in five minutes on two cores that do nothing else
    benchmarks/pictures.py terminal report

They show speeds and times, so nothing else should run. Needs chromium and tmux.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import zero  # noqa: E402, F401 - first: where nothing is installed it says what to type
from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

IMAGES = ROOT / "docs" / "img"
NAMES = ["terminal", "report", "sweep"]
COLUMNS, ROWS = 110, 40
WIDTH = 1240
"""The width of a page, in pixels."""

RUN = "python train.py zero.stage=3 launch.ranks=2"
SWEEP = "python train.py -m zero.stage=0,1,2,3 offload=none,nvme steps=50"

PROBE = "<script>addEventListener('load', () => document.title = document.body.scrollHeight)</script></head>"
"""A script that writes the height of a page into its title, which `--dump-dom` shows."""


def main(into: Path, names: list[str]) -> None:
    into.mkdir(parents=True, exist_ok=True)  # chromium says nothing where it cannot write
    with tempfile.TemporaryDirectory(prefix="pictures-") as made:
        folder = Path(made)
        (folder / "train.py").symlink_to(ROOT / "train.py")
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        if {"terminal", "report"} & set(names):
            screen = typed(RUN, folder)
            if "terminal" in names:
                draw(screen, into / "terminal.png", folder)
            if "report" in names:
                (report,) = folder.glob("runs/*/*/report.html")
                draw(report.read_text(), into / "report.png", folder)
        if "sweep" in names:
            subprocess.run([*shlex.split(SWEEP), "hydra.sweep.dir=runs/sweep"], cwd=folder, check=True)
            draw((folder / "runs" / "sweep" / "sweep.html").read_text(), into / "sweep.png", folder)


def typed(command: str, folder: Path) -> str:
    """Run a command in a terminal and return its last screen as HTML."""
    tmux = ["tmux", "-S", str(folder / "tmux")]
    shell = f"printf '$ %s\\n' {shlex.quote(command)}; {command}; tmux wait-for -S ended; cat"
    subprocess.run([*tmux, "new-session", "-d", f"-x{COLUMNS}", f"-y{ROWS}", shell], cwd=folder, check=True)
    try:
        subprocess.run([*tmux, "wait-for", "ended"], check=True)
        capture = [*tmux, "capture-pane", "-e", "-p"]
        screen = subprocess.run(capture, capture_output=True, text=True, check=True).stdout.rstrip()
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(screen))
    style = "<style>body { margin: 0 } svg { display: block }</style>"
    return f"<html><head>{style}</head><body>{console.export_svg(title='zero')}</body></html>"


def draw(html: str, picture: Path, folder: Path) -> None:
    """Write a page as a PNG of the page's height, in light colours."""
    page = folder / "page.html"
    page.write_text(re.sub("<meta http-equiv=[^>]*>", "", html).replace("</head>", PROBE, 1))
    height = re.search(r"<title>(\d+)<", chromium(page, f"--window-size={WIDTH},600", "--dump-dom"))
    assert height is not None
    chromium(page, f"--window-size={WIDTH},{height[1]}", f"--screenshot={picture}")
    print(picture)


def chromium(page: Path, *options: str) -> str:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent / 'chromium'}", "--blink-settings=preferredColorScheme=1", *options]
    return subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(NAMES)}; all unless it is said")
    parser.add_argument("--into", type=Path, default=IMAGES, help="a folder; docs/img unless it is said")
    options = parser.parse_args()
    if unknown := sorted({*options.names} - {*NAMES}):
        parser.error(f"there is no picture {unknown[0]}; there are {', '.join(NAMES)}")
    main(options.into.resolve(), options.names or NAMES)
