"""Loops of DeepSpeed users have the bits of plain torch, whatever the stage, the tier, the ranks and the microbatches.

The oracle is plain torch in fp64. Weights and inputs are small whole numbers, the loss is linear in the model's result,
and the optimizer is SGD with a momentum and a rate of a half: for two steps no product and no sum needs more bits than
fp32 has, so the order of addition does not matter.
"""

import contextlib
import functools
import itertools
import tempfile
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.common.held import open_files
from tests.deepspeed import harness
from tests.engine.test_gather import live_tensors
from zero.testing import run_ranks

ROWS, WIDTH, STEPS, LR, MOMENTUM = 2, 4, 2, 0.5, 0.5

User = Callable[[Any, Tensor], None]
"""The user's code for a microbatch with a model, which is an engine or a module: any forwards, any backwards."""

stages = pytest.mark.parametrize("stage", range(4))
places = pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (1, "nvme"), (2, "none"), (3, "none"), (3, "nvme")])


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
        "train_batch_size": None,
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulate,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": MOMENTUM}},
        **more,
        "zero_optimization": {"stage": stage, **dict.fromkeys(kinds, offload), **more.get("zero_optimization", {})},
    }


def engine_of(
    world: zero.World,
    model: Callable[[], nn.Module] = Net,
    *,
    prepare: Any = harness.no_arguments,
    **settings: Any,
) -> contextlib.AbstractContextManager[zero.Engine]:
    return harness.engine_of(lambda: filled(model()), world, prepare=prepare, **config(**settings))


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
) -> dict[str, Tensor]:
    """The same in plain torch and fp64, rank after rank. Gradients begin as zeros: an unused parameter has one."""
    made = filled(model()).double()
    trained = [parameter for parameter in made.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LR, momentum=MOMENTUM)
    for step in range(steps):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        for rank, micro in itertools.product(range(ranks), range(accumulate)):
            user(made, rows(step, rank, micro).double())
        for parameter in trained:
            parameter.grad /= ranks * accumulate
        optimizer.step()
    return {name: parameter.detach() for name, parameter in made.named_parameters()}


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name].double(), value.double()), name


@places
def test_plain_backward_gives_the_gradients_of_ddp(stage, tier):
    """DDP's gradients are the mean over ranks."""

    def run(world):
        with engine_of(world, stage=stage, tier=tier) as engine:
            loss_of(engine(rows(0, world.rank))).backward()
            return zero.full_state_dict(engine, "grad")

    model = filled(Net())
    for rank in range(2):
        (loss_of(model(rows(0, rank))) / 2).backward()
    for gradients in run_ranks(2, run):
        same(gradients, {name: parameter.grad for name, parameter in model.named_parameters()})


@places
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
        for state_dict, model in zip(both, models, strict=True):
            same(state_dict, {name: parameter.detach() for name, parameter in model.named_parameters()})


@places
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

    for state_dict in run_ranks(2, run):
        same(state_dict, by_torch(all_at_once))


class ByRank(Net):
    """The second block is told the rank."""

    def __init__(self, second: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks[1] = second()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.blocks[0](x), int(x[0, 0])))


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


class Single(nn.Module):
    """One element, and a parameter without any: most ranks own nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.nothing = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.one + 1)


@places
def test_empty_groups_and_ranks_that_own_nothing(stage, tier):
    def prepare(model):
        groups = [{"params": []}, {"params": [model.one]}, {"params": [model.nothing], "lr": 1.0}]
        return {"optimizer": torch.optim.SGD(groups, lr=LR, momentum=MOMENTUM)}

    state_dict = by_zero(model=Single, ranks=4, stage=stage, tier=tier, prepare=prepare)
    same(state_dict, by_torch(model=Single, ranks=4))


@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (3, "nvme")])
def test_memory_returns_when_an_engine_is_destroyed(stage, tier, tmp_path, monkeypatch):
    """Tensors and descriptors; whole views are gone before."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(world):
        with engine_of(world, stage=stage, tier=tier) as engine:
            plain_loop(engine, rows(0, world.rank))
            engine.step()
            zero.full_state_dict(engine)

    def held():
        run_ranks(2, run)
        return *live_tensors(), len(open_files(tmp_path))

    held()  # what torch keeps for itself is there from now on
    before, after = held(), held()
    assert all(now <= then for then, now in zip(before, after, strict=True)), "less, if an earlier test's is gone"


class Experts(nn.Module):
    """Rank r sends all of its rows to expert r, and rank 1 does so twice."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.experts[1](torch.relu(self.experts[1](x))) if rank == 1 else self.experts[rank](x)


@places
def test_experts_that_differ_by_rank_finish(stage, tier):
    model = functools.partial(ByRank, Experts)
    same(by_zero(model=model, ranks=4, stage=stage, tier=tier), by_torch(model=model, ranks=4))
