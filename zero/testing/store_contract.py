"""The contract of a store, as a class of tests from which the tests of every tier inherit."""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero.errors import StoreError
from zero.store import Page, Store, Ticket


class StoreContract:
    """Pytest tests of everything that `zero.store.Store` promises. A subclass for each tier defines `open`:

        class TestMemoryStore(StoreContract):
            def open(self) -> Store:
                return MemoryStore(torch.device("cpu"))

    Pages are compared by their bytes, because NaN, signed zeros and denormal numbers must be preserved. Tickets are
    waited for in reverse order, because a tier may finish them in any order.

    Attributes:
        sizes: numbers of elements of the tested pages. A subclass may change them.
        dtypes: dtypes of the tested pages. A subclass may change them.
    """

    sizes = (64, 2048, 2048 * 5, 2048 * 3 + 64, 100_032)
    """One SIMD vector, multiples of 4 KiB, and sizes that are not, which the last page of a shard may have."""

    dtypes = (torch.float32, torch.bfloat16, torch.float16)

    def open(self) -> Store:
        """Open a new, empty store, which the tests close."""
        raise NotImplementedError

    def test_a_fresh_page_holds_zeros(self) -> None:
        with contextlib.closing(self.open()) as store:
            for page, numel, dtype in self._allocated(store):
                into = torch.ones(numel, dtype=dtype)
                store.read(page, into).wait()
                assert not into.any()

    def test_a_page_holds_its_last_write_bit_for_bit(self) -> None:
        with contextlib.closing(self.open()) as store:
            pages = self._allocated(store)
            sources = {page: self._noise(numel, dtype, seed) for seed, (page, numel, dtype) in enumerate(pages)}
            self._write(store, sources)
            self._check(store, sources)
            for seed, (page, numel, dtype) in enumerate(pages[::3]):
                sources[page] = self._noise(numel, dtype, 1000 + seed)
                store.write(page, sources[page]).wait()
            self._check(store, sources)

    def test_a_read_returns_the_last_write_even_if_that_was_not_waited_for(self) -> None:
        """Test a read right after a write, because a step's first reads follow the last writes of the step before."""
        with contextlib.closing(self.open()) as store:
            page, numel = Page(0, "mu", 0), self.sizes[-1]
            store.allocate(page, numel, torch.float32)
            for seed in range(20):
                source, into = self._noise(numel, torch.float32, seed), torch.empty(numel)
                writing, reading = store.write(page, source), store.read(page, into)
                reading.wait()
                writing.wait()
                assert _bytes_of(into) == _bytes_of(source)

    def test_a_page_shares_no_memory_with_what_was_read_or_written(self) -> None:
        """Test that the tensor of a finished read or write can be changed without a change to the page."""
        with contextlib.closing(self.open()) as store:
            page = Page(0, "mu", 0)
            store.allocate(page, 2048, torch.float32)
            source, into = self._noise(2048, torch.float32, 1), torch.empty(2048)
            kept = source.clone()
            store.write(page, source).wait()
            source.zero_()
            store.read(page, into).wait()
            into.zero_()
            self._check(store, {page: kept})

    def test_a_ticket_may_be_waited_for_twice(self) -> None:
        with contextlib.closing(self.open()) as store:
            page = Page(0, "mu", 0)
            store.allocate(page, 64, torch.float32)
            for ticket in (store.write(page, torch.ones(64)), store.read(page, torch.empty(64))):
                ticket.wait()
                ticket.wait()

    def test_in_place_returns_the_memory_of_the_page(self) -> None:
        """Test `in_place` of stores that support it; it returns None for others."""
        with contextlib.closing(self.open()) as store:
            page = Page(0, "mu", 0)
            store.allocate(page, 2048, torch.float32)
            view = store.in_place(page)
            if view is None:
                return
            assert (view.shape, view.dtype) == ((2048,), torch.float32)
            source = self._noise(2048, torch.float32, 1)
            view.copy_(source)
            self._check(store, {page: source})
            source = self._noise(2048, torch.float32, 2)
            store.write(page, source).wait()
            assert _bytes_of(view) == _bytes_of(source)

    def test_a_renamed_page_keeps_its_bytes(self) -> None:
        with contextlib.closing(self.open()) as store:
            pages = self._allocated(store)
            sources = {page: self._noise(numel, dtype, seed) for seed, (page, numel, dtype) in enumerate(pages)}
            self._write(store, sources)
            aside = {page: page._replace(unit=page.unit + 1000) for page in sources}
            for page, name in aside.items():
                store.rename(page, name)
            for page, numel, dtype in pages:
                store.allocate(page, numel, dtype)
            self._check(store, {aside[page]: source for page, source in sources.items()})
            self._check(store, {page: torch.zeros_like(source) for page, source in sources.items()})

    def test_a_freed_page_is_gone_and_the_others_stay(self) -> None:
        with contextlib.closing(self.open()) as store:
            pages = self._allocated(store)
            sources = {page: self._noise(numel, dtype, seed) for seed, (page, numel, dtype) in enumerate(pages)}
            self._write(store, sources)
            before = store.allocated_bytes
            for page in [*sources][::2]:
                source = sources.pop(page)
                store.free(page)
                _raises_store_error(partial(_finish, store.read, page, source))
            assert 0 < store.allocated_bytes < before
            self._check(store, sources)
            for page, numel, dtype in pages[::2]:
                store.allocate(page, numel, dtype)
                self._check(store, {page: torch.zeros(numel, dtype=dtype)})
            assert store.allocated_bytes == before

    def test_two_stores_are_independent(self) -> None:
        with contextlib.closing(self.open()) as first, contextlib.closing(self.open()) as second:
            page = Page(0, "mu", 0)
            for store, value in ((first, 1.0), (second, 2.0)):
                store.allocate(page, 64, torch.float32)
                store.write(page, torch.full((64,), value)).wait()
            self._check(first, {page: torch.ones(64)})

    def test_allocated_bytes_counts_all_pages(self) -> None:
        with contextlib.closing(self.open()) as store:
            assert store.allocated_bytes == 0
            for number, (numel, dtype) in enumerate(((2048, torch.float32), (4096, torch.bfloat16))):
                store.allocate(Page(0, "mu", number), numel, dtype)
                assert store.allocated_bytes == 8192 * (number + 1)

    def test_a_wrong_size_or_dtype_is_refused_and_changes_nothing(self) -> None:
        with contextlib.closing(self.open()) as store:
            page, source = Page(0, "mu", 0), self._noise(64, torch.float32, 1)
            store.allocate(page, 64, torch.float32)
            store.write(page, source).wait()
            other = torch.zeros(128), torch.zeros(32), torch.zeros(64, dtype=torch.bfloat16)
            _raises_store_error(partial(store.allocate, page, 64, torch.float32))
            for tensor in other:
                _raises_store_error(partial(_finish, store.read, page, tensor))
                _raises_store_error(partial(_finish, store.write, page, tensor))
            self._check(store, {page: source})

    def test_an_unknown_page_raises_store_error(self) -> None:
        with contextlib.closing(self.open()) as store:
            store.allocate(Page(1, "mu", 2), 64, torch.float32)
            for page in (Page(0, "mu", 2), Page(1, "nu", 2), Page(1, "mu", 0)):
                _raises_store_error(partial(_finish, store.read, page, torch.empty(64)))
                _raises_store_error(partial(_finish, store.write, page, torch.empty(64)))
                _raises_store_error(partial(store.in_place, page))

    def test_a_closed_store_refuses_everything_but_close(self) -> None:
        store, page = self.open(), Page(0, "mu", 0)
        store.allocate(page, 64, torch.float32)
        store.close()
        store.close()
        _raises_store_error(partial(store.allocate, Page(1, "mu", 0), 64, torch.float32))
        _raises_store_error(partial(_finish, store.read, page, torch.empty(64)))
        _raises_store_error(partial(_finish, store.write, page, torch.zeros(64)))
        _raises_store_error(partial(store.in_place, page))
        _raises_store_error(lambda: store.allocated_bytes)

    def _allocated(self, store: Store) -> list[tuple[Page, int, torch.dtype]]:
        """Allocate pages of every size and dtype, with keys that differ in one field each."""
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
        """Start all writes at once, then wait for them from the last to the first."""
        for ticket in reversed([store.write(page, source) for page, source in sources.items()]):
            ticket.wait()

    def _check(self, store: Store, expected: Mapping[Page, Tensor]) -> None:
        """Compare pages with `expected`: start all reads at once, then wait for them from the last to the first."""
        contents = {page: torch.empty_like(source) for page, source in expected.items()}
        for ticket in reversed([store.read(page, into) for page, into in contents.items()]):
            ticket.wait()
        for page, into in contents.items():
            assert _bytes_of(into) == _bytes_of(expected[page]), page

    def _noise(self, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
        """Return (numel,) random bits as `dtype`, so that NaN, infinities and denormal numbers occur."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.cpu().view(torch.uint8).tolist())


def _finish(start: Callable[[Page, Tensor], Ticket], page: Page, tensor: Tensor) -> None:
    """Start an operation and wait for it, because a store may raise an error in either call."""
    start(page, tensor).wait()


def _raises_store_error(call: Callable[[], Any]) -> None:
    try:
        call()
    except StoreError:
        return
    raise AssertionError("a StoreError was expected")
