"""The routes by name: the values of `zero.gather` and `zero.reduce`.

A new route is a file beside this one, with a record, and a line in its table. Settings offer the names of these tables.
"""

from zero.distributed.routes import copies, direct, exact, native, node
from zero.distributed.routes.nodes import are_even, are_several
from zero.distributed.routes.route import GatherRoute, SumRoute
from zero.distributed.world import World

GATHERS: dict[str, GatherRoute] = {"world": direct.GATHER, "node": node.GATHER}

SUMS: dict[str, SumRoute] = {"exact": exact.SUM, "native": native.SUM, "node": node.SUM}


def default_gather(world: World) -> str:
    """Return the name of the gather route that `auto` stands for."""
    return "node" if are_even(world) else "world"


def default_sum(world: World) -> str:
    """Return the name of the sum route that `auto` stands for."""
    return "node" if world.local_size < world.size and are_even(world) else "exact"


def gather_route(name: str, world: World, *, copied: bool) -> GatherRoute:
    """Return the gather route of a world, a direct one where nodes make no difference.

    Args:
        copied: whether each node has a copy of the state.
    """
    route = copies.GATHER if copied else GATHERS[name]
    return route if are_several(world) or not route.by_node else direct.GATHER


def sum_route(name: str, world: World, *, copied: bool) -> SumRoute:
    """Return the sum route of a world, as `gather_route`; where nodes make no difference, "exact" is "node"."""
    route = copies.SUM if copied else SUMS[name]
    return route if are_several(world) or not route.by_node else exact.SUM
