"""Make the first state of a plan (`init`)."""

from collections.abc import Mapping
from os import PathLike

from torch import Tensor

from zero.core import checks
from zero.engine.after import After
from zero.engine.arguments import check_type
from zero.engine.checksums import Checksums
from zero.engine.forward import SiteRunner
from zero.engine.gather import CollectiveLog
from zero.engine.model import ModuleTree, Takeover, codes_in
from zero.engine.plan import Plan, refuse_equal_parts, settings_of, settings_of_groups
from zero.engine.pressure import Pressure
from zero.engine.runtime import Runtime
from zero.engine.state import State
from zero.engine.unit_state import UnitState
from zero.engine.whole import Check, Values, Weights, compare, empty_unit, fill, values_in, values_of
from zero.engine.wire import open_routes, wire
from zero.errors import ConfigError, if_it_fails
from zero.platform.host_memory import give_back_memory
from zero.platform.modes import unobserved
from zero.platform.tape import Tape
from zero.progress import Progress, reported, silent
from zero.store import PrefetchStore


@unobserved()
def init(
    plan: Plan,
    store: PrefetchStore | None = None,
    *,
    seed: int = 0,
    weights: Weights = None,
    progress: Progress = silent,
) -> State:
    """Convert the plan's model to sharded training and return its state at step 0. Collective.

    `state.model` is the plan's model itself: its parameters are the same objects, but their values are now in shards.
    Call `copy.deepcopy(model)` before `zero.Plan` to keep an original. `state.close()` makes the model an ordinary one
    again. A rank makes or reads its own part of the parameters only, in chunks of 16 MiB. The parameters of one module
    are made in full if an initializer needs them so, see `zero.engine.model.recorded_values`.

    Args:
        plan: the plan, which contains the model and the tier of each part of the state.
        store: the result of `open_store(plan)`, required. A store holds one state at a time.
        seed: the seed for initializing parameters on meta.
        weights: None, tensors by name, the path of a safetensors file, or a function of (name, fp32 tensor) that fills
            the tensor. None keeps the values that the model has, and initializes parameters on meta by recorded
            operations (see `zero.empty`) or the owner's `reset_parameters`, with generators seeded from `seed`.
            The values are the same for every stage, number of ranks and choice of units.
        progress: called with the number of units that are initialized.

    Raises:
        HandshakeError: the ranks have different plans, seeds or weights, or ranks of a norm group have different values
            of a replicated parameter.
        PlanError: a module that holds parameters has no `reset_parameters`; weights are missing, have another shape or
            codes that the plan does not keep (the message names them); or an earlier `init` has taken the model over.
            The model is unchanged then.
        StoreError: the store already holds another state.
        ConfigError: `plan` is not a Plan, `store` is not given, another argument has a wrong type, or values of a
            parameter that is stored as codes are NaN or infinite.
    """
    check_type(plan, Plan, "zero.init", "state = zero.init(plan, zero.open_store(plan))")
    check_type(store, PrefetchStore, "zero.init", "state = zero.init(plan, zero.open_store(plan))")
    assert isinstance(store, PrefetchStore)
    checks.whole("seed", seed, None)
    if not (weights is None or callable(weights) or isinstance(weights, Mapping | str | PathLike)):
        raise ConfigError(
            f"weights is {checks.type_text(weights)}. Pass tensors by name, a path, or a function that fills one."
        )
    if weights is None:
        refuse_equal_parts(plan.model, plan.beside.replicated)
    store.claim()
    plan.world.agree(settings_of(plan) | {"seed": str(seed)})
    model, splitting = plan.model, plan.facts.splitting
    values = values_in(model, splitting)
    takeover = Takeover(model, splitting, plan.precision.compute, plan.world.device, plan.beside.placed)
    with if_it_fails(takeover.undo):
        codes = codes_in(weights, plan.precision.frozen, splitting.packed_shapes())
        first = values_of(splitting, values, model, seed, weights, plan.world)
        units = _filled(plan, store, first, codes, progress)
    takeover.commit()  # frees the original values, because the plan does not count them together with buffers
    del values
    give_back_memory()  # initialization used the largest host tensors of the run
    device = plan.world.compute
    tape, checksums = Tape(device.clock, rank=plan.world.rank, streams=not device.shares_memory), Checksums(device)
    store.observe(tape.of_store([unit.spec.name for unit in units]))
    sites = SiteRunner(plan, units, tape, checksums)
    sites.bind(model, splitting.sites)
    takeover.attach(sites.runner)
    runtime = Runtime(takeover, ModuleTree(model), store, units, sites, CollectiveLog(), tape, checksums)
    open_routes(runtime, plan)
    wire(runtime, plan)
    runtime.pressure = Pressure(plan)
    # Ranks that are threads share torch's generator, which a checkpoint's recomputation sets, so no rank may train
    # while another one still draws first values.
    plan.world.barrier("init")
    return State(runtime, After.known(0, plan.precision.scale.start()))


def _filled(
    plan: Plan, store: PrefetchStore, values: Values, codes: Mapping[str, Tensor], progress: Progress
) -> tuple[UnitState, ...]:
    """Return all units with first values; raise HandshakeError if the values differ between ranks. Collective."""
    units, check = list[UnitState](), Check()
    for spec in reported(plan.units, "first values", progress):
        units.append(empty_unit(plan, store, spec))
        fill(plan, store, units[-1], values, codes, check)
    compare(plan.world, check)
    for group, names in zip(plan.beside.groups, plan.beside.replicated, strict=True):
        group.agree(settings_of_groups(plan), "settings of norm_groups")
        group.agree({name: check.parameters[name] for name in sorted(names)}, "first values of replicated parameters")
    return tuple(units)
