"""The gather in which each rank receives from every other rank."""

from collections.abc import Callable

from zero.distributed.routes.parts import Queue
from zero.distributed.routes.route import GatherRequest, GatherRoute, Received
from zero.distributed.world import World
from zero.platform.handle import Handle


def _open(world: World, _: Queue) -> Callable[[GatherRequest], Handle]:
    apart = world
    if world.size > 1 and not world.compute.shares_memory:
        # With one communicator a gather would queue behind the sums that were started before it. A kernel of NCCL
        # occupies the GPU until all ranks run it, but two communicators cannot deadlock: all ranks start gathers and
        # sums in the same order, and a GPU has room for a kernel of each. So a later collective never blocks the
        # earliest one that has not ended.
        apart = world.part(range(world.size), "gather", priority=True)

    def start(gather: GatherRequest) -> Handle:
        order = world if gather.of_sum else apart
        return order.gather(gather.shard_S, gather.full_P, what=gather.what)

    return start


def _received(world: World, full_bytes: int) -> Received:
    link, wire = ((full_bytes * others) / world.size for others in (world.size - 1, world.size - world.local_size))
    return Received(link, wire)


GATHER = GatherRoute(_open, _received)
