"""Policies of activations, unit by unit: the same bits, fewer bytes, and with auto as few recomputed as fit."""

import re
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

import train
import zero
from tests.common.small import KiB, Setting, slice_of, small_batch, train_small
from tests.simulation import simulated_gpu
from tests.trainer.test_planning import ROUND, config, gpu, model_of
from zero.core.activations import ACTIVATIONS, ActivationPolicy
from zero.core.placement import NO_LIMIT
from zero.engine.model.split import split
from zero.engine.plan.traffic import traffic
from zero.engine.whole.read import digest
from zero.errors import ConfigError, PlanError
from zero.settings.build import build_plan
from zero.testing import run_ranks
from zero.trainer.models import GPT, loss
from zero.trainer.planning import plan_text
from zero.trainer.planning.choices import planned, with_activations
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.resolve_activations import CPU_LIBRARIES_BYTES
from zero.trainer.planning.resolve_auto import _choose_activations
from zero.trainer.planning.traces.activations import ActivationTraces
from zero.trainer.planning.traces.tracing import META_DEVICE, trace

MIXED = {"blocks.0": "remat", "blocks.1": "offload", "blocks.2": "selective", "blocks.*": "keep"}
DEEP = {"width": 128, "layers": 8, "heads": 4, "seq": 128}


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 1), (1, 2), (2, 3)])
def test_what_is_kept_made_again_or_sent_to_the_host_changes_no_bit(size, stage):
    setting = Setting(stage=stage, precision="bf16", clip=0.5, accumulate=2)
    expected = run_ranks(size, train_small, setting.but(activations="keep"))
    for policies in (MIXED, {"*": "remat"}, {"*": "selective"}, {"blocks.*": "offload"}):
        assert run_ranks(size, train_small, setting.but(activations=policies)) == expected, policies


def test_a_simulated_gpu_sends_those_of_the_units_that_are_named():
    def run(world, policies):
        setting = Setting(activations=policies, page_bytes=4 * KiB)
        state, step = setting.start(world)
        state.runtime.sites.activations._least_bytes = 0
        for number in range(2):
            state, _ = step(state, slice_of(small_batch(number, 6), world, 1))
        return digest(state), state.runtime.sites.activations.allocated_bytes

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
        ("often", "zero.activations=often: must be one of"),
        ({"layers.*": "remat"}, r"no unit is named layers\.\*\. There are"),
    ],
)
def test_unknown_words_and_units_are_refused(policies, why):
    with pytest.raises(PlanError, match=why):
        run_ranks(1, lambda world: Setting(activations=policies).plan(world) and None)


def test_compiled_code_has_no_products_to_keep():
    with pytest.raises(PlanError, match=r"zero\.activations=selective.*zero\.compile=false"):
        zero.Plan(
            torch.nn.Linear(2, 2),
            optimizer=zero.sgd(0.1),
            world=zero.open_world(),
            activations="selective",
            compile="eager",
        )


@pytest.mark.parametrize("value", ["often", ["blocks.0"], ["blocks.0:often"], []])
def test_settings_that_say_nothing_are_refused(value):
    with pytest.raises(ConfigError, match=r"zero\.activations"):
        config(zero_={"activations": value})


def test_a_pattern_is_written_once():
    with pytest.raises(ConfigError, match=r"zero\.activations.*has blocks\.0 twice"):
        config(zero_={"activations": ["blocks.0:remat", "blocks.*:keep", "blocks.0:keep"]})


def test_settings_name_units_by_patterns():
    settings = config(zero_={"activations": ["blocks.0:remat", "blocks.*:keep"]})
    assert settings.zero.activations_by_pattern == {"blocks.0": "remat", "blocks.*": "keep"}
    assert config(zero_={"activations": "remat"}).zero.activations_by_pattern == {"*": "remat"}


def test_each_further_unit_that_is_made_again_takes_bytes_away():
    settings = config(model=DEEP)
    model, batch = model_of(settings), torch.empty(8, 129, dtype=torch.int64, device=META_DEVICE)
    splitting = split(model, world_size=1)
    names = [site.name for site in splitting.sites]
    traces = [
        trace(model, splitting, loss, batch, compute=torch.bfloat16, policies=dict.fromkeys(names, "keep") | again)
        for again in (dict.fromkeys(names[:number], "remat") for number in range(len(names) + 1))
    ]
    plain, selective, again = (
        trace(model, splitting, loss, batch, compute=torch.bfloat16, policies=word)
        for word in ("keep", "selective", "remat")
    )
    assert (traces[0], traces[-1]) == (plain, again)
    for before, after in pairwise(traces):
        assert after.peak_bytes <= before.peak_bytes
        assert after.backward.flops >= before.backward.flops
    assert again.peak_bytes < 0.5 * plain.peak_bytes
    assert selective.backward.flops == plain.backward.flops < again.backward.flops, "no product is computed again"
    assert again.peak_bytes < selective.peak_bytes < 0.8 * plain.peak_bytes


def test_a_policy_from_outside_is_traced_by_its_record(monkeypatch):
    monkeypatch.setitem(ACTIVATIONS, "again", ActivationPolicy("again", recomputes=True))
    monkeypatch.setitem(ACTIVATIONS, "away", ActivationPolicy("away", recomputes=True, offloads=True))
    settings = config(model=DEEP)
    counted = ActivationTraces(settings, model_of(settings))
    again, away, remat = (
        counted.resolved(with_activations(settings, name)).of(16, "cuda") for name in ("again", "away", "remat")
    )
    assert again == remat
    assert away.peak_bytes + away.host_bytes > remat.peak_bytes > away.peak_bytes
    assert away.backward.flops == remat.backward.flops


def test_what_goes_to_the_host_is_counted_as_a_simulated_gpu_allocates_it():
    settings = config(
        model=DEEP,
        batch={"global": 16, "micro": 16},
        zero_={"activations": ["blocks.[0-3]:offload", "blocks.4:remat"], "stage": 0},
    )
    model = model_of(settings)
    counted = ActivationTraces(settings, model).of(16, "cuda")
    kept = ActivationTraces(with_activations(settings, "keep"), model).of(16, "cuda")
    assert counted.peak_bytes < 0.75 * kept.peak_bytes
    assert kept.host_bytes == 0 == ActivationTraces(settings, model).of(16, "cpu").host_bytes

    def run(world):
        torch.manual_seed(0)
        plan = build_plan(settings, GPT(settings.model), world)
        state = zero.init(plan, zero.open_store(plan), seed=0)
        step, tokens = zero.make_step(plan, loss), torch.randint(0, settings.model.vocab, (16, 129))
        for _ in range(2):
            before = world.compute.copied.nbytes
            state, _ = step(state, [tokens])
        return state.runtime.sites.activations.allocated_bytes, world.compute.copied.nbytes - before

    with simulated_gpu():
        assert run_ranks(1, run) == [(counted.host_bytes, 2 * counted.host_bytes)]
    taken = ActivationTraces(settings, model).planned(16, "cuda")
    plan = build_plan(settings, model, gpu(1).world, room=gpu(1).room, **taken)
    assert traffic(plan).of_step(1).by_medium["copy"] == 2 * counted.host_bytes


def test_auto_sends_to_the_host_what_hides_beside_forward_and_makes_the_rest_again(monkeypatch):
    settings = config(
        model=DEEP | {"layers": 5},
        precision={"compute": "bf16"},
        batch={"global": 64, "micro": 64},
        zero_={"activations": "auto", "stage": 0},
    )
    model, roomy = model_of(settings), gpu(1)
    names = ActivationTraces(with_activations(settings, "keep"), model).site_names
    need = {word: _device_bytes(with_activations(settings, word), model, roomy) for word in ("keep", "remat")}
    machine = gpu(1, device=need["remat"] + (need["keep"] - need["remat"]) // 3)
    traced = ActivationTraces(with_activations(settings, "offload"), model).of(64, "cuda")
    told = []
    for share in (0.01, 0.4, 2.0):  # of all units' bytes that a copy engine moves in the time of forward
        rates = replace(ROUND, copy_out_bytes=share * traced.host_bytes * ROUND.flops / traced.forward.flops)
        monkeypatch.setattr(sys.modules[_choose_activations.__module__], "assumed", lambda *_, rates=rates: rates)
        chosen, reasons = _settled(settings, machine, model)
        words = Counter(chosen.zero.activations_by_pattern.values())
        plan = build_plan(
            chosen, model, machine.world, room=machine.room, **ActivationTraces(chosen, model).planned(64, "cuda")
        )
        sent_bytes = plan.bytes.get("host", {}).get("activations", 0)
        assert sent_bytes <= share * traced.host_bytes
        told.append((words["offload"], words["remat"]))
        assert f"computed again in backward: {words['remat']} of {len(names)}" in reasons[-1]
    (none, most), (some, fewer), (all_sent, nothing) = told
    assert (none, nothing) == (1, 0)  # the embedding, which saves no activation of 1 MiB
    assert 1 < some < all_sent
    assert most > fewer > 0


@pytest.fixture
def fast_copies(monkeypatch):
    """Whatever is sent to the host hides beside forward."""
    rates = replace(ROUND, copy_out_bytes=1e18)
    monkeypatch.setattr(sys.modules[_choose_activations.__module__], "assumed", lambda *_: rates)


def test_no_other_way_to_treat_units_makes_fewer_again_whatever_device_and_host_have(fast_copies):
    settings = config(
        model=DEEP | {"layers": 4},
        precision={"compute": "bf16"},
        batch={"global": 64, "micro": 64},
        zero_={"activations": "auto", "stage": 0},
    )
    model = model_of(settings)
    counted = ActivationTraces(settings, model)
    count = len(counted.site_names)
    needs = {}
    for sent in range(count + 1):
        for again in range(count + 1 - sent):
            listed = [f"{name}:offload" for name in counted.site_names[:sent]]
            listed += [f"{name}:remat" for name in counted.site_names[sent : sent + again]]
            plan = planned(with_activations(settings, listed or "keep"), gpu(1).world, NO_LIMIT, counted)
            needs[sent, again] = plan.placement.bytes["device"], plan.placement.bytes["host"]
    least, most = needs[0, count][0], needs[0, 0][0]
    host_bytes = needs[count, 0][1]
    shares = (-0.1, 0, 0.2, 0.5, 1)
    chosen_counts = set()
    for device in (least + int(share * (most - least)) for share in shares):
        for host in (int(share * host_bytes) for share in (0, 0.3, 1)):
            machine = gpu(1, device=device, host=host)
            if device < least:
                with pytest.raises(ConfigError, match="activations"):
                    _settled(settings, machine, model, counted)
                continue
            chosen, _ = _settled(settings, machine, model, counted)
            words = Counter({"remat": count} if chosen.zero.activations == "remat" else _words(chosen))
            got = words["offload"], words["remat"]
            fitting = [way for way, (on_device, on_host) in needs.items() if on_device <= device and on_host <= host]
            assert got in fitting
            assert got[1] == min(again for _, again in fitting), (device, host, got)
            chosen_counts.add(got)
    # the embedding is always sent, because it saves no activation of 1 MiB
    assert {(sent > 1, again > 0) for sent, again in chosen_counts} == set(product((True, False), repeat=2))


@pytest.mark.parametrize("copies", ["slow", "fast"])
def test_what_is_kept_pushes_no_state_off_the_device(copies, monkeypatch):
    settings = config(
        model=DEEP | {"width": 512, "layers": 4},
        precision={"compute": "bf16"},
        batch={"global": 12, "micro": 12},
        offload={"optimizer": "auto", "param": "auto", "grad": "auto", "compute": "host"},  # without slots on a GPU
        zero_={"activations": "auto", "stage": 0},
    )
    rates = replace(ROUND, copy_out_bytes=1e18 if copies == "fast" else 1.0)
    monkeypatch.setattr(sys.modules[_choose_activations.__module__], "assumed", lambda *_: rates)
    model = model_of(settings)
    counted = ActivationTraces(settings, model)
    names = counted.site_names
    need = {word: _device_bytes(with_activations(settings, word), model, gpu(1)) for word in ("keep", "remat")}
    told = []
    for share in (-0.05, 0, 0.25, 0.5, 1):  # at first the state does not fit, even so
        machine = gpu(1, device=need["remat"] + int(share * (need["keep"] - need["remat"])))
        planned(with_activations(settings, "keep"), machine.world, machine.room, counted)  # it leaves room
        least = planned(with_activations(settings, "remat"), machine.world, machine.room, counted)
        chosen, _ = _settled(settings, machine, model, counted)
        assert planned(chosen, machine.world, machine.room, counted).placement.optimizer == least.placement.optimizer
        words = Counter({"remat": len(names)} if chosen.zero.activations == "remat" else _words(chosen))
        told.append(words["remat"])
        if share >= 0:
            assert set(least.placement.optimizer.values()) == {"device"}
    assert told[-1] == 0
    assert told[1:] == sorted(told[1:], reverse=True)
    assert (told[3] > 0) == (copies == "slow")


@pytest.mark.parametrize(("stage", "room"), [("auto", "little"), (0, "little"), (0, "plenty")])
def test_auto_measures_rates_once_and_only_where_it_needs_them(monkeypatch, stage, room):
    settings = config(model=DEEP, batch={"global": 64, "micro": 64}, zero_={"activations": "auto", "stage": stage})
    model, asked = model_of(settings), []

    def measured(*_, **__):
        asked.append("rates")
        return ROUND

    monkeypatch.setattr(sys.modules[_choose_activations.__module__], "measured_rates", measured)
    lightest = with_activations(settings, "remat")
    lightest = lightest.model_copy(update={"zero": lightest.zero.model_copy(update={"stage": 0})})
    need = _device_bytes(lightest, model, gpu(1))
    machine = replace(gpu(1), paper=False)
    if room == "little":
        machine = replace(machine, device_bytes=need)
    _settled(settings, machine, model)
    assert asked == ["rates"] * (stage == "auto" or room == "little")


def test_on_a_cpu_what_is_kept_leaves_its_libraries_room():
    settings = config(
        model=DEEP,
        batch={"global": 16, "micro": 16},
        zero_={"activations": "auto", "stage": 0},
        launch={"malloc": "lean"},
    )
    model = model_of(settings)
    counted = ActivationTraces(settings, model)
    names, world = counted.site_names, cpu(NO_LIMIT.host).world
    kept = [[*(f"{name}:remat" for name in names[:count])] or "keep" for count in range(len(names) + 1)]
    needs = [
        sum(planned(with_activations(settings, words), world, NO_LIMIT, counted).bytes["device"].values())
        for words in kept
    ]
    told = []
    for share in (0, 2, 4, 6, 8):
        budget = needs[-1] + (needs[0] - needs[-1]) * share // 8
        for room in (budget, budget + CPU_LIBRARIES_BYTES):
            chosen, _ = _settled(settings, cpu(room), model, counted)
            words = _words(chosen) if chosen.zero.activations != "remat" else names
            fitting = [count for count, need in enumerate(needs) if need + CPU_LIBRARIES_BYTES <= room]
            assert len(words) == min([*fitting, len(names)])
            told.append(len(words))
    assert {0, len(names)} < set(told)


def test_a_plan_counts_what_auto_becomes():
    """And says it; the table is by the least, by which a run chooses all else."""
    paper = {"ranks": 1, "device_memory": "300MiB", "host_memory": "1TiB", "disk": "1TiB"}
    batch = {"global": 64, "micro": 64}
    settings = config(model=DEEP, precision={"compute": "bf16"}, batch=batch, plan=paper)
    told = {}
    for word in ("auto", "remat"):
        text, fitting = plan_text(with_activations(settings, word), [f"zero.activations={word}"])
        assert fitting
        told[word] = " ".join(text.split())
    assert "zero.activations=auto zero.stage" in told["auto"]
    became = re.search(r"The answer assumes units computed again in backward: (\d+) of 11", told["auto"])
    assert became
    assert 0 < int(became[1]) < 10
    taken = {word: float(re.search(r"A rank takes ([\d.]+) MiB of GPU memory", told[word])[1]) for word in told}
    assert taken["remat"] < 200 < taken["auto"] <= 300
    assert "The answer assumes" not in told["remat"]


def test_a_run_is_planned_with_what_auto_became(here, capsys):
    """Under a budget that holds nothing but what was chosen."""
    sizes = ["model.width=64", "model.layers=4", "model.heads=2", "model.seq=64", "batch.global=16", "batch.micro=16"]
    words = [*sizes, "data=synthetic", "steps=1", "val.rows=1", "zero.stage=0", "launch.malloc=lean"]
    settings = config(
        model={"width": 64, "layers": 4, "heads": 2, "seq": 64, "vocab": 256},
        batch={"global": 16, "micro": 16},
        zero_={"activations": "remat", "stage": 0},
        launch={"malloc": "lean"},
    )
    model, world = model_of(settings), zero.open_world(device="cpu")
    taken = ActivationTraces(settings, model).planned(16, "cpu")
    budget = sum(build_plan(settings, model, world, **taken).bytes["device"].values()) + CPU_LIBRARIES_BYTES + 2**19
    assert train.main([*words, "zero.activations=auto", f"offload.host_budget={budget}"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"auto: zero.activations: units computed again in backward: [1-9] of 7", out), out


def cpu(host_bytes: int) -> Machine:
    return Machine(1, 1, "cpu", 0, host_bytes, 0, paper=True)


def _settled(settings, machine, model, counted=None):
    """Return the policies that auto chooses, and the reasons."""
    return _choose_activations(settings, machine, counted or ActivationTraces(settings, model), lambda *_: None)[:2]


def _words(settings):
    """Return the policy of each unit that does not keep its activations."""
    return [word for word in settings.zero.activations_by_pattern.values() if word != "keep"]


def _device_bytes(settings, model, machine) -> int:
    """Return the device bytes of a plan."""
    rows = settings.batch.solved(machine.ranks).numbers()[1]
    taken = ActivationTraces(settings, model).planned(rows, machine.device)
    plan = build_plan(settings, model, machine.world, room=machine.room, **taken)
    return plan.placement.bytes["device"]
