"""The tracker of a run: passes rows of metrics to metrics.jsonl, the console, and optionally W&B and TensorBoard.

Each of these outputs is a view; only rank 0 has views. A failure to write metrics.jsonl ends the run. Any other view
that fails is left out for the rest of the run, and one line says so.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import methodcaller
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TextIO

from zero.tracker.settings import TrackerSettings, WandbSettings
from zero.tracker.views import wandb
from zero.tracker.views.console import BarView, Lines
from zero.tracker.views.jsonl import (
    RUNNING as RUNNING,
    Jsonl,
    write_failure as write_failure,
    write_summary as write_summary,
)
from zero.tracker.views.tensorboard import TensorBoardRun
from zero.tracker.views.threaded import ThreadedView
from zero.tracker.views.view import ROW as ROW, Row, View

Open = Callable[[Mapping[str, Any], Mapping[str, Any], str | None], tuple[View, str | None]]
"""Function that opens a view, with the arguments of `Tracker.begin`. Returns the view and W&B's run id or None."""


class Tracker(AbstractContextManager["Tracker"]):
    """All views of a run as one object, which passes each call to every view.

    A context manager: leaving it closes every view with the run's exit code.

    Args:
        views: the views, in the order in which they are called.
        later: functions by which `begin` opens more views, by title of the view.
        said: queue of lines to print for the user; views add lines from any thread.

    Attributes:
        run_id: W&B's run id, which checkpoints record so that a resumed run continues it; None before `begin`.
    """

    def __init__(
        self, views: Sequence[View] = (), later: Mapping[str, Open] | None = None, said: SimpleQueue[str] | None = None
    ) -> None:
        self._views, self._later, self._said = list(views), later or {}, said or SimpleQueue()
        self._lost: list[View] = []
        self._summary: Mapping[str, Any] = {}
        self._exit_code = 0
        self.run_id: str | None = None

    def begin(self, config: Mapping[str, Any], facts: Mapping[str, Any], run_id: str | None = None) -> None:
        """Open the views that need the run's settings: W&B and TensorBoard.

        Args:
            config: plain settings as in config.yaml, with every auto replaced by its value; includes `mode`.
            facts: further plain values about the run; `plan_bytes` maps tier -> kind of tensor -> bytes.
            run_id: W&B's run id in the checkpoint that the run resumes from; None if there is none.
        """
        for name, opened in self._later.items():
            try:
                view, opened_id = opened(config, facts, run_id)
                self._views.append(view)
                self.run_id = opened_id or self.run_id
            except Exception as error:
                self._said.put(_left_out(name, error))
        self._pass_on()

    def expect(self, steps: int) -> None:
        """Tell the views another number of steps of the whole run, before the first row."""
        self._tell(lambda view: view.expect(steps))

    def waiting(self, what: str) -> None:
        """Tell the views what the run waits for, a noun, until the first row."""
        self._tell(lambda view: view.waiting(what))

    def log(self, row: Row) -> None:
        """Pass a row of metrics, with the keys of `ROW`, to the views."""
        self._tell(lambda view: view.log(row))

    def note(self, text: str) -> None:
        """Print text for the user on the console."""
        self._tell(lambda view: view.note(text))

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the progress of a long operation, such as a save; `done == total` ends it."""
        self._tell(lambda view: view.progress(what, done, total))

    def saved(self, path: Path, step: int) -> None:
        """Tell the views that the checkpoint of `step` was saved at `path`."""
        self._tell(lambda view: view.saved(path, step))

    def report(self, path: Path) -> None:
        """Tell the views that the run's report, a self-contained HTML file, was written to `path`."""
        self._tell(lambda view: view.report(path))

    def finish(self, summary: Mapping[str, Any], exit_code: int = 0) -> None:
        """Store the summary and exit code for closing the views. An exception's exit code is used instead."""
        self._summary, self._exit_code = summary, exit_code

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        exit_code = self._exit_code if error is None else getattr(error, "exit_code", 1)
        failures = []
        for view in self._views:  # a closed console still shows the lines of views that are closed later
            try:
                self._try(view, lambda view: view.close(self._summary, exit_code))
            except Exception as failed:
                failures.append(failed)
            self._pass_on()
        if failures and error is None:
            raise failures[0]

    def _tell(self, call: Callable[[View], None]) -> None:
        for view in self._views:
            if view not in self._lost:
                self._try(view, call)
        self._pass_on()

    def _try(self, view: View, call: Callable[[View], None]) -> None:
        try:
            call(view)
        except Exception as error:
            if isinstance(view, Jsonl):
                raise
            if view not in self._lost:
                self._lost.append(view)
                self._said.put(_left_out(view.title, error))

    def _pass_on(self) -> None:
        while not self._said.empty():
            text = self._said.get()
            for view in self._views:
                if view not in self._lost:
                    self._try(view, methodcaller("note", text))


def open_tracker(
    settings: TrackerSettings, folder: Path | None, stream: TextIO | None = None, *, steps: int | None
) -> Tracker:
    """Return a tracker with the views that the settings name.

    Args:
        folder: the run folder, in which metrics.jsonl is written; None: the tracker has no views.
        stream: the console's stream; None: stdout.
        steps: number of steps of the whole run; None: unknown, so the console prints a line per row instead of a bar.
    """
    if folder is None:
        return Tracker()
    stream = sys.stdout if stream is None else stream
    views: list[View] = [Jsonl(folder / "metrics.jsonl")]
    said: SimpleQueue[str] = SimpleQueue()
    try:
        views += _console(settings.console, steps, stream)
    except Exception as error:
        said.put(_left_out("the console", error))
    tracker = Tracker(views, _later(settings, folder, said.put), said)
    if isinstance(settings, WandbSettings) and wandb.wanted_mode(settings) == "online" and not wandb.has_key():
        tracker.note(wandb.NO_KEY)
    return tracker


def _console(console: str, steps: int | None, stream: TextIO) -> list[View]:
    if console == "none":
        return []
    if steps is None or console == "lines" or (console == "auto" and not stream.isatty()):
        return [Lines(steps, stream)]
    return [BarView(steps, stream)]


def _left_out(name: str, error: Exception) -> str:
    return f"{name} gets no rows from now on: {wandb.heading_line(error)}. metrics.jsonl has every row."


def _later(settings: TrackerSettings, folder: Path, say: Callable[[str], None]) -> Mapping[str, Open]:
    def open_wandb(config: Mapping[str, Any], facts: Mapping[str, Any], stored: str | None) -> tuple[View, str]:
        assert isinstance(settings, WandbSettings)
        run_id = wandb.run_id_of(config, folder, stored)
        opened = partial(wandb.WandbRun, config, settings, folder, facts, run_id=run_id, say=say)
        return ThreadedView(opened, wandb.abandon), run_id

    def open_tensorboard(config: Mapping[str, Any], *_: object) -> tuple[View, None]:
        return ThreadedView(partial(TensorBoardRun, config, folder), title="TensorBoard"), None

    later: dict[str, Open] = {}
    if isinstance(settings, WandbSettings) and wandb.mode_of(settings) != "disabled":
        later["W&B"] = open_wandb
    if settings.tensorboard:
        later["TensorBoard"] = open_tensorboard
    return later
