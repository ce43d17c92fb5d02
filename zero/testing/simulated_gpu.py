"""A simulated GPU: the engine decides as it does on a GPU, kernels are the CPU's, and memory is the host's.

    with zero.testing.simulated_gpu():
        world = zero.World.from_env()

Memory that the arena or `device.host` gave out is pinned host memory on a GPU, and counts as host memory here. All
other memory counts as the device's, so copies between tiers are made as on a GPU. With `races=True` every operator is
checked: `races` says what orders operators, and `streams` when they run.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from zero.core.sizes import GiB
from zero.platform.device import Device
from zero.testing.handoffs import instrumentation
from zero.testing.instrumented_gpu import InstrumentedGpu, SimulatedGpu, WaitSite
from zero.testing.operators import WITHOUT_KERNEL
from zero.testing.streams import thread


@dataclass(frozen=True)
class Settings:
    """The arguments of `simulated_gpu`."""

    memory_bytes: int
    races: bool
    order: str
    seed: int
    without: WaitSite | None

    @property
    def is_instrumented(self) -> bool:
        """Return whether every operator is recorded."""
        return self.races or self.order != "program"


class Simulation:
    """The record of one `simulated_gpu` block.

    Attributes:
        gpus: one for each rank.
        sites: the waits that were reached, if devices are instrumented.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.gpus: list[SimulatedGpu] = []
        self.sites: set[WaitSite] = set()

    @property
    def counts(self) -> Counter[str]:
        """Launches, waits of the host and bytes copied each way, summed over all devices."""
        return sum((gpu.streams.counts for gpu in self.gpus), Counter())

    def finish(self) -> None:
        """Raise a race that a finalizer saw and that no later access has raised."""
        for gpu in self.gpus:
            if gpu.streams.deferred_races:
                raise gpu.streams.deferred_races[0]

    def make_gpu(self) -> "SimulatedGpu":
        if not self.settings.is_instrumented:
            self.gpus.append(SimulatedGpu(self.settings.memory_bytes))
        else:
            chosen = self.settings
            self.gpus.append(
                InstrumentedGpu(
                    chosen.memory_bytes, chosen.order, chosen.seed, sites=self.sites, without=chosen.without
                )
            )
            if thread.mode is not None:
                thread.gpu = self.gpus[-1]
        return self.gpus[-1]


_SETTINGS: list[Settings] = []
"""Of the `simulated_gpu` blocks that are open in this process, the innermost last."""


def current_settings() -> Settings | None:
    """Return the settings of the innermost block, for new processes; None outside of any block."""
    return _SETTINGS[-1] if _SETTINGS else None


def with_settings(settings: Settings | None) -> AbstractContextManager[Simulation | None]:
    """Simulate with the `current_settings` of another process."""
    return nullcontext() if settings is None else _simulated(settings)


def simulated_gpu(
    memory_bytes: int = 64 * GiB,
    *,
    races: bool = False,
    order: str = "program",
    seed: int = 0,
    without: WaitSite | None = None,
) -> AbstractContextManager[Simulation]:
    """Give worlds that are made in the block a simulated GPU, also in `run_ranks` and `run_processes`.

    Args:
        memory_bytes: what each GPU reports as its total and free memory, in bytes.
        races: check every operator for races: accesses to the same bytes, at least one a write, that nothing orders.
        order: when launches on side streams run: "program", at once; "late", when a thread waits for them; "random",
            at a random moment before that. Until then, the memory that they will write holds NaN.
        seed: for the random moments of order "random".
        without: a wait to leave out, for tests of the simulation itself.

    Returns:
        The block, which yields the simulation: its devices, and counts of launches, waits and copies.

    Raises:
        RaceError: there is a race. Usually raised by the operator that makes the second access; at the end of the block
            if memory was freed while it was in use.
    """
    return _simulated(Settings(memory_bytes, races, order, seed, without))


@contextmanager
def _simulated(settings: Settings) -> Iterator[Simulation]:
    simulated = Simulation(settings)
    _SETTINGS.append(settings)
    try:
        with patch.object(Device, "stand_in", simulated.make_gpu):
            with instrumentation() if settings.is_instrumented else nullcontext():
                yield simulated
            simulated.finish()
    finally:
        _SETTINGS.pop()


def count_launches(run: Callable[[], object]) -> Counter[str]:
    """Count the kernels that `run` would launch on a GPU, by name of the operator, in all threads.

    Counts operators that Python or autograd calls, not those that other operators call.
    """
    all_threads = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=all_threads) as profiled:
        run()
    return Counter(event.name for event in profiled.events() if event.name.startswith("aten::") and _is_launch(event))


def _is_launch(event: "torch.autograd.profiler_util.FunctionEvent") -> bool:
    """Return whether it is the outermost operator with a kernel. `to` has none, but the copy that it calls has."""
    caller = event.cpu_parent
    while caller is not None and (not caller.name.startswith("aten::") or caller.name in WITHOUT_KERNEL):
        caller = caller.cpu_parent
    return caller is None and event.name not in WITHOUT_KERNEL
