"""The nodes of a world: the ranks of a node, the ranks with the same number on each node, and parts of flat tensors."""

import torch
from torch import Tensor

from zero.core.sizes import round_up
from zero.distributed.world import World


def are_even(world: World) -> bool:
    """Return whether each node has the same number of ranks, with consecutive numbers."""
    return world.nodes_alike and not world.size % world.local_size


def are_several(world: World) -> bool:
    """Return whether there are several nodes with several ranks each; else routes by node equal direct routes."""
    return 1 < world.local_size < world.size


def within_node(world: World, operation: str) -> World:
    """Return the ranks of this node as a world."""
    first = world.rank - world.rank % world.local_size
    ranks = range(first, first + world.local_size)
    return world.part(ranks, f"{operation} within a node", priority=operation == "gather", alike=True)


def across_nodes(world: World, operation: str) -> World:
    """Return the ranks with this rank's number, one on each node, as a world."""
    ranks = range(world.rank % world.local_size, world.size, world.local_size)
    return world.part(ranks, f"{operation} across nodes", priority=operation == "gather", alike=True)


def partial_numel(world: World, numel: int) -> int:
    """Return the number of elements of a node's sum on one rank: `numel` / L, rounded up to equal parts per node."""
    return -(-numel // world.size) * world.nodes


def reused(flat: Tensor, dtype: torch.dtype, numel: int, *, start: int = 0) -> Tensor:
    """Return `numel` elements of `dtype` in the memory of `flat`, from byte `start`; new memory if they do not fit."""
    start, nbytes = round_up(start, dtype.itemsize), numel * dtype.itemsize
    if start + nbytes > flat.nbytes:
        return flat.new_empty(numel, dtype=dtype)
    return flat.view(torch.uint8)[start : start + nbytes].view(dtype)
