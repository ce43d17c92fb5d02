"""The policies of activations, each a record; a new one needs a line in the table.

The table is read before torch is imported, as all settings are. `zero.engine.plan.settings.activations_of` chooses that
of each site, and for `auto` `zero.trainer.planning.resolve_activations`.
"""

from typing import Literal

from zero.core.activations.policy import ActivationPolicy
from zero.core.activations.selective import SELECTIVE

KEEP = ActivationPolicy("keep")
REMAT = ActivationPolicy(
    "remat",
    "computed again in backward",
    "keeps one activation per unit and computes a third more",
    recomputes=True,
)
OFFLOAD = ActivationPolicy("offload", "kept in host memory", "moves those of 1 MiB and more", offloads=True)

ACTIVATIONS: dict[str, ActivationPolicy] = {policy.name: policy for policy in (KEEP, SELECTIVE, REMAT, OFFLOAD)}
"""The policies by their names: the values of `zero.activations`."""

Activations = Literal["keep", "selective", "remat", "offload"]
"""The names of the table, for type checkers."""


def policy_texts() -> str:
    """Return the names with their texts. Of the policies that recompute, those that keep some results come last."""
    ordered = sorted(ACTIVATIONS.values(), key=lambda policy: (policy.offloads, policy.keeps is not None))
    return ", ".join(f"{policy.name} ({policy.text})" if policy.text else policy.name for policy in ordered)


def policy_trades() -> str:
    """Return the names with the costs and benefits of the policies."""
    return "; ".join(f"{policy.name} {policy.trades}" for policy in ACTIVATIONS.values() if policy.trades)


__all__ = [
    "ACTIVATIONS", "KEEP", "OFFLOAD", "REMAT", "SELECTIVE", "ActivationPolicy", "Activations", "policy_texts",
    "policy_trades",
]  # fmt: skip
