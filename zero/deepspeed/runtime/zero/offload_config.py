"""Names that scripts import from `deepspeed.runtime.zero.offload_config`."""

from enum import StrEnum


class OffloadDeviceEnum(StrEnum):
    """The devices of `offload_states`."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(StrEnum):
    """The parts of the state that `engine.offload_states` may leave on the GPU."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
