"""The events and actions of read-ahead and write-behind.

Memory has a few **slots**. A **group** of pages is in a store, and is loaded into a slot to be modified:

    unloaded -> READING -> READY -> WORKING -> DIRTY -> WRITING -> unloaded

A caller submits the modification of a group. A caller can also announce groups; such a group is read ahead and waits in
phase READY. It is not modified yet, so its slot can be reused without a write. A modified group waits in phase DIRTY
for its write, first the one that was submitted first. While groups wait for reads and for writes, as many are read as
written, so that disks work in both directions. Reads and writes of single pages are **transfers**.

A modification or a transfer is an **operation** from its submission to its end. Operations on one page, of which at
least one writes, run in the order of submission. A page that a group writes back, or will, is still in the group's
slot, so a read that waits for this write copies from the slot instead. The slot stays until the copy ends, even if the
write ends first. Read-ahead is no operation: it never starts on a page that an operation writes, and a write that is
submitted makes pages that were read ahead stale.

`tests/store/specification.py` defines the right actions as one pure function, (state, event) -> (state, actions), and
`tests/store/test_schedule.py` checks it for every order of events. `indexed_schedule` makes the same decisions for many
groups.
"""

from enum import Enum
from typing import NamedTuple

from zero.store.base import Page

# -- groups ------------------------------------------------------------------------------------------------------------


class PageGroup(NamedTuple):
    """Pages that one update needs together, for example those of one range of a unit's master and moments."""

    unit: int
    number: int
    pages: tuple[Page, ...]
    """Pages that are read, changed and written back."""
    beside: tuple[Page, ...] = ()
    """Pages that are only read, just before the work; never read ahead."""
    out: tuple[Page, ...] = ()
    """Pages that are only written, after the work."""

    @property
    def all(self) -> tuple[Page, ...]:
        """Return all pages in their order in a slot."""
        return (*self.pages, *self.beside, *self.out)

    def __str__(self) -> str:
        return f"group {self.number} of unit {self.unit}"


class GroupPhase(Enum):
    """The state of a loaded group in its slot."""

    READING = "reading"
    READY = "ready"
    WORKING = "working"
    DIRTY = "dirty"
    WRITING = "writing"
    LEAVING = "leaving"
    """Written, but a read still copies from the slot, or will."""


# -- events and actions ------------------------------------------------------------------------------------------------


class Expect(NamedTuple):
    """The announcement of the groups that will be modified next, in this order. Replaces the last announcement.

    Groups without `pages` are not announced.
    """

    groups: tuple[PageGroup, ...]


class Modify(NamedTuple):
    """The submission of work on a group."""

    number: int
    """The number of the operation, larger than every earlier one."""
    group: PageGroup
    priority: tuple[int, ...]
    """The operation with the smallest priority starts first."""
    in_place: bool = False
    """The store lends all pages of the group, so there is no slot, no read and no write."""


class PageTransfer(NamedTuple):
    """The submission of a read or a write of one page."""

    number: int
    page: Page
    writes: bool
    here: bool = False
    """True: the calling thread executes the transfer, without a worker, if it can start at once."""


class Read(NamedTuple):
    """The read of a group's `pages` into a slot."""

    group: PageGroup
    slot: int


class Work(NamedTuple):
    """The read of the group's `beside` and then the work. If `slot` is None, the work is on the pages in place."""

    number: int
    group: PageGroup
    slot: int | None


class Write(NamedTuple):
    """The write of the group's `pages` and `out`."""

    number: int
    group: PageGroup
    slot: int


class Move(NamedTuple):
    """The execution of a transfer."""

    number: int
    page: Page
    writes: bool


class Copy(NamedTuple):
    """The execution of a read as a copy from the slot of a group that is writing the page, or has just written it."""

    number: int
    page: Page
    group: PageGroup
    slot: int


Action = Read | Work | Write | Move | Copy


class Finished(NamedTuple):
    """The end of an action without an error."""

    action: Action


StoreEvent = Expect | Modify | PageTransfer | Finished
