"""The folder and the number of starts of a run that torchrun restarts, kept on each node among torchrun's logs.

torchrun restarts all ranks when a rank fails and when a node joins or leaves, and rank 0 may then be on another node.
torchrun's own count of restarts has only the failures that this node has seen, so it differs between nodes. Therefore
every node keeps the folder and the number of starts as long as its torchrun lives, and the ranks of the next start
exchange them. One node that has stayed is enough.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zero.platform.run_files import publish


class Begun(NamedTuple):
    """The folder of a run that torchrun has started, and the number of its starts so far."""

    folder: str = ""
    starts: int = 0

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Begun":
        """Return the latest start that any rank knows of.

        Args:
            texts: the result of `own_begun` on each rank.
        """
        return max((cls(*json.loads(text)) for text in texts), key=lambda begun: begun.starts)

    def keep(self) -> None:
        """Store this start for later ranks of this node's torchrun; also set this process's `restart_count`."""
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(self.starts - 1)
        if path := _path():
            publish(path, json.dumps(self))


def notes_on_torchrun() -> list[str]:
    """Return a warning if a lost node cannot rejoin.

    torch 2.13 sends the address of its shared store in one rendezvous round only.
    """
    several, again = (int(os.environ.get(name, "0")) for name in ("GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS"))
    if several < 2 or not again or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return []
    variable = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    return [f"a node that fails cannot rejoin the run. Start torchrun with {variable} on every node."]


def own_begun() -> str:
    """Return the last start that this node has stored, as JSON text for `Begun.of`."""
    path = _path()
    return path.read_text() if path and path.exists() else json.dumps(Begun())


def _path() -> Path | None:
    """Return this node's file in torchrun's log folder, beside the folders of attempts; None without torchrun."""
    error = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error).parents[2] / "zero.json" if error else None
