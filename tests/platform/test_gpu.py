"""The work that a GPU would get, seen without one: on a simulated GPU, or by the call that is made.

A test with a real GPU is marked `gpu`. `benchmarks/launches.py` prints the table that the budgets here keep.
"""

import gc
import re
import warnings
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zero
from tests.simulation import simulated_gpu
from tests.simulation.instrumented_gpu import SimulatedGpu
from tests.simulation.simulated_gpu import count_launches
from zero.checkpoint import load, open_checkpoint, save
from zero.core.sizes import GiB
from zero.engine.plan.traffic import traffic
from zero.engine.whole.read import digest
from zero.errors import MachineError
from zero.platform.arena import Arena
from zero.platform.cuda import Cuda, claim_device
from zero.platform.device import Device
from zero.testing import run_ranks

PRESETS = ("none", "cpu", "nvme", "infinity")
ROWS = 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stack(width: int, count: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(Block(width) for _ in range(count)))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def start(world: zero.World, width: int = 64, stage: int = 3, preset: str = "none", **settings):
    precision, moments = settings.pop("precision", "bf16"), settings.pop("moments", "fp32")
    offload = zero.Offload(
        preset,
        path=str(settings.pop("path", ".")),
        page_bytes=settings.pop("page_bytes", None),
        compute=settings.pop("compute", "device"),
    )
    with world.exclusive():
        model = stack(width, settings.pop("layers", 3))
    optimizer = zero.with_moments(zero.adamw(1e-2, clip=0.5), moments)
    plan = zero.Plan(
        model, optimizer=optimizer, world=world, stage=zero.Stage(stage), precision=precision,
        offload=offload, units=["Block"], **settings,
    )  # fmt: skip
    return zero.init(plan, zero.open_store(plan)), zero.make_step(plan, loss)


def rows(step: int, world: zero.World, width: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * step + world.rank)
    return torch.randn(ROWS, width, generator=draw).to(dtype)


def trained(world: zero.World, steps: int = 3, width: int = 64, **settings) -> str:
    state, step = start(world, width, **settings)
    count, compute = state.plan.accumulate, state.plan.precision.compute
    for number in range(steps):
        state, _ = step(state, [rows(count * number + micro, world, width, compute) for micro in range(count)])
    told = digest(state)
    assert not state.runtime.gradients.overflowed, "more buffers than the plan counts"
    state.runtime.store.close()
    return told


# -- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "precision"), [(1, "fp32"), (2, "bf16")])
def test_no_stage_tier_or_page_changes_a_bit_on_a_simulated_gpu(ranks, precision, tmp_path):
    asked = [{"stage": stage} for stage in range(4)]
    asked += [{"stage": 3, "preset": preset, "page_bytes": page} for preset in PRESETS[1:] for page in (4096, None)]
    asked += [{"stage": 1, "preset": "cpu", "page_bytes": 4096}, {"stage": 3, "update": "serial"}]
    with simulated_gpu():
        told = {
            str(options): run_ranks(
                ranks, lambda world, options=options: trained(world, precision=precision, **options, path=tmp_path)
            )
            for options in ({**each} for each in asked)
        }
    assert len({bits for ranks_bits in told.values() for bits in ranks_bits}) == 1, told


@pytest.mark.parametrize(("ranks", "stage", "accumulate"), [(2, 0, 3), (1, 1, 3), (1, 3, 2), (2, 3, 3)])
def test_gradients_that_add_up_off_the_gpu_have_the_same_bits(ranks, stage, accumulate, tmp_path):
    """Transfers are narrow until there is a sum, and a rank moves only the part of the last sum that it updates."""
    how = {"stage": stage, "accumulate": accumulate, "path": tmp_path, "layers": 6}  # more than there are buffers
    asked = [{}, {"preset": "cpu"}, {"preset": "cpu", "page_bytes": 4096}, {"preset": "nvme", "update": "serial"}]
    with simulated_gpu():
        told = [run_ranks(ranks, lambda world, options=options: trained(world, **how, **options)) for options in asked]
    assert len({bits for ranks_bits in told for bits in ranks_bits}) == 1, told


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 3), (2, 1), (2, 2)])
def test_what_crosses_between_host_and_gpu_is_what_the_plan_says(ranks, accumulate, tmp_path):
    def crossed(world: zero.World, **settings) -> tuple[int, float]:
        """In the third step, and by the plan."""
        state, step = start(world, accumulate=accumulate, path=tmp_path, **settings)
        plan = state.plan
        for number in range(3):
            before = world.compute.copied.nbytes
            state, _ = step(state, [rows(number, world, 64, plan.precision.compute) for _ in range(accumulate)])
            state.runtime.store.drain()
        state.runtime.store.close()
        return world.compute.copied.nbytes - before, traffic(plan).of_step(accumulate).by_medium["copy"]

    with simulated_gpu():
        for number, (stage, preset) in enumerate(product(range(4), PRESETS)):
            if preset == "infinity" and stage < 3:
                continue
            how = {"stage": stage, "preset": preset, "precision": ("bf16", "fp32")[(number + stage + ranks) % 2]}
            how["compute"] = ("device", 0.4, "host")[(number + ranks) % 3]
            for moved, planned in run_ranks(ranks, lambda world, how=how: crossed(world, **how)):
                assert moved == planned, how
                assert (moved > 0) is (preset != "none")


# -- budgets -----------------------------------------------------------------------------------------------------------


def launches(width: int, preset: str = "none", **settings) -> tuple[int, int]:
    """Of the third step, and how many page groups move in it."""
    with simulated_gpu():
        world = zero.open_world(device="cpu")
        state, step = start(world, width, preset=preset, **settings)

        def run_step() -> None:
            nonlocal state
            state, _ = step(state, [rows(0, world, width, state.plan.precision.compute)])
            state.runtime.store.drain()

        run_step()
        run_step()
        counts = count_launches(run_step)
        parts = [part for unit in state.runtime.units for part in unit.parts if not part.on_device]
        groups = sum(len(part.groups) for part in parts)
        state.runtime.store.close()
    return sum(counts.values()), groups


def plain_launches(width: int) -> int:
    model = stack(width).bfloat16()
    x = torch.ones(ROWS, width, dtype=torch.bfloat16)
    loss(model, x).backward()
    model.zero_grad()
    return sum(count_launches(lambda: loss(model, x).backward()).values())


@pytest.mark.parametrize("convert", [torch.Tensor.float, lambda x: x.t().contiguous(), lambda x: x.t().reshape(-1)])
def test_a_copy_that_another_operator_makes_is_a_launch(convert):
    """`to`, `contiguous` and `reshape` are views or copies, and only the copies are launches."""
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert sum(count_launches(lambda: convert(x)).values()) == 1
    assert not count_launches(lambda: x.bfloat16().contiguous().reshape(-1))


LAUNCHES = {
    ("none", "fp32"): (56, 56), ("none", "bf16"): (146, 146), ("none", "8bit"): (254, 254),
    ("cpu", "fp32"): (89, 99), ("cpu", "bf16"): (149, 159), ("cpu", "8bit"): (965, 999),
    ("nvme", "fp32"): (275, 309), ("nvme", "bf16"): (455, 489), ("nvme", "8bit"): (965, 999),
    ("infinity", "fp32"): (325, 325), ("infinity", "bf16"): (505, 505), ("infinity", "8bit"): (1015, 1015),
}  # fmt: skip
"""By preset and moments: launches of a step with a split master, below stage 3 and at it, beside forward and backward.
The model has three units in five page groups each. A change may only lower a number."""


@pytest.mark.parametrize(("preset", "moments"), LAUNCHES)
def test_a_step_launches_no_more_than_it_did(preset, moments, tmp_path):
    plain = plain_launches(128)
    for stage in (3,) if preset == "infinity" else (0, 3):
        settings = {"stage": stage, "moments": moments, "page_bytes": 64 * 1024, "path": tmp_path}
        count, groups = launches(128, preset, **settings)
        assert groups == (0 if preset == "none" else 15)
        assert count - plain <= LAUNCHES[preset, moments][stage == 3], settings


@pytest.mark.parametrize(("stage", "most"), [(0, 68), (1, 68), (2, 68), (3, 73)])
def test_a_step_of_two_ranks_launches_no_more_than_it_did(stage, most):
    def of_steps(count: int) -> int:
        return count_launches(lambda: run_ranks(2, lambda world: trained(world, count, 128, stage=stage))).total()

    with simulated_gpu():
        assert of_steps(4) - of_steps(3) <= 2 * (plain_launches(128) + most)


def test_launches_count_units_and_not_bytes():
    """Of every stage, whatever the width: twelve for a unit beside forward and backward, and some for the step."""
    plain = plain_launches(64)
    for stage in range(4):
        counts = [launches(width, stage=stage)[0] for width in (64, 512)]
        assert max(counts) <= 1.05 * min(counts)
        assert max(counts) - plain <= 12 * 3 + 20


@pytest.mark.parametrize(
    ("preset", "master", "moments", "most"),
    [
        ("cpu", "whole", "fp32", 16),
        ("nvme", "split", "fp32", 19),
        ("infinity", "split", "bf16", 29),
        ("cpu", "split", "8bit", 61),
        ("infinity", "whole", "fp32", 16),
    ],
)
def test_a_page_group_that_moves_costs_few_launches(preset, master, moments, most, tmp_path):
    """Twelve to move and update it, and in bf16 four to round its master, or seven to put it together and part it; to
    open a moment and to write it back, six in bf16 and twenty in 8 bits."""
    precision = zero.Precision("bf16", master=master)
    few, _ = launches(256, precision=precision, moments=moments)
    given = {"path": tmp_path, "page_bytes": 64 * 1024, "precision": precision, "moments": moments}
    count, groups = launches(256, preset, **given)
    assert groups > 20
    assert count - few <= most * groups


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reserve", "left"), [(None, GiB + 4 * GiB // 50), (GiB // 2, GiB // 2)])
def test_what_is_placed_by_itself_leaves_room_for_the_gpus_libraries(reserve, left):
    """auto fills the GPU up to that, and the rest goes to the host."""
    with simulated_gpu(4 * GiB):
        world = zero.open_world(device="cpu")
        with zero.empty():
            model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(8)))
        offload = zero.Offload("auto", reserve_bytes=reserve)
        plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=world, stage=3, offload=offload, units=["Linear"])
    used = plan.placement.bytes
    assert used["device"] <= 4 * GiB - left
    assert used["device"] > 4 * GiB - left - 64 * 2**20 * 3, "up to a page group"
    assert used["host"] > 0


# -- what is asked of the device ---------------------------------------------------------------------------------------


class Recorded(SimulatedGpu):
    """Notes which calls were made."""

    def __init__(self) -> None:
        super().__init__(8 * GiB)
        self.joins = self.prepared = 0

    def join(self) -> None:
        self.joins += 1

    def prepare_thread(self) -> None:
        self.prepared += 1
        super().prepare_thread()


@pytest.fixture
def device(monkeypatch) -> Recorded:
    made = Recorded()
    monkeypatch.setattr(Device, "stand_in", lambda: made)
    return made


def test_side_streams_are_waited_for_before_a_save_a_read_and_a_reset(device, tmp_path):
    state, step = start(zero.open_world(device="cpu"))
    x = torch.ones(ROWS, 64, dtype=torch.bfloat16)
    state, _ = step(state, [x])
    before = device.joins
    zero.full_state_dict(state)
    assert device.joins > before
    before = device.joins
    folder = save(state, tmp_path)
    assert device.joins > before
    before = device.joins
    load(state, open_checkpoint(state.plan.world, folder))
    assert device.joins > before
    state, step = start(zero.open_world(device="cpu"))
    under_way = zero.Step(state)
    before = device.joins
    under_way.abandon()
    assert device.joins == before + 1


def test_each_thread_of_the_store_is_prepared_for_the_device(device, tmp_path):
    state, step = start(zero.open_world(device="cpu"), preset="nvme", path=tmp_path)
    state, _ = step(state, [torch.ones(ROWS, 64, dtype=torch.bfloat16)])
    state.runtime.store.drain()
    assert device.prepared == len(state.runtime.store._workers._threads) > 0
    state.runtime.store.close()


def test_a_thread_says_which_gpu_it_is_for_before_it_does_anything(monkeypatch):
    """Else it would open a context on the first one."""
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr("zero.platform.cuda.work_alone", lambda: asked.append("work alone"))
    Cuda(torch.device("cuda", 3)).prepare_thread()
    assert asked == [torch.device("cuda", 3), "work alone"]


def test_memory_that_cannot_be_pinned_is_a_warning_and_leaves_no_error_behind(monkeypatch):
    """CUDA's last error stays until the next launch raises it: that launch is made at once, and asked to."""
    launched: list[str] = []

    def zeros(*args, device=None, **more):
        launched.append(str(device))
        raise RuntimeError("CUDA error: out of memory")

    runtime = SimpleNamespace(cudaHostRegister=lambda *args: 2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    gpu, memory = Cuda(torch.device("cuda", 0)), torch.empty(4096, dtype=torch.uint8)
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.warns(UserWarning, match=r"could not be pinned \(CUDA error 2\)"):
        assert not gpu.pin(memory)
    assert launched == ["cuda:0"]


def test_a_copy_is_behind_only_where_both_ends_keep_the_order_of_the_stream():
    """Pageable memory may be read after the call has returned."""
    asked: list[bool] = []

    class End:
        def __init__(self, *, on_gpu: bool = False, pinned: bool = False) -> None:
            self.is_cuda, self.pinned, self.nbytes = on_gpu, pinned, 1
            self.device = torch.device("cuda" if on_gpu else "cpu")

        def is_pinned(self) -> bool:
            return self.pinned

        def copy_(self, source: "End", *, non_blocking: bool) -> None:
            asked.append(non_blocking)

    gpu = Cuda(torch.device("cuda", 0))
    for other in (End(pinned=True), End(on_gpu=True), End()):
        gpu.copy(End(on_gpu=True), other)
        gpu.copy(other, End(on_gpu=True))
    assert asked == [True, True, True, True, False, False]
    assert gpu.copied.nbytes == 4, "between host memory and the GPU, and not within it"


def test_an_arena_that_a_gpu_reads_is_not_for_children_that_are_forked():
    arena = Arena(8 << 20, SimulatedGpu(GiB))
    address = arena.take(4096).data_ptr()
    vm_flags = next(
        flags
        for begin, end, flags in re.findall(
            r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: ([a-z ]+)$", Path("/proc/self/smaps").read_text(), re.M | re.S
        )
        if int(begin, 16) <= address < int(end, 16)
    )
    assert "dc" in vm_flags.split(), "dontcopy"


@pytest.mark.parametrize(
    ("count", "local_rank", "expected"),
    [(4, 2, "cuda:2"), (1, 0, "cuda:0"), (1, 3, "cuda:0"), (2, 2, "LOCAL_RANK is 2 and this machine has 2 GPUs. Type "),
     (0, 0, "torch finds no GPU. Use launch.device=cpu")],
)  # fmt: skip
def test_a_rank_takes_its_gpu_or_the_only_one_that_it_is_shown(count, local_rank, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    address = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: address)
    if expected.startswith("cuda"):
        assert str(claim_device("cuda", local_rank)) == expected
    else:
        with pytest.raises(MachineError, match=expected):
            claim_device("cuda", local_rank)


def test_nothing_is_left_of_a_simulated_gpu_after_its_block():
    with simulated_gpu():
        assert not zero.open_world(device="cpu").compute.shares_memory
    with warnings.catch_warnings():
        gc.collect()
    assert zero.open_world(device="cpu").compute.shares_memory
