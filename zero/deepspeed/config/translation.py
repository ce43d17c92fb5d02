"""Translation of a DeepSpeed configuration to settings of this library.

Keys that only affect how data is moved are ignored with a note. Keys that would change the numbers of a run are
rejected, and so are misspelt keys and contradictions. In the sections that a configuration has, defaults are
DeepSpeed's: an optimizer without a scheduler keeps its learning rate, weight decay applies to all parameters, a warm-up
is logarithmic.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero.core import schema, suggest
from zero.core.batch import solve_batch
from zero.core.stage import Stage
from zero.deepspeed.config.key_types import moved
from zero.deepspeed.config.keys import Keys
from zero.deepspeed.config.optimizer_keys import AdamWKeys, LionKeys, MuonKeys
from zero.deepspeed.config.schedules import check_one_schedule, optim_of_schedule, schedule_settings, scheduler_of
from zero.deepspeed.config.source import CheckedConfig, check, read_source
from zero.errors import ConfigError
from zero.settings import Settings

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Translation:
    """A DeepSpeed configuration translated to settings of this library.

    Attributes:
        settings: a nested mapping for `Settings.read`, with the settings that the configuration determines. Without an
            `optimizer` and a `scheduler` it has no `schedule`, and its `optim` has only a name and a clip.
        keys: the keys of the configuration.
        notes: lines to print: one with the ignored keys, and one for each default that a user may not expect.
        scheduler: type and arguments of one of `lr_schedules.SCHEDULES`; None if the configuration has no scheduler, or
            if `settings` have it.
    """

    settings: Mapping[str, Any]
    keys: Keys
    notes: tuple[str, ...]
    scheduler: tuple[str, Mapping[str, Any]] | None


def translate(
    raw: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int | None = None, schedule: bool = True
) -> Translation:
    """Translate a DeepSpeed configuration.

    Args:
        raw: a dict, the path of a JSON file, or JSON.
        world_size: the number of ranks, to check the batch sizes; None: not known yet.
        schedule: whether to translate the scheduler to settings. False: the caller makes a scheduler object from
            `Translation.scheduler`, which can compute some schedules that settings cannot express.

    Raises:
        ConfigError: the configuration is invalid; the message is one line that begins with its name.
    """
    name, written = read_source(raw)
    try:
        config = check(written)
        if schedule:
            check_one_schedule(config.scheduler)
        sections = {
            "zero": _zero(config),
            "batch": _batch(config, world_size),
            "precision": _precision(config),
            "offload": _offload(config),
            "optim": _optim(config, schedule),
            "schedule": schedule_settings(config) if schedule else {},
            "tracker": _tracker(config.keys),
        }
        scheduler = None if schedule else scheduler_of(config)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    settings = {section: values for section, values in sections.items() if values}
    return Translation(settings, config.keys, tuple(f"{name}: {note}" for note in config.notes), scheduler)


def _zero(config: CheckedConfig) -> dict[str, Any]:
    zero, remat = config.keys.zero_optimization, config.keys.activation_checkpointing
    settings: dict[str, Any] = {"stage": "auto" if "zero_optimization.stage" in config.autos else zero.stage}
    if zero.leaf_module.classes:
        settings["units"] = ["auto", *(leaf.rpartition(".")[2] for leaf in zero.leaf_module.classes)]
    if any(remat.model_dump().values()):
        settings["activations"] = "remat"
    return settings | moved(zero, "zero")


def _batch(config: CheckedConfig, world_size: int | None) -> dict[str, Any]:
    """Return the section `batch`. Accumulation is 1 if it and a batch size are missing, as in DeepSpeed."""
    keys = config.keys
    total, micro = keys.train_batch_size, keys.train_micro_batch_size_per_gpu
    accumulate = keys.gradient_accumulation_steps
    if total == micro == "auto":
        if config.autos.isdisjoint(BATCH_KEYS[:2]):
            raise ConfigError(f"{BATCH_KEYS[0]} and {BATCH_KEYS[1]} are both missing. Write one of them.")
        return {}
    if accumulate == "auto" and "auto" in (total, micro):
        accumulate = 1
    if world_size is not None or total == "auto" or micro == "auto" or accumulate == "auto":
        solve_batch(total, micro, accumulate, world_size or 1, BATCH_KEYS)
    elif total % (micro * accumulate):
        factors = f"{BATCH_KEYS[1]}={micro} x {BATCH_KEYS[2]}={accumulate}"
        raise ConfigError(f"{BATCH_KEYS[0]}={total} does not divide by {factors}. Set one of the three to auto.")
    return {"global": total, "micro": micro, "accumulate": accumulate}


def _precision(config: CheckedConfig) -> dict[str, Any]:
    keys, fp16 = config.keys, config.keys.fp16
    is_bf16 = keys.bf16.enabled or keys.bfloat16.enabled
    if fp16.enabled and is_bf16:
        raise ConfigError("fp16.enabled and bf16.enabled are both true. Choose one.")
    if not (fp16.enabled or is_bf16) and (unfilled := sorted(config.autos & {"fp16.enabled", "bf16.enabled"})):
        config.notes.append(
            f"{unfilled[0]}=auto: nothing fills it in, so the model computes in fp32. Write true or false."
        )
    compute = "fp16" if fp16.enabled else "bf16" if is_bf16 else "fp32"
    if keys.communication_data_type == "fp16" != compute:
        raise ConfigError(f"communication_data_type=fp16 has no loss scale while the model computes in {compute}")
    scale = moved(fp16, "precision.scale")
    if fp16.enabled and fp16.loss_scale:
        scale["static"] = fp16.loss_scale
    elif fp16.enabled:
        scale["initial"] = 2.0**fp16.initial_scale_power
        if scale["initial"] > Settings().precision.scale.maximum:  # DeepSpeed has no maximum
            scale["maximum"] = scale["initial"]
    frozen = {"frozen": "int8"} if keys.zero_optimization.zero_quantized_nontrainable_weights else {}
    copied = frozen | moved(keys.zero_optimization, "precision") | moved(keys, "precision")
    return {"compute": compute, **copied, **({"scale": scale} if scale else {})}


def _offload(config: CheckedConfig) -> dict[str, Any]:
    """Return the section `offload`. Gradients are offloaded if the optimizer's state is."""
    zero = config.keys.zero_optimization
    param = _tier(config, "offload_param", zero.offload_param_nvme, zero.cpu_offload_param)
    optimizer = _tier(config, "offload_optimizer", zero.offload_optimizer_nvme, zero.cpu_offload)
    is_sharded = Stage(zero.stage).parameters or "zero_optimization.stage" in config.autos
    if param in ("cpu", "nvme") and not is_sharded:
        line = (
            f"zero_optimization.offload_param on {param} needs stage=3, because at stage {zero.stage} parameters stay"
        )
        if param == "nvme":
            raise ConfigError(f"{line} on every rank")
        config.notes.append(f"{line} on the device")
        param = "none"  # as in DeepSpeed, whose scripts write one device for all stages
    grad = {"none": "none", "auto": "auto"}.get(optimizer, "nvme" if optimizer == param == "nvme" else "cpu")
    tiers = {"offload_param": param, "offload_optimizer": optimizer}
    aio = config.keys.aio
    if None not in (aio.intra_op_parallelism, aio.thread_count) and aio.intra_op_parallelism != aio.thread_count:
        raise ConfigError("aio.intra_op_parallelism and aio.thread_count are different numbers of threads. Keep one.")
    settings = {"optimizer": optimizer, "param": param, "grad": grad, **moved(aio, "offload")}
    pins = [getattr(zero, name).pin_memory for name, tier in tiers.items() if tier != "none"]
    if any(pin is not None for pin in pins):
        settings["pin"] = any(pins)
    return settings | _disks(config, tiers)


def _tier(config: CheckedConfig, section: str, nvme: bool, cpu: bool) -> str:
    """Return the tier of parameters or of the optimizer's state. The flag for NVMe overrides the key `device`."""
    if nvme:
        return "nvme"
    if f"zero_optimization.{section}.device" in config.autos:
        return "auto"
    device = getattr(config.keys.zero_optimization, section).device
    if cpu and device not in (None, "cpu"):
        flag = "cpu_offload_param" if section == "offload_param" else "cpu_offload"
        raise ConfigError(f"zero_optimization.{flag}: {section}.device={device} is there too. Remove the older flag.")
    return device or ("cpu" if cpu else "none")


def _disks(config: CheckedConfig, tiers: Mapping[str, str]) -> dict[str, Any]:
    zero = config.keys.zero_optimization
    paths = (zero.nvme_offload_path, zero.offload_optimizer.nvme_path, zero.offload_param.nvme_path)
    folders = list(dict.fromkeys(path for path in paths if path))
    missing = [name for name, tier in tiers.items() if tier == "nvme" and not folders]
    if missing and not any("nvme" in name for name in config.autos):
        section = f"zero_optimization.{missing[-1]}"
        raise ConfigError(f"{section} on nvme needs {section}.nvme_path, a folder on a fast local disk")
    if not folders or not {"nvme", "auto"} & {*tiers.values()}:
        return {}
    return {"path": folders if len(folders) > 1 else folders[0]}


def _optim(config: CheckedConfig, schedule: bool) -> dict[str, Any]:
    clip, optimizer = config.keys.gradient_clipping, config.optimizer
    if clip is None and "gradient_clipping" not in config.autos:
        config.notes.append(
            "gradient_clipping is not given: 1.0, as in newest DeepSpeed (older ones: 0.0, no clipping)"
        )
    settings: dict[str, Any] = {"name": "adamw", "clip": 1.0 if clip is None else clip or None}
    if optimizer is not None:
        settings |= {"name": optimizer.name, "decay": "all", **moved(optimizer, "optim", config.autos)}
    if isinstance(optimizer, LionKeys) and "optimizer.params.betas" not in config.autos:
        settings["beta1"], settings["beta2"] = optimizer.betas
    if isinstance(optimizer, AdamWKeys):
        is_adam = str(config.keys.optimizer.type).lower() == "adam"
        if is_adam and not optimizer.adam_w_mode:
            settings["name"] = "adam"
        elif optimizer.torch_adam and "weight_decay" not in optimizer.model_fields_set:
            settings["weight_decay"] = 0.01  # the default of torch.optim.AdamW
    if isinstance(optimizer, MuonKeys):
        lr = optimizer.lr if "lr" in optimizer.model_fields_set else 3e-4
        settings |= {"exclude": ["*embed*", "*lm_head*"], "adamw_lr": optimizer.adam_lr or lr}
        if optimizer.muon_lr is not None:
            settings["lr"] = optimizer.muon_lr
    of_schedule = optim_of_schedule(config)
    if "lr" in of_schedule and schedule:
        settings.pop("adamw_lr", None)  # DeepSpeed's schedulers give all groups one rate
    return settings | of_schedule if schedule else settings


def _tracker(keys: Keys) -> dict[str, Any]:
    settings: dict[str, Any] = moved(keys, "tracker")
    if keys.tensorboard.enabled:
        settings["tensorboard"] = True
    if not keys.wandb.enabled:
        return {"name": "jsonl", **settings}
    names = {"project": keys.wandb.project, "group": keys.wandb.group, "entity": keys.wandb.team}
    return {"name": "wandb", **settings, **{key: value for key, value in names.items() if value}}


# Settings as text


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as words of a command line. Options of groups come first, because other keys depend on them."""
    flat = schema.flat_fields(settings)
    options = [f"{key.removesuffix('.name')}={value}" for key, value in flat.items() if key.endswith(".name")]
    return options + [f"{key}={suggest.word(value)}" for key, value in flat.items() if not key.endswith(".name")]
