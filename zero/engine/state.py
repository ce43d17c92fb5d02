"""The training state (`State`) between two steps.

A step takes a `State` and returns the next one. Both use the same memory (the `UnitState` of each unit, and pages in
the store), so a step copies nothing. The old state is spent: its attributes raise StaleStateError, because its memory
already has the values of a later step.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from zero.core.loss_scale import LossScale
from zero.core.sizes import size_text
from zero.engine.after import After
from zero.engine.full_flat import full_parameters
from zero.engine.plan import Plan
from zero.engine.runtime import Runtime, awake
from zero.errors import MachineError, StaleStateError, WorldError, one_line
from zero.platform.host_memory import free_host_bytes
from zero.platform.modes import unobserved


@dataclass(frozen=True, eq=False)
class State:
    """The training state after `step` updates. `zero.init` returns the first one, and every step the next.

    Only one thread may use it at a time; another thread gets a ConfigError.

    Attributes:
        step: the number of updates, without skipped steps.
        scale: the loss scale and its counters.
        skipped: the number of steps that were skipped because a gradient was infinite or NaN.
        tried: the sum of `step` and `skipped`.
        plan: the plan that the state was made from.
        model: the plan's model. Reading one of its parameters outside of a forward gathers the parameter's unit.

    Raises:
        StaleStateError: by every attribute, if a later step has consumed the state.
    """

    machinery_: Runtime = field(repr=False)
    after_: After
    spent_: list[str] = field(default_factory=list, repr=False)

    @property
    def step(self) -> int:
        return self._live().after_.counts[0]

    @property
    def scale(self) -> LossScale:
        return self._live().after_.counts[1]

    @property
    def skipped(self) -> int:
        return self.scale.skipped

    @property
    def tried(self) -> int:
        """The number of steps, including skipped ones."""
        return self._live().after_.tried

    @property
    def runtime(self) -> Runtime:
        machinery = self._live().machinery_
        if machinery.takeover.is_over:
            raise StaleStateError("this State was closed. Make another one with zero.init.")
        machinery.wake()
        return machinery

    @property
    def is_parked(self) -> bool:
        """Whether `zero.move(state, offload="parked")` has moved the state off the device, and nothing has used it."""
        return self._live().machinery_.wake is not awake

    @property
    def state(self) -> State:
        """The state itself, for functions that accept a State, a Step or an engine and read its `state`."""
        return self._live()

    @property
    def plan(self) -> Plan:
        return self._live().machinery_.plan

    @property
    def model(self) -> nn.Module:
        return self.plan.model

    @property
    def after(self) -> After:
        """The counts after the last step, which the host may not know yet."""
        return self._live().after_

    def advance(self, after: After, by: str = "") -> State:
        """Return the following state, with its counts, and mark this one as spent.

        Its gradients cannot be read any more, because the update may overwrite them.

        Args:
            by: the name of the event that consumes this state; "": one more step.
        """
        live = self._live()
        live.machinery_.reducer.end_step()
        self.spent_.append(
            f"was already consumed by {by or f'step {live.tried + 1}'}. "
            "Write `state, metrics = step(state, microbatches)` and keep the new one."
        )
        return replace(live, after_=after, spent_=[])

    def restored(self, *, step: int, scale: LossScale) -> State:
        """Return the state for a checkpoint that is about to be loaded into the same memory; mark this one as spent."""
        return self.advance(After.known(step, scale))

    def spend(self) -> None:
        """Mark the state as spent, because a partial change has made its memory inconsistent."""
        self.advance(self.after_)

    def close(self) -> None:
        """Close the store and make the model an ordinary one again. Collective; a second call has no effect.

        Each parameter becomes an ordinary parameter again, with its full trained value on every rank. Its dtype and
        device are those that it had before `zero.init`, or the CPU if it was on meta. Buffers keep their values. The
        model can be used for another plan.

        In some cases the values cannot be gathered: a rank or the store has failed, this state is spent, host memory is
        too small, or an exception is being handled (the other ranks do not know of it, so a collective could hang).
        Then all parameters are on meta, and a warning, or a note on that exception, says so.
        """
        runtime = self.machinery_
        if runtime.takeover.is_over:
            return
        runtime.wake()
        with unobserved():
            runtime.await_copies()
            values, reason = self._values()
            for unit in runtime.units:
                unit.resident, unit.shards, unit.grad = None, (None,) * len(unit.shards), None
            runtime.store.close()
            runtime.takeover.release(values)
        if values is None:
            error, text = sys.exception(), f"the model keeps no values: {reason}. Load a checkpoint, or plan it again."
            if error is None:
                warnings.warn(text, stacklevel=2)
            else:
                error.add_note(text)

    def _values(self) -> tuple[dict[str, Tensor] | None, str]:
        """Return (full parameters by name, ""), or (None, the reason why they cannot be gathered). Collective.

        The parameters have the dtypes that they had before `zero.init`.
        """
        runtime = self.machinery_
        if self.spent_:
            return None, "this state cannot be used any more"
        if sys.exception() is not None:
            return None, "its state was closed after this error"
        forms, world = runtime.takeover.forms, runtime.plan.world
        try:
            widest = max(form.dtype.itemsize for form in forms.values())
            needed_bytes = runtime.plan.numel * widest * world.whole.local_size
            if needed_bytes > (free_bytes := int(world.share(str(free_host_bytes())))):
                return None, f"they take {size_text(needed_bytes)} of host memory, but {size_text(free_bytes)} is free"
            runtime.settle()
            return {name: value.to(forms[name].dtype) for name, value in full_parameters(runtime)}, ""
        except (WorldError, MachineError) as error:
            return None, one_line(error)

    def _live(self) -> State:
        if self.spent_:
            raise StaleStateError(f"this State {self.spent_[0]}")
        return self
