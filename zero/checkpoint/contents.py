"""The flats of a plan's state as a checkpoint has them: the same on every rank.

Ranks share for every unit the fp32 parameters (the master, where there is one), each moment, and the frozen
parameters, whatever they keep beside. Buffers are in the file of rank 0. Stage, tiers and pages are not in it, and a
flat's gaps are left out.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from zero.checkpoint.manifest import ITEM_BYTES, Flat
from zero.core.layout import Layout
from zero.engine.plan import Plan
from zero.errors import CheckpointError

PARAMETER, FROZEN, BUFFER = "parameter", "frozen", "buffer"


def flats(plan: Plan, buffers: Mapping[str, Tensor]) -> tuple[Flat, ...]:
    """The trainable flat of each unit, the frozen flat of each, and a flat for each buffer.

    Where each node has a copy of the state, the nodes share the writing of it.
    """
    copies = plan.world.size // plan.sharers
    kinds = {PARAMETER: torch.float32} | {kind: plan.optimizer.form(kind).saved for kind in plan.optimizer.moments}
    trainable = {kind: dtype_name(dtype) for kind, dtype in kinds.items()}
    frozen = {FROZEN: dtype_name(plan.precision.compute)}
    return (
        *(Flat(trainable, unit.trainable, copies) for unit in plan.units),
        *(Flat(frozen, unit.frozen, copies) for unit in plan.units),
        *(lone(name, BUFFER, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()),
    )


def lone(name: str, kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Flat:
    """A tensor in a flat of its own, which rank 0 writes."""
    return Flat({kind: dtype_name(dtype)}, Layout.of({name: shape}, world_size=1), copies=1)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check(buffers: Mapping[str, Tensor]) -> None:
    """Raise at once the error of every save.

    Raises:
        CheckpointError: a buffer of a dtype that no file holds.
    """
    for name, buffer in buffers.items():
        if dtype_name(buffer.dtype) not in ITEM_BYTES:
            raise CheckpointError(
                f"buffer {name} is {buffer.dtype}, which a checkpoint cannot hold; register it with persistent=False "
                "if it can be computed again, or set checkpoint.every=0"
            )
