"""The checkpoint with the lowest validation loss: the link `best` beside the checkpoints, with `checkpoint.best`.

A link, so that `resume`, `scripts/export` and `scripts/sample` take its path like that of any checkpoint.
"""

import os
from pathlib import Path

from zero.platform.files import naming

LINK = "best"


def mark(checkpoint: Path) -> None:
    """Make the link of the folder's checkpoints name this one.

    Raises:
        CheckpointError: the link cannot be written.
    """
    link = checkpoint.with_name(LINK)
    with naming(link, "writing it"):
        unfinished = link.with_name(f".{LINK}-{os.getpid()}")
        unfinished.unlink(missing_ok=True)
        unfinished.symlink_to(checkpoint.name)
        unfinished.replace(link)


def best_in(root: Path) -> Path | None:
    """Return the checkpoint that the link in `root` names; None if there is no link, or the checkpoint is gone."""
    link = root / LINK
    if not link.is_symlink():
        return None
    checkpoint = root / link.readlink()
    return checkpoint if checkpoint.exists() else None
