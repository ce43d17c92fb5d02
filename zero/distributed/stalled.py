"""Detection of waits that can never end, because the ranks run different operations.

Gloo waits until the deadline for a message that no rank sends, and its waits can neither be inspected nor cancelled.
NCCL waits on the device, and the host for the device at a step's end. So a thread of each rank watches its waits. When
rank 0 has waited for `PATIENCE_S`, its thread writes to the store which operations rank 0 has started; every other rank
that has waited as long compares them with its own. If an operation differs, or if each of the two ranks waits for a
message of an operation that the other one has not started, the comparing rank reports it in the store, and every rank
that waits cuts its connections: sockets, and communicators of GPUs. Then all waits end, and the ranks search for the
cause as after any failed wait.

NCCL's operations are not compared before they start, because that would take a message of the host for each of them.
torch's flight recorder also records them, but a person has to read it.

The two ranks need not be observed at the same time, because a rank that waits for an operation that another has not
started is still waiting for it.

Source: the operations of ranks are compared by number as in torch's own `TORCH_DISTRIBUTED_DEBUG=DETAIL`.
"""

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from zero.distributed.failure import Note, Notes, by_rank, first_difference
from zero.platform.threads import BackgroundThread

PATIENCE_S = 2.0
"""Seconds of waiting before operations are compared. Most longer waits are for a slow rank, and continue."""

DEVICE_PATIENCE_S = 20.0
"""The same for waits for the device: a step may take this long."""

PERIOD_S = 0.5
"""Seconds between two comparisons."""

_STALLED = "stalled"
"""The key of the store that a rank sets when it has found a difference."""


class Wait(NamedTuple):
    """A wait for an operation: its order's name, its number in that order, its signature, and its other ranks.

    A wait for the device has no other ranks, because the host does not know the operation that the device waits for.
    """

    order: str
    number: int
    signature: str
    peers: tuple[int, ...]


class StallWatch:
    """The watch over the waits of one rank.

    Args:
        notes: this rank's notes, which explain waits that the watch ends; their store is also used for the comparison.
        started: returns number -> signature of this rank's latest operations; called in the watching thread.
        counted: returns order -> number of operations started in it; called in the watching thread.
        cut: cuts this rank's connections, so that all its waits end; called in the watching thread.

    Attributes:
        is_cut: whether the connections are cut, so that data received in a wait is not valid.
    """

    def __init__(
        self,
        notes: Notes,
        *,
        started: Callable[[], Mapping[int, str]],
        counted: Callable[[], Mapping[str, int]],
        cut: Callable[[], None],
    ) -> None:
        self._notes, self._started, self._counted, self._cut = notes, started, counted, cut
        self.is_cut = False
        self._waits: tuple[float, Wait] | None = None  # when its patience ends, and the current wait
        self._closing = threading.Lock()
        self._over = threading.Event()
        BackgroundThread(self._watch, name="stalls", stop=self._over.set, limit_s=PATIENCE_S).start()

    @contextmanager
    def watching(self, wait: Wait) -> Iterator[None]:
        """Return a context that watches the wait that its block makes."""
        self._waits = time.monotonic() + (PATIENCE_S if wait.peers else DEVICE_PATIENCE_S), wait
        try:
            yield
        finally:
            self._waits = None

    def close(self) -> None:
        """Stop the watch. To be called before the connections are closed."""
        with self._closing:
            self._over.set()

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store is gone with its host, and so are the connections
            while not self._over.wait(PERIOD_S):
                waits = self._waits
                if waits is None or time.monotonic() < waits[0] or not self._notes.is_there():
                    continue
                different = self._compare(waits[1])
                if different and not self._over.is_set():
                    self._notes.post(Note("vain", waits[1].signature, different, self._started()))
                    self._notes.store.set(_STALLED, different)
                if different or self._notes.store.check([_STALLED]):
                    with self._closing:
                        if not self._over.is_set():
                            self.is_cut = True
                            self._cut()
                    return

    def _compare(self, mine: Wait) -> str:
        """Return a text about the operation that differs from rank 0's; "" if none is known."""
        store, rank = self._notes.store, self._notes.rank
        if rank == 0:
            store.set("started", json.dumps([self._started(), self._counted(), mine]))
            return ""
        if not store.check(["started"]):
            return ""
        started, counted, wait = json.loads(store.get("started"))
        theirs = Wait(*wait)
        first = {int(number): signature for number, signature in started.items()}
        if different := first_difference({0: first, rank: self._started()}):
            return different
        for_each_other = 0 in mine.peers and rank in theirs.peers
        too_few = counted.get(mine.order, 0) < mine.number, self._counted().get(theirs.order, 0) < theirs.number
        if for_each_other and all(too_few):
            return by_rank({0: theirs.signature, rank: mine.signature})
        return ""


def open_sockets() -> frozenset[int]:
    """Return the file descriptors of this process that are sockets."""
    return frozenset(number for number in map(int, os.listdir("/dev/fd")) if _is_socket(number))


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:  # closed since it was listed
        return False


def cut_sockets(sockets: Collection[int]) -> None:
    """Shut down the connections among `sockets`, in both directions."""
    for number in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()  # raises for a socket that listens, which must stay open
            connection.shutdown(socket.SHUT_RDWR)
