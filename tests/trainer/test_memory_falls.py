"""A run whose memory shrinks under it ends with the loss of one whose memory did not."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import train
from tests.simulation import simulated_gpu
from zero.core.sizes import MiB
from zero.engine.metrics import Metrics
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.platform.gauges import HostGauge
from zero.tracker.meter import Summary
from zero.trainer import cli, planning
from zero.trainer.config import Config
from zero.trainer.planning import plan_of_run
from zero.trainer.run.loop import Run
from zero.trainer.run.lowered import read_moves

RUN = [
    *("debug=tiny", "data=synthetic", "steps=45", "val.every=0", "model.seq=32", "batch.global=8", "tracker.every=5"),
    *("model.layers=8", "model.width=128", "launch.malloc=default", "sample.tokens=0", "offload=auto"),
    *("offload.page=256KiB", "offload.pressure=1MiB", "offload.threads=1", "offload.device_budget=48MiB"),
]


def planned(plan: Plan, *tiers: str) -> int:
    return sum(sum(plan.bytes.get(tier, {}).values()) for tier in tiers)


def run(here: Path, falls: bool) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Train; the host's memory falls at step 20, and the GPU's at step 40. Return the summary and the rows."""
    host_bytes, after = [2**40], Run.after

    def free_bytes(gauge: HostGauge, near_bytes: int) -> int:
        return max(0, host_bytes[0] - planned(present[0], "host"))

    present: list[Plan] = []

    def counted(self: Run, state: State, metrics: Metrics) -> None:
        after(self, state, metrics)
        present[:] = [state.plan]
        if falls and state.step == 20:
            host_bytes[0] = int(0.8 * planned(state.plan, "host"))
        if falls and state.step == 40:
            memory = state.plan.world.compute.memory
            memory.limit_bytes = memory.nbytes + 4 * MiB

    def made(*arguments: Any) -> Plan:
        present[:] = [plan_of_run(*arguments)]
        present[0].world.compute.attach_thread()  # other plans were made on other simulated GPUs
        return present[0]

    with (
        simulated_gpu(limited=True),
        patch.object(Run, "after", counted),
        patch.object(HostGauge, "free_bytes", free_bytes),
        patch.object(planning, "plan_of_run", made),
    ):
        assert train.main(RUN) == 0
    (folder,) = here.glob("runs/*/*")
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    folder.rename(here / f"run {falls}")
    return summary, rows


def test_a_run_whose_memory_falls_ends_with_the_same_loss(here: Path):
    (calm, calm_rows), (moved, rows) = (run(here, falls) for falls in (False, True))
    print(*moved["moves"], sep="\n")
    assert moved["train_loss"] == calm["train_loss"]
    assert [row["train/loss"] for row in rows] == [row["train/loss"] for row in calm_rows]
    assert "moves" not in calm
    assert any("host memory is short" in line for line in moved["moves"])
    assert any("out of memory" in line for line in moved["moves"])
    assert sum(row["offload/moved_bytes"] for row in rows) > 0 == sum(row["offload/moved_bytes"] for row in calm_rows)
    assert "Moves of the state" in (here / "run True" / "report.html").read_text()


def train_in_too_little(config: Config, folder: Path) -> Summary:
    """Train as a rank; rank 1 runs out of memory in step 5 until the optimizer's state is in host memory."""
    microbatches = Run.microbatches

    def short(self: Run) -> Any:
        if self._meter.steps == 4 and self._world.rank == 1 and self._state.plan.offload.optimizer == "none":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return microbatches(self)

    with patch.object(Run, "microbatches", short):
        return train.train(config, folder)


@pytest.mark.slow
def test_ranks_start_again_on_lower_tiers(here: Path, capfd: Any):
    """Each start makes one more move and goes on from the last checkpoint."""
    words = [
        *("debug=tiny", "data=synthetic", "steps=8", "launch.ranks=2", "launch.max_restarts=3", "checkpoint.every=2"),
        *("val.every=0", "sample.tokens=0", "tracker.every=1", "zero.prefetch=0"),
    ]
    losses, moves = [], []
    for function in (train.train, train_in_too_little):
        with simulated_gpu():
            assert cli.main(words, function) == 0
        (folder,) = here.glob("runs/*/*")
        losses.append(json.loads((folder / "summary.json").read_text())["train_loss"])
        moves.append(read_moves(folder))
        folder.rename(here / folder.name)
    assert losses[0] == losses[1]
    assert moves == [[], ["zero.activations=remat", "offload.optimizer=cpu"]]
    assert "The next start moves to zero.activations=remat." in capfd.readouterr().err
