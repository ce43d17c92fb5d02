"""Eight facts that stage, precision and tiers mean for one rank of a run, and the sizes that follow from them.

No other code asks for a stage or a tier. P and S are a unit's padded elements and those of one shard, see `Layout`.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal

import torch

from zero.core.layout import Layout
from zero.core.optim import Transform
from zero.core.placement import Tier
from zero.core.precision import Precision
from zero.core.stage import Stage
from zero.distributed.routes import partial_numel
from zero.distributed.world import World
from zero.engine.unit import Splitting, UnitSpec

Scope = Literal["world", "node"]


def sharers(world: World, shard: Scope) -> int:
    """See `Facts.sharers`."""
    return world.local_size if shard == "node" else world.size


@dataclass(eq=False, kw_only=True)
class Facts:
    """The share of one rank in a model that is split into units.

    Attributes:
        accumulate: microbatches of a step.
        prefetch: units that are gathered ahead.
        param_tier: where parameters are between two uses.
        grad_tier: where gradients wait for the update.
        gather, reduce: "node" where gathers, and sums of gradients, go by node, see `zero.distributed.routes`.
        secondary: the tier where a node may keep what it has gathered from others; None: nowhere.
        shard: "node" where each node has a copy of the state, in shards on its ranks.
    """

    splitting: Splitting
    world: World
    stage: Stage
    precision: Precision
    optimizer: Transform
    accumulate: int
    prefetch: int
    param_tier: Tier
    grad_tier: Tier
    gather: Scope
    reduce: Scope
    secondary: Tier | None
    shard: Scope

    @property
    def units(self) -> tuple[UnitSpec, ...]:
        return self.splitting.units

    @property
    def trains(self) -> bool:
        """There is a trainable parameter."""
        return self.splitting.trains

    @property
    def device_is_host(self) -> bool:
        """The device computes in host memory: it is a CPU."""
        return self.world.compute.shares_memory

    def is_offloaded(self, tier: Tier) -> bool:
        """No kernel of the device reads memory of this tier."""
        return tier == "nvme" or (tier == "host" and not self.device_is_host)

    @property
    def params_offloaded(self) -> bool:
        """Parameters are where no kernel of the device reads them."""
        return self.is_offloaded(self.param_tier)

    @property
    def params_on_host(self) -> bool:
        """They are in host memory, which the device copies from by itself: on all ranks, as every tier."""
        return self.params_offloaded and self.param_tier == "host"

    @property
    def grads_offloaded(self) -> bool:
        """Gradients wait for the update where no kernel of the device reads them."""
        return self.is_offloaded(self.grad_tier)

    @property
    def resident(self) -> bool:
        """Full parameters stay between uses: below stage 3, and where the shard is everything and on the device."""
        return not self.params_offloaded and (not self.stage.parameters or self.world.size == 1)

    @property
    def sharers(self) -> int:
        """Ranks that one copy of the state is in shards on: all, or those of a node."""
        return sharers(self.world, self.shard)

    @property
    def rank(self) -> int:
        """The number of this rank among those."""
        return self.world.rank % self.sharers

    @property
    def has_nodes(self) -> bool:
        """There are several nodes, and several ranks on each: only then ways by node are others."""
        return 1 < self.world.local_size < self.world.size

    @property
    def gathers_by_node(self) -> bool:
        return self.has_nodes and self.gather == "node" and self.shard == "world"

    @property
    def sums_by_node(self) -> bool:
        return self.has_nodes and "node" in (self.reduce, self.shard)

    @property
    def keeps_secondary(self) -> bool:
        """Each node keeps all parameters, in secondary shards beside its own, from the first gather after an update."""
        return self.secondary is not None and self.gathers_by_node and not self.resident

    @property
    def full_update(self) -> bool:
        """Each rank updates full flats: moments are not sharded, or there is nobody to share with."""
        return not self.stage.moments or self.world.size == 1

    @property
    def local_sum(self) -> bool:
        """Microbatches are added up before ranks are."""
        return self.world.size == 1 or (not self.stage.gradients and self.accumulate > 1)

    @property
    def grad_dtype(self) -> torch.dtype:
        """fp32, except that a single gradient loses nothing in the dtype in which autograd made it."""
        return self.precision.compute if self.world.size * self.accumulate == 1 else torch.float32

    @property
    def first_grad_dtype(self) -> torch.dtype:
        """The dtype in which the first of several microbatches is offloaded, which is no sum yet."""
        alone = self.local_sum and self.grads_offloaded
        return self.precision.compute if alone else self.grad_dtype

    @property
    def flat_dtype(self) -> torch.dtype:
        """The dtype in which gradients travel: their own, or a narrower one of the precision. The sum is in fp32."""
        sent = self.grad_dtype if self.local_sum else self.precision.compute
        return min(self.precision.reduce, sent, key=lambda dtype: dtype.itemsize)

    def grad_numel(self, unit: UnitSpec) -> int:
        """Elements of the gradient that a rank keeps for the update."""
        return unit.trainable.P if self.local_sum or self.full_update else unit.trainable.S

    def update_numel(self, unit: UnitSpec) -> int:
        """Elements of master and of each moment on a rank."""
        return unit.trainable.P if self.full_update else unit.trainable.S

    def secondary_numel(self, layout: Layout) -> int:
        """Elements of a rank's secondary shard of a flat: those of its number on other nodes."""
        return (self.world.nodes - 1) * layout.S if self.keeps_secondary else 0

    def buffer_counts(self) -> dict[int, int]:
        """Elements of a gathered buffer -> number of them: the unit in use, units ahead, one per level of nesting."""
        if self.resident:
            return {}
        sizes = Counter(unit.full_numel for unit in self.units)
        return {numel: min(n, 1 + self.prefetch + self.splitting.depth) for numel, n in sizes.items()}

    def gathered_at_turns(self) -> tuple[set[int], set[int]]:
        """The units that are in gathered buffers when forward ends, and when backward does: those used last."""
        of_size: dict[int, list[int]] = defaultdict(list)
        for unit in self.units:
            of_size[unit.full_numel].append(unit.index)
        counts = self.buffer_counts().items()
        after_forward = {index for numel, count in counts for index in of_size[numel][-count:]}
        return after_forward, {index for numel, count in counts for index in of_size[numel][:count]}

    def flat_counts(self) -> dict[int, int]:
        """Number of elements -> number of gradient flats: two units of a size fill at once, or two reductions, each of
        two flats, are under way.
        """
        if self.world.size == 1:
            return {}
        sizes = Counter(unit.trainable.P for unit in self.units if unit.trainable.slots)
        return {numel: 2 * min(n, 2) for numel, n in sizes.items()}

    def partial_counts(self) -> dict[int, int]:
        """Elements of a sum by node -> number of them: one for each reduction under way."""
        if not self.sums_by_node:
            return {}
        counts = Counter[int]()
        for numel, n in self.flat_counts().items():  # flats of two sizes may have sums of one
            counts[partial_numel(self.world, numel)] += n // 2
        return dict(counts)

    def grad_buffer_counts(self) -> dict[int, int]:
        """Elements of a buffer in which offloaded gradients arrive -> number of them."""
        if not self.grads_offloaded:
            return {}
        sizes = Counter(self.grad_numel(unit) for unit in self.units if unit.trainable.slots)
        # two reductions may be under way, while what was added up is copied to be sent in a third; a lone CPU has long
        # written one gradient when the next unit's arrives
        count = 2 + (self.local_sum and self.world.size > 1) - (self.world.size == 1 and self.device_is_host)
        return {numel: min(n, count) for numel, n in sizes.items()}
