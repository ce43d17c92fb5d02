"""Collectives between nodes: directly from rank to rank, or by node, which sends each byte once over each wire.

With L ranks on each of N nodes, rank r = n x L + l has number l on node n. A direct gather sends a shard to every rank
of every other node, so L times over the wire to each node, and a direct sum does the same with a rank's part of a sum.
By node:

    gather    ranks with the same number gather their shards; then the ranks of each node gather all of those
    sum       the ranks of each node add their tensors, in the order of ranks; then ranks with the same number add the
              nodes' sums, in the order of nodes

So a byte crosses each wire once. A gather only copies, and gives the same bits either way; a sum by node has its own
order of additions, which is the same for every stage, tier and schedule. The shards that a rank received from other
nodes are its *secondary shard*: if it keeps them, on the device or in host memory, it can gather again without the
wire.

If each node has a copy of the state, sharded over its ranks, gathers stay within the node. After a sum by node each of
the ranks with the same number has a part of the sum of their shard; they gather these parts, so that each copy has all
of it.

Gathers and sums by node have two parts, and the second starts when the first has ended; a sum for copies has three. On
a GPU no host waits between parts: the second part of a gather follows on its stream, the later parts of a sum on the
stream of reductions. On a CPU the second part starts when the operation is waited for, after the second parts of all
earlier operations, so ranks that wait in different orders still start parts in the same order. A rank that does not
wait for an operation must not hold up others that do, so it calls `advance` before it waits for anything else.
`advance` waits only for first parts, which every rank is sure to start.

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
    """The collectives of one rank, direct or by node.

    Args:
        gather_by_node, sum_by_node: whether gathers, and sums, go by node; there are several nodes with several ranks
            each.
        native: whether the backend adds sums that do not go by node, see `World.reduce_scatter`.
        copies: whether each node has a copy of the state: gathers stay within a node, and sums are for all nodes.
        travels: the dtype in which a node's sum is sent to other nodes, if that is narrower than the sum.
    """

    def __init__(
        self,
        world: World,
        *,
        gather_by_node: bool = False,
        sum_by_node: bool = False,
        native: bool = False,
        copies: bool = False,
        travels: torch.dtype = torch.float32,
    ) -> None:
        self._world = within_node(world, "gather") if copies else world
        self._gather_world = self._world
        if world.size > 1 and not world.compute.shares_memory and not gather_by_node and not copies:
            # With one communicator a gather would queue behind the sums that were started before it. A kernel of NCCL
            # occupies the GPU until all ranks run it, but two communicators cannot deadlock: all ranks start gathers
            # and sums in the same order, and a GPU has room for a kernel of each. So a later collective never blocks
            # the earliest one that has not ended.
            self._gather_world = world.part(range(world.size), "gather", priority=True)
        self._queue = _Queue()
        self._native = native
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
        """Start an all-gather as `World.gather`.

        Args:
            secondary: ((N - 1) x S,), memory for the secondary shard, from and to which the device can copy.
            current: whether `secondary` was filled, or is being filled, by an earlier gather; then it is the source.
            of_sum: whether this gather ends an all-reduce, see `advance`. A direct one runs in order with the sums.
        """
        if self._gathers is None or not shard_S.numel():
            world = self._world if of_sum else self._gather_world
            return world.gather(shard_S, full_P, what=what)
        return self._gathers.start(shard_S, full_P, secondary, current=current, of_sum=of_sum, what=what)

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
        if self._sums is None or partial is None or not partial.numel():
            return self._world.reduce_scatter(
                full_P, received, sum_S, native=self._native, accumulate=accumulate, what=what
            )
        return self._sums.start(_Sum(full_P, received, sum_S, partial, accumulate, what))

    @property
    def are_waiting(self) -> bool:
        """Whether parts of operations have not been started."""
        return self._queue.is_waiting

    def advance(self, *, sums: bool = True, through: bool = False) -> None:
        """Start the second parts of the operations that this rank has begun, on the current stream.

        Args:
            sums: also start those of sums, and of operations after a sum. False is safe where other ranks wait for this
                one before they begin the sums that it has begun.
            through: also start third parts, which have to wait for the second ones.
        """
        self._queue.advance(sums=sums, through=through)


def within_node(world: World, operation: str) -> World:
    """Return the ranks of this node as a world."""
    first = world.rank - world.rank % world.local_size
    ranks = range(first, first + world.local_size)
    return world.part(ranks, f"{operation} within a node", priority=operation == "gather", alike=True)


def across_nodes(world: World, operation: str) -> World:
    """Return the ranks with the same number as this one, one on each node, as a world."""
    ranks = range(world.rank % world.local_size, world.size, world.local_size)
    return world.part(ranks, f"{operation} across nodes", priority=operation == "gather", alike=True)


def partial_numel(world: World, numel: int) -> int:
    """Return the number of elements of a node's sum on one rank: `numel` / L, rounded up to equal parts per node."""
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
            if kept and not current:  # runs beside those gathers, which do not change the rows
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
    """Sums within each node, then across nodes."""

    def __init__(self, world: World, travels: torch.dtype, queue: "_Queue") -> None:
        self._within, self._across = within_node(world, "sum"), across_nodes(world, "sum")
        self._travels, self._queue = travels, queue

    def start(self, request: _Sum) -> Handle:
        rows = (flat.view(self._across.size, -1) for flat in (request.full_P, request.recv_P, request.partial))
        first: list[Handle] = []

        def wait() -> None:  # the started sums use flats that the caller frees after an error
            for started in first:
                started.wait()

        with if_it_fails(wait):
            for row in zip(*rows, strict=True):
                first.append(self._within.reduce_scatter(*row, what=request.what))
        return self._queue.add(first, lambda: [self._add_nodes(request)], is_sum=True)

    def _add_nodes(self, request: _Sum) -> Handle:
        """Start the second part, in the memory of the first part's flats, which are not needed any more."""
        sent = request.partial
        if self._travels != sent.dtype:
            sent = _reused(request.full_P, self._travels, sent.numel()).copy_(sent)
        received = _reused(request.recv_P, sent.dtype, sent.numel())
        return self._across.reduce_scatter(
            sent, received, request.sum_S, accumulate=request.accumulate, what=request.what
        )


class _SumsForCopies(_SumsByNode):
    """Sums for nodes that each have a copy of the state: every node gets the whole sum, P / L elements on each rank.

    A third part gathers the sum across nodes.
    """

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

            def add_share() -> None:  # runs on the stream that waits
                back.wait()
                if request.accumulate:
                    total.add_(share)
                else:
                    total.copy_(share)

            return [Then(add_share)]

        first = self._within.reduce_scatter(request.full_P, request.recv_P, share, what=request.what)
        return self._queue.add([first], add_nodes, is_sum=True)


class _Queue:
    """Running operations of several parts. Their next parts start in the order in which the operations began.

    The third part of an operation starts before the second part of the next one, so a rank has started all parts that
    others need for an operation before it waits for anything else.
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
        """Add a third part to the operation whose second part is being started."""
        operation = _TwoHalves([second], then, True, self, is_third=True)
        self._waiting.insert(1, operation)  # the second part is still at the front
        return operation

    def advance(self, *, sums: bool, through: bool) -> None:
        """Start second parts, and the third parts that come before them in the queue.

        Args:
            sums: also start the second parts of sums, and of operations after a sum.
            through: also start the remaining third parts, which have to wait for second ones.
        """
        while self._waiting and (sums or not self._waiting[0].is_sum):
            if self._waiting[0].is_third and len(self._waiting) == 1 and not through:
                return
            self.advance_to(self._waiting[0])

    def advance_to(self, last: "_TwoHalves") -> None:
        """Start the next part of `last`, and of all operations that began earlier."""
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
        """Wait for the current part, then start the next one."""
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
    """Return `numel` elements of `dtype` in the memory of `flat`, from byte `start`; new memory if they do not fit."""
    start, nbytes = round_up(start, dtype.itemsize), numel * dtype.itemsize
    if start + nbytes > flat.nbytes:
        return flat.new_empty(numel, dtype=dtype)
    return flat.view(torch.uint8)[start : start + nbytes].view(dtype)
