"""A state moves while it trains: whatever its stage, tiers, pages and policies become, no bit of a result changes."""

import errno
import random
import signal
import tempfile
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import zero
from tests.common.small import (
    KiB,
    Setting,
    Small,
    adamw_in_8bit,
    deterministic,
    slice_of,
    small_batch,
    small_loss,
    train_small,
    wide,
)
from tests.faults.disks import FaultyFiles, ThrottledStore, fail
from tests.simulation.simulated_gpu import simulated_gpu
from zero.checkpoint.save import Saving
from zero.distributed.world import World
from zero.engine import open_store
from zero.engine.unit_move import UnitMove
from zero.engine.whole.measured import measured
from zero.engine.whole.read import digest
from zero.errors import ConfigError, HandshakeError, MachineError, PlanError, StaleStateError, ZeroError
from zero.store import MemoryStore, NvmeStore
from zero.testing import run_ranks

STEPS = 5


def random_move(draw: random.Random, stage: int, stages: list[int]) -> dict[str, Any]:
    """Draw arguments of a move. Parameters leave the device only at stage 3."""
    move: dict[str, Any] = {}
    if draw.random() < 0.5:
        move["stage"] = stage = draw.choice(stages)
    kinds = {kind: draw.choice(["none", "cpu", "nvme"]) for kind in ("optimizer", "param", "grad")}
    if stage < 3:
        kinds["param"] = "none"
    move["offload"] = zero.Offload(
        **kinds, path=tempfile.gettempdir(), page_bytes=draw.choice([None, 8 * KiB, 16 * KiB]), threads=2
    )
    if draw.random() < 0.3:
        move["keep"] = draw.choice([["*"], ["blocks.1"], []])
    if draw.random() < 0.3:
        move["activations"] = draw.choice(["keep", "remat", "selective", "offload"])
    if draw.random() < 0.3:
        move["prefetch"] = draw.randrange(3)
    return move


def check_bytes(state: zero.State) -> None:
    """Compare the bytes that a state holds with its plan, which rounds pages of a host's memory up to 4 KiB."""
    held, planned, rounding = measured(state), state.plan.bytes, 4 * KiB * len(state.plan.pages.store_pages())
    for tier in ("device", "host", "nvme"):
        spare = sum(planned.get(tier, {}).values()) - sum(held.get(tier, {}).values())
        assert 0 <= spare <= (tier == "host") * rounding, (tier, held, planned)


def train_and_move(world: zero.World, setting: Setting, seed: int, build=wide) -> tuple[str, list[zero.Metrics]]:
    draw, (state, step) = random.Random(seed), setting.start(world, build)
    stage, every = setting.stage, []
    alike = setting.accumulate > 1 and world.size > 1  # stages that add microbatches and ranks in the same order
    stages = [other for other in range(4) if not alike or (other < 2) == (stage < 2)]
    for number in range(STEPS):
        for _ in range(draw.randrange(3)):
            move = random_move(draw, stage, stages)
            stage = move.get("stage", stage)
            state = zero.move(state, **move)
            check_bytes(state)
        batch = small_batch(number, 6 * world.size * setting.accumulate)
        state, metrics = step(state, slice_of(batch, world, setting.accumulate))
        every.append(metrics)
    result = digest(state)
    state.close()
    return result, every


def averaged(lr: Any, **how: Any) -> zero.core.optim.Transform:
    return zero.with_ema(zero.adamw(lr, **how), decay=0.9)


CASES = [
    (1, Setting(clip=0.5)),
    (2, Setting(stage=2, clip=0.5, precision="bf16")),
    (3, Setting(stage=1, precision="fp16", accumulate=2)),
    (2, Setting(stage=0, optimizer=zero.muon)),
    (3, Setting(optimizer=adamw_in_8bit, precision="bf16", accumulate=2)),
    (2, Setting(frozen="nf4", precision="bf16")),
    (1, Setting(precision="bf16", master="whole", update="serial")),
    (2, Setting(optimizer=averaged, precision="bf16")),
]


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize(("case", "seed"), [(case, seed) for case in range(len(CASES)) for seed in range(30)])
def test_no_sequence_of_moves_changes_a_bit(case, seed):
    size, setting = CASES[case]
    expected = run_ranks(size, train_small, setting, STEPS, wide)
    assert run_ranks(size, train_and_move, setting, 100 * case + seed) == expected


@pytest.mark.parametrize(
    "setting", [Setting(between=("node", "node")), Setting(shard="node", between=("auto", "auto"))]
)
def test_moves_on_two_nodes_change_no_bit(setting):
    expected = run_ranks(4, train_small, setting, STEPS, wide, nodes=2)
    assert run_ranks(4, train_and_move, setting, 7, nodes=2) == expected


def train_twice_and_move(world: zero.World, moves: bool) -> tuple[str, list[float]]:
    """Make each step twice and compare the two, on other tiers in each step."""
    state, _ = Setting(precision="bf16").start(world, wide)
    step, losses = zero.make_step(state.plan, small_loss, replay=1), []
    for number, move in enumerate(({"offload": "nvme"}, {"stage": 1}, {"stage": 3, "offload": "infinity"})):
        state = zero.move(state, **move) if moves else state
        state, metrics = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
        losses.append(metrics.loss)
    return digest(state), losses


def test_a_replay_finds_nothing_in_a_moved_state():
    with deterministic():
        assert run_ranks(2, train_twice_and_move, True) == run_ranks(2, train_twice_and_move, False)


# -- what goes on ------------------------------------------------------------------------------------------------------


def test_a_moved_state_is_the_next_one_and_functions_of_its_first_plan_go_on():
    world = World.solo()
    plan = Setting(precision="bf16").plan(world)
    first = zero.init(plan, zero.open_store(plan))
    forward, step = zero.make_forward(plan, small_loss), zero.make_step(plan, small_loss)
    state = zero.move(first, offload="nvme")
    with pytest.raises(StaleStateError, match=r"consumed by zero\.move"):
        first.step  # noqa: B018
    assert state.plan is not plan
    assert state.plan.offload.kinds == ("nvme", "cpu", "cpu")
    assert plan.offload.kinds == ("none", "none", "none")
    rows = small_batch(0, 6)
    assert forward(state, rows)[0].isfinite()
    state, _ = step(state, [rows])
    assert state.step == 1
    other = Setting().plan(world)
    with pytest.raises(ConfigError, match="another Plan"):
        zero.make_step(other, small_loss)(state, [rows])
    state.close()


def test_an_engine_goes_on_after_a_move(tmp_path):
    """Its hooks, optimizer, scheduler, checkpoints and reports of stages are those of the moved state."""

    def losses(move: bool) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 0}}
        engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config)
        seen = []
        for number in range(8):
            rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
            loss = engine(rows).square().mean()
            engine.backward(loss)
            engine.step()
            seen.append(loss.item())
            if move and number % 2:
                engine.move(
                    stage=(number // 2 + 1) % 4, offload=["cpu", "nvme"][number // 2 % 2], offload_path=str(tmp_path)
                )
                assert engine.zero_optimization_stage() == (number // 2 + 1) % 4
        engine.save_checkpoint(str(tmp_path / str(move)))
        engine.destroy()
        return seen

    assert losses(True) == losses(False)


def test_a_parked_state_crosses_the_link_without_gaps():
    """By the simulated clock, in both directions."""

    def shares(world: zero.World) -> list[float]:
        model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
        plan = zero.Plan(model, optimizer=zero.adamw(1e-3), world=world, precision="bf16")
        state, device = zero.init(plan, zero.open_store(plan)), world.compute
        nbytes = sum(plan.bytes["device"][kind] for kind in ("parameters", "master", "moments"))
        clock, results = device.clock(), []
        for where in ("parked", "resident"):
            begin_s = clock.seconds(clock.host())
            zero.move(state, offload=where)
            device.join()
            results.append(nbytes / (clock.seconds(clock.host()) - begin_s) / device.streams.rates.link_bytes_per_s)
        return results

    with simulated_gpu(races=True):
        [result] = run_ranks(1, shares)
    print(result)
    assert min(result) > 0.9


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_move_compiles_nothing_again():
    world, compiled = World.solo(), []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=world, compile=backend)
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, lambda model, rows: model(rows).square().mean())
    state, _ = step(state, [torch.ones(2, 8)])
    count = len(compiled)
    for move in ({"offload": "nvme"}, {"stage": 1}, {"stage": 3, "offload": "infinity"}, {"prefetch": 0}):
        state, _ = step(zero.move(state, **move), [torch.ones(2, 8)])
    assert 0 < count == len(compiled)


def peaks_of_a_move(world: zero.World, old: dict[str, Any], new: dict[str, Any]) -> tuple[int, int]:
    """Return (the peak of device bytes during a move, the larger of both plans and two of its units)."""
    state, _ = Setting(precision="bf16", **old).start(world, lambda: Small(width=200))
    memory, before = world.compute.memory, sum(state.plan.bytes["device"].values())
    memory.peak_bytes = memory.nbytes
    state = zero.move(state, **new)
    after, numel = sum(state.plan.bytes["device"].values()), max(unit.full_numel for unit in state.plan.units)
    return memory.peak_bytes, max(before, after) + 2 * numel * (2 + 2 + 8 + 4)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({}, {"offload": "cpu"}),
        ({"offload": (("preset", "infinity"),)}, {"offload": "none"}),
        ({"stage": 1}, {"stage": 3}),
    ],
)
def test_a_move_takes_no_more_than_the_larger_plan_and_two_units(old, new):
    with simulated_gpu(races=True):
        for peak, limit in run_ranks(2, peaks_of_a_move, old, new):
            assert peak <= limit, (peak, limit)


def test_a_save_behind_a_move_has_the_state_of_its_step(tmp_path):
    """The move waits for the copies, which read pages that it replaces."""

    def save_and_move(world: zero.World) -> tuple[str, str]:
        plan = Setting(precision="bf16", offload=(("preset", "nvme"),)).plan(world, wide)
        slow = ThrottledStore(MemoryStore(torch.device("cpu")), 1e6)  # the copies take a while
        state, step = zero.init(plan, zero.open_store(plan, disk=slow)), zero.make_step(plan, small_loss)
        state, _ = step(state, slice_of(small_batch(0, 6 * world.size), world, 1))
        expected = digest(state)
        saving = Saving(state, tmp_path / "saves", behind=True)
        state = zero.move(state, offload="cpu")
        folder = saving.finish()
        return expected, digest(zero.load(state, zero.open_checkpoint(world, folder)))

    [(expected, saved), _] = run_ranks(2, save_and_move)  # buffers are those of rank 0
    assert saved == expected


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_a_state_is_parked_after_a_step_that_the_device_has_skipped():
    def train(world: zero.World, parks: bool) -> tuple[str, int]:
        state, step = Setting(precision="bf16").start(world)
        overflow = zero.make_step(state.plan, lambda model, batch: small_loss(model, batch)[0] * float("inf"))
        for number, function in enumerate((step, overflow, step)):
            state, _ = function(state, [small_batch(number, 6)])
            if parks:
                zero.move(state, offload="parked")
                assert state.step + state.skipped == number + 1
        return digest(state), state.skipped

    with simulated_gpu(fused=True):
        assert run_ranks(1, train, True) == run_ranks(1, train, False)


def test_further_pages_are_pinned_as_the_new_plan_says():
    def pinned(world: zero.World) -> list[int]:
        state, counts = Setting().start(world)[0], []
        for pin in (False, True):
            state = zero.move(zero.move(state, offload="none"), offload=zero.Offload("cpu", pin=pin))
            counts.append(len(world.compute._pinned))
        return counts

    with simulated_gpu():
        [counts] = run_ranks(1, pinned)
    assert counts[0] == 0 < counts[1]


def test_a_timeline_has_a_move_from_a_disk():
    state, _ = Setting(offload=(("preset", "nvme"),)).start(World.solo())
    with zero.record(state) as timeline:
        state = zero.move(state, offload="none")
    assert any(span.row == "page in" for span in timeline.spans)
    moves = [span for span in timeline.spans if span.row == "move"]
    assert {span.unit for span in moves} == {unit.name for unit in state.plan.units}
    assert timeline.hidden()["move"].hidden_s == pytest.approx(0.0, abs=1e-6), "a step waits for a move"


def move_without_memory_at_the_end(world: zero.World) -> None:
    """Rank 1 has no memory for slots when all units have moved, so all ranks move them back."""
    state, step = Setting(offload=(("preset", "nvme"),)).start(world)
    state, _ = step(state, slice_of(small_batch(0, 12), world, 1))
    expected = digest(state)
    with pytest.raises(MachineError, match="no memory for slots") as raised:
        zero.move(state, offload="cpu")
    assert not [note for note in getattr(raised.value, "__notes__", []) if "lost" in note]
    assert state.plan.offload.optimizer == "nvme"
    assert digest(state) == expected
    step(state, slice_of(small_batch(1, 12), world, 1))


def test_a_rank_that_has_no_memory_at_the_end_sends_all_ranks_back(monkeypatch):
    def give_slots(plan: zero.Plan, store: Any) -> None:
        if plan.offload.optimizer == "cpu" and plan.world.rank == 1:
            raise MachineError("no memory for slots")
        original(plan, store)

    original = open_store.give_slots
    monkeypatch.setattr("zero.engine.move.give_slots", give_slots)
    run_ranks(2, move_without_memory_at_the_end)


def test_pages_of_another_size_are_spread_over_several_disks(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    paths = [str(folder) for folder in folders]
    state, step = Setting(precision="bf16").start(World.solo(), wide)
    expected = digest(state)
    for page_bytes in (8 * KiB, 16 * KiB, 8 * KiB):
        state = zero.move(state, offload=zero.Offload("nvme", path=paths, page_bytes=page_bytes))
        assert digest(state) == expected
    state = zero.move(state, offload="cpu", offload_path=tmp_path)
    assert state.plan.offload.path == str(tmp_path)
    step(state, [small_batch(0, 6)])


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_move_that_cannot_be_changes_nothing():
    world = World.solo()
    state, step = Setting().start(world)
    plan = state.plan
    for arguments, message in (
        ({"offload": "disk"}, "must be one of"),
        ({"stage": 5}, "stage"),
        ({"stage": 1, "offload": "infinity"}, "only zero.stage=3 can"),
        ({"keep": ["nothing"]}, "no unit is named nothing"),
        ({"activations": "some"}, "zero.activations"),
        ({"prefetch": -1}, "zero.prefetch"),
        ({"gather": "ring"}, "zero.gather"),
        ({"offload": "nvme", "offload_path": "/nowhere"}, "/nowhere"),
        ({"offload": zero.Offload("cpu", host_budget=1)}, "host_budget"),
    ):
        with pytest.raises(ZeroError, match=message):
            zero.move(state, **arguments)
        assert state.plan is plan
    under_way = zero.Step(state)
    under_way.microbatch()
    with pytest.raises(ConfigError, match="a step is under way"):
        zero.move(state, stage=1)
    under_way.abandon()
    with zero.gathered(state, ["head.bias"]), pytest.raises(ConfigError, match="a block of gathered values is open"):
        zero.move(state, stage=1)
    state = zero.move(state, stage=1)
    step(state, [small_batch(0, 6)])


def test_stages_that_add_in_another_order_are_refused():
    def move(world: zero.World) -> None:
        state, _ = Setting(stage=1, accumulate=2).start(world)
        with pytest.raises(PlanError, match="the last bits would change"):
            zero.move(state, stage=2)
        assert zero.move(state, stage=0).plan.facts.stage.level == 0

    run_ranks(2, move)


def test_ranks_that_ask_for_different_moves_are_told():
    def move(world: zero.World) -> None:
        state, _ = Setting().start(world)
        with pytest.raises(HandshakeError, match=r"arguments of zero\.move"):
            zero.move(state, stage=world.rank)

    run_ranks(2, move)


# -- failures ----------------------------------------------------------------------------------------------------------


def move_with_a_full_disk(
    world: zero.World, setting: Setting, fails_at: int
) -> tuple[tuple[str, list[zero.Metrics]], int]:
    """Train; before the third step the state moves, and rank 0's disk is full at the n-th write; 0: never."""
    plan = setting.plan(world, wide)
    faulty = fails_at and not world.rank
    files = FaultyFiles(fail(errno.ENOSPC), at=fails_at if faulty else 10**9, on=True, only="pwrite")
    disk = NvmeStore(tempfile.gettempdir(), files=files)
    state, step = zero.init(plan, zero.open_store(plan, disk=disk)), zero.make_step(plan, small_loss)
    every = []
    for number in range(STEPS):
        if number == 2:
            with pytest.raises(MachineError, match="ENOSPC") if fails_at else nullcontext() as raised:
                state = zero.move(state, offload="nvme" if setting.stage < 3 else "infinity")
            assert raised is None or not hasattr(raised.value, "__notes__"), "it was moved back"
            writes = files.count
        state, metrics = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
        every.append(metrics)
    result = digest(state), every
    state.close()
    return result, writes


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("setting", [Setting(), Setting(stage=1, precision="bf16")])
@pytest.mark.parametrize("size", [1, 2])
def test_a_disk_that_fills_during_a_move_leaves_the_state_where_it_was(size, setting):
    expected = run_ranks(size, train_small, setting, STEPS, wide)
    writes = run_ranks(size, move_with_a_full_disk, setting, 0)[0][1]
    assert writes > 8
    for fails_at in (2, 3, 4, writes // 2, writes - 2):  # memory that is not aligned takes fewer writes
        results = run_ranks(size, move_with_a_full_disk, setting, fails_at)
        assert [result for result, _ in results] == expected, fails_at


def test_an_interrupt_during_a_move_waits_for_its_end(monkeypatch):
    """The old state is valid, and its memory is that of the new plan."""
    world = World.solo()
    state, step = Setting().start(world)
    expected = digest(state)
    original = UnitMove.start

    def interrupted(self: UnitMove) -> None:
        signal.raise_signal(signal.SIGINT)
        original(self)

    monkeypatch.setattr(UnitMove, "start", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # another test may have left its own
    with pytest.raises(KeyboardInterrupt):
        zero.move(state, offload="nvme")
    signal.signal(signal.SIGINT, before)
    assert state.plan.offload.kinds[0] == "nvme"
    assert digest(state) == expected
    step(state, [small_batch(0, 6)])


# -- parking -----------------------------------------------------------------------------------------------------------


def train_and_park(world: zero.World, setting: Setting, build=wide) -> tuple[str, list[zero.Metrics]]:
    """Park between steps; half of the times the next step brings the state back."""
    state, step = setting.start(world, build)
    memory, every = world.compute.memory, []
    small = sum(buffer.nbytes for buffer in state.model.buffers()) + 4 * KiB
    for number in range(STEPS):
        before = memory.nbytes
        assert zero.move(state, offload="parked") is state
        assert memory.nbytes < min(small, before / 2), (memory.nbytes, before)
        assert state.is_parked
        zero.move(state, offload="parked")
        if number % 2:
            zero.move(state, offload="resident")
            assert not state.is_parked
            check_bytes(state)
        batch = small_batch(number, 6 * world.size * setting.accumulate)
        state, metrics = step(state, slice_of(batch, world, setting.accumulate))
        every.append(metrics)
    zero.move(state, offload="parked")
    result = digest(state), every
    zero.move(state, offload="parked")
    state.close()
    return result


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("size", "setting"),
    [
        (1, Setting()),
        (2, Setting(stage=1, precision="bf16", optimizer=adamw_in_8bit)),
        (2, Setting(precision="bf16", frozen="nf4", accumulate=2)),
        (2, Setting(precision="bf16", offload=(("preset", "nvme"),))),
        (2, Setting(stage=2, optimizer=zero.muon)),
    ],
)
def test_a_parked_state_is_off_the_device_and_comes_back(size, setting):
    with simulated_gpu(races=True):
        expected = run_ranks(size, train_small, setting, STEPS, wide)
        assert run_ranks(size, train_and_park, setting) == expected
