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

# -- what there is -----------------------------------------------------------------------------------------------------


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
        """In the order in which they lie in a slot."""
        return (*self.pages, *self.beside, *self.out)

    def __str__(self) -> str:
        return f"group {self.number} of unit {self.unit}"


class Phase(Enum):
    """Where a loaded group is on its way through a slot."""

    READING = "reading"
    READY = "ready"
    WORKING = "working"
    WRITING = "writing"
    LEAVING = "leaving"
    """Written; somebody still copies from the slot, or is to."""


# -- what happens, and what is to be done ------------------------------------------------------------------------------


class Expect(NamedTuple):
    """These groups, which all have `pages`, will be modified in this order; replaces what was expected before."""

    groups: tuple[Group, ...]


class Modify(NamedTuple):
    """A group is to be modified."""

    number: int
    """Of the operation: larger than every earlier one."""
    group: Group
    priority: tuple[int, ...]
    """Smallest first."""
    in_place: bool = False
    """The store lends all its pages: no slot, no read, no write."""


class Transfer(NamedTuple):
    """A page is to be read or written."""

    number: int
    page: Page
    writes: bool
    here: bool = False
    """If it can start at once, then in the asking thread: it takes no worker."""


class Read(NamedTuple):
    """Bring the group's `pages` into the slot."""

    group: Group
    slot: int


class Work(NamedTuple):
    """Read what is `beside`, then do the work. Without a slot: on the pages in place."""

    number: int
    group: Group
    slot: int | None


class Write(NamedTuple):
    """Write `pages` and `out` back. The worker that did the work goes on with it."""

    number: int
    group: Group
    slot: int


class Move(NamedTuple):
    """Carry out a transfer."""

    number: int
    page: Page
    writes: bool


class Copy(NamedTuple):
    """Carry out a read from the slot that the page is written from, or was."""

    number: int
    page: Page
    group: Group
    slot: int


Action = Read | Work | Write | Move | Copy


class Finished(NamedTuple):
    """An action has ended well."""

    action: Action


Event = Expect | Modify | Transfer | Finished
