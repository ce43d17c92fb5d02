"""The records of a route: how a gather or a sum over ranks is started, what memory it needs, and the bytes it moves."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zero.distributed.routes.nodes import partial_numel
from zero.distributed.routes.parts import Queue
from zero.distributed.world import World
from zero.platform.handle import Handle


class Received(NamedTuple):
    """The bytes that a rank receives from other ranks, and the part of them from other nodes."""

    link: float
    wire: float


class GatherRequest(NamedTuple):
    """The arguments of one `Routes.gather`."""

    shard_S: Tensor
    full_P: Tensor
    secondary: Tensor | None
    current: bool
    of_sum: bool
    what: str


class SumRequest(NamedTuple):
    """The arguments of one `Routes.reduce_scatter`."""

    full_P: Tensor
    received: Tensor
    sum_S: Tensor
    partial: Tensor | None
    accumulate: bool
    what: str


@dataclass(frozen=True)
class GatherRoute:
    """A way to gather shards. Every way brings the same bits.

    Attributes:
        open: takes a rank's world and queue; returns the function that starts a gather. Collective.
        received: takes the world and the bytes of flat tensors; returns the bytes that a rank receives in their gather.
        by_node: whether gathers are by node, so that a rank may keep a secondary shard.
    """

    open: Callable[[World, Queue], Callable[[GatherRequest], Handle]]
    received: Callable[[World, int], Received]
    by_node: bool = False


@dataclass(frozen=True)
class SumRoute:
    """A way to add gradients over ranks. Each way has its own order of additions.

    Attributes:
        open: takes a rank's world, its queue, and the dtype in which a node's sum is sent to other nodes; returns the
            function that starts a sum. Collective.
        received: takes the world, the number of elements that are added, and the bytes of an element as it is sent
            first, and as a node's sum; returns the bytes that a rank receives in sums.
        chunks: takes the world; returns the numbers of chunks that a rank adds at once: of gradients, of nodes' sums.
        by_node: whether the ranks of a node add first, for which a rank needs a buffer of `partial_numel` elements.
        backend_adds: whether the backend adds, in the dtype in which gradients are sent; a rank then receives S
            elements, else P.
    """

    open: Callable[[World, Queue, torch.dtype], Callable[[SumRequest], Handle]]
    received: Callable[[World, int, int, int], Received]
    chunks: Callable[[World], tuple[int, ...]]
    by_node: bool = False
    backend_adds: bool = False

    def partial_numel(self, world: World, numel: int) -> int:
        """Return the elements of a node's sum of `numel` elements on one rank; 0 if sums are not by node."""
        return partial_numel(world, numel) if self.by_node else 0
