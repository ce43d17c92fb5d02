"""Run a unit's modules on gathered parameters, forward and backward, and pass their gradients on.

The nodes of `graph` tell when all gradients of a call have arrived, and the reducer's reduce-scatter is the transpose
of the gather. Gradients leave autograd one by one: a unit's gradients never exist twice.

While a unit computes, a pair of saved-tensor hooks receives every tensor that autograd saves. A tensor in a gathered
buffer is replaced by (unit, version, offset, size, stride), so the buffer can be released after forward; the first use
in backward gathers the unit again. No activation is recomputed; `activations` keeps them. Only the innermost hooks
count in torch, so a checkpoint of the user's around the unit has its own: it drops everything and recomputes.

A buffer is pinned:

    in forward               from the call to its return
    in backward              from the first use until the gradients of all the unit's calls have arrived
    ... with none to come    until backward uses another unit, or ends (frozen units, gradients of inputs only)
    gathered ahead           until it is used, or the pass ends

`torch.func` transforms (grad, vmap, jacrev) forbid such hooks, so a site raises under one. Tensors that the user put
in place with `torch.func.functional_call` are used as they are.

Every decision about a collective depends on the order of calls alone, so all ranks decide alike.

Source: research prototypes of saved-tensor regather; Zhao et al. 2023, "PyTorch FSDP", section 4.1 for the schedule.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from zero.core.setting_types import Activations
from zero.core.tree import replaced, tensors_in
from zero.engine.compile import Compiler
from zero.engine.graph import (
    RUN_FIRST,
    Arrive,
    Gather,
    check_same_parameters,
    nodes_of,
    reaching,
    views,
)
from zero.engine.placeholder import ParameterPlaceholder, in_backward
from zero.engine.plan import Plan
from zero.engine.pool import Buffer, storage_address
from zero.engine.recompute import recomputed_call
from zero.engine.reduce import Reducer
from zero.engine.residency import Residency
from zero.engine.saved_tensors import InPlace, Kept
from zero.engine.takeover import Body, Run, call_with
from zero.engine.unit import Binding, Site
from zero.engine.unit_state import UnitState
from zero.engine.unsupported import note_dtypes
from zero.errors import OutsideUnitError, StaleStateError
from zero.platform.threads import OneThread
from zero.platform.timeline import Tape


class Place(NamedTuple):
    """A parameter's place in a site's module: `parameters[name]` of the module at `owner` is `placeholder`."""

    owner: tuple[str, ...]
    parameters: dict[str, Any]
    name: str
    placeholder: ParameterPlaceholder

    def is_in(self, module: nn.Module) -> bool:
        """Return whether the site's `module` still has a parameter there: its parts may have been exchanged."""
        for name in self.owner:
            part = module._modules.get(name)
            if part is None:
                return False
            module = part
        return module._parameters is self.parameters and self.parameters.get(self.name) is not None


class Packed(NamedTuple):
    """The place of a saved tensor in the gathered buffer of its unit."""

    unit: int
    version: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Gatherer:
    """Runs the sites of one copied model on gathered units.

    Args:
        activations: keeps activations until backward.
        reducer: takes each gradient of a call, and reduces a unit when all of its calls have delivered theirs.
        tape: records forwards and backwards.

    Attributes:
        arrived: a gradient has arrived in this step.
        unscaled: a gradient has arrived from a backward without the loss scale.
        entering: called before a site runs, or a parameter is read with a history, outside of backward.
        arriving: called when a gradient arrives.
        use: held by the thread that uses the state.
        frozen_groups: numbers of the optimizer's groups that do not train in the next forwards.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[UnitState],
        residency: Residency,
        reducer: Reducer,
        activations: InPlace,
        tape: Tape,
    ) -> None:
        self._tape, self._precision = tape, plan.precision
        self._units, self.residency, self.pool = units, residency, residency.pool
        self._accumulate, self._deliver, self._start_reduce = plan.accumulate, reducer.deliver, reducer.start_reduce
        self.activations, self._policies = activations, plan.activations
        self._sends = False  # `activations` keeps those of the unit that computes now
        self._compiler = Compiler(plan.compile) if plan.compile else None
        self._resident_addresses = {unit.resident.address for unit in units if unit.resident is not None}
        self._anchor = torch.zeros(0, requires_grad=True)
        self._places_of: dict[str, list[Place]] = {}  # by path of a site, in the order of its bindings
        self._check_writes = plan.check_writes
        self.entering: Callable[[], None] = lambda: None
        self.arriving: Callable[[], None] = lambda: None
        self._placeholders: dict[tuple[int, int], ParameterPlaceholder] = {}  # by unit and slot, of those that train
        self._hooked: dict[int, dict[int, Tensor]] = {}  # by unit and slot: gradients that their hooks have not seen
        self._held: dict[int, Buffer] = {}  # pinned by the backward pass under way
        self._open: set[int] = set()  # units that gradients were delivered to and whose reduce has not started
        self._passes: WeakValueDictionary[int, Callable[[], None]] = WeakValueDictionary()
        """Callbacks of the backward passes under way, by autograd's id: several when nested. Autograd owns them, so
        they are gone with a pass that an exception broke off."""
        self._scaled: set[int] = set()  # passes that began with the loss scale
        self.arrived = self.unscaled = False
        self.frozen_groups: frozenset[int] = frozenset()
        self.use = OneThread("a State")
        self._lock = threading.RLock()  # on a GPU backward runs on autograd's own threads

    # -- one microbatch ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a microbatch, or a forward without gradients."""
        if torch.is_grad_enabled():  # an evaluation may lie between a microbatch's forward and its backward
            self._forget_calls()  # of forwards outside of a step, which nobody ended
            self._scaled.clear()
        self.activations.release_all()
        self.residency.begin()

    def clear(self) -> None:
        """Begin a step: nothing has arrived yet."""
        self._hooked.clear()
        self.arrived = self.unscaled = False

    def end(self) -> None:
        """End the microbatch; units whose calls reached no gradient are reduced as zeros, in unit order."""
        for unit in self._units:
            if unit.calls:
                self._close(unit)
        self.activations.release_all()
        self.residency.end()

    def reset(self) -> None:
        """Forget calls and pins after an exception."""
        self._held.clear()
        self._hooked.clear()
        self._open.clear()
        self._passes.clear()
        self._scaled.clear()
        self._forget_calls()
        self.activations.release_all()
        self.residency.reset()

    def _forget_calls(self) -> None:
        for unit in self._units:
            unit.calls.clear()
            unit.returned = 0

    def runner(self, site: Site) -> Run:
        """Return what `site` runs through when it is called, never to be compiled into what calls it."""
        run = partial(self.run, site)
        return run if self._compiler is None else cast(Run, torch.compiler.disable(run))

    def place(self, site: Site, bound: Binding, place: Place) -> None:
        """Note one of the places of a parameter in the model, in the order of the site's bindings."""
        self._places_of.setdefault(site.path, []).append(place)
        if bound.trainable:
            self._placeholders[bound.unit, bound.slot] = place.placeholder

    # -- forward -------------------------------------------------------------------------------------------------------

    def run(self, site: Site, body: Body, args: Any, kwargs: Any) -> Any:
        """Call a site's module on its gathered parameters."""
        recomputing = in_backward()
        if recomputing:
            return self._run(site, body, args, kwargs, recomputing)
        with self.use:
            self.entering()
            with self._tape.forward(site.path, self._units[site.units[0]].spec.name):
                return self._run(site, body, args, kwargs, recomputing)

    def _run(self, site: Site, body: Body, args: Any, kwargs: Any, recomputing: bool) -> Any:
        pinned: list[Buffer] = []
        places = self._places_of[site.path]
        kept = [(parameters, name, parameters[name]) for _, parameters, name, _ in places if name in parameters]
        is_in_full = all(place.placeholder.full_value is not None for place in places) and not torch.is_grad_enabled()
        reject_transforms()
        sends = self._sends
        try:
            units = () if is_in_full else site.units
            for index in units:
                if recomputing:  # held for the pass, but also pinned for the call: the next hold may let it go
                    pinned.append(self._hold(self._units[index]))
                    pinned[-1].pins += 1
                else:
                    pinned.append(self.residency.pin(self._units[index], training=torch.is_grad_enabled()))
            parameters = self._parameters(site, body.module, units, recomputing)
            call = partial(call_with, path=site.path, check_writes=self._check_writes)
            before = nodes_of((args, kwargs))  # taken now: the call may change its inputs in place
            policy = self._policies[site.units[0]]
            self._sends = policy == "offload"
            with self._packing():
                outputs = self._call(policy, call, body, parameters, args, kwargs)
            outputs = reaching(outputs, parameters.values(), set(before))
            if torch.is_grad_enabled() and not recomputing:
                made_with = [(unit, unit.version) for unit in (self._units[index] for index in site.units)]
                for node in nodes_of(outputs) - before:
                    node.register_prehook(partial(check_same_parameters, made_with))
            return self._own(outputs)
        except RuntimeError as error:
            note_dtypes(error, [place.placeholder.full_name for place in places], self._precision)
            raise
        finally:
            self._sends = sends
            for owner, name, placeholder in kept:  # a tensor that stayed there would be taken for the user's
                owner[name] = placeholder
            for buffer in pinned:
                self.residency.unpin(buffer)

    def _parameters(self, site: Site, module: nn.Module, units: Iterable[int], recomputing: bool) -> dict[str, Tensor]:
        """Return the site's parameters by their names in its body: views of gathered buffers.

        Parameters that are not there any more are read as any parameter outside of its unit.

        Args:
            units: those that are gathered; none if all parameters are in a block of `GatheredParameters`.
        """
        gathered: dict[tuple[int, bool], Sequence[Tensor]] = {}  # by unit, and whether it trains
        for index in units:
            unit = self._units[index]
            flat = self.residency.buffer(unit).flat
            gathered[index, False] = views(unit.spec.frozen, flat, unit.spec.trainable.P)
            if torch.is_grad_enabled() and unit.spec.trainable.slots:
                gathered[index, True] = self._made(unit, flat, recomputing)
            else:
                gathered[index, True] = views(unit.spec.trainable, flat)
        places = zip(site.bindings, self._places_of[site.path], strict=True)
        return {
            f"module.{bound.local}": _value_at(place, gathered.get((bound.unit, bound.trainable), ()), bound.slot)
            for bound, place in places
            if place.is_in(module)
        }

    def _made(self, unit: UnitState, flat: Tensor, recomputing: bool) -> list[Tensor]:
        """Return the unit's trainable parameters with a history; a recomputation is the same call again."""
        made = Gather.apply(self._anchor, self, unit, flat, not recomputing)
        if not recomputing:
            unit.calls.append(made[0].grad_fn)
        return [self._arrives(unit, slot, parameter) for slot, parameter in enumerate(made)]

    def _arrives(self, unit: UnitState, slot: int, parameter: Tensor) -> Tensor:
        if (
            unit.spec.trainable.slots[slot].group in self.frozen_groups
            or not self._placeholders[unit.index, slot].trains
        ):
            return parameter.detach()
        arriving = cast(Tensor, Arrive.apply(parameter, self, unit, slot))
        arriving.grad_fn._set_sequence_nr(RUN_FIRST)  # type: ignore[union-attr]
        return arriving

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
        if policy == "remat" and torch.is_grad_enabled():
            return recomputed_call(module, parameters, args, kwargs, call)
        return call(parameters, module, args, kwargs)

    def _packing(self) -> AbstractContextManager[Any]:
        released = self.pool is not None or self.activations.offloads
        if not released or not torch.is_grad_enabled():
            return nullcontext()  # nothing is ever released, so autograd may keep everything
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return nullcontext()  # hooks of an outer unit see all buffers; those of a checkpoint must not be hidden
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _own(self, outputs: Any) -> Any:
        """Copy outputs that are views of a buffer, because they must outlive it."""
        if self.pool is None:
            return outputs
        borrowed = (t for t in tensors_in(outputs) if self.pool.holding(t) is not None)
        return replaced(outputs, {id(t): t.clone() for t in borrowed})

    # -- backward ------------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        buffer = None if self.pool is None else self.pool.holding(tensor)
        if buffer is None:
            stays = not self._sends or storage_address(tensor) in self._resident_addresses
            return Kept(tensor, tensor._version) if stays else self.activations.keep(tensor)
        assert buffer.unit is not None
        offset = int(tensor.storage_offset()) - int(buffer.flat.storage_offset())
        return Packed(buffer.unit, buffer.version, offset, tensor.shape, tensor.stride())

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Packed):
            return packed.unchanged() if isinstance(packed, Kept) else self.activations.find(packed)
        unit = self._units[packed.unit]
        check_same_parameters([(unit, packed.version)])
        with self._lock:
            buffer = self._hold(unit)
        offset = int(buffer.flat.storage_offset()) + packed.offset
        return buffer.flat.as_strided(packed.size, packed.stride, offset)

    def regather(self, site: Site, binding: int) -> Callable[[bool], Tensor]:
        """Return a function that reads a parameter outside of its sites' calls: see `ParameterPlaceholder`."""
        bound = site.bindings[binding]

        def view(with_history: bool) -> Tensor:
            unit = self._units[bound.unit]
            recomputing = in_backward()
            reject_transforms()
            with nullcontext() if recomputing else self.use, self._lock:
                if with_history and not recomputing:
                    self.entering()
                if recomputing:
                    flat = self._hold(unit).flat
                else:  # unpinned at once: a tensor that uses the memory keeps it, see `Pool.take`
                    buffer = self.residency.pin(unit, training=torch.is_grad_enabled())
                    flat = buffer.flat
                    self.residency.unpin(buffer)
                if not bound.trainable:
                    return views(unit.spec.frozen, flat, unit.spec.trainable.P)[bound.slot]
                if not with_history:
                    return views(unit.spec.trainable, flat)[bound.slot]
                return self._made(unit, flat, recomputing)[bound.slot]  # a reentrant checkpoint goes backward from here

        return view

    def _hold(self, unit: UnitState) -> Buffer:
        """Pin `unit` for the backward pass under way."""
        self._watch_pass()
        if unit.index not in self._held:
            for index in [index for index in self._held if not self._awaited(self._units[index])]:
                self._let_go(index)
            self._held[unit.index] = self.residency.pin(unit, training=True)
        return self._held[unit.index]

    def _awaited(self, unit: UnitState) -> bool:
        """Return whether gradients of `unit` will still arrive in the pass under way."""
        return any(torch._C._will_engine_execute_node(call) for call in unit.calls)

    def _let_go(self, index: int) -> None:
        buffer = self._held.pop(index, None)
        if buffer is not None:
            self.residency.unpin(buffer)

    def deliver(self, unit: UnitState, slot: int, grad: Tensor) -> None:
        """Take the gradient of one parameter of one call."""
        with self._lock:
            self._watch_pass()
            self.arriving()
            placeholder = self._placeholders[unit.index, slot]
            if not placeholder.trains:
                raise StaleStateError(
                    f"{placeholder.full_name} was frozen between this graph's forward and its backward. Freeze it "
                    "before the forward, or after the step."
                )
            if placeholder.hooks:  # they get the sum over the unit's calls, as on any leaf
                sums = self._hooked.setdefault(unit.index, {})
                sums[slot] = grad if slot not in sums else sums[slot] + grad
            else:
                self._deliver(unit, slot, grad)
            self._open.add(unit.index)
            self.arrived, self.unscaled = True, self.unscaled or self._scaled.isdisjoint(self._passes)

    def scaled(self, *_: Any) -> None:
        """Note that the backward pass under way began with the loss scale."""
        with self._lock:
            self._watch_pass()
            self._scaled.add(torch._C._current_graph_task_id())

    def returned(self, unit: UnitState, *, counted: bool) -> None:
        """Note that all gradients of one call have arrived; `counted=False`: of a part of it that was recomputed."""
        with self._lock:
            self._watch_pass()
            self._tape.passed("backward", unit.spec.name)
            if unit.resident is None and not unit.spec.lookup and unit.index not in self._held:
                self._hold(unit)  # this rank did not use its values, but others gather it here
            self._open.add(unit.index)
            unit.returned += counted
            if counted and unit.returned == len(unit.calls):
                self._close(unit)
            elif counted:  # used again further up: gathered again there, rather than held until then
                self._let_go(unit.index)

    def _close(self, unit: UnitState) -> None:
        unit.calls.clear()
        unit.returned = 0
        self._open.discard(unit.index)
        for slot, grad in sorted(self._hooked.pop(unit.index, {}).items()):
            # the update divides by the count of microbatches, and hooks see the gradient after that
            hooked = self._placeholders[unit.index, slot].through_hooks(grad / self._accumulate)
            self._deliver(unit, slot, hooked * self._accumulate)
        self._start_reduce(unit)
        self._let_go(unit.index)

    def reduce_arrived(self) -> None:
        """Reduce gradients of units whose backward has not ended, and may never do."""
        with self._lock:
            for index in sorted(self._open if not self._passes else ()):
                self._close(self._units[index])

    def _watch_pass(self) -> None:
        """Have autograd call `_pass_ended` when the backward pass under way ends."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self._passes:
            self._passes[task] = ended = partial(self._pass_ended, task)
            torch.autograd.Variable._execution_engine.queue_callback(ended)

    def _pass_ended(self, task: int) -> None:
        self._passes.pop(task, None)
        self._scaled.discard(task)
        if self._passes:
            return  # a pass inside another one, as a reentrant checkpoint makes
        for index in sorted(self._open):
            unit = self._units[index]
            if unit.returned or not unit.calls:  # else its call is still to come, or `end` closes it
                self._close(unit)
        for index in list(self._held):
            self._let_go(index)


def _value_at(place: Place, gathered: Sequence[Tensor], slot: int) -> Tensor:
    """Return the tensor that the user put in a parameter's place, else its full value in a block, else `gathered`'s."""
    there = place.parameters[place.name]
    if there is place.placeholder:
        full = place.placeholder.seen_in_full()
        return gathered[slot] if full is None else full
    return there.value() if isinstance(there, ParameterPlaceholder) else cast(Tensor, there)


def reject_transforms() -> None:
    """Raise OutsideUnitError under a transform of `torch.func`."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise OutsideUnitError(
            "torch.func cannot transform a model that trains in shards. Take gradients of inputs with "
            "torch.autograd.grad, or apply the transform to a copy of the module."
        )


def bind_placeholders(copied: nn.Module, sites: Iterable[Site], gatherer: Gatherer) -> None:
    """Tell every site where its parameters are, and every placeholder how to find its values outside of its site."""
    for site in sites:
        module = copied.get_submodule(site.path)
        for number, bound in enumerate(site.bindings):
            owner, _, name = bound.local.rpartition(".")
            placeholder = module.get_submodule(owner)._parameters[name]
            assert isinstance(placeholder, ParameterPlaceholder)
            placeholder.regather = gatherer.regather(site, number)
            way = tuple(owner.split(".")) if owner else ()
            gatherer.place(site, bound, Place(way, module.get_submodule(owner)._parameters, name, placeholder))
