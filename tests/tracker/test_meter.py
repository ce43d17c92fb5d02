"""Rows say what moved between tiers and ranks and what it cost: bytes of all ranks, seconds of the slowest."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import zero
from zero.core.precision import Precision
from zero.platform.gpu_peaks import PEAKS, peak_flops
from zero.store import Traffic
from zero.testing import run_ranks
from zero.tracker import ROW, meter as meters
from zero.tracker.interval import TOTALS, figures
from zero.tracker.meter import TIME_KEYS, Meter, endurance
from zero.trainer.models.gpt_config import GPTConfig


class Counted:
    """A store's running totals that a test moves on."""

    def __init__(self, **start):
        self.now = Traffic(**start)

    def __call__(self):
        return self.now

    def add(self, **more):
        self.now = replace(self.now, **{key: getattr(self.now, key) + value for key, value in more.items()})


METRICS = SimpleNamespace(loss=2.0, grad_norm=1.0, lr=0.1, loss_scale=1.0, skipped=False)


def plan_of(**tiers):
    facts = SimpleNamespace(trains=False, splitting=SimpleNamespace(trainable_numel=100))
    return SimpleNamespace(numel=100, facts=facts, bytes=tiers)


def meter_of(world, traffic, flops_per_token=None, peak_flops=None, **tiers):
    plan = plan_of(device={"parameters": 400}, **tiers)
    return Meter(
        world, plan, tokens_per_step=64, traffic=traffic, flops_per_token=flops_per_token, peak_flops=peak_flops
    )


def test_a_run_without_offload_moves_nothing_and_hides_nothing():
    meter = meter_of(zero.open_world(), Counted())
    meter.count(METRICS)
    row = meter.row(validated=False)
    assert set(row) == set(ROW)
    assert tuple(row) == ROW
    assert {key: row[key] for key in ROW if key.startswith("offload/")} == {
        "offload/read_bytes": 0, "offload/write_bytes": 0, "offload/copy_bytes": 0, "offload/wait_s": 0.0,
        "offload/read_gbps": None, "offload/write_gbps": None, "offload/bytes_per_param": 0.0,
        "offload/moved_bytes": 0,
    }  # fmt: skip
    assert row["speed/hidden_fraction"] == 1
    assert row["speed/compute_s"] == row["speed/step_s"]
    assert row["speed/stall_fraction"] == 0
    assert {key: row[key] for key in ROW if key.startswith("comm/")} == {
        "comm/gather_bytes": 0, "comm/reduce_bytes": 0, "comm/wire_bytes": 0, "comm/wait_s": 0.0,
        "comm/slowest_rank": None, "comm/slowest_s": None,
    }  # fmt: skip
    assert row["speed/mfu"] is None, "a CPU has no peak"
    assert row["memory/nvme_bytes"] == 0
    summary = meter.summary("digest", "finished")
    assert (summary.offload_written_bytes, summary.endurance) == (0, None)


def test_a_row_counts_its_own_steps_only():
    traffic = Counted(read_bytes=7, write_bytes=5000, wait_s=9.0)
    meter = meter_of(zero.open_world(), traffic, nvme={"master": 400})
    for _ in range(2):
        meter.count(METRICS)
        traffic.add(read_bytes=1200, write_bytes=800, read_s=1.0, write_s=0.5, busy_s=1.25, wait_s=0.0)
    first = meter.row(validated=False)
    assert (first["offload/read_bytes"], first["offload/write_bytes"]) == (2400, 1600)
    assert first["offload/bytes_per_param"] == 20
    assert first["offload/read_gbps"] == pytest.approx(1200e-9)
    assert first["offload/write_gbps"] == pytest.approx(1600e-9)
    meter.count(METRICS)
    second = meter.row(validated=False)
    assert second["offload/read_bytes"] == second["offload/write_bytes"] == 0
    summary = meter.summary("digest", "finished")
    assert summary.offload_written_bytes == 6600, "first values count as written"
    assert summary.endurance == endurance(1600 / 3), "but no step wrote them"


def test_a_speed_is_of_the_tokens_that_the_steps_had():
    meter = meter_of(zero.open_world(), Counted())
    for counts in ((None, None), (64, 192), (32,)):
        for tokens in counts:
            meter.count(METRICS, tokens)
        row = meter.row(validated=False)
        mean = sum(64 if tokens is None else tokens for tokens in counts) / len(counts)
        assert row["speed/tokens_per_s"] * row["speed/step_s"] == pytest.approx(mean)
    assert meter.tokens == row["tokens"] == 416


def test_the_first_row_after_a_start_says_of_how_many_steps_it_is():
    """A run that goes on from step 25 has its first row at step 30."""
    meter = Meter(zero.open_world(), plan_of(), tokens_per_step=64, traffic=Counted(), steps=25)
    counted = []
    for step in range(26, 41):
        meter.count(METRICS)
        if step % 10 == 0:
            row = meter.row(validated=False)
            counted.append((row["step"], row["speed/steps"]))
    assert counted == [(30, 5), (40, 10)]


def test_what_a_pause_moves_is_not_a_steps_but_wears_the_drive():
    traffic = Counted()
    meter = meter_of(zero.open_world(), traffic)
    meter.count(METRICS)
    traffic.add(read_bytes=10)
    with meter.interval.paused():
        traffic.add(read_bytes=1000, write_bytes=500, wait_s=3.0)
    row = meter.row(validated=True)
    assert (row["offload/read_bytes"], row["offload/write_bytes"], row["offload/wait_s"]) == (10, 0, 0)
    assert meter.summary("digest", "finished").offload_written_bytes == 500


def test_what_updates_move_while_a_step_is_over_is_that_steps(monkeypatch):
    """They go on beside what ranks do between two steps, whose time is nobody's."""
    now_s, traffic = [0.0], Counted()
    monkeypatch.setattr("zero.tracker.interval.time.perf_counter", lambda: now_s[0])
    meter = meter_of(zero.open_world(), traffic)
    now_s[0] += 2.0
    meter.count(METRICS)
    with meter.interval.clock_stopped():
        traffic.add(write_bytes=500, wait_s=3.0)
        now_s[0] += 7.0
    row = meter.row(validated=False)
    assert (row["offload/write_bytes"], row["offload/wait_s"], row["speed/step_s"]) == (500, 0, 2.0)


def test_a_step_that_is_looked_at_moves_bytes_and_takes_no_time(monkeypatch):
    """Of three steps one lasts 50 s: the row's speed is that of the others, and alone it has none."""
    now_s, traffic = [0.0], Counted()
    monkeypatch.setattr("zero.tracker.interval.time.perf_counter", lambda: now_s[0])
    meter = meter_of(zero.open_world(), traffic)

    def step(seconds, waited):
        now_s[0] += seconds
        traffic.add(read_bytes=10, wait_s=waited, busy_s=2 * waited)
        meter.count(METRICS)

    step(1.0, 0.25)
    with meter.interval.untimed():
        step(50.0, 40.0)
    step(1.0, 0.75)
    row = meter.row(validated=False)
    assert (row["speed/step_s"], row["speed/tokens_per_s"]) == (1.0, 64)
    assert (row["speed/stall_fraction"], row["offload/wait_s"], row["speed/hidden_fraction"]) == (0.5, 0.5, 0.5)
    assert (row["offload/read_bytes"], row["offload/bytes_per_param"]) == (30, 0.1)

    with meter.interval.untimed():
        step(50.0, 40.0)
    row = meter.row(validated=False)
    assert tuple(row) == ROW
    assert {row[key] for key in TIME_KEYS} == {None}
    assert (row["step"], row["offload/read_bytes"]) == (4, 10)
    summary = meter.summary("digest", "finished")
    assert (summary.tokens_per_s, summary.wait_s) == (64, 1)

    step(2.0, 0.0)
    assert meter.row(validated=False)["speed/step_s"] == 2, "the next row has nothing of it"


def test_a_summary_needs_no_other_rank():
    """A rank that is left alone says what it knows itself."""
    traffic = Counted()
    meter = meter_of(zero.open_world(), traffic, nvme={"master": 1})
    meter.count(METRICS)
    traffic.add(write_bytes=300)
    summary = meter.summary("digest", "stopped")
    assert summary.offload_written_bytes == 300
    assert summary.endurance == endurance(300)


def test_bytes_are_everyones_and_seconds_those_of_the_slowest():
    def rank(world):
        traffic = Counted()
        meter = meter_of(world, traffic)
        meter.count(METRICS)
        slow = world.rank == 1
        traffic.add(
            read_bytes=100, write_bytes=50, read_s=2.0 if slow else 1.0, write_s=1.0, busy_s=4.0,
            wait_s=1.0 if slow else 0.0,
        )  # fmt: skip
        return meter.row(validated=False), meter.summary("digest", "finished")

    for row, summary in run_ranks(2, rank):
        assert row["offload/read_bytes"] == 200
        assert row["offload/wait_s"] == 1.0
        assert row["offload/read_gbps"] == pytest.approx(100e-9)
        assert row["speed/hidden_fraction"] == 0.75
        assert summary.offload_written_bytes == 100


@pytest.mark.parametrize(
    ("moved", "hidden", "compute_s"),
    [
        ({}, 1.0, 5.0),
        ({"read_bytes": 8, "busy_s": 4.0, "wait_s": 0.0}, 1.0, 5.0),
        ({"read_bytes": 8, "busy_s": 4.0, "wait_s": 1.0}, 0.75, 4.5),
        ({"read_bytes": 8, "busy_s": 1.0, "wait_s": 30.0}, 0.0, 0.0),
        ({"comm_gather_bytes": 8, "comm_wait_s": 2.0}, 1.0, 4.0),
        ({"busy_s": 4.0, "wait_s": 1.0, "comm_wait_s": 2.0}, 0.75, 3.5),
    ],
)
def test_hidden_is_what_nobody_waited_for(moved, hidden, compute_s):
    """Two steps of five seconds; callers in several threads may wait longer, together, than a step lasts."""
    counted = {name: torch.tensor([moved.get(name, 0.0)], dtype=torch.float64) for name in TOTALS}
    told = figures(counted, steps=2, timed=2, step_s=5.0, numel=4)
    assert (told["speed/hidden_fraction"], told["speed/compute_s"]) == (hidden, compute_s)
    assert told["speed/stall_fraction"] == pytest.approx(1 - compute_s / 5)
    assert all(value is None or math.isfinite(value) for value in told.values())


def test_a_step_stalls_as_long_as_the_rank_that_stood_still_longest():
    """Not as long as the longest waits of several ranks together."""
    moved = {name: torch.zeros(2) for name in TOTALS}
    moved |= {"wait_s": torch.tensor([3.0, 0.0]), "comm_wait_s": torch.tensor([0.0, 4.0])}
    told = figures(moved, steps=1, timed=1, step_s=10.0, numel=4)
    assert (told["offload/wait_s"], told["comm/wait_s"], told["speed/stall_fraction"]) == (3.0, 4.0, 0.4)


def test_the_slowest_rank_is_the_one_that_waits_least_for_the_others():
    moved = {name: torch.zeros(3) for name in TOTALS} | {"comm_wait_s": torch.tensor([16.0, 2.0, 12.0])}
    told = figures(moved, steps=2, timed=2, step_s=10.0, numel=4)
    assert (told["comm/slowest_rank"], told["comm/slowest_s"], told["comm/wait_s"]) == (1, 9.0, 8.0)
    alone = figures({name: torch.zeros(1) for name in TOTALS}, steps=2, timed=2, step_s=10.0, numel=4)
    assert (alone["comm/slowest_rank"], alone["comm/slowest_s"]) == (None, None)


def test_what_ranks_bring_each_other_is_counted_in_the_row_of_its_step():
    def rank(world):
        meter = meter_of(world, Counted())
        full_P = torch.zeros(8)
        rows = []
        for gathers in (3, 1):
            for _ in range(gathers):
                world.gather(torch.ones(4), full_P).wait()
            world.reduce_scatter(full_P, torch.empty(8), torch.empty(4)).wait()
            meter.count(METRICS)
            rows.append(meter.row(validated=False))
        return rows

    for first, second in run_ranks(2, rank):
        assert (first["comm/gather_bytes"], second["comm/gather_bytes"]) == (3 * 2 * 16, 2 * 16)
        assert first["comm/reduce_bytes"] >= 2 * 16
        assert first["comm/wait_s"] > 0


def test_mfu_is_the_share_of_what_all_devices_can_do():
    def rank(world):
        meter = meter_of(world, Counted(), flops_per_token=6e3, peak_flops=1e9)
        meter.count(METRICS)
        row = meter.row(validated=False)
        return row, meter.summary("digest", "finished")

    for row, summary in run_ranks(2, rank):
        assert row["speed/mfu"] == pytest.approx(row["speed/tokens_per_s"] * 6e3 / 2e9)
        assert summary.mfu == pytest.approx(summary.tokens_per_s * 6e3 / 2e9)


def test_the_speed_of_a_run_is_the_median_without_the_start(monkeypatch):
    clock = iter([0.0, 100.0, 101.0, 103.0, 104.0, 104.0])
    monkeypatch.setattr("zero.tracker.interval.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    meter = meter_of(zero.open_world(), Counted())
    speeds = []
    for _ in range(4):
        meter.count(METRICS)
        speeds.append(meter.row(validated=False)["speed/tokens_per_s"])
    assert speeds == [0.64, 64.0, 32.0, 64.0]
    assert meter.summary("digest", "finished").tokens_per_s == 64.0


def test_waiting_adds_up_over_a_run(monkeypatch):
    clock = iter([0.0, 10.0, 20.0, 20.0])
    monkeypatch.setattr("zero.tracker.interval.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    traffic = Counted()
    meter = meter_of(zero.open_world(), traffic)
    for wait_s in (1.0, 2.5):
        meter.count(METRICS)
        traffic.add(wait_s=wait_s, busy_s=5.0)
        meter.row(validated=False)
    assert meter.summary("digest", "finished").wait_s == pytest.approx(3.5, abs=0.1), (
        "the rest waited for the rows themselves"
    )


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA L4", "fp16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "tf32", 15.7),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16", None),
        ("NVIDIA H100X", "bf16", None),
        ("Matrox Mystique", "fp32", None),
    ],
)
def test_a_peak_is_known_by_the_name_of_the_device(name, dtype, tera):
    assert peak_flops(name, dtype) == (None if tera is None else tera * 1e12)


@pytest.mark.parametrize(("allowed", "tera"), [("highest", 19.5), ("high", 156), ("medium", 156)])
def test_the_peak_of_fp32_is_that_of_the_units_that_may_be_used(allowed, tera):
    """`precision.matmul=high` lets tensor cores do it."""
    world = SimpleNamespace(compute=SimpleNamespace(product=lambda: "NVIDIA A100-SXM4-80GB"))
    plan = SimpleNamespace(precision=Precision())
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(allowed)
    try:
        assert meters._peak_flops(world, plan) == tera * 1e12
    finally:
        torch.set_float32_matmul_precision(before)


def test_no_device_hides_behind_another():
    """The first that fits counts, so whoever has more words stands before whoever has some of them."""
    for place, peak in enumerate(PEAKS):
        earlier = [other for other in PEAKS[:place] if set(other.words.split()) <= set(peak.words.split())]
        assert not earlier, peak


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_costs_what_its_matrices_multiply(tied):
    """Counted by torch, attention in full as the formula has it."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from zero.trainer.models.gpt import GPT, loss

    config = GPTConfig(vocab=64, width=32, layers=2, heads=2, seq=16, tied=tied)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it counts no fused kernel of a CPU
        loss(GPT(config), torch.zeros(1, config.seq + 1, dtype=torch.int64)).backward()
    norms = 5 * config.width  # are in the formula's parameters and multiply nothing
    assert counter.get_total_flops() / config.seq == pytest.approx(config.flops_per_token - 6 * norms)


def test_endurance_is_counted_in_steps():
    assert endurance(0) == "nothing was written yet"
    assert endurance(16e9) == "14.9 GiB written per step by all ranks. A 1 TB drive rated 600 TBW lasts 37,500 steps"
    assert endurance(330e3) == "322.3 KiB written per step by all ranks", "nobody makes a billion steps"
