"""DeepSpeed's classes of optimizers and schedulers, as functions with their arguments and defaults.

An optimizer is torch's. Where it computes is up to the config, so the fused one and the CPU's are the same here. A
scheduler is that of a config with these `params`, and has its rates.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from zero.deepspeed.config import translate
from zero.deepspeed.optimizers import Optimizer
from zero.deepspeed.schedulers import Scheduled
from zero.errors import ConfigError
from zero.trainer.build import build_optimizer
from zero.trainer.config import OneCycle as Cycle, read


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


def _scheduler(
    kind: str, names: str, optimizer: torch.optim.Optimizer, *given: Any, last_batch_iteration: int = -1, **named: Any
) -> Scheduled:
    """What `zero.initialize` makes of such a section `scheduler`, for these groups.

    Args:
        names: of `given`, in DeepSpeed's order.
        last_batch_iteration: of a run that goes on, one less than its updates.

    Raises:
        ConfigError: one line that names the parameter.
    """
    told_ = {**dict(zip(names.split(), given, strict=False)), **named}
    first = optimizer.param_groups[0]
    told = translate(
        {
            "train_batch_size": 1,
            "optimizer": {"type": "Adam" if "betas" in first else "SGD", "params": {"lr": float(first["lr"])}},
            "scheduler": {"type": kind, "params": {name: one for name, one in told_.items() if one is not None}},
        }
    )
    config = read(told.settings)
    lr = None if told.peak_is_for_all else config.optim.lr
    momenta = isinstance(config.schedule, Cycle) and bool(config.schedule.momentum)
    made = Scheduled(optimizer.param_groups, build_optimizer(config), lr, momenta=momenta)
    made.load_state_dict({"made": last_batch_iteration + 1})
    return made


WarmupLR = partial(_scheduler, "WarmupLR", "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type")
WarmupDecayLR = partial(
    _scheduler, "WarmupDecayLR", "total_num_steps warmup_min_lr warmup_max_lr warmup_num_steps warmup_type"
)
WarmupCosineLR = partial(
    _scheduler, "WarmupCosineLR", "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type"
)
OneCycle = partial(
    _scheduler,
    "OneCycle",
    "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
    "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate",
)
LRRangeTest = partial(
    _scheduler,
    "LRRangeTest",
    "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
)
