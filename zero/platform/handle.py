"""Handles of asynchronous operations, to wait for: transfers of a store, collectives of ranks."""

from collections.abc import Callable
from typing import Protocol


class Handle(Protocol):
    """An asynchronous operation in progress."""

    def wait(self) -> None:
        """Wait until the operation has ended, and raise its error if it failed. Further calls return at once."""


class Done:
    """The handle of an operation that is already complete."""

    ended = True

    def wait(self) -> None:
        return None


class Then:
    """The handle of an operation that the first `wait` completes by calling `finish`.

    If `finish` raises an error, the next `wait` calls it again. `tensors` are kept alive until it has succeeded.
    """

    def __init__(self, finish: Callable[[], object], tensors: object = None) -> None:
        self._finish: Callable[[], object] | None = finish
        self._tensors = tensors

    def wait(self) -> None:
        if self._finish is not None:
            self._finish()
        self._finish = self._tensors = None
