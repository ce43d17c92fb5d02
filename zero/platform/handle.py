"""Operations under way that can be waited for: transfers of a store, collectives of ranks."""

from collections.abc import Callable
from typing import Protocol


class Handle(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Wait until it has ended, and raise its error. Waiting again is free."""


class Done:
    """An operation that was complete at its start."""

    ended = True

    def wait(self) -> None:
        return None


class Then:
    """An operation that the first `wait` completes by `finish`; `tensors` are kept alive until then.

    After an error in `finish` the next wait calls it again.
    """

    def __init__(self, finish: Callable[[], object], tensors: object = None) -> None:
        self._finish: Callable[[], object] | None = finish
        self._tensors = tensors

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
        self._finish = self._tensors = None
