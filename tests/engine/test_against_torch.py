"""Training is what plain torch does: one process, the whole batch, torch.optim, clip_grad_norm_.

Tolerances. Both sides compute in fp32; what differs is the order of addition, in the gradient (per rank, then over
ranks, against one large batch) and in the norm. One such difference is about 2^-24 of the sum, and training amplifies
it, Adam most: the relative error of a small gradient becomes that of a full step. Measured after 50 steps: 3e-7 of the
loss, 5e-7 of the norm, 1e-6 in a parameter. Asked: 1e-5, room for other machines' kernels, and far below what one
step with a wrong learning rate, bias correction, decay mask or clip coefficient would show.
"""

import itertools

import pytest
import torch
from torch import nn

import zero
from tests.common.small import Setting, slice_of, train_small
from zero.core import lr_schedule
from zero.engine.whole.read import full_state_dict
from zero.testing import run_ranks
from zero.trainer.models import GPT, GPTConfig, loss as gpt_loss

CONFIG = GPTConfig(vocab=64, width=32, layers=2, heads=2, seq=16)
BATCH, CLIP, DECAY = 12, 0.4, 0.1


def batch_at(step: int) -> torch.Tensor:
    """(12, 17) tokens that can be learnt: each row counts in steps of its own."""
    generator = torch.Generator().manual_seed(step)
    first, by = torch.randint(0, 64, (2, BATCH, 1), generator=generator)
    return (first + (by % 5 + 1) * torch.arange(17)) % 64


def train_zero(world, setting, steps):
    """First parameters, metrics, last parameters."""
    state, step = setting.start(world, lambda: GPT(CONFIG), gpt_loss)
    before = full_state_dict(state)
    told = []
    for number in range(steps):
        state, metrics = step(state, slice_of(batch_at(number), world, setting.accumulate))
        told.append(metrics)
    return before, told, full_state_dict(state)


def train_torch(before, make, lr_at, steps, clip):
    """Losses, norms and last parameters of plain torch, from the same first parameters."""
    model = GPT(CONFIG)
    told = model.load_state_dict(before, strict=False)
    assert told.missing_keys == ["head.weight"], "the tied one"
    assert not told.unexpected_keys
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = make([{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}])
    losses, norms = [], []
    for number in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(number + 1)
        optimizer.zero_grad()
        loss = gpt_loss(model, batch_at(number))
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.0)


@pytest.mark.parametrize(("stage", "size", "accumulate"), [(3, 3, 1), (0, 2, 2)])
def test_fifty_steps_of_adamw_with_clipping(stage, size, accumulate):
    """Warm-up and cosine, weight decay on matrices only, the norm clipped at every step."""
    lr_at = lr_schedule.warmup_cosine(1e-2, 10, 50, final=1e-3)
    setting = Setting(stage=stage, accumulate=accumulate, lr=lr_at, clip=CLIP, weight_decay=DECAY)
    before, told, parameters = run_ranks(size, train_zero, setting, 50)[0]
    losses, norms, after = train_torch(before, adamw, lr_at, 50, CLIP)
    assert [metrics.loss for metrics in told] == pytest.approx(losses, rel=1e-5)
    assert [metrics.grad_norm for metrics in told] == pytest.approx(norms, rel=1e-5)
    assert_equal_parameters(parameters, after)
    assert losses[-1] < losses[0] - 1, "it learnt something, so the steps mattered"
    assert min(norms) > CLIP, "every step was clipped"


def sgd(groups):
    return torch.optim.SGD(groups, lr=0.0, momentum=0.9, nesterov=True)


def adam(groups):
    return torch.optim.Adam(groups, lr=0.0)


def adagrad(groups):
    return torch.optim.Adagrad(groups, lr=0.0)


class Lion:
    """Chen et al. 2023, algorithm 2, as it is written there."""

    def __init__(self, groups):
        self.param_groups = groups
        self.momentum = {parameter: torch.zeros_like(parameter) for group in groups for parameter in group["params"]}

    def zero_grad(self):
        for parameter in self.momentum:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                m, g = self.momentum[parameter], parameter.grad
                direction = torch.sign(0.9 * m + (1 - 0.9) * g)
                parameter -= group["lr"] * (direction + group["weight_decay"] * parameter)
                self.momentum[parameter] = 0.99 * m + (1 - 0.99) * g


def nesterov(lr, clip, weight_decay):
    return zero.sgd(lr, momentum=0.9, nesterov=True, clip=clip, weight_decay=weight_decay)


@pytest.mark.parametrize(
    ("ours", "theirs", "lr", "clip"),
    [
        (nesterov, sgd, 0.1, CLIP),
        (zero.adam, adam, 1e-2, None),
        (zero.adagrad, adagrad, 1e-2, CLIP),
        (zero.lion, Lion, 1e-3, None),
    ],
)
def test_ten_steps_of_the_other_optimizers(ours, theirs, lr, clip):
    """Ten steps, with a warm-up in them."""
    lr_at = lr_schedule.linear_warmup(lr, 5)
    setting = Setting(optimizer=ours, lr=lr_at, clip=clip, weight_decay=DECAY)
    before, told, parameters = run_ranks(2, train_zero, setting, 10)[0]
    losses, norms, after = train_torch(before, theirs, lr_at, 10, clip)
    if theirs is Lion:
        # The sign of a direction near zero may fall either way, and is a full step: few elements, and no later than
        # the losses show.
        assert [metrics.loss for metrics in told] == pytest.approx(losses, rel=1e-3)
        other = sum(int((parameters[name] - after[name]).abs().gt(1e-5).sum()) for name in after)
        assert other < sum(value.numel() for value in after.values()) / 1000
    else:
        assert [metrics.loss for metrics in told] == pytest.approx(losses, rel=1e-5)
        assert [metrics.grad_norm for metrics in told] == pytest.approx(norms, rel=1e-5)
        assert_equal_parameters(parameters, after)


def assert_equal_parameters(parameters, expected):
    for name, value in expected.items():
        torch.testing.assert_close(
            parameters[name], value, rtol=1e-5, atol=1e-5, msg=lambda told, name=name: f"{name}: {told}"
        )


# -- schedules ---------------------------------------------------------------------------------------------------------


def lrs_and_moves(world, setting, steps):
    """The learning rate that each step reported, and how far a weight of gradient 1 moved."""
    state, step = setting.start(world, OneWeight, lambda model, x: model(x))
    lrs, values = [], [1.0]
    for _ in range(steps):
        state, metrics = step(state, [torch.ones(1)])
        lrs.append(metrics.lr)
        values.append(full_state_dict(state)["w"].item())
    return lrs, [before - after for before, after in itertools.pairwise(values)]


class OneWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def reset_parameters(self):
        nn.init.ones_(self.w)

    def forward(self, x):
        return (self.w * x).sum()


def plain_sgd(lr, clip, weight_decay):
    return zero.sgd(lr, clip=clip, weight_decay=weight_decay)


@pytest.mark.parametrize("update", ["lazy", "serial"])
def test_a_schedule_applies_to_the_step_it_names(update):
    """The first update is made with lr_at(1): what is waiting keeps the rate of the step that decided it."""
    table = [0.5, 0.25, 0.125, 0.0, 2.0]
    setting = Setting(optimizer=plain_sgd, lr=lambda step: table[step - 1], weight_decay=0.0, update=update)
    for lrs, moves in run_ranks(2, lrs_and_moves, setting, 5):
        assert lrs == table
        assert moves == table, "powers of two: exact"


def test_a_limit_that_no_norm_reaches_changes_no_bit():
    runs = [run_ranks(2, train_small, Setting(clip=clip))[0] for clip in (None, 1e6)]
    assert runs[0] == runs[1]


def test_fp16_gradients_are_divided_by_the_scale_of_the_loss():
    settings = [Setting(precision=name, optimizer=plain_sgd, weight_decay=0.0) for name in ("fp32", "fp16")]
    norms = [run_ranks(1, train_small, setting, 1)[0][1][0].grad_norm for setting in settings]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
