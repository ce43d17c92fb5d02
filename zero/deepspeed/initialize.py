"""`zero.initialize`: from what a DeepSpeed script passes to an engine, an optimizer, a loader and a scheduler.

The loaders are here, too: the one that `initialize` makes of a dataset, and DeepSpeed's loader without an end.
"""

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from zero.core.optim import Transform
from zero.deepspeed.config import Translation, translate
from zero.deepspeed.engine import Engine
from zero.deepspeed.metrics import RunLog, run_settings
from zero.deepspeed.model import bypass_compiled, get_z3_leaf_modules, set_z3_leaf_modules, uncompiled
from zero.deepspeed.optimizers import Optimizer, PassedOptimizer, names_of, trained, transform
from zero.deepspeed.schedulers import SCHEDULES, Scheduler
from zero.distributed.world import World, open_default_group
from zero.engine.empty import is_meta, lacks_values
from zero.engine.first_values import Weights
from zero.engine.init import init, open_store
from zero.engine.module_copy import buffers_of, same_bits
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.errors import ConfigError
from zero.settings import Settings
from zero.settings.build import build_plan
from zero.tracker.settings import Wandb

log = logging.getLogger("zero")

ConfigSource = Mapping[str, Any] | str | PathLike[str]
AnyOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None
AnyScheduler = Scheduler | Callable[[torch.optim.Optimizer], Scheduler] | None


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: AnyOptimizer = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: AnyScheduler = None,
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
) -> tuple[Engine, Optimizer | None, "Loader | None", Scheduler | None]:
    """Make an engine for `model`, the optimizer whose groups it reads, a loader and a scheduler. Collective.

    The model is taken over, with rank 0's values: `engine.module` is `model`, and whoever holds it can still call it,
    read its parameters or its `state_dict()`, put hooks on it or set its modes. As its parameters are sharded, all
    ranks have to read the same ones. They are written with `zero.gathered` and `zero.set_full`.

    Without an optimizer nothing is trained; the parameters are sharded and can be run all the same.

    Args:
        args: its attribute `deepspeed_config` names the config, for scripts with `add_config_arguments`.
        model: on any device. Parameters on meta (`zero.empty()`) get their values from `weights` or
            `reset_parameters`. A model that `torch.compile` was given is used without it, and its units are compiled.
        optimizer: a torch optimizer, or a function from parameters to one; wins over the config's. Its groups are read
            at every update.
        model_parameters: parameters, or groups of them, for the config's optimizer; None: all that require a gradient.
        training_data: a dataset for the returned loader, which gives this rank's microbatches; None: no loader.
        lr_scheduler: a torch scheduler, or a function from the returned optimizer to one; wins over the config's. The
            engine steps it.
        collate_fn: makes a batch of a list of rows of `training_data`; None: torch's.
        config: a `ds_config.json`: its path, its text, or a dict.
        config_params: an older name of `config`.
        world: the ranks; None: those of the environment, and torch's default process group is open afterwards.
        weights: first values in place of rank 0's model: a file, a mapping or a function, see `zero.init`.
        seed: of first values and of the loader's order.
        folder: where rank 0 writes rows and settings, and W&B its files. If another run has written there, and no
            checkpoint of it is loaded, `run-2` and so on below it. None: no files, or `runs/DATE/TIME` if the config
            has W&B.
        tokens_per_row: tokens of a row of the batch, for speeds; 1 counts rows.
        others: `dist_init_required` and `distributed_port` have no effect; `mpu` and `mesh_param` must be None.

    Returns:
        (engine, optimizer, loader, scheduler); the last three None where there is none.

    Raises:
        ConfigError: one line that names the key, the value and what to do.
    """
    if model is None:
        raise ConfigError("zero.initialize needs model=")
    for key, value in others.items():
        _refuse_argument(key, value)
    compiled, model = model, uncompiled(model)
    with contextlib.ExitStack() as undo:  # what a refusal half-way must not leave open
        opened = None
        if world is None:
            world = opened = World.from_env()
            undo.callback(opened.close)
        translation = translate(_one_config(args, config, config_params), world_size=world.size, schedule=False)
        for line in translation.notes if world.rank == 0 else ():
            log.warning("%s", line)
        settings = _settings(translation, world)
        passed, made = _optimizer(optimizer, model_parameters, model, settings, translation)
        recorded = run_settings(settings, made)  # before a scheduler writes into the groups
        scheduler = _scheduler(lr_scheduler, made, translation) if trained(made) else None
        loader = None
        if training_data is not None:
            rows, drop_last = settings.batch.numbers()[1], translation.drop_last
            loader = Loader(training_data, world, rows=rows, seed=seed, collate=collate_fn, drop_last=drop_last)
        backend, compiled_again = bypass_compiled(compiled)
        undo.callback(compiled_again)
        units = _units(translation, model)

        def make_plan(chosen: Transform) -> Plan:
            return build_plan(settings, model, world, optimizer=chosen, units=units, compile=backend, in_place=True)

        state = shard(model, made, make_plan, clip=settings.optim.clip, world=world, weights=weights, seed=seed)
        undo.callback(state.runtime.store.close)
        place = _run_folder(settings, folder)
        is_asked = place is not None or "every" in translation.settings.get("tracker", {})
        run_log = RunLog(settings, recorded, state, place, tokens_per_row) if is_asked else None
        if opened is not None:
            open_default_group()
            opened.keeps_default_group = True
        undo.pop_all()
    engine = Engine(
        settings,
        state,
        made,
        passed=None if passed is None else PassedOptimizer(passed),
        lr_scheduler=scheduler,
        managed=translation.managed,
        casts_inputs=translation.casts_inputs,
        run_log=run_log,
        json=translation.values,
        opened=opened,
    )
    engine.training_dataloader = loader
    return engine, made if trained(made) else None, loader, scheduler


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Open torch's default process group, for scripts that use it before `initialize`, which does not need it.

    Args:
        *args: for old calls; the environment says what backend and which ranks there are.
        **kwargs: for old calls.
    """
    open_default_group()


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed`, which has no effect, and `--deepspeed_config`, the path of the `ds_config.json`.

    Args:
        parser: it is changed and returned.
    """
    group = parser.add_argument_group("zero")
    group.add_argument("--deepspeed", action="store_true", help="for old command lines; nothing depends on it")
    group.add_argument("--deepspeed_config", help="path of the ds_config.json")
    return parser


# Arguments


def _refuse_argument(key: str, value: Any) -> None:
    harmless = ("dist_init_required", "distributed_port")
    if key not in (*harmless, "mpu", "mesh_param"):
        raise ConfigError(f"zero.initialize has no argument {key}")
    if value is not None and key not in harmless:
        raise ConfigError(f"zero.initialize: {key} is for model parallelism, which is not supported; leave it out")


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


def _settings(translation: Translation, world: World) -> Settings:
    """The config as settings of this library; nothing may be "auto", because a user's model has no planner."""
    settings = translation.settings
    if settings.get("zero", {}).get("stage") == "auto":
        raise ConfigError("zero_optimization.stage=auto: write the number; zero-train mode=plan compares them")
    rows = settings.get("batch", {})
    if not isinstance(rows.get("global"), int) and not isinstance(rows.get("micro"), int):
        key = "train_micro_batch_size_per_gpu" if "micro" in rows else "train_batch_size"
        raise ConfigError(
            f"{key}=auto: write the rows of a step (train_batch_size) or of a microbatch "
            "(train_micro_batch_size_per_gpu) as a number"
        )
    own = {key: value for key, value in settings.get("zero", {}).items() if key != "units"}  # of the user's classes
    return Settings.read({**settings, "zero": own}).on(world.size)


def _units(translation: Translation, model: nn.Module) -> list[str]:
    """Classes of units by the JSON and of leaf modules; none: the default policy."""
    json = translation.values
    set_z3_leaf_modules(model, json.get("zero_optimization.leaf_module.classes", ()), raise_if_not_found=False)
    leaves = {type(module).__name__ for module in get_z3_leaf_modules(model)}
    return [*json.get("zero_optimization.units", ["auto"] if leaves else []), *sorted(leaves)]


def _optimizer(
    passed: AnyOptimizer, parameters: Iterable[Any] | None, model: nn.Module, config: Settings, translation: Translation
) -> tuple[torch.optim.Optimizer | None, Optimizer]:
    """The torch optimizer that was passed, if one was, and ours with its groups or the config's."""
    if isinstance(passed, Optimizer):
        return None, passed
    if isinstance(passed, torch.optim.Optimizer):
        return passed, Optimizer.of(passed)
    if passed is None and not translation.has_optimizer:
        return None, Optimizer.of_nothing()
    listed = [one for one in model.parameters() if one.requires_grad] if parameters is None else list(parameters)
    if passed is None:
        return None, Optimizer.of_config(config, listed)
    return _optimizer(passed(listed), None, model, config, translation)


def _scheduler(passed: AnyScheduler, optimizer: Optimizer, translation: Translation) -> Scheduler | None:
    if callable(passed) and not isinstance(passed, torch.optim.lr_scheduler.LRScheduler):
        return passed(optimizer)
    if passed is None and translation.scheduler is not None:
        name, arguments = translation.scheduler
        return SCHEDULES[name](optimizer, **arguments)
    return passed


def _run_folder(config: Settings, folder: str | PathLike[str] | None) -> Path | None:
    """Where the files of the run are; None where none are asked for."""
    if folder is None and (isinstance(config.tracker, Wandb) or config.tracker.tensorboard):
        return Path("runs") / f"{datetime.now():%Y-%m-%d/%H-%M-%S-%f}"
    return None if folder is None else Path(folder)


# First values


def shard(
    model: nn.Module,
    optimizer: Optimizer,
    make_plan: Callable[[Transform], Plan],
    *,
    clip: float | None,
    world: World,
    weights: Weights = None,
    seed: int = 0,
) -> State:
    """Take a model over: the state that has its parameters, whose store is open. Collective.

    Args:
        model: as of `initialize`; parameters that `optimizer` does not hold are not trained.
        optimizer: its groups are read at every update.
        make_plan: makes a plan, `in_place`, of the optimizer's transform.
        clip: the largest gradient norm; None for none.
        world, weights, seed: as of `initialize`.

    Raises:
        ConfigError: one line; what was opened is closed then.
    """
    with contextlib.ExitStack() as undo:
        with _others_frozen(model, trained(optimizer)):
            _allocate_absent_buffers(model)
            plan = make_plan(transform(optimizer, names_of(model), clip))
            store = open_store(plan)
            undo.callback(store.close)
            first = _values_of_rank_0(model, world) if weights is None else weights
            state = init(plan, store, seed=seed, weights=first)
        _broadcast_buffers(state.model, world)
        undo.pop_all()
    return state


@contextlib.contextmanager
def _others_frozen(model: nn.Module, chosen: set[int]) -> Iterator[None]:
    """Inside, parameters that no optimizer was given do not require a gradient."""
    others = [one for one in model.parameters() if one.requires_grad and id(one) not in chosen]
    for one in others:
        one.requires_grad_(False)
    try:
        yield
    finally:
        for one in others:
            one.requires_grad_(True)


def _values_of_rank_0(model: nn.Module, world: World) -> Weights:
    """Rank 0's values, one parameter at a time; None where any parameter's are still to be made."""
    if any(lacks_values(parameter) for parameter in model.parameters()):
        return None
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}  # before it is taken over

    def fill(name: str, tensor: torch.Tensor) -> None:
        if world.rank == 0:
            tensor.copy_(values[name])
        world.broadcast(tensor, what=f"first values of {name}").wait()

    return fill


def _allocate_absent_buffers(model: nn.Module) -> None:
    """Make room for persistent buffers that a constructor computed from parameters which only rank 0 has."""
    for name, buffer in buffers_of(model).items():
        if is_meta(buffer) and not lacks_values(buffer):
            owner, _, own = name.rpartition(".")
            model.get_submodule(owner)._buffers[own] = torch.zeros(buffer.shape, dtype=buffer.dtype)


def _broadcast_buffers(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's buffers."""
    for name, buffer in buffers_of(model).items():
        full = buffer.resolve_conj().resolve_neg().contiguous()
        before = full.clone()
        world.broadcast(full, what=f"buffer {name}").wait()
        if not same_bits(full, before):
            buffer.copy_(full)


# Loaders


class Loader:
    """Microbatches of this rank. Each `iter` is one epoch, shuffled by (seed, epoch) alike on all ranks.

    Where ranks do not divide the rows the first ones of the epoch count again, so that every rank has as many.

    An IterableDataset is read as it is: it must itself give each rank its own rows, in its own order.

    Args:
        data: the dataset.
        world: the ranks that share it.
        rows: rows of a microbatch.
        seed: of the order.
        collate: makes a batch of a list of rows; None: torch's.
        drop_last: leave out the last, smaller batch.

    Attributes:
        epoch: number of the epoch that the next `iter` runs through, from 0; set it to go on from an epoch.
        batches: the torch loader inside.
    """

    def __init__(
        self,
        data: Dataset[Any],
        world: World,
        *,
        rows: int,
        seed: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
    ) -> None:
        self.epoch = 0
        self._sampler: DistributedSampler[Any] | None = None
        if not isinstance(data, IterableDataset):
            self._sampler = DistributedSampler(data, world.size, world.rank, shuffle=True, seed=seed)
        elif world.size > 1 and world.rank == 0:
            log.warning("training_data is an IterableDataset: it has to give each rank its own rows")
        self.batches: DataLoader[Any] = DataLoader(
            data,
            batch_size=rows,
            sampler=self._sampler,
            collate_fn=collate,
            drop_last=drop_last,
            generator=torch.Generator().manual_seed(seed),  # None: each epoch would draw from the global generator
        )

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        if self._sampler is not None:
            self._sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.batches)


class RepeatingLoader:
    """Batches of `loader` without an end: after the last one it starts again.

    Args:
        loader: anything that can be iterated more than once.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
