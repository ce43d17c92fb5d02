"""A GPU that is none: every decision of the engine is the one it makes for a GPU, and its memory is the host's.

    with zero.testing.simulated_gpu():
        world = zero.World.from_env()

What lies in the arena, which on a GPU is pinned memory of the host, is host memory here, and everything else is the
device's: what travels between tiers is copied as it would be. Streams run in program order, kernels are the CPU's.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from zero.device import Device, GiB

NOT_LAUNCHED = frozenset(
    f"aten::{name}"
    for name in (
        *(
            "alias",
            "as_strided",
            "chunk",
            "detach",
            "detach_",
            "expand",
            "expand_as",
            "flatten",
            "lift_fresh",
            "movedim",
        ),
        *("narrow", "numpy_T", "permute", "reshape", "resolve_conj", "resolve_neg", "select", "slice", "split"),
        *("split_with_sizes", "squeeze", "t", "transpose", "unbind", "unflatten", "unfold", "unsafe_chunk"),
        *("unsafe_split", "unsqueeze", "view", "view_as", "_reshape_alias", "_unsafe_view", "view_as_real"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "contiguous"),
        *("is_same_size", "result_type", "item", "_local_scalar_dense", "to", "is_pinned", "record_stream"),
    )
)
"""Operators that look at memory, or allocate it, and launch nothing by themselves."""


class SimulatedGpu(Device):
    """A device with memory of its own, by which memory of the host is told from it.

    Args:
        memory_bytes: what it has.
    """

    shares_memory = False
    piece_numel, sum_numel, batch_bytes = 1 << 26, 1 << 22, 16 << 20

    def __init__(self, memory_bytes: int) -> None:
        super().__init__(torch.device("cpu"))
        self._memory_bytes = memory_bytes
        self._host: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def sum_of_squares(self, flat: Tensor) -> Tensor:
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square_()

    def is_home_of(self, tensor: Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        return not any(first <= address < stop for first, stop in self._host)

    def bring(self, tensor: Tensor) -> Tensor:
        return tensor if self.is_home_of(tensor) else tensor.clone()

    def adopt(self, memory: Tensor) -> None:
        with self._lock:
            self._host = [*self._host, (memory.data_ptr(), memory.data_ptr() + memory.nbytes)]

    def pin(self, memory: Tensor) -> bool:
        return True

    def unpin(self, memory: Tensor) -> None:
        with self._lock:
            self._host = [place for place in self._host if place[0] != memory.data_ptr()]

    def give_back_memory(self) -> None:
        """Nothing, as on a GPU."""

    def free_bytes(self) -> int:
        return self._memory_bytes

    def total_bytes(self) -> int:
        return self._memory_bytes


@contextmanager
def simulated_gpu(memory_bytes: int = 64 * GiB) -> Iterator[None]:
    """Worlds that are made in the block have a simulated GPU. A process that is started in it has to say so itself."""
    before, Device.stand_in = Device.stand_in, lambda: SimulatedGpu(memory_bytes)
    try:
        yield
    finally:
        Device.stand_in = before


def count_launches(run: Callable[[], object]) -> Counter[str]:
    """What `run` would launch on a GPU: operators by name, called from outside of operators, in all threads."""
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as told:
        run()
    return Counter(event.name for event in told.events() if event.name.startswith("aten::") and _is_launch(event))


def _is_launch(event: "torch.autograd.profiler_util.FunctionEvent") -> bool:
    around = event.cpu_parent
    while around is not None and not around.name.startswith("aten::"):
        around = around.cpu_parent
    return around is None and event.name not in NOT_LAUNCHED
