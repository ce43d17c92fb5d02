"""Progress of long work: the type of the callback, which a progress bar implements, and functions that call it.

The callback is called in the training thread, on every rank, with this rank's share of the work. `done == total` is the
last call.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

Progress = Callable[[str, int, int], None]
"""A callback with (text, done, total): the name of the work, this rank's finished part and its total, in any unit."""


def silent(what: str, done: int, total: int) -> None:
    """Ignore the progress."""


def reported(items: Sequence[Item], what: str, progress: Progress) -> Iterator[Item]:
    """Yield the items, and call `progress` before each item and after the last."""
    for done, item in enumerate(items):
        progress(what, done, len(items))
        yield item
    progress(what, len(items), len(items))
