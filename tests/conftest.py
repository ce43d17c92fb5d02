"""One seed and one thread for every test, both printed, so that a failure can be run again as it was."""

import gc
import inspect
import json
import os
import sys
import traceback
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist

from zero.store.workers import WorkerPool

pytest.register_assert_rewrite("zero.testing")

SEED = int(os.environ.get("ZERO_TEST_SEED", "0"))
"""0, the default, also fixes hypothesis' examples; any other seed looks for new ones."""

LONG_S = 240.0
"""Seconds that nothing which a test starts may take, even where a shared machine stands still for a while. The test
itself has a little more (pyproject.toml), so that what was waited for is what fails."""

COUNTED = ("passed", "failed", "error", "skipped")

hypothesis.settings.register_profile("zero", derandomize=SEED == 0)
hypothesis.settings.load_profile("zero")


def _stack(context: int = 0) -> list[inspect.FrameInfo]:
    """`inspect.stack` without the lines of source and the modules of pytest's sixty frames, which nobody reads.

    Hydra and torch's agent ask who called them; to find those took a fifth of the time of a short run.
    """
    return [
        inspect.FrameInfo(frame, frame.f_code.co_filename, line, frame.f_code.co_name, None, None)
        for frame, line in traceback.walk_stack(sys._getframe(1))
    ]


inspect.stack = _stack

os.environ.pop("COLUMNS", None)  # pytest-xdist sets it for its workers: a test would see another terminal than alone
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the programs that tests start; many would spin for the same cores


QUICK = ("core", "store", "distributed", "engine", "checkpoint", "test_losses.py", "test_house.py")
"""Folders and files with the laws of the library. `--quick` runs the first case of each test there, in two minutes."""


def pytest_configure() -> None:
    """Keep Hydra from copying its store of option files, a quarter of the time of composing: it copies each file too.

    Ranks that are processes import this file, and not Hydra.
    """
    from hydra.core.config_store import ConfigStore

    ConfigStore.__deepcopy__ = lambda store, memo: store  # type: ignore[attr-defined]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", choices=("only", "not"), help="tests that measure time: only those, or all others")
    parser.addoption("--quick", action="store_true", help="each test of the library once, with its first parameters")
    parser.addoption("--all", action="store_true", help="also tests and cases that are slow and rarely fail")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the few tests that measure time, import no file that has none."""
    if config.getoption("--alone") == "only" and collection_path.suffix == ".py":
        return "mark.alone" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked, others = config.getoption("--alone"), set[pytest.Item]()
    if asked is not None:
        others |= {item for item in items if (item.get_closest_marker("alone") is None) is (asked == "only")}
    if config.getoption("--quick"):
        first: dict[str, pytest.Item] = {}
        for item in items:
            if item.path.relative_to(Path(__file__).parent).parts[0] in QUICK:
                first.setdefault(item.nodeid.partition("[")[0], item)
        others |= set(items) - set(first.values())
    if not config.getoption("--all"):
        others |= _slow(items)
    if others:
        config.hook.pytest_deselected(items=[item for item in items if item in others])
        items[:] = [item for item in items if item not in others]
    # the longest first, which start processes, so that all workers end at the same time
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


def _slow(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that `@pytest.mark.slow(keep=n)` leaves to `--all`: all but n of a test's.

    `always` names parameters of cases that are among the n.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = set[pytest.Item]()
    for items in cases.values():
        marker = items[0].get_closest_marker("slow")
        assert marker is not None
        always = [item for item in items if {*_parameters(item)} & {*marker.kwargs.get("always", ())}]
        left |= {*items} - {*_spread(items, marker.kwargs.get("keep", 0), always)}
    return left


def _parameters(item: pytest.Item) -> list[str]:
    return item.nodeid.partition("[")[2].removesuffix("]").split("-")


def _spread(items: list[pytest.Item], count: int, always: list[pytest.Item]) -> list[pytest.Item]:
    """Choose `count` cases of a test, each with as many parameters that no chosen case has as possible.

    Args:
        always: cases that are chosen first.
    """
    # in the order of a hash, because steps of equal length may always meet the same parameter
    rest = sorted({*items} - {*always}, key=lambda item: zlib.crc32(item.nodeid.encode()))
    words = {item: set(enumerate(_parameters(item))) for item in items}
    chosen = [*always]
    while rest and len(chosen) < count:
        seen = set().union(*(words[item] for item in chosen))
        chosen.append(max(rest, key=lambda item: len(words[item] - seen)))
        rest.remove(chosen[-1])
    return chosen


def pytest_collection_finish() -> None:
    """Freeze the objects that exist now, so that no garbage collection looks through them again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Leave the numbers for one summary if `scripts/test` runs pytest twice."""
    if "ZERO_TEST_COUNTS" in os.environ and not os.environ.get("PYTEST_XDIST_WORKER"):
        counts = {word: len(reports) for word, reports in terminalreporter.stats.items() if word in COUNTED}
        with Path(os.environ["ZERO_TEST_COUNTS"]).open("a") as file:
            file.write(json.dumps(counts) + "\n")


def pytest_report_header() -> str:
    return f"ZERO_TEST_SEED={SEED}, one thread of torch per rank"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True, scope="module")
def _no_garbage() -> Iterator[None]:
    """Nor in the tests of the next file, where thread ranks, which may not collect, have left it.

    What a test has imported is frozen too: transformers and torch's compiler have 300,000 objects.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_store_is_left_open(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads of a store that nobody closed look up once a second: two thousand of them left tests no time."""
    opened: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
    start = WorkerPool._start_threads

    def noted(pool: WorkerPool) -> None:
        opened.add(pool)
        start(pool)

    monkeypatch.setattr(WorkerPool, "_start_threads", noted)
    yield
    for pool in [*opened]:
        with pool._lock:  # without waiting for a thread that a test has stuck
            pool._closed = True
            pool._called.notify_all()


@pytest.fixture(autouse=True)
def _no_process_group_is_left_open() -> Iterator[None]:
    """Nor the variables of one: Accelerate and Lightning leave both, to whatever test their worker runs next."""
    before = dict(os.environ)
    yield
    for name in {**before, **os.environ}:  # and no other, which a thread that still runs may read
        if name not in before:
            del os.environ[name]
        elif os.environ.get(name) != before[name]:
            os.environ[name] = before[name]
    if dist.is_initialized():
        dist.destroy_process_group()
    if "accelerate.state" in sys.modules:  # what it knows of that group
        sys.modules["accelerate.state"].AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # thread ranks share the cores already
    yield
    torch.set_num_threads(before)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, for a command line of `train.py` in a process that nobody's agent started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path
