"""Run tasks one after the other, each in its own process with a time limit, and record the rows that they emit.

Every row is in `gpu.json` before the next one is made, so an early end loses only results that were not emitted yet.
Processes are forked where possible, so that torch is imported once. A forked process can use the GPU only if CUDA was
not initialized before the fork; nothing here does that. This file does not import torch, so that results are written
even if torch crashes.
"""

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
Emit = Callable[[Row], None]

LEAST_S = 3.0
"""The least time of a task in seconds. A task that would get less is skipped."""

STACKS_S = 1.0
"""Seconds before its limit at which a task writes the stacks of its threads to the log, to show where it hangs."""

END_S = 10.0
"""Seconds to wait for a killed process to end. A process that hangs in the driver is left behind."""

DONE, RUNNING, WAITING = "done", "running", "not begun"


class Budget:
    """The remaining time of a task, or of everything."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self._end_s = limit_s, time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()


class Task(NamedTuple):
    """The work of one process.

    Attributes:
        seconds: its time limit in a run of the usual length. In another run, its limit is the same share of the time.
        needs: packages that it imports.
    """

    part: int
    name: str
    seconds: float
    run: Callable[[Emit, Budget], None]
    needs: tuple[str, ...] = ()


class Ledger:
    """All results so far, in `gpu.json`, and as a page in `gpu.md`.

    Args:
        about: facts about the whole run.
        page: turns the results into Markdown.
    """

    def __init__(self, folder: Path, about: Row, tasks: Sequence[Task], page: Callable[[Row], str]) -> None:
        self._folder, self._page = folder, page
        self.results: Row = {**about, "tasks": [{"part": t.part, "name": t.name, "status": WAITING} for t in tasks]}
        folder.mkdir(parents=True, exist_ok=True)
        self.write()

    def begin(self, number: int, limit_s: float) -> Row:
        entry: Row = self.results["tasks"][number]
        entry.update(status=RUNNING, limit_s=round(limit_s, 1), rows=[])
        self.write()
        return entry

    def add(self, number: int, row: Row) -> None:
        self.results["tasks"][number]["rows"].append(row)
        self._publish("gpu.json", json.dumps(self.results, indent=1))

    def end(self, number: int, status: str, seconds: float = 0.0) -> None:
        self.results["tasks"][number].update(status=status, seconds=round(seconds, 1))
        self.write()

    def write(self) -> None:
        self._publish("gpu.json", json.dumps(self.results, indent=1))
        self._publish("gpu.md", self._page(self.results))

    def _publish(self, name: str, text: str) -> None:
        """Replace the file by a rename, so that it is complete at any time."""
        beside = self._folder / f".{name}"
        beside.write_text(text)
        beside.replace(self._folder / name)


def run_all(
    tasks: Sequence[Task],
    ledger: Ledger,
    budget: Budget,
    *,
    log: Path,
    missing: Sequence[str] = (),
    show: Emit = print,
    start: str = "fork",
) -> None:
    """Run every task in order. Each gets its share of the remaining time; unused time goes to later tasks.

    Args:
        log: file for the output of the tasks.
        missing: packages that are not installed.
        show: called with each row.
        start: how processes start, "fork" or "spawn".
    """
    for number, task in enumerate(tasks):
        weight = task.seconds / sum(later.seconds for later in tasks[number:])
        limit_s, lacking = budget.left_s * weight, [name for name in task.needs if name in missing]
        if lacking:
            ledger.end(number, f"skipped: this Python has no {', '.join(lacking)}")
        elif limit_s < LEAST_S:
            ledger.end(number, "skipped: no time was left")
        else:
            print(f"part {task.part}, {task.name}, for at most {limit_s:.0f} s", flush=True)
            _run(number, task, ledger, limit_s, log, show, start)
        entry = ledger.results["tasks"][number]
        print(f"part {task.part}, {task.name}: {entry['status']} ({entry.get('seconds', 0):.0f} s)", flush=True)


def works_forked(run: Callable[[], object]) -> bool:
    """Return whether `run` succeeds in a process that is forked now."""

    def attempt() -> None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - an error here is an answer
        run()

    child = multiprocessing.get_context("fork").Process(target=attempt, daemon=True)
    child.start()
    child.join(timeout=END_S)
    child.kill()
    return child.exitcode == 0


def _run(number: int, task: Task, ledger: Ledger, limit_s: float, log: Path, show: Emit, start: str) -> None:
    """Run one task until it ends or reaches its limit."""
    ledger.begin(number, limit_s)
    context: Any = multiprocessing.get_context(start)
    begin_s = time.monotonic()
    parent_end, child_end = context.Pipe(duplex=False)
    other_end = parent_end if start == "fork" else None  # a spawned process does not inherit it
    child = context.Process(target=_child, args=(task, child_end, other_end, log, limit_s))
    sys.stdout.flush()
    child.start()
    child_end.close()
    status = "stopped with the whole program"

    def receive(row: Row) -> None:
        ledger.add(number, row)
        show(row)

    try:
        status = _listen(parent_end, begin_s + limit_s, receive)
    finally:
        _kill(child.pid, child)
        parent_end.close()
        ended = status if status != DONE else status_of(child.exitcode, ledger.results["tasks"][number]["rows"])
        ledger.end(number, ended, time.monotonic() - begin_s)


def _listen(pipe: Connection, end_s: float, receive: Emit) -> str:
    """Receive rows until the other end is closed or the time is over."""
    begin_s = time.monotonic()
    while pipe.poll(max(0.0, end_s - time.monotonic())):
        try:
            receive(json.loads(pipe.recv_bytes()))
        except (EOFError, OSError):
            return DONE
    return f"cut after {time.monotonic() - begin_s:.0f} s, its limit"


def _kill(pid: int | None, child: Any) -> None:
    """End the process and all that it started. A process that has emitted all its rows gets 1 s to end by itself."""
    child.join(timeout=STACKS_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid or 0, signal.SIGKILL)
    child.kill()
    child.join(timeout=END_S)


def status_of(code: int | None, rows: list[Row]) -> str:
    if code == 0:
        return DONE
    if rows and rows[-1].get("kind") == "failed":
        return f"failed: {rows[-1]['error']}"
    if code is None or code > 0:
        return f"ended with {code}"
    return f"killed by {signal.Signals(-code).name}"


def _child(task: Task, pipe: Connection, other_end: Connection | None, log: Path, limit_s: float) -> None:
    """Run a task in its process."""
    if other_end is not None:
        other_end.close()
    os.setsid()  # so that its children can be killed with it
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    print(f"\n---- part {task.part}, {task.name}", flush=True)
    run_and_exit(task.run, pipe, limit_s)


def run_and_exit(run: Callable[[Emit, Budget], None], pipe: Connection, limit_s: float) -> None:
    """Call `run`, send its rows and its error to the pipe, and end this process without cleanup."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, limit_s - STACKS_S))

    def emit(row: Row) -> None:
        pipe.send_bytes(json.dumps(row).encode())

    code = 1
    try:
        run(emit, Budget(limit_s))
        code = 0
    except BaseException as error:  # any error is a result: the process ends here
        traceback.print_exc()
        emit({"kind": "failed", "error": error_text(error)})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def error_text(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def die_with_parent() -> None:
    """Let this process end when its parent is killed (on Linux only), so that it frees the GPU."""
    signal_on_parents_death = 1  # PR_SET_PDEATHSIG
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(signal_on_parents_death, signal.SIGKILL)
