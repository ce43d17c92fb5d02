"""This process and its device, by DeepSpeed's names: `get_accelerator()`, its rank, and what it logs.

The device is torch's accelerator, or the CPU where there is none.
"""

import logging
import os
from collections.abc import Iterable
from typing import Any

import psutil
import torch

log = logging.getLogger("zero")


class Accelerator:
    """The device of this process. What is not here is that of torch's module for the device, by the same name.

    `device_index` is the index of a GPU; None: the current one. The CPU ignores it.
    """

    @property
    def _name(self) -> str:
        """The type of device, such as "cuda". It is not private there: scripts compare it."""
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return "cpu" if found is None else found.type

    @property
    def _is_cpu(self) -> bool:
        return self._name == "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        """Such as "cuda:1", or "cuda" without an index; "cpu"."""
        return self._name if device_index is None or self._is_cpu else f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """The current device as `device_name` spells it."""
        return self.device_name(self.current_device())

    def current_device(self) -> int:
        """The index of the current device; 0 on the CPU."""
        return 0 if self._is_cpu else torch.accelerator.current_device_index()

    def device(self, device_index: int | None = None) -> torch.device:
        """The same as a `torch.device`."""
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        """Make a device the current one."""
        if not self._is_cpu:
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """The number of devices; 1 on the CPU."""
        return 1 if self._is_cpu else torch.accelerator.device_count()

    def is_available(self) -> bool:
        """True: there is always the CPU."""
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for everything that was launched on the current device."""
        if not self._is_cpu:
            torch.accelerator.synchronize()

    def communication_backend_name(self) -> str:
        """The backend of `torch.distributed`: "nccl" on CUDA, else "gloo"."""
        return "nccl" if self._name == "cuda" else "gloo"

    def empty_cache(self) -> None:
        """Return unused memory of torch's allocator to the device."""
        if not self._is_cpu:
            torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes in use by tensors; 0 on the CPU, where torch does not count them."""
        return 0 if self._is_cpu else torch.accelerator.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most bytes in use since `reset_peak_memory_stats`; 0 on the CPU."""
        return 0 if self._is_cpu else torch.accelerator.max_memory_allocated(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch's allocator holds; 0 on the CPU."""
        return 0 if self._is_cpu else torch.accelerator.memory_reserved(device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The most bytes that it held since `reset_peak_memory_stats`; 0 on the CPU."""
        return 0 if self._is_cpu else torch.accelerator.max_memory_reserved(device_index)

    def available_memory(self, device_index: int | None = None) -> int:
        """Free bytes of the device, or of the host."""
        if self._is_cpu:
            return psutil.virtual_memory().available
        return torch.accelerator.get_memory_info(device_index)[0]

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device, or of the host."""
        return psutil.virtual_memory().total if self._is_cpu else torch.accelerator.get_memory_info(device_index)[1]

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Let the `max_` readings start again."""
        if not self._is_cpu:
            torch.accelerator.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_peak_memory_stats

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""
        return self._name != "cuda" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """True."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that a model can compute in."""
        return [torch.float, torch.half, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def is_synchronized_device(self) -> bool:
        """Whether a call returns when its work is done, as on the CPU."""
        return self._is_cpu

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this kind of device."""
        return tensor.is_cpu == self._is_cpu

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in page-locked memory; itself on the CPU. `align_bytes` is for old calls."""
        return tensor if self._is_cpu else tensor.pin_memory()

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)

    def __getattr__(self, name: str) -> Any:
        """Streams, events, random states and types of tensors, by the same names there."""
        if not name.startswith("_"):
            for module in (torch.get_device_module(self._name), torch):
                if name in vars(module):
                    return vars(module)[name]
        raise AttributeError(f"get_accelerator() has no {name}; torch.{self._name} has what this device can do")


def get_accelerator() -> Accelerator:
    """The device of this process."""
    return Accelerator()


def get_local_rank() -> int:
    """The number of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on some ranks.

    Args:
        message: the message.
        ranks: the ranks, -1 for all; None: rank 0.
        level: of `logging`.
    """
    rank, wanted = _rank(), (0,) if ranks is None else tuple(ranks)
    if rank in wanted or -1 in wanted:
        log.log(level, "[Rank %d] %s", rank, message)


def see_memory_usage(message: str, force: bool = False) -> None:
    """On rank 0, print memory in use on the device, the most since the last call, and that of the host.

    Args:
        message: the beginning of the line.
        force: nothing is printed without it.
    """
    if not force or _rank() != 0:
        return
    device, host = get_accelerator(), psutil.virtual_memory()
    counts = device.memory_allocated(), device.max_memory_allocated(), device.memory_reserved(), host.used
    now, most, reserved, used = (f"{count / 2**30:.2f} GiB" for count in counts)
    print(f"{message}: device {now}, at most {most}, reserved {reserved}; host {used}, {host.percent}%", flush=True)
    device.reset_peak_memory_stats()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
