"""Every key that DeepSpeed 0.19 reads in its JSON, as one table: the values that it takes, and what it means here.

A key is one of four things. It has a meaning here (`to` or `here` names the setting). It has none, because it only says
how bytes are moved or what is printed: it is accepted, and one line says why (`why`). It asks for other numbers than
this library computes: any value but `only` is refused, for the reason `why`. Or it is not in the table, and is refused
with the nearest name; DeepSpeed itself ignores what it does not know at the top level.

Aliases and the keys of optimizers and schedulers, which differ by type, have tables of their own.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from zero.core.setting_types import MOST


class ValueType(NamedTuple):
    """A kind of value: its description, what is one, and how that is read."""

    words: str
    accepts: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda value: value


def _is_number(value: Any, least: float = float("-inf"), below: float = float("inf")) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max and least <= value < below


def _number(words: str, *bounds: float) -> ValueType:
    return ValueType(words, lambda value: _is_number(value, *bounds), float)


def _whole(words: str, *bounds: float) -> ValueType:
    """Whole numbers may be written as 5e8, which JSON reads as a float."""
    return ValueType(words, lambda value: _is_number(value, *bounds) and float(value).is_integer(), int)


def _one_of(*words: str) -> ValueType:
    """One of a few words, in upper or lower case."""
    return ValueType(" or ".join(words), lambda value: isinstance(value, str) and value.lower() in words, str.lower)


def _are_betas(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_is_number(one, 0, 1) for one in value)


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
ANY_NUMBER = _number("a number")
FRACTION = _number("a number from 0, below 1", 0, 1)
STAGE = _whole("0, 1, 2 or 3", 0, 4)
POWER = _whole("a whole number from 0 to 40", 0, 41)
DEVICE = _one_of("none", "cpu", "nvme")
DTYPE = _one_of("fp32", "fp16", "bf16")
CURVE = _one_of("log", "linear")
BETAS = ValueType("a list of two numbers from 0, below 1", _are_betas, lambda value: tuple(map(float, value)))
TEXT = ValueType("text", lambda value: isinstance(value, str) and value.isprintable())
LIST = ValueType("a list", lambda value: isinstance(value, list | tuple), list)
ANY = ValueType("anything", lambda value: True)


class Key(NamedTuple):
    """One key; see above. `to` is the setting that takes the value as it is; `here` describes it where none does."""

    name: str
    type: ValueType
    here: str = ""
    to: str = ""
    why: str = ""
    only: tuple[Any, ...] = ()


class Feature(NamedTuple):
    """A section that has an effect only where it is switched on; its keys are not read one by one.

    `keys` of None: they are another library's, or too many, and are not checked. `on`: the key that switches it on;
    "" for any. `refused`: it would change numbers.
    """

    name: str
    why: str
    keys: str | None = None
    on: str = "enabled"
    refused: bool = False


def _section(name: str, *keys: Key) -> tuple[Key, ...]:
    return tuple(key._replace(name=f"{name}.{key.name}") for key in keys)


def _ignored(why: str, type: ValueType, names: str) -> tuple[Key, ...]:
    return tuple(Key(name, type, why=why) for name in names.split())


UNIT = "a unit (mostly one block) is what is gathered and reduced together, whatever its size"
PAGES = "pages have one size, offload.page, and as many buffers as threads need, whatever the model"
DISK = "a page is read and written whole, offload.threads at a time; measured at the start"
UNITS = "zero.units says what is gathered together"
SMALL = "small parameters travel with their unit"
RESHARD = "the plan fixes how many units are gathered at once"
EXACT = "values travel exactly"
SUBGROUP = "zero.shard=node shares within a node; there is no group of another size"
ANYWORLD = "a checkpoint loads into any world and stage, and every save publishes one whole step"
MASTER = "the master copy is fp32"
MOMENTS = "moments are fp32"
BUFFERS = "buffers of the model keep their own"
FP32_MODULES = (
    "all parameters compute in the type of fp16 or bf16; where a forward needs fp32 write self.weight.float()"
)
IMPLEMENTATION = "there is one implementation of each optimizer"
ORDER = "gradients are added in fp32 in the order of ranks, then divided"
REMAT = "`zero.activations=remat`"

KEYS: tuple[Key, ...] = (
    Key("train_batch_size", COUNT, to="batch.global"),
    Key("train_micro_batch_size_per_gpu", COUNT, to="batch.micro"),
    Key("gradient_accumulation_steps", COUNT, to="batch.accumulate"),
    Key("managed_gradient_accumulation", BOOL, "`zero.initialize`: false leaves it to the caller when to step"),
    Key("gradient_clipping", NUMBER, "`optim.clip`; 0 is `null`; 1.0 without the key, as in newest DeepSpeed"),
    Key("optimizer.type", TEXT, "`optim`"),
    Key("optimizer.params", ANY, "`optim.*`, with `optim.decay=all`"),
    *_ignored(IMPLEMENTATION, BOOL, "optimizer.legacy_fusion"),
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
        *_ignored("a finite step does not refill the hysteresis; a growing scale does", BOOL, "consecutive_hysteresis"),
        Key("auto_cast", BOOL, "`zero.initialize`: false leaves floating-point inputs as they are, with bf16 as well"),
        *_ignored(MASTER, BOOL, "fp16_master_weights_and_grads"),
        *_ignored(IMPLEMENTATION, BOOL, "fused_mode"),
    ),
    *_section(
        "bf16",
        Key("enabled", BOOL, "`precision=bf16`"),
        *_ignored("gradients are added in fp32 as they arrive", BOOL, "immediate_grad_update"),
        *_ignored("a step whose gradient is not finite is skipped, at every stage", BOOL, "check_grad_overflow"),
        *_ignored(MASTER, BOOL, "bf16_master_weights_and_grads"),
        *_ignored(MOMENTS, BOOL, "bf16_optimizer_states"),
    ),
    *_ignored("gradients are added in fp32", DTYPE, "data_types.grad_accum_dtype"),
    *_ignored("parameters compute in the type of fp16 or bf16; the master copy is fp32", DTYPE,
              "data_types.param_dtype"),
    *_ignored(BUFFERS, DTYPE, "data_types.buffer_dtype"),
    *_ignored(FP32_MODULES, LIST, "data_types.keep_in_fp32_modules"),
    Key("communication_data_type", DTYPE, to="precision.reduce"),
    *_ignored("there is no sequence parallelism", DTYPE, "seq_parallel_communication_data_type"),
    Key("sequence_parallel_size", COUNT, why="there is no sequence parallelism", only=(1,)),
    *_section(
        "zero_optimization",
        Key("stage", STAGE, to="zero.stage"),
        Key("nvme_offload_path", TEXT, "`offload.path`"),
        Key("offload_param_nvme", BOOL, "`offload.param=nvme`, whatever `offload_param.device` says"),
        Key("offload_optimizer_nvme", BOOL, "`offload.optimizer=nvme`, whatever `offload_optimizer.device` says"),
        Key("cpu_offload", BOOL, "`offload.optimizer=cpu`"),
        Key("cpu_offload_param", BOOL, "`offload.param=cpu`"),
        Key("cpu_offload_use_pin_memory", BOOL, "`offload.pin`"),
        *_ignored("a unit's gradients always arrive in one flat tensor", BOOL, "contiguous_gradients"),
        *_ignored("a rank receives its share only, wherever gradients are sharded", BOOL, "reduce_scatter"),
        *_ignored(UNIT, NATURAL, "reduce_bucket_size allgather_bucket_size"),
        *_ignored(UNIT, BOOL, "use_multi_rank_bucket_allreduce"),
        *_ignored("units are gathered in the next forward, not after the step", BOOL, "allgather_partitions"),
        *_ignored("communication always runs beside compute, to the same bits", BOOL, "overlap_comm"),
        *_ignored("checkpoints hold the fp32 master copy", BOOL, "load_from_fp32_weights"),
        *_ignored(ANYWORLD, BOOL, "elastic_checkpoint"),
        *_ignored("updates are made page by page; the size is offload.page", NATURAL, "sub_group_size"),
        *_ignored("it counts elements; zero.prefetch counts units, and is 1", NATURAL, "stage3_prefetch_bucket_size"),
        *_ignored(SMALL, NATURAL, "stage3_param_persistence_threshold stage3_model_persistence_threshold"),
        *_ignored(RESHARD, NATURAL, "stage3_max_live_parameters stage3_max_reuse_distance"),
        *_ignored("zero-train export writes full weights from a checkpoint, and gathers nothing", BOOL,
                  "stage3_gather_16bit_weights_on_model_save"),
        *_ignored(UNITS, NATURAL, "stage3_module_granularity_threshold"),
        *_ignored("units are all-gathered into one buffer", BOOL, "stage3_use_all_reduce_for_fetch_params"),
        *_ignored("zero.prefetch=0 gathers one unit at a time", BOOL, "stage3_allgather_sequential"),
        Key("leaf_module.classes", LIST, "zero.units, with the default policy for the rest"),
        Key("units", LIST, to="zero.units"),
        Key("gather", TEXT, to="zero.gather"),
        Key("reduce", TEXT, to="zero.reduce"),
        Key("shard", TEXT, to="zero.shard"),
        *_ignored(UNITS, LIST, "leaf_module.names leaf_module.name_suffixes"),
        *_ignored("a parameter that was not used has a zero gradient", BOOL, "ignore_unused_parameters"),
        Key("legacy_stage1", BOOL, why="there is one stage 1", only=(False,)),
        *_ignored("every rank owns an equal part of every unit", BOOL, "round_robin_gradients"),
        *_ignored("each node keeps its own copy of parameters where it fits: zero.gather", COUNT,
                  "zero_hpz_partition_size"),
        *_ignored(EXACT, BOOL, "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients"),
        *_ignored(SUBGROUP, WHOLE, "mics_shard_size"),
        *_ignored(SUBGROUP, BOOL, "mics_hierarchical_params_gather"),
        *_ignored("no module keeps its weights from forward to backward", BOOL, "memory_efficient_linear"),
        *_ignored("each rank reads its own ranges of the files only", BOOL, "pipeline_loading_checkpoint"),
        *_ignored("torch itself is not changed", BOOL, "override_module_apply"),
        *_ignored("another order of units is not traced again", BOOL, "log_trace_cache_warnings"),
        *_ignored("it is always on", BOOL, "enable_sanity_checks"),
        *_ignored("every step knows its norm", BOOL, "compute_grad_norm"),
        *_ignored("a parameter always begins at a multiple of 64 elements", BOOL, "parameter_alignment"),
        *_ignored("there is no Muon", BOOL, "save_muon_momentum_buffer_in_memory"),
        *_section(
            "offload_param",
            Key("device", DEVICE, "`offload.param`"),
            Key("nvme_path", TEXT, "`offload.path`"),
            Key("pin_memory", BOOL, "`offload.pin`"),
            *_ignored(PAGES, NATURAL, "buffer_count buffer_size"),
            *_ignored("offload.param=auto with offload.host_budget keeps in host memory what fits", NATURAL,
                      "max_in_cpu"),
        ),
        *_section(
            "offload_optimizer",
            Key("device", DEVICE, "`offload.optimizer`; `offload.grad` follows it"),
            Key("nvme_path", TEXT, "`offload.path`"),
            Key("pin_memory", BOOL, "`offload.pin`"),
            *_ignored(PAGES, NATURAL, "buffer_count buffer_size"),
            *_ignored("pages are always read ahead", BOOL, "pipeline_read"),
            *_ignored("pages are always written behind", BOOL, "pipeline_write"),
            *_ignored("first moments are zeros, which are not read from a disk", BOOL, "fast_init"),
            *_ignored("offload.optimizer=auto with offload.device_budget keeps on the device what fits", NUMBER,
                      "ratio"),
            *_ignored("the update always hides behind the next forward", BOOL, "super_offload"),
            *_ignored("offload.threads says how many", NUMBER, "cpuadam_cores_perc"),
        ),
    ),
    Key("aio.intra_op_parallelism", COUNT, to="offload.threads"),
    *_ignored(DISK, COUNT, "aio.block_size aio.queue_depth"),
    *_ignored(DISK, BOOL, "aio.single_submit aio.overlap_events"),
    *_ignored("pages travel through host memory", BOOL, "aio.use_gds"),
    *_section(
        "activation_checkpointing",
        Key("partition_activations", BOOL, REMAT),
        Key("cpu_checkpointing", BOOL, REMAT),
        Key("contiguous_memory_optimization", BOOL, REMAT),
        Key("number_checkpoints", COUNT, REMAT),
        *_ignored("zero.activations=remat recomputes unit by unit, without a setting of its own", BOOL,
                  "profile synchronize_checkpoint_boundary"),
    ),
    # what is printed
    Key("wandb.enabled", BOOL, "`tracker=wandb`"),
    Key("wandb.project", TEXT, "`tracker.project`"),
    Key("wandb.group", TEXT, "`tracker.group`"),
    Key("wandb.team", TEXT, "`tracker.entity`"),
    Key("tensorboard.enabled", BOOL, "`tracker=tensorboard`"),
    *_ignored("TensorBoard's files are in the run's folder", TEXT, "tensorboard.output_path tensorboard.job_name"),
    *_ignored("metrics.jsonl has it in every row, and report.html the spans of one step", BOOL,
              "wall_clock_breakdown memory_breakdown"),
    *_ignored("the plan and all settings are printed and kept in the run's folder", BOOL, "dump_state"),
    *_ignored("what is printed is the plan, rows and warnings", ANY, "log_level"),
    *_ignored("speed is measured without waiting for the device", BOOL,
              "timers.throughput.enabled timers.throughput.synchronized"),
    # gradients
    *_ignored(ORDER, BOOL, "prescale_gradients"),
    *_ignored(ORDER, ANY_NUMBER, "gradient_predivide_factor"),
    Key("gradient_allreduce_op", _one_of("mean", "sum", "avg"), why="gradients are averaged", only=("mean", "avg")),
    *_ignored("a sparse gradient counts like a dense one", BOOL, "sparse_gradients"),
    *_ignored("units are gathered when they are needed", BOOL, "disable_allgather"),
    *_ignored("every optimizer here works at every stage and tier", BOOL, "zero_allow_untested_optimizer"),
    *_ignored("offload.compute says where pages are updated", BOOL, "zero_force_ds_cpu_optimizer"),
    *_ignored("there are no CUDA graphs", BOOL, "graph_harvesting"),
    *_ignored("Python collects garbage when it wants to", BOOL, "disable_python_gc"),
    *_ignored("model.vocab, or the model itself, says it", COUNT, "vocabulary_size"),
    *_ignored("ranks are not divided among experts", BOOL, "use_data_before_expert_parallelism"),
    *_section(
        "checkpoint",
        *_ignored(ANYWORLD, _one_of("warn", "ignore", "fail"), "tag_validation"),
        *_ignored(ANYWORLD, BOOL, "load_universal parallel_write.pipeline_stage"),
        *_ignored("checkpoint.dir is a disk that all ranks share", BOOL, "use_node_local_storage"),
        *_ignored("files are safetensors", BOOL, "checkpoint_serialization"),
    ),
)  # fmt: skip

ROWS = "metrics.jsonl has every row; tracker=wandb and tracker=tensorboard show them"
SAVES = "all ranks write a save at once; checkpoint.async=true writes it in the background"
DATA = "data comes from the loader as it is"

FEATURES: tuple[Feature, ...] = (
    Feature("csv_monitor", "metrics.jsonl has every row", "enabled output_path job_name"),
    Feature("comet", ROWS,
            "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode"),
    Feature("flops_profiler", "profile=true records one step",
            "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file"),
    Feature("comms_logger", "report.html has every collective of one step", "enabled prof_all prof_ops verbose debug"),
    Feature("compile",
            "zero.compile=true compiles what a unit computes; gathers follow the order of units, not a graph",
            "deepcompile free_activation free_activation_threshold offload_activation "
            "offload_opt_states double_buffer symmetric_memory offload_parameters sync_before_reduce sync_after_reduce "
            "sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors debug_log passes "
            "offload_activation_pin_memory autoep_non_moe",
            on="deepcompile"),
    Feature("zero_optimization.zenflow", "every update is exact, and hides behind the next forward",
            "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
            "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch", on=""),
    Feature("zero_optimization.zeropp_loco_param", EXACT, "err_beta reset_T", on=""),
    Feature("checkpoint.writer", SAVES,
            "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier", on=""),
    Feature("nebula", SAVES),
    Feature("datastates_ckpt", SAVES, on=""),
    Feature("autotuning", "zero-train mode=plan says what fits and what is fastest"),
    Feature("elasticity", "checkpoints load into any world; batch.accumulate=auto keeps the batch"),
    Feature("hybrid_engine", "the same state trains and generates"),
    Feature("torch_autocast", "autocast is not used; write bf16 or fp16", refused=True,
            keys="enabled dtype lower_precision_safe_modules"),
    Feature("amp", "Apex is not used; write bf16 or fp16", refused=True),
    Feature("progressive_layer_drop", "no layers are dropped", "enabled theta gamma", refused=True),
    Feature("curriculum_learning", DATA, refused=True),
    Feature("data_efficiency", DATA, refused=True),
    Feature("quantize_training", "there is no quantised training", refused=True),
    Feature("compression_training", "there is no compression", on="", refused=True),
    Feature("sparse_attention", "attention is the model's own", on="", refused=True),
    Feature("eigenvalue", "no eigenvalues are computed", refused=True),
    Feature("pipeline", "there is no pipeline parallelism", on="", refused=True),
    Feature("expert_parallel", "ranks are not divided among experts", refused=True),
    Feature("weight_quantization", "weights are not quantised", on="", refused=True),
    Feature("tensor_parallel", "there is no tensor parallelism", on="", refused=True),
)  # fmt: skip

_SAVE_16BIT = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
_STAGE3 = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential"
)

ALIASES: Mapping[str, str] = {
    "bfloat16": "bf16",
    "aio.thread_count": "aio.intra_op_parallelism",
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (*_STAGE3.split(), "max_reuse_distance", "gather_16bit_weights_on_model_save")
    },
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _SAVE_16BIT,
    "seq_parallel_comm_data_type": "seq_parallel_communication_data_type",
}
"""Older or shorter names."""


class Kind(NamedTuple):
    """A type of optimizer or scheduler: its name here, its keys, and DeepSpeed's defaults where ours differ."""

    name: str
    keys: tuple[Key, ...]
    defaults: Mapping[str, Any]
    required: tuple[str, ...]


def _kind(name: str, *keys: Key, defaults: Mapping[str, Any], required: tuple[str, ...] = ()) -> Kind:
    return Kind(name, keys, defaults, required)


_LR = (Key("lr", NUMBER, to="optim.lr"), Key("weight_decay", NUMBER, to="optim.weight_decay"))
_BETAS = Key("betas", BETAS, "optim.beta1, optim.beta2")
_EPS = Key("eps", NUMBER, to="optim.eps")
_KERNELS = _ignored(IMPLEMENTATION, BOOL, "foreach fused capturable differentiable set_grad_none")
_MINIMISED = Key("maximize", BOOL, why="losses are minimised", only=(False,))
_ADAM = _kind(
    "adamw",
    *_LR,
    _BETAS,
    _EPS,
    *_KERNELS,
    *_ignored(IMPLEMENTATION, BOOL, "torch_adam"),
    Key("adam_w_mode", BOOL, "optim=adamw; false: optim=adam"),
    *_ignored(MOMENTS, BOOL, "fp32_optimizer_states"),
    Key("bias_correction", BOOL, why="the bias of young moments is corrected", only=(True,)),
    Key("amsgrad", BOOL, why="there is no AMSGrad", only=(False,)),
    _MINIMISED,
    defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
)

OPTIMIZERS: Mapping[str, Kind] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": _kind("lion", *_LR, _BETAS, *_KERNELS, defaults={"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}),
    "adagrad": _kind(
        "adagrad",
        *_LR,
        _EPS,
        *_KERNELS,
        Key("lr_decay", NUMBER, why="the schedule changes the learning rate", only=(0.0,)),
        Key("initial_accumulator_value", NUMBER, why="sums of squares begin at 0", only=(0.0,)),
        defaults={"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
    ),
    "sgd": _kind(
        "sgd",
        *_LR,
        *_KERNELS,
        Key("momentum", FRACTION, to="optim.momentum"),
        Key("nesterov", BOOL, to="optim.nesterov"),
        Key("dampening", NUMBER, why="a gradient enters the momentum whole", only=(0.0,)),
        _MINIMISED,
        defaults={"lr": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    ),
}
"""By their names in lower case, as DeepSpeed compares its own."""

_LAST = Key("last_batch_iteration", WHOLE, why="a resumed run knows its step", only=(-1,))
_STEPS = Key("warmup_num_steps", COUNT, "schedule.warmup")
_CURVE = Key("warmup_type", CURVE, to="schedule.curve")
_RISE = (
    Key("warmup_min_lr", NUMBER, "schedule.start, as a share of the peak"),
    Key("warmup_max_lr", NUMBER, "optim.lr"),
    *(_STEPS, _CURVE, _LAST),
)
_TOTAL = Key("total_num_steps", COUNT, to="schedule.total")
_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}

SCHEDULERS: Mapping[str, Kind] = {
    "WarmupLR": _kind("linear_warmup", *_RISE, defaults={**_WARMUP, "warmup_min_lr": 0.0}),
    "WarmupDecayLR": _kind(
        "warmup_linear",
        _TOTAL,
        *_RISE,
        defaults={**_WARMUP, "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3},
        required=("total_num_steps",),
    ),
    "WarmupCosineLR": _kind(
        "warmup_cosine",
        _TOTAL,
        Key("warmup_min_ratio", NUMBER, to="schedule.start"),
        _STEPS,
        Key("cos_min_ratio", NUMBER, to="schedule.final"),
        *(_CURVE, _LAST),
        defaults={**_WARMUP, "warmup_min_ratio": 0.0, "cos_min_ratio": 1e-4},
        required=("total_num_steps",),
    ),
    "OneCycle": _kind(
        "one_cycle",
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
        _LAST,
        defaults={"cycle_first_step_size": 2000},
        required=("cycle_min_lr", "cycle_max_lr"),
    ),
    "LRRangeTest": _kind(
        "lr_range",
        Key("lr_range_test_min_lr", NUMBER, "optim.lr"),
        Key("lr_range_test_step_size", COUNT, to="schedule.every"),
        Key("lr_range_test_step_rate", NUMBER, to="schedule.rate"),
        Key("lr_range_test_staircase", BOOL, to="schedule.stairs"),
        _LAST,
        defaults={"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000},
    ),
}
"""Each with its keys in the order of DeepSpeed's arguments."""
