"""`debug.replay` in a run: the same rows, and an end before a wrong bit is saved."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import train
from tests.simulation import simulated_gpu
from zero.engine.backward.reduce import Reductions
from zero.engine.unit_state import UnitState

RUN = ["debug=tiny", "data=synthetic", "steps=6", "launch.malloc=default", "tracker.every=1", "sample.tokens=0"]


def rows(here: Path) -> list[tuple[int, float, float]]:
    (path,) = here.glob("runs/*/*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.unlink()
    return [(row["step"], row["train/loss"], row["train/grad_norm"]) for row in lines]


def test_a_replayed_run_has_the_same_rows(here: Path):
    assert train.main([*RUN]) == 0
    first = rows(here)
    assert train.main([*RUN, "debug.replay=2"]) == 0
    assert rows(here) == first


def test_a_gpu_that_is_not_deterministic_is_rejected_before_anything_is_stored(here: Path, capsys: Any):
    with simulated_gpu(), patch("zero.open_store") as store:
        assert train.main([*RUN, "debug.replay=2"]) == 2
    assert "debug.replay=2: a GPU may compute other bits each time" in capsys.readouterr().err
    store.assert_not_called()


def test_a_run_ends_before_a_wrong_bit_is_saved(here: Path, capsys: Any):
    """A bit of a gradient flips in the second of the two runs of step 4."""
    calls, publish = 0, Reductions._finalise

    def finalise(reductions: Reductions, unit: UnitState) -> None:
        nonlocal calls
        if unit.index == 0:
            calls += 1
            if calls == 5:  # the calls of steps 1, 2, 3, and two of step 4
                assert unit.grad is not None
                unit.grad[7] = -unit.grad[7]
        publish(reductions, unit)

    with patch.object(Reductions, "_finalise", finalise):
        assert train.main([*RUN, "debug.replay=4", "checkpoint.every=1", "checkpoint.async=false"]) == 3
    assert "debug.replay: step 4, rank 0, " in capsys.readouterr().err
    saved = sorted(path.name for path in here.glob("runs/*/*/checkpoints/step-*"))
    assert saved[-1] == "step-0000000003"
