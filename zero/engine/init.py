"""Allocate the pages of a plan (`open_store`) and make its first state (`init`)."""

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor

from zero.core import checks
from zero.core.activations import ACTIVATIONS
from zero.core.sizes import GiB, size_text
from zero.distributed.routes import Routes
from zero.engine.after import After
from zero.engine.arguments import check_type
from zero.engine.backward import BackwardPass, Reducer
from zero.engine.checksums import Checksums
from zero.engine.forward import SiteRunner
from zero.engine.gather import CollectiveLog, Fetch, Gathers, Residency, gathering, lending, reading
from zero.engine.memory import InPlace, OnHost
from zero.engine.model import ModuleTree, Takeover, codes_in
from zero.engine.plan import Plan, refuse_equal_parts, settings_of, settings_of_groups, thread_count
from zero.engine.runtime import Runtime
from zero.engine.state import State
from zero.engine.unit_state import UnitState
from zero.engine.update import Gradients, PagedGradients, Updater
from zero.engine.whole import Check, Values, Weights, compare, empty_unit, fill, values_in, values_of
from zero.errors import ConfigError, StoreError, if_it_fails
from zero.platform.arena import Arena
from zero.platform.host_memory import give_back_memory
from zero.platform.modes import unobserved
from zero.platform.run_files import folders_of, free_by_file_system, in_memory
from zero.platform.tape import Tape
from zero.progress import Progress, reported, silent
from zero.store import REQUEST_BYTES, MemoryStore, NvmeStore, Page, PrefetchStore, Store, Tiers, probe, spread

PROBED_BYTES = GiB
"""If a rank puts at least this many bytes in several folders, their disks are measured first (up to 3 seconds)."""

MOST_UNEQUAL = 1 / 64
"""The least rate that a disk is assumed to have, as a share of the fastest disk's rate."""

LEAST_PROBED_BYTES = 2 * REQUEST_BYTES
"""Folders with less room are not measured: the measurement needs this much, and such folders get few pages anyway."""

ROOM_SHARE = 15 / 16
"""The share of several folders' free bytes that is used, if that is enough; the file system needs the rest."""


def open_store(plan: Plan, *, disk: Store | None = None, progress: Progress = silent) -> PrefetchStore:
    """Open the store of this rank and allocate every page, filled with zeros.

    Args:
        plan: defines the pages and the tier of each.
        disk: a store to use for the nvme tier instead of a file in `offload.path`. It must pass
            `zero.testing.StoreContract`.
        progress: called with the progress of measuring disks. They are measured only if there are several and the files
            are large.

    Returns:
        The store. Its `close()` frees its host memory and disk space.

    Raises:
        StoreError: `offload.path` cannot be used, or has too little space. Nothing is allocated then.
    """
    check_type(plan, Plan, "zero.open_store", "store = zero.open_store(plan)")
    specs, device = plan.pages.store_pages(), plan.world.compute
    where = device.device
    with ExitStack() as undo, unobserved():  # closes what was opened if a later line raises
        memory = _adjoining(where, {page: spec.nbytes for page, spec in specs.items() if plan.tier(page) == "device"})
        stores: dict[str, Store] = {"device": MemoryStore(where, lambda _: next(memory))}
        on_host_bytes = sum(spec.block_bytes for page, spec in specs.items() if plan.tier(page) == "host")
        on_disk = {page: spec.block_bytes for page, spec in specs.items() if plan.tier(page) == "nvme"}
        if on_disk and disk is None:
            disk = _open_disks(plan, on_disk, progress)
        if disk is not None:
            stores["nvme"] = disk
            undo.callback(disk.close)
        if device.shares_memory:  # device memory is host memory, so one kind of store holds both tiers
            arena = Arena(plan.arena_bytes, device, pin=False)
            stores["host"] = MemoryStore(where)
        else:
            arena = Arena(plan.arena_bytes + on_host_bytes, device, pin=plan.offload.pin)
            undo.callback(arena.close)
            stores["host"] = MemoryStore(torch.device("cpu"), arena.take, copy=device.copy)
        threads = thread_count(plan.offload)
        store = PrefetchStore(
            Tiers(stores, plan.tier, release=arena.close),
            [arena.take(plan.slots.nbytes) for _ in range(plan.slots.arena)],
            [arena.take(plan.slots.bounce_bytes) for _ in range(plan.slots.bounces)],
            threads=threads,
            read_ahead=plan.slots.read_ahead,
            timeout_s=plan.world.timeout_s,
            prepare=device.prepare_thread,
        )
        for page, spec in specs.items():
            store.allocate(page, spec.numel, spec.dtype)
        undo.pop_all()
    return store


def _adjoining(device: torch.device, sizes: Mapping[Page, int]) -> Iterator[Tensor]:
    """Yield zeros for each page, (n,) uint8; pages of one unit and kind are adjacent, so one kernel can update them."""
    for _, pages in groupby(sizes, key=lambda page: (page.unit, page.kind)):
        numels = [sizes[page] for page in pages]
        yield from torch.zeros(sum(numels), dtype=torch.uint8, device=device).split(numels)


def _open_disks(plan: Plan, sizes: Mapping[Page, int], progress: Progress) -> Store:
    """Open the files of this rank, one in each folder of `offload.path`, and spread the pages over them.

    Args:
        sizes: bytes of each page on disk.
    """
    folders, nbytes = folders_of(plan.offload.paths), sum(sizes.values())
    if plan.world.rank == 0 and (warning := in_memory(folders)):
        warnings.warn(warning, stacklevel=3)
    rooms = [nbytes]
    if len(folders) > 1:
        for folder in folders:  # raises an error with the folder's name if it is missing or not writable
            NvmeStore(folder).close()
        rooms = _rooms(folders, nbytes, plan.world.whole.local_size)
    rates = [1.0 for _ in folders]
    if nbytes >= PROBED_BYTES and len(folders) > 1:
        rates = [
            probe(folder, size_bytes=min(nbytes // len(folders), room), progress=progress)
            if room >= LEAST_PROBED_BYTES
            else 0.0
            for folder, room in zip(folders, rooms, strict=True)
        ]
    least = MOST_UNEQUAL * (max(rates) or 1.0)  # all rates are 0 if no measurement ended in time
    where = spread(sizes, [max(rate, least) for rate in rates], rooms)
    with ExitStack() as undo:
        disks: dict[str, Store] = {}
        for number, folder in enumerate(folders):
            own_bytes = sum(nbytes for page, nbytes in sizes.items() if where[page] == str(number))
            disks[str(number)] = NvmeStore(folder, capacity_bytes=own_bytes, verify=plan.offload.verify)
            undo.callback(disks[str(number)].close)
        undo.pop_all()
    return disks["0"] if len(disks) == 1 else Tiers(disks, where.__getitem__)


def _rooms(folders: Sequence[Path], nbytes: int, ranks: int) -> list[int]:
    """Return the bytes that this rank may put in each of several folders.

    That is an equal share for each rank of the node, because all ranks allocate at the same time. If that share is too
    small, all free bytes are returned: the other ranks may have allocated theirs already.

    Args:
        nbytes: bytes that this rank needs.
        ranks: number of ranks of the node.

    Raises:
        StoreError: the folders together have fewer than `nbytes` free bytes.
    """
    free = free_by_file_system(folders)
    rooms = {folder: free_bytes // len(those) for those, free_bytes in free for folder in those}
    if sum(rooms[folder] for folder in folders) < nbytes:  # also right if two names mean the same folder
        has = ", ".join(f"{size_text(free_bytes)} in {' and '.join(map(str, those))}" for those, free_bytes in free)
        raise StoreError(
            f"the state store needs {size_text(nbytes)}, but only {has} are free. Set offload.path to folders with "
            "more space, or keep less there."
        )
    shares = {folder: int(ROOM_SHARE * room) // ranks for folder, room in rooms.items()}
    enough = sum(shares[folder] for folder in folders) >= nbytes
    return [(shares if enough else rooms)[folder] for folder in folders]


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
    if any(ACTIVATIONS[name].recomputes for name in plan.activations.values()):
        importlib.import_module("torch._dynamo")  # else torch's `checkpoint` imports it in the first step: 2 to 3 s
    takeover.commit()  # frees the original values, because the plan does not count them together with buffers
    del values
    give_back_memory()  # initialization used the largest host tensors of the run
    runtime = _wire(plan, store, units, takeover)
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


def _wire(plan: Plan, store: PrefetchStore, units: tuple[UnitState, ...], takeover: Takeover) -> Runtime:
    device, log = plan.world.compute, CollectiveLog()
    checksums = Checksums(device)
    tape = Tape(device.clock, rank=plan.world.rank, streams=not device.shares_memory)
    store.observe(tape.of_store([unit.spec.name for unit in units]))
    gradients = PagedGradients(plan, store, tape) if plan.facts.grads_offloaded else Gradients()
    routes = Routes(
        plan.world,
        plan.facts.gather_route,
        plan.facts.sum_route,
        travels=plan.precision.reduce,
    )
    advance = partial(routes.advance, sums=False)
    updater = Updater(plan, store, units, gradients, tape, advance)
    gathers = Gathers(plan, units, updater, _fetch(plan, routes, store), log, tape)
    residency = Residency(plan, units, gathers, updater.launch_ahead, advance, checksums)
    first = residency.complete
    reducer = Reducer(plan, routes, units, gradients, updater, first=first, log=log, tape=tape, checksums=checksums)
    activations = OnHost(device, pin=plan.offload.pin) if _goes_to_host(plan) else InPlace()
    backward = BackwardPass(plan.accumulate, units, residency, reducer, tape)
    sites = SiteRunner(plan, units, residency, backward, activations, tape, checksums)
    sites.bind(plan.model, plan.facts.splitting.sites)
    takeover.attach(sites.runner)
    parts = store, units, routes, residency, reducer, backward, sites, gradients, updater, log, tape, checksums
    return Runtime(plan, takeover, ModuleTree(plan.model), *parts)


def _fetch(plan: Plan, routes: Routes, store: PrefetchStore) -> Fetch:
    if plan.precision.frozen is not None:
        plan.precision.frozen.tables(plan.world.device)  # created now, so that streams do not each create one later
    if not plan.facts.params_offloaded:
        return gathering(plan, routes)
    return (lending if plan.facts.params_on_host else reading)(plan, routes, store)


def _goes_to_host(plan: Plan) -> bool:
    """Return whether activations are copied to host memory; on a CPU they are in host memory already."""
    offloads = any(ACTIVATIONS[name].offloads for name in plan.activations.values())
    return offloads and not plan.world.compute.shares_memory
