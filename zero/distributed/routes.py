"""Collectives between nodes: straight from rank to rank, or by node, once over each wire.

With L ranks on each of N nodes, rank r = n x L + l is number l of node n. Straight, a shard crosses the wire to every
rank of every other node, L times to each, and so does a rank's part of a sum. By node:

    gather    the ranks of one number give each other their shards; then each node's ranks give each other all of those
    sum       each node adds up its own, in the order of its ranks; then the ranks of one number add up the nodes' sums,
              in the order of nodes

So a byte crosses each wire once. A gather copies, and gives the same bits either way; a sum by node has an order of its
own, which is the same for every stage, tier and schedule. The shards that a rank received from other nodes are its
*secondary shard*: if it keeps them, on the device or in host memory, it gathers again without the wire.

Where each node has a copy of the state, in shards on its ranks, gathers stay within the node. Each rank of one number
has then added up a part of their shard, and they gather these parts, so that each copy has all of it.

Both are operations of two halves, and the second starts when the first has ended; where nodes have copies, a sum has
three. On a GPU no host waits for that: the second half of a gather follows on its stream, the other parts of a sum on
the stream of reductions. On a CPU it starts when the operation is waited for, after those of all earlier operations, so
ranks that wait in different orders still start alike. A rank that does not wait for an operation must not hold up
others that do: before it waits for anything else it calls `advance`. That waits for first halves, so only for those
that every rank is sure to start.

Letters: W ranks, P elements of a full flat, S = P / W.
Source: Wang et al. 2023, "ZeRO++", hpZ, for secondary shards; Jia et al. 2018, "Highly Scalable Deep Learning Training
System with Mixed-Precision", hierarchical all-reduce, for sums of sums.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zero.core.sizes import round_up
from zero.distributed.world import World
from zero.errors import if_it_fails
from zero.platform.handle import Handle, Then


class Routes:
    """The collectives of one rank.

    Args:
        gather_by_node, sum_by_node: gathers, and sums, go by node, of which each has several ranks.
        copies: each node has a copy of the state: gathers stay within it, and sums are for all of them.
        travels: the dtype that a node's sum is sent in, if that is narrower than the sum.
    """

    def __init__(
        self,
        world: World,
        *,
        gather_by_node: bool = False,
        sum_by_node: bool = False,
        copies: bool = False,
        travels: torch.dtype = torch.float32,
    ) -> None:
        self._world = within_node(world, "gather") if copies else world
        self._queue = _Queue()
        self._gathers = _GathersByNode(world, self._queue) if gather_by_node else None
        sums = _SumsForCopies if copies else _SumsByNode
        self._sums = sums(world, travels, self._queue) if sum_by_node or copies else None

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
        """Gather as `World.gather`.

        Args:
            secondary: ((N - 1) x S,), memory that keeps the secondary shard and that the device copies to and from.
            current: `secondary` has been filled already, or is being filled by an earlier gather.
            of_sum: it ends an all-reduce, see `advance`.
        """
        if self._gathers is None or not shard_S.numel():
            return self._world.gather(shard_S, full_P, what=what)
        return self._gathers.start(shard_S, full_P, secondary, current=current, of_sum=of_sum, what=what)

    def reduce_scatter(
        self,
        full_P: Tensor,
        recv_P: Tensor,
        sum_S: Tensor,
        partial: Tensor | None,
        *,
        accumulate: bool,
        what: str = "",
    ) -> Handle:
        """Add as `World.reduce_scatter`.

        Args:
            partial: (`partial_numel`,) fp32, where sums are by node: this node's; scratch until the handle was waited
                for.
        """
        if self._sums is None or partial is None or not partial.numel():
            return self._world.reduce_scatter(full_P, recv_P, sum_S, accumulate=accumulate, what=what)
        return self._sums.start(_Sum(full_P, recv_P, sum_S, partial, accumulate, what))

    @property
    def are_waiting(self) -> bool:
        """Parts of operations have not been started."""
        return self._queue.is_waiting

    def advance(self, *, sums: bool = True, through: bool = False) -> None:
        """Start the second halves of what this rank has begun, on the current stream.

        Args:
            sums: also of sums, and of operations after them. Without, it is safe where other ranks wait for this one
                before they begin the sums that it has begun.
            through: the third parts too, which have to wait for the second ones.
        """
        self._queue.advance(sums=sums, through=through)


def within_node(world: World, operation: str) -> World:
    """Return the ranks of this node."""
    first = world.rank - world.rank % world.local_size
    return world.part(range(first, first + world.local_size), f"{operation} within a node")


def across_nodes(world: World, operation: str) -> World:
    """Return the ranks of this number."""
    return world.part(range(world.rank % world.local_size, world.size, world.local_size), f"{operation} across nodes")


def partial_numel(world: World, numel: int) -> int:
    """Return the elements of a node's sums on one rank: its share of `numel`, as equal parts for each node."""
    return -(-numel // world.size) * world.nodes


class _GathersByNode:
    def __init__(self, world: World, queue: "_Queue") -> None:
        self._within, self._across = within_node(world, "gather"), across_nodes(world, "gather")
        self._device, self._queue = world.compute, queue
        self._at_once = not world.compute.shares_memory  # on a GPU the host does not wait

    def start(
        self, shard_S: Tensor, full_P: Tensor, secondary: Tensor | None, *, current: bool, of_sum: bool, what: str
    ) -> Handle:
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
            if kept and not current:  # beside those gathers, which leave the rows as they are
                self._copy(others, kept)
            return handles

        at_once = self._at_once or (current and not self._queue.is_waiting)
        return self._queue.add(first, gather_within, is_sum=of_sum, at_once=at_once)

    def _copy(self, rows: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        for row, place in zip(rows, into, strict=True):
            self._device.copy(place, row)


class _Sum(NamedTuple):
    """The arguments of one `Routes.reduce_scatter`."""

    full_P: Tensor
    recv_P: Tensor
    sum_S: Tensor
    partial: Tensor
    accumulate: bool
    what: str


class _SumsByNode:
    """Within a node, then across nodes."""

    def __init__(self, world: World, travels: torch.dtype, queue: "_Queue") -> None:
        self._within, self._across = within_node(world, "sum"), across_nodes(world, "sum")
        self._travels, self._queue = travels, queue

    def start(self, request: _Sum) -> Handle:
        rows = (flat.view(self._across.size, -1) for flat in (request.full_P, request.recv_P, request.partial))
        first: list[Handle] = []

        def wait() -> None:  # they use flats that others will be given
            for started in first:
                started.wait()

        with if_it_fails(wait):
            for row in zip(*rows, strict=True):
                first.append(self._within.reduce_scatter(*row, what=request.what))
        return self._queue.add(first, lambda: [self._add_nodes(request)], is_sum=True)

    def _add_nodes(self, request: _Sum) -> Handle:
        """Start the second half. The memory of the first one's flats is free by now."""
        sent = request.partial
        if self._travels != sent.dtype:
            sent = _reused(request.full_P, self._travels, sent.numel()).copy_(sent)
        received = _reused(request.recv_P, sent.dtype, sent.numel())
        return self._across.reduce_scatter(
            sent, received, request.sum_S, accumulate=request.accumulate, what=request.what
        )


class _SumsForCopies(_SumsByNode):
    """Sums of which each node gets all of its share, P / L, by a gather across nodes."""

    def __init__(self, world: World, travels: torch.dtype, queue: "_Queue") -> None:
        super().__init__(world, travels, queue)
        self._back = across_nodes(world, "sum for copies")

    def start(self, request: _Sum) -> Handle:
        total, partial = request.sum_S, request.partial
        share, padding = partial[: total.numel()], partial[total.numel() :]

        def add_nodes() -> list[Handle]:
            padding.zero_()
            after_bytes = partial.numel() * self._travels.itemsize
            own = _reused(request.full_P, partial.dtype, partial.numel() // self._back.size, start=after_bytes)
            added = self._add_nodes(request._replace(sum_S=own, accumulate=False))
            back = self._queue.add_third(added, lambda: [self._back.gather(own, partial, what=request.what)])

            def add_share() -> None:  # on the stream that waits
                back.wait()
                if request.accumulate:
                    total.add_(share)
                else:
                    total.copy_(share)

            return [Then(add_share)]

        first = self._within.reduce_scatter(request.full_P, request.recv_P, share, what=request.what)
        return self._queue.add([first], add_nodes, is_sum=True)


class _Queue:
    """Operations of several parts that are under way: their next parts start in the order of their first ones.

    The third part of an operation comes before the second one of the next, so that a rank has started all that others
    need for an operation before it waits for anything else.
    """

    def __init__(self) -> None:
        self._waiting: deque[_TwoHalves] = deque()

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def add(
        self, first: Sequence[Handle], then: Callable[[], Sequence[Handle]], *, is_sum: bool, at_once: bool = False
    ) -> Handle:
        operation = _TwoHalves(first, then, is_sum, self)
        if at_once:
            operation.go_on()
        else:
            self._waiting.append(operation)
        return operation

    def add_third(self, second: Handle, then: Callable[[], Sequence[Handle]]) -> Handle:
        """Add a third part, as the second one starts."""
        operation = _TwoHalves([second], then, True, self, is_third=True)
        self._waiting.insert(1, operation)  # the second part is still at the front
        return operation

    def advance(self, *, sums: bool, through: bool) -> None:
        """Start second parts, and third ones as far as they are before those.

        Args:
            sums: also of sums, and of operations after them.
            through: all third parts too, which have to wait for the second ones.
        """
        while self._waiting and (sums or not self._waiting[0].is_sum):
            if self._waiting[0].is_third and len(self._waiting) == 1 and not through:
                return
            self.advance_to(self._waiting[0])

    def advance_to(self, last: "_TwoHalves") -> None:
        """Start the next part of `last`, and of all that began earlier."""
        operation = None
        while operation is not last:
            operation = self._waiting[0]
            operation.go_on()
            self._waiting.popleft()


@dataclass(eq=False)
class _TwoHalves:
    handles: Sequence[Handle]
    then: Callable[[], Sequence[Handle]] | None
    is_sum: bool
    queue: _Queue
    is_third: bool = False

    def go_on(self) -> None:
        """Start the second half."""
        for handle in self.handles:
            handle.wait()
        if self.then is not None:
            self.handles, self.then = self.then(), None

    def wait(self) -> None:
        if self.then is not None:
            self.queue.advance_to(self)
        for handle in self.handles:
            handle.wait()


def _reused(flat: Tensor, dtype: torch.dtype, numel: int, *, start: int = 0) -> Tensor:
    """Return bytes of `flat` from `start` as `numel` elements of `dtype`; new memory if they do not fit."""
    start, nbytes = round_up(start, dtype.itemsize), numel * dtype.itemsize
    if start + nbytes > flat.nbytes:
        return flat.new_empty(numel, dtype=dtype)
    return flat.view(torch.uint8)[start : start + nbytes].view(dtype)
