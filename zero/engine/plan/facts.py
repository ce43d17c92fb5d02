"""The consequences of stage, precision and tiers for one rank: eight facts, and the sizes that follow from them.

Other code reads these facts instead of stages and tiers. P is the number of elements of a flat tensor with padding, S
the number of elements of one rank's shard of it, see `Layout`.
"""

from collections import Counter
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise
from typing import Literal

import torch

from zero.core.layout import Layout
from zero.core.optim import Transform
from zero.core.placement import Tier
from zero.core.precision import Precision
from zero.core.stage import Stage
from zero.distributed.routes import partial_numel
from zero.distributed.world import World
from zero.engine.memory import Pool
from zero.engine.model import Splitting, UnitSpec
from zero.platform.device import Device
from zero.store import PageKind

Scope = Literal["world", "node"]
Reduction = Literal["exact", "native", "node"]


def sharers(world: World, shard: Scope) -> int:
    """Return the number of ranks that one copy of the state is sharded over."""
    return world.local_size if shard == "node" else world.size


@dataclass(eq=False, kw_only=True)
class Facts:
    """The settings of a run, and the facts and sizes that they imply for one rank.

    Attributes:
        accumulate: the number of microbatches of a step.
        prefetch: the number of units that are gathered ahead of their use.
        kept_units: the indices of units that stay gathered between forward and backward.
        param_tier: the tier that holds parameters between two uses.
        grad_tier: the tier that holds gradients between backward and the update.
        gather: "node" for hierarchical all-gathers within and between nodes, see `zero.distributed.routes`; or "world".
        reduce: "exact" for sums of gradients in rank order; "native" for sums by the backend; "node" for hierarchical
            sums within and between nodes.
        secondary: the tier of secondary shards, a rank's copies of shards of other nodes; None: no copies are kept.
        shard: "node" if each node holds a full copy of the state, sharded over its ranks; or "world".
    """

    splitting: Splitting
    world: World
    stage: Stage
    precision: Precision
    optimizer: Transform
    accumulate: int
    prefetch: int
    kept_units: frozenset[int]
    param_tier: Tier
    grad_tier: Tier
    gather: Scope
    reduce: Reduction
    secondary: Tier | None
    shard: Scope

    @property
    def units(self) -> tuple[UnitSpec, ...]:
        return self.splitting.units

    @property
    def trains(self) -> bool:
        """Whether the model has a trainable parameter."""
        return self.splitting.trains

    @property
    def device_is_host(self) -> bool:
        """Whether the device is a CPU, which computes in host memory."""
        return self.world.compute.shares_memory

    def is_offloaded(self, tier: Tier) -> bool:
        """Return whether kernels of the device cannot read this tier's memory."""
        return tier == "nvme" or (tier == "host" and not self.device_is_host)

    @property
    def params_offloaded(self) -> bool:
        """Whether parameters are on a tier that kernels of the device cannot read."""
        return self.is_offloaded(self.param_tier)

    @property
    def params_on_host(self) -> bool:
        """Whether parameters are offloaded to host memory, from which the device copies directly.

        All ranks have the same value, because all ranks use the same tiers.
        """
        return self.params_offloaded and self.param_tier == "host"

    @property
    def grads_offloaded(self) -> bool:
        """Whether gradients are on a tier that kernels of the device cannot read."""
        return self.is_offloaded(self.grad_tier)

    @property
    def resident(self) -> bool:
        """Whether full parameters of all units stay on the device between uses.

        True if they are not offloaded, and the stage does not shard them or there is one rank. Codes are expanded for
        each use, so with codes and several ranks no unit is resident, and frozen parameters are sharded at every stage.
        """
        unsharded = not self.stage.parameters or self.world.size == 1
        return not self.params_offloaded and unsharded and not self.splitting.has_codes

    def is_resident(self, unit: UnitSpec) -> bool:
        """Return whether the unit's full parameters stay on the device; on one rank, also beside units with codes."""
        alone = self.world.size == 1 and not self.params_offloaded
        return (alone and not unit.codes.slots) or self.resident

    def stored_dtype(self, kind: PageKind) -> torch.dtype:
        """Return the dtype in which parameters of a `Flat` are kept and gathered."""
        return torch.uint8 if kind == PageKind.CODES else self.precision.compute

    def buffer_numel(self, unit: UnitSpec) -> int:
        """Return the number of elements of the unit's gathered buffer: the parameters, then room for arriving codes.

        A single rank expands codes in device memory from where they are.
        """
        arrive = self.world.size > 1 or self.params_offloaded
        return unit.full_numel + arrive * unit.codes.P // self.precision.compute.itemsize

    @property
    def sharers(self) -> int:
        """The number of ranks that one copy of the state is sharded over: all ranks, or the ranks of a node."""
        return sharers(self.world, self.shard)

    @property
    def rank(self) -> int:
        """The index of this rank among the `sharers` of its copy of the state."""
        return self.world.rank % self.sharers

    @property
    def has_nodes(self) -> bool:
        """Whether there are several nodes with several ranks each; else hierarchical collectives equal plain ones."""
        return 1 < self.world.local_size < self.world.size

    @property
    def gathers_by_node(self) -> bool:
        return self.has_nodes and self.gather == "node" and self.shard == "world"

    @property
    def sums_by_node(self) -> bool:
        return self.has_nodes and "node" in (self.reduce, self.shard)

    @property
    def sums_natively(self) -> bool:
        return self.reduce == "native" and not self.sums_by_node

    @property
    def keeps_secondary(self) -> bool:
        """Whether the ranks of a node keep secondary shards (copies of the shards of other nodes) after a gather.

        They are refreshed by the first gather after an update.
        """
        return self.secondary is not None and self.gathers_by_node and not self.resident

    @property
    def full_update(self) -> bool:
        """Whether each rank updates whole flat tensors: moments are not sharded, or there is one rank."""
        return not self.stage.moments or self.world.size == 1

    @property
    def local_sum(self) -> bool:
        """Whether a rank adds up its microbatches' gradients before they are reduced over ranks."""
        return self.world.size == 1 or (not self.stage.gradients and self.accumulate > 1)

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of a gradient between backward and its update: fp32.

        With one rank and one microbatch it is the dtype of compute, which is exact because nothing is added. Where
        a step has more microbatches than planned, `Gradients.widen` converts it.
        """
        return self.precision.compute if self.world.size * self.accumulate == 1 else torch.float32

    @property
    def first_grad_dtype(self) -> torch.dtype:
        """The dtype in which the gradient of the first of several microbatches is offloaded.

        It may be the dtype of compute, which is exact because nothing has been added yet.
        """
        alone = self.local_sum and self.grads_offloaded
        return self.precision.compute if alone else self.grad_dtype

    @property
    def flat_dtype(self) -> torch.dtype:
        """The dtype in which ranks send gradients: `precision.reduce`, or the gradients' dtype if that is narrower.

        The received gradients are added in fp32, unless the backend adds: in this dtype, which is `precision.reduce`.
        """
        if self.sums_natively:
            return self.precision.reduce
        sent = self.grad_dtype if self.local_sum else self.precision.compute
        return min(self.precision.reduce, sent, key=lambda dtype: dtype.itemsize)

    def grad_numel(self, unit: UnitSpec) -> int:
        """Return the number of elements of the unit's gradient that this rank keeps for the update."""
        return unit.trainable.P if self.local_sum or self.full_update else unit.trainable.S

    def update_numel(self, unit: UnitSpec) -> int:
        """Return the number of elements of the unit's master, and of each moment, on this rank."""
        return unit.trainable.P if self.full_update else unit.trainable.S

    @property
    def muon_numels(self) -> tuple[int, int, int] | tuple[()]:
        """The elements of device memory for a unit's directions, a rank's whole matrices, and products of them.

        They are largest over units, and over ranks, because all ranks must place pages alike; empty without Muon.
        """
        units = [unit for unit in self.units if unit.matrices]
        if not units:
            return ()
        ranges = [b - a for unit in units if not self.full_update for a, b in pairwise(unit.owners)]
        scratch = max(batch.scratch_numel for unit in units for batch in unit.matrices)
        return max(map(self.update_numel, units)), max(ranges, default=0), scratch

    @property
    def muon_flops(self) -> int:
        """The floating point operations that orthogonalize the matrices of a step, on the rank with most, per unit."""

        def most(unit: UnitSpec) -> int:
            cuts = (0, unit.trainable.P) if self.full_update else unit.owners
            ranges = [range(*ends) for ends in pairwise(cuts)]
            return max(sum(batch.flops for batch in unit.matrices if batch.start in ends) for ends in ranges)

        return sum(most(unit) for unit in self.units if unit.matrices)

    @property
    def muon_scratch_dtype(self) -> torch.dtype:
        """The dtype in which matrices are multiplied: fp32 on a CPU, which may lack units for bf16."""
        return torch.float32 if self.device_is_host else torch.bfloat16

    def secondary_numel(self, layout: Layout) -> int:
        """Return the number of elements of this rank's secondary shard of a stored flat; 0 if none is kept.

        It copies one shard from each other node: the shard of the rank with the same local rank.
        """
        return (self.world.nodes - 1) * layout.S if self.keeps_secondary else 0

    def shared_buffer_sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each gathered buffer that any unit may use.

        There is one for each unit in use at the same time, and one for each prefetched unit. All are as large as the
        largest unit, because a unit that is gathered into a buffer stays there until another one needs it.
        """
        pooled = [unit for unit in self.units if not self.is_resident(unit)]
        numels = [self.buffer_numel(unit) for unit in pooled if unit.index not in self.kept_units]
        if not numels:
            return ()
        return (max(numels),) * min(len(numels), self.splitting.depth + 1 + self.prefetch)

    def own_buffer_sizes(self) -> dict[int, int]:
        """Return the number of elements of the gathered buffers of the units that stay gathered, by their index."""
        kept = [unit for unit in self.units if unit.index in self.kept_units and not self.is_resident(unit)]
        return {unit.index: self.buffer_numel(unit) for unit in kept}

    def gathered_at_turns(self) -> tuple[set[int], set[int]]:
        """Return the indices of the units that are still gathered when forward ends, and when backward ends."""
        pool = Pool(self.shared_buffer_sizes(), torch.uint8, Device(torch.device("meta")), self.own_buffer_sizes())
        forward = list(self.units)
        still = []
        for order in (forward, [unit for unit in reversed(forward) if not unit.lookup]):
            for place, unit in enumerate(order):
                for coming in order[place : place + 1 + self.prefetch]:
                    if pool.find(coming.index) is None and pool.has_room_for(coming.index):
                        pool.take(coming.index, self.buffer_numel(coming))
                    if (buffer := pool.find(coming.index)) is not None:
                        buffer.ahead = True
                if (buffer := pool.find(unit.index)) is not None:
                    buffer.ahead = False
                    pool.touch(buffer)
            still.append({unit.index for unit in forward if pool.find(unit.index) is not None})
        return still[0], still[1]

    def flat_sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each pooled gradient flat, the largest first.

        Two reductions of the largest units may be under way. Each uses a flat to send and one to receive. If the
        backend adds, the latter are small, so there is another one for a unit that holds its flat while others are
        reduced: a tied one, or one around others.
        """
        layouts = [unit.trainable for unit in self.units if unit.trainable.slots and self.world.size > 1]
        largest = nlargest(3, layouts, key=lambda layout: layout.P)
        sizes = [numel for layout in largest[:2] for numel in (layout.P, self.received_numel(layout))]
        uses = Counter(unit for site in self.splitting.sites for unit in site.units)
        if self.sums_natively and (self.splitting.depth or max(uses.values(), default=0) > 1):
            sizes += [layout.P for layout in largest[2:]]
        for unit in self.units:
            if unit.shared and unit.trainable in layouts and unit.trainable not in largest[:2]:
                sizes += [unit.trainable.P, self.received_numel(unit.trainable)]
        return tuple(sorted(sizes, reverse=True))

    def received_numel(self, layout: Layout) -> int:
        """Return the number of elements that a rank receives in the reduction of a flat gradient."""
        return layout.S if self.sums_natively else layout.P

    def partial_sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each buffer for sums within a node: one for each reduction."""
        return tuple(partial_numel(self.world, P) for P in self.flat_sizes()[::2] if self.sums_by_node)

    def grad_buffer_sizes(self) -> tuple[int, ...]:
        """Return the number of elements of each buffer that offloaded gradients arrive in."""
        if not self.grads_offloaded:
            return ()
        # Two for the reductions under way. With local sums one more, because the sum of microbatches is copied out of
        # it to be sent. A single CPU rank needs one less: it has written a gradient before the next unit's arrives.
        count = 2 + (self.local_sum and self.world.size > 1) - (self.world.size == 1 and self.device_is_host)
        numels = [self.grad_numel(unit) for unit in self.units if unit.trainable.slots and not unit.shared]
        own = tuple(self.grad_numel(unit) for unit in self.units if unit.trainable.slots and unit.shared)
        return (max(numels, default=0),) * min(len(numels), count) + own
