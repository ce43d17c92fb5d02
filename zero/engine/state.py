"""The `State` that moves from step to step.

A `State` is a value: `step` takes one and returns the next, and the old one is spent. The tensors are the same memory
(the `UnitState` of each unit, and pages in the store), so a state costs nothing, and a spent one says so instead of
showing numbers of a later step.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from zero.core.loss_scale import LossScale
from zero.core.sizes import size_text
from zero.engine.full_flat import full_parameters
from zero.engine.plan import Plan
from zero.engine.runtime import Runtime
from zero.errors import MachineError, StaleStateError, WorldError, one_line
from zero.platform.device import free_host_bytes


@dataclass(frozen=True, eq=False)
class State:
    """The training state after `step` updates. `zero.init` makes the first one, and every step the next.

    One thread of one process may use it at a time; another thread gets ConfigError.

    Attributes:
        step: updates made, the skipped ones not counted.
        scale: the loss scale and its counters.
        skipped: steps that changed nothing because a gradient was not finite.
        tried: `step` and `skipped` together.
        plan: that it was made from.
        model: the plan's model, which trains; reading one of its parameters outside of a forward gathers its unit.

    Raises:
        StaleStateError: an attribute was read of a state that a later step has consumed.
    """

    machinery_: Runtime = field(repr=False)
    step_: int
    scale_: LossScale
    spent_: list[int] = field(default_factory=list, repr=False)

    @property
    def step(self) -> int:
        return self._live().step_

    @property
    def scale(self) -> LossScale:
        return self._live().scale_

    @property
    def skipped(self) -> int:
        return self.scale.skipped

    @property
    def tried(self) -> int:
        """Steps that were made, the skipped ones counted."""
        return self.step + self.skipped

    @property
    def runtime(self) -> Runtime:
        machinery = self._live().machinery_
        if machinery.takeover.is_over:
            raise StaleStateError("this State was closed; make another one with zero.init")
        return machinery

    @property
    def state(self) -> State:
        """Itself: whatever has a state gives it by this name."""
        return self._live()

    @property
    def plan(self) -> Plan:
        return self._live().machinery_.plan

    @property
    def model(self) -> nn.Module:
        return self.plan.model

    def advance(self, *, scale: LossScale, finite: bool) -> State:
        """The state after one more step; this one is spent, and so are its gradients, which the update may use up."""
        live = self._live()
        live.machinery_.updater.sums.clear()
        self.spent_.append(live.tried + 1)
        return replace(live, step_=live.step_ + finite, scale_=scale, spent_=[])

    def restored(self, *, step: int, scale: LossScale) -> State:
        """The state that a checkpoint is about to put in this one's memory; this one is spent."""
        return replace(self.advance(scale=scale, finite=False), step_=step)

    def spend(self) -> None:
        """Something changed that cannot go back: nothing may take this for the state that it was."""
        self.advance(scale=self.scale, finite=False)

    def close(self) -> None:
        """Close the store and make the model an ordinary one again. Collective; a second call has no effect.

        Each parameter is an `nn.Parameter` again. It has its full trained value, on every rank, in the dtype and on the
        device that it was given with, or on the CPU if it was given without values. Buffers keep their values. The
        model can be planned again.

        The model keeps no values where they cannot be collected: if the ranks or the store have failed, if this state
        is spent, if host memory is too small, or while an exception is being handled, because the other ranks do not
        know of it. Then all parameters are on meta, and a warning or a note of that exception says so.
        """
        runtime = self.machinery_
        if runtime.takeover.is_over:
            return
        values, reason = self._values()
        for unit in runtime.units:
            unit.resident = unit.shard_S = unit.frozen_S = unit.grad = None
        runtime.store.close()
        runtime.takeover.release(values)
        if values is None:
            error, text = sys.exception(), f"the model keeps no values: {reason}. Load a checkpoint, or plan it again."
            if error is None:
                warnings.warn(text, stacklevel=2)
            else:
                error.add_note(text)

    def _values(self) -> tuple[dict[str, Tensor] | None, str]:
        """Return the full parameters as the model was given them, or None and the reason. Collective."""
        runtime = self.machinery_
        if self.spent_:
            return None, "the state is spent"
        if sys.exception() is not None:
            return None, "its state was closed after this error"
        forms, world = runtime.takeover.forms, runtime.plan.world
        try:
            needed_bytes = runtime.plan.numel * max(form.dtype.itemsize for form in forms.values()) * world.local_size
            if needed_bytes > (free_bytes := int(world.share(str(free_host_bytes())))):
                return None, f"they take {size_text(needed_bytes)} of host memory, and {size_text(free_bytes)} are free"
            runtime.settle()
            return {name: value.to(forms[name].dtype) for name, value in full_parameters(runtime)}, ""
        except (WorldError, MachineError) as error:
            return None, one_line(error)

    def _live(self) -> State:
        if self.spent_:
            raise StaleStateError(
                f"this State was already consumed by step {self.spent_[0]}; "
                "write `state, metrics = step(state, microbatches)` and keep the new one"
            )
        return self
