"""Load a checkpoint into any state of the same model, whatever the stage, tier, world, pages and units of either.

Nothing is written before every name, shape and dtype was compared: each rank then reads the ranges that its own flats
cover and lets them run through the sinks that first values go through.

Names have to match both ways, unless a pattern says that a tensor stays as it is.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero.checkpoint.contents import BUFFER, FROZEN, PARAMETER, flats
from zero.checkpoint.manifest import Entry, entries
from zero.checkpoint.open import Checkpoint, Tensors, index_of, numbers_of, set_random, weights_of
from zero.checkpoint.save import gather_reports
from zero.core.layout import Slot
from zero.core.suggest import own_arguments, some
from zero.engine.arguments import check_state, kind_of
from zero.engine.first_values import sinks_of
from zero.engine.full import full_values
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.engine.takeover import buffers_of
from zero.errors import CheckpointError, ConfigError
from zero.progress import Progress, reported, silent

Key = tuple[str, str]
"""Name and kind of a tensor."""


@own_arguments({"checkpoint": "state = zero.load(state, checkpoint)"})
def load(
    state: State,
    checkpoint: Checkpoint,
    *,
    partial: Iterable[str] = (),
    convert: Iterable[str] = (),
    moments: bool = True,
    weights: str = PARAMETER,
    note: Callable[[str], None] = lambda text: None,
    progress: Progress = silent,
) -> State:
    """`state` with the checkpoint's values; the one that was given is spent. Collective.

    Args:
        state: of the same model, of any stage, tier and world.
        checkpoint: what `open_checkpoint` or `open_latest` returned.
        partial: names, or patterns such as `head.*`, of tensors that keep the values that they have: they may be
            missing on either side, or differ in shape. With its kind in front, such as `nu/*`, of that kind only.
        convert: names or patterns of tensors whose dtype may change; moments may go from any form to any.
        moments: False leaves the optimizer's as they are, whatever the checkpoint has: for a state that is not trained.
        weights: "parameter" (default), or "ema": the parameters get the running mean of what they were.
        note: called with which tensors keep their values because of `partial`.
        progress: called with the units that are filled.

    Raises:
        CheckpointError: names, shapes or dtypes that do not match, a pattern of `partial` that names nothing, or no
            such `weights`, and nothing was changed; or damage that came after the checkpoint was opened: then the state
            is spent.
    """
    check_state(state, "zero.load", "state = zero.load(state, checkpoint)")
    if not isinstance(checkpoint, Checkpoint):
        raise ConfigError(
            f"zero.load takes a Checkpoint second, and this is {kind_of(checkpoint)}; write "
            "state = zero.load(state, zero.open_checkpoint(world, folder))"
        )
    runtime, plan = state.runtime, state.plan
    runtime.tree.check()
    runtime.settle()
    partial, convert = tuple(partial), tuple(convert)
    buffers = buffers_of(state.model)
    wanted = _tensors(plan, buffers)
    there = _entries(checkpoint, wanted)
    begun = _begun(plan, wanted, there) if moments else {}
    if begun:
        note(f"{checkpoint.folder} has no {', '.join(plan.optimizer.copies)}: it begins as the parameters")
    there, mean = {**there, **begun}, weights_of(checkpoint, weights)
    there |= {key: mean[key[0]] for key in there if key[1] in (PARAMETER, FROZEN) and key[0] in mean}

    def stays_out(key: Key) -> bool:
        return _named(key, partial) or not (moments or key[1] in (PARAMETER, FROZEN, BUFFER))

    for pattern in partial:
        if not any(_named(key, (pattern,)) for key in (*wanted, *there)):
            raise CheckpointError(
                f"{pattern} in partial (checkpoint.partial): the model has no such tensor, nor {checkpoint.folder}"
            )
    kept = {key for key in wanted if stays_out(key)}
    _match(checkpoint.folder, {key: one for key, one in there.items() if not stays_out(key)}, wanted, kept, convert)
    saved = numbers_of(checkpoint.folder, checkpoint.manifest)
    if partial:
        named = [_words(key) for key in wanted if _named(key, partial)]
        note(f"checkpoint.partial: {len(named)} of {len(wanted)} tensors keep the values they have" + _listed(named))
        if left := [_words(key) for key in there if key not in wanted and _named(key, partial)]:
            note(f"checkpoint.partial: {len(left)} tensors of the checkpoint are left behind" + _listed(left))
    stays = _current(state, kept - _untouched(plan, kept))
    scale = plan.precision.scale.resumed(saved.scale, dynamic=saved.dynamic)
    following = state.restored(step=saved.step, scale=scale)
    generators: list[dict[str, Any] | None] = []

    def fill() -> dict[str, Any]:
        if checkpoint.manifest.world == plan.world.size:
            generators.append(index_of(checkpoint, plan.world.rank).random)
        _fill(following, checkpoint, there, stays, buffers, kept, progress)
        return {}

    gather_reports(plan.world, fill)
    runtime.updater.resume(saved.rested)
    for unit in runtime.units:
        unit.mark_changed(resident=True, frozen=True)
    for random in generators:
        if random is not None:
            set_random(random)
    return following


# -- what belongs together ---------------------------------------------------------------------------------------------


def _tensors(plan: Plan, buffers: Mapping[str, Tensor]) -> dict[Key, Entry]:
    """Everything that the state of a plan has, empty tensors too."""
    return {(entry.name, entry.kind): entry for entry in entries(flats(plan, buffers))}


def _entries(checkpoint: Checkpoint, wanted: Iterable[Key]) -> dict[Key, Entry]:
    """By name and kind; what was trained then and is frozen now, or the other way round, by the kind that is wanted."""
    found = {(entry.name, entry.kind): entry for entry in checkpoint.manifest.entries}
    for name, kind in wanted:
        other = (name, {PARAMETER: FROZEN, FROZEN: PARAMETER}.get(kind, kind))
        if (name, kind) not in found and other in found:
            found[name, kind] = found.pop(other)
    return found


def one_sided(state: State, checkpoint: Checkpoint) -> tuple[str, ...]:
    """What only the model or only the checkpoint has, as patterns for `partial`."""
    wanted = _tensors(state.plan, buffers_of(state.model)).keys()
    return tuple(sorted(escape(f"{kind}/{name}") for name, kind in wanted ^ _entries(checkpoint, wanted).keys()))


def _begun(plan: Plan, wanted: Iterable[Key], there: Mapping[Key, Entry]) -> dict[Key, Entry]:
    """What begins as the parameters and is not in the checkpoint, with the parameter's entry."""
    lacking = [key for key in wanted if key[1] in plan.optimizer.copies and key not in there]
    return {key: there[key[0], PARAMETER] for key in lacking if (key[0], PARAMETER) in there}


def _match(
    folder: Path, there: Mapping[Key, Entry], wanted: Mapping[Key, Entry], kept: set[Key], convert: Sequence[str]
) -> None:
    both = {key: (there[key], wanted[key]) for key in wanted if key in there}
    recast = {key: saved for key, (saved, to) in both.items() if not _may_become(key[1], saved.dtype, to.dtype)}
    wrong = {
        "missing": [_words(key) for key in wanted if key not in there and key not in kept],
        "not in the model": [_words(key) for key in there if key not in wanted],
        "of another shape": [
            f"{_words(key)} {saved.shape} for {to.shape}"
            for key, (saved, to) in both.items()
            if saved.shape != to.shape
        ],
        "of another dtype": [
            f"{_words(key)} {saved.dtype}" for key, saved in recast.items() if not _named(key, convert)
        ],
    }
    refused = [f"{some(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in wrong.items() if names]
    if refused:
        key = "convert" if wrong["of another dtype"] and len(refused) == 1 else "partial"
        where = f"{key}=[...] of zero.load, or in checkpoint.{key}"
        raise CheckpointError(f"{folder}: {'; '.join(refused)}; if that is meant, name them in {where}")


def _may_become(kind: str, saved: str, dtype: str) -> bool:
    """Frozen parameters and statistics are held in the dtype of compute, and moments in fp32 or bf16 (those in 8 bits
    as fp32), which may be another one than before; the rest is not."""
    if kind == FROZEN or (kind == BUFFER and "float" in dtype):
        return "float" in saved
    if kind not in (PARAMETER, BUFFER):
        return saved in ("float32", "bfloat16")
    return saved == dtype


def _named(key: Key, patterns: Sequence[str]) -> bool:
    name, kind = key
    return any(fnmatchcase(name, pattern) or fnmatchcase(f"{kind}/{name}", pattern) for pattern in patterns)


def _listed(names: Sequence[str]) -> str:
    return f": {some(names)}" if names else ""


def _words(key: Key) -> str:
    name, kind = key
    return name if kind in (PARAMETER, FROZEN) else f"{kind}/{name}"


# -- what goes where ---------------------------------------------------------------------------------------------------


def _untouched(plan: Plan, kept: set[Key]) -> set[Key]:
    """Of what stays, the flats of which everything does: nothing is read or written there."""
    flats = [(unit.trainable, kind) for unit in plan.units for kind in (PARAMETER, *plan.optimizer.moments)]
    flats += [(unit.frozen, FROZEN) for unit in plan.units]
    held = [{(slot.name, kind) for slot in layout.slots} for layout, kind in flats]
    return {key for keys in held if keys <= kept for key in keys}


def _fill(
    state: State,
    checkpoint: Checkpoint,
    entries: Mapping[Key, Entry],
    stays: Mapping[Key, Tensor],
    buffers: Mapping[str, Tensor],
    kept: set[Key],
    progress: Progress,
) -> None:
    plan, store = state.plan, state.runtime.store
    untouched = _untouched(plan, kept)
    with Tensors(checkpoint) as files, torch.no_grad():

        def values(slot: Slot, kind: str, start: int, stop: int) -> Tensor:
            key = (slot.name, kind)
            return stays[key].view(-1)[start:stop] if key in stays else files.read(entries[key], start, stop)

        for unit in reported(state.runtime.units, "loading", progress):
            for kind in (PARAMETER, *plan.optimizer.moments, FROZEN):
                layout = unit.spec.frozen if kind == FROZEN else unit.spec.trainable
                if any((slot.name, kind) in untouched for slot in layout.slots):
                    continue
                sinks = sinks_of(plan, store, unit, "param" if kind == PARAMETER else kind, at=None)
                first, last = min(sink.start for sink in sinks), max(sink.stop for sink in sinks)
                for start in range(first, last, plan.page_numel):
                    stop = min(start + plan.page_numel, last)
                    page_K = plan.world.compute.host.zeros(stop - start, torch.float32)
                    for slot, a, b, place in layout.pieces(start, stop):
                        page_K[place : place + b - a].copy_(values(slot, kind, a, b))
                    for sink in sinks:
                        sink.take(page_K)
        for name, buffer in buffers.items():
            if (name, BUFFER) not in kept:
                buffer.copy_(files.read(entries[name, BUFFER], 0, buffer.numel()).view(buffer.shape))


def _current(state: State, kept: Set[Key]) -> dict[Key, Tensor]:
    """The values that stay, whole, on the host. Collective: a set's own order is another one in each process."""
    found = dict[Key, Tensor]()
    for kind in sorted({kind for _, kind in kept if kind != BUFFER}):
        source = {PARAMETER: "param", FROZEN: "param"}.get(kind, kind)
        found |= {(name, kind): tensor for name, tensor in full_values(state, source) if (name, kind) in kept}
    return found
