"""The page report.html of a run: results, plan, losses, speed, memory, settings, and the timeline of one step.

The page is made only from the run's files, so it can be made again at any time, also for a run that failed or is still
running.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import zero.tracker.report.chart as chart
from zero.core import suggest
from zero.core.schema import flat_fields
from zero.platform.run_files import publish
from zero.tracker.report.chart import Series
from zero.tracker.report.folder import RecordedRun, read_run
from zero.tracker.report.origin import Defaults, origin_section, settings_section
from zero.tracker.report.page import (
    PILLS,
    Fact,
    Html,
    facts,
    figure,
    links,
    page,
    pill,
    section,
    side_by_side,
    verbatim,
)
from zero.tracker.report.plan import per_step, plan_section
from zero.tracker.report.scale import count, finite_values, loss_scale_of, number_text, percent, seconds, size
from zero.tracker.report.step import step_section
from zero.tracker.report.svg import escape
from zero.tracker.report.texts import data_section, sample_section
from zero.tracker.views.view import ROW

THIRD: Mapping[str, Any] = {"width": 368.0}
LOW: Mapping[str, Any] = {"width": 470.0, "height": 172.0}
"""Sizes of a chart beside two others (THIRD), and of a chart that is stacked with others (LOW)."""

SMOOTHED = 40
"""Number of rows from which the training loss is smoothed, over about a twentieth of them."""

TITLE = 70
"""The most characters of the overrides in a page's title."""

FILES = ("config.yaml", "metrics.jsonl", "summary.json", "trace.json", "ranks/0.log")


def write_run(folder: Path, defaults: Defaults | None = None) -> Path:
    """Write report.html of the run in `folder` and return its path.

    Args:
        defaults: the page shows only settings of a run of train.py that differ from these; None: it shows all.
    """
    path = folder / "report.html"
    publish(path, report(read_run(folder), defaults))
    return path


def report(run: RecordedRun, defaults: Defaults | None = None) -> str:
    """Return the text of report.html; `defaults` as for `write_run`."""
    title = _title(run.overrides) if run.overrides else "the default run" if run.overrides == [] else run.folder.name
    settings = partial(settings_section, defaults=defaults(run.config) if defaults else {})
    parts = (
        _headline,
        _learning,
        plan_section,
        _speed,
        _placement,
        _offload,
        step_section,
        data_section,
        sample_section,
        origin_section,
        settings,
        _footer,
    )
    return page(
        title,
        kicker=" · ".join([*_summary(run), "/".join(run.folder.absolute().parts[-2:])]),
        status=pill(run.status, PILLS[run.status]),
        parts=[part(run) for part in parts],
    )


def _title(overrides: Sequence[str]) -> str:
    """Return the overrides that fit in a line, options first; the section "This run" has all of them."""
    words = [suggest.shown(word) for word in sorted(overrides, key=lambda word: "." in word.partition("=")[0])]
    count = max(1, sum(end <= TITLE for end in accumulate(len(word) + 1 for word in words)))
    more = f" and {len(words) - count} more" if count < len(words) else ""
    return " ".join(words[:count]) + more


def _summary(run: RecordedRun) -> list[str]:
    """Return phrases with the model's size, stage, precision and number of ranks."""
    settings, ranks = flat_fields(run.config), finite_values(run.summary.get("ranks"))
    numel, trained = (finite_values(run.summary.get(f"{which}_numel")) for which in ("parameters", "trainable"))
    adapts = f"trains {count(trained)} of " if numel and trained and trained < numel else ""
    return [
        *([f"{adapts}{count(numel)} parameters"] if numel else []),
        *([f"stage {stage}"] if (stage := settings.get("zero.stage", run.loop.get("stage"))) is not None else []),
        *([str(compute)] if (compute := settings.get("precision.compute", run.loop.get("precision"))) else []),
        *([f"{ranks:.0f} rank{'s' * (ranks != 1)}"] if ranks else []),
    ]


def _headline(run: RecordedRun) -> Html:
    reason = verbatim(run.reason.replace(f"{run.folder.absolute()}/", ""), PILLS[run.status])
    best = finite_values(run.summary.get("best_val_loss"))
    steps, of = run.final("steps", "step"), finite_values(run.config.get("steps", run.loop.get("steps")))
    skipped = finite_values(run.summary.get("skipped")) or 0
    device, host = (run.final(f"{tier}_peak_bytes", f"memory/{tier}_peak_bytes") for tier in ("device", "host"))
    done = run.final(run.unit, run.unit)
    of_steps = f"of {number_text(of, 9)}" * (of is not None) + (f", {skipped:.0f} skipped" if skipped else "")
    shown = [
        Fact(
            "Validation loss",
            loss_scale_of(run.final("val_loss", "val/loss")),
            f"best {loss_scale_of(best)}" if best else "",
        ),
        Fact("Training loss", loss_scale_of(run.final("train_loss", "train/loss")), "of the last step"),
        Fact("Steps", number_text(steps, 9), of_steps),
        Fact("Time", seconds(run.summary.get("seconds")), f"{count(done)} {run.unit}" if done else ""),
        Fact(f"{run.unit.capitalize()} per second", number_text(run.typical(f"speed/{run.unit}_per_s")), "median"),
        Fact("Step", seconds(run.typical("speed/step_s")), "median"),
        Fact("MFU", percent(run.typical("speed/mfu")), "median"),
        *([Fact("Device peak", size(device), "allocated")] if device else []),
        Fact("Host peak", size(host), "whole process"),
    ]
    heading = "How it ended" if run.status != "running" else "So far"
    return section(heading, *([] if run.status == "finished" else [reason]), facts(shown))


# Losses, a sample of text, speed and memory


def _learning(run: RecordedRun) -> Html:
    if not run.rows:
        return Html()
    norms = [value for _, raw in run.points("train/grad_norm") if (value := finite_values(raw)) and value > 0]
    wide = bool(norms) and max(norms) > 30 * min(norms)
    validation = [(at, value) for at, value in run.points("val/loss") if finite_values(value) is not None]
    losses = [*_training(run.points("train/loss")), Series("validation", validation, "amber")]
    scales = len({row.get("train/loss_scale") for row in run.rows}) > 1
    return section(
        "Learning",
        side_by_side(
            _chart("Loss", losses, "nats per token" * (run.unit == "tokens"), height=330),
            _line(run, "Learning rate", "train/lr", "teal", from_zero=True, **LOW),
            _line(run, "Gradient norm", "train/grad_norm", "purple", "before clipping", log=wide, **LOW),
            _line(run, "Loss scale", "train/loss_scale", "slate", log=True, **LOW) if scales else Html(),
            layout="lead",
        ),
        side_by_side(*_others(run), layout="three"),
    )


def _training(points: Sequence[chart.Point]) -> list[Series]:
    """Return the line of the training loss; one of many rows smoothed, with the rows pale behind it."""
    if len(points) < SMOOTHED:
        return [Series("training", points)]
    reach = max(2, len(points) // SMOOTHED)
    means = Series(f"training, mean of {2 * reach + 1} rows", chart.smoothed(points, reach))
    return [means, Series("each row", points, style="pale")]


def _others(run: RecordedRun) -> list[Html]:
    """Return a chart for each metric that the user of `zero.track` logged beside the loss."""
    keys = dict.fromkeys(
        key for row in run.rows for key in row if key.startswith(("train/", "val/")) and key not in ROW
    )
    by_name: dict[str, list[Series]] = {}
    for key in keys:
        part, _, name = key.partition("/")
        points = [(at, value) for at, value in run.points(key) if finite_values(value) is not None]
        colour = "blue" if part == "train" else "amber"
        by_name.setdefault(name, []).append(Series("training" if part == "train" else "validation", points, colour))
    return [_chart(name, series, **THIRD) for name, series in by_name.items()]


def _speed(run: RecordedRun) -> Html:
    if not run.rows:
        return Html()
    waits = run.measured("comm/wait_s") and run.summary.get("ranks") != 1
    times = [
        Series("whole step", run.points("speed/step_s")),
        *([Series("waiting for the store", run.points("offload/wait_s"), "rose")] if _moves(run) else []),
        *([Series("for other ranks", run.points("comm/wait_s"), "green")] if waits else []),
    ]
    peaks = [
        Series(tier, run.points(key), colour)
        for tier, key, colour in (
            ("device", "memory/device_peak_bytes", "purple"),
            ("host", "memory/host_peak_bytes", "amber"),
            ("nvme", "memory/nvme_bytes", "teal"),
        )
        if run.measured(key)
    ]
    tiers = f"most so far; {', '.join(peak.name for peak in peaks)}"
    return section(
        "Speed and memory",
        facts(_slowest(run)),
        side_by_side(
            _line(
                run, f"{run.unit.capitalize()} per second", f"speed/{run.unit}_per_s", "blue", from_zero=True, **THIRD
            )
            if run.unit
            else Html(),
            _chart("A step", times, "seconds", title="seconds of a step", from_zero=True, **THIRD),
            _chart("Memory by tier", peaks, tiers, title="memory peaks", binary=True, **THIRD),
            layout="three",
        ),
    )


def _placement(run: RecordedRun) -> Html:
    """Return the section about moves of the state between tiers; empty if it has not moved."""
    lines = run.summary.get("moves")
    if not isinstance(lines, list) or not lines:
        return Html()
    colours = {"device": "purple", "host": "amber", "nvme": "teal"}
    tiers = [Series(tier, run.points(f"memory/{tier}_bytes"), colour) for tier, colour in colours.items()]
    moved = run.points("offload/moved_bytes")
    return section(
        "Moves of the state",
        verbatim("\n".join(map(str, lines))),
        side_by_side(
            _chart("State by tier", tiers, "planned bytes of a rank", title="bytes by tier", binary=True, **LOW),
            _chart("Moved", [Series("moved", moved, "rose")], "bytes of a rank", title="moved", binary=True, **LOW),
        ),
    )


def _slowest(run: RecordedRun) -> list[Fact]:
    """Return a fact about the slowest rank, which waited least in most rows: how much longer other ranks waited."""
    ranks = finite_values(run.summary.get("ranks"))
    keys = ("comm/slowest_rank", "comm/slowest_s", "comm/wait_s", "speed/step_s")
    numbers = [[finite_values(row.get(key)) for key in keys] for row in run.rows]
    timed = [[value for value in row if value is not None] for row in numbers if None not in row]
    if (ranks is not None and ranks < 2) or not timed:
        return []
    slowest, count = Counter(row[0] for row in timed).most_common(1)[0]
    longer_s = [longest_s - (step_s - worked_s) for rank, worked_s, longest_s, step_s in timed if rank == slowest]
    waited = seconds(max(0.0, median(longer_s)))
    note = f"in {count} of {len(timed)} rows. Other ranks waited up to {waited} longer in a step (median)."
    return [Fact("Slowest", f"rank {number_text(slowest, 9)}", note)]


def _moves(run: RecordedRun) -> bool:
    """Return whether the run read or wrote offloaded state."""
    return run.measured("offload/read_bytes") or run.measured("offload/write_bytes")


def _offload(run: RecordedRun) -> Html:
    if not _moves(run):
        return Html()
    ways = ("read", "read", "teal"), ("written", "write", "rose")
    moved, rates = (
        [Series(name, points(f"offload/{key}_{unit}"), colour) for name, key, colour in ways]
        for unit, points in (("bytes", partial(per_step, run)), ("gbps", run.points))
    )
    written = finite_values(run.summary.get("offload_written_bytes"))
    shown = [
        Fact("Hidden", percent(run.typical("speed/hidden_fraction")), "of the transfers' time; median"),
        Fact("Waiting", seconds(run.typical("offload/wait_s")), "per step, slowest rank; median"),
        Fact("Moved", f"{number_text(run.typical('offload/bytes_per_param'), 3)} B", "per parameter and step; median"),
        *([Fact("Written", size(written), "by all ranks")] if written else []),
    ]
    return section(
        "Offload",
        facts(shown),
        side_by_side(
            _chart("Moved per step", moved, "bytes of all ranks", title="bytes per step", binary=True),
            _chart("Rate while something moves", rates, "10⁹ bytes a second", title="rates", from_zero=True),
        ),
        note=str(run.summary.get("endurance") or ""),
    )


def _chart(caption: str, series: Sequence[Series], note: str = "", *, title: str = "", **axes: Any) -> Html:
    """Return a chart of `series` with its caption above; `axes` are passed to `chart.lines`."""
    return figure(chart.lines(series, title=title or caption.lower(), **axes), caption, note)


def _line(run: RecordedRun, caption: str, key: str, colour: str, note: str = "", **axes: Any) -> Html:
    """Return a chart of the values of `key`."""
    return _chart(caption, [Series(caption.lower(), run.points(key), colour)], note, **axes)


def _footer(run: RecordedRun) -> Html:
    unread = f"<p>{escape('; '.join(run.unread))}.</p>" if run.unread else ""
    return Html(f"<footer>{unread}<p>{links(run.folder, FILES)}</p></footer>")
