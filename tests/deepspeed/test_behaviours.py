"""Forty behaviours that a DeepSpeed user relies on, one test each, in the order of its own tests.

The oracle is plain torch in fp64. Weights and inputs here are small whole numbers, the loss is linear in what the model
returns, and the optimizer is SGD with a momentum and a rate of a half: for two steps no product and no sum needs more
bits than fp32 has. So the order of addition is of no account, and what is found has to be torch's bit for bit, whatever
the stage, the tier, the ranks and the microbatches.

Deeper tests of most of this are named in docs/coming-from-deepspeed.md, beside those of this file.
"""

import contextlib
import errno
import functools
import itertools
import math
import os
import tempfile
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint

import zero
from tests.conftest import LONG_S
from tests.engine.test_gather import live_tensors
from tests.faults.disks import FaultyFiles, ThrottledStore, fail, flip, short
from zero.errors import ConfigError, HandshakeError, StoreError, WorldError
from zero.store import MemoryStore, NvmeStore, Page, Store
from zero.testing import run_processes, run_ranks

ROWS, WIDTH, STEPS, LR, MOMENTUM = 2, 4, 2, 0.5, 0.5
CPU = torch.device("cpu")

User = Callable[[Any, Tensor], None]
"""What user code does with a model, be it an engine or a module, and a microbatch: any forwards, any backwards."""

stages = pytest.mark.parametrize("stage", range(4))
tiers = pytest.mark.parametrize("tier", ["none", "nvme"])


class Block(nn.Module):
    """x + relu(x W + b)"""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


class Net(nn.Module):
    """(b, WIDTH) to the same: blocks, which are units, and a head beside them."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def filled(model: nn.Module) -> nn.Module:
    """With weights of -1, 0 and 1."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=draw))
    return model


def rows(step: int, rank: int = 0, micro: int = 0) -> Tensor:
    """(ROWS, WIDTH) whole numbers; the first row begins with those of the rank and of the step."""
    x = torch.randint(-2, 3, (ROWS, WIDTH), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
    x[0, :2] = torch.tensor([rank, step])
    return x.float()


def loss_of(y: Tensor) -> Tensor:
    """Linear, so gradients need no bits of `y` itself; the mean over rows."""
    return (y * torch.tensor([1, -1, 2, -2])).sum() / len(y)


def plain_loop(model: Any, x: Tensor) -> None:
    loss_of(model(x)).backward()


def config(stage: int, accumulate: int = 1, tier: str = "none", **more: Any) -> dict[str, Any]:
    """A `ds_config.json`."""
    offload = {"device": tier, "nvme_path": tempfile.gettempdir()}
    kinds = () if tier == "none" else ("offload_optimizer", "offload_param")[: 1 + (stage == 3)]
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": MOMENTUM}},
        **more,
        "zero_optimization": {"stage": stage, **dict.fromkeys(kinds, offload), **more.get("zero_optimization", {})},
    }


@contextlib.contextmanager
def engine_of(
    world: zero.World, model: Callable[[], nn.Module] = Net, *, prepare: Any = lambda model: {}, **settings: Any
) -> Iterator[zero.Engine]:
    with world.exclusive():
        made = filled(model())
    engine, *_ = zero.initialize(model=made, config=config(**settings), world=world, **prepare(made))
    try:
        yield engine
    finally:
        engine.destroy()


def by_zero(
    user: User = plain_loop,
    model: Callable[[], nn.Module] = Net,
    *,
    ranks: int = 2,
    steps: int = STEPS,
    accumulate: int = 1,
    stage: int = 3,
    managed: bool = True,
    **settings: Any,
) -> dict[str, Tensor]:
    """Whole parameters after a DeepSpeed user's loop, the same on every rank. If not `managed`, he says where a step
    ends."""
    settings |= {"stage": stage, "accumulate": accumulate, "managed_gradient_accumulation": managed}

    def run(world: zero.World) -> dict[str, Tensor]:
        with engine_of(world, model, **settings) as engine:
            for step, micro in itertools.product(range(steps), range(accumulate)):
                if not managed:
                    engine.set_gradient_accumulation_boundary(micro == accumulate - 1)
                user(engine, rows(step, world.rank, micro))
                engine.step()
            return zero.full_state_dict(engine)

    first, *others = run_ranks(ranks, run)
    for other in others:
        same(other, first)
    return first


def by_torch(
    user: User = plain_loop,
    model: Callable[[], nn.Module] = Net,
    *,
    ranks: int = 2,
    steps: int = STEPS,
    accumulate: int = 1,
    mean: bool = True,
) -> dict[str, Tensor]:
    """The same in plain torch and fp64, rank after rank. Gradients begin as zeros: an unused parameter has one."""
    made = filled(model()).double()
    trained = [one for one in made.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM)
    for step in range(steps):
        for one in trained:
            one.grad = torch.zeros_like(one)
        for rank, micro in itertools.product(range(ranks), range(accumulate)):
            user(made, rows(step, rank, micro).double())
        for one in trained:
            one.grad /= ranks * accumulate if mean else 1
        optimizer.step()
    return {name: one.detach() for name, one in made.named_parameters()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].double(), value.double()), name


# -- training equals reference -----------------------------------------------------------------------------------------


@tiers
@stages
def test_plain_backward_gives_the_gradients_of_ddp(stage, tier):
    """Those are the mean over ranks."""

    def run(world):
        with engine_of(world, stage=stage, tier=tier) as engine:
            loss_of(engine(rows(0, world.rank))).backward()
            return zero.full_state_dict(engine, "grad")

    model = filled(Net())
    for rank in range(2):
        (loss_of(model(rows(0, rank))) / 2).backward()
    for found in run_ranks(2, run):
        same(found, {name: one.grad for name, one in model.named_parameters()})


@stages
def test_backward_from_a_tensor_with_a_supplied_gradient(stage):
    def supplied(model, x):
        y = model(x)
        y.backward(gradient=x + 1)

    same(by_zero(supplied, stage=stage), by_torch(supplied))


@tiers
@stages
def test_microbatches_accumulate_exactly(stage, tier):
    """Four microbatches of two ranks are one batch of plain torch."""

    def one_batch(model, x):
        step = int(x[0, 1])
        plain_loop(model, torch.cat([rows(step, rank, micro).to(x.dtype) for rank in range(2) for micro in range(4)]))

    same(by_zero(stage=stage, tier=tier, accumulate=4), by_torch(one_batch, ranks=1))


@stages
def test_one_loss_trains_several_models(stage):
    """Through each other, at two stages at once."""
    shallow = functools.partial(Net, count=1)

    def run(world):
        with engine_of(world, shallow, stage=stage) as first, engine_of(world, shallow, stage=3) as second:
            for step in range(2):
                x = rows(step, world.rank)
                (loss_of(second(first(x))) + loss_of(second(x))).backward()
                first.step()
                second.step()
            return zero.full_state_dict(first), zero.full_state_dict(second)

    models = filled(shallow()).double(), filled(shallow()).double()
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM) for model in models]
    for step in range(2):
        for rank in range(2):
            x = rows(step, rank).double()
            ((loss_of(models[1](models[0](x))) + loss_of(models[1](x))) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for both in run_ranks(2, run):
        for found, model in zip(both, models, strict=True):
            same(found, {name: one.detach() for name, one in model.named_parameters()})


@stages
def test_the_loss_scale_is_explicit_and_forgetting_it_is_an_error(stage):
    fp16 = {"enabled": True, "initial_scale_power": 4}

    def scaled(engine, x):
        engine.scale(loss_of(engine(x))).backward()

    found = by_zero(scaled, stage=stage, fp16=fp16, accumulate=2, steps=1)
    same(found, by_torch(accumulate=2, steps=1))

    def forgetful(world):
        with engine_of(world, stage=stage, fp16=fp16) as engine:
            plain_loop(engine, rows(0))
            with pytest.raises(ConfigError, match=r"without the loss scale: call engine.backward\(loss\), or"):
                engine.step()
            return zero.full_state_dict(engine)

    same(run_ranks(1, forgetful)[0], dict(filled(Net()).named_parameters()))


class Checkpointed(Net):
    """Each block under torch's own activation checkpointing."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = block(x) if self.kind == "zero's own" else checkpoint(block, x, use_reentrant=self.kind == "reentrant")
        return self.head(x)


def repeated(model: Any, x: Tensor) -> None:
    """Two backwards through one graph, and one through another."""
    y = model(x)
    loss_of(y).backward(retain_graph=True)
    y.sum().backward()
    loss_of(model(-x)).backward()


KINDS = {"reentrant": False, "not reentrant": False, "zero's own": True}
"""Of checkpointing, and whether the engine does it."""


@pytest.mark.parametrize("kind", KINDS)
@stages
def test_activation_checkpointing_with_repeated_backwards(stage, kind):
    own = {"partition_activations": KINDS[kind]}
    found = by_zero(repeated, lambda: Checkpointed(kind), stage=stage, activation_checkpointing=own)
    same(found, by_torch(repeated, Net))


@pytest.mark.parametrize("kind", KINDS)
@stages
def test_frozen_parameters_inside_checkpointed_blocks(stage, kind):
    """A whole block, and a weight beside a trained bias."""

    def frozen():
        model = Checkpointed(kind)
        model.blocks[0].requires_grad_(False)
        model.blocks[1].linear.weight.requires_grad_(False)
        return model

    found = by_zero(repeated, frozen, stage=stage, activation_checkpointing={"partition_activations": KINDS[kind]})
    same(found, by_torch(repeated, frozen))


@tiers
@stages
def test_the_caller_chooses_the_number_of_backwards(stage, tier):
    """Other numbers of microbatches than the config has, and of backwards in each; gradients are divided as it says."""
    backwards = [[3, 1, 2], [2]]

    def run(world):
        settings = {"stage": stage, "tier": tier, "accumulate": 2, "managed_gradient_accumulation": False}
        with engine_of(world, **settings) as engine:
            for step, counts in enumerate(backwards):
                for micro, count in enumerate(counts):
                    engine.set_gradient_accumulation_boundary(micro == len(counts) - 1)
                    for number in range(count):
                        loss_of(engine((number + 1) * rows(step, world.rank, micro))).backward()
                    engine.step()
            return zero.full_state_dict(engine)

    def all_at_once(model, x):
        step, rank = int(x[0, 1]), int(x[0, 0])
        for micro, count in enumerate(backwards[step]):
            for number in range(count):
                (loss_of(model((number + 1) * rows(step, rank, micro).double())) / 2).backward()

    for found in run_ranks(2, run):
        same(found, by_torch(all_at_once))


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_on_nvme_is_that_in_memory(stage, managed):
    """Of the optimizer's state, and at stage 3 of parameters too; who counts is of no account."""
    settings = {"stage": stage, "accumulate": 4, "managed": managed}
    found = by_zero(tier="nvme", **settings)
    same(found, by_zero(tier="none", **settings))
    same(found, by_torch(accumulate=4))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@stages
def test_offload_keeps_the_contribution_of_every_backward(stage, tier):
    settings = {"stage": stage, "accumulate": 2}
    found = by_zero(repeated, tier=tier, **settings)
    same(found, by_zero(repeated, **settings))
    same(found, by_torch(repeated, accumulate=2))


@tiers
@stages
def test_the_reported_norm_is_that_of_the_sum(stage, tier):
    """Microbatches that nearly cancel: the sum of their norms is many times the norm of their sum."""
    parts = [(1.0, rows(0)), (-1.0, rows(0).index_fill(1, torch.tensor([3]), 1.0))]

    def run(world):
        with engine_of(world, stage=stage, tier=tier, accumulate=2) as engine:
            for sign, x in parts:
                engine.backward(sign * loss_of(engine(x)))
                engine.step()
            return engine.get_global_grad_norm()

    model, norms = filled(Net()).double(), []
    for sign, x in parts:
        (sign * loss_of(model(x.double())) / 2).backward()
        norms.append(float(nn.utils.get_total_norm([one.grad for one in model.parameters()])))
    assert 0 < norms[1] < norms[0] / 2
    assert run_ranks(2, run) == pytest.approx([norms[1]] * 2, rel=1e-7)


def test_fewer_collectives_give_the_same_bits():
    """Below stage 2 microbatches are added up before ranks are: one reduction for all of them."""

    def run(world, stage, accumulate):
        with engine_of(world, stage=stage, accumulate=accumulate) as engine:
            for micro in range(accumulate):
                plain_loop(engine, rows(0, world.rank, micro))
                engine.step()
            return world.traffic.reduce_bytes, zero.full_state_dict(engine)

    [(once, _), _] = run_ranks(2, run, 0, 1)
    for stage in range(4):
        for moved, found in run_ranks(2, run, stage, 4):
            assert moved == (once if stage < 2 else 4 * once) > 0
            same(found, by_torch(steps=1, accumulate=4))


@tiers
@stages
def test_the_last_microbatch_is_not_left_out(stage, tier):
    """In bf16 the only gradient there is comes with it, on one rank."""
    only = rows(0, 1, 3)

    def last(model, x):
        (loss_of(model(x)).float() * bool((x == only.to(x.dtype)).all())).backward()

    found = by_zero(last, stage=stage, tier=tier, accumulate=4, steps=1, bf16={"enabled": True})
    same(found, by_torch(last, accumulate=4, steps=1))
    assert not torch.equal(found["head.weight"], filled(Net()).head.weight)


@stages
def test_gradients_are_a_mean_and_a_loss_times_ranks_and_microbatches_makes_them_a_sum(stage):
    """There is no setting for it, and who asks for one is told."""

    def summed(model, x):
        (loss_of(model(x)) * (2 * 4)).backward()

    same(by_zero(summed, stage=stage, accumulate=4), by_torch(accumulate=4, mean=False))
    with pytest.raises(ConfigError, match=r"gradient_allreduce_op=sum is not supported: gradients are averaged"):
        by_zero(stage=stage, ranks=1, gradient_allreduce_op="sum")


class ByRank(Net):
    """The second block is told the rank."""

    def __init__(self, second: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks[1] = second()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](x), int(x[0, 0])))


class Sometimes(Block):
    """Rank 0 passes its input through."""

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return super().forward(x) if rank else x


@tiers
@stages
def test_ranks_without_a_gradient_for_some_parameters_do_not_hang(stage, tier):
    model = functools.partial(ByRank, Sometimes)
    same(by_zero(model=model, stage=stage, tier=tier), by_torch(model=model))


@pytest.mark.parametrize("ignore", [True, False])
@stages
def test_unused_parameters_are_tolerated_and_have_a_zero_gradient(stage, ignore):
    """Whatever `ignore_unused_parameters` says; parts of a unit, and a unit that is never called."""

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.blocks[0].idle = nn.Parameter(torch.empty(3))
            self.blocks.append(Block())

        def forward(self, x):
            return self.head(self.blocks[1](self.blocks[0](x)))

    def run(world):
        with engine_of(world, Model, stage=stage) as engine:
            plain_loop(engine, rows(0, world.rank))
            return zero.full_state_dict(engine, "grad")

    found = by_zero(model=Model, stage=stage, zero_optimization={"ignore_unused_parameters": ignore})
    same(found, by_torch(model=Model))
    for told in run_ranks(2, run):
        assert [name for name, one in told.items() if not one.any()] == [
            *("blocks.0.idle", "blocks.2.linear.weight", "blocks.2.linear.bias")
        ]


def one_step(model: nn.Module, x: Tensor) -> Tensor:
    return loss_of(model(x))


def state_of(
    world: zero.World, model: Callable[[], nn.Module] = Net, disk: Store | None = None, **settings: Any
) -> tuple[zero.State, Callable[..., tuple[zero.State, zero.Metrics]]]:
    """For those who write the loop by themselves: the first state, and the step."""
    with world.exclusive():
        made = filled(model())
    plan = zero.Plan(made, world=world, **{"optimizer": zero.sgd(LR, momentum=MOMENTUM), **settings})
    return zero.init(plan, zero.open_store(plan, disk=disk)), zero.make_step(plan, one_step)


class Late(ThrottledStore):
    """A slow disk that spoils at once what it will read into, and looks whether what it writes stays as it was."""

    def read(self, page, into):
        into.fill_(torch.nan)
        return super().read(page, into)

    def write(self, page, source):
        before = source.clone()
        ticket = super().write(page, source)
        assert torch.equal(source, before), "the source changed on its way"
        return ticket


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_buffers_under_way_on_the_side_are_protected_until_they_are_consumed(stage, prefetch):
    """Here by threads of the store; the streams of a GPU need one."""
    offload = zero.Offload("infinity" if stage == 3 else "nvme", grad="nvme", threads=3, read_ahead=2, page_bytes=4096)

    def run(world):
        disk = Late(MemoryStore(CPU), bytes_per_s=2e6)
        state, step = state_of(world, disk=disk, stage=stage, prefetch=prefetch, offload=offload)
        for number in range(STEPS):
            state, _ = step(state, [rows(number, world.rank)])
        return zero.full_state_dict(state)

    for found in run_ranks(2, run):
        same(found, by_torch())


# -- partitioning ------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "rest"])

OUTPUTS = {
    "dict": lambda x: {"rest": None, "x": x},
    "tuple": lambda x: (x, None),
    "list": lambda x: [x],
    "namedtuple": lambda x: Pair(x, None),
}

MATRIX: list[dict[str, Any]] = [
    {"fp16": {"enabled": True, "initial_scale_power": 4}, "steps": 1},
    {"tier": "cpu"},
    {"tier": "nvme"},
    {"activation_checkpointing": {"partition_activations": True}},
    {"zero_optimization": {"contiguous_gradients": True, "stage3_param_persistence_threshold": 10**6}},
    {"zero_optimization": {"reduce_scatter": False, "stage3_allgather_sequential": True}},
]


@pytest.mark.parametrize("output", OUTPUTS)
@stages
def test_no_setting_of_the_matrix_and_no_kind_of_output_changes_a_gradient(stage, output):
    """Every setting meets every stage and every kind of output."""

    class Returns(Block):
        def forward(self, given):
            x = given if isinstance(given, Tensor) else given["x"] if isinstance(given, dict) else given[0]
            return OUTPUTS[output](super().forward(x))

    class Model(Net):
        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x["x"] if isinstance(x, dict) else x[0])

    def scaled(model, x):
        model.scale(loss_of(model(x))).backward()

    first = (stage + list(OUTPUTS).index(output)) % 3
    for settings in MATRIX[first::3]:
        same(
            by_zero(scaled, lambda: Model(Returns), stage=stage, **settings),
            by_torch(steps=settings.get("steps", STEPS)),
        )


class Huge(Net):
    def __init__(self) -> None:
        super().__init__()
        self.huge = nn.Linear(WIDTH, 10_000 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.huge(x).view(len(x), -1, WIDTH).sum(1)


class Hundreds(Net):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.empty(1 + number % 3) for number in range(300))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.stack([part.sum() for part in self.parts]).sum())


@pytest.mark.parametrize("model", [Huge, Hundreds])
@tiers
@pytest.mark.parametrize("stage", [0, 3])
def test_one_huge_parameter_or_hundreds_of_them(stage, tier, model):
    """Four ranks cut both; a step each, because the second has larger numbers in it than fp32 adds exactly."""
    settings = {"model": model, "ranks": 4, "steps": 1}
    same(by_zero(stage=stage, tier=tier, **settings), by_torch(**settings))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@stages
def test_slices_start_on_aligned_addresses(stage, precision):
    """Parameters of odd sizes as a module finds them; and where the ranks' shards are cut."""
    starts: list[int] = []

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(torch.empty(size) for size in (1, 3, 5, 7, 65))

        def forward(self, x):
            starts.extend(part.data_ptr() for part in self.parts)
            return x * torch.cat(list(self.parts)).sum()

    def run(world):
        state, step = state_of(world, lambda: Net(Odd), stage=stage, precision=precision)
        shards = [unit.trainable.shard(world.rank) for unit in state.plan.units]
        step(state, [rows(0, world.rank).to(state.plan.precision.compute)])
        return shards

    for shards in run_ranks(3, run):
        assert all(edge % 64 == 0 for shard in shards for edge in shard)
    assert len(starts) == 3 * 2 * 5
    assert not any(start % 64 for start in starts), "bytes of a cache line, and of the widest vector"


class Single(nn.Module):
    """One element, and a parameter without any: most ranks own nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.nothing = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.one + 1)


@tiers
@stages
def test_empty_groups_and_ranks_that_own_nothing(stage, tier):
    def prepare(model):
        groups = [{"params": []}, {"params": [model.one]}, {"params": [model.nothing], "lr": 1.0}]
        return {"optimizer": torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM)}

    found = by_zero(model=Single, ranks=4, stage=stage, tier=tier, prepare=prepare)
    same(found, by_torch(model=Single, ranks=4))


@pytest.mark.parametrize("remat", [False, True])
@stages
def test_a_module_used_several_times_in_one_forward(stage, remat):
    """Once under no_grad, whose result is lost."""

    class Twice(Net):
        def forward(self, x):
            x = self.blocks[0](x)
            with torch.no_grad():
                self.blocks[1](x)
            return self.head(self.blocks[0](x)) + self.head(x)

    found = by_zero(model=Twice, stage=stage, activation_checkpointing={"partition_activations": remat})
    same(found, by_torch(model=Twice))


@tiers
@stages
def test_the_step_counter_is_the_same_in_all_pages(stage, tier):
    """Adam on a gradient of ones moves every element alike, in units of many pages; what was skipped does not count."""

    class Ones(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in (3000, 1, 1500))

        def forward(self, x):
            return sum(part(x * torch.ones(part.in_features)).sum() for part in self.parts)

    def run(world):
        offload = zero.Offload(tier, page_bytes=4096, path=tempfile.gettempdir())
        state, _ = state_of(world, Ones, optimizer=zero.adamw(0.1, weight_decay=0.0), stage=stage, offload=offload)
        step = zero.make_step(state.plan, lambda model, x: model(x))
        with zero.gathered(state, modify=True) as full:
            for one in full.values():
                one.zero_()
        for x in (1.0, math.inf, 1.0, 1.0):
            state, _ = step(state, [torch.tensor(x)])
        assert (state.step, state.skipped) == (3, 1)
        found = torch.cat([one.flatten() for one in zero.full_state_dict(state).values()])
        state.runtime.store.close()
        return found

    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, fused=True)
    for _ in range(3):
        weight.grad = torch.ones(1)
        optimizer.step()
    for found in run_ranks(2, run):
        assert torch.equal(found, weight.detach().expand(4501))


@tiers
@stages
def test_frozen_and_trained_parameters_mix(stage, tier):
    """A block, and a part of the head. What is frozen keeps its bits and has no gradient and no moment."""

    def mixed():
        model = Net()
        model.blocks[1].requires_grad_(False)
        model.head.weight.requires_grad_(False)
        return model

    def run(world):
        with engine_of(world, mixed, stage=stage, tier=tier) as engine:
            plain_loop(engine, rows(0, world.rank))
            return [set(zero.full_state_dict(engine, kind)) for kind in ("grad", "mu")]

    found = by_zero(model=mixed, stage=stage, tier=tier)
    same(found, by_torch(model=mixed))
    frozen = {"blocks.1.linear.weight", "blocks.1.linear.bias", "head.weight"}
    same({name: found[name] for name in frozen}, {name: filled(mixed()).get_parameter(name) for name in frozen})
    assert all(names == found.keys() - frozen for kinds in run_ranks(2, run) for names in kinds)


@tiers
@stages
def test_train_and_eval_alternate(stage, tier):
    """Before a step, in the middle of an accumulation, and between a forward and its backward."""

    class OtherInTraining(Block):
        def forward(self, x):
            return super().forward(x) * (2 if self.training else 1)

    def alternating(seen, model, x):
        def look():
            model.eval()
            with torch.no_grad():
                seen.setdefault(tuple(x[0, :2].tolist()), []).append(model(x).double())
            model.train()

        look()
        loss = loss_of(model(x))
        look()
        loss.backward()

    def build():
        return Net(OtherInTraining)

    wanted: dict[Any, list[Tensor]] = {}
    found: dict[Any, list[Tensor]] = {}
    expected = by_torch(functools.partial(alternating, wanted), build, accumulate=2)
    same(by_zero(functools.partial(alternating, found), build, stage=stage, tier=tier, accumulate=2), expected)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(torch.stack(found[key]), torch.stack(wanted[key])) for key in wanted)


@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (3, "nvme")])
def test_memory_returns_when_an_engine_is_destroyed(stage, tier):
    """Tensors and descriptors; whole views are gone before."""

    def run(world):
        with engine_of(world, stage=stage, tier=tier) as engine:
            plain_loop(engine, rows(0, world.rank))
            engine.step()
            zero.full_state_dict(engine)

    def held():
        run_ranks(2, run)
        return *live_tensors(), len(os.listdir("/proc/self/fd"))

    held()  # what torch keeps for itself is there from now on
    before, after = held(), held()
    assert all(now <= then for then, now in zip(before, after, strict=True)), "less, if an earlier test's is gone"


class Broken(Exception):
    pass


class Fragile(Block):
    """Breaks off half-way, when it is told to."""

    told = threading.local()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if getattr(self.told, "to_break", False):
            raise Broken
        return x + torch.relu(y)


@pytest.mark.parametrize("kind", KINDS)
@stages
def test_an_exception_in_a_recomputation_leaves_a_usable_engine(stage, kind):
    """The step that is tried again is the step that never failed; by hand, after `zero_grad` as in torch."""

    class Model(Checkpointed):
        def __init__(self):
            super().__init__(kind)
            self.blocks[0] = Fragile()

    def stumbling(engine, x):
        for by_hand in (False, True):
            loss = loss_of(engine(x))
            Fragile.told.to_break = True
            with pytest.raises(Broken):
                _ = loss.backward() if by_hand else engine.backward(loss)
            Fragile.told.to_break = False
            if by_hand:
                engine.zero_grad()
        plain_loop(engine, x)

    own = {"partition_activations": KINDS[kind]}
    same(by_zero(stumbling, Model, stage=stage, activation_checkpointing=own), by_torch())


@stages
def test_torch_func_grad_vmap_and_jacrev_go_through_an_engine(stage):
    """By themselves, and as parts of a loss that reaches the parameters."""

    def transformed(model, x):
        slopes = vmap(grad(lambda row: loss_of(model(row[None]) * row)))(x)
        jacobian = jacrev(lambda row: model(row[None])[0])(x[1])
        return torch.cat([slopes, jacobian])

    def user(model, x):
        (loss_of(model(x)) + transformed(model, x).sum()).backward()

    def run(world):
        with engine_of(world, stage=stage) as engine:
            engine.eval()
            with torch.no_grad():
                return transformed(engine, rows(0))

    for told in run_ranks(2, run):
        assert torch.equal(told.double(), transformed(filled(Net()).double(), rows(0).double()).detach())
    same(by_zero(user, stage=stage), by_torch(user))


@tiers
@stages
def test_a_full_view_is_freed_on_exit_edits_persist_and_an_illegal_edit_fails_on_all_ranks(stage, tier):
    def run(world):
        with engine_of(world, stage=stage, tier=tier) as engine:
            with torch.no_grad():
                engine(rows(0))  # copies that it leaves behind are stale after the edit
            with zero.gathered(engine, "blocks.1.*", modify=True) as full:
                views = [weakref.ref(one) for one in full.values()]
                for one in full.values():
                    one.neg_()
                del one
            assert [view() for view in views] == [None, None]
            with torch.no_grad():
                seen = engine(rows(0))
            for modify in (False, True):
                illegal = pytest.raises(WorldError if modify else ConfigError, match=r"rank 1")
                with illegal, zero.gathered(engine, "head.*", modify) as full:
                    full["head.bias"].add_(world.rank)
            return seen, zero.full_state_dict(engine)

    model = filled(Net())
    with torch.no_grad():
        for one in model.blocks[1].parameters():
            one.neg_()
        for seen, found in run_ranks(2, run):
            same(found, dict(model.named_parameters()))
            assert torch.equal(seen, model(rows(0)))


EDITS = {"param": lambda one: one + 1, "grad": lambda one: -one, "mu": lambda one: 2 * one}


@tiers
@stages
def test_parameters_gradients_and_moments_are_read_and_written_on_every_tier(stage, tier):
    """Between backward and the step; training on is what torch does after the same edits."""

    def run(world):
        seen = []
        with engine_of(world, stage=stage, tier=tier) as engine:
            for step in range(STEPS):
                plain_loop(engine, rows(step, world.rank))
                for kind, edit in EDITS.items():
                    seen.append(zero.full_state_dict(engine, kind))
                    with zero.gathered(engine, "blocks.1.*", modify=True, kind=kind) as full:
                        full.update({name: edit(one) for name, one in full.items()})
                engine.step()
            return [*seen, zero.full_state_dict(engine)]

    model, expected = filled(Net()).double(), []
    moments = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
    for step in range(STEPS):
        for rank in range(2):
            (loss_of(model(rows(step, rank).double())) / 2).backward()
        held = {
            name: {"param": one.data, "grad": one.grad, "mu": moments[name]} for name, one in model.named_parameters()
        }
        for kind, edit in EDITS.items():
            expected.append({name: kinds[kind].clone() for name, kinds in held.items()})
            for name, kinds in held.items():
                kinds[kind].copy_(edit(kinds[kind]) if name.startswith("blocks.1") else kinds[kind])
        for kinds in held.values():
            kinds["mu"].mul_(MOMENTUM).add_(kinds["grad"])
            kinds["param"].sub_(LR * kinds["mu"])
        model.zero_grad()
    for found in run_ranks(2, run):
        for told, wanted in zip(found, [*expected, dict(model.named_parameters())], strict=True):
            same(told, wanted)


class Experts(nn.Module):
    """Rank r sends all of its rows to expert r, and rank 1 does so twice."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.experts[1](torch.relu(self.experts[1](x))) if rank == 1 else self.experts[rank](x)


@tiers
@stages
def test_experts_that_differ_by_rank_finish(stage, tier):
    model = functools.partial(ByRank, Experts)
    same(by_zero(model=model, ranks=4, stage=stage, tier=tier), by_torch(model=model, ranks=4))


def test_running_unsharded_by_mistake_is_refused(monkeypatch):
    """Half an environment is no world of one, and ranks that shard otherwise do not begin."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="lacks RANK, MASTER_ADDR, MASTER_PORT; start the ranks with torchrun"):
        zero.initialize(model=Net(), config=config(3))

    def apart(world):
        with engine_of(world, stage=3 * world.rank):
            pass

    with pytest.raises(HandshakeError, match=r"zero\.stage is 0 on rank 0; 3 on rank 1"):
        run_ranks(2, apart)


# -- offload and files -------------------------------------------------------------------------------------------------


def values_of(source: Any, *kinds: str) -> dict[str, Tensor]:
    return {f"{kind} {name}": one for kind in kinds for name, one in zero.full_state_dict(source, kind).items()}


def test_states_move_out_and_back_by_kind_through_a_checkpoint_and_memory_is_as_planned(tmp_path):
    """Between two steps and in a new plan, not in a store that is at work; the values are those that never moved."""
    ways = ["", "optimizer", "param", "grad", "optimizer param grad", ""]
    names = {"optimizer": "moments", "param": "parameters", "grad": "gradients"}

    def run(world, moves):
        path, before = None, {}
        for number, kinds in enumerate(ways):
            away, disk = kinds.split() if moves else [], NvmeStore(tmp_path)
            offload = zero.Offload(**dict.fromkeys(away, "nvme"), page_bytes=4096)
            state, step = state_of(world, disk=disk, offload=offload)
            told = state.plan.bytes.get("nvme", {})
            assert set(told) == {names[kind] for kind in away}
            assert disk.allocated_bytes == sum(told.values())
            if path is not None:
                state = zero.load(state, zero.open_checkpoint(world, path))
                same(values_of(state, "param", "mu"), before)
            state, _ = step(state, [rows(number, world.rank)])
            path, before = zero.save(state, tmp_path / f"{moves}"), values_of(state, "param", "mu")
            state.runtime.store.close()
        return before

    moved, stayed = run_ranks(2, run, True), run_ranks(2, run, False)
    same(moved[0], stayed[0])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_state_that_is_partly_offloaded_trains(stage):
    """From everything in memory to everything on the disk, by what memory is allowed."""

    def run(world, budget):
        disk, offload = MemoryStore(CPU), {"threads": 1, "read_ahead": 0, "page_bytes": 4096, "host_budget": budget}
        offload = zero.Offload(optimizer="auto", **offload)
        state, step = state_of(world, disk=disk, stage=stage, offload=offload)
        for number in range(STEPS):
            state, _ = step(state, [rows(number, world.rank)])
        found = zero.full_state_dict(state)
        state.runtime.store.close()
        return found, sum(tier == "nvme" for tier in state.plan.placement.optimizer.values())

    expected, shares = by_torch(), []
    for budget in (None, 24_000, 20_000, 16_000, 12_000):
        [(found, away), _] = run_ranks(2, run, budget)
        same(found, expected)
        shares.append(away)
    assert sorted({*shares}) == [0, 1, 2, 3], "pages of three units"


@pytest.mark.parametrize("page_bytes", [4096, 2**22])
@tiers
@pytest.mark.parametrize("stage", [0, 3])
def test_the_update_on_the_cpu_is_that_of_torch_however_it_is_cut(stage, tier, page_bytes):
    """Ten steps of AdamW with decay: the bits of torch's fused kernel."""
    x, t = torch.randn(1, 60), torch.randn(1, 70)

    def loss_fn(model, x):
        return (model(x) * t).sum()

    def run(world):
        state, _ = state_of(
            *(world, lambda: nn.Linear(60, 70, bias=False)),
            stage=stage,
            optimizer=zero.adamw(0.1, weight_decay=0.25),
            offload=zero.Offload(tier, path=tempfile.gettempdir(), page_bytes=page_bytes),
        )
        step = zero.make_step(state.plan, loss_fn)
        for number in range(10):
            state, _ = step(state, [x * (number - 4)])
        found = values_of(state, "param", "mu", "nu")
        state.runtime.store.close()
        return found

    model = filled(nn.Linear(60, 70, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.25, fused=True)
    for number in range(10):
        optimizer.zero_grad()
        loss_fn(model, x * (number - 4)).backward()
        optimizer.step()
    held = optimizer.state[model.weight]
    expected = {"param": model.weight.detach(), "mu": held["exp_avg"], "nu": held["exp_avg_sq"]}
    for found in run_ranks(2, run):
        same(found, {f"{kind} weight": one for kind, one in expected.items()})


def test_files_are_read_and_written_in_parallel_while_python_runs_and_faults_are_told(tmp_path):
    """Of a queue of eight pages two are under way at once: each transfer waits for another one, and for Python here."""
    pages, meet = [Page(number, "mu", 0) for number in range(8)], threading.Barrier(3)
    sources = {page: torch.randn(64 * (1 + page.unit)) for page in pages}  # a block, and so a transfer, each

    def moved(threads, files, python=lambda: None):
        """What was read back from where it was written."""
        targets = {page: torch.empty_like(one) for page, one in sources.items()}
        with contextlib.closing(NvmeStore(tmp_path, files=files)) as store, ThreadPoolExecutor(threads) as queue:
            for page, source in sources.items():
                store.allocate(page, source.numel(), source.dtype)
            for move, tensors in ((store.write, sources), (store.read, targets)):
                under_way = [queue.submit(move, page, tensor) for page, tensor in tensors.items()]
                python()
                for one in under_way:
                    one.result().wait()
        return all(torch.equal(targets[page], source) for page, source in sources.items())

    def together(call):
        if call.name in ("pwrite", "pread") and threading.current_thread() is not threading.main_thread():
            meet.wait(timeout=LONG_S)

    assert moved(2, FaultyFiles(before=together), lambda: [meet.wait(timeout=LONG_S) for _ in pages[::2]])
    assert moved(1, FaultyFiles(short(512), on=True))
    for fault, call, told in ((fail(errno.EIO), "pwrite", "EIO"), (flip(77), "pread", "checksum differs")):
        with pytest.raises(StoreError, match=rf"page .*offset .*{told}"):
            moved(1, FaultyFiles(fault, at=4, only=call))


SCALES = {
    "none": ({"initial_scale_power": 8, "loss_scale_window": 2}, "......", [256, 256, 512, 512, 1024, 1024, 2048]),
    "all": ({"initial_scale_power": 3, "hysteresis": 1, "min_loss_scale": 1}, "XXXXX", [8, 4, 2, 1, 1, 1]),
    "some": (
        {"initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 2},
        *("XX..X.X...", [16, 16, 8, 8, 16, 16, 16, 8, 8, 16, 16]),
    ),
}
"""Which steps overflow, and the scale before each step and after the last."""


@pytest.mark.parametrize("precision", [*SCALES, "bf16"])
@stages
def test_the_loss_scale_is_the_exact_sequence_for_none_some_and_all_overflows(stage, precision):
    """One rank has one value that is not finite: all skip, and no bit changes. bf16 has no scale, and skips too."""
    settings, steps, expected = SCALES.get(precision, ({}, "X.X", [1, 1, 1, 1]))
    kind = "bf16" if precision == "bf16" else "fp16"

    def run(world):
        with engine_of(world, stage=stage, **{kind: {"enabled": True, **settings}}) as engine:
            scales, skipped = [engine.loss_scale], 0
            for step in steps:
                before = zero.full_state_dict(engine)
                bad = step == "X" and world.rank == 1
                engine.backward(loss_of(engine(rows(0, world.rank))) * (math.inf if bad else 2**-9))
                engine.step()
                skipped += step == "X"
                scales.append(engine.loss_scale)
                assert (engine.was_step_applied(), engine.skipped_steps) == (step == ".", skipped)
                if step == "X":
                    same(zero.full_state_dict(engine), before)
            return scales

    assert run_ranks(2, run) == [expected] * 2


@tiers
@stages
def test_clipping_is_by_the_true_global_norm(stage, tier):
    """With frozen parts, which have no part in it, three ranks and two microbatches."""

    def build():
        model = Net()
        model.blocks[0].requires_grad_(False)
        return model

    def run(world):
        with engine_of(world, build, stage=stage, tier=tier, accumulate=2, gradient_clipping=0.5) as engine:
            for micro in range(2):
                engine.backward(loss_of(engine(rows(0, world.rank, micro))))
                engine.step()
            return engine.get_global_grad_norm(), zero.full_state_dict(engine)

    model = filled(build()).double()
    for rank, micro in itertools.product(range(3), range(2)):
        (loss_of(model(rows(0, rank, micro).double())) / 6).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
    torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=LR).step()
    assert norm > 1
    for told, found in run_ranks(3, run):
        assert told == pytest.approx(norm, rel=1e-6)
        for name, one in model.named_parameters():
            torch.testing.assert_close(found[name].double(), one.detach(), rtol=1e-6, atol=1e-6)


def mostly_frozen() -> nn.Module:
    model = Huge()
    model.blocks[0].requires_grad_(False)
    return model


def train_on(engine: zero.Engine, world: zero.World, step: int, pieces: int = 4) -> None:
    """This rank's share of the same four microbatches, whatever the world."""
    for number in range(world.rank, pieces, world.size):
        plain_loop(engine, rows(step, number % 2, number // 2))
        engine.step()


@pytest.mark.parametrize(
    ("first", "then", "stage"), [(2, 2, 0), (2, 2, 3), (4, 2, 1), (4, 2, 3), (2, 4, 3), (1, 2, 2), (2, 1, 3)]
)
def test_a_checkpoint_loads_in_any_world_with_or_without_moments_and_is_not_bloated(first, then, stage, tmp_path):
    """Saved in the middle of an accumulation, loaded right after, saved again; part of the model is frozen."""

    def settings(world):
        return {"stage": stage, "accumulate": 4 // world.size}

    def saves(world):
        with engine_of(world, mostly_frozen, **settings(world)) as engine:
            train_on(engine, world, 0)
            held = values_of(engine, "param", "mu")
            train_on(engine, world, 1, pieces=world.size if world.size < 4 else 0)
            for _ in range(2):
                path = engine.save_checkpoint(tmp_path)
                engine.load_checkpoint(tmp_path)
                same(values_of(engine, "param", "mu"), held)
            return held, path

    def loads(world, **how):
        with engine_of(world, mostly_frozen, **settings(world)) as engine:
            train_on(engine, world, 7)  # what is there is overwritten, or forgotten
            engine.load_checkpoint(tmp_path, **how)
            found = values_of(engine, "param", "mu")
            train_on(engine, world, 1)
            return found, zero.full_state_dict(engine)

    held, path = run_ranks(first, saves)[0]
    in_files = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert in_files < 1.1 * sum(one.nbytes for one in held.values())
    for found, after in run_ranks(then, loads):
        same(found, held)
        same(after, by_torch(model=mostly_frozen, accumulate=2))
    for found, _ in run_ranks(then, functools.partial(loads, load_module_only=True)):
        same(found, {name: one if name.startswith("param") else 0 * one for name, one in held.items()})


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.blocks[1].linear.weight


ON_DISK: dict[str, Any] = {
    "model": Tied,
    "stage": 3,
    "tier": "nvme",
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 5}},
}


def goes_on(world: zero.World, folder: Any, first: int, last: int) -> list[Any]:
    """Whole parameters and moments after loading and after training, and the rate."""
    with engine_of(world, **ON_DISK) as engine:
        if first:
            assert engine.load_checkpoint(folder, tag="best")[1] == {"rows": first}
        found = values_of(engine, "param", "mu", "nu")
        for step in range(first, last):
            plain_loop(engine, rows(step, world.rank))
            engine.step()
        if not first:
            engine.save_checkpoint(folder, tag="best", client_state={"rows": last})
        return [found, values_of(engine, "param", "mu", "nu"), engine.get_lr()]


@pytest.mark.process
def test_state_on_nvme_is_saved_and_goes_on_in_a_fresh_process_with_its_moments(tmp_path):
    """And with a tied weight, the schedule, a tag and what the user put in."""
    _, saved, _ = run_ranks(2, goes_on, tmp_path, 0, 3)[0]
    _, straight, rate = run_ranks(2, goes_on, tmp_path / "straight", 0, 5)[0]
    same(run_processes(1, goes_on, tmp_path, 3, 3)[0][0], saved)
    for loaded, after, its_rate in run_ranks(2, goes_on, tmp_path, 3, 5):
        same(loaded, saved)
        same(after, straight)
        assert its_rate == rate
