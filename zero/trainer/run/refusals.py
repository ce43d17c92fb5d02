"""Differences between the settings of a run and those of the run that saved its checkpoint.

A different model or different optimizer moments raise an error that names the settings to add. Other differences that
change the result are printed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from zero.checkpoint import Checkpoint
from zero.checkpoint.contents import BUFFER, PARAMETER, weight_kinds
from zero.core import suggest
from zero.core.schema import flat_fields
from zero.engine.plan import Plan
from zero.errors import CheckpointError
from zero.trainer.config import Config, kinds

MATTERS = (
    *("seed", "steps", "batch.global", "model.", "data.", "optim.", "schedule.", "precision."),
    *("debug.overfit", "val.path"),
)
"""Settings and sections that change the result of training."""

MATTERS_TO_A_LOSS = ("seed", "data.", "precision.", "val.rows", "val.weights", "val.path")
"""Settings and sections that change the result of mode=eval."""

AS_DECLARED = {"gpt": "gpt_nano"}
"""Name of a section's class -> the option file with the defaults of that class, if the two names differ."""


def refuse_other_model(config: Config, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if the checkpoint is of a model with other settings.

    Raises:
        CheckpointError: settings of the model differ, and `checkpoint.partial` is empty. The message names them.
    """
    theirs = _saved(checkpoint.facts).get("model")
    ours = config.plain()["model"]
    if not isinstance(theirs, Mapping) or config.checkpoint.partial:
        return
    if other := _as_saved("model", ours, theirs):
        data = _saved(checkpoint.facts).get("data")
        if isinstance(data, Mapping):
            other += _as_saved("data", config.plain()["data"], data)
        raise CheckpointError(
            f"{checkpoint.folder} was saved with another model. Add {' '.join(other)}, or list in checkpoint.partial "
            "the tensors that are not loaded."
        )


def refuse_other_batch(config: Config, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if `epochs` is set and earlier steps had another batch, because `steps` would be wrong."""
    batch = _saved(checkpoint.facts).get("batch")
    there, here = batch.get("global") if isinstance(batch, Mapping) else None, config.batch.numbers()[0]
    if config.epochs is None or there in (None, here):
        return
    left = config.steps * here - checkpoint.facts.get("tokens", 0) // config.model.seq
    steps = checkpoint.step + max(0, -(-left // here))
    raise CheckpointError(
        f"epochs={config.epochs}: {checkpoint.folder} was saved with batch.global={there}, so its steps had other "
        f"rows. Set steps={steps} in place of epochs."
    )


def refuse_other_moments(config: Config, plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a parameter that trains in both has other moments in the checkpoint than in the plan.

    Raises:
        CheckpointError: moments differ, and `checkpoint.partial` is empty. The message names the settings to add.
    """
    saved = {(entry.name, entry.kind) for entry in checkpoint.manifest.entries}
    both = [
        (unit, slot.name) for unit in plan.units for slot in unit.trainable.slots if (slot.name, PARAMETER) in saved
    ]
    names, here = {name for _, name in both}, {(name, kind) for unit, name in both for kind in unit.moments}
    there = {(name, kind) for name, kind in saved if name in names and kind not in {*weight_kinds(), BUFFER}}
    lacking = {key for key in here - there if key[1] not in plan.optimizer.copies}
    beyond, ours, theirs = there - here, config.plain()["optim"], _saved(checkpoint.facts).get("optim")
    if config.checkpoint.partial or not (lacking or beyond):
        return
    problems = [f"lacks {_words(lacking, there)}, which optim={ours['name']} keeps"] * bool(lacking)
    problems += [f"has {_words(beyond, here)}, which optim={ours['name']} does not keep"] * bool(beyond)
    overrides = _as_saved("optim", ours, theirs) if isinstance(theirs, Mapping) else []
    ways = [" ".join(overrides)] * bool(overrides)
    patterns = [*_patterns(lacking, there), *_patterns(beyond, here)]
    listed = f"=[{','.join(patterns)}]" if len(patterns) <= suggest.SHOWN else " with each of these"
    ways.append(f"checkpoint.partial{listed} to load the rest")
    raise CheckpointError(f"{checkpoint.folder} {' and '.join(problems)}. Add {', or '.join(ways)}.")


def _patterns(keys: set[tuple[str, str]], others: set[tuple[str, str]]) -> list[str]:
    """Return patterns of `checkpoint.partial` that match moments, (name, kind), and none of `others`."""
    shared = {kind for _, kind in others}
    whole = {f"{kind}/*" for _, kind in keys if kind not in shared}
    return sorted(whole | {f"{kind}/{name}" for name, kind in keys if kind in shared})


def _words(keys: set[tuple[str, str]], others: set[tuple[str, str]]) -> str:
    """Return the kinds of moments, with the parameters' names if `others` has the same kind of other parameters."""
    return suggest.some([pattern.removesuffix("/*") for pattern in _patterns(keys, others)])


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about different data, and about different settings that change the result.

    Args:
        there: facts of the checkpoint that the run continues from.
        here: facts that this run saves in its checkpoints.
    """
    was, now = there.get("data"), here.get("data")
    if was is not None and was != now:
        yield f"warning: the digest of the data is {now}, and was {was} in the run that saved the checkpoint"
    theirs, ours = _saved(there), _saved(here)
    if not (theirs and ours):
        return
    mattering = MATTERS_TO_A_LOSS if ours.get("mode") == "eval" else MATTERS
    before, after = flat_fields(theirs), flat_fields(ours)
    changed = [
        f"{key.removesuffix('.name')}={suggest.shown(value)} (was {suggest.shown(before[key])})"
        for key, value in after.items()
        if key.startswith(mattering) and key != "data.cache" and key in before and before[key] != value
    ]
    if changed:
        yield f"settings that differ from those of the run that saved the checkpoint: {', '.join(changed)}"


def _saved(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    config = facts.get("config")
    return config if isinstance(config, Mapping) else {}


def _as_saved(section: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Return the settings to type so that a section is the same as in the checkpoint."""
    name, theirs = str(theirs.get("name")), flat_fields(theirs)
    if name == ours["name"]:
        chosen, expected = [], flat_fields(ours)
    else:
        known = kinds(section).get(name)
        chosen = [f"{section}={AS_DECLARED.get(name, name)}"]
        expected = {} if known is None else flat_fields(known.model_construct().model_dump(mode="json"))
    return chosen + [
        suggest.typed(f"{section}.{key}={suggest.word(theirs[key])}")
        for key in expected
        if key != "name" and key in theirs and theirs[key] != expected[key]
    ]
