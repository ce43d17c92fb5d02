"""The calls of a GPU's torch and of the system, and when they are made; no GPU is needed."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero.distributed.world
from tests.common.small import Setting, slice_of, small_batch, train_small
from tests.conftest import LONG_S
from tests.simulation import simulated_gpu
from tests.simulation.instrumented_gpu import SimulatedGpu
from zero.core.placement import Room, budget_bytes
from zero.core.sizes import GiB
from zero.distributed import process_group
from zero.distributed.opening import open_transport
from zero.distributed.transport import Processes
from zero.engine.update.pieces import Pieces
from zero.errors import HandshakeError, MachineError
from zero.platform import cuda
from zero.platform.arena import Arena
from zero.platform.cuda import Cuda, compute_device
from zero.platform.device import Device
from zero.testing import run_ranks
from zero.trainer.config import read
from zero.trainer.planning import machine

ROOT = Path(__file__).resolve().parents[2]

# -- the end of a world ------------------------------------------------------------------------------------------------

BROKEN = """
import sys, torch.distributed as dist
import zero.distributed.process_group
from zero.distributed.failure import Notes
from zero.distributed.transport import Processes
from zero.distributed.world import World
from tests.simulation import simulated_gpu

def told(owner, name, word):
    function = getattr(owner, name)
    def telling(*args):
        print(word, getattr(args[-1], "kind", ""))
        return function(*args)
    setattr(owner, name, telling)

told(Notes, "post", "note")
told(zero.distributed.process_group, "abort", "abort")
told(dist, "destroy_process_group", "destroy")
if sys.argv[1] == "theirs":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with simulated_gpu():
    try:
        with World(Processes("cpu", timeout_s=20)):
            if sys.argv[2] == "broken":
                raise ValueError("bad batch")
        print("left")
    except ValueError as error:
        print(error)
print(dist.is_initialized())
"""


@pytest.mark.process
@pytest.mark.parametrize(("group", "how"), [("own", "broken"), ("theirs", "whole")])
def test_a_world_that_broke_says_why_first_and_then_waits_for_no_kernel(group, how):
    """To destroy a group waits for kernels whose other half never comes; one that is aborted is gone already."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    rank_env = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", BROKEN, group, how]
    done = subprocess.run(
        command, env=os.environ | rank_env, capture_output=True, text=True, check=True, timeout=LONG_S
    )
    told = [line.strip() for line in done.stdout.splitlines()]
    posts = ["note raised", "note left", "abort"] if how == "broken" else ["note left", "destroy"]
    assert told == [*posts, "bad batch" if how == "broken" else "left", str(group == "theirs")], done.stderr


# -- which device ------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_rank_1(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


def test_two_ranks_on_one_gpu_are_answered_with_the_words_to_type(as_rank_1, monkeypatch):
    """Each is shown the same GPU, so NCCL would refuse them with a page of its own."""
    store = dist.HashStore()
    for rank in range(2):
        store.set(f"here/{rank}", "a host")
    monkeypatch.setattr(Processes, "_are_nodes_alike", lambda self: True)  # nobody is there to be asked
    gpu = SimpleNamespace(uuid="GPU-7", pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(cuda, "_has_kernels", lambda device: False)
    monkeypatch.setattr(process_group, "open_key_value_store", lambda *_: store)
    connected = []
    monkeypatch.setattr(process_group, "connect_all", lambda store, rank, *_, **__: connected.append(rank))
    monkeypatch.setattr(process_group, "StallWatch", lambda *_, **__: None)
    open_transport(timeout_s=20)  # the first to come has it
    with pytest.raises(MachineError) as refusal:
        open_transport(timeout_s=20)
    assert str(refusal.value) == (
        "rank 1 of 2 sees one GPU, which another rank uses. Type launch.ranks=1, or launch.device=cpu."
    )
    assert connected == [1]


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
def test_nccl_is_opened_for_a_gpu_alone(device, backend, monkeypatch):
    asked = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: asked.append((backend, how["device_id"])))
    where = torch.device(device)
    process_group.ProcessGroup._connect(
        SimpleNamespace(_wait_s=20.0, _compute=compute_device(where), _owns_default=True, _store=None, rank=0, size=2)  # type: ignore[arg-type]
    )
    assert asked == [(backend, where if device == "cuda" else None)]


class Options(SimpleNamespace):
    """In place of `ProcessGroupNCCL.Options`, which torch has only with CUDA."""


def test_a_part_of_a_world_of_gpus_opens_nothing_for_hosts(monkeypatch):
    """Messages of hosts use the connections of the whole world."""
    calls = []
    monkeypatch.setattr(dist, "new_group", lambda *args, **_: calls.append(args))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("no operation runs", device.type)))
    group = SimpleNamespace(_wait_s=20.0, _compute=compute_device(torch.device("cuda")), _parts={})
    for name, priority in (("sum across nodes", False), ("gather across nodes", True)):
        process_group.ProcessGroup.open_part(group, [0, 2], name, priority=priority)  # type: ignore[arg-type]
    timeout = timedelta(seconds=20)
    assert calls[::2] == [("no operation runs", "cuda")] * 2
    assert calls[1::2] == [
        ([0, 2], timeout, "nccl", None),
        ([0, 2], timeout, "nccl", Options(is_high_priority_stream=True, _timeout=timeout)),
    ]


def test_gloo_gets_no_options_of_nccl(monkeypatch):
    calls = []
    monkeypatch.setattr(dist, "new_group", lambda *args, **_: calls.append(args))
    group = SimpleNamespace(_wait_s=20.0, _compute=SimulatedGpu(GiB), _parts={})
    process_group.ProcessGroup.open_part(group, [0, 1], "gather", priority=True)  # type: ignore[arg-type]
    assert calls == [([0, 1], timedelta(seconds=20), "gloo", None)]


def test_settings_are_shared_under_torchrun_without_a_gpu(as_rank_1, monkeypatch):
    """NCCL would be opened twice, and closed in between."""
    from zero.trainer import cli

    class Opened(Exception):
        pass

    def open_world(timeout_s: float = 0.0, device: str | None = None):
        raise Opened(device)

    monkeypatch.setattr("zero.distributed.world.open_world", open_world)
    with pytest.raises(Opened, match=r"^cpu$"):
        cli._as_one_rank([], lambda config, folder: None)


# -- memory of the host ------------------------------------------------------------------------------------------------


def mapping_of(address: int) -> dict[str, str]:
    """Return the system's description of the memory mapping that has an address."""
    told = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    for mapping in told[1:]:
        begin, end = (int(edge, 16) for edge in mapping.split(maxsplit=1)[0].split("-"))
        if begin <= address < end:
            return dict(re.findall(r"^(\w+):\s+(.*?)\s*$", mapping, re.M))
    raise AssertionError


def test_an_arena_is_in_large_pages_and_there_when_it_is_pinned():
    """To register memory faults it in, by one thread; other threads have done it by then."""
    nbytes, seen = 16 << 20, []

    class Pinning(SimulatedGpu):
        def pin(self, memory: torch.Tensor) -> bool:
            seen.append(mapping_of(memory.data_ptr()))
            return True

    Arena(nbytes, Pinning(GiB))
    assert int(seen[0]["Rss"].split()[0]) * 1024 >= nbytes
    assert "hg" in seen[0]["VmFlags"].split() or not Path("/sys/kernel/mm/transparent_hugepage").exists()
    touched = Arena(nbytes, Device(torch.device("cpu")), pin=False)
    assert int(mapping_of(touched.take(1).data_ptr())["Rss"].split()[0]) * 1024 < nbytes, "a CPU's is not touched"


def test_several_threads_touch_an_arena_whatever_the_number_of_torchs(monkeypatch):
    """Each waits in its first part for another one."""
    meeting, zero_ = threading.Barrier(2, timeout=LONG_S), torch.Tensor.zero_
    met: set[int] = set()

    def touch(part: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() not in met:
            met.add(threading.get_ident())
            meeting.wait()
        return zero_(part)

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(torch.Tensor, "zero_", touch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        Arena(16 << 20, SimulatedGpu(GiB))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_freed_memory_of_the_host_stays_with_a_process_on_a_gpu(monkeypatch):
    """Giving it back takes 25 ms, and host memory is not short there."""
    given_back: list[int] = []
    monkeypatch.setattr(zero.platform.device, "give_back_memory", lambda: given_back.append(1))
    Cuda(torch.device("cuda", 0)).give_back_memory()

    def in_a_step(world: zero.World, preset: str) -> int:
        state, step = Setting(offload=(("preset", preset),)).start(world)
        given_back.clear()
        step(state, slice_of(small_batch(0, 6), world, 1))
        return len(given_back)

    with simulated_gpu():
        assert run_ranks(1, in_a_step, "cpu") == run_ranks(1, in_a_step, "infinity") == [0]
    assert run_ranks(1, in_a_step, "infinity") == [2]


@pytest.mark.parametrize(("budget", "most"), [(None, 0.9), (0.5, 0.5), (1.0, 1.0)])
def test_what_is_placed_by_itself_leaves_some_of_the_hosts_memory(budget, most, monkeypatch, tmp_path):
    for module in (zero.engine.plan.placing, machine):
        monkeypatch.setattr(module, "free_host_bytes", lambda: 8 * GiB)
    with simulated_gpu(4 * GiB):
        world = zero.open_world(device="cpu")
        with zero.empty():
            model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(24)))
        offload = zero.Offload("auto", host_budget=budget, path=str(tmp_path))
        used = zero.Plan(model, optimizer=zero.adamw(1e-3), world=world, offload=offload, units=["Linear"]).placement
    assert used.bytes["host"] <= most * 8 * GiB
    assert used.bytes["host"] > most * 8 * GiB - 256 * 2**20, "up to a page group"
    assert used.bytes["nvme"] > 0
    room = machine.Machine.of(read({"offload": {"host_budget": f"{budget:.0%}" if budget else "auto"}}), world).room
    assert budget_bytes(budget, room.host) == int(most * 8 * GiB)


# -- the CPU's kernel --------------------------------------------------------------------------------------------------


def test_what_the_host_updates_beside_a_gpu_is_the_same_on_every_tier_off_it(monkeypatch):
    """As the README says it. The CPU's kernel is made to give other bits than what stands for the GPU's."""
    update = Pieces.update

    def with_other_bits(self, unit, hyper, where, pieces, *how):
        changed = (
            [piece._replace(grad_K=piece.grad_K * (1 + 2**-8)) for piece in pieces] if where.shares_memory else pieces
        )
        update(self, unit, hyper, where, changed, *how)

    monkeypatch.setattr(Pieces, "update", with_other_bits)
    plain = Setting(precision="bf16", accumulate=2, page_bytes=4096)
    asked = [(), (("preset", "cpu"),), (("preset", "nvme"),), (("preset", "infinity"),)]
    with simulated_gpu():
        none, *others = (
            run_ranks(1, train_small, plain.but(offload=(*offload, ("compute", "host"))))[0][0] for offload in asked
        )
        larger = plain.but(offload=(("preset", "nvme"), ("compute", "host")), page_bytes=16384, threads=1)
        others.append(run_ranks(1, train_small, larger)[0][0])
        assert none == run_ranks(1, train_small, plain)[0][0]
    assert len(set(others)) == 1
    assert none not in others


# -- tiers -------------------------------------------------------------------------------------------------------------


def test_ranks_that_placed_parameters_elsewhere_are_refused(tmp_path):
    """When a gather begins depends on the tier, so ranks that differ would start other collectives."""

    def placed(world: zero.World) -> str:
        room = Room(64 * 2**20 if world.rank else 7_400_000, GiB)  # rank 0 has room for its buffers alone
        with world.exclusive(), zero.empty():
            model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
        plan = zero.Plan(
            model, optimizer=zero.adamw(1e-3), world=world, room=room, units=["Linear"],
            offload=zero.Offload("cpu", param="auto", path=str(tmp_path), compute="host"),  # without slots on a GPU
        )  # fmt: skip
        assert plan.facts.params_on_host == (world.rank == 0)
        with contextlib.closing(zero.open_store(plan)) as store, pytest.raises(HandshakeError) as refusal:
            zero.init(plan, store)
        return str(refusal.value)

    with simulated_gpu():
        for told in run_ranks(2, placed):
            assert "tiers of offload=auto" in told
