"""Match the tensors of a model with those of a checkpoint: names, shapes and dtypes, before a value is written.

Model and checkpoint must have the same names, except for tensors in `partial`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from zero.checkpoint.contents import BUFFER, PARAMETER, flats, weight_kinds
from zero.checkpoint.format.manifest import Entry, entries, frozen_kinds
from zero.checkpoint.tensors import Checkpoint, shape_of, weights_of
from zero.core.suggest import some
from zero.engine.model import buffers_of
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.errors import CheckpointError

TensorKey = tuple[str, str]
"""(name, kind) of a tensor."""


class Match(NamedTuple):
    """The tensors of a checkpoint for a model: an entry for each loaded tensor, and the keys of the kept tensors.

    `entries` also has tensors that only the checkpoint has and that `partial` names.
    """

    entries: Mapping[TensorKey, Entry]
    kept: frozenset[TensorKey]


def match(
    checkpoint: Checkpoint,
    plan: Plan,
    buffers: Mapping[str, Tensor],
    *,
    partial: Sequence[str],
    convert: Sequence[str],
    moments: bool,
    weights: str,
    note: Callable[[str], None],
) -> Match:
    """Choose the entry of each tensor of a plan's state; the arguments after `buffers` are those of `load`.

    Raises:
        CheckpointError: names, shapes or dtypes do not match, a pattern of `partial` matches nothing, or the checkpoint
            has no such `weights`.
    """
    wanted = _tensors(plan, buffers)
    saved = _entries(checkpoint, wanted)
    begun = _begun(plan, wanted, saved) if moments else {}
    if begun:
        note(f"{checkpoint.folder} has no {', '.join(plan.optimizer.copies)}, which starts as a copy of the parameters")
    saved |= begun
    for name, entry in weights_of(checkpoint, weights).items():
        saved |= {key: entry for kind in weight_kinds() if (key := (name, kind)) in saved}

    def stays(key: TensorKey) -> bool:
        return _named(key, partial) or not (moments or key[1] in {*weight_kinds(), BUFFER})

    kept = frozenset(key for key in wanted if stays(key))
    _check_partial(checkpoint.folder, partial, wanted, saved, note)
    loaded = {key: entry for key, entry in saved.items() if not stays(key)}
    _check_match(checkpoint, loaded, wanted, kept, convert, plan.facts.splitting.shapes())
    return Match(saved, kept)


def _tensors(plan: Plan, buffers: Mapping[str, Tensor]) -> dict[TensorKey, Entry]:
    """Return an entry for every tensor of a plan's state, empty tensors included."""
    return {(entry.name, entry.kind): entry for entry in entries(flats(plan, buffers))}


def _entries(checkpoint: Checkpoint, wanted: Iterable[TensorKey]) -> dict[TensorKey, Entry]:
    """Return the entries of a checkpoint by (name, kind).

    A parameter that is trained, frozen or packed in the model and not in the checkpoint gets the model's kind.
    """
    saved = {(entry.name, entry.kind): entry for entry in checkpoint.manifest.entries}
    for name, kind in wanted:
        others = [(name, other) for other in weight_kinds() if (name, other) in saved] if kind in weight_kinds() else []
        if (name, kind) not in saved and others:
            saved[name, kind] = saved.pop(others[0])
    return saved


def one_sided(state: State, checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the tensors that only the model or only the checkpoint has, as patterns for the argument `partial`."""
    wanted = _tensors(state.plan, buffers_of(state.model)).keys()
    return tuple(sorted(escape(f"{kind}/{name}") for name, kind in wanted ^ _entries(checkpoint, wanted).keys()))


def _begun(plan: Plan, wanted: Iterable[TensorKey], saved: Mapping[TensorKey, Entry]) -> dict[TensorKey, Entry]:
    """Map each moment that begins as a copy of its parameter and is not in the checkpoint to the parameter's entry."""
    lacking = [key for key in wanted if key[1] in plan.optimizer.copies and key not in saved]
    return {key: saved[key[0], PARAMETER] for key in lacking if (key[0], PARAMETER) in saved}


def _check_partial(
    folder: Path,
    partial: Sequence[str],
    wanted: Mapping[TensorKey, Entry],
    saved: Mapping[TensorKey, Entry],
    note: Callable[[str], None],
) -> None:
    for pattern in partial:
        if not any(_named(key, (pattern,)) for key in (*wanted, *saved)):
            raise CheckpointError(
                f"partial (checkpoint.partial): {pattern} matches no tensor of the model or of {folder}"
            )
    if partial:
        names = [_words(key) for key in wanted if _named(key, partial)]
        ends = f": {some(names)}" if names else ""
        note(f"checkpoint.partial: {len(names)} of {len(wanted)} tensors keep the values they have{ends}")
    if unused := [_words(key) for key in saved if key not in wanted and _named(key, partial)]:
        note(f"checkpoint.partial: {len(unused)} tensors of the checkpoint are not loaded: {some(unused)}")


def _check_match(
    checkpoint: Checkpoint,
    saved: Mapping[TensorKey, Entry],
    wanted: Mapping[TensorKey, Entry],
    kept: Set[TensorKey],
    convert: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    both = {key: (saved[key], wanted[key]) for key in wanted if key in saved}
    wrong = {
        "missing": [_words(key) for key in wanted if key not in saved and key not in kept],
        "not in the model": [_words(key) for key in saved if key not in wanted],
        "of another shape than in the model": [
            f"{_words(key)} {there} for {here}"
            for key, (a, b) in both.items()
            if (there := shape_of(checkpoint, a)) != (here := shapes.get(b.name, b.shape))
        ],
        "of another dtype than in the model": [
            f"{_words(key)} {a.dtype}"
            for key, (a, b) in both.items()
            if not _may_become(key[1], a.dtype, b.dtype) and not _named(key, convert)
        ],
    }
    lines = [f"{some(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in wrong.items() if names]
    if lines:
        *others, dtypes = wrong.values()
        keys = [key for key, names in (("partial", any(others)), ("convert", dtypes)) if names]
        places = [f"{key}=[...] of zero.load, or in checkpoint.{key}" for key in keys]
        where = ", and those of another dtype in ".join(places)
        raise CheckpointError(f"{checkpoint.folder}: {'; '.join(lines)}. If you expect that, name them in {where}.")


def _may_become(kind: str, saved: str, dtype: str) -> bool:
    """Return whether a tensor saved as `saved` may be loaded as `dtype` without `convert`.

    Frozen parameters accept every floating-point dtype and codes, floating-point buffers every floating-point dtype,
    and moments fp32 and bf16.
    """
    if kind in frozen_kinds():
        return "float" in saved or saved == "uint8"
    if kind == BUFFER and "float" in dtype:
        return "float" in saved
    if kind not in (PARAMETER, BUFFER):
        return saved in ("float32", "bfloat16")  # 8-bit moments are saved as fp32
    return saved == dtype


def _named(key: TensorKey, patterns: Sequence[str]) -> bool:
    name, kind = key
    return any(fnmatchcase(name, pattern) or fnmatchcase(f"{kind}/{name}", pattern) for pattern in patterns)


def _words(key: TensorKey) -> str:
    name, kind = key
    return name if kind in weight_kinds() else f"{kind}/{name}"
