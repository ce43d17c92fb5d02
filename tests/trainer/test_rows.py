"""`zero.rows` in plans and runs: counted bytes are those of a step, and auto takes the most rows that fit."""

import re
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import train
import zero
from tests.trainer.test_planning import TINY, config, gpu, model_of, peak_of
from zero.core.activations.rows import halvings
from zero.core.placement import NO_LIMIT
from zero.core.sizes import GiB
from zero.errors import ConfigError
from zero.settings.build import build_plan
from zero.trainer.models import GPT, loss
from zero.trainer.models.gpt_config import GPTConfig
from zero.trainer.planning import plan_text
from zero.trainer.planning.choices import planned, with_activations
from zero.trainer.planning.resolve_auto import _choose, _choose_activations
from zero.trainer.planning.traces.activations import ActivationTraces
from zero.trainer.planning.traces.tracing import trace

WIDE = {"width": 128, "layers": 3, "heads": 4, "seq": 128, "vocab": 256}
DEEP = {"width": 128, "layers": 8, "heads": 4, "seq": 128}


@pytest.mark.parametrize(
    ("sizes", "precision", "rows"),
    [(WIDE, "fp32", 1), (WIDE, "fp32", 3), (WIDE, "fp32", 4), (WIDE, "bf16", 2), (TINY, "fp32", 2)],
)
def test_traced_bytes_of_chunks_are_those_that_a_real_step_allocates(sizes, precision, rows):
    """As in `test_planning`, by torch's profiler. In bf16 the CPU's attention packs keys and values, which no GPU does,
    and its sums in fp32 of gradients in bf16 make temporary tensors.
    """
    settings = GPTConfig(**sizes)
    with zero.empty():
        model = GPT(settings)
    plan = zero.Plan(
        model,
        optimizer=zero.adamw(1e-3, clip=1.0),
        world=zero.open_world(device="cpu"),
        precision=precision,
        activations="remat",
        rows=rows,
        update="serial",
    )
    batch = torch.zeros(8, settings.seq + 1, dtype=torch.int64)
    splitting, compute = plan.facts.splitting, plan.precision.compute
    traced, whole = (
        trace(model, splitting, loss, batch.to("meta"), compute=compute, policies="remat", rows=chunk)
        for chunk in (rows, 0)
    )
    state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, loss)
    state, _ = step(state, [batch])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(state, [batch])
    assert traced.peak_bytes == pytest.approx(peak_of(profiled), rel=0.15 if precision == "bf16" else 0.05)
    assert traced.peak_bytes < 0.9 * whole.peak_bytes
    assert traced.forward.flops == whole.forward.flops
    assert traced.backward.flops == whole.backward.flops
    assert traced.forward.launches > whole.forward.launches


def test_fewer_rows_of_a_chunk_never_take_more_bytes():
    settings = config(model=DEEP, zero_={"activations": "remat"}, batch={"global": 16, "micro": 16})
    counted = ActivationTraces(settings, model_of(settings))
    bytes_of = {rows: counted.resolved(settings.changed("zero", rows=rows)).bytes(16, "cuda") for rows in halvings(16)}
    assert [*bytes_of] == [0, 8, 4, 2, 1]
    assert [*bytes_of.values()] == sorted(bytes_of.values(), reverse=True)
    assert bytes_of[1] < 0.7 * bytes_of[0]
    for rows in (16, 99, "auto"):
        assert counted.resolved(settings.changed("zero", rows=rows)).bytes(16, "cuda") == bytes_of[0]
    kept = counted.resolved(with_activations(settings.changed("zero", rows=2), "keep"))
    assert kept.bytes(16, "cuda") == counted.resolved(with_activations(settings, "keep")).bytes(16, "cuda")


def test_halvings_end_at_one_row():
    assert halvings(1) == [0]
    assert halvings(6) == [0, 3, 2, 1]


def auto(**batch):
    return config(
        model=DEEP,
        precision={"compute": "bf16"},
        batch=batch,
        zero_={"activations": "remat", "rows": "auto", "stage": 0},
    )


def test_auto_takes_the_most_rows_that_fit_and_smaller_chunks_before_smaller_microbatches():
    settings = auto(**{"global": 16})
    counted = ActivationTraces(settings, model_of(settings))
    needs = {}
    for micro in (16, 8, 4, 2, 1):
        for rows in halvings(micro):
            batch = {"global_": 16, "micro": micro, "accumulate": 16 // micro}
            chosen = settings.changed("zero", rows=rows).changed("batch", **batch)
            plan = planned(chosen, gpu(1).world, NO_LIMIT, counted)
            needs[micro, rows] = plan.placement.bytes["device"]
    chosen_rows = []
    for limit in sorted({*needs.values(), min(needs.values()) - 1}):
        machine = gpu(1, device=limit)
        fitting = [choice for choice, nbytes in needs.items() if nbytes <= limit]
        if not fitting:
            with pytest.raises(ConfigError, match="activations"):
                _choose(settings, machine, counted, lambda *_: None)
            continue
        chosen, reasons, _ = _choose(settings, machine, counted, lambda *_: None)
        micro, rows = chosen.batch.numbers()[1], chosen.zero.rows
        assert (micro, rows) == fitting[0]
        assert chosen.debug.check_rows == (rows > 0)
        assert f"auto: zero.rows={rows}: recomputed blocks run on {micro} rows" in reasons[-1]
        chosen_rows.append((micro, rows))
    assert {(16, 0), (16, 4), (8, 4)} <= {*chosen_rows}


def test_auto_of_activations_keeps_what_fits_beside_chunks():
    settings = auto(**{"global": 16, "micro": 16}).changed("zero", activations="auto")
    counted = ActivationTraces(settings, model_of(settings))

    def need(word, rows):
        chosen = with_activations(settings, word).changed("zero", rows=rows)
        return planned(chosen, gpu(1).world, NO_LIMIT, counted).placement.bytes["device"]

    told = []
    for limit in (need("remat", 2), need("remat", 0), need("keep", 0)):
        machine = gpu(1, device=limit)
        chosen, _, _ = _choose_activations(settings, machine, counted, lambda *_: None)
        planned(chosen, machine.world, machine.room, counted)
        told.append((chosen.zero.rows, {*chosen.zero.activations_by_pattern.values()}))
    assert told[0][0] in (4, 2)
    assert "remat" in told[0][1]
    assert told[1][0] == 0
    assert told[2] == (0, {"keep"})


def test_a_plan_names_the_rows_that_it_counts():
    paper = {"ranks": 1, "device_memory": "40MiB", "host_memory": "1TiB", "disk": "1TiB"}
    settings = auto(**{"global": 16, "micro": 16}).model_copy(update={"plan": config(plan=paper).plan})
    text, fits = plan_text(settings, ["zero.rows=auto", "zero.activations=remat"])
    assert fits
    (command,) = re.findall(r"python train.py .*", text)
    assert re.search(r"zero\.rows=[1248]\b", command)
    assert "zero.rows=auto" not in command


def test_32k_tokens_of_7b_fit_into_one_microbatch_of_a_24_gb_gpu_with_room_for_half_as_many():
    """At one gather of each unit for each pass: `tests/engine/test_rows.py` counts them."""
    sizes = {"width": 4096, "layers": 32, "heads": 32, "seq": 4096, "hidden": 11008, "vocab": 32000}
    settings = config(
        model=sizes,
        precision={"compute": "bf16"},
        offload={"optimizer": "cpu", "param": "cpu", "grad": "cpu"},
        zero_={"activations": "remat", "rows": "auto", "stage": 3},
    )
    machine = replace(gpu(1, device=24 * GiB), host_bytes=256 * GiB)
    counted = ActivationTraces(settings, model_of(settings))
    told = {}
    for rows in (8, 12):
        chosen, _, _ = _choose(settings.changed("batch", global_=rows), machine, counted, lambda *_: None)
        told[rows] = chosen.batch.numbers()[1:], chosen.zero.rows
    assert told == {8: ((8, 1), 0), 12: ((12, 1), 6)}
    bytes_of = [counted.resolved(settings.changed("zero", rows=rows)).bytes(8, "cuda") / GiB for rows in (0, 4, 2)]
    assert bytes_of == pytest.approx([16.5, 13.3, 11.3], abs=0.1)


def test_a_run_trains_in_the_chunks_that_auto_chose(here, capsys):
    """Under a budget that holds all rows of no block at once."""
    sizes = ["model.width=64", "model.layers=4", "model.heads=2", "model.seq=128", "batch.global=64", "batch.micro=64"]
    words = [
        *sizes,
        "data=synthetic",
        "steps=2",
        "val.rows=1",
        "zero.stage=0",
        "launch.malloc=raised",
        "zero.activations=remat",
    ]
    settings = config(
        model={"width": 64, "layers": 4, "heads": 2, "seq": 128, "vocab": 256},
        batch={"global": 64, "micro": 64},
        zero_={"activations": "remat", "stage": 0, "rows": 16},
        launch={"malloc": "raised"},
    )
    model, world = model_of(settings), zero.open_world(device="cpu")
    counted = ActivationTraces(settings, model).planned(64, "cpu")
    budget = sum(build_plan(settings, model, world, **counted).bytes["device"].values())
    assert train.main([*words, "zero.rows=auto", f"offload.host_budget={budget}"]) == 0
    out = capsys.readouterr().out
    assert "auto: zero.rows=16: recomputed blocks run on 64 rows in chunks of 16, as many as fit" in out
    losses = []
    for rows in (16, 0):
        assert train.main([*words, f"zero.rows={rows}"]) == 0
        losses.append(re.findall(r"loss ([\d.]+)", capsys.readouterr().out))
    assert losses[0] == re.findall(r"loss ([\d.]+)", out)
    assert losses[0]


def test_a_heap_is_counted_with_the_holes_that_chunks_leave():
    settings = auto(**{"global": 16, "micro": 16}).changed("zero", rows=2)
    counted = ActivationTraces(settings, model_of(settings))
    traced, kept = counted.of(16, "cpu").peak_bytes, counted.of(16, "cpu", remat=False).peak_bytes
    for malloc in ("raised", "lean"):
        here = counted.resolved(settings.changed("launch", malloc=malloc))
        assert here.bytes(16, "cpu") == min(int(1.5 * kept), int(4.5 * traced))
    assert counted.bytes(16, "cuda") == counted.of(16, "cuda").peak_bytes


def test_a_plan_that_does_not_fit_advises_chunks_where_blocks_are_recomputed():
    settings = auto(**{"global": 16, "micro": 16}).changed("zero", rows=0)
    counted = ActivationTraces(settings, model_of(settings))
    assert counted.lighter(16, "cuda")["set zero.rows=1"] < counted.bytes(16, "cuda")
    others = settings.changed("zero", rows=1), with_activations(settings, "keep")
    assert not any("set zero.rows=1" in counted.resolved(other).lighter(16, "cuda") for other in others)
    assert "set zero.rows=1" not in counted.lighter(1, "cuda")
