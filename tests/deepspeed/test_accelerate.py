"""What Accelerate asks of DeepSpeed's engine, optimizer and scheduler, through its own wrappers around ours.

Its loop calls backward for every microbatch and says before each whether that one ends a step; `engine.step()` is
called after the last alone. Source: accelerate/utils/deepspeed.py, and what accelerate/accelerator.py calls.
"""

from pathlib import Path

import pytest
import torch

import zero
from tests.deepspeed.test_engine import ROWS, TORCH, WIDTH, alike, config, net, reference, rows
from zero.deepspeed.engine import MANY_FORWARDS
from zero.testing import run_ranks

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.deepspeed import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"}}


@pytest.fixture
def _accelerate():
    """Its wrappers ask what is shared by a process."""
    accelerator = Accelerator(cpu=True)
    yield
    accelerator.free_memory()
    accelerator.state._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
def test_its_loop_accumulates_as_one_batch_and_the_loss_is_that_of_the_gradient(stage: int, ranks: int):
    """No step is called between the microbatches, and each loss is divided as its gradient is."""
    count = 4

    def run(world):
        with world.exclusive():
            model = net()
        settings = config(stage=stage, gradient_accumulation_steps=count)
        engine, *_ = zero.initialize(model=model, config=settings, world=world)
        wrapped, losses, ends = DeepSpeedEngineWrapper(engine), [], []
        for step in range(3):
            for number, part in enumerate(rows(step, world).chunk(count)):
                wrapped.backward(engine(part), sync_gradients=number == count - 1)
                ends.append(engine.is_gradient_accumulation_boundary())
            losses.append(engine.metrics.loss)
        told = (losses, zero.full_state_dict(engine)), wrapped.get_global_grad_norm()
        engine.destroy()
        assert ends == [False, False, False, True] * 3
        assert engine.global_steps == 3
        return told

    for told, norm in run_ranks(ranks, run):
        alike(told, reference(3))
        assert isinstance(norm, float)
        assert norm > 0


def test_whoever_says_when_a_step_ends_is_not_reminded_to_step(caplog):
    world = zero.World.from_env()
    engine, *_ = zero.initialize(model=net(), config=config(), world=world)
    wrapped, part = DeepSpeedEngineWrapper(engine), rows(0, world)[:1]
    for _ in range(2 * MANY_FORWARDS):
        wrapped.backward(engine(part), sync_gradients=False)
    wrapped.backward(engine(part), sync_gradients=True, retain_graph=False)
    assert not [line for line in caplog.messages if "engine.step()" in line]
    engine.destroy()


@pytest.mark.usefixtures("_accelerate")
def test_its_optimizer_knows_a_skipped_step_and_shows_ours():
    world = zero.World.from_env()
    settings = config(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    engine, optimizer, *_ = zero.initialize(model=net(), config=settings, world=world)
    wrapped, backward = DeepSpeedOptimizerWrapper(optimizer), DeepSpeedEngineWrapper(engine).backward
    assert wrapped.step_was_skipped is False
    backward(engine(rows(0, world)) * float("inf"))
    assert wrapped.step_was_skipped is True
    backward(engine(rows(0, world)))
    assert wrapped.step_was_skipped is False
    wrapped.step()
    wrapped.zero_grad()
    wrapped.train()
    wrapped.eval()
    assert engine.global_steps == 2
    assert wrapped.param_groups is optimizer.param_groups
    assert wrapped.defaults is optimizer.defaults
    wrapped.param_groups[0]["lr"] = 0.5
    assert engine.get_lr() == [0.5]
    engine.destroy()


@pytest.mark.usefixtures("_accelerate")
@pytest.mark.parametrize("whose", ["the config's", "torch's"])
def test_its_scheduler_shows_what_the_engine_steps(whose: str):
    world, model = zero.World.from_env(), net()
    how = {"config": config(scheduler=WARMUP)}
    if whose == "torch's":
        how = {"config": config(), "lr_scheduler": lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)}
    engine, optimizer, _, scheduler = zero.initialize(model=model, world=world, **how)
    wrapped = DeepSpeedSchedulerWrapper(scheduler, DeepSpeedOptimizerWrapper(optimizer))
    seen = []
    for step in range(2):
        DeepSpeedEngineWrapper(engine).backward(engine(rows(step, world)))
        wrapped.step()
        seen += wrapped.get_last_lr()
        assert wrapped.get_last_lr() == engine.get_lr()
        assert whose == "torch's" or wrapped.get_lr() == engine.get_lr()  # torch's own would rather not be asked
    assert seen[0] != seen[1]
    saved = wrapped.state_dict()
    DeepSpeedEngineWrapper(engine).backward(engine(rows(2, world)))
    wrapped.load_state_dict(saved)
    assert wrapped.state_dict() == saved
    engine.destroy()


@pytest.mark.usefixtures("_accelerate")
def test_a_scheduler_that_accelerate_steps_writes_the_rate_that_ours_reads():
    """The script's own, on the optimizer that it passed: the engine was told of none, and steps none."""
    world, model = zero.World.from_env(), net()
    given = TORCH["AdamW"](model)
    schedule = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
    engine, optimizer, *_ = zero.initialize(model=model, optimizer=given, config=config(), world=world)
    wrapped = AcceleratedScheduler(schedule, DeepSpeedOptimizerWrapper(optimizer))
    for step in range(3):
        DeepSpeedEngineWrapper(engine).backward(engine(rows(step, world)))
        wrapped.step()
    told = [engine.metrics.loss], zero.full_state_dict(engine)
    losses, values = reference(
        3, TORCH["AdamW"], scheduler=lambda made: torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)
    )
    alike(told, (losses[-1:], values))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_whole_model_is_on_rank_0_for_its_state_dict(stage: int):
    """In the dtype of compute, on the CPU; what is frozen can be left out."""

    def run(world):
        with world.exclusive():
            model = net()
        model.last.requires_grad_(False)
        settings = config(stage=stage, bf16={"enabled": True})
        engine, *_ = zero.initialize(model=model, config=settings, world=world)
        assert engine.zero_gather_16bit_weights_on_model_save() is True
        found = engine._zero3_consolidated_16bit_state_dict(), engine._consolidated_16bit_state_dict(True)
        engine.destroy()
        return found

    (whole, trained), others = run_ranks(2, run)
    assert others == (None, None)
    wanted = {name: value.bfloat16() for name, value in net().state_dict().items()}
    torch.testing.assert_close(whole, wanted, rtol=0, atol=0)
    assert trained.keys() == {name for name in wanted if not name.startswith("last.")}


def test_its_names_of_checkpoints_are_tags(tmp_path: Path):
    world = zero.World.from_env()
    engine, *_ = zero.initialize(model=net(), config=config(), world=world)
    engine.backward(engine(rows(0, world)))
    engine.step()
    engine.save_checkpoint(str(tmp_path), "pytorch_model")
    path, told = engine.load_checkpoint(str(tmp_path), "pytorch_model")
    assert path is not None
    assert told == {}
    engine.destroy()


# The clock of DeepSpeed's engine


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, monkeypatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr("zero.deepspeed.metrics.time.perf_counter", lambda: self.now_s)

    def passes(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_clock_counts_rows_from_a_steps_first_forward_to_its_end(monkeypatch):
    """Not the first two steps, as there, nor what lies between steps or is not training."""
    clock, world = Clock(monkeypatch), zero.World.from_env()
    engine, *_ = zero.initialize(model=net(), config=config(gradient_accumulation_steps=2), world=world)
    timer, told = engine.tput_timer, []
    for step in range(5):
        for part in rows(step, world).chunk(2):
            loss = engine(part)
            clock.passes(1.0 if step >= 2 else 50.0)
            engine.backward(loss)
            engine.step()
        clock.passes(7.0)
        with torch.no_grad():
            engine(torch.randn(2, WIDTH))
        told.append(timer.avg_samples_per_sec())
    assert told == [float("-inf")] * 2 + [ROWS / 2.0] * 3
    assert (timer.global_step_count, timer.total_elapsed_time) == (5, 6.0)
    timer.update_epoch_count()
    assert timer.epoch_count == 1
    engine.destroy()
