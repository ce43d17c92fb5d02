"""`gpu.json` as Markdown: of a run that is under way, of a dry run, and for the documentation.

Does not import torch. Every part of the JSON may be missing; what is missing is not shown.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

Row = dict[str, Any]
GB = 2**30
NONE = "–"

NONE_YET = "No GPU has been seen yet: this section is what `scripts/gpu --page gpu.json` prints when one has been."
"""The only line of the section until there is a `docs/gpu.json`."""

HEADING = "## On a GPU"

BEGINNING = """\
`{command}`, {date}{commit}, {device}. One rank, unless a number is given. The last table lists tasks that failed or
reached their time limit; their results until then are included.
"""

SPEED = """\
bf16, the same rows and initial values for all. The systems run one after the other in one process, in every second
round in the opposite order. A step is the time between two events on the compute stream: median (lowest to highest).
MFU does not count recomputation, and refers to the dense peak that the maker states. "peak" is the most memory of
tensors on the GPU in these steps; "plan" is the plan's count for a step of this size. On several GPUs
the tokens are those of one rank.
"""

INSPECTED = """\
The content of a step is measured in separate steps of the first size. Launches, copies (and fills) and waits are calls
of CUDA's runtime in all threads. Syncs are torch operators that made the host wait, counted by torch's sync debug mode.
Hidden: the part of a timeline row's busy time during which nothing waited for it.
"""


COLLECTIVES = """\
Collectives of a tensor of this size on each rank: bus bandwidth in GB/s (milliseconds). An exact sum adds in fp32, in
the order of ranks.
"""


def page(results: Row) -> str:
    """Return all results as a section of the documentation."""
    parts = [
        HEADING,
        _beginning(results),
        *(make(results) for make in (_machine, _laws, _speed, _largest, _traces, _several)),
        _ends(results),
    ]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _beginning(results: Row) -> str:
    known = {"command": "scripts/gpu", "date": "", "device": "not known yet"}
    facts = {row["what"]: row["value"] for row in _rows(results, "fact")}
    known |= {key: results[key] for key in known if results.get(key)} | (
        {"device": facts["GPU"]} if "GPU" in facts else {}
    )
    known["commit"] = f", commit {results['commit']}" if results.get("commit") else ""
    simulated = "Nothing of this ran on a GPU: it is a dry run.\n\n" if results.get("simulated") else ""
    return simulated + BEGINNING.format(**known)


# -- parts -------------------------------------------------------------------------------------------------------------


def _machine(results: Row) -> str:
    rates = [(row["what"], _rate(row)) for row in _rows(results, "rate")]
    facts = [(row["what"], str(row["value"])) for row in _rows(results, "fact")]
    return _titled("The machine", _table(("", ""), [*facts, *rates]))


def _rate(row: Row) -> str:
    return row["error"] if "error" in row else f"{row['rate']:,.1f} {row['unit']}"


def _laws(results: Row) -> str:
    digests = _rows(results, "digest")
    groups = list(dict.fromkeys((row["precision"], row["family"]) for row in digests))
    lines = [_group(*group, [row for row in digests if (row["precision"], row["family"]) == group]) for group in groups]
    equal = _table(("precision", "", "settings", "with the same bits", "others"), lines)
    bounds = _table(
        ("precision", "reference", "ranks", "steps", "loss, relative", "norm, relative", "bound", ""),
        [_bound(row) for row in _rows(results, "bound")],
    )
    hazards = _table(("", "found by torch's sanitizer"), [_hazards(row) for row in _rows(results, "hazards")])
    notes = [row["text"] for row in _rows(results, "note")]
    return _titled("The laws", equal, *notes, bounds and f"Largest differences from a reference:\n\n{bounds}", hazards)


def _group(precision: str, family: str, rows: Sequence[Row]) -> Sequence[str]:
    others = [f"{row['case']}: {row.get('error', row.get('digest'))}" for row in rows if not row.get("equal")]
    same = sum(bool(row.get("equal")) for row in rows)
    return precision, family, str(len(rows)), str(same), "; ".join(others) or "none"


def _bound(row: Row) -> Sequence[str]:
    known = row["precision"], row["reference"], str(row["ranks"]), str(row["steps"])
    if "error" in row:
        return *known, row["error"], "", "", "failed"
    far = [f"{row[what]:.1e}" for what in ("loss", "norm")]
    return *known, *far, f"{row['bound']:.0e}", "holds" if row["holds"] else "**does not**"


def _hazards(row: Row) -> Sequence[str]:
    if "error" in row:
        return row["case"], f"failed: {row['error']}"
    findings = NONE if row["found"] is None else "nothing" if not row["found"] else "<br>".join(row["texts"])
    return row["case"], findings


def _speed(results: Row) -> str:
    models = [_speed_of(results, model) for model in _rows(results, "model")]
    return _titled("Speed", SPEED, INSPECTED, *models) if models else ""


def _speed_of(results: Row, model: Row) -> str:
    rows = [row for row in _rows(results, "speed") if row["model"] == model["model"]]
    turns = 1 + max((row["round"] for row in rows), default=0)
    kept = "kept" if model["activations"] == "keep" else "computed again in backward"
    head = f"**{model['model']}**, {model['parameters'] / 1e6:,.0f} million parameters, rows of {model['seq']} tokens, "
    sizes = list(dict.fromkeys(row["tokens"] for row in rows if "tokens" in row))
    tables = [_speed_table([row for row in rows if row.get("tokens") == size], size) for size in sizes]
    failed = dict.fromkeys(f"{row['system']}: {row['error']}" for row in rows if "error" in row)
    head += f"activations {kept}; {turns} round{'s' * (turns > 1)}."
    return "\n\n".join([head, *tables, *failed, _step_table(results, model)]).strip()


def _speed_table(rows: Sequence[Row], size: int) -> str:
    """Return a table with rows in the order in which the systems first ran."""
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
        peaks = [
            sample["peak_bytes"] for sample in rows if sample["system"] == name and sample["peak_bytes"] is not None
        ]
        peak, plan = _gib(max(peaks, default=None)), _gib(row["plan_bytes"])
        lines.append((name, _spread(times[name]), f"{size / step_s:,.0f}", _mfu(row, step_s), *ratios, peak, plan))
    return _table(header, lines)


def _step_table(results: Row, model: Row) -> str:
    rows = [row for row in _rows(results, "step") if row["model"] == model["model"]]
    header = ("in a step", "launches", "copies", "waits", "syncs", "hidden", "exposed, ms")
    counts = ("launches", "copies", "waits", "syncs")
    lines = [
        (row["system"], *(_count(row.get(count)) for count in counts), *_shares(row.get("shares") or {}))
        for row in rows
    ]
    return _table(header, lines)


def _largest(results: Row) -> str:
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
    lines = [_largest_line(row, results) for row in _rows(results, "forecast")]
    rates = list(dict.fromkeys(row["rates"] for row in _rows(results, "forecast") if "rates" in row))
    intro = f"`offload=auto`, bf16, activations computed again in backward. Rates: {'; '.join(rates)}."
    return _titled("The largest", lines and intro, _table(header, lines))


def _largest_line(row: Row, results: Row) -> Sequence[str]:
    known = row["model"], f"{row['parameters'] / 1e9:.2f} billion"
    if "error" in row:
        return *known, row["error"], *[NONE] * 6
    places = ", ".join(_gib(row["bytes"].get(tier, 0)) for tier in ("device", "host", "nvme"))
    made = [made_step for made_step in _rows(results, "largest") if made_step["model"] == row["model"]]
    if not made:
        return *known, places, f"{row['step_s']:.2f}", *["no step was completed", NONE, NONE, NONE, NONE]
    steps = ", ".join(f"{made_step['step_s']:.2f}" for made_step in made)
    best = min(made_step["step_s"] for made_step in made)
    peak = max((made_step["peak_bytes"] or 0 for made_step in made), default=0)
    losses = ", ".join(f"{made_step['loss']:.3f}" for made_step in made)
    speed = f"{row['tokens'] / best:,.0f}"
    return *known, places, f"{row['step_s']:.2f}", steps, speed, _mfu(made[0], best), _gib(peak or None), losses


def _traces(results: Row) -> str:
    rows = _rows(results, "exposed")
    lines = [(row["preset"], row["error"], "", "", "") if "error" in row else _trace_line(row) for row in rows]
    return _titled("One step", _table(("offload", "step, ms", "hidden", "exposed, ms", "files"), lines))


def _trace_line(row: Row) -> Sequence[str]:
    return row["preset"], f"{1e3 * row['recorded_s']:.1f}", *_shares(row["shares"]), ", ".join(row["files"])


def _several(results: Row) -> str:
    rows = _rows(results, "collective")
    names = list(dict.fromkeys(row["what"] for row in rows))
    rates = {(row["bytes"], row["what"]): f"{row['rate']:,.1f} ({1e3 * row['s']:.2f})" for row in rows}
    sizes = dict.fromkeys(row["bytes"] for row in rows)
    lines = [(f"{size / 2**20:g}", *(rates.get((size, name), NONE) for name in names)) for size in sizes]
    collectives = _table(("MiB", *names), lines)
    header = ("", "rank", "how it ended", "s")
    failures = _table(header, [_failure(row) for row in _rows(results, "failure")])
    return _titled("Several GPUs", *(collectives and (COLLECTIVES, collectives)), failures)


def _failure(row: Row) -> Sequence[str]:
    return row["case"], str(row["rank"]), row["end"], f"{row['s']:.1f}"


def _ends(results: Row) -> str:
    """Return a table of the status of every task."""
    header = ("part", "task", "", "s")
    lines = [
        (str(task["part"]), task["name"], task["status"], str(task.get("seconds", NONE)))
        for task in results.get("tasks", [])
    ]
    return _titled("How the parts ended", _table(header, lines))


# -- text --------------------------------------------------------------------------------------------------------------


def row_text(row: Row) -> str:
    """Return a row as one line of text, for the terminal."""
    return "  " + "  ".join(f"{key} {_short(value)}" for key, value in row.items() if key not in ("kind", "flops"))


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    return NONE if value is None else str(value)


def _rows(results: Row, row_type: str) -> list[Row]:
    return [row for task in results.get("tasks", []) for row in task.get("rows", []) if row.get("kind") == row_type]


def _titled(title: str, *texts: Any) -> str:
    paragraphs = [text.strip() for text in texts if text and text.strip()]
    return "\n\n".join([f"### {title}", *paragraphs]) if paragraphs else ""


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; an empty text if there are no lines."""
    drawn = ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
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
    """Return (hidden fractions, exposed milliseconds) of the busy rows of a timeline, except compute."""
    busy = {row: pair for row, pair in shares.items() if row != "compute"}
    hidden = [f"{row} {1 - exposed / whole:.0%}" for row, (whole, exposed) in busy.items()]
    exposed_ms = [f"{row} {1e3 * exposed:.1f}" for row, (_, exposed) in busy.items()]
    return ", ".join(hidden) or NONE, ", ".join(exposed_ms) or NONE
