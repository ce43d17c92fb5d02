"""Every key that DeepSpeed 0.19 reads in its JSON, as tables: the values that it takes, and its meaning here.

A key has a meaning (`KEYS`), is ignored with a note (`IGNORED`), or is a section that is ignored or rejected where it
is switched on. Other keys are rejected with the nearest name. Optimizers and schedulers have keys by type.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zero.core.setting_types import MOST


class ValueType(NamedTuple):
    """A type of values: its description, whether it accepts a value, and how it reads one."""

    words: str
    accepts: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda value: value


def _is_number(value: Any, least: float = float("-inf"), below: float = float("inf")) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max and least <= value < below


def _number(words: str, *bounds: float) -> ValueType:
    return ValueType(words, lambda value: _is_number(value, *bounds), float)


def _whole(words: str, *bounds: float) -> ValueType:
    # 5e8 is a whole number, which JSON reads as a float
    return ValueType(words, lambda value: _is_number(value, *bounds) and float(value).is_integer(), int)


def _word(*words: str) -> ValueType:
    return ValueType(" or ".join(words), lambda value: isinstance(value, str) and value.lower() in words, str.lower)


def _are_betas(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_is_number(beta, 0, 1) for beta in value)


BOOL = ValueType("true or false", lambda value: type(value) is bool)
COUNT = _whole("a whole number from 1", 1)
EVERY = ValueType(
    "a whole number from 1, or infinite",
    lambda value: value == float("inf") or COUNT.accepts(value),
    lambda value: MOST if value == float("inf") else int(value),
)
NATURAL = _whole("a whole number from 0", 0)
WHOLE = _whole("a whole number")
NUMBER = _number("a number from 0", 0)
FRACTION = _number("a number from 0, below 1", 0, 1)
STAGE = _whole("0, 1, 2 or 3", 0, 4)
POWER = _whole("a whole number from 0 to 40", 0, 41)
DEVICE = _word("none", "cpu", "nvme")
DTYPE = _word("fp32", "fp16", "bf16")
CURVE = _word("log", "linear")
BETAS = ValueType("a list of two numbers from 0, below 1", _are_betas, lambda value: tuple(map(float, value)))
TEXT = ValueType("text", lambda value: isinstance(value, str) and value.isprintable())
LIST = ValueType("a list", lambda value: isinstance(value, list | tuple), list)
ANY = ValueType("anything", lambda value: True)


class Key(NamedTuple):
    """A key with a meaning. `to` is the setting that takes its value; `here` describes its meaning where none does.

    `only`: the accepted values of a key that would change numbers, for the reason `why`.
    """

    name: str
    type: ValueType
    here: str = ""
    to: str = ""
    why: str = ""
    only: tuple[Any, ...] = ()


def _section(name: str, *keys: Key) -> tuple[Key, ...]:
    return tuple(key._replace(name=f"{name}.{key.name}") for key in keys)


REMAT = "`zero.activations=remat`"

KEYS: tuple[Key, ...] = (
    Key("train_batch_size", COUNT, to="batch.global"),
    Key("train_micro_batch_size_per_gpu", COUNT, to="batch.micro"),
    Key("gradient_accumulation_steps", COUNT, to="batch.accumulate"),
    Key("managed_gradient_accumulation", BOOL, "`zero.initialize`: false leaves it to the caller when to step"),
    Key("gradient_clipping", NUMBER, "`optim.clip`; 0 is `null`; 1.0 without the key, as in newest DeepSpeed"),
    Key("gradient_allreduce_op", _word("mean", "sum", "avg"), why="gradients are averaged", only=("mean", "avg")),
    Key("optimizer.type", TEXT, "`optim`"),
    Key("optimizer.params", ANY, "`optim.*`, with `optim.decay=all`"),
    Key("scheduler.type", TEXT, "`schedule`"),
    Key("scheduler.params", ANY, "`schedule.*` and `optim.lr`"),
    Key("steps_per_print", EVERY, to="tracker.every"),
    Key("dataloader_drop_last", BOOL, "`zero.initialize`: whether its loader leaves out the last, smaller batch"),
    *_section(
        "fp16",
        Key("enabled", BOOL, "`precision=fp16`"),
        Key("loss_scale", NUMBER, "`precision.scale.static`; 0 is `null`: dynamic"),
        Key("initial_scale_power", POWER, "`precision.scale.initial`, 2 to that power"),
        Key("loss_scale_window", COUNT, to="precision.scale.window"),
        Key("hysteresis", COUNT, to="precision.scale.hysteresis"),
        Key("min_loss_scale", NUMBER, to="precision.scale.minimum"),
        Key("auto_cast", BOOL, "`zero.initialize`: false leaves floating-point inputs as they are, with bf16 as well"),
    ),
    Key("bf16.enabled", BOOL, "`precision=bf16`"),
    Key("communication_data_type", DTYPE, to="precision.reduce"),
    Key("sequence_parallel_size", COUNT, why="there is no sequence parallelism", only=(1,)),
    *_section(
        "zero_optimization",
        Key("stage", STAGE, to="zero.stage"),
        Key("nvme_offload_path", TEXT, "`offload.path`"),
        Key("offload_param_nvme", BOOL, "`offload.param=nvme`, whatever `offload_param.device` is"),
        Key("offload_optimizer_nvme", BOOL, "`offload.optimizer=nvme`, whatever `offload_optimizer.device` is"),
        Key("cpu_offload", BOOL, "`offload.optimizer=cpu`"),
        Key("cpu_offload_param", BOOL, "`offload.param=cpu`"),
        Key("cpu_offload_use_pin_memory", BOOL, "`offload.pin`"),
        Key("leaf_module.classes", LIST, "`zero.units`, with the default policy for the rest"),
        Key("units", LIST, to="zero.units"),
        Key("gather", TEXT, to="zero.gather"),
        Key("reduce", TEXT, to="zero.reduce"),
        Key("shard", TEXT, to="zero.shard"),
        Key("legacy_stage1", BOOL, why="there is one stage 1", only=(False,)),
        Key("offload_param.device", DEVICE, "`offload.param`"),
        Key("offload_param.nvme_path", TEXT, "`offload.path`"),
        Key("offload_param.pin_memory", BOOL, "`offload.pin`"),
        Key("offload_optimizer.device", DEVICE, "`offload.optimizer`; `offload.grad` follows it"),
        Key("offload_optimizer.nvme_path", TEXT, "`offload.path`"),
        Key("offload_optimizer.pin_memory", BOOL, "`offload.pin`"),
    ),
    Key("aio.intra_op_parallelism", COUNT, to="offload.threads"),
    *_section(
        "activation_checkpointing",
        Key("partition_activations", BOOL, REMAT),
        Key("cpu_checkpointing", BOOL, REMAT),
        Key("contiguous_memory_optimization", BOOL, REMAT),
        Key("number_checkpoints", COUNT, REMAT),
    ),
    Key("wandb.enabled", BOOL, "`tracker=wandb`"),
    Key("wandb.project", TEXT, "`tracker.project`"),
    Key("wandb.group", TEXT, "`tracker.group`"),
    Key("wandb.team", TEXT, "`tracker.entity`"),
    Key("tensorboard.enabled", BOOL, "`tracker=tensorboard`"),
)

_UNIT = "zero.units and zero.prefetch set what is gathered and reduced together"
_PAGES = "offload.page and offload.threads set how pages travel"
_EXACT = "sums, master copy and moments are fp32"
_ANY_WORLD = "a checkpoint has fp32 values and loads into any world and stage"
_PRINTED = "metrics.jsonl has times and memory in every row"
_ALWAYS = "it is always so here"
_NO_EFFECT = "it has no counterpart here, and changes no number"

IGNORED: Mapping[str, str] = {
    f"{section}{name}": why
    for section, why, names in (
        ("", _EXACT, "prescale_gradients gradient_predivide_factor data_types.grad_accum_dtype data_types.param_dtype"),
        ("", _PRINTED, "wall_clock_breakdown memory_breakdown dump_state log_level timers"),
        ("", _PRINTED, "tensorboard.output_path tensorboard.job_name"),
        ("", _ALWAYS, "zero_allow_untested_optimizer sparse_gradients"),
        ("", _NO_EFFECT, "optimizer.legacy_fusion seq_parallel_communication_data_type disable_allgather"),
        ("", _NO_EFFECT, "zero_force_ds_cpu_optimizer graph_harvesting disable_python_gc vocabulary_size"),
        ("", _NO_EFFECT, "use_data_before_expert_parallelism data_types.buffer_dtype data_types.keep_in_fp32_modules"),
        ("fp16.", _EXACT, "fp16_master_weights_and_grads fused_mode"),
        ("fp16.", "a growing scale refills the hysteresis, a finite step does not", "consecutive_hysteresis"),
        ("bf16.", _EXACT, "immediate_grad_update bf16_master_weights_and_grads bf16_optimizer_states"),
        ("bf16.", _ALWAYS, "check_grad_overflow"),
        ("aio.", _PAGES, "block_size queue_depth single_submit overlap_events use_gds"),
        ("activation_checkpointing.", _NO_EFFECT, "profile synchronize_checkpoint_boundary"),
        ("checkpoint.", _ANY_WORLD, "tag_validation load_universal parallel_write use_node_local_storage"),
        ("checkpoint.", _ANY_WORLD, "checkpoint_serialization"),
        ("zero_optimization.", _UNIT, "reduce_bucket_size allgather_bucket_size use_multi_rank_bucket_allreduce"),
        ("zero_optimization.", _UNIT, "allgather_partitions round_robin_gradients memory_efficient_linear"),
        ("zero_optimization.", _UNIT, "leaf_module.names leaf_module.name_suffixes mics_shard_size"),
        ("zero_optimization.", _UNIT, "mics_hierarchical_params_gather zero_hpz_partition_size"),
        ("zero_optimization.stage3_", _UNIT, "prefetch_bucket_size param_persistence_threshold max_live_parameters"),
        ("zero_optimization.stage3_", _UNIT, "model_persistence_threshold max_reuse_distance allgather_sequential"),
        ("zero_optimization.stage3_", _UNIT, "module_granularity_threshold use_all_reduce_for_fetch_params"),
        ("zero_optimization.stage3_", _ANY_WORLD, "gather_16bit_weights_on_model_save"),
        ("zero_optimization.", _ANY_WORLD, "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint"),
        ("zero_optimization.", _ALWAYS, "contiguous_gradients reduce_scatter overlap_comm ignore_unused_parameters"),
        ("zero_optimization.", _ALWAYS, "compute_grad_norm enable_sanity_checks parameter_alignment"),
        ("zero_optimization.", _EXACT, "zero_quantized_weights zero_quantized_nontrainable_weights"),
        ("zero_optimization.", _EXACT, "zero_quantized_gradients"),
        ("zero_optimization.", _NO_EFFECT, "override_module_apply log_trace_cache_warnings"),
        ("zero_optimization.", _NO_EFFECT, "save_muon_momentum_buffer_in_memory"),
        ("zero_optimization.", _PAGES, "sub_group_size"),
        ("zero_optimization.offload_param.", _PAGES, "buffer_count buffer_size max_in_cpu"),
        ("zero_optimization.offload_optimizer.", _PAGES, "buffer_count buffer_size pipeline_read pipeline_write"),
        ("zero_optimization.offload_optimizer.", _PAGES, "fast_init super_offload cpuadam_cores_perc"),
        (
            "zero_optimization.offload_optimizer.",
            "offload.optimizer=auto with offload.device_budget keeps on the device what fits",
            "ratio",
        ),
    )
    for name in names.split()
}
"""Keys, and sections, that only set how bytes move or what is printed -> the reason. Their values are not checked."""

_ROWS = "metrics.jsonl has every row; tracker=wandb and tracker=tensorboard show them"
_TRACE = "profile=true records one step"
_SAVES = "all ranks write a save at once; checkpoint.async=true writes it in the background"
_DATA = "data comes from the loader as it is"

IGNORED_FEATURES: Mapping[str, str] = {
    "csv_monitor": _ROWS,
    "comet": _ROWS,
    "flops_profiler": _TRACE,
    "comms_logger": _TRACE,
    "compile": "zero.compile=true compiles each unit",
    "zero_optimization.zenflow": "every update is exact, and hides behind the next forward",
    "zero_optimization.zeropp_loco_param": _EXACT,
    "checkpoint.writer": _SAVES,
    "nebula": _SAVES,
    "datastates_ckpt": _SAVES,
    "autotuning": "zero-train mode=plan compares settings",
    "elasticity": _ANY_WORLD,
    "hybrid_engine": "the same state trains and generates",
}
"""Sections that are noted where they are switched on -> the reason. Their keys are not checked."""

REJECTED_FEATURES: Mapping[str, str] = {
    "torch_autocast": "autocast is not used; write bf16 or fp16",
    "amp": "Apex is not used; write bf16 or fp16",
    "progressive_layer_drop": "no layers are dropped",
    "curriculum_learning": _DATA,
    "data_efficiency": _DATA,
    "quantize_training": "there is no quantised training",
    "compression_training": "there is no compression",
    "sparse_attention": "attention is the model's own",
    "eigenvalue": "no eigenvalues are computed",
    "pipeline": "there is no pipeline parallelism",
    "expert_parallel": "ranks are not divided among experts",
    "weight_quantization": "weights are not quantised",
    "tensor_parallel": "there is no tensor parallelism",
}
"""Sections that would change numbers, and are rejected where they are switched on -> the reason."""

_WITHOUT_STAGE3 = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential max_reuse_distance "
    "gather_16bit_weights_on_model_save"
)

ALIASES: Mapping[str, str] = {
    "bfloat16": "bf16",
    "aio.thread_count": "aio.intra_op_parallelism",
    **{f"zero_optimization.{name}": f"zero_optimization.stage3_{name}" for name in _WITHOUT_STAGE3.split()},
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "seq_parallel_comm_data_type": "seq_parallel_communication_data_type",
}
"""Older or shorter names -> names in the tables."""


class Kind(NamedTuple):
    """A type of optimizer or scheduler: its name here, its keys, and DeepSpeed's defaults where ours differ."""

    name: str
    keys: tuple[Key, ...]
    defaults: Mapping[str, Any]
    required: tuple[str, ...] = ()


_OPTIMIZER_KEYS = {
    key.name: key
    for key in (
        Key("lr", NUMBER, to="optim.lr"),
        Key("weight_decay", NUMBER, to="optim.weight_decay"),
        Key("betas", BETAS, "optim.beta1, optim.beta2"),
        Key("eps", NUMBER, to="optim.eps"),
        Key("adam_w_mode", BOOL, "optim=adamw; false: optim=adam"),
        Key("torch_adam", BOOL, "torch's default of weight_decay"),
        Key("momentum", FRACTION, to="optim.momentum"),
        Key("nesterov", BOOL, to="optim.nesterov"),
        Key("bias_correction", BOOL, why="the bias of young moments is corrected", only=(True,)),
        Key("amsgrad", BOOL, why="there is no AMSGrad", only=(False,)),
        Key("maximize", BOOL, why="losses are minimised", only=(False,)),
        Key("lr_decay", NUMBER, why="the schedule changes the learning rate", only=(0.0,)),
        Key("initial_accumulator_value", NUMBER, why="sums of squares begin at 0", only=(0.0,)),
        Key("dampening", NUMBER, why="the momentum takes a gradient whole", only=(0.0,)),
    )
}
IGNORED_OPTIMIZER_KEYS = (
    *("foreach", "fused", "capturable", "differentiable", "set_grad_none"),
    "fp32_optimizer_states",
)


def _optimizer(name: str, keys: str, **defaults: Any) -> Kind:
    return Kind(name, tuple(_OPTIMIZER_KEYS[key] for key in keys.split()), {**defaults, "weight_decay": 0.0})


_ADAM = _optimizer(
    "adamw",
    "lr weight_decay betas eps adam_w_mode torch_adam bias_correction amsgrad maximize",
    lr=1e-3,
    betas=(0.9, 0.999),
    eps=1e-8,
)

OPTIMIZERS: Mapping[str, Kind] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": _optimizer("lion", "lr weight_decay betas", lr=1e-3, betas=(0.9, 0.999)),
    "adagrad": _optimizer("adagrad", "lr weight_decay eps lr_decay initial_accumulator_value", lr=1e-2, eps=1e-10),
    "sgd": _optimizer(
        "sgd", "lr weight_decay momentum nesterov dampening maximize", lr=1e-3, momentum=0.0, nesterov=False
    ),
}
"""Optimizers by their names in lower case, as DeepSpeed compares its own."""

_SCHEDULER_KEYS = {
    key.name: key
    for key in (
        Key("warmup_min_lr", NUMBER, "schedule.start, as a share of the peak"),
        Key("warmup_max_lr", NUMBER, "optim.lr"),
        Key("warmup_num_steps", COUNT, "schedule.warmup"),
        Key("warmup_type", CURVE, to="schedule.curve"),
        Key("total_num_steps", COUNT, to="schedule.total"),
        Key("warmup_min_ratio", NUMBER, to="schedule.start"),
        Key("cos_min_ratio", NUMBER, to="schedule.final"),
        Key("cycle_min_lr", NUMBER, "schedule.start, as a share of the peak"),
        Key("cycle_max_lr", NUMBER, "optim.lr"),
        Key("decay_lr_rate", NUMBER, to="schedule.decay_rate"),
        Key("cycle_first_step_size", COUNT, to="schedule.rise"),
        Key("cycle_second_step_size", NATURAL, to="schedule.fall"),
        Key("cycle_first_stair_count", NATURAL, to="schedule.rise_stairs"),
        Key("cycle_second_stair_count", NATURAL, to="schedule.fall_stairs"),
        Key("decay_step_size", NATURAL, to="schedule.decay_every"),
        Key("cycle_momentum", BOOL, to="schedule.momentum"),
        Key("cycle_min_mom", FRACTION, to="schedule.momentum_min"),
        Key("cycle_max_mom", FRACTION, to="schedule.momentum_max"),
        Key("decay_mom_rate", NUMBER, to="schedule.momentum_decay_rate"),
        Key("lr_range_test_min_lr", NUMBER, "optim.lr"),
        Key("lr_range_test_step_size", COUNT, to="schedule.every"),
        Key("lr_range_test_step_rate", NUMBER, to="schedule.rate"),
        Key("lr_range_test_staircase", BOOL, to="schedule.stairs"),
        Key("last_batch_iteration", WHOLE, why="a resumed run knows its step", only=(-1,)),
    )
}


def _scheduler(name: str, keys: str, required: tuple[str, ...] = (), **defaults: Any) -> Kind:
    names = (*keys.split(), "last_batch_iteration")
    return Kind(name, tuple(_SCHEDULER_KEYS[key] for key in names), defaults, required)


_WARMUP: Mapping[str, Any] = {"warmup_num_steps": 1000, "warmup_type": "log"}
_RISE = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type"

SCHEDULERS: Mapping[str, Kind] = {
    "WarmupLR": _scheduler("linear_warmup", _RISE, warmup_min_lr=0.0, **_WARMUP),
    "WarmupDecayLR": _scheduler(
        "warmup_linear",
        f"total_num_steps {_RISE}",
        ("total_num_steps",),
        warmup_min_lr=0.0,
        warmup_max_lr=1e-3,
        **_WARMUP,
    ),
    "WarmupCosineLR": _scheduler(
        "warmup_cosine",
        "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type",
        ("total_num_steps",),
        warmup_min_ratio=0.0,
        cos_min_ratio=1e-4,
        **_WARMUP,
    ),
    "OneCycle": _scheduler(
        "one_cycle",
        "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
        "cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate",
        ("cycle_min_lr", "cycle_max_lr"),
        cycle_first_step_size=2000,
    ),
    "LRRangeTest": _scheduler(
        "lr_range",
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
        lr_range_test_min_lr=1e-3,
        lr_range_test_step_size=2000,
    ),
}
"""Schedulers, each with its keys in the order of DeepSpeed's arguments."""
