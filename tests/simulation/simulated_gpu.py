"""A simulated GPU: the engine makes the same decisions as on a GPU, but kernels run on the CPU, in host memory.

    with simulated_gpu():
        world = zero.open_world()

Memory from the arena or from `device.host`, which is pinned host memory on a GPU, counts as host memory here. All other
memory counts as GPU memory, so copies between tiers are made as on a GPU. With `races=True` every operator is checked
for races: see `races` for the order of operators, and `streams` for the time at which they run.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from tests.simulation.handoffs import instrumentation
from tests.simulation.instrumented_gpu import InstrumentedGpu, SimulatedGpu, WaitSite
from tests.simulation.operators import WITHOUT_KERNEL
from tests.simulation.simulated_time import RATES, Rates
from tests.simulation.streams import thread
from zero.core.sizes import GiB
from zero.platform.device import Device
from zero.testing.processes import SURROUNDINGS


@dataclass(frozen=True)
class Settings:
    """The arguments of `simulated_gpu`."""

    memory_bytes: int
    races: bool
    order: str
    seed: int
    without: WaitSite | None
    fused: bool
    rates: Rates
    limited: bool = False

    @property
    def is_instrumented(self) -> bool:
        """Return whether every operator is recorded."""
        return self.races or self.limited or self.order != "program"


class Simulation:
    """The devices and records of one `simulated_gpu` block.

    Attributes:
        gpus: the simulated GPUs, one for each rank.
        sites: the waits in the library that were executed; empty unless devices are instrumented.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.gpus: list[SimulatedGpu] = []
        self.sites: set[WaitSite] = set()

    @property
    def counts(self) -> Counter[str]:
        """Return the numbers of launches, waits of the host and bytes copied each way, summed over all devices."""
        return sum((gpu.streams.counts for gpu in self.gpus), Counter())

    def finish(self) -> None:
        """Raise the RaceError of a finalizer, which cannot raise it itself, unless a later access has raised it."""
        for gpu in self.gpus:
            if gpu.streams.deferred_races:
                raise gpu.streams.deferred_races[0]

    def make_gpu(self) -> "SimulatedGpu":
        if not self.settings.is_instrumented:
            self.gpus.append(SimulatedGpu(self.settings.memory_bytes, fused=self.settings.fused))
        else:
            chosen = self.settings
            self.gpus.append(
                InstrumentedGpu(
                    chosen.memory_bytes,
                    chosen.order,
                    chosen.seed,
                    chosen.rates,
                    sites=self.sites,
                    without=chosen.without,
                    fused=chosen.fused,
                    limited=chosen.limited,
                )
            )
            if thread.mode is not None:
                thread.gpu = self.gpus[-1]
        return self.gpus[-1]


def simulated_gpu(
    memory_bytes: int = 64 * GiB,
    *,
    races: bool = False,
    order: str = "program",
    seed: int = 0,
    without: WaitSite | None = None,
    fused: bool = False,
    rates: Rates = RATES,
    limited: bool = False,
) -> AbstractContextManager[Simulation]:
    """Give each world that is made in the block a simulated GPU, also in `run_ranks` and `run_processes`.

    Args:
        memory_bytes: total and free memory that each GPU reports, in bytes.
        races: check every operator for races: two accesses to the same bytes, at least one of them a write, without a
            wait or other synchronization that orders them.
        order: when launches on side streams run: "program", at once; "late", when a thread waits for them; "random",
            at a random time before that. Until a launch runs, the memory that it will write holds NaN.
        seed: seed of the random times of order "random".
        without: a wait to skip, for tests of the simulation itself.
        fused: run the Triton kernels of updates and sums, in the interpreter of Triton; else operators compute the
            same.
        rates: the rates of the simulated clock.
        limited: raise torch.OutOfMemoryError if live bytes exceed `memory_bytes`, and report the rest as free.

    Returns:
        A context manager that yields the `Simulation`: its devices, and counts of launches, waits and copies.

    Raises:
        RaceError: there is a race. Usually raised by the operator that makes the second access; raised at the end of
            the block if memory was freed while it was in use.
    """
    return _simulated(Settings(memory_bytes, races, order, seed, without, fused, rates, limited))


@contextmanager
def _simulated(settings: Settings) -> Iterator[Simulation]:
    simulated = Simulation(settings)
    SURROUNDINGS.append(partial(_simulated, settings))
    try:
        with patch.object(Device, "stand_in", simulated.make_gpu):
            with instrumentation() if settings.is_instrumented else nullcontext():
                yield simulated
            simulated.finish()
    finally:
        SURROUNDINGS.pop()


def count_launches(run: Callable[[], object]) -> Counter[str]:
    """Count the kernels that `run` would launch on a GPU, in all threads; return operator name -> count.

    Only operators called by Python or autograd are counted, not operators called by other operators.
    """
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads) as profiled:
        run()
    return Counter(event.name for event in profiled.events() if _is_launch(event))


def _is_launch(event: "torch.autograd.profiler_util.FunctionEvent") -> bool:
    """Return whether `event` is an operator with a kernel that no other operator with a kernel has called.

    For example, `to` has no kernel, but the copy that it calls has.
    """
    caller = event.cpu_parent
    while caller is not None and not _has_kernel(caller.name):
        caller = caller.cpu_parent
    return caller is None and _has_kernel(event.name)


def _has_kernel(name: str) -> bool:
    return name.startswith(("aten::", "zero::")) and name not in WITHOUT_KERNEL
