"""The files metrics.jsonl, with the rows of a run, and summary.json, with its results and exit reason."""

import json
import logging
import os
from collections.abc import Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

from zero.platform.run_files import publish, writing
from zero.tracker.views.view import Row, View, finite

log = logging.getLogger("zero")

ROWS_FILE = "metrics.jsonl"

RUNNING = "running, or ended without a word"
"""The exit reason in summary.json until a run ends; it remains if the process is killed."""

FINISHED, EVALUATED, STOPPED, CUT_SHORT = "finished", "evaluated", "stopped by a signal", "debug.stop_at reached"
PATIENCE_REACHED = "val.patience reached"
"""Exit reasons of runs that ended without an error."""


class Jsonl(View):
    """A view that appends each row to metrics.jsonl as a line of JSON, and flushes it. NaN and infinity become null."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with writing(path):
            self._file = path.open("a", encoding="utf-8")
            if _is_cut_short(path):
                self._file.write("\n")

    def log(self, row: Row) -> None:
        with writing(self._path):
            self._file.write(json.dumps({key: finite(value) for key, value in row.items()}, allow_nan=False) + "\n")
            self._file.flush()

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        with writing(self._path):
            self._file.close()


def _is_cut_short(path: Path) -> bool:
    """Return whether a file's last line has no end, because an earlier run could not write it whole."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if not size:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json atomically, so that a reader never sees a partial file; NaN and infinity become null."""
    clean = {key: finite(value) if isinstance(value, float) else value for key, value in summary.items()}
    publish(folder / "summary.json", json.dumps(clean, indent=2, allow_nan=False) + "\n")


def write_failure(folder: Path, summary: Mapping[str, Any], *, final: bool = False) -> None:
    """Update summary.json after a failure; fields that `summary` lacks keep their values.

    Args:
        summary: at least `exit_reason`.
        final: replace the exit reason of an earlier failure. By default the earlier reason is kept, because the rank
            that fails first is closest to the cause.
    """
    try:
        before = dict(json.loads((folder / "summary.json").read_text()))
    except (OSError, ValueError, TypeError):  # missing or unreadable
        before = {}
    before.setdefault("exit_reason", RUNNING)
    known = not final and before["exit_reason"] != RUNNING
    write_summary(folder, {**before, **summary, **({"exit_reason": before["exit_reason"]} if known else {})})


def unused_folder(folder: Path) -> Path:
    """Return the first of `folder` and `run-2`, `run-3`, ... below it without metrics.jsonl, and create that file."""
    place = next(filter(_claim, chain([folder], (folder / f"run-{number}" for number in count(2)))))
    if place != folder:
        log.warning("%s has the rows of another run, which was not resumed. New rows go to %s.", folder, place)
    return place


def _claim(place: Path) -> bool:
    """Create metrics.jsonl; return False if it exists. If two processes start at once, only one creates the file."""
    place.mkdir(parents=True, exist_ok=True)
    try:
        (place / ROWS_FILE).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
