"""What DeepSpeed's `get_accelerator()` is asked: torch's accelerator, or the CPU where there is none."""

from typing import Any

import psutil
import torch


class Accelerator:
    """The device of this process, by DeepSpeed's names; what they do not rename is that of torch's module for it."""

    @property
    def _name(self) -> str:
        """Not private there: scripts compare it."""
        return self._kind

    @property
    def _kind(self) -> str:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return "cpu" if found is None else found.type

    def device_name(self, device_index: int | None = None) -> str:
        return self._kind if device_index is None or self._kind == "cpu" else f"{self._kind}:{device_index}"

    def current_device_name(self) -> str:
        return self.device_name(None if self._kind == "cpu" else torch.accelerator.current_device_index())

    def current_device(self) -> int:
        return 0 if self._kind == "cpu" else torch.accelerator.current_device_index()

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        if self._kind != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        return 1 if self._kind == "cpu" else torch.accelerator.device_count()

    def is_available(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        if self._kind != "cpu":
            torch.accelerator.synchronize()

    def communication_backend_name(self) -> str:
        return "nccl" if self._kind == "cuda" else "gloo"

    def empty_cache(self) -> None:
        if self._kind != "cpu":
            torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._count("memory_allocated", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._count("max_memory_allocated", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._count("memory_reserved", device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._count("max_memory_reserved", device_index)

    def available_memory(self, device_index: int | None = None) -> int:
        return self._free_and_total(device_index)[0]

    def total_memory(self, device_index: int | None = None) -> int:
        return self._free_and_total(device_index)[1]

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._kind != "cpu":
            torch.accelerator.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_peak_memory_stats

    def is_bf16_supported(self) -> bool:
        return self._kind != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def is_synchronized_device(self) -> bool:
        return self._kind == "cpu"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu == (self._kind == "cpu")

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._kind == "cpu" else tensor.pin_memory()

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    manual_seed = manual_seed_all

    def __getattr__(self, name: str) -> Any:
        """Streams, events, random states and types of tensors, by the same names there."""
        if not name.startswith("_"):
            for module in (torch.get_device_module(self._kind), torch):
                if name in vars(module):
                    return vars(module)[name]
        raise AttributeError(f"get_accelerator() has no {name}; torch.{self._kind} has what this device can do")

    def _count(self, what: str, device_index: int | None) -> int:
        """Bytes; 0 on the CPU, whose memory torch does not count."""
        return 0 if self._kind == "cpu" else getattr(torch.accelerator, what)(device_index)

    def _free_and_total(self, device_index: int | None) -> tuple[int, int]:
        if self._kind == "cpu":
            return psutil.virtual_memory().available, psutil.virtual_memory().total
        free, total = torch.accelerator.get_memory_info(device_index)
        return free, total


def get_accelerator() -> Accelerator:
    return Accelerator()
