"""Report the progress of long work: the type of a function that the work calls, and that a progress bar implements.

It is called in the thread that trains, on every rank, with this rank's share of the work; `done == total` ends it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

Progress = Callable[[str, int, int], None]
"""A function of (text, done, total): the name of the work, this rank's done part and its total, in any unit."""


def silent(what: str, done: int, total: int) -> None:
    """Show nothing."""


def reported(items: Sequence[Item], what: str, progress: Progress) -> Iterator[Item]:
    """Yield the items, and call `progress` before each and after the last."""
    for done, item in enumerate(items):
        progress(what, done, len(items))
        yield item
    progress(what, len(items), len(items))
