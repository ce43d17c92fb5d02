"""The tracker of a run: rows in metrics.jsonl, the console, and Weights & Biases or TensorBoard if asked.

Trackers of other ranks than 0 have no views. metrics.jsonl comes first, and is the only view whose failure ends a run;
any other that fails is left out from then on, with one line about it.
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

from zero.tracker import wandb
from zero.tracker.behind import Behind
from zero.tracker.console import Bar, Lines
from zero.tracker.jsonl import RUNNING as RUNNING, Jsonl, write_failure as write_failure, write_summary as write_summary
from zero.tracker.settings import TrackerSettings, Wandb
from zero.tracker.tensorboard import TensorBoardRun
from zero.tracker.view import ROW as ROW, Row, View

Open = Callable[[Mapping[str, Any], Mapping[str, Any], str | None], tuple[View, str | None]]
"""Function from the arguments of `Tracker.begin` to a view and, for W&B, the id of its run."""


class Tracker(AbstractContextManager["Tracker"]):
    """Passes each call to its views; a context manager that closes every view with the run's exit code.

    Args:
        views: in the order of calls.
        later: functions that make more views when training begins, by their titles.
        said: lines for a person that views put there from any thread.

    Attributes:
        run_id: W&B's, for a checkpoint to remember; None before `begin`.
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
        """Open the views that need the settings.

        Args:
            config: plain settings as config.yaml has them, with every auto settled; `mode` is one.
            facts: plain values beside the settings; `plan_bytes` is tier to kind to bytes.
            run_id: W&B's id in the checkpoint that the run goes on from.
        """
        for name, opened in self._later.items():
            try:
                view, opened_id = opened(config, facts, run_id)
                self._views.append(view)
                self.run_id = opened_id or self.run_id
            except Exception as error:
                self._said.put(_left_out(name, error))
        self._pass_on()

    def log(self, row: Row) -> None:
        """Show a row, with the keys of `ROW`."""
        self._tell(lambda view: view.log(row))

    def note(self, text: str) -> None:
        """Show lines to a person."""
        self._tell(lambda view: view.note(text))

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far a longer work is; `done == total` ends it."""
        self._tell(lambda view: view.progress(what, done, total))

    def saved(self, path: Path, step: int) -> None:
        """Tell views that there is a checkpoint at `path`."""
        self._tell(lambda view: view.saved(path, step))

    def report(self, path: Path) -> None:
        """Tell views that there is a report at `path`, self-contained HTML."""
        self._tell(lambda view: view.report(path))

    def finish(self, summary: Mapping[str, Any], exit_code: int = 0) -> None:
        """Keep the summary and exit code for the end; an exception has an exit code of its own."""
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
    """Make a tracker with the views of the settings; with none where `folder` is None.

    Args:
        folder: the run folder; receives metrics.jsonl.
        stream: the console; None: stdout.
        steps: of the whole run; None: nobody knows, and the console has a line per row.
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
    if isinstance(settings, Wandb) and wandb.wanted_mode(settings) == "online" and not wandb.has_key():
        tracker.note(wandb.NO_KEY)
    return tracker


def _console(console: str, steps: int | None, stream: TextIO) -> list[View]:
    if console == "none":
        return []
    if steps is None or console == "lines" or (console == "auto" and not stream.isatty()):
        return [Lines(steps, stream)]
    return [Bar(steps, stream)]


def _left_out(name: str, error: Exception) -> str:
    return f"{name} is left out from here on: {wandb.first_line(error)}; metrics.jsonl has every row"


def _later(settings: TrackerSettings, folder: Path, say: Callable[[str], None]) -> Mapping[str, Open]:
    def open_wandb(config: Mapping[str, Any], facts: Mapping[str, Any], stored: str | None) -> tuple[View, str]:
        assert isinstance(settings, Wandb)
        run_id = wandb.run_id_of(config, folder, stored)
        opened = partial(wandb.WandbRun, config, settings, folder, facts, run_id=run_id, say=say)
        return Behind(opened, wandb.abandon), run_id

    def open_tensorboard(config: Mapping[str, Any], *_: object) -> tuple[View, None]:
        return Behind(partial(TensorBoardRun, config, folder), title="TensorBoard"), None

    later: dict[str, Open] = {}
    if isinstance(settings, Wandb) and wandb.mode_of(settings) != "disabled":
        later["W&B"] = open_wandb
    if settings.tensorboard:
        later["TensorBoard"] = open_tensorboard
    return later
