"""Every key that DeepSpeed 0.19 reads in its JSON, as one table: what it takes, and what it is here.

A key is one of four things. It has a meaning here (`here` names our key). It has none, because it only says how bytes
are to be moved or what is to be printed: then it is accepted, and one line says why (`why`). It asks for other numbers
than are made here (`only`): then any other value is refused, for the same reason. Or it is not in the table and is
refused with the nearest name; DeepSpeed itself ignores what it does not know at the top level.

Aliases and the keys of optimizers and schedules, which differ by type, have tables of their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Takes:
    """A kind of value: its words, and how it is read; `read` raises ValueError for anything else."""

    words: str
    read: Callable[[Any], Any]


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < float("inf"):
        raise ValueError
    return float(value)


def _whole(value: Any) -> int:
    """Whole numbers may be written as 5e8, which JSON reads as a float."""
    if not _number(value).is_integer():
        raise ValueError
    return int(value)


def _from(least: float, read: Callable[[Any], Any], below: float = float("inf")) -> Callable[[Any], Any]:
    def bounded(value: Any) -> Any:
        found = read(value)
        if not least <= found < below:
            raise ValueError
        return found

    return bounded


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError
    return list(value)


def _betas(value: Any) -> tuple[float, float]:
    first, second = (_from(0, _number, below=1)(one) for one in _list(value))
    return first, second


def one_of(*words: str) -> Takes:
    """One of a few words, in upper or lower case."""

    def read(value: Any) -> str:
        if not isinstance(value, str) or value.lower() not in words:
            raise ValueError
        return value.lower()

    return Takes(" or ".join(words), read)


BOOL = Takes("true or false", _bool)
COUNT = Takes("a whole number from 1", _from(1, _whole))
NATURAL = Takes("a whole number from 0", _from(0, _whole))
WHOLE = Takes("a whole number", _whole)
NUMBER = Takes("a number from 0", _from(0, _number))
ANY_NUMBER = Takes("a number", _number)
FRACTION = Takes("a number from 0, below 1", _from(0, _number, below=1))
STAGE = Takes("0, 1, 2 or 3", _from(0, _whole, below=4))
POWER = Takes("a whole number from 0 to 40", _from(0, _whole, below=41))
DEVICE = one_of("none", "cpu", "nvme")
DTYPE = one_of("fp32", "fp16", "bf16")
CURVE = one_of("log", "linear")
BETAS = Takes("a list of two numbers from 0, below 1", _betas)
TEXT = Takes("text", _text)
LIST = Takes("a list", _list)
ANY = Takes("anything", lambda value: value)


class Key(NamedTuple):
    """One key; see the file's idea. `to` is our key that takes the value as it is; `here` says it where none does."""

    name: str
    takes: Takes
    here: str = ""
    to: str = ""
    why: str = ""
    only: tuple[Any, ...] = ()


class Feature(NamedTuple):
    """A section that asks for nothing unless it is switched on; what is inside is then not looked at one by one.

    `keys` of None: they are another library's, or too many, and are not read. `refused`: it would change numbers.
    """

    name: str
    why: str
    keys: str | None = None
    on: str = "enabled"
    refused: bool = False


ALWAYS = "this is always so"
UNIT = "a unit (mostly one block) is what is gathered and reduced together, whatever its size"
PAGES = "pages have one size, offload.page, and as many buffers as threads need, whatever the model"
RESHARD = "the plan fixes how many units are gathered at once"
DISK = "a page is read and written whole, offload.threads at a time; measured at the start"
RECOMPUTED = "zero.activations=remat recomputes unit by unit, without a setting of its own"
PRINTED = "metrics.jsonl has it in every row, and report.html the spans of one step"
EXACT = "values travel exactly"
SUBGROUP = "all ranks share; there is no smaller group to share within"
ANYWORLD = "a checkpoint loads into any world and stage, and every save publishes one whole step"

KEYS: tuple[Key, ...] = (
    Key("train_batch_size", COUNT, to="batch.global"),
    Key("train_micro_batch_size_per_gpu", COUNT, to="batch.micro"),
    Key("gradient_accumulation_steps", COUNT, to="batch.accumulate"),
    Key("managed_gradient_accumulation", BOOL, "`zero.initialize`: false leaves it to the caller when to step"),
    Key("gradient_clipping", NUMBER, "`optim.clip`; 0 is `null`; 1.0 without the key, as in newest DeepSpeed"),
    Key("optimizer.type", TEXT, "`optim`"),
    Key("optimizer.params", ANY, "`optim.*`, with `optim.decay=all`"),
    Key("optimizer.legacy_fusion", BOOL, why="there is one implementation of each optimizer"),
    Key("scheduler.type", TEXT, "`schedule`"),
    Key("scheduler.params", ANY, "`schedule.*` and `optim.lr`"),
    Key("steps_per_print", COUNT, to="tracker.every"),
    Key("dataloader_drop_last", BOOL, "`zero.initialize`: whether its loader leaves out the last, smaller batch"),
    # precision
    Key("fp16.enabled", BOOL, "`precision=fp16`"),
    Key("fp16.loss_scale", NUMBER, "`precision.scale.static`; 0 is `null`: dynamic"),
    Key("fp16.initial_scale_power", POWER, "`precision.scale.initial`, 2 to that power"),
    Key("fp16.loss_scale_window", COUNT, to="precision.scale.window"),
    Key("fp16.hysteresis", COUNT, to="precision.scale.hysteresis"),
    Key("fp16.min_loss_scale", NUMBER, to="precision.scale.minimum"),
    Key("fp16.consecutive_hysteresis", BOOL, why="a finite step does not refill the hysteresis; a growing scale does"),
    Key("fp16.auto_cast", BOOL, why="zero.initialize's engine always casts floating-point inputs"),
    Key("fp16.fp16_master_weights_and_grads", BOOL, why="the master copy is fp32"),
    Key("fp16.fused_mode", BOOL, why="there is one implementation of each optimizer"),
    Key("bf16.enabled", BOOL, "`precision=bf16`"),
    Key("bf16.immediate_grad_update", BOOL, why="gradients are added in fp32 as they arrive"),
    Key("bf16.check_grad_overflow", BOOL, why="a step whose gradient is not finite is skipped, at every stage"),
    Key("bf16.bf16_master_weights_and_grads", BOOL, why="the master copy is fp32"),
    Key("bf16.bf16_optimizer_states", BOOL, why="moments are fp32"),
    Key("data_types.grad_accum_dtype", DTYPE, why="gradients are added in fp32"),
    Key("data_types.param_dtype", DTYPE, why="parameters compute in the type of fp16 or bf16; the master copy is fp32"),
    Key("data_types.buffer_dtype", DTYPE, why="buffers of the model keep their own"),
    Key("communication_data_type", DTYPE, to="precision.reduce"),
    Key("seq_parallel_communication_data_type", DTYPE, why="there is no sequence parallelism"),
    # zero_optimization
    Key("zero_optimization.stage", STAGE, to="zero.stage"),
    Key("zero_optimization.nvme_offload_path", TEXT, "`offload.path`"),
    Key("zero_optimization.offload_param_nvme", BOOL, "`offload.param=nvme`, whatever `offload_param.device` says"),
    Key(
        "zero_optimization.offload_optimizer_nvme",
        BOOL,
        "`offload.optimizer=nvme`, whatever `offload_optimizer.device` says",
    ),
    Key("zero_optimization.cpu_offload", BOOL, "`offload.optimizer=cpu`"),
    Key("zero_optimization.cpu_offload_param", BOOL, "`offload.param=cpu`"),
    Key("zero_optimization.cpu_offload_use_pin_memory", BOOL, "`offload.pin`"),
    Key("zero_optimization.contiguous_gradients", BOOL, why="a unit's gradients always arrive in one flat tensor"),
    Key("zero_optimization.reduce_scatter", BOOL, why="a rank receives its share only, wherever gradients are sharded"),
    Key("zero_optimization.reduce_bucket_size", NATURAL, why=UNIT),
    Key("zero_optimization.use_multi_rank_bucket_allreduce", BOOL, why=UNIT),
    Key(
        "zero_optimization.allgather_partitions", BOOL, why="units are gathered in the next forward, not after the step"
    ),
    Key("zero_optimization.allgather_bucket_size", NATURAL, why=UNIT),
    Key("zero_optimization.overlap_comm", BOOL, why="communication always runs beside compute, to the same bits"),
    Key("zero_optimization.load_from_fp32_weights", BOOL, why="checkpoints hold the fp32 master copy"),
    Key("zero_optimization.elastic_checkpoint", BOOL, why=ANYWORLD),
    Key("zero_optimization.sub_group_size", NATURAL, why="updates are made page by page; the size is offload.page"),
    Key(
        "zero_optimization.stage3_prefetch_bucket_size",
        NATURAL,
        why="it counts elements; zero.prefetch counts units, and is 1",
    ),
    Key("zero_optimization.stage3_param_persistence_threshold", NATURAL, why="small parameters travel with their unit"),
    Key("zero_optimization.stage3_model_persistence_threshold", NATURAL, why="small parameters travel with their unit"),
    Key("zero_optimization.stage3_max_live_parameters", NATURAL, why=RESHARD),
    Key("zero_optimization.stage3_max_reuse_distance", NATURAL, why=RESHARD),
    Key(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        BOOL,
        why="scripts/export writes whole weights from a checkpoint, and gathers nothing",
    ),
    Key(
        "zero_optimization.stage3_module_granularity_threshold",
        NATURAL,
        why="zero.units says what is gathered together",
    ),
    Key("zero_optimization.stage3_use_all_reduce_for_fetch_params", BOOL, why="units are all-gathered into one buffer"),
    Key("zero_optimization.stage3_allgather_sequential", BOOL, why="zero.prefetch=0 gathers one unit at a time"),
    Key("zero_optimization.leaf_module.classes", LIST, "zero.units, with the default policy for the rest"),
    Key("zero_optimization.units", LIST, to="zero.units"),
    Key("zero_optimization.leaf_module.names", LIST, why="zero.units says what is gathered together"),
    Key("zero_optimization.leaf_module.name_suffixes", LIST, why="zero.units says what is gathered together"),
    Key("zero_optimization.ignore_unused_parameters", BOOL, why="a parameter that was not used has a zero gradient"),
    Key("zero_optimization.legacy_stage1", BOOL, why="there is one stage 1", only=(False,)),
    Key("zero_optimization.round_robin_gradients", BOOL, why="every rank owns an equal part of every unit"),
    Key("zero_optimization.zero_hpz_partition_size", COUNT, why=SUBGROUP),
    Key("zero_optimization.zero_quantized_weights", BOOL, why=EXACT),
    Key("zero_optimization.zero_quantized_nontrainable_weights", BOOL, why=EXACT),
    Key("zero_optimization.zero_quantized_gradients", BOOL, why=EXACT),
    Key("zero_optimization.mics_shard_size", WHOLE, why=SUBGROUP),
    Key("zero_optimization.mics_hierarchical_params_gather", BOOL, why=SUBGROUP),
    Key("zero_optimization.memory_efficient_linear", BOOL, why="no module keeps its weights from forward to backward"),
    Key("zero_optimization.pipeline_loading_checkpoint", BOOL, why="each rank reads its own ranges of the files only"),
    Key("zero_optimization.override_module_apply", BOOL, why="torch itself is not changed"),
    Key("zero_optimization.log_trace_cache_warnings", BOOL, why="another order of units costs no trace"),
    Key("zero_optimization.enable_sanity_checks", BOOL, why=ALWAYS),
    Key("zero_optimization.save_muon_momentum_buffer_in_memory", BOOL, why="there is no Muon"),
    Key("zero_optimization.offload_param.device", DEVICE, "`offload.param`"),
    Key("zero_optimization.offload_param.nvme_path", TEXT, "`offload.path`"),
    Key("zero_optimization.offload_param.pin_memory", BOOL, "`offload.pin`"),
    Key("zero_optimization.offload_param.buffer_count", NATURAL, why=PAGES),
    Key("zero_optimization.offload_param.buffer_size", NATURAL, why=PAGES),
    Key(
        "zero_optimization.offload_param.max_in_cpu",
        NATURAL,
        why="offload.param=auto with offload.host_budget keeps in host memory what fits",
    ),
    Key("zero_optimization.offload_optimizer.device", DEVICE, "`offload.optimizer`; `offload.grad` follows it"),
    Key("zero_optimization.offload_optimizer.nvme_path", TEXT, "`offload.path`"),
    Key("zero_optimization.offload_optimizer.pin_memory", BOOL, "`offload.pin`"),
    Key("zero_optimization.offload_optimizer.buffer_count", NATURAL, why=PAGES),
    Key("zero_optimization.offload_optimizer.buffer_size", NATURAL, why=PAGES),
    Key("zero_optimization.offload_optimizer.pipeline_read", BOOL, why="pages are always read ahead"),
    Key("zero_optimization.offload_optimizer.pipeline_write", BOOL, why="pages are always written behind"),
    Key("zero_optimization.offload_optimizer.fast_init", BOOL, why="first moments are zeros that no disk is asked for"),
    Key(
        "zero_optimization.offload_optimizer.ratio",
        NUMBER,
        why="offload.optimizer=auto with offload.device_budget keeps on the device what fits",
    ),
    Key(
        "zero_optimization.offload_optimizer.super_offload", BOOL, why="the update always hides behind the next forward"
    ),
    Key("zero_optimization.offload_optimizer.cpuadam_cores_perc", NUMBER, why="offload.threads says how many"),
    # aio
    Key("aio.intra_op_parallelism", COUNT, to="offload.threads"),
    Key("aio.block_size", COUNT, why=DISK),
    Key("aio.queue_depth", COUNT, why=DISK),
    Key("aio.single_submit", BOOL, why=DISK),
    Key("aio.overlap_events", BOOL, why=DISK),
    Key("aio.use_gds", BOOL, why="pages travel through host memory"),
    # activations
    Key("activation_checkpointing.partition_activations", BOOL, "`zero.activations=remat`"),
    Key("activation_checkpointing.cpu_checkpointing", BOOL, "`zero.activations=remat`"),
    Key("activation_checkpointing.contiguous_memory_optimization", BOOL, "`zero.activations=remat`"),
    Key("activation_checkpointing.number_checkpoints", COUNT, "`zero.activations=remat`"),
    Key("activation_checkpointing.profile", BOOL, why=RECOMPUTED),
    Key("activation_checkpointing.synchronize_checkpoint_boundary", BOOL, why=RECOMPUTED),
    # what is shown
    Key("wandb.enabled", BOOL, "`tracker=wandb`"),
    Key("wandb.project", TEXT, "`tracker.project`"),
    Key("wandb.group", TEXT, "`tracker.group`"),
    Key("wandb.team", TEXT, why="the environment variable WANDB_ENTITY says whose run it is"),
    Key("wall_clock_breakdown", BOOL, why=PRINTED),
    Key("memory_breakdown", BOOL, why=PRINTED),
    Key("dump_state", BOOL, why="the plan and all settings are printed and kept in the run's folder"),
    Key("log_level", ANY, why="what is printed is the plan, rows and warnings"),
    Key("timers.throughput.enabled", BOOL, why="speed is measured without waiting for the device"),
    Key("timers.throughput.synchronized", BOOL, why="speed is measured without waiting for the device"),
    # gradients
    Key("prescale_gradients", BOOL, why="gradients are added in fp32 in the order of ranks, then divided"),
    Key("gradient_predivide_factor", ANY_NUMBER, why="gradients are added in fp32 in the order of ranks, then divided"),
    Key("gradient_allreduce_op", one_of("mean", "sum", "avg"), why="gradients are averaged", only=("mean", "avg")),
    Key("sparse_gradients", BOOL, why="a sparse gradient counts like a dense one"),
    Key("disable_allgather", BOOL, why="units are gathered when they are needed"),
    Key("zero_allow_untested_optimizer", BOOL, why="every optimizer here works at every stage and tier"),
    Key("zero_force_ds_cpu_optimizer", BOOL, why="offload.compute says where pages are updated"),
    Key("graph_harvesting", BOOL, why="there are no CUDA graphs"),
    Key("vocabulary_size", COUNT, why="model.vocab, or the model itself, says it"),
    Key("use_data_before_expert_parallelism", BOOL, why="ranks are not divided among experts"),
    # checkpoints
    Key("checkpoint.tag_validation", one_of("warn", "ignore", "fail"), why=ANYWORLD),
    Key("checkpoint.load_universal", BOOL, why=ANYWORLD),
    Key("checkpoint.use_node_local_storage", BOOL, why="checkpoint.dir is a disk that all ranks share"),
    Key("checkpoint.parallel_write.pipeline_stage", BOOL, why=ANYWORLD),
    Key("checkpoint.checkpoint_serialization", BOOL, why="files are safetensors"),
)

FEATURES: tuple[Feature, ...] = (
    Feature("tensorboard", "metrics.jsonl has every row; tracker=wandb shows them", "enabled output_path job_name"),
    Feature("csv_monitor", "metrics.jsonl has every row", "enabled output_path job_name"),
    Feature(
        "comet",
        "metrics.jsonl has every row; tracker=wandb shows them",
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    ),
    Feature(
        "flops_profiler",
        "profile=true records one step",
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    ),
    Feature("comms_logger", "report.html has every collective of one step", "enabled prof_all prof_ops verbose debug"),
    Feature(
        "compile",
        "zero.compile=true compiles what a unit computes; gathers follow the order of units, not a graph",
        "deepcompile free_activation free_activation_threshold offload_activation "
        "offload_opt_states double_buffer symmetric_memory offload_parameters sync_before_reduce sync_after_reduce "
        "sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors debug_log passes",
        on="deepcompile",
    ),
    Feature(
        "zero_optimization.zenflow",
        "every update is exact, and hides behind the next forward",
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
        "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
        on="",
    ),
    Feature("zero_optimization.zeropp_loco_param", EXACT, "err_beta reset_T", on=""),
    Feature(
        "checkpoint.writer",
        "a save is written by all ranks at once; checkpoint.async=true does it behind",
        "type io_buffer_size io_buffer_double show_statistics data_parallel decoupled io_multiplier",
        on="",
    ),
    Feature("autotuning", "python train.py mode=plan says what fits and what is fastest"),
    Feature("elasticity", "checkpoints load into any world; batch.accumulate=auto keeps the batch"),
    Feature("hybrid_engine", "the same state trains and generates"),
    Feature("torch_autocast", "autocast is not used; write bf16 or fp16", refused=True,
            keys="enabled dtype lower_precision_safe_modules"),
    Feature("amp", "Apex is not used; write bf16 or fp16", refused=True),
    Feature("progressive_layer_drop", "no layers are dropped", "enabled theta gamma", refused=True),
    Feature("curriculum_learning", "data comes from the loader as it is", refused=True),
    Feature("data_efficiency", "data comes from the loader as it is", refused=True),
    Feature("quantize_training", "there is no quantised training", refused=True),
    Feature("compression_training", "there is no compression", on="", refused=True),
    Feature("sparse_attention", "attention is the model's own", on="", refused=True),
    Feature("eigenvalue", "no eigenvalues are computed", refused=True),
    Feature("pipeline", "there is no pipeline parallelism", on="", refused=True),
    Feature("tensor_parallel", "there is no tensor parallelism", on="", refused=True),
)  # fmt: skip

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "bfloat16": "bf16",
        "aio.thread_count": "aio.intra_op_parallelism",
        "zero_optimization.prefetch_bucket_size": "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.param_persistence_threshold": "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.model_persistence_threshold": "zero_optimization.stage3_model_persistence_threshold",
        "zero_optimization.max_live_parameters": "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
        "zero_optimization.gather_16bit_weights_on_model_save": (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        ),
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        ),
        "seq_parallel_comm_data_type": "seq_parallel_communication_data_type",
    }
)
"""Older or shorter names."""


class Kind(NamedTuple):
    """A type of optimizer or schedule: our name of it, its keys, and DeepSpeed's defaults where ours differ."""

    name: str
    keys: tuple[Key, ...]
    defaults: Mapping[str, Any] = MappingProxyType({})
    required: tuple[str, ...] = ()


_LR = (Key("lr", NUMBER, to="optim.lr"), Key("weight_decay", NUMBER, to="optim.weight_decay"))
_MOMENTS = (Key("betas", BETAS, "optim.beta1, optim.beta2"),)
_EPS = (Key("eps", NUMBER, to="optim.eps"),)
_KERNELS = tuple(
    Key(name, BOOL, why="there is one implementation of each optimizer")
    for name in ("foreach", "fused", "capturable", "differentiable", "set_grad_none")
)
_ADAM = (
    *_LR,
    *_MOMENTS,
    *_EPS,
    *_KERNELS,
    Key("torch_adam", BOOL, why="there is one implementation of each optimizer"),
    Key("adam_w_mode", BOOL, "optim=adamw; false: optim=adam"),
    Key("fp32_optimizer_states", BOOL, why="moments are fp32"),
    Key("bias_correction", BOOL, why="the bias of young moments is corrected", only=(True,)),
    Key("amsgrad", BOOL, why="there is no AMSGrad", only=(False,)),
    Key("maximize", BOOL, why="losses are minimised", only=(False,)),
)
_OF_ADAM = MappingProxyType({"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})

OPTIMIZERS: Mapping[str, Kind] = MappingProxyType(
    {
        "adam": Kind("adamw", _ADAM, _OF_ADAM),
        "adamw": Kind("adamw", _ADAM, _OF_ADAM),
        "lion": Kind(
            "lion",
            (*_LR, *_MOMENTS, *_KERNELS),
            MappingProxyType({"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}),
        ),
        "adagrad": Kind(
            "adagrad",
            (
                *_LR,
                *_EPS,
                *_KERNELS,
                Key("lr_decay", NUMBER, why="the schedule changes the learning rate", only=(0.0,)),
                Key("initial_accumulator_value", NUMBER, why="sums of squares begin at 0", only=(0.0,)),
            ),
            MappingProxyType({"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
        ),
        "sgd": Kind(
            "sgd",
            (
                *_LR,
                *_KERNELS,
                Key("momentum", FRACTION, to="optim.momentum"),
                Key("nesterov", BOOL, to="optim.nesterov"),
                Key("dampening", NUMBER, why="a gradient enters the momentum whole", only=(0.0,)),
                Key("maximize", BOOL, why="losses are minimised", only=(False,)),
            ),
            MappingProxyType({"lr": 1e-3, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}),
        ),
    }
)
"""By their names in lower case, as DeepSpeed compares its own."""

_RISE = (
    Key("warmup_num_steps", COUNT, "schedule.warmup"),
    Key("warmup_type", CURVE, to="schedule.curve"),
    Key("last_batch_iteration", WHOLE, why="a resumed run knows its step", only=(-1,)),
)
_RISE_LR = (
    *_RISE,
    Key("warmup_min_lr", NUMBER, "schedule.start, as a share of the peak"),
    Key("warmup_max_lr", NUMBER, "optim.lr"),
)
_TOTAL = (Key("total_num_steps", COUNT, to="schedule.total"),)
_OF_RISE = {"warmup_num_steps": 1000, "warmup_type": "log"}

SCHEDULERS: Mapping[str, Kind] = MappingProxyType(
    {
        "WarmupLR": Kind("linear_warmup", _RISE_LR, MappingProxyType({**_OF_RISE, "warmup_min_lr": 0.0})),
        "WarmupDecayLR": Kind(
            "warmup_linear",
            (*_RISE_LR, *_TOTAL),
            MappingProxyType({**_OF_RISE, "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3}),
            required=("total_num_steps",),
        ),
        "WarmupCosineLR": Kind(
            "warmup_cosine",
            (
                *_RISE,
                *_TOTAL,
                Key("warmup_min_ratio", NUMBER, to="schedule.start"),
                Key("cos_min_ratio", NUMBER, to="schedule.final"),
            ),
            MappingProxyType({**_OF_RISE, "warmup_min_ratio": 0.0, "cos_min_ratio": 1e-4}),
            required=("total_num_steps",),
        ),
        "OneCycle": Kind(
            "one_cycle",
            (
                Key("cycle_min_lr", NUMBER, "schedule.start, as a share of the peak"),
                Key("cycle_max_lr", NUMBER, to="optim.lr"),
                Key("cycle_first_step_size", COUNT, to="schedule.rise"),
                Key("cycle_second_step_size", COUNT, to="schedule.fall"),
                Key("cycle_first_stair_count", NATURAL, to="schedule.rise_stairs"),
                Key("cycle_second_stair_count", NATURAL, to="schedule.fall_stairs"),
                Key("decay_step_size", NATURAL, to="schedule.decay_every"),
                Key("decay_lr_rate", NUMBER, to="schedule.decay_rate"),
                Key("cycle_momentum", BOOL, to="schedule.momentum"),
                Key("cycle_min_mom", FRACTION, to="schedule.momentum_min"),
                Key("cycle_max_mom", FRACTION, to="schedule.momentum_max"),
                Key("decay_mom_rate", NUMBER, to="schedule.momentum_decay_rate"),
                Key("last_batch_iteration", WHOLE, why="a resumed run knows its step", only=(-1,)),
            ),
            MappingProxyType({"cycle_first_step_size": 2000}),
            required=("cycle_min_lr", "cycle_max_lr"),
        ),
        "LRRangeTest": Kind(
            "lr_range",
            (
                Key("lr_range_test_min_lr", NUMBER, to="optim.lr"),
                Key("lr_range_test_step_size", COUNT, to="schedule.every"),
                Key("lr_range_test_step_rate", NUMBER, to="schedule.rate"),
                Key("lr_range_test_staircase", BOOL, to="schedule.stairs"),
                Key("last_batch_iteration", WHOLE, why="a resumed run knows its step", only=(-1,)),
            ),
            MappingProxyType({"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000}),
        ),
    }
)
