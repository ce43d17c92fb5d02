"""A whole model out of an engine's state: every name, tied ones too, and buffers; and moments that begin anew.

Everything here is collective.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from zero.checkpoint.disk import naming
from zero.checkpoint.save import tied_names
from zero.checkpoint.save import told as told_by_all
from zero.copied import buffers_of
from zero.errors import ConfigError
from zero.full import full_state_dict, full_values, set_full
from zero.state import State


def whole_model(state: State) -> dict[str, Tensor]:
    """Every parameter in fp32 and every buffer, on every rank."""
    return _with_the_rest(state, full_state_dict(state))


def save_16bit(state: State, path: Path) -> None:
    """The parameters in the dtype that the model computes in, and the buffers, in one file that rank 0 writes.

    Raises:
        ConfigError: another kind of file: DeepSpeed's `pytorch_model.bin` is a pickle, and none is written here.
    """
    if path.suffix != ".safetensors":
        raise ConfigError(f"save_16bit_model(save_filename={path.name!r}): it must end with .safetensors")
    dtype, writes, whole = state.plan.precision.compute, state.plan.world.rank == 0, dict[str, Tensor]()
    for name, value in full_values(state, "compute"):  # on every rank, because it is collective
        if writes:
            whole[name] = value.to(dtype)

    def write() -> dict[str, Any]:
        if writes:
            with naming(path, "writing it"):
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file({name: one.clone() for name, one in _with_the_rest(state, whole).items()}, path)
        return {}

    told_by_all(state.plan.world, write)


def forget_moments(state: State) -> None:
    """Zeros, as before the first update."""
    transform = state.plan.optimizer
    for slot in (slot for unit in state.plan.units for slot in unit.trainable.slots):
        for kind in (kind for kind in transform.moments if kind not in transform.copies):
            set_full(state, slot.name, torch.zeros(slot.shape), kind)


def _with_the_rest(state: State, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With buffers, and under every name that a tied parameter has."""
    found = {**parameters, **{name: one.cpu() for name, one in buffers_of(state.model).items()}}
    ties = tied_names(state.plan.model)
    return found | {name: found[first] for name, first in ties.items() if first in found}
