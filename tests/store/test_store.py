"""Every tier of the state store keeps the same promises."""

import torch

from zero.store import MemoryStore, Store
from zero.testing import StoreContract


class TestMemoryStore(StoreContract):
    def open(self) -> Store:
        return MemoryStore(torch.device("cpu"))
