"""Pages on tiers. A tier is a class that passes `zero.testing.StoreContract`."""

from zero.platform.files import REQUEST_BYTES
from zero.store.base import Page, Store, Ticket
from zero.store.memory import MemoryStore
from zero.store.nvme import NvmeStore, Speed, probe
from zero.store.prefetch import PrefetchStore
from zero.store.schedule import Group
from zero.store.tiers import Tiers, spread
from zero.store.traffic import Traffic

__all__ = [
    "REQUEST_BYTES",
    "Group",
    "MemoryStore",
    "NvmeStore",
    "Page",
    "PrefetchStore",
    "Speed",
    "Store",
    "Ticket",
    "Tiers",
    "Traffic",
    "probe",
    "spread",
]
