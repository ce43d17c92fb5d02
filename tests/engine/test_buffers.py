"""Buffers stay whole on every rank: statistics, tables, and one that two modules share."""

import pytest
import torch
from torch import Tensor, nn

import zero
from zero.engine.model.takeover import move_buffers
from zero.engine.whole.read import digest
from zero.testing import run_ranks


class Convolutional(nn.Module):
    """Torch's own batch norm, unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True)),
            nn.Sequential(nn.Conv2d(5, 4, 3), nn.BatchNorm2d(4)),
        )
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))


@pytest.mark.parametrize("activations", ["keep", "remat"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_torchs_batch_norm_trains_in_every_stage(precision, activations):
    """Running statistics included; remat does not count a batch twice."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]

    def rank_main(world: zero.World, stage: int, activations: str) -> tuple[str, Tensor]:
        with world.exclusive(), zero.empty():
            model = Convolutional()
        plan = zero.Plan(
            model,
            optimizer=zero.adamw(1e-2),
            world=world,
            stage=zero.Stage(stage),
            precision=zero.Precision(precision),
            activations=activations,
        )
        state = zero.init(plan, zero.open_store(plan), seed=1)
        step = zero.make_step(plan, lambda model, x: model(x).float().square().mean())
        for number in range(3):
            x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(number + 10 * world.rank))
            state, _ = step(state, [x.to(dtype)])
        (mean,) = [b for name, b in state.model.named_buffers() if name.endswith("1.1.running_mean")]
        return digest(state), mean

    kept = run_ranks(2, rank_main, 0, "keep")
    for stage in range(4):
        for (a, mean_a), (b, mean_b) in zip(run_ranks(2, rank_main, stage, activations), kept, strict=True):
            assert a == b
            assert torch.equal(mean_a, mean_b)
            assert mean_a.abs().sum() > 0


def test_a_buffer_of_two_modules_stays_one():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    table = torch.arange(3.0)
    for layer in model:
        layer.register_buffer("table", table)
    move_buffers(model, torch.bfloat16, torch.device("meta"))
    assert model[0].table is model[1].table
    assert model[0].table.is_meta
    assert model[0].table.dtype == torch.float32


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_buffer_of_two_modules_stays_one_when_the_state_is_closed(precision):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[2].running_mean = model[1].running_mean
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=zero.open_world(), precision=precision)
    state = zero.init(plan, zero.open_store(plan))
    zero.make_forward(plan, lambda model: model(torch.ones(4, 2, dtype=plan.precision.compute)))(state)
    state.close()
    assert model[1].running_mean is model[2].running_mean
    assert model[1].running_mean.dtype == torch.float32


def test_a_sparse_tensor_may_be_saved_inside_a_unit():
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])
            self.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(self.graph, self.layers[0](x))

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Sparse()])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    def rank_main(world: zero.World, stage: int) -> str:
        with world.exclusive(), zero.empty():
            model = Inside()
        plan = zero.Plan(model, optimizer=zero.adamw(1e-2), world=world, stage=zero.Stage(stage))
        state = zero.init(plan, zero.open_store(plan))
        state, metrics = zero.make_step(plan, lambda model, x: model(x).square().mean())(state, [torch.ones(3, 4)])
        return repr(metrics)

    assert run_ranks(2, rank_main, 0) == run_ranks(2, rank_main, 3)
