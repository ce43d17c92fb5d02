"""The comparison of a sweep's jobs, written after each job: sweep.html for people and sweep.csv for programs.

Everything is read from the folders of the jobs, so jobs may run in any order, in other processes and on other machines
that share the disk. Jobs that are still running or were killed are included.
"""

import csv
import fcntl
import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import zero.tracker.report.chart as chart
import zero.tracker.report.svg as svg
from zero.platform.run_files import publish, writing
from zero.tracker.report.bars import Bar, BarPart, bars
from zero.tracker.report.chart import Panel, Series
from zero.tracker.report.folder import Status, read_run
from zero.tracker.report.jobs import (
    FIGURES,
    Job,
    best_of,
    comparison,
    counts,
    differing,
    equal_losses,
    jobs_in,
    table_of,
)
from zero.tracker.report.page import (
    PILLS,
    Html,
    by_window,
    code,
    figure,
    page,
    pill,
    section,
    side_by_side,
    table,
    with_bar,
)
from zero.tracker.report.scale import UNKNOWN, finite_values, loss_scale_of, number_text, seconds, size
from zero.tracker.report.svg import escape

PALETTE = {"finished": "blue", "failed": "rose", "stopped": "amber", "running": "amber"}


class Sweep(NamedTuple):
    """Results of a sweep: jobs sorted by name, override keys that differ between them, best job, path of the page."""

    jobs: tuple[Job, ...]
    keys: Sequence[str]
    best: Job | None
    page: Path

    @property
    def failed(self) -> tuple[Job, ...]:
        """Jobs that failed."""
        return tuple(job for job in self.jobs if job.status == "failed")


def write_sweep(folder: Path) -> Sweep:
    """Write sweep.csv and sweep.html of the sweep in `folder`, which contains the jobs' folders; return the results.

    Raises:
        MachineError: a file cannot be written.
    """
    with _alone(folder):
        runs = [read_run(job) for job in jobs_in(folder)]
        jobs = table_of(folder, runs)
        keys, best = differing(jobs), best_of(jobs)
        publish(folder / "sweep.csv", spreadsheet(jobs, keys, best))
        publish(folder / "sweep.html", html(folder, jobs, keys, best))
    return Sweep(jobs, keys, best, folder / "sweep.html")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a file lock on the sweep, because jobs may end at once and the last one must write the last table."""
    path = folder / ".sweep.lock"
    with writing(path):
        lock = path.open("a")
    with lock:
        with suppress(OSError):  # some network disks have no locks; then the last table may lack a job
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


HEAD = {
    "steps_done": "steps done",
    "train_loss": "train loss",
    "val_loss": "val loss",
    "tokens_per_s": "tokens/s",
    "speed": "speed",
    "step_s": "step",
    "device_peak_bytes": "device peak",
    "host_peak_bytes": "host peak",
}


def _written(field: str, value: float | None) -> str:
    """Format a value of the table, with its unit."""
    if value is None:
        return UNKNOWN
    if field.endswith("_loss"):
        return loss_scale_of(value)
    if field.endswith("_bytes"):
        return size(value)
    if field == "speed":
        return f"{value:.2f} x"
    return seconds(value) if field == "step_s" else number_text(value, 9 if field == "steps_done" else 4)


def _measured(jobs: Sequence[Job]) -> list[str]:
    """Return the names in `FIGURES` that at least one job has a value for."""
    return [field for field in FIGURES if any(getattr(job, field) is not None for job in jobs)]


# As plain text, as CSV, as HTML


FIRST_FIGURES = ("val_loss", "tokens_per_s", "step_s", "host_peak_bytes")

ANY_COLUMNS = 10_000


def plain(sweep: Sweep, columns: int = ANY_COLUMNS) -> str:
    """Return a table for a terminal: the overrides that differ between jobs, and as many figures as fit `columns`.

    A sentence below it says which jobs have equal losses.
    """
    fields = [field for field in FIRST_FIGURES if field in _measured(sweep.jobs)]
    table = _plain(sweep, fields)
    while fields and max(map(len, table.splitlines())) > columns:
        table = _plain(sweep, fields := fields[:-1])
    return "\n\n".join(filter(None, [table, textwrap.fill(comparison(sweep.jobs), columns)]))


def _plain(sweep: Sweep, fields: Sequence[str]) -> str:
    rows = [["run", *sweep.keys, *(HEAD[field] for field in fields), ""]]
    for job in sweep.jobs:
        note = "best" if job is sweep.best else "" if job.status == "finished" else job.status
        figures = (_written(field, getattr(job, field)) for field in fields)
        rows.append([job.name, *(job.overrides.get(key, "") for key in sweep.keys), *figures, note])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust] * (1 + len(sweep.keys)) + [str.rjust] * len(fields) + [str.ljust]
    return "\n".join(
        "  ".join(pad(text, width) for pad, text, width in zip(pads, row, widths, strict=True)).rstrip() for row in rows
    )


def spreadsheet(jobs: Sequence[Job], keys: Sequence[str], best: Job | None) -> str:
    """Return the table as CSV, with unrounded values in bytes, seconds and ratios."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["job", *keys, "status", "best", *FIGURES, "cause"])
    for job in jobs:
        figures = [_exact(field, getattr(job, field)) for field in FIGURES]
        values = [job.overrides.get(key, "").replace("\r", " ") for key in keys]  # csv.writer does not quote \r
        rows.writerow([job.name, *values, job.status, int(job is best), *figures, job.cause])
    return text.getvalue()


def _exact(field: str, value: float | None) -> float | None:
    return int(value) if value is not None and field.endswith(("_bytes", "_done")) else value


def html(folder: Path, jobs: Sequence[Job], keys: Sequence[str], best: Job | None) -> str:
    """Return the text of sweep.html."""
    shared = [f"{key}={value}" for key, value in (jobs[0].overrides.items() if jobs else ()) if key not in keys]
    states = {job.status for job in jobs}
    state: Status = next((status for status in ("running", "failed", "stopped") if status in states), "finished")
    same = _same_for_all(jobs)
    values = [f"{HEAD[field]} {_written(field, getattr(jobs[0], field))}" for field in same]
    note = " ".join([
        *([f"All with {' '.join(shared)}."] if shared else []),
        *([comparison(jobs)] if comparison(jobs) else []),
        *([f"Each: {', '.join(values)}."] if same else []),
    ])  # fmt: skip
    return page(
        " x ".join(keys) or "A sweep",
        kicker="sweep · " + "/".join(folder.absolute().parts[-2:]),
        status=pill(counts(jobs), PILLS[state]),
        parts=[
            section("Jobs", _rows(folder, jobs, keys, best, same), note=note),
            section("Speed and memory", _speed_and_memory(jobs, keys)),
            section("Loss", _losses(jobs, keys, best), _against(jobs, keys)),
            section("What went wrong", _causes(jobs, keys)),
        ],
    )


def _same_for_all(jobs: Sequence[Job]) -> list[str]:
    """Return the figures of training in which no job differs, if the losses of all are equal to the bit."""
    if [len(group) for group in equal_losses(jobs)] != [len(jobs)] or len(jobs) < 2:
        return []
    return [field for field in _measured(jobs) if field in ("steps_done", "train_loss", "val_loss")]


def _rows(folder: Path, jobs: Sequence[Job], keys: Sequence[str], best: Job | None, same: Sequence[str]) -> Html:
    """Return the table of jobs.

    Args:
        same: figures without a column.
    """
    fields = [field for field in _measured(jobs) if field not in same]
    first = "fastest" if same else "best"
    largest = {field: max((getattr(job, field) or 0.0) for job in jobs) for field in fields}
    rows = [
        [
            _link(folder, job),
            *(code(job.overrides.get(key, "")) for key in keys),
            pill(first if job is best else job.status, PILLS[job.status])
            if job is best or job.status != "finished"
            else "",
            *(_with_bar(field, getattr(job, field), largest[field]) for field in fields),
        ]
        for job in jobs
    ]
    right = range(2 + len(keys), 2 + len(keys) + len(fields))
    marked = {place: "best" for place, job in enumerate(jobs) if job is best}
    head = ["job", *keys, "", *(HEAD[field] for field in fields)]
    return table(head, rows, numbers=right, marked=marked)


def _link(folder: Path, job: Job) -> Html:
    report = f"{job.name}/report.html"
    name = escape(job.name).replace("/", "/<wbr/>").replace(",", ",<wbr/>")
    return Html(f'<a href="{quote(report)}">{name}</a>') if (folder / report).exists() else Html(name)


def _with_bar(field: str, value: float | None, largest: float) -> str:
    text = _written(field, value)
    colours = {"tokens_per_s": "blue", "device_peak_bytes": "purple", "host_peak_bytes": "amber"}
    return with_bar(text, value / largest, colours[field]) if value and largest and field in colours else text


def _causes(jobs: Sequence[Job], keys: Sequence[str]) -> Html:
    rows = [(job.name, _choice(job, keys), job.cause) for job in jobs if job.cause]
    return table(["job", "overrides", "cause"], rows) if rows else Html()


def _speed_and_memory(jobs: Sequence[Job], keys: Sequence[str]) -> Html:
    """Return charts of speed and memory, if some jobs differ in nothing else."""
    if not comparison(jobs):
        return Html()
    figures = []
    for field, colour in (("tokens_per_s", "blue"), ("device_peak_bytes", "purple"), ("host_peak_bytes", "amber")):
        write = size if field.endswith("_bytes") else number_text
        rows = [
            Bar(_label([job], keys), [BarPart(HEAD[field], value, colour)])
            for job in jobs
            if (value := getattr(job, field)) is not None
        ]
        if rows:
            title = f"{HEAD[field].capitalize()} of each job"
            figures.append(figure(bars(rows, title=title, write=write), title, " · ".join(map(_last_word, keys))))
    return side_by_side(*figures)


def _losses(jobs: Sequence[Job], keys: Sequence[str], best: Job | None) -> Html:
    """Return a small chart of the training loss for each job; one for all jobs with the same losses to the bit."""
    groups = equal_losses(jobs)
    groups += [[job] for job in jobs if not any(job in group for group in groups)]
    points = {id(group): [(step, loss) for step, loss, _ in group[0].losses] for group in groups}
    values = [value for line in points.values() for _, raw in line if (value := finite_values(raw)) is not None]
    if not values:
        return Html()
    if len(groups) == 1 < len(jobs):
        return _loss_of_all(groups[0][0])
    panels = [
        Panel(
            _label(group, keys),
            points[id(group)],
            "green" if best in group else PALETTE[group[0].status],
            _written("val_loss", group[0].val_loss) if group[0].status == "finished" else group[0].status,
        )
        for group in sorted(groups, key=lambda group: jobs.index(group[0]))
    ]
    log = min(values) > 0 and max(values) > 20 * min(values)
    drawn = (
        chart.multiples(panels, title="training loss", log=log, width=width) for width in (2 * svg.WIDTH, svg.NARROW)
    )
    names = " · ".join(map(_last_word, keys))
    note = f"{names}; grey: the others; right: validation loss"
    return figure(by_window(*drawn), "Training loss of each job", note)


def _loss_of_all(job: Job) -> Html:
    """Return a chart of the losses of jobs that have the same losses as `job`."""
    validation = [(step, value) for step, _, value in job.losses if value is not None]
    series = [
        Series("training", [(step, loss) for step, loss, _ in job.losses]),
        Series("validation", validation, "amber"),
    ]
    drawn = (
        chart.lines(series, title="loss of all jobs", width=width, height=height)
        for width, height in ((2 * svg.WIDTH, 280), (svg.NARROW, 236))
    )
    return figure(by_window(*drawn), "Loss of all jobs", "nats per token")


def _label(group: Sequence[Job], keys: Sequence[str]) -> str:
    """Return the values of the overrides that differ, such as "1e-3 · 0, 3" for two jobs."""
    having = [key for key in keys if any(key in job.overrides for job in group)]
    values = [dict.fromkeys(job.overrides[key] for job in group if key in job.overrides) for key in having]
    return " · ".join(map(", ".join, values)) or f"job {', '.join(job.name for job in group)}"


def _choice(job: Job, keys: Sequence[str]) -> str:
    """Return the overrides of a job under `keys` as text, such as `stage=3 offload=nvme`."""
    return " ".join(f"{_last_word(key)}={job.overrides[key]}" for key in keys if key in job.overrides)


def _last_word(key: str) -> str:
    return key.rpartition(".")[-1]


def _against(jobs: Sequence[Job], keys: Sequence[str]) -> Html:
    """Return a chart of the validation loss against each override that has three or more different numbers."""
    figures = []
    if len(equal_losses(jobs)) < 2:
        return Html()
    for key in keys:
        points = [
            (value, job.val_loss)
            for job in jobs
            if job.val_loss is not None and job.status == "finished" and (value := _as_number(job, key)) is not None
        ]
        known = [value for value, _ in points]
        if len(set(known)) >= 3:
            log_x = min(known) > 0 and max(known) >= 10 * min(known)
            series = [Series(key, points, "green", "dots")]
            drawn = chart.lines(series, title=f"validation loss against {key}", x_name=key, log_x=log_x)
            figures.append(figure(drawn, f"Validation loss against {key}"))
    return side_by_side(*figures)


def _as_number(job: Job, key: str) -> float | None:
    try:
        return finite_values(float(job.overrides.get(key, "")))
    except ValueError:
        return None
