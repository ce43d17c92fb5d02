"""A schedule is a function of the step; torch's stateful schedulers are the oracle."""

import pickle
from math import cos, floor, log, nan, pi

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from zero.errors import ConfigError
from zero.schedule import (
    Cycle,
    constant,
    cycled_momentum,
    linear_warmup,
    lr_range,
    one_cycle,
    warmup_cosine,
    warmup_linear,
)

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


# DeepSpeed's schedules as they are documented, of t: 0 for the first batch. The right side of each is how ours says it.

LOW, WARM, TOTAL = 0.05, 6, 17


def deepspeed_warmup(t: int, kind: str) -> float:
    """Its share of the way from the least to the largest rate."""
    return 1.0 if t >= WARM else log(t + 1) / log(WARM) if kind == "log" else t / WARM


def deepspeed_decay(t: int, kind: str) -> float:
    share = deepspeed_warmup(t, kind) if t < WARM else max(0.0, (TOTAL - t) / (TOTAL - WARM))
    return LOW + (LR - LOW) * share


def deepspeed_cosine(t: int) -> float:
    if t < WARM:
        return LR * (LOW + (1 - LOW) * deepspeed_warmup(t, "log"))
    return LR * (0.1 + 0.9 * (1 + cos(pi * min(1.0, (t - WARM + 1) / (TOTAL - WARM)))) / 2)


@pytest.mark.parametrize(
    ("schedule", "documented"),
    [
        (linear_warmup(LR, WARM, start=LOW, curve="log"), lambda t: LOW + (LR - LOW) * deepspeed_warmup(t, "log")),
        (linear_warmup(LR, WARM + 1, start=LOW), lambda t: LOW + (LR - LOW) * deepspeed_warmup(t, "linear")),
        (
            warmup_linear(LR, WARM, TOTAL + 1, LOW, hold=1, start=LOW, curve="log"),
            lambda t: deepspeed_decay(t, "log"),
        ),
        (warmup_linear(LR, WARM + 1, TOTAL + 1, LOW, start=LOW), lambda t: deepspeed_decay(t, "linear")),
        (warmup_cosine(LR, WARM, TOTAL, 0.1 * LR, start=LOW * LR, curve="log"), deepspeed_cosine),
        (lr_range(LR, 4, rate=0.5), lambda t: LR * (1 + 0.5 * t / 4)),
        (lr_range(LR, 4, rate=0.5, stairs=True), lambda t: LR * (1 + 0.5 * floor(t / 4))),
    ],
    ids=["WarmupLR log", "linear", "WarmupDecayLR log", "linear", "WarmupCosineLR", "LRRangeTest", "staircase"],
)
def test_a_schedule_of_deepspeed_is_one_of_ours(schedule, documented):
    assert ours(schedule, TOTAL + 8) == pytest.approx([documented(t) for t in range(TOTAL + 8)], rel=1e-12)


@pytest.mark.parametrize("stairs", [(0, 0), (2, 3)])
@pytest.mark.parametrize("decay_every", [0, 3])
def test_a_cycle_is_deepspeeds_one_cycle(stairs, decay_every):
    """Lines between the ends and the peak; each is cut into stairs from its lower end."""
    rise, fall = 6, 9

    def share(t):
        if t > rise + fall:
            return 0.0
        done, count = (t / rise, stairs[0]) if t <= rise else ((rise + fall - t) / fall, stairs[1])
        return floor(done * count + 1e-9) / count if count else done

    def intervals(t):
        return max(0, t - rise - fall) / decay_every if decay_every else 0.0

    cycle = Cycle(rise, fall, stairs, decay_every)
    steps = range(rise + fall + 9)
    rates = [(LOW + (LR - LOW) * share(t)) / (1 + 0.5 * intervals(t)) for t in steps]
    momenta = [(0.9 - (0.9 - 0.8) * share(t)) * (1 + 0.01 * intervals(t)) for t in steps]
    assert ours(one_cycle(LR, LOW, cycle, decay_rate=0.5), len(steps)) == pytest.approx(rates, rel=1e-12)
    assert ours(cycled_momentum(0.8, 0.9, cycle, decay_rate=0.01), len(steps)) == pytest.approx(momenta, rel=1e-12)
    assert rates[rise] == LR
    assert momenta[rise] == 0.8


def test_a_cycle_is_torchs_triangle():
    def torchs(optimizer):
        return torch.optim.lr_scheduler.CyclicLR(optimizer, LOW, LR, 5, 7, cycle_momentum=False)

    assert ours(one_cycle(LR, LOW, Cycle(5, 7)), 13) == pytest.approx(what_torch_uses(torchs, 13), rel=1e-12)


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
    "schedule",
    [
        constant(LR),
        linear_warmup(LR, 3),
        warmup_linear(LR, 3, 9),
        warmup_cosine(LR, 3, 9, hold=2, start=0.1, curve="log"),
        one_cycle(LR, 0.1, Cycle(3, 4)),
        cycled_momentum(0.8, 0.9, Cycle(3, 4)),
        lr_range(LR, 3),
    ],
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
        ("total", lambda: warmup_cosine(LR, 4, 9, hold=5)),
        ("start", lambda: linear_warmup(LR, 4, start=-1.0)),
        ("curve", lambda: linear_warmup(LR, 4, curve="square")),
        ("hold", lambda: warmup_linear(LR, 4, 9, hold=-2)),
        ("every", lambda: lr_range(LR, 0)),
        ("rise", lambda: one_cycle(LR, 0.1, Cycle(0, 4))),
        ("fall_stairs", lambda: one_cycle(LR, 0.1, Cycle(3, 4, (0, -1)))),
        (
            "momentum_decay_rate",
            lambda: cycled_momentum(0.8, 0.9, Cycle(3, 4, decay_every=1), decay_rate=0.05, steps=11),
        ),
        ("momentum_max", lambda: cycled_momentum(0.8, nan, Cycle(3, 4))),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_key(key, make):
    with pytest.raises(ConfigError, match=rf"schedule\.{key}="):
        make()
