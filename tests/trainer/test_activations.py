"""What becomes of activations, unit by unit: the same bits, fewer bytes, and with auto as few made again as fit."""

from itertools import pairwise

import pytest
import torch

from tests.common.small import KiB, Setting, slice_of, small_batch, train_small
from tests.trainer.test_planning import config, gpu, model_of
from zero.engine.full import digest
from zero.engine.unit import split
from zero.errors import ConfigError, PlanError
from zero.settings.build import build_plan
from zero.testing import run_ranks, simulated_gpu
from zero.trainer.models import loss
from zero.trainer.planning.activations import Activations
from zero.trainer.planning.choices import fits, with_activations
from zero.trainer.planning.resolve_auto import _with_activations
from zero.trainer.planning.tracing import META, trace

MIXED = {"blocks.0": "remat", "blocks.1": "offload", "blocks.*": "keep"}
DEEP = {"width": 128, "layers": 8, "heads": 4, "seq": 128}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("size", [1, 2])
def test_what_is_kept_made_again_or_sent_to_the_host_changes_no_bit(size, stage):
    setting = Setting(stage=stage, precision="bf16", clip=0.5, accumulate=2)
    expected = run_ranks(size, train_small, setting.but(activations="keep"))
    for policies in (MIXED, {"*": "remat"}, {"blocks.*": "offload"}):
        assert run_ranks(size, train_small, setting.but(activations=policies)) == expected, policies


def test_a_simulated_gpu_sends_those_of_the_units_that_are_named():
    def run(world, policies):
        setting = Setting(activations=policies, page_bytes=4 * KiB)
        state, step = setting.start(world)
        state.runtime.gatherer.activations._least_bytes = 0
        for number in range(2):
            state, _ = step(state, slice_of(small_batch(number, 6), world, 1))
        return digest(state), state.runtime.gatherer.activations.allocated_bytes

    with simulated_gpu():
        kept, some, every = (
            run_ranks(1, run, policies)[0]
            for policies in ({"blocks.0": "keep"}, {"blocks.0": "offload"}, {"*": "offload"})
        )
    assert kept[0] == some[0] == every[0]
    assert 0 == kept[1] < some[1] < every[1]


@pytest.mark.parametrize(
    ("policies", "why"),
    [
        ("often", "zero.activations=often: it is one of"),
        ({"layers.*": "remat"}, r"no unit is named layers\.\*; there are"),
    ],
)
def test_unknown_words_and_units_are_refused(policies, why):
    with pytest.raises(PlanError, match=why):
        run_ranks(1, lambda world: Setting(activations=policies).plan(world) and None)


@pytest.mark.parametrize("value", ["often", ["blocks.0"], ["blocks.0:often"], []])
def test_settings_that_say_nothing_are_refused(value):
    with pytest.raises(ConfigError, match=r"zero\.activations"):
        config(zero_={"activations": value})


def test_settings_name_units_by_patterns():
    settings = config(zero_={"activations": ["blocks.0:remat", "blocks.*:keep"]})
    assert settings.zero.activations_by_pattern == {"blocks.0": "remat", "blocks.*": "keep"}
    assert config(zero_={"activations": "remat"}).zero.activations_by_pattern == {"*": "remat"}


def test_each_further_unit_that_is_made_again_takes_bytes_away():
    settings = config(model=DEEP)
    model, batch = model_of(settings), torch.empty(8, 129, dtype=torch.int64, device=META)
    splitting = split(model, world_size=1)
    count = len(splitting.units)
    traces = [
        trace(model, splitting, loss, batch, compute=torch.bfloat16, remat=set(range(number)))
        for number in range(count + 1)
    ]
    plain, again = (trace(model, splitting, loss, batch, compute=torch.bfloat16, remat=one) for one in (False, True))
    assert (traces[0], traces[-1]) == (plain, again)
    for before, after in pairwise(traces):
        assert after.peak_bytes <= before.peak_bytes
        assert after.backward_flops >= before.backward_flops
    assert again.peak_bytes < 0.5 * plain.peak_bytes


def test_auto_makes_again_as_few_as_fit_for_every_budget():
    settings = config(
        model=DEEP,
        precision={"compute": "bf16"},
        batch={"global": 64, "micro": 64},
        zero_={"activations": "auto", "stage": 0},
    )
    model, told = model_of(settings), []
    roomy = gpu(1)
    need = {word: _device_bytes(with_activations(settings, word), model, roomy) for word in ("keep", "remat")}
    budgets = [need["remat"] + (need["keep"] - need["remat"]) * share // 8 for share in range(9)]
    for budget in budgets:
        machine = gpu(1, device=budget)
        chosen, reasons = _with_activations(settings, machine, model, lambda *_: None)
        names = Activations(chosen, model).unit_names
        policy = chosen.zero.activations
        count = {"keep": 0, "remat": len(names)}.get(policy if isinstance(policy, str) else "", len(policy))
        told.append(count)
        assert fits(chosen, machine, model)
        assert f"auto: zero.activations: {count} of {len(names)} units" in reasons[-1]
        if count:
            fewer = [f"{name}:remat" for name in names[: count - 1]] or "keep"
            assert not fits(with_activations(settings, fewer), machine, model), "one fewer would not have fitted"
    print(told)
    assert told == sorted(told, reverse=True)
    assert (told[0] > len(names) // 2, told[-1]) == (True, 0)
    assert len(set(told)) >= 5
    with pytest.raises(ConfigError, match="activations"):
        _with_activations(settings, gpu(1, device=need["remat"] // 2), model, lambda *_: None)


def _device_bytes(settings, model, machine) -> int:
    """What a plan takes of a GPU."""
    rows = settings.batch.solved(machine.ranks).numbers()[1]
    nbytes = Activations(settings, model).bytes(rows, machine.device)
    plan = build_plan(settings, model, machine.world, room=machine.room, activation_bytes=nbytes)
    return plan.placement.bytes["device"]
