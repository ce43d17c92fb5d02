"""Stream full weights out of a run, unit by unit, for a program that feeds an inference engine.

A stream yields each parameter in the dtype of compute. A unit's deferred update is applied when the stream reaches the
unit, so updates of later units still run beside the transfer of earlier ones.

A later stream can yield only the elements that have changed. Each rank compares its shard, bit by bit, with a copy of
what the last stream yielded, and the ranks exchange the positions and values that differ. Full weights are not gathered
for that. Frozen parameters change in loads and edits only; they are not copied, but yielded in full after either.
"""

from collections.abc import Iterator
from typing import NamedTuple, overload

import torch
from torch import Tensor

from zero.core.layout import Slot
from zero.engine.full import Source, state_of
from zero.engine.full_flat import own_shard
from zero.engine.runtime import Runtime
from zero.engine.state import State
from zero.engine.unit import Flat
from zero.engine.unit_state import UnitState
from zero.errors import ConfigError

INT32_MAX = 2**31 - 1

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by bytes of an element, to compare bits."""


class Patch(NamedTuple):
    """The changed elements of one parameter.

    `full.view(-1)[patch.indices.long()] = patch.values` patches a parameter.
    """

    name: str
    indices: Tensor
    """(n,) ascending indices in the flattened parameter, int32; int64 for a parameter of 2**31 elements or more."""
    values: Tensor
    """(n,) the new values, in the dtype of compute."""
    shape: tuple[int, ...]
    """The shape of the parameter."""


@overload
def stream_weights(
    source: Source, *, changed_since: None = None, keep: bool = False, device: torch.device | str | None = None
) -> Iterator[tuple[str, Tensor]]: ...
@overload
def stream_weights(
    source: Source, *, changed_since: int, keep: bool = False, device: torch.device | str | None = None
) -> Iterator[Patch]: ...
def stream_weights(
    source: Source,
    *,
    changed_since: int | None = None,
    keep: bool = False,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, Tensor]] | Iterator[Patch]:
    """Return an iterator over the weights, in the dtype of compute, for an inference engine. Collective.

        for name, tensor in zero.stream_weights(state, keep=True):
            send(name, tensor)
        state, metrics = step(state, microbatches)
        for name, indices, values, shape in zero.stream_weights(state, changed_since=0):
            send_patch(name, indices, values, shape)

    Names and their order are those of `full_state_dict(state)`; a tied parameter is yielded once. Each tensor is a
    copy. At most one unit is gathered at a time, and only when its first tensor is asked for.

    Every rank must read its iterator to the end, because each unit is a collective; a rank that does not send drops the
    tensors. The state must not take a step meanwhile.

    Args:
        source: a `State`, a `Step` before its `finish`, or an engine of `zero.initialize`.
        changed_since: the step of the last stream with `keep`. The iterator yields a `Patch` (name, indices, values,
            shape) for each parameter of which an element has changed. Applied to the weights of that stream, the
            patches make the present weights, bit for bit. The present step replaces the kept one.
        keep: keep a copy of this rank's shard of the trained weights in host memory, for a later `changed_since`.
        device: the device of the tensors; None: the world's.

    Raises:
        ConfigError: `changed_since` is not the step of the last stream with `keep`, or that was not read to its end,
            also by the iterator; or the model gained, lost or exchanged a parameter.
        HandshakeError: the ranks called this with different arguments, or have kept different steps.
        StaleStateError: the state is spent. By the iterator: it took a step meanwhile.
    """
    state = state_of(source, "zero.stream_weights", "for name, tensor in zero.stream_weights(state):")
    runtime, kept = state.runtime, state.runtime.streamed
    fields = {"changed_since": repr(changed_since), "keep": repr(keep), "the kept step": repr(kept.step)}
    runtime.plan.world.agree(fields, "arguments of zero.stream_weights")
    if changed_since is not None:
        _check_kept(kept.step, changed_since)
    runtime.tree.check()
    runtime.write_edits()
    runtime.gather_changed()
    where = runtime.plan.world.device if device is None else torch.device(device)
    return _weights(state, where, keep=keep) if changed_since is None else _patches(state, changed_since, where)


def _check_kept(kept: int | None, changed_since: int) -> None:
    """Raise ConfigError unless the step `kept` is `changed_since`."""
    if kept != changed_since:
        has = "no step was kept" if kept is None else f"the step that was kept is {kept}"
        raise ConfigError(f"changed_since={changed_since}: {has}. Stream all weights once with keep=True.")


def _weights(state: State, device: torch.device, *, keep: bool) -> Iterator[tuple[str, Tensor]]:
    kept = state.runtime.streamed
    if keep:
        kept.step = None  # until the stream is read to its end
    for unit in state.runtime.units:
        if keep:
            kept.shards[unit.index] = _shard(state.runtime, unit).to("cpu", copy=True)
            kept.frozen_versions[unit.index] = unit.frozen_version
        for flat in unit.spec.flats:
            for slot in flat.values.slots:
                yield slot.name, _full(state, unit, flat, slot).to(device, copy=True)
    if keep:
        kept.step = state.step


@torch.no_grad()
def _full(state: State, unit: UnitState, flat: Flat, slot: Slot) -> Tensor:
    """Return a view of one full parameter; its unit is gathered again if the reader has used the model meanwhile."""
    return slot.of(flat.of(state.runtime.gatherer.residency.materialise(unit)))


def _shard(runtime: Runtime, unit: UnitState) -> Tensor:
    """Return this rank's shard of the trainable parameters after the last update, see `own_shard`."""
    runtime.updater.apply_deferred(unit)
    unit.await_grad_readers()  # a gather may have applied the update on another stream
    return own_shard(runtime, unit)


def _patches(state: State, changed_since: int, device: torch.device) -> Iterator[Patch]:
    kept = state.runtime.streamed
    _check_kept(kept.step, changed_since)  # again: another iterator may have replaced it
    kept.step = None  # until the stream is read to its end
    for unit in state.runtime.units:
        if slots := unit.spec.trainable.slots:
            positions, values = _changed(state.runtime, unit)
            for slot, first, last in _slots_at(positions, slots):
                indices = (positions[first:last] - slot.offset).to(device, _index_dtype(slot.numel))
                yield Patch(slot.name, indices, values[first:last].to(device, copy=True), slot.shape)
        if kept.frozen_versions[unit.index] != unit.frozen_version:
            kept.frozen_versions[unit.index] = unit.frozen_version
            for flat in unit.spec.flats[1:]:
                for slot in flat.values.slots:
                    values = _full(state, unit, flat, slot).reshape(-1).to(device, copy=True)
                    indices = torch.arange(slot.numel, dtype=_index_dtype(slot.numel), device=device)
                    yield Patch(slot.name, indices, values, slot.shape)
    kept.step = state.step


@torch.no_grad()
def _changed(runtime: Runtime, unit: UnitState) -> tuple[Tensor, Tensor]:
    """Return the positions in a unit's trainable flat that have changed, ascending, and their values. Collective.

    This rank's kept shard gets the present values.
    """
    plan, routes, layout = runtime.plan, runtime.routes, unit.spec.trainable
    index_dtype = _index_dtype(layout.P)
    now_S, kept_S = _shard(runtime, unit), runtime.streamed.shards[unit.index]
    bits = _BITS[now_S.itemsize]
    local = (now_S.view(bits) != kept_S.to(now_S.device).view(bits)).nonzero().view(-1)
    kept_S.copy_(now_S)
    what = f"changes of {unit.spec.name}"
    counts = plan.world.exchange(torch.tensor([local.numel()], device="cpu"), what=what).view(-1).tolist()
    most = max(counts)
    mine = torch.zeros(most, dtype=index_dtype, device=now_S.device)
    mine[: local.numel()] = local + layout.shard(plan.rank)[0]
    mine_values = torch.zeros(most, dtype=now_S.dtype, device=now_S.device)
    mine_values[: local.numel()] = now_S[local]
    positions, values = mine.new_empty(plan.sharers * most), mine_values.new_empty(plan.sharers * most)
    if most:
        for handle in [routes.gather(mine, positions, what=what), routes.gather(mine_values, values, what=what)]:
            handle.wait()
    filled = [slice(rank * most, rank * most + counts[rank]) for rank in range(plan.sharers)]
    return torch.cat([positions[part] for part in filled]), torch.cat([values[part] for part in filled])


def _slots_at(positions: Tensor, slots: tuple[Slot, ...]) -> Iterator[tuple[Slot, int, int]]:
    """Yield each slot that has some of the ascending `positions`, with the (first, last) of their range."""
    bounds = torch.tensor([bound for slot in slots for bound in (slot.offset, slot.stop)], dtype=positions.dtype)
    places = torch.searchsorted(positions, bounds.to(positions.device)).tolist()
    for slot, first, last in zip(slots, places[::2], places[1::2], strict=True):
        if first < last:
            yield slot, first, last


def _index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= INT32_MAX else torch.int64
