"""A world of some of a run's ranks: it sees its own ranks, nodes and failures, and no operation of another world."""

import contextlib
import os
import re
import signal
import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zero
from tests.common.small import Setting, train_small
from tests.conftest import LONG_S
from tests.simulation import simulated_gpu
from zero.distributed.operations import _LOST
from zero.distributed.stalled import PATIENCE_S, PERIOD_S
from zero.errors import ConfigError, RankFailedError, WorldError
from zero.testing import run_processes, run_ranks


def seen(world: zero.World) -> dict[str, Any]:
    """Return the ranks that an exchange and a gather of the world reach, and its facts."""
    number = torch.tensor([world.ranks[world.rank]])
    full = number.new_empty(world.size)
    world.gather(number, full).wait()
    assert full.tolist() == world.exchange(number).flatten().tolist() == list(world.ranks)
    return {"ranks": world.ranks, "rank": world.rank, "coordinates": dict(world.coordinates)}


def on_a_mesh(_: zero.World) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    both = mesh["replicate", "shard"]._flatten("dp")
    group = mesh.get_group("tp")
    with zero.World.from_mesh(mesh, "tp", timeout_s=LONG_S) as tp:
        worlds = {"tp": seen(tp), "beside": seen(tp.beside(mesh["replicate"])), "part": seen(tp.part([1, 0], "turned"))}
        assert tp.beside(tp.whole) is tp.whole
    for name, source in (("dp", mesh), ("flattened", both), ("line", mesh["replicate"])):
        with zero.World.from_mesh(source, "replicate" if name == "line" else "dp", timeout_s=LONG_S) as world:
            worlds[name] = seen(world)
    with zero.World.from_group(group, coordinates={"replicate": dist.get_rank() // 2}, timeout_s=LONG_S) as world:
        worlds["group"] = seen(world)
        world.barrier()
    with pytest.raises(WorldError, match="has left this world"):
        world.barrier()
    return worlds


def test_a_world_of_a_mesh_or_group_has_its_ranks_and_the_coordinates_of_other_dimensions():
    """Dimensions of one index have no coordinate, and a flattened one replaces its parts."""
    for rank, worlds in enumerate(run_processes(4, on_a_mesh, timeout_s=LONG_S)):
        dp, tp = divmod(rank, 2)
        line, pair = (tp, tp + 2), (2 * dp, 2 * dp + 1)
        of_dp = {"ranks": line, "rank": dp, "coordinates": {"tp": tp}}
        of_tp = {"ranks": pair, "rank": tp, "coordinates": {"replicate": dp}}
        assert worlds == {
            "tp": of_tp,
            "beside": {**of_dp, "coordinates": {}},
            "part": {"ranks": pair[::-1], "rank": 1 - tp, "coordinates": {}},
            "dp": of_dp,
            "flattened": of_dp,
            "line": of_dp,
            "group": of_tp,
        }


def test_one_rank_is_a_world_of_a_mesh_too():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        with zero.World.from_mesh(mesh, "dp") as world:
            assert world.size == 1
            assert seen(world) == {"ranks": (0,), "rank": 0, "coordinates": {}}
    finally:
        dist.destroy_process_group()


def apart(whole: zero.World, *, on_mesh: bool) -> list[float]:
    """Run operations of another size in each of two worlds, and wait in both for a slow rank."""
    with contextlib.ExitStack() as closing:
        if on_mesh:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            world = closing.enter_context(zero.World.from_mesh(mesh, "dp", timeout_s=LONG_S))
        else:
            world = zero.sequence.open_group(whole, 2)
        full = torch.empty(2 * (3 + min(world.ranks)))
        for turn in range(2):
            if turn and world.rank == 1:
                threading.Event().wait(PATIENCE_S + 2 * PERIOD_S)
            world.gather(torch.full((full.numel() // 2,), float(world.rank)), full).wait()
        return full.tolist()


@pytest.mark.parametrize(("on_mesh", "numels"), [(True, (3, 4, 3, 4)), (False, (3, 3, 5, 5))])
def test_ranks_that_wait_long_do_not_take_another_worlds_operations_for_theirs(on_mesh: bool, numels: tuple[int, ...]):
    results = run_processes(4, partial(apart, on_mesh=on_mesh), timeout_s=LONG_S)
    assert results == [[0.0] * numel + [1.0] * numel for numel in numels]


def is_killed(whole: zero.World) -> None:
    group = zero.sequence.open_group(whole, 2)
    full = torch.empty(2 * (3 + min(group.ranks)))
    whole.barrier("start")
    if whole.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    handle = group.gather(full[: full.numel() // 2].clone(), full)
    if whole.rank == 2:
        wait, op = handle.wait, "gather"
    else:
        handle.wait()
        wait, op = partial(whole.barrier, "the end"), "barrier of the end"
    with pytest.raises(RankFailedError, match=rf"^rank {whole.rank} lost rank 3 in {op} \("):
        wait()


def test_a_killed_rank_is_named_beside_groups_that_run_other_operations():
    with pytest.raises(RankFailedError, match=r"^rank 3 ended without a result: killed by signal 9 \(SIGKILL\)"):
        run_processes(4, is_killed, timeout_s=LONG_S)


def overlapping(whole: zero.World) -> list[list[int]]:
    """Gather in each pair of three ranks, the first pair twice."""
    gathered = []
    for ranks in ([0, 1], [0, 1], [0, 2], [1, 2]):
        if whole.rank in ranks:
            full = torch.empty(2, dtype=torch.int64)
            whole.part(ranks, "pair").gather(torch.tensor([whole.rank]), full).wait()
            gathered.append(full.tolist())
    return gathered


@pytest.mark.parametrize("run", [run_ranks, partial(run_processes, timeout_s=LONG_S)], ids=["threads", "processes"])
def test_groups_of_one_name_may_share_ranks(run):
    assert run(3, overlapping) == [[[0, 1], [0, 1], [0, 2]], [[0, 1], [0, 1], [1, 2]], [[0, 2], [1, 2]]]


def communicators(_: zero.World, *, more: str) -> Any:
    """Return the GPU communicators of a world and a norm group; rank 0 may have made a process group more."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if more == "alone" and dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    if more == "counted" and dist.get_rank() == 0:
        dist.distributed_c10d._world.group_count += 1
    try:
        with zero.World.from_mesh(mesh, "dp", timeout_s=LONG_S) as world:
            assert seen(world.beside(mesh["tp"]))["ranks"] == tuple(mesh["tp"].mesh.tolist())
            return len(world._transport._processes._parts)
    except (ConfigError, WorldError) as error:
        return str(error)


def test_a_world_of_gpus_has_one_communicator():
    with simulated_gpu():
        assert run_processes(4, partial(communicators, more=""), timeout_s=LONG_S) == [1] * 4


REFUSED = "process groups of torch. Make as many on each rank"


def test_a_world_of_gpus_refuses_names_that_would_differ():
    """torch 2.14 counts a group that a rank makes alone, so there not even the connections would have one name."""
    with simulated_gpu():
        texts = run_processes(4, partial(communicators, more="alone"), timeout_s=LONG_S)
    if texts[0].startswith("ranks 0, 2 have [5, 4] "):
        assert texts[2].startswith("ranks 0, 2 have [5, 4] ")
        assert all(f"ranks 0, 2 have [5, 4] {REFUSED}" in text for text in texts), "the other ranks name it, too"
    else:
        assert all(text.startswith(f"the ranks have made 6, 5, 5, 5 {REFUSED}") for text in texts)


def test_ranks_that_count_other_groups_are_told_before_they_connect():
    texts = run_processes(4, partial(communicators, more="counted"), timeout_s=LONG_S)
    counts = [int(count) for count in re.findall(r"\d+", texts[0].partition(REFUSED)[0])]
    assert counts == [counts[1] + 1, *counts[1:2] * 3]
    assert (
        texts == [f"the ranks have made {', '.join(map(str, counts))} {REFUSED}, by init_device_mesh or new_group."] * 4
    )


def test_only_errors_of_gloo_are_lost_connections():
    assert _LOST.search("[/src/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    assert _LOST.search("[/src/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete")
    assert not _LOST.search("DataLoader timed out after 5 seconds")


def of_nodes(whole: zero.World, ranks: list[int]) -> tuple[int, int, bool] | None:
    if whole.rank not in ranks:
        return None
    part = whole.part(ranks, "part")
    assert part.part(range(len(ranks)), "again").local_size == part.local_size
    return part.local_size, part.nodes, part.nodes_alike


@pytest.mark.parametrize(
    ("ranks", "facts"),
    [
        ([0, 1, 2, 3], [(4, 1, True)] * 4),
        ([0, 2, 4, 6], [(2, 2, True)] * 4),
        ([1, 5], [(1, 2, True)] * 2),
        ([2, 3, 4], [(2, 2, False), (2, 2, False), (1, 3, False)]),
        ([0, 4, 1, 5], [(2, 2, False)] * 4),
    ],
)
def test_a_part_knows_which_of_its_ranks_are_on_a_node(ranks: list[int], facts: list[Any]):
    results = run_ranks(8, of_nodes, ranks, nodes=2)
    assert [results[rank] for rank in ranks] == facts


def half(whole: zero.World, setting: Setting) -> Any:
    """Train on the ranks of this one's parity; the two worlds differ in the number of steps."""
    world = whole.part(range(whole.rank % 2, whole.size, 2), f"parity {whole.rank % 2}")
    return train_small(world, setting, steps=2 + whole.rank % 2)


@pytest.mark.parametrize("between", [("world", "exact"), ("node", "node"), ("world", "native")], ids=str)
def test_a_part_of_a_run_trains_in_the_bits_of_a_run_of_its_size(between: tuple[str, str]):
    """By node too, where each node has two ranks of each part."""
    setting = Setting(stage=3, between=between, clip=0.1)
    expected = [run_ranks(4, train_small, setting, 2 + number, nodes=2) for number in range(2)]
    assert run_ranks(8, half, setting, nodes=2) == [expected[rank % 2][rank // 2] for rank in range(8)]
