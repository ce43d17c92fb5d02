"""What a store promises, as tests that every tier inherits."""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero.errors import StoreError
from zero.store import Page, Store, Ticket


class StoreContract:
    """The laws of `zero.store.Store`, as pytest tests. A tier passes them by inheriting:

    class TestMemoryStore(StoreContract):
        def open(self) -> Store:
            return MemoryStore(torch.device("cpu"))

    Pages are compared by their bytes, so that no NaN, signed zero or denormal number is lost. Tickets are waited for
    out of order, because a tier may finish in any order.
    """

    sizes = (64, 2048, 2048 * 5, 2048 * 3 + 64, 100_032)
    """Elements of a page: one vector, whole blocks of 4 KiB, and last pages of a shard, which are ragged."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def open(self) -> Store:
        """An empty store."""
        raise NotImplementedError

    def test_a_fresh_page_holds_zeros(self) -> None:
        with contextlib.closing(self.open()) as store:
            for page, numel, dtype in self._allocated(store):
                into = torch.ones(numel, dtype=dtype)
                store.read(page, into).wait()
                assert not into.any()

    def test_a_page_holds_what_was_written_bit_for_bit(self) -> None:
        with contextlib.closing(self.open()) as store:
            pages = self._allocated(store)
            sources = {page: self._noise(numel, dtype, seed) for seed, (page, numel, dtype) in enumerate(pages)}
            self._write(store, sources)
            self._holds(store, sources)

    def test_the_last_write_wins_and_leaves_other_pages_alone(self) -> None:
        with contextlib.closing(self.open()) as store:
            pages = self._allocated(store)
            sources = {page: self._noise(numel, dtype, seed) for seed, (page, numel, dtype) in enumerate(pages)}
            self._write(store, sources)
            for seed, (page, numel, dtype) in enumerate(pages[::3]):
                sources[page] = self._noise(numel, dtype, 1000 + seed)
                store.write(page, sources[page]).wait()
            self._holds(store, sources)

    def test_a_read_sees_the_write_before_it_whether_or_not_that_was_waited_for(self) -> None:
        """The first reads of a step are the last writes of the one before."""
        with contextlib.closing(self.open()) as store:
            page, numel = Page(0, "mu", 0), self.sizes[-1]
            store.allocate(page, numel, torch.float32)
            for seed in range(20):
                source, into = self._noise(numel, torch.float32, seed), torch.empty(numel)
                writing, reading = store.write(page, source), store.read(page, into)
                reading.wait()
                writing.wait()
                assert _bytes_of(into) == _bytes_of(source)

    def test_what_was_copied_is_nobody_elses(self) -> None:
        """Once waited for, neither side of a read or a write is connected to the page."""
        with contextlib.closing(self.open()) as store:
            page = Page(0, "mu", 0)
            store.allocate(page, 2048, torch.float32)
            source, into = self._noise(2048, torch.float32, 1), torch.empty(2048)
            kept = source.clone()
            store.write(page, source).wait()
            source.zero_()
            store.read(page, into).wait()
            into.zero_()
            self._holds(store, {page: kept})

    def test_a_ticket_may_be_waited_for_twice(self) -> None:
        with contextlib.closing(self.open()) as store:
            page = Page(0, "mu", 0)
            store.allocate(page, 64, torch.float32)
            for ticket in (store.write(page, torch.ones(64)), store.read(page, torch.empty(64))):
                ticket.wait()
                ticket.wait()

    def test_a_page_in_place_is_the_page_itself(self) -> None:
        """Where a store lends pages at all."""
        with contextlib.closing(self.open()) as store:
            page = Page(0, "mu", 0)
            store.allocate(page, 2048, torch.float32)
            lent = store.in_place(page)
            if lent is None:
                return
            assert (lent.shape, lent.dtype) == ((2048,), torch.float32)
            source = self._noise(2048, torch.float32, 1)
            lent.copy_(source)
            self._holds(store, {page: source})
            source = self._noise(2048, torch.float32, 2)
            store.write(page, source).wait()
            assert _bytes_of(lent) == _bytes_of(source)

    def test_two_stores_share_nothing(self) -> None:
        with contextlib.closing(self.open()) as one, contextlib.closing(self.open()) as other:
            page = Page(0, "mu", 0)
            for store, value in ((one, 1.0), (other, 2.0)):
                store.allocate(page, 64, torch.float32)
                store.write(page, torch.full((64,), value)).wait()
            self._holds(one, {page: torch.ones(64)})

    def test_bytes_are_counted(self) -> None:
        with contextlib.closing(self.open()) as store:
            assert store.allocated_bytes == 0
            for number, (numel, dtype) in enumerate(((2048, torch.float32), (4096, torch.bfloat16))):
                store.allocate(Page(0, "mu", number), numel, dtype)
                assert store.allocated_bytes == 8192 * (number + 1)

    def test_what_does_not_fit_is_refused_and_changes_nothing(self) -> None:
        with contextlib.closing(self.open()) as store:
            page, source = Page(0, "mu", 0), self._noise(64, torch.float32, 1)
            store.allocate(page, 64, torch.float32)
            store.write(page, source).wait()
            other = torch.zeros(128), torch.zeros(32), torch.zeros(64, dtype=torch.bfloat16)
            _refused(partial(store.allocate, page, 64, torch.float32))
            for tensor in other:
                _refused(partial(_finish, store.read, page, tensor))
                _refused(partial(_finish, store.write, page, tensor))
            self._holds(store, {page: source})

    def test_an_unknown_page_is_refused(self) -> None:
        with contextlib.closing(self.open()) as store:
            store.allocate(Page(1, "mu", 2), 64, torch.float32)
            for page in (Page(0, "mu", 2), Page(1, "nu", 2), Page(1, "mu", 0)):
                _refused(partial(_finish, store.read, page, torch.empty(64)))
                _refused(partial(_finish, store.write, page, torch.empty(64)))
                _refused(partial(store.in_place, page))

    def test_a_closed_store_refuses_everything_but_closing(self) -> None:
        store, page = self.open(), Page(0, "mu", 0)
        store.allocate(page, 64, torch.float32)
        store.close()
        store.close()
        _refused(partial(store.allocate, Page(1, "mu", 0), 64, torch.float32))
        _refused(partial(_finish, store.read, page, torch.empty(64)))
        _refused(partial(_finish, store.write, page, torch.zeros(64)))
        _refused(partial(store.in_place, page))
        _refused(lambda: store.allocated_bytes)

    def _allocated(self, store: Store) -> list[tuple[Page, int, torch.dtype]]:
        """Pages of every size and dtype, under keys that differ in one field each."""
        made = [
            (Page(unit, kind, number), numel, dtype)
            for unit, dtype in enumerate(self.dtypes)
            for kind in ("master", "mu")
            for number, numel in enumerate(self.sizes)
        ]
        for page, numel, dtype in made:
            store.allocate(page, numel, dtype)
        return made

    def _write(self, store: Store, sources: Mapping[Page, Tensor]) -> None:
        """All writes are under way at once, and are waited for from the last to the first."""
        for ticket in reversed([store.write(page, source) for page, source in sources.items()]):
            ticket.wait()

    def _holds(self, store: Store, expected: Mapping[Page, Tensor]) -> None:
        """The same for reads."""
        found = {page: torch.empty_like(source) for page, source in expected.items()}
        for ticket in reversed([store.read(page, into) for page, into in found.items()]):
            ticket.wait()
        for page, into in found.items():
            assert _bytes_of(into) == _bytes_of(expected[page]), page

    def _noise(self, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
        """Random bits: every kind of number that the dtype has."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.cpu().view(torch.uint8).tolist())


def _finish(start: Callable[[Page, Tensor], Ticket], page: Page, tensor: Tensor) -> None:
    """A store may refuse at once, or when the ticket is waited for."""
    start(page, tensor).wait()


def _refused(call: Callable[[], Any]) -> None:
    try:
        call()
    except StoreError:
        return
    raise AssertionError("a StoreError was expected")
