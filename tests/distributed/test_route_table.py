"""The table of routes: settings offer its names, and a route from outside of the package trains a model."""

from collections import Counter
from dataclasses import replace
from typing import get_args, get_type_hints

import pytest
from torch import nn

import zero
from tests.common.small import Setting, train_small
from zero.distributed.routes import GATHERS, SUMS
from zero.errors import PlanError
from zero.settings.step_sections import Zero
from zero.testing import run_ranks


def test_settings_offer_the_names_of_the_table():
    hints = get_type_hints(Zero)
    assert get_args(hints["reduce"]) == ("auto", *SUMS)
    assert get_args(hints["gather"]) == ("auto", *GATHERS)


@pytest.mark.parametrize(("stage", "accumulate"), [(0, 1), (1, 2), (3, 2)])
def test_a_route_from_outside_that_adds_as_exact_does_gives_its_bits(monkeypatch, stage, accumulate):
    counts: Counter[int] = Counter()

    def open_counted(world, queue, travels):
        start_exact = SUMS["exact"].open(world, queue, travels)

        def start(total):
            counts[world.rank] += 1
            return start_exact(total)

        return start

    setting = Setting(stage=stage, accumulate=accumulate, clip=0.5)
    expected = run_ranks(2, train_small, setting.but(between=("world", "exact")))
    monkeypatch.setitem(SUMS, "counted", replace(SUMS["exact"], open=open_counted))
    assert run_ranks(2, train_small, setting.but(between=("world", "counted"))) == expected
    assert counts[0] == counts[1] > 0


def test_a_plan_offers_the_routes_of_the_table(monkeypatch):
    monkeypatch.setitem(SUMS, "counted", SUMS["exact"])
    with pytest.raises(PlanError, match=r"zero\.reduce=fast: must be one of auto, exact, native, node, counted"):
        zero.Plan(nn.Linear(2, 2), optimizer=zero.sgd(0.1), world=zero.World.solo(), reduce="fast")
