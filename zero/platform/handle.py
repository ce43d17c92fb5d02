"""What is under way and can be waited for: transfers of a store, operations between ranks."""

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
