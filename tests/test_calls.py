"""What a GPU's torch and system are asked for, and when: seen by the calls, since there need be no GPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import zero.world
from zero.errors import MachineError
from zero.world import ProcessWorld

ROOT = Path(__file__).resolve().parent.parent

# -- the end of a world ------------------------------------------------------------------------------------------------

BROKEN = """
import sys, torch.distributed as dist
import zero.world
from zero.failure import Notes
from zero.testing import simulated_gpu

def told(owner, name, word):
    function = getattr(owner, name)
    def telling(*args):
        print(word, getattr(args[-1], "kind", ""))
        return function(*args)
    setattr(owner, name, telling)

told(Notes, "post", "note")
told(zero.world, "_abort", "abort")
told(dist, "destroy_process_group", "destroy")
if sys.argv[1] == "theirs":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with simulated_gpu():
    try:
        with zero.world.ProcessWorld(timeout_s=20, device="cpu"):
            if sys.argv[2] == "broken":
                raise ValueError("bad batch")
        print("left")
    except ValueError as error:
        print(error)
print(dist.is_initialized())
"""


@pytest.mark.process
@pytest.mark.parametrize("group", ["own", "theirs"])
@pytest.mark.parametrize("how", ["broken", "whole"])
def test_a_world_that_broke_says_why_first_and_then_waits_for_no_kernel(group, how):
    """To destroy a group waits for kernels whose other half never comes; one that is aborted is gone already."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BROKEN, group, how]
    done = subprocess.run(command, env=os.environ | one, capture_output=True, text=True, check=True, timeout=60)
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7"))
    monkeypatch.setattr(zero.world, "_open_store", lambda *_: store)
    connected = []
    monkeypatch.setattr(ProcessWorld, "_open_group", lambda self: connected.append(self.rank))
    monkeypatch.setattr(zero.world, "StallWatch", lambda *_, **__: None)
    ProcessWorld(timeout_s=20)  # the first to come has it
    with pytest.raises(MachineError) as refusal:
        ProcessWorld(timeout_s=20)
    assert str(refusal.value) == (
        "rank 1 of 2 sees one GPU, which another rank has; type launch.ranks=1, or launch.device=cpu"
    )
    assert connected == [1]


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
def test_nccl_is_opened_for_a_gpu_alone(device, backend, monkeypatch):
    asked = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: asked.append((backend, how["device_id"])))
    where = torch.device(device)
    ProcessWorld._connect(
        SimpleNamespace(timeout_s=20.0, device=where, _owns_default=True, _store=None, rank=0, size=2)  # type: ignore[arg-type]
    )
    assert asked == [(backend, where if device == "cuda" else None)]


def test_settings_are_shared_under_torchrun_without_a_gpu(as_rank_1, monkeypatch):
    """NCCL would be opened twice, and closed in between."""
    import train

    class Opened(Exception):
        pass

    def from_env(timeout_s: float = 0.0, device: str | None = None):
        raise Opened(device)

    monkeypatch.setattr(zero.world.World, "from_env", from_env)
    with pytest.raises(Opened, match=r"^cpu$"):
        train._as_one_rank([])
