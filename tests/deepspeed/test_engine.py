"""A DeepSpeed user's loop: the same losses and weights as plain torch, whatever the stage and tier."""

import copy
import gc
import json
import math
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import nn

import zero
from tests.common.held import open_files
from tests.common.small import Setting
from tests.conftest import LONG_S
from tests.deepspeed.harness import (
    ROWS,
    SGD,
    WIDTH,
    adamw,
    alike,
    close,
    config,
    engine_of,
    half_frozen,
    net,
    plain,
    rows,
    same,
    sgd,
    train,
    trained,
)
from tests.engine.test_coded import CODED, build
from zero import deepspeed
from zero.deepspeed.utils import zero_to_fp32
from zero.distributed.world import World
from zero.errors import CheckpointError, ConfigError, MachineError, OutsideUnitError
from zero.testing import run_ranks
from zero.tracker import RUNNING
from zero.tracker.report import run as report
from zero.user_loop.full_models import load_model
from zero.user_loop.optimizers import Optimizer

ROOT = Path(__file__).resolve().parents[2]
STAGES = pytest.mark.parametrize("stage", range(4))


# The loop


@STAGES
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_is_plain_torch(stage: int, ranks: int, tmp_path: Path):
    zero_optimization = {"stage": stage}
    if stage in (1, 3):
        zero_optimization["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp_path)}
    for result in run_ranks(ranks, lambda world: trained(world, zero_optimization=zero_optimization)):
        alike(result, plain(0, 1, 2))


def two_forwards(engine, part):
    first, second = engine(part), engine(part.flip(0))
    engine.backward(first)
    engine.backward(second * 0.5)


def one_after_the_other(engine, part):
    engine.backward(engine(part))
    engine.backward(engine(part.flip(0)) * 0.5)


def by_hand(engine, part):
    loss = engine(part)
    engine.scale(loss + engine(part.flip(0)) * 0.5).backward()


def divided_already(engine, part):
    """`backward(loss, retain_graph, scale_wrt_gas)` by position, as in DeepSpeed 0.19.8."""
    loss = (engine(part) + engine(part.flip(0)) * 0.5) / 2 / engine.gradient_accumulation_steps()
    engine.backward(loss, True, False)
    engine.backward(loss, False, False)


@pytest.mark.parametrize("accumulate", [1, 2])
@STAGES
@pytest.mark.parametrize("loop", [two_forwards, one_after_the_other, by_hand, divided_already])
def test_several_losses_and_backwards_add_up(loop, stage: int, accumulate: int):
    _, values = plain(0, 1, loss=lambda model, batch: model(batch) + model(batch.flip(0)) * 0.5)
    ranks = 1 + (stage + accumulate) % 2
    for _, state_dict in run_ranks(
        ranks, lambda world: trained(world, 2, stage=stage, accumulate=accumulate, loop=loop)
    ):
        close(state_dict, values, 2e-5)


@pytest.mark.filterwarnings("ignore:the model keeps no values. an exception ended the run")
def test_a_backward_without_the_scale_is_refused_in_fp16_and_with_it_trains():
    world, fp16 = zero.open_world(), {"enabled": True, "initial_scale_power": 4}

    def half(engine, part):
        engine.scale(engine(part)).backward()
        engine(part).backward()

    for loop in (
        lambda engine, part: engine(part).backward(),
        half,
        lambda engine, part: half(engine, part) or engine.backward(engine(part)),
    ):
        with pytest.raises(ConfigError, match="backward in fp16 without the loss scale"):
            trained(world, loop=loop, fp16=fp16)
    losses, _ = trained(world, fp16=fp16, loop=lambda engine, part: engine.scale(engine(part)).backward())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(plain(0, 1, 2)[0]), rtol=2e-2, atol=2e-2)


def stumbling(engine, part):
    """After an exception the engine goes on as if nothing had happened."""
    with pytest.raises(RuntimeError):
        engine(part[:, :3])
    loss = engine(part)
    with pytest.raises(RuntimeError, match="grad"):
        engine.backward(loss.detach())
    engine.backward(engine(part))


def looking(engine, part):
    """An evaluation between steps, or in the middle of one, changes nothing."""
    engine.eval()
    with torch.no_grad():
        before = engine(part)
    engine.train()
    loss = engine(part)
    with torch.no_grad():
        assert torch.equal(engine(part), before)
    assert torch.equal(loss.detach(), before)
    engine.backward(loss)


def stray(engine, part):
    """A backward outside of a step counts in none, nor does a gradient that was dropped."""
    engine.eval()
    (engine(part) * 1e3).backward()
    engine.train()
    engine.backward(engine(part) * 1e3)
    engine.zero_grad()
    engine.backward(engine(part))


def dropping(engine, part):
    """zero_grad drops gradients that have arrived, and not those under way."""
    engine.backward(engine(part) * 100)
    loss = engine(part)
    engine.optimizer.zero_grad()
    engine.backward(loss)


def habitual(engine, part):
    """A habit of zero_grad drops nothing that was added up."""
    engine.optimizer.zero_grad()
    loss = engine(part)
    engine.optimizer.zero_grad()
    engine.backward(loss)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("loop", [stumbling, looking, stray, dropping, habitual])
def test_other_calls_in_a_loop_change_no_weight(loop, stage: int, caplog):
    accumulate = 4 if loop is habitual else 1
    for ranks in (1, 2) if loop is not stumbling else (1,):
        for _, state_dict in run_ranks(
            ranks, lambda world: trained(world, stage=stage, loop=loop, accumulate=accumulate)
        ):
            close(state_dict, plain(0, 1, 2)[1], 2e-5)
    warned = sum("optimizer.zero_grad() does nothing" in message for message in caplog.messages)
    assert (warned > 0) == (loop is habitual)


@pytest.mark.parametrize("mistake", ["a bad batch", "an update too early"])
def test_what_was_accumulated_before_an_exception_is_forgotten_and_counting_begins_anew(mistake: str):
    with engine_of(gradient_accumulation_steps=2) as engine:
        part = rows(0)
        engine.backward(engine(part) * 100)
        engine.step()
        with pytest.raises(RuntimeError if mistake == "a bad batch" else ConfigError):
            _ = engine(part[:, :3]) if mistake == "a bad batch" else engine.optimizer.step()
        losses = train(engine, 0, accumulate=2)
        assert engine.global_steps == 1
        alike((losses, zero.full_state_dict(engine)), plain(0))


@pytest.mark.parametrize("stage", [0, 3])
def test_optimizer_step_in_place_of_engine_step_leaves_schedule_and_counts_to_the_script(stage: int):
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    with engine_of(prepare=lambda model: {"optimizer": adamw(model), "lr_scheduler": schedule}, stage=stage) as engine:
        for step in range(3):
            engine.backward(engine(rows(step)))
            engine.optimizer.step()
            engine.lr_scheduler.step()
        assert engine.micro_steps == 0
        close(zero.full_state_dict(engine), plain(0, 1, 2, scheduler=schedule)[1])


def test_a_wider_input_of_an_fp32_model_raises_as_in_torch():
    wide = rows(0).double()
    with pytest.raises(RuntimeError) as raised:
        net()(wide)
    with engine_of() as engine, pytest.raises(RuntimeError, match=f"^{re.escape(str(raised.value))}"):
        engine(wide)
    with engine_of(bf16={"enabled": True}) as engine:
        assert torch.equal(engine(wide), engine(wide.bfloat16()))


def test_no_sync_adds_up():
    with engine_of() as engine:
        with engine.no_sync():
            engine.backward(engine(rows(0)) / 2)
            with pytest.raises(ConfigError, match=r"engine.step\(\) inside engine.no_sync"):
                engine.step()
        engine.backward(engine(rows(0)) / 2)
        engine.step()
        close(zero.full_state_dict(engine), plain(0)[1])


def test_a_step_without_a_backward_is_refused_unless_the_gradient_was_dropped_on_purpose():
    """On any rank: one that skips its own bad batch has a zero gradient, and the others go on."""

    def run(world):
        with engine_of(world=world) as engine:
            engine(rows(0, world))
            with pytest.raises(ConfigError, match="no rank has a new gradient since the last update"):
                engine.step()
            loss = engine(rows(0, world))
            if world.rank == 0:
                engine.backward(loss)
            else:
                (loss * 0).backward()
            engine.step()
            engine.backward(engine(rows(1, world)))
            engine.zero_grad()
            engine.step()
            return engine.global_steps, engine.get_global_grad_norm()

    assert run_ranks(2, run) == [(2, 0.0)] * 2


# What an engine reports


def test_what_the_engine_tells():
    data = {"training_data": torch.randn(10, WIDTH), "collate_fn": torch.stack}
    with engine_of(gradient_accumulation_steps=4, gradient_clipping=0.5, arguments=data) as engine:
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 2)
        assert engine.gradient_accumulation_steps() == 4
        assert (engine.global_rank, engine.local_rank, engine.world_size, engine.device.type) == (0, 0, 1, "cpu")
        assert engine.lr_scheduler is engine.get_global_grad_norm() is engine.empty_partition_cache() is None
        assert len(engine.training_dataloader) == 5
        boundaries, applied = [], []
        for _ in range(2):
            for batch in engine.training_dataloader:
                boundaries.append(engine.is_gradient_accumulation_boundary())
                engine.backward(engine(batch))
                engine.step()
                applied.append(engine.was_step_applied())
        assert boundaries == applied == [False, False, False, True] * 2 + [False, False]
        assert (engine.micro_steps, engine.global_steps, engine.skipped_steps) == (10, 2, 0)
        assert engine.get_global_grad_norm() > 0
        assert engine.blocks is engine.module.blocks  # what it has not is the model's
        assert engine.get_lr() == [1e-2]
        engine.set_lr(0.5)
        assert engine.get_lr() == [0.5]


@STAGES
def test_an_engine_reports_its_stage_as_deepspeeds_does(stage: int):
    with engine_of(stage=stage, gradient_clipping=0.5, bf16={"enabled": True}) as engine:
        assert engine.zero_optimization_stage() == stage
        assert engine.zero_optimization() == (stage > 0)
        assert engine.zero_optimization_partition_gradients() == (stage > 1)
        assert engine.zero_optimization_partition_weights() == (stage > 2)
        assert (engine.gradient_clipping(), engine.bfloat16_enabled(), engine.fp16_enabled()) == (0.5, True, False)


def test_the_users_model_says_which_modules_train():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    with engine_of(model) as engine, torch.no_grad():
        part, dropout = rows(0), model[1]
        assert not torch.equal(engine(part), engine(part))
        model.eval()
        assert torch.equal(engine(part), engine(part))
        dropout.train()
        assert not torch.equal(engine(part), engine(part))
        engine.eval()
        assert torch.equal(engine(part), engine(part))
        assert not dropout.training


def test_an_engine_is_a_module_around_its_model():
    model, called = net(), []
    with engine_of(model) as engine:
        assert isinstance(engine, nn.Module)
        assert isinstance(engine, deepspeed.DeepSpeedEngine)
        assert list(engine.children()) == [engine.module] == [model]
        names = [f"module.{name}" for name, _ in model.named_parameters()]
        assert [name for name, _ in engine.named_parameters()] == names
        assert all(a is b for a, b in zip(engine.parameters(), model.parameters(), strict=True))
        assert engine.eval() is engine
        assert not any(module.training for module in engine.modules())
        assert all(module.training for module in engine.train().modules())
        engine.register_forward_hook(lambda *_: called.append("forward"))
        train(engine, 0)
        assert called == ["forward"]
        assert engine.to("cpu") is engine.float() is engine
        with pytest.raises(ConfigError, match="this model trains in"):
            engine.half()
        with pytest.raises(AttributeError, match="'Net' object has no attribute 'train_batch'"):
            _ = engine.train_batch
        for value in (nn.Linear(2, 2), nn.Parameter(torch.ones(2)), model.first, model.first.weight):
            with pytest.raises(ConfigError, match=r"^engine\.extra: a \w+ on the engine is not .* zero\.initialize"):
                engine.extra = value
        engine.extra = torch.ones(2)
        values = engine.module_state_dict()
        same(engine.state_dict(), values)
        within = nn.ModuleDict({"generator": engine}).state_dict()
        same(within, {f"generator.{name}": value for name, value in values.items()})
        engine.requires_grad_(False)
        assert not any(parameter.requires_grad for parameter in model.parameters())


def test_an_optimizer_tells_the_loss_scale_and_whether_it_overflowed():
    with engine_of(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}) as engine:
        optimizer = engine.optimizer
        assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.overflow) == (16.0, 16.0, False)
        engine.backward(engine(rows(0)) * float("inf"))
        engine.step()
        assert (optimizer.loss_scale, optimizer.overflow, engine.was_step_applied()) == (8.0, True, False)
    with pytest.raises(ConfigError, match="belongs to no engine"):
        _ = Optimizer.of(TORCH["AdamW"](net())).loss_scale


# Optimizers and schedulers


def grouped(model):
    """Biases apart, with other numbers."""
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    return [{"params": others}, {"params": biases, "lr": 3e-3, "weight_decay": 0.0}]


TORCH = {
    "AdamW": lambda m: torch.optim.AdamW(grouped(m), lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9)),
    "Adam": lambda m: torch.optim.Adam(grouped(m), lr=1e-2, weight_decay=0.1),
    "SGD": lambda m: torch.optim.SGD(grouped(m), lr=1e-2, weight_decay=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda m: torch.optim.Adagrad(grouped(m), lr=1e-2, weight_decay=0.1, lr_decay=0.1),
}


@pytest.mark.parametrize("name", TORCH)
def test_a_torch_optimizer_is_translated_with_its_groups_and_wins_over_the_configs(name: str):
    for result in run_ranks(2, lambda world: trained(world, 4, prepare=lambda m: {"optimizer": TORCH[name](m)})):
        alike(result, plain(0, 1, 2, 3, make=TORCH[name]))


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


@pytest.mark.parametrize("where", ["on the given", "from the returned"])
def test_a_torch_scheduler_writes_the_learning_rate(where: str):
    def prepare(model):
        optimizer = TORCH["AdamW"](model)
        return {"optimizer": optimizer, "lr_scheduler": halving(optimizer) if "given" in where else halving}

    result = trained(zero.open_world(), 4, prepare=prepare)
    alike(result, plain(0, 1, 2, 3, make=TORCH["AdamW"], scheduler=halving))


def test_a_peak_in_the_json_is_every_groups_and_without_one_each_keeps_its_own():
    def rates(kind="WarmupLR", **params):
        rise = {"warmup_num_steps": 1, "warmup_type": "linear"} if kind == "WarmupLR" else {}
        scheduler = {"type": kind, "params": {**rise, **params}}
        with engine_of(prepare=lambda m: {"optimizer": TORCH["AdamW"](m)}, scheduler=scheduler) as engine:
            train(engine, 0, 1, 2)
            return engine.get_lr()

    assert rates(warmup_max_lr=0.02) == [0.02, 0.02]
    assert rates() == [1e-2, 3e-3]
    assert rates("LRRangeTest", lr_range_test_min_lr="auto", lr_range_test_step_rate=0) == [1e-2, 3e-3]
    first, second = rates("OneCycle", cycle_min_lr=0, cycle_max_lr="auto", cycle_first_step_size=10)
    assert first == pytest.approx(second / 3e-3 * 1e-2) != 0


def test_groups_that_come_too_late_are_refused():
    for whose in ("client_optimizer", "optimizer"):
        with engine_of(prepare=lambda m: {"optimizer": TORCH["AdamW"](m)}) as engine:
            getattr(engine, whose).add_param_group({"params": [nn.Parameter(torch.ones(1))]})
            with pytest.raises(ConfigError, match="has other groups"):
                train(engine, 0)


def test_a_group_freezes_in_the_middle_of_training():
    with engine_of(prepare=lambda m: {"optimizer": TORCH["AdamW"](m)}) as engine:
        train(engine, 0)
        before = zero.full_state_dict(engine)
        for parameter in engine.optimizer.param_groups[1]["params"]:
            parameter.requires_grad_(False)
        train(engine, 1, 2)
        for name, value in zero.full_state_dict(engine).items():
            assert torch.equal(value, before[name]) == name.endswith("bias"), name


class Two(nn.Sequential):
    """(b, WIDTH) to the same: two units."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def square(engine, part):
    engine.backward(engine(part).square().mean())


def mean_square(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize(("stage", "remat"), [(0, True), (1, False), (2, True), (3, False), (3, True)])
def test_a_model_that_is_frozen_in_a_forward_gets_no_gradient_of_it(stage: int, remat: bool):
    """As a discriminator while the generator is trained through it: the flags at the forward decide, as in torch."""

    def losses(generator, discriminator, its, x, real):
        its.requires_grad_(False)
        yield -discriminator(generator(x)).mean()
        its.requires_grad_(True)
        yield (discriminator(generator(x).detach()) - discriminator(real)).square().mean()

    pair = net(0, Two), net(1, Two)
    plain_pair = copy.deepcopy(pair)
    how = {"stage": stage, "optimizer": SGD, "activation_checkpointing": {"partition_activations": remat}}
    with engine_of(pair[0], **how) as generator, engine_of(pair[1], **how) as discriminator:
        engines, optimizers = (generator, discriminator), [sgd(model) for model in plain_pair]
        for number in range(3):
            x, real = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
            for engine, loss in zip(engines, losses(*engines, pair[1], x, real), strict=True):
                engine.backward(loss)
                engine.step()
            for optimizer, loss in zip(optimizers, losses(*plain_pair, plain_pair[1], x, real), strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        for engine, model in zip(engines, plain_pair, strict=True):
            close(zero.full_state_dict(engine), dict(model.named_parameters()), 1e-6)


@pytest.mark.parametrize(("stage", "frozen_in"), [(0, 0), (0, 1), (3, 0), (3, 1)])
def test_a_group_that_is_frozen_in_one_microbatch_has_the_others_gradient(stage: int, frozen_in: int):
    def groups(model):
        return torch.optim.SGD([{"params": [*part.parameters()]} for part in model], lr=0.1)

    model = net(0, Two)
    torch_model = copy.deepcopy(model)
    how = {"stage": stage, "gradient_accumulation_steps": 2, "train_batch_size": 2 * ROWS}
    with engine_of(model, prepare=lambda m: {"optimizer": groups(m)}, **how) as engine:
        for number in range(2):
            for frozen in (model, torch_model):
                frozen[1].requires_grad_(number != frozen_in)
            train(engine, number, loop=square)
            (mean_square(torch_model, rows(number)) / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(torch_model.parameters(), torch.inf)
        groups(torch_model).step()
        close(zero.full_state_dict(engine), dict(torch_model.named_parameters()), 1e-6)
        assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-5)


def test_a_parameter_that_was_frozen_from_the_start_cannot_thaw_and_the_step_goes_on_when_it_rests():
    """A rejected microbatch does not count: the step needs as many microbatches as without it."""
    model = net(0, Two)
    model[0].bias.requires_grad_(False)
    torch_model = copy.deepcopy(model)
    how = {"optimizer": SGD, "gradient_accumulation_steps": 2, "train_batch_size": 2 * ROWS}
    with engine_of(model, prepare=lambda m: {"model_parameters": m.parameters()}, **how) as engine:
        for number in range(2):
            model[0].bias.requires_grad_(True)
            with pytest.raises(ConfigError, match=r"0\.bias was frozen in zero\.initialize"):
                engine(rows(number))
            model[0].bias.requires_grad_(False)
            train(engine, number, loop=square)
            (mean_square(torch_model, rows(number)) / 2).backward()
        assert engine.global_steps == 1
        torch.optim.SGD([p for p in torch_model.parameters() if p.requires_grad], lr=0.1).step()
        close(zero.full_state_dict(engine), dict(torch_model.named_parameters()), 1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_is_frozen_alone_has_a_gradient_of_zero(stage):
    """As in DeepSpeed; in torch it would have none, and rest."""
    model, torch_model = net(0, Two), net(0, Two)
    optimizer = torch.optim.AdamW(torch_model.parameters(), lr=1e-2, weight_decay=0.1)
    with engine_of(model, stage=stage) as engine:
        for number in range(4):
            model[0].bias.requires_grad_(number % 2 == 0)
            train(engine, number, loop=square)
            optimizer.zero_grad()
            mean_square(torch_model, rows(number)).backward()
            if number % 2:
                torch_model[0].bias.grad.zero_()
            optimizer.step()
        close(zero.full_state_dict(engine), dict(torch_model.named_parameters()))


class Product(torch.autograd.Function):
    """x W' of a user's own: it is given the parameter itself, and reads it in its forward and its backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight[:].t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight[:], grad.t() @ x


class Fused(nn.Module):
    """A head that is never called, as with kernels that fuse it with the loss, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        products = (Product.apply(x, weight) for weight in (self.head.weight, self.layers[0].weight))
        return sum(product.square().mean() for product in products)


@STAGES
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_an_autograd_function_is_given_gets_its_gradient(stage: int, ranks: int):
    how = {"model": lambda: net(0, Fused), "stage": stage, "optimizer": SGD, "accumulate": 2}
    for _, state_dict in run_ranks(ranks, lambda world: trained(world, **how)):
        close(state_dict, plain(0, 1, 2, model=net(0, Fused), make=sgd)[1], 1e-6)


def test_a_parameter_on_meta_that_an_autograd_function_is_given_is_one_line():
    """Torch rejects its gradient before anything of the library sees it; a view of it has one."""

    def loss_of(view):
        with zero.empty():
            model = net()
        with engine_of(model, stage=3, optimizer=SGD) as engine:
            weight = engine.module.last.weight
            engine.backward(engine(rows(0)) + Product.apply(rows(0), weight[:] if view else weight).mean())
            engine.step()

    loss_of(view=True)
    with pytest.raises(OutsideUnitError, match=r"^Product\.apply\(weight\): .*Pass weight\[:\]\.\n"):
        loss_of(view=False)


def clip(scaler, engine, optimizer):
    nn.utils.clip_grad_norm_(engine.module.parameters(), 0.05)


def unscale(scaler, engine, optimizer):
    scaler.unscale_(optimizer)


@STAGES
@pytest.mark.parametrize(
    ("left", "said"), [(clip, "Clip with gradient_clipping"), (unscale, "scale with fp16 in the config")]
)
def test_torchs_clipping_and_scaler_act_as_in_torch_or_say_what_to_write_instead(left, said, stage: int):
    """Gradients are whole below stage 2, so both act as in torch there."""

    def training(module, forward, optimizer):
        scaler = torch.amp.GradScaler("cpu", enabled=left is unscale)
        scaler.scale(forward(rows(0))).backward()
        left(scaler, SimpleNamespace(module=module), optimizer)
        scaler.step(optimizer)

    torch_model = net()
    with engine_of(prepare=lambda m: {"optimizer": sgd(m)}, stage=stage, optimizer=None) as engine:
        if stage < 2:
            training(engine.module, engine, engine.optimizer)
            training(torch_model, torch_model, sgd(torch_model))
            close(zero.full_state_dict(engine), dict(torch_model.named_parameters()))
        else:
            with pytest.raises(ConfigError, match=rf"first\.weight\.grad: stage {stage} shards.*{said}"):
                training(engine.module, engine, engine.optimizer)


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_tensors_are_cast_and_numbers_are_not_unless_auto_cast_is_false(dtype: str, casts: bool):
    """As in DeepSpeed 0.19.8. 257 is no bf16: a count of tokens by which a loss is divided; 2049 is neither's."""

    class Counted(nn.Linear):
        def forward(self, x, count, time):
            assert (x.dtype != torch.float32) == (time.dtype != torch.float32) == casts
            return super().forward(x.to(self.weight.dtype)).float().sum(1) * time / count

    precision = {"fp16": {"enabled": dtype == "fp16", "auto_cast": casts}, "bf16": {"enabled": dtype == "bf16"}}
    with engine_of(Counted(WIDTH, 1, bias=False), **precision) as engine:
        x, time = torch.randn(ROWS, WIDTH), torch.full((ROWS,), 2048.0 if casts else 2049.0)
        whole = engine(x, torch.tensor(1.0), torch.ones(ROWS))
        assert torch.equal(engine(x, torch.tensor(257.0), time=time), whole * time / 257)


def test_a_backward_whose_gradient_has_the_scale_already_is_said_to():
    """A head on its own, as where a loss is computed in pieces."""
    model, head = net(0, Two), nn.Linear(WIDTH, 1)
    torch_model = copy.deepcopy(model)
    with engine_of(model, fp16={"enabled": True, "initial_scale_power": 8}, optimizer=SGD) as engine:
        hidden = engine(rows(0))
        cut = hidden.detach().float().requires_grad_()
        engine.scale(head(cut).mean()).backward()
        engine.scale(hidden, already=True).backward(cut.grad.half())
        engine.step()
        head(torch_model(rows(0))).mean().backward()
        sgd(torch_model).step()
        close(zero.full_state_dict(engine), dict(torch_model.named_parameters()), 1e-4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda m: torch.optim.RMSprop(m.parameters()), "RMSprop is not supported"),
        (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "amsgrad=True is not supported"),
        (lambda m: torch.optim.SGD(m.parameters(), momentum=0.9, dampening=0.5), "dampening=0.5"),
        (
            lambda m: torch.optim.AdamW([*m.parameters(), nn.Parameter(torch.ones(7))]),
            r"shape \(7,\), is not in the model",
        ),
        (
            lambda m: torch.optim.AdamW([{"params": [p], "eps": 10.0**-n} for n, p in enumerate(m.parameters(), 3)]),
            "eps=0.0001, group 0 has 0.001",
        ),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(make, says: str):
    with pytest.raises(ConfigError, match=says):
        trained(zero.open_world(), prepare=lambda model: {"optimizer": make(model)})


def test_one_cycle_moves_betas_and_no_other_momentum():
    """DeepSpeed 0.19.8 says "cycle_momentum is disabled" for SGD, whose groups have no betas."""
    scheduler = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}}
    for name, key, expected in (("SGD", "momentum", 0.9), ("AdamW", "betas", (pytest.approx(0.875), 0.99))):
        with engine_of(prepare=lambda m, name=name: {"optimizer": TORCH[name](m)}, scheduler=scheduler) as engine:
            train(engine, 0)
            assert [group[key] for group in engine.optimizer.param_groups] == [expected] * 2


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
def test_no_state_of_the_optimizer_is_stepped_read_made_or_loaded_without_moments(kind: str):
    """A dict without moments would load without an error, and training would go on with zeros."""
    model = net()
    passed = getattr(torch.optim, kind)(model.parameters())
    saved = passed.state_dict()
    with engine_of(model, arguments={"optimizer": passed}) as engine:
        engine.backward(engine(rows(0)))
        with pytest.raises(ConfigError, match=r"Call engine\.step\(\)"):
            passed.step()
        engine.step()
        assert engine.global_steps == 1
        for optimizer in (engine.optimizer, passed):
            for use in (
                optimizer.state_dict,
                lambda optimizer=optimizer: optimizer.load_state_dict(saved),
                lambda optimizer=optimizer: optimizer.load_state_dict({"param_groups": saved["param_groups"]}),
                lambda optimizer=optimizer: optimizer.state[model.first.weight]["exp_avg"],
            ):
                with pytest.raises(ConfigError, match="moments are sharded"):
                    use()
    passed.load_state_dict(saved)


# Checkpoints


@pytest.mark.parametrize("tag", [None, "first"])
def test_a_run_goes_on_from_its_checkpoint_as_if_never_stopped(tag, tmp_path: Path):
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}}

    def run(world, first, last, save=None, load=None):
        with engine_of(lambda: net(seed=7 + world.rank), world, scheduler=scheduler) as engine:
            if load:
                path, client_state = engine.load_checkpoint(load, tag=tag)
                assert path is not None
                assert (client_state, engine.global_steps) == ({"rows": [1, 2]}, first)
            train(engine, *range(first, last))
            if save:
                engine.save_checkpoint(save, tag=tag, client_state={"rows": [1, 2]})
            return zero.engine.whole.read.digest(engine.state), engine.get_lr()

    never_stopped = run_ranks(2, lambda world: run(world, 0, 5))[0]
    run_ranks(2, lambda world: run(world, 0, 3, save=tmp_path))
    assert run_ranks(2, lambda world: run(world, 3, 5, load=tmp_path))[0] == never_stopped


def test_a_folder_that_is_none_cannot_be_made_or_is_empty_is_one_line(tmp_path: Path, caplog):
    (tmp_path / "file").touch()

    def run(world):
        with engine_of(world=world) as engine:
            for folder in ("", None):
                for use in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
                    with pytest.raises(ConfigError, match=f"is {folder!r}\\. Pass a path"):
                        use(folder)
            with pytest.raises(CheckpointError, match="making it"):
                engine.save_checkpoint(tmp_path / "file", tag="best")
            world.barrier("earlier lines are logged")
            caplog.clear()
            assert engine.load_checkpoint(tmp_path / "none") == (None, {})
            assert engine.load_checkpoint(tmp_path, tag="best") == (None, {})

    run_ranks(2, run)
    places = [f"{tmp_path / 'none'} and its tags", str(tmp_path / "best")]
    assert [line.partition(". ")[0] for line in caplog.messages] == [
        f"load_checkpoint: no checkpoint in {place}" for place in places
    ]


SCHEDULERS = {
    "MultiStepLR": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "ReduceLROnPlateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "SequentialLR": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1, 2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_torch_scheduler_goes_on_from_a_checkpoint_whatever_it_remembers(name: str, tmp_path: Path):
    told = {"metrics": 1.0} if name == "ReduceLROnPlateau" else {}

    def prepare(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[name](optimizer)}

    def run(first, last, load=False):
        rates = []
        with engine_of(prepare=prepare) as engine:
            if load:
                engine.load_checkpoint(tmp_path)
            for step in range(first, last):
                engine.backward(engine(rows(step)))
                engine.step(lr_kwargs=told)
                rates += engine.get_lr()
            engine.save_checkpoint(tmp_path)
        return rates

    assert [*run(0, 3), *run(3, 6, load=True)] == run(0, 6)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_checkpoint_from_the_middle_of_an_accumulation_goes_on_in_any_other(accumulate: int, tmp_path: Path):
    for count, load in ((2, False), (accumulate, True)):
        with engine_of(train_batch_size=count * 2, gradient_accumulation_steps=count) as engine:
            if load:
                engine.load_checkpoint(tmp_path)
            for _ in range(3):
                engine.backward(engine(rows(0)))
                engine.step()
            engine.save_checkpoint(tmp_path)
            steps = engine.global_steps
    assert steps == 1 + 3 // accumulate


def test_without_the_file_latest_the_most_steps_of_all_tags_count_and_a_path_is_a_checkpoint(tmp_path: Path):
    with engine_of() as engine:
        saved = []
        for tag in ("b", "a"):
            train(engine, 0)
            saved.append(engine.save_checkpoint(tmp_path, tag, {tag: {7: float("inf")}}, save_latest=False))
        assert engine.load_checkpoint(tmp_path) == (saved[1], {"a": {7: float("inf")}})
        assert engine.load_checkpoint(saved[0]) == (saved[0], {"b": {7: float("inf")}})


def test_the_checkpoint_that_was_saved_last_is_loaded_unless_its_save_says_otherwise(tmp_path: Path, caplog):
    """The file `latest` decides, as in DeepSpeed, although another tag may have more steps."""

    def run(world):
        with engine_of(world=world) as engine:

            def saved(tag, **how):
                train(engine, 0)
                return engine.save_checkpoint(tmp_path, tag, **how)

            first, more = saved(None), [saved("more"), saved("more")]
            assert engine.load_checkpoint(tmp_path)[0] == more[1]
            engine.load_checkpoint(first)
            last = saved("last")
            unnamed = [saved(tag, save_latest=False) for tag in ("other", None, "more")]
            values = {name: value.clone() for name, value in engine.module_state_dict().items()}
            world.barrier("earlier lines are logged")
            caplog.clear()
            assert engine.load_checkpoint(tmp_path)[0] == last
            assert engine.global_steps == 2
            world.barrier("rank 0 has logged")
            assert caplog.messages == [f"load_checkpoint: loaded {last}, of step 2"]
            whole = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
            same(engine.module_state_dict(), whole)
            assert any(not torch.equal(value, whole[name]) for name, value in values.items())
        return last, unnamed[2]

    last, newest = run_ranks(2, run)[0]
    assert (tmp_path / "latest").read_text() == os.path.relpath(last, tmp_path)
    damaged = next(last.glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with engine_of() as engine:
        caplog.clear()
        assert engine.load_checkpoint(tmp_path)[0] == newest
        assert [str(last) in caplog.messages[0], str(newest) in caplog.messages[1]] == [True, True]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_replaces_that_of_its_tag_although_another_run_made_more_steps(ranks: int, tmp_path: Path):
    def run(world, *steps):
        with engine_of(world=world) as engine:
            train(engine, *steps)
            engine.save_checkpoint(tmp_path, "best", {"steps": len(steps)}, save_latest=False)
            loaded_from, state = engine.load_checkpoint(tmp_path, "best")
            assert (engine.global_steps, state) == (len(steps), {"steps": len(steps)})
            return loaded_from

    run_ranks(ranks, run, 0, 1, 2)
    (folder, *_) = run_ranks(ranks, run, 3)
    assert [*(tmp_path / "best").iterdir()] == [folder]
    with engine_of() as engine:
        other = engine.save_checkpoint(tmp_path, "more")
        assert engine.load_checkpoint(tmp_path)[0] == other
        (tmp_path / "latest").unlink()
        with pytest.raises(CheckpointError, match=f"{other} and {folder}: two runs saved them"):
            engine.load_checkpoint(tmp_path)


@pytest.mark.parametrize("managed", [True, False])
def test_global_samples_are_the_rows_of_the_microbatches_that_were_run(managed: bool, tmp_path: Path):
    """A step may have any number of microbatches. Rows of metrics and a checkpoint have the same count."""
    counts = [2, 2, 2] if managed else [1, 3, 4]
    how = {"gradient_accumulation_steps": 2, "managed_gradient_accumulation": managed, "steps_per_print": 1}

    def run(world):
        with engine_of(world=world, arguments={"folder": tmp_path / "run"}, **how) as engine:
            for count in counts:
                engine.backward(engine(rows(0, world)))
                engine.zero_grad()
                if managed:
                    engine.step()
                for _ in range(count - managed):
                    engine.backward(engine(rows(0, world)))
                    if managed:
                        engine.step()
                if not managed:
                    engine.step()
            samples = engine.global_samples
            engine.save_checkpoint(tmp_path)
            engine.load_checkpoint(tmp_path)
            assert engine.global_samples == samples
            return samples

    assert run_ranks(2, run) == [sum(counts) * ROWS // 2] * 2
    expected = [sum(counts[: number + 1]) * ROWS // 2 for number in range(3)]
    assert [row["tokens"] for row in logged(tmp_path / "run")] == expected


def test_without_moments_training_begins_with_step_1_and_steps_are_counted_on(tmp_path: Path, monkeypatch):
    """Adam's corrections for zero moments would be those of a late step otherwise, also in a layer that rested.

    Each page is written once.
    """
    written = Counter()

    def by_layer(model: Any) -> torch.optim.Optimizer:
        layers = [{"params": model.first.parameters()}, {"params": model.last.parameters()}]
        return torch.optim.AdamW(layers, lr=1e-2, weight_decay=0.1)

    with engine_of(prepare=lambda model: {"optimizer": by_layer(model)}, optimizer=None) as engine:
        store = type(engine.state.runtime.store)
        real = store.write
        monkeypatch.setattr(
            store, "write", lambda self, page, values: (written.update([page]), real(self, page, values))[1]
        )
        engine.module.first.requires_grad_(False)
        train(engine, 0, 1, 2)
        engine.module.first.requires_grad_(True)
        train(engine, 3)
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
        values = zero.full_state_dict(engine)
        for how, steps in (({}, 4), ({"load_optimizer_states": False}, 4), ({"load_module_only": True}, 0)):
            written.clear()
            engine.load_checkpoint(tmp_path, **how)
            assert set(written.values()) <= {1}
            assert engine.global_steps == steps
        train(engine, 9)
        model = net()
        model.load_state_dict(values)
        close(zero.full_state_dict(engine), plain(9, model=model, make=by_layer)[1])


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_is_saved_in_sixteen_bits_without_frozen_parameters_where_a_script_says_so(stage: int, tmp_path: Path):
    def run(world):
        with engine_of(partial(half_frozen, "first"), world, stage=stage, bf16={"enabled": True}) as engine:
            with pytest.raises(ConfigError, match="safetensors"):
                engine.save_16bit_model(tmp_path / "made", "pytorch_model.bin")
            whole = engine.save_16bit_model(tmp_path / "made")
            trained_only = engine.save_16bit_model(tmp_path, exclude_frozen_parameters=True)
            values = engine.module_state_dict(exclude_frozen_parameters=True)
            assert engine.state_dict(exclude_frozen_parameters=True).keys() == values.keys()
            return load_file(whole), load_file(trained_only), values, engine.module_state_dict()

    every = dict(net().named_parameters())
    for whole, trained_only, values, in_fp32 in run_ranks(2, run):
        same(whole, {name: value.detach().bfloat16() for name, value in every.items()})
        assert set(trained_only) == set(values) == set(every) - {"first.weight", "first.bias"}
        assert all(torch.equal(values[name], every[name]) for name in values)
        assert in_fp32.keys() == every.keys()


class Tied(nn.Module):
    """A root with a parameter of its own, a tie, and a buffer that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.drop = nn.Dropout(0.5)
        self.register_buffer("table", torch.ones(3, 2).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.last(self.first(x * self.scale))).square().mean()


@STAGES
def test_a_model_that_comes_in_eval_mode_trains_in_it_until_its_first_training_mode(stage: int):
    """As a model of from_pretrained in DeepSpeed. Evaluations without a graph change nothing."""
    model = Tied().eval()
    expected = plain(0, 1, model=copy.deepcopy(model))
    with engine_of(model, stage=stage) as engine:
        with torch.no_grad():
            engine(rows(0))
        losses = train(engine, 0, 1)
        assert not any(module.training for module in model.modules())
        alike((losses, zero.full_state_dict(engine)), expected)
        engine.train()
        assert not torch.equal(engine(rows(0)), engine(rows(0)))
        engine.abandon()
        engine.eval()
        with pytest.raises(ConfigError, match="no forward in training mode since the last step"):
            engine.backward(engine(rows(0)))


def test_a_root_with_parameters_of_its_own_follows_and_is_saved_under_every_name():
    with engine_of(Tied().eval()) as engine:
        engine.train()
        train(engine, 0)
        engine.eval()
        assert torch.equal(engine(rows(0)), engine(rows(0)))
        with pytest.raises(ConfigError, match=r"no forward in training mode since the last one\. Call engine\.train"):
            engine.step()
        Tied().load_state_dict(engine.module_state_dict(), strict=True)


def test_a_model_with_codes_loads_equal_values_and_refuses_others_before_it_writes():
    state, _ = Setting(frozen="nf4").start(World.solo(), build)
    before = zero.full_state_dict(state)
    values = {name: value if name in CODED else value + 1 for name, value in before.items()}
    with pytest.raises(ConfigError, match=f"{CODED[-1]} cannot be edited"):
        load_model(state, {**values, CODED[-1]: torch.zeros(13, 13)}, strict=False)
    same(zero.full_state_dict(state), before)
    load_model(state, values, strict=False)
    same(zero.full_state_dict(state), values)


# What is left behind


def logged(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_the_files_that_a_report_is_made_from(tmp_path: Path):
    """They say the optimizer that was passed, and nothing of our model."""
    how = {"prepare": lambda m: {"optimizer": TORCH["SGD"](m)}, "arguments": {"folder": tmp_path / "run"}}

    def run(world):
        with engine_of(world=world, steps_per_print=2, **how) as engine:
            losses = train(engine, 0, 1, 2, 3)
            engine.save_checkpoint(tmp_path / "kept")
            return losses, engine.get_lr()[0]

    losses, lr = run_ranks(2, run)[0]
    told = logged(tmp_path / "run")
    assert [(row["step"], row["tokens"], row["train/loss"]) for row in told] == [
        (2, 2 * ROWS, losses[1]),
        (4, 4 * ROWS, losses[3]),
    ]
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert settings.keys() == {"mode", "zero", "offload", "batch", "precision", "tracker", "optimizer"}
    assert (settings["optimizer"]["kind"], settings["optimizer"]["groups"]["0"]["lr"]) == ("sgd", lr)
    report.write_run(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<svg" in page
    assert "optimizer.kind" in page
    assert "of 200" not in page, "the default of a loop that is not the user's"
    assert "model." not in page.partition("Settings that differ")[2]


def test_rows_follow_those_of_the_run_that_goes_on_and_never_those_of_another(tmp_path: Path, caplog):
    folder = tmp_path / "run"

    def run(steps: int, load: bool = False, **how):
        with engine_of(steps_per_print=1, arguments={"folder": folder}) as engine:
            if load:
                assert engine.load_checkpoint(tmp_path / "kept", **how)[0]
            train(engine, *range(steps))
            engine.save_checkpoint(tmp_path / "kept")

    def steps_in(place: Path) -> list[int]:
        return [row["step"] for row in logged(place)]

    def said() -> list[str]:
        return [line for line in caplog.messages if "rows of another run" in line]

    run(2)
    summary = folder / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"best_train_loss": 1e-9, "seconds": 1000.0}))
    run(1, load=True)
    assert steps_in(folder) == [1, 2, 3]
    assert not said()
    assert json.loads(summary.read_text())["best_train_loss"] == 1e-9
    assert json.loads(summary.read_text())["seconds"] > 1000
    run(1)
    run(1, load=True, load_module_only=True)  # begins anew
    assert [steps_in(folder / place) for place in ("", "run-2", "run-3")] == [[1, 2, 3], [1], [1]]
    assert [line.rpartition("go to ")[2] for line in said()] == [f"{folder}/run-2.", f"{folder}/run-3."]
    assert all((folder / place / "config.yaml").exists() for place in ("", "run-2", "run-3"))


def test_wandb_knows_a_run_that_goes_on_in_another_folder(tmp_path: Path, monkeypatch):
    opened: list[str] = []
    shown = SimpleNamespace(log=lambda row: None, saved=lambda *_: None, close=lambda *_: None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("zero.tracker.views.wandb.WandbRun", lambda *_, run_id, say: opened.append(run_id) or shown)
    for number, load in enumerate([None, {}, {"load_module_only": True}]):
        with engine_of(wandb={"enabled": True}, arguments={"folder": tmp_path / f"{number}"}) as engine:
            if load is not None:
                engine.load_checkpoint(tmp_path / "kept", **load)
            train(engine, 0)
            if load is None:
                engine.save_checkpoint(tmp_path / "kept")
    first, goes_on, another = opened
    assert first == goes_on != another


def test_an_engine_that_is_dropped_gives_back_its_threads_and_its_files(tmp_path: Path):
    def collect() -> None:
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "closing":
                thread.join()

    model = net()
    passed = TORCH["AdamW"](model)
    collect()  # what other tests have left
    before = set(threading.enumerate())
    disk = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    settings = config(zero_optimization=disk, steps_per_print=1)
    engine, *_ = zero.initialize(
        model=model, optimizer=passed, config=settings, world=zero.open_world(), folder=tmp_path / "run"
    )
    train(engine, 0)
    workers = set(threading.enumerate()) - before
    assert workers
    assert open_files(tmp_path)
    del engine, _
    collect()
    assert not any(thread.is_alive() for thread in workers)
    assert not open_files(tmp_path)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"] == RUNNING
    assert passed.param_groups, "it may outlive the engine"


def test_a_log_that_cannot_be_closed_does_not_cost_the_trained_model(tmp_path: Path):
    engine, *_ = zero.initialize(model=net(), config=config(), world=zero.open_world(), folder=tmp_path / "run")
    model, values = engine.module, engine.module_state_dict()

    def full(status: str | None) -> None:
        raise MachineError("the disk is full")

    engine._run_log.close = full
    with pytest.raises(MachineError, match="the disk is full"):
        engine.destroy()
    same(model.state_dict(), values)


def test_an_engine_is_destroyed_once_and_says_so(tmp_path: Path, caplog):
    with engine_of(arguments={"folder": tmp_path / "run"}) as engine:
        engine.backward(engine(rows(0)))
        engine.destroy()
    assert "gradients that arrived after the last engine.step() are dropped" in caplog.messages[-1]
    for use in (
        lambda: engine(rows(0)),
        engine.module_state_dict,
        lambda: engine.save_checkpoint(tmp_path),
        lambda: engine.state,
        lambda: engine.load_checkpoint(tmp_path),
    ):
        with pytest.raises(ConfigError, match="was destroyed"):
            use()
    assert (engine.global_steps, engine.skipped_steps, engine.loss_scale) == (0, 0, 1.0)


# The default process group


@pytest.mark.parametrize("how", ["init_distributed", "initialize", "Init"])
def test_a_script_of_one_rank_may_ask_torch_for_its_rank(how: str):
    assert not torch.distributed.is_initialized()
    if how == "init_distributed":
        for _ in range(2):
            zero.init_distributed("nccl", dist_init_required=True)
        trained(zero.open_world(), steps=1)
    elif how == "Init":
        with deepspeed.zero.Init():
            assert deepspeed.comm.get_rank() == 0
    else:
        with engine_of(arguments={"world": None}):
            pass
    total = torch.ones(1)
    deepspeed.comm.all_reduce(total)
    assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), float(total)) == (0, 1, 1.0)
    torch.distributed.destroy_process_group()


REFUSED = """
import gc, sys, threading
import torch
import zero

config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "gradient_clipping": 0.0}
wrong = [config | {"train_batch_size": 3}, config | {"nonsense": 1}]
for number in range(4):
    try:
        zero.initialize(model=torch.nn.Linear(2, 2), config=wrong[number % 2])
    except zero.ZeroError as error:
        assert "ds_config" in str(error)
    else:
        raise AssertionError("accepted")
    gc.collect()
    if number == 0 and sys.argv[1] == "0":  # the host of the store is late: the other rank opens its next world first
        input()
assert not torch.distributed.is_initialized()
for _ in range(2):
    engine, *_ = zero.initialize(model=torch.nn.Linear(2, 2), config=config)
    engine.destroy()
for _ in range(2):
    assert torch.distributed.get_world_size() == 2
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    zero.init_distributed()
for thread in set(threading.enumerate()) - {threading.main_thread()}:
    thread.join(30)  # of those that stop when a world is closed
    assert not thread.is_alive(), thread.name
"""


@pytest.mark.process
def test_a_call_that_is_refused_leaves_nothing_open():
    """Two processes, the first of which hosts the store; worlds left open would abort one as it ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", REFUSED, str(rank)],
            env={**shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.communicate("go on\n", timeout=LONG_S)
    assert [rank.returncode for rank in ranks] == [0, 0]


# Mistakes


def auto(kind: str, key: str) -> dict:
    return {"config": config(scheduler={"type": kind, "params": {key: "auto"}})}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": None}, "needs model="),
        ({"config": None}, "takes one config, and got 0"),
        ({"config_params": {}}, "takes one config, and got 2"),
        ({"mpu": object()}, "no model parallelism"),
        ({"config": config(train_batch_size="auto")}, "train_batch_size=auto: write the rows"),
        ({"config": {"train_micro_batch_size_per_gpu": "auto"}}, "train_batch_size=auto: write the rows"),
        ({"config": config(zero_optimization={"stage": "auto"})}, "stage=auto: write a number"),
        (auto("WarmupLR", "warmup_num_steps"), "scheduler.params.warmup_num_steps=auto: write the number"),
        (auto("WarmupCosineLR", "total_num_steps"), "scheduler.params.total_num_steps=auto: write the number"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, says: str):
    with pytest.raises(ConfigError, match=re.escape(says)):
        zero.initialize(**{"model": net(), "config": config(), "world": zero.open_world(), **arguments})


@pytest.mark.parametrize("text", [False, True], ids=["a dict", "JSON"])
def test_steps_per_print_of_infinity_trains_and_prints_no_row(text: bool, capsys):
    settings = config(steps_per_print=math.inf)
    with engine_of(arguments={"config": json.dumps(settings) if text else settings}) as engine:
        train(engine, 0)
        assert (engine.global_steps, capsys.readouterr().out) == (1, "")


def test_a_loop_in_the_wrong_order_is_told():
    with engine_of() as engine:
        for call in (engine.step, lambda: engine.backward(torch.ones((), requires_grad=True))):
            with pytest.raises(ConfigError, match="no forward"):
                call()


# The documents' own scripts: only `deepspeed` is replaced


class Tokens(nn.Module):
    """A model as the scripts leave it to the reader: a batch in, a loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.embed(batch[:, :-1])
        for layer in self.layers:
            x = x + layer(x).relu()
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())


SCRIPTS = {
    "cpu_and_nvme_flags": (
        """
        import torch
        from torch import nn
        from zero import initialize

        class LargeModel(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer1 = nn.Linear(1024, 1024)
                self.layer2 = nn.Linear(1024, 1024)

            def forward(self, x):
                return self.layer2(torch.relu(self.layer1(x)))

        model = LargeModel()
        ds_config = CONFIG
        model_engine, optimizer, _, _ = initialize(model=model, model_parameters=model.parameters(), config=ds_config)
        for _ in range(ds_config["gradient_accumulation_steps"]):
            loss = model_engine(torch.randn(1, 1024)).square().mean()
            model_engine.backward(loss)
            model_engine.step()
        """,
        ("nvme", "nvme"),
    ),
    "stage2_fp16": (
        """
        import zero as deepspeed
        model = MyLargeModel()
        model_engine, optimizer, _, _ = deepspeed.initialize(model=model, config="ds_config.json")
        for batch in dataloader:
            loss = model_engine(batch)
            model_engine.backward(loss)
            model_engine.step()
        """,
        ("none", "none"),
    ),
    "stage2_fp16_cpu": (
        """
        import torch
        import zero.deepspeed as deepspeed
        model = MyTransformerModel()
        optimizer = torch.optim.AdamW(model.parameters())
        model_engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config='ds_config.json')
        for step, batch in enumerate(data_loader):
            batch = to_device(batch, model_engine.local_rank)
            loss = model_engine(batch)
            model_engine.backward(loss)
            model_engine.step()
        """,
        ("none", "cpu"),
    ),
}
"""Each with a file in golden/, and where its parameters and its optimizer's state are."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_the_documents_runs_with_its_own_json(name: str, tmp_path: Path, monkeypatch):
    script, tiers = SCRIPTS[name]
    text = Path(__file__).with_name("golden").joinpath(f"{name}.json").read_text()
    text = text.replace("/tmp/ds_nvme_offload", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(text)
    batches = [torch.randint(0, 16, (2, 9)) for _ in range(8)]
    names = {
        "CONFIG": json.loads(text), "MyLargeModel": Tokens, "MyTransformerModel": Tokens, "dataloader": batches,
        "data_loader": batches, "to_device": lambda batch, rank: batch,
    }  # fmt: skip
    exec(compile(textwrap.dedent(script), name, "exec"), names)
    engine = names["model_engine"]
    assert engine.global_steps == (2 if name == "stage2_fp16" else 1)
    assert engine.plan.facts.stage.level == json.loads(text)["zero_optimization"]["stage"]
    assert (engine.config.offload.param, engine.config.offload.optimizer) == tiers
    if name == "stage2_fp16_cpu":
        assert engine.get_lr() == [1e-3], "torch's own, not the config's"
    engine.destroy()


# Muon

MUON = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1}}


@STAGES
def test_muon_of_a_config_is_that_of_the_library(stage: int, tmp_path: Path):
    """With DeepSpeed's rule: all matrices but embeddings and the language model's head."""
    optimizer = zero.muon(
        0.02, momentum=0.9, adamw_lr=1e-3, weight_decay=0.1, eps=1e-10, exclude=(), decay=lambda name, shape: True
    )

    def own(world):
        with world.exclusive():
            model = net()
        plan = zero.Plan(model, world=world, stage=stage, optimizer=optimizer)
        state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, lambda model, part: model(part))
        losses = []
        for number in range(3):
            state, metrics = step(state, [rows(number, world)])
            losses.append(metrics.loss)
        return losses, zero.full_state_dict(state)

    disk = {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    expected = run_ranks(2, own)
    by_config = run_ranks(2, lambda world: trained(world, model=net, optimizer=MUON, zero_optimization=disk))
    for (losses, values), (wanted_losses, wanted) in zip(by_config, expected, strict=True):
        assert losses == wanted_losses
        same(values, wanted)


def test_groups_of_muon_are_read_at_every_update():
    with engine_of(optimizer=MUON) as engine:
        matrices, others = engine.optimizer.param_groups
        assert (matrices["use_muon"], others["use_muon"]) == (True, False)
        assert (matrices["lr"], matrices["momentum"], others["lr"], others["betas"]) == (0.02, 0.9, 1e-3, (0.9, 0.95))
        before = zero.full_state_dict(engine)
        matrices["lr"] = 0.0
        train(engine, 0)
        after = zero.full_state_dict(engine)
    for name, value in net().named_parameters():
        assert torch.equal(before[name], after[name]) is (value.ndim == 2), name


def test_muon_takes_names_and_groups_and_loads_without_moments(tmp_path: Path):
    """In torch's forms of parameters."""
    forms = [
        lambda model: model.named_parameters(),
        lambda model: [{"params": model.first.weight}, {"params": [*model.blocks.parameters()], "lr": 0.5}],
    ]
    for form in forms:
        with engine_of(optimizer=MUON, prepare=lambda model, form=form: {"model_parameters": form(model)}) as engine:
            train(engine, 0)
            uses = [group["use_muon"] for group in engine.optimizer.param_groups]
    assert uses == [True, True, False]
    with engine_of(optimizer=MUON) as engine:
        train(engine, 0)
        engine.save_checkpoint(tmp_path)
        train(engine, 1)
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        for moment in ("mu", "nu"):
            assert not any(value.any() for value in zero.full_state_dict(engine, moment).values())
        train(engine, 1)
