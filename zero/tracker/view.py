"""What a run reports, row by row, and the interface of everything that shows it.

A row is a flat mapping with the keys of `ROW`; what was not measured is null.
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

`speed/steps` is of how many steps the row is: fewer than between two rows where a run goes on, because it may have had
no row at the step that it goes on from.

`offload/` is what moved between tiers in this row's steps (`copy_bytes`: between host memory and GPUs), `comm/` what
ranks received from others, `wire_bytes` of it from other nodes: bytes of all ranks; seconds per step in which the
slowest rank stood still for it; 10^9 bytes a second while something was read or written (null: nothing was); bytes
read and written per parameter and step.
`comm/slowest_rank` waited least for others, so they waited for it; `comm/slowest_s` is what is left of its step (null:
there is one rank).

`speed/compute_s` is what is left of a step on the rank that stood still longest, for whatever reason;
`speed/stall_fraction` is the rest as a share of the step; `speed/hidden_fraction` is the share of the transfers' time
that nobody waited for; `speed/mfu` the share of what the GPUs could do at most. Validation is left out of all times,
and so is a step that is recorded: null where a row has no other.
"""

Row = Mapping[str, float | int | None]


QUIET = ("memory/", "comm/", "offload/")
"""Of these a value gets no chart as long as it was always 0: a chart of what a run does not have is in the way."""


class View:
    """One place that shows a run. Each shows what it has room for, and nothing of the rest."""

    title = "the console"
    """What a person is told of when it fails."""

    def log(self, row: Row) -> None:
        """Show or keep one row."""

    def note(self, text: str) -> None:
        """Show lines for a person."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how far a longer work has come; `done == total` ends it."""

    def saved(self, path: Path, step: int) -> None:
        """There is a checkpoint at `path`."""

    def report(self, path: Path) -> None:
        """There is a page about the run."""

    def close(self, summary: Mapping[str, Any], exit_code: int) -> None:
        """Nothing follows. `summary` is empty when the run failed."""


NO_CHART = ("speed/steps",)
"""What says how to read the rest of a row."""


class Charts:
    """Which values of a row get a chart."""

    def __init__(self) -> None:
        self._moving: set[str] = set()

    def of(self, row: Row) -> dict[str, float | int]:
        """The values of a row that were measured, without those that were always 0 and need no chart."""
        self._moving |= {key for key, value in row.items() if value or not key.startswith(QUIET)} - {*NO_CHART}
        return {key: value for key, value in row.items() if value is not None and key in self._moving}


def finite(value: float | int | None) -> float | int | None:
    """What JSON has a word for."""
    return value if value is None or math.isfinite(value) else None
