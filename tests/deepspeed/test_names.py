"""The package `zero.deepspeed`: DeepSpeed's names and what they do."""

import io
import json
import math
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
from tests.deepspeed.harness import SGD, WIDTH, Net, engine_of, net, rows, same, train, trained
from zero import deepspeed
from zero.checkpoint.format.json_values import from_json
from zero.deepspeed.runtime import lr_schedules
from zero.deepspeed.runtime.utils import see_memory_usage
from zero.errors import CheckpointError, ConfigError
from zero.testing import run_ranks


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
    "zero.deepspeed.ops.muon": "MuonWithAuxAdam",
    "zero.deepspeed.runtime.dataloader": "RepeatingLoader",
    "zero.deepspeed.runtime.engine": "DeepSpeedEngine",
    "zero.deepspeed.runtime.lr_schedules": "LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR "
    "VALID_LR_SCHEDULES",
    "zero.deepspeed.runtime.utils": "see_memory_usage",
    "zero.deepspeed.runtime.zero": "GatheredParameters Init",
    "zero.deepspeed.runtime.zero.partition_parameters": "GatheredParameters Init ZeroParamStatus",
    "zero.deepspeed.utils": "RepeatingLoader get_z3_leaf_modules log_dist logger safe_get_full_fp32_param "
    "safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
    "safe_set_full_optimizer_state set_z3_leaf_modules",
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
    for name in ("pipe", "moe", "init_inference", "nothing"):
        with pytest.raises(
            AttributeError, match=rf"zero\.deepspeed has no '{name}'. It has data parallelism, but no pipe"
        ):
            getattr(deepspeed, name)
    with pytest.raises(ModuleNotFoundError, match=r"zero\.ops"):
        import_module("zero.ops.adam")


def by_dimensions(parameters):
    return [{"params": [p for p in parameters if (p.ndim == 2) is uses], "use_muon": uses} for uses in (True, False)]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda p: deepspeed.ops.adam.FusedAdam(p, lr=0.1, weight_decay=0.2), "adamw"),
        (lambda p: deepspeed.ops.adam.FusedAdam(p, adam_w_mode=False), "adam"),
        (lambda p: deepspeed.ops.adam.DeepSpeedCPUAdam([{"params": p, "lr": 0.3}], betas=(0.8, 0.9)), "adamw"),
        (lambda p: deepspeed.ops.adagrad.DeepSpeedCPUAdagrad(p), "adagrad"),
        (lambda p: deepspeed.ops.lion.FusedLion(p), "lion"),
        (lambda p: deepspeed.ops.lion.DeepSpeedCPULion(p), "lion"),
        (lambda p: deepspeed.ops.muon.MuonWithAuxAdam(by_dimensions(p)), "muon"),
        (lambda p: Fast(p), "adamw"),
        (lambda p: MyLion(p, lr=0.1), "lion"),
    ],
)
def test_their_classes_of_optimizers_and_subclasses_train(make, kind):
    model = net()
    made = make(list(model.parameters()))
    assert isinstance(made, torch.optim.Optimizer)
    if type(made) in (deepspeed.ops.lion.FusedLion, deepspeed.ops.lion.DeepSpeedCPULion):  # as DeepSpeed 0.19.8
        defaults = {key: made.defaults[key] for key in ("lr", "betas", "weight_decay")}
        assert defaults == {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    with engine_of(model, arguments={"optimizer": made}) as engine:
        assert engine.optimizer.kind == kind
        train(engine, 0)
        assert not torch.equal(model.first.weight, net().first.weight)


@pytest.mark.parametrize("make", [deepspeed.ops.adam.FusedAdam, torch.optim.AdamW])
def test_a_subclass_with_an_update_of_its_own_is_refused(make):
    class Signed(make):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad.sign())

    with pytest.raises(ConfigError, match="Signed is not supported"):
        trained(zero.open_world(), prepare=lambda model: {"optimizer": Signed(model.parameters())})


def test_a_scheduler_goes_on_from_an_iteration_and_rejects_what_deepspeeds_does():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.3)
    again = lr_schedules.WarmupLR(optimizer, warmup_num_steps=4, last_batch_iteration=3)
    assert again.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == [0.3]
    cycle = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}
    for kind, keys, line in (
        (lr_schedules.WarmupLR, {"warmup_num_steps": 0}, "warmup_num_steps=0: must be at least 1"),
        (lr_schedules.WarmupLR, {"warmup_min_lr": [0.1, 0.2]}, "must have one number for each of the optimizer's 1 gr"),
        (lr_schedules.WarmupLR, {"warmup_max_lr": [0.1, "x"]}, "at most 1000, or a list with such a number for each"),
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
    assert case["type"] in lr_schedules.VALID_LR_SCHEDULES


@pytest.mark.parametrize("case", OBSERVED, ids=lambda case: case["type"])
def test_the_scheduler_of_a_json_is_an_object_of_its_class_with_the_numbers_of_deepspeed_0_19_8(case):
    """Cases include a decay without a step and a cycle without a second half."""
    params = {key: value or "auto" if key == "warmup_max_lr" else value for key, value in case["params"].items()}
    params.pop("decay_mom_rate", None)
    sections = {
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "scheduler": {"type": case["type"], "params": params},
    }
    with engine_of(**sections) as engine:
        assert type(engine.lr_scheduler) is getattr(lr_schedules, case["type"])
        for rates, *_ in case["rows"][:10]:
            assert engine.get_lr() == pytest.approx(rates[:1])
            engine.lr_scheduler.step()


LISTS = [
    ("WarmupLR", {"warmup_min_lr": [0.0, 0.1], "warmup_max_lr": [0.4, 0.5], "warmup_num_steps": 3}),
    ("WarmupDecayLR", {"warmup_min_lr": [0.1, 0.2], "warmup_max_lr": 0.5, "warmup_num_steps": 2, "total_num_steps": 4}),
    ("OneCycle", {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": (0.3, 0.5), "cycle_first_step_size": 2,
                  "cycle_min_mom": [0.7, 0.8], "cycle_max_mom": [0.9, 0.95]}),
    ("LRRangeTest", {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys"), LISTS, ids=[name for name, _ in LISTS])
def test_a_list_has_a_number_for_each_group_whose_schedule_is_that_of_its_numbers_alone(name, keys):
    def made(rates, keys):
        optimizer = torch.optim.Adam([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])
        return optimizer, getattr(lr_schedules, name)(optimizer, **keys)

    def own(group):
        return {key: value[group] if isinstance(value, list | tuple) else value for key, value in keys.items()}

    (optimizer, both), *alone = made((0.5, 0.25), keys), made((0.5,), own(0)), made((0.25,), own(1))
    for _ in range(6):
        assert both.get_lr() == [scheduler.get_lr()[0] for _, scheduler in alone]
        betas = [single.param_groups[0]["betas"] for single, _ in alone]
        assert [group["betas"] for group in optimizer.param_groups] == betas
        both.step()
        for _, scheduler in alone:
            scheduler.step()
    assert len({*both.get_lr()}) == 2
    with pytest.raises(ConfigError, match=r"must have one number for each of the optimizer's 1 group"):
        made((0.5,), keys)


def test_momentum_before_the_first_step_is_the_highest_while_the_groups_have_the_lowest_as_in_deepspeed():
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    scheduler = lr_schedules.OneCycle(optimizer, cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=4)
    assert scheduler.get_mom() == [(0.9, 0.99)]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    scheduler.step()
    assert scheduler.get_mom() == [optimizer.param_groups[0]["betas"]] == [(pytest.approx(0.875), 0.99)]


def test_an_unknown_type_of_warm_up_is_logarithmic_with_a_warning_as_in_deepspeed(caplog):
    caplog.set_level("WARNING", "zero")
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    scheduler = lr_schedules.WarmupLR(optimizer, warmup_max_lr=0.2, warmup_num_steps=4, warmup_type="cubic")
    assert [record.getMessage() for record in caplog.records] == [
        "scheduler.params.warmup_type=cubic is neither log nor linear: log is used, as in DeepSpeed"
    ]
    scheduler.step(1)
    assert scheduler.get_lr() == pytest.approx([0.2 * math.log(2) / math.log(4)])


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
    data = torch.arange(8.0).repeat(WIDTH, 1).T.contiguous()
    with engine_of(arguments={"training_data": data}) as engine:
        loader = engine.training_dataloader
    batches = iter(deepspeed.utils.RepeatingLoader(loader))
    epochs = [torch.cat([next(batches) for _ in range(len(loader))])[:, 0].tolist() for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(8))
    assert epochs[0] != epochs[1]
    with pytest.raises(StopIteration):
        next(deepspeed.utils.RepeatingLoader([]))


def test_the_last_batch_that_is_dropped_is_a_ranks_and_not_the_rows_that_ranks_do_not_divide():
    """Rows of the first epoch by DeepSpeed 0.19.8: eleven, of which the first counts again."""

    def run(world):
        how = {"train_batch_size": 12, "dataloader_drop_last": True, "arguments": {"training_data": list(range(11))}}
        with engine_of(world=world, **how) as engine:
            return [batch.tolist() for batch in engine.training_dataloader]

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
        how = {"stage": stage, "optimizer": SGD}
        return [trained(world, 2, model=lambda kind=kind: net(0, kind), **how) for kind in (Recomputed, Kept)]

    deepspeed.checkpointing.configure(None, partition_activations=True, checkpoint_in_cpu=True)
    assert deepspeed.checkpointing.is_configured()
    for (losses, values), (losses_kept, values_kept) in run_ranks(2, rank_main):
        assert losses == losses_kept
        same(values, values_kept)


def test_weights_of_a_checkpoint_of_several_ranks_are_read_and_written_whole(tmp_path: Path):
    """By the names of zero_to_fp32, in a process of its own, with what is frozen and without."""
    convert = import_module("zero.deepspeed.utils.zero_to_fp32")

    def half_frozen():
        model = net()
        model.first.requires_grad_(False)
        return model

    def rank_main(world):
        with engine_of(half_frozen, world, bf16={"enabled": True}) as engine:
            train(engine, 0)
            engine.save_checkpoint(tmp_path, tag="best")
            return engine.module_state_dict()

    wanted = run_ranks(2, rank_main)[0]
    weights = convert.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], value) and value.dtype == torch.float32 for name, value in wanted.items())
    trained = convert.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "best", exclude_frozen_parameters=True)
    assert wanted.keys() - trained.keys() == {"first.weight", "first.bias"}
    other = convert.load_state_dict_from_zero_checkpoint(net(5), tmp_path, tag="best")
    assert all(torch.equal(other.state_dict()[name], value) for name, value in wanted.items())
    convert.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "made")
    written = torch.load(tmp_path / "made/pytorch_model.bin")
    assert all(torch.equal(written[name], value) for name, value in wanted.items())
    convert.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "files", safe_serialization=True)
    assert list((tmp_path / "files").glob("*.safetensors"))
    with pytest.raises(ConfigError, match="Use zero-train export --shard-size"):
        convert.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "more", max_shard_size="1GB")
    with pytest.raises(zero.ZeroError, match="there is no checkpoint"):
        convert.get_fp32_state_dict_from_zero_checkpoint(tmp_path, tag="worst")


@pytest.mark.parametrize("stage", [0, 3])
def test_parameters_are_saved_one_by_one_by_a_script_that_asks_for_their_status(stage):
    """As DeepSpeed-Chat and PEFT do: there is nothing to gather, because a parameter reads as whole by itself."""
    status = deepspeed.zero.ZeroParamStatus

    def rank_main(world):
        with engine_of(world=world, stage=stage) as engine:
            train(engine, 0)
            saved = {}
            for name, p in engine.module.named_parameters():
                absent = [p] if hasattr(p, "ds_id") and p.ds_status == status.NOT_AVAILABLE else []
                with deepspeed.zero.GatheredParameters(absent, enabled=stage == 3):
                    saved[name] = p.data.cpu()
            file = io.BytesIO()
            torch.save(saved, file)
            return file.getvalue(), engine.module_state_dict()

    for written, wanted in run_ranks(2, rank_main):
        same(torch.load(io.BytesIO(written)), wanted)


def test_full_values_are_read_and_written_by_the_parameter_itself():
    utils = deepspeed.utils
    with engine_of() as engine:
        weight = engine.module.last.weight
        assert utils.safe_get_full_grad(weight) is None
        engine.backward(engine(rows(0)))
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
    with pytest.raises(ConfigError, match="belongs to no engine"):
        utils.safe_get_full_fp32_param(nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_frozen_parameter_has_no_full_values_of_its_training(stage):
    """The functions return None as in DeepSpeed, because scripts read every parameter."""
    model, utils = net(), deepspeed.utils
    model.first.requires_grad_(False)
    reads = (
        utils.safe_get_full_grad,
        utils.safe_get_full_fp32_param,
        lambda parameter: utils.safe_get_full_optimizer_state(parameter, "exp_avg"),
    )
    with engine_of(model, stage=stage) as engine:
        engine.backward(engine(rows(0)))
        for parameter in model.parameters():
            assert [read(parameter) is not None for read in reads] == [parameter.requires_grad] * 3


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
    model, zero_optimization = Mixture(), {"stage": 3}
    model.mixture = Sparse()
    if named is None:
        zero_optimization["leaf_module"] = {"classes": [f"{__name__}.Sparse", "NotThere"]}
    else:
        assert deepspeed.utils.set_z3_leaf_modules(model, [named]) == [model.mixture]
    with engine_of(model, zero_optimization=zero_optimization) as engine:
        assert deepspeed.utils.get_z3_leaf_modules(engine.module) == [model.mixture]
        names = [unit.name for unit in engine.plan.units]
        assert "mixture" in names
        assert not any(name.startswith("mixture.") for name in names)
        assert "blocks.1" in names
        train(engine, 0)
    with pytest.raises(ConfigError, match="the model has no module Expert"):
        deepspeed.utils.set_z3_leaf_modules(model, ["Expert"])
    assert deepspeed.utils.set_z3_leaf_modules(model, ["Expert"], raise_if_not_found=False) == []


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


def test_a_folder_of_deepspeeds_is_no_start_from_scratch(tmp_path: Path):
    (tmp_path / "global_step5").mkdir()
    (tmp_path / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(b"")
    (tmp_path / "latest").write_text("global_step5")
    line = r"is a checkpoint of DeepSpeed's .*zero-train import --from deepspeed"
    with engine_of() as engine, pytest.raises(zero.ZeroError, match=line):
        engine.load_checkpoint(tmp_path)


def test_what_a_script_remembers_comes_back_as_it_was(tmp_path: Path):
    """Whatever needs no pickle: states of generators, tensors, tuples, sets, bytes, keys that are no texts."""
    numpy = pytest.importorskip("numpy")
    draws = numpy.random.RandomState(3)
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "shape": (2, (3, "x")),
        "seen": {1, 5},
        "raw": b"\x00\xff",
        3: [torch.ones(2, 3, dtype=torch.bfloat16), torch.empty(0), torch.ones(1)],
        "limit": float("inf"),
        "numpy": draws.get_state(),
        "best": numpy.float32(0.5),
    }
    with engine_of() as engine:
        engine.save_checkpoint(tmp_path, client_state=state)
        expected = draws.rand(3)
        loaded = engine.load_checkpoint(tmp_path)[1]
        draws.set_state(loaded.pop("numpy"))
        assert (draws.rand(3) == expected).all()
        with pytest.raises(CheckpointError, match="client_state"):
            engine.save_checkpoint(tmp_path, "texts", {"names": numpy.array(["a"])})
    state.pop("numpy")
    assert loaded.keys() == state.keys()
    torch.testing.assert_close(loaded.pop("torch"), state.pop("torch"), rtol=0, atol=0)
    for value, other in zip(loaded.pop(3), state.pop(3), strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=0)
    assert loaded == state
    random.setstate(loaded["python"])


@pytest.mark.parametrize("said", [["load", [1], "AAAA"], ["int8", [5], "AAAA"], ["int8", "x", "AAAA"], ["int8"], 3])
def test_a_tensor_that_a_file_cannot_mean_is_refused(said):
    with pytest.raises(zero.ZeroError, match="the client state has a tensor that cannot be read"):
        from_json({"zero: a tensor": said})


class WithHead(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)


def test_a_checkpoint_of_a_model_that_had_less_loads_where_that_is_allowed(tmp_path: Path):
    """Entries that only the model or only the checkpoint has stay as they are."""
    with engine_of() as engine:
        train(engine, 0)
        engine.save_checkpoint(tmp_path / "less")
        values = zero.full_state_dict(engine)
    more = net(3, WithHead)
    head = more.head.weight.detach().clone()
    with engine_of(more) as engine:
        with pytest.raises(zero.ZeroError, match="missing"):
            engine.load_checkpoint(tmp_path / "less")
        engine.load_checkpoint(tmp_path / "less", load_module_strict=False)
        loaded = zero.full_state_dict(engine)
        assert all(torch.equal(loaded[name], value) for name, value in values.items())
        assert torch.equal(loaded["head.weight"], head)
        engine.save_checkpoint(tmp_path / "more")
    with engine_of(net(5)) as engine:
        engine.load_checkpoint(tmp_path / "more", load_module_strict=False)
        same(zero.full_state_dict(engine), values)
