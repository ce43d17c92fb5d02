"""Counts of the bytes that one rank receives from other ranks, and of the time in which its host waits for them."""

import time
from typing import Any, NamedTuple

from zero.platform.handle import Handle, Then


class Collectives(NamedTuple):
    """Bytes that one rank received in gathers and reductions, and time of waits, since its world was opened."""

    gather_bytes: int
    reduce_bytes: int
    wait_s: float
    """Seconds that the host spent in `wait`, additions of chunks included. On a CUDA world the host does not wait."""
    wire_bytes: int = 0
    """The part of `gather_bytes` and `reduce_bytes` that came from other nodes."""


class CollectiveCounter:
    """The counter of one rank, which a world shares with its parts."""

    def __init__(self) -> None:
        self._moved: dict[str, Any] = dict.fromkeys(Collectives._fields, 0)

    def read(self) -> Collectives:
        return Collectives(*(self._moved[name] for name in Collectives._fields))

    def received(self, nbytes: int, wire_bytes: int, *, gather: bool) -> None:
        """Add bytes that were received, of which `wire_bytes` came from other nodes."""
        self._moved["gather_bytes" if gather else "reduce_bytes"] += nbytes
        self._moved["wire_bytes"] += wire_bytes

    def timed(self, handle: Handle) -> Handle:
        """Return a handle whose `wait` adds its time."""

        def wait() -> None:
            begin_s = time.perf_counter()
            try:
                handle.wait()
            finally:
                self._moved["wait_s"] += time.perf_counter() - begin_s

        return Then(wait)
