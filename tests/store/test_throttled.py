"""A store of fixed bandwidth keeps the contract, and the pace of one device that all its users share."""

import contextlib
import threading

import pytest
import torch

from tests.conftest import LONG_S
from tests.faults.disks import ThrottledStore
from zero.store import MemoryStore, Page, Store
from zero.testing import StoreContract


class TestThrottledStore(StoreContract):
    def open(self) -> Store:
        return ThrottledStore(MemoryStore(torch.device("cpu")), 1e12)


class Clock:
    """Each sleeper takes time with it; nobody really sleeps."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, time_s: float) -> None:
        with self._lock:
            self.now_s += time_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock):
    """1,000 bytes per second, and two pages of 400 bytes."""
    with contextlib.closing(
        ThrottledStore(MemoryStore(torch.device("cpu")), 1000.0, clock=clock, sleep=clock.sleep)
    ) as store:
        for number in (0, 1):
            store.allocate(Page(0, "mu", number), 100, torch.float32)
        yield store


def test_reads_and_writes_share_the_bandwidth(clock, store):
    into = torch.empty(100)
    for number in (0, 1):
        store.write(Page(0, "mu", number), into)
        store.read(Page(0, "mu", number), into)
    assert clock.now_s == pytest.approx(5.0 + 4 * 0.4)


def test_idle_time_is_not_saved_up(clock, store):
    store.read(Page(0, "mu", 0), torch.empty(100))
    clock.now_s = 100.0
    store.read(Page(0, "mu", 0), torch.empty(100))
    assert clock.now_s == pytest.approx(100.4)


def test_threads_take_turns(clock):
    """Two that begin together: the second one ends after the time of both."""
    ends_s, together = [], threading.Barrier(3, timeout=LONG_S)

    def sleep(time_s: float) -> None:
        ends_s.append(clock() + time_s)
        together.wait()

    store = ThrottledStore(MemoryStore(torch.device("cpu")), 1000.0, clock=clock, sleep=sleep)
    threads = []
    for number in (0, 1):
        page = Page(0, "mu", number)
        store.allocate(page, 100, torch.float32)
        threads.append(threading.Thread(target=store.read, args=(page, torch.empty(100)), daemon=True))
    for thread in threads:
        thread.start()
    together.wait()
    for thread in threads:
        thread.join(10)
    assert sorted(ends_s) == pytest.approx([5.4, 5.8])


def test_pages_are_not_lent(store):
    assert store.in_place(Page(0, "mu", 0)) is None
