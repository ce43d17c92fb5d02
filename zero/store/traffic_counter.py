"""Counters of the bytes that move between a store and memory, and of the time that they take."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes that moved and times, since the store was opened; pages in place do not move."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_s: float = 0.0
    """Wall time in which at least one read was in progress."""
    write_s: float = 0.0
    """Wall time in which at least one write was in progress."""
    busy_s: float = 0.0
    """Wall time in which at least one read or write was in progress."""
    wait_s: float = 0.0
    """Time that callers were blocked, summed over the callers."""


class TrafficCounter:
    """Counter of bytes, and of the wall time in which reads or writes were in progress. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since_s = time.monotonic()
        self._under_way, self._bytes, self._s = [0, 0], [0, 0], [0.0, 0.0]  # [reads, writes]
        self._busy_s = self._wait_s = 0.0

    @contextmanager
    def moving(self, nbytes: int, writes: bool) -> Iterator[None]:
        """Count the read or the write in the body; its bytes count only if the body does not raise."""
        self._change(writes, +1, 0)
        moved = 0
        try:
            yield
            moved = nbytes
        finally:
            self._change(writes, -1, moved)

    def waited(self, seconds: float) -> None:
        with self._lock:
            self._wait_s += seconds

    def read_off(self) -> Traffic:
        with self._lock:
            self._tick()
            return Traffic(self._bytes[0], self._bytes[1], self._s[0], self._s[1], self._busy_s, self._wait_s)

    def _change(self, writes: bool, by: int, nbytes: int) -> None:
        with self._lock:
            self._tick()
            self._under_way[writes] += by
            self._bytes[writes] += nbytes

    def _tick(self) -> None:
        """Add the time since the last call to the times of reads and writes that are in progress."""
        now_s = time.monotonic()
        passed_s, self._since_s = now_s - self._since_s, now_s
        for writes, count in enumerate(self._under_way):
            if count:
                self._s[writes] += passed_s
        if any(self._under_way):
            self._busy_s += passed_s
