"""A step that runs out of memory is made again on lower tiers, and its results are those of a step that did not."""

import random
import re
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn

import zero
from tests.common.small import Setting, adamw_in_bf16, slice_of, small_batch, small_loss, wide
from tests.simulation.races import RaceError
from tests.simulation.simulated_gpu import simulated_gpu
from zero.distributed.world import World
from zero.engine.lower import device_bytes, lower_plans
from zero.engine.retry import Retry
from zero.engine.whole.read import digest
from zero.errors import MachineError
from zero.testing import run_ranks

STEPS = 3
UPDATE_INTERRUPTED = "An update was interrupted half-way", "the work on group"


class Dropping(nn.Module):
    """The small model, with random numbers of torch and of Python in its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.small = wide()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        kept = torch.nn.functional.dropout(self.small(tokens), 0.3, self.training)
        return kept * (1 + random.random())


def started(world: zero.World, setting: Setting, **retry: Any) -> tuple[zero.State, Callable[..., Any], list[str]]:
    """Return a state, its step, and the notes of steps that are made again."""
    with world.exclusive():
        torch.manual_seed(0)
        random.seed(0)
    notes: list[str] = []
    plan = setting.plan(world, Dropping)
    step = zero.make_step(plan, small_loss, retry=Retry(notes.append, **retry))
    return zero.init(plan, zero.open_store(plan)), step, notes


def train(world: zero.World, setting: Setting, fails_at: int = 0) -> tuple[str, list[float], int, list[str]]:
    """Train; the n-th allocation after the first step fails. Return the digest, losses, allocations and notes."""
    state, step, notes = started(world, setting)
    memory, losses, count = world.compute.memory, [], 6 * world.size * setting.accumulate
    batches = [slice_of(small_batch(number, count), world, setting.accumulate) for number in range(STEPS)]
    for number, batch in enumerate(batches):
        if number == 1:
            begun = memory.allocations
            memory.fails_at = fails_at and begun + fails_at
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    ended, memory.fails_at = memory.allocations, 0
    result = digest(state), losses, ended - begun, notes
    state.close()
    return result


SETTINGS = [
    Setting(precision="bf16", clip=0.5),
    Setting(precision="fp16", activations="remat", accumulate=2),
    Setting(precision="bf16", offload=(("preset", "cpu"),), optimizer=adamw_in_bf16),
    Setting(precision="bf16", offload=(("preset", "infinity"),)),
    Setting(stage=0, optimizer=zero.muon),
]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("case", "fused"), [*((case, False) for case in range(len(SETTINGS))), (0, True), (2, True)])
def test_each_allocation_of_a_step_may_fail_once(case, fused):
    """The same bits, or one clear error where the update itself was interrupted."""
    setting, interrupted = SETTINGS[case], 0
    with simulated_gpu(limited=True, fused=fused):
        *expected, allocations, _ = run_ranks(1, train, setting)[0]
        places = sorted(random.Random(case).sample(range(1, allocations), 15))
        for fails_at in places:
            try:
                *result, allocated, notes = run_ranks(1, train, setting, fails_at)[0]
            except MachineError as error:
                interrupted += any(text in str(error) for text in UPDATE_INTERRUPTED)
                if not interrupted:
                    raise
                continue
            assert result == expected, fails_at
            assert len(notes) == (allocated >= fails_at), "threads may update after the last step"
    assert interrupted <= (0 if fused else 0.7 * len(places)), "a kernel's update allocates nothing"


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("preset", ["none", "cpu", "nvme", "infinity", "auto"])
@pytest.mark.parametrize("size", [1, 2])
def test_an_allocation_may_fail_at_every_stage_and_preset(stage, preset, size):
    """Alone the same bits, or one clear error in a thread of the store; on one of two ranks an error on both."""
    if preset == "infinity" and stage < 3:
        pytest.skip("parameters on a disk need stage 3")
    setting = Setting(stage=stage, precision="bf16", offload=(("preset", preset),))
    failed_ranks = suppress(RaceError) if size > 1 else nullcontext()  # they free memory of work under way
    with failed_ranks, simulated_gpu(limited=True, fused=True):
        *expected, allocations, _ = run_ranks(size, train, setting)[0]
        places = random.Random(f"{stage} {preset}").sample(range(1, allocations), 4)
        print(f"of {allocations} allocations {places}")
        for fails_at in places:
            if size > 1:
                with pytest.raises(Exception, match="out of memory") as raised:
                    run_ranks(size, train_on_one, setting, fails_at)
                assert "raised on rank 1 of 2" in raised.value.__notes__
                continue
            try:
                *result, allocated, notes = run_ranks(1, train, setting, fails_at)[0]
            except MachineError as error:
                if preset == "none" or not any(text in str(error) for text in UPDATE_INTERRUPTED):
                    raise
                continue
            assert result == expected, fails_at
            assert len(notes) == (allocated >= fails_at), "threads may update after the last step"


def train_on_one(world: zero.World, setting: Setting, fails_at: int) -> None:
    """Train; an allocation of rank 1 fails."""
    train(world, setting, fails_at if world.rank == 1 else 0)


def train_in_less(
    world: zero.World, setting: Setting, spare_bytes: int, **retry: Any
) -> tuple[str, list[float], list[str]]:
    """Train; after the first step the GPU has so many bytes beside what the state holds."""
    state, step, notes = started(world, setting, **retry)
    memory, losses = world.compute.memory, []
    batches = [slice_of(small_batch(number, 6), world, 1) for number in range(STEPS + 2)]
    for number, batch in enumerate(batches):
        if number == 1:
            memory.limit_bytes = memory.nbytes + spare_bytes
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    memory.limit_bytes = None
    result = digest(state), losses, notes
    state.close()
    return result


def test_a_step_that_does_not_fit_moves_the_state_until_it_does():
    setting = Setting(precision="bf16", prefetch=2, keep=("*",), page_bytes=4096)
    with simulated_gpu(limited=True, fused=True):
        *expected, notes = run_ranks(1, train_in_less, setting, 1 << 20)[0]
        assert notes == []
        *result, notes = run_ranks(1, train_in_less, setting, 8 << 10)[0]
        assert result == expected
        assert "Made again with an empty cache" in notes[0]
        assert [note for note in notes if "Moved to" in note]
        assert all("\n" not in note for note in notes)


def test_the_move_after_which_a_step_is_fastest_comes_first():
    setting = Setting(precision="bf16", prefetch=2, activations="remat")

    def ordered(world: zero.World) -> None:
        plan = setting.plan(world, wide)
        fixed = dict(lower_plans(plan))
        texts = [text for text, _ in lower_plans(plan, device_bytes)]  # as if the smallest were the fastest
        held = [device_bytes(fixed[text]) for text in texts]
        assert held[:-1] == sorted(held[:-1]) != [device_bytes(lower) for lower in fixed.values()][:-1]
        assert texts[-1] == [*fixed][-1] == "zero.activations=offload"

    with simulated_gpu(limited=True):
        run_ranks(1, ordered)


def test_a_microbatch_that_was_chosen_here_is_halved_at_last():
    """Sums round otherwise then, so the losses are nearly equal; without leave to halve it is an error."""
    setting = Setting(precision="fp32", activations="offload", offload=(("preset", "infinity"),), page_bytes=4096)

    def train(world: zero.World, micro: int) -> tuple[list[float], list[str], int]:
        with world.exclusive():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Embedding(11, 64), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 11))
        plan, notes, losses = setting.plan(world, lambda: model), list[str](), []

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            if begun and len(batch) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")
            return small_loss(model, batch)[0]

        state, begun = zero.init(plan, zero.open_store(plan)), False
        step = zero.make_step(plan, loss, retry=Retry(notes.append, micro=micro))
        for number in range(STEPS):
            batch = small_batch(number, 8)
            begun = micro > 0 and number >= 1
            state, metrics = step(state, batch.split(8 // state.plan.accumulate))
            losses.append(metrics.loss)
        return losses, notes, state.plan.accumulate

    with simulated_gpu(limited=True):
        expected, _, _ = run_ranks(1, train, 0)[0]
        losses, notes, count = run_ranks(1, train, 8)[0]
        assert losses == pytest.approx(expected, rel=1e-5)
        assert count == 4
        halvings = [note for note in notes if "round otherwise" in note]
        assert [re.search(r"batch\.micro=\d+ batch\.accumulate=\d+", note)[0] for note in halvings] == [
            "batch.micro=4 batch.accumulate=2", "batch.micro=2 batch.accumulate=4",
        ]  # fmt: skip
        with pytest.raises(MachineError, match="nothing of the state can move"):
            run_ranks(1, train, 5)


def test_a_step_that_fits_nowhere_is_an_error():
    """All moves are tried, and one line says what did not fit."""

    def train(world: zero.World) -> None:
        state, _ = Setting(precision="bf16", prefetch=2).start(world, wide)
        retry = Retry(lambda line: None)

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return small_loss(model, batch)[0] + torch.zeros(1 << 20).sum()

        world.compute.memory.limit_bytes = 1 << 20
        with pytest.raises(MachineError, match=r"step 1: .* out of memory.* nothing of the state can move"):
            zero.make_step(state.plan, loss, retry=retry)(state, [small_batch(0, 6)])
        assert len(retry.moves) >= 4

    with simulated_gpu(limited=True):
        run_ranks(1, train)


def test_other_errors_are_not_tried_again():
    state, _ = Setting().start(World.solo())
    notes: list[str] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a mistake in the model")

    step = zero.make_step(state.plan, loss, retry=Retry(notes.append))
    with pytest.raises(RuntimeError, match="a mistake in the model"):
        step(state, [small_batch(0, 6)])
    assert not notes


def test_one_of_several_ranks_gets_advice():
    def fail(world: zero.World) -> None:
        state, _ = Setting().start(world)

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")

        with pytest.raises(RuntimeError, match="ALLOC_FAILED") as raised:
            zero.make_step(state.plan, loss, retry=True)(state, [small_batch(0, 6)])
        assert "Start again from the last checkpoint with zero.prefetch=0 or" in raised.value.__notes__[0]

    run_ranks(2, fail)
