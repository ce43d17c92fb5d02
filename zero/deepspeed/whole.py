"""A whole model out of an engine's state: every name, tied ones too, and buffers.

Everything here is collective.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import save_file
from torch import Tensor, nn

from zero.checkpoint.disk import naming
from zero.checkpoint.save import by_rank_0, tied_names
from zero.core.suggest import some
from zero.engine.full import full_state_dict, full_values, gathered
from zero.engine.module_copy import buffers_of
from zero.engine.state import State
from zero.errors import ConfigError


def whole_model(state: State) -> dict[str, Tensor]:
    """Every parameter in fp32 and every buffer, on every rank."""
    return _with_the_rest(state, full_state_dict(state))


def whole_16bit(state: State) -> dict[str, Tensor] | None:
    """Every parameter in the dtype that the model computes in, and every buffer, on rank 0; None elsewhere."""
    dtype, is_first, whole = state.plan.precision.compute, state.plan.world.rank == 0, dict[str, Tensor]()
    for name, value in full_values(state, "compute"):  # on every rank, because it is collective
        if is_first:
            whole[name] = value.to(dtype)
    return _with_the_rest(state, whole) if is_first else None


def save_16bit(state: State, path: Path) -> None:
    """The parameters in the dtype that the model computes in, and the buffers, in one file that rank 0 writes.

    Raises:
        ConfigError: another kind of file: DeepSpeed's `pytorch_model.bin` is a pickle, and none is written here.
    """
    if path.suffix != ".safetensors":
        raise ConfigError(f"save_16bit_model(save_filename={path.name!r}): it must end with .safetensors")
    whole = whole_16bit(state)

    def write() -> None:
        assert whole is not None
        with naming(path, "writing it"):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: one.clone() for name, one in whole.items()}, path)

    by_rank_0(state.plan.world, write)


class Loaded(NamedTuple):
    """What a state dict had and had not, in torch's words."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_model(state: State, values: Mapping[str, Any], *, strict: bool) -> Loaded:
    """Put values by name, under any name of a tied parameter, in place of parameters and buffers.

    Raises:
        ConfigError: `strict`, and names are missing or unknown; nothing was changed then.
    """
    buffers = buffers_of(state.model)
    known = {**state.plan.splitting.aliases(), **_names_of(state.model, buffers)}
    found = {name: next((one for one in names if one in values), None) for name, names in known.items()}
    missing = [name for name, key in found.items() if key is None]
    unexpected = sorted(set(values) - {one for names in known.values() for one in names})
    if strict and (missing or unexpected):
        raise ConfigError(f"load_state_dict: missing {some(missing)}; unknown {some(unexpected)}; or pass strict=False")
    for unit in state.plan.units:
        slots = [slot.name for layout in (unit.trainable, unit.frozen) for slot in layout.slots]
        wanted = {name: key for name in slots if (key := found[name]) is not None}
        if wanted:
            with gathered(state, list(wanted), modify=True) as full:
                full.update({name: values[key] for name, key in wanted.items()})
    for name, buffer in buffers.items():
        if (key := found[name]) is not None:
            buffer.copy_(values[key])
    return Loaded(missing, unexpected)


def _names_of(model: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Every name of a buffer by its first one: a module at several places has several."""
    everywhere = dict(model.named_buffers(remove_duplicate=False))
    return {
        first: (first, *(n for n, b in everywhere.items() if b is one and n != first)) for first, one in buffers.items()
    }


def _with_the_rest(state: State, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With buffers, and under every name that a tied parameter has."""
    found = {**parameters, **{name: one.cpu() for name, one in buffers_of(state.model).items()}}
    ties = tied_names(state.plan.model)
    return found | {name: found[first] for name, first in ties.items() if first in found}
