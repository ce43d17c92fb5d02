"""Moments in bf16: what stochastic rounding promises, against counting, and that no cut changes a bit of it."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

import zero
from zero.core.layout import Layout
from zero.core.moments import BLOCK, Bf16Moments, fill, stochastic_upper
from zero.errors import ConfigError


def noise(key: str, start: int, stop: int) -> torch.Tensor:
    found = torch.zeros(stop - start, dtype=torch.int16)
    fill(found, key, start)
    return found


def rounded(values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    return stochastic_upper(values.clone(), bits).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("key", ["0/1/mu/head.weight", "7/99/nu/blocks.3.weight"])
def test_a_block_of_random_bits_has_every_value_once(key):
    for block in (0, 3, 40):
        found = noise(key, block * BLOCK, (block + 1) * BLOCK)
        assert torch.equal(found.sort().values, torch.arange(-(2**15), 2**15).to(torch.int16))
        assert (found[1:].int() - found[:-1]).unique().numel() > BLOCK // 4, "in no order"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=6), st.integers(0, 50 * BLOCK))
def test_random_bits_belong_to_their_element_however_a_parameter_is_cut(sizes, start):
    whole, at = noise("a/key", start, start + sum(sizes)), start
    for size in sizes:
        assert torch.equal(noise("a/key", at, at + size), whole[at - start : at - start + size])
        at += size


def test_seed_step_moment_parameter_and_block_have_bits_of_their_own():
    keys = [f"{seed}/{step}/{kind}/{name}" for seed in (0, 1) for step in (1, 2) for kind in "mn" for name in "pq"]
    found = [noise(key, block * BLOCK, block * BLOCK + 64) for key in keys for block in range(40)]
    same = sum(torch.equal(one, other) for i, one in enumerate(found) for other in found[:i])
    assert same <= 2 * len(found) ** 2 / 2 / BLOCK + 8, "as many as 16 bits agree by chance"


@pytest.mark.parametrize("value", [1.0 + 2.0**-9, -3.14159265, 1e-30, 2.0**-130, -1e38, 0.7 * 2.0**-7])
def test_the_mean_of_a_block_is_the_value(value):
    """Each of 2^16 equally likely bits once: as many go up, in magnitude, as the lower half says."""
    values = torch.full((BLOCK,), value)
    low = int(values[0].view(torch.int32)) & 0xFFFF
    found = rounded(values, noise("k", 0, BLOCK)).float()
    down = (values[:1].view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert int((found != down).sum()) == low
    assert found.double().mean().item() == pytest.approx(value, rel=2.0**-24)


def test_what_bf16_can_hold_is_never_changed():
    """So what does not train keeps its moments, and a page that is written twice is the same."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.isfinite()]
    for key in ("a", "b", "c"):
        found = rounded(values, noise(key, 0, values.numel()))
        assert torch.equal(found.view(torch.int16), values.bfloat16().view(torch.int16))


def test_infinity_and_nan_stay():
    made = [0x7FFFFFFF, 0x7FC00000, -0x400000, 0x7FFF0000, -0x10000]  # of a GPU, of CPUs, and read from bf16
    nan = torch.tensor(made, dtype=torch.int32).view(torch.float32).repeat(BLOCK)
    assert rounded(nan, noise("k", 0, nan.numel())).isnan().all()
    for sign in (1, -1):
        infinity = torch.full((BLOCK,), sign * math.inf)
        assert torch.equal(rounded(infinity, noise("k", 0, BLOCK)).float(), infinity)


def test_a_mean_that_moves_by_less_than_half_a_bit_moves_all_the_same():
    """beta2 = 0.999 towards 2, from 1: rounded to the nearest it would stay at 1 for ever."""
    kept, form = torch.ones(4096, dtype=torch.bfloat16), Bf16Moments(seed=5)
    [slot] = Layout.of({"p": (4096,)}, world_size=1).slots
    for step in range(1, 501):
        with form.opened([kept], [[(slot, 0, 4096, 0)]], f"{step}/nu") as [moment]:
            moment.mul_(0.999).add_(2 * 0.001)
    assert kept.float().mean().item() == pytest.approx(2 - 0.999**500, abs=0.005)


def test_other_dtypes_are_refused_and_a_mean_of_parameters_stays_in_fp32():
    with pytest.raises(ConfigError, match=r"optim\.moments=fp16: it is fp32 or bf16"):
        zero.with_moments(zero.adamw(1e-3), "fp16")
    for made in (
        zero.with_ema(zero.with_moments(zero.adamw(1e-3))),
        zero.with_moments(zero.with_ema(zero.adamw(1e-3))),
    ):
        dtypes = {kind: made.form(kind).dtype for kind in made.moments}
        assert dtypes == {"mu": torch.bfloat16, "nu": torch.bfloat16, "ema": torch.float32}
