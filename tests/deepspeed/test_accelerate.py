"""Accelerate's calls of DeepSpeed's engine, optimizer and scheduler, through its own wrappers around ours.

Its loop calls backward for every microbatch and says before each whether that one ends a step; `engine.step()` is
called after the last alone. Source: accelerate/utils/deepspeed.py, and what accelerate/accelerator.py calls.
"""

from functools import partial
from pathlib import Path

import pytest
import torch

import zero
from tests.deepspeed.harness import ROWS, alike, engine_of, half_frozen, net, plain, rows
from tests.deepspeed.test_engine import TORCH, halving
from zero.errors import ConfigError
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


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2), (2, 1), (3, 2)])
def test_its_loop_accumulates_as_one_batch_and_the_loss_is_that_of_the_gradient(stage: int, ranks: int, tmp_path: Path):
    """No step is called between the microbatches, and each loss is divided as its gradient is."""
    count = 4

    def run(world):
        losses, ends = [], []
        with engine_of(world=world, stage=stage, gradient_accumulation_steps=count) as engine:
            wrapped = DeepSpeedEngineWrapper(engine)
            for step in range(3):
                for number, part in enumerate(rows(step, world).chunk(count)):
                    wrapped.backward(engine(part), sync_gradients=number == count - 1)
                    ends.append(engine.is_gradient_accumulation_boundary())
                losses.append(engine.metrics.loss)
            assert ends == [False, False, False, True] * 3
            assert engine.global_steps == 3
            engine.save_checkpoint(str(tmp_path), "pytorch_model")
            assert engine.load_checkpoint(str(tmp_path), "pytorch_model")[1] == {}
            return (losses, zero.full_state_dict(engine)), wrapped.get_global_grad_norm()

    for told, norm in run_ranks(ranks, run):
        alike(told, plain(0, 1, 2))
        assert isinstance(norm, float)
        assert norm > 0


@pytest.mark.usefixtures("_accelerate")
def test_its_optimizer_knows_a_skipped_step_and_shows_ours():
    with engine_of(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}) as engine:
        wrapped, backward = DeepSpeedOptimizerWrapper(engine.optimizer), DeepSpeedEngineWrapper(engine).backward
        assert wrapped.step_was_skipped is False
        for factor, skipped in ((float("inf"), True), (1.0, False)):
            backward(engine(rows(0)) * factor)
            assert wrapped.step_was_skipped is skipped
        wrapped.step()
        wrapped.zero_grad()
        wrapped.train()
        wrapped.eval()
        assert engine.global_steps == 2
        assert wrapped.param_groups is engine.optimizer.param_groups
        assert wrapped.defaults is engine.optimizer.defaults
        wrapped.param_groups[0]["lr"] = 0.5
        assert engine.get_lr() == [0.5]


@pytest.mark.usefixtures("_accelerate")
def test_an_engine_that_is_prepared_is_refused_as_an_engine():
    with engine_of() as engine:
        with pytest.raises(ConfigError, match=r"accelerator\.prepare\.$"):
            Accelerator(cpu=True).prepare(engine, engine.optimizer)
        with pytest.raises(ConfigError, match=r"model= is an engine already"):  # Accelerate's DeepSpeed plugin
            zero.initialize(model=engine, config={"train_batch_size": 1})


@pytest.mark.usefixtures("_accelerate")
@pytest.mark.parametrize(
    "how", [{"scheduler": WARMUP}, {"arguments": {"lr_scheduler": halving}}], ids=["ours", "torch's"]
)
def test_its_scheduler_shows_what_the_engine_steps(how):
    with engine_of(**how) as engine:
        wrapped = DeepSpeedSchedulerWrapper(engine.lr_scheduler, DeepSpeedOptimizerWrapper(engine.optimizer))
        seen = []
        for step in range(2):
            DeepSpeedEngineWrapper(engine).backward(engine(rows(step)))
            wrapped.step()
            seen += wrapped.get_last_lr()
            assert wrapped.get_last_lr() == engine.get_lr()
            assert "arguments" in how or wrapped.get_lr() == engine.get_lr()  # torch's own would rather not be asked
        assert seen[0] != seen[1]
        saved = wrapped.state_dict()
        DeepSpeedEngineWrapper(engine).backward(engine(rows(2)))
        wrapped.load_state_dict(saved)
        assert wrapped.state_dict() == saved


@pytest.mark.usefixtures("_accelerate")
def test_a_scheduler_that_accelerate_steps_writes_the_rate_that_ours_reads():
    """The script's own, on the optimizer that it passed: the engine was told of none, and steps none."""
    model = net()
    passed = TORCH["AdamW"](model)
    schedule = halving(passed)
    with engine_of(model, arguments={"optimizer": passed}) as engine:
        wrapped = AcceleratedScheduler(schedule, DeepSpeedOptimizerWrapper(engine.optimizer))
        losses = []
        for step in range(3):
            DeepSpeedEngineWrapper(engine).backward(engine(rows(step)))
            wrapped.step()
            losses.append(engine.metrics.loss)
        alike((losses, zero.full_state_dict(engine)), plain(0, 1, 2, make=TORCH["AdamW"], scheduler=halving))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_whole_model_is_on_rank_0_for_its_state_dict(stage: int):
    """In the dtype of compute, on the CPU; what is frozen can be left out."""

    def run(world):
        with engine_of(partial(half_frozen, "last"), world, stage=stage, bf16={"enabled": True}) as engine:
            assert engine.zero_gather_16bit_weights_on_model_save() is True
            return engine._zero3_consolidated_16bit_state_dict(), engine._consolidated_16bit_state_dict(True)

    (whole, trained), others = run_ranks(2, run)
    assert others == (None, None)
    wanted = {name: value.bfloat16() for name, value in net().state_dict().items()}
    torch.testing.assert_close(whole, wanted, rtol=0, atol=0)
    assert trained.keys() == {name for name in wanted if not name.startswith("last.")}


def test_a_clock_counts_rows_from_a_steps_first_forward_to_its_end(monkeypatch):
    """DeepSpeed's: without the first two steps, and what lies between steps or is not training."""
    now_s = [100.0]
    monkeypatch.setattr("zero.user_loop.run_log.time.perf_counter", lambda: now_s[0])
    with engine_of(gradient_accumulation_steps=2) as engine:
        timer, told = engine.tput_timer, []
        for step in range(5):
            for part in rows(step).chunk(2):
                loss = engine(part)
                now_s[0] += 1.0 if step >= 2 else 50.0
                engine.backward(loss)
                engine.step()
            now_s[0] += 7.0
            with torch.no_grad():
                engine(rows(0))
            told.append(timer.avg_samples_per_sec())
        assert told == [float("-inf")] * 2 + [ROWS / 2.0] * 3
        assert (timer.global_step_count, timer.total_elapsed_time) == (5, 6.0)
        timer.update_epoch_count()
        assert timer.epoch_count == 1
