"""The sizes of the buffers and flats that follow from a run's facts for one rank, in elements.

P is the number of elements of a flat tensor with padding, S the number of elements of one rank's shard of it, see
`Layout`.
"""

from collections import Counter
from collections.abc import Sequence
from heapq import nlargest
from itertools import groupby, pairwise
from typing import NamedTuple

import torch

from zero.core.layout import Layout
from zero.engine.memory import Pool
from zero.engine.model import Flat, UnitSpec
from zero.engine.plan.facts import Facts
from zero.platform.device import Device
from zero.store import PageKind


class GatherCounts(NamedTuple):
    """The gathers of units into buffers of the pool, by index."""

    forward: Counter[int]
    backward: Counter[int]
    still: set[int]
    """Units that a forward finds in a buffer, which are gathered once more if an update has changed them."""


class Sizes:
    """The sizes of what one rank holds of each unit, and of the buffers that all units share."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def buffer_numel(self, unit: UnitSpec) -> int:
        """Return the number of elements of the unit's gathered buffer: the parameters, then room for packed bytes.

        A single rank expands packed parameters from where they are in device memory.
        """
        arrive = self.facts.world.size > 1 or self.facts.params_offloaded
        packed_bytes = unit.packed.stored.P if arrive and unit.packed else 0
        return unit.full_numel + packed_bytes // self.facts.precision.compute.itemsize

    def grad_numel(self, unit: UnitSpec) -> int:
        """Return the number of elements of the unit's gradient that this rank keeps for the update."""
        return unit.trainable.P if self.facts.local_sum or self.facts.full_update else unit.trainable.S

    def update_numel(self, unit: UnitSpec) -> int:
        """Return the number of elements of the unit's master, and of each moment, on this rank."""
        return unit.trainable.P if self.facts.full_update else unit.trainable.S

    def kept_numel(self, flat: Flat) -> int:
        """Return the number of elements of a stored flat that this rank keeps in device memory."""
        whole = self.facts.resident or (self.facts.full_update and flat.kind == PageKind.PARAM)
        return flat.stored.P if whole else flat.stored.S

    def received_numel(self, layout: Layout) -> int:
        """Return the number of elements that a rank receives in the reduction of a flat gradient."""
        return layout.S if self.facts.sum_route.backend_adds else layout.P

    def secondary_numel(self, layout: Layout) -> int:
        """Return the number of elements of this rank's secondary shard of a stored flat; 0 if none is kept.

        A secondary shard copies one shard from each other node, that of the rank with the same local rank.
        """
        return (self.facts.world.nodes - 1) * layout.S if self.facts.keeps_secondary else 0

    @property
    def matrix_numels(self) -> tuple[int, int, int] | tuple[()]:
        """The elements of device memory for a unit's directions, a rank's whole matrices, and products of them.

        Each is the largest over units and ranks, because all ranks must place pages alike; empty without matrices.
        """
        units = [unit for unit in self.facts.units if unit.matrices]
        if not units:
            return ()
        ranges = [b - a for unit in units if not self.facts.full_update for a, b in pairwise(unit.owners)]
        scratch = max(batch.scratch_numel for unit in units for batch in unit.matrices)
        return max(map(self.update_numel, units)), max(ranges, default=0), scratch

    @property
    def matrix_flops(self) -> int:
        """The floating point operations that orthogonalize the matrices of a step, on the rank with most, per unit."""

        rule = self.facts.optimizer.matrix_rule
        if rule is None:
            return 0

        def most(unit: UnitSpec) -> int:
            cuts = (0, unit.trainable.P) if self.facts.full_update else unit.owners
            ranges = [range(*ends) for ends in pairwise(cuts)]
            return max(sum(rule.flops(batch) for batch in unit.matrices if batch.start in ends) for ends in ranges)

        return sum(most(unit) for unit in self.facts.units if unit.matrices)

    @property
    def matrix_scratch_dtype(self) -> torch.dtype:
        """The dtype in which matrices are multiplied: fp32 on a CPU, which may lack units for bf16."""
        return torch.float32 if self.facts.device_is_host else torch.bfloat16

    def shared_buffer_sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each gathered buffer that any unit may use.

        There is one buffer for each unit in use at once, and one for each prefetched unit. All are as large as the
        largest unit, because a unit that is gathered into a buffer stays there until another one needs it.
        """
        pooled = [unit for unit in self.facts.units if not self.facts.is_resident(unit)]
        numels = [self.buffer_numel(unit) for unit in pooled if unit.index not in self.facts.kept_units]
        if not numels:
            return ()
        return (max(numels),) * min(len(numels), self.facts.splitting.depth + 1 + self.facts.prefetch)

    def own_buffer_sizes(self) -> dict[int, int]:
        """Return the number of elements of the gathered buffers of the units that stay gathered, by their index."""
        kept = [
            unit
            for unit in self.facts.units
            if unit.index in self.facts.kept_units and not self.facts.is_resident(unit)
        ]
        return {unit.index: self.buffer_numel(unit) for unit in kept}

    def flat_sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each pooled gradient flat, the largest first.

        Two reductions of the largest units may be under way. Each uses a flat to send and one to receive. If the
            backend adds, flats to receive are small, so there is one more flat for a unit that holds its flat while
            others are reduced: a tied unit, or one around others.
        """
        layouts = [unit.trainable for unit in self.facts.units if unit.trainable.slots and self.facts.world.size > 1]
        largest = nlargest(3, layouts, key=lambda layout: layout.P)
        sizes = [numel for layout in largest[:2] for numel in (layout.P, self.received_numel(layout))]
        uses = Counter(unit for site in self.facts.splitting.sites for unit in site.units)
        if self.facts.sum_route.backend_adds and (self.facts.splitting.depth or max(uses.values(), default=0) > 1):
            sizes += [layout.P for layout in largest[2:]]
        for unit in self.facts.units:
            if unit.shared and unit.trainable in layouts and unit.trainable not in largest[:2]:
                sizes += [unit.trainable.P, self.received_numel(unit.trainable)]
        return tuple(sorted(sizes, reverse=True))

    def partial_sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each buffer for sums within a node: one for each reduction."""
        route, world = self.facts.sum_route, self.facts.world
        return tuple(route.partial_numel(world, P) for P in self.flat_sizes()[::2] if route.by_node)

    def grad_buffer_sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each buffer that offloaded gradients arrive in."""
        if not self.facts.grads_offloaded:
            return ()
        # Two for the reductions under way. With local sums one more, because the sum of microbatches is copied out of
        # it to be sent. A single CPU rank needs one less: it has written a gradient before the next unit's arrives.
        count = (
            2
            + (self.facts.local_sum and self.facts.world.size > 1)
            - (self.facts.world.size == 1 and self.facts.device_is_host)
        )
        numels = [self.grad_numel(unit) for unit in self.facts.units if unit.trainable.slots and not unit.shared]
        own = tuple(self.grad_numel(unit) for unit in self.facts.units if unit.trainable.slots and unit.shared)
        return (max(numels, default=0),) * min(len(numels), count) + own

    def buffer_bytes(self) -> dict[str, int]:
        """Return the bytes of the device buffers for gathered units and for gradients, by kind."""
        kinds = {
            "gathered units": (
                (*self.shared_buffer_sizes(), *self.own_buffer_sizes().values()),
                self.facts.precision.compute,
            ),
            "gradient flats": (self.flat_sizes(), self.facts.flat_dtype),
            "node sums": (self.partial_sizes(), torch.float32),
            "gradient buffers": (self.grad_buffer_sizes(), self.facts.grad_dtype),
        }
        held = {kind: dtype.itemsize * sum(sizes) for kind, (sizes, dtype) in kinds.items()}
        *flats, scratch = self.matrix_numels or (0,)
        return held | {"matrices": 2 * sum(flats) + self.matrix_scratch_dtype.itemsize * scratch}

    def gathers(self) -> GatherCounts:
        """Return how often a forward and a backward gather each unit, beyond the units that are still in a buffer.

        Sites run one after another, a site inside of another after it, and backward visits them the other way around.
        """
        pool = Pool(self.shared_buffer_sizes(), torch.uint8, Device(torch.device("meta")), self.own_buffer_sizes())
        forward = [self.facts.units[index] for site in self.facts.splitting.sites for index in site.units]
        backward = [unit for unit in reversed(forward) if not unit.lookup]
        passes = [self._gathers_of(pool, order) for order in (forward, backward, forward, backward)]
        (in_forward, still), (in_backward, _) = passes[2:]  # the first forward finds nothing
        return GatherCounts(in_forward, in_backward, still)

    def _gathers_of(self, pool: Pool, visits: Sequence[UnitSpec]) -> tuple[Counter[int], set[int]]:
        """Return how often each unit is gathered by these visits, and the units that are in a buffer before that."""
        gathered, still = Counter[int](), set[int]()
        order = [unit for unit, _ in groupby(visits)]
        for place, unit in enumerate(order):
            for coming in dict.fromkeys(order[place : place + 1 + self.facts.prefetch]):
                if pool.find(coming.index) is not None:
                    still |= {coming.index} - gathered.keys()
                elif pool.has_room_for(coming.index):
                    pool.take(coming.index, self.buffer_numel(coming))
                    gathered[coming.index] += 1
                if (buffer := pool.find(coming.index)) is not None:
                    buffer.ahead = True
            if (buffer := pool.find(unit.index)) is not None:
                buffer.ahead = False
                pool.touch(buffer)
        return gathered, still
