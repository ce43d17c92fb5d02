"""The keys of a row of metrics, and the base class of outputs that show rows.

A row is a flat mapping with the keys of `ROW`; a value that was not measured is None, in JSON null.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECTIONS = {
    "train": "loss grad_norm lr loss_scale skipped",
    "val": "loss",
    "speed": "steps step_s tokens_per_s mfu compute_s stall_fraction hidden_fraction",
    "comm": "gather_bytes reduce_bytes wire_bytes wait_s slowest_rank slowest_s",
    "offload": "read_bytes write_bytes copy_bytes wait_s read_gbps write_gbps bytes_per_param moved_bytes",
    "memory": "device_peak_bytes host_peak_bytes device_bytes host_bytes nvme_bytes",
}
ROW = ("step", "tokens", *(f"{section}/{name}" for section, names in SECTIONS.items() for name in names.split()))
"""Keys of every row of metrics. A row describes the steps since the row before.

`train/skipped` is the number of skipped steps since the start of the run. `memory/` values are bytes of the rank that
has the most: peaks so far of device and host memory, and the bytes that the plan holds on each tier, which moves
change. `offload/moved_bytes` are the bytes that moves have made on other tiers, on this rank.

`speed/steps` is the number of steps of the row. After a resume it may be smaller than the distance to the row before,
because the checkpoint may be of a step without a row.

`offload/` counts the bytes moved between tiers in the row's steps (`copy_bytes`: between host memory and GPUs), `comm/`
the bytes that ranks received from other ranks (`wire_bytes`: from other nodes), both summed over ranks. `wait_s` is the
time in seconds per step that the rank with the longest wait waited for these transfers. `read_gbps` and `write_gbps`
are 10^9 bytes per second of the time in which something was read or written; null if nothing was. `bytes_per_param` is
bytes read and written per parameter and step. `comm/slowest_rank` is the rank that waited least for other ranks,
because they waited for it; `comm/slowest_s` is the duration of its step without that wait. Both are null on one rank.

`speed/compute_s` is the duration of a step without waiting, on the rank that waited longest, and `speed/stall_fraction`
is that wait as a fraction of the step. `speed/hidden_fraction` is the fraction of the time of reads and writes in which
the training thread did not wait. `speed/mfu` is the fraction of the GPUs' peak FLOP/s. Times do not include validation
and recorded steps; in a row without other steps they are null.
"""

Row = Mapping[str, float | int | None]


QUIET = ("memory/", "comm/", "offload/")
"""Sections whose keys get a chart only after their first nonzero value, because most runs have no such traffic."""


class View:
    """Base class of outputs that show a training run: console, file, W&B.

    Each method does nothing unless a subclass overrides it.
    """

    title = "the console"
    """The name of the view in messages."""

    def expect(self, steps: int) -> None:
        """Take over another number of steps of the whole run, before the first row."""

    def waiting(self, what: str) -> None:
        """Show what the run waits for, a noun, until the first row."""

    def log(self, row: Row) -> None:
        """Show or store a row of metrics."""

    def note(self, text: str) -> None:
        """Print text for the user."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Show the progress of a long operation, such as a save; `done == total` ends it."""

    def saved(self, path: Path, step: int) -> None:
        """Record that the checkpoint of `step` was saved at `path`."""

    def report(self, path: Path) -> None:
        """Publish the report of the run, an HTML file at `path`."""

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Close the view. `summary` is empty if the run failed."""


NO_CHART = ("speed/steps",)
"""Keys without a chart, because they only help to interpret the other keys of a row."""


class Charts:
    """A filter that selects the values of a row that get a chart."""

    def __init__(self) -> None:
        self._moving: set[str] = set()

    def of(self, row: Row) -> dict[str, float | int]:
        """Return the measured values of a row that get a chart, by key."""
        self._moving |= {key for key, value in row.items() if value or not key.startswith(QUIET)} - {*NO_CHART}
        return {key: value for key, value in row.items() if value is not None and key in self._moving}


def finite(value: float | int | None) -> float | int | None:
    """Replace NaN and infinity by None, because JSON has neither."""
    return value if value is None or math.isfinite(value) else None
