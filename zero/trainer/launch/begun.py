"""Which run torchrun starts again: its folder, kept by each node's torchrun among its own logs.

torchrun starts all ranks anew when one fails and when a node comes or goes, with rank 0 on any node. It says only how
often this node has seen a failure, which is another number on other nodes. So every node keeps what its ranks were
told, for as long as its torchrun lives, and the ranks of the next start ask each other: one node that has stayed is
enough.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zero.platform.run_files import publish


class Begun(NamedTuple):
    """A run that torchrun has started."""

    folder: str = ""
    starts: int = 0

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Begun":
        """The last start that any rank knows of, from the `own_begun` of each."""
        return max((cls(*json.loads(text)) for text in texts), key=lambda one: one.starts)

    def keep(self) -> None:
        """Keep it for the ranks that this node's torchrun starts next; they read it as `restart_count`, too."""
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(self.starts - 1)
        if path := _path():
            publish(path, json.dumps(self))


def own_begun() -> str:
    """What this node's torchrun has started before, for `Begun.of`."""
    path = _path()
    return path.read_text() if path and path.exists() else json.dumps(Begun())


def _path() -> Path | None:
    """Beside the folders of attempts; that of an error is in one for each rank, in one for each attempt."""
    error = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error).parents[2] / "zero.json" if error else None
