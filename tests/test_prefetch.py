"""Read-ahead and write-behind by real threads: the same bytes as without them, or one typed error."""

import contextlib

import torch
from torch import Tensor

from zero.store import MemoryStore, Page, Store
from zero.store.paging import Group
from zero.store.prefetch import PrefetchStore
from zero.testing import StoreContract

BLOCK_BYTES = 4096


class AsleepStore(MemoryStore):
    """Memory that is not lent: every page must be read and written."""

    def in_place(self, page: Page) -> Tensor | None:
        super().in_place(page)
        return None


def aligned(count: int, nbytes: int) -> list[Tensor]:
    arena = torch.zeros(count * nbytes + BLOCK_BYTES, dtype=torch.uint8)
    start = -arena.data_ptr() % BLOCK_BYTES
    return list(arena[start : start + count * nbytes].view(count, nbytes))


def prefetch(inner: Store, *, slots: int = 4, slot_bytes: int = 8 * BLOCK_BYTES, **options) -> PrefetchStore:
    options = {"threads": 3, "read_ahead": 2, "timeout_s": 20.0} | options
    return PrefetchStore(inner, aligned(slots, slot_bytes), **options)


class TestLent(StoreContract):
    def open(self) -> Store:
        return prefetch(MemoryStore(torch.device("cpu")))


class TestAsleep(StoreContract):
    def open(self) -> Store:
        return prefetch(AsleepStore(torch.device("cpu")))


def groups_of(store: Store, units: int, numbers: int, numel: int = 1024) -> list[Group]:
    """Groups of master and mu, a gradient beside them and parameters to go out, allocated and zero."""
    made = []
    for unit in range(units):
        for number in range(numbers):
            pages = {kind: Page(unit, kind, number) for kind in ("master", "mu", "grad", "param")}
            for kind, page in pages.items():
                store.allocate(page, numel, torch.bfloat16 if kind == "param" else torch.float32)
            made.append(Group(unit, number, (pages["master"], pages["mu"]), (pages["grad"],), (pages["param"],)))
    return made


def test_a_group_is_read_changed_and_written_back():
    with contextlib.closing(prefetch(AsleepStore(torch.device("cpu")))) as store:
        groups = groups_of(store, 3, 4)
        for round_ in range(1, 4):
            for group in groups:
                store.write(group.beside[0], torch.full((1024,), float(group.number)))
            store.expect(groups)

            def work(tensors: tuple[Tensor, ...]) -> None:
                master, mu, grad, param = tensors
                assert all(tensor.data_ptr() % BLOCK_BYTES == 0 for tensor in tensors)
                master += grad
                mu += 1
                param.copy_(master)

            for ticket in [store.modify(group, work, (group.unit, group.number)) for group in groups]:
                ticket.wait()
            store.settle()
            for group in groups:
                values = [round_ * group.number, round_, group.number, round_ * group.number]
                for page, value in zip((*group.pages, *group.beside, *group.out), values, strict=True):
                    into = torch.empty(1024, dtype=torch.bfloat16 if page.kind == "param" else torch.float32)
                    store.read(page, into).wait()
                    assert into.eq(value).all()
