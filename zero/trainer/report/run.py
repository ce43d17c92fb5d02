"""report.html of a run: how it ended, what it was set to, what it held, how fast it was, and one step in detail.

A view of the files that the run left, so it can be made again at any time, also of a run that failed or still runs.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import zero.trainer.report.chart as chart
from zero.platform.run_files import publish
from zero.platform.timeline import ROWS, Span, Timeline, shares
from zero.trainer.config import Config
from zero.trainer.report.chart import Bar, Part, Series
from zero.trainer.report.folder import Run, flat, mapping, read_run
from zero.trainer.report.page import (
    Fact,
    Html,
    code,
    facts,
    figure,
    links,
    page,
    pill,
    said,
    section,
    side_by_side,
    table,
)
from zero.trainer.report.scale import UNKNOWN, finite, number, seconds, size

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
"""Colour and shade of what a plan has bytes for; anything else is slate."""

COLOURS = {"gather": "green", "compute": "blue", "reduce": "amber", "page in": "teal", "update": "purple"}
"""Of the rows of a timeline; the last, page out, is rose."""

NARROW = 368.0
"""Width of a chart where three stand side by side."""

TIERS = ("device", "host", "nvme")
FILES = ("config.yaml", "metrics.jsonl", "summary.json", "trace.json", "ranks/0.log")
PILLS = {"finished": "good", "failed": "bad", "stopped": "open", "running": "open"}


def write(folder: Path) -> Path:
    """Write report.html of the run in `folder`; returns its path."""
    path = folder / "report.html"
    publish(path, report(read_run(folder)))
    return path


def report(run: Run) -> str:
    """The page."""
    overrides = run.overrides or []
    asked = " ".join(overrides) if overrides else "the default run" if run.overrides == [] else run.folder.name
    return page(
        asked,
        kicker=" · ".join([*_what(run), "/".join(run.folder.absolute().parts[-2:])]),
        status=pill(run.status, PILLS[run.status]),
        parts=[
            _headline(run),
            _plan(run),
            _learning(run),
            _speed(run),
            _offload(run),
            _step(run),
            _settings(run),
            _footer(run),
        ],
    )


def _what(run: Run) -> list[str]:
    """What was run, in a few words."""
    settings, ranks = flat(run.config), finite(run.summary.get("ranks"))
    numel = finite(run.summary.get("parameters_numel"))
    return [
        *([f"{_count(numel)} parameters"] if numel else []),
        *([f"stage {settings['zero.stage']}"] if "zero.stage" in settings else []),
        *([str(settings["precision.compute"])] if "precision.compute" in settings else []),
        *([f"{ranks:.0f} rank{'s' * (ranks != 1)}"] if ranks else []),
    ]


def _headline(run: Run) -> Html:
    words = (
        []
        if run.status == "finished"
        else [said(run.reason.replace(f"{run.folder.absolute()}/", ""), PILLS[run.status])]
    )
    best = finite(run.summary.get("best_val_loss"))
    steps, of = run.final("steps", "step"), finite(run.config.get("steps"))
    skipped = finite(run.summary.get("skipped")) or 0
    device, host = (run.final(f"{tier}_peak_bytes", f"memory/{tier}_peak_bytes") for tier in ("device", "host"))
    tokens = run.final("tokens", "tokens")
    shown = [
        Fact("Validation loss", _loss(run.final("val_loss", "val/loss")), f"best {_loss(best)}" if best else ""),
        Fact("Training loss", _loss(run.final("train_loss", "train/loss")), "of the last step"),
        Fact(
            "Steps",
            number(steps, 9),
            f"of {number(of, 9)}" * (of is not None) + (f", {skipped:.0f} skipped" if skipped else ""),
        ),
        Fact("Time", seconds(run.summary.get("seconds")), f"{_count(tokens)} tokens" if tokens else ""),
        Fact("Tokens per second", number(run.typical("speed/tokens_per_s")), "median"),
        Fact("Step", seconds(run.typical("speed/step_s")), "median"),
        Fact("MFU", _percent(run.typical("speed/mfu")), "median"),
        *([Fact("Device peak", size(device), "allocated")] if device else []),
        Fact("Host peak", size(host), "whole process"),
    ]
    return section("How it ended" if run.status != "running" else "So far", *words, facts(shown))


# What it was set to, and what that was to hold


def differences(config: Mapping[str, Any], default: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(key, value, default) of what differs: first what was chosen, then what `auto` became.

    A key that only one of the two has is compared with None.
    """
    values, defaults = flat(config), flat(default)
    found = [
        (key, values.get(key), defaults.get(key))
        for key in [*values, *(key for key in defaults if key not in values)]
        if values.get(key) != defaults.get(key)
    ]
    return sorted(found, key=lambda one: one[2] == "auto")


def _settings(run: Run) -> Html:
    if not run.config:
        return Html()
    known = {key: value for key, value in Config().plain().items() if key in run.config}  # others do not apply
    rows = [
        (code(key), code(_value(value)), code(_value(default)))
        for key, value, default in differences(run.config, known)
    ]
    if not rows:
        return section("Settings", said("all settings are the defaults"))
    return section(
        "Settings that differ from the defaults",
        table(["key", "this run", "default"], rows),
        note="Where the default is auto, the value is what the run settled on.",
    )


def _value(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plan(run: Run) -> Html:
    planned = {tier: _bytes(kinds) for tier, kinds in mapping(run.summary.get("plan_bytes")).items()}
    planned = {tier: planned[tier] for tier in [*TIERS, *planned] if sum(planned.get(tier, {}).values()) > 0}
    if not planned:
        return Html()
    measured = {tier: _measured(run, tier) for tier in planned}
    rows = []
    for tier in planned:
        rows.append(Bar(f"{tier}, plan" if measured[tier] else tier, _parts(planned[tier])))
        rows += [Bar("measured", _parts(measured[tier]))] if measured[tier] else []
    held = [kind for tier in planned.values() for kind, count in tier.items() if count]
    kinds = dict.fromkeys(kind for kind in [*KINDS, *held] if kind in held)
    body = [
        (kind, *(size(planned[tier][kind]) if planned[tier].get(kind) else "" for tier in planned)) for kind in kinds
    ]
    body.append(("plan", *(size(sum(planned[tier].values())) for tier in planned)))
    marked = {len(body) - 1: "total"}
    if any(measured.values()):
        held_only = {tier: _held(kinds) for tier, kinds in planned.items()}
        if held_only != {tier: sum(kinds.values()) for tier, kinds in planned.items()}:
            body.append(("plan, between steps", *map(size, held_only.values())))
        body.append(
            ("measured", *(size(sum(measured[tier].values())) if measured[tier] else UNKNOWN for tier in planned))
        )
        body.append(("difference", *(_difference(held_only[tier], measured[tier]) for tier in planned)))
    return section(
        "Plan and measurement",
        side_by_side(
            figure(chart.bars(rows, title="bytes of one rank", order=list(KINDS)), "Bytes of one rank"),
            table(["kind", *planned], body, numbers=range(1, 1 + len(planned)), marked=marked),
        ),
        note="Of one rank. Measured is what its tensors and its store hold between two steps. The host peak above is "
        "that of the whole process: the interpreter, torch and whatever the allocator keeps are in it.",
    )


def _bytes(kinds: object) -> dict[str, float]:
    return {kind: count for kind, raw in mapping(kinds).items() if (count := finite(raw)) is not None and count >= 0}


def _measured(run: Run, tier: str) -> dict[str, float]:
    """Bytes by kind, or as one number, where the run counted them."""
    counted = mapping(run.summary.get("measured_bytes")).get(tier)
    if isinstance(counted, Mapping):
        return _bytes(counted)
    return {"measured": known} if (known := finite(counted)) else {}


def _held(kinds: Mapping[str, float]) -> float:
    """What is there between two steps, too: all but activations."""
    return sum(count for kind, count in kinds.items() if kind != "activations")


def _parts(kinds: Mapping[str, float]) -> list[Part]:
    return [Part(kind, count, *KINDS.get(kind, ("slate", 0.7))) for kind, count in kinds.items()]


def _difference(planned: float, measured: Mapping[str, float]) -> str:
    return f"{100 * (sum(measured.values()) / planned - 1):+.1f} %" if measured and planned else UNKNOWN


# What it learned, and how fast


def _learning(run: Run) -> Html:
    if not run.rows:
        return Html()
    norms = [value for _, raw in run.points("train/grad_norm") if (value := finite(raw)) and value > 0]
    wide = bool(norms) and max(norms) > 30 * min(norms)
    losses = [
        Series("training", run.points("train/loss")),
        Series("validation", _without_gaps(run.points("val/loss")), "amber"),
    ]
    return section(
        "Learning",
        side_by_side(
            figure(chart.lines(losses, title="loss", width=640, height=372), "Loss", "nats per token"),
            figure(_line(run, "train/lr", "learning rate", "teal", from_zero=True, height=172), "Learning rate"),
            figure(
                _line(run, "train/grad_norm", "gradient norm", "purple", log=wide, height=172),
                "Gradient norm",
                "before clipping",
            ),
            _scale(run),
            layout="lead",
        ),
    )


def _scale(run: Run) -> Html:
    if len({row.get("train/loss_scale") for row in run.rows}) < 2:
        return Html()
    return figure(_line(run, "train/loss_scale", "loss scale", "slate", log=True, height=172), "Loss scale")


def _speed(run: Run) -> Html:
    if not run.rows:
        return Html()
    spent = [
        Series("whole step", run.points("speed/step_s")),
        *([Series("waiting for the store", run.points("offload/wait_s"), "rose")] if _moves(run) else []),
        *([Series("for other ranks", run.points("comm/wait_s"), "green")] if run.measured("comm/wait_s") else []),
    ]
    held = [
        Series(tier, run.points(key), colour)
        for tier, key, colour in (
            ("device", "memory/device_peak_bytes", "purple"),
            ("host", "memory/host_peak_bytes", "amber"),
            ("nvme", "memory/nvme_bytes", "teal"),
        )
        if run.measured(key)
    ]
    return section(
        "Speed and memory",
        side_by_side(
            figure(_line(run, "speed/tokens_per_s", "tokens per second", "blue", from_zero=True), "Tokens per second"),
            figure(chart.lines(spent, title="seconds of a step", from_zero=True, width=NARROW), "A step", "seconds"),
            figure(
                chart.lines(held, title="memory peaks", binary=True, width=NARROW),
                "Memory by tier",
                f"most so far; {', '.join(one.name for one in held)}",
            ),
            layout="three",
        ),
    )


def _moves(run: Run) -> bool:
    """Whether something sleeps where it has to be fetched from."""
    return run.measured("offload/read_bytes") or run.measured("offload/write_bytes")


def _offload(run: Run) -> Html:
    if not _moves(run):
        return Html()
    moved = [
        Series("read", _per_step(run, "offload/read_bytes"), "teal"),
        Series("written", _per_step(run, "offload/write_bytes"), "rose"),
    ]
    rates = [
        Series("read", run.points("offload/read_gbps"), "teal"),
        Series("written", run.points("offload/write_gbps"), "rose"),
    ]
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
            figure(chart.lines(moved, title="bytes per step", binary=True), "Moved per step", "bytes of all ranks"),
            figure(
                chart.lines(rates, title="rates", from_zero=True),
                "Rate while something moves",
                "10⁹ bytes a second",
            ),
        ),
        note=str(run.summary.get("endurance") or ""),
    )


def _per_step(run: Run, key: str) -> list[tuple[object, object]]:
    """What a row counts, divided by the steps since the row before."""
    before = 0.0
    found: list[tuple[object, object]] = []
    for step, raw in run.points(key):
        value, now = finite(raw), finite(step) or 0.0
        found.append((step, None if value is None else value / max(1.0, now - before)))
        before = now
    return found


def _line(
    run: Run, key: str, title: str, colour: str, *, log: bool = False, from_zero: bool = False, height: float = 236.0
) -> str:
    width = NARROW if height > 200 else 470.0
    return chart.lines(
        [Series(title, run.points(key), colour)],
        title=title,
        log=log,
        from_zero=from_zero,
        width=width,
        height=height,
    )


def _without_gaps(points: Iterable[tuple[object, object]]) -> list[tuple[object, object]]:
    return [(at, value) for at, value in points if finite(value) is not None]


# One step


def _step(run: Run) -> Html:
    spans = [span for span in run.trace if span.rank == min(one.rank for one in run.trace)]
    if not spans:
        return Html()
    rows = [
        chart.Row(name, [_drawn(span) for span in spans if span.row == name], COLOURS.get(name, "rose"))
        for name in ROWS
        if any(span.row == name for span in spans)
    ]
    return section(
        "One step",
        figure(chart.timeline(rows, title="timeline of one step"), "Timeline", "point at a span for what it is"),
        table(
            ["row", "spans", "busy", "hidden", "exposed", "exposed, of the step"], _shares(spans), numbers=range(1, 6)
        ),
        note="Exposed: the training thread stood still for it. Hidden: it did not notice. One wait may be for several "
        "rows. trace.json holds the same for ui.perfetto.dev.",
    )


def _drawn(span: Span) -> chart.Span:
    return chart.Span(span.begin_s, span.end_s, span.name, span.unit, 0.6 if "backward" in span.name else 1.0)


def _shares(spans: list[Span]) -> list[tuple[str, ...]]:
    """For each row how long it was busy, and how much of that was hidden."""
    step_s = Timeline(spans).step_s
    found: list[tuple[str, ...]] = []
    for name, share in shares(spans).items():
        times = (
            seconds(share.hidden_s),
            seconds(share.exposed_s),
            _percent(share.exposed_s / step_s if step_s else None),
        )
        shown = ("", "", "") if name == "compute" else times
        count = sum(span.row == name for span in spans)
        if count:
            found.append((name, number(count, 9), seconds(share.busy_s), *shown))
    return found


# Words


def _loss(value: object) -> str:
    shown = finite(value)
    return UNKNOWN if shown is None else f"{shown:.4f}" if abs(shown) < 1e6 else number(shown)


def _count(value: object) -> str:
    """A count that may be very large, in three digits."""
    shown = finite(value)
    if shown is None or shown < 1e6:
        return number(shown, 7)
    unit, name = next((unit, name) for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if shown >= unit)
    return f"{number(shown / unit, 3)} {name}"


def _percent(value: object) -> str:
    shown = finite(value)
    return UNKNOWN if shown is None else f"{100 * shown:.{int(abs(shown) < 0.1)}f} %"


def _footer(run: Run) -> Html:
    unread = f"<p>{chart.words('; '.join(run.unread))}.</p>" if run.unread else ""
    return Html(f"<footer>{unread}<p>{links(run.folder, FILES)}</p></footer>")
