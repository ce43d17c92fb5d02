"""The order in which units are visited, to predict the next gathers, and a log of collectives.

A visit is a unit's forward, or the first use of the unit in backward, either of which gathers it. The order of the last
microbatch predicts which units to gather ahead in the present microbatch. If a microbatch visits units in another
order, results stay correct: nothing is gathered ahead until a visit matches the recorded order again.

All ranks must visit units in the same order. The log hashes a step's collectives to one number, and the ranks compare
their numbers before they use the received data.
"""

import zlib
from collections import deque
from collections.abc import Sequence

MOST_VISITS = 65_536
"""The largest number of recorded visits, because a model that runs outside of steps never begins a new microbatch."""


class VisitOrder:
    """A record of visits that predicts the next ones."""

    def __init__(self) -> None:
        self._expected: list[int] = []
        self._seen: list[int] = []
        self._at = 0

    def begin(self) -> None:
        """Begin a microbatch, and expect the visits of the last one."""
        if self._seen:
            self._expected, self._seen = self._seen, []
        self._at = 0

    def forget(self) -> None:
        """Drop the record of an interrupted microbatch, because it is incomplete."""
        self._seen, self._at = [], 0

    def visit(self, unit: int, ahead: int) -> Sequence[int]:
        """Record a visit of `unit`; return the next `ahead` distinct units that are expected, nearest first."""
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
    """A record of the collectives that this rank started since `clear`.

    Attributes:
        fingerprint: a CRC-32 of them, to compare ranks.
        recent: the last 8 of them, for error messages.
    """

    def __init__(self) -> None:
        self.fingerprint = 0
        self.recent: deque[str] = deque(maxlen=8)

    def clear(self) -> None:
        self.fingerprint = 0

    def note(self, what: str) -> None:
        """Record one collective, described by `what`."""
        self.fingerprint = zlib.crc32(what.encode(), self.fingerprint)
        self.recent.append(what)
