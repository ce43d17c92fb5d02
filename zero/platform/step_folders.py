"""Find checkpoints by the names of their folders, without torch and without reading what is in them."""

import re
from contextlib import suppress
from pathlib import Path

FOLDER = "checkpoints"
"""Of a run, inside its folder, unless configured otherwise."""

MANIFEST_NAME = "manifest.json"


def step_of(name: str) -> int | None:
    """The step that a folder's name says; None for every name that `step_name` does not give."""
    found = re.fullmatch(r"step-([0-9]{10})", name)
    return int(found[1]) if found else None


def is_step(path: Path) -> bool:
    """It is meant to be one checkpoint, not a folder of them."""
    return step_of(path.name) is not None or (path / MANIFEST_NAME).exists()


def root_at(path: Path) -> Path:
    """The folder of checkpoints that a person means by the folder of a run, or by the folder itself."""
    return path / FOLDER if (path / FOLDER).is_dir() else path


def missing(path: Path) -> str:
    """What to say of a path without a checkpoint; "" where there is a step, a run or a folder of checkpoints."""
    if is_step(path) or any(step_of(one.name) is not None for one in root_at(path).glob("step-*")):
        return ""
    return f"{path}: there is no checkpoint; give a step, a run or a folder of checkpoints{_newest_run(path)}"


def last_save_s(root: Path) -> float:
    """When something was published there; 0: never."""
    last_s = 0.0
    for path in root.glob("step-*"):
        with suppress(FileNotFoundError):  # its run has removed it meanwhile
            last_s = max(last_s, path.lstat().st_mtime if step_of(path.name) is not None else 0.0)
    return last_s


def _newest_run(path: Path) -> str:
    """For those who gave the folder of all runs: of those that saved, the one that did so last."""
    saves_s = {root: last_save_s(root) for depth in ("*", "*/*") for root in path.glob(f"{depth}/{FOLDER}")}
    newest = max(saves_s, key=lambda root: saves_s[root], default=None)
    return f", such as {newest.parent}" if newest is not None and saves_s[newest] else ""
