"""Gathers and sums by node, which send each byte once over each wire.

With L ranks on each of N nodes, rank r = n x L + l has number l on node n. A direct gather sends a shard to every rank
of every other node, so L times over the wire to each node, and a direct sum does the same with a rank's part of a sum.
By node:

    gather    ranks with the same number gather their shards; then the ranks of each node gather all of those
    sum       the ranks of each node add their tensors, in the order of ranks; then ranks with the same number add the
              nodes' sums, in the order of nodes

A gather only copies, and gives the same bits either way; a sum by node has its own order of additions, which is the
same for every stage, tier and schedule. The shards that a rank received from other nodes are its *secondary shard*: if
it keeps them, on the device or in host memory, it can gather again without the wire.

Source: Wang et al. 2023, "ZeRO++", hpZ, for secondary shards; Jia et al. 2018, "Highly Scalable Deep Learning Training
System with Mixed-Precision", hierarchical all-reduce, for sums of sums.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zero.distributed.routes.nodes import across_nodes, reused, within_node
from zero.distributed.routes.parts import Queue
from zero.distributed.routes.route import GatherRequest, GatherRoute, Received, SumRequest, SumRoute
from zero.distributed.world import World
from zero.errors import if_it_fails
from zero.platform.handle import Done, Handle


class _Gathers:
    def __init__(self, world: World, queue: Queue) -> None:
        self._within, self._across = within_node(world, "gather"), across_nodes(world, "gather")
        self._world = world
        self._device, self._queue = world.compute, queue
        self._at_once = not world.compute.shares_memory  # on a GPU the host does not wait

    def start(self, gather: GatherRequest) -> Handle:
        shard_S, full_P, secondary, current, of_sum, what = gather
        if not shard_S.numel():
            return self._world.gather(shard_S, full_P, what=what)
        nodes, here = self._across.size, self._across.rank
        places = full_P.view(nodes, -1, shard_S.numel())
        rows = places[:, self._within.rank]
        others = [rows[n] for n in range(nodes) if n != here]
        kept = [] if secondary is None else [*secondary.view(nodes - 1, -1)]
        first = [] if current else [self._across.gather(shard_S, rows, what=what)]

        def gather_within() -> list[Handle]:
            if current:
                self._copy(kept, others)
            own = [shard_S if n == here else rows[n] for n in range(nodes)]
            handles = [self._within.gather(own[n], places[n].view(-1), what=what) for n in range(nodes)]
            if kept and not current:  # runs beside those gathers, which do not change the rows
                self._copy(others, kept)
            return handles

        at_once = self._at_once or (current and not self._queue.is_waiting)
        return self._queue.add(first, gather_within, is_sum=of_sum, at_once=at_once)

    def _copy(self, rows: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        for row, place in zip(rows, into, strict=True):
            self._device.copy(place, row)


class SumsByNode:
    """Sums within each node, then across nodes."""

    def __init__(self, world: World, travels: torch.dtype, queue: Queue) -> None:
        self._within, self._across = within_node(world, "sum"), across_nodes(world, "sum")
        self._travels, self._queue = travels, queue

    def start(self, request: SumRequest) -> Handle:
        partial = request.partial
        if partial is None or not partial.numel():
            return Done()
        rows = (flat.view(self._across.size, -1) for flat in (request.full_P, request.received, partial))
        first: list[Handle] = []

        def wait() -> None:  # the started sums use flats that the caller frees after an error
            for started in first:
                started.wait()

        with if_it_fails(wait):
            for row in zip(*rows, strict=True):
                first.append(self._within.reduce_scatter(*row, what=request.what))
        return self._queue.add(first, lambda: [self._add_nodes(request, partial)], is_sum=True)

    def _add_nodes(self, request: SumRequest, sent: Tensor) -> Handle:
        """Start to add nodes' sums `sent`, in the memory of the first part's flats, which are not needed any more."""
        if self._travels != sent.dtype:
            sent = reused(request.full_P, self._travels, sent.numel()).copy_(sent)
        received = reused(request.received, sent.dtype, sent.numel())
        return self._across.reduce_scatter(
            sent, received, request.sum_S, accumulate=request.accumulate, what=request.what
        )


def _gather_received(world: World, full_bytes: int) -> Received:
    return Received(full_bytes * (world.size - 1) / world.size, full_bytes * (world.nodes - 1) / world.size)


def sum_received(world: World, numel: int, sent_bytes: int, travels_bytes: int, back_bytes: int = 0) -> Received:
    """Return the bytes of sums by node; with `back_bytes` per element that ranks gather across nodes at the end."""
    wire = numel * (travels_bytes + back_bytes) * (world.nodes - 1) / world.size
    return Received(numel * sent_bytes * (world.local_size - 1) / world.local_size + wire, wire)


def chunks(world: World) -> tuple[int, ...]:
    return world.local_size, world.nodes


GATHER = GatherRoute(lambda world, queue: _Gathers(world, queue).start, _gather_received, by_node=True)
SUM = SumRoute(
    lambda world, queue, travels: SumsByNode(world, travels, queue).start, sum_received, chunks, by_node=True
)
