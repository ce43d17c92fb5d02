"""The results of a step (`Metrics`), which the host reads from the device when it is asked for one of them."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any


class Metrics:
    """The results of one step, the same on every rank.

    A GPU may not have computed them yet: the first attribute that is read waits for it, unless the host knows it. They
    compare, unpack and print like a named tuple.

    Args:
        read: function that waits for the device and returns all results by name.
        known: results that the host knows.
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
    tokens: int | None
    """The number of tokens in the losses of all ranks; None if losses are means."""

    def __init__(self, read: Callable[[], Mapping[str, Any]], known: Mapping[str, Any] = MappingProxyType({})) -> None:
        vars(self).update(known)
        self._read: Callable[[], Mapping[str, Any]] | None = read

    def __getattr__(self, name: str) -> Any:
        """Read all results; afterwards they are attributes of the object."""
        if name not in FIELDS:
            raise AttributeError(f"Metrics has no attribute {name!r}")
        if (read := self._read) is not None:
            vars(self).update(read())
            self._read = None  # frees what the function holds; last, because another thread may read too
        return vars(self)[name]

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, name) for name in FIELDS)

    def __getitem__(self, place: int) -> Any:
        return getattr(self, FIELDS[place])

    def __len__(self) -> int:
        return len(FIELDS)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, Metrics) else other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, tuple(self)

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(FIELDS, self, strict=True))

    def _replace(self, **values: Any) -> "Metrics":
        if unknown := values.keys() - {*FIELDS}:
            raise ValueError(f"Metrics has no {', '.join(sorted(unknown))}")
        return _made(*(self._asdict() | values).values())


FIELDS = tuple(Metrics.__annotations__)


def _made(*values: Any) -> Metrics:
    return Metrics(lambda: dict(zip(FIELDS, values, strict=True)))
