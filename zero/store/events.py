"""The events and actions of read-ahead and write-behind.

Memory has a few **slots**. A **group** of pages is in a store, and is loaded into a slot to be modified:

    unloaded -> READING -> READY -> WORKING -> WRITING -> unloaded

A caller submits the modification of a group. A group that is only expected is read ahead and waits, READY; it is clean,
so its slot can be taken back for free. Beside groups there are **transfers**: single pages that are read or written.

A modification or a transfer is an **operation** from its submission to its end. Operations that touch one page with at
least one write keep the order of submission. A page that a group is writing back is still in its slot, so a read that
waits for the write is a copy from there, and the slot stays until the copy ends, though the write may end first.
Read-ahead is no operation: it never starts on a page that an operation writes, and a write that is submitted makes
pages that were read ahead stale.

`tests/store/specification.py` defines the right actions as one pure function, (state, event) -> (state, actions), of
which `tests/store/test_schedule.py` searches every order of events. `indexed_schedule` decides the same for many
groups.
"""

from enum import Enum
from typing import NamedTuple

from zero.store.base import Page

# -- groups ------------------------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Pages that one piece of work needs together: one stretch of a unit's master and moments, for example."""

    unit: int
    number: int
    pages: tuple[Page, ...]
    """Read, changed and written back."""
    beside: tuple[Page, ...] = ()
    """Only read, just before the work: never read ahead."""
    out: tuple[Page, ...] = ()
    """Only written, after the work."""

    @property
    def all(self) -> tuple[Page, ...]:
        """Return all pages in their order in a slot."""
        return (*self.pages, *self.beside, *self.out)

    def __str__(self) -> str:
        return f"group {self.number} of unit {self.unit}"


class Phase(Enum):
    """The state of a loaded group in its slot."""

    READING = "reading"
    READY = "ready"
    WORKING = "working"
    WRITING = "writing"
    LEAVING = "leaving"
    """Written, and a read still copies from the slot or will."""


# -- events and actions ------------------------------------------------------------------------------------------------


class Expect(NamedTuple):
    """The groups that will be modified next, in this order; all have `pages`. Replaces the last such event."""

    groups: tuple[Group, ...]


class Modify(NamedTuple):
    """The submission of work on a group."""

    number: int
    """Of the operation: larger than every earlier one."""
    group: Group
    priority: tuple[int, ...]
    """Smallest first."""
    in_place: bool = False
    """The store lends all pages of the group: no slot, no read, no write."""


class Transfer(NamedTuple):
    """The submission of a read or a write of one page."""

    number: int
    page: Page
    writes: bool
    here: bool = False
    """True: the calling thread carries it out if it can start at once, without a worker."""


class Read(NamedTuple):
    """The read of a group's `pages` into a slot."""

    group: Group
    slot: int


class Work(NamedTuple):
    """The read of `beside` and then the work; without a slot, on the pages in place."""

    number: int
    group: Group
    slot: int | None


class Write(NamedTuple):
    """The write of `pages` and `out`, by the worker that did the work."""

    number: int
    group: Group
    slot: int


class Move(NamedTuple):
    """The execution of a transfer."""

    number: int
    page: Page
    writes: bool


class Copy(NamedTuple):
    """The execution of a read from the slot that the page is written from, or was."""

    number: int
    page: Page
    group: Group
    slot: int


Action = Read | Work | Write | Move | Copy


class Finished(NamedTuple):
    """The end of an action without an error."""

    action: Action


Event = Expect | Modify | Transfer | Finished
