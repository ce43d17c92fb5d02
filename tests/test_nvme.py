"""Pages on a disk: right bits, or one typed error that names page, offset and cause."""

from pathlib import Path

import pytest

from zero.store import Store
from zero.store.nvme import NvmeStore
from zero.testing import StoreContract


class TestNvmeStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def open(self) -> Store:
        return NvmeStore(self.folder)


class TestNvmeStoreInSmallRequests(TestNvmeStore):
    def open(self) -> Store:
        return NvmeStore(self.folder, request_bytes=4096)


class TestNvmeStoreWithoutChecksums(TestNvmeStore):
    def open(self) -> Store:
        return NvmeStore(self.folder, verify=False)


class TestNvmeStoreReservedAhead(TestNvmeStore):
    def open(self) -> Store:
        return NvmeStore(self.folder, capacity_bytes=2**20)
