"""The settings that ranks compare before they start, as text."""

import hashlib
import platform

import torch

from zero.engine.model import described
from zero.engine.plan.plan import Plan


def settings_of(plan: Plan) -> dict[str, str]:
    """Return the settings, as text, that must be equal on all ranks before they start."""
    agreed = {
        "zero.stage": str(plan.facts.stage.level),
        "zero.bucket": str(plan.bucket),
        "zero.prefetch": str(plan.facts.prefetch),
        "zero.keep": " ".join(plan.units[index].name for index in sorted(plan.facts.kept_units)),
        "zero.activations": " ".join(plan.activations.values()),
        "zero.rows": str(plan.arrangement.rows),
        "zero.compile": described(plan.compile),
        "zero.update": plan.update,
        "zero.gather": f"{plan.facts.gather}, secondary shards: {plan.facts.keeps_secondary and plan.facts.secondary}",
        "zero.reduce": plan.facts.reduce,
        "zero.shard": plan.facts.shard,
        "batch.accumulate": str(plan.accumulate),
        "precision": str(plan.precision),
        "offload": str(plan.offload),
        **plan.optimizer.fields(),
        "kernels of Triton": str(plan.world.compute.tile_numel > 0),
        "version of torch": torch.__version__,
        "version of python": platform.python_version(),
    }
    if plan.beside.groups:
        agreed["norm_groups"] = " ".join(str(group.size) for group in plan.beside.groups)
    if "auto" in plan.offload.kinds:
        agreed["tiers of offload=auto"] = hashlib.sha256(repr(plan.placement).encode()).hexdigest()[:16]
    if plan.facts.gather_route.by_node or plan.facts.sum_route.by_node:
        agreed["ranks of a node"] = str(plan.world.local_size)
    for unit in plan.units:
        slots = repr([flat.stored.slots for flat in unit.flats]).encode()
        agreed[f"zero.units {unit.index} {unit.name}"] = hashlib.sha256(slots).hexdigest()[:16]
    return agreed


def settings_of_groups(plan: Plan) -> dict[str, str]:
    """Return the settings, as text, that must be equal on all ranks of the norm groups."""
    names = ("zero.update", "batch.accumulate", "precision")
    agreed = {name: text for name, text in settings_of(plan).items() if name in (*names, *plan.optimizer.fields())}
    return agreed | {"ranks of the world": str(plan.world.size)}
