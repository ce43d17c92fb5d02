"""Run a unit's modules on gathered parameters in forward and backward, and deliver their gradients to the reducer.

The autograd nodes of `graph` tell when all gradients of a call have arrived. The reducer then reduce-scatters them.
Each large gradient is taken out of autograd as soon as it is complete, so no second copy of it exists.

While a unit computes, a pair of saved-tensor hooks receives every tensor that autograd saves. A tensor in a gathered
buffer is replaced by (unit, version, offset, size, stride), so the buffer can be released after forward; the first use
in backward gathers the unit again. Activations are not recomputed, but kept by `activations`. If the user wraps the
unit in a checkpoint, these hooks are not installed, because torch runs only the innermost hooks. The checkpoint then
drops all saved tensors and recomputes the forward.

A buffer is pinned (must not be released):

    in forward               from the call of the site to its return
    in backward              from the first use until the gradients of all the unit's calls have arrived
    ... without gradients    until backward uses another unit, or ends (frozen units, gradients of inputs only)
    gathered ahead           until it is used, or the pass ends

A site raises OutsideUnitError under a transform of `torch.func` (grad, vmap, jacrev), because these transforms forbid
saved-tensor hooks. Tensors that the user puts in place of parameters with `torch.func.functional_call` are used as they
are.

Whether and when a collective starts depends only on the order of calls, so all ranks decide alike.

Source: research prototypes of saved-tensor regather; Zhao et al. 2023, "PyTorch FSDP", section 4.1 for the schedule.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from zero.core.setting_types import RECOMPUTED, Activations
from zero.core.tree import replaced, tensors_in
from zero.distributed.mesh import Placed, is_dtensor, local_part, spec_of, with_spec
from zero.engine.backward import Reducer
from zero.engine.checksums import Checksums
from zero.engine.forward.graph import (
    LARGE_NUMEL,
    RUN_FIRST,
    Arrive,
    Gather,
    check_same_parameters,
    nodes_of,
    reaching,
)
from zero.engine.forward.recompute import recomputed_call
from zero.engine.forward.residency import Residency
from zero.engine.memory import Buffer, InPlace, Kept, storage_address
from zero.engine.model import (
    NOTHING,
    Binding,
    Body,
    Compiler,
    ParameterPlaceholder,
    Run,
    Site,
    call_with,
    in_backward,
    note_dtypes,
)
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.errors import ConfigError, OutsideUnitError, StaleStateError
from zero.platform.modes import unobserved
from zero.platform.threads import OneThread
from zero.platform.timeline import Tape


class Place(NamedTuple):
    """The position of a parameter in a site's module.

    Attributes:
        owner: the path of the submodule that holds the parameter, relative to the site's module.
        parameters: that submodule's `_parameters`.
        name: the parameter's key in `parameters`.
        placeholder: the parameter itself.
    """

    owner: tuple[str, ...]
    parameters: dict[str, Any]
    name: str
    placeholder: ParameterPlaceholder

    def is_in(self, module: nn.Module) -> bool:
        """Return whether `module` still has a parameter at this place; users may exchange submodules."""
        for name in self.owner:
            part = module._modules.get(name)
            if part is None:
                return False
            module = part
        return module._parameters is self.parameters and self.parameters.get(self.name) is not None


class Packed(NamedTuple):
    """A saved tensor as a view of its unit's gathered buffer; `offset` counts elements from the buffer's start."""

    unit: int
    version: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class PackedPlaced(NamedTuple):
    """A saved DTensor whose local part is a view of its unit's gathered buffer."""

    local: Packed
    spec: Any


class Gatherer:
    """Runner of a model's sites: it gathers their units, runs them, and delivers their gradients.

    Args:
        residency: gathers and releases units.
        reducer: receives each gradient, and reduces a unit when all of its calls have delivered their gradients.
        activations: keeps activations until backward.
        tape: records forwards and backwards in the timeline.
        checksums: records outputs of sites, if a step is made twice.

    Attributes:
        arrived: whether a gradient has arrived in this step.
        unscaled: whether a gradient has arrived from a backward without the loss scale.
        entering: a callback, called outside of backward before a site runs or a parameter is read with an autograd
            history.
        arriving: a callback, called when a gradient arrives.
        use: a lock that only one thread may hold, which ensures that one thread uses the state at a time.
        frozen_groups: the numbers of optimizer groups that do not train in the next forwards.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[UnitState],
        residency: Residency,
        reducer: Reducer,
        activations: InPlace,
        tape: Tape,
        checksums: Checksums,
    ) -> None:
        self._tape, self._precision, self._checksums = tape, plan.precision, checksums
        self._units, self.residency, self.pool = units, residency, residency.pool
        self._accumulate, self._deliver, self._start_reduce = (
            plan.accumulate,
            reducer.deliver,
            reducer.start_reduce,
        )
        self.activations, self._policies = activations, plan.activations
        self._sends = False  # whether the running unit's activations are offloaded
        self._compiler = Compiler(plan.compile) if plan.compile else None
        self._resident_addresses = {unit.resident.address for unit in units if unit.resident is not None}
        self._anchor = torch.zeros(0, requires_grad=True)
        self._places_of: dict[str, list[Place]] = {}  # by the site's path, in the order of its bindings
        self._placed = plan.beside.placed
        self._placed_of: dict[str, dict[str, Placed]] = {}  # by the site's path and the name in its `Body`
        self._check_writes = plan.check_writes
        self.entering: Callable[[], None] = lambda: None
        self.arriving: Callable[[], None] = lambda: None
        self._held: list[UnitState] = []  # units whose buffer the running backward pass has pinned
        self._passes: WeakValueDictionary[int, Callable[[], None]] = WeakValueDictionary()
        """End-of-pass callbacks of the running backward passes, by autograd's graph task id; several when nested.

        Only autograd references them, so the callback of a pass that raised disappears with that pass."""
        self._scaled: set[int] = set()  # ids of passes that began with the loss scale
        self.arrived = self.unscaled = False
        self.frozen_groups: frozenset[int] = frozenset()
        self.use = OneThread("a State", self.reset)
        self._lock = threading.RLock()  # on a GPU backward runs on autograd's own threads

    # -- one microbatch ------------------------------------------------------------------------------------------------

    @unobserved()
    def begin(self) -> None:
        """Begin a microbatch, or an evaluation."""
        if torch.is_grad_enabled():  # else keep the calls: an evaluation may run between forward and backward
            self._forget_calls()  # of forwards outside of a step, for which `end` is never called
            self._scaled.clear()
        self.activations.release_all()
        self.residency.begin()

    @unobserved()
    def clear(self) -> None:
        """Begin a step: forget what arrived in the last one."""
        for unit in [*self._held]:
            self._let_go(unit)
        self.arrived = self.unscaled = False

    @unobserved()
    def end(self) -> None:
        """End the microbatch; reduce units whose calls got no gradient as zeros, in unit order."""
        for unit in self._units:
            if unit.step.calls:
                self._close(unit)
        self.activations.release_all()
        self.residency.end()

    @unobserved()
    def reset(self) -> None:
        """Forget all calls and pinned buffers after an exception."""
        for unit in self._held:
            unit.step.held = None
        self._held.clear()
        self._passes.clear()
        self._scaled.clear()
        self.activations.release_all()
        self.residency.reset()

    def _forget_calls(self) -> None:
        for unit in self._units:
            unit.step.calls.clear()
            unit.step.returned = 0

    def runner(self, site: Site) -> Run:
        """Return the function that runs a call of `site`.

        With `compile` torch's compiler does not trace it into the caller's graph; without, it raises there.
        """
        if self._compiler is not None:
            return cast(Run, torch.compiler.disable(partial(self.run, site)))

        def run(body: Body, args: Any, kwargs: Any) -> Any:
            refuse_compiler()
            return self.run(site, body, args, kwargs)

        return run

    def place(self, site: Site, bound: Binding, place: Place) -> None:
        """Register one place of a parameter in the model; call it in the order of the site's bindings."""
        self._places_of.setdefault(site.path, []).append(place)
        if (placed := self._placed.get(place.placeholder.full_name)) is not None:
            place.placeholder.is_part = True
            self._placed_of.setdefault(site.path, {})[f"module.{bound.local}"] = placed
        if bound.trainable:
            self._units[bound.unit].placeholders[bound.slot] = place.placeholder

    # -- forward -------------------------------------------------------------------------------------------------------

    def run(self, site: Site, body: Body, args: Any, kwargs: Any) -> Any:
        """Run a call of a site's module on gathered parameters."""
        recomputing = in_backward()
        if recomputing:
            return self._run(site, body, args, kwargs, recomputing)
        with self.use:
            self.entering()
            with self._tape.forward(site.path, self._units[site.units[0]].spec.name):
                return self._run(site, body, args, kwargs, recomputing)

    def _run(self, site: Site, body: Body, args: Any, kwargs: Any, recomputing: bool) -> Any:
        pinned: list[tuple[UnitState, Buffer]] = []
        places = self._places_of[site.path]
        kept = [(parameters, name, parameters[name]) for _, parameters, name, _ in places if name in parameters]
        is_in_full = all(place.placeholder.full_value is not None for place in places) and not torch.is_grad_enabled()
        reject_transforms()
        sends = self._sends
        try:
            units = () if is_in_full else site.units
            with unobserved():
                for index in units:
                    unit = self._units[index]
                    if recomputing:  # also pinned for the call, because holding another unit may release this one
                        pinned.append((unit, self._hold(unit)))
                        pinned[-1][1].pins += 1
                    else:
                        pinned.append((unit, self.residency.pin(unit, training=torch.is_grad_enabled())))
                parameters = self._parameters(site, body.module, units, recomputing)
            placed = self._placed_of.get(site.path, NOTHING)
            call = partial(call_with, path=site.path, check_writes=self._check_writes, placed=placed)
            before = nodes_of((args, kwargs))  # before the call, which may change its inputs in place
            policy = self._policies[site.name]
            self._sends = policy == "offload"
            with self._packing():
                outputs = self._call(policy, call, body, parameters, args, kwargs)
            return self._after(site, outputs, parameters.values(), before, recomputing)
        except RuntimeError as error:
            note_dtypes(error, [place.placeholder.full_name for place in places], self._precision)
            raise
        finally:
            self._sends = sends
            for owner, name, placeholder in kept:  # else the next call takes it for a tensor of the user
                owner[name] = placeholder
            with unobserved():
                for unit, buffer in pinned:
                    self.residency.unpin(unit, buffer)

    @unobserved()
    def _after(
        self, site: Site, outputs: Any, parameters: Collection[Tensor], before: set[Any], recomputing: bool
    ) -> Any:
        """Return a site's outputs as its caller gets them, and start work that follows the site's.

        Args:
            before: the autograd nodes that made the site's inputs.
        """
        if self._checksums.active:
            self._checksums.note(site.name, "output", tensors_in(outputs))
        if not recomputing:
            self.residency.launched()
        outputs = reaching(outputs, parameters, set(before))
        if torch.is_grad_enabled() and not recomputing:
            made_with = [(unit, unit.version) for unit in (self._units[index] for index in site.units)]
            for node in nodes_of(outputs) - before:
                node.register_prehook(partial(check_same_parameters, made_with))
        return self._own(outputs)

    def _parameters(self, site: Site, module: nn.Module, units: Iterable[int], recomputing: bool) -> dict[str, Tensor]:
        """Return the site's parameters, views of gathered buffers, by their names in its `Body`.

        Parameters that the module does not have any more are left out.

        Args:
            units: the gathered units; none if all parameters are in a block of `GatheredParameters`.
        """
        gathered: dict[tuple[int, bool, int], Tensor] = {}  # by (unit, whether trainable, slot)
        for index in units:
            unit = self._units[index]
            flat, used, frozen = self.residency.buffer(unit).flat, site.slots[index, True], site.slots[index, False]
            if torch.is_grad_enabled() and used:
                made = self._made(unit, used, flat, recomputing)
            else:
                made = [unit.spec.trainable.slots[slot].of(flat) for slot in used]
            gathered |= {(index, True, slot): parameter for slot, parameter in zip(used, made, strict=True)}
            gathered |= {(index, False, slot): unit.spec.frozen_view(slot, flat) for slot in frozen}
        places = zip(site.bindings, self._places_of[site.path], strict=True)
        return {
            f"module.{bound.local}": _value_at(place, gathered.get((bound.unit, bound.trainable, bound.slot)))
            for bound, place in places
            if place.is_in(module)
        }

    def _made(self, unit: UnitState, slots: Sequence[int], flat: Tensor, recomputing: bool) -> list[Tensor]:
        """Return the trainable parameters `slots` of a unit with an autograd history.

        Args:
            recomputing: the call recomputes an earlier one, so it is not counted as a further call.
        """
        parameters: list[Tensor] = [*Gather.apply(self._anchor, self, unit, slots, flat, not recomputing)]
        if not recomputing:
            unit.step.calls.append(parameters[0].grad_fn)
        for place, (number, trains) in enumerate(zip(slots, unit.trains(slots), strict=True)):
            slot = unit.spec.trainable.slots[number]
            if not trains or slot.group in self.frozen_groups:
                parameters[place] = parameters[place].detach()
            elif slot.numel >= LARGE_NUMEL:
                parameters[place] = arriving = cast(Any, Arrive.apply(parameters[place], self, unit, number))
                arriving.grad_fn._set_sequence_nr(RUN_FIRST)
        return parameters

    def _call(
        self,
        policy: Activations,
        call: Callable[..., Any],
        body: Body,
        parameters: dict[str, Tensor],
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        module: nn.Module = body
        if self._compiler is not None and torch.is_grad_enabled():
            parameters = {f"module.{name}": value for name, value in parameters.items()}
            module = self._compiler.compiled(body, type(body.module))
        if policy in RECOMPUTED and torch.is_grad_enabled():
            return recomputed_call(module, parameters, args, kwargs, call, selective=policy == "selective")
        return call(parameters, module, args, kwargs)

    def _packing(self) -> AbstractContextManager[Any]:
        released = self.pool is not None or self.activations.offloads
        if not released or not torch.is_grad_enabled():
            return nullcontext()  # no buffer is ever released, so autograd may save all tensors itself
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return nullcontext()  # an outer unit's hooks handle all buffers; a checkpoint's hooks must not be hidden
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _own(self, outputs: Any) -> Any:
        """Copy outputs that are views of a gathered buffer, because the buffer is released before they are used."""
        if self.pool is None:
            return outputs
        borrowed = (t for t in tensors_in(outputs) if self.pool.holding(t) is not None)
        return replaced(outputs, {id(t): t.clone() for t in borrowed})

    # -- backward ------------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        if self._placed and is_dtensor(tensor):
            with unobserved():
                local = local_part(tensor)
            if self.pool is None or self.pool.holding(local) is None:
                return Kept(tensor, tensor._version)
            return PackedPlaced(self._pack(local), spec_of(tensor))
        buffer = None if self.pool is None else self.pool.holding(tensor)
        if buffer is None:
            stays = not self._sends or storage_address(tensor) in self._resident_addresses
            return Kept(tensor, tensor._version) if stays else self.activations.keep(tensor)
        assert buffer.unit is not None
        offset = int(tensor.storage_offset()) - int(buffer.flat.storage_offset())
        return Packed(buffer.unit, buffer.version, offset, tensor.shape, tensor.stride())

    @unobserved()
    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, PackedPlaced):
            return with_spec(self._unpack(packed.local), packed.spec)
        if not isinstance(packed, Packed):
            return packed.unchanged() if isinstance(packed, Kept) else self.activations.find(packed)
        unit = self._units[packed.unit]
        check_same_parameters([(unit, packed.version)])
        with self._lock:
            buffer = self._hold(unit)
        offset = int(buffer.flat.storage_offset()) + packed.offset
        return buffer.flat.as_strided(packed.size, packed.stride, offset)

    def regather(self, site: Site, binding: int) -> Callable[[bool], Tensor]:
        """Return the `ParameterPlaceholder.regather` of a parameter: it gathers the unit and returns a view.

        The function's argument says whether the view needs an autograd history.
        """
        bound = site.bindings[binding]

        @unobserved()
        def view(with_history: bool) -> Tensor:
            unit = self._units[bound.unit]
            recomputing = in_backward()
            reject_transforms()
            with nullcontext() if recomputing else self.use, self._lock:
                if with_history and not recomputing:
                    self.entering()
                if recomputing:
                    flat = self._hold(unit).flat
                else:  # unpinned immediately: `Pool.take` leaves the memory to tensors that still use it
                    buffer = self.residency.pin(unit, training=torch.is_grad_enabled())
                    flat = buffer.flat
                    self.residency.unpin(unit, buffer)
                if not bound.trainable:
                    return unit.spec.frozen_view(bound.slot, flat)
                if not with_history:
                    return unit.spec.trainable.slots[bound.slot].of(flat)
                # with a history even while recomputing, because a reentrant checkpoint runs backward from here
                return self._made(unit, (bound.slot,), flat, recomputing)[0]

        return view

    def _hold(self, unit: UnitState) -> Buffer:
        """Gather and pin `unit` for the running backward pass; unpin units that expect no more gradients in it."""
        self._watch_pass()
        if unit.step.held is None:
            for other in [other for other in self._held if not self._awaited(other)]:
                self._let_go(other)
            unit.step.held = self.residency.pin(unit, training=True)
            self._held.append(unit)
        return unit.step.held

    def _awaited(self, unit: UnitState) -> bool:
        """Return whether gradients of `unit` will still arrive in the running backward pass."""
        return any(torch._C._will_engine_execute_node(call) for call in unit.step.calls)

    def _let_go(self, unit: UnitState) -> None:
        buffer, unit.step.held = unit.step.held, None
        if buffer is not None:
            self._held.remove(unit)
            self.residency.unpin(unit, buffer)

    @unobserved()
    def deliver(self, unit: UnitState, grads: dict[int, Tensor]) -> None:
        """Receive gradients, by slot, from one call of their unit."""
        with self._lock:
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
                if placeholder.hooks:  # they get the sum over all calls, as hooks of any leaf do
                    hooked[slot] = hooked[slot] + grad if slot in hooked else grad
                    del grads[slot]
            self._deliver(unit, grads)
            unit.step.delivered = True
            self.arrived, self.unscaled = True, self.unscaled or self._scaled.isdisjoint(self._passes)

    def scaled(self, *_: Any) -> None:
        """Note that the running backward pass began with the loss scale. A tensor hook, which ignores its gradient."""
        with self._lock:
            self._watch_pass()
            self._scaled.add(torch._C._current_graph_task_id())

    @unobserved()
    def returned(self, unit: UnitState, *, counted: bool) -> None:
        """Note that all gradients of one call have arrived.

        Args:
            counted: False for a call that recomputes an earlier one.
        """
        with self._lock:
            self._watch_pass()
            self._tape.passed("backward", unit.spec.name)
            if unit.resident is None and not unit.spec.lookup:
                self._hold(unit)  # this rank did not use the values, but other ranks gather the unit here
            self.residency.launched()
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
        """Reduce the gradients that have arrived, even for units whose backward has not ended, outside of backward."""
        with self._lock:
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
            if record.delivered and (record.returned or not record.calls):  # else a later backward or `end` closes it
                self._close(unit)
        for unit in [*self._held]:
            self._let_go(unit)


def _value_at(place: Place, gathered: Tensor | None) -> Tensor:
    """Return the value to use for the parameter at `place`.

    That is the tensor that the user put there, else its full value in a block of `GatheredParameters`, else `gathered`.
    """
    there = place.parameters[place.name]
    if there is place.placeholder:
        full = place.placeholder.seen_in_full()
        return cast(Tensor, gathered) if full is None else full
    return there.value() if isinstance(there, ParameterPlaceholder) else cast(Tensor, there)


def refuse_compiler() -> None:
    """Raise ConfigError if torch's compiler traces or runs the caller, because it cannot trace how units are gathered.

    The compiler does not compile a frame that raises, but runs it in Python, so the error is seen.
    """
    if torch.compiler.is_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback():
        raise ConfigError(
            "torch.compile after zero.init or zero.initialize: the compiler cannot trace how units are gathered. Write "
            "zero.Plan(compile=True) or zero.initialize(model=torch.compile(model), ...)."
        )


def reject_transforms() -> None:
    """Raise OutsideUnitError under a transform of `torch.func`."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise OutsideUnitError(
            "torch.func cannot transform a model that trains in shards. Take gradients of inputs with "
            "torch.autograd.grad, or apply the transform to a copy of the module."
        )


def bind_placeholders(copied: nn.Module, sites: Iterable[Site], gatherer: Gatherer) -> None:
    """Register every site's parameters with `gatherer`, and set each placeholder's `regather`."""
    for site in sites:
        module = copied.get_submodule(site.path)
        for number, bound in enumerate(site.bindings):
            owner, _, name = bound.local.rpartition(".")
            placeholder = module.get_submodule(owner)._parameters[name]
            assert isinstance(placeholder, ParameterPlaceholder)
            placeholder.regather = gatherer.regather(site, number)
            way = tuple(owner.split(".")) if owner else ()
            gatherer.place(site, bound, Place(way, module.get_submodule(owner)._parameters, name, placeholder))
