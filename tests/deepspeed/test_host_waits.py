"""The host of a loop of one's own does not wait for its own step."""

import pytest
import torch

import zero
from tests.deepspeed.test_offload_states import engine_on
from tests.simulation.simulated_gpu import simulated_gpu
from zero.testing import run_ranks


def unread(world: zero.World, stage: int) -> list[bool]:
    """Whether the host has not read, and so not waited for, the results of a step that has returned."""
    engine, results = engine_on(world, stage), []
    for number in range(4):
        rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(number)).to(world.device)
        engine.backward(engine(rows).float().square().mean())
        engine.step()
        results.append("skipped" not in vars(engine.metrics))
    assert engine.was_step_applied()
    assert engine.get_global_grad_norm() > 0
    assert "skipped" in vars(engine.metrics)
    engine.destroy()
    return results


@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_returns_before_the_host_knows_its_results(stage):
    with simulated_gpu(races=True, fused=True):
        assert run_ranks(2, unread, stage) == [[True] * 4] * 2
