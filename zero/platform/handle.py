"""Something under way that can be waited for: a transfer of a store, an operation between ranks."""

from collections.abc import Callable
from typing import Protocol


class Handle(Protocol):
    """Something under way."""

    def wait(self) -> None:
        """Return when it has ended; raise what went wrong. Waiting again is free."""


class Done:
    """Something that was complete when it was started."""

    ended = True

    def wait(self) -> None:
        return None


class Then:
    """An operation that `finish` completes, once; `tensors` are kept alive until then.

    Where an error breaks `finish` off, the next wait calls it again.
    """

    def __init__(self, finish: Callable[[], object], tensors: object = None) -> None:
        self._finish: Callable[[], object] | None = finish
        self._tensors = tensors

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
        self._finish = self._tensors = None
