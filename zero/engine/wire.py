"""Make the parts of a runtime that depend on its plan, and connect them."""

import gc
import importlib
from collections.abc import Callable
from functools import partial

from zero.core.activations import ACTIVATIONS
from zero.distributed.routes import Routes
from zero.engine.backward import BackwardPass, Reducer
from zero.engine.gather import Fetch, Gathers, Residency, gathering, lending, reading
from zero.engine.memory import InPlace, OnHost
from zero.engine.plan import Plan
from zero.engine.runtime import Runtime
from zero.engine.update import Gradients, PagedGradients, Updater
from zero.engine.warm_up import warm_up


def open_routes(runtime: Runtime, plan: Plan) -> None:
    """Open the routes of `plan`, unless they are open: a route may have communicators. Collective."""
    names = plan.facts.gather, plan.facts.reduce, plan.facts.shard
    if names != runtime.route_names:
        runtime.routes = Routes(
            plan.world, plan.facts.gather_route, plan.facts.sum_route, travels=plan.precision.reduce
        )
        runtime.route_names = names


def wire(runtime: Runtime, plan: Plan) -> None:
    """Make the parts of `runtime` for `plan`, whose pages are in its store and whose tensors are in its units.

    Call `open_routes` before.
    """
    if any(ACTIVATIONS[name].recomputes for name in plan.activations.values()):
        importlib.import_module("torch._dynamo")  # else torch's `checkpoint` imports it in the first step: 2 to 3 s
    store, units, tape, checksums, log = runtime.store, runtime.units, runtime.tape, runtime.checksums, runtime.log
    gradients = PagedGradients(plan, store, tape) if plan.facts.grads_offloaded else Gradients()
    routes = runtime.routes
    advance = partial(routes.advance, sums=False)
    updater = Updater(plan, store, units, gradients, tape, advance)
    gathers = Gathers(plan, units, updater, _fetch(plan, routes, runtime), log, tape)
    residency = Residency(plan, units, gathers, updater.launch_ahead, advance, checksums)
    first = residency.complete
    reducer = Reducer(plan, routes, units, gradients, updater, first=first, log=log, tape=tape, checksums=checksums)
    backward = BackwardPass(plan.accumulate, units, residency, reducer, tape)
    runtime.residency, runtime.reducer, runtime.backward = residency, reducer, backward
    runtime.gradients, runtime.updater = gradients, updater
    set_activations(runtime, plan)
    warm_up(plan, updates=any(part.tables for unit in units for part in unit.parts))


def set_activations(runtime: Runtime, plan: Plan) -> None:
    """Use `plan`, which differs from the plan of the runtime's parts in activations at the most."""
    device = plan.world.compute
    activations = OnHost(device, pin=plan.offload.pin) if _goes_to_host(plan) else InPlace()
    runtime.sites.connect(plan, runtime.residency, runtime.backward, activations)
    runtime.plan = plan


def rewired(runtime: Runtime) -> Callable[[Plan], None]:
    """Return a function that calls `wire` after `unwire`, with the counts and callbacks that `runtime` has now."""
    rested, arriving = runtime.updater.numbers.counts.rested, runtime.backward.arriving

    def again(plan: Plan) -> None:
        wire(runtime, plan)
        runtime.updater.resume(rested)
        runtime.backward.arriving = arriving

    return again


def unwire(runtime: Runtime) -> None:
    """Drop the parts that have memory of the plan, except routes. Call `wire` before the runtime is used again."""
    runtime.sites.disconnect()
    del runtime.residency, runtime.reducer, runtime.backward, runtime.gradients, runtime.updater
    for unit in runtime.units:
        unit.parts, unit.grad, unit.secondary, unit.secondary_versions = (), None, (), ()
    if any(runtime.plan.sizes.buffer_bytes().values()) or runtime.plan.slots.staging:
        gc.collect()  # the parts refer to each other and hold buffers


def _fetch(plan: Plan, routes: Routes, runtime: Runtime) -> Fetch:
    if not plan.facts.params_offloaded:
        return gathering(plan, routes)
    return (lending if plan.facts.params_on_host else reading)(plan, routes, runtime.store)


def _goes_to_host(plan: Plan) -> bool:
    """Return whether activations are copied to host memory; on a CPU they are in host memory already."""
    offloads = any(ACTIVATIONS[name].offloads for name in plan.activations.values())
    return offloads and not plan.world.compute.shares_memory
