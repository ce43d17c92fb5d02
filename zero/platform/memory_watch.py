"""Keep the last memory reading of processes that the system may kill without a word.

The system kills a process with signal 9 when memory runs out, and the victim cannot report what it held. So its parent
reads the memory of each child, and the free memory, from time to time.
"""

from contextlib import suppress
from typing import NamedTuple

import psutil

from zero.core.sizes import size_text
from zero.platform.device import free_host_bytes

EVERY_S = 0.5


class Reading(NamedTuple):
    """Resident bytes of the children, and the free bytes at that time."""

    largest_bytes: int
    """Of the largest child."""
    all_bytes: int
    free_bytes: int

    @property
    def is_scarce(self) -> bool:
        """Return whether less was free than the largest child held."""
        return self.free_bytes < self.largest_bytes

    def __str__(self) -> str:
        return (
            f"shortly before, the ranks held {size_text(self.all_bytes)} (the largest {size_text(self.largest_bytes)}) "
            f"and {size_text(self.free_bytes)} were free"
        )


class MemoryWatch:
    """The last readings of a run."""

    def __init__(self) -> None:
        self._readings: list[Reading] = []

    @property
    def last(self) -> Reading | None:
        """Return the largest of the last readings: the very last may come after the end of a child."""
        return max(self._readings, key=lambda reading: reading.all_bytes, default=None)

    def read(self) -> None:
        """Add a reading if there are children."""
        sizes = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                sizes.append(child.memory_info().rss)
        if sizes:
            self._readings = [*self._readings[-3:], Reading(max(sizes), sum(sizes), free_host_bytes())]
