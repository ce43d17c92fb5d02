"""Functions that DeepSpeed has in `deepspeed.utils`."""

from zero.deepspeed.runtime.dataloader import RepeatingLoader as RepeatingLoader
from zero.deepspeed.utils.logging import log_dist as log_dist, logger as logger
from zero.deepspeed.zero import (
    get_z3_leaf_modules as get_z3_leaf_modules,
    safe_get_full_fp32_param as safe_get_full_fp32_param,
    safe_get_full_grad as safe_get_full_grad,
    safe_get_full_optimizer_state as safe_get_full_optimizer_state,
    safe_set_full_fp32_param as safe_set_full_fp32_param,
    safe_set_full_grad as safe_set_full_grad,
    safe_set_full_optimizer_state as safe_set_full_optimizer_state,
    set_z3_leaf_modules as set_z3_leaf_modules,
)
