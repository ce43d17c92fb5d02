"""The sum by the backend, such as NCCL: around a ring over all ranks, in the dtype in which gradients are sent."""

from collections.abc import Callable

import torch

from zero.distributed.routes.parts import Queue
from zero.distributed.routes.route import Received, SumRequest, SumRoute
from zero.distributed.world import World
from zero.platform.handle import Handle


def _open(world: World, _: Queue, travels: torch.dtype) -> Callable[[SumRequest], Handle]:
    def start(total: SumRequest) -> Handle:
        return world.reduce_scatter(
            total.full_P, total.received, total.sum_S, native=True, accumulate=total.accumulate, what=total.what
        )

    return start


def _received(world: World, numel: int, sent_bytes: int, _: int) -> Received:
    """Two links of each node's part of the ring are wires."""
    received = numel * sent_bytes * (world.size - 1) / world.size
    return Received(received, received / world.local_size if world.nodes > 1 else 0)


SUM = SumRoute(_open, _received, lambda _: (1,), backend_adds=True)
