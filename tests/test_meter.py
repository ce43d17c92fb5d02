"""Rows say what moved between tiers and what it cost: bytes of all ranks, seconds of the slowest."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

import zero
from zero.meter import Meter, Moved, endurance, offload_figures
from zero.store import Traffic
from zero.testing import run_ranks
from zero.tracker import ROW


class Counted:
    """A store's running totals that a test moves on."""

    def __init__(self, **start):
        self.now = Traffic(**start)

    def __call__(self):
        return self.now

    def add(self, **more):
        self.now = replace(self.now, **{key: getattr(self.now, key) + value for key, value in more.items()})


METRICS = SimpleNamespace(loss=2.0, grad_norm=1.0, lr=0.1, loss_scale=1.0, skipped=False)


def meter_of(world, traffic, **tiers):
    plan = SimpleNamespace(numel=100, bytes={"device": {"parameters": 400}, **tiers})
    return Meter(world, plan, tokens_per_step=64, traffic=traffic)


def test_a_run_without_offload_moves_nothing_and_hides_nothing():
    meter = meter_of(zero.World.from_env(), Counted())
    meter.count(METRICS)
    row = meter.row(validated=False)
    assert set(row) == set(ROW)
    assert tuple(row) == ROW
    assert {key: row[key] for key in ROW if key.startswith("offload/")} == {
        "offload/read_bytes": 0, "offload/write_bytes": 0, "offload/wait_s": 0.0,
        "offload/read_gbps": None, "offload/write_gbps": None, "offload/bytes_per_param": 0.0,
    }  # fmt: skip
    assert row["speed/hidden_fraction"] == 1
    assert row["speed/compute_s"] == row["speed/step_s"]
    summary = meter.summary("digest", "finished")
    assert (summary.offload_written_bytes, summary.endurance) == (0, None)


def test_a_row_counts_its_own_steps_only():
    traffic = Counted(read_bytes=7, write_bytes=5000, wait_s=9.0)
    meter = meter_of(zero.World.from_env(), traffic, nvme={"master": 400})
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


def test_what_a_pause_moves_is_not_a_steps_but_wears_the_drive():
    traffic = Counted()
    meter = meter_of(zero.World.from_env(), traffic)
    meter.count(METRICS)
    traffic.add(read_bytes=10)
    with meter.paused():
        traffic.add(read_bytes=1000, write_bytes=500, wait_s=3.0)
    row = meter.row(validated=True)
    assert (row["offload/read_bytes"], row["offload/write_bytes"], row["offload/wait_s"]) == (10, 0, 0)
    assert meter.summary("digest", "finished").offload_written_bytes == 500


def test_a_summary_needs_no_other_rank():
    """A rank that is left alone says what it knows itself."""
    traffic = Counted()
    meter = meter_of(zero.World.from_env(), traffic, nvme={"master": 1})
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
        (Moved(), 1.0, 5.0),
        (Moved(read_bytes=8, busy_s=4.0, wait_s=0.0), 1.0, 5.0),
        (Moved(read_bytes=8, busy_s=4.0, wait_s=1.0), 0.75, 4.5),
        (Moved(read_bytes=8, busy_s=1.0, wait_s=30.0), 0.0, 0.0),
    ],
)
def test_hidden_is_what_nobody_waited_for(moved, hidden, compute_s):
    """Two steps of five seconds; callers in several threads may wait longer, together, than a step lasts."""
    figures = offload_figures([moved], steps=2, step_s=5.0, numel=4)
    assert (figures["speed/hidden_fraction"], figures["speed/compute_s"]) == (hidden, compute_s)
    assert all(value is None or math.isfinite(value) for value in figures.values())


def test_endurance_is_in_the_words_of_a_data_sheet():
    assert endurance(0) == "nothing was written yet"
    assert endurance(16e9) == ("16 GB written per step by all ranks; a 1 TB drive rated 600 TBW lasts 37,500 steps")
    assert endurance(2.5e6).startswith("2.5 MB written per step")
    assert endurance(300).startswith("300 bytes written per step")
