"""Report how far long work has come: a function that the work calls, and that a progress bar implements.

Called in the thread that trains, on every rank, with what this rank has done of its own share; `done == total` ends it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")

Progress = Callable[[str, int, int], None]
"""Called as (text, done, total): what is being done, how much of it this rank has done, and how much there is to do, in
one unit: bytes, rows, tokens or units."""


def silent(what: str, done: int, total: int) -> None:
    """Shows nothing."""


def reported(items: Sequence[Item], what: str, progress: Progress) -> Iterator[Item]:
    """The items; `progress` is told how many are done, before each and after the last."""
    for done, item in enumerate(items):
        progress(what, done, len(items))
        yield item
    progress(what, len(items), len(items))
