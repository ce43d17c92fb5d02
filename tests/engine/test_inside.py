"""The freedom of user code inside a model and around its calls: at every stage results are those of plain torch.

The oracle, and most odd models, are in test_gather.py.
"""

import copy
import dataclasses
import re
from collections import OrderedDict, UserDict
from collections.abc import Callable
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils._pytree import register_pytree_node
from torch.utils.checkpoint import checkpoint

import zero
from tests.engine.test_gather import (
    LR,
    ROWS,
    WIDTH,
    AllUnderCheckpoint,
    Batch,
    Broken,
    Chain,
    InPlace,
    InPlaceChain,
    Layer,
    Lora,
    LossFn,
    MostlyFrozen,
    Nested,
    Recurrent,
    RootOwns,
    SpoilsAnActivation,
    Tied,
    UnderCheckpoint,
    assert_same,
    batch_of,
    by_input_too,
    by_input_twice,
    mean_square,
    pins,
    plain,
    sharded,
)
from zero.core.tree import replaced, tensors_in
from zero.distributed.world import World
from zero.engine.memory.saved_tensors import OnHost
from zero.errors import OutsideUnitError, PlanError
from zero.platform.device import Device
from zero.testing import run_ranks


def values_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def state_of(model: nn.Module, world: zero.World, stage: int = 3, **settings: Any) -> zero.State:
    plan = zero.Plan(copy.deepcopy(model), optimizer=zero.sgd(LR), world=world, stage=zero.Stage(stage), **settings)
    return zero.init(plan, zero.open_store(plan), weights=values_of(model))


# -- torch.func --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 3])
def test_tensors_given_by_functional_call_are_used_and_a_transform_is_rejected(stage):
    model, batch = Tied(), batch_of(0, 0)
    given = {name: 2 * value for name, value in values_of(model).items()}
    some = {name: value for name, value in given.items() if "layers.1" in name}

    def rank_main(world: zero.World) -> list[Tensor]:
        state = state_of(model, world, stage)
        with pytest.raises(OutsideUnitError, match=r"^torch\.func cannot transform a model that trains in shards"):
            grad(lambda x: state.model(batch._replace(x=x)).sum())(batch.x)
        with pytest.raises(OutsideUnitError, match=r"^torch\.func cannot transform"):
            grad(lambda x: (x @ state.model.first.weight).sum())(batch.x)
        with torch.no_grad():
            return [functional_call(state.model, parameters, (batch,)) for parameters in (given, some)]

    with torch.no_grad():
        expected = [functional_call(model, parameters, (batch,)) for parameters in (given, some)]
    for told in run_ranks(2, rank_main):
        torch.testing.assert_close(told, expected)


# -- backwards ---------------------------------------------------------------------------------------------------------


def two_forwards_two_backwards(model: nn.Module, batch: Batch) -> Tensor:
    first, second = mean_square(model, batch), mean_square(model, batch._replace(x=-2 * batch.x))
    first.backward()
    return second


def several_losses_of_one_forward(model: nn.Module, batch: Batch) -> Tensor:
    y = model(batch)
    y.square().mean().backward(retain_graph=True)
    y.sin().sum().backward(retain_graph=True)
    return y.mean()


def not_a_scalar(model: nn.Module, batch: Batch) -> Tensor:
    y = model(batch)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y), retain_graph=True)
    return y.mean() * 0


def gradients_taken_out(model: nn.Module, batch: Batch) -> Tensor:
    """Of several inputs and outputs, with a supplied gradient, twice from one graph."""
    x = batch.x.clone().requires_grad_()
    y = model(batch._replace(x=x))
    (first,) = torch.autograd.grad([y, y.square()], [x], [torch.ones_like(y)] * 2, retain_graph=True)
    (second,) = torch.autograd.grad(y.mean(), x, retain_graph=True)
    return y.square().mean() + (first + second).mean()


class FrozenUnderCheckpoint(MostlyFrozen):
    """Frozen and trained units under one checkpoint each, and beside each other under one."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.loras = nn.ModuleList(Lora() for _ in range(2))
        self.reentrant = reentrant

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x.clone().requires_grad_()
        for layer in (*self.layers, *self.loras):
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x + checkpoint(
            lambda y: super(MostlyFrozen, self).forward(batch._replace(x=y)), x, use_reentrant=self.reentrant
        )


@pytest.mark.parametrize(
    ("build", "loss", "stage"),
    [
        (RootOwns, two_forwards_two_backwards, 2),
        (RootOwns, two_forwards_two_backwards, 3),
        (Tied, several_losses_of_one_forward, 0),
        (Tied, several_losses_of_one_forward, 3),
        (Chain, not_a_scalar, 2),
        (MostlyFrozen, gradients_taken_out, 3),
        (lambda: AllUnderCheckpoint(reentrant=False), several_losses_of_one_forward, 3),
        (lambda: UnderCheckpoint(reentrant=True), several_losses_of_one_forward, 0),
        (lambda: UnderCheckpoint(reentrant=True), two_forwards_two_backwards, 3),
        (lambda: FrozenUnderCheckpoint(reentrant=False), several_losses_of_one_forward, 3),
        (lambda: FrozenUnderCheckpoint(reentrant=True), two_forwards_two_backwards, 2),
    ],
)
def test_any_number_of_backwards_of_any_kind(build, loss, stage):
    model = build()
    assert_same(sharded(model, loss, stage=stage, steps=2), *plain(model, loss, 2, 2))


class FailsInRecomputation(nn.Module):
    """The first recomputation breaks off half-way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        if self.calls == 2:
            raise Broken
        return self.second(x)


@pytest.mark.parametrize(("stage", "reentrant"), [(0, True), (3, False), (3, True)])
def test_an_exception_in_a_recomputation_leaves_the_state_as_it_was(stage, reentrant):
    """In user code's checkpoint, around units and inside one; the same step again is the step that did not fail."""

    class Model(Chain):
        def forward(self, batch: Batch) -> Tensor:
            x = batch.x.clone().requires_grad_()
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    model = Model(FailsInRecomputation)

    def rank_main(world: zero.World, units: list[str], breaks: bool) -> dict[str, Tensor]:
        state = state_of(model, world, stage, units=units)
        for module in state.model.modules():
            if isinstance(module, FailsInRecomputation):
                module.calls = 0 if breaks else 2
        step = zero.make_step(state.plan, mean_square)
        if breaks:
            with pytest.raises(Broken):
                step(state, [batch_of(0, world.rank)])
        for layer in state.model.layers:
            layer.calls = 2
        state, _ = step(state, [batch_of(0, world.rank)])
        pool = state.runtime.residency.pool
        assert pool is None or pool.pinned == 0
        return zero.full_state_dict(state)

    for units in (["Layer"], ["FailsInRecomputation"]):
        broken, whole = (run_ranks(2, rank_main, units, breaks) for breaks in (True, False))
        torch.testing.assert_close(broken, whole, rtol=0, atol=0)


# -- containers --------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    bias: Any


@dataclasses.dataclass
class Unregistered:
    x: Any
    bias: Any
    late: Tensor = dataclasses.field(init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    bias: Any


@dataclasses.dataclass
class ModelOutput(OrderedDict):
    """A dataclass and a mapping in one, as some libraries return."""

    x: Any = None
    bias: Any = None
    nothing: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


class Registered:
    def __init__(self, x: Any, bias: Any) -> None:
        self.x, self.bias = x, bias


register_pytree_node(
    Registered, lambda container: ([container.x, container.bias], None), lambda parts, _: Registered(*parts)
)

CONTAINERS: list[Callable[[Any, Any], Any]] = [
    Pair,
    Unregistered,
    Frozen,
    lambda x, bias: ModelOutput(x=x, bias=bias),
    Registered,
    lambda x, bias: {"x": x, "bias": bias, "nothing": None},
    lambda x, bias: OrderedDict(x=x, bias=[bias, 3]),
    lambda x, bias: UserDict({"x": (x,), "bias": bias}),
    lambda x, bias: MappingProxyType({"x": x, "bias": bias}),
    lambda x, bias: [None, (x, "a word"), Unregistered(1, Pair(None, bias))],
]


class InContainers(nn.Module):
    """Takes and returns its tensors in a container; one of them lies in the unit's buffer, and some ranks pass by."""

    def __init__(self, make: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make = make

    def forward(self, given: Any, *, rank: int) -> Any:
        x = tensors_in(given)[0]
        return self.make(x * 1.5 if rank == 1 else torch.tanh(self.linear(x)), self.linear.bias.detach())


class OnlyPasses(InContainers):
    """Does not use its parameters on one rank."""

    def forward(self, given: Any, *, rank: int) -> Any:
        return super().forward(given, rank=rank) if rank == 0 else given


class ContainerChain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer()
        kinds = (InContainers, OnlyPasses)
        self.layers = nn.ModuleList(kind(make) for make in CONTAINERS for kind in kinds)

    def forward(self, batch: Batch) -> Tensor:
        given: Any = self.first(batch.x)
        biases = []
        for layer in self.layers:
            given = layer(given, rank=batch.rank)
            biases += tensors_in(given)[1:]
        return tensors_in(given)[0] + torch.stack(biases).sum(0) * 0.1


@pytest.mark.parametrize(("stage", "activations"), [(2, "keep"), (3, "keep"), (3, "remat")])
def test_modules_take_and_return_any_container(stage, activations):
    model = ContainerChain()
    told = sharded(model, stage=stage, steps=2, activations=activations)
    assert_same(told, *plain(model, mean_square, 2, 2))
    assert [rank.renewed for rank in told] == [[0, 0]] * 2  # nothing that was returned lies in a buffer


@pytest.mark.parametrize("make", CONTAINERS)
def test_tensors_in_containers_are_found_and_replaced(make):
    x, bias, other = torch.zeros(1), torch.ones(1), torch.ones(2)
    given = make(x, bias)
    assert [id(tensor) for tensor in tensors_in(given)] == [id(x), id(bias)]
    assert replaced(given, {id(other): x}) is given
    after = replaced(given, {id(bias): other})
    assert type(after) is type(given)
    assert [id(tensor) for tensor in tensors_in(after)] == [id(x), id(other)]
    assert [id(tensor) for tensor in tensors_in(given)] == [id(x), id(bias)], "the caller's own is not changed"
    if isinstance(after, ModelOutput):
        assert after["bias"] is after.bias is other


def test_a_container_may_hold_itself():
    x, other = torch.zeros(1), torch.ones(1)
    given: list[Any] = [x]
    given.append(given)
    assert tensors_in(given) == [x]
    assert replaced(given, {id(x): other})[0] is other


# -- two models --------------------------------------------------------------------------------------------------------


class Holder(nn.Module):
    """Calls another model, which is not its submodule, from within a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.ask: list[Callable[[Batch], Tensor]] = []

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.layer(x) * self.ask[0](batch._replace(x=x))


@pytest.mark.parametrize(("stage", "inside"), [(0, True), (3, False), (3, True)])
def test_a_model_trains_through_another_one_that_is_frozen_and_sharded(stage, inside):
    """Distillation: a target without gradients, a loss through the frozen model, and a call from inside a unit."""
    teacher = RootOwns().requires_grad_(False)
    student = Holder() if inside else Tied()

    def loss_with(ask: Callable[[Batch], Tensor], quiet: Callable[[Batch], Tensor]) -> LossFn:
        def loss(model: nn.Module, batch: Batch) -> Tensor:
            if inside:
                holder = next(module for module in model.modules() if isinstance(module, Holder))
                holder.ask[:] = [ask]
                y = model(batch.x, batch)
            else:
                y = model(batch)
            return (y - quiet(batch)).square().mean() + ask(batch._replace(x=y)).square().mean()

        return loss

    def rank_main(world: zero.World) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        frozen = state_of(teacher, world, 3, units=["Nested", "Layer"])
        forward = zero.make_forward(frozen.plan, lambda model, batch: model(batch))
        state = state_of(student, world, stage, units=["Holder"] if inside else None)
        step = zero.make_step(state.plan, loss_with(frozen.model, lambda batch: forward(frozen, batch)))
        losses = []
        for number in range(3):
            state, metrics = step(state, [batch_of(number, world.rank)])
            losses.append(metrics.loss)
            assert pins(frozen.runtime.residency.pool) == 0
        return losses, zero.full_state_dict(state), zero.full_state_dict(frozen)

    def quiet(batch: Batch) -> Tensor:
        with torch.no_grad():
            return teacher(batch)

    losses, parameters = plain(student, loss_with(teacher, quiet), 2, 3)
    for told_losses, told_parameters, told_teacher in run_ranks(2, rank_main):
        torch.testing.assert_close(told_losses, losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(told_parameters, parameters, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(told_teacher, values_of(teacher), rtol=0, atol=0)


def test_a_frozen_model_has_nothing_to_train():
    state = state_of(Chain().requires_grad_(False), World.solo())
    with pytest.raises(PlanError, match="no trainable parameter"):
        zero.make_step(state.plan, mean_square)(state, [batch_of(0, 0)])


# -- activations in host memory ----------------------------------------------------------------------------------------


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> list[OnHost]:
    """Activations of a CPU leave as those of a GPU do, small ones too; who did it, one for each rank."""
    made: list[OnHost] = []

    class Everything(OnHost):
        def __init__(self, device: Device, *, pin: bool) -> None:
            super().__init__(device, pin=pin, least_bytes=4 * ROWS * WIDTH)
            made.append(self)

    monkeypatch.setattr("zero.engine.wire.OnHost", Everything)
    monkeypatch.setattr("zero.engine.wire._goes_to_host", lambda plan: "offload" in plan.activations.values())
    return made


OFFLOADED = [
    (Chain, mean_square),
    (RootOwns, two_forwards_two_backwards),
    (Tied, several_losses_of_one_forward),
    (MostlyFrozen, by_input_too),
    (Chain, by_input_twice),
    (Recurrent, mean_square),
    (lambda: InPlaceChain(InPlace), mean_square),
    (lambda: FrozenUnderCheckpoint(reentrant=True), mean_square),
]


@pytest.mark.parametrize(("build", "loss"), OFFLOADED)
def test_activations_that_wait_on_the_host_change_no_bit(on_host, build, loss):
    model, stage = build(), (3, 0)[OFFLOADED.index((build, loss)) % 3 == 1]
    kept, offloaded = (sharded(model, loss, stage=stage, steps=2, activations=how) for how in ("keep", "offload"))
    for result, other in zip(kept, offloaded, strict=True):
        assert result.losses == other.losses
        torch.testing.assert_close(result.parameters, other.parameters, rtol=0, atol=0)
    assert on_host, "nothing went to the host"
    for host_store in on_host:
        assert host_store.allocated_bytes
        assert not host_store._homes, "a graph that is gone leaves nothing behind"
        assert sum(block.numel() for free in host_store._free.values() for block in free) == host_store.allocated_bytes


def test_what_is_kept_twice_goes_once_and_views_come_back_as_they_were():
    store = OnHost(Device(torch.device("cpu")), least_bytes=64)
    wide = torch.randn(4, 24)
    given = [wide, wide[:, 8:16], wide.t(), wide.view(torch.int32)[1]]
    packed = [store.keep(tensor) for tensor in given]
    assert store.allocated_bytes == 4096
    small = store.keep(torch.ones(3))
    expected = [tensor.clone() for tensor in given]
    for _ in range(2):
        for handle, before in zip(reversed(packed), reversed(expected), strict=True):
            assert torch.equal(store.find(handle), before)
    wide.zero_()  # its copy may have been under way
    changed = store.keep(wide)
    for _ in range(2):
        assert store.find(changed).count_nonzero() == 0
        for handle, before in zip(packed, given, strict=True):
            shape = re.escape(str(tuple(before.shape)))
            with pytest.raises(RuntimeError, match=f"modified by an inplace operation.*{shape} is at version 1"):
                store.find(handle)
    assert torch.equal(store.find(small), torch.ones(3))
    small.tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        store.find(small)
    store.release_all()
    del packed, changed, handle
    assert not store._homes


def test_an_activation_that_was_overwritten_on_its_way_is_refused_as_torch_does(on_host):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sharded(Chain(SpoilsAnActivation), activations="offload")


def test_on_a_cpu_offloaded_activations_are_kept_where_they_are():
    state = state_of(Chain(), World.solo(), activations="offload")
    assert state.runtime.sites.activations.allocated_bytes == 0
    assert not state.runtime.sites.activations.offloads


# -- compilation -------------------------------------------------------------------------------------------------------


class Numbered(Layer):
    """A layer that knows its index."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.index % 3) / 3


class ManyNumbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Numbered(index) for index in range(24))

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x.clone().requires_grad_()
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch hides its own, for all threads or none
@pytest.mark.parametrize(
    ("build", "settings", "most"),
    [
        (Chain, {"ranks": 2, "stage": 3}, 4),  # on each rank; the first block's input wants no gradient
        (Chain, {"ranks": 1, "stage": 0, "activations": "remat"}, 2),
        (ManyNumbered, {"ranks": 1}, 2),
        (lambda: UnderCheckpoint(reentrant=False, make=Nested), {"ranks": 1, "units": ["Nested", "Layer"]}, 6),
    ],
)
def test_blocks_of_a_class_share_one_compiled_function(build, settings, most):
    """And what is computed is what was written."""
    torch.compiler.reset()
    made: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        made.append(graph.print_readable(print_output=False))
        return graph.forward

    model = build()
    whole = "units" not in settings  # a unit inside another one breaks the outer graph
    told = sharded(model, compile={"backend": backend, "fullgraph": whole}, steps=2, **settings)
    assert_same(told, *plain(model, mean_square, settings["ranks"], 2))
    assert 0 < len(made) <= most
    assert [rank.renewed for rank in told] == [[0, 0]] * settings["ranks"]


class _Backend:
    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return graph.forward


@pytest.mark.parametrize("backend_of", [_Backend, lambda: partial(_Backend(), inputs=[]), lambda: _Backend().__call__])
def test_ranks_agree_on_a_backend_that_is_an_object_of_each(backend_of):
    def begun(world: World) -> bool:
        with world.exclusive(), zero.empty():
            model = nn.Linear(2, 2)
        plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=world, compile=backend_of())
        zero.init(plan, zero.open_store(plan), seed=0).close()
        return True

    assert run_ranks(2, begun) == [True, True]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_dynamic_shapes_compile_once_for_all_lengths():
    lengths, made = (3, 5, 8, 13, 21), {}
    for dynamic in (True, False):
        torch.compiler.reset()
        graphs: list[int] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Any], graphs: list[int] = graphs) -> Callable[..., Any]:
            graphs.append(len(inputs))
            return graph.forward

        plan = zero.Plan(
            nn.Sequential(*(Numbered(index) for index in range(3))),
            optimizer=zero.sgd(0.1),
            world=World.solo(),
            compile={"backend": backend, "dynamic": dynamic},
        )
        state, step = zero.init(plan, zero.open_store(plan), seed=0), zero.make_step(plan, lambda m, x: m(x).mean())
        for length in lengths:
            x = torch.ones(length, WIDTH, requires_grad=True)
            state, _ = step(state, [x])
        made[dynamic] = len(graphs)
    assert made[True] <= 2 < made[False]
