"""The jobs of a sweep, found and read in its folder: their results, how they differ, and which is best."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zero.tracker.report.folder import RecordedRun, Status
from zero.tracker.report.page import PILLS
from zero.tracker.report.scale import finite_values


class Job(NamedTuple):
    """The results of a job. Losses are in nats per token, peaks the largest over ranks; None: not measured.

    `speed` is the job's tokens per second divided by those of the first finished job. `cause` is the reason why the job
    failed or was stopped, otherwise empty.
    """

    name: str
    overrides: dict[str, str]
    status: Status
    steps_done: float | None
    train_loss: float | None
    val_loss: float | None
    tokens_per_s: float | None
    speed: float | None
    step_s: float | None
    device_peak_bytes: float | None
    host_peak_bytes: float | None
    cause: str
    losses: tuple[tuple[float | None, ...], ...]
    """(step, training loss, validation loss) of each row, to compare jobs to the bit."""


FIGURES = Job._fields[3:-2]

MARKS_OF_A_RUN = {".hydra", "config.yaml", "summary.json"}
"""Files and folders by which the folder of a run is recognised, because `hydra.sweep.subdir` may give it any name."""


def jobs_in(folder: Path) -> list[Path]:
    """Return the jobs' folders at any depth below `folder`, sorted by name with 2 before 10.

    The list is empty if `folder` is itself the folder of a run.
    """
    jobs = []
    for place, folders, files in os.walk(folder):
        if MARKS_OF_A_RUN.intersection(folders + files):
            jobs.append(Path(place))
            folders.clear()  # a run contains no other run
    return sorted((path for path in jobs if path != folder), key=lambda path: _in_order(str(path)))


def _in_order(name: str) -> list[str | int]:
    """Return a sort key that orders the numbers in `name` by value."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def table_of(folder: Path, runs: Sequence[RecordedRun]) -> tuple[Job, ...]:
    """Return the results of each run of the sweep in `folder`."""
    jobs = [_job(folder, run) for run in runs]
    reference = next((job.tokens_per_s for job in jobs if job.status == "finished" and job.tokens_per_s), None)
    return tuple(
        job._replace(speed=job.tokens_per_s / reference) if reference and job.tokens_per_s else job for job in jobs
    )


def _job(folder: Path, run: RecordedRun) -> Job:
    device, host = (run.final(f"{tier}_peak_bytes", f"memory/{tier}_peak_bytes") for tier in ("device", "host"))
    return Job(
        name=run.folder.relative_to(folder).as_posix(),
        overrides=dict(map(_key_and_value, run.overrides or [])),
        status=run.status,
        steps_done=run.final("steps", "step"),
        train_loss=run.final("train_loss", "train/loss"),
        val_loss=run.final("val_loss", "val/loss"),
        tokens_per_s=run.typical("speed/tokens_per_s"),
        speed=None,
        step_s=run.typical("speed/step_s"),
        device_peak_bytes=device or None,
        host_peak_bytes=host or None,
        cause=_cause(folder, run),
        losses=tuple(
            tuple(finite_values(row.get(key)) for key in ("step", "train/loss", "val/loss")) for row in run.rows
        ),
    )


def _cause(folder: Path, run: RecordedRun) -> str:
    """Return why a job did not finish, on one line, with paths relative to the sweep."""
    if run.status not in ("failed", "stopped"):
        return ""
    return " ".join(run.reason.split()).replace(f"{folder.absolute()}/", "")


def _key_and_value(override: str) -> tuple[str, str]:
    """Return key and value of a Hydra override: `key=value`, `+key=value` or `~key`."""
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def differing(jobs: Sequence[Job]) -> list[str]:
    """Return the keys of overrides that differ between jobs, in the order of typing; all keys of a single job."""
    keys = list(dict.fromkeys(key for job in jobs for key in job.overrides))
    return [key for key in keys if len(jobs) == 1 or len({job.overrides.get(key) for job in jobs}) > 1]


def equal_losses(jobs: Sequence[Job]) -> list[list[Job]]:
    """Return the finished jobs that have a loss, in groups whose losses are equal to the bit.

    Compared are the losses at the end and in all rows. Groups are in the order of their first jobs.
    """
    groups: dict[object, list[Job]] = {}
    for job in jobs:
        if job.status == "finished" and job.losses and job.train_loss is not None:
            groups.setdefault((job.losses, job.train_loss, job.val_loss), []).append(job)
    return [*groups.values()]


def comparison(jobs: Sequence[Job]) -> str:
    """Return a sentence about jobs whose losses are equal to the bit; empty if there are none."""
    groups = [group for group in equal_losses(jobs) if len(group) > 1]
    if not groups:
        return ""
    if len(groups[0]) == len(jobs):
        return f"All {len(jobs)} jobs have the same losses to the bit, so they differ in speed and memory alone."
    names = ", ".join(" = ".join(job.name for job in group) for group in groups)
    return f"Jobs with the same losses to the bit, which differ in speed and memory alone: {names}."


def best_of(jobs: Sequence[Job]) -> Job | None:
    """Return the finished job with the lowest validation loss; of equal jobs the fastest, then the first."""
    known = [job for job in jobs if job.status == "finished" and job.val_loss is not None]
    return min(known, key=lambda job: (job.val_loss, -(job.tokens_per_s or 0.0)), default=None)


def counts(jobs: Sequence[Job]) -> str:
    """Return the numbers of jobs as text, such as `3 jobs: 2 finished, 1 failed`."""
    states = {status: sum(job.status == status for job in jobs) for status in PILLS}
    parts = ", ".join(f"{count} {status}" for status, count in states.items() if count)
    return f"{len(jobs)} job{'s' * (len(jobs) != 1)}" + (f": {parts}" if parts else "")
