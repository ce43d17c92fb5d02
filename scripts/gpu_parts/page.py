"""`gpu.json` as Markdown: the same words for a run that is under way, a dry one, and the page of the documentation.

No torch here, and nothing is required of the JSON: what a run did not come to is not shown.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

Row = dict[str, Any]
GB = 2**30
NONE = "–"

NONE_YET = "No GPU has been seen yet: this section is what `scripts/gpu --page gpu.json` prints when one has been."
"""The section's only line until there is a `docs/gpu.json`."""

HEADING = "## On a GPU"

BEGINNING = """\
`{command}`, {date}{commit}, {device}. One rank. A part that was cut or failed says so at the end; what it had told by
then is here.
"""

SPEED = """\
bf16, all on the same rows and first values. One system is alive at a time and they take turns in one process, every
other round in the opposite order. A step is the time between events on the stream that computes, median (lowest to
highest). MFU is without recomputation, of the maker's dense peak. The peak is of tensors on the GPU during these steps;
the plan counts a step of this size.
"""

LOOKED_INTO = """\
What is in a step is looked at in steps of their own, of the first size. Launches, copies (and fills) and waits are
calls of CUDA's runtime in all threads; syncs are operators of torch that made the host wait, as its sync debug mode
counts them. Hidden: of the time that a row of the timeline was busy, the part in which nothing stood still for it.
"""


def page(told: Row) -> str:
    """Everything as a section of the documentation."""
    parts = [
        HEADING,
        _beginning(told),
        *(make(told) for make in (_there, _laws, _speed, _largest, _traces)),
        _ends(told),
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _beginning(told: Row) -> str:
    known = {"command": "scripts/gpu", "date": "", "device": "not known yet"}
    found = {row["what"]: row["value"] for row in _rows(told, "fact")}
    known |= {key: told[key] for key in known if told.get(key)} | ({"device": found["GPU"]} if "GPU" in found else {})
    known["commit"] = f", commit {told['commit']}" if told.get("commit") else ""
    simulated = "Nothing of this ran on a GPU: it is a dry run.\n\n" if told.get("simulated") else ""
    return simulated + BEGINNING.format(**known)


# -- parts -------------------------------------------------------------------------------------------------------------


def _there(told: Row) -> str:
    rates = [(row["what"], _rate(row)) for row in _rows(told, "rate")]
    facts = [(row["what"], str(row["value"])) for row in _rows(told, "fact")]
    return _titled("The machine", _table(("", ""), [*facts, *rates]))


def _rate(row: Row) -> str:
    return row["error"] if "error" in row else f"{row['rate']:,.1f} {row['unit']}"


def _laws(told: Row) -> str:
    digests = _rows(told, "digest")
    groups = list(dict.fromkeys((row["precision"], row["family"]) for row in digests))
    lines = [_group(*group, [row for row in digests if (row["precision"], row["family"]) == group]) for group in groups]
    equal = _table(("precision", "", "ways to train", "of the same bits", "others"), lines)
    bounds = _table(
        ("precision", "steps", "loss, relative", "norm, relative", "bound", ""),
        [_bound(row) for row in _rows(told, "bound")],
    )
    hazards = _table(("", "found by torch's sanitizer"), [_hazards(row) for row in _rows(told, "hazards")])
    notes = [row["text"] for row in _rows(told, "note")]
    return _titled(
        "The laws", equal, *notes, bounds and f"Against plain torch, largest difference:\n\n{bounds}", hazards
    )


def _group(precision: str, family: str, rows: Sequence[Row]) -> Sequence[str]:
    others = [f"{row['case']}: {row.get('error', row.get('digest'))}" for row in rows if not row.get("equal")]
    same = sum(bool(row.get("equal")) for row in rows)
    return precision, family, str(len(rows)), str(same), "; ".join(others) or "none"


def _bound(row: Row) -> Sequence[str]:
    if "error" in row:
        return row["precision"], str(row["steps"]), row["error"], "", "", "failed"
    far = [f"{row[what]:.1e}" for what in ("loss", "norm")]
    return row["precision"], str(row["steps"]), *far, f"{row['bound']:.0e}", "holds" if row["holds"] else "**does not**"


def _hazards(row: Row) -> Sequence[str]:
    if "error" in row:
        return row["case"], f"it did not run: {row['error']}"
    found = NONE if row["found"] is None else "nothing" if not row["found"] else "<br>".join(row["texts"])
    return row["case"], found


def _speed(told: Row) -> str:
    models = [_speed_of(told, model) for model in _rows(told, "model")]
    return _titled("Speed", SPEED, LOOKED_INTO, *models) if models else ""


def _speed_of(told: Row, model: Row) -> str:
    rows = [row for row in _rows(told, "speed") if row["model"] == model["model"]]
    turns = 1 + max((row["round"] for row in rows), default=0)
    kept = "kept" if model["activations"] == "keep" else "computed again in backward"
    head = f"**{model['model']}**, {model['parameters'] / 1e6:,.0f} million parameters, rows of {model['seq']} tokens, "
    sizes = list(dict.fromkeys(row["tokens"] for row in rows if "tokens" in row))
    tables = [_speed_table([row for row in rows if row.get("tokens") == size], size) for size in sizes]
    failed = dict.fromkeys(f"{row['system']}: {row['error']}" for row in rows if "error" in row)
    head += f"activations {kept}; {turns} round{'s' * (turns > 1)}."
    return "\n\n".join([head, *tables, *failed, _step_table(told, model)]).strip()


def _speed_table(rows: Sequence[Row], size: int) -> str:
    """Rows in the order in which the systems first ran."""
    names = list(dict.fromkeys(row["system"] for row in rows))
    times = {name: [s for row in rows if row["system"] == name for s in row["step_s"]] for name in names}
    header = (
        f"{size:,} tokens",
        "step, ms",
        "tokens/s",
        "MFU",
        "/ forward and backward",
        "/ FSDP2",
        "peak, GiB",
        "plan, GiB",
    )
    lines = []
    for name in names:
        row, step_s = next(row for row in rows if row["system"] == name), median(times[name])
        ratios = [
            f"{step_s / median(times[other]):.2f}" if other in times else NONE
            for other in ("forward and backward", "FSDP2")
        ]
        peaks = [one["peak_bytes"] for one in rows if one["system"] == name and one["peak_bytes"] is not None]
        peak, plan = _gib(max(peaks, default=None)), _gib(row["plan_bytes"])
        lines.append((name, _spread(times[name]), f"{size / step_s:,.0f}", _mfu(row, step_s), *ratios, peak, plan))
    return _table(header, lines)


def _step_table(told: Row, model: Row) -> str:
    rows = [row for row in _rows(told, "step") if row["model"] == model["model"]]
    header = ("in a step", "launches", "copies", "waits", "syncs", "hidden", "exposed, ms")
    counts = ("launches", "copies", "waits", "syncs")
    lines = [
        (row["system"], *(_count(row.get(kind)) for kind in counts), *_shares(row.get("shares") or {})) for row in rows
    ]
    return _table(header, lines)


def _largest(told: Row) -> str:
    header = (
        "model",
        "parameters",
        "GPU, host, disk, GiB",
        "forecast, s",
        "steps, s",
        "tokens/s",
        "MFU",
        "peak, GiB",
        "loss",
    )
    lines = [_largest_line(row, told) for row in _rows(told, "forecast")]
    rates = list(dict.fromkeys(row["rates"] for row in _rows(told, "forecast") if "rates" in row))
    intro = f"`offload=auto`, bf16, activations computed again in backward. Rates: {'; '.join(rates)}."
    return _titled("The largest", lines and intro, _table(header, lines))


def _largest_line(row: Row, told: Row) -> Sequence[str]:
    known = row["model"], f"{row['parameters'] / 1e9:.2f} billion"
    if "error" in row:
        return *known, row["error"], *[NONE] * 6
    places = ", ".join(_gib(row["bytes"].get(tier, 0)) for tier in ("device", "host", "nvme"))
    made = [one for one in _rows(told, "largest") if one["model"] == row["model"]]
    if not made:
        return *known, places, f"{row['step_s']:.2f}", *["no step was made", NONE, NONE, NONE, NONE]
    steps = ", ".join(f"{one['step_s']:.2f}" for one in made)
    best = min(one["step_s"] for one in made)
    peak = max((one["peak_bytes"] or 0 for one in made), default=0)
    losses = ", ".join(f"{one['loss']:.3f}" for one in made)
    speed = f"{row['tokens'] / best:,.0f}"
    return *known, places, f"{row['step_s']:.2f}", steps, speed, _mfu(made[0], best), _gib(peak or None), losses


def _traces(told: Row) -> str:
    rows = _rows(told, "exposed")
    lines = [(row["preset"], row["error"], "", "", "") if "error" in row else _trace_line(row) for row in rows]
    return _titled("One step", _table(("offload", "step, ms", "hidden", "exposed, ms", "files"), lines))


def _trace_line(row: Row) -> Sequence[str]:
    return row["preset"], f"{1e3 * row['recorded_s']:.1f}", *_shares(row["shares"]), ", ".join(row["files"])


def _ends(told: Row) -> str:
    """What did not come to its end, or all tasks where that is every one."""
    header = ("part", "task", "", "s")
    lines = [
        (str(one["part"]), one["name"], one["status"], str(one.get("seconds", NONE))) for one in told.get("tasks", [])
    ]
    return _titled("How the parts ended", _table(header, lines))


# -- words -------------------------------------------------------------------------------------------------------------


def row_text(row: Row) -> str:
    """A row in a line, for somebody who looks on."""
    return "  " + "  ".join(f"{key} {_short(value)}" for key, value in row.items() if key not in ("kind", "flops"))


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    return NONE if value is None else str(value)


def _rows(told: Row, kind: str) -> list[Row]:
    return [row for task in told.get("tasks", []) for row in task.get("rows", []) if row.get("kind") == kind]


def _titled(title: str, *texts: Any) -> str:
    there = [text.strip() for text in texts if text and text.strip()]
    return "\n\n".join([f"### {title}", *there]) if there else ""


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Nothing without a line."""
    drawn = ["| " + " | ".join(one.replace("|", "/") for one in line) + " |" for line in lines]
    head = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*head, *drawn]) if drawn else ""


def _spread(times: Sequence[float]) -> str:
    low, high = min(times), max(times)
    return f"{1e3 * median(times):.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"


def _mfu(row: Row, step_s: float) -> str:
    return f"{row['flops'] / step_s / row['peak_flops']:.1%}" if row.get("peak_flops") else NONE


def _gib(nbytes: int | None) -> str:
    return NONE if nbytes is None else f"{nbytes / GB:.2f}"


def _count(number: int | None) -> str:
    return NONE if number is None else f"{number:,}"


def _shares(shares: dict[str, Sequence[float]]) -> tuple[str, str]:
    """(hidden fractions, exposed milliseconds) of the rows that were busy; compute hides nothing."""
    busy = {row: pair for row, pair in shares.items() if row != "compute"}
    hidden = [f"{row} {1 - exposed / whole:.0%}" for row, (whole, exposed) in busy.items()]
    stood = [f"{row} {1e3 * exposed:.1f}" for row, (_, exposed) in busy.items()]
    return ", ".join(hidden) or NONE, ", ".join(stood) or NONE
