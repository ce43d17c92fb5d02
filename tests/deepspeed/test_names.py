"""The package `zero.deepspeed`: DeepSpeed's names and what they do."""

import io
import json
import random
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.conftest import LONG_S
from tests.deepspeed.test_engine import WIDTH, Net, config, net, rows
from zero import deepspeed
from zero.checkpoint.json_values import from_json
from zero.deepspeed.runtime import lr_schedules
from zero.deepspeed.runtime.utils import see_memory_usage
from zero.errors import ConfigError
from zero.testing import run_ranks

SGD = {"type": "SGD", "params": {"lr": 0.1}}


class Fast(deepspeed.ops.adam.FusedAdam):
    def __init__(self, params) -> None:
        super().__init__(params, lr=0.1)


class MyLion(deepspeed.ops.lion.FusedLion):
    """A class of one's own."""


IMPORTS = """
import sys
before, finders = set(sys.modules), list(sys.meta_path)
import zero
import zero.deepspeed as deepspeed
assert sys.meta_path == finders
new = set(sys.modules) - before
assert {name.partition(".")[0] for name in new} - {"zero"} <= set(sys.stdlib_module_names), new
for name in new:
    if name.partition(".")[0] == "zero":
        place = sys.modules[name].__spec__.origin.removesuffix("/__init__.py").removesuffix(".py")
        assert place.endswith(name.replace(".", "/")), name
"""


def test_importing_zero_imports_nothing_but_its_own_files():
    subprocess.run([sys.executable, "-c", IMPORTS], check=True, timeout=LONG_S)


NAMES = {
    "zero.deepspeed": "DeepSpeedEngine add_config_arguments get_accelerator init_distributed initialize log_dist",
    "zero.deepspeed.accelerator": "get_accelerator",
    "zero.deepspeed.checkpointing": "checkpoint configure is_configured reset",
    "zero.deepspeed.comm": "init_distributed get_local_rank get_rank all_reduce ReduceOp",
    "zero.deepspeed.ops.adagrad": "DeepSpeedCPUAdagrad",
    "zero.deepspeed.ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "zero.deepspeed.ops.lion": "DeepSpeedCPULion FusedLion",
    "zero.deepspeed.runtime.dataloader": "RepeatingLoader",
    "zero.deepspeed.runtime.engine": "DeepSpeedEngine",
    "zero.deepspeed.runtime.lr_schedules": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR",
    "zero.deepspeed.runtime.utils": "see_memory_usage",
    "zero.deepspeed.runtime.zero": "GatheredParameters Init",
    "zero.deepspeed.runtime.zero.partition_parameters": "GatheredParameters Init ZeroParamStatus",
    "zero.deepspeed.utils": "RepeatingLoader get_z3_leaf_modules log_dist logger safe_get_full_fp32_param "
    "safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
    "safe_set_full_optimizer_state set_z3_leaf_modules unset_z3_leaf_modules z3_leaf_module",
    "zero.deepspeed.utils.logging": "log_dist logger",
    "zero.deepspeed.utils.zero_to_fp32": "convert_zero_checkpoint_to_fp32_state_dict "
    "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint",
    "zero.deepspeed.zero": "GatheredParameters Init register_external_parameter",
}


@pytest.mark.parametrize("module", NAMES)
def test_a_script_imports_the_names_that_it_imports_from_deepspeed(module):
    assert all(getattr(import_module(module), name) is not None for name in NAMES[module].split())


def test_names_are_attributes_of_the_package():
    assert deepspeed.initialize is zero.initialize
    assert deepspeed.ops.adam.FusedAdam.__mro__[1] is torch.optim.Adam
    assert deepspeed.__version__ == zero.__version__
    for name in ("pipe", "moe", "init_inference"):
        with pytest.raises(AttributeError, match=rf"zero\.deepspeed\.{name} does not exist: "):
            getattr(deepspeed, name)
    with pytest.raises(AttributeError, match=r"module 'zero\.deepspeed' has no attribute 'nothing'"):
        _ = deepspeed.nothing
    with pytest.raises(ModuleNotFoundError, match=r"zero\.ops"):
        import_module("zero.ops.adam")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda p: deepspeed.ops.adam.FusedAdam(p, lr=0.1, weight_decay=0.2), "adamw"),
        (lambda p: deepspeed.ops.adam.FusedAdam(p, adam_w_mode=False), "adam"),
        (lambda p: deepspeed.ops.adam.DeepSpeedCPUAdam([{"params": p, "lr": 0.3}], betas=(0.8, 0.9)), "adamw"),
        (lambda p: deepspeed.ops.adagrad.DeepSpeedCPUAdagrad(p), "adagrad"),
        (lambda p: deepspeed.ops.lion.FusedLion(p), "lion"),
        (lambda p: deepspeed.ops.lion.DeepSpeedCPULion(p), "lion"),
        (lambda p: Fast(p), "adamw"),
        (lambda p: MyLion(p, lr=0.1), "lion"),
    ],
)
def test_their_classes_of_optimizers_and_subclasses_train(make, kind):
    model, world = net(), zero.World.from_env()
    made = make(list(model.parameters()))
    assert isinstance(made, torch.optim.Optimizer)
    engine, optimizer, *_ = zero.initialize(model=model, optimizer=made, config={"train_batch_size": 8}, world=world)
    assert optimizer.kind == kind
    engine.backward(engine(rows(0, world)))
    engine.step()
    assert not torch.equal(model.first.weight, net().first.weight)
    engine.destroy()


@pytest.mark.parametrize("make", [deepspeed.ops.adam.FusedAdam, torch.optim.AdamW])
def test_a_subclass_with_an_update_of_its_own_is_refused(make):
    class Signed(make):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad.sign())

    model = net()
    with pytest.raises(ConfigError, match="Signed has no counterpart here"):
        zero.initialize(model=model, optimizer=Signed(model.parameters()), config=config(), world=zero.World.from_env())


@pytest.mark.parametrize("make", [deepspeed.ops.lion.FusedLion, deepspeed.ops.lion.DeepSpeedCPULion])
def test_their_lion_has_the_defaults_of_deepspeed_0_19_8(make):
    defaults = make([nn.Parameter(torch.zeros(1))]).defaults
    assert {key: defaults[key] for key in ("lr", "betas", "weight_decay")} == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "weight_decay": 0.0,
    }


SCHEDULERS = {
    "WarmupLR": {"warmup_min_lr": 0.01, "warmup_max_lr": 0.2, "warmup_num_steps": 4},
    "WarmupDecayLR": {"total_num_steps": 8, "warmup_max_lr": 0.2, "warmup_num_steps": 3, "warmup_type": "linear"},
    "WarmupCosineLR": {"total_num_steps": 8, "warmup_min_ratio": 0.1, "warmup_num_steps": 3},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.4, "cycle_first_step_size": 3},
    "LRRangeTest": {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2},
}


@pytest.mark.parametrize("where", ["given", "called"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_their_schedulers_as_objects_are_those_of_the_json(kind, where):
    """Learning rates, momenta and weights; tests/deepspeed/test_config.py has the formulas."""
    world, params = zero.World.from_env(), SCHEDULERS[kind]
    adam = {"type": "Adam", "params": {"lr": 0.2, "weight_decay": 0.01}}

    def trained(**how):
        torch.manual_seed(0)
        model = net()
        optimizer = deepspeed.ops.adam.FusedAdam(model.parameters(), lr=0.2, weight_decay=0.01)
        how = {key: made(optimizer) if where == "given" else made for key, made in how.items()}
        section = {} if how else {"scheduler": {"type": kind, "params": params}, "optimizer": adam}
        given = {"optimizer": optimizer} if how else {}
        engine, *_, scheduler = zero.initialize(model=model, config=config(**section), world=world, **given, **how)
        rates = []
        for step in range(6):
            rates.append((engine.get_lr(), engine.get_mom()))
            engine.backward(engine(rows(step, world)))
            engine.step()
        assert scheduler.get_last_lr() == engine.get_lr()
        values = zero.full_state_dict(engine)
        engine.destroy()
        return rates, values

    rates, values = trained()
    found, same = trained(lr_scheduler=lambda optimizer: getattr(lr_schedules, kind)(optimizer, **params))
    assert found == rates
    assert len({str(one) for one in rates}) > 3
    assert all(torch.equal(same[name], value) for name, value in values.items())


def test_a_scheduler_goes_on_from_an_iteration_and_rejects_what_deepspeeds_does():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.3)
    again = lr_schedules.WarmupLR(optimizer, warmup_num_steps=4, last_batch_iteration=3)
    assert again.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == [0.3]
    cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    for kind, keys, line in (
        (lr_schedules.WarmupLR, {"warmup_num_steps": 0}, "warmup_num_steps=0: must be at least 1"),
        (lr_schedules.WarmupLR, {"warmup_type": "cubic"}, "warmup_type=cubic: must be log or linear"),
        (lr_schedules.WarmupLR, {"warmup_steps": 2}, "Did you mean scheduler.params.warmup_num_steps"),
        (lr_schedules.WarmupDecayLR, {}, "total_num_steps is missing"),
        (lr_schedules.OneCycle, {**cycle, "cycle_first_step_size": 0}, "cycle_first_step_size=0: must be at least 1"),
        (lr_schedules.OneCycle, {"cycle_max_lr": 0.2}, "cycle_min_lr is missing"),
        (lr_schedules.LRRangeTest, {"lr_range_test_step_size": 0}, "lr_range_test_step_size=0: must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=line):
            kind(optimizer, **keys)


OBSERVED = json.loads(Path(__file__).with_name("schedules.json").read_text())
"""DeepSpeed 0.19.8 with an Adam of two groups, lr 0.5 and 0.25: rates of both, betas and `last_batch_iteration` at
first, after nine calls of step(), after step(2), and after load_state_dict({"last_batch_iteration": 4}) and step()."""


@pytest.mark.parametrize("case", OBSERVED, ids=lambda case: case["type"])
def test_their_schedulers_have_the_numbers_of_deepspeed_0_19_8(case):
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.5, 0.25)]
    optimizer = torch.optim.Adam(groups)
    kind = getattr(lr_schedules, case["type"])
    scheduler = kind(optimizer, **case["params"])
    assert isinstance(scheduler, kind)
    for number, (rates, *betas, iteration) in enumerate(case["rows"]):
        if number == 10:
            scheduler.step(2)
        elif number == 11:
            assert scheduler.state_dict() == {"last_batch_iteration": 2}
            scheduler.load_state_dict({"last_batch_iteration": 4})
            scheduler.step()
        elif number:
            scheduler.step()
        assert scheduler.last_batch_iteration == iteration
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates)
        assert optimizer.param_groups[1]["betas"] == pytest.approx(betas)
        if case["type"] == "OneCycle" and number:
            assert scheduler.get_mom() in (None, [group["betas"] for group in optimizer.param_groups])


@pytest.mark.parametrize("case", OBSERVED, ids=lambda case: case["type"])
def test_the_scheduler_of_a_json_is_an_object_of_its_class_with_the_numbers_of_deepspeed_0_19_8(case):
    """Cases include a decay without a step and a cycle without a second half."""
    params = {key: value or "auto" if key == "warmup_max_lr" else value for key, value in case["params"].items()}
    params.pop("decay_mom_rate", None)
    sections = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "scheduler": {"type": case["type"], "params": params},
    }
    engine, *_, scheduler = zero.initialize(model=net(), config=config(**sections), world=zero.World.from_env())
    assert type(scheduler) is getattr(lr_schedules, case["type"])
    for rates, *_ in case["rows"][:10]:
        assert engine.get_lr() == pytest.approx(rates[:1])
        scheduler.step()
    engine.destroy()


def test_a_subclass_of_their_scheduler_says_the_rates():
    class Halved(lr_schedules.WarmupLR):
        def get_lr(self):
            return [lr / 2 for lr in super().get_lr()]

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.4)
    halved = Halved(optimizer, warmup_num_steps=2)
    assert isinstance(halved, lr_schedules.WarmupLR)
    for _ in range(3):
        halved.step()
    assert halved.get_last_lr() == [optimizer.param_groups[0]["lr"]] == [0.2]


def test_a_group_whose_rate_is_a_tensor_keeps_it():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=rate)
    scheduler = lr_schedules.WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    for expected in (0.0, 0.25, 0.5):
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] is rate
        assert rate.item() == expected


def test_lines_of_some_ranks_and_memory_in_use(caplog, capsys, monkeypatch):
    caplog.set_level("INFO", "zero")
    monkeypatch.setenv("RANK", "1")
    for ranks in ([0], [1], [-1], None):
        deepspeed.utils.log_dist(f"for {ranks}", ranks=ranks)
    assert [record.getMessage() for record in caplog.records] == ["[Rank 1] for [1]", "[Rank 1] for [-1]"]
    see_memory_usage("of rank 1", force=True)
    monkeypatch.setenv("RANK", "0")
    see_memory_usage("unless it is forced")
    see_memory_usage("after a step", force=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("after a step: device ")
    assert "GiB" in line


def test_a_loader_repeats_with_another_order_each_time():
    world, data = zero.World.from_env(), torch.arange(8.0).repeat(WIDTH, 1).T.contiguous()
    engine, _, loader, _ = zero.initialize(model=net(), config=config(), world=world, training_data=data)
    batches = iter(deepspeed.utils.RepeatingLoader(loader))
    epochs = [torch.cat([next(batches) for _ in loader])[:, 0].tolist() for _ in range(2)]
    engine.destroy()
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(8))
    assert epochs[0] != epochs[1]
    with pytest.raises(StopIteration):
        next(deepspeed.utils.RepeatingLoader([]))


def test_the_last_batch_that_is_dropped_is_a_ranks_and_not_the_rows_that_ranks_do_not_divide():
    """Rows of the first epoch by DeepSpeed 0.19.8: eleven, of which the first counts again."""

    def run(world):
        with world.exclusive():
            model = net()
        settings = config(train_batch_size=12, dataloader_drop_last=True)
        engine, _, loader, _ = zero.initialize(model=model, config=settings, world=world, training_data=list(range(11)))
        engine.destroy()
        return [batch.tolist() for batch in loader]

    assert run_ranks(4, run) == [[[10, 5, 9]], [[0, 8, 7]], [[4, 2, 6]], [[3, 1, 10]]]


class Recomputed(Net):
    def forward(self, batch: Tensor) -> Tensor:
        h = deepspeed.checkpointing.checkpoint(self.first, batch)
        for block in self.blocks:
            h = deepspeed.checkpointing.checkpoint(block, h)
        return super().forward(batch) + h.square().mean()


class Kept(Net):
    def forward(self, batch: Tensor) -> Tensor:
        h = self.first(batch)
        for block in self.blocks:
            h = block(h)
        return super().forward(batch) + h.square().mean()


@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_checkpointed_by_their_name_learns_the_same(stage):
    def rank_main(world):
        trained = []
        for kind in (Recomputed, Kept):
            with world.exclusive():
                torch.manual_seed(0)
                model = kind()
            engine, *_ = zero.initialize(model=model, config=config(stage=stage), world=world)
            for step in range(2):
                engine.backward(engine(rows(step, world)))
                engine.step()
            trained.append(zero.full_state_dict(engine))
            engine.destroy()
        return trained

    deepspeed.checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=True)
    assert deepspeed.checkpointing.is_configured()
    for one, other in run_ranks(2, rank_main):
        assert all(torch.equal(one[name], value) for name, value in other.items())


def test_weights_of_a_checkpoint_of_several_ranks_are_read_and_written_whole(tmp_path: Path):
    """By the names of zero_to_fp32, in a process of its own, with what is frozen and without."""
    convert = import_module("zero.deepspeed.utils.zero_to_fp32")

    def rank_main(world):
        with world.exclusive():
            model = net()
            model.first.requires_grad_(False)
        engine, *_ = zero.initialize(model=model, config=config(stage=3, bf16={"enabled": True}), world=world)
        engine.backward(engine(rows(0, world)))
        engine.step()
        engine.save_checkpoint(tmp_path, tag="best")
        wanted = engine.module_state_dict()
        engine.destroy()
        return wanted

    wanted = run_ranks(2, rank_main)[0]
    found = convert.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) and value.dtype == torch.float32 for name, value in wanted.items())
    trained = convert.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "best", exclude_frozen_parameters=True)
    assert wanted.keys() - trained.keys() == {"first.weight", "first.bias"}
    other = convert.load_state_dict_from_zero_checkpoint(net(5), tmp_path, tag="best")
    assert all(torch.equal(other.state_dict()[name], value) for name, value in wanted.items())
    convert.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "made")
    written = torch.load(tmp_path / "made/pytorch_model.bin")
    assert all(torch.equal(written[name], value) for name, value in wanted.items())
    convert.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "files", safe_serialization=True)
    assert list((tmp_path / "files").glob("*.safetensors"))
    with pytest.raises(ConfigError, match="use zero-train export --shard-size"):
        convert.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "more", max_shard_size="1GB")
    with pytest.raises(zero.ZeroError, match="there is no checkpoint"):
        convert.get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="worst")


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("bf16", [False, True])
def test_gathered_parameters_are_whole_inside_and_edits_of_one_rank_count(stage, bf16):
    """They are read and written by name or through .data, and outside the block reads return the edit."""

    def rank_main(world):
        with world.exclusive():
            model = net()
        settings = config(stage=stage, optimizer=SGD, bf16={"enabled": bf16})
        engine, *_ = zero.initialize(model=model, config=settings, world=world)
        weight, bias = model.first.weight, model.first.bias
        with deepspeed.zero.GatheredParameters([weight, bias], modifier_rank=0):
            if world.rank == 0:
                nn.init.ones_(weight)
                bias.data[0] = 5.0
                bias.data.mul_(2)
                assert float(weight.sum()) == weight.numel()
        with deepspeed.zero.GatheredParameters(weight):
            assert bool((weight == 1).all())
        edited = pytest.raises(ConfigError, match=r"was edited, but it is a copy; .* modifier_rank=0 to Gath")
        with edited, deepspeed.zero.GatheredParameters(weight), torch.no_grad():
            weight.zero_()
        assert bool((weight == 1).all())
        assert bias.detach()[0].item() == 10.0
        engine.destroy()

    run_ranks(2, rank_main)


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_are_saved_one_by_one_by_a_script_that_asks_for_their_status(stage):
    """As DeepSpeed-Chat and PEFT do: there is nothing to gather, because a parameter reads as whole by itself."""
    status = deepspeed.zero.ZeroParamStatus

    def rank_main(world):
        with world.exclusive():
            model = net()
        engine, *_ = zero.initialize(model=model, config=config(stage=stage), world=world)
        engine.backward(engine(rows(0, world)))
        engine.step()
        saved = {}
        for name, p in engine.module.named_parameters():
            absent = [one for one in [p] if hasattr(one, "ds_id") and one.ds_status == status.NOT_AVAILABLE]
            with deepspeed.zero.GatheredParameters(absent, enabled=stage == 3):
                saved[name] = p.data.cpu()
        file = io.BytesIO()
        torch.save(saved, file)
        wanted = engine.module_state_dict()
        engine.destroy()
        return file.getvalue(), wanted

    for written, wanted in run_ranks(2, rank_main):
        found = torch.load(io.BytesIO(written))
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert found.keys() == wanted.keys()


def test_full_values_are_read_and_written_by_the_parameter_itself():
    world, model = zero.World.from_env(), net()
    engine, *_ = zero.initialize(model=model, config=config(), world=world)
    weight = model.last.weight
    utils = deepspeed.utils
    assert utils.safe_get_full_grad(weight) is None
    engine.backward(engine(rows(0, world)))
    grad = utils.safe_get_full_grad(weight)
    assert torch.equal(grad, zero.get_full(engine, "last.weight", "grad"))
    engine.step()
    assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), zero.get_full(engine, weight, "mu"))
    utils.safe_set_full_fp32_param(weight, torch.zeros_like(weight))
    utils.safe_set_full_optimizer_state(weight, torch.ones(1, WIDTH), "exp_avg_sq")
    assert not zero.get_full(engine, weight).any()
    assert bool((zero.get_full(engine, weight, "nu") == 1).all())
    with zero.gathered(engine, [weight], modify=True) as full:
        full["last.weight"].fill_(2)
    assert bool((weight == 2).all())
    engine.destroy()
    with pytest.raises(ConfigError, match="belongs to no engine"):
        utils.safe_get_full_fp32_param(nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_parameter_has_no_full_values_of_its_training(stage):
    """The functions return None as in DeepSpeed, because scripts read every parameter."""
    model, utils = net(), deepspeed.utils
    model.first.requires_grad_(False)
    engine, *_ = zero.initialize(model=model, config=config(stage=stage), world=zero.World.from_env())
    engine.backward(engine(rows(0, engine.plan.world)))
    reads = (
        utils.safe_get_full_grad,
        utils.safe_get_full_fp32_param,
        lambda parameter: utils.safe_get_full_optimizer_state(parameter, "exp_avg"),
    )
    for parameter in model.parameters():
        assert [read(parameter) is not None for read in reads] == [parameter.requires_grad] * 3
    engine.destroy()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[0](x)


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mixture = Experts()

    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(self.mixture(batch))


class Sparse(Experts):
    """A subclass."""


@pytest.mark.parametrize("named", [Experts, "Sparse", f"{__name__}.Sparse", None])
def test_a_leaf_module_is_gathered_whole(named):
    """By the class of a base, by name, by qualified name, or by the config."""
    model, world = Mixture(), zero.World.from_env()
    model.mixture = Sparse()
    settings = config()
    if named is None:
        settings["zero_optimization"]["leaf_module"] = {"classes": [f"{__name__}.Sparse", "NotThere"]}
    else:
        assert deepspeed.utils.set_z3_leaf_modules(model, [named]) == [model.mixture]
    engine, *_ = zero.initialize(model=model, config=settings, world=world)
    assert deepspeed.utils.get_z3_leaf_modules(engine.module) == [model.mixture]
    names = [unit.name for unit in engine.plan.units]
    assert "mixture" in names
    assert not any(name.startswith("mixture.") for name in names)
    assert "blocks.1" in names
    engine.backward(engine(rows(0, world)))
    engine.step()
    engine.destroy()


def test_leaf_modules_can_be_unset_and_absent_ones_are_named():
    model, utils = Mixture(), deepspeed.utils
    with pytest.raises(ConfigError, match="the model has no module Expert"):
        utils.set_z3_leaf_modules(model, ["Expert"])
    assert utils.set_z3_leaf_modules(model, [Experts]) == [model.mixture]
    assert utils.z3_leaf_module(model.mixture)
    assert utils.unset_z3_leaf_modules(model, [Experts]) == [model.mixture]
    assert utils.get_z3_leaf_modules(model) == []


def test_the_accelerator_is_torchs_or_the_cpu():
    accelerator = deepspeed.get_accelerator()
    torch.ones(1, device=accelerator.current_device_name())
    assert accelerator.device_count() >= 1
    assert accelerator.communication_backend_name() in ("gloo", "nccl")
    accelerator.synchronize()
    accelerator.empty_cache()
    assert accelerator._name == accelerator.device_name()
    assert 0 <= accelerator.memory_allocated() <= accelerator.memory_reserved() <= accelerator.total_memory()
    assert 0 < accelerator.available_memory() <= accelerator.total_memory()
    accelerator.reset_max_memory_allocated()
    assert accelerator.is_bf16_supported() in (True, False)
    assert accelerator.pin_memory(torch.ones(2)).to(accelerator.device()).device.type == accelerator._name
    with accelerator.stream(accelerator.current_stream()):
        accelerator.set_rng_state(accelerator.get_rng_state())
    with pytest.raises(AttributeError, match=r"get_accelerator\(\) has no nothing"):
        _ = accelerator.nothing


def test_steps_are_counted_on_where_the_optimizer_is_left_out(tmp_path: Path):
    world = zero.World.from_env()

    def engine_of():
        return zero.initialize(model=net(), config=config(), world=world)[0]

    first = engine_of()
    for step in range(3):
        first.backward(first(rows(step, world)))
        first.step()
    first.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    first.destroy()
    for how, steps in (({}, 3), ({"load_optimizer_states": False}, 3), ({"load_module_only": True}, 0)):
        again = engine_of()
        again.load_checkpoint(tmp_path, **how)
        assert again.global_steps == steps
        again.destroy()


def test_a_folder_of_deepspeeds_is_no_start_from_scratch(tmp_path: Path):
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(b"")
    (tmp_path / "latest").write_text("global_step5")
    engine, *_ = zero.initialize(model=net(), config=config(), world=zero.World.from_env())
    with pytest.raises(zero.ZeroError, match=r"is a checkpoint of DeepSpeed's .*zero-train import --from deepspeed"):
        engine.load_checkpoint(tmp_path)
    engine.destroy()


def test_what_a_script_remembers_comes_back_as_it_was(tmp_path: Path):
    """Whatever needs no pickle: states of generators, tensors, tuples, sets, bytes, keys that are no texts."""
    world = zero.World.from_env()
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "shape": (2, (3, "x")),
        "seen": {1, 5},
        "raw": b"\x00\xff",
        3: [torch.ones(2, 3, dtype=torch.bfloat16), torch.empty(0), torch.ones(1)],
        "limit": float("inf"),
    }
    engine, *_ = zero.initialize(model=net(), config=config(), world=world)
    engine.backward(engine(rows(0, world)))
    engine.step()
    engine.save_checkpoint(tmp_path, client_state=state)
    found = engine.load_checkpoint(tmp_path)[1]
    engine.destroy()
    assert found.keys() == state.keys()
    torch.testing.assert_close(found.pop("torch"), state.pop("torch"), rtol=0, atol=0)
    for one, other in zip(found.pop(3), state.pop(3), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert found == state
    random.setstate(found["python"])


@pytest.mark.parametrize("said", [["load", [1], "AAAA"], ["int8", [5], "AAAA"], ["int8", "x", "AAAA"], ["int8"], 3])
def test_a_tensor_that_a_file_cannot_mean_is_refused(said):
    with pytest.raises(zero.ZeroError, match="the client state has a tensor that cannot be read"):
        from_json({"zero: a tensor": said})


class WithHead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)


def test_a_checkpoint_of_a_model_that_had_less_loads_where_that_is_allowed(tmp_path: Path):
    """What only one side has stays as it is, on either side."""
    world = zero.World.from_env()

    def engine_of(model: nn.Module):
        return zero.initialize(model=model, config=config(), world=world)[0]

    first = engine_of(net())
    first.backward(first(rows(0, world)))
    first.step()
    first.save_checkpoint(tmp_path / "less")
    values = zero.full_state_dict(first)
    first.destroy()
    torch.manual_seed(3)
    more = WithHead()
    head = more.head.weight.detach().clone()
    second = engine_of(more)
    with pytest.raises(zero.ZeroError, match="missing"):
        second.load_checkpoint(tmp_path / "less")
    second.load_checkpoint(tmp_path / "less", load_module_strict=False)
    found = zero.full_state_dict(second)
    assert all(torch.equal(found[name], value) for name, value in values.items())
    assert torch.equal(found["head.weight"], head)
    second.save_checkpoint(tmp_path / "more")
    second.destroy()
    third = engine_of(net(5))
    third.load_checkpoint(tmp_path / "more", load_module_strict=False)
    assert all(torch.equal(zero.full_state_dict(third)[name], value) for name, value in values.items())
    third.destroy()
