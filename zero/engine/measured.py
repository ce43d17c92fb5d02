"""The bytes that a state really holds, read from its tensors and its store; the plan says what they should be."""

from collections import Counter

from torch import Tensor

from zero.engine.state import State


def measured(state: State) -> dict[str, int]:
    """Tier to bytes on this rank, between two steps, when no temporary buffer exists."""
    parts = state.runtime
    plan, store = parts.plan, parts.store
    held: Counter[str] = Counter()
    for unit in parts.units:
        resident = [] if unit.resident is None else [unit.resident.flat]
        held[plan.placement.param] += _distinct_bytes([*resident, unit.shard_S, unit.frozen_S])
        held[plan.placement.grad] += _distinct_bytes([unit.grad])
        held["device"] += _distinct_bytes([*unit.secondary])
    pool = parts.gatherer.pool
    held["device"] += 0 if pool is None else pool.allocated_bytes
    held["device"] += parts.reducer.allocated_bytes + parts.gradients.allocated_bytes
    held["device"] += _distinct_bytes([*parts.model.buffers()])
    held["host"] += store.slots_bytes
    in_memory_bytes = 0
    for page in plan.store_pages():
        view = store.in_place(page)
        if view is not None:
            in_memory_bytes += view.nbytes
            held[plan.tier(page)] += view.nbytes
    held["nvme"] += store.allocated_bytes - in_memory_bytes
    return {tier: nbytes for tier, nbytes in held.items() if nbytes}


def _distinct_bytes(tensors: list[Tensor | None]) -> int:
    """Of the memory behind them, each piece once: a shard may be a view of a resident unit."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(storages.values())
