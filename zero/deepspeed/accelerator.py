"""The device of this process, by DeepSpeed's name: `get_accelerator()`.

The device is torch's accelerator, or the CPU where there is none.
"""

from typing import Any

import psutil
import torch

_ZERO_ON_CPU = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "empty_cache"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated"),
)


class Accelerator:
    """The device of this process.

    Attributes that it lacks are looked up in torch's module for the device, such as `torch.cuda`, then in `torch`.
    `device_index` is the index of a GPU; None: the current one. The CPU ignores it.
    """

    @property
    def _name(self) -> str:
        # DeepSpeed's attribute has the underscore too, and scripts compare it with "cuda"
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return "cpu" if current is None else current.type

    @property
    def _is_cpu(self) -> bool:
        return self._name == "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """Return the device's name: "cuda:1", "cuda" without an index, or "cpu"."""
        return self._name if device_index is None or self._is_cpu else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """Return the current device as `device_name` spells it."""
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        """Return the index of the current device; 0 on the CPU."""
        return 0 if self._is_cpu else torch.accelerator.current_device_index()

    def device(self, device_index: int | None = None) -> torch.device:
        """Return the device as a `torch.device`."""
        return torch.device(self.device_name(device_index))

    def communication_backend_name(self) -> str:
        """Return the backend of `torch.distributed`: "nccl" on CUDA, else "gloo"."""
        return "nccl" if self._name == "cuda" else "gloo"

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the free memory of the device in bytes; on a CPU that of the host."""
        return psutil.virtual_memory().available if self._is_cpu else torch.accelerator.get_memory_info(device_index)[0]

    def total_memory(self, device_index: int | None = None) -> int:
        """Return the total memory of the device in bytes; on a CPU that of the host."""
        return psutil.virtual_memory().total if self._is_cpu else torch.accelerator.get_memory_info(device_index)[1]

    def is_bf16_supported(self) -> bool:
        """Return whether the device computes in bf16."""
        return self._name != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Return True."""
        return True

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """Return `tensor` in page-locked memory; on a CPU `tensor` itself. `align_bytes` has no effect."""
        return tensor if self._is_cpu else tensor.pin_memory()

    def __getattr__(self, name: str) -> Any:
        if name in _ZERO_ON_CPU and self._is_cpu:
            return lambda *_, **__: 0
        for module in (torch.get_device_module(self._name), torch):
            if name in vars(module):
                return vars(module)[name]
        raise AttributeError(f"get_accelerator() has no {name}. Look for it in torch.{self._name}.")


def get_accelerator() -> Accelerator:
    """Return the device of this process."""
    return Accelerator()
