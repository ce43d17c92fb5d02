"""How shards and sums travel between nodes: straight from rank to rank, or once over each wire.

With L ranks on each of N nodes, rank r = n x L + l is number l of node n. Straight, a shard crosses the wire to every
rank of every other node, L times to each, and so does a rank's part of a sum. By node:

    gather    the ranks of one number give each other their shards; then each node's ranks give each other all of those
    sum       each node adds up its own, in the order of its ranks; then the ranks of one number add up the nodes' sums,
              in the order of nodes

So a byte crosses each wire once. A gather copies, and gives the same bits either way; a sum by node has an order of its
own, which is the same for every stage, tier and schedule. What the ranks of one number have given each other is the
node's *secondary shard*: who keeps it gathers again without the wire.

Both are operations of two halves, and the second starts when the first has ended. On a GPU no host waits for that: the
second half of a gather follows on its stream, that of a sum where the reductions are. Elsewhere it starts when the
operation is waited for, after those of all operations that came earlier, so ranks that wait in different orders still
start alike. A rank that does not wait for an operation must not hold up others that do: before it waits for anything
else it calls `advance`. That waits for first halves, so only for those that every rank is sure to have started.

Letters: W ranks, P elements of a full flat, S = P / W.
Source: Wang et al. 2023, "ZeRO++", hpZ, for secondary shards; Jia et al. 2018, "Highly Scalable Deep Learning Training
System with Mixed-Precision", hierarchical all-reduce, for sums of sums.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero.distributed.world import World
from zero.platform.handle import Handle


class Routes:
    """The ways of one rank.

    Args:
        gather_by_node, sum_by_node: whether gathers, and sums, go by node; both are straight where every node has one
            rank, or there is one node.
        travels: what a node's sum travels in, if that is narrower than the sum.
    """

    def __init__(
        self,
        world: World,
        *,
        gather_by_node: bool = False,
        sum_by_node: bool = False,
        travels: torch.dtype = torch.float32,
    ) -> None:
        self._world, self._travels = world, travels
        self._waiting: deque[_TwoHalves] = deque()  # for their second half, in the order of their first
        self._gathers = _ByNode(world, "gather") if gather_by_node else None
        self._sums = _ByNode(world, "sum") if sum_by_node else None

    def gather(
        self,
        shard_S: Tensor,
        full_P: Tensor,
        *,
        secondary: Tensor | None = None,
        current: bool = False,
        turn: int = 0,
        what: str = "",
    ) -> Handle:
        """As `World.gather`.

        Args:
            secondary: (N x S,), keeps the secondary shard; None: nobody does.
            current: `secondary` has been filled already, or is being filled by an earlier gather.
            turn: see `advance`.
        """
        if self._gathers is None or not shard_S.numel():
            return self._world.gather(shard_S, full_P, what=what)
        ways, nodes = self._gathers, self._gathers.nodes
        places = full_P.view(nodes, -1, shard_S.numel())
        own = places[:, ways.within.rank] if secondary is None else secondary.view(nodes, -1)
        first = [] if current else [ways.across.gather(shard_S, own, what=what)]

        def gather_within() -> list[Handle]:
            return [ways.within.gather(own[n], places[n].view(-1), what=what) for n in range(nodes)]

        operation = _TwoHalves(first, gather_within, turn, self._advance)
        if not self._world.compute.shares_memory or (current and not self._waiting):
            operation.go_on()  # the host does not wait
        else:
            self._waiting.append(operation)
        return operation

    def reduce_scatter(
        self,
        full_P: Tensor,
        recv_P: Tensor,
        sum_S: Tensor,
        partial: Tensor | None,
        *,
        accumulate: bool,
        turn: int = 0,
        what: str = "",
    ) -> Handle:
        """As `World.reduce_scatter`.

        Args:
            partial: (N x S,) fp32, where sums are by node: this node's sums; scratch, until the handle was waited for.
            turn: see `advance`.
        """
        if self._sums is None or partial is None or not partial.numel():
            return self._world.reduce_scatter(full_P, recv_P, sum_S, accumulate=accumulate, what=what)
        ways, nodes = self._sums, self._sums.nodes
        rows = zip(full_P.view(nodes, -1), recv_P.view(nodes, -1), partial.view(nodes, -1), strict=True)
        first = [ways.within.reduce_scatter(sent, received, own, what=what) for sent, received, own in rows]

        def add_nodes() -> list[Handle]:
            sent = partial
            if self._travels != partial.dtype:
                sent = _reused(full_P, self._travels, partial.numel()).copy_(partial)
            received = _reused(recv_P, sent.dtype, sent.numel())
            return [ways.across.reduce_scatter(sent, received, sum_S, accumulate=accumulate, what=what)]

        self._waiting.append(_TwoHalves(first, add_nodes, turn, self._advance))
        return self._waiting[-1]

    @property
    def are_waiting(self) -> bool:
        """There are second halves to start."""
        return bool(self._waiting)

    def advance(self, turns: int) -> None:
        """Start the second halves of what began in the first `turns` turns, on the current stream.

        Args:
            turns: so many every rank is sure to take without waiting for this one. Turns are counted as the caller
                likes, alike on all ranks; 0 is before all of them.
        """
        while self._waiting and self._waiting[0].turn <= turns:
            self._advance(self._waiting[0])

    def _advance(self, last: "_TwoHalves") -> None:
        """Start the second half of `last`, and of all that began earlier."""
        operation = None
        while operation is not last:
            operation = self._waiting[0]
            operation.go_on()
            self._waiting.popleft()


class _ByNode:
    """The ranks of this node, and those of this number."""

    def __init__(self, world: World, kind: str) -> None:
        size, (node, number) = world.local_size, divmod(world.rank, world.local_size)
        self.nodes = world.nodes
        self.within = world.part(range(node * size, (node + 1) * size), f"{kind} within a node")
        self.across = world.part(range(number, world.size, size), f"{kind} across nodes")


class _TwoHalves:
    def __init__(
        self,
        first: Sequence[Handle],
        then: Callable[[], Sequence[Handle]],
        turn: int,
        advance: "Callable[[_TwoHalves], None]",
    ) -> None:
        self.turn, self._handles, self._advance = turn, first, advance
        self._then: Callable[[], Sequence[Handle]] | None = then

    def go_on(self) -> None:
        """Start the second half. An interrupt leaves it as it was, or has started it."""
        for handle in self._handles:
            handle.wait()
        if self._then is not None:
            self._handles, self._then = self._then(), None

    def wait(self) -> None:
        if self._then is not None:
            self._advance(self)
        for handle in self._handles:
            handle.wait()


def _reused(flat: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
    """The first bytes of `flat` as `numel` elements of `dtype`."""
    return flat.view(torch.uint8)[: numel * dtype.itemsize].view(dtype)
