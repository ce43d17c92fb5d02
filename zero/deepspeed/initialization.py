"""`zero.initialize`, which makes engine, optimizer, data loader and scheduler from a DeepSpeed script's arguments."""

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero.core import checks
from zero.core.optim import Transform
from zero.deepspeed.config import Translation, translate
from zero.deepspeed.config.keys import ZeroOptimization
from zero.deepspeed.precompiled import bypass_compiled, uncompiled
from zero.deepspeed.runtime.dataloader import Loader
from zero.deepspeed.runtime.lr_schedules import SCHEDULES
from zero.deepspeed.zero import flag_leaf_modules, get_z3_leaf_modules
from zero.distributed.opening import open_default_group
from zero.distributed.world import World, open_world
from zero.engine.model import frozen_matrices
from zero.engine.plan import Plan
from zero.engine.state import State
from zero.engine.whole import Weights
from zero.errors import ConfigError
from zero.settings import Settings
from zero.settings.build import build_plan
from zero.tracker.settings import WandbSettings
from zero.user_loop.engine import Engine
from zero.user_loop.optimizers import Optimizer, PassedOptimizer, Scheduler, trained
from zero.user_loop.run_log import RunLog, run_settings
from zero.user_loop.shard import shard

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
    mpu: None = None,
    mesh_param: None = None,
    dist_init_required: bool | None = None,
    distributed_port: int | None = None,
) -> tuple[Engine, Optimizer | None, Loader | None, Scheduler | None]:
    """Make an engine for `model`, the optimizer whose groups it reads, a data loader and a scheduler. Collective.

    The engine takes over the model, with rank 0's values: `engine.module` is `model`, which can still be called, read,
    hooked and set to train or eval mode. Its parameters are sharded, so all ranks must read the same parameters
    together. Write them with `zero.gathered` and `zero.set_full`.

    A model that comes in eval mode, such as that of `from_pretrained`, trains in it until its first forward in
    training mode.

    Without an optimizer the parameters are sharded and the model runs, but nothing is trained.

    Args:
        args: its attribute `deepspeed_config` names the config, for scripts with `add_config_arguments`.
        model: on any device. Parameters on meta (`zero.empty()`) get their values from `weights` or
            `reset_parameters`. If `torch.compile` made the model, its units are compiled instead.
        optimizer: a torch optimizer, or a function from parameters to an optimizer; it replaces the optimizer of the
            config. Its groups are read at every update.
        model_parameters: parameters, or groups of them, for the config's optimizer; None: all that require a gradient.
        training_data: a dataset for the returned loader, which yields this rank's microbatches; None: no loader.
        lr_scheduler: a torch scheduler, or a function from the returned optimizer to a scheduler; it replaces the
            scheduler of the config. The engine calls its `step`.
        collate_fn: function from a list of samples of `training_data` to a batch; None: torch's.
        config: a `ds_config.json`: its path, its text, or a dict.
        config_params: an older name of `config`.
        world: the ranks; None: those of the environment, and torch's default process group is open afterwards.
        weights: initial values to use instead of those of rank 0's model: a file, a mapping or a function, see
            `zero.init`.
        seed: the seed of initial values and of the loader's order.
        folder: the folder in which rank 0 writes rows of metrics and settings. If it has rows of another run, and no
            checkpoint of that run is loaded, `run-2`, `run-3`, ... below it is used. None: no files, or
            `runs/DATE/TIME` if the config has W&B or TensorBoard.
        tokens_per_row: number of tokens of a sample, for speeds; 1 counts samples.
        mpu, mesh_param: must be None.
        dist_init_required, distributed_port: ignored, for compatibility with DeepSpeed.

    Returns:
        (engine, optimizer, loader, scheduler); each of the last three may be None.

    Raises:
        ConfigError: one line that names the key, the value and what to do.
    """
    compiled, model = _passed_model(model, mpu, mesh_param, world, tokens_per_row)
    with contextlib.ExitStack() as undo:
        opened = None
        if world is None:
            world = opened = open_world()
            undo.callback(opened.close)
        translation = _translation(args, config, config_params, world)
        settings = _settings(translation, world, model)
        passed, made = _optimizer(optimizer, model_parameters, model, settings, translation)
        recorded = run_settings(settings, made)  # before a scheduler writes into the groups
        scheduler = _scheduler(lr_scheduler, made, translation) if trained(made) else None
        loader = _loader(training_data, world, settings, translation, seed, collate_fn)
        backend, compiled_again = bypass_compiled(compiled)
        undo.callback(compiled_again)
        units = _units(translation.keys.zero_optimization, model)

        def make_plan(chosen: Transform) -> Plan:
            return build_plan(settings, model, world, optimizer=chosen, units=units, compile=backend)

        state = shard(model, made, make_plan, clip=settings.optim.clip, world=world, weights=weights, seed=seed)
        undo.callback(state.runtime.store.close)
        run_log = _run_log(translation, settings, recorded, state, folder, tokens_per_row)
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
        managed=translation.keys.managed_gradient_accumulation,
        casts_inputs=translation.keys.fp16.auto_cast,
        run_log=run_log,
        opened=opened,
    )
    engine.training_dataloader = loader
    return engine, made if trained(made) else None, loader, scheduler


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Open torch's default process group, for scripts that use it before `initialize`.

    Args:
        *args: ignored, for compatibility with DeepSpeed; backend and ranks are those of the environment.
        **kwargs: ignored, for compatibility with DeepSpeed.
    """
    open_default_group()


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options `--deepspeed`, without effect, and `--deepspeed_config`, the path of the `ds_config.json`.

    Args:
        parser: the parser, which is changed and returned.
    """
    group = parser.add_argument_group("zero")
    group.add_argument("--deepspeed", action="store_true", help="accepted for old command lines, without effect")
    group.add_argument("--deepspeed_config", help="path of the ds_config.json")
    return parser


# Arguments


def _passed_model(
    model: nn.Module | None, mpu: None, mesh_param: None, world: World | None, tokens_per_row: int
) -> tuple[nn.Module, nn.Module]:
    """Check arguments; return the model that was passed, and the model that `torch.compile` made it from."""
    if model is None:
        raise ConfigError("zero.initialize needs model=")
    if isinstance(model, Engine):
        raise ConfigError("model= is an engine already. Use it as it is, without accelerator.prepare.")
    checks.instance("model", model, nn.Module, "Pass a torch.nn.Module.")
    if mpu is not None or mesh_param is not None:
        raise ConfigError("zero.initialize(mpu=..., mesh_param=...): there is no model parallelism. Leave it out.")
    checks.instance("world", world, World | None, "Pass zero.open_world(), or None.")
    checks.whole("tokens_per_row", tokens_per_row, 1, "tokens")
    return model, uncompiled(model)


def _translation(
    args: Any, config: ConfigSource | None, config_params: ConfigSource | None, world: World
) -> Translation:
    """Return the only config that was passed, translated; rank 0 logs its notes."""
    translation = translate(_only_config(args, config, config_params), world_size=world.size, schedule=False)
    for line in translation.notes if world.rank == 0 else ():
        log.warning("%s", line)
    return translation


def _only_config(args: Any, config: ConfigSource | None, config_params: ConfigSource | None) -> ConfigSource:
    sources = (config, config_params, getattr(args, "deepspeed_config", None))
    passed = [source for source in sources if source is not None]
    if len(passed) != 1:
        raise ConfigError(
            f"zero.initialize takes one config, and got {len(passed)} in config=, config_params= and "
            "args.deepspeed_config. Pass config='ds_config.json'."
        )
    return passed[0]


def _settings(translation: Translation, world: World, model: nn.Module) -> Settings:
    """Return the config as settings; "auto" is rejected, because a user's model has no planner."""
    settings = dict(translation.settings)
    if settings["zero"]["stage"] == "auto":
        raise ConfigError("zero_optimization.stage=auto: write a number. zero-train mode=plan compares them.")
    if "batch" not in settings:
        raise ConfigError(
            "train_batch_size=auto: write the rows of a step (train_batch_size) or of a microbatch "
            "(train_micro_batch_size_per_gpu) as a number."
        )
    if translation.keys.zero_optimization.frozen is None and not frozen_matrices(model):
        settings["precision"] = {**settings["precision"], "frozen": "compute"}  # DeepSpeed's key does nothing then
    without_units = {key: value for key, value in settings["zero"].items() if key != "units"}
    return Settings.read({**settings, "zero": without_units}).on(world.size)


def _units(keys: ZeroOptimization, model: nn.Module) -> list[str]:
    """Return the class names of units in the config and of leaf modules; none for the default policy."""
    flag_leaf_modules(model, keys.leaf_module.classes)
    leaves = {type(module).__name__ for module in get_z3_leaf_modules(model)}
    usual = ("auto",) if leaves else ()
    return [*(usual if keys.units is None else keys.units), *sorted(leaves)]


def _optimizer(
    passed: AnyOptimizer, parameters: Iterable[Any] | None, model: nn.Module, config: Settings, translation: Translation
) -> tuple[torch.optim.Optimizer | None, Optimizer]:
    """Return the torch optimizer that was passed, or None, and an `Optimizer` with its groups or of the config."""
    if isinstance(passed, torch.optim.Optimizer):
        made = Optimizer.of(passed)
        return None if made is passed else passed, made
    if passed is None and translation.keys.optimizer.type is None:
        return None, Optimizer.of_nothing()
    trainable = (parameter for parameter in model.parameters() if parameter.requires_grad)
    listed = list(trainable if parameters is None else parameters)
    if passed is None:
        return None, Optimizer.of_config(config, listed, model)
    if not callable(passed):
        raise ConfigError(
            f"optimizer is {checks.type_text(passed)}. Pass torch's optimizer, or a function from parameters to one."
        )
    return _optimizer(passed(listed), None, model, config, translation)


def _loader(
    data: Any,
    world: World,
    settings: Settings,
    translation: Translation,
    seed: int,
    collate: Callable[[list[Any]], Any] | None,
) -> Loader | None:
    if data is None:
        return None
    rows, drop_last = settings.batch.numbers()[1], translation.keys.dataloader_drop_last
    return Loader(data, world, rows=rows, seed=seed, collate=collate, drop_last=drop_last)


def _scheduler(passed: AnyScheduler, optimizer: Optimizer, translation: Translation) -> Scheduler | None:
    if callable(passed) and not isinstance(passed, torch.optim.lr_scheduler.LRScheduler):
        return passed(optimizer)
    if passed is None and translation.scheduler is not None:
        name, arguments = translation.scheduler
        return SCHEDULES[name.lower()](optimizer, **arguments)
    if passed is not None and not callable(getattr(passed, "step", None)):
        raise ConfigError(
            f"lr_scheduler is {checks.type_text(passed)}. Pass torch's scheduler, or a function from the optimizer to "
            "one."
        )
    return passed


def _run_log(
    translation: Translation,
    settings: Settings,
    recorded: Mapping[str, Any],
    state: State,
    folder: str | PathLike[str] | None,
    tokens_per_row: int,
) -> RunLog | None:
    if folder is None and (isinstance(settings.tracker, WandbSettings) or settings.tracker.tensorboard):
        folder = Path("runs") / f"{datetime.now():%Y-%m-%d/%H-%M-%S-%f}"
    if folder is None and "every" not in translation.settings.get("tracker", {}):
        return None
    return RunLog(settings, recorded, state, None if folder is None else Path(folder), tokens_per_row)
