"""The interface of a store of state: pages that are read and written by key, such as those of master and moments.

A store knows keys and bytes, and nothing of optimizers, ranks or models. A page is a 1-D tensor of fixed length and
dtype with the contents that were last written to it.

Every store passes the same tests, `zero.testing.StoreContract`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from zero.errors import StoreError
from zero.platform.handle import Handle

Holder = TypeVar("Holder")


class PageKind(StrEnum):
    """The kind of a page that holds neither a master nor a moment.

    Kinds of masters and moments are named by the precision and the optimizer.
    """

    PARAM = "param"
    FROZEN = "frozen"
    PACKED = "codes"
    GRAD = "grad"
    FIRST_GRAD = "first_grad"
    SECONDARY = "secondary"


ASIDE = 1 << 30
"""A number that is added to the unit of a page while another page has its key."""

PARAMETER_KINDS = PageKind.PARAM, PageKind.FROZEN, PageKind.PACKED
"""The kinds of pages that hold parameters."""


class Page(NamedTuple):
    """The key of one page."""

    unit: int
    kind: str
    """A `PageKind`, or the name of a master or a moment."""
    number: int
    """The index of the page within its shard."""

    def __str__(self) -> str:
        return f"page {self.kind} {self.number} of unit {self.unit}"


class Pages(dict[Page, Holder]):
    """A store's record of each of its pages. A look-up of an unknown page, or after `close`, raises StoreError."""

    is_closed = False

    def __missing__(self, page: Page) -> Holder:
        self.check_open()
        raise StoreError(f"{page} was never allocated")

    def rename(self, page: Page, name: Page) -> None:
        self.check_new(name)
        self[name] = self.take(page)

    def take(self, page: Page) -> Holder:
        """Return the record of a page, and remove it."""
        record = self[page]
        del self[page]
        return record

    def check_open(self) -> None:
        if self.is_closed:
            raise StoreError("this store is closed")

    def check_new(self, page: Page) -> None:
        self.check_open()
        if page in self:
            raise StoreError(f"{page} is allocated already")

    def close(self) -> None:
        self.is_closed = True  # set first, so that another thread reports a closed store
        self.clear()


def check_matching(page: Page, numel: int, dtype: torch.dtype, other: Tensor) -> None:
    """Raise StoreError unless the page can be copied from and to the tensor `other`."""
    if other.shape != (numel,) or other.dtype != dtype:
        raise StoreError(f"{page} holds ({numel},) {dtype}, but the tensor is {tuple(other.shape)} {other.dtype}")


class Ticket(Handle, Protocol):
    """A read or a write in progress. It is complete when `wait` has returned."""

    @property
    def ended(self) -> bool:
        """Return whether `wait` would return at once."""


class Watch(Protocol):
    """A function that returns a context manager to put around an action of a store. Called from any thread."""

    def __call__(self, what: str, unit: int = -1, *part: object) -> AbstractContextManager[None]:
        """Return the context manager for one action.

        Args:
            what: "read" or "write" of a page, "work" on a group, or "wait": a caller is blocked.
            unit: the unit of the page or group; -1 of a wait.
            part: kind and number of the page, or number of the group.
        """
        ...


def watch_nothing(what: str, unit: int = -1, *part: object) -> AbstractContextManager[None]:
    """Return a context manager that does nothing."""
    return nullcontext()


class Store(ABC):
    """Base class of stores, which keep pages between two updates."""

    @abstractmethod
    def allocate_all(self, sizes: Mapping[Page, tuple[int, torch.dtype]]) -> None:
        """Reserve space for pages; they hold zeros until they are written. A store in memory makes them adjacent.

        Args:
            sizes: the number of elements and the dtype of each page.

        Raises:
            StoreError: a page exists already.
        """

    def allocate(self, page: Page, numel: int, dtype: torch.dtype) -> None:
        """Reserve space for one page, see `allocate_all`."""
        self.allocate_all({page: (numel, dtype)})

    @abstractmethod
    def rename(self, page: Page, name: Page) -> None:
        """Give a page another key, which no page has.

        Raises:
            StoreError: the page is unknown, or a page has that key.
        """

    @abstractmethod
    def free(self, page: Page) -> None:
        """Remove a page, on which no read or write is under way, and free its space, at the latest in `trim`.

        Raises:
            StoreError: the page is unknown.
        """

    def trim(self) -> None:  # noqa: B027  # most stores free a page at once
        """Return the space of freed pages to the system."""

    @abstractmethod
    def read(self, page: Page, into: Tensor) -> Ticket:
        """Start to copy a page to `into`, (K,), of the page's length and dtype. `into` is valid after `ticket.wait()`.

        Raises:
            StoreError: the page is unknown, or was allocated with another length or dtype.
        """

    @abstractmethod
    def write(self, page: Page, source: Tensor) -> Ticket:
        """Start to copy `source`, (K,), to the page. `source` must not change before `ticket.wait()` has returned.

        Raises:
            StoreError: the page is unknown, or was allocated with another length or dtype.
        """

    @abstractmethod
    def in_place(self, page: Page) -> Tensor | None:
        """Return the page itself if the compute device can use it directly, else None."""

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Return the bytes that all pages take on this store's tier."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. A closed store raises StoreError on any use; closing twice is allowed."""
