"""The record of a run's starts and saves, beside its checkpoints, from which a restart knows where to continue."""

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero.checkpoint import Checkpoint, Root
from zero.platform.files import appearing, naming
from zero.platform.run_files import writing
from zero.platform.step_folders import FOLDER
from zero.trainer.config import Config

STARTS = "starts.jsonl"
"""File in the run's folder with a JSON line for each start, {"from": folder or null, "step": number, "machines":
"one" or "several"}, and for each save, {"saved": folder}."""


def root_of(config: Config, folder: Path) -> Path:
    """Return the folder of the checkpoints of the run in `folder`."""
    return Path(config.checkpoint.dir) if config.checkpoint.dir is not None else folder / FOLDER


def record_start(folder: Path, checkpoint: Checkpoint | None, *, several: bool = False) -> None:
    """Record that the run in `folder` starts from a checkpoint, or from none.

    Args:
        several: whether the ranks are on several machines.
    """
    began, step = (None, None) if checkpoint is None else (str(checkpoint.folder.absolute()), checkpoint.step)
    with writing(folder / STARTS):
        _record(folder, {"from": began, "step": step, "machines": "several" if several else "one"})


def record_saved(folder: Path, published: Path) -> None:
    """Record that the run in `folder` has published a checkpoint."""
    with naming(folder / STARTS, "writing it"):
        _record(folder, {"saved": str(published.absolute())})


def last_saved(folder: Path) -> Path | None:
    """Return the newest checkpoint that the run in `folder` has published and that still exists."""
    saved = [Path(line["saved"]) for line in recorded(folder) if "saved" in line]
    return next((path for path in reversed(saved) if path.exists()), None)


def _record(folder: Path, line: Mapping[str, Any]) -> None:
    lines = [*recorded(folder), line]
    with appearing(folder / STARTS, replaces=True) as unfinished:  # a full disk would cut short a line that is appended
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in lines))


def clean(root: Path, folder: Path, restarts: int) -> list[dict[str, Any]]:
    """Remove unpublished folders of dead runs from `root`; returns the recorded starts and saves of this run."""
    Root(root).sweep()
    path = folder / STARTS
    with naming(path, "reading it"):
        if not restarts:
            path.unlink(missing_ok=True)  # file of an earlier run in the same folder
        return recorded(folder)


def recorded(folder: Path) -> list[dict[str, Any]]:
    path, lines = folder / STARTS, []
    for text in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):  # earlier versions appended to lines that were cut short
            lines.append(json.loads(text))
    return lines


def suspects(lines: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """Return the checkpoints from which two starts of this run have failed without a save since, and the reason.

    Only starts on one machine count, because of several machines one is more likely to have failed than the checkpoint.
    """
    failed: Counter[str] = Counter()
    for line in lines:
        if "saved" in line:
            failed.clear()
        elif line["from"] is not None and line.get("machines") != "several":
            failed[line["from"]] += 1
    return {Path(folder): "two starts from it have failed" for folder, count in failed.items() if count > 1}
