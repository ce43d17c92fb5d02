"""Stream full weights out of a run, unit by unit, for a program that feeds an inference engine.

A stream yields each parameter in the dtype of compute. A unit's deferred update is applied when the stream reaches the
unit, so updates of later units still run beside the transfer of earlier ones.

A later stream can yield only the elements that have changed. Each rank compares its shard, bit by bit, with a copy of
what the last stream yielded, and the ranks exchange the positions and values that differ. Full weights are not gathered
for that, and a shard is compared in pieces, so that positions take a fixed amount of memory. Frozen parameters change
in loads and edits only; they are not copied, but yielded in full after a load or an edit.
"""

from collections.abc import Iterator
from typing import NamedTuple, overload

import torch
from torch import Tensor

from zero.core import checks
from zero.core.layout import Slot
from zero.engine.full_flat import own_shard
from zero.engine.model import Flat
from zero.engine.runtime import Runtime
from zero.engine.state import State
from zero.engine.unit_state import UnitState
from zero.engine.whole.merged import check_adapters, merged_weights
from zero.engine.whole.names import Source, state_of
from zero.errors import ConfigError
from zero.platform.device import torch_device
from zero.platform.modes import unobserved_items

INT32_MAX = 2**31 - 1

PIECE_NUMEL = 2**20
"""Elements that are compared and sent at a time, of all ranks together. Where all have changed, they take 40 MiB."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by bytes of an element, to compare bits."""


class Patch(NamedTuple):
    """Changed elements of one parameter. A stream yields a parameter with many of them in several patches.

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
    source: Source,
    *,
    changed_since: None = None,
    keep: bool = False,
    merged: bool = False,
    device: torch.device | str | None = None,
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
    merged: bool = False,
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
    tensors. No step may be made meanwhile.

    Args:
        source: a `State`, a `Step` before its `finish`, or an engine of `zero.initialize`.
        changed_since: the step of the last stream with `keep`. The iterator yields a `Patch` (name, indices, values,
            shape), or several, for each parameter of which an element has changed. Applied to the weights of that
            stream, the patches make the present weights, bit for bit. The next `changed_since` is the present step.
        keep: keep a copy of this rank's shard of the trained weights in host memory, for a later `changed_since`.
        merged: merge the active adapters of peft in the dtype of compute, as its `merge_and_unload` does, and yield the
            weights of the base by their names in the base. All weights are yielded: not with `changed_since` or `keep`.
        device: the device of the tensors; None: the world's.

    Raises:
        ConfigError: `changed_since` is not the step of the last stream with `keep`, or that stream was not read to its
            end (also by the iterator); `merged` without adapters, or with an adapted weight that a module outside of
            the adapter shares; or the model gained, lost or exchanged a parameter.
        HandshakeError: the ranks called this with different arguments, or have kept different steps.
        StaleStateError: the state is spent. By the iterator: it took a step meanwhile.
    """
    state = state_of(source, "zero.stream_weights", "for name, tensor in zero.stream_weights(state):")
    runtime, kept = state.runtime, state.runtime.streamed
    checks.boolean("keep", keep)
    checks.boolean("merged", merged)
    if changed_since is not None:
        checks.whole("changed_since", changed_since, 0)
    where = runtime.plan.world.device if device is None else torch_device(device)
    fields = {"changed_since": repr(changed_since), "keep": repr(keep), "merged": repr(merged)}
    fields["the kept step"] = repr(kept.step)
    runtime.plan.world.agree(fields, "arguments of zero.stream_weights")
    if changed_since is not None:
        _check_kept(kept.step, changed_since)
    if merged:
        if keep or changed_since is not None:
            raise ConfigError("merged=True yields all weights. Call it without keep and changed_since.")
        check_adapters(state.model, state.plan.facts.splitting.aliases())
    runtime.tree.check()
    runtime.write_edits()
    runtime.gather_changed()
    if changed_since is not None:
        return _patches(state, changed_since, where)
    return _merged(state, where) if merged else _weights(state, where, keep=keep)


def _check_kept(kept: int | None, changed_since: int) -> None:
    """Raise ConfigError unless the step `kept` is `changed_since`."""
    if kept != changed_since:
        has = "no step was kept" if kept is None else f"the step that was kept is {kept}"
        raise ConfigError(f"changed_since={changed_since}: {has}. Stream all weights once with keep=True.")


@unobserved_items
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


@unobserved_items
def _merged(state: State, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    where = {
        slot.name: (unit, flat, slot)
        for unit in state.runtime.units
        for flat in unit.spec.flats
        for slot in flat.values.slots
    }
    for name, tensor in merged_weights(state.model, where, lambda name: _full(state, *where[name])):
        yield name, tensor.to(device, copy=True)


@torch.no_grad()
def _full(state: State, unit: UnitState, flat: Flat, slot: Slot) -> Tensor:
    """Return a view of one full parameter; its unit is gathered again if the reader has used the model meanwhile."""
    return slot.of(flat.of(state.runtime.residency.materialise(unit)))


def _shard(runtime: Runtime, unit: UnitState) -> Tensor:
    """Return this rank's shard of the trainable parameters after the last update, see `own_shard`."""
    runtime.updater.apply_deferred(unit)
    unit.await_grad_readers()  # a gather may have applied the update on another stream
    return own_shard(runtime, unit)


@unobserved_items
def _patches(state: State, changed_since: int, device: torch.device) -> Iterator[Patch]:
    kept = state.runtime.streamed
    _check_kept(kept.step, changed_since)  # again: another iterator may have replaced it
    kept.step = None  # until the stream is read to its end
    for unit in state.runtime.units:
        if slots := unit.spec.trainable.slots:
            for positions, values in _changes(state.runtime, unit):
                for slot, first, last in _slots_at(positions, slots):
                    indices = (positions[first:last] - slot.offset).to(device, _index_dtype(slot.numel))
                    yield Patch(slot.name, indices, values[first:last].to(device, copy=True), slot.shape)
        if kept.frozen_versions[unit.index] != unit.frozen_version:
            kept.frozen_versions[unit.index] = unit.frozen_version
            for flat in unit.spec.flats[1:]:
                for slot in flat.values.slots:
                    yield from _whole(state, unit, flat, slot, device)
    kept.step = state.step


def _whole(state: State, unit: UnitState, flat: Flat, slot: Slot, device: torch.device) -> Iterator[Patch]:
    """Yield all elements of one parameter, `PIECE_NUMEL` at a time."""
    for start in range(0, slot.numel, PIECE_NUMEL):
        stop = min(start + PIECE_NUMEL, slot.numel)
        indices = torch.arange(start, stop, dtype=_index_dtype(slot.numel), device=device)
        values = _full(state, unit, flat, slot).reshape(-1)[start:stop]
        yield Patch(slot.name, indices, values.to(device, copy=True), slot.shape)


class _Piece(NamedTuple):
    """The same range of the shard of every rank."""

    start: int
    """The first element of the range in a shard."""
    now: Tensor
    """(n,) the present values of this rank's shard."""
    kept: Tensor
    """(n,) the values that were kept, in host memory."""

    def differs(self) -> Tensor:
        """Return which elements have changed: (n,) bool on the device."""
        bits = _BITS[self.now.itemsize]
        return self.now.view(bits) != self.kept.to(self.now.device).view(bits)


@torch.no_grad()
def _changes(runtime: Runtime, unit: UnitState) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the changed positions in a unit's trainable flat, ascending, and their values, piece by piece. Collective.

    This rank's kept shard gets the present values. Each piece is compared twice, first only to count its changes,
    because masks of the whole shard would take memory.
    """
    plan, what = runtime.plan, f"changes of {unit.spec.name}"
    now_S, kept_S = _shard(runtime, unit), runtime.streamed.shards[unit.index]
    numel = -(-PIECE_NUMEL // plan.facts.sharers)
    starts = range(0, now_S.numel(), numel)
    pieces = [_Piece(start, now_S[start : start + numel], kept_S[start : start + numel]) for start in starts]
    none = now_S.new_zeros((), dtype=torch.int64)  # a rank may have no pieces
    counts = torch.stack([none, *(piece.differs().count_nonzero() for piece in pieces)])
    counts = plan.world.exchange(plan.world.on_host(counts), what=what)[: plan.facts.sharers, 1:]
    for piece, numbers in zip(pieces, counts.T.tolist(), strict=True):
        if any(numbers):
            yield _gathered(runtime, unit, piece, numbers)


def _gathered(runtime: Runtime, unit: UnitState, piece: _Piece, numbers: list[int]) -> tuple[Tensor, Tensor]:
    """Return the changed positions of one piece on all ranks, and their values. Collective.

    The ranks send positions and values, or a mask and all values where that is smaller.

    Args:
        numbers: the number of changes by rank.
    """
    layout, what, most = unit.spec.trainable, f"changes of {unit.spec.name}", max(numbers)
    differs, now, index_dtype = piece.differs(), piece.now, _index_dtype(layout.P)
    if most * (index_dtype.itemsize + now.itemsize) > now.numel() * (1 + now.itemsize):
        mask = _all(runtime, differs.view(torch.uint8), what).view(torch.bool)
        values, places = _all(runtime, now, what)[mask], mask.view(-1).nonzero().view(-1)
        gaps = (places // now.numel()).mul_(layout.S - now.numel())
        positions = places.add_(gaps).add_(piece.start).to(index_dtype)
    else:
        local = differs.nonzero().view(-1)
        sent, sent_values = now.new_zeros(most, dtype=index_dtype), now.new_zeros(most)
        sent[: local.numel()], sent_values[: local.numel()] = local, now[local]
        first = torch.arange(len(numbers), dtype=index_dtype)[:, None] * layout.S + piece.start
        filled = torch.arange(most) < torch.tensor(numbers)[:, None]
        everywhere = _all(runtime, sent, what).add_(first.to(now.device))
        filled = filled.to(now.device)
        positions, values = everywhere[filled], _all(runtime, sent_values, what)[filled]
    piece.kept.copy_(now)
    return positions, values


def _all(runtime: Runtime, mine: Tensor, what: str) -> Tensor:
    """Return the tensors of all ranks that share a state, (ranks, n). Collective."""
    full = mine.new_empty(runtime.plan.facts.sharers, mine.numel())
    runtime.routes.gather(mine, full.view(-1), what=what).wait()
    return full


def _slots_at(positions: Tensor, slots: tuple[Slot, ...]) -> Iterator[tuple[Slot, int, int]]:
    """Yield each slot that has some of the ascending `positions`, with the (first, last) of their range."""
    bounds = torch.tensor([bound for slot in slots for bound in (slot.offset, slot.stop)], dtype=positions.dtype)
    places = torch.searchsorted(positions, bounds.to(positions.device)).tolist()
    for slot, first, last in zip(slots, places[::2], places[1::2], strict=True):
        if first < last:
            yield slot, first, last


def _index_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= INT32_MAX else torch.int64
