"""benchmarks/window.py: its small model has the ratios of the large one, beside arithmetic by hand."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
window = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "window.py")))


def test_a_row_has_the_ratios_of_the_large_model():
    setting = window.Setting("h100-pcie5", "7B", "optimizer", "fp32", 4096, ranks=1)
    [row] = window.rows([setting], window.Small(layers=4, width=32, page_bytes=4096))
    products_ms = 1e3 * 8 * 4096 * 7e9 / 544e12
    update_ms = 1e3 * 30 * 7e9 / 3.35e12  # parameter, rest of the master, moments: read and written; gradient: twice
    resident_ms, copied_ms = products_ms + update_ms, 1e3 * 10 * 7e9 / 50e9
    assert row["bytes"] == {"in": 10.0, "out": 10.0, "read": 0.0, "written": 0.0}  # rest of the master 2, moments 8
    assert row["share"] * row["step_ms"] == pytest.approx(resident_ms, rel=0.05)
    assert row["limit"] == pytest.approx(resident_ms / copied_ms, rel=0.05)
    assert row["share"] <= row["limit"] < 0.4
    assert row["exposed_ms"]["update"] == pytest.approx(row["step_ms"] * (1 - row["share"]), rel=0.1)
