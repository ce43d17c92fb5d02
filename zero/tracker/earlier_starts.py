"""Best losses and training time of a run before it was resumed, read from its folder."""

from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from zero.tracker.report.folder import read_run
from zero.tracker.report.scale import finite_values


class EarlierStarts(NamedTuple):
    """Best losses and seconds of the earlier starts of a resumed run; infinite losses and zero seconds if unknown.

    Attributes:
        best_val_step: the step whose validation loss is `best_val_loss`.
    """

    best_train_loss: float = inf
    best_val_loss: float = inf
    best_val_step: float = inf
    seconds: float = 0.0

    @classmethod
    def of(cls, facts: dict[str, Any]) -> "EarlierStarts":
        """Return the figures that `facts` has under the fields' names; missing or non-finite values are unknown."""
        known = {name: value for name in cls._fields if (value := finite_values(facts.get(name))) is not None}
        return cls(**known)

    def facts(self) -> dict[str, float | None]:
        """Return the figures as JSON values, which `of` reads; unknown losses become null."""
        return {name: finite_values(value) for name, value in self._asdict().items()}


def earlier_starts(folder: Path, step: int) -> EarlierStarts:
    """Return the best losses and the seconds of the earlier starts of the run in `folder`, which resumes from `step`.

    Losses of steps after `step` do not count, because the run repeats these steps; their seconds count. metrics.jsonl
    has the training losses of some steps only, so the best losses of summary.json are included if it ends by `step`.
    """
    run = read_run(folder)
    summary = EarlierStarts.of(run.summary)
    rows = [row for row in run.rows if row["step"] <= step]
    train, val = (
        [(loss, row["step"]) for row in rows if (loss := finite_values(row.get(f"{kind}/loss"))) is not None]
        for kind in ("train", "val")
    )
    if (finite_values(run.summary.get("steps")) or inf) <= step:
        train, val = [*train, (summary.best_train_loss, inf)], [*val, (summary.best_val_loss, summary.best_val_step)]
    best_train_loss, _ = min(train, default=(inf, inf))
    best_val_loss, best_val_step = min(val, default=(inf, inf))
    return EarlierStarts(best_train_loss, best_val_loss, best_val_step, summary.seconds)
