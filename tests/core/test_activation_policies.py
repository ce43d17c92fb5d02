"""A policy of activations is one record: a record from outside of the package trains like those inside."""

from collections import Counter
from typing import get_args

import pytest
import torch
from torch import nn

import zero
from tests.common.small import Setting, slice_of, small_batch, train_small
from tests.simulation import simulated_gpu
from zero.core.activations import ACTIVATIONS, ActivationPolicy, Activations
from zero.engine.whole.read import digest
from zero.errors import ConfigError, PlanError
from zero.settings.step_sections import Zero
from zero.testing import run_ranks


@pytest.fixture
def kept(monkeypatch):
    """Put `biased` into the table, which keeps products with a bias only, and count its answers."""
    answers: Counter[bool] = Counter()

    def keeps(operator, args, kwargs):
        answers[operator is torch.ops.aten.addmm.default] += 1
        return operator is torch.ops.aten.addmm.default

    policy = ActivationPolicy("biased", recomputes=True, keeps=keeps, not_compiled="sees no products")
    monkeypatch.setitem(ACTIVATIONS, policy.name, policy)
    return answers


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 3)])
def test_a_policy_from_outside_gives_the_bits_of_kept_activations(kept, size, stage):
    setting = Setting(stage=stage, precision="bf16", clip=0.5, accumulate=2)
    expected, products = run_ranks(size, train_small, setting), []
    for policies in ("biased", {"blocks.1": "biased"}, {"blocks.0": "biased", "*": "remat"}):
        kept.clear()
        assert run_ranks(size, train_small, setting.but(activations=policies)) == expected, policies
        assert kept[False] > kept[True] > 0
        products.append(kept[True])
    assert products[0] > products[1] > products[2]


def test_a_policy_may_offload_the_inputs_of_what_it_recomputes(monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "inputs", ActivationPolicy("inputs", recomputes=True, offloads=True))

    def train(world, policies):
        state, step = Setting(activations=policies).start(world)
        activations = state.runtime.sites.activations
        activations._least_bytes = 0
        for number in range(2):
            state, _ = step(state, slice_of(small_batch(number, 6), world, 1))
        return digest(state), activations.allocated_bytes

    with simulated_gpu():
        keep, block, inputs, offload = (
            run_ranks(1, train, policies)[0] for policies in ("keep", {"blocks.1": "inputs"}, "inputs", "offload")
        )
    assert keep[0] == block[0] == inputs[0] == offload[0]
    assert 0 == keep[1] < block[1] < inputs[1] < offload[1]


def test_settings_and_a_plan_offer_the_policies_of_the_table(kept):
    assert (*get_args(Activations), "biased") == (*ACTIVATIONS,)
    assert all(name == policy.name for name, policy in ACTIVATIONS.items())
    assert Zero(activations="biased").activations_by_pattern == {"*": "biased"}
    assert Zero(activations=["blocks.0:biased"]).activations_by_pattern == {"blocks.0": "biased"}
    with pytest.raises(ConfigError, match=r"offload, biased, auto\. Did you mean biased\?"):
        Zero(activations="biase")
    with pytest.raises(ConfigError, match="with keep, selective, remat, offload or biased"):
        Zero(activations=["blocks.0:often"])
    plan = {"optimizer": zero.sgd(0.1), "world": zero.World.solo()}
    with pytest.raises(PlanError, match=r"zero\.activations=often: must be one of keep, .*, offload, biased"):
        zero.Plan(nn.Linear(2, 2), activations="often", **plan)
    with pytest.raises(PlanError, match=r"zero\.activations=biased sees no products\. Set zero\.compile=false\."):
        zero.Plan(nn.Linear(2, 2), activations="biased", compile=True, **plan)
