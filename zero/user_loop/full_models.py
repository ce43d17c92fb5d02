"""The part of an engine that reads, sets and writes full models: all parameters under all their names, and buffers."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zero.checkpoint.agreement import by_rank_0
from zero.checkpoint.contents import tied_names
from zero.core.suggest import some
from zero.engine.model import ParameterPlaceholder, buffers_of
from zero.engine.state import State
from zero.engine.whole import full_state_dict, full_values, gathered
from zero.errors import ConfigError
from zero.platform.files import appearing, naming
from zero.platform.modes import unobserved
from zero.user_loop.state import EngineState


class LoadResult(NamedTuple):
    """The result of loading a model, with the same fields as that of torch's `load_state_dict`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class EngineModels(EngineState):
    """The part of an engine that reads, sets and writes full models."""

    @unobserved()
    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Return all parameters in fp32 and all buffers on every rank's CPU, tied ones under each name. Collective.

        Args:
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
        """
        values = _with_buffers_and_ties(self.state, full_state_dict(self.state))
        frozen = self._frozen(exclude_frozen_parameters)
        return {name: value for name, value in values.items() if name not in frozen}

    def state_dict(
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        exclude_frozen_parameters: bool = False,
        **_: Any,
    ) -> Any:
        """Return `module_state_dict` with torch's arguments: `prefix` before each name, added to `destination`."""
        values = {} if destination is None else destination
        full = self.module_state_dict(exclude_frozen_parameters)
        values.update({f"{prefix}{name}": value for name, value in full.items()})
        return values

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadResult:
        """Set parameters and buffers by name. Collective.

        Args:
            state_dict: full values by name, the same on every rank; a tied parameter may have any of its names.
            strict: raise if names are missing or unknown; otherwise skip them.

        Raises:
            ConfigError: `strict` is set, and names are missing or unknown. No value has changed then.
        """
        return load_model(self.state, state_dict, strict=strict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadResult:  # type: ignore[override]
        """Call `load_module_state_dict`."""
        return self.load_module_state_dict(state_dict, strict)

    @unobserved()
    def save_16bit_model(
        self,
        save_dir: str | PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Write parameters in the dtype of compute, and buffers, to one file, and return its path. Collective.

        Rank 0 holds the full model in host memory meanwhile. `zero-train export` writes a checkpoint piece by piece
        instead.

        Args:
            save_dir: folder of the file, created if missing.
            save_filename: must end with `.safetensors`.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.

        Raises:
            ConfigError: `save_dir` is None or empty, or the name is that of a pickle, such as `pytorch_model.bin`.
        """
        path = folder_of(save_dir, save_filename)
        if path.suffix != ".safetensors":
            raise ConfigError(f"save_16bit_model(save_filename={path.name!r}): it must end with .safetensors")
        full = self._consolidated_16bit_state_dict(exclude_frozen_parameters)

        def write() -> None:
            assert full is not None
            with naming(path, "writing it"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with appearing(path, replaces=True) as unfinished:
                    save_file({name: value.clone() for name, value in full.items()}, unfinished)

        by_rank_0(self.plan.world, write)
        return path

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True, because a full model can always be saved."""
        return True

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        # Accelerate calls this method under both of DeepSpeed's private names, at every stage and on every rank
        frozen = self._frozen(exclude_frozen_parameters)
        return self._whole("compute", self.plan.precision.compute, frozen)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def state_dict_on_rank_0(self, without: Collection[str] = ()) -> dict[str, Tensor] | None:
        """Return `module_state_dict` on rank 0 alone; None on other ranks. Collective.

        Args:
            without: names of parameters to leave out; they are not gathered.
        """
        return self._whole("param", torch.float32, without)

    def _frozen(self, is_excluded: bool) -> set[str]:
        parameters = self.module.named_parameters(remove_duplicate=False) if is_excluded else ()
        return {name for name, parameter in parameters if not parameter.requires_grad}

    @unobserved()
    def _whole(self, part: str, dtype: torch.dtype, left_out: Collection[str]) -> dict[str, Tensor] | None:
        state, is_first, full = self.state, self.global_rank == 0, dict[str, Tensor]()
        for name, value in full_values(state, part, left_out):  # on every rank, because it is collective
            if is_first:
                full[name] = value.to(dtype)
        if not is_first:
            return None
        return {name: value for name, value in _with_buffers_and_ties(state, full).items() if name not in left_out}

    def save_pretrained(self, save_directory: str | PathLike[str], **kwargs: Any) -> None:
        """Write a transformers model to a folder, by its own `save_pretrained` on rank 0. Collective.

        Args:
            save_directory: the folder.
            kwargs: arguments of the model's `save_pretrained`.
        """
        module, values = self.module, self.module.state_dict()

        def write() -> None:
            with full_on_this_rank(module, values):
                module.save_pretrained(save_directory, state_dict=values, **kwargs)  # type: ignore[operator]

        by_rank_0(self.plan.world, write)


def folder_of(folder: str | PathLike[str], tag: str | None) -> Path:
    """Return the folder of `tag` in `folder`; `folder` itself if `tag` is None.

    Raises:
        ConfigError: `folder` is None or empty.
    """
    if folder is None or not str(folder):
        raise ConfigError(f"save_dir or load_dir is {folder!r}. Pass a path, or '.' for the current folder.")
    return Path(folder) if tag is None else Path(folder) / str(tag)


def close_full(placeholders: Iterable[ParameterPlaceholder]) -> None:
    for placeholder in placeholders:
        placeholder.full_value, placeholder.may_be_edited = None, False


@contextmanager
def full_on_this_rank(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager in which this rank reads parameters of `module` from `values`, without the other ranks.

    Code of others that saves a model on one rank may read parameters there although it got a state dict.

    Args:
        module: a model with an engine.
        values: full values by name; other parameters are gathered when they are read.
    """
    with ExitStack() as undo:
        for name, placeholder in module.named_parameters(remove_duplicate=False):
            if isinstance(placeholder, ParameterPlaceholder) and placeholder.full_value is None and name in values:
                placeholder.full_value = values[name]
                undo.callback(close_full, [placeholder])
        yield


@unobserved()
def load_model(state: State, values: Mapping[str, Any], *, strict: bool) -> LoadResult:
    buffers = buffers_of(state.model)
    known = {**state.plan.facts.splitting.aliases(), **_buffer_names(state.model, buffers)}
    keys = {name: next((alias for alias in names if alias in values), None) for name, names in known.items()}
    missing = [name for name, key in keys.items() if key is None]
    unexpected = sorted(set(values) - {alias for names in known.values() for alias in names})
    if strict and (missing or unexpected):
        raise ConfigError(
            f"load_state_dict: missing {some(missing)}, unknown {some(unexpected)}. Pass strict=False to allow both."
        )
    units = state.plan.units
    # packed parameters first, because another value raises before anything is written
    packed = [[unit.packed] for unit in units if unit.packed]
    plain = [[flat for flat in unit.flats if flat.form is None] for unit in units]
    for flats in (*packed, *plain):
        slots = [slot.name for flat in flats for slot in flat.values.slots]
        present = {name: key for name in slots if (key := keys[name]) is not None}
        if present:
            with gathered(state, list(present), modify=True) as full:
                full.update({name: values[key] for name, key in present.items()})
    for name, buffer in buffers.items():
        if (key := keys[name]) is not None:
            buffer.copy_(values[key])
    return LoadResult(missing, unexpected)


def _buffer_names(model: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Return all names of each buffer, by its first name. A buffer of a shared module has several names."""
    everywhere = list(model.named_buffers(remove_duplicate=False))
    return {
        first: (first, *(name for name, other in everywhere if other is buffer and name != first))
        for first, buffer in buffers.items()
    }


def _with_buffers_and_ties(state: State, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    values = {**parameters, **{name: buffer.cpu() for name, buffer in buffers_of(state.model).items()}}
    ties = tied_names(state.plan.model)
    return values | {name: values[first] for name, first in ties.items() if first in values}
