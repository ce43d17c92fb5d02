"""Runs tasks one after the other, each in a process of its own that is killed at its limit, and keeps what they tell.

A task tells rows, and every row is in `gpu.json` before the next one comes: whatever ends a task, or all of this, costs
what was not told yet. Processes are forked where that can be, so that torch is imported once: a process that was forked
can use a GPU only if nothing asked for one before, and nothing here does. No torch in this file: what a crash of it
leaves must still be written.
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
Tell = Callable[[Row], None]

LEAST_S = 3.0
"""A task that would get less is not begun."""

STACKS_S = 1.0
"""Before its limit a task writes its stacks to the log: what it hung in is seldom seen again."""

LAST_WORDS_S = 10.0
"""How long a killed process may take to end. One that the driver holds is left behind."""

DONE, RUNNING, WAITING = "done", "running", "not begun"


class Budget:
    """How much of its time a task has left."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self._end_s = limit_s, time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()


class Task(NamedTuple):
    """One process.

    Attributes:
        seconds: of a run of the usual length; of another one its share of what is left is the same.
        needs: packages without which it cannot run.
    """

    part: int
    name: str
    seconds: float
    run: Callable[[Tell, Budget], None]
    needs: tuple[str, ...] = ()


class Ledger:
    """What is known so far, in `gpu.json`, and as a page in `gpu.md`.

    Args:
        about: what holds for the whole run.
        page: the JSON as Markdown.
    """

    def __init__(self, folder: Path, about: Row, tasks: Sequence[Task], page: Callable[[Row], str]) -> None:
        self._folder, self._page = folder, page
        self.told: Row = {**about, "tasks": [{"part": t.part, "name": t.name, "status": WAITING} for t in tasks]}
        folder.mkdir(parents=True, exist_ok=True)
        self.write()

    def begin(self, number: int, limit_s: float) -> Row:
        entry: Row = self.told["tasks"][number]
        entry.update(status=RUNNING, limit_s=round(limit_s, 1), rows=[])
        self.write()
        return entry

    def add(self, number: int, row: Row) -> None:
        self.told["tasks"][number]["rows"].append(row)
        self._publish("gpu.json", json.dumps(self.told, indent=1))

    def end(self, number: int, status: str, seconds: float = 0.0) -> None:
        self.told["tasks"][number].update(status=status, seconds=round(seconds, 1))
        self.write()

    def write(self) -> None:
        self._publish("gpu.json", json.dumps(self.told, indent=1))
        self._publish("gpu.md", self._page(self.told))

    def _publish(self, name: str, text: str) -> None:
        """By rename: whoever reads it, or stops here, has the last one whole."""
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
    say: Tell = print,
    start: str = "fork",
) -> None:
    """Every task in order. Each gets its share of the time that is left: what one leaves goes to all after it.

    Args:
        log: file of what the tasks print.
        missing: packages that this Python has not.
        start: how processes start, "fork" or "spawn".
    """
    for number, task in enumerate(tasks):
        weight = task.seconds / sum(later.seconds for later in tasks[number:])
        limit_s, lacking = budget.left_s * weight, [name for name in task.needs if name in missing]
        if lacking:
            ledger.end(number, f"left out: this Python has no {', '.join(lacking)}")
        elif limit_s < LEAST_S:
            ledger.end(number, "left out: no time was left")
        else:
            print(f"part {task.part}, {task.name}, for at most {limit_s:.0f} s", flush=True)
            _run(number, task, ledger, limit_s, log, say, start)
        entry = ledger.told["tasks"][number]
        print(f"part {task.part}, {task.name}: {entry['status']} ({entry.get('seconds', 0):.0f} s)", flush=True)


def works_forked(run: Callable[[], object]) -> bool:
    """Whether `run` succeeds in a process that is forked off now."""

    def attempt() -> None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it is an answer here, and no error
        run()

    child = multiprocessing.get_context("fork").Process(target=attempt, daemon=True)
    child.start()
    child.join(timeout=LAST_WORDS_S)
    child.kill()
    return child.exitcode == 0


def _run(number: int, task: Task, ledger: Ledger, limit_s: float, log: Path, say: Tell, start: str) -> None:
    """One task, to its end or its limit."""
    ledger.begin(number, limit_s)
    context: Any = multiprocessing.get_context(start)
    begin_s = time.monotonic()
    ours, theirs = context.Pipe(duplex=False)
    other_end = ours if start == "fork" else None  # a process that was spawned has only what it was given
    child = context.Process(target=_child, args=(task, theirs, other_end, log, limit_s))
    sys.stdout.flush()
    child.start()
    theirs.close()
    status = "stopped with everything"

    def told(row: Row) -> None:
        ledger.add(number, row)
        say(row)

    try:
        status = _listen(ours, begin_s + limit_s, told)
    finally:
        _kill(child.pid, child)
        ours.close()
        ended = status if status != DONE else _how_it_ended(child.exitcode, ledger.told["tasks"][number]["rows"])
        ledger.end(number, ended, time.monotonic() - begin_s)


def _listen(pipe: Connection, end_s: float, told: Tell) -> str:
    """Take rows until the other end is closed or time is up."""
    begin_s = time.monotonic()
    while pipe.poll(max(0.0, end_s - time.monotonic())):
        try:
            told(json.loads(pipe.recv_bytes()))
        except (EOFError, OSError):
            return DONE
    return f"cut after {time.monotonic() - begin_s:.0f} s, its limit"


def _kill(pid: int | None, child: Any) -> None:
    """The process and all that it started. One that has told everything has nothing left to do but end."""
    child.join(timeout=STACKS_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid or 0, signal.SIGKILL)
    child.kill()
    child.join(timeout=LAST_WORDS_S)


def _how_it_ended(code: int | None, rows: list[Row]) -> str:
    if code == 0:
        return DONE
    if rows and rows[-1].get("kind") == "failed":
        return f"failed: {rows[-1]['error']}"
    if code is None or code > 0:
        return f"ended with {code}"
    return f"killed by {signal.Signals(-code).name}"


def _child(task: Task, pipe: Connection, other_end: Connection | None, log: Path, limit_s: float) -> None:
    """The task's process, from its start to its end, which takes no notice of what is still open."""
    if other_end is not None:
        other_end.close()
    os.setsid()  # so that what it starts ends with it
    _die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    print(f"\n---- part {task.part}, {task.name}", flush=True)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, limit_s - STACKS_S))

    def tell(row: Row) -> None:
        pipe.send_bytes(json.dumps(row).encode())

    code = 1
    try:
        task.run(tell, Budget(limit_s))
        code = 0
    except BaseException as error:  # told, whatever it is: the process ends here
        traceback.print_exc()
        tell({"kind": "failed", "error": error_text(error)})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def error_text(error: BaseException) -> str:
    """The class and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _die_with_parent() -> None:
    """Linux: a parent that is killed takes this process along, and with it what it holds of the GPU."""
    died_with_parent = 1  # PR_SET_PDEATHSIG
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(died_with_parent, signal.SIGKILL)
