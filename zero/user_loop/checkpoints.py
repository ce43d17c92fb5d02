"""The part of an engine that saves and loads checkpoints, by tag.

A checkpoint holds the sharded training state, and of the script's loop: the client state, counts of steps and samples,
settings of the optimizer's groups, and the state of the scheduler.
"""

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero import checkpoint
from zero.checkpoint import Checkpoint
from zero.checkpoint.agreement import by_rank_0
from zero.checkpoint.files.publish import sweep_beside
from zero.checkpoint.format.json_values import from_json, to_json
from zero.checkpoint.match import one_sided
from zero.distributed.world import World
from zero.engine.state import State
from zero.engine.whole import FlatWriter
from zero.errors import CheckpointError
from zero.platform.files import appearing, naming
from zero.platform.modes import unobserved
from zero.user_loop.full_models import EngineModels, folder_of
from zero.user_loop.optimizers import Scheduler, check_group_count, optimizer_settings, restore
from zero.user_loop.run_log import make_folder

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


class EngineCheckpoints(EngineModels, ABC):
    """The part of an engine that saves and loads checkpoints."""

    lr_scheduler: Scheduler | None
    micro_steps: int

    @unobserved()
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
            tag: a folder in `save_dir` to save the checkpoint in instead; replaces the checkpoint in that folder.
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

    @unobserved()
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
        self.abandon()
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
        if groups is not None:  # checked before anything is changed
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
        self.follow(state)
        counted = saved.global_samples if counts else 0
        self.global_samples = self.global_steps * self.train_batch_size() if counted is None else counted
        if self._run_log is not None:
            run_id = opened.facts.get("wandb") if moments else None
            counts_now = self.global_steps, self.skipped_steps, self.global_samples
            self._run_log.start_from(*counts_now, continues=moments, run_id=run_id)

    @abstractmethod
    def abandon(self) -> None:
        """Discard the current step and its gradients."""


def _zero_moments(state: State) -> None:
    for unit in state.runtime.units:
        for moment in unit.spec.moments:
            writer = FlatWriter(state.plan, state.runtime.store, unit, moment)
            writer.write_all(lambda slot, start, stop: torch.zeros(stop - start))


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
