"""What a DeepSpeed script asks an engine: who it is, what it was told, how far it has come."""

from typing import Any

import torch
from torch import nn

from zero.deepspeed.optimizers import Optimizer
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.engine.step import Metrics
from zero.trainer.config import Config


class EngineInfo:
    """An engine, as far as it only tells."""

    config: Config
    plan: Plan
    optimizer: Optimizer
    metrics: Metrics | None
    _state: State
    _steps_before: int

    @property
    def module(self) -> nn.Module:
        """The model, which runs on gathered parameters."""
        return self._state.model

    @property
    def device(self) -> torch.device:
        return self.plan.world.device

    @property
    def local_rank(self) -> int:
        """Number of this rank's GPU; the rank itself where there is none."""
        return self.device.index if self.device.index is not None else self.plan.world.rank

    @property
    def global_rank(self) -> int:
        return self.plan.world.rank

    @property
    def world_size(self) -> int:
        return self.plan.world.size

    @property
    def global_steps(self) -> int:
        """Steps tried, the skipped ones counted, and those of a checkpoint whose optimizer was left out."""
        return self._steps_before + self._state.tried

    @property
    def global_samples(self) -> int:
        """Rows of those steps."""
        return self.global_steps * self.train_batch_size()

    @property
    def dp_world_size(self) -> int:
        return self.plan.world.size

    @property
    def skipped_steps(self) -> int:
        return self._state.skipped

    @property
    def loss_scale(self) -> float:
        return self._state.scale.scale

    @property
    def overflow(self) -> bool:
        """The last update was skipped, because a gradient was not finite."""
        return self.metrics is not None and self.metrics.skipped

    def gradient_accumulation_steps(self) -> int:
        return self.plan.accumulate

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.batch.numbers()[1]

    def train_batch_size(self) -> int:
        return self.config.batch.numbers()[0]

    def get_batch_info(self) -> tuple[int, int, int]:
        """Rows of a step, rows of a microbatch on one rank, microbatches."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_global_grad_norm(self) -> float | None:
        """Of the last step's mean gradient, before clipping."""
        return self.metrics.grad_norm if self.metrics is not None else None

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_lr(self, lr: float) -> None:
        """Of every group, until a scheduler writes the next one."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def steps_per_print(self) -> int:
        """Steps between two rows."""
        return self.config.tracker.every

    def get_mom(self) -> list[Any]:
        groups = self.optimizer.param_groups
        return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in groups]

    def zero_optimization_stage(self) -> int:
        return self.plan.stage.level

    def gradient_clipping(self) -> float:
        """The largest norm; 0 for none."""
        return self.plan.optimizer.clip or 0.0

    def fp16_enabled(self) -> bool:
        return self.plan.precision.compute == torch.float16

    def bfloat16_enabled(self) -> bool:
        return self.plan.precision.compute == torch.bfloat16
