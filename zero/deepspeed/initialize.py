"""From a model, a config and whatever else a DeepSpeed script passes to a running engine."""

import argparse
import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.deepspeed.config import Translation, translate
from zero.deepspeed.engine import Engine
from zero.deepspeed.loader import Loader
from zero.deepspeed.optimizers import KINDS, Optimizer, Taken, names_of, settings_of, trained, transform
from zero.deepspeed.original import rank_0, share_buffers, training_only
from zero.deepspeed.parameters import LEAVES
from zero.deepspeed.plain import plain
from zero.deepspeed.precompiled import as_written, beneath
from zero.deepspeed.schedulers import Scheduled, Scheduler
from zero.deepspeed.watched import Watched
from zero.distributed.world import World, open_default_group
from zero.engine.first_values import Weights
from zero.engine.init import init, open_store
from zero.engine.plan import Plan
from zero.errors import ConfigError
from zero.store import PrefetchStore
from zero.trainer.build import build_optimizer, build_plan
from zero.trainer.config import Config, OneCycle, Wandb, read

log = logging.getLogger("zero")

TRUE_OF_ANY_LOOP = ("mode", "zero", "offload", "batch", "precision", "tracker")
"""Sections of a config that say the same of a model and a loop of the user's own."""

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
) -> tuple[Engine, Optimizer | None, Loader | None, Scheduler | None]:
    """An engine for `model`, the optimizer whose groups it reads, a loader and a scheduler. Collective.

    Without an optimizer nothing is trained: the parameters are in shards all the same, and run.

    The model is taken over, with rank 0's values: `engine.module` is `model`, and it stays what it was for whoever
    calls it, reads its parameters or its `state_dict()`, puts hooks on it or sets its modes. As its parameters are in
    shards, every rank has to read them alike. They are written with `zero.gathered` and `zero.set_full`.

    Args:
        args: where `args.deepspeed_config` names the config, for scripts with `add_config_arguments`.
        model: on any device; parameters on meta (`zero.empty()`) get their values from `weights` or
            `reset_parameters`. Of what `torch.compile` made of a model, the model is taken, and its units are compiled.
        optimizer: of torch, or a function that makes one; wins over the config's. Its groups stay live.
        model_parameters: what the config's optimizer trains, plain or in groups; None: everything that requires grad.
        training_data: a dataset, for the returned loader of microbatches of this rank.
        lr_scheduler: of torch, or a function that makes one from the returned optimizer; wins over the config's. The
            engine steps it.
        config: a `ds_config.json`: its path, its text, or what is in it.
        world: the ranks; None: those of the environment.
        weights, seed: see `zero.init`.
        folder: where the run leaves its rows and settings, and W&B its own; `run-2` and so on below it where another
            run has left some that no loaded checkpoint goes on with. None: nowhere, or `runs/DATE/TIME` if the config
            asks for W&B. Rank 0 writes it.
        tokens_per_row: what a row of the batch counts as in speeds; 1 counts rows.

    Raises:
        ConfigError: one line that names the key, the value and what to do.
    """
    if model is None:
        raise ConfigError("zero.initialize needs model=")
    for key, value in others.items():
        _refuse_argument(key, value)
    compiled, model = model, beneath(model)
    world = world or World.from_env()
    told = translate(_one_config(args, config, config_params), world_size=world.size)
    for line in told.notes if world.rank == 0 else ():
        log.warning("%s", line)
    settled = _settled(told, world)
    given, made = _optimizer(optimizer, model_parameters, model, settled, told)
    settings = _settings(settled, made)  # before a scheduler writes into the groups
    scheduler = _scheduler(lr_scheduler, made, settled, told) if trained(made) else None
    with contextlib.ExitStack() as undo:  # what a refusal half-way must not leave open
        backend, compiled_again = as_written(compiled)
        undo.callback(compiled_again)
        with training_only(model, trained(made)):
            chosen = transform(made, names_of(model), settled.optim.clip)
            units = _units(told, model)
            plan = build_plan(settled, model, world, optimizer=chosen, units=units, compile=backend, in_place=True)
            store = open_store(plan)
            undo.callback(store.close)
            state = init(plan, store, seed=seed, weights=rank_0(model, world) if weights is None else weights)
        share_buffers(state.model, world)
        watched = _watched(settled, settings, told, plan, store, folder, tokens_per_row)
        undo.pop_all()
    engine = Engine(
        settled,
        plan,
        store,
        state,
        made,
        taken=None if given is None else Taken(given),
        lr_scheduler=scheduler,
        managed=told.managed,
        watched=watched,
    )
    returned = made if trained(made) else None
    if training_data is None:
        return engine, returned, None, scheduler
    rows = engine.train_micro_batch_size_per_gpu()
    loader = Loader(training_data, world, rows=rows, seed=seed, collate=collate_fn, drop_last=told.drop_last)
    engine.training_dataloader = loader
    return engine, returned, loader, scheduler


def init_distributed(*args: Any, **how: Any) -> None:
    """Open torch's default process group, for scripts that use it before `initialize`, which needs no such call."""
    open_default_group()


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`."""
    group = parser.add_argument_group("zero")
    group.add_argument("--deepspeed", action="store_true", help="for old command lines; nothing depends on it")
    group.add_argument("--deepspeed_config", help="path of the ds_config.json")
    return parser


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
    own = {key: value for key, value in settings.get("zero", {}).items() if key != "units"}  # of the user's classes
    return read({**settings, "zero": own}).on(world.size)


def _units(told: Translation, model: nn.Module) -> list[str]:
    """What the JSON and `set_z3_leaf_modules` say of units; none: the default policy."""
    leaves = vars(model).get(LEAVES, [])
    return [*told.settings.get("zero", {}).get("units", ["auto"] if leaves else []), *leaves]


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


def _optimizer(
    asked: AnyOptimizer, parameters: Iterable[Any] | None, model: nn.Module, config: Config, told: Translation
) -> tuple[torch.optim.Optimizer | None, Optimizer]:
    """The optimizer of torch that was passed, if one was, and ours with the same groups or with the config's."""
    if callable(asked) and not isinstance(asked, torch.optim.Optimizer):
        asked = asked(_listed(parameters, model))
    if isinstance(asked, Optimizer):
        return None, asked
    if asked is not None:
        return asked, Optimizer.of(asked)
    if not told.has_optimizer:
        return None, Optimizer.of_nothing()
    return None, _from_config(config, _listed(parameters, model))


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


def _scheduler(asked: AnyScheduler, optimizer: Optimizer, config: Config, told: Translation) -> Scheduler | None:
    if callable(asked) and not isinstance(asked, torch.optim.lr_scheduler.LRScheduler):
        made: Scheduler = asked(optimizer)
        return made
    if asked is not None:
        scheduler: Scheduler = asked
        return scheduler
    if not told.has_scheduler:
        return None
    lr = None if told.peak_is_for_all else config.optim.lr
    momenta = isinstance(config.schedule, OneCycle) and bool(config.schedule.momentum)
    return Scheduled(optimizer.param_groups, build_optimizer(config), lr, momenta=momenta)


def _settings(config: Config, optimizer: Optimizer) -> dict[str, Any]:
    """What was set, as JSON holds it: of the config what is true here, without our model, data, schedule and steps."""
    groups = {str(number): group for number, group in enumerate(settings_of(optimizer.param_groups))}
    own = {"kind": optimizer.kind, "clip": config.optim.clip, "groups": groups}
    ours = {key: value for key, value in config.plain().items() if key in TRUE_OF_ANY_LOOP}
    return {**ours, "optimizer": json.loads(json.dumps(plain(own), default=str))}


def _watched(
    config: Config,
    settings: Mapping[str, Any],
    told: Translation,
    plan: Plan,
    store: PrefetchStore,
    folder: str | PathLike[str] | None,
    tokens_per_row: int,
) -> Watched | None:
    """What the run leaves behind; None where nobody asked for anything."""
    if folder is None and isinstance(config.tracker, Wandb):
        folder = Path("runs") / f"{datetime.now():%Y-%m-%d/%H-%M-%S-%f}"
    if folder is None and "every" not in told.settings.get("tracker", {}):
        return None
    place = None if folder is None else Path(folder)
    return Watched(config, settings, plan, store, place, tokens_per_row=tokens_per_row)
