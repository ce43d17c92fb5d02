"""List the flat tensors of a plan's state that a checkpoint holds; the list is equal on every rank.

The fp32 parameters of each unit (the master copy, if there is one), each of their moments, and the frozen parameters
are divided among the ranks. Buffers are in the file of rank 0. The list does not depend on stage, tiers and
page size. The alignment gaps between the tensors of a flat are not saved.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zero.checkpoint.format.manifest import ITEM_BYTES, SavedFlat, frozen_kinds
from zero.core.layout import Layout
from zero.engine.model import Flat, UnitSpec
from zero.engine.plan import Plan
from zero.errors import CheckpointError
from zero.store import PageKind

PARAMETER, FROZEN, BUFFER = "parameter", "frozen", "buffer"


def weight_kinds() -> frozenset[str]:
    """Return the kinds of parameters' values. Frozen parameters in a packed format have the format's name as kind."""
    return frozen_kinds() | {PARAMETER}


def flats(plan: Plan, buffers: Mapping[str, Tensor]) -> tuple[SavedFlat, ...]:
    """Return the trainable flat of each unit, then the frozen flats, the packed flats, and one flat for each buffer.

    If each node has a copy of the state, each node writes an equal part of it.
    """
    copies = plan.world.size // plan.facts.sharers

    def trainable(unit: UnitSpec) -> dict[str, str]:
        kinds = {PARAMETER: torch.float32} | {kind: plan.optimizer.form(kind).saved for kind in unit.moments}
        return {kind: dtype_name(dtype) for kind, dtype in kinds.items()}

    return (
        *(SavedFlat(trainable(unit), unit.trainable, copies) for unit in plan.units),
        *(
            SavedFlat({saved_kind(flat): dtype_name(flat.dtype(plan.precision.compute))}, flat.stored, copies)
            for flats in zip(*(unit.flats[1:] for unit in plan.units), strict=True)
            for flat in flats
        ),
        *(lone(name, BUFFER, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()),
    )


def saved_kind(flat: Flat) -> str:
    """Return the kind of a unit's flat in checkpoints."""
    plain = PARAMETER if flat.kind == PageKind.PARAM else FROZEN
    return plain if flat.form is None else flat.form.name


def lone(name: str, kind: str, dtype: torch.dtype, shape: tuple[int, ...]) -> SavedFlat:
    """Return a flat that holds a single tensor and is written by rank 0."""
    return SavedFlat({kind: dtype_name(dtype)}, Layout.of({name: shape}, world_size=1), copies=1)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_sizes(buffers: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a checkpoint cannot store the dtype of a buffer, because every save would fail."""
    for name, buffer in buffers.items():
        if dtype_name(buffer.dtype) not in ITEM_BYTES:
            raise CheckpointError(
                f"buffer {name}: a checkpoint cannot hold {buffer.dtype}. Register it with persistent=False if the "
                "model can compute it again, or set checkpoint.every=0."
            )


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return alias -> first name of the tensors that have several names in the model's state dict.

    A checkpoint holds such a tensor once, under its first name.
    """
    tensors = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: first[id(tensor)] for name, tensor in tensors.items() if first[id(tensor)] != name}
