"""The part of an engine that saves and loads: checkpoints by tag, and full models.

A checkpoint holds the sharded training state, and of the script's loop: the client state, counts of steps and samples,
settings of the optimizer's groups, and the state of the scheduler.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zero import checkpoint
from zero.checkpoint import Checkpoint
from zero.checkpoint.agreement import by_rank_0
from zero.checkpoint.contents import tied_names
from zero.checkpoint.files.publish import sweep_beside
from zero.checkpoint.format.json_values import from_json, to_json
from zero.checkpoint.match import one_sided
from zero.core.suggest import some
from zero.deepspeed.metrics import EngineInfo, make_folder
from zero.deepspeed.optimizers import check_group_count, optimizer_settings, restore
from zero.deepspeed.runtime.lr_schedules import Scheduler
from zero.deepspeed.zero import full_on_this_rank
from zero.distributed.world import World
from zero.engine.model import buffers_of
from zero.engine.state import State
from zero.engine.whole import FlatWriter, full_state_dict, full_values, gathered
from zero.errors import CheckpointError, ConfigError
from zero.platform.files import appearing, naming
from zero.platform.modes import unobserved

log = logging.getLogger("zero")

LATEST = "latest"
"""The file in a folder of checkpoints that names the newest one."""


class LoopState(NamedTuple):
    """The state of the script's loop in a checkpoint; empty if the checkpoint was not saved by an engine."""

    client_state: dict[str, Any]
    micro_steps: int = 0
    global_samples: int | None = None
    param_groups: list[dict[str, Any]] | None = None
    lr_scheduler: dict[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """The state as JSON values, for the argument `facts` of `checkpoint.save`."""
        return {"engine": to_json(self._asdict())}

    @classmethod
    def of(cls, opened: Checkpoint) -> "LoopState":
        saved = {"client_state": {}} | from_json(opened.facts.get("engine", {}))
        return cls(**{name: saved[name] for name in cls._fields if name in saved})


class LoadResult(NamedTuple):
    """The result of loading a model, with the same fields as that of torch's `load_state_dict`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class EngineCheckpoints(EngineInfo, ABC):
    """The part of an engine that saves and loads checkpoints and full models."""

    lr_scheduler: Scheduler | None
    micro_steps: int

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
        return _load_model(self.state, state_dict, strict=strict)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadResult:  # type: ignore[override]
        """Call `load_module_state_dict`."""
        return self.load_module_state_dict(state_dict, strict)

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

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Save a checkpoint, and return its folder. Collective.

        Args:
            save_dir: the folder of checkpoints, created if missing.
            tag: a folder in `save_dir` to save the checkpoint in instead; it replaces the checkpoint there.
            client_state: values for `load_checkpoint` to return: JSON, tensors, anything that needs no pickle.
            save_latest: name the checkpoint in the file `latest`, which `load_checkpoint` reads.
            exclude_frozen_parameters: ignored, because a checkpoint always holds the whole model.

        Raises:
            CheckpointError: the checkpoint cannot be written; raised on every rank.
            ConfigError: `save_dir` is None or empty.
        """
        state, root = self.state, folder_of(save_dir, tag)
        make_folder(self.plan.world, root)
        if tag is not None:
            by_rank_0(self.plan.world, lambda: sweep_beside(root, self.plan.world))
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        groups = optimizer_settings(self.optimizer.param_groups)
        facts = LoopState(dict(client_state or {}), self.micro_steps, self.global_samples, groups, schedule).facts
        if self._run_log is not None:
            facts["wandb"] = self._run_log.run_id
        path = checkpoint.save(state, root, facts, alone=tag is not None)
        if save_latest:
            by_rank_0(self.plan.world, lambda: _write_latest(Path(save_dir), path))
        if self._run_log is not None:
            self._run_log.log_checkpoint(path)
        return path

    def load_checkpoint(
        self,
        load_dir: str | PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Load the newest checkpoint, and log its folder. Collective.

        Without a `tag`, the file `latest` in `load_dir` names the checkpoint. Without that file, or if that checkpoint
        is damaged, the valid checkpoint in `load_dir` and its tags that was saved last is loaded.

        Args:
            load_dir: a folder of checkpoints, or one checkpoint.
            tag: the folder in `load_dir` whose checkpoint is loaded.
            load_module_strict: False keeps parameters that the checkpoint lacks, and logs names that only one side has.
            load_optimizer_states: load moments and settings of groups. Without them the number of steps is the
                checkpoint's, and Adam corrects its moments from step 1 again.
            load_lr_scheduler_states: load the scheduler's state.
            load_module_only: load only the model's values, and count steps from 0.

        Returns:
            The checkpoint's folder and the client state; (None, {}) if there is no checkpoint, with a logged warning.

        Raises:
            CheckpointError: there are checkpoints, but none is valid or of this model, or DeepSpeed wrote them; or
                without a `tag` and the file `latest`, they are of runs that did not continue from one another.
            ConfigError: `load_dir` is None or empty.
        """
        world, folder = self.state.plan.world, folder_of(load_dir, tag)
        self._abort()
        opened, notes = open_saved(world, load_dir, tag)
        for line in notes:
            log.warning("%s", line)
        if opened is None:
            _refuse_deepspeed_folder(world, folder)
            where = f"{folder} and its tags" if tag is None else str(folder)
            self._warn_once(f"load_checkpoint: no checkpoint in {where}. Training continues with the current values.")
            return None, {}
        moments, saved = load_optimizer_states and not load_module_only, LoopState.of(opened)
        groups = saved.param_groups if moments else None
        if groups is not None:  # before anything is changed
            check_group_count(self.optimizer.param_groups, groups)
        self._load_state(opened, saved, moments=moments, counts=not load_module_only, strict=load_module_strict)
        self.micro_steps = saved.micro_steps
        if groups is not None:
            restore(self.optimizer.param_groups, groups)
        if self.lr_scheduler is not None and saved.lr_scheduler and load_lr_scheduler_states and not load_module_only:
            self.lr_scheduler.load_state_dict(saved.lr_scheduler)
        if world.rank == 0:
            log.warning("load_checkpoint: loaded %s, of step %d", opened.folder, opened.step)
        return opened.folder, saved.client_state

    def _load_state(self, opened: Checkpoint, saved: LoopState, *, moments: bool, counts: bool, strict: bool) -> None:
        has_trained = self._state.step > 0
        partial = () if strict else one_sided(self._state, opened)
        state = checkpoint.load(self._state, opened, partial=partial, moments=moments, note=self._warn_once)
        self._steps_before = 0
        if not moments:  # as with a new optimizer, Adam's bias correction begins at step 1 again
            self._steps_before = state.tried if counts else 0
            state = state.restored(step=0, scale=self.plan.precision.scale.start())
            state.runtime.updater.resume({})
            if has_trained:
                _zero_moments(state)
        self._keep(state)
        counted = saved.global_samples if counts else 0
        self.global_samples = self.global_steps * self.train_batch_size() if counted is None else counted
        if self._run_log is not None:
            run_id = opened.facts.get("wandb") if moments else None
            counts_now = self.global_steps, self.skipped_steps, self.global_samples
            self._run_log.start_from(*counts_now, continues=moments, run_id=run_id)

    @abstractmethod
    def _abort(self) -> None:
        """Discard the current step and its gradients."""


def _zero_moments(state: State) -> None:
    for unit in state.runtime.units:
        for moment in unit.spec.moments:
            writer = FlatWriter(state.plan, state.runtime.store, unit, moment)
            writer.write_all(lambda slot, start, stop: torch.zeros(stop - start))


# Folders


def folder_of(folder: str | PathLike[str], tag: str | None) -> Path:
    """Return the folder of `tag` in `folder`; `folder` itself if `tag` is None.

    Raises:
        ConfigError: `folder` is None or empty.
    """
    if folder is None or not str(folder):
        raise ConfigError(f"save_dir or load_dir is {folder!r}. Pass a path, or '.' for the current folder.")
    return Path(folder) if tag is None else Path(folder) / str(tag)


def _write_latest(folder: Path, path: Path) -> None:
    latest = folder / LATEST
    with naming(latest, "writing it"), appearing(latest, replaces=True) as unfinished:
        unfinished.write_text(os.path.relpath(path, folder))


def open_saved(world: World, load_dir: str | PathLike[str], tag: str | None) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that `load_checkpoint` loads, or None, and why others were rejected. Collective."""
    folder = folder_of(load_dir, tag)
    latest = folder / LATEST

    def named() -> str:
        with naming(latest, "reading it"):
            return latest.read_text().strip() if latest.is_file() else ""

    name = by_rank_0(world, named) if tag is None else ""
    if not name:
        return checkpoint.newest(world, folder, below=tag is None, mixed=tag is not None)
    try:
        return checkpoint.open_checkpoint(world, folder / name), []
    except CheckpointError as error:
        _refuse_deepspeed_folder(world, folder)
        opened, notes = checkpoint.newest(world, folder, below=True)
        if opened is None:
            raise
        return opened, [str(error), *notes]


def _refuse_deepspeed_folder(world: World, folder: Path) -> None:
    """Raise CheckpointError if DeepSpeed wrote the folder, because training must not restart silently. Collective."""

    def find() -> str | None:
        return next((path.name for path in sorted(folder.glob("**/*_states.pt"))), None)

    if name := by_rank_0(world, find):
        raise CheckpointError(
            f"{folder} is a checkpoint of DeepSpeed's ({name}). Make it universal with its ds_to_universal.py, then "
            "run zero-train import --from deepspeed UNIVERSAL."
        )


# Full models: all parameters under all their names, and buffers


def _load_model(state: State, values: Mapping[str, Any], *, strict: bool) -> LoadResult:
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
    codes = [(unit.expanded,) for unit in units]  # first, because another value raises before anything is written
    for layouts in (*codes, *((unit.trainable, unit.frozen) for unit in units)):
        slots = [slot.name for layout in layouts for slot in layout.slots]
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
