"""Formulas, machines on paper, what fits, activations, choices; and that a plan is what is really allocated."""

import contextlib
import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero
from tests.common.papers import OURS
from tests.common.small import KiB
from tests.conftest import LONG_S
from zero.core.placement import NO_LIMIT, DoesNotFit, size_text, usable_host_bytes
from zero.core.stage import Stage
from zero.engine.model.split import split
from zero.engine.plan.handshake import settings_of
from zero.engine.plan.traffic import Load, traffic
from zero.errors import ConfigError, WorldError
from zero.platform.device import Device
from zero.platform.host_memory import free_host_bytes
from zero.progress import Progress, silent
from zero.settings.build import build_plan
from zero.testing import run_ranks
from zero.tracker import Tracker
from zero.trainer import planning
from zero.trainer.config import Config, read
from zero.trainer.models import GPT, loss
from zero.trainer.models.gpt_config import GPTConfig
from zero.trainer.planning import (
    ActivationTraces,
    Machine,
    PaperWorld,
    against_measured,
    choices,
    measured,
    probes,
    resolve_auto,
    timed,
    trace,
)
from zero.trainer.planning.choices import batches, best, plan_of_run, with_setting
from zero.trainer.planning.cost import Rates, seconds_text, step_seconds
from zero.trainer.planning.rates import assumed
from zero.trainer.planning.traces.operators import OperatorWork, Product
from zero.trainer.planning.traces.shapes import result_of
from zero.trainer.run.out_of_memory import out_of_memory
from zero.trainer.run.task import build_task

TINY = {"width": 64, "layers": 2, "heads": 4, "seq": 64}
GiB, TiB = 2**30, 2**40


def config(**groups) -> Config:
    """`Config` of a tiny run; `zero_={"stage": 2}` is the group `zero`."""
    return read({"model": TINY, "batch": {"global": 8}} | {key.rstrip("_"): value for key, value in groups.items()})


def model_of(settings: Config) -> torch.nn.Module:
    with zero.empty():
        return GPT(settings.model)


def telling(note: Callable[[str], object], progress: Progress = silent) -> Tracker:
    """A tracker that does this with what it is told."""
    tracker = Tracker()
    tracker.note, tracker.progress = note, progress
    return tracker


def gpu(ranks: int, device: int = 80 * GiB, host: int = TiB, disk: int = TiB) -> Machine:
    return Machine(ranks, min(ranks, 8), "cuda", device, host, disk, paper=True)


def activation_bytes(settings: Config, model: torch.nn.Module, device: str) -> int:
    """Of the microbatch of a config whose batch is solved."""
    return ActivationTraces(settings, model).bytes(settings.batch.numbers()[1], device)


def states_bytes(plan: zero.Plan) -> int:
    kinds = ("parameters", "gradients", "master", "moments")
    return sum(told.get(kind, 0) for told in plan.bytes.values() for kind in kinds)


def tier_bytes(plan: zero.Plan, *tiers: str) -> int:
    return sum(sum(plan.bytes.get(tier, {}).values()) for tier in tiers)


# What a plan is made of


def test_a_presets_name_is_an_offload():
    plans = [
        zero.Plan(torch.nn.Linear(4, 4), optimizer=zero.adamw(1e-3), world=gpu(2).world, room=NO_LIMIT, offload=offload)
        for offload in ("nvme", zero.Offload("nvme"), None, zero.Offload())
    ]
    assert settings_of(plans[0]) == settings_of(plans[1])
    assert settings_of(plans[2]) == settings_of(plans[3])
    assert plans[0].bytes != plans[2].bytes


# Formulas


@pytest.mark.parametrize(("level", "ranks"), [(0, 4), (1, 64), (2, 2), (3, 4)])
def test_a_plan_holds_what_our_formula_says(level, ranks):
    """Padding is all there is beside it."""
    settings = config(zero_={"stage": level}, precision={"compute": "bf16"}, model={**TINY, "width": 512})
    plan = build_plan(with_rows(settings, ranks), model_of(settings), gpu(ranks).world, room=gpu(ranks).room)
    assert states_bytes(plan) == pytest.approx(OURS[level].of(plan.numel, ranks), rel=0.02)


def with_rows(settings: Config, ranks: int) -> Config:
    batch = settings.batch.model_copy(update={"global_": 2 * ranks, "accumulate": 2})
    return settings.model_copy(update={"batch": batch})


# Machines


def test_a_world_on_paper_talks_to_nobody():
    world = PaperWorld(64, local_size=8, device="cuda")
    assert (world.size, world.rank, world.local_size, world.device.type) == (64, 0, 8, "cuda")
    for talk in (
        lambda: world.barrier(),
        lambda: world.share("text"),
        lambda: world.gather(torch.zeros(1), torch.zeros(64)),
        lambda: world.reduce_scatter(torch.zeros(64), torch.zeros(64), torch.zeros(1)),
    ):
        with pytest.raises(WorldError, match="on paper"):
            talk()


def test_a_gpu_is_described_by_its_name():
    machine = Machine.described(config(plan={"gpu": "H100"}))
    assert (machine.device, machine.device_bytes, machine.paper) == ("cuda", 80 * GiB, True)
    for name, precision, flops in (("H100", "bf16", 989.4e12), ("RTX 4090", "fp32", 82.6e12), ("A100", "fp16", 312e12)):
        rates = assumed(config(plan={"gpu": name}, precision={"compute": precision}), machine)
        assert 0.5 * flops < rates.flops < 0.7 * flops
        assert name in rates.source
    for name, gib in ((4090, 24), ("4090", 24), ("rtx4090", 24), ("h100", 80), ("3090 ti", 24), ("h100 nvl", 94)):
        assert Machine.described(config(plan={"gpu": name})).device_bytes == gib * GiB
    with pytest.raises(ConfigError, match=r"plan\.gpu=h1000 is not known\. Did you mean H100\?"):
        Machine.described(config(plan={"gpu": "h1000"}))
    with pytest.raises(ConfigError, match="V100 does not compute in bf16"):
        assumed(config(plan={"gpu": "V100"}, precision={"compute": "bf16"}), machine)


def test_a_machine_on_paper_asks_nothing_of_the_gpu_here(monkeypatch):
    for name in ("is_available", "device_count", "mem_get_info", "memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("the GPU of this machine was asked"))
    settings = config(plan={"ranks": 64, "device_memory": "80GiB", "host_memory": "1TiB", "disk": "8TiB"})
    machine = Machine.described(settings)
    assert (machine.ranks, machine.ranks_per_node, machine.device, machine.paper) == (64, 8, "cuda", True)
    assert machine.room == (80 * GiB, TiB // 8, TiB)
    assert machine.world.local_size == 8
    assert "64 ranks on 8 nodes" in str(machine)
    assert "80.0 GiB on each GPU" in str(machine)


def test_what_is_not_asked_for_is_this_machine(tmp_path):
    settings = config(offload={"path": str(tmp_path)}, launch={"ranks": 2})
    machine = Machine.described(settings)
    assert not machine.paper
    assert (machine.ranks, machine.ranks_per_node) == (2, 2)
    assert machine.device == ("cuda" if torch.cuda.is_available() else "cpu")
    if machine.device == "cpu":
        usable = usable_host_bytes(settings.offload, free_host_bytes(), device_is_host=True)
        assert machine.host_bytes == pytest.approx(usable, rel=0.1)
    assert machine.disk_bytes > 0
    assert config(plan={"disk": "4TB"}).plan.disk == 4 * 10**12


def test_ranks_of_launch_are_on_one_machine_and_those_of_plan_may_be_on_many(monkeypatch):
    def nodes(**groups) -> tuple[int, int]:
        machine = Machine.described(config(**groups))
        return machine.ranks, machine.ranks_per_node

    assert nodes(launch={"ranks": 16}) == (16, 16)
    assert nodes(launch={"ranks": 16}, plan={"ranks_per_node": 4}) == (16, 4)
    assert nodes(launch={"ranks": 2}, plan={"ranks": 16}) == (16, 8)
    assert nodes(plan={"ranks": 4}) == (4, 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"launch\.ranks=16: this machine has 2 GPUs\. Use plan\.ranks=16"):
        nodes(launch={"ranks": 16})
    assert nodes(launch={"ranks": 16}, plan={"device_memory": "80GiB"}) == (16, 16)


@pytest.mark.parametrize(("stage", "preset"), [(0, "none"), (1, "cpu"), (2, "nvme"), (3, "infinity"), (3, "none")])
def test_a_plan_on_paper_is_the_plan_of_real_ranks(stage, preset, tmp_path):
    settings = with_setting(config(offload={"path": str(tmp_path), "page": "8KiB"}), Stage(stage), preset)
    with_two = run_ranks(2, lambda world: build_plan(settings, model_of_rank(world, settings), world).bytes)
    room = Machine(2, 2, "cpu", 0, TiB, TiB, paper=True)
    assert with_two[0] == build_plan(settings, model_of(settings), room.world, room=room.room).bytes


def model_of_rank(world: zero.World, settings: Config) -> torch.nn.Module:
    with world.exclusive():
        return model_of(settings)


# What fits


@pytest.mark.parametrize(
    ("preset", "tier"), [("none", "device"), ("cpu", "host"), ("nvme", "nvme"), ("infinity", "host")]
)
def test_what_is_needed_fits_and_one_byte_less_does_not(preset, tier, tmp_path):
    settings = with_setting(config(offload={"path": str(tmp_path), "page": "8KiB"}), Stage(3), preset)
    model, rates = model_of(settings), assumed(settings, gpu(1))
    settings = settings.model_copy(update={"batch": settings.batch.model_copy(update={"micro": 8})})
    machine = gpu(1, device=1, host=1, disk=1)
    (refused,) = choices(
        settings, machine, ActivationTraces(settings, model), rates, stages=[Stage(3)], presets=[preset]
    )
    needs = {name: sum(kinds.values()) for name, kinds in refused.plan.bytes.items()}
    exact = gpu(1, *(needs.get(name, 0) for name in ("device", "host", "nvme")))
    (fits,) = choices(settings, exact, ActivationTraces(settings, model), rates, stages=[Stage(3)], presets=[preset])
    assert fits.fits
    assert fits.plan.bytes == refused.plan.bytes
    field = {"device": "device_bytes", "host": "host_bytes", "nvme": "disk_bytes"}[tier]
    less = replace(exact, **{field: needs[tier] - 1})
    (short,) = choices(settings, less, ActivationTraces(settings, model), rates, stages=[Stage(3)], presets=[preset])
    assert not short.fits
    assert short.lacks == {tier: 1}
    key = {"device": "zero.activations=remat", "host": "offload", "nvme": "offload.path"}[tier]
    assert key in short.refusal
    assert "iB" in short.refusal
    assert "\n" not in short.refusal


def test_activations_count_and_a_refusal_says_how_much_and_what_to_do():
    settings = config(offload={"host_budget": "6MiB"}, batch={"global": 64}).on(1)
    model, world = model_of(settings), zero.open_world(device="cpu")
    counted = ActivationTraces(settings, model)
    plan = build_plan(settings, model, world)
    nbytes = activation_bytes(settings, model, "cpu")
    assert nbytes == int(1.5 * counted.of(64, "cpu").peak_bytes)
    assert tier_bytes(plan, "device") + nbytes > 6 * 2**20 > tier_bytes(plan, "device")
    match = rf"{re.escape(size_text(nbytes))} of activations.*batch\.micro"
    with pytest.raises(DoesNotFit, match=match) as refused:
        plan_of_run(settings, world, counted)
    assert "offload.host_budget=6.0 MiB" in str(refused.value)


@pytest.mark.parametrize(
    ("mode", "ranks", "stage"),
    [("train", 1, 0), ("train", 4, 1), ("train", 4, 3), ("eval", 1, 3), ("eval", 4, 0), ("eval", 1, 1)],
)
def test_what_is_advised_can_be_done_and_takes_less(mode, ranks, stage):
    """One row, one token, activations made again already: nothing of them is left to make smaller."""
    settings = config(
        mode=mode,
        resume="latest" if mode == "eval" else "none",
        model={**TINY, "seq": 1},
        zero_={"stage": stage, "activations": "remat"},
        batch={"global": ranks, "micro": 1},
    )
    model = build_task(settings).model
    nbytes = ActivationTraces(settings, model).bytes(1, "cuda")
    resorts = {3: ["use more ranks"], 0: ["set zero.stage=3"], 1: ["set zero.stage=3", "use more ranks"]}[stage]
    resorts = ["use more ranks with zero.stage=3"] if ranks == 1 and stage < 3 else resorts
    leaves = {"train": "set offload.optimizer=cpu", "eval": "set offload.param=cpu"}[mode]
    moves = [leaves] if mode == "train" or stage == 3 else []
    for device_bytes, expected in ((nbytes + 4 * KiB, [*moves, *resorts]), (KiB, ["use a machine with more memory"])):
        machine = gpu(ranks, device_bytes)
        rates = assumed(settings, machine)
        (refused,) = choices(
            settings, machine, ActivationTraces(settings, model), rates, stages=[Stage(stage)], presets=["config"]
        )
        assert refused.refusal.split(". ")[-1].removesuffix(".").lower().split(", or ") == expected


def test_a_budget_is_raised_where_it_is_the_limit():
    model, offload = {**TINY, "width": 512}, {"device_budget": "1MiB"}
    settings = config(mode="eval", resume="latest", model=model, offload=offload)
    model = build_task(settings).model
    for stage, free, advised in (
        (3, GiB, "Raise offload.device_budget, or set offload.param=cpu, or use more ranks."),
        (0, GiB, "Raise offload.device_budget, or set zero.stage=3."),
        (3, 512 * KiB, "Set offload.param=cpu, or use more ranks."),
    ):
        with pytest.raises(ConfigError) as refused:
            build_plan(
                with_setting(settings, Stage(stage), "config").on(4), model, gpu(4).world, room=gpu(4, free).room
            )
        assert str(refused.value).split(". ")[-1] == advised


@pytest.mark.parametrize(
    ("rows", "device", "helps", "activations"),
    [(8, "cpu", False, "keep"), (8, "cuda", True, "keep"), (64, "cpu", True, "keep"), (8, "cuda", True, "remat")],
)
def test_remat_is_advised_where_it_is_not_set_and_would_take_less(activations, rows, device, helps):
    """Two layers and few rows: the logits are most of it, and they are there in any case."""
    settings = config(zero_={"stage": 3, "activations": activations}, batch={"global": rows, "micro": rows})
    model = model_of(settings)
    counted = ActivationTraces(settings, model)
    kept, recomputed = (counted.bytes(rows, device, remat=remat) for remat in (False, True))
    assert (recomputed < kept) == helps
    assert recomputed <= kept
    machine = gpu(1, device=KiB) if device == "cuda" else Machine(1, 1, "cpu", 0, KiB, KiB, paper=True)
    (refused,) = choices(
        settings,
        machine,
        ActivationTraces(settings, model),
        assumed(settings, machine),
        stages=[Stage(3)],
        presets=["none"],
    )
    assert ("zero.activations=remat" in refused.refusal) == (helps and activations == "keep")
    fewer, shorter = (counted.bytes(*least, seq=seq) for least, seq in (((1, device), None), ((rows, device), 32)))
    now = recomputed if activations == "remat" else kept
    assert ("a smaller batch.micro" in refused.refusal) == (fewer < now)
    assert ("a smaller model.seq or a larger zero.sequence" in refused.refusal) == (shorter < now)


# Activations


class Recording(TorchDispatchMode):
    """Every operator's results, as shapes, strides and dtypes; on meta by our rules, elsewhere by computing them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        on_meta = any(isinstance(t, torch.Tensor) and t.is_meta for t in tree_leaves((args, kwargs)))
        made = result_of(func, args, kwargs or {}) if on_meta else func(*args, **(kwargs or {}))
        told = [(tuple(t.shape), t.stride(), t.dtype) for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        self.seen.append((str(func), told))
        return made


@pytest.mark.parametrize(
    ("kind", "compute"),
    [
        ({}, torch.float16),
        ({}, torch.float32),
        ({"norm": "layer", "mlp": "gelu", "tied": False, "vocab": 99}, torch.bfloat16),
    ],
    ids=["rms, fp16", "rms, fp32", "layer, bf16"],
)
def test_every_rule_says_what_the_operator_does(kind, compute, monkeypatch):
    """The same model computed on the CPU and traced on meta: the same operators, shapes, strides and dtypes."""
    from zero.trainer.planning.traces import operators, tracing

    seen = {}
    for where in ("cpu", "meta"):
        recorded = Recording()
        monkeypatch.setattr(tracing, "META_DEVICE", torch.device(where))
        monkeypatch.setattr(operators, "result_of", lambda func, args, kwargs, to=recorded: to(func, args, kwargs))
        monkeypatch.setattr(
            Recording,
            "__call__",
            lambda self, func, args, kwargs: self.__torch_dispatch__(func, (), args, kwargs),
            raising=False,
        )
        with zero.empty():
            model = GPT(GPTConfig(**TINY, **kind))
        batch = torch.zeros(3, 33, dtype=torch.int64, device=where)
        traced = trace(model, split(model, world_size=1), loss, batch, compute=compute, policies="remat")
        seen[where] = traced, recorded.seen
    assert len(seen["cpu"][1]) > 300
    assert seen["cpu"] == seen["meta"]


def test_elementwise_results_lie_in_memory_as_torch_lays_them():
    base = torch.randn(3, 4, 5, 6)
    layouts = [base, base.transpose(1, 2), base.permute(3, 1, 0, 2), base[:, :, ::2], base[:1].expand(3, 4, 5, 6)]
    layouts += [base.permute(0, 3, 1, 2), base[:, :1].transpose(0, 2)]
    for x in layouts:
        for y in (x, x[0], x.bfloat16(), x[..., :1], torch.tensor(2.0), x.transpose(0, 1).contiguous().transpose(0, 1)):
            real = x * y
            on_meta = [strided_meta(t) for t in (x, y)]
            made = result_of(torch.ops.aten.mul.Tensor, tuple(on_meta), {})
            assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype)
            aten = torch.ops.aten
            for func, *given in (
                *((func, x.long(), y) for func in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)),
                *((aten.div.Tensor, x, y.long()), (aten.div.Tensor, x.long(), y.long())),
                *((aten.sub.Tensor, x.long(), 3), (aten.mul.Tensor, x > 0, y), (aten.mul.Tensor, x > 0, 2)),
                *((aten.bitwise_and.Tensor, x > 0, y > 0), (aten.bitwise_and.Tensor, x.long(), y > 0)),
                *((aten.where.self, x > 0, x, y), (aten.where.self, y > 0, x, torch.tensor(0))),
                (aten.gather.default, x, 1, torch.zeros(x.shape[0], 1, *x.shape[2:], dtype=torch.int64)),
            ):
                real = func(*given)
                made = result_of(func, tuple(strided_meta(t) if isinstance(t, torch.Tensor) else t for t in given), {})
                assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype), func
        calls = {
            torch.ops.aten.clamp.default: (0, 3),
            torch.ops.aten.logsumexp.default: ([1],),
            torch.ops.aten.ge.Scalar: (0,),
            torch.ops.aten.lt.Scalar: (1,),
            torch.ops.aten.ne.Scalar: (1,),
            torch.ops.aten.sum.default: (),
        }
        for func, arguments in calls.items():
            for tensor in (x, x.long()) if func is not torch.ops.aten.logsumexp.default else (x,):
                real, made = func(tensor, *arguments), result_of(func, (strided_meta(tensor), *arguments), {})
                assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype), func


def strided_meta(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.untyped_storage().nbytes() // t.element_size(), dtype=t.dtype, device="meta").as_strided(
        t.shape, t.stride(), t.storage_offset()
    )


@pytest.mark.parametrize(
    ("sizes", "precision", "activations"),
    [
        (TINY, "bf16", "keep"),
        (TINY, "fp32", "remat"),
        (TINY, "fp32", "selective"),
        ({"width": 128, "layers": 3, "heads": 4, "seq": 128, "vocab": 3000}, "fp32", "keep"),
        ({"width": 128, "layers": 3, "heads": 4, "seq": 128, "vocab": 3000}, "bf16", "remat"),
    ],
)
def test_traced_bytes_are_what_a_real_step_allocates(sizes, precision, activations):
    """torch's profiler sees every allocation, those inside kernels too, of a step of the real engine.

    Two things are not traced: a few thousand bytes of the step itself, and what the CPU's attention packs in half
    precision (keys and values of one block, which a larger peak elsewhere usually hides).
    """
    settings = GPTConfig(**sizes)
    with zero.empty():
        model = GPT(settings)
    plan = zero.Plan(
        model,
        optimizer=zero.adamw(1e-3, clip=1.0),
        world=zero.open_world(device="cpu"),
        precision=precision,
        activations=activations,
        update="serial",
    )
    batch = torch.zeros(4, settings.seq + 1, dtype=torch.int64)
    traced = trace(
        model, plan.facts.splitting, loss, batch.to("meta"), compute=plan.precision.compute, policies=activations
    )
    state, step = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, loss)
    state, _ = step(state, [batch])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step(state, [batch])
    packed = 0.15 if precision == "bf16" and activations == "remat" else 0.05
    assert traced.peak_bytes == pytest.approx(peak_of(profiled), rel=packed)


def peak_of(profiled: profile) -> int:
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert len(events) > 100
    return peak


@pytest.mark.parametrize("vocab", [256, 40_000], ids=["plain loss", "loss in chunks"])
def test_tracing_is_quick_and_does_not_import_the_compiler(vocab):
    sizes = {**TINY, "vocab": vocab}
    code = (
        "import sys, time, torch, zero\n"
        "from zero.trainer.planning import ActivationTraces\n"
        "from zero.trainer.config import read\n"
        "from zero.trainer.models import GPT\n"
        f"config = read({{'model': {sizes!r}, 'batch': {{'global': 8}}, 'precision': {{'compute': 'bf16'}}}}).on(1)\n"
        "with zero.empty(): model = GPT(config.model)\n"
        "begin = time.process_time()\n"
        "assert ActivationTraces(config, model).bytes(8, 'cpu') > 0\n"
        "print(time.process_time() - begin, *[name for name in ('torch._dynamo', 'sympy') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S, check=True)
    seconds, *imported = done.stdout.split()
    assert float(seconds) < 1.0
    assert not imported


def test_a_validation_can_need_more_than_a_step():
    """Rows of 64 tokens are evaluated 32 at a time, also where training takes one."""
    settings = config(model={**TINY, "vocab": 20_000}, zero_={"activations": "remat"})
    model = model_of(settings)
    chunk = torch.zeros(32, 65, dtype=torch.int64, device="meta")
    evaluated = trace(model, split(model, world_size=1), loss, chunk, compute=torch.float32, backward=False)
    assert ActivationTraces(settings, model).of(1, "cpu").peak_bytes == evaluated.peak_bytes
    assert ActivationTraces(settings, model).of(64, "cpu").peak_bytes > evaluated.peak_bytes


def test_what_is_only_evaluated_needs_parameters_and_the_activations_of_a_validation():
    """Counted, held, and with slots for its pages where a GPU would read them from a file."""
    settings = config(mode="eval", resume="latest", model={**TINY, "vocab": 20_000}, precision={"compute": "bf16"})
    offloaded = settings.model_copy(update={"offload": config(offload={"param": "nvme", "page": 4096}).offload})
    model, machine, counted = build_task(settings).model, gpu(2), ActivationTraces(settings, build_task(settings).model)
    chunk = torch.zeros(32, 65, dtype=torch.int64, device="meta")
    told = trace(model, split(model, world_size=1), loss, chunk, compute=torch.bfloat16, backward=False)
    assert counted.of(1, "cpu") == counted.of(64, "cpu", remat=True) == told
    plan = build_plan(offloaded.on(2), model, machine.world, room=machine.room)
    assert set(plan.bytes["device"]) == {"gathered units", "buffers"}
    assert set(plan.bytes["nvme"]) == {"parameters"}
    assert plan.slots.arena > 0
    for stage in (0, 3):
        kinds, held = zip(*run_ranks(2, held_for_evaluation, settings, stage), strict=True)
        assert {*kinds[0]} <= {"parameters", "gathered units", "buffers"}
        assert [*held] == [{kind: nbytes for kind, nbytes in kind_bytes.items() if nbytes} for kind_bytes in kinds]


def held_for_evaluation(world: zero.World, settings: Config, stage: int) -> tuple[dict[str, int], dict[str, int]]:
    with world.exclusive():
        model = build_task(settings).model
    plan = build_plan(with_setting(settings, Stage(stage), "none").on(2), model, world)
    with contextlib.closing(zero.open_store(plan)) as store:
        state = zero.init(plan, store)
        zero.make_forward(plan, loss)(state, torch.zeros(1, 9, dtype=torch.int64))
        return plan.bytes["device"], measured(state)["device"]


# Cost


ROUND = Rates(
    flops=1e9,
    attention_flops=1e9,
    memory_bytes=1e12,
    launch_s=0.0,
    copy_in_bytes=1e9,
    copy_out_bytes=1e9,
    disk_read_bytes=5e5,
    disk_write_bytes=5e5,
    host_bytes=1e18,
    link_bytes=1e6,
    wire_bytes=1e6,
    update_numel=1e12,
    host_update_numel=1e12,
    source="a test",
)


def nvme_plan(update: str = "lazy") -> zero.Plan:
    settings = config(zero_={"stage": 3, "update": update}, optim={"name": "adamw", "clip": None})
    settings = with_setting(settings, Stage(3), "nvme")
    machine = Machine(1, 1, "cpu", 0, TiB, TiB, paper=True)
    return build_plan(settings, model_of(settings), machine.world, room=machine.room)


def test_a_serial_step_lasts_as_the_law_says():
    """C + O; what a lazy one lasts is tested in `test_step_seconds`."""
    plans = {update: nvme_plan(update) for update in ("lazy", "serial")}
    pages = plans["lazy"].pages.store_pages()
    on_disk_bytes = sum(spec.nbytes for page, spec in pages.items() if plans["lazy"].tier(page) == "nvme")
    offload_s = on_disk_bytes / ROUND.disk_read_bytes  # written at the same time and rate
    for forward_s, backward_s in ((offload_s / 2, offload_s), (2 * offload_s, 3 * offload_s)):
        work = OperatorWork(forward_s * ROUND.flops), OperatorWork(backward_s * ROUND.flops)
        seconds = {update: step_seconds(plan, ROUND, *work) for update, plan in plans.items()}
        assert max(forward_s, offload_s) + backward_s < seconds["lazy"] < seconds["serial"]
        assert seconds["serial"] == pytest.approx(forward_s + backward_s + offload_s, rel=1e-3)


@pytest.mark.parametrize("stage", range(4))
def test_ranks_move_what_the_stage_says(stage):
    """Stage 0 reduces and publishes gradients, 1 and 2 gather once, 3 gathers twice a microbatch."""
    settings = with_setting(config(batch={"global": 8, "micro": 2, "accumulate": 2}), Stage(stage), "none")
    plan = build_plan(settings, model_of(settings), gpu(2).world, room=gpu(2).room)
    moved = traffic(plan)
    half = sum(unit.trainable.P for unit in plan.units) * 4 / 2
    cold, backward, forward = (4 / 2 * numel for numel in gathered_numel(plan, 3))
    assert moved.update == Load()
    assert moved.forward.link == (forward if stage == 3 else 0)
    assert moved.first.link == {0: 0, 1: half, 2: half, 3: cold - forward}[stage]
    assert moved.backward.link == {0: 0, 1: 0, 2: half, 3: backward + half}[stage]
    assert moved.last.link == {0: 2 * half, 1: half, 2: 0, 3: 0}[stage]


def gathered_numel(plan: zero.Plan, passes: int) -> list[int]:
    """Elements that are gathered in the first forward of a step, its backward, the next forward and so on, by what each
    unit finds in its buffers, of which the one that was used longest ago goes.
    """
    # each with the time of its last use, and its unit
    buffers = [[numel, 0, None] for numel in plan.sizes.shared_buffer_sizes()]
    numels, clock = [], 0
    visits = [plan.units[index] for site in plan.facts.splitting.sites for index in site.units]
    for number in range(passes):
        numels.append(0)
        order = [unit for unit in visits[:: -1 if number % 2 else 1] if number % 2 == 0 or not unit.lookup]
        for place in range(len(order)):
            coming = {unit.index for unit in order[place : place + 2]}
            for unit in order[place : place + 2]:
                numel, clock = unit.full_numel, clock + 1
                fit = [b for b in buffers if b[2] == unit.index] or sorted(
                    b for b in buffers if b[0] >= numel and b[2] not in coming
                )
                for buffer in fit[:1]:
                    numels[-1] += 0 if buffer[2] == unit.index else numel
                    buffer[1:] = clock, unit.index
    return numels


# Choices


def test_the_best_choice_is_the_fastest_that_fits_and_of_those_alike_what_moves_and_takes_least():
    settings = config(precision={"compute": "bf16"}, batch={"global": 32})
    model, machine = model_of(settings), gpu(4)
    offered = choices(settings, machine, ActivationTraces(settings, model), assumed(settings, machine))
    assert [(choice.plan.facts.stage.level, choice.preset) for choice in offered[:3]] == [
        (0, "none"),
        (0, "cpu"),
        (0, "nvme"),
    ]
    assert len(offered) == 13
    assert all(choice.fits for choice in offered)
    winner = best(offered)
    assert winner.seconds <= 1.02 * min(choice.seconds for choice in offered)
    for choice in offered:
        if choice.seconds <= winner.seconds:
            assert (choice.moved_bytes, choice.memory_bytes) >= (winner.moved_bytes, winner.memory_bytes)
    assert best([replace(choice, refusal="no") for choice in offered]) is None


@pytest.mark.parametrize(("ranks", "level"), [(1, 0), (4, 1)])
def test_where_everything_is_as_fast_the_star_is_where_the_concepts_page_says(ranks, level):
    settings = config(precision={"compute": "bf16"}, batch={"global": 32})
    unbound = replace(
        ROUND, copy_in_bytes=1e18, copy_out_bytes=1e18, disk_read_bytes=1e18, disk_write_bytes=1e18, link_bytes=1e18
    )
    winner = best(choices(settings, gpu(ranks), ActivationTraces(settings, model_of(settings)), unbound))
    assert winner is not None
    assert (winner.plan.facts.stage.level, winner.preset) == (level, "none")


def test_a_time_is_said_in_three_digits_and_never_as_a_power():
    for tenth in range(-60, 61):
        for nudge in (0.9994, 0.9996, 0.99996, 1, 1.2346):
            seconds = 10 ** (tenth / 10) * nudge
            said, unit = seconds_text(seconds).split(" ")
            assert re.fullmatch(r"\d{1,3}(,\d{3})*|\d{1,2}\.\d{1,2}|0\.\d+", said), said
            told = float(said.replace(",", "")) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]
            assert told == pytest.approx(seconds, rel=0.5e-2)
    assert [seconds_text(seconds) for seconds in (0.9996, 999.6, 1.5, 2e-3)] == ["1,000 ms", "1,000 s", "1.5 s", "2 ms"]


def test_batches_try_every_divisor_the_largest_first():
    asked = config(batch={"global": 24})
    assert [batch.numbers() for batch in batches(asked, 2)] == [
        (24, 12, 1), (24, 6, 2), (24, 4, 3), (24, 3, 4), (24, 2, 6), (24, 1, 12),
    ]  # fmt: skip
    for fixed in ({"global": 24, "micro": 3}, {"global": 24, "accumulate": 2}, {"global": "auto", "micro": 4}):
        assert len(list(batches(config(batch=fixed), 2))) == 1


@pytest.mark.parametrize(("share", "size"), [(0.2, 2), (0.45, 1), (0.7, 2), (1.5, 1)])
def test_settle_finds_the_largest_microbatch_as_brute_force_does(share, size):
    wide = config(batch={"global": 48 * size})
    model = model_of(wide)
    whole = build_plan(wide, model, zero.open_world(device="cpu"), activation_bytes=0)
    most = ActivationTraces(wide, model).bytes(48, "cpu")
    settings = config(
        batch={"global": 48 * size}, offload={"host_budget": tier_bytes(whole, "device") * 2 + int(share * most)}
    )

    def fits(accumulate: int) -> bool:
        solved = settings.model_copy(update={"batch": settings.batch.model_copy(update={"accumulate": accumulate})})
        machine = Machine(size, size, "cpu", 0, TiB * size, TiB, paper=True)
        nbytes = ActivationTraces(solved, model).bytes(48 // accumulate, "cpu")
        try:
            build_plan(solved, model, machine.world, room=machine.room, activation_bytes=nbytes)
        except ConfigError:
            return False
        return True

    expected = next(accumulate for accumulate in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48) if fits(accumulate))
    notes = []
    settled = run_ranks(
        size,
        lambda world: resolve_auto(
            settings, ActivationTraces(settings, model_of_rank(world, settings)), world, telling(notes.append)
        ),
    )
    for resolved, step_s, micro in settled:
        assert micro == resolved.batch.numbers()[1], "it was chosen here, so it may be halved later"
        assert step_s is None, "nothing was compared, so no rate was measured"
        assert resolved.batch.numbers() == (48 * size, 48 // expected, expected)
        assert resolved == settings.model_copy(update={"batch": resolved.batch}).on(size)
    assert len(notes) == (size if expected > 1 else 0)
    assert all("batch.micro" in note and "MiB" in note for note in notes)


def test_settle_changes_nothing_where_nothing_is_auto():
    """A run without auto does not even look at the model."""
    for batch in (
        {"global": 8, "micro": 2},
        {"global": 8, "accumulate": 4},
        {"global": "auto", "micro": 2},
        {"global": 1},
    ):
        settings = config(batch=batch)
        world = zero.open_world(device="cpu")
        assert resolve_auto(settings, None, world, telling(pytest.fail)) == (
            settings.on(1), None, int(settings.batch.is_open),
        )  # fmt: skip


def test_a_default_run_that_fits_keeps_its_batch_whole():
    settings = config()
    settled, *_ = resolve_auto(
        settings,
        ActivationTraces(settings, model_of(settings)),
        zero.open_world(device="cpu"),
        telling(pytest.fail),
    )
    assert settled == settings.on(1)
    assert settled.batch.numbers() == (8, 8, 1)


def test_where_nothing_fits_every_rank_says_what_is_needed_and_which_key_to_change():
    for stage in (3, "auto"):
        settings = config(zero_={"stage": stage}, offload={"host_budget": "1MiB"})
        with pytest.raises(ConfigError, match=r"offload\.host_budget=1\.0 MiB: a rank needs at least \d.*Raise"):
            run_ranks(
                2,
                lambda world, s=settings: resolve_auto(
                    s, ActivationTraces(s, model_of_rank(world, s)), world, Tracker()
                ),
            )


def test_a_stage_of_auto_becomes_the_best_one_and_says_why(tmp_path):
    settings = config(zero_={"stage": "auto"}, offload={"path": str(tmp_path)})
    notes = []
    settled = run_ranks(
        2,
        lambda world: resolve_auto(
            settings, ActivationTraces(settings, model_of_rank(world, settings)), world, telling(notes.append)
        ),
    )
    assert settled[0] == settled[1]
    chosen, step_s, _ = settled[0]
    assert type(chosen.zero.stage) is int
    assert chosen.offload == settings.offload, "the offload that was asked for"
    assert len(notes) == 4
    assert f"{seconds_text(step_s)} a step predicted" in notes[0]
    assert "measured here" in "".join(notes)


@pytest.mark.parametrize(
    ("size", "nodes", "said"),
    [
        (2, 1, r"; assumed: 0\.5 GB/s between ranks(, timed|$)"),
        (4, 2, r"\d, [\d.e+-]+ GB/s between ranks, [\d.e+-]+ GB/s between nodes(, timed|$)"),
        (2, 2, r"\d, [\d.e+-]+ GB/s between nodes(, timed|$)"),
    ],
)
def test_a_run_on_several_nodes_measures_what_is_between_its_ranks(size, nodes, said, tmp_path):
    settings = config(zero_={"stage": "auto"}, offload={"path": str(tmp_path)})
    notes = []
    run_ranks(
        size,
        lambda world: resolve_auto(
            settings, ActivationTraces(settings, model_of_rank(world, settings)), world, telling(notes.append)
        ),
        nodes=nodes,
    )
    [told] = {note for note in notes if "rates" in note}
    assert re.search(said, told.replace(" elementwise", "").replace(" million updates/s", "")), told
    assert ("assumed" in told) is (nodes == 1)


def test_with_offload_auto_as_well_anything_may_be_chosen(tmp_path):
    kinds = dict.fromkeys(("optimizer", "param", "grad"), "auto")
    settings = config(zero_={"stage": "auto"}, offload={"path": str(tmp_path), **kinds})
    notes = []
    shown = []
    settled, *_ = resolve_auto(
        settings,
        ActivationTraces(settings, model_of(settings)),
        zero.open_world(device="cpu"),
        telling(notes.append, lambda *told: shown.append(told)),
    )
    works = list(dict.fromkeys(what for what, _, _ in shown))
    assert works == ["probe", "settings to choose from"]
    assert [told for told in shown if told[1] == told[2]] == [("probe", 6, 6), ("settings to choose from", 17, 17)]
    assert settled.offload.kinds in {zero.Offload(p).kinds for p in ("none", "cpu", "auto")}, "memory is fast"
    assert "of 17 settings fit" in notes[0]


def test_slow_compute_is_not_measured_for_long(monkeypatch):
    """One turn to load things and one that counts; quick works are repeated, and the fastest turn counts."""
    now_s, turns = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])

    def work(seconds: float) -> None:
        turns.append(seconds)
        now_s[0] += seconds

    device = Device(torch.device("cpu"))
    assert timed.fastest_s([lambda: work(3.0), lambda: work(5.0)], device, 0.2) == pytest.approx([3.0, 5.0])
    assert turns == [3.0, 5.0, 3.0, 5.0]
    slower = iter([9.0, 0.05, 0.01, 0.06, 0.5])
    assert timed.fastest_s([lambda: work(next(slower))], device, 0.115) == pytest.approx([0.01])


@pytest.mark.parametrize("seq", [64, 128])
def test_products_are_timed_at_the_models_own_shapes(seq, monkeypatch):
    """A machine that computes tall products at a tenth of the rate of others: what counts is the model's mixture."""
    settings = config(model={**TINY, "seq": seq}, batch={"global": 2})
    traced = ActivationTraces(settings, model_of(settings)).of(2, "cpu")
    tokens, width = 2 * seq, TINY["width"]
    assert Product(1, tokens, width, 3 * width, (False, True)) in traced.products
    all_flops = sum(matmul.flops * count for matmul, count in traced.products.items())
    assert all_flops == traced.forward.flops + traced.backward.flops
    now_s = [0.0]

    def speed(product: Product) -> float:
        return 1e9 if product.m == tokens else 1e10

    def multiply(product: Product, compute: torch.dtype, device: Device):
        def work() -> None:
            now_s[0] += product.flops / speed(product)

        return work

    monkeypatch.setattr(probes, "_multiply", multiply)
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    all_s = sum(matmul.flops * count / speed(matmul) for matmul, count in traced.products.items())
    assert probes._flops(settings, traced, Device(torch.device("cpu"))) == pytest.approx(all_flops / all_s)


def test_a_long_product_is_timed_in_part():
    whole = Product(1, 8192, 1792, 9728, (False, True))
    part = whole.shortened(1e8)
    assert 2.5e7 < part.flops <= 1e8
    assert min(part[:4]) == 1
    assert max(part[1:4]) < 3 * min(part[1:4]), "no side is cut more than needed"
    assert whole.shortened(whole.flops) == whole


def test_a_step_is_the_sum_of_its_parts_and_grows_with_rows():
    settings = config(precision={"compute": "bf16"})
    model, rates = (
        model_of(settings),
        replace(ROUND, attention_flops=3e8, memory_bytes=1e9, launch_s=1e-5, update_numel=1e6),
    )
    counted, machine = ActivationTraces(settings, model), Machine(1, 1, "cpu", 0, TiB, TiB, paper=True)
    plan = build_plan(settings, model, machine.world, room=machine.room)
    written_bytes = 2 * plan.facts.flat_dtype.itemsize * sum(unit.trainable.P for unit in plan.units)
    updated_numel = sum(plan.sizes.update_numel(unit) for unit in plan.units)
    before_s = 0.0
    for rows in (1, 2, 4, 8):
        traced = counted.of(rows, "cpu")
        work = traced.forward + traced.backward
        parts_s = work.flops / 1e9 + work.attention_flops / 3e8 + (work.nbytes + written_bytes) / 1e9
        parts_s += work.launches * 1e-5 + updated_numel / 1e6
        step_s = step_seconds(plan, rates, traced.forward, traced.backward)
        assert step_s == pytest.approx(parts_s)
        assert min(work._replace(exchanged_bytes=1.0)) > 0
        assert step_s > before_s
        before_s = step_s


def test_recomputing_takes_longer_and_what_ranks_send_does_not_hide_on_a_cpu():
    settings = config(zero_={"stage": 3}, batch={"global": 2})
    model, slow = model_of(settings), replace(ROUND, flops=1e3)
    kept, again = (ActivationTraces(settings, model).of(1, "cpu", remat=remat) for remat in (False, True))
    assert again.backward.flops > kept.backward.flops
    assert again.forward.flops == kept.forward.flops
    machines = Machine(2, 2, "cpu", 0, TiB, TiB, paper=True), gpu(2)
    for machine, hides in zip(machines, (False, True), strict=True):
        plan = build_plan(settings.on(2), model, machine.world, room=machine.room)
        moved, first = traffic(plan), plan.units[0].full_numel / sum(unit.full_numel for unit in plan.units)
        exposed = first * (moved.first.link + moved.forward.link) if hides else moved.of_step(1).link
        with_s, without_s = (
            step_seconds(plan, replace(slow, link_bytes=link), kept.forward, kept.backward) for link in (1e6, 1e18)
        )
        assert with_s - without_s == pytest.approx(exposed / 1e6, abs=1e-3)


def test_what_comes_from_other_nodes_takes_its_own_time():
    """If nothing else takes time, a gather by node is quicker than a straight one by the bytes that it saves."""
    rates = replace(ROUND, update_numel=1e18, memory_bytes=1e18, link_bytes=1e9, wire_bytes=1e6)
    machine, took = Machine(16, 8, "cuda", TiB, TiB, TiB, paper=True), {}
    for way in ("world", "node"):
        settings = config(
            model={"layers": 40},
            zero_={"stage": 3, "gather": way, "reduce": "exact", "bucket": 0},
            batch={"global": 16},
        )
        plan = build_plan(settings.on(16), model_of(settings), machine.world, room=machine.room)
        moved, (first, again) = traffic(plan).of_step(1), (4 * numel for numel in gathered_numel(plan, 2))
        summed = 4 * sum(unit.trainable.P for unit in plan.units)
        # by node a rank has secondary shards of what it gathers again
        anew = summed if way == "node" else first
        again += first - anew
        assert moved.link == pytest.approx(((anew + summed) * 15 + again * {"world": 15, "node": 14}[way]) / 16)
        assert moved.wire == pytest.approx(
            (anew * {"world": 8, "node": 1}[way] + summed * 8 + again * 8 * (way == "world")) / 16
        )
        took[way] = step_seconds(plan, rates, OperatorWork(), OperatorWork())
        assert took[way] == pytest.approx((moved.link - moved.wire) / 1e9 + moved.wire / 1e6)
    assert took["node"] < 0.4 * took["world"]


def test_where_no_file_can_be_made_nothing_is_planned_on_disk(tmp_path):
    kinds = dict.fromkeys(("optimizer", "param", "grad"), "auto")
    settings = config(zero_={"stage": "auto"}, offload={"path": str(tmp_path / "missing"), **kinds})
    notes = []
    settled = run_ranks(
        2,
        lambda world: resolve_auto(
            settings, ActivationTraces(settings, model_of_rank(world, settings)), world, telling(notes.append)
        ),
    )
    assert all("nvme" not in resolved.config.offload.kinds for resolved in settled)
    assert "nothing can be offloaded to a disk here" in notes[0]
    assert "missing: no file can be made: ENOENT" in notes[0]
    assert "of 17 settings fit" in "".join(notes)
    text, fits = planning.plan_text(settings.changed("plan", all=True))
    assert fits
    assert "nothing can be offloaded to a disk here" in text
    assert "no, lacks nvme" in text


# What is really there


CASES = [
    *((1, stage, preset, "fp32") for stage, preset in ((0, "none"), (1, "nvme"), (2, "cpu"), (3, "infinity"))),
    *((1, stage, preset, "fp16") for stage, preset in ((0, "cpu"), (3, "nvme"))),
    *((2, stage, preset, "bf16") for stage, preset in ((0, "nvme"), (1, "none"), (2, "nvme"), (3, "cpu"))),
    *((2, stage, preset, "fp32") for stage, preset in ((1, "cpu"), (2, "none"), (3, "none"), (3, "infinity"))),
]
"""Every size, stage, preset and precision with every other."""


@pytest.mark.parametrize(
    ("size", "stage", "preset", "precision", "optimizer"),
    [
        *((*case, zero.adamw) for case in CASES),
        *((*case, zero.muon) for case in ((1, 0, "nvme", "bf16"), (2, 1, "cpu", "fp16"), (2, 3, "infinity", "fp32"))),
    ],
)
def test_the_plan_is_what_is_allocated(size, stage, preset, precision, optimizer, tmp_path, request):
    """Counted by looking at every tensor alive and at the nameless file, which know nothing of plans."""
    with zero.empty():
        models = [GPT(GPTConfig(**{**TINY, "width": 128})) for _ in range(size)]
    gc.freeze()  # from here on gc.get_objects() are those that come
    request.addfinalizer(gc.unfreeze)

    def run(world: zero.World) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        plan = zero.Plan(
            models[world.rank],
            optimizer=optimizer(1e-3, clip=1.0),
            world=world,
            stage=stage,
            precision=precision,
            offload=zero.Offload(preset, path=str(tmp_path), page_bytes=16 * KiB, threads=2),
        )
        store = zero.open_store(plan)
        state, step = zero.init(plan, store), zero.make_step(plan, loss)
        state, _ = step(state, [torch.zeros(2, 33, dtype=torch.int64)])
        world.barrier()
        counted = {}
        if world.rank == 0:
            counted = {"memory": sum(storages().values()), "nvme": nameless_bytes(tmp_path)}
        world.barrier()  # the others stand still while one looks at what they have
        measured_bytes = measured(state)
        told = {tier: tier_bytes(plan, tier) for tier in ("device", "host", "nvme")}
        assert against_measured(plan, measured_bytes).count("\n") == sum(map(bool, told.values()))
        store.close()
        kinds = {tier: {kind: n for kind, n in kind_bytes.items() if n} for tier, kind_bytes in plan.bytes.items()}
        kinds |= {"nvme": {"file": sum(kinds["nvme"].values())}} if "nvme" in kinds else {}
        assert {tier: kind_bytes for tier, kind_bytes in kinds.items() if kind_bytes} == measured_bytes
        return told, {tier: sum(kind_bytes.values()) for tier, kind_bytes in measured_bytes.items()}, counted

    ranks = run_ranks(size, run)
    for told, measured_bytes, _ in ranks:
        assert set(measured_bytes) == {tier for tier, nbytes in told.items() if nbytes}
        for tier, nbytes in measured_bytes.items():
            assert told[tier] == pytest.approx(nbytes, rel=0.05), tier
    counted = ranks[0][2]
    in_memory = sum(told["device"] + told["host"] for told, _, _ in ranks)
    assert in_memory == pytest.approx(counted["memory"], rel=0.05)
    assert sum(told["nvme"] for told, _, _ in ranks) == pytest.approx(counted["nvme"], rel=0.05)


def test_activations_are_estimated_and_the_table_says_so():
    settings = config().on(1)
    nbytes = 3 * 2**20
    machine = gpu(1)
    plan = build_plan(settings, model_of(settings), machine.world, room=machine.room, activation_bytes=nbytes)
    held = tier_bytes(plan, "device")
    *_, device, activations = against_measured(plan, {"device": {"moments": held - nbytes}}).splitlines()
    assert (device.split()[0], device.split()[-1]) == ("device", "1.000")
    assert activations.split() == ["activations", "3.0", "MiB", "not", "measured"]


def storages() -> dict[int, int]:
    """Address to size of all memory that a tensor of this process looks at."""
    sizes = {}
    for obj in gc.get_objects():
        if type(obj) in (torch.Tensor, torch.nn.Parameter) and not obj.is_meta:  # an absent parameter has no memory
            storage = obj.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    sizes.pop(0, None)
    return sizes


def nameless_bytes(folder: Path) -> int:
    sizes = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            if str(folder) in os.readlink(fd):
                sizes += os.stat(fd).st_size
        except FileNotFoundError:
            continue
    return sizes


# What is printed


def test_seven_billion_parameters_on_four_gpus_are_planned_in_seconds():
    settings = read(
        {
            "mode": "plan",
            "model": {
                "vocab": 32000,
                "width": 4096,
                "layers": 32,
                "heads": 32,
                "seq": 4096,
                "hidden": 11008,
                "tied": False,
            },
            "precision": {"compute": "bf16"},
            "plan": {"all": True, "ranks": 4, "device_memory": "80GiB", "host_memory": "1TiB", "disk": "4TB"},
        }
    )
    begin = time.process_time()
    overrides = ["model=gpt_7b", "offload=nvme", "offload.optimizer=cpu", "precision=bf16", "plan.ranks=4", "mode=plan"]
    text, fits = planning.plan_text(settings, overrides)
    assert fits
    assert time.process_time() - begin < 10
    assert "6,738,415,616 parameters" in text
    assert "assumed for each GPU" in text
    (marked,) = [line for line in text.splitlines() if line.startswith("* ") and line.endswith("yes")]
    *lines, command = text.splitlines()
    answer = next(line for line in lines if line.startswith("fits: "))
    assert command.startswith("  python train.py launch.ranks=4 model=gpt_7b precision=bf16 zero.stage=")
    setting = f"zero.stage={marked.split()[1]} offload={marked.split()[2]}"
    assert setting in command
    assert answer.startswith(f"fits: {setting}, about ")
    told = [line.split("no, lacks")[0] for line in lines]
    assert max(map(len, told)) <= 80
    alone, _ = planning.plan_text(settings.changed("plan", all=False), overrides)
    said = "plan.all=true prints every stage and offload. "
    assert alone.replace(said, "") == text[text.index("\n6,738,415,616") + 1 :]
    assert said in alone
    assert len(alone.splitlines()) < 20


def test_a_plan_says_which_memory_is_too_small_and_proposes_nothing_where_nothing_fits():
    text, fits = planning.plan_text(
        config(plan={"all": True, "ranks": 2, "device_memory": "2MiB", "host_memory": "4MiB", "disk": "1MiB"})
    )
    assert not fits
    assert sum("no, lacks device" in line for line in text.splitlines()) == 13
    *_, answer = text.split("\n\n")
    assert answer.startswith("nothing fits. Nearest: zero.stage=")
    assert "a rank needs at least" in answer.replace("\n ", "")


def test_what_is_wrong_with_every_setting_is_said_once():
    text, fits = planning.plan_text(config(offload={"device_budget": "1GiB"}, plan={"all": True}))
    assert not fits
    assert sum(line.endswith("  no") for line in text.splitlines()) == 13
    assert text.count("offload.device_budget=1.0 GiB") == 1


@pytest.mark.slow
@pytest.mark.parametrize("width", [8, 4096])
def test_columns_of_small_and_large_models_stay_apart(width):
    """A model of a few thousand parameters, whose steps last microseconds; one of billions on thousands of ranks."""
    large = {"width": width, "layers": 1 if width == 8 else 32, "heads": 1}
    machine = {"ranks": 2 if width == 8 else 4096, "device_memory": "80GiB", "host_memory": "64TiB", "disk": "9PB"}
    text, _ = planning.plan_text(
        config(model={**TINY, **large}, plan=machine | {"all": True}, batch={"global": 2 if width == 8 else 4096})
    )
    lines = text.splitlines()
    told = [line for line in lines if "train.py" not in line]
    assert max(len(line.split("no, lacks")[0]) for line in told) <= 80
    cell = r"(?: +[\d.]+ (?:B|[KMGT]iB)| {11})"
    rows = [line for line in lines if line.endswith("  yes")]
    assert rows
    for row in rows:
        assert re.fullmatch(rf"[* ] [0-3] +\w+ *{cell}{{2,3}} +\d+ +[\d.,e+]+ (?:s|ms|us)  yes", row), row


def test_fewer_rows_than_ranks_are_planned_with_a_row_each():
    text, _ = planning.plan_text(config(plan={"ranks": 64, "device_memory": "80GiB"}))
    assert "planned with batch.global=64" in text
    assert any(
        line.startswith("  torchrun --nnodes 8 --nproc-per-node 8 train.py zero.stage=") for line in text.splitlines()
    )


# When the plan was not enough


@pytest.mark.parametrize(
    ("settings", "ranks", "ways"),
    [
        (
            {"zero": {"stage": 2}, "batch": {"global": 8, "micro": 4}},
            2,
            "a smaller batch.micro, or zero.stage=3, or zero.activations=remat, or offload=cpu, or more ranks",
        ),
        (
            {"zero": {"activations": "remat"}, "batch": {"global": 1}, "offload": {"optimizer": "cpu", "grad": "cpu"}},
            1,
            "more ranks",
        ),
    ],
)
def test_out_of_memory_names_what_was_planned_and_taken_and_what_is_not_set_yet(settings, ranks, ways):
    config = read(settings).on(ranks)
    world = PaperWorld(ranks, local_size=ranks, device="cuda")
    plan = build_plan(config, model_of(config), world, room=NO_LIMIT)
    planned = size_text(tier_bytes(plan, "device"))
    assert out_of_memory(config, plan, 3 * GiB, 4 * GiB) == (
        f"the GPU ran out of memory: planned {planned}, taken 3.0 GiB of 4.0 GiB. Use {ways}."
    )
