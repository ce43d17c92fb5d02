"""Predicted seconds of a step against a simulation of events, and against the simulated clock of real steps."""

import re
import sys
from dataclasses import replace
from itertools import product
from math import inf

import pytest
import torch
from torch import nn

import zero
from tests.common.small import KiB
from tests.simulation import simulated_gpu
from tests.simulation.simulated_time import RATES
from tests.trainer.test_planning import config, gpu, model_of
from zero.core.placement import NO_LIMIT
from zero.engine.model.split import split
from zero.engine.plan import placing
from zero.engine.plan.traffic import traffic
from zero.errors import ConfigError
from zero.testing import run_ranks
from zero.tracker import Tracker
from zero.trainer.planning import ActivationTraces, Machine, plan_text, probes, resolve_auto, trace
from zero.trainer.planning.choices import plan_choice, with_compute
from zero.trainer.planning.cost import Ahead, Rates, break_even, limits, step_seconds
from zero.trainer.planning.machine import PaperWorld
from zero.trainer.planning.rates import assumed, with_drives
from zero.trainer.planning.traces.operators import OperatorWork
from zero.trainer.planning.update_probes import update_numel

FREE = Rates(
    flops=1.0,
    attention_flops=1.0,
    memory_bytes=inf,
    launch_s=0.0,
    copy_in_bytes=inf,
    copy_out_bytes=inf,
    disk_read_bytes=inf,
    disk_write_bytes=inf,
    host_bytes=inf,
    link_bytes=inf,
    wire_bytes=inf,
    update_numel=inf,
    host_update_numel=inf,
    source="a test",
)
"""A machine on which only compute takes time: a second for each operation."""

WIDTH = 128


def stack(units: int) -> nn.Module:
    with zero.empty():
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(units)))


def stack_plan(
    world: zero.World, units: int, microbatches: int, offload: zero.Offload | str, moments: str = "fp32", **settings
) -> zero.Plan:
    return zero.Plan(
        stack(units), optimizer=zero.with_moments(zero.adamw(1e-2), moments), world=world, precision="bf16",
        accumulate=microbatches, offload=offload, units=["Linear"], **settings,
    )  # fmt: skip


def paged_plan(units: int, microbatches: int, offload: zero.Offload) -> zero.Plan:
    """A plan whose pages all move, although there are so few that each could have a slot."""
    plan = stack_plan(gpu(1).world, units, microbatches, offload, stage=0, room=NO_LIMIT)
    plan.slots = plan.slots._replace(keeps_staged=False)
    return plan


# Against a simulation of events

PAGES = 16
"""Pages of a unit in the simulation."""


def simulated_step_s(
    units: int, microbatches: int, forward_s: float, backward_s: float, read_s: float, write_s: float, slots: int
) -> float:
    """Simulate steps page by page; return the time of the last one.

    Two engines, one for each direction, move pages in the order of forward. A page is read into a slot, updated when
    the backward of the step has ended, and written; then its slot is free. A unit's forward starts after the updates
    of all of its pages. `slots=0` stands for slots that are used in the first forward only.

    Args:
        read_s, write_s: seconds to move all pages once.
    """
    count = units * PAGES
    free_s = [0.0] * max(slots, count if not slots else 0)
    in_s = out_s = decided_s = 0.0
    lasted_s = 0.0
    for _ in range(40):
        begin_s = now_s = decided_s
        for unit in range(units):
            for page in range(unit * PAGES, (unit + 1) * PAGES):
                slot = page % len(free_s) if not slots else None
                ready_s = max(in_s, free_s.pop(0)) if slots else max(in_s, free_s[slot], decided_s)
                in_s = ready_s + read_s / count
                updated_s = max(in_s, decided_s)
                out_s = max(out_s, updated_s) + write_s / count
                if slots:
                    free_s.append(out_s)
                else:
                    free_s[slot] = out_s
                now_s = max(now_s, updated_s if slots else out_s)
            now_s += forward_s / units
        decided_s = now_s + backward_s + (microbatches - 1) * (forward_s + backward_s)
        lasted_s = decided_s - begin_s
    return lasted_s


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("units", [1, 2, 4, 8])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_step_lasts_as_long_as_a_simulation_of_its_pages(tier, units, microbatches):
    offload = zero.Offload(optimizer=tier)
    plan = paged_plan(units, microbatches, offload)
    states = traffic(plan).states
    nbytes = states.disk_read or states.copy_in
    assert nbytes > 8 * sum(unit.trainable.P for unit in plan.units)
    for in_s, out_s, share in product((0.2, 1.0, 3.0, 9.0), (0.2, 1.0, 3.0, 9.0), (0.0, 0.25, 0.5, 1.0)):
        slots = int(share * units * PAGES)
        expected_s = simulated_step_s(units, microbatches, 1.0, 2.0, in_s, out_s, slots)
        if tier == "cpu":
            rates = replace(FREE, copy_in_bytes=nbytes / in_s, copy_out_bytes=nbytes / out_s)
            ahead = Ahead(on_device=share)
        else:
            rates = replace(FREE, disk_read_bytes=nbytes / in_s, disk_write_bytes=nbytes / out_s)
            ahead = Ahead(on_host=share)
        step_s = step_seconds(plan, rates, OperatorWork(1.0), OperatorWork(2.0), ahead=ahead)
        assert step_s == pytest.approx(expected_s, rel=0.1), (in_s, out_s, share)


@pytest.mark.parametrize(("device", "each"), [("cpu", 24.0), ("cuda", 33 / 64 + 2)])
def test_codes_are_expanded_in_each_forward_and_each_backward(device, each):
    plans = []
    for frozen in ("compute", "nf4"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)), nn.Linear(64, 1))
        model[:4].requires_grad_(False)
        precision = zero.Precision("bf16", frozen=frozen)
        world = PaperWorld(1, local_size=1, device=device)
        plans.append(
            zero.Plan(model, optimizer=zero.adamw(1e-3), precision=precision, world=world, accumulate=3, room=NO_LIMIT)
        )
    rates = replace(FREE, memory_bytes=1e3)
    values_s, codes_s = (step_seconds(plan, rates, OperatorWork(1.0), OperatorWork(2.0)) for plan in plans)
    forward, backward, _ = plans[1].sizes.gathers()
    gathers = 3 * sum(forward[number] + backward[number] for number in range(4))  # the last unit trains
    assert codes_s - values_s == pytest.approx(gathers * 64 * 64 * each / 1e3)


@pytest.mark.parametrize("part", ["in", "out"])
def test_slots_for_a_whole_state_leave_the_slower_direction_or_compute(part):
    plan = paged_plan(4, 1, zero.Offload(optimizer="cpu"))
    nbytes = traffic(plan).states.copy_in
    for moving_s in (2.0, 30.0):
        rates = replace(FREE, **{f"copy_{part}_bytes": nbytes / moving_s})
        assert step_seconds(plan, rates, OperatorWork(1.0), OperatorWork(2.0), ahead=Ahead(1.0)) == pytest.approx(
            max(moving_s, 3.0)
        )
        assert step_seconds(plan, rates, OperatorWork(1.0), OperatorWork(2.0), ahead=Ahead()) == pytest.approx(
            moving_s + 1 / 4 + 2
        )


def test_the_shares_of_what_limits_a_step_are_its_parts():
    """Reads of 3 s, then the forward of the last unit and the backward. Writes of half as long set nothing."""
    plan = paged_plan(4, 1, zero.Offload(optimizer="cpu"))
    nbytes = traffic(plan).states.copy_in
    rates = replace(FREE, copy_in_bytes=nbytes / 3.0, copy_out_bytes=nbytes / 1.5)
    shares = limits(lambda rates: step_seconds(plan, rates, OperatorWork(1.0), OperatorWork(2.0), ahead=Ahead()), rates)
    assert shares == pytest.approx({"PCIe in": 3 / 5.25, "compute": 2.25 / 5.25})
    assert list(shares) == ["PCIe in", "compute"]


@pytest.mark.parametrize(("units", "in_s"), [(1, 3.0), (4, 3.0), (4, 0.01)])
def test_a_break_even_is_where_compute_hides_what_moves_but_for_a_fiftieth(units, in_s):
    """Reads take as long as `in_s` forwards. A unit that has nothing before it hides nothing, however long it takes."""
    plan = paged_plan(units, 1, zero.Offload(optimizer="cpu"))
    rates = replace(FREE, copy_in_bytes=traffic(plan).states.copy_in / in_s)

    def seconds(rates: Rates, tokens: float) -> float:
        return step_seconds(plan, rates, OperatorWork(1.0), OperatorWork(2.0), ahead=Ahead(), tokens=tokens)

    factor = break_even(seconds, rates)
    # the first unit's share of the reads is exposed: in_s / units of 3 * factor
    assert factor == pytest.approx(max(1.0, in_s / units / (0.02 * 3)), rel=1e-3)


def test_no_number_of_tokens_hides_a_disk_that_stands_still():
    plan = paged_plan(2, 1, zero.Offload(optimizer="cpu"))
    rates = replace(FREE, copy_out_bytes=1e-9)
    assert (
        break_even(lambda rates, n: step_seconds(plan, rates, OperatorWork(1.0), OperatorWork(2.0), tokens=n), rates)
        == inf
    )


# Described machines


def described(**plan) -> Rates:
    settings = config(plan={"gpu": "H100", **plan}, precision={"compute": "bf16"})
    return with_drives(assumed(settings, Machine.described(settings)), settings, 1)


def test_pcie_and_drives_are_described_by_number():
    """Nominal rates: 4 GB/s a lane in generation 5, half of it in generation 4."""
    h100 = described()
    assert 0.6 * 64e9 < h100.copy_in_bytes == h100.copy_out_bytes < 64e9
    for pcie, share in (("5x16", 1), ("5x8", 1 / 2), ("4x16", 1 / 2), ("3x4", 1 / 16), ("6x16", 2)):
        assert described(pcie=pcie).copy_in_bytes == pytest.approx(share * h100.copy_in_bytes)
        assert f"{described(pcie=pcie).copy_out_bytes / 1e9:.3g} GB/s to the host" in described(pcie=pcie).source
    four = described(disks=4)
    assert (four.disk_read_bytes, four.disk_write_bytes) == (4 * h100.disk_read_bytes, 4 * h100.disk_write_bytes)
    assert described(ranks=8, ranks_per_node=4).disk_read_bytes == h100.disk_read_bytes / 4


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"pcie": "5"}, r"plan\.pcie=5: must be a generation from 3 to 6 and lanes, such as 5x16"),
        ({"pcie": "7x16"}, r"plan\.pcie=7x16: must be"),
        ({"pcie": "5x3"}, r"plan\.pcie=5x3: must be"),
        ({"disks": 0}, r"plan\.disks=0"),
    ],
)
def test_a_machine_that_does_not_exist_is_an_error_of_one_line(plan, message):
    with pytest.raises(ConfigError, match=message) as error:
        config(plan=plan)
    assert "\n" not in str(error.value)


def test_pcie_without_a_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"plan\.pcie=5x16 is for a machine with GPUs\. Set plan\.gpu as well\."):
        Machine.described(config(plan={"pcie": "5x16"}))


def test_an_h100_computes_seven_billion_parameters_at_the_rate_of_its_products():
    """544 of 989 TFLOP/s: 6 operations for each parameter and token, and attention."""
    layers, width, seq, numel = 32, 4096, 4096, 6.74e9
    large = {"vocab": 32000, "width": width, "layers": layers, "heads": 32, "seq": seq, "hidden": 11008, "tied": False}
    settings = config(model=large, plan={"gpu": "H100"}, precision={"compute": "bf16"}, batch={"global": 1})
    traced = ActivationTraces(settings, model_of(settings)).of(1, "cuda")
    rates = assumed(settings, Machine.described(settings))
    work = traced.forward + traced.backward
    predicted_s = work.flops / rates.flops + work.attention_flops / rates.attention_flops
    expected_s = (6 * numel * seq + 14 * layers * seq**2 * width) / 544e12
    assert predicted_s == pytest.approx(expected_s, rel=0.1)


# The processor of the update


@pytest.mark.parametrize(("fast", "compute"), [("copy_in_bytes", "device"), ("host_update_numel", "host")])
def test_auto_updates_where_a_step_is_shorter(fast, compute, monkeypatch):
    monkeypatch.setattr(placing, "STAGED", 1)  # so that pages move
    settings = config(
        zero_={"stage": 3},
        precision={"compute": "bf16"},
        offload={"optimizer": "cpu", "grad": "cpu", "compute": "auto", "ahead": 0},
    )
    model, machine = model_of(settings), gpu(1)
    rates = replace(FREE, flops=1e15, attention_flops=1e15, copy_in_bytes=1e6, host_update_numel=1e4)
    rates = replace(rates, **{fast: 1e12})
    counted = ActivationTraces(settings, model)
    choice = plan_choice(settings, "config", machine, counted, rates)
    fixed = {
        where: plan_choice(
            settings.model_copy(update={"offload": settings.offload.model_copy(update={"compute": where})}),
            "config", machine, counted, rates,
        ).seconds
        for where in ("device", "host")
    }  # fmt: skip
    assert choice.config.offload.compute == compute == min(fixed, key=fixed.__getitem__)
    assert choice.seconds == min(fixed.values())
    assert ("offload.compute=host" in choice.keys) is (compute == "host")


def test_auto_shares_the_update_so_that_link_and_host_end_together(monkeypatch):
    """The time is the least of all shares in sixteenths, and less than with either processor alone."""
    monkeypatch.setattr(placing, "STAGED", 1)  # so that pages move
    offload = {**dict.fromkeys(("optimizer", "param", "grad"), "cpu"), "compute": "auto", "page": 4096}
    settings = config(zero_={"stage": 3}, precision={"compute": "bf16"}, offload={**offload, "ahead": 0})
    model, machine = model_of(settings), gpu(1)
    rates = replace(FREE, flops=1e15, attention_flops=1e15)
    rates = replace(rates, copy_in_bytes=1e9, copy_out_bytes=1e9, host_update_numel=1e8)
    counted = ActivationTraces(settings, model)
    seconds = {
        share: plan_choice(with_compute(settings, share), "config", machine, counted, rates).seconds
        for share in [number / 16 for number in range(17)]
    }
    choice = plan_choice(settings, "config", machine, counted, rates)
    assert choice.seconds == min(seconds.values()) < 0.95 * min(seconds[0], seconds[1])
    assert seconds[choice.config.offload.host_share] == choice.seconds
    assert f"offload.compute={choice.config.offload.compute}" in choice.keys


def test_auto_leaves_updates_to_one_processor_while_gradients_are_on_the_gpu(monkeypatch):
    monkeypatch.setattr(placing, "STAGED", 1)
    settings = config(
        zero_={"stage": 3},
        precision={"compute": "bf16"},
        offload={"optimizer": "cpu", "compute": "auto", "page": 4096, "ahead": 0},
    )
    rates = replace(FREE, flops=1e15, attention_flops=1e15, copy_in_bytes=1e9, copy_out_bytes=1e9)
    rates = replace(rates, host_update_numel=1e8)
    choice = plan_choice(settings, "config", gpu(1), ActivationTraces(settings, model_of(settings)), rates)
    assert choice.config.offload.compute in ("device", "host")


def test_auto_is_the_device_where_nothing_is_offloaded():
    settings = config(offload={"compute": "auto", "ahead": 0})
    model, machine = model_of(settings), gpu(1)
    choice = plan_choice(settings, "config", machine, ActivationTraces(settings, model), assumed(settings, machine))
    assert choice.config.offload.compute == "device"


@pytest.mark.parametrize(("fast", "compute"), [("copy_in_bytes", "device"), ("host_update_numel", "host")])
def test_a_run_takes_the_processor_that_its_measured_rates_favour(fast, compute, monkeypatch):
    monkeypatch.setattr(placing, "STAGED", 1)  # so that pages move
    settings = config(zero_={"stage": 3}, offload={"optimizer": "cpu", "compute": "auto", "ahead": 0})
    rates = replace(FREE, flops=1e15, attention_flops=1e15, copy_in_bytes=1e6, host_update_numel=1e4)
    monkeypatch.setattr(
        sys.modules[resolve_auto.__module__], "measured_rates", lambda *_, **__: replace(rates, **{fast: 1e12})
    )
    with simulated_gpu():
        [resolved] = run_ranks(
            1, lambda world: resolve_auto(settings, ActivationTraces(settings, model_of(settings)), world, Tracker())
        )
    assert resolved.config.offload.compute == compute
    assert resolved.step_s > 0


def test_a_run_on_a_cpu_measures_nothing_to_choose_its_processor(monkeypatch):
    planning = sys.modules[resolve_auto.__module__]
    monkeypatch.setattr(planning, "measured_rates", lambda *_, **__: pytest.fail("measured"))
    settings = config(batch={"global": 1}, offload={"compute": "auto", "ahead": 0})
    resolved = resolve_auto(
        settings, ActivationTraces(settings, model_of(settings)), zero.open_world(device="cpu"), Tracker()
    )
    assert (resolved.config.offload.compute, resolved.step_s) == ("device", None)


# The text


def test_a_plan_says_what_limits_its_step_and_what_would_move_that():
    """Moments on four slow drives: a fifth one is a quarter more, and half of each moment is less to move."""
    large = {"width": 2048, "layers": 8, "heads": 16, "seq": 512}
    machine = {"gpu": "H100", "host_memory": "3GiB", "disk": "4TB", "device_memory": "5GiB", "disks": 4}
    text, fits = plan_text(config(model=large, plan=machine, precision={"compute": "bf16"}, batch={"global": 8}))
    assert fits
    sentence = text.split("\n\n")[-1].replace("\n ", "")
    assert "offload=nvme" in sentence
    assert "limits of the step: disk writes" in sentence
    assert "Compute hides all transfers from" in sentence
    gains = sentence.split("times the tokens/s: ")[1]
    assert "optim.moments=bf16" in gains
    drive = float(gains.split("another drive ")[1][:4])
    assert 1.02 < drive <= 1.25


def test_a_plan_says_what_moves_when_memory_runs_short():
    """The fastest of the lower plans first; and with offload=auto the last pages of each memory."""
    kinds = dict.fromkeys(("optimizer", "param", "grad"), "auto")
    large = {"width": 2048, "layers": 8, "heads": 16, "seq": 512}
    machine = {"gpu": "H100", "host_memory": "60GiB", "disk": "4TB", "device_memory": "20GiB"}
    settings = config(model=large, plan=machine, precision={"compute": "bf16"}, offload=kinds)
    answer, fits = plan_text(settings)
    assert fits
    sentences = answer.split("\n\n")[-1].replace("\n ", "")
    retried = re.search(r"if a step runs out of memory, it is made again with (.*)", sentences)[1].split(", or then ")
    print(*retried, sep="\n")
    assert retried[0].startswith("zero.activations=remat (then ")
    assert len(retried) == 3
    assert re.search(
        r"if the GPU runs short, the optimizer's pages of blocks\.\d to \w+ move to host memory", sentences
    )
    calm, _ = plan_text(settings.changed("offload", pressure="off"))
    assert "runs short" not in calm


# Against the simulated clock


@pytest.mark.parametrize("to_host", [False, True])
def test_probes_of_copies_measure_each_direction(to_host, monkeypatch):
    def run(world: zero.World) -> tuple[float, int]:
        monkeypatch.setattr(
            "time.perf_counter", lambda: world.compute.streams.seconds(world.compute.streams.host.moment)
        )
        rate = probes._copy_bytes(world.compute, to_host=to_host)
        return rate, sum(copy.nbytes for copy in world.compute.copies if copy.to_host != to_host)

    with simulated_gpu(races=True):
        assert run_ranks(1, run) == [(pytest.approx(RATES.link_bytes_per_s, rel=0.01), 0)]


def test_the_probe_of_host_memory_counts_reads_and_writes(monkeypatch):
    def run(world: zero.World) -> float:
        monkeypatch.setattr(
            "time.perf_counter", lambda: world.compute.streams.seconds(world.compute.streams.host.moment)
        )
        return probes._host_bytes(world.compute.host)

    with simulated_gpu(races=True):
        assert run_ranks(1, run) == [pytest.approx(RATES.host_bytes_per_s, rel=0.01)]


PLANS = [
    *product((4, 6, 8), ("none",), ("fp32", "bf16"), (1, 2), (128,)),
    *product((4, 6), ("cpu",), ("fp32", "bf16"), (1, 2), (128, 512)),
    *product((8,), ("cpu",), ("fp32", "bf16"), (1,), (256,)),
]
"""30 plans: units, tier, moments, microbatches, rows of a microbatch."""


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def offload_of(tier: str) -> zero.Offload:
    return zero.Offload(tier, page_bytes=8 * KiB, ahead=256 * KiB)


def last_step_s(world: zero.World, units: int, tier: str, moments: str, microbatches: int, rows: int) -> float:
    """Return the mean seconds of two steps after others, on the clock of the simulation."""
    plan = stack_plan(world, units, microbatches, offload_of(tier), moments)
    state, step, ends = zero.init(plan, zero.open_store(plan)), zero.make_step(plan, mean_square), []
    for _ in range(6):
        state, _ = step(state, [torch.ones(rows, WIDTH, dtype=torch.bfloat16)] * microbatches)
        ends.append(world.compute.streams.main.agent.moment)
    begin_s, end_s = (world.compute.streams.seconds(ends[number]) for number in (-3, -1))
    state.runtime.store.close()
    return (end_s - begin_s) / 2


def simulated_rates(world: zero.World, moments: str) -> Rates:
    """The rates of the simulation; a probe of plans times the update on its clock."""
    settings = config(precision={"compute": "bf16"}, optim={"name": "adamw", "moments": moments})
    return replace(
        FREE,
        flops=RATES.flops_per_s,
        memory_bytes=RATES.device_bytes_per_s,
        copy_in_bytes=RATES.link_bytes_per_s,
        copy_out_bytes=RATES.link_bytes_per_s,
        update_numel=update_numel(settings, world.compute, 0.2),
    )


@pytest.fixture(scope="module")
def rates_by_moments():
    rates = {}
    for moments in ("fp32", "bf16"):
        with simulated_gpu(races=True), pytest.MonkeyPatch.context() as patch:

            def run(world, moments=moments, patch=patch):
                patch.setattr(
                    "time.perf_counter", lambda: world.compute.streams.seconds(world.compute.streams.host.moment)
                )
                return simulated_rates(world, moments)

            [rates[moments]] = run_ranks(1, run)
    return rates


@pytest.mark.slow(keep=10)
@pytest.mark.parametrize(("units", "tier", "moments", "microbatches", "rows"), PLANS)
def test_a_step_lasts_as_long_as_on_the_simulated_clock(
    units, tier, moments, microbatches, rows, rates_by_moments, monkeypatch
):
    monkeypatch.setattr(placing, "STAGED_BYTES", 32 * KiB)  # as small beside a unit as slots are on a GPU
    with simulated_gpu(races=True):
        [lasted_s] = run_ranks(1, last_step_s, units, tier, moments, microbatches, rows)
    plan = stack_plan(gpu(1).world, units, microbatches, offload_of(tier), moments, room=NO_LIMIT)
    model = stack(units)
    batch = torch.empty(rows, WIDTH, dtype=torch.bfloat16, device="meta")
    traced = trace(model, split(model, world_size=1), mean_square, batch, compute=torch.bfloat16)
    step_s = step_seconds(plan, rates_by_moments[moments], traced.forward, traced.backward)
    assert step_s == pytest.approx(lasted_s, rel=0.1)
