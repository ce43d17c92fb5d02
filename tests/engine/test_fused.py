"""The kernels of a GPU in the engine, run by the interpreter of Triton on a simulated GPU.

Stages and tiers give equal bits among themselves, and no stream races.
"""

from functools import partial
from typing import TYPE_CHECKING

import pytest

import zero
from tests.common.small import KiB, Setting, adamw_in_8bit, small_batch, train_small, wide
from tests.engine.test_nonfinite import NAMES, Layers, batch_for, loss_fn
from tests.simulation import simulated_gpu
from tests.simulation.simulated_gpu import count_launches
from zero.core.groups import decay_matrices
from zero.core.optim import Fused, make_transform
from zero.engine.runtime import Runtime
from zero.engine.whole.read import digest
from zero.testing import run_ranks

if TYPE_CHECKING:
    import triton.language as tl

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


def on_gpu(preset: str) -> tuple[tuple[str, str], ...]:
    return ("preset", preset), ("compute", "device")


@pytest.mark.parametrize(
    ("optimizer", "precision", "others"),
    [
        (zero.adamw, "fp32", ((1, "cpu"), (3, "none"))),
        (adamw_in_8bit, "bf16", ((1, "none"), (3, "infinity"))),
    ],
)
def test_no_stage_and_no_tier_changes_a_bit(optimizer, precision, others):
    setting = Setting(stage=0, optimizer=optimizer, precision=precision, clip=0.5, page_bytes=4 * KiB)
    with simulated_gpu(fused=True):
        expected = run_ranks(2, train_small, setting, 2)
        for stage, preset in others:
            other = setting.but(stage=stage, offload=on_gpu(preset), master="auto" if stage % 2 else "whole")
            assert run_ranks(2, train_small, other, 2) == expected, other


def averaged_lion(lr, **settings):
    return zero.with_ema(zero.lion(lr, **settings), 0.5)


@pytest.mark.parametrize("optimizer", [zero.lion, averaged_lion])
def test_lion_has_the_arithmetic_of_its_operators(optimizer):
    setting = Setting(stage=1, optimizer=optimizer, precision="bf16", clip=0.5, accumulate=2)
    with simulated_gpu(fused=True):
        fused = run_ranks(2, train_small, setting, 2)
    with simulated_gpu():
        assert run_ranks(2, train_small, setting, 2) == fused


def signum(lr, *, weight_decay=0.0, clip=None):
    """Make an optimizer of the user's own, with a function for the kernel."""
    fused = Fused(tile, lambda now: (now.lr, *now.betas))
    betas = {"momentum": 0.9}
    return make_transform("signum", ("mu",), update, (), lr, betas, 0.0, clip, decay_matrices, (), fused=fused)


def update(batch):
    batch.divide_grads()
    for param, grad, mean in zip(batch.params, batch.grads, *batch.moments, strict=True):
        mean.mul_(batch.settings.betas[0]).add_(grad)
        param.sub_(mean.sign().mul_(batch.settings.lr))


def tile(param, gradient, numbers, mean):
    mean = mean * tl.load(numbers + 1) + gradient
    return param - ((mean > 0).to(tl.float32) - (mean < 0).to(tl.float32)) * tl.load(numbers), mean


def test_the_kernel_compiles_the_function_of_an_optimizer_from_outside():
    setting = Setting(stage=1, optimizer=signum, precision="bf16", clip=0.5)
    with simulated_gpu(fused=True):
        fused = run_ranks(2, train_small, setting, 2)
        assert count_launches(lambda: train_small(zero.open_world(), setting, 2))["zero::update"]
    with simulated_gpu():
        assert run_ranks(2, train_small, setting, 2) == fused


def resting(lr, **settings):
    """AdamW whose biases rest in each second step."""
    return zero.adamw(lr, groups=[zero.Group("*.bias", trains=lambda step: step % 2 == 1)], **settings)


def trained_with_skips(world: zero.World, setting: Setting, *, reads: bool):
    """The metrics of some steps, in three of which a gradient is not finite, and the state after them."""
    state, step = setting.start(world, Layers, loss_fn)
    metrics_of_steps = []
    for number, poisoned in enumerate((None, NAMES[0], None, None, NAMES[-1], NAMES[3], None)):
        state, metrics = step(state, batch_for(world, number, setting.accumulate, poisoned))
        metrics_of_steps.append(metrics)
        assert not reads or metrics.skipped == bool(poisoned)
    rested = state.step and state.runtime.updater.numbers.counts.rested
    return repr([*metrics_of_steps]), digest(state), state.tried, state.step, state.scale, rested


@pytest.mark.slow(keep=5)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("precision", "preset", "compute", "optimizer"),
    [
        ("fp16", "none", "device", zero.adamw),
        ("fp16", "nvme", 0.5, resting),
        ("bf16", "cpu", "device", resting),
        ("fp32", "cpu", "host", averaged_lion),
        ("bf16", "infinity", "device", adamw_in_8bit),
    ],
)
def test_what_the_device_decides_is_what_the_host_would(precision, preset, compute, optimizer, ranks, monkeypatch):
    setting = Setting(
        stage=3,
        precision=precision,
        clip=0.5,
        optimizer=optimizer,
        accumulate=2,
        page_bytes=4 * KiB,
        offload=(("preset", preset), ("compute", compute)),
    )
    with simulated_gpu(fused=True):
        by_device = [run_ranks(ranks, partial(trained_with_skips, reads=reads), setting) for reads in (False, True)]
        monkeypatch.setattr(Runtime, "decides_on_device", False)
        assert by_device == [run_ranks(ranks, partial(trained_with_skips, reads=True), setting)] * 2


@pytest.mark.parametrize(("ranks", "order", "preset"), [(2, "late", "none"), (1, "random", "infinity")])
def test_no_stream_races(ranks, order, preset):
    setting = Setting(optimizer=adamw_in_8bit, precision="bf16", page_bytes=4 * KiB, offload=on_gpu(preset))
    with simulated_gpu(fused=True):
        expected = run_ranks(ranks, train_small, setting, 2)
    with simulated_gpu(fused=True, races=True, order=order, seed=1):
        assert run_ranks(ranks, train_small, setting, 2) == expected


def test_a_unit_is_updated_by_one_launch():
    """Pages on the device that follow each other are one piece, so launches do not grow with elements."""

    def launches(world: zero.World, page_bytes: int) -> int:
        setting = Setting(optimizer=adamw_in_8bit, precision="bf16", page_bytes=page_bytes)
        state, step = setting.start(world, wide)
        state, _ = step(state, [small_batch(0, 6)])
        return count_launches(lambda: step(state, [small_batch(1, 6)]))["zero::update"]

    with simulated_gpu(fused=True):
        world = zero.open_world()
        assert launches(world, 4 * KiB) == launches(world, 1024 * KiB) == 5, "the units of the model"
