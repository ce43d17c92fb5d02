"""Something under way that can be waited for: a transfer of a store, an operation between ranks."""

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
