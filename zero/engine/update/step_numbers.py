"""The optimizer's numbers of a step: which groups train, how often each was updated, and the squares of the norm."""

import functools
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from zero.core.fused import numbers
from zero.core.layout import Slot
from zero.core.optim import Hyper
from zero.core.update_counts import UpdateCounts
from zero.core.updates import INVERSE, TRAINS, GroupSettings
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.errors import if_it_fails


class StepNumbers:
    """The numbers of this rank's updates.

    Attributes:
        counts: the number of updates of each parameter.
        fused: the rule of the kernel; None without a kernel.
        decided: the numbers of the last decided update; None before the first.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._device, self._rank = plan, plan.world.compute, plan.rank
        self.fused = plan.optimizer.fused if self._device.tile_numel else None
        counted = (slot for unit in plan.units if not unit.matrices for slot in unit.trainable.slots)
        self.counts = UpdateCounts(counted, len(plan.optimizer.groups))
        self.decided: Hyper | None = None  # kept until the next `decide`, because other streams read its table

    def train(self, groups: Sequence[GroupSettings]) -> None:
        """Note which groups train in the next forward, see `UpdateCounts.train`."""
        self.counts.train(groups)

    def measure(self, unit: UnitState) -> None:
        """Compute the sum of squares of the unit's final gradient, over this rank's shard and groups that train.

        The sum is always added over ranges of the shard, so its bits do not depend on stage, page size or tier.
        Parameters that count on another rank of a norm group add 0, or NaN if they are not finite.
        """
        grad_S = unit.own_grad_S(self._rank)
        groups, squares = self._plan.beside.groups, list[Tensor]()
        equal = [grad_S.new_zeros((), dtype=torch.float64) for _ in groups]
        for first, last, equal_on in self._training(unit):
            squares.append(self._device.sum_of_squares(grad_S[first:last]))
            for number in equal_on:
                equal[number] = equal[number] + squares[-1]
            if any(groups[number].rank > 0 for number in equal_on):
                squares[-1] = squares[-1] * 0.0
        unit.step.equal_squares = equal
        if squares:
            unit.step.squares = functools.reduce(torch.add, squares)
        else:
            unit.step.squares = grad_S.new_zeros((), dtype=torch.float64)

    def decide(self, hyper: Hyper) -> Hyper:
        """Return `hyper` with the groups that trained in this step, and the number of updates of each."""
        hyper, rule = self.counts.decide(hyper), self._plan.optimizer.matrix_rule
        with if_it_fails(self.counts.undo):  # the device may have no memory
            table = self._device.upload(numbers(self.fused, hyper, 0 if rule is None else rule.groups))
            if hyper.decision is not None:
                table = hyper.decision.applied(table, TRAINS, INVERSE)
        self.decided = hyper._replace(table=table)
        return self.decided

    def _training(self, unit: UnitState) -> list[tuple[int, int, Sequence[int]]]:
        """Return the maximal ranges of this rank's shard in which all groups train.

        Returns:
            (start, stop) in the shard, and the numbers of the norm groups on whose ranks the range is equal.
        """
        layout, equal = unit.spec.trainable, self._plan.beside.equal_over
        if all(self.counts.trains) and not equal:
            return [(0, layout.S, ())]
        first, last = layout.shard(self._rank)

        def key(extent: tuple[Slot, int, int]) -> tuple[bool, Sequence[int]]:
            return self.counts.trains[extent[0].group], equal.get(extent[0].name, ())

        runs = ((*keys, list(run)) for keys, run in groupby(layout.extents(first, last), key=key))
        return [(run[0][1] - first, run[-1][2] - first, numbers) for trains, numbers, run in runs if trains]
