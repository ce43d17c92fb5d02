"""`zero.init` takes a model over: it stays the user's, trains, and is an ordinary model again after `close`."""

import contextlib
import copy
import pickle
import re
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import zero
from tests.common.small import Setting, Small, slice_of, small_batch, small_loss
from zero.distributed.world import World
from zero.engine.model import unsupported
from zero.errors import OutsideUnitError, PlanError, StaleStateError
from zero.testing import run_ranks

WIDTH, ROWS, LR, STEPS = 6, 4, 0.1, 3


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def batch_of(step: int, rank: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def plain(build: Callable[[], nn.Module], ranks: int = 1) -> dict[str, Tensor]:
    """Parameters after `STEPS` steps of plain torch, in which every rank's backward is one of its own."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(ranks):
            (mean_square(model, batch_of(step, rank))).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= ranks
        optimizer.step()
    return dict(model.state_dict())


def trained(build: Callable[[], nn.Module], stage: int, ranks: int = 1, **settings: Any) -> dict[str, Tensor]:
    models = [build() for _ in range(ranks)]

    def rank_main(world: zero.World) -> dict[str, Tensor]:
        plan = zero.Plan(models[world.rank], optimizer=zero.sgd(LR), world=world, stage=stage, **settings)
        state = zero.init(plan, zero.open_store(plan))
        step = zero.make_step(plan, mean_square)
        for number in range(STEPS):
            state, _ = step(state, [batch_of(number, world.rank)])
        return zero.full_state_dict(state)

    return run_ranks(ranks, rank_main)[0]


def plan_of(model: nn.Module, **settings: Any) -> zero.Plan:
    return zero.Plan(model, optimizer=zero.sgd(LR), world=World.solo(), **settings)


# -- taken over and given back -----------------------------------------------------------------------------------------


def is_ordinary(model: nn.Module) -> bool:
    return all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_the_given_model_is_the_one_that_trains():
    model = Small().eval()
    classes = [type(module) for module in model.modules()]
    parameters, buffers = list(model.parameters()), dict(model.named_buffers())
    with World.solo() as world:
        plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=world)
        assert is_ordinary(model)
        state = zero.init(plan, zero.open_store(plan))
        state, _ = zero.make_step(plan, small_loss)(state, [small_batch(0, 6)])
    assert state.model is model
    assert not model.training
    assert [type(module) for module in model.modules()] == classes
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


def test_a_model_that_was_taken_over_is_rejected_with_what_to_write():
    with World.solo() as world:
        first, second = (zero.Plan(model, optimizer=zero.sgd(LR), world=world) for model in [chain()] * 2)
        state = zero.init(first, zero.open_store(first))
        line = r"^model: an earlier zero\.init .* Write copy\.deepcopy\(model\) before zero\.Plan to keep an original"
        with pytest.raises(PlanError, match=line):
            zero.Plan(state.model, optimizer=zero.sgd(LR), world=world)
        with pytest.raises(PlanError, match=line):
            zero.init(second, zero.open_store(second))
        state.close()
        zero.init(second, zero.open_store(second)).close()


def in_bf16() -> nn.Module:
    model = Small()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    return model


def without_values() -> nn.Module:
    with zero.empty():
        return Small()


CPU = (("optimizer", "cpu"), ("param", "cpu"), ("grad", "cpu"))
NVME = (("optimizer", "nvme"), ("param", "nvme"), ("grad", "nvme"))
CLOSED = [
    (1, Small, Setting(stage=0)),
    (2, Small, Setting(stage=3, precision="bf16", offload=CPU)),
    (2, in_bf16, Setting(stage=1, precision="bf16", update="serial")),
    (1, in_bf16, Setting(stage=3, offload=NVME)),
    (2, without_values, Setting(stage=2, precision="fp16")),
    (2, without_values, Setting(stage=3, offload=NVME)),
]


@pytest.mark.parametrize(("ranks", "build", "setting"), CLOSED)
def test_a_closed_model_is_an_ordinary_one_with_the_trained_values(ranks, build, setting):
    """In the dtype that it was given with; it computes, keeps ties and what is frozen, and can be planned again."""

    def rank_main(world: zero.World) -> None:
        with world.exclusive():
            torch.manual_seed(0)
            model = build()
        hooked = model.get_parameter("head.bias")
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        trains = [parameter.requires_grad for parameter in model.parameters()]
        seen = []
        hooked.register_hook(lambda grad: seen.append(grad.shape))
        plan = setting.plan(world, lambda: model)
        state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, small_loss)
        for number in range(2):
            state, _ = step(state, slice_of(small_batch(number, 6 * world.size), world, 1))
        full = zero.full_state_dict(state)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        state.close()
        state.close()
        assert is_ordinary(model)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, full[name].to(dtypes[name])), name
            assert parameter.dtype == dtypes[name]
        assert [parameter.requires_grad for parameter in model.parameters()] == trains
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
        assert model.head.weight is model.embed.weight
        del seen[:]
        small_loss(model, small_batch(0, 6))[0].backward()
        assert len(seen) == 1
        assert model.head.weight.grad is not None
        with pytest.raises(StaleStateError, match=r"^this State was closed\. Make another one with zero\.init\.$"):
            zero.full_state_dict(state)
        again = zero.init(plan, zero.open_store(plan))
        assert all(torch.equal(zero.full_state_dict(again)[name], full[name].to(dtypes[name]).float()) for name in full)
        again.close()

    run_ranks(ranks, rank_main)


def reason_of(state: zero.State, how: str) -> str:
    """Close a state whose values cannot be collected; returns the text that says so."""
    if how == "exception":
        with pytest.raises(KeyboardInterrupt) as caught, contextlib.closing(state):
            raise KeyboardInterrupt
        return caught.value.__notes__[0]
    with pytest.warns(UserWarning, match="the model keeps") as warned:
        state.close()
    return str(warned[0].message)


@pytest.mark.parametrize(
    ("build", "how"), [(Small, "exception"), (without_values, "spent"), (Small, "memory"), (without_values, "store")]
)
def test_a_model_whose_values_cannot_be_collected_says_so_and_can_be_planned_again(build, how, monkeypatch):
    with World.solo() as world:
        model = build()
        plan = zero.Plan(model, optimizer=zero.adamw(LR), world=world, precision="bf16", offload=zero.Offload("nvme"))
        state = zero.init(plan, zero.open_store(plan))
        if how == "spent":
            state.spend()
        if how == "memory":
            monkeypatch.setattr("zero.engine.state.free_host_bytes", lambda: 100)
        if how == "store":
            state.runtime.store.close()
        text = reason_of(state, how)
        assert re.fullmatch(r"the model keeps no values: .*\. Load a checkpoint, or plan it again\.", text)
        assert is_ordinary(model)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert model.head.weight is model.embed.weight
        monkeypatch.undo()
        values = Small().state_dict()
        zero.init(plan, zero.open_store(plan), weights=values).close()
        weights = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert all(torch.equal(parameter, values[name]) for name, parameter in weights)


def test_closing_after_another_rank_failed_gives_an_ordinary_model_without_values():
    models = [chain(), chain()]

    def rank_main(world: zero.World) -> None:
        plan = zero.Plan(models[world.rank], optimizer=zero.sgd(LR), world=world)
        state = zero.init(plan, zero.open_store(plan))
        if world.rank == 1:
            raise ValueError("rank 1 fails")
        with pytest.warns(UserWarning, match="the model keeps no values: .*rank 1"):
            state.close()

    with pytest.raises(ValueError, match="rank 1 fails"):
        run_ranks(2, rank_main)
    assert is_ordinary(models[0])
    assert all(parameter.is_meta for parameter in models[0].parameters())


def test_a_module_that_trains_in_shards_is_not_copied_or_pickled():
    with World.solo() as world:
        plan = zero.Plan(chain(), optimizer=zero.sgd(LR), world=world)
        state = zero.init(plan, zero.open_store(plan))
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(zero.ZeroError, match="that trains in shards cannot be copied or pickled"):
                call(state.model.layers[0])
        state.close()
        assert isinstance(copy.deepcopy(plan.model), Chain)


# -- what a model may hold ---------------------------------------------------------------------------------------------


def patched() -> nn.Module:
    """A method made of a closure."""
    model = chain()
    old, own = model.layers[1].forward, model.layers[1]

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        assert self is own
        return old(x) + self[0].bias

    model.layers[1].forward = types.MethodType(forward, model.layers[1])
    return model


def uncopyable() -> nn.Module:
    """A weak reference to itself, a lock, and a tensor with a history."""
    model = chain()
    model.layers[1].parent, model.layers[1].guard = weakref.ref(model), threading.Lock()
    model.layers[1].last = model.layers[1][0].weight * 2
    model.layers[1].register_forward_hook(lambda module, args, output: output + module.parent().layers[0](args[0]))
    return model


@pytest.mark.parametrize(("build", "stage"), [(patched, 3), (uncopyable, 0), (uncopyable, 3)])
def test_functions_of_the_model_compute_with_what_trains(build, stage):
    torch.testing.assert_close(trained(build, stage), plain(build))


def one_memory() -> nn.Module:
    model = chain()
    model.layers[2][0].weight = nn.Parameter(model.layers[0][0].weight.data)
    return model


def slices_of_one_memory(overlap: bool = True) -> nn.Module:
    """Parameters and buffers side by side, some of which reach over others; two buffers may."""
    model, memory = nn.Sequential(), torch.zeros(30)
    for place in range(8):
        made = nn.Parameter(memory[3 * place : 3 * place + 3])
        model.register_parameter(f"p{place}", made)
    model.register_buffer("wide", memory[24:30])
    model.register_buffer("inside", memory[25:26])
    if overlap:
        model.register_buffer("across", memory[20:25])
    return model


def a_buffer_in_a_parameter() -> nn.Module:
    model = chain()
    model.register_buffer("first_row", model.layers[0][0].weight.data[0])
    return model


def an_attribute_in_a_parameter() -> nn.Module:
    model = chain()
    model.layers[1].seen = model.layers[1][0].weight.detach()
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3))


def scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), torch.jit.trace(nn.Linear(3, 3), torch.zeros(1, 3)))


def compiled() -> nn.Module:
    return torch.compile(chain(), backend="eager")


REFUSED = [
    (compiled, r"model was compiled by torch\.compile\. Pass the model itself"),
    (one_memory, r"layers\.2\.0\.weight and layers\.0\.0\.weight are two tensors in the same memory"),
    (slices_of_one_memory, r"across and p6 are two tensors in the same memory"),
    (a_buffer_in_a_parameter, r"first_row and layers\.0\.0\.weight are two tensors in the same memory"),
    (an_attribute_in_a_parameter, r"layers\.1\.seen and layers\.1\.0\.weight are two tensors in the same memory"),
    (lazy, r"1 is a LazyLinear whose sizes are not known yet\. Run one batch"),
    (scripted, r"1 is a TopLevelTracedModule, which is compiled code with its own parameters"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize(("build", "words"), REFUSED, ids=[build.__name__ for build, _ in REFUSED])
def test_a_model_that_cannot_be_taken_over_is_rejected_when_the_plan_is_made(build, words):
    with pytest.raises(PlanError, match=words):
        plan_of(build())


def test_tensors_side_by_side_in_one_memory_are_each_looked_at_once(monkeypatch):
    looked, extent = list[Tensor](), unsupported._extent
    monkeypatch.setattr(unsupported, "_extent", lambda tensor: looked.append(tensor) or extent(tensor))
    unsupported.check_model(slices_of_one_memory(overlap=False))
    assert len(looked) == 10


def test_a_module_may_keep_a_parameter_as_an_attribute_too():
    model = chain()
    object.__setattr__(model, "shared", model.layers[0][0].weight)
    plan_of(model)


# -- hooks of parameters -----------------------------------------------------------------------------------------------


def masked() -> nn.Module:
    """Of two ranks each masks its own gradient, before they are added."""
    model = chain()
    mask = (torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 2).float()
    model.layers[1][0].weight.register_hook(lambda grad: grad * mask)
    return model


def bounded() -> nn.Module:
    """Not linear: of the sum over three uses, one of them a tie; and the second sees what the first made."""
    model = chain()
    model.layers[2][0].weight = model.layers[0][0].weight
    model.layers.append(model.layers[0])
    model.layers[0][0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model.layers[0][0].weight.register_hook(lambda grad: grad.square())
    return model


def decayed() -> nn.Module:
    """The decay reads the parameter."""
    model = chain()
    weight = model.layers[1][0].weight
    weight.register_hook(lambda grad: grad + 0.1 * weight.detach())
    return model


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(("build", "ranks"), [(masked, 2), (bounded, 1), (bounded, 2), (decayed, 2)])
def test_hooks_of_parameters_make_the_gradient_that_they_make_in_torch(build, ranks, stage):
    expected, without = plain(build, ranks), plain(chain, ranks)
    parameters = trained(build, stage, ranks)
    torch.testing.assert_close(parameters, {name: expected[name] for name in parameters}, rtol=1e-5, atol=1e-6)
    assert not all(torch.equal(expected[name], without[name]) for name in parameters), "the hook changed nothing"


@pytest.mark.parametrize("stage", [0, 3])
def test_hooks_see_a_microbatchs_share_of_the_step(stage):
    """As where a script divides its loss by their number, and as DeepSpeed does."""
    count, expected = 2, bounded()
    optimizer = torch.optim.SGD(expected.parameters(), lr=LR)
    plan = plan_of(bounded(), stage=stage, accumulate=count)
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, mean_square)
    for number in range(STEPS):
        parts = [batch_of(number, part) for part in range(count)]
        state, _ = step(state, parts)
        optimizer.zero_grad()
        for part in parts:
            (mean_square(expected, part) / count).backward()
        optimizer.step()
    parameters = zero.full_state_dict(state)
    torch.testing.assert_close(
        parameters, {name: expected.state_dict()[name] for name in parameters}, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_a_hook_may_be_put_on_a_model_that_trains_and_taken_away(stage):
    plan, seen = plan_of(chain(), stage=stage), []
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, mean_square)
    handle = state.model.get_parameter("layers.1.0.bias").register_hook(lambda grad: seen.append(tuple(grad.shape)))
    state, _ = step(state, [batch_of(0)])
    handle.remove()
    state, _ = step(state, [batch_of(1)])
    assert seen == [(WIDTH,)]


def test_a_hook_that_follows_accumulation_is_rejected():
    model = chain()
    handle = model.layers[0][0].bias.register_post_accumulate_grad_hook(print)
    with pytest.raises(PlanError, match=r"^parameter layers\.0\.0\.bias of a Linear has a hook that follows"):
        plan_of(model)
    handle.remove()
    plan = plan_of(model)
    handle = model.layers[0][0].bias.register_post_accumulate_grad_hook(print)
    with pytest.raises(PlanError, match=r"^parameter layers\.0\.0\.bias has a hook that follows"):
        zero.init(plan, zero.open_store(plan))
    handle.remove()
    zero.init(plan, zero.open_store(plan))
    with pytest.raises(OutsideUnitError, match=r"^layers\.0\.0\.bias: .* Use register_hook\.$"):
        model.layers[0][0].bias.register_post_accumulate_grad_hook(print)


def test_a_hook_that_returns_another_shape_is_refused():
    model = chain()
    model.layers[1][0].weight.register_hook(lambda grad: grad[0])
    plan = plan_of(model)
    with pytest.raises(RuntimeError, match=r"layers\.1\.0\.weight returned \(6,\) of .* of shape \(6, 6\)"):
        zero.make_step(plan, mean_square)(zero.init(plan, zero.open_store(plan)), [batch_of(0)])


# -- what hooks of the old kind make -----------------------------------------------------------------------------------


def weight_normed() -> nn.Module:
    model = chain()
    nn.utils.weight_norm(model.layers[1][0])
    mean_square(model, batch_of(0))  # so that the weight it made has a history
    return model


def spectral_normed() -> nn.Module:
    model = chain()
    nn.utils.spectral_norm(model.layers[1][0])
    return model


def pruned() -> nn.Module:
    model = chain()
    prune.l1_unstructured(model.layers[1][0], "weight", amount=0.5)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(("build", "stage"), [(weight_normed, 3), (spectral_normed, 0), (pruned, 3)])
def test_weights_that_a_hook_of_the_old_kind_makes_train(build, stage):
    expected, parameters = plain(build), trained(build, stage)
    assert len(parameters) == len(list(build().parameters()))
    torch.testing.assert_close(parameters, {name: expected[name] for name in parameters}, rtol=1e-5, atol=1e-6)
