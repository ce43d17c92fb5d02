"""Whatever a model does with its units, gradients are those of plain torch and no buffer stays taken.

The oracle is one process with the same weights: mean loss over ranks, plain autograd, plain SGD with a step so large
that a wrong gradient cannot hide. A parameter that was not used counts as having a zero gradient.
"""

import copy
import gc
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo  # else torch's checkpoint imports it in the middle of a step, in frames that hold on to tensors
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import zero
from tests.simulation import simulated_gpu
from zero.distributed.world import World
from zero.engine.forward.recompute import UNCOUNTED_NUMEL
from zero.engine.memory.pool import Pool
from zero.errors import StaleStateError, WorldError
from zero.testing import run_ranks
from zero.trainer.models.gpt import GPT, loss as gpt_loss
from zero.trainer.models.gpt_config import GPTConfig

WIDTH, ROWS, STEPS, LR = 7, 3, 3, 0.3


class Batch(NamedTuple):
    """The input of one rank in one step; models may behave differently by step or by rank."""

    x: Tensor
    step: int
    rank: int


LossFn = Callable[[nn.Module, Batch], Tensor]


def mean_square(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch).square().mean()


class Layer(nn.Module):
    """tanh(x W + b): saves its weight, its input and its output."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Layers one after another; what odd models are made from."""

    def __init__(self, make: Callable[[], nn.Module] = Layer, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        for layer in self.layers:
            x = layer(x)
        return x


class Nested(nn.Module):
    """A unit that owns a parameter, holds units, and uses its own parameter before, between and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x * self.gain)
        return x + self.gain * self.second(x * self.gain)


class RootOwns(nn.Module):
    """The root is a unit because it owns a parameter, around all others."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(Nested() for _ in range(2))

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x + self.bias
        for block in self.blocks:
            x = block(x) * self.bias
        return x


class UnderCheckpoint(Chain):
    def __init__(self, *, reentrant: bool, make: Callable[[], nn.Module] = Layer) -> None:
        super().__init__(make)
        self.reentrant = reentrant

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x.clone().requires_grad_() if self.reentrant else batch.x
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class AllUnderCheckpoint(UnderCheckpoint):
    """Several units inside one checkpoint."""

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x.clone().requires_grad_()
        return checkpoint(lambda y: Chain.forward(self, batch._replace(x=y)), x, use_reentrant=self.reentrant)


class CheckpointInside(nn.Module):
    """User code inside a unit that drops and recomputes a part which reads the unit's parameters."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.reentrant = reentrant

    def part(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x + self.up.bias[:WIDTH])
        return x + checkpoint(self.part, x, use_reentrant=self.reentrant)


class PartWithoutGradients(CheckpointInside):
    """A part of what is recomputed wants no gradient."""

    def part(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.up(x).abs().mean()
        return super().part(x) / (1 + scale)


class CheckpointInCheckpoint(CheckpointInside):
    """A reentrant checkpoint inside one that drops and recomputes it: it runs three times."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(reentrant=reentrant)
        self.middle = nn.Linear(WIDTH, WIDTH)

    def part(self, x: Tensor) -> Tensor:
        return super().part(checkpoint(lambda y: self.middle(y) + self.up(y)[..., :WIDTH], x, use_reentrant=True))


class TwoNames(nn.Module):
    """A layer under a name of its own and twice in a list beside it, another one in that list and under a name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.steps = nn.ModuleList([self.first, nn.Tanh(), nn.Linear(WIDTH, WIDTH), self.first])
        self.again = self.steps[2]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x + self.again(self.first(x))


class TwoNamesOfFrozen(TwoNames):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class ReadsOutside(Chain):
    """Parameters of a unit are read before it, after it, in a method, and by a unit that has no part in them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].linear.weight.requires_grad_(False)
        first = self.layers[0].linear
        self.layers[1].register_forward_hook(lambda module, args, output: output + first.weight.sum(0))

    def head(self, x: Tensor) -> Tensor:
        return F.linear(x, weight=self.layers[0].linear.weight.t(), bias=self.layers[2].linear.bias)

    def forward(self, batch: Batch) -> Tensor:
        before = (
            self.layers[1].linear.weight.mean() + torch.cat([p.view(-1) for p in self.layers[2].parameters()]).std()
        )
        return self.head(super().forward(batch) * before)


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    """Every parameter is read by the loss; some are only looked at."""
    norms = torch.stack([parameter.detach().norm() for parameter in model.parameters()])
    assert norms.max().item() > 0
    return mean_square(model, batch) + 0.01 * sum(p.square().sum() for p in model.parameters() if p.requires_grad)


def by_a_method(model: nn.Module, batch: Batch) -> Tensor:
    return model.head(batch.x).square().mean()


class Wrap(torch.autograd.Function):
    """Return a tensor that wraps others and has no memory of its own, such as a DTensor or a float8 tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return TwoTensor(x, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.a


class Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return TwoTensor(grad, grad)


class KeepsWrapped(Layer):
    """Autograd keeps a wrapped activation."""

    def forward(self, x: Tensor) -> Tensor:
        wrapped = Wrap.apply(super().forward(x))
        return Unwrap.apply(wrapped * wrapped)


class Product(torch.autograd.Function):
    """x W' of a user's own: it is given the parameter itself, and reads it in its forward and its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def by_a_function(model: nn.Module, batch: Batch) -> Tensor:
    return Product.apply(model(batch), model.layers[0].linear.weight).square().mean()


def in_chunks(model: nn.Module, batch: Batch) -> Tensor:
    """The head and its loss in one, outside of the head."""
    head = model.layers[2].linear
    return zero.losses.linear_cross_entropy(model(batch), head.weight, torch.arange(ROWS), 2, bias=head.bias)


class ReturnsItsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self) -> Tensor:
        return self.weight[1]


class UsesAReturnedView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.ModuleList([ReturnsItsParameter()])
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, batch: Batch) -> Tensor:
        row = self.table[0]()
        x = batch.x
        for layer in self.layers:
            x = layer(x * row)
        return x + row


class Storing(nn.Module):
    """A unit that leaves views of its parameter where others find them later."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.linear.weight[0])
        return torch.tanh(self.linear(x))


class UsesStoredViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.layers = nn.ModuleList(Storing(self.kept) for _ in range(4))

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        for layer in self.layers:
            x = layer(x)
        x = x * torch.stack(self.kept).square().sum(0)
        x = x * self.kept[0]
        self.kept.clear()
        return x


class Scaled(nn.Module):
    """A unit that is handed somebody else's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, gain: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * gain)


class Lends(nn.Module):
    """An outer unit whose parameter is used inside inner units."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.inner = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        for inner in self.inner:
            x = inner(x, gain=self.gain)
        return x


class Tied(nn.Module):
    """One weight at two sites, transposed at one of them, and beside a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, batch: Batch) -> Tensor:
        x = self.first(batch.x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Twice(Chain):
    """The same units again, in another order, once with the output of the first pass lost."""

    def forward(self, batch: Batch) -> Tensor:
        x = super().forward(batch)
        self.layers[1](x)
        return self.layers[0](self.layers[2](x)) + self.layers[0](x)


class TwoPlaces(nn.Module):
    """One module registered twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = Layer()
        self.layers = nn.ModuleList([shared, Layer(), shared])
        self.again = shared

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        for layer in self.layers:
            x = layer(x)
        return self.again(x)


class SharedPart(nn.Module):
    """Units that share a submodule: each needs the other's unit beside its own."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), shared) for _ in range(3))

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        for layer in self.layers:
            x = layer(x)
        return x


class Unused(Chain):
    """Parameters that nobody uses, without elements, without dimensions, and a whole unit that is never called."""

    def __init__(self) -> None:
        super().__init__(count=2)
        self.layers.append(Layer())
        for layer in self.layers:
            layer.idle = nn.Parameter(torch.randn(3))
            layer.nothing = nn.Parameter(torch.empty(0, 3))
            layer.gain = nn.Parameter(torch.randn(()))

    def forward(self, batch: Batch) -> Tensor:
        return self.layers[1](self.layers[0](batch.x) * 2)


class Sometimes(Chain):
    """Units that are not visited in some steps, in an order that changes from step to step."""

    def __init__(self) -> None:
        super().__init__(count=5)

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        orders = [(0, 1, 2, 3, 4), (4, 2, 0), (3, 1), (1, 4, 0, 3, 2, 1), (0,)]
        for index in orders[batch.step % len(orders)]:
            x = self.layers[index](x)
        return x


class Peeks(Chain):
    """Calls without gradients inside a training step: before, between and on units that get gradients too."""

    def forward(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            seen = super().forward(batch)
        x = self.layers[0](batch.x)
        with torch.no_grad():
            x = x + self.layers[0](seen) + self.layers[2](x)
        return self.layers[2](self.layers[1](x)) * seen


class Lora(nn.Module):
    """Frozen weight, trained low-rank addition."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class MostlyFrozen(Chain):
    """Whole units without a trained parameter between those that have some."""

    def __init__(self) -> None:
        super().__init__(count=6)
        for layer in (self.layers[0], self.layers[2], self.layers[3], self.layers[5]):
            layer.requires_grad_(False)


class InPlace(nn.Module):
    """Changes its input in place, as residual streams are; the norm does not need the old value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x += torch.tanh(self.linear(x + 0))
        return x


class InPlaceChain(Chain):
    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch._replace(x=batch.x.clone()))


class OnHost(Chain):
    """A foreign pair of saved-tensor hooks around units."""

    def forward(self, batch: Batch) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            x = self.layers[1](self.layers[0](batch.x))
        return self.layers[2](x)


class Recurrent(nn.Module):
    """A module that keeps its own list of weights, and one that reads a child's weight directly."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(WIDTH, 1, 9, dropout=0.0, batch_first=True)])

    def forward(self, batch: Batch) -> Tensor:
        x, _ = self.lstm(batch.x[None])
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.layers[0](x)[0]


class FrozenParts(nn.Module):
    """Frozen units that share a frozen weight, so that a site needs two units and none of them gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = Layer(), nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for layer in self.layers:
            layer.weight = self.shared.weight
        self.shared.requires_grad_(False)
        self.layers.requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        x = self.first(batch.x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class BranchesByRank(nn.Module):
    """Ranks use different parameters of one unit: one saves the weight for backward, another saves nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return 2 * (torch.sin(self.linear(x)) if rank == 0 else x + self.bias)


class SkipsByRank(BranchesByRank):
    """One rank passes its input through."""

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return 2 * torch.sin(self.linear(x) + self.bias) if rank == 0 else x


class ByRank(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = Layer()
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, batch: Batch) -> Tensor:
        x = self.first(batch.x) * 0.5
        for layer in self.layers:
            x = layer(x, batch.rank)
            x += 0.1  # a unit's output is the caller's to change
        return x


def by_input_too(model: nn.Module, batch: Batch) -> Tensor:
    """A gradient with respect to the input only, and a loss of which it is a constant part."""
    x = batch.x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(mean_square(model, batch._replace(x=x)), x)
    return mean_square(model, batch._replace(x=batch.x + slope.detach()))


def by_input_twice(model: nn.Module, batch: Batch) -> Tensor:
    """A loss that contains the gradient with respect to the input (energy and force)."""
    x = batch.x.clone().requires_grad_()
    energy = mean_square(model, batch._replace(x=x))
    (apply,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy + apply.square().sum()


def backward_twice(model: nn.Module, batch: Batch) -> Tensor:
    """One backward of the same graph before the engine's own."""
    loss = mean_square(model, batch)
    loss.backward(retain_graph=True)
    return loss


def in_parts(model: nn.Module, batch: Batch) -> Tensor:
    """A first loss goes backward before the second one exists."""
    mean_square(model, batch).backward()
    return mean_square(model, batch._replace(x=batch.x * 2))


class Case(NamedTuple):
    name: str
    build: Callable[[], nn.Module]
    loss: LossFn = mean_square
    units: tuple[str, ...] | None = None
    remat: bool = True
    """Activation checkpointing by the engine is meaningful and allowed here."""


CASES = [
    Case("chain", Chain),
    Case("one unit at the root", Layer, lambda model, batch: model(batch.x).square().mean()),
    Case("root owns", RootOwns),
    Case("nested by class", RootOwns, units=("Nested", "Layer")),
    Case("nested, own parameters", RootOwns, units=("RootOwns", "Nested", "Layer", "Linear")),
    Case("checkpoint around", lambda: UnderCheckpoint(reentrant=False)),
    Case("reentrant checkpoint around", lambda: UnderCheckpoint(reentrant=True)),
    Case("checkpoint around nested", lambda: UnderCheckpoint(reentrant=False, make=Nested), units=("Nested", "Layer")),
    Case("checkpoint around all", lambda: AllUnderCheckpoint(reentrant=False)),
    Case("reentrant checkpoint around all", lambda: AllUnderCheckpoint(reentrant=True)),
    Case("checkpoint around the shared", lambda: UnderCheckpoint(reentrant=False, make=Lora)),
    Case("checkpoint inside", lambda: Chain(lambda: CheckpointInside(reentrant=False))),
    Case("reentrant checkpoint inside", lambda: Chain(lambda: CheckpointInside(reentrant=True))),
    Case("no gradients in a checkpoint inside", lambda: Chain(lambda: PartWithoutGradients(reentrant=False))),
    Case("no gradients in a reentrant checkpoint inside", lambda: Chain(lambda: PartWithoutGradients(reentrant=True))),
    Case("a wrapped activation", lambda: Chain(KeepsWrapped)),
    Case("checkpoints inside", lambda: Chain(lambda: CheckpointInCheckpoint(reentrant=False))),
    Case("reentrant checkpoints inside", lambda: Chain(lambda: CheckpointInCheckpoint(reentrant=True))),
    Case("two names", lambda: Chain(TwoNames)),
    Case("two names of a frozen layer", lambda: Chain(TwoNamesOfFrozen)),
    Case("reads outside", ReadsOutside),
    Case("reads outside, by a method alone", ReadsOutside, by_a_method),
    Case("reads outside, by the loss", ReadsOutside, penalised),
    Case("reads outside, by an autograd function", Chain, by_a_function),
    Case("reads outside, by a loss in chunks", Chain, in_chunks),
    Case("reads outside, nested", RootOwns, penalised, units=("RootOwns", "Nested", "Layer", "Linear")),
    Case("reads outside, tied", Tied, penalised),
    Case("returned view", UsesAReturnedView),
    Case("stored views", UsesStoredViews, remat=False),  # recomputation would store again
    Case("borrowed parameter", Lends),
    Case("tied", Tied),
    Case("twice", Twice),
    Case("two places", TwoPlaces),
    Case("shared part", SharedPart),
    Case("unused", Unused),
    Case("sometimes", Sometimes),
    Case("peeks", Peeks),
    Case("lora", lambda: Chain(Lora)),
    Case("mostly frozen", MostlyFrozen),
    Case("shared frozen part", FrozenParts),
    Case("in place", lambda: InPlaceChain(InPlace), remat=False),  # recomputation would see the changed input
    Case("hooks around", OnHost),
    Case("recurrent", Recurrent),
    Case("branches by rank", lambda: ByRank(BranchesByRank)),
    Case("skips by rank", lambda: ByRank(SkipsByRank)),
    Case("gradient of the input", Chain, by_input_too),
    Case("gradient of the input, mostly frozen", MostlyFrozen, by_input_too),
    Case("gradient of the input, tied", Tied, by_input_too),
    Case("force", Chain, by_input_twice),
    Case("backward twice", Chain, backward_twice),
    Case("backward in parts", Tied, in_parts),
]


def batch_of(step: int, rank: int) -> Batch:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    return Batch(x, step, rank)


def plain(model: nn.Module, loss_fn: LossFn, ranks: int, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of the oracle. Gradients start as zeros, so that unused parameters have one."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses = []
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        told = 0.0
        for rank in range(ranks):
            loss = loss_fn(model, batch_of(step, rank))
            loss.backward()
            told += loss.item() / ranks
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= ranks
            parameter.requires_grad or parameter.grad.zero_()
        losses.append(told)
        optimizer.step()
    return losses, {name: parameter.detach() for name, parameter in model.named_parameters()}


class Told(NamedTuple):
    """The observations of one rank. Counts are its pool's after each step; `extra` counts buffers beyond the pool."""

    losses: list[float]
    parameters: dict[str, Tensor]
    overflowed: list[int]
    renewed: list[int]
    extra: list[int]


def pins(pool: Pool | None) -> int:
    return sum(buffer.pins for buffer in pool.buffers) if pool else 0


def sharded(
    model: nn.Module,
    loss_fn: LossFn = mean_square,
    *,
    ranks: int = 2,
    stage: int = 3,
    steps: int = STEPS,
    accumulate: int = 1,
    batch: Callable[[int, int], Any] = batch_of,
    **settings: Any,
) -> list[Told]:
    """The same training on thread ranks. No buffer is held when forward has ended, nor when the step has."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def rank_main(world: zero.World) -> Told:
        plan = zero.Plan(
            copies[world.rank],
            optimizer=zero.sgd(LR),
            world=world,
            stage=zero.Stage(stage),
            accumulate=accumulate,
            **settings,
        )
        state = zero.init(plan, zero.open_store(plan), weights=values)
        pool = state.runtime.residency.pool

        def watched(model: nn.Module, batch: Any) -> Tensor:
            loss = loss_fn(model, batch)
            assert pins(pool) == 0
            return loss

        step = zero.make_step(plan, watched)
        told = Told([], {}, [], [], [])
        for number in range(steps):
            state, metrics = step(state, [batch(number, world.rank)] * accumulate)
            assert pool is None or pool.pinned == 0
            told.losses.append(metrics.loss)
            told.overflowed.append(pool.overflowed if pool else 0)
            told.renewed.append(pool.renewed if pool else 0)
            told.extra.append(sum(buffer.extra for buffer in pool.buffers) if pool else 0)
        told.parameters.update(zero.full_state_dict(state))
        return told

    return run_ranks(ranks, rank_main)


def assert_same(told: Sequence[Told], losses: Sequence[float], parameters: dict[str, Tensor]) -> None:
    for rank in told:
        torch.testing.assert_close(rank.losses, list(losses), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(rank.parameters, parameters, rtol=1e-5, atol=2e-6)


SHARDED: list[dict[str, Any]] = [
    {"ranks": 2},
    {"ranks": 3, "prefetch": 0, "accumulate": 2},
    {"ranks": 2, "prefetch": 3, "activations": "remat"},
]
RESIDENT: list[dict[str, Any]] = [
    {"ranks": 2, "stage": 2, "accumulate": 2},
    {"ranks": 2, "stage": 0},
]


def chosen(number: int, case: Case) -> list[dict[str, Any]]:
    """Return one way to shard, and for every third case one to keep units resident; all ways where ranks differ."""
    fitting = [settings for settings in SHARDED if case.remat or "activations" not in settings]
    if "by rank" in case.name:
        return fitting + RESIDENT
    return [fitting[number % len(fitting)], *([RESIDENT[number // 3 % 2]] if number % 3 == 0 else [])]


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        pytest.param(case, settings, id=f"{case.name}, {' '.join(map(str, settings.values()))}")
        for number, case in enumerate(CASES)
        for settings in chosen(number, case)
    ],
)
def test_gradients_are_those_of_plain_torch(case, settings):
    """And what overflowed the pool is gone again."""
    model = case.build()
    expected = plain(model, case.loss, settings["ranks"], STEPS)
    told = sharded(model, case.loss, units=case.units, **settings)
    assert_same(told, *expected)
    assert [rank.extra for rank in told] == [[0] * STEPS] * settings["ranks"]


# -- buffers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prefetch", "activations"), [(0, "keep"), (1, "remat"), (2, "keep"), (3, "remat")])
def test_the_planned_buffers_are_enough_for_a_gpt(prefetch, activations):
    """None is made beside them, and none had to be given away because somebody still looked at it."""
    model = GPT(GPTConfig(vocab=11, width=16, layers=4, heads=2, seq=8))
    told = sharded(
        model,
        gpt_loss,
        batch=lambda step, rank: torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(9 * step + rank)),
        prefetch=prefetch,
        activations=activations,
    )
    assert [rank.overflowed for rank in told] == [[0] * STEPS] * 2
    assert [rank.renewed for rank in told] == [[0] * STEPS] * 2


PLAIN_LOOKING = ["root owns", "nested by class", "tied", "shared part", "unused", "lora", "mostly frozen"]


@pytest.mark.parametrize("activations", ["keep", "remat"])
@pytest.mark.parametrize("case", [c for c in CASES if c.name in PLAIN_LOOKING], ids=lambda case: case.name)
def test_the_planned_buffers_are_enough_for_nested_tied_and_frozen_units(case, activations):
    prefetch = PLAIN_LOOKING.index(case.name) % 3
    for rank in sharded(case.build(), case.loss, units=case.units, prefetch=prefetch, activations=activations):
        assert rank.overflowed == [0] * STEPS
        assert rank.renewed == [0] * STEPS


def overflowing(world: zero.World, models: list[nn.Module], case: Case) -> list[tuple[str, list[str]]]:
    """Buffers that three steps allocate beside the planned ones: (unit, units whose memory autograd keeps then)."""
    plan = zero.Plan(
        models[world.rank],
        optimizer=zero.sgd(0.1),
        world=world,
        stage=3,
        precision="bf16",
        units=case.units,
        prefetch=0,
    )
    state = zero.init(plan, zero.open_store(plan))
    step = zero.make_step(plan, lambda model, b: case.loss(model, b._replace(x=b.x.bfloat16())).float())
    pool, planned, names = state.runtime.residency.pool, plan.sizes.buffer_bytes()["gathered units"], []
    take = pool.take

    def taken(unit: int, numel: int) -> Any:
        kept = [plan.units[buffer.unit].name for buffer in pool.buffers if buffer.is_seen]
        buffer = take(unit, numel)
        if buffer.extra:
            assert pool.allocated_bytes == planned + plan.sizes.buffer_numel(plan.units[unit]) * buffer.flat.itemsize
            names.append((plan.units[unit].name, kept))
        return buffer

    pool.take = taken
    for number in range(STEPS):
        state, _ = step(state, [batch_of(number, world.rank)])
        assert pool.allocated_bytes == planned
    return names


def test_a_buffer_beside_the_planned_ones_is_of_one_unit_and_freed_after_its_last_use():
    """A user's checkpoint keeps what it recomputed of `first`, weights in the gathered buffer too, while `second` runs.

    The third buffer is needed, because autograd uses both units' weights and the module's own parameter afterwards.
    """
    case = next(case for case in CASES if case.name == "checkpoint around nested")
    model = case.build()
    one_step = [(f"layers.{n}.second", [f"layers.{n}", f"layers.{n}.first"]) for n in (2, 1, 0)]
    with simulated_gpu(races=True, order="late", seed=1):
        assert run_ranks(2, overflowing, [copy.deepcopy(model) for _ in range(2)], case) == [one_step * STEPS] * 2


class NineTenthsFrozen(nn.Module):
    """Nine tenths of it are frozen: units, parts of units, and what is peeked at without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList(Layer() for _ in range(7)).requires_grad_(False)
        self.loras = nn.ModuleList(Lora() for _ in range(2))

    def forward(self, batch: Batch) -> Tensor:
        x = self.loras[0](batch.x)
        with torch.no_grad():
            target = self.frozen[3](x)
        for layer in self.frozen:
            x = layer(x)
        return self.loras[1](x) - target


def live_tensors() -> tuple[int, int]:
    gc.collect()
    objects = (thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter))
    alive = [tensor for tensor in objects if tensor.layout == torch.strided]
    return len(alive), sum(tensor.untyped_storage().nbytes() for tensor in alive)


def test_a_mostly_frozen_model_does_not_grow():
    """Tensors alive, bytes in them, and records of visits are after 120 steps what they were after 20."""
    model = NineTenthsFrozen()
    copies = [copy.deepcopy(model) for _ in range(2)]
    meet = threading.Barrier(2)

    def rank_main(world: zero.World) -> list[tuple[int, int]]:
        plan = zero.Plan(copies[world.rank], optimizer=zero.sgd(1e-3), world=world)
        state = zero.init(plan, zero.open_store(plan), seed=0)
        step = zero.make_step(plan, mean_square)
        seen = []
        for number in range(120):
            state, _ = step(state, [batch_of(number, world.rank)])
            if number in (19, 119):
                meet.wait(30)  # not world.barrier: its own tensors would be counted
                residency = state.runtime.residency
                visits = sum(len(order._seen) + len(order._expected) for order in residency._orders.values())
                alive = live_tensors() if world.rank == 0 else (0, 0)
                seen.append((*alive, residency.pool.allocated_bytes, visits))
                meet.wait(30)
        return seen

    for before, after in run_ranks(2, rank_main):
        assert before == after


# -- what is refused ---------------------------------------------------------------------------------------------------


class Parting(Chain):
    """Ranks take different ways through the units."""

    def __init__(self, ways: Sequence[Sequence[int]]) -> None:
        super().__init__(count=3)
        self.ways = ways

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        for index in self.ways[batch.rank]:
            x = self.layers[index](x)
        return x


@pytest.mark.parametrize(
    "ways", [[(0, 1, 2), (0, 2, 1)], [(0, 1, 2), (0, 2)], [(0,), (0, 1, 2)], [(0, 1), (0, 2)]], ids=str
)
def test_ranks_that_visit_different_units_are_refused_by_name_where_those_are_sharded(ways):
    """At once: long before the deadline, and never with a number that is wrong. Below stage 3 see test_turns."""
    with pytest.raises(WorldError, match=r"layers|other units|norms and losses"):
        sharded(Parting(ways), stage=3)


@pytest.mark.parametrize(("ranks", "stage"), [(2, 3), (2, 1), (1, 0), (1, 3)])
def test_a_graph_from_before_the_update_is_refused_by_name(ranks, stage):
    kept: dict[int, Tensor] = {}

    def first_loss_is_kept_alive(model: nn.Module, batch: Batch) -> Tensor:
        if batch.step == 0:
            kept[batch.rank] = mean_square(model, batch)
            return mean_square(model, batch)
        return mean_square(model, batch) + kept[batch.rank]

    with pytest.raises(StaleStateError, match=r"the parameters of layers\.\d changed .* Call backward before"):
        sharded(Chain(), first_loss_is_kept_alive, ranks=ranks, stage=stage)


@pytest.mark.parametrize("wanted", ["inputs", "parameters"])
def test_one_rank_refuses_such_a_graph_whatever_is_asked_of_it(wanted: str):
    """A sum keeps no parameter, and torch would notice nothing."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plan = zero.Plan(model, optimizer=zero.sgd(LR), world=zero.open_world())
    state = zero.init(plan, zero.open_store(plan))
    x = torch.ones(2, WIDTH, requires_grad=True)
    step = zero.Step(state)
    step.microbatch()
    loss = state.model(x).sum()
    step.backward(loss, retain_graph=True)
    state, _ = step.finish()
    for _ in range(2):  # the update waits, and is made
        with pytest.raises(StaleStateError, match="Call backward before the next step"):
            _ = torch.autograd.grad(loss, x, retain_graph=True) if wanted == "inputs" else loss.backward()
        with torch.no_grad():
            state.model(x)
    state.runtime.store.close()


class SpoilsAnActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        y += 1
        return y


@pytest.mark.parametrize("stage", [0, 3])
def test_an_activation_that_was_overwritten_is_refused_as_torch_does(stage):
    """Hooks switch torch's own check off; without it the gradient would be wrong in silence."""
    model = Chain(SpoilsAnActivation)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(model, mean_square, 1, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sharded(model, stage=stage)


def test_remat_of_a_unit_that_overwrites_its_input_is_refused():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sharded(InPlaceChain(InPlace), activations="remat")


class WritesItsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.9)
        return x


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_writing_to_a_parameter_is_refused_by_name(stage):
    """At stage 3 the write would reach a gathered copy and be lost, below it ranks would part."""
    with pytest.raises(StaleStateError, match=r"one of the parameters layers\.0\.scale, .* was written to in place"):
        sharded(Chain(WritesItsParameter), stage=stage)


def kept_small(parameter: Tensor) -> None:
    parameter.data.clamp_(-1e-3, 1e-3)


class WritesPastTheCount(WritesItsParameter):
    """As for a bound on weights; a helper does it, and torch counts no write."""

    def forward(self, x: Tensor) -> Tensor:
        kept_small(self.linear.weight)
        return self.linear(x) * self.scale


class WritesSometimes(WritesItsParameter):
    """A hook does it, and not the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.linear.register_forward_pre_hook(lambda module, args: self.sometimes(module))

    def sometimes(self, module: nn.Module) -> None:
        self.calls += 1
        if self.calls == 2:
            module.weight.data.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize(
    ("stage", "build", "activations"),
    [(0, WritesPastTheCount, "remat"), (2, WritesSometimes, "keep"), (3, WritesPastTheCount, "keep")],
)
def test_writing_to_a_parameter_past_the_count_of_versions_is_refused_too(stage, build, activations):
    """Below stage 3 it would be an edit, at stage 3 be lost."""
    with pytest.raises(StaleStateError, match=r"layers\.\d\.linear\.weight was written to in place.*modify=True"):
        sharded(Chain(build), stage=stage, activations=activations, check_writes=True)


class ReplacesItsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.linear.weight = nn.Parameter(self.linear.weight.detach() * 0.9)
        return y


@pytest.mark.parametrize(("stage", "activations"), [(0, "keep"), (3, "remat")])
def test_replacing_a_parameter_is_refused_by_name(stage, activations):
    """torch would compute with the new one, and train the old one."""
    with pytest.raises(StaleStateError, match=r"layers\.\d\.linear\.weight was replaced by a forward"):
        sharded(Chain(ReplacesItsParameter), stage=stage, activations=activations)


class BackwardParts(Chain):
    """All ranks go the same way forward, but the loss of one needs only the first unit."""

    def forward(self, batch: Batch) -> Tensor:
        first = self.layers[0](batch.x)
        last = self.layers[2](self.layers[1](first))
        return last if batch.rank == 0 else first


def test_ranks_whose_backward_visits_different_units_are_refused_by_name_where_those_are_sharded():
    with pytest.raises(WorldError, match="layers"):
        sharded(BackwardParts(), stage=3)


# -- dtypes that do not go together ------------------------------------------------------------------------------------


class Router(nn.Module):
    """Compute in fp32 inside a model of any dtype, with its own weight or with the weight of an inner layer."""

    def __init__(self, *, within: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH, bias=False)
        self.weight = None if within else nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gate.weight if self.weight is None else self.weight
        return F.linear(x.float(), weight).to(x.dtype)


MIXED = {
    "own": (lambda: Chain(lambda: Router(within=False)), r"layers\.0\.weight, layers\.0\.gate\.weight"),
    "within": (lambda: Chain(lambda: Router(within=True)), r"layers\.0\.gate\.weight"),
    "in a layer": (Chain, r"layers\.0\.linear\.weight, layers\.0\.linear\.bias"),
    "at the root": (lambda: Router(within=False), "weight"),
}


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(("build", "names"), MIXED.values(), ids=MIXED)
def test_a_parameter_that_meets_another_dtype_is_noted_with_its_own_and_the_setting(build, names, precision):
    model, compute = build(), zero.Precision(precision).compute
    plan = zero.Plan(model, optimizer=zero.sgd(LR), world=World.solo(), precision=precision)
    state = zero.init(plan, zero.open_store(plan))
    given = torch.ones(ROWS, WIDTH, dtype=torch.float32 if build is Chain else compute)
    x = given if isinstance(model, Router) else Batch(given, 0, 0)
    said = rf"{names} compute in {compute}, by precision={precision} or .* Cast the input or the weight .*"
    if precision == "fp32":
        assert state.model(x).dtype == compute
        return
    with pytest.raises(RuntimeError, match=r"dtype|scalar type") as raised:
        state.model(x)
    (note,) = raised.value.__notes__
    assert re.fullmatch(said, note)


class Fails(nn.Module):
    """Raises an error of torch, or one with `text`."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self.linear, self.text = nn.Linear(WIDTH, WIDTH), text

    def forward(self, x: Tensor) -> Tensor:
        if self.text:
            raise RuntimeError(self.text)
        return self.linear(x)


@pytest.mark.parametrize(
    ("precision", "text", "dtype"),
    [
        ("fp32", "", torch.bfloat16),
        ("bf16", "CUBLAS error: float gemm with BFloat16 failed", torch.bfloat16),
        ("bf16", "mat1 and mat2 shapes cannot be multiplied (4x8 and 9x8)", torch.bfloat16),
    ],
    ids=["in fp32", "of a kernel", "of shapes"],
)
def test_an_error_that_is_not_of_the_plan_s_dtype_is_raised_as_it_is(precision, text, dtype):
    plan = zero.Plan(Chain(lambda: Fails(text)), optimizer=zero.sgd(LR), world=World.solo(), precision=precision)
    state = zero.init(plan, zero.open_store(plan))
    with pytest.raises(RuntimeError, match=re.escape(text) or "same dtype") as raised:
        state.model(Batch(torch.ones(ROWS, WIDTH, dtype=dtype), 0, 0))
    assert not getattr(raised.value, "__notes__", ())


# -- buffers of the model, sparse gradients ----------------------------------------------------------------------------


class Counting(nn.Module):
    """Computes with buffers that it replaces or changes in every call, small ones and large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, numel in (("small", 1), ("large", UNCOUNTED_NUMEL + 1)):
            self.register_buffer(f"{name}_replaced", torch.zeros(numel))
            self.register_buffer(f"{name}_changed", torch.zeros(numel))

    def forward(self, x: Tensor) -> Tensor:
        self.small_replaced = self.small_replaced + 1
        self.large_replaced = self.large_replaced + 2
        self.small_changed += 3
        self.large_changed += 4
        calls = self.small_replaced + self.large_replaced[0] + self.small_changed + self.large_changed[0]
        return torch.sin(self.linear(x) * calls)


@pytest.mark.parametrize("stage", [1, 3])
def test_recomputation_sees_the_buffers_that_forward_saw_and_changes_none(stage):
    model = Chain(Counting)
    kept, recomputed = (sharded(model, stage=stage, activations=which) for which in ("keep", "remat"))
    for result, other in zip(kept, recomputed, strict=True):
        assert result.losses == other.losses
        torch.testing.assert_close(result.parameters, other.parameters, rtol=0, atol=0)


class SparseLookup(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=sparse)

    def forward(self, batch: Batch) -> Tensor:
        return self.table(torch.tensor([0, 1, 1])) + self.table(torch.tensor([2, batch.rank, 4]))


@pytest.mark.parametrize("stage", [0, 3])
def test_a_sparse_gradient_counts_like_a_dense_one(stage):
    model = SparseLookup(sparse=True)
    assert_same(sharded(model, stage=stage), *plain(_dense(model), mean_square, 2, STEPS))


def _dense(model: SparseLookup) -> SparseLookup:
    dense = SparseLookup(sparse=False)
    dense.load_state_dict(model.state_dict())
    return dense


# -- after an exception, and between steps -----------------------------------------------------------------------------


class Broken(Exception):
    pass


class FailsOnce(Chain):
    def forward(self, batch: Batch) -> Tensor:
        x = self.layers[1](self.layers[0](batch.x))
        if batch.step == 1:
            raise Broken
        return self.layers[2](x)


class FailsInBackward(Chain):
    def forward(self, batch: Batch) -> Tensor:
        x = self.layers[1](self.layers[0](batch.x))
        if batch.step == 1:
            x.register_hook(self.fail)
        return self.layers[2](x)

    @staticmethod
    def fail(grad: Tensor) -> None:
        raise Broken


@pytest.mark.parametrize(
    ("build", "stage"),
    [(FailsOnce, 1), (FailsOnce, 3), (FailsInBackward, 0), (FailsInBackward, 2), (FailsInBackward, 3)],
)
def test_a_step_that_raised_on_every_rank_leaves_the_state_as_it_was(build, stage):
    """Two good steps with a broken one between them are two good steps."""
    model = build()
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def rank_main(world: zero.World, numbers: Sequence[int]) -> dict[str, Tensor]:
        plan = zero.Plan(
            copy.deepcopy(model), optimizer=zero.sgd(LR, momentum=0.5), world=world, stage=zero.Stage(stage)
        )
        state = zero.init(plan, zero.open_store(plan), weights=values)
        step = zero.make_step(plan, mean_square)
        for number in numbers:
            batch = [batch_of(number, world.rank)]
            if number == 1:
                with pytest.raises(Broken):
                    step(state, batch)
            else:
                state, _ = step(state, batch)
        assert state.runtime.residency.pool is None or state.runtime.residency.pool.pinned == 0
        return zero.full_state_dict(state)

    broken, whole = (run_ranks(2, rank_main, numbers) for numbers in ((0, 1, 2), (0, 2)))
    torch.testing.assert_close(broken, whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("build", "guard", "stage"),
    [
        (RootOwns, torch.no_grad, 2),
        (RootOwns, torch.inference_mode, 3),
        (lambda: Chain(TwoNames), torch.inference_mode, 0),
        (lambda: Chain(TwoNamesOfFrozen), torch.no_grad, 3),
    ],
)
def test_evaluation_between_steps_sees_the_update_and_disturbs_nothing(build, guard, stage):
    """Under inference mode too, whose tensors may not be kept for a later backward."""
    model = build()
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def rank_main(world: zero.World, evaluate: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        plan = zero.Plan(
            copy.deepcopy(model),
            optimizer=zero.sgd(LR),
            world=world,
            stage=zero.Stage(stage),
            units=["Nested", "Layer"] if isinstance(model, RootOwns) else None,
        )
        state = zero.init(plan, zero.open_store(plan), weights=values)
        step, forward = zero.make_step(plan, mean_square), zero.make_forward(plan, mean_square)
        seen = []
        for number in range(STEPS):
            state, _ = step(state, [batch_of(number, world.rank)])
            if evaluate:
                with guard():
                    seen.append(forward(state, batch_of(7, 0)).clone())
        return seen, zero.full_state_dict(state)

    with_it, without = (run_ranks(2, rank_main, evaluate) for evaluate in (True, False))
    assert all(torch.equal(with_it[0][1][name], value) for name, value in without[0][1].items())
    for count, seen in enumerate(with_it[0][0], 1):
        trained = copy.deepcopy(model)
        trained.load_state_dict(plain(model, mean_square, 2, count)[1], strict=False)  # a second name of one it has
        torch.testing.assert_close(seen, mean_square(trained, batch_of(7, 0)).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_an_edit_of_what_has_two_names_is_seen_after_an_evaluation(stage):
    model = Chain(TwoNamesOfFrozen)
    plan = zero.Plan(copy.deepcopy(model), optimizer=zero.sgd(LR), world=World.solo(), stage=zero.Stage(stage))
    state = zero.init(plan, zero.open_store(plan))
    forward = zero.make_forward(plan, mean_square)
    for factor in (1.0, 0.5):
        with zero.gathered(state, "layers.0.first.weight", modify=True) as full, torch.no_grad():
            full["layers.0.first.weight"].mul_(factor)
            model.layers[0].first.weight.mul_(factor)
        torch.testing.assert_close(forward(state, batch_of(0, 0)), mean_square(model, batch_of(0, 0)).detach())
