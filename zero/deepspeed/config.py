"""Translate a DeepSpeed configuration to settings of this library.

Keys that only set how bytes move are ignored with a note. Keys that would change the numbers of a run are rejected, and
so are misspelt keys and contradictions. Defaults are DeepSpeed's wherever its section is used: an optimizer without a
scheduler keeps its learning rate, weight decay applies to all parameters, a warm-up is logarithmic.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from zero.core import schema, suggest
from zero.core.stage import Stage
from zero.deepspeed.config_keys import KEYS, Key, Kind
from zero.deepspeed.config_source import CheckedConfig, check, read_source
from zero.errors import ConfigError
from zero.settings import Settings

ZERO = "zero_optimization"
PARAM, OPTIMIZER = f"{ZERO}.offload_param", f"{ZERO}.offload_optimizer"


@dataclass(frozen=True)
class Translation:
    """A configuration as settings of this library.

    Attributes:
        settings: nested, for `Settings.read`; only settings that the configuration has. Without an `optimizer` and a
            `scheduler` there is no `schedule`, and `optim` has only a name and a clip.
        values: dotted keys of the configuration -> values.
        notes: one line for each ignored key, and for each default that may surprise.
        managed: True if the engine counts microbatches; False if the caller decides when to step.
        drop_last: whether a loader leaves out the last, smaller batch.
        casts_inputs: whether floating-point inputs are cast to the dtype of compute.
        has_optimizer: whether the configuration names one.
        scheduler: type and arguments of one of `lr_schedules.SCHEDULES`; None if there is none or `settings` have it.
    """

    settings: Mapping[str, Any]
    values: Mapping[str, Any]
    notes: tuple[str, ...]
    managed: bool
    drop_last: bool
    casts_inputs: bool
    has_optimizer: bool
    scheduler: tuple[str, Mapping[str, Any]] | None


def translate(
    raw: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int | None = None, schedule: bool = True
) -> Translation:
    """Translate a DeepSpeed configuration.

    Args:
        raw: a dict, the path of a JSON file, or JSON.
        world_size: the number of ranks, to check the batch sizes; None: not known yet.
        schedule: whether `settings` have the schedule. False: the caller makes the object `scheduler`, which computes a
            few schedules that settings do not have.

    Raises:
        ConfigError: one line that begins with the configuration's name.
    """
    name, written = read_source(raw)
    try:
        config = check(written)
        flat = _direct(KEYS, config.values) | _batch(config, world_size) | _stage(config) | _precision(config)
        flat |= _offload(config) | _optim(config) | _tracker(config)
        peak = _noted_peak(config)
        flat |= _schedule(config, peak) if schedule else {}
        scheduler = None if schedule or config.scheduler is None else _scheduler(config, config.scheduler)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return Translation(
        settings=_nested({key: flat[key] for key in schema.keys(Settings) if key in flat}),
        values=config.values,
        notes=tuple(f"{name}: {note}" for note in config.notes),
        managed=config.get("managed_gradient_accumulation", True),
        drop_last=config.get("dataloader_drop_last", False),
        casts_inputs=config.get("fp16.auto_cast", True),
        has_optimizer=config.optimizer is not None,
        scheduler=scheduler,
    )


def _direct(keys: Iterable[Key], values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.to: values[key.name] for key in keys if key.to and key.name in values}


def _batch(config: CheckedConfig, world_size: int | None) -> dict[str, Any]:
    """Check total = micro x accumulation x ranks, with DeepSpeed's rule: accumulation is 1 where it is left out."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, accumulate = (config.get(name) for name in names)
    if total is None and micro is None:
        if config.autos & set(names[:2]):
            return {} if names[0] in config.autos else {"batch.micro": "auto"}
        raise ConfigError("train_batch_size and train_micro_batch_size_per_gpu are both missing. Write one of them.")
    if total is None:
        return {"batch.global": "auto", "batch.accumulate": accumulate or 1}
    factors = {name: config.get(name) for name in names[1:] if config.get(name) is not None}
    product = math.prod(factors.values()) * (world_size or 1)
    is_full = None not in (micro, accumulate, world_size)
    if total != product if is_full else total % product:
        ranks = [] if world_size is None else [f"{world_size} rank{'s' * (world_size > 1)}"]
        text = " x ".join([*(f"{name}={value}" for name, value in factors.items()), *ranks])
        does = "is not" if is_full else "does not divide by"
        raise ConfigError(f"train_batch_size={total} {does} {text} = {product}. Leave one of them out.")
    return {"batch.accumulate": accumulate or 1} if micro is None else {}


def _stage(config: CheckedConfig) -> dict[str, Any]:
    stage = "auto" if f"{ZERO}.stage" in config.autos else config.get(f"{ZERO}.stage", 0)
    leaves = config.get(f"{ZERO}.leaf_module.classes")
    units = {"zero.units": ["auto", *(str(leaf).rpartition(".")[2] for leaf in leaves)]} if leaves else {}
    recomputes = any(config.below("activation_checkpointing").values())
    activations = {"zero.activations": "remat"} if recomputes else {}
    return {"zero.stage": stage, **units, **activations}


def _precision(config: CheckedConfig) -> dict[str, Any]:
    fp16, bf16 = config.get("fp16.enabled", False), config.get("bf16.enabled", False)
    if fp16 and bf16:
        raise ConfigError("fp16.enabled and bf16.enabled are both true; choose one")
    if not (fp16 or bf16) and (unfilled := sorted(config.autos & {"fp16.enabled", "bf16.enabled"})):
        config.note(f"{unfilled[0]}=auto: nothing fills it in, so the model computes in fp32; write true or false")
    compute = "fp16" if fp16 else "bf16" if bf16 else "fp32"
    if config.get("communication_data_type") == "fp16" != compute:
        raise ConfigError(f"communication_data_type=fp16 has no loss scale while the model computes in {compute}")
    settings: dict[str, Any] = {"precision.compute": compute}
    if not fp16:
        return settings
    initial, minimum = 2.0 ** config.get("fp16.initial_scale_power", 16), config.get("fp16.min_loss_scale", 1.0)
    if minimum <= 0:
        raise ConfigError("fp16.min_loss_scale=0: must be above 0")
    if config.get("fp16.loss_scale"):
        return settings | {"precision.scale.static": config.get("fp16.loss_scale")}
    if minimum > initial:
        raise ConfigError(
            f"fp16.min_loss_scale={minimum:g} is above the first scale, 2^initial_scale_power={initial:g}"
        )
    settings["precision.scale.initial"] = initial
    if initial > Settings().precision.scale.maximum:  # DeepSpeed has none
        settings["precision.scale.maximum"] = initial
    return settings


def _offload(config: CheckedConfig) -> dict[str, Any]:
    """Return the tiers. Gradients follow the optimizer's state off the device."""
    param = _device(config, PARAM, "offload_param_nvme", "cpu_offload_param")
    optimizer = _device(config, OPTIMIZER, "offload_optimizer_nvme", "cpu_offload")
    stage = config.get(f"{ZERO}.stage", 0)
    if param in ("cpu", "nvme") and not Stage(stage).parameters and f"{ZERO}.stage" not in config.autos:
        if param == "nvme":
            raise ConfigError(f"{PARAM} on {param} needs {ZERO}.stage=3; stage {stage} keeps parameters on every rank")
        config.note(f"{PARAM} on cpu needs {ZERO}.stage=3; at stage {stage} parameters stay on the device")
        param = "none"  # as in DeepSpeed, whose scripts write one device for all stages
    grad = {"none": "none", "auto": "auto"}.get(optimizer, "nvme" if optimizer == param == "nvme" else "cpu")
    tiers = {"offload.optimizer": optimizer, "offload.param": param, "offload.grad": grad}
    return tiers | _disks(config, param, optimizer) | _pins(config, param, optimizer)


def _disks(config: CheckedConfig, param: str, optimizer: str) -> dict[str, Any]:
    sources = (f"{ZERO}.nvme_offload_path", f"{OPTIMIZER}.nvme_path", f"{PARAM}.nvme_path")
    folders = list(dict.fromkeys(config.get(name) for name in sources if config.get(name)))
    if "nvme" in (param, optimizer) and not folders and not config.autos & set(sources):
        section = OPTIMIZER if optimizer == "nvme" else PARAM
        raise ConfigError(f"{section} on nvme needs {section}.nvme_path, a folder on a fast local disk")
    if not folders or not {param, optimizer} & {"nvme", "auto"}:
        return {}
    if len(folders) > 1:
        config.note(f"pages of all kinds are spread over {' and '.join(folders)}, by their rates")
    return {"offload.path": folders if len(folders) > 1 else folders[0]}


def _pins(config: CheckedConfig, param: str, optimizer: str) -> dict[str, Any]:
    used = [section for section, device in ((PARAM, param), (OPTIMIZER, optimizer)) if device != "none"]
    names = [*(f"{section}.pin_memory" for section in used), f"{ZERO}.cpu_offload_use_pin_memory"]
    pins = [config.values[name] for name in names if name in config.values]
    return {"offload.pin": any(pins)} if pins else {}


def _device(config: CheckedConfig, section: str, flag: str, older: str) -> str:
    """Return the tier of parameters or of the optimizer's state. The flag for NVMe wins over the device beside it."""
    if config.get(f"{ZERO}.{flag}"):
        return "nvme"
    if f"{section}.device" in config.autos:
        return "auto"
    if config.get(f"{ZERO}.{older}"):
        if f"{section}.device" in config.values:
            raise ConfigError(f"{ZERO}.{older} is the older spelling of {section}.device. Remove it.")
        return "cpu"
    return str(config.get(f"{section}.device", "none"))


def _optim(config: CheckedConfig) -> dict[str, Any]:
    clip = config.get("gradient_clipping", 1.0)
    if not {"gradient_clipping"} & {*config.values, *config.autos}:
        config.note("gradient_clipping is not given: 1.0, as in newest DeepSpeed (older ones: 0.0, no clipping)")
    settings: dict[str, Any] = {"optim.name": "adamw", "optim.clip": clip or None}
    if config.optimizer is None:
        return settings
    params = {**config.optimizer.defaults, **config.below("optimizer.params")}
    params = {name: value for name, value in params.items() if f"optimizer.params.{name}" not in config.autos}
    settings |= {"optim.name": config.optimizer.name, "optim.decay": "all"}
    if config.get("optimizer.type").lower() == "adam" and not params.get("adam_w_mode", True):
        settings["optim.name"] = "adam"
    elif params.get("torch_adam"):
        params["weight_decay"] = config.get("optimizer.params.weight_decay", 0.01)  # torch.optim.AdamW's
    if "betas" in params:
        settings["optim.beta1"], settings["optim.beta2"] = params["betas"]
    return settings | _direct(config.optimizer.keys, params)


_PEAKS = {"one_cycle": "cycle_max_lr", "lr_range": "lr_range_test_min_lr"}


def _peak_key(kind: str) -> str:
    return _PEAKS.get(kind, "warmup_max_lr")


def _peak(config: CheckedConfig) -> float | None:
    """Return the highest learning rate that the schedule itself has."""
    if config.scheduler is None:
        return None
    key = _peak_key(config.scheduler.name)
    if f"scheduler.params.{key}" in config.autos:
        return None
    return {**config.scheduler.defaults, **config.below("scheduler.params")}.get(key)


def _noted_peak(config: CheckedConfig) -> float | None:
    """Return `_peak`, and note if it wins over another learning rate."""
    if config.scheduler is None or (peak := _peak(config)) is None:
        return None
    key = _peak_key(config.scheduler.name)
    params, lr = config.below("scheduler.params"), config.get("optimizer.params.lr", peak)
    if key not in params or lr != peak:
        config.note(f"scheduler.params.{key} is {peak:g}, and wins over optimizer.params.lr, as in DeepSpeed")
    return peak


def _scheduler(config: CheckedConfig, kind: Kind) -> tuple[str, dict[str, Any]]:
    """Return type and arguments. A peak of "auto" is each group's rate; other words "auto" are the defaults."""
    section, peak_key = "scheduler.params", _peak_key(kind.name)
    for key in ("warmup_num_steps", *kind.required):
        if f"{section}.{key}" in config.autos and key != peak_key:
            raise ConfigError(f"{section}.{key}=auto: write the number, because nothing fills it in")
    arguments = config.below(section)
    if f"{section}.{peak_key}" in config.autos:
        arguments[peak_key] = None
    return config.get("scheduler.type"), arguments


def _schedule(config: CheckedConfig, scheduler_peak: float | None) -> dict[str, Any]:
    """Return the schedule and the peak learning rate: the scheduler's, or else the optimizer's."""
    if config.scheduler is None:
        return {} if config.optimizer is None else {"schedule.name": "constant"}
    section = "scheduler.params"
    params = {**config.scheduler.defaults, **config.below(section)}
    name, settings = config.scheduler.name, _direct(config.scheduler.keys, params)
    peak = _lr(config) if scheduler_peak is None else scheduler_peak
    if scheduler_peak is not None:
        settings["optim.lr"] = peak
    if peak <= 0:
        raise ConfigError(f"{section}.{_peak_key(name)}={peak:g}: must be above 0")
    if name == "one_cycle":
        settings |= _cycle(config, params, peak)
    elif name != "lr_range":
        settings |= _rise(config, name, params, peak)
    return {"schedule.name": name} | settings


def _lr(config: CheckedConfig) -> float:
    """Return the optimizer's learning rate; this library's default if it is "auto" or there is no optimizer."""
    if config.optimizer is None or "optimizer.params.lr" in config.autos:
        name = "adamw" if config.optimizer is None else config.optimizer.name
        return Settings.read({"optim": {"name": name}}).optim.lr
    return float(config.get("optimizer.params.lr", config.optimizer.defaults["lr"]))


def _rise(config: CheckedConfig, name: str, params: Mapping[str, Any], peak: float) -> dict[str, Any]:
    """Return the settings of a warm-up and its decay.

    DeepSpeed makes its first two updates at the first rate. The setting `schedule` has the first rate once, so every
    rate comes a step earlier. A logarithm is then at its peak in step `warmup_num_steps`, a line one step later, where
    a linear decay begins; a cosine begins a step ahead of that.
    """
    log, cosine = params["warmup_type"] == "log", name == "warmup_cosine"
    start = params["warmup_min_ratio"] if cosine else params["warmup_min_lr"] / peak
    if start and not cosine and _peak(config) is None and config.optimizer is None:
        raise ConfigError("scheduler.params.warmup_min_lr needs warmup_max_lr: there is no optimizer.params.lr")
    if start > 1:
        raise ConfigError(f"scheduler.params: the warm-up begins at {start * peak:g}, above its peak of {peak:g}")
    is_auto = "scheduler.params.warmup_num_steps" in config.autos
    warmup = None if is_auto else max(2, params["warmup_num_steps"]) + (not log)
    settings = {"schedule.start": start, "schedule.warmup": warmup or "auto"}
    if name == "linear_warmup":
        return settings
    total = params.get("total_num_steps")
    if cosine:
        settings["schedule.hold"] = int(log) - 1
    else:
        settings |= {"schedule.final": start, "schedule.hold": int(log)}
        total = None if total is None else total + 1
    if total is not None and warmup is not None and total <= warmup:
        raise ConfigError(
            f"scheduler.params: total_num_steps={params['total_num_steps']} leaves no step for the decay after "
            f"warmup_num_steps={params['warmup_num_steps']}"
        )
    return settings if total is None else settings | {"schedule.total": total}


def _cycle(config: CheckedConfig, params: Mapping[str, Any], peak: float) -> dict[str, Any]:
    """Return the settings of one cycle.

    DeepSpeed's cycle sets both betas, the second to 0.99, and no other momentum. It makes the first update with the
    lowest momentum.
    """
    start = params.get("cycle_min_lr", 0.0) / peak
    if start > 1:
        raise ConfigError(f"scheduler.params.cycle_min_lr={start * peak:g} is above cycle_max_lr={peak:g}")
    if params.get("cycle_second_step_size") == 0:
        raise ConfigError("scheduler.params.cycle_second_step_size=0: must be 1 or more")
    settings = {"schedule.start": start}
    if config.optimizer is not None and not any(key.name == "betas" for key in config.optimizer.keys):
        return settings | {"schedule.momentum": False}
    if not params.get("cycle_momentum", True):
        return settings
    if params.get("decay_mom_rate") and params.get("decay_step_size"):
        raise ConfigError(
            f"scheduler.params.decay_mom_rate={params['decay_mom_rate']:g}: beta1 grows with every step of the decay, "
            "and past 1. Leave it out."
        )
    return settings | {"optim.beta2": 0.99, "schedule.momentum_start": params.get("cycle_min_mom", 0.8)}


def _tracker(config: CheckedConfig) -> dict[str, Any]:
    settings = {"tracker.tensorboard": True} if config.get("tensorboard.enabled", False) else {}
    if not config.get("wandb.enabled", False):
        return {"tracker.name": "jsonl", **settings}
    names = {"tracker.group": config.get("wandb.group"), "tracker.entity": config.get("wandb.team")}
    settings |= {key: value for key, value in names.items() if value}
    return {"tracker.name": "wandb", "tracker.project": config.get("wandb.project", "deepspeed"), **settings}


# Settings as text


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as words of a command line: options first, because a key belongs to one."""
    flat = schema.flat(settings)
    options = [f"{key.removesuffix('.name')}={value}" for key, value in flat.items() if key.endswith(".name")]
    return options + [f"{key}={suggest.word(value)}" for key, value in flat.items() if not key.endswith(".name")]


def differing(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults of the chosen options."""
    flat, usual = schema.flat(settings), schema.flat(Settings().plain())
    names = {key: value for key, value in flat.items() if key.endswith(".name")}
    plain = dict(usual)
    for key, value in names.items():  # each alone: one may need a key of another
        section = key.removesuffix("name")
        alone = schema.flat(Settings.read(_nested({key: value})).plain())
        plain |= {name: default for name, default in alone.items() if name.startswith(section)}
    return _nested({key: value for key, value in flat.items() if value != (usual if key in names else plain)[key]})


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, last = key.split(".")
        node = nested
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return nested
