"""The face of a run for a loop of the user's own: forward, backward, step, in DeepSpeed's words.

A microbatch begins with the first forward after `step()`, and ends with the next `step()`: between them may be any
number of forwards and backwards, by `engine.backward(loss)` or by `engine.scale(loss).backward()`. Every
`gradient_accumulation_steps()`-th call of `step()` updates.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from zero import checkpoint
from zero.checkpoint.disk import naming
from zero.checkpoint.save import tied_names
from zero.checkpoint.save import told as told_by_all
from zero.config import Config
from zero.copied import buffers_of
from zero.errors import ConfigError
from zero.full import full_state_dict, full_values, set_full
from zero.interop.kept import newest, root_of
from zero.interop.optimizers import Optimizer, restore, same_groups, settings_of
from zero.interop.original import Modes
from zero.interop.plain import plain, read_back
from zero.interop.schedulers import Scheduler
from zero.interop.watched import Watched
from zero.nested import replaced, tensors_in
from zero.passes import Metrics, Step
from zero.plan import Plan
from zero.state import State
from zero.store import PrefetchStore

log = logging.getLogger("zero")


class Engine:
    """A model in training. Made by `initialize`; what it does not have is looked for in the model.

    Attributes:
        module: the copy of the model that runs on gathered parameters.
        optimizer: whose `param_groups` every update reads.
        lr_scheduler: stepped with each update that was really made; None if there is none.
        metrics: what the last step did; None before the first.
        micro_steps: calls of `step()`.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        store: PrefetchStore,
        state: State,
        optimizer: Optimizer,
        *,
        given: torch.optim.Optimizer | None,
        lr_scheduler: Scheduler | None,
        modes: Modes,
        managed: bool,
        watched: Watched | None,
    ) -> None:
        self.config, self.plan, self.optimizer, self.lr_scheduler = config, plan, optimizer, lr_scheduler
        self._store, self._state, self._modes, self._managed = store, state, modes, managed
        self._given, self._watched = given, watched
        self._step: Step | None = None
        self._in_microbatch = self._scaled = self._synchronised = self._applied = False
        self._boundary: bool | None = None
        self._destroyed = False
        self.metrics: Metrics | None = None
        self.micro_steps = 0
        self._said: set[str] = set()
        self._groups = list(optimizer.param_groups)  # the dicts themselves: every update reads these
        optimizer.update, optimizer.forget = self._update, self._zero_grad
        self._stepping = False
        if given is not None:
            given.register_step_pre_hook(self._only_from_here)

    # -- the loop ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; floating-point tensors are cast to the dtype that it computes in."""
        self._living()
        self._modes.follow()
        if torch.is_grad_enabled() and self.module.training:
            self._begin_microbatch()
        elif self._step is None:
            self.state.machinery.gatherer.begin()
        args, kwargs = self._cast((args, kwargs))
        try:
            return self.module(*args, **kwargs)
        except BaseException:
            self._abandon()
            raise

    __call__ = forward

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward from the mean loss of the microbatch; returns its share of the step's loss.

        Args:
            scale_wrt_gas: False if `loss` is that share already.
        """
        count = self.plan.accumulate
        whole = loss if scale_wrt_gas else loss * count
        try:
            self._under_way("backward").backward(whole, retain_graph=retain_graph)
        except BaseException:
            self._abandon()
            raise
        self._scaled = True
        return whole.detach() / count

    def scale(self, loss: Tensor) -> Tensor:
        """What to call `backward` on by hand: it has fp16's loss scale in it."""
        under_way, self._scaled = self._under_way("scale"), True
        if loss.numel() == 1:
            under_way.count(loss)
        return under_way.scaled(loss)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End a microbatch; at the end of an accumulation update the parameters, and the learning rate after them.

        Args:
            lr_kwargs: for the scheduler's `step`, such as the metrics of ReduceLROnPlateau.

        Raises:
            ConfigError: there was no forward; inside `no_sync`; or a backward by hand without `scale` in fp16.
        """
        if not self._in_microbatch:
            raise ConfigError("engine.step(): no forward in training mode, engine.train(), since the last one")
        if self._synchronised:
            raise ConfigError("engine.step() inside engine.no_sync(): it would synchronise; leave the block first")
        ends = self.is_gradient_accumulation_boundary()
        self._in_microbatch = self._applied = False
        self.micro_steps += 1
        if not ends:
            return
        self.optimizer.step()
        if self._given is not None:  # no parameter has a gradient there: torch's schedulers look for the call
            self._stepping = True
            self._given.step()
            self._stepping = False
        if self.lr_scheduler is not None and self.was_step_applied():
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def zero_grad(self) -> None:
        """Forget the gradients that have arrived since the last update."""
        if self._step is not None:
            self._step.forget()

    def _zero_grad(self) -> None:
        """The optimizer's, a habit before every backward: what earlier microbatches have added up stays."""
        if self._step is not None and (self._step.microbatches > 1 or not self._in_microbatch):
            self._say_once("optimizer.zero_grad() does nothing while microbatches add up; engine.zero_grad() drops all")
        else:
            self.zero_grad()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Microbatches that do not end a step. Gradients are added up in any case, so nothing else changes here."""
        before, self._synchronised = self._synchronised, True
        try:
            yield
        finally:
            self._synchronised = before

    def train(self, mode: bool = True) -> "Engine":
        self._modes.set(mode)
        return self

    def eval(self) -> "Engine":
        return self.train(False)

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._living()

    @property
    def module(self) -> nn.Module:
        return self._state.model

    @property
    def device(self) -> torch.device:
        return self.plan.world.device

    @property
    def local_rank(self) -> int:
        """Number of this rank's GPU; the rank itself where there is none."""
        return self.device.index if self.device.index is not None else self.plan.world.rank

    @property
    def global_rank(self) -> int:
        return self.plan.world.rank

    @property
    def world_size(self) -> int:
        return self.plan.world.size

    @property
    def global_steps(self) -> int:
        """Steps tried, the skipped ones counted."""
        return self._state.tried

    @property
    def skipped_steps(self) -> int:
        return self._state.skipped

    def gradient_accumulation_steps(self) -> int:
        return self.plan.accumulate

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.batch.numbers()[1]

    def train_batch_size(self) -> int:
        return self.config.batch.numbers()[0]

    def is_gradient_accumulation_boundary(self) -> bool:
        """The next `step()` updates."""
        if self._boundary is not None:
            return self._boundary
        begun = 0 if self._step is None else self._step.microbatches
        return not self._managed or begun + (not self._in_microbatch) >= self.plan.accumulate

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next `step()` updates; None: count again."""
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """The last call of `step()` changed the parameters: it was the end of an accumulation, and not skipped."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """Of the last step's mean gradient, before clipping."""
        return self.metrics.grad_norm if self.metrics is not None else None

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        groups = self.optimizer.param_groups
        return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in groups]

    def zero_optimization_stage(self) -> int:
        return self.plan.stage.level

    def gradient_clipping(self) -> float:
        """The largest norm; 0 for none."""
        return self.plan.optimizer.clip or 0.0

    def fp16_enabled(self) -> bool:
        return self.plan.precision.compute == torch.float16

    def bfloat16_enabled(self) -> bool:
        return self.plan.precision.compute == torch.bfloat16

    @property
    def loss_scale(self) -> float:
        return self._state.scale.scale

    def module_state_dict(self) -> dict[str, Tensor]:
        """Every parameter in fp32 and every buffer, whole, on every rank. Collective."""
        return self._whole(full_state_dict(self._living()))

    state_dict = module_state_dict

    def save_16bit_model(self, save_dir: str | PathLike[str], save_filename: str = "model.safetensors") -> Path:
        """Parameters in the dtype that the model computes in, and buffers, in one file. Collective.

        Rank 0 holds all of it for a moment; `scripts/export` writes a checkpoint as files, piece by piece.

        Raises:
            ConfigError: another kind of file: DeepSpeed's `pytorch_model.bin` is a pickle, and none is written here.
        """
        path, dtype, whole = Path(save_dir) / save_filename, self.plan.precision.compute, {}
        if path.suffix != ".safetensors":
            raise ConfigError(f"save_16bit_model(save_filename={save_filename!r}): it must end with .safetensors")
        for name, value in full_values(self._living(), "compute"):  # on every rank, because it is collective
            if self.global_rank == 0:
                whole[name] = value.to(dtype)

        def write() -> dict[str, Any]:
            if self.global_rank == 0:
                with naming(path, "writing it"):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    save_file({name: one.clone() for name, one in self._whole(whole).items()}, path)
            return {}

        told_by_all(self.plan.world, write)
        return path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.module, name)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

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
            client_state: JSON values that `load_checkpoint` gives back.
            save_latest: for old calls; the newest is found by its number of steps.
            exclude_frozen_parameters: not here; a checkpoint is whole.
        """
        if exclude_frozen_parameters:
            raise ConfigError("exclude_frozen_parameters=True: a checkpoint holds all of the model; leave it out")
        root = root_of(save_dir, tag)

        def make() -> dict[str, Any]:
            with naming(root, "making it"):
                root.mkdir(parents=True, exist_ok=True)
            return {}

        told_by_all(self.plan.world, make)
        facts = {
            "client_state": dict(client_state or {}),
            "micro_steps": self.micro_steps,
            "param_groups": settings_of(self.optimizer.param_groups),
            "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None,
        }
        path = checkpoint.save(self._living(), root, {"engine": plain(facts)})
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

        Returns:
            Its folder and the client state; (None, {}) if there is none.

        Raises:
            CheckpointError: there are checkpoints, and none is valid or of this model.
        """
        if not load_module_strict:
            raise ConfigError("load_module_strict=False: zero.load(state, checkpoint, partial=) names what may differ")
        self._living()
        folder = root_of(load_dir, tag)
        self._abandon()
        found, notes = newest(self.plan.world, folder, below=tag is None)
        for line in notes:
            log.warning("%s", line)
        if found is None:
            return None, {}
        moments = load_optimizer_states and not load_module_only
        facts = read_back(found.facts.get("engine", {}))
        if moments and "param_groups" in facts:
            same_groups(self.optimizer.param_groups, facts["param_groups"])
        has_trained = self._state.step > 0
        self._state = checkpoint.load(self._state, found, moments=moments)
        if not moments:  # a new optimizer: corrections of its first moments count from the beginning
            self._state = self._state.restored(step=0, scale=self.plan.precision.scale.start())
            if has_trained:
                self._forget_moments()
        if self._watched is not None:
            self._watched.resumed(self.global_steps, self.skipped_steps)
        self.micro_steps = int(facts.get("micro_steps", 0))
        if moments and "param_groups" in facts:
            restore(self.optimizer.param_groups, facts["param_groups"])
        saved = facts.get("lr_scheduler")
        if self.lr_scheduler is not None and saved and load_lr_scheduler_states and not load_module_only:
            self.lr_scheduler.load_state_dict(saved)
        return found.folder, dict(facts.get("client_state", {}))

    def destroy(self) -> None:
        """Give back files and memory; the engine cannot be used after it. Once more does nothing."""
        if self._destroyed:
            return
        self._destroyed = True
        self._abandon()
        if self._watched is not None:
            self._watched.close()
        self._store.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _only_from_here(self, *_: Any) -> None:
        """The optimizer that was passed has nothing to update any more: who steps it would train nothing."""
        if not (self._stepping or self._destroyed):
            raise ConfigError("this optimizer was taken over by zero.initialize: call engine.step() in its place")

    def _whole(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """With buffers, and under every name that a tied parameter has."""
        found = {**parameters, **{name: one.cpu() for name, one in buffers_of(self.module).items()}}
        ties = tied_names(self.plan.model)
        return found | {name: found[first] for name, first in ties.items() if first in found}

    def _forget_moments(self) -> None:
        transform = self.plan.optimizer
        for slot in (slot for unit in self.plan.units for slot in unit.trainable.slots):
            for kind in (kind for kind in transform.moments if kind not in transform.copies):
                set_full(self, slot.name, torch.zeros(slot.shape), kind)

    def _cast(self, given: Any) -> Any:
        dtype = self.plan.precision.compute
        floats = [one for one in tensors_in(given) if one.is_floating_point() and one.dtype != dtype]
        return replaced(given, {id(one): one.to(dtype) for one in floats}) if floats else given

    def _begin_microbatch(self) -> None:
        if self._step is None:
            self._step = Step(self._state)
        if not self._in_microbatch:
            self._step.microbatch()
            self._in_microbatch = True

    def _living(self) -> State:
        if self._destroyed:
            raise ConfigError("this engine was destroyed; make another one with zero.initialize")
        return self._state

    def _under_way(self, asked: str) -> Step:
        if self._step is None:
            raise ConfigError(f"engine.{asked}(): no forward in training mode, engine.train(), since the last step")
        return self._step

    def _abandon(self) -> None:
        step, self._step = self._step, None
        self._in_microbatch = self._scaled = False
        if step is not None:
            step.abandon()

    def _update(self) -> None:
        step = self._under_way("step")
        try:
            self._check(step)
            self._state, self.metrics = step.finish()
        except BaseException:
            self._abandon()
            raise
        self._step, self._in_microbatch, self._scaled = None, False, False
        self._applied = not self.metrics.skipped
        if self._watched is not None:
            self._watched.stepped(self.metrics, has_loss=step.has_loss)

    def _say_once(self, line: str) -> None:
        if line not in self._said and self.global_rank == 0:
            log.warning("%s", line)
        self._said.add(line)

    def _check(self, step: Step) -> None:
        """Refuse an update that would not be what the script means."""
        for one in (self.optimizer, self._given):
            if one is not None and [id(group) for group in one.param_groups] != [id(group) for group in self._groups]:
                raise ConfigError(
                    "the optimizer got other groups than zero.initialize was given (add_param_group, load_state_dict): "
                    "edit those that are there, give all of them to zero.initialize, and load with load_checkpoint"
                )
        if self._managed and step.microbatches != self.plan.accumulate and self._boundary is None:
            raise ConfigError(
                f"optimizer.step() after {step.microbatches} microbatches; gradients are divided for "
                f"gradient_accumulation_steps={self.plan.accumulate}: call engine.step() after each of them"
            )
        if self.loss_scale != 1.0 and not self._scaled:
            raise ConfigError(
                "a backward in fp16 without the loss scale: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
