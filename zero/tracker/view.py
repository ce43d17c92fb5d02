"""The keys of a row, and the interface of everything that shows rows.

A row is a flat mapping with the keys of `ROW`; a value that was not measured is null.
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
    "offload": "read_bytes write_bytes copy_bytes wait_s read_gbps write_gbps bytes_per_param",
    "memory": "device_peak_bytes host_peak_bytes nvme_bytes",
}
ROW = ("step", "tokens", *(f"{section}/{name}" for section, names in SECTIONS.items() for name in names.split()))
"""Keys of every row. `train/skipped` counts from the start; memory is the most that a rank holds or held.

`speed/steps` is the number of steps of the row: fewer than between two rows where a run goes on, because there may be
no row at the step of its checkpoint.

`offload/` counts bytes between tiers in the row's steps (`copy_bytes`: between host memory and GPUs), `comm/` bytes
that ranks received from others (`wire_bytes`: from other nodes); both are of all ranks. `wait_s` is the seconds per
step for which the slowest rank waited for them; `gbps` is 10^9 bytes a second while something was read or written
(null: nothing was); `bytes_per_param` is per parameter and step.
`comm/slowest_rank` waited least for others, so they waited for it; `comm/slowest_s` is its step without that wait (null
on one rank).

`speed/compute_s` is the step without waiting, on the rank that waited longest; `speed/stall_fraction` is that wait as a
share of the step; `speed/hidden_fraction` is the share of the transfers' time that nobody waited for; `speed/mfu` is
the share of the GPUs' peak. Times leave out validation and recorded steps, and are null in a row without other steps.
"""

Row = Mapping[str, float | int | None]


QUIET = ("memory/", "comm/", "offload/")
"""Sections whose values get a chart only once one was not 0, because most runs have no such traffic."""


class View:
    """A place that shows a run; calls that it has no use for do nothing."""

    title = "the console"
    """The name of the view in messages."""

    def log(self, row: Row) -> None:
        """Show or keep a row."""

    def note(self, text: str) -> None:
        """Show lines for a person."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far a longer work is; `done == total` ends it."""

    def saved(self, path: Path, step: int) -> None:
        """Show that there is a checkpoint at `path`."""

    def report(self, path: Path) -> None:
        """Show the report of the run."""

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """End the view. `summary` is empty when the run failed."""


NO_CHART = ("speed/steps",)
"""Keys that are needed to read the rest of a row."""


class Charts:
    """The values of rows that get a chart."""

    def __init__(self) -> None:
        self._moving: set[str] = set()

    def of(self, row: Row) -> dict[str, float | int]:
        """Return the measured values of a row, without those that need no chart."""
        self._moving |= {key for key, value in row.items() if value or not key.startswith(QUIET)} - {*NO_CHART}
        return {key: value for key, value in row.items() if value is not None and key in self._moving}


def finite(value: float | int | None) -> float | int | None:
    """Replace NaN and infinity by None, because JSON has neither."""
    return value if value is None or math.isfinite(value) else None
