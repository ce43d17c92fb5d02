"""What a run says while it runs: rows in metrics.jsonl always, the console, and Weights & Biases if asked.

A row is a flat mapping with the keys of `ROW`; what was not measured is null. Views do not know each other, and none of
them may end a run. Rank 0 has a tracker; the others have one without views. Only this file imports wandb.
"""

import json
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zero.config import Config, Wandb

ROW = (
    "step",
    "tokens",
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/loss_scale",
    "train/skipped",
    "val/loss",
    "speed/step_s",
    "speed/tokens_per_s",
    "speed/compute_s",
    "speed/hidden_fraction",
    "offload/read_bytes",
    "offload/write_bytes",
    "offload/wait_s",
    "offload/read_gbps",
    "offload/write_gbps",
    "offload/bytes_per_param",
    "memory/device_peak_bytes",
    "memory/host_peak_bytes",
)
"""Keys of every row. `train/skipped` counts from the start; peaks are the largest over ranks.

`offload/` is what moved between tiers in this row's steps: bytes of all ranks; seconds per step in which the slowest
rank stood still for it; 10^9 bytes a second while something was read or written (null: nothing was); bytes read and
written per parameter and step. `speed/compute_s` is the rest of the step, `speed/hidden_fraction` the share of the
transfers' time that nobody waited for. Validation is left out.
"""

Row = Mapping[str, float | int | None]


class View(Protocol):
    """One place where rows go."""

    def log(self, row: Row) -> None:
        """Show or keep one row."""
        ...

    def note(self, text: str) -> None:
        """Show or keep lines for a person."""
        ...

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """No row follows. `summary` is empty when the run failed."""
        ...


class Tracker:
    """Passes each row to every view; a context manager that closes them with the run's exit code."""

    def __init__(self, views: Sequence[View] = (), run_id: str | None = None) -> None:
        self._views = tuple(views)
        self._summary: Mapping[str, Any] = {}
        self.run_id = run_id  # W&B's, for a checkpoint to remember

    def log(self, row: Row) -> None:
        for view in self._views:
            view.log(row)

    def note(self, text: str) -> None:
        for view in self._views:
            view.note(text)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Remember how the run ended, for those views that show it."""
        self._summary = summary

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for view in self._views:
            view.close(self._summary, 0 if error is None else getattr(error, "exit_code", 1))


def open_tracker(config: Config, folder: Path | None, stream: TextIO | None = None) -> Tracker:
    """The views that `config.tracker` asks for; none where `folder` is None.

    Args:
        folder: the run folder; receives metrics.jsonl.
        stream: the console; None: stdout.
    """
    if folder is None:
        return Tracker()
    stream = sys.stdout if stream is None else stream
    views: list[View] = [Jsonl(folder / "metrics.jsonl")]
    console = config.tracker.console
    if console == "auto":
        console = "bar" if stream.isatty() else "lines"
    if console != "none":
        views.append(Bar(config.steps, stream) if console == "bar" else Lines(config.steps, stream))
    tracker = Tracker(views)
    if isinstance(config.tracker, Wandb) and config.tracker.mode != "disabled":
        try:
            view = WandbView(config, config.tracker, folder)
            tracker = Tracker([*views, view], view.run_id)
        except ImportError:
            tracker.note("tracker=wandb: wandb is not installed; metrics.jsonl has every row")
    return tracker


class Jsonl:
    """One JSON object a line, on disk when `log` returns. Numbers that JSON does not have become null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, row: Row) -> None:
        self._file.write(json.dumps({key: _finite(value) for key, value in row.items()}, allow_nan=False) + "\n")
        self._file.flush()

    def note(self, text: str) -> None:
        """Notes are for people."""

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._file.close()


class Lines:
    """A plain line per row, for pipes and files."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self._steps, self._stream, self._clock = steps, stream, _Clock(steps)

    def log(self, row: Row) -> None:
        left = f"{_minutes(self._clock.left_s(row))} left"
        print(f"step {row['step']}/{self._steps}", *_words(row), left, sep="  ", file=self._stream, flush=True)

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._stream.flush()


class Bar:
    """A progress bar, for terminals."""

    def __init__(self, steps: int, stream: TextIO) -> None:
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=Console(file=stream),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=steps, words="")
        self._bar.start()

    def log(self, row: Row) -> None:
        self._bar.update(self._task, completed=row["step"], words="  ".join(_words(row)))

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._bar.stop()


class WandbView:
    """A W&B run that shows the same rows. Offline where no key is found or the network is away."""

    def __init__(self, config: Config, settings: Wandb, folder: Path) -> None:
        import wandb

        options: dict[str, Any] = {
            "project": settings.project,
            "name": settings.run,
            "dir": str(folder),
            "config": config.plain(),
            # the console would be our progress bar; the program and its arguments may hold secrets
            "settings": wandb.Settings(console="off", save_code=False, disable_git=True, x_disable_meta=True),
        }
        mode = _wandb_mode(settings.mode)
        try:
            self._run = wandb.init(mode=mode, **options)
        except Exception as refused:  # W&B raises many kinds, and none is a reason not to train
            if mode == "offline":
                raise
            warnings.warn(f"W&B is offline for this run: {_first_line(refused)}", stacklevel=2)
            self._run = wandb.init(mode="offline", **options)
        self._run.define_metric("*", step_metric="step")
        self.run_id = str(self._run.id)

    def log(self, row: Row) -> None:
        self._run.log({key: value for key, value in row.items() if value is not None})

    def note(self, text: str) -> None:
        """Notes are for the console."""

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._run.summary.update({key: value for key, value in summary.items() if not isinstance(value, Mapping)})
        self._run.finish(exit_code=exit_code)


def _wandb_mode(asked: str) -> Any:
    if asked != "auto":
        return asked
    if "WANDB_MODE" in os.environ:
        return os.environ["WANDB_MODE"]
    netrc = Path("~/.netrc").expanduser()
    known = "WANDB_API_KEY" in os.environ or (netrc.is_file() and "wandb" in netrc.read_text(errors="replace"))
    return "online" if known else "offline"


class _Clock:
    """Seconds left, from the speed since the first row: the first steps are slower than the rest."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first: tuple[float, float] | None = None

    def left_s(self, row: Row) -> float | None:
        step, now = float(row["step"] or 0), time.monotonic()
        if self._first is None:
            self._first = step, now
            return (self._steps - step) * float(row.get("speed/step_s") or 0)
        done = step - self._first[0]
        return (self._steps - step) * (now - self._first[1]) / done if done > 0 else None


def _words(row: Row) -> list[str]:
    words = [f"loss {_number(row.get('train/loss'))}"]
    if row.get("val/loss") is not None:
        words.append(f"val {_number(row['val/loss'])}")
    if row.get("speed/tokens_per_s") is not None:
        words.append(f"{row['speed/tokens_per_s']:,.0f} tokens/s")
    if (row.get("offload/wait_s") or 0) >= 0.005:
        words.append(f"waits {row['offload/wait_s']:.2f} s")
    peak = row.get("memory/device_peak_bytes") or row.get("memory/host_peak_bytes")
    if peak:
        words.append(f"{peak / 2**20:,.0f} MiB")
    if row.get("train/skipped"):
        words.append(f"{row['train/skipped']} skipped")
    return words


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f}"


def _minutes(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "?"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


RUNNING = "running, or ended without a word"
"""The exit reason until there is one."""


def write_summary(folder: Path, summary: Mapping[str, Any]) -> None:
    """summary.json of a run, whole at any moment; numbers that JSON does not have become null."""
    clean = {key: _finite(value) if isinstance(value, float) else value for key, value in summary.items()}
    unfinished = folder / f".summary.{os.getpid()}"
    unfinished.write_text(json.dumps(clean, indent=2, allow_nan=False) + "\n")
    unfinished.replace(folder / "summary.json")


def write_failure(folder: Path, summary: Mapping[str, Any], *, final: bool = False) -> None:
    """Bring summary.json up to date after a failure; fields that `summary` lacks stay.

    Args:
        summary: at least `exit_reason`.
        final: replace a reason that is there already. By default it stays: the first rank to say one is the nearest
            to the cause.
    """
    path = folder / "summary.json"
    before = json.loads(path.read_text()) if path.exists() else {"exit_reason": RUNNING}
    known = not final and before["exit_reason"] != RUNNING
    write_summary(folder, {**before, **summary, **({"exit_reason": before["exit_reason"]} if known else {})})


def _finite(value: float | int | None) -> float | int | None:
    return value if value is None or math.isfinite(value) else None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
