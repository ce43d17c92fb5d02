"""Keep the last memory reading of processes that the system may kill without a word.

The system kills with signal 9 whoever asks for memory when there is none, and the victim cannot say what it held. So
its parent reads it now and then: what each child holds, and what was left.
"""

from contextlib import suppress
from typing import NamedTuple

import psutil

from zero.core.placement import size_text
from zero.platform.device import free_host_bytes

EVERY_S = 0.5


class Reading(NamedTuple):
    """Resident bytes of the children, and what was free then."""

    most_bytes: int
    """Of the largest one."""
    all_bytes: int
    free_bytes: int

    @property
    def is_scarce(self) -> bool:
        """Less was free than the largest one held already."""
        return self.free_bytes < self.most_bytes

    def __str__(self) -> str:
        return (
            f"shortly before, the ranks held {size_text(self.all_bytes)} (the largest {size_text(self.most_bytes)}) "
            f"and {size_text(self.free_bytes)} were free"
        )


class MemoryWatch:
    """The readings that were made while a run lasted, but for the oldest."""

    def __init__(self) -> None:
        self._readings: list[Reading] = []

    @property
    def last(self) -> Reading | None:
        """Of the last few readings the one in which most was held: the very last may come after the end."""
        return max(self._readings, key=lambda reading: reading.all_bytes, default=None)

    def read(self) -> None:
        """Make one; none without children."""
        sizes = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                sizes.append(child.memory_info().rss)
        if sizes:
            self._readings = [*self._readings[-3:], Reading(max(sizes), sum(sizes), free_host_bytes())]
