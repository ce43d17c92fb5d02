"""The assertions of DeepSpeed's own test of `offload_states`, and what a rollout between steps needs."""

import pytest
import torch

import zero
from tests.simulation.simulated_gpu import simulated_gpu
from zero.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from zero.errors import ConfigError
from zero.testing import run_ranks

PARTS = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.lp_params]


def engine_on(world: zero.World, stage: int) -> zero.Engine:
    with world.exclusive():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    return zero.initialize(model=model, config=config, world=world)[0]


def train(world: zero.World, stage: int, include: list[str] | None, parks: bool) -> list[float]:
    engine, losses = engine_on(world, stage), []
    memory = world.compute.memory
    for number in range(4):
        if parks:
            values, before = zero.full_state_dict(engine), memory.nbytes
            engine.offload_states(include, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True)
            offloaded = memory.nbytes
            assert offloaded < before
            if number % 2:
                engine.reload_states(non_blocking=True)
                assert offloaded < memory.nbytes <= before
            after = zero.full_state_dict(engine)
            assert all(torch.equal(value, after[name]) for name, value in values.items())
        rows = torch.randn(2, 64, generator=torch.Generator().manual_seed(10 * number + world.rank))
        loss = engine(rows).float().square().mean()
        engine.backward(loss)
        if parks:
            with pytest.raises(ConfigError, match="a step is under way"):
                engine.offload_states()
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("stage", "include"), [(3, None), (1, None), (3, PARTS[:1]), (3, PARTS[1:]), (2, [*PARTS])])
def test_states_leave_the_gpu_and_come_back(stage, include):
    with simulated_gpu(races=True):
        assert run_ranks(2, train, stage, include, True) == run_ranks(2, train, stage, include, False)


def test_unknown_parts_and_devices_are_refused():
    engine = engine_on(zero.distributed.world.World.solo(), 3)
    with pytest.raises(ConfigError, match=r"include=all: must be one of optim_states"):
        engine.offload_states(include=["all"])
    with pytest.raises(ConfigError, match=r"device=nvme: must be one of cpu"):
        engine.offload_states(device="nvme")
    engine.destroy()
