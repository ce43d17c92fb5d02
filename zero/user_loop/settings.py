"""The part of an engine that reports its settings, under DeepSpeed's names."""

import torch
from torch import nn

from zero.engine.plan import Plan
from zero.settings import Settings
from zero.user_loop.optimizers import Optimizer


class EngineSettings(nn.Module):
    """The part of an engine that reports its settings.

    Attributes:
        module: the model, which runs on gathered parameters.
        optimizer: the optimizer whose `param_groups` are read at every update.
    """

    def __init__(self, config: Settings, plan: Plan, module: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self.config, self.plan, self.module, self.optimizer = config, plan, module, optimizer

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.plan.world.device

    @property
    def global_rank(self) -> int:
        """The rank, from 0."""
        return self.plan.world.rank

    @property
    def local_rank(self) -> int:
        """The index of this rank's GPU; the rank itself where there is none."""
        return self.global_rank if self.device.index is None else self.device.index

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.plan.world.size

    @property
    def dp_world_size(self) -> int:
        """The number of ranks."""
        return self.world_size

    def gradient_accumulation_steps(self) -> int:
        """Return the number of microbatches of a step."""
        return self.plan.accumulate

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the number of samples in a microbatch of one rank."""
        return self.config.batch.numbers()[1]

    def train_batch_size(self) -> int:
        """Return the number of samples in a step, over all ranks."""
        return self.config.batch.numbers()[0]

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group.

        Args:
            lr: the learning rate, until a scheduler writes the next.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def zero_optimization_stage(self) -> int:
        """Return the stage, 0 to 3."""
        return self.plan.facts.stage.level

    def gradient_clipping(self) -> float:
        """Return the largest gradient norm; 0 without clipping."""
        return self.plan.optimizer.clip or 0.0

    def fp16_enabled(self) -> bool:
        """Return whether the model computes in fp16."""
        return self.plan.precision.compute == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Return whether the model computes in bf16."""
        return self.plan.precision.compute == torch.bfloat16

    def zero_optimization(self) -> bool:
        """Return whether the stage is above 0."""
        return self.plan.facts.stage.moments

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded: stages 2 and 3."""
        return self.plan.facts.stage.gradients

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are sharded: stage 3."""
        return self.plan.facts.stage.parameters

    def empty_partition_cache(self) -> None:
        """Do nothing, because gathered parameters are not cached after their use."""
