"""The comparison of a sweep's jobs, written after each job: sweep.html for people and sweep.csv for programs.

Everything is read from the folders of the jobs, so jobs may run in any order, in other processes and on other machines
that share the disk. Jobs that are still running or were killed are included.
"""

import csv
import fcntl
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import zero.tracker.report.chart as chart
from zero.platform.run_files import publish, writing
from zero.tracker.report.chart import Panel, Series
from zero.tracker.report.folder import RecordedRun, Status, read_run
from zero.tracker.report.jobs import FIGURES, Job, best_of, counts, differing, jobs_in, table_of
from zero.tracker.report.page import PILLS, Html, code, figure, page, pill, section, side_by_side, table, with_bar
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
        publish(folder / "sweep.html", html(folder, runs, jobs, keys, best))
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
    """Return a table for a terminal: the overrides that differ between jobs, and as many figures as fit `columns`."""
    fields = [field for field in FIRST_FIGURES if field in _measured(sweep.jobs)]
    table = _plain(sweep, fields)
    while fields and max(map(len, table.splitlines())) > columns:
        table = _plain(sweep, fields := fields[:-1])
    return table


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


def html(folder: Path, runs: Sequence[RecordedRun], jobs: Sequence[Job], keys: Sequence[str], best: Job | None) -> str:
    """Return the text of sweep.html."""
    shared = [f"{key}={value}" for key, value in (jobs[0].overrides.items() if jobs else ()) if key not in keys]
    states = {job.status for job in jobs}
    state: Status = next((status for status in ("running", "failed", "stopped") if status in states), "finished")
    note = f"All with {' '.join(shared)}." if shared else ""
    return page(
        " x ".join(keys) or "A sweep",
        kicker="sweep · " + "/".join(folder.absolute().parts[-2:]),
        status=pill(counts(jobs), PILLS[state]),
        parts=[
            section("Jobs", _rows(folder, jobs, keys, best), note=note),
            section("Loss", _losses(runs, jobs, keys, best), _against(jobs, keys)),
            section("What went wrong", _causes(jobs, keys)),
        ],
    )


def _rows(folder: Path, jobs: Sequence[Job], keys: Sequence[str], best: Job | None) -> Html:
    fields = _measured(jobs)
    largest = {field: max((getattr(job, field) or 0.0) for job in jobs) for field in fields}
    rows = [
        [
            _link(folder, job),
            *(code(job.overrides.get(key, "")) for key in keys),
            pill("best" if job is best else job.status, PILLS[job.status]),
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


def _losses(runs: Sequence[RecordedRun], jobs: Sequence[Job], keys: Sequence[str], best: Job | None) -> Html:
    """Return a small chart of the training loss for each job."""
    values = [value for run in runs for _, raw in run.points("train/loss") if (value := finite_values(raw)) is not None]
    if not values:
        return Html()
    panels = [
        Panel(
            " · ".join(job.overrides[key] for key in keys if key in job.overrides) or f"job {job.name}",
            run.points("train/loss"),
            "green" if job is best else PALETTE[job.status],
            _written("val_loss", job.val_loss) if job.status == "finished" else job.status,
        )
        for run, job in zip(runs, jobs, strict=True)
    ]
    log = min(values) > 0 and max(values) > 20 * min(values)
    drawn = chart.multiples(panels, title="training loss", log=log)
    names = " · ".join(map(_last_word, keys))
    return figure(drawn, "Training loss of each job", f"{names}; grey: the others; right: validation loss")


def _choice(job: Job, keys: Sequence[str]) -> str:
    """Return the overrides of a job under `keys` as text, such as `stage=3 offload=nvme`."""
    return " ".join(f"{_last_word(key)}={job.overrides[key]}" for key in keys if key in job.overrides)


def _last_word(key: str) -> str:
    return key.rpartition(".")[-1]


def _against(jobs: Sequence[Job], keys: Sequence[str]) -> Html:
    """Return a chart of the validation loss against each override that has three or more different numbers."""
    figures = []
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
