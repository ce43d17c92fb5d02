"""Record the memory use of child processes, to explain why the system killed one.

The system kills a process with signal 9 when memory runs out, and the killed process cannot report how much memory it
used. So its parent reads the memory of each child and the free memory every `EVERY_S` seconds.
"""

from contextlib import suppress
from typing import NamedTuple

import psutil

from zero.core.sizes import size_text
from zero.platform.host_memory import free_host_bytes

EVERY_S = 0.5


class Reading(NamedTuple):
    """Resident bytes of all child processes and of the largest one, and the free host memory at that time."""

    largest_bytes: int
    """Resident bytes of the largest child."""
    all_bytes: int
    free_bytes: int

    @property
    def is_scarce(self) -> bool:
        """Return whether less memory was free than the largest child used."""
        return self.free_bytes < self.largest_bytes

    def __str__(self) -> str:
        return (
            f"shortly before, the ranks held {size_text(self.all_bytes)} (the largest {size_text(self.largest_bytes)}) "
            f"and {size_text(self.free_bytes)} were free"
        )


class MemoryWatch:
    """The last four memory readings of the child processes of this process."""

    def __init__(self) -> None:
        self._readings: list[Reading] = []

    @property
    def last(self) -> Reading | None:
        """Return the reading with the most memory in use, None without readings.

        The newest reading may have been made after a child ended, when its memory was free again.
        """
        return max(self._readings, key=lambda reading: reading.all_bytes, default=None)

    def read(self) -> None:
        """Add a reading if this process has children."""
        sizes = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # the child has just ended
                sizes.append(child.memory_info().rss)
        if sizes:
            self._readings = [*self._readings[-3:], Reading(max(sizes), sum(sizes), free_host_bytes())]
