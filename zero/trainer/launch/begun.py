"""The run that torchrun starts again: its folder, which each node keeps among its torchrun's logs.

torchrun starts all ranks anew when one fails and when a node comes or goes, with rank 0 on any node. It tells only how
often this node has seen a failure, which differs between nodes. So every node keeps the folder and the number of starts
for as long as its torchrun lives, and the ranks of the next start ask each other: one node that has stayed is enough.
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
        """Return the last start that any rank knows of, from the `own_begun` of each."""
        return max((cls(*json.loads(text)) for text in texts), key=lambda begun: begun.starts)

    def keep(self) -> None:
        """Keep it for the ranks that this node's torchrun starts next, also as their `restart_count`."""
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(self.starts - 1)
        if path := _path():
            publish(path, json.dumps(self))


def notes_on_torchrun() -> list[str]:
    """Warn if a lost node cannot come back: torch 2.13 sends the address of its shared store in one round only."""
    several, again = (int(os.environ.get(name, "0")) for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
    if several < 2 or not again or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return []
    return ["a node that is lost cannot come back: start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on each"]


def own_begun() -> str:
    """Return the last start of this node's torchrun as text for `Begun.of`."""
    path = _path()
    return path.read_text() if path and path.exists() else json.dumps(Begun())


def _path() -> Path | None:
    """Return the path beside torchrun's folders of attempts, each of which has a folder for each rank's error file."""
    error = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error).parents[2] / "zero.json" if error else None
