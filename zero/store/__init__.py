"""Storage of state in pages on tiers: device, host memory, disk.

Every class of stores passes the tests of `zero.testing.StoreContract`.
"""

from zero.platform.scratch_file import REQUEST_BYTES
from zero.store.base import ASIDE, PARAMETER_KINDS, Page, PageKind, Store, Ticket
from zero.store.events import PageGroup
from zero.store.memory import MemoryBlock, MemoryStore
from zero.store.nvme import NvmeStore, probe
from zero.store.prefetch import PrefetchStore
from zero.store.tiers import Tiers, spread
from zero.store.traffic_counter import Traffic

__all__ = [
    "ASIDE",
    "PARAMETER_KINDS",
    "REQUEST_BYTES",
    "MemoryBlock",
    "MemoryStore",
    "NvmeStore",
    "Page",
    "PageGroup",
    "PageKind",
    "PrefetchStore",
    "Store",
    "Ticket",
    "Tiers",
    "Traffic",
    "probe",
    "spread",
]
