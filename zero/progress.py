"""How far long work has come. Whoever does it tells `Progress`; whoever shows it is given as one.

Called in the thread that trains, on every rank, with what this rank has done of its own share; `done == total` ends it.
"""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""(what is done, how much of it, of how much): bytes, rows or tokens, as long as both are the same."""


def silent(what: str, done: int, total: int) -> None:
    """Shows nothing."""
