"""Code outside the module tree: closures, hooks and patched methods go with the copy, or are refused by name."""

import copy
import itertools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import zero
from zero.distributed.world import SoloWorld
from zero.errors import ConfigError, PlanError, StaleStateError
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


def trained(build: Callable[[], nn.Module], stage: int, ranks: int = 1) -> dict[str, Tensor]:
    models = [build() for _ in range(ranks)]

    def rank_main(world: zero.World) -> dict[str, Tensor]:
        plan = zero.Plan(models[world.rank], optimizer=zero.sgd(LR), world=world, stage=stage)
        state = zero.init(plan, zero.open_store(plan))
        step = zero.make_step(plan, mean_square)
        for number in range(STEPS):
            state, _ = step(state, [batch_of(number, world.rank)])
        return zero.full_state_dict(state)

    return run_ranks(ranks, rank_main)[0]


def plan_of(model: nn.Module, **settings: Any) -> zero.Plan:
    return zero.Plan(model, optimizer=zero.sgd(LR), world=SoloWorld(), **settings)


# -- carried over ------------------------------------------------------------------------------------------------------


def doubled() -> nn.Module:
    """A forward in place of another, which it calls."""
    model = chain()
    old = model.layers[1].forward
    model.layers[1].forward = lambda x: 2 * old(x)
    return model


def patched() -> nn.Module:
    """A method made of a closure."""
    model = chain()
    old, own = model.layers[1].forward, model.layers[1]

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        assert self is own
        return old(x) + self[0].bias

    model.layers[1].forward = types.MethodType(forward, model.layers[1])
    return model


def borrowed() -> nn.Module:
    """A hook that computes with another layer, found in a list that a nested function holds."""
    model = chain()
    layers = [model.layers[0], {"other": model.layers[2]}]

    def other(x: Tensor) -> Tensor:
        return layers[1]["other"](x)

    model.layers[1].register_forward_hook(lambda module, args, output: output + other(args[0]))
    return model


def by_default() -> nn.Module:
    """A default value, and a partial."""
    model = chain()

    def hook(module: nn.Module, args: Any, output: Tensor, other: nn.Module = model.layers[2]) -> Tensor:
        return output + other(args[0])

    model.layers[1].register_forward_hook(hook)
    model.layers[0].register_forward_hook(partial(lambda other, module, args, output: other(output), model.layers[2]))
    return model


def with_a_buffer() -> nn.Module:
    model = chain()
    model.register_buffer("scale", torch.full((), 0.5))
    scale = model.scale
    model.layers[1].register_forward_hook(lambda module, args, output: output * scale.mul_(0.9))
    return model


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("build", [doubled, patched, borrowed, by_default, with_a_buffer])
def test_functions_of_the_model_reach_the_copy(build, stage):
    expected, model = plain(build), build()
    before = copy.deepcopy(model.state_dict())
    torch.testing.assert_close(trained(build, stage), {k: v for k, v in expected.items() if k != "scale"})
    plan = plan_of(model, stage=stage)
    zero.init(plan, zero.open_store(plan))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


class Pair(NamedTuple):
    number: int
    function: Callable[[Tensor], Tensor]


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda f: [f], lambda held: held[0]),
    "deque": (lambda f: deque([f]), lambda held: held[0]),
    "dict": (lambda f: {"f": f}, lambda held: held["f"]),
    "tuple": (lambda f: (1, f), lambda held: held[1]),
    "named tuple": (partial(Pair, 1), lambda held: held.function),
    "set": (lambda f: {f}, lambda held: next(iter(held))),
    "frozen set": (lambda f: frozenset([f]), lambda held: next(iter(held))),
    "partial": (lambda f: partial(f), lambda held: held.func),
    "argument": (lambda f: partial(map, f), lambda held: held.args[0]),
    "object": (lambda f: types.SimpleNamespace(f=[f]), lambda held: held.f[0]),
    "attribute": (lambda f: setattr(f, "own", (f,)) or f, lambda held: held.own[0]),
}
"""Makes a value that holds a function, and gets the function from it."""


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_function_reaches_the_copy_whatever_holds_it(kind):
    put, take = HOLDERS[kind]

    def holding() -> nn.Module:
        model = chain()
        other = model.layers[2]
        model.layers[1].held = put(lambda x: other(x))
        model.layers[1].again = model.layers[1].held
        model.layers[1].register_forward_hook(lambda module, args, output: output + take(module.again)(args[0]))
        return model

    torch.testing.assert_close(trained(holding, 0), plain(holding))
    model = holding()
    function = take(model.layers[1].held)
    plan = plan_of(model)
    zero.init(plan, zero.open_store(plan))
    assert take(model.layers[1].held) is take(model.layers[1].again) is function


class StaysItself(types.SimpleNamespace):
    def __deepcopy__(self, memo: Any) -> "StaysItself":
        return self


def test_what_the_model_shares_with_its_copy_is_not_changed():
    model = chain()
    other = model.layers[2]
    model.layers[1].shared = StaysItself(functions=[lambda: other])
    (function,) = model.layers[1].shared.functions
    plan = plan_of(model)
    state = zero.init(plan, zero.open_store(plan))
    assert state.model.layers[1].shared is model.layers[1].shared
    assert model.layers[1].shared.functions == [function]


class Recorder:
    def __init__(self) -> None:
        self.seen: list[float] = []

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output.abs().sum().item())


def test_a_hook_that_records_goes_on_recording_where_its_owner_looks():
    model, recorder, seen, count = chain(), Recorder(), [], 0

    def counting(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal count
        count += model.layers[0] is not None

    model.layers[0].register_forward_hook(recorder.hook)
    model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.sum().item()))
    model.layers[2].register_forward_hook(counting)
    plan = plan_of(model)
    state = zero.init(plan, zero.open_store(plan))
    zero.make_step(plan, mean_square)(state, [batch_of(0)])
    assert len(recorder.seen) == len(seen) == count == 1


# -- refused by name ---------------------------------------------------------------------------------------------------

MODEL: Any = None
"""What a script has as a global."""


def with_the_global(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + MODEL.layers[0](args[0])


def helped(x: Tensor) -> Tensor:
    return MODEL.layers[0](x)


class ReadsAGlobal(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + helped(x)


class HasAMethodOfThatName(Chain):
    """An attribute that is called as the global is no global."""

    @property
    def MODEL(self) -> nn.Module:
        return self.layers[0]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.MODEL(x)


def reads_a_global(make: Callable[[], nn.Module]) -> nn.Module:
    global MODEL
    MODEL = make()
    return MODEL


def hooked_with_a_global() -> nn.Module:
    model = reads_a_global(chain)
    model.layers[1].register_forward_hook(with_the_global)
    return model


def with_a_class_attribute() -> nn.Module:
    class Own(Chain):
        shared: nn.Module

    model = Own()
    Own.shared = model.layers[0]
    return model


def with_a_class_in_a_closure() -> nn.Module:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + model.layers[0](x)

    model = chain()
    model.layers.append(Own())
    return model


def with_a_weak_reference() -> nn.Module:
    model = chain()
    model.layers[1].parent = weakref.ref(model)
    return model


def with_a_method_inside() -> nn.Module:
    model = chain()
    old = model.layers[1].forward
    model.layers[1].forward = partial(types.MethodType(lambda self, x: 2 * old(x), model.layers[1]))
    return model


def one_memory() -> nn.Module:
    model = chain()
    model.layers[2][0].weight = nn.Parameter(model.layers[0][0].weight.data)
    return model


def a_buffer_in_a_parameter() -> nn.Module:
    model = chain()
    model.register_buffer("first_row", model.layers[0][0].weight.data[0])
    return model


def an_attribute_in_a_parameter() -> nn.Module:
    model = chain()
    model.layers[1].seen = model.layers[1][0].weight.detach()
    return model


def with_a_history() -> nn.Module:
    model = chain()
    model.layers[1].last = model.layers[1][0].weight * 2
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3))


def scripted() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), torch.jit.trace(nn.Linear(3, 3), torch.zeros(1, 3)))


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo: Any) -> "CopiesItself":
        return CopiesItself(self.in_features, self.out_features)


def copying_itself() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), CopiesItself(3, 3))


def with_a_lock() -> nn.Module:
    model = chain()
    model.layers[1].guard = threading.Lock()
    return model


def compiled() -> nn.Module:
    return torch.compile(chain(), backend="eager")


REFUSED = [
    (compiled, r"model is what torch\.compile made of one: pass the model itself"),
    (hooked_with_a_global, r"with_the_global, which runs in layers\.1, reads the global MODEL: the model"),
    (partial(reads_a_global, ReadsAGlobal), r"helped, which runs in ReadsAGlobal, reads the global MODEL: the model"),
    (with_a_class_attribute, r"Own\.shared is the module layers\.0, held by the class"),
    (with_a_class_in_a_closure, r"Own\.forward, which runs in layers\.3, .* reaches the model through its closure"),
    (with_a_weak_reference, r"parent of layers\.1 is a weak reference to the model"),
    (with_a_method_inside, r"forward of layers\.1 is a method whose function reaches the model inside something else"),
    (one_memory, r"layers\.2\.0\.weight and layers\.0\.0\.weight are two tensors in the same memory"),
    (a_buffer_in_a_parameter, r"layers\.0\.0\.weight and first_row are two tensors in the same memory"),
    (an_attribute_in_a_parameter, r"layers\.1\.0\.weight and layers\.1\.seen are two tensors in the same memory"),
    (with_a_history, r"layers\.1\.last, Tensor, cannot be copied, .*Only Tensors created explicitly by the user"),
    (lazy, r"1 is a LazyLinear whose sizes are not known yet; run one batch"),
    (scripted, r"1 is a TopLevelTracedModule: compiled code that keeps its own parameters"),
    (copying_itself, r"CopiesItself has a __deepcopy__ of its own that makes another 1\.weight"),
    (with_a_lock, r"layers\.1\.guard, lock, cannot be copied, .*cannot pickle '_thread\.lock' object"),
]


@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize(("build", "words"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_what_a_copy_could_not_have_is_refused_when_the_plan_is_made(build, words):
    with pytest.raises(PlanError, match=words):
        plan_of(build())


@pytest.mark.parametrize("build", [partial(reads_a_global, HasAMethodOfThatName), partial(reads_a_global, chain)])
def test_a_global_that_is_not_read_is_no_reason_to_refuse(build):
    plan_of(build())


def test_parameters_that_lie_between_each_other_in_memory_are_two():
    memory = torch.randn(WIDTH, 2 * WIDTH)
    model = chain()
    model.layers[0][0].weight = nn.Parameter(memory[:, :WIDTH])
    model.layers[1][0].weight = nn.Parameter(memory[:, WIDTH:])
    plan_of(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_at_the_original_is_noticed(stage):
    model = chain()

    def loss(copied: nn.Module, x: Tensor) -> Tensor:
        return mean_square(copied, x) + 0.1 * model.layers[0][0].weight.square().sum()

    def distilled(copied: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = model(x)
        return (copied(x) - wanted).square().mean()

    plan = plan_of(model, stage=stage)
    state = zero.init(plan, zero.open_store(plan))
    mean_square(model, batch_of(0)).backward()  # of no step
    for _ in range(2):  # a first gradient, and one that is added to it
        with pytest.raises(ConfigError, match="a gradient arrived at the model that was given"):
            zero.make_step(plan, loss)(state, [batch_of(0)])
    state, _ = zero.make_step(plan, distilled)(state, [batch_of(0)])
    assert state.step == 1


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
    """It reads the parameter."""
    model = chain()
    weight = model.layers[1][0].weight
    weight.register_hook(lambda grad: grad + 0.1 * weight.detach())
    return model


def scaled_afterwards() -> nn.Module:
    """Afterwards, when the gradient is in its place: changed there, and another one taken away."""
    model, mask = chain(), torch.full((WIDTH,), 0.5)
    model.layers[0][0].weight.register_hook(lambda grad: grad + 1e-3)

    def scale(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(mask)

    def drop(parameter: nn.Parameter) -> None:
        parameter.grad = None

    model.layers[0][0].weight.register_post_accumulate_grad_hook(scale)
    model.layers[1][0].weight.register_post_accumulate_grad_hook(drop)
    return model


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("build", "ranks"),
    [*itertools.product([masked, bounded, decayed], [1, 2]), (scaled_afterwards, 1)],  # torch's are of one rank
)
def test_hooks_of_parameters_make_the_gradient_that_they_make_in_torch(build, ranks, stage):
    expected, without = plain(build, ranks), plain(chain, ranks)
    found = trained(build, stage, ranks)
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-5, atol=1e-6)
    assert not all(torch.equal(expected[name], without[name]) for name in found), "the hook changed nothing"


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
    found = zero.full_state_dict(state)
    torch.testing.assert_close(found, {name: expected.state_dict()[name] for name in found}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_hook_may_be_put_on_the_copy_and_taken_away(stage):
    plan, seen = plan_of(chain(), stage=stage), []
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, mean_square)
    handle = state.model.get_parameter("layers.1.0.bias").register_hook(lambda grad: seen.append(tuple(grad.shape)))
    state, _ = step(state, [batch_of(0)])
    handle.remove()
    state, _ = step(state, [batch_of(1)])
    assert seen == [(WIDTH,)]


def test_a_hook_that_returns_another_shape_is_refused():
    model = chain()
    model.layers[1][0].weight.register_hook(lambda grad: grad[0])
    plan = plan_of(model)
    with pytest.raises(RuntimeError, match=r"layers\.1\.0\.weight returned \(6,\) of .* for a gradient \(6, 6\)"):
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
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("build", [weight_normed, spectral_normed, pruned])
def test_weights_that_a_hook_of_the_old_kind_makes_train(build, stage):
    expected, found = plain(build), trained(build, stage)
    assert len(found) == len(list(build().parameters()))
    torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-5, atol=1e-6)


# -- writes that no reading of the code finds --------------------------------------------------------------------------


class Keeper:
    def bound(self, weight: Tensor) -> None:
        weight.data.clamp_(-0.01, 0.01)


HELPERS = types.SimpleNamespace(bound=Keeper().bound)


class WritesByAnother(nn.Linear):
    def __init__(self, how: Callable[["WritesByAnother"], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.how, self.keeper = (how,), Keeper()

    def forward(self, x: Tensor) -> Tensor:
        self.how[0](self)
        return super().forward(x)


WRITERS: list[Callable[[WritesByAnother], Any]] = [
    lambda module: module.keeper.bound(module.weight),
    lambda module: HELPERS.bound(module.weight),
    lambda module: list(map(HELPERS.bound, [module.weight])),
    lambda module: setattr(module.weight, "data", module.weight.clone()[:, :].mul(0.5)),
    lambda module: torch.from_dlpack(module.weight.detach()).mul_(0.9),
]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("how", WRITERS)
def test_a_write_by_whatever_calls_is_refused_the_first_time(how, stage):
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), WritesByAnother(how))

    with pytest.raises(StaleStateError, match=r"weight of 1 was written to in place"):
        trained(build, stage, 2)
