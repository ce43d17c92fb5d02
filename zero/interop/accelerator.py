"""What DeepSpeed's `get_accelerator()` is asked: torch's accelerator, or the CPU where there is none."""

from typing import Any

import torch


class Accelerator:
    """The device of this process, by DeepSpeed's names; what they do not rename is `torch.accelerator`'s."""

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
        return 0 if self._kind == "cpu" else torch.accelerator.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return 0 if self._kind == "cpu" else torch.accelerator.max_memory_allocated(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._kind != "cpu":
            torch.accelerator.reset_peak_memory_stats(device_index)

    def is_bf16_supported(self) -> bool:
        return self._kind != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        return True

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    manual_seed = manual_seed_all


def get_accelerator() -> Accelerator:
    return Accelerator()
