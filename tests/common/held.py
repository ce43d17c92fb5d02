"""Open files of a folder, and threads: a test must leave none behind in its process.

Never all of the process: an engine that an earlier test has dropped is closed, by a thread and with a file, whenever
Python collects it.
"""

import contextlib
import os
import threading
from pathlib import Path


def open_files(folder: Path) -> list[int]:
    """Descriptors of this process to `folder` and to whatever is in it, with or without a name."""
    descriptors = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if f"{os.readlink(link)}/".startswith(f"{folder.resolve()}/"):
                descriptors.append(int(link.name))
    return sorted(descriptors)


def live_threads() -> set[threading.Thread]:
    """All but those that close a dropped engine."""
    return {thread for thread in threading.enumerate() if thread.name != "closing"}
