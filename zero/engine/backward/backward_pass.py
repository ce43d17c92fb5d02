"""Hold the units of a running backward pass in their buffers, and deliver their gradients to the reducer.

The autograd nodes of `zero.engine.forward.graph` tell which gradients have arrived, and when all gradients of a call
have. Then the unit's buffer is released, and after the last call of the unit its gradient is reduced. A buffer is
pinned (must not be released):

    in forward               from the call of the site to its return
    in backward              from the first use until the gradients of all the unit's calls have arrived
    ... without gradients    until backward uses another unit, or ends (frozen units, gradients of inputs only)
    gathered ahead           until it is used, or the pass ends
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from zero.engine.backward.arrivals import Reducer
from zero.engine.gather import Residency
from zero.engine.memory import Buffer
from zero.engine.unit_state import UnitState
from zero.errors import StaleStateError
from zero.platform.modes import unobserved
from zero.platform.tape import Tape


class BackwardPass:
    """The backward passes of a step.

    Args:
        accumulate: the number of microbatches of a step.
        residency: gathers and releases units.
        reducer: receives each gradient, and reduces a unit when all of its calls have delivered their gradients.
        tape: records backwards in the timeline.

    Attributes:
        arrived: whether a gradient has arrived in this step.
        unscaled: whether a gradient has arrived from a backward without the loss scale.
        arriving: a callback, called when a gradient arrives.
        lock: held while gradients are delivered, because on a GPU backward runs on autograd's own threads.
    """

    def __init__(
        self, accumulate: int, units: Sequence[UnitState], residency: Residency, reducer: Reducer, tape: Tape
    ) -> None:
        self._accumulate, self._units, self._residency, self._tape = accumulate, units, residency, tape
        self._deliver, self._start_reduce = reducer.deliver, reducer.start_reduce
        self.arriving: Callable[[], None] = lambda: None
        self._held: list[UnitState] = []  # units whose buffer the running backward pass has pinned
        self._passes: WeakValueDictionary[int, Callable[[], None]] = WeakValueDictionary()
        """End-of-pass callbacks of the running backward passes, by autograd's graph task id; several when nested.

        Only autograd references them, so the callback of a pass that raised disappears with that pass."""
        self._scaled: set[int] = set()  # ids of passes that began with the loss scale
        self.arrived = self.unscaled = False
        self.lock = threading.RLock()

    # -- one step ------------------------------------------------------------------------------------------------------

    @unobserved()
    def clear(self) -> None:
        """Begin a step: forget what arrived in the last one."""
        for unit in [*self._held]:
            self._let_go(unit)
        self.arrived = self.unscaled = False

    def forget_calls(self) -> None:
        """Forget forwards outside of a step, for which `end` is never called."""
        for unit in self._units:
            unit.step.calls.clear()
            unit.step.returned = 0
        self._scaled.clear()

    def end(self) -> None:
        """End a microbatch; reduce units whose calls got no gradient as zeros, in unit order."""
        for unit in self._units:
            if unit.step.calls:
                self._close(unit)

    def reset(self) -> None:
        """Forget all passes and pinned buffers after an exception."""
        for unit in self._held:
            unit.step.held = None
        self._held.clear()
        self._passes.clear()
        self._scaled.clear()

    # -- one pass ------------------------------------------------------------------------------------------------------

    def hold(self, unit: UnitState) -> Buffer:
        """Gather and pin `unit` for the running backward pass; unpin units that expect no more gradients in it."""
        with self.lock:
            self._watch_pass()
            if unit.step.held is None:
                for other in [other for other in self._held if not self._awaited(other)]:
                    self._let_go(other)
                unit.step.held = self._residency.pin(unit, training=True)
                self._held.append(unit)
            return unit.step.held

    def _awaited(self, unit: UnitState) -> bool:
        """Return whether gradients of `unit` will still arrive in the running backward pass."""
        return any(torch._C._will_engine_execute_node(call) for call in unit.step.calls)

    def _let_go(self, unit: UnitState) -> None:
        buffer, unit.step.held = unit.step.held, None
        if buffer is not None:
            self._held.remove(unit)
            self._residency.unpin(unit, buffer)

    @unobserved()
    def deliver(self, unit: UnitState, grads: dict[int, Tensor]) -> None:
        """Receive gradients, by slot, from one call of their unit."""
        with self.lock:
            self._watch_pass()
            self.arriving()
            hooked = unit.step.hooked
            for (slot, grad), trains in zip([*grads.items()], unit.trains(grads), strict=True):
                placeholder = unit.placeholders[slot]
                if not trains:
                    raise StaleStateError(
                        f"{placeholder.full_name} was frozen between this graph's forward and its backward. Freeze it "
                        "before the forward, or after the step."
                    )
                if placeholder.hooks:  # hooks get the sum over all calls, as on any leaf
                    hooked[slot] = hooked[slot] + grad if slot in hooked else grad
                    del grads[slot]
            self._deliver(unit, grads)
            unit.step.delivered = True
            self.arrived, self.unscaled = True, self.unscaled or self._scaled.isdisjoint(self._passes)

    def scaled(self, *_: Any) -> None:
        """Note that the running backward pass began with the loss scale. Used as a tensor hook."""
        with self.lock:
            self._watch_pass()
            self._scaled.add(torch._C._current_graph_task_id())

    @unobserved()
    def returned(self, unit: UnitState, *, counted: bool) -> None:
        """Note that all gradients of one call have arrived.

        Args:
            counted: False for a call that recomputes an earlier one.
        """
        with self.lock:
            self._watch_pass()
            self._tape.passed("backward", unit.spec.name)
            if unit.resident is None and not unit.spec.lookup:
                self.hold(unit)  # this rank did not use the values, but other ranks gather the unit here
            self._residency.launched()
            record = unit.step
            record.delivered = True
            record.returned += counted
            if counted and record.returned == len(record.calls):
                self._close(unit)
            elif counted:  # an earlier call needs the unit later in backward: gather it again then
                self._let_go(unit)

    def _close(self, unit: UnitState) -> None:
        record = unit.step
        record.calls.clear()
        record.returned, record.delivered = 0, False
        hooked, record.hooked = record.hooked, {}
        for slot, grad in sorted(hooked.items()):
            # hooks see the gradient divided by the number of microbatches; the update divides later, so multiply back
            seen = unit.placeholders[slot].through_hooks(grad / self._accumulate)
            self._deliver(unit, {slot: seen * self._accumulate})
        self._start_reduce(unit)
        self._let_go(unit)

    @unobserved()
    def reduce_arrived(self) -> None:
        """Reduce the gradients that have arrived, even of units with backwards to come. Call it outside of backward."""
        with self.lock:
            for unit in self._units if not self._passes else ():
                if unit.step.delivered:
                    self._close(unit)

    def _watch_pass(self) -> None:
        """Have autograd call `_pass_ended` when the running backward pass ends."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self._passes:
            self._passes[task] = ended = partial(self._pass_ended, task)
            torch.autograd.Variable._execution_engine.queue_callback(ended)

    @unobserved()
    def _pass_ended(self, task: int) -> None:
        self._passes.pop(task, None)
        self._scaled.discard(task)
        if self._passes:
            return  # the ended pass was nested in another one, as with a reentrant checkpoint
        for unit in self._units:
            record = unit.step
            if record.delivered and (record.returned or not record.calls):  # else a later backward or `end` does
                self._close(unit)
        for unit in [*self._held]:
            self._let_go(unit)
