"""Moments in bf16 and 8 bits: what stochastic rounding promises, against counting; no cut changes a bit of it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings, strategies as st

import zero
from zero.core.layout import Layout, SlotPiece, key_of
from zero.core.moments import ROUNDING_BLOCK, ROW_NUMEL, Bf16Moments, EightBitMoments, Moments, add_random
from zero.errors import ConfigError

FORMS = (Bf16Moments(5), EightBitMoments(5), EightBitMoments(5).of_squares())


def noise(key: str, start: int, stop: int) -> torch.Tensor:
    bits = torch.zeros(stop - start, dtype=torch.int32)
    add_random(bits, key_of(key), start)
    return bits


def rounded(values: torch.Tensor, key: str) -> torch.Tensor:
    page = torch.zeros(values.numel(), dtype=torch.bfloat16)
    with opened(Bf16Moments(), page, key) as moment:
        moment.copy_(values)
    return page


@pytest.mark.parametrize("key", ["0/1/mu/head.weight", "7/99/nu/blocks.3.weight"])
def test_a_block_of_random_bits_has_every_value_once(key):
    for block in (0, 3, 40):
        bits = noise(key, block * ROUNDING_BLOCK, (block + 1) * ROUNDING_BLOCK)
        assert torch.equal(bits.sort().values, torch.arange(2**16).int())
        assert (bits[1:] - bits[:-1]).unique().numel() > ROUNDING_BLOCK // 4, "in no order"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 3 * ROUNDING_BLOCK), min_size=1, max_size=6), st.integers(0, 50 * ROUNDING_BLOCK))
def test_random_bits_belong_to_their_element_however_a_parameter_is_cut(sizes, start):
    whole, at = noise("a/key", start, start + sum(sizes)), start
    for size in sizes:
        assert torch.equal(noise("a/key", at, at + size), whole[at - start : at - start + size])
        at += size


def test_seed_step_moment_parameter_and_block_have_bits_of_their_own():
    keys = [f"{seed}/{step}/{kind}/{name}" for seed in (0, 1) for step in (1, 2) for kind in "mn" for name in "pq"]
    samples = [noise(key, block * ROUNDING_BLOCK, block * ROUNDING_BLOCK + 64) for key in keys for block in range(40)]
    same = sum(torch.equal(sample, other) for i, sample in enumerate(samples) for other in samples[:i])
    assert same <= 2 * len(samples) ** 2 / 2 / ROUNDING_BLOCK + 8, "as many as 16 bits agree by chance"


@pytest.mark.parametrize("value", [1.0 + 2.0**-9, -3.14159265, 1e-30, 2.0**-130, -1e38, 0.7 * 2.0**-7])
def test_the_mean_of_a_block_is_the_value(value):
    """Each of 2^16 equally likely bits once: as many go up, in magnitude, as the lower half says."""
    values = torch.full((ROUNDING_BLOCK,), value)
    low = int(values[0].view(torch.int32)) & 0xFFFF
    rounded_values = rounded(values, "k").float()
    down = (values[:1].view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert int((rounded_values != down).sum()) == low
    assert rounded_values.double().mean().item() == pytest.approx(value, rel=2.0**-24)


def test_what_bf16_can_hold_is_never_changed():
    """So what does not train keeps its moments, and a page that is written twice is the same."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.isfinite()]
    for key in ("a", "b", "c"):
        rounded_values = rounded(values, key)
        assert torch.equal(rounded_values.view(torch.int16), values.bfloat16().view(torch.int16))


def test_infinity_and_nan_stay():
    made = [0x7FFFFFFF, 0x7FC00000, -0x400000, 0x7FFF0000, -0x10000]  # of a GPU, of CPUs, and read from bf16
    nan = torch.tensor(made, dtype=torch.int32).view(torch.float32).repeat(ROUNDING_BLOCK)
    assert rounded(nan, "k").isnan().all()
    for sign in (1, -1):
        infinity = torch.full((ROUNDING_BLOCK,), sign * math.inf)
        assert torch.equal(rounded(infinity, "k").float(), infinity)


@pytest.mark.parametrize("form", FORMS)
def test_a_mean_that_moves_by_less_than_half_a_bit_moves_all_the_same(form):
    """beta2 = 0.999 towards 2, from 1: rounded to the nearest it would stay at 1 for ever."""
    kept = form.page_of(torch.ones(4096))
    for step in range(1, 501):
        with opened(form, kept, f"{step}/nu") as moment:
            moment.mul_(0.999).add_(2 * 0.001)
    assert form.values_of(kept).float().mean().item() == pytest.approx(2 - 0.999**500, abs=0.01)


@pytest.mark.parametrize(
    ("form", "beta2", "alike"),
    [(form, beta2, (i + j) % 2 == 0) for i, form in enumerate(FORMS) for j, beta2 in enumerate((0.95, 0.999, 1.0))],
)
def test_a_mean_follows_across_powers_of_two(form, beta2, alike):
    """From nothing, where all of a block are of one size: whatever is largest there has to be able to grow.

    1.0: the sum of squares that Adagrad keeps.
    """
    made = torch.Generator().manual_seed(11)
    kept, exact = form.page_of(torch.zeros(4096)), torch.zeros(4096, dtype=torch.float64)
    for step in range(1, 601):
        squares = torch.ones(4096) if alike else torch.randn(4096, generator=made).square()
        share = 1 - beta2 or 1.0
        with opened(form, kept, f"{step}/nu") as moment:
            moment.mul_(beta2).add_(squares, alpha=share)
        exact.mul_(beta2).add_(squares.double(), alpha=share)
    ratio = form.values_of(kept).double() / exact
    assert ratio.mean().item() == pytest.approx(1, abs=0.02)
    assert ratio.std().item() < 0.3


# Eight bits

MEANS, SQUARES = EightBitMoments(3), EightBitMoments(3).of_squares()


@contextmanager
def opened(form: Moments, page: torch.Tensor, key: str) -> Iterator[torch.Tensor]:
    """One page of a parameter, from its first element on."""
    numel = form.values_of(page).numel()
    [slot] = Layout.of({"p": (numel,)}, world_size=1).slots
    with form.opened([page], [[SlotPiece(slot, 0, numel, 0)]], key) as [moment]:
        yield moment


def read(page: torch.Tensor, signed: bool) -> list[float]:
    """Decode a page in Python's numbers: rows of 64 codes for each of 16 blocks or fewer, and then their exponents."""
    values = []
    for row in page.split(16 * 65):
        count = row.numel() // 65
        for place, code in enumerate(row[: 64 * count].tolist()):
            lowest = int(row[64 * count + place // 64])
            sign, size = (-1.0 if code >= 128 else 1.0, code % 128) if signed else (1.0, code)
            exponent, digits = lowest + size // 8, size % 8
            value = math.ldexp(1 + digits / 8, exponent - 127) if exponent else math.ldexp(digits / 8, -126)
            values.append(sign * value if size or not signed else 0.0)
    return values


@pytest.mark.parametrize("form", [MEANS, SQUARES])
@pytest.mark.parametrize("lowest", [0, 1, 100, 223])
def test_every_code_is_the_number_that_its_bits_say(form, lowest):
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    page = torch.cat([codes.view(-1), torch.full((4,), lowest, dtype=torch.uint8)])
    assert form.values_of(page).tolist() == read(page, form.signed)


def blocks(seed: int, spread: float) -> torch.Tensor:
    """(64 x 64,) numbers of both signs, with zeros, of blocks of very different sizes."""
    made = torch.Generator().manual_seed(seed)
    values = torch.randn(64, 64, generator=made) * torch.exp(spread * torch.randn(64, 64, generator=made))
    values *= torch.exp2(torch.randint(-60, 40, (64, 1), generator=made).float())
    return torch.where(torch.rand(64, 64, generator=made) < 0.05, 0.0, values).view(-1)


@pytest.mark.parametrize("form", [MEANS, SQUARES])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_is_near_and_small_numbers_end_where_it_says(form, seed):
    values = blocks(seed, 2.0) if form.signed else blocks(seed, 2.0).abs()
    page = form.page_of(values.clone())
    assert page.dtype == torch.uint8
    assert page.numel() == form.numel(values.numel()) == 65 * 64
    decoded = torch.tensor(read(page, form.signed), dtype=torch.float64)
    largest = values.double().abs().view(64, 64).amax(1, keepdim=True).expand(64, 64).reshape(-1)
    smallest = largest * 2.0 ** (-14 if form.signed else -30)
    held = values.abs().double() > smallest
    assert held.sum() > 3000
    error = (decoded - values).abs() / values.abs()
    assert error[held].max() <= 1 / 16
    assert (decoded[~held].abs() <= 17 / 16 * smallest[~held]).all()
    assert (decoded[values == 0] == 0).all() if form.signed else (decoded[largest > 0] > 0).all()


@pytest.mark.parametrize("form", [MEANS, SQUARES])
def test_what_8_bits_can_hold_is_never_changed(form):
    """So what does not train keeps its moments, and a checkpoint in fp32 gives back the page that it was saved from."""
    page = form.page_of(blocks(7, 3.0) if form.signed else blocks(7, 3.0).abs())
    before = page.clone()
    for key in ("a", "b", "c"):
        with opened(form, page, key):
            pass
        assert torch.equal(page, before)
    assert torch.equal(form.page_of(form.values_of(page)), before)


@pytest.mark.parametrize("form", [MEANS, SQUARES])
def test_zeros_are_zeros(form):
    page = torch.zeros(form.numel(256), dtype=torch.uint8)
    assert not form.values_of(page).any()
    with opened(form, page, "k"):
        pass
    assert not page.any()


@pytest.mark.parametrize("value", [0.7, 3.14159265e-9, 0.26])
@pytest.mark.parametrize("form", [MEANS, SQUARES])
def test_the_mean_of_many_is_the_value_beside_a_large_one(form, value):
    """Each of 2^16 equally likely bits once, in blocks whose first element is 1 or 2^-27."""
    values = torch.full((ROUNDING_BLOCK,), value)
    values[::64] = 1.0 if value > 1e-3 else 2.0**-27
    page = form.page_of(torch.zeros(ROUNDING_BLOCK))
    with opened(form, page, "k") as moment:
        moment.copy_(values)
    decoded = form.values_of(page).double().view(-1, 64)
    assert decoded[:, 1:].mean().item() == pytest.approx(value, rel=1e-3)
    assert (decoded[:, 0] == values[0].item()).all()


@pytest.mark.parametrize("form", [MEANS, SQUARES])
def test_infinity_and_nan_stay_in_8_bits(form):
    for value in (math.inf, math.nan, -math.inf if form.signed else math.inf):
        values = torch.full((128,), value)
        page = form.page_of(torch.zeros(128))
        with opened(form, page, "k") as moment:
            moment.copy_(values)
        assert torch.equal(form.values_of(page), values) or form.values_of(page).isnan().all() == math.isnan(value)
    held = torch.full((64,), math.ldexp(1.875, 127))
    assert torch.equal(form.values_of(form.page_of(held.clone())), held)
    beyond = torch.full((64,), torch.finfo(torch.float32).max)  # nearer to 2^128, as in every rounding to the nearest
    assert form.values_of(form.page_of(beyond)).isinf().all()


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.sampled_from([MEANS, SQUARES]), st.integers(0, 99))
def test_no_cut_between_vectors_changes_a_bit_of_8_bits(sizes, form, seed):
    numel = 64 * sum(sizes)
    [slot] = Layout.of({"p": (numel,)}, world_size=1).slots
    values = blocks(seed, 1.0).repeat(-(-numel // 4096))[:numel]
    values = values if form.signed else values.abs()
    whole = form.page_of(torch.zeros(numel))
    with opened(form, whole, "k") as moment:
        moment.copy_(values)
    pages, places, at = [], [], 0
    for size in sizes:
        pages.append(form.page_of(torch.zeros(64 * size)))
        places.append([SlotPiece(slot, at, at + 64 * size, 0)])
        at += 64 * size
    with form.opened(pages, places, "k") as moments:
        torch._foreach_copy_(list(moments), list(values.split([64 * size for size in sizes])))
    actual, expected = torch.cat([form.values_of(page) for page in pages]), form.values_of(whole)
    assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))
    joined = torch.cat([form.page_of(part) for part in expected.split(ROW_NUMEL)])
    assert torch.equal(joined, whole), "pages can be joined"


def test_other_dtypes_are_refused_and_a_mean_of_parameters_stays_in_fp32():
    with pytest.raises(ConfigError, match=r"optim\.moments=fp16: must be one of fp32, bf16, 8bit"):
        zero.with_moments(zero.adamw(1e-3), "fp16")
    for made in (
        zero.with_ema(zero.with_moments(zero.adamw(1e-3))),
        zero.with_moments(zero.with_ema(zero.adamw(1e-3))),
    ):
        dtypes = {kind: made.form(kind).dtype for kind in made.moments}
        assert dtypes == {"mu": torch.bfloat16, "nu": torch.bfloat16, "ema": torch.float32}
