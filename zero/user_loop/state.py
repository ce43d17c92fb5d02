"""The part of an engine that holds the state and its counts, and closes both when Python collects the engine."""

import logging
import weakref
from collections.abc import Collection
from functools import partial
from typing import Any

from zero.core import checks
from zero.engine.metrics import Metrics
from zero.engine.move import move, park_between_steps
from zero.engine.park import FLATS
from zero.engine.state import State
from zero.errors import ConfigError
from zero.platform.threads import BackgroundThread
from zero.settings import Settings
from zero.store import PrefetchStore
from zero.user_loop.optimizers import Optimizer
from zero.user_loop.run_log import RunLog
from zero.user_loop.settings import EngineSettings

log = logging.getLogger("zero")


class EngineState(EngineSettings):
    """The part of an engine that holds the training state.

    Attributes:
        metrics: results of the last step; None before the first.
        global_samples: number of samples of all steps, over all ranks.
        global_steps: number of steps, including skipped steps and those of a checkpoint that was loaded without its
            optimizer.
    """

    def __init__(self, config: Settings, state: State, optimizer: Optimizer, run_log: RunLog | None) -> None:
        super().__init__(config, state.plan, state.model, optimizer)
        self._run_log = run_log
        self.metrics: Metrics | None = None
        self._steps_before = self.global_samples = 0
        self.follow(state)
        self._warned: set[str] = set()
        self._closing = weakref.finalize(self, _close_in_thread, state.runtime.store, run_log)
        self._closing.atexit = False

    def follow(self, state: State) -> None:
        """Go on with a new state. Its counts are copied, because they may be read after `destroy`."""
        self._state, self.plan, self._after = state, state.plan, state.after
        self.global_steps = self._steps_before + state.tried

    @property
    def skipped_steps(self) -> int:
        """The number of steps that were skipped because a gradient was not finite."""
        return self._after.counts[1].skipped

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss; 1 except in fp16."""
        return self._after.counts[1].scale

    @property
    def state(self) -> State:
        """The training state, for functions such as `zero.get_full`.

        Raises:
            ConfigError: the engine was destroyed.
        """
        if not self._closing.alive:
            raise ConfigError("this engine was destroyed. Make another with zero.initialize.")
        return self._state

    def move(self, **settings: Any) -> None:
        """Move the state to other settings of memory, see `zero.move`. Collective.

        Args:
            settings: arguments of `zero.move`, such as `offload="cpu"`.
        """
        self.follow(move(self.state, **settings))

    def offload_states(
        self,
        include: Collection[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Park the state in host memory while another program needs the GPU, see `zero.move`. Collective.

        Args:
            include: the parts that leave: "optim_states", "hp_params", "lp_params", "lp_grads" and
                "contiguous_grad_buffer", as DeepSpeed names them; None: all. Buffers of gradients and of gathered
                parameters are freed in any case.
            device: "cpu".
            pin_memory: ignored: `offload.pin` says whether host memory is pinned.
            non_blocking: ignored, because copies have ended when this returns.

        Raises:
            ConfigError: a step is under way, or a name or device is unknown.
            MachineError: host memory is too small.
        """
        checks.one_of("device", device, ("cpu",))
        kept = self.plan.passes.kept.dtypes
        master = {kind for kind in kept if kind == self.plan.precision.master.kind}
        kinds = {"optim_states": kept.keys() - master, "hp_params": master, "lp_params": FLATS}
        parts = kinds | dict.fromkeys(("lp_grads", "contiguous_grad_buffer"), frozenset[str]())
        for name in include or ():
            checks.one_of("include", name, [*parts])
        chosen = parts if include is None else include
        park_between_steps(self.state, frozenset().union(*(parts[name] for name in chosen)))

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` has parked; the next use of the engine would, too.

        Args:
            non_blocking: ignored, because copies have ended when this returns.
        """
        move(self.state, offload="resident")

    @property
    def overflow(self) -> bool:
        """Whether the last update was skipped because a gradient was not finite."""
        return self.metrics is not None and self.metrics.skipped

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's mean gradient before clipping; None before the first step."""
        return self.metrics.grad_norm if self.metrics is not None else None

    def _warn_once(self, line: str) -> None:
        if line not in self._warned and self.global_rank == 0:
            log.warning("%s", line)
        self._warned.add(line)


def gather_ahead(state: State) -> None:
    """Start to gather resident parameters, unless threads are still updating them.

    A single rank may then read, save or run them, as scripts for DeepSpeed's lower stages do.
    """
    if not any(unit.tickets for unit in state.runtime.units):
        state.runtime.gather_changed()


def _close(store: PrefetchStore, run_log: RunLog | None) -> None:
    try:
        if run_log is not None:
            run_log.close(None)
    finally:
        store.close()


def _close_in_thread(store: PrefetchStore, run_log: RunLog | None) -> None:
    # in a thread, because Python may collect an engine anywhere, even in the store's threads and under its lock
    BackgroundThread(partial(_close, store, run_log), name="closing").start()
