"""The best losses and the seconds of the earlier starts of a run that goes on."""

from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from zero.tracker.report.folder import read_run
from zero.tracker.report.scale import finite


class Earlier(NamedTuple):
    """Figures of earlier starts; unknown losses are infinite, unknown seconds zero."""

    best_train_loss: float = inf
    best_val_loss: float = inf
    seconds: float = 0.0

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "Earlier":
        """Take the figures of these names; those missing or not finite are unknown."""
        known = {name: value for name in cls._fields if (value := finite(facts.get(name))) is not None}
        return cls(**known)

    def facts(self) -> dict[str, float | None]:
        """Return JSON values, for `of`."""
        return {name: finite(value) for name, value in self._asdict().items()}


def earlier(folder: Path, step: int) -> Earlier:
    """Read the files of the run in `folder` that goes on from `step`.

    Losses of later steps do not count, but the seconds that they took do. Rows have some of the training losses, a
    summary has the best of all up to its own last step.
    """
    run = read_run(folder)
    summary = Earlier.of(run.summary)
    rows = [row for row in run.rows if row["step"] <= step]
    train, val = (
        [loss for row in rows if (loss := finite(row.get(f"{kind}/loss"))) is not None] for kind in ("train", "val")
    )
    if (finite(run.summary.get("steps")) or inf) <= step:
        train, val = [*train, summary.best_train_loss], [*val, summary.best_val_loss]
    return Earlier(min(train, default=inf), min(val, default=inf), summary.seconds)
