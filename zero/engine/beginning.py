"""The random generators and the model's buffers at the beginning of a step, so that the step can be made again."""

import random

import torch
from torch import nn

from zero.platform.modes import unobserved


class Beginning:
    """A copy of the random generators of torch and Python, and of the model's buffers.

    All buffers are copied, because batch norm writes its statistics without a change of their version.
    """

    @unobserved()
    def __init__(self, model: nn.Module) -> None:
        on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._generators = random.getstate(), torch.get_rng_state(), on_gpu
        self._buffers = [
            (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
        ]

    @unobserved()
    @torch.no_grad()
    def restore(self) -> None:
        """Restore the generators and the buffers."""
        in_python, on_cpu, on_gpu = self._generators
        random.setstate(in_python)
        torch.set_rng_state(on_cpu)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu)
        for buffers, name, buffer, before in self._buffers:
            buffers[name] = buffer  # the step may have replaced the buffer
            if buffer is not None and before is not None:
                buffer.copy_(before)
