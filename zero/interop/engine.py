"""The face of a run for a loop of the user's own: forward, backward, step, in DeepSpeed's words.

A microbatch begins with the first forward after `step()`, and ends with the next `step()`: between them may be any
number of forwards and backwards, by `engine.backward(loss)` or by `engine.scale(loss).backward()`. Every
`gradient_accumulation_steps()`-th call of `step()` updates.
"""

import argparse
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zero import checkpoint
from zero.build import build_optimizer, build_plan
from zero.checkpoint.disk import naming
from zero.checkpoint.load import is_step
from zero.checkpoint.manifest import step_name
from zero.checkpoint.save import told as told_by_all
from zero.config import Config, Wandb, read
from zero.copied import buffers_of
from zero.ds_config import Translation, translate
from zero.errors import ConfigError
from zero.initialise import Weights
from zero.interop.loader import Loader
from zero.interop.optimizers import KINDS, Optimizer, names_of, restore, same_groups, settings_of, trained, transform
from zero.interop.plain import plain, read_back
from zero.interop.schedulers import Scheduled, Scheduler
from zero.interop.watched import Watched
from zero.passes import Metrics, Step
from zero.plan import Plan
from zero.state import State
from zero.step import init, open_store
from zero.store import PrefetchStore
from zero.world import World

log = logging.getLogger("zero")

ConfigSource = Mapping[str, Any] | str | PathLike[str]


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
        self, config: Config, plan: Plan, store: PrefetchStore, state: State, optimizer: Optimizer, managed: bool
    ) -> None:
        self.config, self.plan, self.optimizer = config, plan, optimizer
        self._store, self._state, self._managed = store, state, managed
        self._step: Step | None = None
        self._in_microbatch = self._scaled = self._synchronised = self._applied = False
        self._boundary: bool | None = None
        self._destroyed = False
        self.lr_scheduler: Scheduler | None = None
        self.given: torch.optim.Optimizer | None = None  # the torch optimizer whose groups these are
        self.metrics: Metrics | None = None
        self.micro_steps = 0
        self.watched: Watched | None = None
        self._groups = list(optimizer.param_groups)  # the dicts themselves: every update reads these
        optimizer.update, optimizer.forget = self._update, self.zero_grad

    # -- the loop ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; floating-point tensors are cast to the dtype that it computes in."""
        self._living()
        if torch.is_grad_enabled() and self.module.training:
            self._begin_microbatch()
        elif self._step is None:
            self.state.machinery.gatherer.begin()
        dtype = self.plan.precision.compute
        args, kwargs = tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
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
        if self.given is not None:
            self.given.step()  # no parameter has a gradient there: torch's schedulers look for the call
        if self.lr_scheduler is not None and self.was_step_applied():
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def zero_grad(self) -> None:
        """Forget the gradients that have arrived since the last update."""
        if self._step is not None:
            self._step.forget()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Microbatches that do not end a step. Gradients are added up in any case, so nothing else changes here."""
        before, self._synchronised = self._synchronised, True
        try:
            yield
        finally:
            self._synchronised = before

    def train(self, mode: bool = True) -> "Engine":
        self.module.train(mode)
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

    @property
    def loss_scale(self) -> float:
        return self._state.scale.scale

    def module_state_dict(self) -> dict[str, Tensor]:
        """Every parameter in fp32 and every buffer, whole, on every rank. Collective."""
        from zero.full import full_state_dict

        return {**full_state_dict(self._living()), **{name: one.cpu() for name, one in buffers_of(self.module).items()}}

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
        root = _root(save_dir, tag)

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
        if self.watched is not None:
            self.watched.saved(path)
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
        folder = _root(load_dir, tag)
        self._abandon()
        found, notes = _newest(self.plan.world, folder, below=tag is None)
        for line in notes:
            log.warning("%s", line)
        if found is None:
            return None, {}
        moments = load_optimizer_states and not load_module_only
        facts = read_back(found.facts.get("engine", {}))
        if moments and "param_groups" in facts:
            same_groups(self.optimizer.param_groups, facts["param_groups"])
        self._state = checkpoint.load(self._state, found, moments=moments)
        if self.watched is not None:
            self.watched.resumed(self.global_steps, self.skipped_steps)
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
        if self.watched is not None:
            self.watched.close()
        self._store.close()

    # -- inside --------------------------------------------------------------------------------------------------------

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
        if self.watched is not None:
            self.watched.stepped(self.metrics)

    def _check(self, step: Step) -> None:
        """Refuse an update that would not be what the script means."""
        for one in (self.optimizer, self.given):
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


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Scheduler | Callable[[torch.optim.Optimizer], Scheduler] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    config_params: ConfigSource | None = None,
    *,
    world: World | None = None,
    weights: Weights = None,
    seed: int = 0,
    folder: str | PathLike[str] | None = None,
    tokens_per_row: int = 1,
    **others: Any,
) -> tuple[Engine, Optimizer, Loader | None, Scheduler | None]:
    """An engine for `model`, the optimizer whose groups it reads, a loader and a scheduler. Collective.

    The model's values are rank 0's. They are taken over and then released: `model` keeps its shapes and its
    `requires_grad`, and NaN for values. Read and write them with `zero.gathered`, `zero.get_full`, `zero.set_full`.

    Args:
        args: where `args.deepspeed_config` names the config, for scripts with `add_config_arguments`.
        model: on any device; parameters on meta (`zero.empty()`) get their values from `weights` or
            `reset_parameters`.
        optimizer: of torch, or a function that makes one; wins over the config's. Its groups stay live.
        model_parameters: what the config's optimizer trains, plain or in groups; None: everything that requires grad.
        training_data: a dataset, for the returned loader of microbatches of this rank.
        lr_scheduler: of torch, or a function that makes one from the returned optimizer; wins over the config's. The
            engine steps it.
        config: a `ds_config.json`: its path, its text, or what is in it.
        world: the ranks; None: those of the environment.
        weights, seed: see `zero.init`.
        folder: where the run leaves its rows and settings, and W&B its own; None: nowhere, or `runs/zero` if the config
            asks for W&B. Every rank must give the same.
        tokens_per_row: what a row of the batch counts as in speeds; 1 counts rows.

    Raises:
        ConfigError: one line that names the key, the value and what to do.
    """
    if model is None:
        raise ConfigError("zero.initialize needs model=")
    for key, value in others.items():
        _refuse_argument(key, value)
    world = world or World.from_env()
    told = translate(_one_config(args, config, config_params), world_size=world.size)
    for line in told.notes if world.rank == 0 else ():
        log.warning("%s", line)
    settled = _settled(told, world)
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(_listed(model_parameters, model))
    if optimizer is None and not told.has_optimizer:
        raise ConfigError('there is no optimizer: pass optimizer=, or put an "optimizer" into the config')
    made = Optimizer.of(optimizer) if optimizer is not None else _from_config(settled, _listed(model_parameters, model))
    with _training_only(model, trained(made)):
        plan = build_plan(settled, model, world, optimizer=transform(made, names_of(model), settled.optim.clip))
        store = open_store(plan)
        try:
            state = init(plan, store, seed=seed, weights=_rank_0(model, world) if weights is None else weights)
        except BaseException:
            store.close()
            raise
    for name, buffer in buffers_of(state.model).items():
        world.broadcast(buffer, what=f"buffer {name}").wait()
    _release(model)
    engine = Engine(settled, plan, store, state, made, told.managed)
    engine.given = optimizer
    engine.lr_scheduler = _scheduler(lr_scheduler, made, settled, told)
    folder = Path("runs/zero") if folder is None and isinstance(settled.tracker, Wandb) else folder
    if folder is not None or "every" in told.settings.get("tracker", {}):
        where = None if folder is None else Path(folder)
        engine.watched = Watched(settled, plan, store, where, tokens_per_row=tokens_per_row)
    loader = None
    if training_data is not None:
        loader = Loader(
            training_data,
            rows=engine.train_micro_batch_size_per_gpu(),
            rank=world.rank,
            ranks=world.size,
            seed=seed,
            collate=collate_fn,
            drop_last=told.drop_last,
        )
    return engine, made, loader, engine.lr_scheduler


def init_distributed(*args: Any, **how: Any) -> None:
    """For scripts that call it first: `initialize` finds the ranks in the environment by itself."""


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`."""
    group = parser.add_argument_group("zero")
    group.add_argument("--deepspeed", action="store_true", help="for old command lines; nothing depends on it")
    group.add_argument("--deepspeed_config", help="path of the ds_config.json")
    return parser


def _root(folder: str | PathLike[str], tag: str | None) -> Path:
    return Path(folder) if tag is None else Path(folder) / str(tag)


def _newest(world: World, folder: Path, *, below: bool) -> tuple[checkpoint.Checkpoint | None, list[str]]:
    """The newest valid checkpoint in `folder`, and `below` in the folders of its tags; why newer ones were rejected."""
    if is_step(folder):
        return checkpoint.open_checkpoint(world, folder), []
    found, notes = checkpoint.open_latest(world, folder)
    if found is not None or not below:
        return found, notes

    def tagged() -> dict[str, Any]:
        tags = [one for one in folder.glob("*") if one.is_dir()] if world.rank == 0 else []
        steps = [(step, str(tag / step_name(step))) for tag in tags for step in checkpoint.Root(tag).steps()]
        return {"newest first": [path for _, path in sorted(steps, reverse=True)]}

    return checkpoint.open_first(world, [Path(path) for path in told_by_all(world, tagged)[0]["newest first"]])


def _one_config(args: Any, config: ConfigSource | None, old: ConfigSource | None) -> ConfigSource:
    given = {
        "config=": config,
        "config_params=": old,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    named = [(name, value) for name, value in given.items() if value is not None]
    if len(named) != 1:
        what = "; ".join(name for name, _ in named) or "none"
        raise ConfigError(f"zero.initialize takes one config, and was given {what}; pass config='ds_config.json'")
    return named[0][1]


def _settled(told: Translation, world: World) -> Config:
    """The config in our words, with nothing left open: for a model of the user's there is nothing to settle it by."""
    settings = told.settings
    if settings.get("zero", {}).get("stage") == "auto":
        raise ConfigError("zero_optimization.stage=auto: write the number; python train.py mode=plan compares them")
    rows = settings.get("batch", {})
    if not isinstance(rows.get("global"), int) and not isinstance(rows.get("micro"), int):
        raise ConfigError("train_batch_size=auto: write the rows of a step, or train_micro_batch_size_per_gpu")
    return read(settings).on(world.size)


def _refuse_argument(key: str, value: Any) -> None:
    harmless = ("dist_init_required", "distributed_port")
    if key not in (*harmless, "mpu", "mesh_param"):
        raise ConfigError(f"zero.initialize has no argument {key}")
    if value is not None and key not in harmless:
        raise ConfigError(f"zero.initialize: {key} is for model parallelism, which is not here; leave it out")


def _listed(parameters: Iterable[Any] | None, model: nn.Module) -> list[Any]:
    if parameters is None:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(parameters)


def _from_config(config: Config, parameters: list[Any]) -> Optimizer:
    """The config's optimizer in torch's shape."""
    chosen = config.optim
    told = build_optimizer(config).groups[0](1)
    defaults: dict[str, Any] = {"lr": chosen.lr, "weight_decay": chosen.weight_decay}
    if chosen.name == "sgd":
        defaults |= {"momentum": chosen.momentum, "nesterov": chosen.nesterov}
    elif chosen.name == "adagrad":
        defaults |= {"eps": chosen.eps, "lr_decay": 0.0}
    else:
        defaults["betas"] = told.betas
        if chosen.name != "lion":
            defaults["eps"] = chosen.eps
    assert chosen.name in KINDS
    return Optimizer(parameters, defaults, chosen.name)


def _scheduler(asked: Any, optimizer: Optimizer, config: Config, told: Translation) -> Scheduler | None:
    if callable(asked) and not isinstance(asked, torch.optim.lr_scheduler.LRScheduler):
        made: Scheduler = asked(optimizer)
        return made
    if asked is not None:
        scheduler: Scheduler = asked
        return scheduler
    if not told.has_scheduler:
        return None
    lr = None if told.peak_is_for_all else config.optim.lr
    return Scheduled(optimizer.param_groups, build_optimizer(config), lr)


@contextmanager
def _training_only(model: nn.Module, chosen: set[int]) -> Iterator[None]:
    """Inside, parameters that no optimizer was given do not require a gradient."""
    others = [one for one in model.parameters() if one.requires_grad and id(one) not in chosen]
    for one in others:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in others:
            one.requires_grad_(True)


def _rank_0(model: nn.Module, world: World) -> Weights:
    """Rank 0's values, one parameter at a time; None where the model has none yet."""
    held = dict(model.named_parameters())
    if any(one.numel() > 1 and not any(one.stride()) and bool(one.isnan().all()) for one in held.values()):
        raise ConfigError("the model's values were released by an earlier zero.initialize; build it again")
    if any(parameter.is_meta for parameter in held.values()):
        return None

    def fill(name: str, tensor: Tensor) -> None:
        tensor.copy_(held[name].detach())
        world.broadcast(tensor, what=f"first values of {name}").wait()

    return fill


def _release(model: nn.Module) -> None:
    """Free the values of the user's model. What is left of them reads as NaN, so that nobody computes with them."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
            parameter.data = nothing.expand(parameter.shape)
