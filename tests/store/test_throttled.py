"""A store of fixed bandwidth keeps the contract, and the pace of one device that all its users share."""

import contextlib

import pytest
import torch

from tests.faults.disks import ThrottledStore
from zero.store import MemoryStore, Page, Store
from zero.testing import StoreContract


class TestThrottledStore(StoreContract):
    def open(self) -> Store:
        return ThrottledStore(MemoryStore(torch.device("cpu")), 1e12)


def test_reads_and_writes_share_the_bandwidth_and_idle_time_is_not_saved_up():
    now_s, slept = [5.0], []
    inner = MemoryStore(torch.device("cpu"))
    with contextlib.closing(ThrottledStore(inner, 1000.0, clock=lambda: now_s[0], sleep=slept.append)) as store:
        page, into = Page(0, "mu", 0), torch.empty(100)
        store.allocate(page, 100, torch.float32)
        assert store.in_place(page) is None
        for move in (store.write, store.read, store.read):  # as by three threads, none of which waits for another
            move(page, into)
        now_s[0] = 100.0
        store.read(page, into)
    assert slept == pytest.approx([0.4, 0.8, 1.2, 0.4])
