"""The results of a step (`Metrics`), which the host reads from the device when it is asked for one of them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class StepResults(NamedTuple):
    """The values of `Metrics`, in its order."""

    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    nonfinite_unit: str | None
    aux: Mapping[str, float]
    rank_flags: tuple[float, ...]


class Metrics:
    """The results of one step, the same on every rank.

    A GPU may not have computed them yet: the first attribute that is read waits for it. They compare, unpack and print
    like a named tuple.
    """

    loss: float
    """The mean loss over the global batch."""
    grad_norm: float
    """The L2 norm of the mean gradient before clipping; infinite or NaN if the step was skipped."""
    lr: float
    """The learning rate of the default parameter group."""
    loss_scale: float
    """The loss scale of this step; 1 unless the precision is fp16."""
    skipped: bool
    """Whether the update was skipped because a gradient was infinite or NaN."""
    nonfinite_unit: str | None
    """The name of the first unit with an infinite or NaN gradient; None if there is none."""
    aux: Mapping[str, float]
    """The means over the global batch of the further numbers that `loss_fn` returned with the loss, by name."""
    rank_flags: tuple[float, ...]
    """Each rank's `flag`, see `make_step`, by rank; with norm groups by the rank in the group, then in the world."""

    def __init__(self, read: Callable[[], StepResults]) -> None:
        self._read: Callable[[], StepResults] | None = read
        self._values: StepResults | None = None

    @property
    def values(self) -> StepResults:
        """All results; waits for the device."""
        if self._values is None:
            assert self._read is not None
            self._values, self._read = self._read(), None  # frees what the function holds
        return self._values

    def __getattr__(self, name: str) -> Any:
        if name not in StepResults._fields:
            raise AttributeError(f"Metrics has no attribute {name!r}")
        return getattr(self.values, name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values)

    def __getitem__(self, place: int) -> Any:
        return self.values[place]

    def __len__(self) -> int:
        return len(StepResults._fields)

    def __eq__(self, other: object) -> bool:
        return self.values == (other.values if isinstance(other, Metrics) else other)

    def __hash__(self) -> int:
        return hash(self.values)

    def __repr__(self) -> str:
        return repr(self.values).replace(StepResults.__name__, type(self).__name__, 1)

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, tuple(self.values)

    def _asdict(self) -> dict[str, Any]:
        return self.values._asdict()

    def _replace(self, **values: Any) -> "Metrics":
        return _made(*self.values._replace(**values))


def _made(*values: Any) -> Metrics:
    return Metrics(lambda: StepResults(*values))
