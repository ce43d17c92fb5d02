"""The model that was given to zero.initialize is the one that trains: what a script does with it means what it did."""

import contextlib
import copy
import gc
import pickle
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero
import zero.deepspeed as deepspeed
from tests.deepspeed.harness import SGD, WIDTH, Net, close, config, engine_of, net, plain as plain_loop, rows, same, sgd
from zero.engine.meta import is_meta
from zero.errors import ConfigError, OutsideUnitError, StaleStateError
from zero.testing import run_ranks

STAGES = pytest.mark.parametrize("stage", range(4))
STAGES_AND_RANKS = pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 1), (2, 2), (3, 1), (3, 2)])
whole = zero.full_state_dict
taken = partial(engine_of, optimizer=SGD)


def plain(*steps: int, **how) -> dict[str, Tensor]:
    return plain_loop(*steps, make=sgd, **how)[1]


def train(engine: zero.Engine, *steps: int, change=lambda model: None) -> None:
    """By the model that was given, not by the engine."""
    for step in steps:
        engine.backward(engine.module(rows(step, engine.plan.world)))
        change(engine.module)
        engine.step()


def read(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@STAGES_AND_RANKS
def test_the_given_model_is_the_one_that_trains(stage, ranks):
    """Its identity, class, names, parameters and their sizes; called by itself it computes and evaluates."""
    expected = net()
    values = plain(0, 1, model=expected)
    evaluated = expected(torch.ones(2, WIDTH)).item()

    def rank_main(world):
        with world.exclusive():
            model = net(world.rank)
        names, held = [name for name, _ in model.named_modules()], dict(model.named_parameters())
        with taken(model, world, stage=stage) as engine:
            assert engine.module is model
            assert isinstance(model, Net)
            assert type(model).__name__ == "Net"
            assert [name for name, _ in model.named_modules()] == names
            assert all(parameter is held[name] for name, parameter in model.named_parameters())
            assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in net().parameters())
            train(engine, 0, 1)
            model.eval()
            with torch.no_grad():
                assert model(torch.ones(2, WIDTH)).item() == pytest.approx(evaluated, rel=1e-5)
            assert not engine.module.training
            return read(model), model.state_dict()

    for weights, state_dict in run_ranks(ranks, rank_main):
        close(weights, values)
        close(state_dict, values)
        assert all(
            type(value) is Tensor and value.untyped_storage().nbytes() == value.nbytes for value in weights.values()
        )


@pytest.mark.parametrize("stage", range(3))
def test_one_rank_alone_reads_saves_and_evaluates_where_parameters_are_whole(stage):
    """`if rank == 0: torch.save(model.state_dict())`, as scripts for stages 0 to 2 do; the others go on, or end."""

    def rank_main(world):
        with taken(lambda: net(world.rank), world, stage=stage) as engine:
            train(engine, 0)
            if world.rank == 1:
                with torch.no_grad():
                    engine.module(torch.ones(2, WIDTH))
            train(engine, 1)
            world.barrier()  # nobody helps from here on
            saved = engine.module.state_dict() if world.rank == 0 else None
            world.barrier()
            return saved

    close(run_ranks(2, rank_main)[0], plain(0, 1))


@STAGES
def test_a_saved_state_dict_is_loaded_by_plain_torch_and_back(stage, tmp_path: Path):
    with taken(stage=stage) as engine:
        model = engine.module
        train(engine, 0, 1)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        torch.save({"first": model.first.weight}, tmp_path / "one.pt")
        saved = torch.load(tmp_path / "model.pt", weights_only=True)
        bare = net(1)
        bare.load_state_dict(saved)
        close(bare.state_dict(), plain(0, 1))
        assert torch.equal(torch.load(tmp_path / "one.pt", weights_only=True)["first"], saved["first.weight"])
        other = net(7).state_dict()
        assert model.load_state_dict(other).missing_keys == []
        same(whole(engine), other)
        with pytest.raises(ConfigError, match=r"missing first\.weight.*unknown more"):
            model.load_state_dict({**{k: v for k, v in other.items() if k != "first.weight"}, "more": torch.ones(1)})
        told = engine.load_module_state_dict({"last.bias": torch.full((1,), 5.0), "more": torch.ones(1)}, strict=False)
        assert told.unexpected_keys == ["more"]
        assert float(whole(engine)["last.bias"]) == 5.0


@STAGES
def test_hooks_and_flags_that_are_set_on_it_later_count(stage):
    model, seen = net(), []
    with taken(model, stage=stage) as engine:
        model.register_forward_hook(lambda module, args, output: seen.append("model"))
        model.blocks[1].register_forward_hook(lambda module, args, output: seen.append("block"))
        model.last.weight.register_hook(lambda grad: grad * 0)
        train(engine, 0)
        assert seen == ["block", "model"]
        before = net().state_dict()
        assert torch.equal(model.last.weight, before["last.weight"])
        assert not torch.equal(model.last.bias, before["last.bias"])


@STAGES_AND_RANKS
def test_grad_is_the_gradient_below_stage_2_and_a_named_answer_from_there(stage, ranks):
    """The mean over the global batch; what is written into it counts."""

    def bound(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.clamp_(-0.01, 0.01)
            parameter.grad.data.mul_(3)

    expected = plain(0) if stage >= 2 else plain(0, 1, change=bound)

    def rank_main(world):
        with taken(world=world, stage=stage) as engine:
            weight = engine.module.first.weight
            assert weight.grad is None
            engine.backward(engine.module(rows(5, world)))
            engine.module.zero_grad()  # drops what has arrived
            assert weight.grad is None
            if stage >= 2:
                engine.backward(engine.module(rows(0, world)))
                with pytest.raises(ConfigError, match=rf"first\.weight\.grad: stage {stage} shards grad.*get_full"):
                    _ = weight.grad
                engine.step()
            else:
                train(engine, 0, 1, change=bound)
            close(whole(engine), expected)
            assert weight.grad is None

    run_ranks(ranks, rank_main)


class Encoder(Net):
    def encode(self, batch: Tensor) -> Tensor:
        return self.blocks[0](self.first(batch)).square().mean() + 0.1 * self.last.weight.square().sum()


@STAGES
def test_a_method_that_is_not_forward_trains(stage):
    with taken(net(0, Encoder), stage=stage) as engine:
        for step in (0, 1):
            engine.backward(engine.module.encode(rows(step)))
            engine.step()
        close(whole(engine), plain(0, 1, model=net(0, Encoder), loss=lambda model, batch: model.encode(batch)))


@pytest.mark.parametrize("bf16", [False, True])
def test_to_where_it_is_is_nothing_and_anywhere_else_is_refused(bf16):
    with taken(bf16={"enabled": bf16}) as engine:
        model = engine.module
        assert model.to("cpu") is model
        assert (model.bfloat16() if bf16 else model.float()) is model
        for move in (model.half, model.double, lambda: model.to("meta"), lambda: model.first.half()):
            with pytest.raises(
                (ConfigError, OutsideUnitError), match=r"Leave out \.to\(\)|first\.weight was written to"
            ):
                move()


def test_an_engine_that_is_dropped_is_not_kept_alive_by_the_model():
    model = net()
    engine, *_ = zero.initialize(model=model, config=config(), world=zero.open_world())
    gone = weakref.ref(engine)
    del engine, _
    gc.collect()
    assert gone() is None
    with pytest.raises(ConfigError, match="the engine of this model was garbage-collected"):
        model(torch.ones(2, WIDTH))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    ("stage", "placed"),
    [
        *((stage, {}) for stage in range(4)),
        (1, {"offload_optimizer": "cpu"}),
        (3, {"offload_optimizer": "nvme"}),
        (3, {"offload_param": "nvme"}),
    ],
    ids=str,
)
def test_an_engine_that_does_not_train_runs(stage, placed, frozen, tmp_path: Path):
    """A reference model: no optimizer, or one whose parameters are all frozen. Its gradient goes to the input."""
    places = {kind: {"device": device, "nvme_path": str(tmp_path)} for kind, device in placed.items()}
    how = {"zero_optimization": {"stage": stage, **places}, "optimizer": None}
    x = torch.ones(2, WIDTH, requires_grad=True)
    expected = net()(x)
    (slope,) = torch.autograd.grad(expected, x)

    def optimizer(model):
        return {"optimizer": torch.optim.AdamW(model.requires_grad_(False).parameters())} if frozen else {}

    def rank_main(world):
        with taken(world=world, prepare=optimizer, **how) as engine:
            mine = x.detach().clone().requires_grad_()
            with torch.no_grad():
                outputs = [engine(mine), engine.module(mine)]
            engine(mine).backward()
            with pytest.raises(ConfigError, match=r"engine\.step\(\): no optimizer holds a parameter"):
                engine.step()
            close(enumerate([*outputs, mine.grad]), enumerate([expected.detach(), expected.detach(), slope]))

    run_ranks(2, rank_main)


@torch.no_grad()
def rows_in_turn(weight: Tensor) -> None:
    for row in weight:
        row.mul_(0.5)


WRITES = {
    "row": lambda weight: weight.data[0].zero_(),
    "view": torch.no_grad()(lambda weight: weight.view(-1).mul_(0.5)),
    "row with history": lambda weight: nn.init.zeros_(weight[0]),
    "rows in turn": rows_in_turn,
    "list": lambda weight: torch._foreach_mul_([weight.data], 0.5),
    "overload": lambda weight: torch.ops.aten.mul_.Scalar(weight.data, 0.5),
    "in place": lambda weight: nn.functional.relu(weight.data, inplace=True),
    "renormalised": torch.no_grad()(lambda weight: nn.functional.embedding(torch.tensor([0]), weight, max_norm=0.01)),
}


@STAGES
def test_what_would_write_past_an_absent_parameter_is_refused_by_name(stage):
    """Into a view of it, or by a function that does not say so: the write would be lost."""

    def rank_main(world):
        with taken(world=world, stage=stage) as engine:
            train(engine, 0)
            for write in WRITES.values():
                with pytest.raises(
                    OutsideUnitError, match=r"parameter first\.weight was written to by.*zero\.gathered"
                ):
                    write(engine.module.first.weight)

    run_ranks(2, rank_main)


def test_what_was_read_is_read_as_any_tensor_and_a_clone_is_written_to():
    with taken() as engine:
        weight, expected = engine.module.first.weight, net().first.weight.detach()
        copied, row = copy.deepcopy(weight), weight.data[0]
        assert isinstance(copied, nn.Parameter)
        assert torch.equal(copied, expected)
        for read_row in (row, copy.deepcopy(row), pickle.loads(pickle.dumps(row)), row.clone().mul_(1)):
            assert torch.equal(read_row, expected[0])
        assert type(copy.deepcopy(row)) is type(pickle.loads(pickle.dumps(row))) is type(row + 1) is Tensor
        with pytest.raises(ValueError, match="read-only"):
            weight.detach().numpy()[0] = 0
        with pytest.raises(OutsideUnitError, match=r"first\.weight was written to by mul_"):
            row.view(-1).mul_(2)
        weight[:2].square().sum().backward()
        engine.step()
        assert torch.allclose(weight[0], expected[0] * 0.8)


def test_a_constant_does_not_get_a_gradient_of_its_own():
    """Its gradient would arrive in the model."""
    with taken() as engine:
        weight, bias = engine.module.first.weight, engine.module.last.bias
        for make in (lambda w: w.detach().requires_grad_(), lambda w: nn.Parameter(w.data)):
            with pytest.raises(
                OutsideUnitError, match=r"first\.weight: a detached parameter.*clone\(\)\.requires_grad_"
            ):
                make(weight)
        assert nn.Parameter(weight.detach().clone()).requires_grad
        with pytest.raises(OutsideUnitError, match=r"torch\.autograd\.grad by first\.weight"):
            torch.autograd.grad(engine.module(torch.ones(2, WIDTH)), [bias.detach().clone(), weight])


class Nested(Net):
    """Each block is a list, so that there is something inside a site."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(block, nn.Tanh()) for block in self.blocks)


def another_module(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.blocks[0][0] = nn.Linear(WIDTH, WIDTH)


def another_place(model: nn.Module) -> None:
    model.blocks[0][0], model.blocks[1][0] = nn.Identity(), nn.Sequential(model.blocks[1][0], model.blocks[0][0])


def tied(model: nn.Module) -> None:
    model.blocks[0][0].weight = model.blocks[1][0].weight


def without(model: nn.Module) -> None:
    model.blocks[0][0].bias = None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_module, r"blocks\.0\.0\.weight \(12, 12\) was exchanged for \(12, 12\), blocks\.0\.0\.bias"),
        (tied, r"blocks\.0\.0\.weight vanished"),
        (without, r"blocks\.0\.0\.bias vanished"),
        (another_place, r"blocks\.0\.0\.weight is now blocks\.1\.0\.1\.weight, blocks\.0\.0\.bias is now"),
    ],
)
def test_another_parameter_that_is_put_into_a_unit_later_is_named_by_step_and_save(change, said, tmp_path):
    """The new parameter would not train, and a checkpoint would hold the old one."""
    engine, *_ = zero.initialize(model=net(0, Nested), config=config(), world=zero.open_world())
    change(engine.module)
    for call in (lambda: train(engine, 0), lambda: engine.save_checkpoint(tmp_path), engine.module_state_dict):
        with pytest.raises(ConfigError, match=rf"^the model was changed after zero took it over: {said}"):
            call()
    engine.destroy()


@STAGES_AND_RANKS
def test_a_module_that_moves_within_a_unit_later_runs_where_it_is(stage, ranks):
    expected = net(0, Nested)
    another_place(expected)

    def rank_main(world):
        with taken(lambda: net(0, Nested), world, stage=stage) as engine, torch.no_grad():
            another_place(engine.module)
            return engine(rows(0))

    for loss in run_ranks(ranks, rank_main):
        torch.testing.assert_close(loss, expected(rows(0)).detach())


@pytest.mark.parametrize(("stage", "ranks"), [(0, 1), (1, 2)])
def test_grad_that_was_read_is_read_again_after_another_backward(stage, ranks):
    """By `loss.backward()` of torch, which tells nobody."""
    expected = net()
    (expected(rows(0)) + expected(rows(1))).backward()

    def rank_main(world):
        with taken(world=world, stage=stage) as engine:
            model, weight = engine.module, engine.module.first.weight
            losses = [model(rows(step, world)) for step in range(2)]
            losses[0].backward()
            outdated = weight.grad
            assert outdated is weight.grad
            losses[1].backward()
            close([("g", weight.grad)], [("g", expected.first.weight.grad)])
            outdated.mul_(2)
            with pytest.raises(ConfigError, match=r"first\.weight\.grad was edited after another backward"):
                engine.step()
            engine.zero_grad()
            losses = [model(rows(step, world)) for step in range(2)]
            losses[0].backward()
            weight.grad.mul_(2)
            with pytest.raises(ConfigError, match=r"first\.weight\.grad was edited, and loss"):
                losses[1].backward()

    run_ranks(ranks, rank_main)


@pytest.mark.parametrize("way", ["engine", "part of another"])
def test_a_model_that_was_taken_over_is_taken_over_again_after_destroy_and_not_before(way):
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    values = model.weight.detach().clone()
    given = nn.Sequential(model) if way == "part of another" else model
    again = pytest.raises(
        ConfigError, match=r"zero\.initialize has taken it over\. Write copy\.deepcopy\(model\) before"
    )
    with taken(model), again, taken(given):
        pass
    assert torch.equal(model.weight, values)
    with taken(given) as engine:
        assert torch.equal(next(iter(whole(engine).values())), values)


@STAGES
def test_what_is_frozen_for_a_while_is_trained_through_and_not_trained(stage):
    """As the teacher of another model, in eval mode, where no microbatch of its own begins.

    Between a forward and its backward torch would drop its gradient, and update it or not by what else there is.
    """
    other = nn.Linear(WIDTH, WIDTH)
    with taken(stage=stage) as engine:
        model = engine.module
        train(engine, 0)
        model.eval().requires_grad_(False)
        model(other(rows(0))).backward()
        assert other.weight.grad is not None
        model.train().requires_grad_(True)
        train(engine, 0)
        close(whole(engine), plain(0, 0))
        loss = model(rows(0))
        model.requires_grad_(False)
        with pytest.raises(zero.ZeroError, match="was frozen between this graph's forward and its backward"):
            engine.backward(loss)


class Recomputed(Net):
    """One block at two places, with statistics; and a checkpoint of the old kind, whose forward leaves no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(block, nn.BatchNorm1d(WIDTH)) for block in self.blocks)
        self.blocks.append(self.blocks[0])

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(batch).tanh()
        x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return self.last(x).square().mean() + self.blocks[1](x).square().mean()


@STAGES
def test_a_state_dict_and_a_log_between_steps_leave_gradients_whole(stage):
    """They read parameters, and no backward comes by what they have read."""
    expected = net(0, Recomputed)
    optimizer = sgd(expected)
    with taken(net(0, Recomputed), stage=stage) as engine:
        model = engine.module
        assert model.load_state_dict(model.state_dict()).missing_keys == []
        for step in range(2):
            model.state_dict()
            assert sum(parameter.norm() for parameter in model.parameters()).item() > 0
            engine.backward(model(rows(step)))
            full = zero.get_full(engine, "blocks.0.0.weight", kind="grad")
            optimizer.zero_grad()
            expected(rows(step)).backward()
            close([("grad", full)], [("grad", expected.blocks[0][0].weight.grad)])
            engine.step()
            optimizer.step()
        close(whole(engine), read(expected))


# -- compiled before ---------------------------------------------------------------------------------------------------


def whole_model(model: nn.Module, backend) -> nn.Module:
    return torch.compile(model, backend=backend)


def in_its_place(model: nn.Module, backend) -> nn.Module:
    model.compile(backend=backend)
    return model


def each_block(model: nn.Module, backend) -> nn.Module:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def each_block_wrapped(model: nn.Module, backend) -> nn.Module:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides its own, for all threads or none
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("compiled", [whole_model, in_its_place, each_block, each_block_wrapped])
def test_a_model_that_was_compiled_before_is_taken_over_and_its_units_are_compiled(compiled, stage):
    torch.compiler.reset()
    made: list[int] = []

    def backend(graph, inputs):
        made.append(len(inputs))
        return graph.forward

    inner = net()
    model = compiled(inner, backend)
    with taken(model, stage=stage) as engine:
        assert engine.module is inner
        for module in model.modules():  # torch's compiler is asked for units alone, and not for what gathers them
            assert module._compiled_call_impl is None
            assert "torch" not in module.forward.__module__ or type(module).__name__ != "OptimizedModule"
        train(engine, 0, 1)
        assert made
        close({name.replace("_orig_mod.", ""): value for name, value in whole(engine).items()}, plain(0, 1))


def exchange_for_compiled(engine: zero.Engine) -> zero.Engine:
    engine.module.blocks[0] = torch.compile(engine.module.blocks[0], backend="eager")
    return engine


def test_what_is_compiled_too_late_says_when_to_compile():
    for compile_late in (
        exchange_for_compiled,
        lambda engine: engine.module.blocks[0].compile(backend="eager") or engine,
        lambda engine: torch.compile(engine, backend="eager"),
        lambda engine: torch.compile(engine.module, backend="eager"),
        lambda engine: engine.compile(backend="eager") or engine,
    ):
        with taken() as engine:
            late = compile_late(engine)
            with pytest.raises(ConfigError, match=r"Write .*zero\.initialize\(model=torch\.compile\(model\)"):
                late(rows(0))


def test_a_compiled_model_that_is_refused_is_left_compiled():
    model = torch.compile(net(), backend="eager")
    forward = model.forward
    with (
        pytest.raises(ConfigError, match="no module of class Missing"),
        taken(model, zero_optimization={"stage": 3, "units": ["Missing"]}),
    ):
        pass
    assert model.forward is forward


# -- writes before zero.initialize -------------------------------------------------------------------------------------


class ByRank(nn.Module):
    """Values that differ by rank, and some that only rank 0 sets."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.0 + rank))
        self.register_buffer("before", self.first.weight.detach().clone() * (1 + rank))
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.last.weight, std=0.1)
        if rank == 0:
            with torch.no_grad():
                self.first.bias[0] = 5.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x * self.scale)).square().mean()


def in_rank_0(model: nn.Module, rank: int) -> None:
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if rank == 0:
            model.load_state_dict({name: value + float(value.sum()) for name, value in model.state_dict().items()})
            model.last.weight.data = model.last.weight.data * 2


def in_all_ranks(model: nn.Module, rank: int) -> None:
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        model.apply(lambda module: nn.init.normal_(module.weight) if isinstance(module, nn.Linear) else None)
        model.first.bias.data.fill_(3.0)
        model.scale.data.copy_(torch.rand_like(model.scale))


def moved(model: nn.Module, rank: int) -> None:
    model.half().cpu().to("cpu")
    model.load_state_dict(model.float().state_dict())


@pytest.mark.parametrize("write", [lambda model, rank: None, in_rank_0, in_all_ranks, moved])
@pytest.mark.parametrize("stage", [0, 3])
def test_under_init_training_begins_with_what_rank_0_wrote(write, stage):
    """Values have the bits of a run without `Init`. If all ranks draw, their generators stay equal."""

    def built(rank: int, context=contextlib.nullcontext) -> nn.Module:
        torch.manual_seed(5)
        with context():
            model = ByRank(rank)
        write(model, rank)
        return model

    expected, drawn = built(0), torch.get_rng_state()

    def rank_main(world):
        with world.exclusive():
            model = built(world.rank, partial(deepspeed.zero.Init, world=world, config_dict_or_path={}))
            generator = torch.get_rng_state()
        with taken(model, world, stage=stage) as engine:
            values, buffer = whole(engine), model.before.clone()
            train(engine, 0)
            return values, buffer, generator

    for values, buffer, generator in run_ranks(2, rank_main):
        same(values, dict(expected.named_parameters()))
        assert torch.equal(buffer, expected.before)
        assert torch.equal(generator, drawn)


def test_under_init_other_ranks_hold_no_values_and_say_so():
    def rank_main(world):
        with world.exclusive(), deepspeed.zero.Init(world=world):
            model = ByRank(world.rank)
        if world.rank == 0:
            return float(model.scale.detach().sum())
        assert all(is_meta(parameter) for parameter in model.parameters())
        with pytest.raises(ConfigError, match=r"modifier_rank=1: before zero\.initialize only rank 0 has the values"):
            deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=1).__enter__()
        with pytest.raises(OutsideUnitError, match=r"before zero\.initialize: only rank 0 has the values"):
            float(model.scale.detach().sum())
        return WIDTH

    assert run_ranks(2, rank_main) == [WIDTH, WIDTH]


def test_initialize_may_be_called_within_init_and_init_with_a_module():
    def rank_main(world):
        with world.exclusive(), deepspeed.zero.Init(world=world):
            model = net(5)
            deepspeed.zero.Init(module=model, world=world)
            engine, *_ = zero.initialize(model=model, config=config(optimizer=SGD), world=world)
        train(engine, 0, 1)
        return whole(engine)

    (values,) = run_ranks(1, rank_main)
    close(values, plain(0, 1, model=net(5)))


def test_from_pretrained_under_init_trains_the_files_values(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8, "eos_token_id": 0}
    saved = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0))
    saved.save_pretrained(tmp_path)

    def rank_main(world):
        with world.exclusive(), deepspeed.zero.Init(world=world):
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        with taken(model, world) as engine:
            return whole(engine)

    for values in run_ranks(2, rank_main):
        same(values, dict(saved.named_parameters()))


# -- edits in a block of GatheredParameters ----------------------------------------------------------------------------


@STAGES
@pytest.mark.parametrize("bf16", [False, True])
def test_whatever_reads_within_the_block_reads_the_edit(stage, bf16, tmp_path: Path):
    """An average is swapped in on rank 0, which evaluates it alone; all save it; the weights come back bit by bit."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    average = {name: torch.full_like(value, 0.125) for name, value in net().state_dict().items()}
    swapped = net()
    swapped.load_state_dict(average)
    swapped.to(dtype).eval()
    expected = swapped(torch.ones(2, WIDTH, dtype=dtype))

    def rank_main(world):
        with taken(world=world, stage=stage, bf16={"enabled": bf16}) as engine:
            model = engine.module
            train(engine, 0)
            raw = whole(engine)
            with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0):
                if world.rank == 0:
                    for name, parameter in model.named_parameters():
                        parameter.data.copy_(average[name])
                    with torch.no_grad():
                        assert torch.equal(model(torch.ones(2, WIDTH)), expected)
                    assert bool((copy.deepcopy(model.first.weight) == 0.125).all())
                    same(model.state_dict(), swapped.state_dict())
                path = engine.save_16bit_model(tmp_path)
                assert all(bool((value == 0.125).all()) for value in whole(engine).values())
                if world.rank == 0:
                    assert all(bool((value == 0.125).all()) for value in load_file(path).values())
                    assert model.load_state_dict(raw)
            same(whole(engine), raw)
            train(engine, 1)

    run_ranks(2, rank_main)


def test_what_a_block_cannot_do_is_said():
    with taken() as engine:
        model = engine.module
        block = partial(deepspeed.zero.GatheredParameters, list(model.parameters()), modifier_rank=0)
        with pytest.raises(OutsideUnitError, match=r"used with gradients on while its values may be edited"), block():
            model(torch.ones(2, WIDTH))
        with (
            block(),
            pytest.raises(ConfigError, match="is already in an outer block of GatheredParameters"),
        ):
            block().__enter__()
        old = pytest.raises(StaleStateError, match=r"^zero\.gathered or GatheredParameters: a step or load inside")
        with old, deepspeed.zero.GatheredParameters(model.parameters()):
            train(engine, 0)
        weight, before = model.first.weight, model.first.weight.detach().clone()
        edited = pytest.raises(ConfigError, match=r"was edited, but it is a copy, .* modifier_rank=RANK")
        with edited, deepspeed.zero.GatheredParameters(weight), torch.no_grad():
            weight.zero_()
        assert torch.equal(weight, before)
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            nn.init.ones_(weight)
            weight.data[0].mul_(2)
        assert float(weight.detach().sum()) == weight.numel() + WIDTH
