"""Figures of the steps so far, whose metrics are read one step late.

A GPU may still be computing the newest step while the host goes on. Its metrics are read when the next step is counted,
by which time the step has needed them, or when somebody asks for a figure.
"""

from math import inf, nan

from zero.engine.metrics import Metrics


class StepResults:
    """The losses and the skipped steps of a run.

    Args:
        skipped: the number of skipped steps in earlier starts.

    Attributes:
        skipped_in_a_row: the number of the last steps that were all skipped, up to the newest one that was read.
    """

    def __init__(self, skipped: int) -> None:
        self._skipped, self.skipped_in_a_row, self._best_loss = skipped, 0, inf
        self._last: Metrics | None = None
        self._is_read = True

    def count(self, metrics: Metrics) -> None:
        """Count a step, and read the metrics of the step before."""
        self._read()
        self._last, self._is_read = metrics, False

    @property
    def last(self) -> Metrics | None:
        """The metrics of the newest step; None before the first."""
        self._read()
        return self._last

    @property
    def skipped(self) -> int:
        """The number of skipped steps."""
        self._read()
        return self._skipped

    @property
    def loss(self) -> float:
        """The newest loss; NaN before the first step."""
        return nan if self.last is None else self.last.loss

    @property
    def best_loss(self) -> float:
        """The lowest loss of this start; infinite before the first step."""
        self._read()
        return self._best_loss

    def _read(self) -> None:
        if self._last is None or self._is_read:
            return
        self._is_read, metrics = True, self._last
        self._skipped += metrics.skipped
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * metrics.skipped
        self._best_loss = min(self._best_loss, metrics.loss)
