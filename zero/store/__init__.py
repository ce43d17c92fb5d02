"""The one open family of zero: a tier is a class that passes `zero.testing.StoreContract`."""

from zero.store.base import Page, Store, Ticket
from zero.store.files import REQUEST_BYTES
from zero.store.memory import MemoryStore
from zero.store.nvme import NvmeStore, probe
from zero.store.paging import Group
from zero.store.prefetch import PrefetchStore
from zero.store.tiers import Tiers
from zero.store.traffic import Traffic

__all__ = [
    "REQUEST_BYTES",
    "Group",
    "MemoryStore",
    "NvmeStore",
    "Page",
    "PrefetchStore",
    "Store",
    "Ticket",
    "Tiers",
    "Traffic",
    "probe",
]
