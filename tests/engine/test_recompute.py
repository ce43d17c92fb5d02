"""Recomputed activations: the same numbers as kept ones, and no operator of the table runs twice without need."""

import subprocess
import sys
import warnings
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import zero
from tests.common.small import Setting
from tests.conftest import LONG_S
from zero.core.activations.selective import PRODUCTS
from zero.distributed.world import World
from zero.engine.whole.read import digest
from zero.testing import run_ranks

aten = torch.ops.aten


def attention(*args, **kwargs):
    """Run a GPU's attention operator on a CPU: the query, with dropout from the default generator."""
    query, p = args[0], kwargs.pop("p")
    mask = (torch.rand(query.shape) >= p) / (1 - p) if p else torch.ones(query.shape)
    return query * mask, mask


class Flash:
    def forward(query, key, value, p=0.0, *_, **__):
        output, mask = attention(query, p=p)
        none = torch.zeros(0, dtype=torch.int64)
        return output, torch.zeros(1), none, none, 0, 0, mask, none, none

    def backward(grad, query, key, value, *rest, **_):
        return grad * rest[8], torch.zeros_like(key), torch.zeros_like(value)


class Efficient:
    def forward(query, key, value, bias, log, p=0.0, *_, **__):
        output, mask = attention(query, p=p)
        return output, torch.zeros(1), mask, torch.zeros(0)

    def backward(grad, query, key, value, bias, output, log, mask, *_, **__):
        return grad * mask, torch.zeros_like(key), torch.zeros_like(value), None


class CuDNN:
    def forward(query, key, value, bias, log, p=0.0, *_, **__):
        output, mask = attention(query, p=p)
        none = torch.zeros(0, dtype=torch.int64)
        return output, torch.zeros(1), none, none, 0, 0, mask, none, none

    def backward(grad, query, key, value, output, log, mask, *_, **__):
        return grad * mask, torch.zeros_like(key), torch.zeros_like(value)


@pytest.fixture(scope="module")
def operators_of_a_gpu():
    library = torch.library.Library("aten", "IMPL")
    for name, stand_in in (("flash", Flash), ("efficient", Efficient), ("cudnn", CuDNN)):
        library.impl(f"_scaled_dot_product_{name}_attention", stand_in.forward, "CPU")
        library.impl(f"_scaled_dot_product_{name}_attention_backward", stand_in.backward, "CPU")
    yield
    library._destroy()


class Scaled(torch.autograd.Function):
    """A product in float8, which torch does not differentiate."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        scale = torch.ones(())
        narrow, wide = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        return torch._scaled_mm(narrow, wide.t(), scale, scale, out_dtype=torch.bfloat16).float()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0], None


def flexible(q, p):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not compiled
        return flex.flex_attention(q, q * 2, q * 3)


CALLS = {
    aten.mm.default: lambda q, p: torch.mm(q[0, 0], q[0, 1])[None, None],
    aten.addmm.default: lambda q, p: torch.addmm(q[0, 0], q[0, 0], q[0, 1])[None, None],
    aten.bmm.default: lambda q, p: torch.bmm(q[0], q[0])[None],
    aten.baddbmm.default: lambda q, p: torch.baddbmm(q[0], q[0], q[0])[None],
    aten._grouped_mm.default: lambda q, p: torch._grouped_mm(q[0].bfloat16(), q[0].bfloat16())[None].float(),
    aten._scaled_mm.default: lambda q, p: Scaled.apply(q[0, 0], q[0, 1].detach())[None, None],
    torch.ops.higher_order.flex_attention: flexible,
    aten._scaled_dot_product_flash_attention.default: lambda q, p: aten._scaled_dot_product_flash_attention(
        q, q * 2, q * 3, p
    )[0],
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda q, p: (
        aten._scaled_dot_product_flash_attention_for_cpu(q, q * 2, q * 3, p)[0]
    ),
    aten._scaled_dot_product_efficient_attention.default: lambda q, p: aten._scaled_dot_product_efficient_attention(
        q, q * 2, q * 3, None, True, dropout_p=p
    )[0],
    aten._scaled_dot_product_cudnn_attention.default: lambda q, p: aten._scaled_dot_product_cudnn_attention(
        q, q * 2, q * 3, None, True, p
    )[0],
    aten.convolution.default: lambda q, p: torch.conv2d(q, q[:, :, :3, :3], padding=1),
}
"""Each operator that is kept, and one that is not, on (1, 2, 16, 16) with a probability of dropout."""

DROPS = [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]


class Runs(TorchDispatchMode):
    """Count the operators that run, outside of the modes that answer with kept results."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, call, p):
        super().__init__()
        self.before, self.after, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.5)
        self.call, self.p = call, p

    def forward(self, x):
        y = self.call(torch.tanh(self.before(x)), self.p).mean((1, 2), keepdim=True)
        return self.drop(torch.tanh(self.after(y * x)))


def test_the_table_has_no_operator_without_a_test():
    assert {*PRODUCTS} <= {*map(str, CALLS)}


@pytest.mark.parametrize(
    ("operator", "p"),
    [(operator, 0.0) for operator in CALLS] + [(operator, 0.25) for operator in DROPS],
    ids=lambda value: str(value).removeprefix("aten._scaled_dot_product_"),
)
def test_a_kept_result_does_not_change_the_random_numbers_that_follow(operator, p, operators_of_a_gpu, monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # it allows no backward on a CPU
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)

    def step(policy):
        torch.manual_seed(0)
        model = nn.Sequential(Block(CALLS[operator], p), Block(CALLS[operator], p))
        plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=World.solo(), activations=policy)
        state, runs = zero.init(plan, zero.open_store(plan)), Runs()

        def loss(model, x):
            return model(x).square().sum()

        torch.manual_seed(5)
        with runs:
            _, metrics = zero.make_step(plan, loss)(state, [torch.randn(1, 2, 16, 16)])
        return metrics, runs.counts[operator], torch.rand(1)

    keep, remat, selective = (step(policy) for policy in ("keep", "remat", "selective"))
    assert keep[0] == selective[0] == remat[0]
    assert keep[2] == selective[2]
    assert keep[1] < remat[1]
    assert selective[1] == (keep[1] if str(operator) in PRODUCTS and not p else remat[1])


# -- nested sites ------------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    """An innermost unit with dropout, which counts its forwards."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.forwards = nn.Linear(10, 10), nn.Dropout(0.5), 0

    def forward(self, x):
        self.forwards += 1
        return self.drop(torch.tanh(self.linear(x)))


class Around(nn.Module):
    """Two innermost units, with dropout and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.drop = Inner(), Inner(), nn.Dropout(0.25)
        self.gain = nn.Parameter(torch.ones(10))

    def forward(self, x):
        return self.drop(self.second(self.first(x)) * self.gain)


class Positions(nn.Module):
    """A root with a parameter of its own."""

    def __init__(self, block):
        super().__init__()
        self.positions, self.blocks = nn.Parameter(torch.ones(10)), nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        x = x + self.positions
        for block in self.blocks:
            x = block(x)
        return x


def nested_step(world, activations, block, units):
    plan = zero.Plan(
        Positions(block), optimizer=zero.sgd(0.1), world=world, activations=activations, units=units, accumulate=2
    )

    def fill(name, tensor):
        tensor.uniform_(-1, 1, generator=torch.Generator().manual_seed(len(name)))

    state = zero.init(plan, zero.open_store(plan), weights=fill)
    step, inner = zero.Step(state), [module for module in plan.model.modules() if isinstance(module, Inner)]
    plan.model.train(world.size == 1)  # ranks that are threads share the generator
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(world.rank))
    torch.manual_seed(5)
    for _ in range(2):
        step.microbatch()
        step.backward(plan.model(x).square().mean())
    grads, pool = zero.full_state_dict(step, "grad"), state.runtime.residency.pool
    state.runtime.store.close()
    forwards, overflowed = [module.forwards for module in inner], 0 if pool is None else pool.overflowed
    return grads, torch.rand(1), forwards, plan.bytes["device"]["gathered units"], overflowed


NESTED = [(Inner, None), (Around, ["Around", "Inner"]), (Around, ["Positions", "Around", "Inner", "Linear"])]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("activations", ["remat", "selective", {"blocks.[02]*": "selective", "*": "remat"}])
@pytest.mark.parametrize(("block", "units"), NESTED)
def test_nested_units_are_recomputed_once_with_the_gradients_and_buffers_of_kept_ones(block, units, activations, size):
    """Dropout is in units and around them. Where `Linear` is a unit, only that is recomputed, and no Inner."""
    for kept, recomputed in zip(
        run_ranks(size, nested_step, "keep", block, units),
        run_ranks(size, nested_step, activations, block, units),
        strict=True,
    ):
        assert kept[0].keys() == recomputed[0].keys()
        for name, grad in kept[0].items():
            assert grad.any()
            assert torch.equal(recomputed[0][name], grad), name
        assert kept[1] == recomputed[1] or size > 1
        assert {*kept[2]} == {2}
        assert {*recomputed[2]} == {2 if "Linear" in (units or ()) else 4}
        assert kept[3] == recomputed[3]
        assert kept[4] == recomputed[4] == 0


def test_a_module_around_units_keeps_its_activations():
    plan = zero.Plan(
        Positions(Around),
        optimizer=zero.sgd(0.1),
        world=World.solo(),
        units=["Around", "Inner"],
        activations={"(root)": "remat", "blocks.0": "offload", "blocks.1*": "selective", "*second": "remat"},
    )
    assert plan.activations == {
        "(root)": "keep",
        "blocks.0": "offload",
        "blocks.0.first": "keep",
        "blocks.0.second": "remat",
        "blocks.1": "keep",
        "blocks.1.first": "selective",
        "blocks.1.second": "selective",
        "blocks.2": "keep",
        "blocks.2.first": "keep",
        "blocks.2.second": "remat",
    }


# -- modes of the user -------------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """The operators that a mode of the user sees."""

    def __init__(self):
        super().__init__()
        self.operators = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


METADATA = {"__get__", "is_inference", "numel", "storage_offset", "stride", "untyped_storage"}
"""Functions that compute nothing."""


class Called(TorchFunctionMode):
    """The functions that a mode of the user sees."""

    def __init__(self):
        super().__init__()
        self.operators = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.operators.add(func)
        return func(*args, **(kwargs or {}))


class NoMode(nullcontext):
    """No mode: the values that a mode must not change."""

    operators = frozenset()


class Outer(nn.Module):
    """A site around two others."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gain = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        return torch.tanh(self.second(torch.tanh(self.first(x))) * self.gain)


def loss_of(model, x):
    return model(x).square().mean()


def with_a_frozen_block():
    """A block that is frozen whole, between two that train."""
    model = nn.Sequential(Outer(), Outer(), Outer())
    model[1].requires_grad_(False)
    return model


def plain_operators(mode):
    model, x = with_a_frozen_block(), torch.ones(2, 8)
    with mode() as seen:
        loss_of(model, x).backward()
        with torch.no_grad():
            loss_of(model, x)
    return seen.operators


def foreign_operators(world, mode, policy, preset, clip, build, replay):
    """The operators of the engine that a mode of the user sees in a step, an evaluation and reads."""
    plan = (
        Setting(
            accumulate=2,
            activations=policy,
            offload=(("preset", preset),),
            clip=clip,
            precision="fp32",
            prefetch=world.size,
        )
        .but(units=("Outer", "Linear"))
        .plan(world, build)
    )
    state = zero.init(plan, zero.open_store(plan), weights=lambda name, tensor: tensor.fill_(0.1))
    step, forward = zero.make_step(plan, loss_of, replay=replay), zero.make_forward(plan, loss_of)
    batches = [torch.ones(2, 8), torch.ones(2, 8)]
    with mode() as seen:
        for _ in range(2):
            state, _ = step(state, batches)
            forward(state, batches[0])
    state.runtime.store.close()
    return seen.operators


@pytest.mark.parametrize("mode", [Seen, Called])
@pytest.mark.parametrize(("build", "replay"), [(lambda: nn.Sequential(Outer(), Outer()), 0), (with_a_frozen_block, 1)])
@pytest.mark.parametrize(
    ("size", "policy", "preset"),
    [(2, "keep", "none"), (2, "selective", "none"), (2, "remat", "none"), (1, "keep", "infinity"), (2, "keep", "cpu")],
)
def test_a_mode_of_the_user_sees_the_operators_of_the_model_and_none_of_the_engine(
    mode, size, policy, preset, build, replay
):
    allowed = plain_operators(mode)
    for seen in run_ranks(size, foreign_operators, mode, policy, preset, 0.5, build, replay):
        assert {op for op in seen - allowed if getattr(op, "__name__", "") not in METADATA} == set()
        assert seen


def read_and_written(world, mode, stage, preset, root):
    """The values that each function of the engine outside of a step returns, and the operators that a mode sees."""
    plan = (
        Setting(stage=stage, offload=(("preset", preset),), precision="bf16", prefetch=1)
        .but(units=("Outer", "Linear"))
        .plan(world, lambda: nn.Sequential(Outer(), Outer()))
    )
    seen, values, batch, edit = mode(), {}, torch.ones(2, 8, dtype=torch.bfloat16), torch.full((8,), 0.5)

    def fill(name, tensor):
        tensor.fill_(0.1)

    def note(part, named):
        values.update({f"{part} {number} {name}": value for number, (name, value) in enumerate(named)})

    with seen:
        state = zero.init(plan, zero.open_store(plan), weights=fill)
    step = zero.make_step(plan, lambda model, x: loss_of(model, x).float())
    for number in range(2):
        state, _ = step(state, [batch])
        with seen:
            world.barrier()
            note("stream", zero.stream_weights(state, keep=True))
            for kind in ("param", "compute", "mu"):
                note(kind, zero.full_state_dict(state, kind).items())
            zero.set_full(state, "0.gain", edit)
            with zero.gathered(state, ["1.gain"], modify=True) as full:
                note("gathered", full.items())
                full["1.gain"] = edit
            values[f"one {number}"] = zero.get_full(state, "1.gain")
            for name, indices, changed, _ in zero.stream_weights(state, changed_since=number + 1):
                note("patch", [(f"{name} at", indices), (name, changed)])
            note("state dict", state.model.state_dict().items())
            values[f"digest {number}"] = digest(state)
            folder = zero.save(state, f"{root}-{number}")
            state = zero.load(state, zero.open_checkpoint(world, folder))
            values[f"loaded {number}"] = digest(state)
    under_way = zero.Step(state)
    under_way.microbatch()
    under_way.backward(loss_of(state.model, batch).float())
    with seen:
        note("grad", zero.full_state_dict(under_way, "grad").items())
        zero.set_full(under_way, "0.gain", edit, kind="grad")
        values["one gradient"] = zero.get_full(under_way, "0.gain", kind="grad")
    state, _ = under_way.finish()
    with seen:
        state.close()
    note("closed", plan.model.state_dict().items())
    return seen.operators, values


@pytest.mark.parametrize("mode", [Seen, Called])
@pytest.mark.parametrize(
    ("size", "stage", "preset"), [(1, 3, "infinity"), (2, 1, "none"), (2, 3, "none"), (2, 3, "cpu")]
)
def test_a_mode_of_the_user_neither_sees_nor_changes_reads_edits_saves_and_loads(mode, size, stage, preset, tmp_path):
    plain = run_ranks(size, read_and_written, NoMode, stage, preset, tmp_path / "plain")
    model = Outer()
    with mode() as of_torch:
        model.state_dict()
    for (seen, values), (_, expected) in zip(
        run_ranks(size, read_and_written, mode, stage, preset, tmp_path / "seen"), plain, strict=True
    ):
        assert {op for op in seen - of_torch.operators if getattr(op, "__name__", "") not in METADATA} == set()
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(value, values[name]) if isinstance(value, torch.Tensor) else value == values[name], name


@pytest.mark.parametrize("build", [lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), Outer])
def test_selective_says_why_a_result_cannot_be_kept(build):
    plan = zero.Plan(
        nn.Sequential(nn.Sequential(build())), optimizer=zero.sgd(0.1), world=World.solo(), activations="selective"
    )
    step = zero.Step(zero.init(plan, zero.open_store(plan)))
    step.microbatch()
    loss = loss_of(plan.model, torch.ones(2, 8))
    with pytest.raises(RuntimeError) as caught:
        [step.backward(loss, retain_graph=True) for _ in range(2)]
    assert any("zero.activations=selective" in note and "Use remat" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("policy", ["keep", "remat"])
def test_what_a_recomputation_imports_is_loaded_before_the_first_step(policy):
    """torch's compiler: 890 modules, which no step may load, and which nothing else needs."""
    code = f"""
import sys, torch, zero
from torch import nn
model, world = nn.Sequential(nn.Linear(4, 4)), zero.open_world()
plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=world, activations="{policy}")
state = zero.init(plan, zero.open_store(plan))
before = {{*sys.modules}}
state, _ = zero.make_step(plan, lambda model, x: model(x).sum())(state, [torch.ones(2, 4)])
print("torch._dynamo" in before, len([name for name in {{*sys.modules}} - before if name.startswith("torch._dynamo")]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S, check=True)
    assert done.stdout.split() == [str(policy == "remat"), "0"]
