"""benchmarks/window.py: its small model has the ratios of the large one, beside arithmetic by hand."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
window = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "window.py")))


def test_a_row_has_the_ratios_of_the_large_model():
    setting = window.Setting("h100-pcie5", "7B", "optimizer", "fp32", 4096, 1, "device")
    [row] = window.rows([setting], window.Small(layers=4, width=32, page_bytes=4096))
    products_ms = 1e3 * 8 * 4096 * 7e9 / 544e12
    update_ms = 1e3 * 30 * 7e9 / 3.35e12  # parameter, rest of the master, moments: read and written; gradient: twice
    resident_ms, copied_ms = products_ms + update_ms, 1e3 * 10 * 7e9 / 50e9
    assert row["bytes"] == {"in": 10.0, "out": 10.0, "read": 0.0, "written": 0.0}  # rest of the master 2, moments 8
    assert row["share"] * row["step_ms"] == pytest.approx(resident_ms, rel=0.05)
    assert row["limit"] == pytest.approx(resident_ms / copied_ms, rel=0.05)
    assert row["share"] <= row["limit"] < 0.4
    assert row["exposed_ms"]["update"] == pytest.approx(row["step_ms"] * (1 - row["share"]), rel=0.1)


def test_a_share_of_the_host_saves_its_moments_and_masters_on_the_link():
    """With all state offloaded a parameter takes 18 bytes in and 14 out, or 4 and 2 if the host updates it."""
    setting = window.Setting("4090-pcie4", "7B", "cpu", "fp32", 8192, 1, 0.5)
    [row] = window.rows([setting], window.Small(layers=4, width=32, page_bytes=4096))
    by_host = (18 - row["bytes"]["in"]) / 14
    assert row["by_host"] == 0.5
    assert 0.4 < by_host <= 0.5, "the last page of a unit, which the host gets, may be small"
    assert (14 - row["bytes"]["out"]) / 12 == pytest.approx(by_host, abs=0.01)
