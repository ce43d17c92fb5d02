"""Pages whose size is not given: few for a large model, small for a small one, and never much of host memory."""

from typing import Any

import pytest
from torch import nn

import zero
from zero.core.placement import Room
from zero.engine.plan.placing import thread_count

MiB, GiB = 1024**2, 1024**3


def planned(parameters: int, **offload: Any) -> zero.Plan:
    """Of a model of so many parameters, on meta, with 4 TiB of everything."""
    with zero.empty():
        model = nn.Sequential(*(nn.Linear(16384, parameters // 16384 // 8, bias=False) for _ in range(8)))
    room = Room(device=2**42, host=offload.pop("host", 2**42), disk=2**42)
    optimizer, world = zero.adamw(1e-3), zero.open_world()
    return zero.Plan(
        model, optimizer=optimizer, world=world, stage=3, offload=zero.Offload("infinity", **offload), units=["Linear"],
        precision="bf16", room=room,
    )  # fmt: skip


@pytest.mark.parametrize(("parameters", "page"), [(2**20, 4), (2**30, 4), (2**31, 8), (2**32, 16), (2**34, 64)])
def test_pages_grow_with_the_model_so_that_they_stay_few(parameters, page):
    """A thousand up to 64 GiB of master, and none larger than 64 MiB; a small model's are as small as ever."""
    plan = planned(parameters)
    assert plan.offload.page_bytes == page * MiB
    assert len(plan.placement.optimizer) <= max(1024, 4 * parameters // (64 * MiB))
    assert plan.arena_bytes <= 2**42 / 8


def test_pages_stay_small_where_their_slots_would_take_more_than_an_eighth_of_host_memory():
    plan = planned(2**34, host=14 * GiB)
    assert 4 * MiB <= plan.offload.page_bytes < 64 * MiB
    assert plan.arena_bytes <= 2 * GiB
    assert planned(2**34, host=14 * GiB, page_bytes=32 * MiB).offload.page_bytes == 32 * MiB


def test_each_folder_has_threads_and_slots_of_its_own_unless_memory_is_short():
    drives = {"path": ["/a", "/b", "/c", "/d"], "page_bytes": 8 * MiB}
    assert [planned(2**31, **offload).slots.arena for offload in ({}, drives, {**drives, "threads": 6})] == [6, 18, 8]
    assert planned(2**31, **drives, ahead=GiB).slots.arena > 21
    assert planned(2**31, **drives, host=7 * GiB // 4).slots.arena == 4
    assert thread_count(zero.Offload("cpu", path=drives["path"])) == 4, "no folder is used"
