"""What an engine writes and reads: checkpoints by tag, full models, and full fp32 weights out of a checkpoint.

A checkpoint is one of this library; see docs/checkpoints.md. Beside the state it keeps what a loop has: the client
state, counts, settings of the optimizer's groups, and the scheduler. The functions of DeepSpeed's `zero_to_fp32` come
last: one process is enough for them, however many ranks have saved.
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
from zero.checkpoint.disk import naming
from zero.checkpoint.json_values import from_json, to_json
from zero.checkpoint.load import one_sided
from zero.checkpoint.save import by_rank_0, tied_names
from zero.core.suggest import some
from zero.deepspeed.metrics import EngineInfo, RunLog, make_folder
from zero.deepspeed.optimizers import check_group_count, restore, settings_of
from zero.deepspeed.schedulers import Scheduler
from zero.distributed.world import SoloWorld, World
from zero.engine.full import full_state_dict, full_values, gathered, set_full
from zero.engine.module_copy import buffers_of
from zero.engine.state import State
from zero.errors import CheckpointError, ConfigError
from zero.formats.export_checkpoint import export_checkpoint, whole

log = logging.getLogger("zero")

LATEST = "latest"
"""The file in a folder of checkpoints that names the one that was saved last."""


class LoopState(NamedTuple):
    """What a checkpoint keeps of a loop beside the state; empty where no engine has made it."""

    client_state: dict[str, Any]
    micro_steps: int = 0
    global_samples: int | None = None
    param_groups: list[dict[str, Any]] | None = None
    lr_scheduler: dict[str, Any] | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """For `checkpoint.save`."""
        return {"engine": to_json(self._asdict())}

    @classmethod
    def of(cls, found: Checkpoint) -> "LoopState":
        saved = {"client_state": {}} | from_json(found.facts.get("engine", {}))
        return cls(**{name: saved[name] for name in cls._fields if name in saved})


class LoadResult(NamedTuple):
    """Names that a state dict lacked, and names that the model has not, in torch's words."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class EngineCheckpoints(EngineInfo, ABC):
    """The part of an engine that saves and loads."""

    lr_scheduler: Scheduler | None
    micro_steps: int
    _run_log: RunLog | None

    def module_state_dict(
        self,
        destination: dict[str, Tensor] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """Every parameter in fp32 and every buffer, by all their names, in full, on every rank's CPU. Collective.

        Args:
            destination: filled and returned; None: a new dict.
            prefix: in front of every name.
            keep_vars: for old calls; the tensors are copies.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
        """
        state, without = self.state, self._frozen() if exclude_frozen_parameters else ()
        full = _with_buffers_and_ties(state, full_state_dict(state))
        values = {} if destination is None else destination
        values.update({f"{prefix}{name}": value for name, value in full.items() if name not in without})
        return values

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return `module_state_dict`, by the names of the model."""
        return self.module_state_dict(*args, **kwargs)

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadResult:
        """Set parameters and buffers by name. Collective.

        Args:
            state_dict: full values by name, the same on every rank; a tied parameter may have any of its names.
            strict: refuse names that are missing or unknown; otherwise they are left out.

        Raises:
            ConfigError: `strict`, and names are missing or unknown; nothing was changed then.
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
        """Write parameters in the dtype that the model computes in, and buffers, to one file. Collective.

        Rank 0 holds all of it for a moment; `zero-train export` writes a checkpoint as files, piece by piece.

        Args:
            save_dir: folder of the file; made if it is missing.
            save_filename: must end with `.safetensors`.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.

        Raises:
            ConfigError: no folder, or another kind of file: DeepSpeed's `pytorch_model.bin` is a pickle, and none is
                written here.
        """
        path = _root(save_dir, save_filename)
        if path.suffix != ".safetensors":
            raise ConfigError(f"save_16bit_model(save_filename={path.name!r}): it must end with .safetensors")
        full = self._consolidated_16bit_state_dict(exclude_frozen_parameters)

        def write() -> None:
            assert full is not None
            with naming(path, "writing it"):
                path.parent.mkdir(parents=True, exist_ok=True)
                save_file({name: one.clone() for name, one in full.items()}, path)

        by_rank_0(self.plan.world, write)
        return path

    save_fp16_model = save_16bit_model

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: a full model can be saved, whatever the config says."""
        return True

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """What `save_16bit_model` writes, on rank 0; None on other ranks. Collective.

        The name is private in DeepSpeed, too; Accelerate calls it all the same, at every stage and on every rank.

        Args:
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
        """
        frozen = self._frozen() if exclude_frozen_parameters else ()
        return self._whole("compute", self.plan.precision.compute, frozen)

    def state_dict_on_rank_0(
        self, exclude_frozen_parameters: bool = False, without: Collection[str] = ()
    ) -> dict[str, Tensor] | None:
        """`module_state_dict` on rank 0 alone; None on other ranks. Collective.

        Args:
            exclude_frozen_parameters: leave out parameters that do not require a gradient; they are not gathered.
            without: leave out these as well, by name.
        """
        frozen = self._frozen() if exclude_frozen_parameters else set[str]()
        return self._whole("param", torch.float32, frozen.union(without))

    def _frozen(self) -> set[str]:
        return {name for name, one in self.module.named_parameters(remove_duplicate=False) if not one.requires_grad}

    def _whole(self, kind: str, dtype: torch.dtype, left_out: Collection[str]) -> dict[str, Tensor] | None:
        state, is_first, full = self.state, self.global_rank == 0, dict[str, Tensor]()
        for name, value in full_values(state, kind, left_out):  # on every rank, because it is collective
            if is_first:
                full[name] = value.to(dtype)
        if not is_first:
            return None
        return {name: value for name, value in _with_buffers_and_ties(state, full).items() if name not in left_out}

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def save_pretrained(self, save_directory: str | PathLike[str], **kwargs: Any) -> None:
        """Write the folder of a transformers model in the dtype that it computes in. Collective; rank 0 writes.

        Args:
            save_directory: the folder.
            kwargs: for the model's own `save_pretrained`.
        """
        module, values = self.module, self.module.state_dict()
        by_rank_0(self.plan.world, lambda: module.save_pretrained(save_directory, state_dict=values, **kwargs))  # type: ignore[operator]

    def save_checkpoint(
        self,
        save_dir: str | PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Publish a checkpoint, and return its folder. Collective; see docs/checkpoints.md.

        Args:
            save_dir: the folder of checkpoints; made if it is missing.
            tag: a folder in `save_dir` to use instead.
            client_state: what `load_checkpoint` gives back: JSON values, tensors, anything that needs no pickle.
            save_latest: name it in the file `latest`, which `load_checkpoint` follows.
            exclude_frozen_parameters: for old calls; a checkpoint holds the whole model.

        Raises:
            CheckpointError: it cannot be written; on every rank.
            ConfigError: no folder.
        """
        if exclude_frozen_parameters:
            self._warn_once("save_checkpoint(exclude_frozen_parameters=True): a checkpoint holds the whole model here")
        state, root = self.state, _root(save_dir, tag)
        make_folder(self.plan.world, root)
        schedule = self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None
        groups = settings_of(self.optimizer.param_groups)
        facts = LoopState(dict(client_state or {}), self.micro_steps, self.global_samples, groups, schedule).facts
        if self._run_log is not None:
            facts["wandb"] = self._run_log.run_id
        path = checkpoint.save(state, root, facts)
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
        custom_load_fn: None = None,
    ) -> tuple[Path | None, dict[str, Any]]:
        """Go on from the checkpoint that was saved last, and log which it is. Collective.

        Without a `tag` the file `latest` in `load_dir` names the checkpoint. Without the file, or if that checkpoint is
        damaged, load the valid one with the most steps: of `load_dir`, or else of all its tags.

        Args:
            load_dir: a folder of checkpoints, or one checkpoint.
            tag: the folder in `load_dir` whose checkpoint with the most steps is loaded.
            load_module_strict: False leaves parameters that only one side has as they are, and logs them; shapes must
                agree.
            load_optimizer_states: load moments and settings of groups. Without them the number of steps is the
                checkpoint's, and Adam corrects its moments from step 1 again.
            load_lr_scheduler_states: load the scheduler's state.
            load_module_only: load neither of these, and count steps from 0.
            custom_load_fn: must be None.

        Returns:
            Its folder and the client state; (None, {}) and a warning if there is none.

        Raises:
            CheckpointError: there are checkpoints, and none is valid or of this model; or they are DeepSpeed's.
            ConfigError: no folder, or a `custom_load_fn`.
        """
        world, folder = self.state.plan.world, _root(load_dir, tag)
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...): values load by name here; change those of "
                "get_fp32_state_dict_from_zero_checkpoint, and give them to engine.load_module_state_dict"
            )
        self._abort()
        opened, notes = _open(world, load_dir, tag)
        for line in notes:
            log.warning("%s", line)
        if opened is None:
            _refuse_deepspeed_folder(world, folder)
            where = f"{folder} and its tags" if tag is None else str(folder)
            self._warn_once(f"load_checkpoint: there is no checkpoint in {where}; training goes on with what is here")
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
        """Replace the state by a checkpoint's."""
        has_trained = self._state.step > 0
        partial = () if strict else one_sided(self._state, opened)
        self._state = checkpoint.load(self._state, opened, partial=partial, moments=moments, note=self._warn_once)
        self._steps_before = 0
        if not moments:  # a new optimizer: the corrections of its moments count from the beginning
            self._steps_before = self._state.tried if counts else 0
            self._state = self._state.restored(step=0, scale=self.plan.precision.scale.start())
            if has_trained:
                _zero_moments(self._state)
        counted = saved.global_samples if counts else 0
        self.global_samples = self.global_steps * self.train_batch_size() if counted is None else counted
        if self._run_log is not None:
            self._run_log.start_from(self.global_steps, self.skipped_steps, self.global_samples)
            if moments:
                self._run_log.continue_run(opened.facts.get("wandb"))

    @property
    @abstractmethod
    def state(self) -> State:
        """The state; refused once the engine was destroyed."""

    @abstractmethod
    def _abort(self) -> None:
        """Drop the current step."""


def _zero_moments(state: State) -> None:
    for slot in (slot for unit in state.plan.units for slot in unit.trainable.slots):
        for kind in state.plan.optimizer.moments:
            set_full(state, slot.name, torch.zeros(slot.shape), kind)


# Folders


def _root(folder: str | PathLike[str], tag: str | None) -> Path:
    """The folder of a tag.

    Raises:
        ConfigError: `folder` is None or empty.
    """
    if folder is None or not str(folder):
        raise ConfigError(
            f"save_dir or load_dir is {folder!r}: not a folder. Write its path, or '.' for the current one."
        )
    return Path(folder) if tag is None else Path(folder) / str(tag)


def _write_latest(folder: Path, path: Path) -> None:
    """Name a checkpoint below `folder` in its file `latest`."""
    latest = folder / LATEST
    unfinished = latest.with_name(f".{LATEST}.{os.getpid()}")
    with naming(latest, "writing it"):
        unfinished.write_text(os.path.relpath(path, folder))
        unfinished.replace(latest)


def _open(world: World, load_dir: str | PathLike[str], tag: str | None) -> tuple[Checkpoint | None, list[str]]:
    """Open the checkpoint that `load_checkpoint` describes; and why others were rejected. Collective."""
    folder = _root(load_dir, tag)
    latest = folder / LATEST

    def named() -> str:
        with naming(latest, "reading it"):
            return latest.read_text().strip() if latest.is_file() else ""

    name = by_rank_0(world, named) if tag is None else ""
    if not name:
        return checkpoint.newest(world, folder, below=tag is None)
    try:
        return checkpoint.open_checkpoint(world, folder / name), []
    except CheckpointError as error:
        _refuse_deepspeed_folder(world, folder)
        opened, notes = checkpoint.newest(world, folder, below=True)
        if opened is None:
            raise
        return opened, [str(error), *notes]


def _refuse_deepspeed_folder(world: World, folder: Path) -> None:
    """Refuse a folder that DeepSpeed wrote: training must not begin afresh without a word. Collective.

    Raises:
        CheckpointError: it is one.
    """

    def theirs() -> list[str]:
        return [str(one) for one in sorted(folder.glob("**/*_states.pt"))[:1]] if folder.is_dir() else []

    if found := by_rank_0(world, theirs):
        raise CheckpointError(
            f"{folder} is a checkpoint of DeepSpeed's ({Path(found[0]).name}); make it universal with its "
            "ds_to_universal.py, then: zero-train import --from deepspeed UNIVERSAL, and load what that makes"
        )


# Full models: every name, those of tied parameters too, and buffers


def _load_model(state: State, values: Mapping[str, Any], *, strict: bool) -> LoadResult:
    buffers = buffers_of(state.model)
    known = {**state.plan.splitting.aliases(), **_buffer_names(state.model, buffers)}
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
    return LoadResult(missing, unexpected)


def _buffer_names(model: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Every name of a buffer by its first one: a module at several places has several."""
    everywhere = dict(model.named_buffers(remove_duplicate=False))
    return {
        first: (first, *(n for n, b in everywhere.items() if b is one and n != first)) for first, one in buffers.items()
    }


def _with_buffers_and_ties(state: State, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and buffers under every name."""
    found = {**parameters, **{name: one.cpu() for name, one in buffers_of(state.model).items()}}
    ties = tied_names(state.plan.model)
    return found | {name: found[first] for name, first in ties.items() if first in found}


# DeepSpeed's zero_to_fp32


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Parameters in fp32 and buffers of a checkpoint, under every name of the model, on the CPU.

    Args:
        checkpoint_dir: the folder that `engine.save_checkpoint` was given.
        tag: the folder in it to look into; None: the checkpoint that its file `latest` names.
        exclude_frozen_parameters: leave out parameters that were not trained.
        lazy_mode: for old calls, which call `.contiguous()` on every value; a tensor has that, too.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    return whole(_newest(checkpoint_dir, tag), frozen=not exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | PathLike[str], tag: str | None = None
) -> nn.Module:
    """Set a model to the values of a checkpoint, and return it.

    Args:
        model: on any device; values that the checkpoint lacks stay as they are.
        checkpoint_dir, tag: as for `get_fp32_state_dict_from_zero_checkpoint`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    values: Mapping[str, Any] = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model.load_state_dict(values, strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | PathLike[str],
    output_dir: str | PathLike[str],
    max_shard_size: str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights of a checkpoint: `pytorch_model.bin` in a folder, or the folder as safetensors.

    Args:
        checkpoint_dir, tag: as for `get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: the folder to write.
        max_shard_size: must be "5GB" or None; `zero-train export --shard-size` writes other sizes.
        safe_serialization: write safetensors.
        exclude_frozen_parameters: must be False.

    Raises:
        CheckpointError: there is none, or it is damaged.
        ConfigError: another size, or frozen parameters left out; or what is to be written exists.
    """
    if exclude_frozen_parameters or max_shard_size not in ("5GB", None):
        raise ConfigError(
            "convert_zero_checkpoint_to_fp32_state_dict: for max_shard_size= see zero-train export --shard-size; "
            "exclude_frozen_parameters= is an argument of get_fp32_state_dict_from_zero_checkpoint alone"
        )
    found, folder = _newest(checkpoint_dir, tag), Path(output_dir)
    if safe_serialization:
        export_checkpoint(found, "hf", folder)
        return
    folder.mkdir(parents=True, exist_ok=True)
    export_checkpoint(found, "torch", folder / "pytorch_model.bin")


def _newest(folder: str | PathLike[str], tag: str | None) -> Checkpoint:
    root = _root(folder, tag)
    opened, _ = _open(SoloWorld(), folder, tag)
    if opened is None:
        raise CheckpointError(
            f"{root}: there is no checkpoint; give the folder that engine.save_checkpoint was given; one of "
            "DeepSpeed's is read by its own zero_to_fp32, or comes here by zero-train import --from deepspeed"
        )
    return opened
