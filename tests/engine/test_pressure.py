"""Pages move down when memory runs short while a run trains, and come back; no bit of a result changes."""

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import pytest

import zero
from tests.common.small import KiB, Setting, Small, slice_of, small_batch, small_loss
from tests.conftest import LONG_S
from tests.simulation.simulated_gpu import simulated_gpu
from zero.core.placement import Room
from zero.engine.pressure import CALM_STEPS, Pressure, watches
from zero.engine.whole.read import digest
from zero.errors import SettingError
from zero.platform.gauges import HostGauge
from zero.platform.host_memory import memory_groups
from zero.testing import run_ranks

MiB = 1024 * KiB
STEPS = 60


class Gauge(HostGauge):
    """A host of `nbytes`, of which a rank's state takes what its plan says."""

    def __init__(self, state: zero.State) -> None:
        super().__init__()
        self._runtime, self.nbytes = state.runtime, 2**40

    def free_bytes(self, near_bytes: int) -> int:
        return max(0, self.nbytes - held_bytes(self._runtime.plan))


def held_bytes(plan: zero.Plan) -> int:
    """Return the bytes of host memory that a rank holds."""
    tiers = ("device", "host") if plan.facts.device_is_host else ("host",)
    return sum(sum(plan.bytes.get(tier, {}).values()) for tier in tiers)


def train(world: zero.World, setting: Setting, room: Room, lowers: bool) -> tuple[str, list[float], list[str]]:
    """Train; another program takes host memory from step 20 to step 30, on the last rank."""
    with world.exclusive(), zero.empty():
        model = Small(width=211)
    plan = zero.Plan(
        model, optimizer=setting.optimizer(1e-2, clip=0.5), world=world, stage=setting.stage, room=room,
        precision=setting.precision,
        offload=zero.Offload("auto", path=tempfile.gettempdir(), page_bytes=4096, threads=1, pressure=64 * KiB),
    )  # fmt: skip
    state = zero.init(plan, zero.open_store(plan))
    step, gauge, notes = zero.make_step(plan, small_loss), Gauge(state), list[str]()
    state.runtime.pressure = Pressure(plan, gauge, notes.append)
    tiers, losses = [], []
    for number in range(STEPS):
        if lowers and world.rank == world.size - 1:
            gauge.nbytes = (
                int(0.8 * held_bytes(state.plan)) if number == 20 else 2**40 if number == 30 else gauge.nbytes
            )
        state, metrics = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
        losses.append(metrics.loss)
        tiers.append(sum(tier == "nvme" for tier in state.plan.placement.optimizer.values()))
    result = digest(state), losses
    state.close()
    assert {*tiers[:20], *tiers[21 + CALM_STEPS :]} == {tiers[0]}
    assert all((number > tiers[0]) == lowers for number in tiers[20 : 20 + CALM_STEPS]), tiers
    assert len({*tiers[21 : 20 + CALM_STEPS]}) == 1, "nothing swings"
    return *result, notes


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("size", "gpu"), [(1, False), (3, False), (2, True)])
def test_pages_move_down_and_come_back(size, gpu):
    setting = Setting(precision="bf16")
    room = Room(1500 * KiB, 8 * MiB) if gpu else Room(0, 8 * MiB)
    with simulated_gpu() if gpu else nullcontext():
        calm = run_ranks(size, train, setting, room, False)
        moved = run_ranks(size, train, setting, room, True)
    assert [result[:2] for result in moved] == [result[:2] for result in calm]
    assert all(notes == [] for *_, notes in [*calm, *moved[1:]])
    down, *_, up = moved[0][2]
    assert down.startswith("step 21: host memory is short: ")
    assert down.endswith("moved down")
    assert re.match(rf"step 4[12]: memory was free for {CALM_STEPS} steps: .* moved up", up)


def test_without_a_lower_tier_one_line_says_so():
    def train(world: zero.World) -> list[str]:
        plan = Setting(offload=(("preset", "auto"),)).plan(world)
        state, step, notes = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, small_loss), list[str]()
        gauge = Gauge(state)
        gauge.nbytes = 0
        state.runtime.pressure = Pressure(plan, gauge, notes.append)
        for number in range(4):
            state, _ = step(state, [small_batch(number, 6)])
        return notes

    [notes] = run_ranks(1, train)
    [note] = notes
    assert note.startswith("step 1: memory is short, but the state stays where it is: host memory has 0 B free")


def test_only_auto_is_watched():
    assert watches(zero.Offload("auto"))
    assert watches(zero.Offload("cpu", optimizer="auto"))
    assert not watches(zero.Offload("auto", pressure="off"))
    assert not watches(zero.Offload("infinity", pressure="2GiB"))
    with pytest.raises(SettingError, match=r"offload\.pressure"):
        zero.Offload("auto", pressure="never")


# -- readings ----------------------------------------------------------------------------------------------------------


def machine(top: Path, available_kib: int, **group: str) -> Path:
    """Write the files of a machine with a memory cgroup of version 2."""
    (top / "proc/self").mkdir(parents=True, exist_ok=True)
    (top / "proc/self/cgroup").write_text("0::/job\n")
    (top / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:   {available_kib} kB\n")
    (top / "sys/fs/cgroup/job").mkdir(parents=True, exist_ok=True)
    for name, text in group.items():
        (top / "sys/fs/cgroup/job" / f"memory.{name}").write_text(text)
    return top


def test_the_free_memory_is_that_of_the_machine_or_of_the_group(tmp_path):
    group = {"max": "max", "current": "1000", "stat": "anon 5\ninactive_file 300\nactive_file 70\n"}
    gauge = HostGauge(machine(tmp_path, 8, **group))
    assert gauge.free_bytes(0) == 8192
    machine(tmp_path, 8, max="4096")  # a limit that is lowered while the process runs
    assert gauge.free_bytes(0) == 4096 - 1000
    assert gauge.free_bytes(1 << 20) == 4096 - 1000 + 300, "files that were not used lately are no pressure"
    machine(tmp_path, 8, high="3000")  # not there when the gauge was made
    assert HostGauge(tmp_path).free_bytes(0) == 3000 - 1000
    machine(tmp_path, 8, current="5000")
    assert gauge.free_bytes(0) == 0
    gauge.close()


LOWERED = """
import sys
from pathlib import Path
import torch
from torch import nn
import zero
from zero.engine.whole.read import digest

group, kind, lowers = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "lowers"
(group / "cgroup.procs").write_text("0")
used, limit = {"v1": ("memory.usage_in_bytes", "memory.limit_in_bytes"), "v2": ("memory.current", "memory.max")}[kind]
torch.manual_seed(0)
with zero.empty():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(24)))
offload = zero.Offload("auto", path=sys.argv[4], threads=1, page_bytes=1 << 20, pressure=24 << 20)
plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=zero.open_world(device="cpu"), offload=offload)
state = zero.init(plan, zero.open_store(plan))
step = zero.make_step(plan, lambda model, batch: model(batch).square().mean())
on_disk = []
for number in range(30):
    if lowers and number == 4:
        (group / limit).write_text(str(int((group / used).read_text()) + (16 << 20)))
    if lowers and number == 6:
        assert on_disk[-1] > 0, on_disk
        (group / limit).write_text("max" if kind == "v2" else "-1")
    state, metrics = step(state, [torch.ones(4, 512)])
    on_disk.append(sum(state.plan.bytes.get("nvme", {}).values()))
print(digest(state), metrics.loss, on_disk[0], on_disk[-1])
"""


@pytest.fixture
def group(tmp_path):
    """A memory cgroup of the system inside of this process's, and its version."""
    for folder, limit, _ in memory_groups():
        group = folder / f"zero-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).is_file():
            yield group, "v1" if limit == "memory.limit_in_bytes" else "v2"
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("no memory cgroup can be made here")


def test_a_limit_of_the_system_that_is_lowered_moves_pages(group, tmp_path):
    """Pages go to the disk before the limit is reached, and come back when it is raised; the bits are the same."""
    folder, version = group

    def run(how: str) -> list[str]:
        command = [sys.executable, "-c", LOWERED, str(folder), version, how, str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)
        assert ended.returncode == 0, ended.stderr
        print(ended.stderr)
        return ended.stdout.split()

    calm, moved = run("stays"), run("lowers")
    assert moved == calm
    assert calm[2:] == ["0", "0"], "nothing is on the disk at the end"


def test_a_reading_takes_little_of_a_step():
    gauge, times = HostGauge(), []
    for _ in range(200):
        begin_s = time.perf_counter()
        gauge.free_bytes(0)
        times.append(time.perf_counter() - begin_s)
    print(f"{1e6 * median(times):.1f} us")
    assert median(times) < 50e-6
