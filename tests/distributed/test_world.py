"""Laws of communication: they hold on any number of ranks, whether ranks are threads or processes."""

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.conftest import LONG_S
from tests.simulation import simulated_gpu
from zero.distributed import rendezvous, stalled
from zero.distributed.ordered_sum import ordered_sum
from zero.distributed.stalled import PATIENCE_S, PERIOD_S
from zero.distributed.transport import Processes
from zero.distributed.world import World, open_world
from zero.errors import ConfigError, DeadlineError, HandshakeError, LayoutError, RankFailedError, WorldError
from zero.platform.device import Device
from zero.testing import run_processes, run_ranks

SIZES = [1, 2, 3, 8]
PROCESSES = [2, 3]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
SHORT_S = 1.0
RAGGED = Device.sum_numel + 7


def integers(numel: int, *seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(part * 1000**i for i, part in enumerate(seed)))
    return torch.randint(-9, 10, (numel,), generator=generator).float()


def rough(numel: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    """Values of very different size: any other order or precision of addition shows."""
    generator = torch.Generator().manual_seed(7 + rank)
    exponents = torch.randint(-8, 8, (numel,), generator=generator)
    return torch.ldexp(torch.randn(numel, generator=generator), exponents).to(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()


# The laws, each a function of one rank's world, so that threads and processes run the very same lines.


def transpose(world: World) -> tuple[float, float]:
    """This rank's part of <gather(x), y> and of <x, reduce_scatter(y)>."""
    numel = 5
    x_S, y_P = integers(numel, world.rank, 1), integers(numel * world.size, world.rank, 2)
    full_P, sum_S = torch.empty_like(y_P), torch.empty(numel)
    world.gather(x_S, full_P).wait()
    world.reduce_scatter(y_P, torch.empty_like(y_P), sum_S).wait()
    return float(full_P @ y_P), float(x_S @ sum_S)


def placed(world: World) -> list[bool]:
    """Rank r's shard lands at place r: every dtype, apart and in place, empty too."""
    right = []
    for dtype in DTYPES:
        for numel in (0, 3):
            ranks = torch.arange(world.size).repeat_interleave(numel) % 2
            expected_P = ranks.to(torch.float32).to(dtype)
            own_S = expected_P[world.rank * numel : (world.rank + 1) * numel]
            apart_P, inside_P = torch.zeros_like(expected_P), torch.zeros_like(expected_P)
            inside_S = inside_P[world.rank * numel : (world.rank + 1) * numel]
            inside_S.copy_(own_S)
            world.gather(own_S, apart_P, what="apart").wait()
            world.gather(inside_S, inside_P, what="inside").wait()
            right += [bits(apart_P) == bits(expected_P), bits(inside_P) == bits(expected_P)]
    return right


def sums(world: World) -> dict[str, tuple[bool, int]]:
    """For every kind of sum: does it equal a plain loop's, and a hash of its bits."""
    numel = RAGGED if world.size <= 3 else 71
    results = {}
    for dtype in FLOATS:
        full_P = rough(numel * world.size, dtype, world.rank)
        chunks = [rough(numel * world.size, dtype, r).view(world.size, -1)[world.rank] for r in range(world.size)]
        for sum_dtype in {torch.float32, dtype}:
            total_S = chunks[0].to(sum_dtype)
            for chunk in chunks[1:]:
                total_S = total_S + chunk.to(sum_dtype)
            for accumulate in (False, True):
                start_S = rough(numel, sum_dtype, 99)
                sum_S = start_S.clone()
                world.reduce_scatter(full_P, torch.empty_like(full_P), sum_S, accumulate=accumulate).wait()
                equal = torch.equal(sum_S, start_S + total_S if accumulate else total_S)
                name = f"{dtype} into {sum_dtype}, accumulate={accumulate}"
                results[name] = (equal, torch.hash_tensor(sum_S.float()).item())
    return results


def native_sums(world: World) -> dict[str, bool]:
    """For every dtype: is the backend's sum as near to the exact one as W roundings allow, and the same again."""
    numel = 71
    results = {}
    for dtype in FLOATS:
        full_P = rough(numel * world.size, dtype, world.rank)
        every = torch.stack([rough(numel * world.size, dtype, r).double() for r in range(world.size)])
        chunks = every.view(world.size, world.size, -1)[:, world.rank]
        bound = world.size * torch.finfo(dtype).eps * chunks.abs().sum(0)
        for accumulate in (False, True):
            sums_of_both = []
            for _ in range(2):
                sum_S = torch.full((numel,), 0.5)
                handle = world.reduce_scatter(
                    full_P, full_P.new_empty(numel), sum_S, native=True, accumulate=accumulate
                )
                handle.wait()
                sums_of_both.append(sum_S)
            expected = chunks.sum(0) + 0.5 * accumulate
            room = bound + torch.finfo(torch.float32).eps * (expected.abs() + 0.5)
            near = bool(((sums_of_both[0].double() - expected).abs() <= room).all())
            results[f"{dtype}, accumulate={accumulate}"] = near and torch.equal(*sums_of_both)
    return results


def turned(world: World) -> list[bool]:
    """An all-to-all is a transposition: chunk s of rank r becomes chunk r of rank s. Every dtype, empty too."""
    right = []
    for dtype in DTYPES:
        for numel in (0, 3):
            sent = [(integers(numel * world.size, r, 4) % 2).to(dtype) for r in range(world.size)]
            expected_P = torch.cat([full_P.view(world.size, -1)[world.rank] for full_P in sent])
            recv_P, before = torch.zeros_like(expected_P), world.traffic.reduce_bytes
            world.all_to_all(sent[world.rank], recv_P, what="heads").wait()
            received = world.traffic.reduce_bytes - before
            right += [bits(recv_P) == bits(expected_P), received == numel * (world.size - 1) * dtype.itemsize]
    return right


def small_things(world: World) -> dict[str, object]:
    scalar, table = torch.tensor(1.0 + world.rank), torch.full((2, 3), world.rank)
    world.all_reduce(scalar, what="norm").wait()
    world.all_reduce(table).wait()
    sent = []
    for source in range(world.size):
        flags = torch.tensor([[world.rank == source], [True]])
        world.broadcast(flags, source).wait()
        sent.append(flags.flatten().tolist())
    world.barrier("the end")
    world.agree({"stage": "3", "dtype": "bf16"})
    return {
        "scalar": scalar.item(),
        "table": table.flatten().tolist(),
        "sent": sent,
        "texts": [world.share(f"from {world.rank} ü", source) for source in range(world.size)] + [world.share("")],
    }


def out_of_order(world: World) -> tuple[list[float], list[float]]:
    """Handles are waited for in reverse, and one of them twice."""
    full_P, sum_S = torch.empty(world.size), torch.zeros(1)
    gather = world.gather(torch.tensor([float(world.rank)]), full_P)
    reduce = world.reduce_scatter(torch.ones(world.size), torch.empty(world.size), sum_S, accumulate=True)
    reduce.wait()
    reduce.wait()
    gather.wait()
    return full_P.tolist(), sum_S.tolist()


LAWS = (transpose, placed, sums, native_sums, turned, small_things, out_of_order)


def all_laws(world: World) -> dict[str, object]:
    with pytest.raises(UserWarning, match="in a rank"):
        warnings.warn("in a rank", stacklevel=1)
    return {
        "threads": torch.get_num_threads(),
        "kind": type(world._transport).__name__,
        **{law.__name__: law(world) for law in LAWS},
    }


class Collectively(Processes):
    """The way that GPU tensors take, on host tensors."""

    def _by_collective(self, tensor: torch.Tensor) -> bool:
        return True


def part_of(whole: World, ranks: Sequence[int], group: dist.ProcessGroup) -> World:
    """Return some ranks of a world of `Collectively`, with their communicator."""
    part = whole.part(ranks, "part", for_host=True)
    part._transport._processes._parts[part._transport.order] = group  # type: ignore[attr-defined]
    return part


def laws_and_stories(world: World) -> dict[str, object]:
    seen = all_laws(world) | {"after a slow rank": after_a_slow_rank(world)}
    with World(Collectively("cpu", timeout_s=LONG_S)) as collective:
        seen["by collective"] = {law.__name__: law(collective) for law in LAWS}
        ranks, number = (1, 2), torch.tensor([float(world.rank)])
        group = dist.new_group(ranks)
        if world.rank in ranks:
            part_of(collective, ranks, group).broadcast(number, 1).wait()
        seen["from the second of the last two"] = number.item()
    return seen | {"stories": stories(world)}


@pytest.fixture(scope="module")
def three_processes():
    """One start of three processes for all that three processes have to show."""
    return run_processes(3, laws_and_stories)


@pytest.fixture(scope="module", params=[*SIZES, *(-size for size in PROCESSES)], ids=lambda n: f"{abs(n)}{'tp'[n < 0]}")
def outcome(request):
    """The observations of every rank; a positive size means threads, a negative one processes."""
    size = request.param
    if size > 0:
        return run_ranks(size, lambda world: {law.__name__: law(world) for law in LAWS})
    return request.getfixturevalue("three_processes") if size == -3 else run_processes(-size, all_laws)


@pytest.mark.process
def test_a_broadcast_in_a_part_comes_from_a_rank_of_the_part(three_processes):
    assert [rank["from the second of the last two"] for rank in three_processes] == [0, 2, 2]


class CountedStore:
    """A store in this process, and the names of the calls of it."""

    def __init__(self, values: dict[str, str]) -> None:
        self.calls, self._store = list[str](), dist.HashStore()
        for key, value in values.items():
            self._store.set(key, value)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.calls.append(name)
        return getattr(self._store, name)


def test_a_rank_reads_the_texts_of_all_ranks_in_one_request():
    """With a request for each of 1,024 ranks the store would answer a million."""
    size = 9
    store = CountedStore({f"here/{rank}": str(rank) for rank in range(size)})
    assert rendezvous.hosts(store, size) == [*map(str, range(size))]
    assert store.calls == ["multi_get"]
    store = CountedStore({f"groups/{rank}": "2" for rank in range(size)})
    rendezvous.check_process_groups(store, 3, size, 2, LONG_S)
    assert store.calls == ["set", "wait", "multi_get"]
    store = CountedStore({f"connected/{rank}": "" for rank in range(size)})
    rendezvous.connect_all(store, 3, size, lambda: None, timeout_s=LONG_S, wait_s=LONG_S, hint="")
    assert store.calls == ["set", "wait", "multi_get", "set"]


def test_gather_and_reduce_scatter_are_transposes(outcome):
    """<gather(x), y> = <x, reduce_scatter(y)>, exactly, since the values are small integers."""
    left, right = zip(*(rank["transpose"] for rank in outcome), strict=True)
    assert sum(left) == sum(right)


def test_a_shard_lands_at_its_ranks_place(outcome):
    assert all(all(rank["placed"]) for rank in outcome)


def test_chunks_are_added_in_rank_order_in_the_dtype_of_the_sum(outcome):
    for rank in outcome:
        assert all(equal for equal, _ in rank["sums"].values()), rank["sums"]


def test_sums_of_the_backend_are_near_and_repeat(outcome):
    for rank in outcome:
        assert all(rank["native_sums"].values()), rank["native_sums"]


def test_an_all_to_all_transposes_chunks_and_counts_their_bytes(outcome):
    assert all(all(rank["turned"]) for rank in outcome)


def test_small_things_reach_every_rank(outcome):
    size = len(outcome)
    expected = {
        "scalar": sum(range(1, size + 1)),
        "table": [sum(range(size))] * 6,
        "sent": [[True, True]] * size,
        "texts": [f"from {source} ü" for source in range(size)] + [""],
    }
    assert [rank["small_things"] for rank in outcome] == [expected] * size


def test_handles_may_be_waited_for_in_any_order_and_again(outcome):
    size = len(outcome)
    assert [rank["out_of_order"] for rank in outcome] == [([float(r) for r in range(size)], [float(size)])] * size


@pytest.mark.process
@pytest.mark.parametrize("outcome", [-size for size in PROCESSES], indirect=True, ids=["2p", "3p"])
def test_threads_and_processes_give_the_same_bits(outcome):
    threads = run_ranks(len(outcome), sums)
    assert [rank["sums"] for rank in outcome] == threads
    assert {rank["threads"] for rank in outcome} == {1}
    assert {rank["kind"] for rank in outcome} == {"Processes"}


@pytest.mark.process
def test_collectives_obey_the_same_laws_with_the_same_bits(three_processes):
    for rank in three_processes:
        assert rank["by collective"] == {law.__name__: rank[law.__name__] for law in LAWS}


# The local sum.


@pytest.mark.parametrize("numel", [0, 1, Device.sum_numel, RAGGED])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_chunked_sum_is_the_plain_sum(numel, size, accumulate):
    for dtype in FLOATS:
        chunks = [rough(numel, dtype, r) for r in range(size)]
        start = rough(numel, torch.float32, 99)
        total = chunks[0].float()
        for chunk in chunks[1:]:
            total = total + chunk.float()
        out = start.clone()
        ordered_sum(torch.stack(chunks), out, accumulate=accumulate)
        assert torch.equal(out, start + total if accumulate else total)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_sum_allocates_only_its_scratch(dtype, accumulate):
    chunks, out = torch.stack([rough(4 * RAGGED, dtype, r) for r in range(3)]), torch.zeros(4 * RAGGED)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        ordered_sum(chunks, out, accumulate=accumulate)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    scratches = int(accumulate) + int(dtype != torch.float32)
    assert allocated <= scratches * Device.sum_numel * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_kernel_of_the_sum_gives_the_bits_of_the_operators(size, dtype):
    """Run the kernel in the interpreter of Triton, with the own chunk in another tensor than the received ones."""
    with simulated_gpu(fused=True):
        gpu = World.solo().compute
    patterns = torch.randint(-(2**31), 2**31, (size + 1, RAGGED), generator=torch.Generator().manual_seed(size))
    received = patterns[:size].to(torch.int32).view(torch.float32).to(dtype)
    received[:, ::3] = torch.stack([rough(RAGGED, dtype, r)[::3] for r in range(size)])
    own, start = rough(RAGGED, dtype, 50), rough(RAGGED, torch.float32, 99)
    for rank in {0, size - 1}:
        for accumulate in (False, True):
            plain, fused = start.clone(), start.clone()
            ordered_sum(received, plain, own, rank, accumulate=accumulate)
            ordered_sum(received, fused, own, rank, accumulate=accumulate, device=gpu)
            assert torch.equal(plain.isnan(), fused.isnan())
            assert torch.equal(plain.nan_to_num().view(torch.int32), fused.nan_to_num().view(torch.int32))


# What a world refuses.


def test_sizes_and_dtypes_that_do_not_fit_are_refused():
    world = World.solo()
    with pytest.raises(LayoutError, match=r"gather of head: .*, not shape \(3,\)"):
        world.gather(torch.zeros(2), torch.zeros(3), what="head")
    with pytest.raises(LayoutError, match="bfloat16"):
        world.gather(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    with pytest.raises(LayoutError, match="strides"):
        world.reduce_scatter(torch.zeros(4)[::2], torch.zeros(2), torch.zeros(2))
    with pytest.raises(WorldError, match="ranks 0 to 0"):
        world.broadcast(torch.zeros(1), source=1)
    with pytest.raises(LayoutError, match="all_to_all of heads: the tensor must be 2"):
        world.all_to_all(torch.zeros(2), torch.zeros(3), what="heads")


def test_a_sum_inside_its_own_summand_is_refused():
    def inside(world: World) -> None:
        full_P = torch.zeros(2 * world.size)
        world.reduce_scatter(full_P, torch.zeros_like(full_P), full_P[:2])

    with pytest.raises(LayoutError, match="overlaps an input"):
        run_ranks(2, inside)


def test_a_solo_sum_may_be_its_summand():
    full_P = torch.arange(3.0)
    World.solo().reduce_scatter(full_P, torch.empty(3), full_P).wait()
    assert full_P.tolist() == [0, 1, 2]


# The handshake.

SETTINGS = {"layouts": "h.0: 4096; h.1: 4096", "precision": "bf16", "seed": "0", "torch": "2.13.0", "zero.stage": "3"}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("odd", [0, 2])
def test_the_handshake_names_the_field_that_differs(name, odd):
    def greet(world: World) -> str:
        fields = SETTINGS | ({name: "other"} if world.rank == odd else {})
        with pytest.raises(HandshakeError) as refusal:
            world.agree(fields)
        return str(refusal.value)

    same = ", ".join(str(r) for r in range(3) if r != odd)
    messages = run_ranks(3, greet)
    assert len(set(messages)) == 1
    assert f"different settings: {name} is" in messages[0]
    assert f"other on rank {odd}" in messages[0]
    assert f"{SETTINGS[name]} on ranks {same}" in messages[0]


def test_the_handshake_names_a_field_that_only_one_rank_has():
    with pytest.raises(HandshakeError, match=r"extra is \(absent\) on rank 0; 1 on rank 1"):
        run_ranks(2, lambda world: world.agree({"seed": "0"} | ({"extra": "1"} if world.rank else {})))


def test_the_handshake_cuts_long_values_to_where_they_differ():
    with pytest.raises(HandshakeError, match=r"xyz0x.*on rank 0.*xyz1x") as refusal:
        run_ranks(2, lambda world: world.agree({"config": "x" * 9000 + f"xyz{world.rank}" + "x" * 9000}))
    assert len(str(refusal.value)) < 600


# Threads that cannot go on.


def test_ranks_that_run_different_operations_are_named():
    def differ(world: World) -> None:
        world.barrier("start")
        if world.rank == 1:
            world.barrier("the end")
        else:
            world.all_reduce(torch.zeros(2), what="norm").wait()

    with pytest.raises(WorldError, match=r"barrier of the end, .* on rank 1") as refusal:
        run_ranks(3, differ)
    assert "all_reduce of norm, 6 elements of torch.float32 on rank" in str(refusal.value)


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(2, dtype=torch.int32)], ids=["shape", "dtype"])
def test_ranks_that_bring_other_shapes_or_dtypes_are_named(other):
    with pytest.raises(WorldError, match="different operations: all_reduce"):
        run_ranks(2, lambda world: world.all_reduce(torch.zeros(2) if world.rank else other.clone()).wait())


def test_a_rank_that_never_comes_is_named_with_its_last_operation():
    release = threading.Event()

    def late(world: World) -> None:
        world.barrier("start")
        world._transport.timeout_s = 0.2
        if world.rank == 1:
            release.wait(LONG_S)
        else:
            try:
                world.barrier("the end")
            finally:
                release.set()

    with pytest.raises(
        DeadlineError, match=r"waited 0\.2 s in barrier of the end\. Missing: rank 1 \(last .* of start"
    ):
        run_ranks(2, late)


def test_a_rank_that_raises_releases_the_others_and_is_raised():
    seen: dict[int, str] = {}

    def fall(world: World) -> None:
        if world.rank == 2:
            raise ValueError("bad batch")
        try:
            world.barrier("the end")
        except RankFailedError as error:
            seen[world.rank] = str(error)
            raise

    start_s = time.monotonic()
    with pytest.raises(ValueError, match="bad batch") as failure:
        run_ranks(3, fall)
    assert time.monotonic() - start_s < 60, "long before the deadline of 120 s"
    assert failure.value.__notes__ == ["raised on rank 2 of 3"]
    assert seen == {
        r: f"rank 2 failed first: ValueError: bad batch (rank {r} was in barrier of the end)" for r in (0, 1)
    }


def test_a_rank_that_leaves_early_is_named_at_once():
    with pytest.raises(WorldError, match="rank 0 left the world while rank 1 was in barrier of the end"):
        run_ranks(2, lambda world: world.barrier("the end") if world.rank else None)


def test_a_rank_that_hangs_is_shown_with_its_stack():
    release = threading.Event()

    def stand_still(world: World) -> None:
        release.wait(LONG_S)

    with pytest.raises(DeadlineError, match=r"(?s)ranks 0, 1 of 2 still running after 0\.2 s.*in stand_still"):
        run_ranks(2, stand_still, timeout_s=0.2)
    release.set()


def test_exclusive_keeps_torchs_generator_to_one_rank():
    def draw(world: World) -> list[float]:
        values = []
        for seed in range(50):
            with world.exclusive():
                torch.manual_seed(seed)
                values += [torch.rand(()).item() for _ in range(5)]
        return values

    first, *rest = run_ranks(4, draw)
    assert rest == [first] * 3


def save_the_generator_amid_garbage(world):
    """Save the generator as a checkpoint does, while cycles of tensors wait for the garbage collector."""
    for _ in range(300):
        cycle = [2 * torch.zeros(1, requires_grad=True)]
        cycle.append(cycle)
        torch.set_rng_state(torch.get_rng_state())
    return gc.isenabled()


def test_ranks_that_save_torchs_generator_do_not_lock_each_other_out():
    """A collection inside torch's generator lock gives Python's away: two threads then wait for each other for ever."""
    before = gc.get_threshold()
    gc.set_threshold(5, 2, 2)  # without the rule, this hangs at once
    try:
        assert run_ranks(3, save_the_generator_amid_garbage) == [False] * 3
    finally:
        gc.set_threshold(*before)
    assert gc.isenabled()


# The environment.


@pytest.fixture
def bare(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_torchruns_environment_the_world_is_solo(bare):
    world = World.from_env(device="cpu")
    assert (world.rank, world.size, world.device.type) == (0, 1, "cpu")


def test_a_world_of_another_device_is_refused(bare):
    with pytest.raises(ConfigError, match=r'device=gpu: must be cpu or cuda. Write zero.open_world\(device="cuda"'):
        World.from_env(device="gpu")


def test_tasks_of_srun_without_ranks_are_refused(bare):
    bare.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ConfigError, match=r"^srun has started 4 tasks without RANK and WORLD_SIZE, and each would be"):
        open_world(device="cpu")
    bare.setenv("WORLD_SIZE", "1")
    open_world(device="cpu").close()
    World.solo().close()


def test_half_an_environment_is_refused(bare):
    bare.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"lacks RANK, MASTER_ADDR, MASTER_PORT\. Start the ranks with torchrun"):
        World.from_env(device="cpu")
    bare.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE must be a whole number, not 'two'"):
        World.from_env(device="cpu")


def test_a_rank_that_never_starts_is_named(bare):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in environment.items():
        bare.setenv(name, value)
    with pytest.raises(DeadlineError, match="rank 0 of 3 waited 1 s for ranks 1, 2 to start"):
        World.from_env(timeout_s=SHORT_S, device="cpu")


def one_of_two(bare, connect) -> tuple[dist.TCPStore, str]:
    """Rank 0 of a world of two whose rank 1 is a store; `connect` is what connecting does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        bare.setenv(name, value)
    bare.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    bare.setattr(dist, "init_process_group", connect)
    store.set("zero/0/1/here/1", "")
    return store, "zero/0/1/connected/1"


def test_nobody_enters_a_world_before_all_are_connected(bare):
    """Who enters may leave, and would tear the connections that others still make."""
    store, connected = one_of_two(bare, lambda *_, **__: None)
    with pytest.raises(DeadlineError, match="rank 0 of 2 waited 1 s for rank 1 to connect"):
        World.from_env(timeout_s=SHORT_S, device="cpu")
    store.delete_key("zero/opened/0/0")
    store.set(connected, "rank 1 of 2 could not connect to the others: no route")
    with pytest.raises(RankFailedError, match="rank 1 of 2 could not connect to the others: no route"):
        World.from_env(timeout_s=LONG_S, device="cpu")


def test_a_connection_that_is_torn_is_no_deadline(bare):
    def torn(*_, **__):
        raise RuntimeError("Connection closed by peer")

    _store, _ = one_of_two(bare, torn)
    with pytest.raises(RankFailedError, match="rank 0 of 2 could not connect to the others: Connection closed by peer"):
        World.from_env(timeout_s=LONG_S, device="cpu")


# Processes that cannot go on. A process group is there already, so each case opens a world beside it.


def raises(world: World) -> None:
    if world.rank == 1:
        raise ValueError("bad batch")
    world.barrier("the end")


def leaves(world: World) -> None:
    if world.rank != 1:
        world.barrier("the end")


def differs(world: World) -> None:
    world.barrier("start")
    full_P = torch.zeros(world.size, dtype=torch.int32 if world.rank == 1 else torch.float32)
    handle = world.gather(full_P[:1].clone(), full_P, what="h.0")
    with pytest.raises(WorldError):
        handle.wait()
    handle.wait()


def comes_late(world: World) -> None:
    if world.rank != 1:
        world.barrier("the end")


def differs_for_long(world: World) -> None:
    """Rank 1 starts another operation, and then is not in a wait but elsewhere."""
    world.barrier("start")
    begin_s = time.monotonic()
    handle = world.all_reduce(torch.zeros(2 + (world.rank == 1)), what="norm")
    if world.rank == 1:
        threading.Event().wait(PATIENCE_S + 2 * PERIOD_S)
    try:
        handle.wait()
    finally:
        assert time.monotonic() - begin_s < LONG_S / 3, "gloo's waits go on until the deadline"


CASES = {raises: SHORT_S, leaves: SHORT_S, differs: SHORT_S, differs_for_long: LONG_S, comes_late: SHORT_S}
"""And the deadline of each."""


def after_a_slow_rank(world: World) -> float:
    """A sum for which two ranks wait longer than ranks wait before they compare their operations."""
    world.barrier("start")
    if world.rank == 1:
        threading.Event().wait(PATIENCE_S + 2 * PERIOD_S)
    ones = torch.ones(2)
    world.all_reduce(ones).wait()
    return float(ones.sum())


def stories(outer: World) -> dict[str, str]:
    """Return the message of each case on this rank."""
    told = {}
    for case, timeout_s in CASES.items():
        world = World(Processes("cpu", timeout_s=timeout_s))
        try:
            if case is comes_late:
                case(world)
                outer.barrier("rank 1 waits here until the others have given up")
                world.close()
            else:
                with world:
                    case(world)
        except Exception as error:
            told[case.__name__] = f"{type(error).__name__}: {error}"
            if case is comes_late:
                outer.barrier("rank 1 waits here until the others have given up")
            with pytest.raises(WorldError):
                world.barrier("after a failure")
        world.close()
        outer.barrier("next case")
    return told


@pytest.fixture
def told(three_processes):
    return [rank["stories"] for rank in three_processes]


@pytest.mark.process
def test_processes_name_the_rank_that_raised(told):
    assert told[1]["raises"] == "ValueError: bad batch"
    for r in (0, 2):
        assert told[r]["raises"] == (
            f"RankFailedError: rank 1 failed first: ValueError: bad batch (rank {r} was in barrier of the end)"
        )


@pytest.mark.process
def test_processes_name_the_rank_that_left(told):
    assert "leaves" not in told[1]
    for r in (0, 2):
        assert told[r]["leaves"] == f"WorldError: rank 1 left the world while rank {r} was in barrier of the end"


UNCLOSED = """
import zero

world = zero.open_world(20.0, "cpu")
world.barrier("start")
if world.rank == 1:
    raise ValueError("bad batch")
try:
    world.barrier("the end")
except zero.errors.WorldError as error:
    print(type(error).__name__, error)
"""

HOST_IS_GONE = """
import zero

unclosed = zero.open_world(90.0, "cpu")
with zero.open_world(90.0, "cpu") as world:
    world.barrier("start")
    world.rank and input()
"""


def scripts(code: str) -> list[subprocess.Popen[str]]:
    """A process for each rank of two; rank 0 hosts the store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        subprocess.Popen([sys.executable, "-c", code], env={**shared, "RANK": str(rank)}, **pipes) for rank in range(2)
    ]


@pytest.mark.process
def test_a_script_that_ends_without_closing_its_world_says_why():
    answers = [rank.communicate(timeout=LONG_S) for rank in scripts(UNCLOSED)]
    message = "RankFailedError rank 1 failed first: ValueError: bad batch (rank 0 was in barrier of the end)\n"
    assert answers[0] == (message, "")
    assert "ValueError: bad batch" in answers[1][1], "its traceback is its own"


@pytest.mark.process
def test_a_script_that_ends_when_the_stores_host_is_gone_has_nothing_to_say():
    """torch would print a stack of its C++."""
    ranks = scripts(HOST_IS_GONE)
    assert ranks[0].communicate(timeout=LONG_S) == ("", "")
    assert ranks[1].communicate("go on\n", timeout=LONG_S) == ("", "")


@pytest.mark.process
def test_processes_name_what_they_did_differently(told):
    """Gloo alone would have mixed the dtypes up and gone on."""
    for r in range(3):
        assert told[r]["differs"] == (
            "WorldError: the ranks run different operations: gather of h.0, 3 elements of torch.float32 on ranks 0, 2; "
            "gather of h.0, 3 elements of torch.int32 on rank 1"
        )
        assert told[r]["differs_for_long"] == (
            "WorldError: the ranks run different operations: all_reduce of norm, 6 elements of torch.float32 on ranks "
            "0, 2; all_reduce of norm, 9 elements of torch.float32 on rank 1"
        )


def differ_on_a_device(world: World) -> str:
    """The host waits for a device on which nothing ends before the connections are cut."""
    transport = world._transport
    assert isinstance(transport, Processes)
    stalled.DEVICE_PATIENCE_S = 0.5
    processes, cut = transport._processes, threading.Event()
    processes._stalls._cut = cut.set

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        assert cut.wait(LONG_S)
        return tensor

    processes._compute.on_host = on_host  # type: ignore[method-assign]
    name = "h.1" if world.rank == 1 else "h.0"
    world.gather(torch.zeros(3), torch.zeros(3 * world.size), what=name)
    with pytest.raises(WorldError) as caught:
        world.on_host(torch.zeros(3), "norms")
    return str(caught.value)


@pytest.mark.process
def test_a_difference_ends_the_hosts_wait_for_a_device_on_every_rank():
    """As NCCL, which would wait for its watchdog, and then end the process without the operation's name."""
    assert (
        run_processes(3, differ_on_a_device)
        == [
            "the ranks run different operations: gather of h.0, 9 elements of torch.float32 on ranks 0, 2; "
            "gather of h.1, 9 elements of torch.float32 on rank 1"
        ]
        * 3
    )


@pytest.mark.process
def test_a_slow_process_is_asked_and_waited_for(three_processes):
    assert [rank["after a slow rank"] for rank in three_processes] == [6.0] * 3


@pytest.mark.process
def test_processes_name_the_rank_that_did_not_come(told):
    for r in (0, 2):
        assert re.match(rf"DeadlineError: rank {r} (waited|was) .*{SHORT_S:g} s", told[r]["comes_late"])
        assert "in barrier of the end" in told[r]["comes_late"]
        assert "No message from rank 1 (busy, stopped or dead)" in told[r]["comes_late"]


def is_killed(world: World) -> None:
    world.barrier("start")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankFailedError, match=r"rank 0 lost rank 1 in barrier of the end \(.* signal 9"):
        world.barrier("the end")


@pytest.mark.process
def test_a_killed_process_is_named_by_the_others_and_by_the_parent():
    with pytest.raises(RankFailedError, match=r"rank 1 ended without a result: killed by signal 9 \(SIGKILL\)"):
        run_processes(2, is_killed)


def is_wrong(world: World) -> None:
    raise ValueError("bad batch")


@pytest.mark.process
def test_processes_that_raised_leave_no_descriptor_to_the_collector():
    left = []
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match="bad batch"):
                run_processes(1, is_wrong)
            left.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert left[0] == left[1]


def stands_still(world: World) -> None:
    threading.Event().wait(600)


@pytest.mark.process
def test_a_process_that_hangs_is_stopped_and_shown_with_its_stack():
    with pytest.raises(DeadlineError, match=r"(?s)rank 0 of 1 still running after 1 s.*in stands_still"):
        run_processes(1, stands_still, timeout_s=SHORT_S)
