"""An engine as it is written and read: whole models and checkpoints, in DeepSpeed's words."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero import checkpoint
from zero.checkpoint.load import one_sided
from zero.checkpoint.save import by_rank_0
from zero.deepspeed.answers import EngineInfo
from zero.deepspeed.checkpoints import Remembered, make_root, refuse_deepspeeds, root_of
from zero.deepspeed.optimizers import restore, same_groups, settings_of
from zero.deepspeed.schedulers import Scheduler
from zero.deepspeed.watched import Watched
from zero.deepspeed.whole import Loaded, load_model, save_16bit, whole_16bit, whole_model
from zero.engine.full import set_full
from zero.engine.state import State

log = logging.getLogger("zero")


class EngineCheckpoints(EngineInfo, ABC):
    """An engine, as far as it goes to disk and comes from there."""

    lr_scheduler: Scheduler | None
    micro_steps: int
    _steps_before: int
    _watched: Watched | None

    def module_state_dict(self) -> dict[str, Tensor]:
        """Every parameter in fp32 and every buffer, whole, on every rank. Collective."""
        return whole_model(self._living())

    state_dict = module_state_dict

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Loaded:
        """Values by name in place of the model's, the same ones on every rank. Collective.

        Raises:
            ConfigError: `strict`, and names are missing or unknown; nothing was changed then.
        """
        state = self._living()
        return load_model(state, state_dict, strict=strict)

    def save_16bit_model(self, save_dir: str | PathLike[str], save_filename: str = "model.safetensors") -> Path:
        """Parameters in the dtype that the model computes in, and buffers, in one file. Collective.

        Rank 0 holds all of it for a moment; `scripts/export` writes a checkpoint as files, piece by piece.

        Raises:
            ConfigError: another kind of file: DeepSpeed's `pytorch_model.bin` is a pickle, and none is written here.
        """
        path = Path(save_dir) / save_filename
        save_16bit(self._living(), path)
        return path

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """A whole model may be asked for, whatever the config says."""
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """What `save_16bit_model` writes, on rank 0; None elsewhere. Collective.

        The name is DeepSpeed's own, and private; Accelerate asks for it all the same, at every stage and rank.

        Args:
            exclude_frozen_parameters: leave out those that nothing trains.
        """
        state = self._living()
        whole = whole_16bit(state)
        if whole is None or not exclude_frozen_parameters:
            return whole
        frozen = {name for name, one in self.module.named_parameters(remove_duplicate=False) if not one.requires_grad}
        return {name: value for name, value in whole.items() if name not in frozen}

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_pretrained(self, save_directory: str | PathLike[str], **how: Any) -> None:
        """The folder of a model of transformers, in the dtype of compute; rank 0 writes it. Collective."""
        module, values = self.module, self.module.state_dict()
        by_rank_0(self.plan.world, lambda: module.save_pretrained(save_directory, state_dict=values, **how))  # type: ignore[operator]

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Publish a checkpoint in `save_dir`, or in the folder `tag` of it. Collective; see docs/checkpoints.md.

        Args:
            client_state: what `load_checkpoint` gives back: JSON values, tensors, whatever needs no pickle.
            save_latest: for old calls; the newest is found by its number of steps.
            exclude_frozen_parameters: for old calls; a checkpoint is whole.
        """
        if exclude_frozen_parameters:
            self._say_once("save_checkpoint(exclude_frozen_parameters=True): a checkpoint holds all of the model here")
        state, root = self._living(), root_of(save_dir, tag)
        make_root(self.plan.world, root)
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        groups = settings_of(self.optimizer.param_groups)
        facts = Remembered(dict(client_state or {}), self.micro_steps, groups, schedule).facts
        if self._watched is not None:
            facts["wandb"] = self._watched.run_id
        path = checkpoint.save(state, root, facts)
        if self._watched is not None:
            self._watched.saved(path)
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
        """Go on from the newest valid checkpoint there, or from `load_dir` itself if it is one. Collective.

        Without a tag, and with none in `load_dir` itself, the newest of all its tags is taken.

        Args:
            load_module_strict: False leaves what only one side has as it is, and says so; sizes have to agree.

        Returns:
            Its folder and the client state; (None, {}) if there is none, with one line that says so. Without the
            optimizer's states the number of steps is the checkpoint's, and its corrections begin anew.

        Raises:
            CheckpointError: there are checkpoints, and none is valid or of this model; or they are DeepSpeed's.
        """
        self._living()
        folder = root_of(load_dir, tag)
        self._abandon()
        found, notes = checkpoint.newest(self.plan.world, folder, below=tag is None)
        for line in notes:
            log.warning("%s", line)
        if found is None:
            refuse_deepspeeds(self.plan.world, folder)
            where = f"{folder} and its tags" if tag is None else str(folder)
            self._say_once(f"load_checkpoint: there is no checkpoint in {where}; training goes on with what is here")
            return None, {}
        moments, told = load_optimizer_states and not load_module_only, Remembered.of(found)
        groups = told.param_groups if moments else None
        if groups is not None:  # before anything is changed
            same_groups(self.optimizer.param_groups, groups)
        self._take(found, moments=moments, counts=not load_module_only, strict=load_module_strict)
        self.micro_steps = told.micro_steps
        if groups is not None:
            restore(self.optimizer.param_groups, groups)
        if self.lr_scheduler is not None and told.lr_scheduler and load_lr_scheduler_states and not load_module_only:
            self.lr_scheduler.load_state_dict(told.lr_scheduler)
        return found.folder, told.client_state

    # -- inside --------------------------------------------------------------------------------------------------------

    def _take(self, found: checkpoint.Checkpoint, *, moments: bool, counts: bool, strict: bool) -> None:
        """The state of a checkpoint in place of this one."""
        has_trained = self._state.step > 0
        partial = () if strict else one_sided(self._state, found)
        self._state = checkpoint.load(self._state, found, partial=partial, moments=moments, note=self._say_once)
        self._steps_before = 0
        if not moments:  # a new optimizer: corrections of its first moments count from the beginning
            self._steps_before = self._state.tried if counts else 0
            self._state = self._state.restored(step=0, scale=self.plan.precision.scale.start())
            if has_trained:
                _forget_moments(self._state)
        if self._watched is not None:
            self._watched.resumed(self.global_steps, self.skipped_steps)
            if moments:
                self._watched.goes_on(found.facts.get("wandb"))

    @abstractmethod
    def _living(self) -> State:
        """The state, unless there is none any more."""

    @abstractmethod
    def _abandon(self) -> None:
        """Forget the step under way."""

    @abstractmethod
    def _say_once(self, line: str) -> None:
        """Tell a person."""


def _forget_moments(state: State) -> None:
    """Zeros, as before the first update."""
    for slot in (slot for unit in state.plan.units for slot in unit.trainable.slots):
        for kind in state.plan.optimizer.moments:
            set_full(state, slot.name, torch.zeros(slot.shape), kind)
