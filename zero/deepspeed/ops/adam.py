"""DeepSpeed's Adam classes, as subclasses of torch's.

The config decides where an update is computed, so the fused class and the CPU class compute the same here.
"""

from collections.abc import Iterable
from typing import Any

import torch

from zero.errors import ConfigError


class FusedAdam(torch.optim.Adam):
    """Torch's AdamW, or its Adam with `adam_w_mode=False`.

    Args:
        params: parameters or groups of them.
        lr, betas, eps, weight_decay, amsgrad: as torch's.
        bias_correction: must be true.
        adam_w_mode: whether weight decay is decoupled from the gradient.
        set_grad_none: ignored, for compatibility with DeepSpeed.

    Raises:
        ConfigError: `bias_correction=False`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if not bias_correction:
            raise ConfigError("bias_correction=False: Adam corrects the bias of its first steps here. Leave it out.")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=adam_w_mode)


class DeepSpeedCPUAdam(FusedAdam):
    """`FusedAdam` with another order and other names of the arguments, as in DeepSpeed.

    Args:
        model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode: as `FusedAdam`'s.
        fp32_optimizer_states: ignored, because moments are always fp32.

    Raises:
        ConfigError: `bias_correction=False`.
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad)
