"""One unit's tensors on one rank, and the update that it waits for.

full_P     trainable and frozen flats in one buffer, in the compute dtype: resident, or borrowed from the pool
shard_S    this rank's range of the trainable flat in the compute dtype; a view of full_P where that is resident
frozen_S   the same for the frozen flat
grad       the gradient that the update will read: this rank's range, or the whole flat
pages      what is kept of the master (half precision only) and moments, in the store; there also shards and gradients
           that are offloaded, and secondary shards
"""

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

    Attributes:
        resident: the buffer that always holds the full unit; None when the unit is gathered into the pool.
        shard_S: (S,) trainable, compute dtype; None where parameters are offloaded.
        frozen_S: (S of the frozen flat,), compute dtype; likewise.
        grad: (P,) or (S,), see `Plan.grad_numel`; None when nothing is trainable, or while it is offloaded.
        secondary: ((N - 1) x S,) of trainable and of frozen ones, compute dtype: what this rank keeps of other nodes',
            in the store; see `zero.distributed.routes`.
        secondary_versions: what they are of, as `versions`, or will be after the gather that was started last; -1 where
            they hold nothing.
        deferred: the update that has to be made before the next gather, or None.
        tickets: the parts of that update that the store's threads work on.
        interrupted: that update began and did not end.
        grad_readers: work that still reads `grad`, see `await_grad_readers`.
        version: how many times the parameters changed.
        frozen_version: how many times the frozen ones did: what a step does leaves them.
        calls: the autograd nodes of this microbatch's forward calls, until all their gradients have arrived.
        returned: how many of them have.
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
        """Of the trainable flat and of the frozen one."""
        return self.version, self.frozen_version

    def await_grad_readers(self) -> None:
        """Have the current stream wait for the last update, which reads `grad` beside compute.

        Compute waits for a unit that it visits. A unit that a step skips is updated too, and nothing else orders its
        next gradient after that.
        """
        while self.grad_readers:
            self.grad_readers[-1].wait()  # an interrupt leaves it there, to be waited for again
            self.grad_readers.pop()

    def mark_changed(self, *, resident: bool, frozen: bool = False) -> None:
        """The parameters changed, or also `frozen` ones: gathered copies are stale, except a resident one that was
        changed too."""
        self.version += 1
        self.frozen_version += frozen
        if resident and self.resident is not None:
            self.resident.version = self.version

    def own_params(self, *, full_update: bool) -> Tensor | None:
        """(P,) or (S,): what this rank updates, in the compute dtype; None where it is offloaded."""
        if full_update and self.resident is not None:
            return self.resident.flat[: self.spec.trainable.P]
        return self.shard_S

    def own_grad_S(self, rank: int) -> Tensor:
        """(S,): the range of `grad` that `rank` owns, whether the rest is kept or not."""
        assert self.grad is not None
        if self.grad.numel() == self.spec.trainable.S:
            return self.grad
        start, stop = self.spec.trainable.shard(rank)
        return self.grad[start:stop]
