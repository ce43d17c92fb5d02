"""DeepSpeed's Lion classes. Torch has no Lion."""

from collections.abc import Iterable
from typing import Any

from zero.user_loop.optimizers import Optimizer


class FusedLion(Optimizer):
    """Lion (Chen et al. 2023), with DeepSpeed's defaults.

    Args:
        params: parameters or groups of them.
        lr, betas, weight_decay: as the paper's.
        set_grad_none, fp32_optimizer_states: ignored, for compatibility with DeepSpeed.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, "lion")


class DeepSpeedCPULion(FusedLion):
    """`FusedLion` under the name of DeepSpeed's class for CPUs."""
