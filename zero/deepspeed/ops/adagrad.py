"""DeepSpeed's Adagrad, as a subclass of torch's."""

from collections.abc import Iterable
from typing import Any

import torch


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """Torch's Adagrad.

    Args:
        model_params: parameters or groups of them.
        lr, eps, weight_decay: as torch's.
        amsgrad, fp32_optimizer_states: ignored, for compatibility with DeepSpeed.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
