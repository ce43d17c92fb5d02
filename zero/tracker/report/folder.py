"""Reading of a run's folder, whether the run finished, failed, is running, or was killed while it wrote a line.

Invalid contents of a file never raise an error. `RecordedRun.unread` names files that are missing or cannot be read.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import yaml

from zero.platform.timeline import Span, from_trace
from zero.tracker.report.scale import finite_values
from zero.tracker.views.jsonl import CUT_SHORT, EVALUATED, FINISHED, PATIENCE_REACHED, RUNNING, STOPPED

OWN_LOOP = "loop"
"""The section of config.yaml in which `zero.track` describes a run; runs of train.py do not have it."""

Status = Literal["finished", "stopped", "failed", "running"]


class RecordedRun(NamedTuple):
    """The contents of a run's folder.

    `rows` are the rows of metrics.jsonl with increasing steps, `trace` the spans of trace.json, `overrides` the Hydra
    overrides or None if their file is missing, `unread` messages about files that could not be read, `composed` the
    settings before auto was replaced by a value.
    """

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    rows: list[dict[str, Any]]
    overrides: list[str] | None
    trace: list[Span]
    unread: list[str]
    composed: Mapping[str, Any] = MappingProxyType({})

    @property
    def loop(self) -> dict[str, Any]:
        """The description of the run by `zero.track`; empty for a run of train.py."""
        return mapping(self.config.get(OWN_LOOP))

    @property
    def unit(self) -> str:
        """The unit in which the run's speed is counted: tokens or samples; "" if it counted neither."""
        return next((unit for unit in ("tokens", "samples") if unit in self.loop), "") if self.loop else "tokens"

    @property
    def reason(self) -> str:
        """The exit reason in summary.json."""
        return str(self.summary.get("exit_reason") or RUNNING)

    @property
    def status(self) -> Status:
        if self.reason in (FINISHED, EVALUATED, CUT_SHORT, PATIENCE_REACHED):
            return "finished"
        if self.reason == RUNNING:
            return "running"
        return "stopped" if self.reason == STOPPED or self.reason.startswith("stopped by ") else "failed"

    def final(self, summary_key: str, row_key: str) -> float | None:
        """Return a number from the summary, else the newest in the rows; None if it is unknown or not finite.

        NaN is written as null, because JSON has no NaN. So null in the summary of a finished run, or as the training
        loss of a row, means that the run has diverged, and an earlier value must not be returned instead.
        """
        final = finite_values(self.summary.get(summary_key))
        if final is not None or (self.status == "finished" and summary_key in self.summary):
            return final
        measured = [row[row_key] for row in self.rows if row_key in row]
        if row_key == "val/loss":
            measured = [value for value in measured if value is not None]
        return finite_values(measured[-1]) if measured else None

    def points(self, key: str) -> list[tuple[object, object]]:
        """Return (step, value of `key`) of each row; the value is None if it was not measured."""
        return [(row["step"], row.get(key)) for row in self.rows]

    def typical(self, key: str) -> float | None:
        """Return the median of `key` over the rows; see the function `typical`."""
        return typical(self.points(key))

    def measured(self, key: str) -> bool:
        """Return whether any row has a nonzero number for `key`."""
        return any(finite_values(row.get(key)) for row in self.rows)


def typical(points: Sequence[tuple[object, object]]) -> float | None:
    """Return the median of the values, without the first row, which is slower, unless it is the only row."""
    known = [value for _, raw in points[1:] or points if (value := finite_values(raw)) is not None]
    return median(known) if known else None


def read_run(folder: Path) -> RecordedRun:
    """Read the run in `folder`."""
    unread: list[str] = []
    overrides = _read(folder / ".hydra" / "overrides.yaml", yaml.safe_load, unread, needed=False)
    return RecordedRun(
        folder=folder,
        config=mapping(_read(folder / "config.yaml", yaml.safe_load, unread)),
        summary=mapping(_read(folder / "summary.json", json.loads, unread)),
        rows=_rows(folder / "metrics.jsonl", unread),
        overrides=[str(word) for word in overrides] if isinstance(overrides, list) else None,
        trace=_read(folder / "trace.json", lambda text: from_trace(json.loads(text)), unread, needed=False) or [],
        unread=unread,
        composed=mapping(_read(folder / ".hydra" / "config.yaml", yaml.safe_load, unread, needed=False)),
    )


def mapping(value: object) -> dict[str, Any]:
    """Return `value` as a dict with keys as text; an empty dict if it is not a mapping."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def _read(path: Path, parse: Callable[[str], Any], unread: list[str], *, needed: bool = True) -> Any:
    """Return the parsed contents of `path`. If it cannot be read, return None and add a message to `unread`."""
    try:
        return parse(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        unread += [f"there is no {path.name}"] if needed else []
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        unread.append(f"{path.name} cannot be read: {type(error).__name__}")
    return None


def _rows(path: Path, unread: list[str]) -> list[dict[str, Any]]:
    """Return rows with increasing steps. Rows of steps that a resumed run repeated are replaced by the newer rows."""
    rows: list[dict[str, Any]] = []
    broken = 0
    for line in _read(path, str.splitlines, unread) or ():
        row = _row(line)
        if row is None:
            broken += bool(line.strip())
            continue
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
        rows.append(row)
    if broken:
        unread.append(f"{broken} line{'s' * (broken > 1)} of {path.name} cannot be read")
    return rows


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and finite_values(row.get("step")) is not None else None
