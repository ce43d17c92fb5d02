"""One gradient that is not finite, on one rank: every rank skips the step, and not one bit of the state changes.

The counters of the loss scale are the record of the skip, so the digest is taken with those of before; that the scale
itself moves as its automaton says is a law of its own here.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import zero
from tests.common.small import Setting, slice_of
from zero.engine.after import After
from zero.engine.whole.read import digest
from zero.testing import run_processes, run_ranks

KiB = 1024


class Poison(torch.autograd.Function):
    """The identity, whose gradient ends with `value`."""

    @staticmethod
    def forward(ctx, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        grad.view(-1)[-1] = ctx.value
        return grad, None


class Layer(nn.Module):
    """x + gain * tanh(x @ weight) + bias, where one parameter's gradient may be poisoned."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.weight = nn.Parameter(torch.empty(5, 5))
        self.bias = nn.Parameter(torch.empty(5))
        self.gain = nn.Parameter(torch.empty(()))

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor, poisoned: str | None, value: float) -> Tensor:
        own = {
            name: Poison.apply(parameter, value) if self.prefix + name == poisoned else parameter
            for name, parameter in self.named_parameters()
        }
        return x + own["gain"] * torch.tanh(x.to(own["weight"].dtype) @ own["weight"]) + own["bias"]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(f"layers.{number}.") for number in range(3))

    def forward(self, x: Tensor, poisoned: str | None, value: float) -> Tensor:
        for layer in self.layers:
            x = layer(x, poisoned, value)
        return x


NAMES = tuple(name for name, _ in Layers().named_parameters())


def loss_fn(model, batch):
    x, poisoned, value = batch
    return model(x, poisoned, value).float().square().mean()


def batch_for(world, number, accumulate=1, poisoned=None, value=math.nan):
    """This rank's microbatches; poison is only in the last rank's last one."""
    x = torch.randn(4 * world.size * accumulate, 5, generator=torch.Generator().manual_seed(number))
    parts = slice_of(x, world, accumulate)
    last = world.rank == world.size - 1
    return [(part, poisoned if last and m == accumulate - 1 else None, value) for m, part in enumerate(parts)]


def bits(state, like) -> str:
    """The digest, but for the loss scale's counters."""
    return digest(replace(state, after_=After.known(state.step, like.after_.counts[1])))


def poison_each(world, setting, value):
    """One clean step, a poisoned step for each parameter, another clean step; returns the last digest."""
    state, step = setting.start(world, Layers, loss_fn)
    state, _ = step(state, batch_for(world, 0, setting.accumulate))
    first = state
    before = bits(state, first)
    for number, name in enumerate(NAMES):
        state, metrics = step(state, batch_for(world, 1, setting.accumulate, name, value))
        assert metrics.skipped
        assert not math.isfinite(metrics.grad_norm)
        assert metrics.nonfinite_unit == name.rpartition(".")[0]
        assert (state.step, state.skipped) == (1, number + 1)
        assert bits(state, first) == before, name
    state, metrics = step(state, batch_for(world, 2, setting.accumulate))
    assert not metrics.skipped
    assert metrics.nonfinite_unit is None
    assert state.step == 2
    assert bits(state, first) != before
    return bits(state, first)


def never_poisoned(world, setting):
    """Return the result that `poison_each` must have."""
    state, step = setting.start(world, Layers, loss_fn)
    state, _ = step(state, batch_for(world, 0, setting.accumulate))
    first = state
    state, _ = step(state, batch_for(world, 2, setting.accumulate))
    return bits(state, first)


@pytest.mark.parametrize(
    ("stage", "precision", "value"),
    [
        (0, "fp32", math.nan),
        (0, "fp16", math.inf),
        (1, "bf16", math.nan),
        (2, "fp32", -math.inf),
        (2, "fp16", math.nan),
        (3, "bf16", math.inf),
        (3, "fp32", math.nan),
    ],
)
def test_each_parameter_in_turn_is_caught(stage, precision, value):
    """The next clean step is the step that would have been taken, with or without clipping, whenever it is applied."""
    setting = Setting(
        stage=stage,
        precision=precision,
        clip=0.1 if value > 0 else None,
        update="serial" if math.isnan(value) and stage % 2 else "lazy",
        activations="remat" if math.isinf(value) else "keep",
    )
    poisoned = run_ranks(3, poison_each, setting, value)
    assert len(set(poisoned)) == 1
    if precision != "fp16":  # another loss scale rounds small fp16 gradients elsewhere
        assert poisoned == run_ranks(3, never_poisoned, setting)


def test_of_several_bad_units_the_first_is_named():
    def go(world):
        state, step = Setting().start(world, Layers, loss_fn)
        [(x, *rest)] = batch_for(world, 0)
        return step(state, [(x * math.nan, *rest)])[1].nonfinite_unit

    assert run_ranks(2, go) == ["layers.0"] * 2


@pytest.mark.parametrize(("size", "stage"), [(2, 0), (1, 2), (2, 3)])
def test_a_bad_last_microbatch_spoils_what_was_accumulated(size, stage):
    setting = Setting(stage=stage, accumulate=3)
    assert run_ranks(size, poison_each, setting, math.nan) == run_ranks(size, never_poisoned, setting)


@pytest.mark.process
def test_processes_skip_as_threads_do():
    setting = Setting(precision="bf16")
    assert run_processes(2, poison_each, setting, math.nan) == run_ranks(2, never_poisoned, setting)


# -- the loss scale ----------------------------------------------------------------------------------------------------


def scales(world, bad):
    """The loss scale that each step ran with; `bad` says which steps are poisoned."""
    setting = Setting(precision="fp16")
    plan = setting.plan(world, Layers)
    scale = zero.LossScaling(initial=16.0, window=2, hysteresis=2, minimum=4.0)
    plan.pages.facts = replace(plan.facts, precision=zero.Precision("fp16", scale=scale))
    state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, loss_fn)
    told = []
    for number, is_bad in enumerate(bad):
        state, metrics = step(state, batch_for(world, number, poisoned=NAMES[0] if is_bad else None))
        assert metrics.skipped is is_bad
        told.append(metrics.loss_scale)
    return told, state.skipped, state.step


def test_the_loss_scale_follows_its_automaton():
    """The first overflow uses up the hysteresis, each further one halves down to the minimum, two good steps double
    and refill it. Good steps in between start to count anew after an overflow."""
    bad = [True, True, True, True, False, True, False, False, True, False]
    expected = [16.0, 16.0, 8.0, 4.0, 4.0, 4.0, 4.0, 4.0, 8.0, 8.0]
    for told, skipped, made in run_ranks(2, scales, bad):
        assert told == expected
        assert (skipped, made) == (6, 4)


def overflowing(world):
    """A loss whose gradients are finite in fp32 and not in fp16 at the first scale."""
    setting = Setting(precision="fp16", lr=0.0)
    plan = setting.plan(world, Layers)
    plan.pages.facts = replace(plan.facts, precision=zero.Precision("fp16", scale=zero.LossScaling(hysteresis=1)))
    state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, loss_fn)
    skipped = []
    for _ in range(16):
        state, metrics = step(state, [(x * 40, name, value) for x, name, value in batch_for(world, 0)])
        skipped.append(metrics.skipped)
    return skipped, state.scale.scale


def test_a_real_overflow_is_skipped_until_the_scale_fits():
    for skipped, scale in run_ranks(2, overflowing):
        assert skipped[0]
        assert not skipped[-1]
        assert skipped == sorted(skipped, reverse=True), "once it fits, it fits"
        assert scale == 2.0 ** (16 - sum(skipped))


def without_tokens(world):
    """The metrics of a step in which rank 0 has an infinite gradient and rank 1 of its norm group runs no unit."""
    alone, group = world.part([world.rank], f"data {world.rank}"), world.part([0, 1], "experts")
    with world.exclusive():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = zero.Plan(model, optimizer=zero.sgd(0.1), world=alone, norm_groups=[group])
    state = zero.init(plan, zero.open_store(plan))
    x = torch.ones(2, 4, requires_grad=True)
    step = zero.make_step(plan, lambda model, _: x.sum() if world.rank else (model(x) * torch.inf).sum())
    _, metrics = step(state, [None])
    return metrics.skipped, metrics.nonfinite_unit


def test_a_rank_that_used_no_unit_reports_the_skipped_step_of_another():
    assert run_ranks(2, without_tokens) == [(True, "0")] * 2
