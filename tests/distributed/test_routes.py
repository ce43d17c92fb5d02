"""Laws of the ways by node: a gather brings the same bits, a sum has its declared order, each byte crosses once."""

import pytest
import torch
from torch import Tensor

from tests.simulation import simulated_gpu
from zero.distributed.routes import Routes, gather_route, partial_numel, sum_route
from zero.distributed.transport import Processes
from zero.distributed.world import World
from zero.errors import ConfigError, RankFailedError
from zero.testing import run_processes, run_ranks
from zero.testing.thread_world import Threads

SHAPES = [(2, 2), (2, 3), (3, 2), (4, 2)]
"""Nodes, and ranks on each."""
NUMEL = 5


def rough(numel: int, dtype: torch.dtype, *seed: int) -> Tensor:
    """Values of very different size: any other order or precision of addition shows."""
    generator = torch.Generator().manual_seed(sum(part * 1000**i for i, part in enumerate(seed)))
    exponents = torch.randint(-8, 8, (numel,), generator=generator)
    return torch.ldexp(torch.randn(numel, generator=generator), exponents).to(dtype)


def routes_of(
    world: World,
    gather: str = "world",
    reduce: str = "exact",
    *,
    copied: bool = False,
    travels: torch.dtype = torch.float32,
) -> Routes:
    ways = gather_route(gather, world, copied=copied), sum_route(reduce, world, copied=copied)
    return Routes(world, *ways, travels=travels)


def by_node(world: World) -> Routes:
    return routes_of(world, "node", "node")


def gathered(world: World, keeps: bool) -> list[Tensor]:
    """Return the results of three gathers, and of one more from the secondary shard."""
    routes, fulls, handles = by_node(world), [], []
    secondary = torch.full(((world.nodes - 1) * NUMEL,), torch.nan) if keeps else None
    for number in range(3):
        fulls.append(torch.full((world.size * NUMEL,), torch.nan))
        own = rough(NUMEL, torch.float32, world.rank, number)
        handles.append(routes.gather(own, fulls[-1], secondary=secondary if number == 2 else None))
    order = range(3) if world.rank % 2 else reversed(range(3))  # ranks wait in different orders
    for number in order:
        handles[number].wait()
    if keeps:
        fulls.append(torch.full_like(fulls[-1], torch.nan))
        before = world.traffic.wire_bytes
        routes.gather(own, fulls[-1], secondary=secondary, current=True).wait()
        assert world.traffic.wire_bytes == before
    return fulls


def on_two_nodes(world: World, keeps: bool) -> list[Tensor]:
    world.local_size = world.size // 2
    return gathered(world, keeps)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_a_gather_by_node_brings_every_shard_to_every_rank(nodes, ranks, keeps):
    size = nodes * ranks
    expected = [torch.cat([rough(NUMEL, torch.float32, r, number) for r in range(size)]) for number in range(3)]
    for fulls in run_ranks(size, gathered, keeps, nodes=nodes):
        for full, wanted in zip(fulls, [*expected, expected[2]][: len(fulls)], strict=True):
            assert torch.equal(full, wanted)


def two_gathers(world: World) -> list[Tensor]:
    """Of two engines in one world, before either is waited for."""
    world.local_size = world.size // 2
    fulls = [torch.full((world.size * NUMEL,), torch.nan) for _ in range(2)]
    own = [rough(NUMEL, torch.float32, world.rank, number) for number in range(2)]
    handles = [by_node(world).gather(shard, full) for shard, full in zip(own, fulls, strict=True)]
    for handle in handles:
        handle.wait()
    return fulls


@pytest.mark.parametrize("run", [run_ranks, run_processes])
def test_the_ways_of_two_engines_are_apart(run):
    expected = [torch.cat([rough(NUMEL, torch.float32, r, number) for r in range(4)]) for number in range(2)]
    for fulls in run(4, two_gathers):
        assert all(torch.equal(full, wanted) for full, wanted in zip(fulls, expected, strict=True))


def test_processes_gather_as_threads_do():
    threads, processes = run_ranks(4, gathered, True, nodes=2), run_processes(4, on_two_nodes, True)
    for tensors, other in zip(threads, processes, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors, other, strict=True))


def before(share: int, place: int) -> Tensor:
    """Return the values that a rank's share has before the sum."""
    return rough(share, torch.float32, place, 7)


def summed(world: World, dtype: torch.dtype, travels: torch.dtype, accumulate: bool, copies: bool) -> list[Tensor]:
    """Two sums, started one after the other; the first one's second half begins before it is waited for.

    Where each node has a copy a rank's share is P / L.
    """
    routes, sums, handles = routes_of(world, reduce="node", copied=copies, travels=travels), [], []
    sharers = world.local_size if copies else world.size
    share = world.size * NUMEL // sharers
    for number in range(2):
        full = rough(world.size * NUMEL, dtype, world.rank, number)
        sums.append(before(share, world.rank % sharers) if accumulate else torch.full((share,), torch.nan))
        partial = torch.full((partial_numel(world, full.numel()),), torch.nan)
        routes.advance()
        handles.append(routes.reduce_scatter(full, torch.empty_like(full), sums[-1], partial, accumulate=accumulate))
    for handle in handles if world.rank % 2 else handles[::-1]:
        handle.wait()
        handle.wait()
    return sums


def added_by_hand(nodes: int, ranks: int, number: int, dtype: torch.dtype, travels: torch.dtype) -> Tensor:
    """(c_0 + c_1 + ...) of each node in fp32, rounded to what travels, then node after node in fp32."""
    total = None
    for node in range(nodes):
        part = None
        for rank in range(node * ranks, (node + 1) * ranks):
            own = rough(nodes * ranks * NUMEL, dtype, rank, number).float()
            part = own if part is None else part + own
        assert part is not None
        part = part.to(travels).float()
        total = part if total is None else total + part
    assert total is not None
    return total


TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
"""Of gradients, and of node sums between nodes."""


@pytest.mark.parametrize(
    ("shape", "types", "accumulate", "copies"),
    [
        (shape, types, (i + j) % 2 == 0, (i // 2 + j) % 2 == 0)
        for i, shape in enumerate(SHAPES)
        for j, types in enumerate(TYPES)
    ],
)
def test_a_sum_by_node_adds_within_nodes_and_then_nodes(shape, types, accumulate, copies):
    """Every copy gets the same. Any two of these four go together once."""
    (nodes, ranks), (dtype, travels) = shape, types
    told = run_ranks(nodes * ranks, summed, dtype, travels, accumulate, copies, nodes=nodes)
    sharers = ranks if copies else nodes * ranks
    for number in range(2):
        expected = added_by_hand(nodes, ranks, number, dtype, travels).view(sharers, -1)
        for rank, sums in enumerate(told):
            place = rank % sharers
            wanted = expected[place]
            wanted = before(wanted.numel(), place) + wanted if accumulate else wanted
            assert torch.equal(sums[number], wanted)


@pytest.mark.parametrize("numel", [64 * 4, 64 * 12, 64 * 60])
def test_a_share_that_nodes_cannot_divide_is_padded(numel):
    """5 nodes of 2: shares of 2 ranks, in parts for 5."""

    def summed_up(world: World) -> Tensor:
        own, full = torch.empty(numel // 2), rough(numel, torch.float32, world.rank)
        partial = torch.full((partial_numel(world, numel),), torch.nan)
        routes = routes_of(world, copied=True)
        routes.reduce_scatter(full, torch.empty_like(full), own, partial, accumulate=False).wait()
        return own

    pairs = [rough(numel, torch.float32, 2 * n) + rough(numel, torch.float32, 2 * n + 1) for n in range(5)]
    expected = (((pairs[0] + pairs[1]) + pairs[2]) + pairs[3]) + pairs[4]
    for rank, told in enumerate(run_ranks(10, summed_up, nodes=5)):
        assert torch.equal(told, expected.view(2, -1)[rank % 2])


def test_the_order_of_a_sum_by_node_is_another_one():
    """Else the test above could not tell them apart."""

    def straight(world: World) -> Tensor:
        full, own = rough(world.size * NUMEL, torch.float32, world.rank, 0), torch.empty(NUMEL)
        world.reduce_scatter(full, torch.empty_like(full), own).wait()
        return own

    rank_order_sum = torch.cat(run_ranks(4, straight, nodes=2))
    assert not torch.equal(rank_order_sum, added_by_hand(2, 2, 0, torch.float32, torch.float32))


@pytest.mark.parametrize(("nodes", "ranks"), SHAPES)
def test_a_byte_crosses_each_wire_once(nodes, ranks):
    """Of a gather each rank gets one shard from each other node, of a sum one sum of each other node: together N - 1
    N-ths of a full tensor for each node, where a ring brings (W - 1) W-ths."""

    def moved(world: World) -> tuple[int, int]:
        full = torch.zeros(world.size * NUMEL)
        routes, partial = by_node(world), torch.empty(world.nodes * NUMEL)
        routes.gather(full[:NUMEL].clone(), torch.empty_like(full)).wait()
        gathered_bytes = world.traffic.wire_bytes
        routes.reduce_scatter(full, torch.empty_like(full), full.new_empty(NUMEL), partial, accumulate=False).wait()
        return gathered_bytes, world.traffic.wire_bytes - gathered_bytes

    size = nodes * ranks
    for counted in run_ranks(size, moved, nodes=nodes):
        assert counted == (4 * NUMEL * (nodes - 1),) * 2
        assert ranks * counted[1] <= 4 * NUMEL * (size - 1)


def test_a_rank_that_fails_is_named_to_those_who_wait_in_either_half():
    def fail(world: World) -> None:
        routes, full = by_node(world), torch.empty(world.size * NUMEL)
        routes.gather(torch.zeros(NUMEL), full).wait()
        if world.rank == 3:
            raise ValueError("of its own")
        routes.gather(torch.zeros(NUMEL), full).wait()

    told = []

    def note(world: World) -> None:
        try:
            fail(world)
        except RankFailedError as error:
            told.append((world.rank, str(error)))
            raise

    with pytest.raises(ValueError, match="of its own"):
        run_ranks(4, note, nodes=2)
    assert {rank for rank, _ in told} == {0, 1, 2}
    assert all("rank 3 failed first: ValueError: of its own" in text for _, text in told)


def parts_used(world: World, *ways: str) -> tuple[dict[str, bool], list[tuple[str, str]]]:
    """Return the parts that `Routes` opens, each with its priority, and (part, operation) of each collective."""
    parts: dict[str, bool] = {}
    operations: list[tuple[str, str]] = []

    class Recording(Threads):
        def open(self, *, priority):
            parts[self.order.partition(" of ")[0]] = priority

        def _start(self, op, *args, **kwargs):
            operations.append((self.order.partition(" of ")[0], op))
            return super()._start(op, *args, **kwargs)

    world._transport.__class__ = Recording
    routes, full = routes_of(world, *ways), torch.zeros(world.size * NUMEL)
    shard, partial = full[:NUMEL].clone(), torch.empty(world.nodes * NUMEL)
    routes.gather(shard, full.clone(), what="parameters").wait()
    routes.reduce_scatter(full, torch.empty_like(full), shard, partial, accumulate=False).wait()
    routes.gather(shard, full.clone(), of_sum=True, what="a sum").wait()
    return parts, operations


def test_on_gpus_gathers_of_parameters_do_not_queue_behind_sums():
    """A gather that ends a sum follows it in the same communicator."""
    names = ["gather of parameters", "reduce_scatter", "gather of a sum"]
    assert run_ranks(2, parts_used) == [({}, [("", name) for name in names])] * 2
    with simulated_gpu():
        used = {"gather": True}, [*zip(("gather", "", ""), names, strict=True)]
        assert run_ranks(2, parts_used) == [used] * 2
        assert run_ranks(1, parts_used)[0][0] == {}, "one rank gathers nothing"


def test_parts_for_gathers_by_node_have_priority_over_those_for_sums():

    def by_node_parts(world: World) -> dict[str, bool]:
        return parts_used(world, "node", "node")[0]

    with simulated_gpu():
        for parts in run_ranks(4, by_node_parts, nodes=2):
            wheres = ("within a node", "across nodes")
            assert parts == {f"{name} {where}": name == "gather" for name in ("gather", "sum") for where in wheres}


def on_two_communicators(world: World) -> tuple[list[float], list[float]]:
    """Start sums and gathers in turn, and wait for the gathers first."""
    transport = world._transport
    assert isinstance(transport, Processes)
    routes, fulls, sums = routes_of(world), torch.zeros(3, world.size), torch.zeros(3)
    handles = []
    for number in range(3):
        rows = torch.full((world.size,), float(number + world.rank))
        scratch, own = torch.empty_like(rows), rows[:1].clone()
        started = routes.reduce_scatter(rows, scratch, sums[number : number + 1], None, accumulate=False)
        handles += [started, routes.gather(own, fulls[number])]
    for handle in (*handles[1::2], *handles[::2]):
        handle.wait()
    assert [name.partition(" of ")[0] for name in transport._processes._parts] == ["gather"]
    return fulls.flatten().tolist(), sums.tolist()


@pytest.mark.process
def test_processes_gather_beside_their_sums():
    with simulated_gpu():
        assert run_processes(2, on_two_communicators) == [([0, 1, 1, 2, 2, 3], [1, 3, 5])] * 2


def test_thread_ranks_are_as_many_on_each_node():
    with pytest.raises(ConfigError, match="4 ranks do not divide by 3 nodes"):
        run_ranks(4, by_node, nodes=3)
