"""A whole model out of an engine's state: every name, tied ones too, and buffers.

Everything here is collective.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from zero.checkpoint.disk import naming
from zero.checkpoint.save import by_rank_0, tied_names
from zero.copied import buffers_of
from zero.errors import ConfigError
from zero.full import full_state_dict, full_values
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

    def write() -> None:
        with naming(path, "writing it"):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: one.clone() for name, one in _with_the_rest(state, whole).items()}, path)

    by_rank_0(state.plan.world, write)


def _with_the_rest(state: State, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With buffers, and under every name that a tied parameter has."""
    found = {**parameters, **{name: one.cpu() for name, one in buffers_of(state.model).items()}}
    ties = tied_names(state.plan.model)
    return found | {name: found[first] for name, first in ties.items() if first in found}
