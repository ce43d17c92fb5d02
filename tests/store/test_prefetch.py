"""Read-ahead and write-behind by real threads: the same bytes as without them, or one typed error; never a hang."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch import Tensor

from tests.conftest import LONG_S
from zero.errors import StoreError
from zero.store import MemoryStore, NvmeStore, Page, Store
from zero.store.base import Ticket
from zero.store.events import PageGroup
from zero.store.prefetch import PrefetchStore
from zero.testing import StoreContract

BLOCK_BYTES = 4096


class UnlentStore(MemoryStore):
    """Memory that is not given in place: every page must be read and written."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def in_place(self, page: Page) -> Tensor | None:
        super().in_place(page)
        return None


class PartlyLentStore(MemoryStore):
    """Lends the pages of some kinds."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(torch.device("cpu"))
        self._kinds = kinds

    def in_place(self, page: Page) -> Tensor | None:
        view = super().in_place(page)
        return view if page.kind in self._kinds else None


class Held(NamedTuple):
    """A read or write that waits until it is told to go on, or to fail."""

    name: str
    page: Page
    told: threading.Event
    errors: list[Exception]


class HeldStore(UnlentStore):
    """Reads and writes whose names are in `holds` wait for the test."""

    def __init__(self, *holds: str) -> None:
        super().__init__()
        self.holds = set(holds)
        self.waiting: list[Held] = []
        self.arrived = threading.Condition()

    def read(self, page: Page, into: Tensor) -> Ticket:
        self._arrive("read", page)
        return super().read(page, into)

    def write(self, page: Page, source: Tensor) -> Ticket:
        self._arrive("write", page)
        return super().write(page, source)

    def await_held(self, count: int) -> list[Held]:
        """Return when so many operations wait; in the order of their pages, since threads come in any."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.waiting) >= count, LONG_S)
            return sorted(self.waiting, key=lambda held: held[:2])

    def let_go(self, held: Held, *errors: Exception) -> None:
        with self.arrived:
            self.waiting.remove(held)
        held.errors.extend(errors)
        held.told.set()

    def let_all_go(self) -> None:
        """From now on nothing waits."""
        with self.arrived:
            self.holds.clear()
            for held in self.waiting:
                held.told.set()
            self.waiting.clear()

    def _arrive(self, name: str, page: Page) -> None:
        with self.arrived:
            if name not in self.holds:
                return
            held = Held(name, page, threading.Event(), [])
            self.waiting.append(held)
            self.arrived.notify_all()
        assert held.told.wait(LONG_S)
        if held.errors:
            raise held.errors[0]


def aligned(count: int, nbytes: int) -> list[Tensor]:
    arena = torch.zeros(count * nbytes + BLOCK_BYTES, dtype=torch.uint8)
    start = -arena.data_ptr() % BLOCK_BYTES
    return list(arena[start : start + count * nbytes].view(count, nbytes))


@contextlib.contextmanager
def prefetch(inner: Store, *, slots: int = 4, **options: Any) -> Iterator[PrefetchStore]:
    """A store that is closed in the end, whatever it holds then, and leaves no thread."""
    options = {"threads": 3, "read_ahead": 2, "timeout_s": LONG_S} | options
    before = threading.active_count()
    store = PrefetchStore(inner, aligned(slots, 4 * BLOCK_BYTES), **options)
    try:
        yield store
    finally:
        if isinstance(inner, HeldStore):
            inner.let_all_go()
        store.close()
        assert threading.active_count() == before


def groups_of(store: Store, count: int, numel: int = 64) -> list[PageGroup]:
    """Groups of master and mu, a gradient beside them and parameters to go out: allocated, and zero."""
    made = []
    for number in range(count):
        pages = {kind: Page(0, kind, number) for kind in ("master", "mu", "grad", "param")}
        for kind, page in pages.items():
            store.allocate(page, numel, torch.bfloat16 if kind == "param" else torch.float32)
        made.append(PageGroup(0, number, (pages["master"], pages["mu"]), (pages["grad"],), (pages["param"],)))
    return made


def thread_of(target: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def pages_only(groups: list[PageGroup]) -> list[PageGroup]:
    return [group._replace(beside=(), out=()) for group in groups]


def value_of(store: Store, page: Page, numel: int = 64) -> float:
    into = torch.empty(numel, dtype=torch.bfloat16 if page.kind == "param" else torch.float32)
    store.read(page, into).wait()
    assert into.eq(into[0]).all()
    return into[0].item()


def count_up(tensors: tuple[Tensor, ...]) -> None:
    """Work: master takes the gradient, mu counts, and what goes out is the master."""
    master, mu, *rest = tensors
    mu += 1
    if rest:
        grad, param = rest
        master += grad
        param.copy_(master)


# -- the contract ------------------------------------------------------------------------------------------------------


class Opened(StoreContract):
    def inner(self) -> Store:
        raise NotImplementedError

    def open(self) -> Store:
        return PrefetchStore(self.inner(), aligned(2, BLOCK_BYTES), threads=3, read_ahead=1, timeout_s=LONG_S)


class TestLentMemory(Opened):
    def inner(self) -> Store:
        return MemoryStore(torch.device("cpu"))


class TestUnlentMemory(Opened):
    def inner(self) -> Store:
        return UnlentStore()


class TestNvme(Opened):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def inner(self) -> Store:
        return NvmeStore(self.folder)


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_asked_for_before_it_is_updated_is_never_read_back(threads, slots):
    """A gather's reads are copies from the slot, though every worker has something else to do when the write ends."""
    inner = HeldStore("read")
    with prefetch(inner, slots=slots, threads=threads) as store:
        groups = groups_of(store, 6)
        for group in groups:
            store.modify(group, count_up, (group.number,))
        asked = [(page, torch.empty(64, dtype=torch.bfloat16)) for group in groups for page in group.out]
        tickets = [store.read(page, into) for page, into in asked]
        inner.let_all_go()
        for ticket in tickets:
            ticket.wait()
        assert store.traffic.read_bytes == len(groups) * 3 * 64 * 4  # master, mu and gradient


@pytest.mark.parametrize(("threads", "slots", "read_ahead"), [(1, 1, 0), (3, 1, 1), (1, 2, 4), (3, 2, 0), (3, 6, 4)])
def test_every_modification_happens_once_and_in_order(threads, slots, read_ahead):
    with prefetch(UnlentStore(), slots=slots, threads=threads, read_ahead=read_ahead) as store:
        groups = groups_of(store, 8)
        for _ in range(3):
            for group in groups:
                store.write(group.beside[0], torch.full((64,), float(group.number)))
            store.expect(groups)
            for group in groups:
                store.modify(group, count_up, (group.number,))
        for group in groups:
            values = [value_of(store, page) for page in (*group.pages, *group.beside, *group.out)]
            assert values == [3 * group.number, 3, group.number, 3 * group.number]


def test_work_gets_aligned_pages_of_the_right_length_and_dtype():
    seen: list[tuple[Tensor, ...]] = []
    with prefetch(UnlentStore()) as store:
        (group,) = groups_of(store, 1, numel=100)
        store.modify(group, seen.append).wait()
        assert [(len(tensor), tensor.dtype) for tensor in seen[0]] == [
            *[(100, torch.float32)] * 3,
            (100, torch.bfloat16),
        ]
        assert all(tensor.data_ptr() % BLOCK_BYTES == 0 for tensor in seen[0])


def test_work_runs_without_gradients_in_a_prepared_thread():
    prepared, seen = [], []
    with prefetch(UnlentStore(), threads=2, prepare=lambda: prepared.append(threading.current_thread())) as store:
        for group in groups_of(store, 6):
            store.modify(group, lambda _: seen.append((torch.is_grad_enabled(), threading.current_thread())))
        store.drain()
        assert len(prepared) == len(set(prepared)) == 2
        assert {enabled for enabled, _ in seen} == {False}
        assert {thread for _, thread in seen} <= set(prepared)


def test_threads_start_when_they_are_needed():
    before = threading.active_count()
    with prefetch(UnlentStore(), threads=2) as store:
        groups = groups_of(store, 2)
        store.drain()
        assert threading.active_count() == before
        store.expect(groups)
        assert threading.active_count() == before + 2


def test_the_smallest_priority_goes_first():
    held, order = HeldStore("read"), []
    with prefetch(held, threads=1) as store:
        groups = pages_only(groups_of(store, 5))
        store.modify(groups[0], lambda _: order.append(0), (9, 9))
        held.await_held(1)
        for group, priority in zip(groups[1:], [(3, 0), (1, 2), (1, 1), (2,)], strict=True):
            store.modify(group, lambda _, number=group.number: order.append(number), priority)
        held.let_all_go()
        store.drain()
    assert order == [0, 3, 2, 4, 1]


def test_as_many_are_read_ahead_as_was_said_and_nearest_first():
    held = HeldStore("read")
    with prefetch(held, threads=4, read_ahead=3) as store:
        groups = pages_only(groups_of(store, 5))
        store.expect(groups[::-1])
        waiting = held.await_held(3)
        assert [(operation.name, operation.page.number) for operation in waiting] == [
            ("read", 2),
            ("read", 3),
            ("read", 4),
        ]
        held.let_all_go()
        store.drain()
        assert store.traffic.read_bytes == 3 * 2 * 64 * 4
        store.modify(groups[4], count_up).wait()
        store.drain()
        assert store.traffic.read_bytes == 4 * 2 * 64 * 4, "one was read already; another is read in its place"


def test_a_ticket_ends_with_the_work_and_settle_with_the_write():
    held = HeldStore("write")
    with prefetch(held) as store:
        (group,) = pages_only(groups_of(store, 1))
        store.modify(group, count_up).wait()
        held.await_held(1)
        settled = threading.Event()
        thread = thread_of(lambda: (store.drain(), settled.set()))
        assert not settled.is_set()
        held.let_all_go()
        thread.join(LONG_S)
        assert settled.is_set()


# -- pages in place --------------------------------------------------------------------------------------------------


def test_lent_pages_are_worked_on_where_they_lie_and_nothing_moves():
    with prefetch(MemoryStore(torch.device("cpu")), slots=0) as store:
        (group,) = groups_of(store, 1)
        pages = (*group.pages, *group.beside, *group.out)
        seen: list[tuple[Tensor, ...]] = []
        store.write(group.beside[0], torch.full((64,), 3.0)).wait()
        store.modify(group, lambda tensors: (seen.append(tensors), count_up(tensors))[0]).wait()
        assert all(tensor is store.in_place(page) for tensor, page in zip(seen[0], pages, strict=True))
        assert [value_of(store, page) for page in pages] == [3, 1, 3, 3]
        assert (store.traffic.read_bytes, store.traffic.write_bytes, store.traffic.busy_s) == (0, 0, 0)


@pytest.mark.parametrize("kinds", [("master", "mu"), ("grad",), ("param",), ("mu", "grad", "param")])
def test_a_group_may_be_lent_in_part(kinds):
    with prefetch(PartlyLentStore(*kinds), slots=1) as store:
        groups = groups_of(store, 3)
        for _ in range(2):
            store.expect(groups)
            for group in groups:
                store.write(group.beside[0], torch.full((64,), 5.0))
                store.modify(group, count_up)
        assert [value_of(store, page) for page in groups[1].pages + groups[1].out] == [10, 2, 10]
        moved = [kind for kind in ("master", "mu", "param") if kind not in kinds]
        sizes = {"master": 4, "mu": 4, "param": 2}
        store.drain()
        written = sum(sizes[kind] for kind in moved) + (4 if "grad" not in kinds else 0)
        assert store.traffic.write_bytes == 2 * 3 * 64 * written


def test_a_lent_page_is_copied_after_the_work_that_was_asked_for_before():
    begun, go_on = threading.Event(), threading.Event()

    def work(tensors: tuple[Tensor, ...]) -> None:
        begun.set()
        assert go_on.wait(LONG_S)
        count_up(tensors)

    with prefetch(MemoryStore(torch.device("cpu"))) as store:
        (group,) = pages_only(groups_of(store, 1))
        store.modify(group, work)
        assert begun.wait(LONG_S)
        values: list[float] = []
        thread = thread_of(lambda: values.append(value_of(store, group.pages[1])))
        assert not values
        go_on.set()
        thread.join(LONG_S)
        assert values == [1]


def test_lent_pages_are_given_out_in_one_piece_where_they_lie_in_one():
    """As soon as their work has run: what else it changed may still be on its way out."""

    class Disk(HeldStore):
        """Lends parameters, out of one block of memory."""

        def in_place(self, page: Page) -> Tensor | None:
            return None if page.kind != "param" else block[64 * page.number :][:64]

    block = torch.zeros(3 * 64, dtype=torch.bfloat16)
    disk = Disk("write")
    with prefetch(disk) as store:
        groups = [group._replace(beside=()) for group in groups_of(store, 3)]
        pages = [group.out[0] for group in groups]
        store.modify(groups[1], lambda tensors: tensors[-1].fill_(7)).wait()
        disk.await_held(1)
        [whole] = store.in_place_views(pages)
        assert torch.equal(whole, block)
        assert whole.view(3, 64)[:, 0].tolist() == [0, 7, 0]
        assert [view.numel() for view in store.in_place_views([pages[0], pages[2]])] == [64, 64]
        with pytest.raises(StoreError, match="its tier returns copies"):
            store.in_place_views([groups[0].pages[0]])


# -- traffic -----------------------------------------------------------------------------------------------------------


def test_traffic_counts_the_bytes_that_moved_and_the_time_somebody_waited():
    held = HeldStore("read")
    with prefetch(held) as store:
        (group,) = groups_of(store, 1)
        ticket = store.modify(group, count_up)
        thread = thread_of(ticket.wait)
        held.await_held(1)
        held.let_all_go()
        thread.join(LONG_S)
        store.drain()
        traffic = store.traffic
        assert (traffic.read_bytes, traffic.write_bytes) == (64 * 12, 64 * 10)
        assert 0 < max(traffic.read_s, traffic.write_s) <= traffic.busy_s <= traffic.read_s + traffic.write_s + 1e-9
        assert traffic.wait_s >= 0
    assert store.traffic == traffic, "and can be read off a closed store"


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def _raise(error: Exception) -> Callable[..., None]:
    def work(*_: Any) -> None:
        raise error

    return work


@pytest.mark.parametrize("where", ["read", "beside", "work", "write", "transfer", "read ahead"])
def test_the_first_error_is_everybodys_and_nothing_hangs(where):
    held, error = HeldStore("read", "write"), StoreError("page mu 0 of unit 0 at offset 8192: EIO: Input/output error")
    fails_at = {
        "read": ("read", "master"),
        "beside": ("read", "grad"),
        "write": ("write", "mu"),
        "read ahead": ("read", "mu"),
        "transfer": ("write", "param"),
    }.get(where)
    with prefetch(held, threads=2) as store:
        groups = groups_of(store, 4)
        tickets: list[Ticket] = []
        if where == "read ahead":
            store.expect(groups)
        elif where == "transfer":
            tickets.append(store.write(groups[3].out[0], torch.zeros(64, dtype=torch.bfloat16)))
        else:
            work = _raise(error) if where == "work" else count_up
            tickets += [store.modify(group, work if group.number == 0 else count_up) for group in groups]
        while store._workers._failure is None:
            with held.arrived:
                held.arrived.wait_for(lambda: bool(held.waiting) or store._workers._failure is not None, 0.01)
                waiting = list(held.waiting)
            for operation in waiting:
                held.let_go(operation, *([error] if (operation.name, operation.page.kind) == fails_at else []))
        later: list[Callable[[], Any]] = [
            *[ticket.wait for ticket in tickets],
            store.drain,
            lambda: store.expect(groups),
            lambda: store.modify(groups[0], count_up),
            lambda: store.read(groups[0].pages[0], torch.empty(64)),
            lambda: store.write(groups[0].pages[0], torch.empty(64)),
        ]
        for call in later:
            with pytest.raises(StoreError, match="page mu 0 of unit 0 at offset 8192: EIO") as caught:
                call()
            assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("place", "message"),
    [("work", "the work on group 0 of unit 0: ValueError: no"), ("prepare", "a thread of the store: ValueError: no")],
)
def test_an_error_of_another_class_has_its_name_and_place(place, message):
    error = ValueError("no")
    with prefetch(UnlentStore(), **({"prepare": _raise(error)} if place == "prepare" else {})) as store:
        (group,) = groups_of(store, 1)
        with pytest.raises(StoreError, match=message) as caught:
            store.modify(group, _raise(error)).wait()
        assert caught.value.__cause__ is error


def test_who_waits_while_something_fails_is_told():
    held, told = HeldStore("read"), []

    def wait_for(call: Callable[[], None]) -> None:
        with contextlib.suppress(StoreError):
            call()
            return
        told.append(call)

    with prefetch(held) as store:
        groups = groups_of(store, 2)
        tickets = [store.modify(group, count_up) for group in groups]
        calls = [*[ticket.wait for ticket in tickets], store.drain]
        threads = [thread_of(lambda call=call: wait_for(call)) for call in calls]
        for operation in held.await_held(2):
            held.let_go(operation, OSError(5, "Input/output error"))
        for thread in threads:
            thread.join(LONG_S)
        assert len(told) == len(calls)


def test_a_wait_that_takes_too_long_says_for_what_and_the_store_goes_on():
    held = HeldStore("read")
    with prefetch(held, timeout_s=0.05) as store:
        (group,) = pages_only(groups_of(store, 1))
        ticket = store.modify(group, count_up)
        held.await_held(1)
        with pytest.raises(
            StoreError,
            match=r"the work on group 0 of unit 0: not ended after 0.05 s. Still running: the read of group 0 of unit",
        ):
            ticket.wait()
        with pytest.raises(StoreError, match=r"all operations: not ended after 0.05 s"):
            store.drain()
        held.let_all_go()
        while not ticket.ended:
            with contextlib.suppress(StoreError):
                ticket.wait()
        ticket.wait()


@pytest.fixture
def interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_waiting_leaves_the_store_as_it_is():
    held, pause = HeldStore("read"), threading.Event()
    with prefetch(held) as store:
        (group,) = pages_only(groups_of(store, 1))
        ticket = store.modify(group, count_up)

        def interrupt() -> None:
            while not store._workers._watchers:
                pause.wait(0.001)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        for call in (ticket.wait, store.drain):
            thread = thread_of(interrupt)
            with pytest.raises(KeyboardInterrupt):
                call()
            thread.join(LONG_S)
        held.let_all_go()
        ticket.wait()
        assert value_of(store, group.pages[1]) == 1


@pytest.mark.parametrize("after_error", [False, True])
def test_closing_drops_what_has_not_started_and_joins_the_threads(after_error):
    held = HeldStore("read")
    with prefetch(held, threads=2) as store:
        groups = groups_of(store, 4)
        tickets = [store.modify(group, count_up) for group in groups]
        first, _ = held.await_held(2)
        if after_error:
            held.let_go(first, OSError(28, "No space left on device"))
            with pytest.raises(StoreError, match="No space left"):
                tickets[3].wait()
        held.let_all_go()
        store.close()
        for ticket in tickets:
            if not ticket.ended or after_error:
                with pytest.raises(StoreError, match="No space left" if after_error else "was closed before"):
                    ticket.wait()
        for call in (store.drain, lambda: store.expect(groups), lambda: store.modify(groups[0], count_up)):
            with pytest.raises(StoreError):
                call()
        store.close()


def test_a_thread_that_does_not_come_back_is_named_and_the_store_is_not_closed_under_it():
    held = HeldStore("read")
    with prefetch(held, threads=1, timeout_s=0.05) as store:
        (group,) = groups_of(store, 1)
        store.modify(group, count_up)
        held.await_held(1)
        with pytest.raises(StoreError, match=r"store worker 0: not ended after 0\.05 s"):
            store.close()
        assert held.allocated_bytes
        held.let_all_go()


def test_what_a_slot_cannot_hold_is_refused():
    with prefetch(UnlentStore()) as store:
        (group,) = groups_of(store, 1, numel=1025)
        for call in (lambda: store.expect([group]), lambda: store.modify(group, count_up)):
            with pytest.raises(
                StoreError, match="group 0 of unit 0 takes 28672 bytes of memory, but a slot of the arena has 16384"
            ):
                call()
        with pytest.raises(StoreError, match="was never allocated"):
            store.expect([PageGroup(0, 1, (Page(0, "mu", 7),))])
        store.drain()


# -- against a dictionary ----------------------------------------------------------------------------------------------

PAGES = [Page(0, "mu", 0), Page(1, "mu", 0), Page(2, "mu", 0), Page(0, "grad", 0), Page(2, "param", 0)]
MACHINE_GROUPS = [
    PageGroup(0, 0, (PAGES[0],), (PAGES[3],)),
    PageGroup(1, 0, (PAGES[1],)),
    PageGroup(2, 0, (PAGES[2],), (PAGES[3],), (PAGES[4],)),
]
NUMEL = 4


class AgainstDictionary(RuleBasedStateMachine):
    """Anything is asked for at any time, and the inner store ends its operations in any order, or fails.

    `model` is what each page holds once everything that was asked for so far has ended. What an operation must see is
    therefore known when it is asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.broken = False
        self.wrong: list[Any] = []
        self._open()

    def _open(self) -> None:
        self.held = HeldStore("read", "write")
        self.store = PrefetchStore(self.held, aligned(3, 3 * BLOCK_BYTES), threads=2, read_ahead=2, timeout_s=LONG_S)
        for page in PAGES:
            self.store.allocate(page, NUMEL, torch.float32)
        self.model = dict.fromkeys(PAGES, 0.0)
        self.tickets: list[Ticket] = []
        self.reads: list[tuple[Tensor, float]] = []
        self.settled = 0

    def _still(self) -> list[Held]:
        """Return when every action under way waits at the inner store: the threads have done all they can."""
        with self.held.arrived:
            while True:
                with self.store._workers._lock:
                    if len(self.held.waiting) == len(self.store._workers._schedule.running):
                        return sorted(self.held.waiting, key=lambda held: held[:2])
                self.held.arrived.wait(0.001)

    @precondition(lambda self: not self.broken)
    @rule(page=st.sampled_from(PAGES), value=st.integers(1, 9))
    def put(self, page: Page, value: int) -> None:
        self.tickets.append(self.store.write(page, torch.full((NUMEL,), float(value))))
        self.model[page] = float(value)

    @precondition(lambda self: not self.broken)
    @rule(page=st.sampled_from(PAGES))
    def get(self, page: Page) -> None:
        into = torch.full((NUMEL,), -1.0)
        self.tickets.append(self.store.read(page, into))
        self.reads.append((into, self.model[page]))

    @precondition(lambda self: not self.broken)
    @rule(group=st.sampled_from(MACHINE_GROUPS), priority=st.integers(0, 2), value=st.integers(1, 9))
    def modify(self, group: PageGroup, priority: int, value: int) -> None:
        expected = [self.model[page] for page in group.pages + group.beside]

        def work(tensors: tuple[Tensor, ...]) -> None:
            values = [tensor[-1].item() for tensor in tensors[: len(expected)]]
            if values != expected:
                self.wrong.append((group, values, expected))
            for tensor in tensors[: len(group.pages)]:
                tensor.mul_(2).add_(value)
            for tensor in tensors[len(expected) :]:
                tensor.fill_(values[0])

        self.tickets.append(self.store.modify(group, work, (priority,)))
        for page in group.pages:
            self.model[page] = 2 * self.model[page] + value
        for page in group.out:
            self.model[page] = expected[0]

    @precondition(lambda self: not self.broken)
    @rule(groups=st.permutations(MACHINE_GROUPS))
    def expect(self, groups: list[PageGroup]) -> None:
        self.store.expect(groups)

    @precondition(lambda self: not self.broken)
    @rule(choices=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def complete_some(self, choices: list[int]) -> None:
        for choice in choices:
            waiting = self._still()
            if waiting:
                self.held.let_go(waiting[choice % len(waiting)])

    @precondition(lambda self: not self.broken)
    @rule()
    def drain(self) -> None:
        """Everything ends, and every page and everything that was read is right."""
        self.held.let_all_go()
        self.store.drain()
        for ticket in self.tickets:
            ticket.wait()
        assert not self.wrong
        assert all(into.eq(value).all() for into, value in self.reads)
        for page, value in self.model.items():
            into = torch.empty(NUMEL)
            self.store.read(page, into).wait()
            assert into.eq(value).all(), page
        self.tickets.clear()
        self.reads.clear()
        self.held.holds = {"read", "write"}
        self.settled += 1

    @precondition(lambda self: not self.broken and self.settled > 3)
    @rule(choice=st.integers(0, 1))
    def fail_one(self, choice: int) -> None:
        waiting = self._still()
        if waiting:
            self.held.let_go(waiting[choice % len(waiting)], StoreError("EIO"))
            self.broken = True

    @precondition(lambda self: self.broken)
    @rule()
    def find_it_broken(self) -> None:
        """Every wait and request raises the error; then another store takes the broken one's place."""
        self.held.let_all_go()
        calls = [*[ticket.wait for ticket in self.tickets], self.store.drain, lambda: self.store.expect([])]
        with pytest.raises(StoreError, match="EIO"):
            self.store.drain()
        for call in calls:
            with pytest.raises(StoreError, match="EIO"):
                call()
        self.store.close()
        assert not self.wrong
        self.broken = False
        self._open()

    def teardown(self) -> None:
        self.held.let_all_go()
        with contextlib.suppress(StoreError):
            self.store.drain()
        self.store.close()
        assert not self.store._workers._threads
        assert not self.wrong


TestAgainstDictionary = AgainstDictionary.TestCase
TestAgainstDictionary.settings = settings(
    max_examples=50, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
