"""How shards and sums travel between nodes: straight from rank to rank, or once over each wire.

With L ranks on each of N nodes, rank r = n x L + l is number l of node n. Straight, a shard crosses the wire to every
rank of every other node, L times to each, and so does a rank's part of a sum. By node:

    gather    the ranks of one number give each other their shards; then each node's ranks give each other all of those
    sum       each node adds up its own, in the order of its ranks; then the ranks of one number add up the nodes' sums,
              in the order of nodes

So a byte crosses each wire once. A gather copies, and gives the same bits either way; a sum by node has an order of its
own, which is the same for every stage, tier and schedule. What the ranks of one number have given each other is the
node's *secondary shard*: who keeps it gathers again without the wire.

Both are operations of two halves. The second half starts when the operation is waited for; before it start those of all
operations that came earlier, so ranks that wait in different orders still start alike. On a GPU nobody waits: the
second half of a gather follows on its stream, that of a sum where the reductions are.

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
        at_once = not world.compute.shares_memory  # the host does not wait
        self._gathers = _ByNode(world, "gather", at_once=at_once) if gather_by_node else None
        self._sums = _ByNode(world, "sum", at_once=False) if sum_by_node else None

    def gather(
        self, shard_S: Tensor, full_P: Tensor, *, secondary: Tensor | None = None, current: bool = False, what: str = ""
    ) -> Handle:
        """As `World.gather`.

        Args:
            secondary: (N x S,), keeps the secondary shard; None: nobody does.
            current: `secondary` has been filled already, or is being filled by an earlier gather.
        """
        if self._gathers is None or not shard_S.numel():
            return self._world.gather(shard_S, full_P, what=what)
        ways, nodes = self._gathers, self._gathers.nodes
        places = full_P.view(nodes, -1, shard_S.numel())
        own = places[:, ways.within.rank] if secondary is None else secondary.view(nodes, -1)
        first = [] if current else [ways.across.gather(shard_S, own, what=what)]
        return ways.start(
            first, lambda: [ways.within.gather(own[n], places[n].view(-1), what=what) for n in range(nodes)]
        )

    def reduce_scatter(
        self, full_P: Tensor, recv_P: Tensor, sum_S: Tensor, partial: Tensor | None, *, accumulate: bool, what: str = ""
    ) -> Handle:
        """As `World.reduce_scatter`.

        Args:
            partial: (N x S,) fp32, where sums are by node: this node's sums; scratch, until the handle was waited for.
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

        return ways.start(first, add_nodes)

    def advance(self) -> None:
        """Start the second half of every sum, on the current stream, as soon as its first one has ended."""
        if self._sums is not None:
            self._sums.advance()


class _ByNode:
    """The ranks of this node, and those of this number, with the operations of two halves that are under way."""

    def __init__(self, world: World, kind: str, *, at_once: bool) -> None:
        size, (node, number) = world.local_size, divmod(world.rank, world.local_size)
        self.nodes = world.nodes
        self.within = world.part(range(node * size, (node + 1) * size), f"{kind} within a node")
        self.across = world.part(range(number, world.size, size), f"{kind} across nodes")
        self._at_once = at_once
        self._waiting: deque[_TwoHalves] = deque()  # for their second half, in the order of their first

    def start(self, first: Sequence[Handle], then: Callable[[], Sequence[Handle]]) -> Handle:
        operation = _TwoHalves(first, then, self.advance)
        self._waiting.append(operation)
        if self._at_once or (not first and len(self._waiting) == 1):
            self.advance()
        return operation

    def advance(self, until: "_TwoHalves | None" = None) -> None:
        while self._waiting:
            operation = self._waiting[0]
            operation.go_on()
            self._waiting.popleft()
            if operation is until:
                return


class _TwoHalves:
    def __init__(
        self,
        first: Sequence[Handle],
        then: Callable[[], Sequence[Handle]],
        advance: "Callable[[_TwoHalves], None]",
    ) -> None:
        self._handles, self._advance = first, advance
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
