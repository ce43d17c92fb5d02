"""The consequences of stage, precision and tiers for one rank.

Other code reads these facts instead of stages and tiers. P is the number of elements of a flat tensor with padding, S
the number of elements of one rank's shard of it, see `Layout`.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from zero.core.optim import Transform
from zero.core.placement import Tier
from zero.core.precision import Precision
from zero.core.stage import Stage
from zero.distributed.routes import (
    GATHERS,
    SUMS,
    GatherRoute,
    SumRoute,
    are_even,
    default_gather,
    default_sum,
    gather_route,
    sum_route,
)
from zero.distributed.world import World
from zero.engine.model import Splitting, UnitSpec
from zero.errors import PlanError

Scope = Literal["world", "node"]


def sharers(world: World, shard: Scope) -> int:
    """Return the number of ranks that one copy of the state is sharded over."""
    return world.local_size if shard == "node" else world.size


def facts_of(*, world: World, gather: str, reduce: str, shard: Scope, **given: Any) -> "Facts":
    """Return the facts of a run; `gather` and `reduce` may be "auto", and other arguments are fields of `Facts`.

    Raises:
        PlanError: the ranks are not on nodes as `gather`, `reduce` or `shard` needs them.
    """
    sends_by_node = gather != "auto" and GATHERS[gather].by_node
    adds_by_node = reduce != "auto" and SUMS[reduce].by_node
    if not are_even(world) and (sends_by_node or adds_by_node or shard == "node"):
        raise PlanError(
            f"{world.size} ranks are not {world.local_size} consecutive ranks on each node. Start as many ranks on "
            "every node, or set zero.gather=world zero.reduce=exact zero.shard=world."
        )
    if shard == "node" and reduce != "auto" and SUMS[reduce].backend_adds:
        raise PlanError("zero.shard=node adds by node. Set zero.reduce=auto.")
    if shard == "node" and world.local_size == 1 < world.size:
        raise PlanError("zero.shard=node shards nothing, because each node has one rank. Set zero.stage=0.")
    facts = Facts(
        world=world,
        gather=default_gather(world) if gather == "auto" else gather,
        reduce=default_sum(world) if reduce == "auto" else reduce,
        shard=shard,
        secondary=None,
        **given,
    )
    if sends_by_node or facts.param_tier != "nvme":  # with parameters on a disk host memory is probably too small
        facts = replace(facts, secondary="host" if facts.params_offloaded else "device")
    return facts


@dataclass(frozen=True, eq=False, kw_only=True)
class Facts:
    """The settings of a run, and the facts and sizes that they imply for one rank.

    Attributes:
        accumulate: the number of microbatches of a step.
        prefetch: the number of units that are gathered ahead of their use.
        kept_units: the indices of units that stay gathered between forward and backward.
        param_tier: the tier that holds parameters between two uses.
        grad_tier: the tier that holds gradients between backward and the update.
        gather, reduce: the names of the routes of parameters and of sums of gradients, see `zero.distributed.routes`.
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
    gather: str
    reduce: str
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

        True if they are not offloaded, and the stage does not shard them or there is one rank. Packed parameters are
        expanded for each use, so with them and several ranks no unit is resident, and frozen parameters are sharded at
        every stage.
        """
        unsharded = not self.stage.parameters or self.world.size == 1
        return not self.params_offloaded and unsharded and not self.splitting.has_packed

    def is_resident(self, unit: UnitSpec) -> bool:
        """Return whether the unit's full parameters stay on the device; on one rank, also beside packed units."""
        alone = self.world.size == 1 and not self.params_offloaded
        return (alone and not unit.packed) or self.resident

    @property
    def sharers(self) -> int:
        """The number of ranks that one copy of the state is sharded over: all ranks, or the ranks of a node."""
        return sharers(self.world, self.shard)

    @property
    def rank(self) -> int:
        """The index of this rank among the `sharers` of its copy of the state."""
        return self.world.rank % self.sharers

    @property
    def gather_route(self) -> GatherRoute:
        """The route of gathers of parameters."""
        return gather_route(self.gather, self.world, copied=self.sharers < self.world.size)

    @property
    def sum_route(self) -> SumRoute:
        """The route of sums of gradients."""
        return sum_route(self.reduce, self.world, copied=self.sharers < self.world.size)

    @property
    def keeps_secondary(self) -> bool:
        """Whether the ranks of a node keep secondary shards (copies of the shards of other nodes) after a gather.

        They are refreshed by the first gather after an update.
        """
        return self.secondary is not None and self.gather_route.by_node and not self.resident

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

        With one rank and one microbatch it is the dtype of compute, which is exact because nothing is added. If a step
        has more microbatches than planned, `Gradients.widen` converts the gradient.
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
        if self.sum_route.backend_adds:
            return self.precision.reduce
        sent = self.grad_dtype if self.local_sum else self.precision.compute
        return min(self.precision.reduce, sent, key=lambda dtype: dtype.itemsize)
