"""Run a site's module on gathered parameters, in forward and in the recomputations of backward.

A site is gathered before its module runs and may be released when it returns: `packing` replaces what autograd saves
of its buffer. `graph` puts autograd nodes around the call, which take the gradients out of autograd one by one, so no
second copy of them exists, and hand them to `zero.engine.backward`.

A site raises OutsideUnitError under a transform of `torch.func` (grad, vmap, jacrev), because these transforms forbid
saved-tensor hooks. Tensors that the user puts in place of parameters with `torch.func.functional_call` are used as they
are.

Whether and when a collective starts depends only on the order of calls, so all ranks decide alike.

Source: Zhao et al. 2023, "PyTorch FSDP", section 4.1 for the schedule.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from zero.core.activations import ACTIVATIONS, ActivationPolicy
from zero.core.tree import tensors_in
from zero.engine.backward import BackwardPass
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
from zero.engine.forward.packing import Packing
from zero.engine.forward.places import Place, Places
from zero.engine.forward.recompute import recomputed_call
from zero.engine.forward.rows import Chunks
from zero.engine.gather import Residency
from zero.engine.memory import Buffer, InPlace
from zero.engine.model import (
    Body,
    Compiler,
    ParameterPlaceholder,
    Site,
    SiteRun,
    call_with,
    in_backward,
    note_dtypes,
)
from zero.engine.plan import Plan
from zero.engine.unit_state import UnitState
from zero.errors import ConfigError, OutsideUnitError
from zero.platform.modes import unobserved
from zero.platform.tape import Tape
from zero.platform.threads import OneThread


class SiteRunner:
    """The runner of a model's sites.

    Args:
        tape: records forwards in the timeline.
        checksums: records outputs of sites, if a step is made twice.

    Attributes:
        entering: a callback, called outside of backward before a site runs or a parameter is read with an autograd
            history.
        use: a lock that only one thread may hold, which ensures that one thread uses the state at a time.
        wake: a callback, called before each use: it brings back a parked state.
        frozen_groups: the numbers of optimizer groups that do not train in the next forwards.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[UnitState],
        tape: Tape,
        checksums: Checksums,
    ) -> None:
        self._units, self._tape, self._checksums = units, tape, checksums
        self._compiler = Compiler(plan.compile) if plan.compile else None
        self._anchor = torch.zeros(0, requires_grad=True)
        self._places = Places(plan.beside.placed)
        self.entering: Callable[[], None] = lambda: None
        self.wake: Callable[[], None] = lambda: None
        self.frozen_groups: frozenset[int] = frozenset()
        self.use = OneThread("a State", self.reset)

    def connect(self, plan: Plan, residency: Residency, backward: BackwardPass, activations: InPlace) -> None:
        """Set the parts that depend on the plan.

        Args:
            residency: gathers and releases units.
            backward: receives gradients.
            activations: keeps activations until backward.
        """
        self._plan, self._residency, self._backward, self.activations = plan, residency, backward, activations
        has_dtensors = bool(plan.beside.placed)
        self._packing: Packing | None = Packing(
            self._units, residency.pool, activations, backward.hold, has_dtensors=has_dtensors
        )

    def disconnect(self) -> None:
        """Drop the parts that `connect` has set."""
        self._packing = None
        del self._residency, self._backward, self.activations

    # -- one microbatch ------------------------------------------------------------------------------------------------

    @unobserved()
    def begin(self) -> None:
        """Begin a microbatch, or an evaluation."""
        if torch.is_grad_enabled():  # else keep the calls: an evaluation may run between forward and backward
            self._backward.forget_calls()
        self.activations.release_all()
        self._residency.begin()

    @unobserved()
    def end(self) -> None:
        """End the microbatch."""
        self._backward.end()
        self.activations.release_all()
        self._residency.end()

    @unobserved()
    def reset(self) -> None:
        """Forget all calls and pinned buffers after an exception."""
        if self._packing is None:  # the exception is of a move
            return
        self._backward.reset()
        self.activations.release_all()
        self._residency.reset()

    def bind(self, model: nn.Module, sites: Iterable[Site]) -> None:
        """Register the places of every site's parameters, and set each placeholder's `regather`."""
        for site in sites:
            module = model.get_submodule(site.path)
            for number, bound in enumerate(site.bindings):
                owner, _, name = bound.local.rpartition(".")
                parameters = module.get_submodule(owner)._parameters
                placeholder = parameters[name]
                assert isinstance(placeholder, ParameterPlaceholder)
                placeholder.regather = self._regather(site, number)
                way = tuple(owner.split(".")) if owner else ()
                self._places.add(site, bound, Place(way, parameters, name, placeholder))
                if bound.trainable:
                    self._units[bound.unit].placeholders[bound.slot] = placeholder

    def runner(self, site: Site) -> SiteRun:
        """Return the function that runs a call of `site`.

        With `compile`, torch's compiler leaves the call out of the caller's graph. Without, the compiler gets an error.
        """
        if self._compiler is not None:
            return cast(SiteRun, torch.compiler.disable(partial(self.run, site)))

        def run(body: Body, args: Any, kwargs: Any) -> Any:
            refuse_compiler()
            return self.run(site, body, args, kwargs)

        return run

    # -- forward -------------------------------------------------------------------------------------------------------

    def run(self, site: Site, body: Body, args: Any, kwargs: Any) -> Any:
        """Run a call of a site's module on gathered parameters."""
        self.wake()
        recomputing = in_backward()
        if recomputing:
            return self._run(site, body, args, kwargs, recomputing)
        with self.use:
            self.entering()
            with self._tape.forward(site.path, self._units[site.units[0]].spec.name):
                return self._run(site, body, args, kwargs, recomputing)

    def _run(self, site: Site, body: Body, args: Any, kwargs: Any, recomputing: bool) -> Any:
        reject_transforms()
        units = () if self._places.is_in_full(site) and not torch.is_grad_enabled() else site.units
        try:
            with self._places.restored(site), self._pinned(units, recomputing):
                with unobserved():
                    parameters = self._parameters(site, body.module, units, recomputing)
                before = nodes_of((args, kwargs))  # before the call, which may change its inputs in place
                policy = ACTIVATIONS[self._plan.activations[site.name]]
                assert self._packing is not None
                with self._packing.hooks(offloads=policy.offloads):
                    outputs = self._call(site, policy, body, parameters, args, kwargs)
                return self._after(site, outputs, parameters.values(), before, recomputing)
        except RuntimeError as error:
            note_dtypes(error, self._places.names(site), self._plan.precision)
            raise

    @contextmanager
    def _pinned(self, units: Iterable[int], recomputing: bool) -> Iterator[None]:
        """Gather units, and keep them in their buffers in the block."""
        pinned: list[tuple[UnitState, Buffer]] = []
        try:
            with unobserved():
                for index in units:
                    unit = self._units[index]
                    if recomputing:  # also pinned for the call, because holding another unit may release this unit
                        pinned.append((unit, self._backward.hold(unit)))
                        pinned[-1][1].pins += 1
                    else:
                        pinned.append((unit, self._residency.pin(unit, training=torch.is_grad_enabled())))
            yield
        finally:
            with unobserved():
                for unit, buffer in pinned:
                    self._residency.unpin(unit, buffer)

    @unobserved()
    def _after(
        self, site: Site, outputs: Any, parameters: Collection[Tensor], before: set[Any], recomputing: bool
    ) -> Any:
        """Copy outputs that lie in buffers, link all outputs to the gathers, and start the work of later units.

        Args:
            before: the autograd nodes that made the site's inputs.
        """
        if self._checksums.active:
            self._checksums.note(site.name, "output", tensors_in(outputs))
        if not recomputing:
            self._residency.launched()
        outputs = reaching(outputs, parameters, set(before))
        if torch.is_grad_enabled() and not recomputing:
            made_with = [(unit, unit.version) for unit in (self._units[index] for index in site.units)]
            for node in nodes_of(outputs) - before:
                node.register_prehook(partial(check_same_parameters, made_with))
        assert self._packing is not None
        return self._packing.own(outputs)

    def _parameters(self, site: Site, module: nn.Module, units: Iterable[int], recomputing: bool) -> dict[str, Tensor]:
        """Return the site's parameters, views of gathered buffers, by their names in its `Body`.

        Parameters that the module does not have any more are left out.

        Args:
            units: the gathered units; none if all parameters are in a block of `GatheredParameters`.
        """
        gathered: dict[tuple[int, bool, int], Tensor] = {}  # by (unit, whether trainable, slot)
        for index in units:
            unit = self._units[index]
            flat, used, frozen = (
                self._residency.gathers.buffer(unit).flat,
                site.slots[index, True],
                site.slots[index, False],
            )
            if torch.is_grad_enabled() and used:
                made = self._made(unit, used, flat, recomputing)
            else:
                made = [unit.spec.trainable.slots[slot].of(flat) for slot in used]
            gathered |= {(index, True, slot): parameter for slot, parameter in zip(used, made, strict=True)}
            gathered |= {(index, False, slot): unit.spec.frozen_view(slot, flat) for slot in frozen}
        return self._places.values(site, module, gathered)

    def _made(self, unit: UnitState, slots: Sequence[int], flat: Tensor, recomputing: bool) -> list[Tensor]:
        """Return the trainable parameters `slots` of a unit with an autograd history.

        Args:
            recomputing: the call recomputes an earlier one, so it is not counted as a further call.
        """
        parameters: list[Tensor] = [*Gather.apply(self._anchor, self._backward, unit, slots, flat, not recomputing)]
        if not recomputing:
            unit.step.calls.append(parameters[0].grad_fn)
        for place, (number, trains) in enumerate(zip(slots, unit.trains(slots), strict=True)):
            slot = unit.spec.trainable.slots[number]
            if not trains or slot.group in self.frozen_groups:
                parameters[place] = parameters[place].detach()
            elif slot.numel >= LARGE_NUMEL:
                parameters[place] = arriving = cast(Any, Arrive.apply(parameters[place], self._backward, unit, number))
                arriving.grad_fn._set_sequence_nr(RUN_FIRST)
        return parameters

    def _call(
        self, site: Site, policy: ActivationPolicy, body: Body, parameters: dict[str, Tensor], args: Any, kwargs: Any
    ) -> Any:
        """Call the site's module with `parameters`, compiled or recomputed as the plan says."""
        call = partial(
            call_with, path=site.path, check_writes=self._plan.comparisons.writes, placed=self._places.placed(site)
        )
        module: nn.Module = body
        if self._compiler is not None and torch.is_grad_enabled():
            parameters = {f"module.{name}": value for name, value in parameters.items()}
            module = self._compiler.compiled(body, type(body.module))
        if policy.recomputes and torch.is_grad_enabled():
            rows, compared = self._plan.arrangement.rows, body if self._plan.comparisons.rows else None
            chunks = Chunks(rows, site.name, compared) if rows and site.is_block else None
            return recomputed_call(module, parameters, args, kwargs, call, policy=policy, chunks=chunks)
        return call(parameters, module, args, kwargs)

    def _regather(self, site: Site, binding: int) -> Callable[[bool], Tensor]:
        """Return the `ParameterPlaceholder.regather` of a parameter: it gathers the unit and returns a view.

        The function's argument says whether the view needs an autograd history.
        """
        bound = site.bindings[binding]

        @unobserved()
        def view(with_history: bool) -> Tensor:
            self.wake()
            unit = self._units[bound.unit]
            recomputing = in_backward()
            reject_transforms()
            with nullcontext() if recomputing else self.use, self._backward.lock:
                if with_history and not recomputing:
                    self.entering()
                if recomputing:
                    flat = self._backward.hold(unit).flat
                else:  # unpinned immediately: `Pool.take` leaves the memory to tensors that still use it
                    buffer = self._residency.pin(unit, training=torch.is_grad_enabled())
                    flat = buffer.flat
                    self._residency.unpin(unit, buffer)
                if not bound.trainable:
                    return unit.spec.frozen_view(bound.slot, flat)
                if not with_history:
                    return unit.spec.trainable.slots[bound.slot].of(flat)
                # with a history even while recomputing, because a reentrant checkpoint runs backward from here
                return self._made(unit, (bound.slot,), flat, recomputing)[0]

        return view


def refuse_compiler() -> None:
    """Raise ConfigError if torch's compiler traces or runs the caller, because it cannot trace how units are gathered.

    The compiler does not compile a frame that raises, but runs it in Python, so the error is seen.
    """
    if torch.compiler.is_compiling() or torch._C._dynamo.eval_frame.get_eval_frame_callback():
        raise ConfigError(
            "torch.compile of the model or of a part of it: the compiler cannot trace how units are gathered. Write "
            "zero.Plan(compile=True) or zero.initialize(model=torch.compile(model), ...) instead."
        )


def reject_transforms() -> None:
    """Raise OutsideUnitError under a transform of `torch.func`."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise OutsideUnitError(
            "torch.func cannot transform a model that trains in shards. Take gradients of inputs with "
            "torch.autograd.grad, or apply the transform to a copy of the module."
        )
