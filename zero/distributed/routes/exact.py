"""The sum in the order of ranks, in fp32: each rank adds the chunks that it receives, see `World.reduce_scatter`."""

from collections.abc import Callable

import torch

from zero.distributed.routes.parts import Queue
from zero.distributed.routes.route import Received, SumRequest, SumRoute
from zero.distributed.world import World
from zero.platform.handle import Handle


def _open(world: World, _: Queue, travels: torch.dtype) -> Callable[[SumRequest], Handle]:
    def start(total: SumRequest) -> Handle:
        return world.reduce_scatter(
            total.full_P, total.received, total.sum_S, accumulate=total.accumulate, what=total.what
        )

    return start


def _received(world: World, numel: int, sent_bytes: int, _: int) -> Received:
    link, wire = (
        numel * sent_bytes * others / world.size for others in (world.size - 1, world.size - world.local_size)
    )
    return Received(link, wire)


SUM = SumRoute(_open, _received, lambda world: (world.size,))
