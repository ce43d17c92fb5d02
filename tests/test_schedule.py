"""A schedule is a function of the step; torch's stateful schedulers are the oracle."""

import pickle
from math import nan

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from zero.errors import ConfigError
from zero.schedule import constant, linear_warmup, warmup_cosine, warmup_linear

LR, FINAL = 0.3, 0.02


def what_torch_uses(make, steps: int) -> list[float]:
    """The learning rate of each update, the first one's first."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=LR)
    scheduler: LRScheduler = make(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def warmed(optimizer, warmup, after):
    """Torch counts from 0 and its warm-up includes the first step at full rate."""
    rise = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    return SequentialLR(optimizer, [rise, after], milestones=[warmup - 1])


def ours(schedule, steps: int) -> list[float]:
    return [schedule(step) for step in range(1, steps + 1)]


def test_constant_is_torchs():
    assert ours(constant(LR), 9) == what_torch_uses(lambda o: ConstantLR(o, factor=1.0), 9)


@pytest.mark.parametrize("warmup", [2, 5, 12])
def test_linear_warmup_is_torchs(warmup):
    expected = what_torch_uses(lambda o: LinearLR(o, start_factor=1 / warmup, total_iters=warmup - 1), 20)
    assert ours(linear_warmup(LR, warmup), 20) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("warmup", "total"), [(2, 3), (4, 17)])
def test_warmup_and_line_are_torchs(warmup, total):
    def torchs(optimizer):
        fall = LinearLR(optimizer, start_factor=1.0, end_factor=FINAL / LR, total_iters=total - warmup)
        return warmed(optimizer, warmup, fall)

    expected = what_torch_uses(torchs, total + 3)
    assert ours(warmup_linear(LR, warmup, total, FINAL), total + 3) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("warmup", "total"), [(2, 3), (4, 17)])
def test_warmup_and_cosine_are_torchs(warmup, total):
    def torchs(optimizer):
        return warmed(optimizer, warmup, CosineAnnealingLR(optimizer, T_max=total - warmup, eta_min=FINAL))

    expected = what_torch_uses(torchs, total)  # torch's cosine rises again afterwards
    assert ours(warmup_cosine(LR, warmup, total, FINAL), total) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("decay", [warmup_linear, warmup_cosine])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_a_decay_peaks_after_the_warmup_ends_at_final_and_stays_there(decay, warmup):
    rates = ours(decay(LR, warmup, 12, FINAL), 15)
    assert max(rates) == rates[max(warmup, 1) - 1] <= LR
    assert rates[max(warmup, 1) - 1 :] == sorted(rates[max(warmup, 1) - 1 :], reverse=True)
    assert rates[11:] == [pytest.approx(FINAL)] * 4


def test_no_warmup_starts_at_the_full_rate():
    assert ours(linear_warmup(LR, 0), 3) == ours(linear_warmup(LR, 1), 3) == [LR] * 3


@pytest.mark.parametrize(
    "schedule", [constant(LR), linear_warmup(LR, 3), warmup_linear(LR, 3, 9), warmup_cosine(LR, 3, 9)]
)
def test_a_schedule_travels_to_another_process(schedule):
    assert ours(pickle.loads(pickle.dumps(schedule)), 12) == ours(schedule, 12)


@pytest.mark.parametrize(
    ("key", "make"),
    [
        ("lr", lambda: constant(-0.1)),
        ("lr", lambda: warmup_cosine(nan, 0, 9)),
        ("final", lambda: warmup_linear(LR, 0, 9, final=-1.0)),
        ("warmup", lambda: linear_warmup(LR, -1)),
        ("total", lambda: warmup_cosine(LR, 9, 9)),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_key(key, make):
    with pytest.raises(ConfigError, match=rf"schedule\.{key}="):
        make()
