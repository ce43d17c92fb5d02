"""The order in which units are visited, recorded in one microbatch and expected in the next; a log of collectives.

A visit is a gather: a unit's forward, or backward's first touch of it. What was seen last time says what to gather
ahead this time. A microbatch that deviates still gives the right answer: the order finds its place again at the next
visit it knows, and until then nothing is gathered ahead.

All ranks must visit alike. The log turns a step's collectives into one number that the ranks compare before they trust
what arrived.
"""

import zlib
from collections import deque
from collections.abc import Sequence

MOST_VISITS = 65_536
"""Visits that are remembered. A model that runs outside of steps, such as a teacher, never ends a microbatch."""


class VisitOrder:
    """Records visits and says which come next."""

    def __init__(self) -> None:
        self._expected: list[int] = []
        self._seen: list[int] = []
        self._at = 0

    def begin(self) -> None:
        """A microbatch starts: what the last one saw is what this one expects."""
        if self._seen:
            self._expected, self._seen = self._seen, []
        self._at = 0

    def forget(self) -> None:
        """The microbatch broke off: do not expect its half of a record."""
        self._seen, self._at = [], 0

    def visit(self, unit: int, ahead: int) -> Sequence[int]:
        """Record a visit; returns the next `ahead` distinct units, nearest first."""
        if len(self._seen) == MOST_VISITS:
            self.begin()
        self._seen.append(unit)
        try:
            self._at = self._expected.index(unit, self._at) + 1
        except ValueError:
            return ()
        upcoming: dict[int, None] = {}
        for place in range(self._at, len(self._expected)):
            if len(upcoming) == ahead:
                break
            if self._expected[place] != unit:
                upcoming[self._expected[place]] = None
        return tuple(upcoming)


class CollectiveLog:
    """The collectives that this rank started since `clear`: a number to compare, and the last names to show."""

    def __init__(self) -> None:
        self.fingerprint = 0
        self.recent: deque[str] = deque(maxlen=8)

    def clear(self) -> None:
        self.fingerprint = 0

    def note(self, what: str) -> None:
        """Add one collective."""
        self.fingerprint = zlib.crc32(what.encode(), self.fingerprint)
        self.recent.append(what)
