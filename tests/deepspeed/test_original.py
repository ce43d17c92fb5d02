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
from tests.deepspeed.test_engine import WIDTH, Net, config, net, rows
from zero.engine.empty import is_meta
from zero.engine.full import Source
from zero.errors import ConfigError, OutsideUnitError
from zero.testing import run_ranks

STAGES = pytest.mark.parametrize("stage", range(4))
RANKS = pytest.mark.parametrize("ranks", [1, 2])
SGD = {"type": "SGD", "params": {"lr": 0.1}}


def begin(world: zero.World, model: nn.Module, stage: int, **more):
    engine, *_ = zero.initialize(model=model, config=config(stage=stage, optimizer=SGD, **more), world=world)
    return engine


def plain(steps: int = 2, model: nn.Module | None = None, change=lambda model: None) -> nn.Module:
    """Plain torch on the whole batch; `change` is called between backward and step."""
    model = net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.cat([rows(step, world) for world in [_One()]])).backward()
        change(model)
        optimizer.step()
    return model


class _One:
    rank, size = 0, 1


def train(engine: zero.Engine, model: nn.Module, steps: int = 2, change=lambda model: None) -> None:
    """By the model that was given, not by the engine."""
    for step in range(steps):
        engine.backward(model(rows(step, engine.plan.world)))
        change(model)
        engine.step()


def whole(source: Source) -> dict[str, Tensor]:
    return zero.full_state_dict(source)


def close(found, wanted) -> None:
    torch.testing.assert_close(dict(found), dict(wanted), rtol=1e-5, atol=1e-6)


@STAGES
@RANKS
def test_the_given_model_is_the_one_that_trains(ranks, stage):
    """Its identity, class, names, parameters and their sizes; called by itself it computes and evaluates."""
    expected = plain()
    evaluated = expected(torch.ones(2, WIDTH)).item()

    def rank_main(world):
        with world.exclusive():
            model = net(world.rank)
        names, held = [name for name, _ in model.named_modules()], dict(model.named_parameters())
        engine = begin(world, model, stage)
        assert engine.module is model
        assert isinstance(model, Net)
        assert type(model).__name__ == "Net"
        assert [name for name, _ in model.named_modules()] == names
        assert all(one is held[name] for name, one in model.named_parameters())
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in net().parameters())
        train(engine, model)
        model.eval()
        with torch.no_grad():
            assert model(torch.ones(2, WIDTH)).item() == pytest.approx(evaluated, rel=1e-5)
        assert not engine.module.training
        return {name: one.detach().clone() for name, one in model.named_parameters()}, model.state_dict()

    for values, state_dict in run_ranks(ranks, rank_main):
        close(values, {name: one.detach() for name, one in expected.named_parameters()})
        close(state_dict, expected.state_dict())
        assert all(type(one) is Tensor and one.untyped_storage().nbytes() == one.nbytes for one in state_dict.values())


@pytest.mark.parametrize("stage", range(3))
def test_one_rank_alone_reads_saves_and_evaluates_where_parameters_are_whole(stage):
    """`if rank == 0: torch.save(model.state_dict())`, as scripts for stages 0 to 2 do; the others go on, or end."""
    expected = plain()

    def rank_main(world):
        with world.exclusive():
            model = net(world.rank)
        engine = begin(world, model, stage)
        train(engine, model, 1)
        if world.rank == 1:
            with torch.no_grad():
                model(torch.ones(2, WIDTH))
        engine.backward(model(rows(1, world)))
        engine.step()
        world.barrier()  # nobody helps from here on
        return model.state_dict() if world.rank == 0 else None

    close(run_ranks(2, rank_main)[0], expected.state_dict())


@STAGES
def test_a_saved_state_dict_is_loaded_by_plain_torch_and_back(stage, tmp_path: Path):
    world, model = zero.World.from_env(), net()
    engine = begin(world, model, stage)
    train(engine, model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.save({"first": model.first.weight}, tmp_path / "one.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    bare = net(1)
    bare.load_state_dict(saved)
    close(bare.state_dict(), plain().state_dict())
    assert torch.equal(torch.load(tmp_path / "one.pt", weights_only=True)["first"], saved["first.weight"])
    train(engine, model)
    other = net(7).state_dict()
    assert model.load_state_dict(other).missing_keys == []
    close(whole(engine), other)
    with pytest.raises(ConfigError, match=r"missing first\.weight.*unknown more"):
        model.load_state_dict({**{k: v for k, v in other.items() if k != "first.weight"}, "more": torch.ones(1)})
    told = engine.load_module_state_dict({"last.bias": torch.full((1,), 5.0), "more": torch.ones(1)}, strict=False)
    assert told.unexpected_keys == ["more"]
    assert float(whole(engine)["last.bias"]) == 5.0
    engine.destroy()


@STAGES
def test_hooks_and_flags_that_are_set_on_it_later_count(stage):
    world, model, seen = zero.World.from_env(), net(), []
    engine = begin(world, model, stage)
    model.register_forward_hook(lambda module, args, output: seen.append("model"))
    model.blocks[1].register_forward_hook(lambda module, args, output: seen.append("block"))
    model.last.weight.register_hook(lambda grad: grad * 0)
    train(engine, model, 1)
    assert seen == ["block", "model"]
    before = net().state_dict()
    assert torch.equal(model.last.weight, before["last.weight"])
    assert not torch.equal(model.last.bias, before["last.bias"])
    engine.destroy()


@STAGES
@RANKS
def test_grad_is_the_gradient_below_stage_2_and_a_named_answer_from_there(ranks, stage):
    """The mean over the global batch; what is written into it counts."""

    def bound(model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad.clamp_(-0.01, 0.01)
            parameter.grad.data.mul_(3)

    expected = plain(change=bound)

    def rank_main(world):
        with world.exclusive():
            model = net()
        engine = begin(world, model, stage)
        assert model.first.weight.grad is None
        if stage >= 2:
            engine.backward(model(rows(0, world)))
            with pytest.raises(ConfigError, match=rf"first\.weight\.grad: stage {stage} shards gradients.*get_full"):
                _ = model.first.weight.grad
            engine.step()
        else:
            train(engine, model, change=bound)
            close(whole(engine), {name: one.detach() for name, one in expected.named_parameters()})
        assert model.first.weight.grad is None
        return True

    run_ranks(ranks, rank_main)


@STAGES
def test_zero_grad_of_the_model_drops_what_has_arrived(stage):
    world, model = zero.World.from_env(), net()
    engine = begin(world, model, stage, gradient_accumulation_steps=1)
    engine.backward(model(rows(5, world)))
    model.zero_grad()
    assert model.first.weight.grad is None
    engine.backward(model(rows(0, world)))
    engine.step()
    close(whole(engine), {name: one.detach() for name, one in plain(1).named_parameters()})
    engine.destroy()


class Encoder(Net):
    def encode(self, batch: Tensor) -> Tensor:
        return self.blocks[0](self.first(batch)).square().mean() + 0.1 * self.last.weight.square().sum()


@STAGES
def test_a_method_that_is_not_forward_trains(stage):
    torch.manual_seed(0)
    world, model = zero.World.from_env(), Encoder()
    expected = copy.deepcopy(model)
    engine = begin(world, model, stage)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        expected.encode(rows(step, world)).backward()
        optimizer.step()
        engine.backward(model.encode(rows(step, world)))
        engine.step()
    close(whole(engine), {name: one.detach() for name, one in expected.named_parameters()})
    engine.destroy()


@pytest.mark.parametrize("bf16", [False, True])
def test_to_where_it_is_is_nothing_and_anywhere_else_is_refused(bf16):
    world, model = zero.World.from_env(), net()
    engine = begin(world, model, 3, bf16={"enabled": bf16})
    assert model.to("cpu") is model
    assert (model.bfloat16() if bf16 else model.float()) is model
    for move in (model.half, model.double, lambda: model.to("meta"), lambda: model.first.half()):
        with pytest.raises((ConfigError, OutsideUnitError), match=r"Leave out \.to\(\)|first\.weight was written to"):
            move()
    engine.destroy()


def test_values_of_one_parameter_can_be_copied():
    model = net()
    engine = begin(zero.World.from_env(), model, 3)
    copied = copy.deepcopy(model.first.weight)
    assert isinstance(copied, nn.Parameter)
    close([("w", copied.detach())], [("w", net().first.weight.detach())])
    engine.destroy()


def test_an_engine_that_is_dropped_is_not_kept_alive_by_the_model():
    model = net()
    engine = begin(zero.World.from_env(), model, 3)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    with pytest.raises(ConfigError, match="the engine of this model was garbage-collected"):
        model(torch.ones(2, WIDTH))


@pytest.mark.parametrize(
    "placed", [{}, {"offload_optimizer": "cpu"}, {"offload_optimizer": "nvme"}, {"offload_param": "nvme"}]
)
@pytest.mark.parametrize("frozen", [False, True])
@STAGES
def test_an_engine_that_does_not_train_runs(stage, frozen, placed, tmp_path: Path):
    """A reference model: no optimizer, or one whose parameters are all frozen. Its gradient goes to the input."""
    if stage < 3 and "offload_param" in placed:
        pytest.skip("parameters leave at stage 3 only")
    how = {kind: {"device": device, "nvme_path": str(tmp_path)} for kind, device in placed.items()}
    settings = {"train_batch_size": 2, "zero_optimization": {"stage": stage, **how}}
    x = torch.ones(2, WIDTH, requires_grad=True)
    expected = net()(x)
    (slope,) = torch.autograd.grad(expected, x)

    def rank_main(world):
        with world.exclusive():
            model = net()
        given = {"optimizer": torch.optim.AdamW(model.requires_grad_(False).parameters())} if frozen else {}
        engine, optimizer, _, _ = zero.initialize(model=model, config=settings, world=world, **given)
        assert (optimizer is not None) == frozen
        mine = x.detach().clone().requires_grad_()
        with torch.no_grad():
            found = [engine(mine), model(mine)]
        engine(mine).backward()
        with pytest.raises(ConfigError, match=r"engine\.step\(\): no optimizer holds a parameter"):
            engine.step()
        close(enumerate([*found, mine.grad]), enumerate([expected.detach(), expected.detach(), slope]))
        engine.destroy()

    run_ranks(2, rank_main)


def row(model: nn.Module) -> None:
    model.first.weight.data[0].zero_()


def view(model: nn.Module) -> None:
    with torch.no_grad():
        model.first.weight.view(-1).mul_(0.5)


def row_with_history(model: nn.Module) -> None:
    nn.init.zeros_(model.first.weight[0])


def rows_in_turn(model: nn.Module) -> None:
    with torch.no_grad():
        for one in model.first.weight:
            one.mul_(0.5)


def list_of_them(model: nn.Module) -> None:
    torch._foreach_mul_([one.data for one in model.parameters()], 0.5)


def overload(model: nn.Module) -> None:
    torch.ops.aten.mul_.Scalar(model.first.weight.data, 0.5)


def in_place(model: nn.Module) -> None:
    nn.functional.relu(model.first.weight.data, inplace=True)


def renormalised(model: nn.Module) -> None:
    with torch.no_grad():
        nn.functional.embedding(torch.tensor([0]), model.first.weight, max_norm=0.01)


@STAGES
@pytest.mark.parametrize(
    "write", [row, view, row_with_history, rows_in_turn, list_of_them, overload, in_place, renormalised]
)
def test_what_would_write_past_an_absent_parameter_is_refused_by_name(write, stage):
    """Into a view of it, or by a function that does not say so: the write would be lost."""

    def rank_main(world):
        with world.exclusive():
            model = net()
        engine = begin(world, model, stage)
        train(engine, model, 1)
        with pytest.raises(OutsideUnitError, match=r"parameter first\.weight was written to by.*zero\.gathered"):
            write(model)
        return True

    assert run_ranks(2, rank_main) == [True, True]


def test_what_was_read_is_read_as_any_tensor_and_a_clone_is_written_to():
    model = net()
    engine = begin(zero.World.from_env(), model, 3)
    row, wanted = model.first.weight.data[0], net().first.weight.detach()
    for one in (row, copy.deepcopy(row), pickle.loads(pickle.dumps(row)), row.clone().mul_(1)):
        assert torch.equal(one, wanted[0])
    assert type(copy.deepcopy(row)) is type(pickle.loads(pickle.dumps(row))) is type(row + 1) is Tensor
    with pytest.raises(ValueError, match="read-only"):
        model.first.weight.detach().numpy()[0] = 0
    with pytest.raises(OutsideUnitError, match=r"first\.weight was written to by mul_"):
        row.view(-1).mul_(2)
    model.first.weight[:2].square().sum().backward()
    engine.step()
    assert torch.allclose(model.first.weight[0], wanted[0] * 0.8)
    engine.destroy()


@pytest.mark.parametrize("make", [lambda w: w.detach().requires_grad_(), lambda w: nn.Parameter(w.data)])
def test_a_constant_does_not_get_a_gradient_of_its_own(make):
    """Its gradient would arrive in the model."""
    model = net()
    engine = begin(zero.World.from_env(), model, 3)
    with pytest.raises(OutsideUnitError, match=r"first\.weight without its history.*clone\(\)\.requires_grad_"):
        make(model.first.weight)
    assert nn.Parameter(model.first.weight.detach().clone()).requires_grad
    with pytest.raises(OutsideUnitError, match=r"torch\.autograd\.grad by first\.weight"):
        torch.autograd.grad(model(torch.ones(2, WIDTH)), [model.last.bias.detach().clone(), model.first.weight])
    engine.destroy()


class Nested(Net):
    """Each block is a list, so that there is something inside a site."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(one, nn.Tanh()) for one in self.blocks)


def another_module(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.blocks[0][0] = nn.Linear(WIDTH, WIDTH)


def another_place(model: nn.Module) -> None:
    model.blocks[0][0], model.blocks[1][0] = nn.Identity(), nn.Sequential(model.blocks[1][0], model.blocks[0][0])


def tied(model: nn.Module) -> None:
    model.blocks[0][0].weight = model.blocks[1][0].weight


def without(model: nn.Module) -> None:
    model.blocks[0][0].bias = None


def nested() -> nn.Module:
    torch.manual_seed(0)
    return Nested()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_module, r"blocks\.0\.0\.weight \(12, 12\) was exchanged for \(12, 12\), blocks\.0\.0\.bias"),
        (tied, r"blocks\.0\.0\.weight vanished"),
        (without, r"blocks\.0\.0\.bias vanished"),
    ],
)
def test_another_parameter_that_is_put_into_a_unit_later_is_named_by_step_and_save(change, said, tmp_path):
    """The new parameter would not train, and a checkpoint would hold the old one."""
    model = nested()
    engine = begin(zero.World.from_env(), model, 3)
    change(model)
    for call in (
        lambda: train(engine, model, 1),
        lambda: engine.save_checkpoint(tmp_path),
        lambda: engine.module_state_dict(),
    ):
        with pytest.raises(ConfigError, match=rf"^the model was changed after zero took it over: {said}"):
            call()
    engine.destroy()


@STAGES
@RANKS
def test_a_module_that_moves_within_a_unit_later_counts(ranks, stage):
    expected = nested()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    another_place(expected)
    for step in range(2):
        optimizer.zero_grad()
        expected(rows(step, _One())).backward()
        optimizer.step()

    def rank_main(world):
        with world.exclusive():
            model = nested()
        engine = begin(world, model, stage, activation_checkpointing={"partition_activations": True})
        with world.exclusive():
            another_place(model)
        world.barrier()  # recomputation takes torch's generator back, and the other rank may be drawing
        train(engine, model)
        return {name: one.detach().clone() for name, one in model.named_parameters()}

    for values in run_ranks(ranks, rank_main):
        close(values, {name: one.detach() for name, one in expected.named_parameters()})


@pytest.mark.parametrize("stage", [0, 1])
@RANKS
def test_grad_that_was_read_is_read_again_after_another_backward(ranks, stage):
    """By `loss.backward()` of torch, which tells nobody."""
    expected = net()
    (expected(rows(0, _One())) + expected(rows(1, _One()))).backward()

    def rank_main(world):
        with world.exclusive():
            model = net()
        engine = begin(world, model, stage)
        losses = [model(rows(step, world)) for step in range(2)]
        losses[0].backward()
        outdated = model.first.weight.grad
        assert outdated is model.first.weight.grad
        losses[1].backward()
        close([("g", model.first.weight.grad)], [("g", expected.first.weight.grad)])
        outdated.mul_(2)
        with pytest.raises(ConfigError, match=r"first\.weight\.grad was edited after another backward"):
            engine.step()
        engine.zero_grad()
        losses = [model(rows(step, world)) for step in range(2)]
        losses[0].backward()
        model.first.weight.grad.mul_(2)
        with pytest.raises(ConfigError, match=r"first\.weight\.grad was edited, and loss"):
            losses[1].backward()
        return True

    run_ranks(ranks, rank_main)


@STAGES
def test_what_is_frozen_between_forward_and_backward_is_refused(stage):
    """Torch would drop its gradient, and update it or not by what else there is."""
    model = net()
    engine = begin(zero.World.from_env(), model, stage)
    loss = model(rows(0, engine.plan.world))
    model.requires_grad_(False)
    with pytest.raises(zero.ZeroError, match="was frozen between this graph's forward and its backward"):
        engine.backward(loss)
    engine.destroy()


@pytest.mark.parametrize("way", ["engine", "part of another"])
def test_a_model_that_was_taken_over_is_taken_over_again_after_destroy_and_not_before(way):
    world, model = zero.World.from_env(), nn.Linear(WIDTH, WIDTH, bias=False)
    values = model.weight.detach().clone()
    engine = begin(world, model, 3)
    given = nn.Sequential(model) if way == "part of another" else model
    with pytest.raises(ConfigError, match=r"zero\.initialize has taken it over\. Write copy\.deepcopy\(model\) before"):
        begin(world, given, 3)
    engine.destroy()
    assert torch.equal(model.weight, values)
    engine = begin(world, given, 3)
    assert torch.equal(zero.get_full(engine, next(iter(dict(given.named_parameters())))), values)
    engine.destroy()


@STAGES
def test_what_is_frozen_for_a_while_is_trained_through_and_not_trained(stage):
    """As the teacher of another model, in eval mode, where no microbatch of its own begins."""
    model, other = net(), nn.Linear(WIDTH, WIDTH)
    expected = net()
    engine = begin(zero.World.from_env(), model, stage)
    train(engine, model, 1)
    model.eval().requires_grad_(False)
    model(other(rows(0, _One()))).backward()
    assert other.weight.grad is not None
    model.train().requires_grad_(True)
    for step in (0, 0):
        optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
        optimizer.zero_grad()
        expected(rows(step, _One())).backward()
        optimizer.step()
    train(engine, model, 1)
    close(whole(engine), {name: one.detach() for name, one in expected.named_parameters()})
    engine.destroy()


class ByClass(Net):
    """Asks its parts for their classes, in the ways that are usual."""

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(batch)
        for block in self.blocks:
            known = type(block) == nn.Linear and type(block) in {nn.Linear}  # noqa: E721
            x = x + (block(x) if known and block.__class__ == nn.Linear else 0) * {nn.Linear: 2}.get(type(block), 1)
        return self.last(x).square().mean()


@STAGES
def test_a_class_is_what_it_was_to_whoever_compares(stage):
    torch.manual_seed(0)
    expected = ByClass()
    model = copy.deepcopy(expected)
    engine = begin(zero.World.from_env(), model, stage)
    train(engine, model, 2)
    close(whole(engine), {name: one.detach() for name, one in plain(2, expected).named_parameters()})
    assert type(model) == ByClass  # noqa: E721
    assert type(model) != Net  # noqa: E721
    engine.destroy()


class Recomputed(Net):
    """One block at two places, with statistics; and a checkpoint of the old kind, whose forward leaves no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(one, nn.BatchNorm1d(WIDTH)) for one in self.blocks)
        self.blocks.append(self.blocks[0])

    def forward(self, batch: Tensor) -> Tensor:
        x = self.first(batch).tanh()
        x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return self.last(x).square().mean() + self.blocks[1](x).square().mean()


@STAGES
def test_a_state_dict_and_a_log_between_steps_leave_gradients_whole(stage):
    """They read parameters, and no backward comes by what they have read."""
    torch.manual_seed(0)
    model = Recomputed()
    expected = copy.deepcopy(model)
    engine = begin(zero.World.from_env(), model, stage)
    assert model.load_state_dict(model.state_dict()).missing_keys == []
    for step in range(2):
        model.state_dict()
        assert sum(one.norm() for one in model.parameters()).item() > 0
        loss = model(rows(step, _One()))
        engine.backward(loss)
        full = zero.get_full(engine, "blocks.0.0.weight", kind="grad")
        expected.zero_grad()
        expected(rows(step, _One())).backward()
        close([("grad", full)], [("grad", expected.blocks[0][0].weight.grad)])
        engine.step()
        torch.optim.SGD(expected.parameters(), lr=0.1).step()
    close(whole(engine), {name: one.detach() for name, one in expected.named_parameters()})
    engine.destroy()


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
    engine = begin(zero.World.from_env(), model, stage)
    assert engine.module is inner
    for module in model.modules():  # torch's compiler is asked for units alone, and not for what gathers them
        assert module._compiled_call_impl is None
        assert "torch" not in module.forward.__module__ or type(module).__name__ != "OptimizedModule"
    train(engine, model)
    assert made
    values = {name.replace("_orig_mod.", ""): one for name, one in whole(engine).items()}
    close(values, plain().state_dict())
    engine.destroy()


@pytest.mark.parametrize("part", [lambda engine: engine, lambda engine: engine.module])
def test_what_is_compiled_too_late_says_when_to_compile(part):
    engine = begin(zero.World.from_env(), net(), 3)
    with pytest.raises(ConfigError, match=r"Write zero\.initialize\(model=torch\.compile\(model\)"):
        torch.compile(part(engine), backend="eager")(rows(0, engine.plan.world))
    engine.destroy()


def test_a_compiled_model_that_is_refused_is_left_compiled():
    model = torch.compile(net(), backend="eager")
    forward = model.forward
    with pytest.raises(ConfigError, match="no module of class Missing"):
        begin(zero.World.from_env(), model, 3, zero_optimization={"stage": 3, "units": ["Missing"]})
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

    plain, drawn = built(0), torch.get_rng_state()

    def rank_main(world):
        with world.exclusive():
            model = built(world.rank, partial(deepspeed.zero.Init, world=world, config_dict_or_path={}))
            generator = torch.get_rng_state()
        engine = begin(world, model, stage)
        values, buffer = whole(engine), model.before.clone()
        train(engine, model, 1)
        engine.destroy()
        return values, buffer, generator

    for values, buffer, generator in run_ranks(2, rank_main):
        assert all(torch.equal(values[name], value) for name, value in plain.named_parameters())
        assert torch.equal(buffer, plain.before)
        assert torch.equal(generator, drawn)


def test_under_init_other_ranks_hold_no_values_and_say_so():
    def rank_main(world):
        with world.exclusive(), deepspeed.zero.Init(world=world):
            model = ByRank(world.rank)
        if world.rank == 0:
            return float(model.scale.detach().sum())
        assert all(is_meta(parameter) for parameter in model.parameters())
        with pytest.raises(ConfigError, match=r"modifier_rank=1: before zero\.initialize rank 0 alone has the values"):
            deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=1).__enter__()
        with pytest.raises(OutsideUnitError, match=r"whose values rank 0 alone has until zero\.initialize"):
            float(model.scale.detach().sum())
        return WIDTH

    assert run_ranks(2, rank_main) == [WIDTH, WIDTH]


def test_initialize_may_be_called_within_init_and_init_with_a_module():
    def rank_main(world):
        with world.exclusive(), deepspeed.zero.Init(world=world):
            torch.manual_seed(5)
            model = net()
            deepspeed.zero.Init(module=model, world=world)
            engine = begin(world, model, 3)
        train(engine, model)
        return whole(engine)

    (values,) = run_ranks(1, rank_main)
    close(values, dict(plain().named_parameters()))


def test_from_pretrained_under_init_trains_the_files_values(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 8, "eos_token_id": 0}
    saved = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0))
    saved.save_pretrained(tmp_path)

    def rank_main(world):
        with world.exclusive(), deepspeed.zero.Init(world=world):
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        return whole(begin(world, model, 3))

    for values in run_ranks(2, rank_main):
        assert all(torch.equal(values[name], value) for name, value in saved.named_parameters())


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
        with world.exclusive():
            model = net()
        engine = begin(world, model, stage, bf16={"enabled": bf16})
        train(engine, model, 1)
        raw = whole(engine)
        with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0):
            if world.rank == 0:
                for name, parameter in model.named_parameters():
                    parameter.data.copy_(average[name])
                with torch.no_grad():
                    assert torch.equal(model(torch.ones(2, WIDTH)), expected)
                assert bool((copy.deepcopy(model.first.weight) == 0.125).all())
                read = model.state_dict()
                assert all(torch.equal(read[name], value) for name, value in swapped.state_dict().items())
            path = engine.save_16bit_model(tmp_path)
            assert all(bool((value == 0.125).all()) for value in whole(engine).values())
            if world.rank == 0:
                assert all(bool((value == 0.125).all()) for value in load_file(path).values())
                assert model.load_state_dict(raw)
        assert all(torch.equal(value, raw[name]) for name, value in whole(engine).items())
        train(engine, model, 1)
        engine.destroy()

    run_ranks(2, rank_main)


@STAGES
def test_one_rank_may_load_a_state_dict_within_the_block(stage):
    def rank_main(world):
        with world.exclusive():
            model, other = net(), net(3)
        engine = begin(world, model, stage)
        with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0):
            if world.rank == 0:
                model.load_state_dict(other.state_dict())
        values = whole(engine)
        engine.destroy()
        return values

    for values in run_ranks(2, rank_main):
        assert all(torch.equal(values[name], value) for name, value in net(3).named_parameters())


@pytest.mark.parametrize("build", [contextlib.nullcontext, deepspeed.zero.Init, zero.empty])
def test_a_write_in_a_block_without_modifier_rank_raises_before_initialize_too(build):
    with build():
        model = net()
    weight = next(model.parameters())
    with (
        pytest.raises(ConfigError, match="Pass modifier_rank=0"),
        deepspeed.zero.GatheredParameters([weight]),
        torch.no_grad(),
    ):
        weight.add_(1.0)
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.add_(1.0)


def test_what_a_block_cannot_do_is_said():
    model = net()
    engine = begin(zero.World.from_env(), model, 3)
    block = partial(deepspeed.zero.GatheredParameters, list(model.parameters()), modifier_rank=0)
    with pytest.raises(OutsideUnitError, match=r"used with gradients on while its values may be edited"), block():
        model(torch.ones(2, WIDTH))
    with block(), pytest.raises(ConfigError, match="is in a block of GatheredParameters already; leave it out"):
        block().__enter__()
    engine.destroy()
