"""The collectives of one rank on the routes of a plan."""

import torch
from torch import Tensor

from zero.distributed.routes.parts import Queue
from zero.distributed.routes.route import GatherRequest, GatherRoute, SumRequest, SumRoute
from zero.distributed.world import World
from zero.platform.handle import Handle


class Routes:
    """The gathers and sums of one rank. Making it is collective.

    Args:
        travels: the dtype in which a node's sum is sent to other nodes, if that is narrower than the sum.
    """

    def __init__(
        self, world: World, gathers: GatherRoute, sums: SumRoute, *, travels: torch.dtype = torch.float32
    ) -> None:
        self._queue = Queue()
        self._start_gather = gathers.open(world, self._queue)
        self._start_sum = sums.open(world, self._queue, travels)

    def gather(
        self,
        shard_S: Tensor,
        full_P: Tensor,
        *,
        secondary: Tensor | None = None,
        current: bool = False,
        of_sum: bool = False,
        what: str = "",
    ) -> Handle:
        """Start an all-gather as `World.gather`.

        Args:
            secondary: ((N - 1) x S,), memory for the secondary shard, from and to which the device can copy.
            current: whether `secondary` was filled, or is being filled, by an earlier gather; then `secondary` is the
                source.
            of_sum: whether this gather ends an all-reduce, see `advance`. A direct gather then runs in order with the
                sums.
        """
        return self._start_gather(GatherRequest(shard_S, full_P, secondary, current, of_sum, what))

    def reduce_scatter(
        self,
        full_P: Tensor,
        received: Tensor,
        sum_S: Tensor,
        partial: Tensor | None,
        *,
        accumulate: bool,
        what: str = "",
    ) -> Handle:
        """Start a reduce-scatter as `World.reduce_scatter`.

        Args:
            received: scratch, (S,) if the backend adds, else (P,).
            partial: (`partial_numel`,) fp32, for the sum of this node if sums are by node; scratch, in use until the
                handle was waited for.
        """
        return self._start_sum(SumRequest(full_P, received, sum_S, partial, accumulate, what))

    @property
    def are_waiting(self) -> bool:
        """Whether parts of operations have not been started."""
        return self._queue.is_waiting

    def advance(self, *, sums: bool = True, through: bool = False) -> None:
        """Start the second parts of the operations that this rank has begun, on the current stream.

        Args:
            sums: also start second parts of sums, and of operations after a sum. False is safe where other ranks wait
                for this rank before they begin the sums that this rank has begun.
            through: also start third parts, which have to wait for the second ones.
        """
        self._queue.advance(sums=sums, through=through)
