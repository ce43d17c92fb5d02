"""The page report.html of a run: results, plan, losses, speed, memory, settings, and the timeline of one step.

The page is made only from the run's files, so it can be made again at any time, also for a run that failed or is still
running.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import zero.tracker.report.chart as chart
from zero.core import suggest
from zero.core.schema import flat
from zero.platform.installed import as_called
from zero.platform.run_files import publish
from zero.platform.timeline import ROWS, Span, Timeline, shares
from zero.tracker.report.chart import Bar, Part, Series
from zero.tracker.report.folder import OWN_LOOP, Run, mapping, read_run, typical
from zero.tracker.report.page import (
    Fact,
    Html,
    code,
    facts,
    figure,
    links,
    page,
    pill,
    section,
    side_by_side,
    table,
    verbatim,
)
from zero.tracker.report.scale import UNKNOWN, finite, number, seconds, size
from zero.tracker.view import ROW

KINDS = {
    "parameters": ("blue", 1.0),
    "gathered units": ("blue", 0.55),
    "gradients": ("amber", 1.0),
    "gradient flats": ("amber", 0.62),
    "gradient buffers": ("amber", 0.35),
    "master": ("purple", 1.0),
    "moments": ("purple", 0.6),
    "buffers": ("slate", 1.0),
    "activations": ("green", 1.0),
    "arena": ("teal", 1.0),
}
"""Colour and opacity of each kind of tensor in charts of a plan's memory; other kinds are slate."""

COLOURS = {"gather": "green", "compute": "blue", "reduce": "amber", "page in": "teal", "update": "purple"}
"""Colours of the rows of a timeline; other rows, such as page out, are rose."""

THIRD: Mapping[str, Any] = {"width": 368.0}
LOW: Mapping[str, Any] = {"width": 470.0, "height": 172.0}
"""Sizes of a chart beside two others (THIRD), and of a chart that is stacked with others (LOW)."""

TIERS = ("device", "host", "nvme")

BETWEEN = "between steps"
"""The label of a tier's bytes between two steps: the sum of all kinds except activations."""

TIME = "time"

MOVES = (
    ("disk", "to and from the disk", ("offload/read_bytes", "offload/write_bytes")),
    ("copy", "between host and GPU", ("offload/copy_bytes",)),
    ("link", "from other ranks", ("comm/gather_bytes", "comm/reduce_bytes")),
    ("wire", "from other nodes", ("comm/wire_bytes",)),
)
"""Transfers of a step: their field in `engine.plan.Load`, their label on the page, and their keys in a row."""

FILES = ("config.yaml", "metrics.jsonl", "summary.json", "trace.json", "ranks/0.log")
PILLS = {"finished": "good", "failed": "bad", "stopped": "open", "running": "open"}


def write(folder: Path, defaults: Mapping[str, Any] | None = None) -> Path:
    """Write report.html of the run in `folder` and return its path.

    Args:
        defaults: train.py's default settings, nested and plain. The page shows only settings of a run of train.py that
            differ from them; None: it shows all.
    """
    path = folder / "report.html"
    publish(path, report(read_run(folder), defaults))
    return path


def report(run: Run, defaults: Mapping[str, Any] | None = None) -> str:
    """Return the text of report.html; `defaults` as for `write`."""
    overrides = run.overrides or []
    title = " ".join(overrides) if overrides else "the default run" if run.overrides == [] else run.folder.name
    settings = partial(_settings, defaults=defaults or {})
    parts = (_headline, _plan, _learning, _sample, _speed, _offload, _step, _origin, settings, _footer)
    return page(
        title,
        kicker=" · ".join([*_summary(run), "/".join(run.folder.absolute().parts[-2:])]),
        status=pill(run.status, PILLS[run.status]),
        parts=[part(run) for part in parts],
    )


def _summary(run: Run) -> list[str]:
    """Return phrases with the model's size, stage, precision and number of ranks."""
    settings, ranks = flat(run.config), finite(run.summary.get("ranks"))
    numel = finite(run.summary.get("parameters_numel"))
    return [
        *([f"{_count(numel)} parameters"] if numel else []),
        *([f"stage {stage}"] if (stage := settings.get("zero.stage", run.loop.get("stage"))) is not None else []),
        *([str(compute)] if (compute := settings.get("precision.compute", run.loop.get("precision"))) else []),
        *([f"{ranks:.0f} rank{'s' * (ranks != 1)}"] if ranks else []),
    ]


def _headline(run: Run) -> Html:
    reason = verbatim(run.reason.replace(f"{run.folder.absolute()}/", ""), PILLS[run.status])
    best = finite(run.summary.get("best_val_loss"))
    steps, of = run.final("steps", "step"), finite(run.config.get("steps", run.loop.get("steps")))
    skipped = finite(run.summary.get("skipped")) or 0
    device, host = (run.final(f"{tier}_peak_bytes", f"memory/{tier}_peak_bytes") for tier in ("device", "host"))
    done = run.final(run.unit, run.unit)
    of_steps = f"of {number(of, 9)}" * (of is not None) + (f", {skipped:.0f} skipped" if skipped else "")
    shown = [
        Fact("Validation loss", _loss(run.final("val_loss", "val/loss")), f"best {_loss(best)}" if best else ""),
        Fact("Training loss", _loss(run.final("train_loss", "train/loss")), "of the last step"),
        Fact("Steps", number(steps, 9), of_steps),
        Fact("Time", seconds(run.summary.get("seconds")), f"{_count(done)} {run.unit}" if done else ""),
        Fact(f"{run.unit.capitalize()} per second", number(run.typical(f"speed/{run.unit}_per_s")), "median"),
        Fact("Step", seconds(run.typical("speed/step_s")), "median"),
        Fact("MFU", _percent(run.typical("speed/mfu")), "median"),
        *([Fact("Device peak", size(device), "allocated")] if device else []),
        Fact("Host peak", size(host), "whole process"),
    ]
    heading = "How it ended" if run.status != "running" else "So far"
    return section(heading, *([] if run.status == "finished" else [reason]), facts(shown))


# Commands to repeat and to resume the run, its settings, and the plan compared with measurements


def _origin(run: Run) -> Html:
    """Return a section with the commands that repeat and resume the run, its versions, seed and data."""
    versions, saved = mapping(run.summary.get("versions")), str(run.summary.get("checkpoint") or "")
    data, digest = mapping(run.config.get("data")).get("name"), str(run.summary.get("data_digest") or "")
    facts: dict[str, str] = {}
    if run.overrides is not None:
        ranks = finite(run.summary.get("ranks")) or 1
        words = dict.fromkeys(run.overrides)
        if ranks > 1 and not any(word.startswith("launch.ranks=") for word in words):
            words[f"launch.ranks={ranks:.0f}"] = None  # torchrun or the default may have chosen them
        steps = finite(run.config.get("steps"))
        longer = {"steps": round(2 * steps)} if run.status == "finished" and steps else {}
        facts["command"] = code(as_called(suggest.command(words)))
        facts["checkpoint"] = code(saved) if saved else "none was saved. checkpoint.every=100 saves every 100 steps"
        if saved:
            facts["to go on"] = code(as_called(suggest.command(words, **longer, resume=saved)))
    elif saved:
        facts["checkpoint"] = code(saved)
    facts |= {"versions": ", ".join(f"{name} {number}" for name, number in versions.items() if number)}
    facts |= {"seed": _value(run.config["seed"]) if "seed" in run.config else ""}
    facts |= {"data": f"{data}, digest {digest[:12]}" if data and digest else ""}
    return section("This run", table([], [(name, text) for name, text in facts.items() if text]))


def differences(config: Mapping[str, Any], default: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (key, value, default) of each setting that differs from its default; defaults of auto come last.

    A key that is missing in one of the two mappings counts as None there.
    """
    values, defaults = flat(config), flat(default)
    keys = dict.fromkeys([*values, *defaults])
    rows = [(key, values.get(key), defaults.get(key)) for key in keys if values.get(key) != defaults.get(key)]
    return sorted(rows, key=lambda row: row[2] == "auto")


def _settings(run: Run, defaults: Mapping[str, Any]) -> Html:
    if not run.config:
        return Html()
    known = {key: value for key, value in defaults.items() if key in run.config}  # other defaults do not apply
    if not known or OWN_LOOP in run.config:
        return section(
            "Settings", table(["key", "this run"], [(code(a), code(_value(b))) for a, b in flat(run.config).items()])
        )
    rows = [
        (code(key), code(_value(value)), code(_value(default)))
        for key, value, default in differences(run.config, known)
    ]
    if not rows:
        return section("Settings", verbatim("all settings are the defaults"))
    return section(
        "Settings that differ from the defaults",
        table(["key", "this run", "default"], rows),
        note="Where the default is auto, the value is what the run resolved it to.",
    )


def _value(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Compared(NamedTuple):
    """A planned and a measured value of one rank, in bytes, or in seconds if `what` is `TIME`; None: unknown."""

    where: str
    what: str
    planned: float | None
    measured: float | None


def compared(run: Run) -> list[Compared]:
    """Compare plan and measurement: bytes held in each tier between two steps, and bytes moved and time of a step."""
    planned, measured = (_by_tier(run, key) for key in ("plan_bytes", "measured_bytes"))
    peak = run.final("device_peak_bytes", "memory/device_peak_bytes")
    rows: list[Compared] = []
    for tier, kinds in planned.items():
        held = measured.get(tier, {})
        shown = [name for name in dict.fromkeys([*KINDS, *kinds]) if kinds.get(name) or held.get(name)]
        between, held_bytes = sum(kinds.values()) - kinds.get("activations", 0), sum(held.values()) if held else None
        if len(shown) == 1:
            rows.append(Compared(tier, shown[0], kinds.get(shown[0], 0), held_bytes))
        else:
            rows += [Compared(tier, name, kinds.get(name, 0), held.get(name)) for name in shown]
            rows.append(Compared(tier, BETWEEN, between, held_bytes))
        if tier == "device" and peak:
            rows.append(Compared(tier, "peak in a step", sum(kinds.values()), peak))
    moves, ranks = mapping(run.summary.get("plan_step_bytes")), finite(run.summary.get("ranks")) or 1
    for load, what, keys in MOVES:
        moved = [typical(_per_step(run, key)) for key in keys]
        known = [nbytes / ranks for nbytes in moved if nbytes is not None]
        if (nbytes := finite(moves.get(load))) and known:
            rows.append(Compared("a step", what, nbytes, sum(known)))
    if (predicted_s := finite(run.summary.get("plan_step_s"))) and (step_s := run.typical("speed/step_s")):
        rows.append(Compared("a step", TIME, predicted_s, step_s))
    return rows


def _plan(run: Run) -> Html:
    planned, measured = (_by_tier(run, key) for key in ("plan_bytes", "measured_bytes"))
    if not planned:
        return Html()
    bars = []
    for tier, kinds in planned.items():
        bars.append(Bar(f"{tier}, plan" if measured.get(tier) else tier, _parts(kinds)))
        bars += [Bar("measured", _parts(measured[tier]))] if measured.get(tier) else []
    rows = compared(run)
    places = ["", *(row.where for row in rows)]  # `where` of the row before
    idle = " A time is predicted for a machine that does nothing else." * any(row.what == TIME for row in rows)
    return section(
        "Plan and measurement",
        side_by_side(
            figure(chart.bars(bars, title="bytes of one rank", order=list(KINDS)), "Bytes of one rank"),
            table(
                ["", "", "plan", "measured", "ratio"],
                [_cells(row, first=row.where != before) for before, row in zip(places, rows, strict=False)],
                numbers=(2, 3, 4),
                marked={place: "total" for place, row in enumerate(rows) if row.what == BETWEEN},
            ),
        ),
        note="Of one rank. Measured is what its tensors and its store hold between two steps, and the median of what a "
        "step moves. The host peak above is of the whole process: the interpreter, torch and whatever the allocator "
        "keeps are in it." + idle,
    )


def _cells(row: Compared, *, first: bool) -> tuple[str, ...]:
    """Return the cells of a row of the table; only the first row of each `where` shows it."""
    ratio = UNKNOWN if row.measured is None or not row.planned else f"{row.measured / row.planned:.3f}"
    write = seconds if row.what == TIME else size
    return row.where * first, row.what, write(row.planned), write(row.measured), ratio


def _by_tier(run: Run, key: str) -> dict[str, dict[str, float]]:
    """Return the bytes under `key` of the summary as tier -> kind of tensor -> bytes, without empty tiers."""
    tiers = {tier: _bytes(kinds) for tier, kinds in mapping(run.summary.get(key)).items()}
    return {tier: tiers[tier] for tier in [*TIERS, *tiers] if sum(tiers.get(tier, {}).values()) > 0}


def _bytes(kinds: object) -> dict[str, float]:
    return {name: count for name, raw in mapping(kinds).items() if (count := finite(raw)) is not None and count >= 0}


def _parts(kinds: Mapping[str, float]) -> list[Part]:
    shown = [name for name in dict.fromkeys([*KINDS, *kinds]) if name in kinds]
    return [Part(name, kinds[name], *KINDS.get(name, ("slate", 0.7))) for name in shown]


# Losses, a sample of text, speed and memory


def _learning(run: Run) -> Html:
    if not run.rows:
        return Html()
    norms = [value for _, raw in run.points("train/grad_norm") if (value := finite(raw)) and value > 0]
    wide = bool(norms) and max(norms) > 30 * min(norms)
    validation = [(at, value) for at, value in run.points("val/loss") if finite(value) is not None]
    losses = [Series("training", run.points("train/loss")), Series("validation", validation, "amber")]
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


def _sample(run: Run) -> Html:
    text = str(run.summary.get("sample") or "").rstrip()
    blocks = [verbatim(text)] if text else []
    return section("Sample", *blocks, note="Text from the model, as the run printed it at its end.")


def _others(run: Run) -> list[Html]:
    """Return a chart for each metric that the user of `zero.track` logged beside the loss."""
    keys = dict.fromkeys(
        key for row in run.rows for key in row if key.startswith(("train/", "val/")) and key not in ROW
    )
    by_name: dict[str, list[Series]] = {}
    for key in keys:
        part, _, name = key.partition("/")
        points = [(at, value) for at, value in run.points(key) if finite(value) is not None]
        colour = "blue" if part == "train" else "amber"
        by_name.setdefault(name, []).append(Series("training" if part == "train" else "validation", points, colour))
    return [_chart(name, series, **THIRD) for name, series in by_name.items()]


def _speed(run: Run) -> Html:
    if not run.rows:
        return Html()
    times = [
        Series("whole step", run.points("speed/step_s")),
        *([Series("waiting for the store", run.points("offload/wait_s"), "rose")] if _moves(run) else []),
        *([Series("for other ranks", run.points("comm/wait_s"), "green")] if run.measured("comm/wait_s") else []),
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


def _slowest(run: Run) -> list[Fact]:
    """Return a fact about the slowest rank, which waited least in most rows: how much longer other ranks waited."""
    ranks = finite(run.summary.get("ranks"))
    keys = ("comm/slowest_rank", "comm/slowest_s", "comm/wait_s", "speed/step_s")
    numbers = [[finite(row.get(key)) for key in keys] for row in run.rows]
    timed = [[value for value in row if value is not None] for row in numbers if None not in row]
    if (ranks is not None and ranks < 2) or not timed:
        return []
    slowest, count = Counter(row[0] for row in timed).most_common(1)[0]
    longer_s = [longest_s - (step_s - worked_s) for rank, worked_s, longest_s, step_s in timed if rank == slowest]
    waited = seconds(max(0.0, median(longer_s)))
    note = f"in {count} of {len(timed)} rows. Other ranks waited up to {waited} longer in a step (median)."
    return [Fact("Slowest rank", number(slowest, 9), note)]


def _moves(run: Run) -> bool:
    """Return whether the run read or wrote offloaded state."""
    return run.measured("offload/read_bytes") or run.measured("offload/write_bytes")


def _offload(run: Run) -> Html:
    if not _moves(run):
        return Html()
    ways = ("read", "read", "teal"), ("written", "write", "rose")
    moved, rates = (
        [Series(name, points(f"offload/{key}_{unit}"), colour) for name, key, colour in ways]
        for unit, points in (("bytes", partial(_per_step, run)), ("gbps", run.points))
    )
    written = finite(run.summary.get("offload_written_bytes"))
    shown = [
        Fact("Hidden", _percent(run.typical("speed/hidden_fraction")), "of the transfers' time; median"),
        Fact("Waiting", seconds(run.typical("offload/wait_s")), "per step, slowest rank; median"),
        Fact("Moved", f"{number(run.typical('offload/bytes_per_param'), 3)} B", "per parameter and step; median"),
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


def _per_step(run: Run, key: str) -> list[tuple[object, object]]:
    """Return (step, value of `key` per step) of each row: its value divided by its number of steps."""
    counts = [max(1.0, finite(count) or 1.0) for _, count in run.points("speed/steps")]
    values = zip(run.points(key), counts, strict=True)
    return [(step, None if (value := finite(raw)) is None else value / count) for (step, raw), count in values]


def _chart(caption: str, series: Sequence[Series], note: str = "", *, title: str = "", **axes: Any) -> Html:
    """Return a chart of `series` with its caption above; `axes` are passed to `chart.lines`."""
    return figure(chart.lines(series, title=title or caption.lower(), **axes), caption, note)


def _line(run: Run, caption: str, key: str, colour: str, note: str = "", **axes: Any) -> Html:
    """Return a chart of the values of `key`."""
    return _chart(caption, [Series(caption.lower(), run.points(key), colour)], note, **axes)


# One step


def _step(run: Run) -> Html:
    spans = [span for span in run.trace if span.rank == min(traced.rank for traced in run.trace)]
    if not spans:
        return Html()
    drawn = {name: [_drawn(span) for span in spans if span.row == name] for name in ROWS}
    rows = [chart.Row(name, placed, COLOURS.get(name, "rose")) for name, placed in drawn.items() if placed]
    head = ["row", "spans", "busy", "hidden", "exposed", "of the step"]
    return section(
        "One step",
        figure(chart.timeline(rows, title="timeline of one step"), "Timeline", "point at a span for what it is"),
        table(head, _shares(spans), numbers=range(1, 6)),
        note="Exposed: the training thread waited for it. Hidden: the thread did not wait. One wait may be for several "
        "rows. trace.json holds the same for ui.perfetto.dev.",
    )


def _drawn(span: Span) -> chart.Span:
    return chart.Span(span.begin_s, span.end_s, span.name, span.unit, 0.6 if "backward" in span.name else 1.0)


def _shares(spans: list[Span]) -> list[tuple[str, ...]]:
    """Return a table of the timeline's rows: number of spans, busy time, and its hidden and exposed parts."""
    step_s = Timeline(spans).step_s
    rows: list[tuple[str, ...]] = []
    for name, share in shares(spans).items():
        part = _percent(share.exposed_s / step_s if step_s else None)
        times = ("", "", "") if name == "compute" else (seconds(share.hidden_s), seconds(share.exposed_s), part)
        count = sum(span.row == name for span in spans)
        rows += [(name, number(count, 9), seconds(share.busy_s), *times)] if count else []
    return rows


# Numbers as text


def _loss(value: object) -> str:
    shown = finite(value)
    return UNKNOWN if shown is None else f"{shown:.4f}" if abs(shown) < 1e6 else number(shown)


def _count(value: object) -> str:
    """Format a count; from a million on with three digits and a unit, such as 1.24 B."""
    shown = finite(value)
    if shown is None or shown < 1e6:
        return number(shown, 7)
    unit, name = next((unit, name) for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if shown >= unit)
    return f"{number(shown / unit, 3)} {name}"


def _percent(value: object) -> str:
    shown = finite(value)
    return UNKNOWN if shown is None else f"{100 * shown:.{int(abs(shown) < 0.1)}f} %"


def _footer(run: Run) -> Html:
    unread = f"<p>{chart.escape('; '.join(run.unread))}.</p>" if run.unread else ""
    return Html(f"<footer>{unread}<p>{links(run.folder, FILES)}</p></footer>")
