"""DeepSpeed's classes of optimizers, as functions that make those of torch with their arguments and defaults.

Where an optimizer computes is up to the config, so the fused one and the CPU's are the same here.
"""

from collections.abc import Iterable
from typing import Any

import torch

from zero.errors import ConfigError
from zero.interop.optimizers import Optimizer


def FusedAdam(
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """Adam, with decoupled decay unless `adam_w_mode=False`."""
    return _adam(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)


def DeepSpeedCPUAdam(
    model_params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """The same."""
    if not fp32_optimizer_states:
        raise ConfigError("DeepSpeedCPUAdam(fp32_optimizer_states=False): moments are kept in fp32; leave it out")
    return _adam(model_params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adamw_mode)


def _adam(
    params: Iterable[Any],
    lr: float,
    bias_correction: bool,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    amsgrad: bool,
    decoupled: bool,
) -> torch.optim.Optimizer:
    if not bias_correction:
        raise ConfigError("bias_correction=False: Adam corrects its first steps here; leave it out")
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def DeepSpeedCPUAdagrad(
    model_params: Iterable[Any],
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """Adagrad."""
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


def FusedLion(
    params: Iterable[Any],
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """Lion, which torch does not have."""
    return Optimizer(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, "lion")
