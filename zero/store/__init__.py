"""The one open family of zero: a tier is a class that passes `zero.testing.StoreContract`."""

from zero.store.base import Page, Store, Ticket
from zero.store.memory import MemoryStore

__all__ = ["MemoryStore", "Page", "Store", "Ticket"]
