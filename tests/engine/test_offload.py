"""Tiers are not arithmetic: every tier gives the same bits, and hides what it does."""

import errno
import math
import random
import tempfile
import threading
import time
from contextlib import closing

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.common.small import (
    Setting,
    Small,
    adamw_in_8bit,
    adamw_in_bf16,
    slice_of,
    small_batch,
    small_loss,
    train_small,
    wide,
)
from tests.conftest import LONG_S
from tests.faults.disks import FaultyFiles, ThrottledStore, fail, flip, short
from tests.simulation import simulated_gpu
from zero.distributed.world import World
from zero.engine.update.update import GPU_GROUPS, Updater
from zero.engine.whole.read import digest, full_state_dict
from zero.errors import ConfigError, StoreError
from zero.store import MemoryStore, NvmeStore, Store
from zero.testing import run_processes, run_ranks

KiB = 1024
CPU = torch.device("cpu")

# Presets, and each kind alone where no preset has it so
EVERYWHERE = ({"preset": "nvme"}, {"preset": "cpu"}, {"preset": "auto"}, {"preset": "none", "grad": "nvme"})
WITH_SHARDED_PARAMETERS = ({"preset": "infinity"}, {"preset": "none", "param": "nvme"})


class Jittery(Store):
    """A store in which every transfer takes its time: operations end in any order."""

    def __init__(self, inner: Store, seed: int) -> None:
        self._inner, self._random, self._lock = inner, random.Random(seed), threading.Lock()

    def _delay(self) -> None:
        with self._lock:
            chosen = self._random.random()
        time.sleep(chosen**4 * 2e-3)

    def allocate_all(self, sizes):
        self._inner.allocate_all(sizes)

    def rename(self, page, name):
        self._inner.rename(page, name)

    def free(self, page):
        self._inner.free(page)

    def read(self, page, into):
        self._delay()
        return self._inner.read(page, into)

    def write(self, page, source):
        self._delay()
        ticket = self._inner.write(page, source)
        self._delay()
        return ticket

    def in_place(self, page):
        self._inner.in_place(page)

    @property
    def allocated_bytes(self):
        return self._inner.allocated_bytes

    def close(self):
        self._inner.close()


def offloads(stage: int) -> list[dict[str, str]]:
    return [*EVERYWHERE, *(WITH_SHARDED_PARAMETERS if stage == 3 else ())]


def train_offloaded(world, setting, steps, disk=None, build=Small):
    """As `train_small`, on a store that is settled and closed afterwards."""
    plan = setting.plan(world, build)
    store = zero.open_store(plan, disk=None if disk is None else disk(world.rank))
    state, step = zero.init(plan, store, seed=setting.seed), zero.make_step(plan, small_loss)
    told = []
    for number in range(steps):
        batch = small_batch(number, 6 * world.size * setting.accumulate)
        state, metrics = step(state, slice_of(batch, world, setting.accumulate))
        told.append(metrics)
    result = digest(state), told
    store.drain()
    store.close()
    return result


KINDS = [("fp32", 1, 0.5), ("bf16", 3, 0.5), ("fp32", 3, None), ("bf16", 1, None)]
CASES = [(size, stage, *KINDS[(size + stage) % 4]) for size in (1, 2, 3) for stage in range(4)]


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize(("size", "stage", "precision", "accumulate", "clip"), CASES)
def test_no_tier_changes_a_bit(size, stage, precision, accumulate, clip):
    """Eight steps on every tier, with another page size, read-ahead, number of threads, update and form of master each.

    The sizes of a stage share its tiers.
    """
    plain = Setting(stage=stage, precision=precision, accumulate=accumulate, clip=clip)
    expected = run_ranks(size, train_small, plain, 8)
    for number, offload in list(enumerate(offloads(stage)))[size - 1 :: 3]:
        setting = plain.but(
            offload=tuple(offload.items()),
            update=("lazy", "serial", "lazy")[number % 3],
            page_bytes=(4 * KiB, 8 * KiB, 16 * 1024 * KiB)[number % 3],
            master=("auto", "whole")[number % 2],
            ahead=(None, 0, 32 * KiB, 64 * KiB, 256 * KiB)[(number + size) % 5],
            threads=1 + (number + stage) % 3,
        )
        assert run_ranks(size, train_offloaded, setting, 8) == expected, setting


@pytest.mark.parametrize(
    ("size", "stage", "precision", "accumulate", "clip"),
    [(1, 3, "bf16", 3, 0.5), (3, 3, "fp32", 1, None), (2, 1, "bf16", 3, 0.5)],
)
def test_units_of_many_pages(size, stage, precision, accumulate, clip):
    """More pages than slots: they wait for one another, and the first are read again while the last are written."""
    plain = Setting(stage=stage, precision=precision, accumulate=accumulate, clip=clip)
    expected = run_ranks(size, train_small, plain, 4, wide)
    for number, offload in list(enumerate(offloads(stage)))[(size + 1) % 2 :: 2]:
        setting = plain.but(
            offload=tuple(offload.items()),
            update=("lazy", "serial")[number % 2],
            page_bytes=4 * KiB,
            master=("whole", "auto")[number % 2],
            ahead=(0, 32 * KiB, None)[number % 3],
            threads=1 + number % 3,
        )
        pages = run_ranks(1, lambda world, setting=setting: setting.plan(world, wide).pages.store_pages().keys())[0]
        assert max(page.number for page in pages) >= 6
        assert run_ranks(size, train_offloaded, setting, 4, None, wide) == expected, setting


def test_a_gpu_updates_a_few_groups_at_a_time_with_any_number_of_threads(monkeypatch):
    """Each group from a disk has a copy in device memory while it is updated."""
    update, lock, inside, most = Updater._update_offloaded, threading.Lock(), [0], [0]
    crowded = threading.Event()

    def noted(updater, *args):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            if inside[0] == GPU_GROUPS:
                crowded.set()
        crowded.wait(LONG_S)  # the first ones stay until as many are inside as may be
        update(updater, *args)
        with lock:
            inside[0] -= 1

    setting = Setting(offload=(("preset", "nvme"),), precision="bf16", clip=0.5, page_bytes=4 * KiB)
    with simulated_gpu():
        expected = run_ranks(1, train_offloaded, setting.but(threads=1), 3, None, wide)
        monkeypatch.setattr(Updater, "_update_offloaded", noted)
        assert run_ranks(1, train_offloaded, setting.but(threads=8), 3, None, wide) == expected
    assert most == [GPU_GROUPS]


@pytest.mark.parametrize(("precision", "optimizer"), [("bf16", adamw_in_bf16), ("fp32", adamw_in_8bit)])
def test_no_tier_changes_a_bit_of_moments_in_fewer_bits(precision, optimizer):
    """On every tier, with pages that cut parameters elsewhere."""
    plain = Setting(precision=precision, clip=0.5, optimizer=optimizer)
    expected = run_ranks(2, train_small, plain, 4, wide)
    for number, offload in list(enumerate(offloads(3)))[precision == "fp32" :: 2]:
        setting = plain.but(offload=tuple(offload.items()), page_bytes=(4, 8, 16)[number % 3] * KiB)
        assert run_ranks(2, train_offloaded, setting, 4, None, wide) == expected, setting


class Branches(nn.Module):
    """A block that every microbatch runs, one that is run twice, and one that is run where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(48, 48) for _ in range(3))

    def forward(self, x: Tensor, *, twice: bool = False, once: bool = True) -> Tensor:
        first, second, third = self.blocks
        x = second(torch.tanh(first(x)))
        x = second(torch.tanh(x)) if twice else x
        return third(torch.tanh(x)) if once else x


def train_branches(world, stage, accumulate, precision, offload, ways):
    """The digest after three steps, and the bytes that the disk took and gave in the last one's backwards.

    Args:
        ways: for each microbatch, how the model is called.
    """
    with world.exclusive(), zero.empty():
        model = Branches()
    plan = zero.Plan(
        model,
        optimizer=zero.adamw(1e-2),
        world=world,
        stage=stage,
        precision=precision,
        accumulate=accumulate,
        offload=zero.Offload("none", grad="nvme", page_bytes=4 * KiB) if offload else None,
        update="serial",
    )
    with closing(zero.open_store(plan)) as store:
        state = zero.init(plan, store, seed=3)
        generator = torch.Generator().manual_seed(world.rank)
        for _ in range(3):
            step, before = zero.Step(state), store.traffic
            for way in ways:
                step.microbatch()
                x = torch.randn(4, 48, generator=generator).to(plan.precision.compute)
                step.backward(state.model(x, **way).float().square().mean())
            store.drain()
            moved = store.traffic
            state, _ = step.finish()
        return digest(state), (moved.write_bytes - before.write_bytes, moved.read_bytes - before.read_bytes)


@pytest.mark.parametrize(("size", "stage", "accumulate"), [(1, 0, 3), (2, 0, 2), (2, 1, 3), (2, 2, 2)])
def test_gradients_add_up_on_the_disk_whichever_microbatch_runs_what(size, stage, accumulate):
    """One gradient is there in the dtype of compute and a sum in fp32, and nobody sees a difference."""
    for precision in ("fp32", "bf16"):
        for rare in range(accumulate):
            ways = [{"twice": number != rare, "once": number == rare} for number in range(accumulate)]
            results = [
                run_ranks(size, train_branches, stage, accumulate, precision, offload, ways)
                for offload in (False, True)
            ]
            assert results[0][0][0] == results[1][0][0], (precision, rare)


def test_fewer_microbatches_than_planned_leave_a_single_gradient_to_the_update():
    digests = [run_ranks(1, train_branches, 0, 3, "bf16", offload, [{}])[0][0] for offload in (False, True)]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("accumulate", [1, 2, 3, 4])
@pytest.mark.parametrize(("precision", "single"), [("fp32", 4), ("bf16", 2)])
def test_what_gradients_move_is_what_their_sum_needs(accumulate, precision, single):
    """The first microbatch writes one gradient; each other one reads what there is, and writes a sum in fp32."""
    numel = 3 * 2368  # each block's 48 x 48 + 48, up to the next multiple of 64
    _, moved = run_ranks(1, train_branches, 0, accumulate, precision, True, [{}] * accumulate)[0]
    read = [single, *[4] * (accumulate - 2)] if accumulate > 1 else []
    assert moved == (numel * (single + 4 * (accumulate - 1)), numel * sum(read))


@pytest.mark.parametrize(("seed", "update"), [(0, "serial"), (1, "lazy")])
def test_no_order_of_completion_changes_a_bit(seed, update):
    plain = Setting(precision="bf16", accumulate=2, clip=None, page_bytes=4 * KiB)
    expected = run_ranks(2, train_small, plain, 5)
    for offload in ({"preset": "nvme"}, {"preset": "infinity"}):
        for ahead in (0, 64 * KiB):
            setting = plain.but(offload=tuple(offload.items()), update=update, ahead=ahead, threads=3)

            def disk(rank: int) -> Store:
                return Jittery(MemoryStore(CPU), 10 * seed + rank)

            assert run_ranks(2, train_offloaded, setting, 5, disk) == expected, setting


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_was_interrupted_can_be_made_again(where, accumulate):
    """Reads under way, waiting updates and half a gradient on the disk: the old state is still good."""

    def rank_main(world, offload, interrupted):
        setting = Setting(precision="bf16", clip=0.5, accumulate=accumulate, offload=offload, page_bytes=4 * KiB)
        plan = setting.plan(world, wide)
        store = zero.open_store(plan)
        calls = []

        def stopping(model, batch):
            loss, beside = small_loss(model, batch)
            calls.append(None)
            if len(calls) == accumulate:
                if where == "forward":
                    raise KeyboardInterrupt
                loss.register_hook(_interrupt)
            return loss, beside

        state, step = zero.init(plan, store), zero.make_step(plan, small_loss)
        for number in range(4):
            batches = slice_of(small_batch(number, 6 * accumulate), world, accumulate)
            if interrupted and number == 2:
                with pytest.raises(KeyboardInterrupt):
                    zero.make_step(plan, stopping)(state, batches)
            state, _ = step(state, batches)
        state_dicts = {kind: full_state_dict(state, kind) for kind in ("param", "mu", "nu")}
        store.close()
        return state_dicts

    expected = run_ranks(1, rank_main, (), False)[0]
    for preset in ("nvme", "infinity"):
        state_dicts = run_ranks(1, rank_main, (("preset", preset),), True)[0]
        for kind, tensors in expected.items():
            assert all(torch.equal(tensor, state_dicts[kind][name]) for name, tensor in tensors.items()), (preset, kind)


def _interrupt(grad):
    raise KeyboardInterrupt


@pytest.mark.parametrize("drains", [True, False])
def test_reads_that_an_interrupt_lost_have_ended_before_the_step_is_made_again(drains, monkeypatch):
    """The interrupt arrives after reads have started and before any wait for them."""
    setting = Setting(offload=(("preset", "infinity"),), page_bytes=4 * KiB)
    state, step = setting.start(World.solo(), wide, small_loss)
    store, residency = state.runtime.store, state.runtime.residency
    asked, drain, fetch = threading.Event(), store.drain, residency.gathers._fetch
    read = NvmeStore.read

    def waits_to_be_drained(disk, page, into):
        if page.kind == "param" and threading.current_thread() is not threading.main_thread():
            asked.wait(LONG_S)
        return read(disk, page, into)

    def asked_to_drain():
        asked.set()
        drain()

    def breaks_off(*args):
        fetch(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(NvmeStore, "read", waits_to_be_drained)
    if drains:
        monkeypatch.setattr(store, "drain", asked_to_drain)
    else:
        monkeypatch.setattr(store, "drain", lambda: None)
    monkeypatch.setattr(residency.gathers, "_fetch", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        step(state, slice_of(small_batch(0, 6), World.solo(), 1))
    assert store._workers._schedule.is_quiet == drains
    asked.set()
    drain()
    store.close()


def test_a_store_holds_one_state():
    def rank_main(world):
        plan = Setting().plan(world)
        store = zero.open_store(plan)
        zero.init(plan, store)
        with pytest.raises(StoreError, match="holds a state already"):
            zero.init(plan, store)

    run_ranks(1, rank_main)


@pytest.mark.parametrize("offload", ["nvme", "infinity"])
def test_processes_agree_with_threads(offload):
    setting = Setting(precision="bf16", clip=0.5)
    expected = run_ranks(2, train_small, setting, 5)
    assert run_processes(2, train_offloaded, setting.but(offload=(("preset", offload),)), 5) == expected


def test_first_values_are_the_same_everywhere():
    def values(world, setting):
        plan = setting.plan(world)
        state = zero.init(plan, zero.open_store(plan), seed=7)
        return {name: tensor.tolist() for name, tensor in full_state_dict(state).items()}

    for size, precision, offload in ((1, "fp32", "infinity"), (3, "bf16", "infinity"), (2, "bf16", "nvme")):
        expected = run_ranks(1, values, Setting(stage=0, precision=precision))[0]
        setting = Setting(precision=precision, offload=(("preset", offload),), page_bytes=4 * KiB)
        assert run_ranks(size, values, setting) == [expected] * size


# -- what a step may do meanwhile --------------------------------------------------------------------------------------


def test_a_skipped_step_changes_nothing_and_reads_ahead_for_nothing():
    """An overflow drops the update before any page is asked for."""

    def rank_main(world):
        setting = Setting(precision="bf16", offload=(("preset", "infinity"),), clip=0.5)
        state, step = setting.start(world)
        batches = [small_batch(number, 6 * world.size) for number in range(3)]
        state, _ = step(state, slice_of(batches[0], world, 1))
        before = digest(state)

        def broken(model, batch):
            loss, beside = small_loss(model, batch)
            return loss * torch.inf, beside

        state, metrics = zero.make_step(state.plan, broken)(state, slice_of(batches[1], world, 1))
        assert metrics.skipped
        return before, state.step, [full_state_dict(state, kind) for kind in ("param", "mu", "nu")]

    def undisturbed(world):
        state, step = Setting(precision="bf16", clip=0.5).start(world)
        state, _ = step(state, slice_of(small_batch(0, 6 * world.size), world, 1))
        return [full_state_dict(state, kind) for kind in ("param", "mu", "nu")]

    for (_, steps, state_dicts), expected in zip(run_ranks(2, rank_main), run_ranks(2, undisturbed), strict=True):
        assert steps == 1
        for state_dict, other in zip(state_dicts, expected, strict=True):
            assert state_dict.keys() == other.keys()
            assert all(torch.equal(state_dict[name], other[name]) for name in state_dict)


def test_evaluation_between_steps_changes_nothing():
    """Evaluation reads through the waiting updates, wherever they are made."""

    def rank_main(world, setting):
        state, step = setting.start(world)
        forward = zero.make_forward(state.plan, small_loss)
        losses = []
        for number in range(4):
            state, _ = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
            losses.append(float(forward(state, small_batch(100, 6))[0]))
        return losses, digest(state)

    expected = run_ranks(2, rank_main, Setting(clip=0.5))
    for preset in ("nvme", "infinity"):
        assert run_ranks(2, rank_main, Setting(clip=0.5, offload=(("preset", preset),))) == expected


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("moments", "nbytes"), [("fp32", 8), ("bf16", 4), ("8bit", 2 * 65 / 64)])
@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_moments_take_what_their_form_says(tier, moments, nbytes):
    """Two for each parameter; of 64 elements and one parameter each, so that no page ends on a block of its own."""
    with zero.empty():
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    optimizer = zero.with_moments(zero.adamw(1e-3), moments)
    plan = zero.Plan(model, optimizer=optimizer, units=("Linear",), world=World.solo(), offload=tier)
    held = {kind: bytes_ for kinds in plan.bytes.values() for kind, bytes_ in kinds.items()}
    assert held["moments"] == nbytes * 4 * 64 * 64


@pytest.mark.parametrize(
    ("size", "offload", "precision"),
    [(1, "cpu", "bf16"), (2, "nvme", "bf16"), (1, "infinity", "fp32"), (2, "infinity", "bf16"), (2, "auto", "fp32")],
)
def test_an_offloaded_plan_is_true(size, offload, precision):
    """The table holds every tier, and the bytes that it announces are there."""

    def rank_main(world):
        setting = Setting(precision=precision, offload=(("preset", offload),), clip=0.5)
        state, step = setting.start(world)
        for number in range(2):
            state, _ = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
        digest(state)
        plan, parts = state.plan, state.runtime
        specs = plan.pages.store_pages()
        told = plan.bytes
        kinds = {"param": "parameters", "frozen": "parameters", "grad": "gradients", "master": "master"}
        kinds["master_low"] = "master"
        held: dict[tuple[str, str], int] = {}
        for page, spec in specs.items():
            key = plan.tier(page), kinds.get(page.kind, "moments")
            if page.kind == "param" and plan.precision.master.reads_params:
                key = plan.tier(page), "parameters"
            blocks = -(-spec.nbytes // 4096) * 4096  # what a page takes in a file
            held[key] = held.get(key, 0) + (blocks if plan.tier(page) == "nvme" else spec.nbytes)
        for (tier, kind), nbytes in held.items():
            assert told[tier][kind] == nbytes, (tier, kind)
        if plan.facts.grads_offloaded:
            home = parts.gradients
            held = home.allocated_bytes + sum(unit.grad.nbytes for unit in home._open)
            assert held == told["device"]["gradient buffers"]
            assert home.overflowed == 0
        if parts.residency.pool is not None:
            assert parts.residency.pool.allocated_bytes == told["device"]["gathered units"]
        assert sum(slot.nbytes for slot in parts.store._executor.slots) == told.get("host", {}).get("arena", 0)
        return True

    assert run_ranks(size, rank_main) == [True] * size


def test_below_stage_3_parameters_stay_and_infinity_is_refused():
    def plan(world, stage, **offload):
        return Setting(stage=stage, offload=tuple(offload.items())).plan(world)

    for stage in (0, 1, 2):
        assert run_ranks(2, lambda world, s=stage: plan(world, s, preset="nvme").placement.param) == ["device"] * 2
        with pytest.raises(ConfigError, match=r"offload=infinity .* zero.stage=3, or offload=nvme"):
            run_ranks(1, lambda world, s=stage: plan(world, s, preset="infinity") and None)


def test_a_budget_that_is_too_small_names_the_least():
    offload = zero.Offload("cpu", host_budget=4096, page_bytes=8 * KiB)
    with pytest.raises(ConfigError, match=r"offload.host_budget=4.0 KiB: a rank needs at least .* MiB"):
        zero.Plan(nn.Linear(512, 512), optimizer=zero.adamw(lr=1e-3), world=World.solo(), offload=offload)


# -- faults ------------------------------------------------------------------------------------------------------------


FAULTS = [
    (fail(errno.EIO), "pread", "EIO", 30),
    (fail(errno.EIO), "pwrite", "EIO", 150),
    (fail(errno.ENOSPC), "pwrite", "ENOSPC", 30),
    (flip(77), "pread", "checksum differs", 150),
]


@pytest.mark.parametrize(("fault", "call", "told", "at"), FAULTS)
def test_a_broken_disk_ends_the_run_with_one_error_on_every_rank(fault, call, told, at):
    """Right bits or a typed error with the page's name; soon, and on both ranks."""

    met: dict[int, str] = {}

    def rank_main(world):
        setting = Setting(precision="bf16", offload=(("preset", "infinity"),), clip=0.5, page_bytes=4 * KiB)

        def disk(rank: int) -> Store:
            files = FaultyFiles(fault, at=at, only=call, on=True) if rank == 1 else None
            return NvmeStore(tempfile.gettempdir(), files=files)

        try:
            train_offloaded(world, setting, 20, disk)
        except zero.ZeroError as error:
            met[world.rank] = str(error)
            raise

    begin = time.monotonic()
    with pytest.raises((StoreError, zero.ZeroError)) as raised:
        run_ranks(2, rank_main)
    assert time.monotonic() - begin < 60, "long before the deadline of 120 s"
    assert raised.type is StoreError
    assert met.keys() == {0, 1}
    for text in met.values():
        assert told in text
        assert "page" in text
        assert "offset" in text
        assert "\n" not in text


def test_short_transfers_are_completed():
    plain = Setting(precision="bf16", clip=0.5)
    expected = run_ranks(1, train_small, plain, 5)

    def disk(rank: int) -> Store:
        return NvmeStore(tempfile.gettempdir(), files=FaultyFiles(short(4096), at=1, on=True))

    setting = plain.but(offload=(("preset", "infinity"),), page_bytes=16 * KiB)
    assert run_ranks(1, train_offloaded, setting, 5, disk) == expected


# -- hiding ------------------------------------------------------------------------------------------------------------


class Slow(torch.autograd.Function):
    """The identity, which takes its time in both directions: compute that no other thread can slow down."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return grad, None


class SlowBlock(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: Tensor) -> Tensor:
        return x + Slow.apply(self.linear(x), self.seconds)


class SlowStack(nn.Module):
    def __init__(self, blocks: int, width: int, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SlowBlock(width, seconds) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


BLOCKS, BLOCK_WIDTH, BLOCK_S = 10, 128, 0.1  # what Python takes beside compute and disk (0.1 s a step) is little of it
C_FORWARD_S, C_BACKWARD_S = BLOCKS * BLOCK_S, 2 * BLOCKS * BLOCK_S
MOST_STEPS, READ_AHEAD = 20, 4


def step_s(
    update: str, traffic_s: float, ideal_s: float, ahead: int = READ_AHEAD, most_steps: int = MOST_STEPS
) -> float:
    """The shortest of several steps on a disk on which a step's traffic takes `traffic_s`. Whatever else the machine
    does can only lengthen a step, so a busy one is given more of them, until one comes close to `ideal_s`."""

    def rank_main(world):
        with zero.empty():
            model = SlowStack(BLOCKS, BLOCK_WIDTH, BLOCK_S)

        def planned(ahead_bytes: int) -> zero.Plan:
            offload = zero.Offload("nvme", page_bytes=128 * KiB, threads=4, ahead=ahead_bytes)
            return zero.Plan(model, optimizer=zero.adamw(1e-3, clip=1.0), world=world, update=update, offload=offload)

        plan = planned(ahead * planned(0).pages.slot_bytes)
        assert plan.slots.arena == 4 + ahead
        moved = 2 * sum(spec.nbytes for spec in plan.pages.store_pages().values())
        store = zero.open_store(plan, disk=ThrottledStore(MemoryStore(CPU), moved / traffic_s))
        state, step = zero.init(plan, store), zero.make_step(plan, lambda model, x: model(x).square().mean())
        x, shortest_s = torch.ones(4, BLOCK_WIDTH), math.inf
        state, _ = step(state, [x])  # the first has no update before it
        for _ in range(most_steps):
            begin = time.perf_counter()
            state, _ = step(state, [x])
            shortest_s = min(shortest_s, time.perf_counter() - begin)
            if shortest_s <= 1.05 * ideal_s:
                break
        store.drain()
        store.close()
        return shortest_s

    return run_ranks(1, rank_main, timeout_s=LONG_S)[0]


@pytest.mark.alone
@pytest.mark.parametrize("traffic_s", [0.5, 1.25])
def test_a_lazy_update_hides_behind_the_next_forward(traffic_s):
    """Time is max(C_forward, O) + C_backward, with clipping on; serial is the sum, but for the groups, one a block,
    that it may have read ahead during compute.

    Compute and disk are clocks here, so that the machine's load counts little.
    """
    read_ahead_s = traffic_s / 2 * READ_AHEAD / BLOCKS  # of the half of the traffic that is reads
    bound, total = max(C_FORWARD_S, traffic_s) + C_BACKWARD_S, C_FORWARD_S + C_BACKWARD_S + traffic_s
    lazy = step_s("lazy", traffic_s, bound)
    serial = step_s("serial", traffic_s, total, most_steps=2)  # nothing below asks that it be short
    print(f"lazy {lazy:.3f} s, serial {serial:.3f} s, bound {bound:.3f} s")
    assert lazy <= 1.15 * bound
    assert serial >= 0.95 * (total - read_ahead_s)
    assert lazy / serial <= bound / total / 0.9375  # where traffic is as long as the forward: 0.8


@pytest.mark.alone
def test_what_has_a_slot_hides_behind_the_whole_step():
    """Reads begin before there is a gradient, and writes end behind the backward after it."""
    traffic_s, bound = 2.5, C_FORWARD_S + C_BACKWARD_S
    lasted_s = step_s("lazy", traffic_s, bound, ahead=BLOCKS - 4)
    print(f"{lasted_s:.3f} s, bound {bound:.3f} s")
    assert lasted_s <= 1.15 * bound < traffic_s + C_BACKWARD_S


@pytest.mark.parametrize(("stage", "accumulate"), [(0, 1), (0, 2), (1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("large", [(1,), (1, 64)])
def test_no_buffer_is_allocated_beyond_the_plan_where_one_unit_is_much_larger(stage, accumulate, large, tmp_path):
    """As a vocabulary is: its gradient and its gathered parameters find a buffer when smaller units use the others."""
    sizes = [*large, 64, *[1] * 5]

    with zero.empty():
        models = [
            nn.Sequential(*(nn.Sequential(nn.Linear(8, 8 * n), nn.Linear(8 * n, 8)) for n in sizes)) for _ in range(2)
        ]

    def rank_main(world):
        offload = zero.Offload("nvme", grad="nvme", path=str(tmp_path))
        plan = zero.Plan(
            models[world.rank],
            optimizer=zero.sgd(1e-2),
            world=world,
            stage=stage,
            accumulate=accumulate,
            offload=offload,
        )
        with closing(zero.open_store(plan)) as store:
            state, step = zero.init(plan, store), zero.make_step(plan, lambda model, x: model(x).square().mean())
            for _ in range(3):
                state, _ = step(state, [torch.ones(2, 8)] * accumulate)
            pool = state.runtime.residency.pool
            return state.runtime.gradients.overflowed, pool.overflowed if pool is not None else 0

    assert run_ranks(2, rank_main) == [(0, 0)] * 2
