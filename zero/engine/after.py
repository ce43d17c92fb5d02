"""The counts after a step: the number of updates and the loss scale, which a device may know before the host."""

from collections.abc import Callable

from zero.core.loss_scale import LossScale

Counts = tuple[int, LossScale]
"""The number of updates, without skipped steps, and the loss scale."""


class After:
    """The counts after a step, which are one of the `possible` ones.

    Args:
        tried: the number of steps, including skipped ones.
        possible: what the counts may be: one pair if the host knows them, else with an update and without.
        learn: waits for the device and returns the counts; called once. None: they are known.
    """

    def __init__(self, tried: int, possible: tuple[Counts, ...], learn: Callable[[], Counts] | None = None) -> None:
        self.tried, self.possible, self._learn = tried, possible, learn

    @classmethod
    def known(cls, step: int, scale: LossScale) -> "After":
        return cls(step + scale.skipped, ((step, scale),))

    def __repr__(self) -> str:
        return f"After({', or '.join(f'step={step}, {scale}' for step, scale in self.possible)})"

    @property
    def counts(self) -> Counts:
        """The counts; waits for the device if the host does not know them."""
        if self._learn is not None:
            self.possible = (self._learn(),)
            self._learn = None
        return self.possible[0]
