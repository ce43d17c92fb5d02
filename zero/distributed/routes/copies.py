"""Collectives for nodes that each have a copy of the state, sharded over their ranks.

Gathers stay within the node. After a sum by node each rank has a part of the sum of its shard. Ranks with the same
number gather these parts, so that each copy has the whole sum.
"""

from collections.abc import Callable

import torch

from zero.distributed.routes.node import SumsByNode, chunks, sum_received
from zero.distributed.routes.nodes import across_nodes, reused, within_node
from zero.distributed.routes.parts import Queue
from zero.distributed.routes.route import GatherRequest, GatherRoute, Received, SumRequest, SumRoute
from zero.distributed.world import World
from zero.platform.handle import Done, Handle, Then


class _Sums(SumsByNode):
    """Sums for nodes that each have a copy of the state: every node gets the whole sum, P / L elements on each rank.

    A third part gathers the nodes' parts of the sum.
    """

    def __init__(self, world: World, travels: torch.dtype, queue: Queue) -> None:
        super().__init__(world, travels, queue)
        self._back = across_nodes(world, "sum for copies")

    def start(self, request: SumRequest) -> Handle:
        total, partial = request.sum_S, request.partial
        if partial is None or not partial.numel():
            return Done()
        share, padding = partial[: total.numel()], partial[total.numel() :]

        def add_nodes() -> list[Handle]:
            padding.zero_()
            after_bytes = partial.numel() * self._travels.itemsize
            own = reused(request.full_P, partial.dtype, partial.numel() // self._back.size, start=after_bytes)
            added = self._add_nodes(request._replace(sum_S=own, accumulate=False), partial)
            back = self._queue.add_third(added, lambda: [self._back.gather(own, partial, what=request.what)])

            def add_share() -> None:  # runs on the waiting stream
                back.wait()
                if request.accumulate:
                    total.add_(share)
                else:
                    total.copy_(share)

            return [Then(add_share)]

        first = self._within.reduce_scatter(request.full_P, request.received, share, what=request.what)
        return self._queue.add([first], add_nodes, is_sum=True)


def _open_gather(world: World, _: Queue) -> Callable[[GatherRequest], Handle]:
    node = within_node(world, "gather")
    return lambda gather: node.gather(gather.shard_S, gather.full_P, what=gather.what)


def _gather_received(world: World, full_bytes: int) -> Received:
    return Received(full_bytes * (world.local_size - 1) / world.local_size, 0)


def _sum_received(world: World, numel: int, sent_bytes: int, travels_bytes: int) -> Received:
    return sum_received(world, numel, sent_bytes, travels_bytes, torch.float32.itemsize)


GATHER = GatherRoute(_open_gather, _gather_received)
SUM = SumRoute(lambda world, queue, travels: _Sums(world, travels, queue).start, _sum_received, chunks, by_node=True)
