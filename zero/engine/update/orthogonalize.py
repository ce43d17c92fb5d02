"""Orthogonalize the directions of a unit of matrices, each matrix on one rank.

The ranks have equal parts of the flat directions. Most matrices are on one rank already. The parts of a matrix that is
cut are sent to the rank that has its middle, and back, in bf16. If each rank has all directions, nothing is sent, and
each rank works on all matrices. The batches, and so the bits, are the same either way.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero.distributed.routes import within_node
from zero.engine.model import UnitSpec
from zero.engine.plan import Part, Plan
from zero.engine.unit_state import UnitState
from zero.store import Ticket


class Orthogonalizer:
    """Device memory for the directions of one unit at a time, and the exchange of whole matrices.

    Attributes:
        allocated_bytes: the size of that memory; 0 if the plan has no matrices.
    """

    def __init__(self, plan: Plan) -> None:
        world, device = plan.world, plan.world.compute
        self._plan, self._world, self.allocated_bytes = plan, world, 0
        if plan.sizes.matrix_numels:
            if not plan.facts.full_update:  # an order of operations of its own, beside gathers and sums
                local = plan.facts.sharers < world.size
                self._world = within_node(world, "update") if local else world.part(range(world.size), "update")
            directions, owned, scratch = plan.sizes.matrix_numels
            self._directions, self._owned = (device.zeros(numel, torch.bfloat16) for numel in (directions, owned))
            self._scratch = device.zeros(scratch, plan.sizes.matrix_scratch_dtype)
            self.allocated_bytes = sum(held.nbytes for held in (self._directions, self._owned, self._scratch))

    def directions(self, unit: UnitSpec) -> Tensor:
        """Return the directions of the elements that this rank updates of a unit, (P,) or (S,) bf16."""
        return self._directions[: self._plan.sizes.update_numel(unit)]

    def run(self, unit: UnitSpec) -> None:
        """Replace the directions by orthogonal ones, on the current stream. Collective."""
        directions = self.directions(unit)
        if self._plan.facts.full_update:
            self._orthogonalize(unit, directions, 0)
            return
        even, cuts = unit.trainable.cuts, unit.owners
        first, last = cuts[self._world.rank : self._world.rank + 2]
        owned, what = self._owned[: last - first], f"directions of {unit.name}"
        self._world.reshard(directions, owned, even, cuts, what=what).wait()
        self._orthogonalize(unit, owned, first)
        self._world.reshard(owned, directions, cuts, even, what=what).wait()

    def _orthogonalize(self, unit: UnitSpec, flat: Tensor, first: int) -> None:
        """Orthogonalize the matrices that lie in `flat`, which begins at element `first` of the unit's flat."""
        rule = self._plan.optimizer.matrix_rule
        assert rule is not None
        for batch in unit.matrices:
            if first <= batch.start < first + flat.numel():
                matrices = flat[batch.start - first : batch.stop - first]
                rule.orthogonalize(matrices.view(batch.number, batch.rows, batch.columns), self._scratch)


class MatrixPasses:
    """The two passes of the update of a unit with matrices, with the exchange of directions between them.

    Args:
        advance: starts the later parts of gathers that this rank does not wait for, see `Routes.advance`.
    """

    def __init__(self, plan: Plan, advance: Callable[[], None]) -> None:
        self._device, self._advance = plan.world.compute, advance
        self._orthogonalizer = Orthogonalizer(plan)
        self.directions, self.allocated_bytes = self._orthogonalizer.directions, self._orthogonalizer.allocated_bytes
        self._readers, self._read = list[Ticket](), self._device.mark()  # readers of the directions of the last unit

    def run(self, unit: UnitState, launch: Callable[[Sequence[Part]], list[Ticket]]) -> list[Ticket]:
        """Launch both passes for the current stream. Collective.

        The host waits for the momentum that the store's threads update; then they get the parameters.

        Args:
            launch: launches a pass over some parts, and returns the tickets of the work of the store's threads.

        Returns:
            The tickets of the second pass.
        """
        unit.grad_ready.wait()
        self._read.wait()
        self._advance()  # because this rank waits for others, which may wait for those gathers
        for turn in range(2):
            for ticket in self._readers:  # readers of the last unit's directions, or writers of this unit's
                ticket.wait()
            if turn == 1:
                self._orthogonalizer.run(unit.spec)
            self._readers = launch([part for part in unit.parts if part.turn == turn])
        self._read = self._device.mark()
        return self._readers
