"""Notice during a wait that it can never end, because the ranks run different operations.

Gloo waits until the deadline for a message that nobody sends, and its waits can neither be inspected nor cancelled. So
a thread of each rank watches. When rank 0 has waited for `PATIENCE_S`, it writes the operations that it has started to
the store; another rank that waits as long compares them with its own. If an operation differs it cuts its connections:
every wait of every rank then fails at once, and finds the cause as any wait that fails.

Source: the operations of ranks are compared by number as in torch's own `TORCH_DISTRIBUTED_DEBUG=DETAIL`.
"""

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from zero.distributed.failure import Note, Notes, first_difference
from zero.platform.threads import Beside

PATIENCE_S = 2.0
"""Shorter waits are not compared. Most longer ones are for a slow rank, and go on."""

PERIOD_S = 0.5
"""Seconds between two comparisons."""


class StallWatch:
    """The watch of one rank.

    Args:
        notes: this rank's notes, for ranks whose waits will fail; and their store, through which ranks compare.
        started: returns this rank's latest operations in order, by number; called by the thread of the watch.
        sockets: descriptors of this rank's connections.
    """

    def __init__(
        self,
        notes: Notes,
        *,
        started: Callable[[], Mapping[int, str]],
        sockets: Collection[int],
    ) -> None:
        self._notes, self._started, self._sockets = notes, started, sockets
        self._waits: tuple[float, str] | None = None  # since when, and for what
        self._over = threading.Event()
        Beside(self._watch, name="stalls", stop=self._over.set, limit_s=PATIENCE_S).start()

    def begin(self, signature: str) -> None:
        """Note that this rank waits from now on for an operation."""
        self._waits = time.monotonic(), signature

    def end(self) -> None:
        """Note that it does not wait any more."""
        self._waits = None

    def close(self) -> None:
        """Stop, before the connections are closed."""
        self._over.set()

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store is gone with its host, and so are the connections
            while not self._over.wait(PERIOD_S):
                waits = self._waits
                if waits is None or time.monotonic() - waits[0] < PATIENCE_S or not self._notes.is_there():
                    continue
                different = self._compare()
                if different and not self._over.is_set():
                    self._notes.post(Note("vain", waits[1], different, self._started()))
                    cut(self._sockets)
                    return

    def _compare(self) -> str:
        """Return the operation that differs from rank 0's; "" if none is known."""
        store, rank = self._notes.store, self._notes.rank
        if rank == 0:
            store.set("started", json.dumps(self._started()))
            return ""
        if not store.check(["started"]):
            return ""
        first = {int(number): signature for number, signature in json.loads(store.get("started")).items()}
        return first_difference({0: first, rank: self._started()})


def open_sockets() -> frozenset[int]:
    """Return the descriptors of this process that are sockets."""
    return frozenset(number for number in map(int, os.listdir("/dev/fd")) if _is_socket(number))


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:  # closed since it was listed
        return False


def cut(sockets: Collection[int]) -> None:
    """End the connections among `sockets`, in both directions."""
    for number in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()  # raises for a socket that listens, which must stay open
            connection.shutdown(socket.SHUT_RDWR)
