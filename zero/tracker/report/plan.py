"""The plan of a run compared with measurements: bytes held in each tier, bytes moved, and the time of a step."""

from collections.abc import Mapping
from typing import NamedTuple

from zero.core.placement import TIERS
from zero.tracker.report.bars import Bar, BarPart, bars
from zero.tracker.report.folder import RecordedRun, mapping, typical
from zero.tracker.report.page import Html, figure, note, section, side_by_side, table, together
from zero.tracker.report.scale import UNKNOWN, finite_values, seconds, size

KIND_COLOURS = {
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


ROW_PIXELS, NOTE_PIXELS = 33, 190
"""Heights of a row of the table, and of the legend, axis and note beside it: the chart is as high as the table."""

NOT_MEASURED = ("activations",)
"""Kinds of tensors that exist only within a step, and are hatched."""

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


class Compared(NamedTuple):
    """A planned and a measured value of one rank, in bytes, or in seconds if `what` is `TIME`; None: unknown."""

    where: str
    what: str
    planned: float | None
    measured: float | None


def compared(run: RecordedRun) -> list[Compared]:
    """Compare plan and measurement: bytes held in each tier between two steps, and bytes moved and time of a step."""
    planned, measured = (_by_tier(run, key) for key in ("plan_bytes", "measured_bytes"))
    peak = run.final("device_peak_bytes", "memory/device_peak_bytes")
    rows: list[Compared] = []
    for tier, kinds in planned.items():
        held = measured.get(tier, {})
        shown = [name for name in dict.fromkeys([*KIND_COLOURS, *kinds]) if kinds.get(name) or held.get(name)]
        between, held_bytes = sum(kinds.values()) - kinds.get("activations", 0), sum(held.values()) if held else None
        if len(shown) == 1:
            rows.append(Compared(tier, shown[0], kinds.get(shown[0], 0), held_bytes))
        else:
            rows += [Compared(tier, name, kinds.get(name, 0), held.get(name)) for name in shown]
            rows.append(Compared(tier, BETWEEN, between, held_bytes))
        if tier == "device" and peak:
            rows.append(Compared(tier, "peak in a step", sum(kinds.values()), peak))
    moves, ranks = mapping(run.summary.get("plan_step_bytes")), finite_values(run.summary.get("ranks")) or 1
    for load, what, keys in MOVES:
        moved = [typical(per_step(run, key)) for key in keys]
        known = [nbytes / ranks for nbytes in moved if nbytes is not None]
        if (nbytes := finite_values(moves.get(load))) and known:
            rows.append(Compared("a step", what, nbytes, sum(known)))
    if (predicted_s := finite_values(run.summary.get("plan_step_s"))) and (step_s := run.typical("speed/step_s")):
        rows.append(Compared("a step", TIME, predicted_s, step_s))
    return rows


def plan_section(run: RecordedRun) -> Html:
    """Return the section with a chart of bytes by tier and a table of ratios; empty without a plan in the summary."""
    planned, measured = (_by_tier(run, key) for key in ("plan_bytes", "measured_bytes"))
    if not planned:
        return Html()
    drawn = []
    for tier, kinds in planned.items():
        drawn.append(Bar(f"{tier}, plan" if measured.get(tier) else tier, _parts(kinds)))
        drawn += [Bar("measured", _parts(measured[tier]))] if measured.get(tier) else []
    rows = compared(run)
    places = ["", *(row.where for row in rows)]  # `where` of the row before
    idle = " A time is predicted for a machine that does nothing else." * any(row.what == TIME for row in rows)
    pitch = max(32.0, min(56.0, (ROW_PIXELS * len(rows) - NOTE_PIXELS) / len(drawn)))
    figures = bars(drawn, title="bytes of one rank", order=list(KIND_COLOURS), pitch=pitch)
    about = (
        "Measured is what the tensors of a rank and its store hold between two steps, and the median of what a step "
        "moves. Activations are hatched, because they exist only within a step and are not measured. The host peak "
        "above is of the whole process: the interpreter, torch and whatever the allocator keeps are in it."
    )
    return section(
        "Plan and measurement",
        side_by_side(
            together(figure(figures, "Bytes of one rank"), note(about + idle)),
            table(
                ["", "", "plan", "measured", "ratio"],
                [_cells(row, first=row.where != before) for before, row in zip(places, rows, strict=False)],
                numbers=(2, 3, 4),
                marked={place: "total" for place, row in enumerate(rows) if row.what == BETWEEN},
            ),
        ),
    )


def _cells(row: Compared, *, first: bool) -> tuple[str, ...]:
    """Return the cells of a row of the table; only the first row of each `where` shows it."""
    ratio = UNKNOWN if row.measured is None or not row.planned else f"{row.measured / row.planned:.3f}"
    write = seconds if row.what == TIME else size
    return row.where * first, row.what, write(row.planned), write(row.measured), ratio


def _by_tier(run: RecordedRun, key: str) -> dict[str, dict[str, float]]:
    """Return the bytes under `key` of the summary as tier -> kind of tensor -> bytes, without empty tiers."""
    tiers = {tier: _bytes(kinds) for tier, kinds in mapping(run.summary.get(key)).items()}
    return {tier: tiers[tier] for tier in [*TIERS, *tiers] if sum(tiers.get(tier, {}).values()) > 0}


def _bytes(kinds: object) -> dict[str, float]:
    return {
        name: count for name, raw in mapping(kinds).items() if (count := finite_values(raw)) is not None and count >= 0
    }


def _parts(kinds: Mapping[str, float]) -> list[BarPart]:
    shown = [name for name in dict.fromkeys([*KIND_COLOURS, *kinds]) if name in kinds]
    return [
        BarPart(name, kinds[name], *KIND_COLOURS.get(name, ("slate", 0.7)), hatched=name in NOT_MEASURED)
        for name in shown
    ]


def per_step(run: RecordedRun, key: str) -> list[tuple[object, object]]:
    """Return (step, value of `key` per step) of each row: the row's value divided by its number of steps."""
    counts = [max(1.0, finite_values(count) or 1.0) for _, count in run.points("speed/steps")]
    values = zip(run.points(key), counts, strict=True)
    return [(step, None if (value := finite_values(raw)) is None else value / count) for (step, raw), count in values]
