"""The bytes that a state actually holds, read from its tensors and its store, to compare with the plan's bytes."""

from collections import Counter

from torch import Tensor

from zero.engine.state import State


def measured(state: State) -> dict[str, dict[str, int]]:
    """Return the bytes that this rank holds as a dict from tier to kind to bytes.

    Call it between two steps, when no temporary buffers exist. Kinds are those of `Plan.bytes`, but the nvme tier has
    only "file".
    """
    parts = state.runtime
    plan, store = parts.plan, parts.store
    held: dict[str, Counter[str]] = {tier: Counter() for tier in ("device", "host", "nvme")}
    for unit in parts.units:
        resident = [] if unit.resident is None else [unit.resident.flat]
        held[plan.placement.param]["parameters"] += _distinct_bytes([*resident, *unit.shards])
        held[plan.placement.grad]["gradients"] += _distinct_bytes([unit.grad])
    pool = parts.residency.pool
    held["device"]["gathered units"] += 0 if pool is None else pool.allocated_bytes
    held["device"]["gradient flats"] += parts.reducer.reductions.flats.free_bytes
    held["device"]["node sums"] += parts.reducer.reductions.partials.free_bytes
    held["device"]["gradient buffers"] += parts.gradients.allocated_bytes
    held["device"]["staging"] += parts.updater.staging.allocated_bytes
    held["device"]["matrices"] += parts.updater.matrices.allocated_bytes
    held["device"]["buffers"] += _distinct_bytes([*plan.model.buffers()])
    held["host"]["arena"] += store.slots_bytes
    in_memory_bytes = 0
    for page in plan.pages.store_pages():
        view = store.in_place(page)
        if view is not None:
            in_memory_bytes += view.nbytes
            held[plan.tier(page)][plan.kind(page)] += view.nbytes
    held["nvme"]["file"] += store.allocated_bytes - in_memory_bytes
    return {tier: dict(+kinds) for tier, kinds in held.items() if +kinds}


def _distinct_bytes(tensors: list[Tensor | None]) -> int:
    """Return the bytes of the tensors' storages; a shared storage counts once (a shard may view a resident buffer)."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
