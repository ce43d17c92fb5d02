"""Let all ranks succeed or fail together: exchange results and errors before any rank returns or raises.

A rank that raised alone would leave the other ranks waiting in the next collective.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero.distributed.failure import some_ranks
from zero.distributed.world import World
from zero.errors import CheckpointError, with_class
from zero.platform.files import naming

MEET_S = 1.0
"""Seconds between two collectives of `join_threads`, in which ranks report whether their threads are still running."""


def gather_reports(world: World, work: Callable[[], dict[str, Any] | None]) -> list[dict[str, Any]]:
    """Run `work` on every rank and return all results in rank order, with {} in place of None. Collective.

    Raises:
        CheckpointError: `work` raised an error on a rank; raised on every rank.
    """
    text, cause = _report(work)
    reports = [json.loads(text) for text in world.gather_texts(text, "reports of a checkpoint")]
    for rank, report in enumerate(reports):
        _raise_fault(world, rank, report, cause)
    return reports


def _report(work: Callable[[], dict[str, Any] | None]) -> tuple[str, Exception | None]:
    """Return the result of `work` as JSON, or its error, to raise after the collective in which other ranks wait."""
    try:
        return json.dumps(work() or {}), None
    except Exception as error:
        return json.dumps({"error": with_class(error)}), error


def _raise_fault(world: World, rank: int, report: Mapping[str, Any], cause: Exception | None) -> None:
    if "error" in report:
        raise CheckpointError(f"rank {rank}: {report['error']}" if world.size > 1 else report["error"]) from cause


def join_threads(
    world: World, threads: Sequence[threading.Thread], meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Wait until `threads` have ended on every rank. Collective.

    The threads may take longer than the timeout of a collective. So all ranks run one collective every `MEET_S` seconds
    until the last thread has ended.

    Args:
        meanwhile: called before each of these collectives.
    """
    at_work = True
    while at_work:
        end_s = time.monotonic() + min(MEET_S, world.timeout_s / 4)
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        meanwhile()
        words = world.gather_texts("01"[any(thread.is_alive() for thread in threads)], "threads at work")
        at_work = "1" in words


def by_rank_0(world: World, work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0 and return its result, a JSON value, on every rank. Collective.

    Raises:
        CheckpointError: `work` raised an error; raised on every rank.
    """
    text, cause = _report(lambda: {"value": work()}) if world.rank == 0 else ("", None)
    report = json.loads(world.share(text))
    _raise_fault(world, 0, report, cause)
    return report["value"]


def check_shared(world: World, root: Path) -> None:
    """Make the folder `root`, and check that all ranks see the same folder there. Collective.

    Raises:
        CheckpointError: the folder cannot be made, or a rank does not see what rank 0 writes there; raised on every
            rank.
    """

    def leave_mark() -> str:
        with naming(root, "making it"):
            root.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix=".seen-by-all-", dir=root)).name

    mark = root / by_rank_0(world, leave_mark)
    reports = gather_reports(world, lambda: {"seen": mark.is_dir()})
    by_rank_0(world, lambda: mark.rmdir())
    if blind := [rank for rank, report in enumerate(reports) if not report["seen"]]:
        raise CheckpointError(
            f"{some_ranks(blind)} of {world.size} {'does' if len(blind) == 1 else 'do'} not see the files of rank 0 in "
            f"{root}. Set checkpoint.dir to a folder on a disk that all nodes share, or set checkpoint.every=0."
        )
