"""Find checkpoints by the names of their folders, without torch and without reading their files."""

import json
import re
from contextlib import suppress
from pathlib import Path

FOLDER = "checkpoints"
"""Name of the default folder of checkpoints inside the folder of a run."""

MANIFEST_NAME = "manifest.json"


def step_of(name: str) -> int | None:
    """Return the step in a folder's name such as step-0000000020; None for any other name."""
    match = re.fullmatch(r"step-([0-9]{10})", name)
    return int(match[1]) if match else None


def is_step(path: Path) -> bool:
    """Return whether `path` is one checkpoint, by its name or its manifest, and not a folder of checkpoints."""
    return step_of(path.name) is not None or (path / MANIFEST_NAME).exists()


def root_at(path: Path) -> Path:
    """Return the folder of checkpoints of the run in `path`, which its summary names if it is elsewhere.

    If `path` is not the folder of a run, return `path`.
    """
    if (path / FOLDER).is_dir():
        return path / FOLDER
    with suppress(OSError, ValueError, TypeError):
        return Path(json.loads((path / "summary.json").read_text())["checkpoint"]).parent
    return path


def missing(path: Path) -> str:
    """Return an error message if `path` has no checkpoint; "" if it is a step, a run or a folder with checkpoints."""
    if is_step(path) or any(step_of(folder.name) is not None for folder in root_at(path).glob("step-*")):
        return ""
    return f"{path}: there is no checkpoint. Give a step, a run or a folder of checkpoints"


def last_save_s(root: Path) -> float:
    """Return the time of the last checkpoint in `root`, as seconds since 1970; 0 if there is none."""
    last_s = 0.0
    for path in root.glob("step-*"):
        with suppress(FileNotFoundError):  # the run may remove a checkpoint meanwhile
            last_s = max(last_s, path.lstat().st_mtime if step_of(path.name) is not None else 0.0)
    return last_s
