"""Read this rank's part of a state, page by page, through a few buffers of host memory.

A few pages are read before the writer needs them. A GPU copies them on the current stream.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from zero.checkpoint.contents import BUFFER, PARAMETER, saved_kind
from zero.checkpoint.format.manifest import Held, SavedFlat
from zero.core.layout import pages
from zero.core.sizes import round_up
from zero.engine.plan import Plan
from zero.engine.runtime import Runtime
from zero.engine.unit_state import UnitState
from zero.platform.device import Event
from zero.platform.handle import Done, Handle
from zero.store import Page

AHEAD = 5
"""Number of pages of a kind that are read before the writer needs them: a few more than the store's threads."""


def staging_bytes(plan: Plan) -> int:
    """Return the bytes of host memory through which a save reads pages, pinned if there is a GPU."""
    return 2 * (AHEAD + 1) * round_up(plan.pages.page_numel * torch.float32.itemsize)


def pieces_on_host(buffer: Tensor) -> Tensor:
    """Return a copy of a buffer in host memory, 1-D and contiguous."""
    return buffer.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous().view(-1)


def pieces_of(
    pieces: Iterable[Held], flats: Sequence[SavedFlat], buffers: Mapping[str, Tensor], runtime: Runtime, memory: Tensor
) -> Iterator[Tensor]:
    """Yield the pieces of a file of this rank in order, as contiguous CPU tensors; each is valid until the next one.

    Args:
        buffers: copies of the model's buffers, from `pieces_on_host`.
        memory: host memory for pages, (`staging_bytes`,) uint8.
    """
    units, staging = runtime.units, memory.chunk(2 * (AHEAD + 1))
    for (number, kind), group in itertools.groupby(pieces, key=lambda piece: (piece.flat, piece.kind)):
        if kind == BUFFER:
            yield from (buffers[piece.slot.name] for piece in group)
            continue
        layout = flats[number].layout
        start, stop = flats[number].share(runtime.plan.world.rank)
        for origin, page in _pages(runtime, units[number % len(units)], kind, start, stop, staging):
            first, last = max(origin, start), min(origin + page.numel(), stop)
            for part in layout.pieces(first, last):
                begin = first - origin + part.start_in_range
                yield page[begin : begin + part.slot_stop - part.slot_start]


def _pages(
    runtime: Runtime, unit: UnitState, kind: str, start: int, stop: int, staging: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, values) of each page of this rank that overlaps elements [start, stop) of a unit's flat."""
    plan, master = runtime.plan, runtime.plan.precision.master
    kept = partial(_kept, runtime, unit, start, stop)
    read = partial(kept, staging[AHEAD + 1 :])
    own_params = unit.own_params(full_update=plan.facts.full_update)
    params = partial(kept, staging[: AHEAD + 1], "param", plan.precision.compute, own_params)
    frozen = {saved_kind(flat): number for number, flat in enumerate(unit.spec.flats) if number}
    if kind in frozen:
        flat, stored_S = unit.spec.flats[frozen[kind]], unit.shards[frozen[kind]]
        yield from read(flat.kind, flat.dtype(plan.precision.compute), stored_S)
    elif kind != PARAMETER:
        form = plan.optimizer.form(kind)
        for origin, page in read(kind, form.dtype):
            yield origin, form.values_of(page)
    elif master.kind is None:
        yield from params()
    else:
        params_read = params() if master.reads_params else itertools.repeat((0, torch.empty(0)))
        for (origin, kept_K), (_, param_K) in zip(read(master.kind, master.dtype), params_read, strict=False):
            yield origin, master.of(param_K, kept_K)


def _kept(
    runtime: Runtime,
    unit: UnitState,
    start: int,
    stop: int,
    staging: Sequence[Tensor],
    kind: str,
    dtype: torch.dtype,
    in_memory: Tensor | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield (first element, contents) of each page of one kind that overlaps elements [start, stop) of a unit's flat.

    Args:
        in_memory: this rank's part of the flat; None: the pages are read from the store.
    """
    plan, device = runtime.plan, runtime.plan.world.compute
    layout = unit.spec.stored(kind)
    whole = plan.facts.full_update and layout is unit.spec.trainable
    origin, end = (0, layout.P) if whole else layout.shard(plan.rank)
    wanted = [
        (number, a, b)
        for number, (a, b) in enumerate(pages(end - origin, plan.pages.page_numel))
        if origin + a < stop and origin + b > start
    ]
    waiting: deque[tuple[int, Tensor, Handle, Event]] = deque()
    for place, (number, a, b) in enumerate(wanted):
        if in_memory is not None and device.shares_memory:
            yield origin + a, in_memory[a:b].detach()
            continue
        if len(waiting) == len(staging):
            yield _arrived(*waiting.popleft())
        numel = plan.passes.kept.numel(kind, b - a)
        page = staging[place % len(staging)][: numel * dtype.itemsize].view(dtype)
        if in_memory is None:
            ticket: Handle = runtime.store.read(Page(unit.index, kind, number), page)
        else:
            device.copy(page, in_memory[a:b].detach())
            ticket = Done()
        waiting.append((origin + a, page, ticket, device.mark()))
    while waiting:
        yield _arrived(*waiting.popleft())


def _arrived(origin: int, page: Tensor, ticket: Handle, copied: Event) -> tuple[int, Tensor]:
    ticket.wait()
    copied.finish()
    return origin, page
