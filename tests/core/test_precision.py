"""Dtypes by name, and the loss scale as an automaton that a ten-line loop can check."""

from math import inf

import pytest
import torch
from hypothesis import given, settings, strategies as st

from zero.core.precision import LossScaling, Precision
from zero.errors import ConfigError

SCALINGS = st.builds(
    LossScaling,
    initial=st.sampled_from([1.0, 4.0, 2.0**10]),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    minimum=st.sampled_from([0.25, 1.0]),
    maximum=st.sampled_from([2.0**10, 2.0**12]),
)


def model(rule: LossScaling, steps: list[bool]) -> tuple[float, int]:
    """The rule read aloud, with variables that change: the last scale, and the steps skipped."""
    scale, good, chances = rule.initial, 0, rule.hysteresis
    for finite in steps:
        good = good + 1 if finite else 0
        if not finite and chances == 1:
            scale = max(rule.minimum, scale / 2)
        elif not finite:
            chances -= 1
        elif good % rule.window == 0:
            scale, chances = min(rule.maximum, scale * 2), rule.hysteresis
    return scale, steps.count(False)


def run(rule: LossScaling, steps: list[bool]):
    state = rule.start()
    for finite in steps:
        state = rule.advance(state, finite)
    return state


@settings(deadline=None)
@given(SCALINGS, st.lists(st.booleans(), max_size=40))
def test_the_automaton_is_its_model(rule, steps):
    last = run(rule, steps)
    assert (last.scale, last.skipped) == model(rule, steps)
    assert rule.minimum <= last.scale <= rule.maximum
    assert 0 <= last.good_steps < rule.window
    assert 1 <= last.hysteresis_left <= rule.hysteresis


@settings(deadline=None)
@given(SCALINGS, st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=20))
def test_the_state_is_all_there_is_to_save(rule, before, after):
    """Going on from a saved state is never having stopped."""
    state = type(rule.start())(*run(rule, before))
    for finite in after:
        state = rule.advance(state, finite)
    assert state == run(rule, before + after)


@settings(deadline=None)
@given(st.floats(2.0**-10, 2.0**30), st.lists(st.booleans(), max_size=20))
def test_a_static_scale_never_moves_and_counts_what_it_skipped(scale, steps):
    last = run(LossScaling(static=scale), steps)
    assert (last.scale, last.skipped) == (scale, steps.count(False))


def test_the_defaults_are_those_people_know():
    """2^16; two overflows before the first halving; a thousand good steps to double."""
    rule = Precision("fp16").scale
    assert [run(rule, [False] * n).scale for n in range(4)] == [2.0**16, 2.0**16, 2.0**15, 2.0**14]
    assert [run(rule, [True] * n).scale for n in (999, 1000, 8000, 9000)] == [2.0**16, 2.0**17, 2.0**24, 2.0**24]
    assert run(rule, [False] * 30).scale == 1.0


@pytest.mark.parametrize(
    ("name", "compute", "kind"),
    [("fp32", torch.float32, None), ("bf16", torch.bfloat16, "master_low"), ("fp16", torch.float16, "master")],
)
def test_the_master_has_pages_of_its_own_beside_a_half_type(name, compute, kind):
    precision = Precision(name)
    assert (precision.compute, precision.reduce, precision.master.kind) == (compute, torch.float32, kind)
    assert Precision(name, reduce="bf16").reduce == torch.bfloat16


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_only_fp16_scales_its_loss(name):
    assert run(Precision(name).scale, [True, False] * 9).scale == 1.0
    with pytest.raises(ConfigError, match="Remove it"):
        Precision(name, scale=LossScaling())


def test_precisions_are_equal_when_their_settings_are():
    assert Precision("fp16") == Precision("fp16", scale=LossScaling())
    assert Precision("bf16") != Precision("bf16", reduce="bf16")
    assert Precision("bf16", frozen="nf4", coded=["a"]) == Precision("bf16", frozen="nf4", coded=("a",))
    assert Precision("bf16", frozen="nf4") != Precision("bf16", frozen="int8")
    assert len({Precision("fp32"), Precision("fp32"), Precision("bf16")}) == 2


@pytest.mark.parametrize(
    ("words", "make"),
    [
        ("compute=torch.bfloat16: must be one of fp32, bf16, fp16", lambda: Precision("torch.bfloat16")),
        ("reduce=bf61: must be one of fp32, bf16, fp16", lambda: Precision("bf16", reduce="bf61")),
        ("frozen=fp4: must be one of compute, nf4, int8", lambda: Precision("bf16", frozen="fp4")),  # type: ignore[arg-type]
        ("coded='blocks' is one string. Pass a list", lambda: Precision("bf16", frozen="nf4", coded="blocks")),
        ("coded needs a format. Set precision.frozen=nf4", lambda: Precision("bf16", coded=["blocks.*"])),
        ("initial=0.5", lambda: LossScaling(initial=0.5)),
        ("maximum=inf", lambda: LossScaling(maximum=inf)),
        ("window=0", lambda: LossScaling(window=0)),
        ("hysteresis=0", lambda: LossScaling(hysteresis=0)),
        ("static=0", lambda: LossScaling(static=0.0)),
    ],
)
def test_a_wrong_setting_is_refused_with_what_was_seen(words, make):
    with pytest.raises(ConfigError, match=words):
        make()
