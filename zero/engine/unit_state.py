"""One unit's tensors on one rank, and the update that it waits for."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zero.core.optim import Hyper
from zero.engine.pool import Buffer
from zero.engine.unit import UnitSpec
from zero.platform.handle import Handle
from zero.store import Ticket


@dataclass(eq=False)
class UnitState:
    """One unit's tensors on this rank, and the update that it waits for.

    The store has the rest in pages: moments, the master of half precision, offloaded shards and gradients.

    Attributes:
        resident: the buffer that always holds the full unit, trainable and frozen flat in one, in the compute dtype;
            None when the unit is gathered into the pool.
        shard_S: (S,) of the trainable flat, compute dtype, a view of `resident` if there is one; None where parameters
            are offloaded.
        frozen_S: the same of the frozen flat.
        grad: (P,) or (S,), see `Plan.grad_numel`; None when nothing is trainable, or while it is offloaded.
        secondary: ((N - 1) x S,) of the trainable and of the frozen flat, compute dtype: the shards of other nodes that
            this rank keeps, in the store; see `zero.distributed.routes`.
        secondary_versions: the `versions` that they hold, or will hold after the gather that was started last; -1 where
            they hold nothing.
        deferred: the update that has to be made before the next gather, or None.
        tickets: the parts of that update that the store's threads work on.
        interrupted: that update began and did not end.
        grad_readers: work that still reads `grad`, see `await_grad_readers`.
        version: the number of changes of parameters.
        frozen_version: the number of changes that included frozen ones: steps do not.
        calls: the autograd nodes of this microbatch's forward calls, until all their gradients have arrived.
        returned: the number of calls whose gradients have arrived.
        filled: `grad` holds a part of this step's gradient.
    """

    spec: UnitSpec
    resident: Buffer | None
    shard_S: Tensor | None
    frozen_S: Tensor | None
    grad: Tensor | None
    secondary: tuple[Tensor | None, Tensor | None] = None, None
    secondary_versions: tuple[int, int] = -1, -1
    deferred: Hyper | None = None
    tickets: list[Ticket] = field(default_factory=list)
    interrupted: bool = False
    version: int = 0
    frozen_version: int = 0
    calls: list[Any] = field(default_factory=list)
    returned: int = 0
    filled: bool = False
    grad_readers: list[Handle] = field(default_factory=list)

    @property
    def index(self) -> int:
        return self.spec.index

    @property
    def versions(self) -> tuple[int, int]:
        """Versions of the trainable and of the frozen flat."""
        return self.version, self.frozen_version

    def await_grad_readers(self) -> None:
        """Have the current stream wait for the last update, which reads `grad` beside compute.

        Compute waits for a unit that it visits. Nothing else orders the next gradient of a skipped unit after its
        update.
        """
        while self.grad_readers:
            self.grad_readers[-1].wait()  # an interrupt leaves it there, to be waited for again
            self.grad_readers.pop()

    def mark_changed(self, *, resident: bool, frozen: bool = False) -> None:
        """Make gathered copies stale, because the parameters changed, or also frozen ones.

        Args:
            resident: the resident copy was changed too, and stays current.
        """
        self.version += 1
        self.frozen_version += frozen
        if resident and self.resident is not None:
            self.resident.version = self.version

    def own_params(self, *, full_update: bool) -> Tensor | None:
        """Return the (P,) or (S,) parameters that this rank updates, compute dtype; None where they are offloaded."""
        if full_update and self.resident is not None:
            return self.resident.flat[: self.spec.trainable.P]
        return self.shard_S

    def own_grad_S(self, rank: int) -> Tensor:
        """Return the (S,) range of `grad` that `rank` owns."""
        assert self.grad is not None
        if self.grad.numel() == self.spec.trainable.S:
            return self.grad
        start, stop = self.spec.trainable.shard(rank)
        return self.grad[start:stop]
