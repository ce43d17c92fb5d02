"""The console output of a run: a progress bar on a terminal, a line per row of metrics in a pipe.

The bar and the newest row stay at the end of the terminal until the last step, in two lines if one is too short. Before
the first row they say what the run waits for. The progress of a long operation, such as a save, is shown above. Text
that follows the last step is printed below.
"""

import math
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from zero.platform.rich import Console, Group, Live, ProgressBar, RenderableType, Table, Text
from zero.tracker.views.view import ROW, Row, View

PIPE_COLUMNS = 120
"""Width of a line in a pipe or a file."""

FIRST_S, AGAIN_S = 5.0, 10.0
"""Seconds until the first progress line of a long operation in a pipe, and between two such lines."""

SPARE_COLUMNS = 3
"""Columns left free at the end of a line on a terminal, so that an echoed ^C does not wrap it."""

BAR_COLUMNS = 14
"""Width of the smallest bar, with the gap after it."""

SHOWN_S = 0.3
"""Seconds after which the progress of a long operation is shown on a terminal."""

MonotonicClock = Callable[[], float]


class Word(NamedTuple):
    """A piece of the console's line. If the line is too long, words with the highest `rank` are left out first."""

    text: str
    rank: int


class Lines(View):
    """A view that prints a plain line per row, for pipes, files, and loops whose number of steps is unknown.

    Args:
        steps: number of steps of the whole run; None: unknown.
    """

    def __init__(self, steps: int | None, stream: TextIO, clock: MonotonicClock = time.monotonic) -> None:
        self._of, self._stream = "", stream
        self._left: _Left | None = None
        self._console = Console(file=stream)
        self._work, self._clock = _Work(clock), clock
        self._said_s: float | None = None
        if steps is not None:
            self.expect(steps)

    def expect(self, steps: int) -> None:
        self._of, self._left = f"/{steps}", _Left(steps, self._clock)

    def log(self, row: Row) -> None:
        step = Word(f"step {row['step']}{self._of}", 0)
        left = [] if self._left is None else [self._left.after(row)]
        columns = self._console.width if self._stream.isatty() else PIPE_COLUMNS
        print(fit([step, *column_words(row), *left], columns), file=self._stream, flush=True)

    def note(self, text: str) -> None:
        shown = at_spaces(text, self._console.width) if self._stream.isatty() else text
        print(shown, file=self._stream, flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        if self._work.goes_on(what, done, total):
            self._said_s = None
        now_s, begun_s = self._clock(), self._work.begun_s
        due_s = begun_s + FIRST_S if self._said_s is None else self._said_s + AGAIN_S
        if done >= total and self._said_s is not None:
            self.note(f"{what}: done in {minutes(now_s - begun_s)}")
        elif done < total and now_s >= due_s:
            self.note(f"{what}: {self._work.share:.0%}, {minutes(self._work.left_s)} left")
            self._said_s = now_s

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._stream.flush()


class BarView(View):
    """A view that shows a progress bar and the newest row, for terminals."""

    def __init__(self, steps: int, stream: TextIO, clock: MonotonicClock = time.monotonic) -> None:
        self._step, self._clock, self._over = 0, clock, False
        self._work = _Work(clock)
        self.expect(steps)
        self._words: list[Word] = []
        self.waiting("the model")
        self._val: float | int | None = None
        self._console = Console(file=stream)
        # stderr is redirected because text printed there would break the line, unless it is a rank's log file
        self._live = Live(
            console=self._console,
            get_renderable=self._drawn,
            refresh_per_second=4,
            redirect_stderr=stream.isatty() and sys.stderr.isatty(),
        )
        self._live.start(refresh=True)  # else a first note and its thread could both draw a first line

    def expect(self, steps: int) -> None:
        self._steps, self._left = steps, _Left(steps, self._clock)

    def waiting(self, what: str) -> None:
        self._waits_for, self._waits_since_s = what, self._clock()

    def log(self, row: Row) -> None:
        self._left.after(row)
        self._step, self._val = int(row["step"] or 0), row.get("val/loss") or self._val
        self._words = column_words({**row, "val/loss": self._val})
        if self._step >= self._steps:
            self._over = True
            self._live.refresh()  # clears the live line, which is then printed permanently
            self._console.print(Group(*self._newest(self._console.width - SPARE_COLUMNS)))

    def note(self, text: str) -> None:
        self._console.print(at_spaces(text, self._console.width), markup=False, highlight=False, soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        self._work.goes_on(what, done, total)

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        self._work.end()
        self._over = self._over or not self._words  # no row was logged, as with mode=eval
        self._live.stop()

    def _drawn(self) -> RenderableType:
        work, columns = self._work, max(1, self._console.width - SPARE_COLUMNS)
        lines: list[RenderableType] = [] if self._over else self._newest(columns)
        if work.is_under_way and self._clock() - work.begun_s >= SHOWN_S:
            left = [Word(f"{work.share:.0%}", 0), Word(f"{minutes(work.left_s)} left", 0)]
            lines.insert(0, _line(work.what, work.share, left, columns, BAR_COLUMNS))
        return Group(*lines)

    def _newest(self, columns: int) -> list[RenderableType]:
        """Return the line with the bar, and a line with the row's values if the first has no room for them."""
        step, share = f"step {self._step}/{self._steps}", self._step / self._steps
        if not self._words:
            waits = [Word(f"waits for {self._waits_for}", 0), Word(minutes(self._clock() - self._waits_since_s), 1)]
            return [_line(step, share, waits, columns, BAR_COLUMNS if columns >= 56 else 0)]
        words = [*self._words, self._left.word]
        if len(" ".join(word.text for word in words)) <= columns - len(step) - 2 - BAR_COLUMNS:
            return [_line(step, share, words, columns, BAR_COLUMNS)]
        is_speed = [word.rank == SPEED_RANK for word in self._words]
        beside = [word for word, speed in zip(self._words, is_speed, strict=True) if speed]
        below = [word for word, speed in zip(self._words, is_speed, strict=True) if not speed]
        bar = BAR_COLUMNS if columns >= 56 else 0
        return [_line(step, share, [*beside, self._left.word], columns, bar), _text(fit(below, columns))]


def column_words(row: Row) -> list[Word]:
    """Return the console's words for a row, in the order of printing; values that were not measured are left out."""
    shown = [Word(f"loss {_number(row.get('train/loss'))}", 1)] if row.get("step") else []
    for key, rank, text in _WORDS:
        value = row.get(key)
        if value is not None and (written := text(value)):
            shown.append(Word(written, rank))
    if row.get("speed/step_s") and not {"speed/tokens_per_s", "speed/samples_per_s"} & set(row):
        shown.append(Word(f"{row['speed/step_s']:.3g} s/step", SPEED_RANK))
    if row.get("train/skipped"):
        shown.append(Word(f"{row['train/skipped']} skipped", 2))
    shown += [Word(f"{key} {row[key]:.4g}", 5) for key in row if _is_extra(key) and row[key] is not None]
    memory = _memory(row)
    return [*shown, Word(memory, 10)] if memory else shown


def fit(words: Sequence[Word], columns: int) -> str:
    """Join words to a line of at most `columns` characters.

    If they do not fit, narrow the gaps, then leave out the words of the highest rank.
    """
    kept = list(words)
    while len(kept) > 1:
        for gap in ("  ", " "):
            line = gap.join(word.text for word in kept)
            if len(line) <= columns:
                return line
        kept.remove(max(kept, key=lambda word: word.rank))
    return kept[0].text[:columns] if kept else ""


def at_spaces(text: str, columns: int) -> str:
    """Break long lines at spaces, because a terminal would break them inside a number."""
    lines = [
        textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False) if len(line) > columns else line
        for line in text.split("\n")
    ]
    return "\n".join(lines)


SPEED_RANK = 4
"""The rank of the words that are beside the bar if a terminal needs two lines."""

_WORDS: tuple[tuple[str, int, Callable[[float], str]], ...] = (
    ("val/loss", 3, lambda value: f"val {_number(value)}"),
    ("train/grad_norm", 6, lambda value: f"norm {value:.3g}"),
    ("train/lr", 7, lambda value: f"lr {_exponent(value)}"),
    ("speed/tokens_per_s", SPEED_RANK, lambda value: f"{value:,.0f} tok/s"),
    ("speed/samples_per_s", SPEED_RANK, lambda value: f"{_short(value)} samples/s"),
    ("speed/mfu", 8, lambda value: f"mfu {value:.0%}"),
    ("speed/stall_fraction", 9, lambda value: f"stall {value:.0%}" if value >= 0.005 else ""),
)


def _is_extra(key: str) -> bool:
    """Return whether a key is a metric that the user added, such as val/accuracy."""
    return key.startswith(("train/", "val/")) and key not in ROW


class _Work:
    """The progress of a long operation, timed from its first report."""

    def __init__(self, clock: MonotonicClock) -> None:
        self._clock, self.begun_s = clock, 0.0
        self.what, self.done, self.total = "", 0, 0

    def goes_on(self, what: str, done: int, total: int) -> bool:
        """Store the reported progress; return whether a new operation has begun."""
        is_new = what != self.what or done < self.done or not self.is_under_way
        if is_new:
            self.begun_s, self._first = self._clock(), done
        self.what, self.done, self.total = what, done, total
        return is_new

    def end(self) -> None:
        self.done = self.total

    @property
    def is_under_way(self) -> bool:
        return self.done < self.total

    @property
    def share(self) -> float:
        return self.done / self.total

    @property
    def left_s(self) -> float | None:
        made = self.done - self._first
        return (self.total - self.done) * (self._clock() - self.begun_s) / made if made > 0 else None


class _Left:
    """Estimate of the time until the last step, by the speed since the first row, because earlier steps are slower."""

    def __init__(self, steps: int, clock: MonotonicClock) -> None:
        self._steps, self._clock, self._begun_s, self._over = steps, clock, clock(), False
        self._first: tuple[float, float] | None = None
        self._newest: tuple[float, float | None] = (clock(), None)

    def after(self, row: Row) -> Word:
        """Update the estimate by a row, and return its text."""
        step, now_s = float(row["step"] or 0), self._clock()
        left_s: float | None = (self._steps - step) * float(row.get("speed/step_s") or 0)
        if self._first is not None and step > self._first[0]:
            left_s = (self._steps - step) * (now_s - self._first[1]) / (step - self._first[0])
        has_recorded_step = row.get("speed/step_s") is None  # recording slows its step: measure from here
        if self._first is None or has_recorded_step:
            self._first = step, now_s
        self._newest, self._over = (now_s, left_s), step >= self._steps
        return self.word

    @property
    def word(self) -> Word:
        """The time left from now; after the last step, the time since the start."""
        at_s, left_s = self._newest
        if self._over:
            return Word(f"in {minutes(at_s - self._begun_s)}", 2)
        return Word(f"{minutes(None if left_s is None else max(0.0, left_s - (self._clock() - at_s)))} left", 2)


def _line(what: str, share: float, words: Sequence[Word], columns: int, bar_columns: int) -> Table:
    """Return a terminal line: `what`, a bar of at least `bar_columns` characters (0: none), and the words that fit."""
    text = _text(fit(words, columns - len(what) - 2 - bar_columns))
    cells: list[RenderableType] = [Text(what, no_wrap=True), text]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.width = columns
    grid.add_column(no_wrap=True)
    if bar_columns:
        cells.insert(1, ProgressBar(total=1.0, completed=share))
        grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    grid.add_row(*cells)
    return grid


def _text(line: str) -> Text:
    """Return a line whose names are dim."""
    text = Text(line, no_wrap=True)
    text.highlight_regex(r"(?<![\w.])[a-z/]+(?![\w.])", "dim")
    return text


def _memory(row: Row) -> str:
    tiers = ("gpu", "device_peak_bytes"), ("host", "host_peak_bytes"), ("disk", "nvme_bytes")
    held = {name: nbytes for name, key in tiers if (nbytes := row.get(f"memory/{key}"))}
    if not held:
        return ""
    unit, name = (2**30, "GiB") if max(held.values()) >= 2**30 else (2**20, "MiB")
    if list(held) == ["host"]:
        return f"memory {_short(held['host'] / unit)} {name}"
    return f"{'/'.join(held)} {'/'.join(_short(nbytes / unit) for nbytes in held.values())} {name}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.2g}"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f}"


def _exponent(value: float) -> str:
    """Format a number as 3.0e-4, without Python's leading zeros in the exponent; zero is 0."""
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def minutes(seconds: float | None) -> str:
    """Format a duration in seconds as 1:02:03 or 2:03; a question mark if it is unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
