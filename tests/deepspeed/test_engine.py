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
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch import nn

import zero
from tests.conftest import LONG_S
from zero import deepspeed
from zero.deepspeed.engine import MANY_FORWARDS
from zero.deepspeed.optimizers import Optimizer
from zero.deepspeed.utils import zero_to_fp32
from zero.errors import CheckpointError, ConfigError, MachineError
from zero.testing import run_ranks
from zero.tracker import RUNNING
from zero.tracker.report import run as report

ROOT = Path(__file__).resolve().parents[2]
ROWS, WIDTH = 8, 12


class Net(nn.Module):
    """(b, WIDTH) to a loss: three linear layers, the middle ones in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.first(batch).tanh()
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x).square().mean()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def rows(step: int, world: zero.World, count: int = ROWS) -> torch.Tensor:
    """This rank's rows of a global batch of `count`."""
    whole = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(step))
    return whole.chunk(world.size)[world.rank]


def config(tmp: Path | None = None, stage: int = 3, **more):
    settings = {
        "train_batch_size": ROWS,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        **more,
    }
    if tmp is not None:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "nvme", "nvme_path": str(tmp)}
    return settings


def reference(steps: int, optimizer=None, losses=lambda model, batch: [model(batch)], scheduler=None, accumulate=1):
    """Plain torch on the whole batch."""
    model = net()
    optimizer = (optimizer or (lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1)))(model)
    schedule = scheduler(optimizer) if scheduler else None
    told = []
    for step in range(steps):
        whole = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        parts = losses(model, whole)
        sum(parts).backward()
        told.append(float(sum(parts).detach()))
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step()
    return told, {name: p.detach() for name, p in model.named_parameters()}


def trained(world, settings, steps=3, prepare=lambda model: {}, loop=None, accumulate=1):
    """Losses and full parameters after a DeepSpeed-shaped loop."""
    with world.exclusive():
        model = net(seed=world.rank)  # rank 0's values count
        how = prepare(model)
    engine, _, _, _ = zero.initialize(model=model, config=settings, world=world, **how)
    told = []
    try:
        for step in range(steps):
            for part in rows(step, world).chunk(accumulate):
                if loop:
                    loop(engine, part)
                else:
                    engine.backward(engine(part))
                engine.step()
            told.append(engine.metrics.loss)
        return told, zero.full_state_dict(engine.state)
    finally:
        engine.destroy()


def alike(one, other, tolerance=2e-6):
    (losses, values), (wanted, reference_values) = one, other
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=tolerance, atol=tolerance)
    for name, value in reference_values.items():
        torch.testing.assert_close(values[name], value, rtol=tolerance * 10, atol=tolerance * 10)


# The loop


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_is_plain_torch(stage: int, ranks: int, tmp_path: Path):
    offload = tmp_path if stage in (1, 3) else None
    for one in run_ranks(ranks, trained, config(offload, stage)):
        alike(one, reference(3))


def test_arguments_of_backward_stand_as_in_deepspeed_0_19_8():
    """`backward(loss, retain_graph, scale_wrt_gas)`: twice, from a loss that is divided already."""

    def loop(engine, part):
        loss = engine(part) / 4
        engine.backward(loss, True, False)
        engine.backward(loss, False, False)

    settings = config(gradient_accumulation_steps=2)
    alike(trained(zero.World.from_env(), settings, loop=loop, accumulate=2), reference(3))


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


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("loop", [two_forwards, one_after_the_other, by_hand])
def test_several_losses_and_backwards_add_up(loop, stage: int, accumulate: int):
    settings = config(stage=stage, gradient_accumulation_steps=accumulate)
    wanted = reference(2, losses=lambda model, batch: [model(batch), model(batch.flip(0)) * 0.5])
    for ranks in (1, 2):
        told = run_ranks(ranks, lambda world: trained(world, settings, 2, loop=loop, accumulate=accumulate))
        alike(told[0], wanted)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("microbatches", [1, 3, 4])
def test_who_counts_on_his_own_may_have_more_microbatches_than_he_said_or_fewer(microbatches: int, stage: int):
    settings = config(stage=stage, gradient_accumulation_steps=2, managed_gradient_accumulation=False)

    def run(world):
        with world.exclusive():
            model = net()
        engine, *_ = zero.initialize(model=model, config=settings, world=world)
        for number in range(microbatches):
            engine.backward(engine(rows(number, world)))
            engine.set_gradient_accumulation_boundary(number == microbatches - 1)
            engine.step()
        engine.destroy()
        return engine.metrics.grad_norm

    model = net()
    for number in range(microbatches):
        (model(rows(number, zero.World.from_env())) / 2).backward()
    wanted = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    assert run_ranks(2, run) == pytest.approx([wanted] * 2, rel=1e-5)


@pytest.mark.filterwarnings("ignore:the model keeps no values. an exception ended the run")
def test_a_backward_without_the_scale_is_refused_in_fp16_and_with_it_trains():
    settings = config(fp16={"enabled": True, "initial_scale_power": 4})

    def forgetful(engine, part):
        engine(part).backward()

    def half(engine, part):
        engine.scale(engine(part)).backward()
        engine(part).backward()

    for loop in (forgetful, half, lambda engine, part: half(engine, part) or engine.backward(engine(part))):
        with pytest.raises(ConfigError, match="backward in fp16 without the loss scale"):
            trained(zero.World.from_env(), settings, loop=loop)
    losses, _ = trained(
        zero.World.from_env(), settings, loop=lambda engine, part: engine.scale(engine(part)).backward()
    )
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference(3)[0]), rtol=2e-2, atol=2e-2)


def test_after_an_exception_the_engine_goes_on_as_if_nothing_had_happened():
    def stumbling(engine, part):
        with pytest.raises(RuntimeError):
            engine(part[:, :3])
        loss = engine(part)
        with pytest.raises(RuntimeError, match="grad"):
            engine.backward(loss.detach())
        engine.backward(engine(part))

    alike(trained(zero.World.from_env(), config(), loop=stumbling), reference(3))


@pytest.mark.parametrize("mistake", ["a bad batch", "an update too early"])
def test_what_was_accumulated_before_an_exception_is_forgotten_and_counting_begins_anew(mistake: str):
    world = zero.World.from_env()
    engine, *_ = zero.initialize(model=net(), config=config(gradient_accumulation_steps=2), world=world)
    part = rows(0, world)
    engine.backward(engine(part) * 100)
    engine.step()
    with pytest.raises(RuntimeError if mistake == "a bad batch" else ConfigError):
        _ = engine(part[:, :3]) if mistake == "a bad batch" else engine.optimizer.step()
    for half in part.chunk(2):
        engine.backward(engine(half))
        engine.step()
    assert engine.global_steps == 1
    alike(([engine.metrics.loss], zero.full_state_dict(engine.state)), reference(1))
    engine.destroy()


def test_evaluation_between_steps_changes_nothing():
    def looking(engine, part):
        engine.eval()
        with torch.no_grad():
            before = engine(part)
        engine.train()
        loss = engine(part)
        with torch.no_grad():
            assert torch.equal(engine(part), before)  # in the middle of a step
        assert torch.equal(loss.detach(), before)
        engine.backward(loss)

    for one in run_ranks(2, lambda world: trained(world, config(), loop=looking)):
        alike(one, reference(3))


def test_zero_grad_forgets_what_has_arrived_and_not_what_is_under_way():
    def twice(engine, part):
        engine.backward(engine(part) * 100)
        loss = engine(part)
        engine.optimizer.zero_grad()
        engine.backward(loss)

    for stage in (0, 3):
        for one in run_ranks(2, lambda world, stage=stage: trained(world, config(stage=stage), loop=twice)):
            torch.testing.assert_close(one[1], reference(3)[1], rtol=2e-5, atol=2e-5)


def test_what_the_engine_tells():
    world = zero.World.from_env()
    settings = config(gradient_accumulation_steps=4, gradient_clipping=0.5)
    engine, _, loader, scheduler = zero.initialize(
        model=net(), config=settings, world=world, training_data=torch.randn(10, WIDTH), collate_fn=torch.stack
    )
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 2)
    assert engine.gradient_accumulation_steps() == 4
    assert (engine.global_rank, engine.local_rank, engine.world_size, engine.device.type) == (0, 0, 1, "cpu")
    assert scheduler is None
    assert engine.get_lr() == [1e-2]
    assert len(loader) == 5
    assert engine.get_global_grad_norm() is None
    boundaries, applied = [], []
    for _ in range(2):
        for batch in loader:
            boundaries.append(engine.is_gradient_accumulation_boundary())
            engine.backward(engine(batch))
            engine.step()
            applied.append(engine.was_step_applied())
    assert boundaries == applied == [False, False, False, True] * 2 + [False, False]
    assert (engine.micro_steps, engine.global_steps, engine.skipped_steps) == (10, 2, 0)
    assert engine.get_global_grad_norm() > 0
    assert engine.blocks is engine.module.blocks  # what it has not is the model's
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5]
    engine.destroy()


def test_the_users_model_says_which_modules_train():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    engine, *_ = zero.initialize(model=model, config=config(), world=zero.World.from_env())
    part, dropout = rows(0, engine.plan.world), model[1]
    with torch.no_grad():
        assert not torch.equal(engine(part), engine(part))
        model.eval()
        assert torch.equal(engine(part), engine(part))
        dropout.train()
        assert not torch.equal(engine(part), engine(part))
        engine.eval()
        assert torch.equal(engine(part), engine(part))
    assert not dropout.training
    engine.destroy()


def test_a_habit_of_zero_grad_drops_nothing_that_was_added_up(caplog):
    def habit(engine, part):
        engine.optimizer.zero_grad()
        loss = engine(part)
        engine.optimizer.zero_grad()
        engine.backward(loss)

    settings = config(gradient_accumulation_steps=4)
    alike(trained(zero.World.from_env(), settings, loop=habit, accumulate=4), reference(3))
    assert sum("optimizer.zero_grad() does nothing" in record.message for record in caplog.records) == 1


def test_a_model_is_saved_in_sixteen_bits(tmp_path: Path):
    def run(world):
        with world.exclusive():
            model = net()
        engine, *_ = zero.initialize(model=model, config=config(bf16={"enabled": True}), world=world)
        with pytest.raises(ConfigError, match="safetensors"):
            engine.save_16bit_model(tmp_path / "made", "pytorch_model.bin")
        path = engine.save_16bit_model(tmp_path / "made")
        engine.destroy()
        return path, (engine.zero_optimization_stage(), engine.gradient_clipping(), engine.bfloat16_enabled())

    [(path, told), _] = run_ranks(2, run)
    assert told == (3, 0.0, True)
    found = load_file(path)
    for name, value in net().named_parameters():
        assert torch.equal(found[name], value.detach().bfloat16()), name


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_are_left_out_where_a_script_says_so(stage: int, tmp_path: Path):
    def run(world):
        with world.exclusive():
            model = net()
            model.first.requires_grad_(False)
        engine, *_ = zero.initialize(model=model, config=config(stage=stage), world=world)
        path = engine.save_16bit_model(tmp_path, exclude_frozen_parameters=True)
        values = engine.module_state_dict(exclude_frozen_parameters=True)
        whole = engine.module_state_dict()
        engine.destroy()
        return path, values, whole

    frozen = {"first.weight", "first.bias"}
    every = dict(net().named_parameters())
    for path, values, whole in run_ranks(2, run):
        assert set(load_file(path)) == set(values) == set(every) - frozen
        assert set(whole) == set(every)
        assert all(torch.equal(values[name], every[name]) for name in set(every) - frozen)


def test_no_folder_is_one_line():
    engine, *_ = zero.initialize(model=net(), config=config(), world=zero.World.from_env())
    for folder in ("", None):
        for use in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
            with pytest.raises(ConfigError, match=f"is {folder!r}: not a folder"):
                use(folder)
    engine.destroy()


def test_no_sync_adds_up_and_refuses_to_step():
    world = zero.World.from_env()
    engine, *_ = zero.initialize(model=net(), config=config(gradient_accumulation_steps=1), world=world)
    part = rows(0, world)
    with engine.no_sync():
        with engine.no_sync():
            engine.backward(engine(part) / 2)
        with pytest.raises(ConfigError, match="no_sync"):
            engine.step()
    engine.backward(engine(part) / 2)
    engine.step()
    for name, value in zero.full_state_dict(engine.state).items():
        torch.testing.assert_close(value, reference(1)[1][name])
    engine.destroy()


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
def test_a_torch_optimizer_is_translated_with_its_groups(name: str):
    settings = {key: value for key, value in config().items() if key != "optimizer"}
    told = run_ranks(2, lambda world: trained(world, settings, 4, lambda model: {"optimizer": TORCH[name](model)}))
    alike(told[0], reference(4, TORCH[name]))


def test_the_optimizer_that_is_passed_wins_over_the_configs():
    told = trained(zero.World.from_env(), config(), 2, lambda model: {"optimizer": TORCH["SGD"](model)})
    alike(told, reference(2, TORCH["SGD"]))


@pytest.mark.parametrize("where", ["on the given", "from the returned"])
def test_a_torch_scheduler_writes_the_learning_rate(where: str):
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def prepare(model):
        optimizer = TORCH["AdamW"](model)
        return {"optimizer": optimizer, "lr_scheduler": scheduler(optimizer) if "given" in where else scheduler}

    alike(trained(zero.World.from_env(), config(), 4, prepare), reference(4, TORCH["AdamW"], scheduler=scheduler))


def test_a_peak_in_the_json_is_every_groups_and_without_one_each_keeps_its_own():
    def rates(**params):
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 1, "warmup_type": "linear", **params}}
        model = net()
        engine, *_ = zero.initialize(
            model=model, optimizer=TORCH["AdamW"](model), config=config(scheduler=schedule), world=zero.World.from_env()
        )
        for step in range(3):
            engine.backward(engine(rows(step, zero.World.from_env())))
            engine.step()
        engine.destroy()
        return engine.get_lr()

    assert rates(warmup_max_lr=0.02) == [0.02, 0.02]
    assert rates() == [1e-2, 3e-3]


def test_what_a_scheduler_wants_to_be_told_is_passed_on():
    def plateau(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    world = zero.World.from_env()
    engine, *_ = zero.initialize(model=net(), config=config(), world=world, lr_scheduler=plateau)
    for loss in (1.0, 2.0):
        engine.backward(engine(rows(0, world)))
        engine.step(lr_kwargs={"metrics": loss})
    assert engine.get_lr() == [5e-3]
    engine.destroy()


@pytest.mark.parametrize("how", ["returned", "passed"])
def test_groups_that_come_too_late_are_refused(how: str):
    world, model = zero.World.from_env(), net()
    passed = TORCH["AdamW"](model)
    engine, returned, _, _ = zero.initialize(model=model, optimizer=passed, config=config(), world=world)
    engine.backward(engine(rows(0, world)))
    late = {"params": [nn.Parameter(torch.ones(1))]}
    if how == "returned":
        with pytest.raises(ConfigError, match="Pass all groups"):
            returned.add_param_group(late)
    else:
        passed.add_param_group(late)
        with pytest.raises(ConfigError, match="has other groups"):
            engine.step()
    engine.destroy()


def test_what_was_frozen_from_the_start_cannot_thaw():
    world, model = zero.World.from_env(), net()
    model.first.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=config(), world=world)
    model.first.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"first.weight was frozen in zero.initialize"):
        engine(rows(0, world))
    engine.destroy()


def test_a_group_freezes_in_the_middle_of_training():
    def halfway(engine, part):
        if engine.global_steps == 1:
            for parameter in engine.optimizer.param_groups[1]["params"]:
                parameter.requires_grad_(False)
            halfway.before = zero.full_state_dict(engine.state)
        engine.backward(engine(part))

    _, after = trained(zero.World.from_env(), config(), 3, lambda m: {"optimizer": TORCH["AdamW"](m)}, halfway)
    for name, value in after.items():
        assert torch.equal(value, halfway.before[name]) == name.endswith("bias"), name


class Two(nn.Sequential):
    """(b, WIDTH) to the same: two units."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("stage", range(4))
def test_a_model_that_is_frozen_in_a_forward_gets_no_gradient_of_it(stage: int, remat: bool):
    """As a discriminator while the generator is trained through it: the flags at the forward decide, as in torch."""

    def losses(generator, discriminator, its, x, real):
        its.requires_grad_(False)
        yield -discriminator(generator(x)).mean()
        its.requires_grad_(True)
        yield (discriminator(generator(x).detach()) - discriminator(real)).square().mean()

    torch.manual_seed(0)
    pair = Two(), Two()
    plain = copy.deepcopy(pair)
    checkpointing = {"activation_checkpointing": {"partition_activations": True}} if remat else {}
    settings = config(stage=stage, optimizer={"type": "SGD", "params": {"lr": 0.1}}, **checkpointing)
    engines = [zero.initialize(model=model, config=settings)[0] for model in pair]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in plain]
    for number in range(3):
        x, real = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        for engine, loss in zip(engines, losses(*engines, pair[1], x, real), strict=True):
            engine.backward(loss)
            engine.step()
        for optimizer, loss in zip(optimizers, losses(*plain, plain[1], x, real), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for engine, model in zip(engines, plain, strict=True):
        torch.testing.assert_close(zero.full_state_dict(engine), dict(model.named_parameters()), rtol=0, atol=1e-6)
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("frozen_in", [0, 1])
def test_a_group_that_is_frozen_in_one_microbatch_has_the_others_gradient(stage: int, frozen_in: int):
    def groups(model):
        return torch.optim.SGD([{"params": [*part.parameters()]} for part in model], lr=0.1)

    torch.manual_seed(0)
    model = Two()
    plain = copy.deepcopy(model)
    settings = config(stage=stage, gradient_accumulation_steps=2, train_batch_size=2 * ROWS)
    engine, *_ = zero.initialize(model=model, optimizer=groups(model), config=settings)
    for number in range(2):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        for one in (model, plain):
            one[1].requires_grad_(number != frozen_in)
        engine.backward(engine(x).square().mean())
        engine.step()
        (plain(x).square().mean() / 2).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), torch.inf)
    groups(plain).step()
    torch.testing.assert_close(zero.full_state_dict(engine), dict(plain.named_parameters()), rtol=0, atol=1e-6)
    assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-5)
    engine.destroy()


def test_a_microbatch_that_is_refused_has_not_begun():
    """Mended flags, and the step goes on: it ends after as many microbatches as ever."""
    torch.manual_seed(0)
    model = Two()
    model[0].bias.requires_grad_(False)
    plain = copy.deepcopy(model)
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    settings = config(optimizer=sgd, gradient_accumulation_steps=2, train_batch_size=2 * ROWS)
    engine, *_ = zero.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for number in range(2):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        model[0].bias.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"0\.bias was frozen in zero\.initialize"):
            engine(x)
        model[0].bias.requires_grad_(False)
        engine.backward(engine(x).square().mean())
        engine.step()
        (plain(x).square().mean() / 2).backward()
    assert engine.global_steps == 1
    torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1).step()
    torch.testing.assert_close(zero.full_state_dict(engine), dict(plain.named_parameters()), rtol=0, atol=1e-6)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_parameter_that_is_frozen_alone_has_a_gradient_of_zero(stage, caplog):
    """As in DeepSpeed; in torch it would have none, and rest."""
    torch.manual_seed(0)
    model = Two()
    plain = copy.deepcopy(model)
    engine, *_ = zero.initialize(model=model, config=config(stage=stage))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for number in range(4):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        model[0].bias.requires_grad_(number % 2 == 0)
        engine.backward(engine(x).square().mean())
        engine.step()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        if number % 2:
            plain[0].bias.grad.zero_()
        optimizer.step()
    torch.testing.assert_close(zero.full_state_dict(engine), dict(plain.named_parameters()), rtol=0, atol=1e-5)
    assert sum("0.bias was frozen, and others" in one.message for one in caplog.records) <= 1
    engine.destroy()


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
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        products = (Product.apply(x, weight) for weight in (self.head.weight, self.layers[0].weight))
        return sum(one.square().mean() for one in products)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_that_an_autograd_function_is_given_gets_its_gradient(stage: int, ranks: int):
    def run(world):
        with world.exclusive():
            model = Fused()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = config(stage=stage, gradient_accumulation_steps=2)
        settings.pop("optimizer", None)
        engine, *_ = zero.initialize(model=model, optimizer=optimizer, config=settings, world=world)
        for step in range(3):
            for part in rows(step, world).chunk(2):
                engine.backward(engine(part))
                engine.step()
        full = zero.full_state_dict(engine)
        engine.destroy()
        return full

    plain = Fused()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        plain(rows(step, zero.World.from_env())).backward()
        optimizer.step()
    for full in run_ranks(ranks, run):
        torch.testing.assert_close(full, dict(plain.named_parameters()), rtol=0, atol=1e-6)


def clip(scaler, engine, optimizer):
    nn.utils.clip_grad_norm_(engine.module.parameters(), 0.05)


def unscale(scaler, engine, optimizer):
    scaler.unscale_(optimizer)


LEFTOVER = {
    clip: "Clip with gradient_clipping",
    unscale: "scale with fp16 in the config",
}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("left", "said"), LEFTOVER.items(), ids=["clip_grad_norm_", "GradScaler"])
def test_torchs_clipping_and_scaler_act_as_in_torch_or_say_what_to_write_instead(left, said, stage: int):
    """Gradients are whole below stage 2, so both act as in torch there."""

    def training(module, forward, optimizer):
        scaler = torch.amp.GradScaler("cpu", enabled=left is unscale)
        scaler.scale(forward(rows(0, zero.World.from_env()))).backward()
        left(scaler, SimpleNamespace(module=module), optimizer)
        scaler.step(optimizer)

    model, plain = net(), net()
    settings = config(stage=stage)
    settings.pop("optimizer")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, optimizer, *_ = zero.initialize(model=model, optimizer=sgd, config=settings)
    if stage < 2:
        training(model, engine, optimizer)
        training(plain, plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        torch.testing.assert_close(zero.full_state_dict(engine), dict(plain.named_parameters()))
    else:
        with pytest.raises(ConfigError, match=rf"first\.weight\.grad: stage {stage} shards.*{said}"):
            training(model, engine, optimizer)
    engine.destroy()


def test_numbers_keep_their_dtype_where_tensors_are_cast():
    """A count of tokens by which a loss is divided: 257 is no bf16."""

    class Counted(nn.Linear):
        def forward(self, x, count):
            assert x.dtype == torch.bfloat16
            return super().forward(x).float().sum() / count

    engine, *_ = zero.initialize(model=Counted(WIDTH, 1, bias=False), config=config(bf16={"enabled": True}))
    x, count = torch.randn(ROWS, WIDTH), torch.tensor(257.0)
    whole = engine(x, torch.tensor(1.0))
    assert torch.equal(engine(x, count), whole / 257)
    engine.destroy()


@pytest.mark.parametrize("precision", [{"fp16": {"enabled": True}}, {"fp16": {}, "bf16": {"enabled": True}}])
def test_a_config_that_says_so_leaves_inputs_as_they_are(precision):
    """As in DeepSpeed 0.19.8, which casts none unless `auto_cast` is true. 2049 is neither a fp16 nor a bf16."""

    class Timed(nn.Linear):
        def forward(self, x, time):
            assert x.dtype == time.dtype == torch.float32
            return super().forward(x.to(self.weight.dtype)).float().sum(1) * time

    precision = {**precision, "fp16": {**precision["fp16"], "auto_cast": False}}
    engine, *_ = zero.initialize(model=Timed(WIDTH, 1, bias=False), config=config(**precision))
    x, times = torch.randn(ROWS, WIDTH), torch.full((ROWS,), 2049.0)
    assert torch.equal(engine(x, time=times), engine(x, torch.ones(ROWS)) * 2049)
    engine.destroy()


def test_a_backward_whose_gradient_has_the_scale_already_is_said_to():
    """A head on its own, as where a loss is computed in pieces."""
    model, head = Two(), nn.Linear(WIDTH, 1)
    plain = copy.deepcopy(model)
    settings = config(
        fp16={"enabled": True, "initial_scale_power": 8}, optimizer={"type": "SGD", "params": {"lr": 0.1}}
    )
    engine, *_ = zero.initialize(model=model, config=settings)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    hidden = engine(x)
    cut = hidden.detach().float().requires_grad_()
    engine.scale(head(cut).mean()).backward()
    engine.scale(hidden, already=True).backward(cut.grad.half())
    engine.step()
    head(plain(x)).mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    torch.testing.assert_close(zero.full_state_dict(engine), dict(plain.named_parameters()), rtol=0, atol=1e-4)
    engine.destroy()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda m: torch.optim.RMSprop(m.parameters()), "RMSprop has no counterpart"),
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
        trained(zero.World.from_env(), config(), prepare=lambda model: {"optimizer": make(model)})


def test_one_cycle_moves_betas_and_no_other_momentum():
    """DeepSpeed 0.19.8 says "cycle_momentum is disabled" for SGD, whose groups have no betas."""
    schedule = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}}
    settings = {key: value for key, value in config(scheduler=schedule).items() if key != "optimizer"}
    for name, wanted in (("SGD", 0.9), ("AdamW", (pytest.approx(0.875), 0.99))):
        engine, *_ = zero.initialize(
            model=(model := net()), optimizer=TORCH[name](model), config=settings, world=zero.World.from_env()
        )
        engine.backward(engine(rows(0, engine.plan.world)))
        engine.step()
        assert engine.get_mom() == [wanted] * 2
        engine.destroy()


def test_the_optimizer_that_was_passed_cannot_be_stepped_in_vain():
    model = net()
    given = torch.optim.AdamW(model.parameters())
    engine, *_ = zero.initialize(model=model, optimizer=given, config=config(), world=zero.World.from_env())
    engine.backward(engine(rows(0, engine.plan.world)))
    with pytest.raises(ConfigError, match=r"Call engine\.step\(\)"):
        given.step()
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()


@pytest.mark.parametrize("kind", ["AdamW", "Adagrad"])
@pytest.mark.parametrize("whose", ["returned", "passed"])
def test_no_state_of_the_optimizer_is_read_made_or_loaded_without_moments(whose: str, kind: str):
    """A dict without moments would load without an error, and training would go on with zeros."""
    model = net()
    passed = getattr(torch.optim, kind)(model.parameters())
    saved = passed.state_dict()
    engine, returned, *_ = zero.initialize(model=model, optimizer=passed, config=config(), world=zero.World.from_env())
    optimizer = returned if whose == "returned" else passed
    engine.backward(engine(rows(0, engine.plan.world)))
    engine.step()
    for use in (
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(saved),
        lambda: optimizer.load_state_dict({"param_groups": saved["param_groups"]}),
        lambda: optimizer.state[model.first.weight]["exp_avg"],
    ):
        with pytest.raises(ConfigError, match="moments are sharded"):
            use()
    engine.destroy()
    passed.load_state_dict(saved)


# Checkpoints


@pytest.mark.parametrize("tag", [None, "first"])
def test_a_run_goes_on_from_its_checkpoint_as_if_never_stopped(tag, tmp_path: Path):
    settings = config(scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}})

    def run(world, first, last, save=None, load=None):
        with world.exclusive():
            model = net(seed=7 + world.rank)
        engine, *_ = zero.initialize(model=model, config=settings, world=world)
        if load:
            found, mine = engine.load_checkpoint(load, tag=tag)
            assert found is not None
            assert mine == {"rows": [1, 2]}
            assert engine.global_steps == first
        for step in range(first, last):
            engine.backward(engine(rows(step, world)))
            engine.step()
        if save:
            engine.save_checkpoint(save, tag=tag, client_state={"rows": [1, 2]})
        told = zero.engine.full.digest(engine.state), engine.get_lr()
        engine.destroy()
        return told

    never_stopped = run_ranks(2, lambda world: run(world, 0, 5))[0]
    run_ranks(2, lambda world: run(world, 0, 3, save=tmp_path))
    assert run_ranks(2, lambda world: run(world, 3, 5, load=tmp_path))[0] == never_stopped


def test_a_folder_that_cannot_be_made_is_one_line_on_every_rank(tmp_path: Path):
    (tmp_path / "file").touch()

    def run(world):
        with world.exclusive():
            model = net()
        engine, *_ = zero.initialize(model=model, config=config(), world=world)
        with pytest.raises(CheckpointError, match="making it"):
            engine.save_checkpoint(tmp_path / "file", tag="best")
        engine.destroy()

    run_ranks(2, run)


def test_an_empty_folder_has_no_checkpoint_and_one_line_says_where_none_was_found(tmp_path: Path, caplog):
    engine, *_ = zero.initialize(model=net(), config=config(), world=zero.World.from_env())
    caplog.clear()
    assert engine.load_checkpoint(tmp_path / "none") == (None, {})
    assert engine.load_checkpoint(tmp_path, tag="best") == (None, {})
    wheres = [f"{tmp_path / 'none'} and its tags", str(tmp_path / "best")]
    assert [line.partition(". ")[0] for line in caplog.messages] == [
        f"load_checkpoint: no checkpoint in {where}" for where in wheres
    ]
    engine.destroy()


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
    world = zero.World.from_env()
    told = {"metrics": 1.0} if name == "ReduceLROnPlateau" else {}

    def run(first, last, load=False):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        how = {"optimizer": optimizer, "lr_scheduler": SCHEDULERS[name](optimizer)}
        engine, *_ = zero.initialize(model=model, config=config(), world=world, **how)
        if load:
            engine.load_checkpoint(tmp_path)
        rates = []
        for step in range(first, last):
            engine.backward(engine(rows(step, world)))
            engine.step(lr_kwargs=told)
            rates += engine.get_lr()
        engine.save_checkpoint(tmp_path)
        engine.destroy()
        return rates

    assert [*run(0, 3), *run(3, 6, load=True)] == run(0, 6)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_checkpoint_from_the_middle_of_an_accumulation_goes_on_in_any_other(accumulate: int, tmp_path: Path):
    world = zero.World.from_env()
    for count, load in ((2, False), (accumulate, True)):
        settings = config(train_batch_size=count * 2, gradient_accumulation_steps=count)
        engine, *_ = zero.initialize(model=net(), config=settings, world=world)
        if load:
            engine.load_checkpoint(tmp_path)
        for _ in range(3):
            engine.backward(engine(rows(0, world)))
            engine.step()
        engine.save_checkpoint(tmp_path)
        steps = engine.global_steps
        engine.destroy()
    assert steps == 1 + 3 // accumulate


def test_without_a_tag_the_newest_of_all_tags_is_loaded_and_a_checkpoint_by_its_own_path(tmp_path: Path):
    world = zero.World.from_env()
    engine, *_ = zero.initialize(model=net(), config=config(), world=world)
    saved = []
    for tag in ("b", "a"):
        engine.backward(engine(rows(0, world)))
        engine.step()
        saved.append(engine.save_checkpoint(tmp_path, tag, {tag: {7: float("inf")}}))
    assert engine.load_checkpoint(tmp_path) == (saved[1], {"a": {7: float("inf")}})
    assert engine.load_checkpoint(saved[0]) == (saved[0], {"b": {7: float("inf")}})
    engine.destroy()


def test_the_checkpoint_that_was_saved_last_is_loaded_unless_its_save_says_otherwise(tmp_path: Path, caplog):
    """The file `latest` decides, as in DeepSpeed, although another tag may have more steps."""

    def run(world):
        with world.exclusive():
            model = net()
        engine, *_ = zero.initialize(model=model, config=config(), world=world)

        def saved(tag, **how):
            engine.backward(engine(rows(0, world)))
            engine.step()
            return engine.save_checkpoint(tmp_path, tag, **how)

        first, more = saved(None), [saved("more"), saved("more")]
        assert engine.load_checkpoint(tmp_path)[0] == more[1]
        engine.load_checkpoint(first)
        last = saved("last")
        unnamed = [saved("other", save_latest=False), saved(None, save_latest=False), saved("more", save_latest=False)]
        values = {name: value.clone() for name, value in engine.module_state_dict().items()}
        world.barrier("earlier lines are logged")
        caplog.clear()
        assert engine.load_checkpoint(tmp_path)[0] == last
        assert engine.global_steps == 2
        world.barrier("rank 0 has logged")
        assert caplog.messages == [f"load_checkpoint: loaded {last}, of step 2"]
        whole = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
        assert all(torch.equal(value, whole[name]) for name, value in engine.module_state_dict().items())
        assert any(not torch.equal(value, whole[name]) for name, value in values.items())
        engine.destroy()
        return last, unnamed[2]

    last, newest = run_ranks(2, run)[0]
    assert (tmp_path / "latest").read_text() == os.path.relpath(last, tmp_path)
    damaged = next(last.glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    engine, *_ = zero.initialize(model=net(), config=config(), world=zero.World.from_env())
    caplog.clear()
    assert engine.load_checkpoint(tmp_path)[0] == newest
    assert [str(last) in caplog.messages[0], str(newest) in caplog.messages[1]] == [True, True]
    engine.destroy()


@pytest.mark.parametrize("managed", [True, False])
def test_global_samples_are_the_rows_of_the_microbatches_that_were_run(managed: bool, tmp_path: Path):
    """A step may have any number of microbatches. Rows of metrics and a checkpoint have the same count."""
    settings = config(gradient_accumulation_steps=2, managed_gradient_accumulation=managed, steps_per_print=1)
    counts = [2, 2, 2] if managed else [1, 3, 4]

    def run(world):
        with world.exclusive():
            model = net()
        engine, *_ = zero.initialize(model=model, config=settings, world=world, folder=tmp_path / "run")
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
        engine.destroy()
        return samples

    assert run_ranks(2, run) == [sum(counts) * ROWS // 2] * 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [sum(counts[: number + 1]) * ROWS // 2 for number in range(3)]


def test_a_client_may_keep_what_numpy_holds(tmp_path: Path):
    """The state of its generator, an array, a number: read back without a pickle."""
    numpy = pytest.importorskip("numpy")
    world, draws = zero.World.from_env(), numpy.random.RandomState(3)
    engine, *_ = zero.initialize(model=net(), config=config(), world=world)
    engine.save_checkpoint(tmp_path, client_state={"random": draws.get_state(), "best": numpy.float32(0.5)})
    expected = draws.rand(3)
    told = engine.load_checkpoint(tmp_path)[1]
    draws.set_state(told["random"])
    assert (draws.rand(3) == expected).all()
    assert told["best"] == 0.5
    with pytest.raises(CheckpointError, match="client_state"):
        engine.save_checkpoint(tmp_path, "texts", {"names": numpy.array(["a"])})
    engine.destroy()


def test_without_moments_training_begins_with_step_1(tmp_path: Path):
    """Its corrections for zero moments would be those of a late step otherwise."""
    world = zero.World.from_env()
    engine, *_ = zero.initialize(model=net(), config=config(), world=world)
    for step in range(4):
        engine.backward(engine(rows(step, world)))
        engine.step()
    engine.save_checkpoint(tmp_path)
    values = zero.full_state_dict(engine.state)
    engine.load_checkpoint(tmp_path, load_module_only=True)
    engine.backward(engine(rows(9, world)))
    engine.step()
    model = net()
    model.load_state_dict(values)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model(rows(9, world)).backward()
    optimizer.step()
    for name, value in zero.full_state_dict(engine.state).items():
        torch.testing.assert_close(value, model.get_parameter(name).detach(), rtol=1e-5, atol=1e-5)
    engine.destroy()


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


def test_a_root_with_parameters_of_its_own_follows_and_is_saved_under_every_name():
    model = Tied().eval()
    engine, *_ = zero.initialize(model=model, config=config(), world=zero.World.from_env())
    part = rows(0, engine.plan.world)
    engine.train()
    engine.backward(engine(part))
    engine.step()
    engine.eval()
    assert torch.equal(engine(part), engine(part))
    with pytest.raises(ConfigError, match=r"no forward in training mode.* engine\.module\.blocks\.eval\(\)"):
        engine.step()
    Tied().load_state_dict(engine.module_state_dict(), strict=True)
    engine.destroy()


def test_a_backward_outside_a_step_and_what_was_dropped_count_in_none():
    def stray(engine, part):
        engine.eval()
        (engine(part) * 1e3).backward()
        engine.train()
        engine.backward(engine(part) * 1e3)
        engine.zero_grad()
        engine.backward(engine(part))

    for stage in (0, 2, 3):
        for one in run_ranks(2, lambda world, stage=stage: trained(world, config(stage=stage), loop=stray)):
            alike(one, reference(3))


# What is left behind


def test_a_run_leaves_the_files_that_a_report_is_made_from(tmp_path: Path):
    def run(world):
        with world.exclusive():
            model = net()
        settings = config(steps_per_print=2)
        engine, *_ = zero.initialize(model=model, config=settings, world=world, folder=tmp_path / "run")
        for step in range(4):
            engine.backward(engine(rows(step, world)))
            engine.step()
        engine.destroy()

    run_ranks(2, run)
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["tokens"]) for row in told] == [(2, 2 * ROWS), (4, 4 * ROWS)]
    assert [row["train/loss"] for row in told] == pytest.approx(reference(4)[0][1::2], rel=1e-5)
    report.write(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<svg" in page
    assert "of 200" not in page, "the default of a loop that is not the user's"


def test_what_is_left_behind_says_the_optimizer_that_was_passed_and_nothing_of_our_model(tmp_path: Path):
    model, world = net(), zero.World.from_env()
    engine, *_ = zero.initialize(
        model=model, optimizer=TORCH["SGD"](model), config=config(), world=world, folder=tmp_path / "run"
    )
    lr = engine.get_lr()[0]
    engine.save_checkpoint(tmp_path / "kept")
    engine.destroy()
    told = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert told.keys() == {"mode", "zero", "offload", "batch", "precision", "tracker", "optimizer"}
    assert (told["optimizer"]["kind"], told["optimizer"]["groups"]["0"]["lr"]) == ("sgd", lr)
    report.write(tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "optimizer.kind" in page
    assert "model." not in page.partition("Settings that differ")[2]


def test_rows_follow_those_of_the_run_that_goes_on_and_never_those_of_another(tmp_path: Path, caplog):
    world, folder = zero.World.from_env(), tmp_path / "run"

    def run(steps: int, load: bool = False, **how):
        settings = config(steps_per_print=1)
        engine, *_ = zero.initialize(model=net(), config=settings, world=world, folder=folder)
        if load:
            assert engine.load_checkpoint(tmp_path / "kept", **how)[0]
        for step in range(steps):
            engine.backward(engine(rows(step, world)))
            engine.step()
        engine.save_checkpoint(tmp_path / "kept")
        engine.destroy()

    def told(place: Path) -> list[int]:
        return [json.loads(line)["step"] for line in (place / "metrics.jsonl").read_text().splitlines()]

    def said() -> list[str]:
        return [line for line in caplog.messages if "rows of another run" in line]

    run(2)
    summary = folder / "summary.json"
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"best_train_loss": 1e-9, "seconds": 1000.0}))
    run(1, load=True)
    assert told(folder) == [1, 2, 3]
    assert not said()
    assert json.loads(summary.read_text())["best_train_loss"] == 1e-9
    assert json.loads(summary.read_text())["seconds"] > 1000
    run(1)
    run(1, load=True, load_module_only=True)  # begins anew
    assert (told(folder), told(folder / "run-2"), told(folder / "run-3")) == ([1, 2, 3], [1], [1])
    assert [line.rpartition("go to ")[2] for line in said()] == [f"{folder}/run-2", f"{folder}/run-3"]
    assert all((place / "config.yaml").exists() for place in (folder, folder / "run-2", folder / "run-3"))


def test_tensorboard_of_a_config_is_written_beside_the_rows(tmp_path: Path):
    pytest.importorskip("tensorboard")
    settings = config(tensorboard={"enabled": True}, steps_per_print=1)
    world = zero.World.from_env()
    engine, *_ = zero.initialize(model=net(), config=settings, world=world, folder=tmp_path)
    engine.backward(engine(rows(0, world)))
    engine.step()
    engine.destroy()
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_wandb_knows_a_run_that_goes_on_in_another_folder(tmp_path: Path, monkeypatch):
    opened: list[str] = []
    shown = SimpleNamespace(log=lambda row: None, saved=lambda *_: None, close=lambda *_: None)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("zero.tracker.wandb.WandbRun", lambda *_, run_id, say: opened.append(run_id) or shown)
    world, settings = zero.World.from_env(), config(wandb={"enabled": True})
    for number, load in enumerate([None, {}, {"load_module_only": True}]):
        engine, *_ = zero.initialize(model=net(), config=settings, world=world, folder=tmp_path / f"{number}")
        if load is not None:
            engine.load_checkpoint(tmp_path / "kept", **load)
        engine.backward(engine(rows(0, world)))
        engine.step()
        if load is None:
            engine.save_checkpoint(tmp_path / "kept")
        engine.destroy()
    first, goes_on, another = opened
    assert first == goes_on != another


def test_an_engine_that_is_dropped_gives_back_its_threads_and_its_files(tmp_path: Path):
    def collect() -> None:
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "closing":
                thread.join()

    world, model = zero.World.from_env(), net()
    given = TORCH["AdamW"](model)
    collect()  # what other tests have left
    before = set(threading.enumerate())
    files = len(os.listdir("/proc/self/fd"))
    engine, *_ = zero.initialize(
        model=model, optimizer=given, config=config(tmp_path, steps_per_print=1), world=world, folder=tmp_path / "run"
    )
    engine.backward(engine(rows(0, world)))
    engine.step()
    workers = set(threading.enumerate()) - before
    assert workers
    assert len(os.listdir("/proc/self/fd")) > files
    del engine, _
    collect()
    assert not any(thread.is_alive() for thread in workers)
    assert len(os.listdir("/proc/self/fd")) == files
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"] == RUNNING
    assert given.param_groups, "it may outlive the engine"


# What is asked for


def test_a_name_that_is_absent_raises_with_what_to_do():
    engine, *_ = zero.initialize(model=net(), config=config(), world=zero.World.from_env())
    with pytest.raises(AttributeError, match=r"engine\.train_batch does not exist: .*write engine\(batch\)"):
        _ = engine.train_batch
    engine.module.monitor = "the model's own"
    assert engine.monitor == "the model's own"
    with pytest.raises(AttributeError, match="neither the engine nor its model, a Net, has 'nothing'"):
        _ = engine.nothing
    engine.destroy()


@pytest.mark.parametrize("stage", range(4))
def test_an_engine_reports_its_stage_as_deepspeeds_does(stage: int):
    engine, *_ = zero.initialize(model=net(), config=config(stage=stage), world=zero.World.from_env())
    assert engine.zero_optimization_stage() == stage
    assert engine.zero_optimization() == (stage > 0)
    assert engine.zero_optimization_partition_gradients() == (stage > 1)
    assert engine.zero_optimization_partition_weights() == (stage > 2)
    assert engine.dynamic_loss_scale() is False
    assert engine.mpu is engine.empty_partition_cache() is None
    engine.destroy()


def test_an_engine_is_a_module_around_its_model():
    model = net()
    engine, *_ = zero.initialize(model=model, config=config(), world=zero.World.from_env())
    assert isinstance(engine, nn.Module)
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine.data_parallel_group is torch.distributed.group.WORLD
    assert list(engine.children()) == [engine.module] == [model]
    assert [name for name, _ in engine.named_parameters()] == [f"module.{name}" for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(engine.parameters(), model.parameters(), strict=True))
    assert engine.eval() is engine
    assert not any(module.training for module in engine.modules())
    assert all(module.training for module in engine.train().modules())
    called = []
    engine.register_forward_hook(lambda *_: called.append("forward"))
    batch = rows(0, engine.plan.world)
    engine.backward(engine(batch))
    assert called == ["forward"]
    assert engine.to("cpu") is engine.float() is engine
    for change in (engine.half, engine.compile):
        with pytest.raises(ConfigError):
            change()
    engine.step()
    engine.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    engine.destroy()


def test_an_optimizer_tells_the_loss_scale_and_whether_it_overflowed():
    world, settings = zero.World.from_env(), config(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    engine, optimizer, *_ = zero.initialize(model=net(), config=settings, world=world)
    assert engine.get_batch_info() == (ROWS, ROWS, 1)
    assert (optimizer.loss_scale, optimizer.cur_scale, optimizer.overflow) == (16.0, 16.0, False)
    engine.backward(engine(rows(0, world)) * float("inf"))
    engine.step()
    assert (optimizer.loss_scale, optimizer.overflow, engine.was_step_applied()) == (8.0, True, False)
    engine.destroy()
    with pytest.raises(ConfigError, match="belongs to no engine"):
        _ = Optimizer.of(TORCH["AdamW"](net())).loss_scale


def test_init_distributed_opens_the_group_that_scripts_ask_for_their_rank():
    for _ in range(2):
        zero.init_distributed("nccl", dist_init_required=True)
    try:
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
        trained(zero.World.from_env(), config(), steps=1)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("how", ["initialize", "Init"])
def test_a_script_of_one_rank_may_ask_torch_for_its_rank(how: str):
    assert not torch.distributed.is_initialized()
    if how == "Init":
        with deepspeed.zero.Init():
            assert deepspeed.comm.get_rank() == 0
    else:
        engine, *_ = zero.initialize(model=net(), config=config())
        engine.destroy()
    total = torch.ones(1)
    deepspeed.comm.all_reduce(total)
    assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), float(total)) == (0, 1, 1.0)


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


def test_a_forgotten_step_is_said_once(caplog):
    world = zero.World.from_env()
    engine, *_ = zero.initialize(model=net(), config=config(), world=world)
    part = rows(0, world)[:1]
    with engine.no_sync():
        for _ in range(MANY_FORWARDS):
            engine(part)
    engine.backward(engine(part))
    engine.step()
    assert not [line for line in caplog.messages if "engine.step()" in line]
    for _ in range(2 * MANY_FORWARDS):
        engine.backward(engine(part))
    engine.destroy()
    told = [line for line in caplog.messages if "engine.step()" in line]
    assert ["forwards since the last" in line for line in told] == [True, False]
    assert told[1] == "engine.destroy(): gradients that arrived after the last engine.step() are dropped"


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"model": None}, "needs model="),
        ({"config": None}, "takes one config, and got none"),
        ({"config_params": {}}, "and got config=; config_params="),
        ({"mpu": object()}, "no model parallelism"),
        ({"modle": 1}, "no argument modle"),
        ({"config": config(train_batch_size="auto")}, "train_batch_size=auto: write the rows"),
        ({"config": {"train_micro_batch_size_per_gpu": "auto"}}, "train_micro_batch_size_per_gpu=auto: write the rows"),
        ({"config": config(zero_optimization={"stage": "auto"})}, "stage=auto: write a number"),
        (
            {"config": config(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}})},
            "scheduler.params.warmup_num_steps=auto: write the number",
        ),
        (
            {"config": config(scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}})},
            "scheduler.params.total_num_steps=auto: write the number",
        ),
    ],
    ids=[
        "no model",
        "no config",
        "two configs",
        "mpu",
        "a typo",
        "auto rows",
        "auto rows of a microbatch",
        "auto stage",
        "auto warm-up",
        "auto total",
    ],
)
def test_wrong_arguments_are_one_line(how, says: str):
    with pytest.raises(ConfigError, match=re.escape(says)):
        zero.initialize(**{"model": net(), "config": config(), "world": zero.World.from_env(), **how})


@pytest.mark.parametrize("text", [False, True], ids=["a dict", "JSON"])
def test_steps_per_print_of_infinity_trains_and_prints_no_row(text: bool, capsys):
    settings, world = config(steps_per_print=math.inf), zero.World.from_env()
    engine, *_ = zero.initialize(model=net(), config=json.dumps(settings) if text else settings, world=world)
    engine.backward(engine(rows(0, world)))
    engine.step()
    assert (engine.global_steps, capsys.readouterr().out) == (1, "")
    engine.destroy()


def test_parameters_and_modules_are_not_set_on_the_engine():
    engine, *_ = zero.initialize(model=net(), config=config(), world=zero.World.from_env())
    for value in (nn.Linear(2, 2), nn.Parameter(torch.ones(2)), engine.module.first, engine.module.first.weight):
        with pytest.raises(ConfigError, match=r"^engine\.extra: a \w+ on the engine is not .* before zero\.initialize"):
            engine.extra = value
    engine.extra = torch.ones(2)
    assert set(engine.state_dict()) == set(net().state_dict())
    engine.destroy()


def test_an_engine_within_a_module_is_in_its_state_dict():
    engine, *_ = zero.initialize(model=net(), config=config(), world=zero.World.from_env())
    values = nn.ModuleDict({"generator": engine}).state_dict()
    assert {name: value.tolist() for name, value in values.items()} == {
        f"generator.{name}": value.tolist() for name, value in engine.module_state_dict().items()
    }
    engine.destroy()


def test_a_log_that_cannot_be_closed_does_not_cost_the_trained_model(tmp_path: Path):
    engine, *_ = zero.initialize(model=net(), config=config(), world=zero.World.from_env(), folder=tmp_path / "run")
    model, values = engine.module, engine.module_state_dict()

    def full(status: str | None) -> None:
        raise MachineError("the disk is full")

    engine._run_log.close = full
    with pytest.raises(MachineError, match="the disk is full"):
        engine.destroy()
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in values.items()
    }


def test_an_engine_is_destroyed_once_and_says_so(tmp_path: Path):
    engine, *_ = zero.initialize(model=net(), config=config(), world=zero.World.from_env(), folder=tmp_path / "run")
    engine.destroy()
    engine.destroy()
    part = rows(0, engine.plan.world)
    uses = (
        lambda: engine(part),
        engine.module_state_dict,
        lambda: engine.save_checkpoint(tmp_path),
        lambda: engine.state,
    )
    for use in (*uses, lambda: engine.load_checkpoint(tmp_path)):
        with pytest.raises(ConfigError, match="was destroyed"):
            use()
    assert (engine.global_steps, engine.skipped_steps, engine.loss_scale) == (0, 0, 1.0)


def test_a_step_without_a_backward_is_refused_unless_the_gradient_was_dropped_on_purpose():
    """On any rank: one that skips its own bad batch has a zero gradient, and the others go on."""

    def run(world):
        with world.exclusive():
            model = net()
        engine, *_ = zero.initialize(model=model, config=config(), world=world)
        engine(rows(0, world))
        with pytest.raises(ConfigError, match="no gradient has arrived since the last update, on any rank"):
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
        counts = engine.global_steps, engine.get_global_grad_norm()
        engine.destroy()
        return counts

    assert run_ranks(2, run) == [(2, 0.0)] * 2


def test_a_loop_in_the_wrong_order_is_told():
    engine, *_ = zero.initialize(model=net(), config=config(), world=zero.World.from_env())
    with pytest.raises(ConfigError, match="no forward"):
        engine.step()
    with pytest.raises(ConfigError, match="no forward"):
        engine.backward(torch.ones((), requires_grad=True))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = engine.nonsense
    engine.destroy()


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
    "offload to CPU and NVMe": (
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
        {
            "fp16": {"enabled": True},
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu", "pin_memory": True},
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "nvme_offload_path": "PATH",
                "offload_param_nvme": True,
                "offload_optimizer_nvme": True,
            },
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 32,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        },
        {"param": "nvme", "optimizer": "nvme"},
    ),
    "stage 2 in four lines": (
        """
        import zero as deepspeed
        model = MyLargeModel()
        model_engine, optimizer, _, _ = deepspeed.initialize(model=model, config="ds_config.json")
        for batch in dataloader:
            loss = model_engine(batch)
            model_engine.backward(loss)
            model_engine.step()
        """,
        {
            "train_batch_size": 256,
            "gradient_accumulation_steps": 4,
            "fp16": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "none"},
                "contiguous_gradients": True,
                "overlap_comm": True,
                "reduce_scatter": True,
            },
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        },
        {"param": "none", "optimizer": "none"},
    ),
    "stage 2 with an optimizer of torch": (
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
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 100,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 0.0001, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "contiguous_gradients": True,
                "overlap_comm": True,
            },
            "fp16": {"enabled": True},
        },
        {"param": "none", "optimizer": "cpu"},
    ),
}


@pytest.mark.parametrize("title", SCRIPTS)
def test_a_script_of_the_documents_runs_with_its_own_json(title: str, tmp_path: Path, monkeypatch):
    script, settings, tiers = SCRIPTS[title]
    settings = json.loads(json.dumps(settings).replace("PATH", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds_config.json").write_text(json.dumps(settings))
    batches = [torch.randint(0, 16, (2, 9)) for _ in range(8)]
    names = {
        "CONFIG": settings, "MyLargeModel": Tokens, "MyTransformerModel": Tokens, "dataloader": batches,
        "data_loader": batches, "to_device": lambda batch, rank: batch,
    }  # fmt: skip
    exec(compile(textwrap.dedent(script), title, "exec"), names)
    engine = names["model_engine"]
    assert engine.global_steps == (2 if title == "stage 2 in four lines" else 1)
    assert engine.plan.stage.level == settings["zero_optimization"]["stage"]
    asked = engine.config.offload
    assert {"param": asked.param, "optimizer": asked.optimizer} == tiers
    if title == "stage 2 with an optimizer of torch":
        assert engine.get_lr() == [1e-3], "torch's own, not the config's"
    engine.destroy()
