"""Run a unit's modules on gathered parameters, forward and backward, and pass their gradients on.

The nodes of `graph` say when a call's gradients have all arrived, and the reducer's reduce-scatter is the transpose of
the gather. The gradients themselves leave autograd one by one: a unit's gradients never exist twice.

While a unit computes, a pair of saved-tensor hooks looks at everything autograd wants to keep. What lies in a gathered
buffer is replaced by (unit, version, offset, size, stride), so the buffer can be released after forward; the first
touch in backward gathers the unit again. No activation is recomputed; where they wait meanwhile is up to `activation`.
Only the innermost hooks count in torch, so where user code has its own (a checkpoint around the unit), packing is left
to it: it drops everything and recomputes.

How long a buffer is pinned:

    in forward               from the call to its return
    in backward              from the first touch until the gradients of all the unit's calls have arrived
    ... with none to come    until backward touches another unit, or ends (frozen units, gradients of inputs only)
    gathered ahead           until it is used, or the pass ends

Under a `torch.func` transform (grad, vmap, jacrev) torch forbids such hooks. Gathering steps outside of the transform,
which then sees parameters as constants with a history: gradients taken inside are right, and a backward outside still
reaches the parameters. What the transform keeps of a buffer stays with it, and the buffer gets fresh memory. Parameters
that the user put in place with `torch.func.functional_call` are used as given, in every place of a tied one.

Everything that decides about a collective depends on the order of calls alone, so all ranks decide alike.

Source: research prototypes of saved-tensor regather; Zhao et al. 2023, "PyTorch FSDP", section 4.1 for the schedule.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    beneath_transforms,
    check_same_parameters,
    nodes_of,
    reaching,
    untransformed,
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
    """Where a site's module has a parameter: `parameters[name]` of the module at `owner` is `placeholder`."""

    owner: tuple[str, ...]
    parameters: dict[str, Any]
    name: str
    placeholder: ParameterPlaceholder

    def is_in(self, module: nn.Module) -> bool:
        """The site's `module` still has a parameter there: its parts may have been exchanged."""
        for part in self.owner:
            found = module._modules.get(part)
            if found is None:
                return False
            module = found
        return module._parameters is self.parameters and self.parameters.get(self.name) is not None


class Packed(NamedTuple):
    """A saved tensor that was in a gathered buffer: where it is when the unit is gathered again."""

    unit: int
    version: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class Gatherer:
    """Runs the sites of one copied model on gathered units.

    Args:
        activations: where those that are kept wait for backward.
        reducer: takes each gradient of a call, and knows when all of a unit's calls have delivered theirs.
        tape: records what computes.

    Attributes:
        arrived: a gradient has, in this step.
        unscaled: one has from a backward without the loss scale.
        entering: called before a site runs, or a parameter is read with a history, outside of backward.
        arriving: called when a gradient arrives.
        use: held by the thread that uses the state.
        frozen_groups: numbers of the optimizer's groups that do not train in the forwards that come.
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
        self._sends = False  # what the unit that computes now keeps goes where `activations` says
        self._compiler = Compiler(plan.compile) if plan.compile else None
        self._resident_addresses = {unit.resident.address for unit in units if unit.resident is not None}
        self._anchor = torch.zeros(0, requires_grad=True)
        # where parameters are in the model: by unit, trainable or frozen, and number; and by path of a site
        self._places: dict[tuple[int, bool, int], list[Place]] = {}
        self._places_of: dict[str, list[Place]] = {}
        self._check_writes = plan.check_writes
        self.entering: Callable[[], None] = lambda: None
        self.arriving: Callable[[], None] = lambda: None
        self._placeholders: dict[tuple[int, int], ParameterPlaceholder] = {}  # by unit and slot, of those that train
        self._hooked: dict[int, dict[int, Tensor]] = {}  # by unit and slot: gradients that their hooks have not seen
        self._held: dict[int, Buffer] = {}  # pinned by the backward pass under way
        self._open: set[int] = set()  # units that gradients were delivered to and whose reduce has not started
        self._passes: WeakValueDictionary[int, Callable[[], None]] = WeakValueDictionary()
        """Backward passes under way, by autograd's id: more than one when nested. What it is to call at the end is its
        own, and gone with a pass that an exception broke off."""
        self._scaled: set[int] = set()  # those of them that began with the loss scale
        self.arrived = self.unscaled = False
        self.frozen_groups: frozenset[int] = frozenset()
        self.use = OneThread("a State")
        self._lock = threading.RLock()  # on a GPU backward runs on autograd's own threads

    # -- one microbatch ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A microbatch, or a forward without gradients, starts."""
        if torch.is_grad_enabled():  # an evaluation may lie between a microbatch's forward and its backward
            self._forget_calls()  # of forwards outside of a step, which nobody ended
            self._scaled.clear()
        self.activations.release_all()
        self.residency.begin()

    def clear(self) -> None:
        """Nothing has arrived yet."""
        self._hooked.clear()
        self.arrived = self.unscaled = False

    def end(self) -> None:
        """The microbatch is over: units whose calls reached no gradient are reduced as zeros, in unit order."""
        for unit in self._units:
            if unit.calls:
                self._close(unit)
        self.activations.release_all()
        self.residency.end()

    def reset(self) -> None:
        """After an exception: forget calls and pins."""
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
        """What `site` runs through when it is called."""
        run = partial(self.run, site)
        return run if self._compiler is None else self._compiler.outside(run)

    def place(self, site: Site, bound: Binding, place: Place) -> None:
        """Note one of the places of a parameter in the model, in the order of the site's bindings."""
        self._places.setdefault((bound.unit, bound.trainable, bound.slot), []).append(place)
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
        found = [(own, name, own[name]) for _, own, name, _ in places if name in own]
        is_in_full = all(place.placeholder.full_value is not None for place in places) and not torch.is_grad_enabled()
        try:
            with beneath_transforms() as transformed:
                for index in () if is_in_full else site.units:
                    if recomputing:  # held for the pass, but also pinned for the call: holding one may let another go
                        pinned.append(self._hold(self._units[index]))
                        pinned[-1].pins += 1
                    else:
                        pinned.append(self.residency.pin(self._units[index], training=torch.is_grad_enabled()))
                make = self._parameters_in_full if is_in_full else partial(self._parameters, recomputing=recomputing)
                parameters = make(site, body.module)
            if transformed:
                return self._own(call_with(parameters, body, args, kwargs, path=site.path))
            call = partial(call_with, path=site.path, check_writes=self._check_writes)
            before = nodes_of((args, kwargs))  # taken now: the call may change its inputs in place
            policy = self._policies[site.units[0]]
            with self._packing(), self._sending(policy):
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
            for own, name, parameter in found:  # whatever happened: what stays would be taken for the user's
                own[name] = parameter
            for buffer in pinned:
                self.residency.unpin(buffer)

    def _parameters(self, site: Site, module: nn.Module, recomputing: bool) -> dict[str, Tensor]:
        """The site's parameters by their names in its body, as far as they are still there: views of gathered buffers.

        What has moved elsewhere by now is read as any parameter outside of its unit.
        """
        trainable: dict[int, Sequence[Tensor]] = {}
        frozen: dict[int, Sequence[Tensor]] = {}
        for index in site.units:
            unit = self._units[index]
            flat = self.residency.buffer(unit).flat
            frozen[index] = views(unit.spec.frozen, flat, unit.spec.trainable.P)
            if torch.is_grad_enabled() and unit.spec.trainable.slots:
                trainable[index] = self._made(unit, flat, recomputing)
            else:
                trainable[index] = views(unit.spec.trainable, flat)
        places = zip(site.bindings, self._places_of[site.path], strict=True)
        return {
            f"module.{bound.local}": self._given(
                bound, place, (trainable if bound.trainable else frozen)[bound.unit][bound.slot]
            )
            for bound, place in places
            if place.is_in(module)
        }

    def _parameters_in_full(self, site: Site, module: nn.Module) -> dict[str, Tensor]:
        """The parameters of `site` from their full values. It gathers nothing, so one rank may call the site alone."""
        places = zip(site.bindings, self._places_of[site.path], strict=True)
        return {
            f"module.{bound.local}": self._given(bound, place, place.placeholder.value())
            for bound, place in places
            if place.is_in(module)
        }

    def _given(self, bound: Binding, place: Place, ours: Tensor) -> Tensor:
        """Return the tensor that the user put in a parameter's place, else its full value in a block, else `ours`."""
        there = place.parameters[place.name]
        if (
            isinstance(there, ParameterPlaceholder) and there is not place.placeholder
        ):  # another parameter, or this one as a constant
            return there.value()
        if there is place.placeholder and (full := place.placeholder.seen_in_full()) is not None:
            return full
        places = self._places[bound.unit, bound.trainable, bound.slot]
        held = (place.parameters.get(place.name) for place in places)
        given = next((one for one in held if one is not None and not isinstance(one, ParameterPlaceholder)), ours)
        if given is not ours and isinstance(placeholder := untransformed(given), ParameterPlaceholder):
            raise OutsideUnitError(
                f"parameter {placeholder.full_name} is the model's own, which torch.func cannot differentiate by; put "
                "tensors of your own in place with torch.func.functional_call"
            )
        return given

    def _made(self, unit: UnitState, flat: Tensor, recomputing: bool) -> list[Tensor]:
        """The unit's trainable parameters, with a history; what is recomputed is the same call again."""
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

    @contextmanager
    def _sending(self, policy: Activations) -> Iterator[None]:
        """What is kept within goes to the host, if the unit's policy is that."""
        before, self._sends = self._sends, policy == "offload"
        try:
            yield
        finally:
            self._sends = before

    def _packing(self) -> AbstractContextManager[Any]:
        released = self.pool is not None or self.activations.offloads
        if not released or not torch.is_grad_enabled():
            return nullcontext()  # nothing is ever released, so autograd may keep what it likes
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
            return nullcontext()  # ours, around an outer unit, see all buffers; a foreign pair must not be hidden
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _own(self, outputs: Any) -> Any:
        """Copy outputs that are views of a buffer: they must outlive it."""
        if self.pool is None:
            return outputs
        borrowed = (t for t in tensors_in(outputs) if self.pool.holding(untransformed(t)) is not None)
        return replaced(outputs, {id(t): t.clone() for t in borrowed})

    # -- backward ------------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        buffer = None if self.pool is None else self.pool.holding(tensor)
        if buffer is None:
            stays = self._is_resident(tensor) or not self._sends
            return Kept(tensor, tensor._version) if stays else self.activations.keep(tensor)
        assert buffer.unit is not None
        offset = int(tensor.storage_offset()) - int(buffer.flat.storage_offset())
        return Packed(buffer.unit, buffer.version, offset, tensor.shape, tensor.stride())

    def _is_resident(self, tensor: Tensor) -> bool:
        """It is in the buffer of a unit that is always loaded."""
        return storage_address(tensor) in self._resident_addresses

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
        """How a parameter is found outside of its sites' calls: see `ParameterPlaceholder`."""
        bound = site.bindings[binding]

        def view(with_history: bool) -> Tensor:
            unit = self._units[bound.unit]
            recomputing = in_backward()
            with nullcontext() if recomputing else self.use, self._lock, beneath_transforms():
                if with_history and not recomputing:
                    self.entering()
                if recomputing:
                    flat = self._hold(unit).flat
                else:  # a tensor that uses it keeps the memory: see `Pool.take`
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
        """Gradients of `unit` will still arrive in the pass under way, and it can be let go then."""
        return any(torch._C._will_engine_execute_node(call) for call in unit.calls)

    def _let_go(self, index: int) -> None:
        buffer = self._held.pop(index, None)
        if buffer is not None:
            self.residency.unpin(buffer)

    def deliver(self, unit: UnitState, slot: int, grad: Tensor) -> None:
        """The gradient of one parameter of one call has arrived."""
        with self._lock:
            self._watch_pass()
            self.arriving()
            placeholder = self._placeholders[unit.index, slot]
            if not placeholder.trains:
                raise StaleStateError(
                    f"{placeholder.full_name} was frozen between this graph's forward and its backward; freeze it "
                    "before the forward, or after the step"
                )
            if (
                placeholder.hooks or placeholder.afterwards
            ):  # which see the sum over the unit's calls, as those of any leaf
                sums = self._hooked.setdefault(unit.index, {})
                sums[slot] = grad if slot not in sums else sums[slot] + grad
            else:
                self._deliver(unit, slot, grad)
            self._open.add(unit.index)
            self.arrived, self.unscaled = True, self.unscaled or self._scaled.isdisjoint(self._passes)

    def scaled(self, *_: Any) -> None:
        """The backward pass under way began with the loss scale."""
        with self._lock:
            self._watch_pass()
            self._scaled.add(torch._C._current_graph_task_id())

    def returned(self, unit: UnitState, *, counted: bool) -> None:
        """All gradients of one call have arrived, or `counted=False` those of a part of it that was recomputed."""
        with self._lock:
            self._watch_pass()
            self._tape.passed("backward", unit.spec.name)
            if unit.resident is None and not unit.spec.lookup and unit.index not in self._held:
                self._hold(unit)  # this rank had no use for its values, but others gather it here
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
            left = self._placeholders[unit.index, slot].through_hooks(grad / self._accumulate)
            if left is not None:  # the update divides by the count of microbatches, and hooks see what is left then
                self._deliver(unit, slot, left * self._accumulate)
        self._start_reduce(unit)
        self._let_go(unit.index)

    def reduce_arrived(self) -> None:
        """Reduce what has arrived of units whose own backward may still come, or never will."""
        with self._lock:
            for index in sorted(self._open if not self._passes else ()):
                self._close(self._units[index])

    def _watch_pass(self) -> None:
        """Have autograd call us when the backward pass under way ends, whoever started it."""
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
            if unit.returned or not unit.calls:  # else its own call is still to come, or `end` closes it
                self._close(unit)
        for index in list(self._held):
            self._let_go(index)


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
