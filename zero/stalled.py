"""Find out while a rank waits that it waits in vain, because the ranks run different operations.

A message that nobody expects, and one that nobody sends, are waited for until the deadline: gloo's waits can neither be
looked into nor called off. So a thread of each rank watches. When rank 0 has waited for `PATIENCE_S`, it tells through
the store which operations it has started; another that waits as long compares them with its own. If one is another, it
cuts its connections: every wait of every rank then fails at once, and learns the cause as any wait that fails.

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
from typing import Protocol

from zero.beside import Beside
from zero.failure import Note, first_difference

PATIENCE_S = 2.0
"""A wait this long is worth a question. Most that are longer are for a rank that is slow, and go on."""

PERIOD_S = 0.5
"""How often the question is asked."""


class SharedStore(Protocol):
    """The part of a c10d store that is needed here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class StallWatch:
    """The watch of one rank.

    Args:
        started: this rank's latest operations, by number; called by the watch's own thread.
        post: leaves this rank's note for those whose waits will fail.
        sockets: descriptors of this rank's connections.
        is_there: whether the store's host is. To write to one that is gone makes torch complain for pages.
    """

    def __init__(
        self,
        store: SharedStore,
        rank: int,
        *,
        started: Callable[[], Mapping[int, str]],
        post: Callable[[Note], None],
        sockets: Collection[int],
        is_there: Callable[[], bool],
    ) -> None:
        self._store, self._rank, self._is_there = store, rank, is_there
        self._started, self._post, self._sockets = started, post, sockets
        self._since_s: float | None = None
        self._over = threading.Event()
        Beside(self._watch, name="stalls", stop=self._over.set, limit_s=PATIENCE_S).start()

    def begin(self) -> None:
        """This rank waits from now on."""
        self._since_s = time.monotonic()

    def end(self) -> None:
        """It does not any more."""
        self._since_s = None

    def close(self) -> None:
        """The connections are about to be given back."""
        self._over.set()

    def _watch(self) -> None:
        with suppress(RuntimeError):  # the store is gone with its host: whoever waits is cut off already
            while not self._over.wait(PERIOD_S):
                since_s = self._since_s
                if since_s is None or time.monotonic() - since_s < PATIENCE_S or not self._is_there():
                    continue
                different = self._compare()
                if different and not self._over.is_set():
                    self._post(Note("lost", "", different, self._started()))
                    cut(self._sockets)
                    return

    def _compare(self) -> str:
        """Which operation is another one than rank 0's, as far as is known; "" where none is."""
        if self._rank == 0:
            self._store.set("started", json.dumps(self._started()))
        elif self._store.check(["started"]):
            first = {int(number): signature for number, signature in json.loads(self._store.get("started")).items()}
            return first_difference({0: first, self._rank: self._started()})
        return ""


def open_sockets() -> frozenset[int]:
    """Descriptors of this process that are sockets."""
    return frozenset(number for number in map(int, os.listdir("/dev/fd")) if _is_socket(number))


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:  # closed since it was listed
        return False


def cut(sockets: Collection[int]) -> None:
    """End the connections among `sockets`, in both directions, whoever is reading."""
    for number in sockets:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            one.getpeername()  # one that listens has no peer, and must go on
            one.shutdown(socket.SHUT_RDWR)
