"""`init` makes a state, `make_step` makes the function that moves it on: see `passes.py` for what a step is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero.engine.compile import Compiler
from zero.engine.fetch import Fetch, gathering, lending, reading
from zero.engine.first_values import Values, Weights, empty_unit, fill, values_in, values_of
from zero.engine.gather import Gatherer, bind_placeholders
from zero.engine.gradient import Gradients, PagedGradients
from zero.engine.module_copy import attach, detached_copy, take_over
from zero.engine.plan import THREADS, Plan
from zero.engine.pool import Pool
from zero.engine.reduce import Reducer
from zero.engine.residency import Residency
from zero.engine.saved_tensors import InPlace, OnHost
from zero.engine.state import Runtime, State
from zero.engine.step import Metrics, Step
from zero.engine.unit_state import UnitState
from zero.engine.update import Updater
from zero.engine.visit_order import CollectiveLog
from zero.errors import ConfigError
from zero.platform.device import ALIGNMENT, Arena, give_back_memory, round_up
from zero.platform.timeline import Tape, Timeline
from zero.progress import Progress, silent
from zero.store import REQUEST_BYTES, MemoryStore, NvmeStore, PrefetchStore, Store, Tiers, probe

PROBED_BYTES = 1 << 30
"""From here on a file is large enough for its disk to be measured first, which takes up to 3 seconds."""

LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Mapping[str, Any]]]


def open_store(plan: Plan, *, disk: Store | None = None, progress: Progress = silent) -> PrefetchStore:
    """The store of this rank, with every page allocated and zero.

    Args:
        disk: what to use for the nvme tier instead of a file in `offload.path`: anything that passes
            `zero.testing.StoreContract`.
        progress: told how far the measurement of a disk is, which a large file is worth.

    Raises:
        StoreError: `offload.path` cannot be used, or has too little space; nothing was taken yet.
    """
    specs, device = plan.store_pages(), plan.world.compute
    where, host = device.device, torch.device("cpu")
    slot_bytes = plan.slot_bytes
    with ExitStack() as undo:  # what a refusal half-way must not leave open
        stores: dict[str, Store] = {"device": MemoryStore(where)}
        on_disk_bytes = sum(round_up(one.nbytes, ALIGNMENT) for page, one in specs.items() if plan.tier(page) == "nvme")
        threads = plan.offload.threads or THREADS
        if on_disk_bytes and disk is None:
            disk, threads = _open_disk(plan, on_disk_bytes, progress)
        if disk is not None:
            stores["nvme"] = disk
            undo.callback(disk.close)
        if device.shares_memory:  # one memory: what stays and what goes to the host lie side by side
            arena = Arena(plan.arena_bytes, device, pin=False)
            stores["host"] = MemoryStore(where)
        else:
            on_host = sum(round_up(one.nbytes, ALIGNMENT) for page, one in specs.items() if plan.tier(page) == "host")
            arena = Arena(plan.arena_bytes + on_host, device, pin=plan.offload.pin)
            undo.callback(arena.close)
            stores["host"] = MemoryStore(host, arena.take, copy=device.copy)
        ahead = plan.offload.read_ahead
        store = PrefetchStore(
            Tiers(stores, plan.tier, release=arena.close),
            [arena.take(slot_bytes) for _ in range(plan.arena_slots)],
            threads=threads,
            read_ahead=max(plan.arena_slots - threads, 0) if ahead is None else ahead,
            timeout_s=plan.world.timeout_s,
            prepare=device.prepare_thread,
        )
        for page, spec in specs.items():
            store.allocate(page, spec.numel, spec.dtype)
        undo.pop_all()
    return store


def _open_disk(plan: Plan, nbytes: int, progress: Progress) -> tuple[Store, int]:
    """The file of this rank, and how many threads suit its disk."""
    folder, threads, request_bytes = Path(plan.offload.path or ".").expanduser(), plan.offload.threads, REQUEST_BYTES
    if threads is None and nbytes >= PROBED_BYTES:
        NvmeStore(folder, capacity_bytes=nbytes).close()  # too little space is refused before anything is measured
        speed = probe(folder, size_bytes=nbytes, progress=partial(progress, "measuring the disk"))
        request_bytes, threads = speed.request_bytes, min(speed.threads, THREADS)  # the arena has slots for so many
    disk = NvmeStore(folder, capacity_bytes=nbytes, verify=plan.offload.verify, request_bytes=request_bytes)
    return disk, threads or THREADS


def init(
    plan: Plan, store: PrefetchStore, *, seed: int = 0, weights: Weights = None, progress: Progress = silent
) -> State:
    """A state at step 0, made page by page: nothing larger than one owner of parameters exists on the way.

    Args:
        weights: None to keep the values of a model that has them, and for parameters on meta to call each owner's
            `reset_parameters` with a generator seeded from (seed, owner), which gives the same values for every stage,
            world and choice of units; or tensors by name; or the path of a safetensors file; or a function of (name,
            fp32 tensor) that fills the tensor.
        progress: told the units that have their values.

    Raises:
        HandshakeError: the ranks have different plans, seeds or weights.
        PlanError: an owner without `reset_parameters`, or missing or misshapen weights; named.
        StoreError: the store holds another state already.
    """
    store.claim()
    plan.world.agree(plan.fields() | {"seed": str(seed)})
    given = values_in(plan.model, plan.splitting)  # before it is taken over
    with _model_of(plan) as model:
        units = _filled(plan, store, values_of(plan.splitting, given, model, seed, weights, plan.world), progress)
    del given
    give_back_memory()  # first values were fp32, and the largest tensors that a run ever has on the host
    runtime = _wire(plan, store, units, model)
    # Thread ranks share torch's generator, and a checkpoint's recomputation sets it: none trains while another draws.
    plan.world.barrier("init")
    return State(runtime, 0, plan.precision.scale.start())


@contextmanager
def _model_of(plan: Plan) -> Iterator[nn.Module]:
    """The model that will run; if something in the block fails, the user's is what it was."""
    form = plan.model, plan.splitting, plan.precision.compute, plan.world.device
    if not plan.in_place:
        yield detached_copy(*form)
        return
    undo = take_over(*form)
    try:
        yield plan.model
    except BaseException:
        undo()
        raise


def _filled(plan: Plan, store: PrefetchStore, values: Values, progress: Progress) -> tuple[UnitState, ...]:
    """Every unit with its first values, the same on all ranks."""
    units: list[UnitState] = []
    checks = {}
    for spec in plan.units:
        progress("first values", len(units), len(plan.units))
        units.append(empty_unit(plan, spec))
        checks[spec.name] = fill(plan, store, units[-1], values)
    progress("first values", len(plan.units), len(plan.units))
    plan.world.agree(checks, "first values")
    return tuple(units)


def _wire(plan: Plan, store: PrefetchStore, units: tuple[UnitState, ...], copied: nn.Module) -> Runtime:
    device, log = plan.world.compute, CollectiveLog()
    tape = Tape(device.clock, rank=plan.world.rank, streams=not device.shares_memory)
    store.observe(tape.of_store([unit.spec.name for unit in units]))
    pool = None if plan.resident else Pool(plan.buffer_counts(), plan.precision.compute, device)
    gradients = PagedGradients(plan, store, device, tape) if plan.grads_offloaded else Gradients()
    updater = Updater(plan, store, units, device=device, gradients=gradients, tape=tape)
    residency = Residency(
        units,
        device=device,
        pool=pool,
        prefetch=plan.prefetch,
        apply=updater.apply,
        follow=updater.follow if plan.params_offloaded else None,
        fetch=_fetch(plan, store),
        alone=plan.world.size == 1,
        in_order=plan.resident and plan.world.size > 1,
        log=log,
        tape=tape,
    )
    reducer = Reducer(
        units,
        world=plan.world,
        device=device,
        counts=plan.flat_counts(),
        dtype=plan.flat_dtype,
        local=plan.local_sum,
        whole=plan.whole_update,
        rounds=1 if plan.local_sum else plan.accumulate,
        gradients=gradients,
        apply=updater.apply,
        final=updater.final,
        first=residency.complete,
        log=log,
        tape=tape,
    )
    gatherer = Gatherer(
        units,
        residency,
        accumulate=plan.accumulate,
        remat=plan.activations == "remat",
        activations=OnHost(device, pin=plan.offload.pin) if _goes_to_host(plan) else InPlace(),
        compiler=Compiler(plan.compile) if plan.compile else None,
        deliver=reducer.deliver,
        start_reduce=reducer.start_reduce,
        tape=tape,
    )
    bind_placeholders(copied, plan.splitting.sites, gatherer)
    attach(copied, plan.splitting, gatherer.runner)
    originals = {name: one for name, one in plan.model.named_parameters() if not (plan.in_place or one.is_meta)}
    return Runtime(plan, copied, originals, store, units, gatherer, gradients, reducer, updater, log, tape)


def _fetch(plan: Plan, store: PrefetchStore) -> Fetch:
    if not plan.params_offloaded:
        return gathering(plan.world)
    return (lending if plan.params_on_host else reading)(plan.world, plan.world.compute, store, plan.page_numel)


def _goes_to_host(plan: Plan) -> bool:
    """Activations of a CPU lie in host memory already."""
    return plan.activations == "offload" and not plan.world.compute.shares_memory


def make_step(
    plan: Plan, loss_fn: LossFn, *, word: Callable[[], float] = lambda: 0.0
) -> Callable[[State, Sequence[Any]], tuple[State, Metrics]]:
    """The training step: `state, metrics = step(state, microbatches)`.

    Args:
        loss_fn: (model, microbatch) to a scalar loss, the mean over the microbatch, or to (loss, dict of scalars). The
            model is the plan's copy; call it as the original.
        word: asked once a step for a number that every rank gets to know, so that all act on it after the same step.

    The step takes `plan.accumulate` microbatches of this rank and returns the next state; the old one is spent. If it
    raises, the old state is still good, except that buffers such as running statistics have seen the microbatches; and
    except with `zero.update=eager` once backward has updated a unit, which spends the state.

    Raises (when called):
        StaleStateError: the state is spent.
        WorldError: the ranks visited different units.
        NonFiniteGradientError: `zero.update=eager` and a gradient that is not finite.
    """

    def step(state: State, microbatches: Sequence[Any]) -> tuple[State, Metrics]:
        _same_plan(plan, state)
        if isinstance(microbatches, Tensor | Mapping | str):
            raise ConfigError(
                f"microbatches is a {type(microbatches).__name__}; pass a list of them: step(state, [batch])"
            )
        if len(microbatches) != plan.accumulate:
            raise ConfigError(
                f"a step takes batch.accumulate={plan.accumulate} microbatches, not {len(microbatches)}; "
                "in Python it is Plan(accumulate=...)"
            )
        under_way = Step(state)
        try:
            for microbatch in microbatches:
                under_way.microbatch()
                result = loss_fn(state.model, microbatch)
                loss, aux = result if isinstance(result, tuple) else (result, {})
                under_way.backward(loss, aux)
            return under_way.finish(word())
        except BaseException:
            under_way.abandon()
            raise

    return step


def make_forward(plan: Plan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Evaluation: `forward(state, *args)` is `fn(model, *args)` in eval mode without gradients.

    Parameters are read through the waiting update, so the state's own step is what is seen. Every rank must call it
    the same number of times.
    """

    def forward(state: State, *args: Any, **kwargs: Any) -> Any:
        _same_plan(plan, state)
        parts = state.runtime
        modes = [(module, module.training) for module in parts.model.modules()]
        parts.model.eval()
        try:
            with torch.no_grad():
                parts.gatherer.begin()
                return fn(parts.model, *args, **kwargs)
        finally:
            for module, training in modes:
                module.training = training

    return forward


@contextmanager
def record(state: State, *, profile: bool = False) -> Iterator[Timeline]:
    """Record when this rank does what, from here to the end of the block.

        with zero.record(state) as timeline:
            state, metrics = step(state, microbatches)
        print(timeline.hidden()["page in"])
        timeline.write(folder / "trace.json")

    The timeline is empty until the block ends. Not collective: one rank may record alone, and gets the same bits. What
    was under way already when the block began is not seen, and what still is when it ends is cut off there; with
    `zero.update=lazy` the updates seen are mostly those that the step before has decided. On a GPU starting and ending
    wait for the device, and steps do not.

    Args:
        profile: also mark everything as ranges of torch.profiler ("gather blocks.3"), for a profile made meanwhile.
            Those of the store's threads are in it if the profiler looks at all threads.

    Raises:
        StaleStateError: the state is spent, or its run is being recorded already.
    """
    with state.runtime.tape.record(profile=profile) as timeline:
        yield timeline


def _same_plan(plan: Plan, state: State) -> None:
    if state.plan is not plan:
        raise ConfigError("this State was made by zero.init from another Plan; make the step from state.plan")
