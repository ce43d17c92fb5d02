"""The keys of DeepSpeed 0.19's configuration: a field for each supported key, and names of ignored or rejected keys.

A field's description names the corresponding setting of this library. The value of a field that is declared with `to`
is copied to that setting unchanged. Each type of optimizer and scheduler has a class of keys, with DeepSpeed's
defaults.
"""

import logging
import math
from collections.abc import Callable, Container, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from zero.core.schema import Section
from zero.core.setting_types import MOST, Count, Fraction, Names, Natural, NonNegative, Rate, Reads, Whole, Word
from zero.core.suggest import shown
from zero.errors import ConfigError

log = logging.getLogger("zero")

Every = Annotated[Whole, BeforeValidator(lambda value: MOST if value == math.inf else value)]
Scale = Annotated[float, Field(ge=0)]
Dtype = Literal["fp32", "fp16", "bf16"]


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(type(beta) in (int, float) for beta in value):
        raise ValueError
    if not all(0 <= beta < 1 for beta in value):
        raise ValueError
    return float(value[0]), float(value[1])


def _by_group(words: str, is_valid: Callable[[float], bool]) -> Reads:
    """Return the type of a number, or of a list with a number for each group of the optimizer."""

    def read(value: Any) -> float | tuple[float, ...]:
        numbers = value if isinstance(value, list | tuple) else [value]
        if not numbers or not all(type(number) in (int, float) and is_valid(number) for number in numbers):
            raise ValueError
        return tuple(map(float, value)) if isinstance(value, list | tuple) else float(value)

    return Reads(f"{words}, or a list with such a number for each group", read)


def _known_curve(value: Any) -> Any:
    if value in ("log", "linear"):
        return value
    log.warning("scheduler.params.warmup_type=%s is neither log nor linear: log is used, as in DeepSpeed", shown(value))
    return "log"


PeakRates = Annotated[
    float | tuple[float, ...], _by_group("a number from 1e-37, at most 1000", lambda rate: 1e-37 <= rate <= 1000)
]
Rates = Annotated[float | tuple[float, ...], _by_group("a number from 0, at most 1000", lambda rate: 0 <= rate <= 1000)]
Fractions = Annotated[float | tuple[float, ...], _by_group("a number from 0, below 1", lambda share: 0 <= share < 1)]
Betas = Annotated[tuple[float, float], Reads("two numbers from 0, below 1, such as [0.9, 0.999]", _betas)]


def means(text: str, default: Any = None) -> Any:
    """Declare a key; `text` describes its meaning in this library."""
    return Field(default, description=text)


def to(setting: str, default: Any = None) -> Any:
    """Declare a key whose value is copied to `setting` of this library; None leaves the setting out."""
    return Field(default, description=f"`{setting}`", json_schema_extra={"to": setting})


class Fp16(Section):
    """Keys of `fp16`."""

    enabled: bool = means("`precision=fp16`", False)
    loss_scale: Scale = means("`precision.scale.static`; 0 is `null`: dynamic", 0.0)
    initial_scale_power: Annotated[int, Field(ge=0, le=40)] = means("`precision.scale.initial`, 2 to that power", 16)
    loss_scale_window: Whole | None = to("precision.scale.window")
    hysteresis: Whole | None = to("precision.scale.hysteresis")
    min_loss_scale: Scale | None = to("precision.scale.minimum")
    auto_cast: bool = means("`zero.initialize`: false leaves floating-point inputs as they are, also in bf16", True)


class Bf16(Section):
    """Keys of `bf16`."""

    enabled: bool = means("`precision=bf16`", False)


class OffloadKeys(Section):
    """Keys of `offload_param` and `offload_optimizer`."""

    device: Literal["none", "cpu", "nvme"] | None = means("`offload.param`, `offload.optimizer`; gradients follow it")
    nvme_path: Word | None = means("`offload.path`")
    pin_memory: bool | None = means("`offload.pin`")


class LeafModule(Section):
    """Keys of `leaf_module`."""

    classes: Names = means("`zero.units`, with the default policy for the rest", ())


class ZeroOptimization(Section):
    """Keys of `zero_optimization`."""

    stage: Annotated[int, Field(ge=0, le=3)] = means("`zero.stage`", 0)
    offload_param: OffloadKeys = means("", OffloadKeys())
    offload_optimizer: OffloadKeys = means("", OffloadKeys())
    nvme_offload_path: Word | None = means("`offload.path`")
    offload_param_nvme: bool = means("`offload.param=nvme`, whatever `offload_param.device` is", False)
    offload_optimizer_nvme: bool = means("`offload.optimizer=nvme`, whatever `offload_optimizer.device` is", False)
    cpu_offload: bool = means("`offload.optimizer=cpu`", False)
    cpu_offload_param: bool = means("`offload.param=cpu`", False)
    leaf_module: LeafModule = means("", LeafModule())
    units: Names | None = to("zero.units")
    gather: Word | None = to("zero.gather")
    reduce: Word | None = to("zero.reduce")
    shard: Word | None = to("zero.shard")
    frozen: Word | None = to("precision.frozen")
    zero_quantized_nontrainable_weights: bool = means("`precision.frozen=int8`", False)


class Aio(Section):
    """Keys of `aio`."""

    intra_op_parallelism: Whole | None = to("offload.threads")
    thread_count: Whole | None = to("offload.threads")


class ActivationCheckpointing(Section):
    """Keys of `activation_checkpointing`, each of which turns on the recomputation of activations."""

    partition_activations: bool = means("`zero.activations=remat`", False)
    cpu_checkpointing: bool = means("`zero.activations=remat`", False)
    contiguous_memory_optimization: bool = means("`zero.activations=remat`", False)
    number_checkpoints: Whole | None = means("`zero.activations=remat`")


class WandbKeys(Section):
    """Keys of `wandb`."""

    enabled: bool = means("`tracker=wandb`", False)
    project: Word = means("`tracker.project`", "deepspeed")
    group: Word | None = means("`tracker.group`")
    team: Word | None = means("`tracker.entity`")


class Tensorboard(Section):
    """Keys of `tensorboard`."""

    enabled: bool = means("`tracker.tensorboard=true`", False)


class Named(Section):
    """Keys of `optimizer` and `scheduler`."""

    type: Word | None = means("`optim` or `schedule`")
    params: Any = means("`optim.*` with `optim.decay=all`, or `schedule.*`", {})


class Keys(Section):
    """All supported keys."""

    train_batch_size: Count = means("`batch.global`", "auto")
    train_micro_batch_size_per_gpu: Count = means("`batch.micro`", "auto")
    gradient_accumulation_steps: Count = means("`batch.accumulate`", "auto")
    managed_gradient_accumulation: bool = means("`zero.initialize`: false leaves it to the caller when to step", True)
    gradient_allreduce_op: Literal["mean", "avg"] = means("gradients are averaged", "mean")
    sequence_parallel_size: Literal[1] = means("only 1", 1)
    gradient_clipping: Scale | None = means("`optim.clip`; 0 is `null`; 1.0 without the key, as in newest DeepSpeed")
    optimizer: Named = means("", Named())
    scheduler: Named = means("", Named())
    steps_per_print: Every | None = to("tracker.every")
    dataloader_drop_last: bool = means(
        "`zero.initialize`: whether its loader leaves out the last, smaller batch", False
    )
    fp16: Fp16 = means("", Fp16())
    bf16: Bf16 = means("", Bf16())
    bfloat16: Bf16 = means("", Bf16())
    communication_data_type: Dtype | None = to("precision.reduce")
    zero_optimization: ZeroOptimization = means("", ZeroOptimization())
    aio: Aio = means("", Aio())
    activation_checkpointing: ActivationCheckpointing = means("", ActivationCheckpointing())
    wandb: WandbKeys = means("", WandbKeys())
    tensorboard: Tensorboard = means("", Tensorboard())


# Optimizers


class OptimizerKeys(Section):
    """Keys that all optimizers have; `name` is the corresponding optimizer of this library."""

    section_key: ClassVar[str] = "optimizer.params"
    name: ClassVar[str]

    lr: Rate = to("optim.lr", 1e-3)
    weight_decay: NonNegative = to("optim.weight_decay", 0.0)


class Lion(OptimizerKeys):
    """Keys of Lion."""

    name: ClassVar[str] = "lion"

    betas: Betas = means("`optim.beta1`, `optim.beta2`", (0.9, 0.999))


class AdamW(Lion):
    """Keys of AdamW and Adam. Adam's weight decay is decoupled too, unless `adam_w_mode` is false."""

    name: ClassVar[str] = "adamw"

    eps: NonNegative = to("optim.eps", 1e-8)
    adam_w_mode: bool = means("false with Adam: `optim=adam`", True)
    torch_adam: bool = means("torch's default of `weight_decay`", False)
    bias_correction: Literal[True] = means("only true", True)
    amsgrad: Literal[False] = means("only false", False)


class Muon(Lion):
    """Keys of Muon, which updates matrices, and of the AdamW beside it."""

    name: ClassVar[str] = "muon"

    lr: Rate = to("optim.lr", 0.02)
    betas: Betas = means("`optim.beta1`, `optim.beta2`, of AdamW", (0.9, 0.95))
    eps: NonNegative = to("optim.eps", 1e-10)
    momentum: Fraction = to("optim.momentum", 0.95)
    muon_lr: Rate | None = means("`optim.lr`; wins over `lr`", None)
    adam_lr: Rate | None = means("`optim.adamw_lr`; without it `lr`, or 3e-4", None)
    ns_method: Literal["gram", "standard"] = means("ignored: two ways to the same iteration", "gram")


class Adagrad(OptimizerKeys):
    """Keys of Adagrad."""

    name: ClassVar[str] = "adagrad"

    lr: Rate = to("optim.lr", 1e-2)
    eps: NonNegative = to("optim.eps", 1e-10)


class Sgd(OptimizerKeys):
    """Keys of SGD."""

    name: ClassVar[str] = "sgd"

    momentum: Fraction = to("optim.momentum", 0.0)
    nesterov: bool = to("optim.nesterov", False)


OPTIMIZERS: Mapping[str, type[OptimizerKeys]] = {
    "Adam": AdamW, "AdamW": AdamW, "Lion": Lion, "Adagrad": Adagrad, "SGD": Sgd, "Muon": Muon
}  # fmt: skip
"""Value of `optimizer.type` -> class of its keys. A config may write it in upper or lower case."""


# Schedulers


class ScheduleKeys(Section):
    """Keys that all schedulers have.

    Attributes:
        name: the corresponding schedule of this library.
        required: keys without a default.
        peak_key: the key of the highest learning rate; "" if that is the optimizer's learning rate.
    """

    section_key: ClassVar[str] = "scheduler.params"
    name: ClassVar[str]
    required: ClassVar[tuple[str, ...]] = ()
    peak_key: ClassVar[str] = ""

    last_batch_iteration: Literal[-1] = means("only -1: a run that continues knows its step", -1)

    @property
    def peak(self) -> float | tuple[float, ...] | None:
        """The highest learning rate, of all groups or of each; None if that is the optimizer's learning rate."""
        return getattr(self, self.peak_key) if self.peak_key else None

    @property
    def by_group(self) -> dict[str, tuple[float, ...]]:
        """The keys with a number for each group of the optimizer."""
        return {name: value for name in type(self).model_fields if isinstance(value := getattr(self, name), tuple)}

    def check(self, autos: Container[str] = ()) -> None:
        """Raise ConfigError if a required key is missing; `autos` are the dotted keys with the value "auto"."""
        for name in self.required:
            if getattr(self, name) is None and f"{self.section_key}.{name}" not in autos:
                raise ConfigError(f"{self.section_key}.{name} is missing, and has no default")


class Rise(ScheduleKeys):
    """Keys that all schedulers with a warm-up have."""

    warmup_num_steps: Whole = means("`schedule.warmup`", 1000)
    warmup_type: Annotated[Literal["log", "linear"], BeforeValidator(_known_curve)] = to("schedule.curve", "log")


class Warmup(Rise):
    """Keys of `WarmupLR`."""

    name: ClassVar[str] = "linear_warmup"
    peak_key: ClassVar[str] = "warmup_max_lr"

    warmup_min_lr: Rates = means("`schedule.start`, as a share of the peak", 0.0)
    warmup_max_lr: PeakRates | None = means("`optim.lr`")


class WarmupDecay(Warmup):
    """Keys of `WarmupDecayLR`."""

    name: ClassVar[str] = "warmup_linear"
    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    warmup_max_lr: PeakRates | None = means("`optim.lr`", 1e-3)
    total_num_steps: Whole | None = means("`schedule.total`")


class WarmupCosine(Rise):
    """Keys of `WarmupCosineLR`."""

    name: ClassVar[str] = "warmup_cosine"
    required: ClassVar[tuple[str, ...]] = ("total_num_steps",)

    total_num_steps: Whole | None = means("`schedule.total`")
    warmup_min_ratio: NonNegative = means("`schedule.start`", 0.0)
    cos_min_ratio: NonNegative = to("schedule.final", 1e-4)


class OneCycle(ScheduleKeys):
    """Keys of `OneCycle`."""

    name: ClassVar[str] = "one_cycle"
    required: ClassVar[tuple[str, ...]] = ("cycle_min_lr", "cycle_max_lr")
    peak_key: ClassVar[str] = "cycle_max_lr"

    cycle_min_lr: Rates | None = means("`schedule.start`, as a share of the peak")
    cycle_max_lr: PeakRates | None = means("`optim.lr`")
    decay_lr_rate: NonNegative = to("schedule.decay_rate", 0.0)
    cycle_first_step_size: Whole = to("schedule.rise", 2000)
    cycle_second_step_size: Natural | None = to("schedule.fall")
    cycle_first_stair_count: Natural = to("schedule.rise_stairs", 0)
    cycle_second_stair_count: Natural | None = to("schedule.fall_stairs")
    decay_step_size: Natural = to("schedule.decay_every", 0)
    cycle_momentum: bool = to("schedule.momentum", True)
    cycle_min_mom: Fractions = to("schedule.momentum_min", 0.8)
    cycle_max_mom: Fractions = to("schedule.momentum_max", 0.9)
    decay_mom_rate: NonNegative = to("schedule.momentum_decay_rate", 0.0)


class LRRange(ScheduleKeys):
    """Keys of `LRRangeTest`."""

    name: ClassVar[str] = "lr_range"
    peak_key: ClassVar[str] = "lr_range_test_min_lr"

    lr_range_test_min_lr: PeakRates | None = means("`optim.lr`", 1e-3)
    lr_range_test_step_size: Whole = to("schedule.every", 2000)
    lr_range_test_step_rate: NonNegative = to("schedule.rate", 1.0)
    lr_range_test_staircase: bool = to("schedule.stairs", False)


SCHEDULERS: Mapping[str, type[ScheduleKeys]] = {
    "WarmupLR": Warmup,
    "WarmupDecayLR": WarmupDecay,
    "WarmupCosineLR": WarmupCosine,
    "OneCycle": OneCycle,
    "LRRangeTest": LRRange,
}


# Ignored and rejected keys

_IGNORED = {
    "": "wall_clock_breakdown memory_breakdown dump_state csv_monitor comet flops_profiler comms_logger autotuning "
    "prescale_gradients gradient_predivide_factor elasticity nebula datastates_ckpt hybrid_engine compile "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer sparse_gradients disable_allgather log_level timers "
    "seq_parallel_communication_data_type seq_parallel_comm_data_type disable_python_gc graph_harvesting "
    "vocabulary_size use_data_before_expert_parallelism",
    "tensorboard.": "output_path job_name",
    "data_types.": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "optimizer.": "legacy_fusion",
    "optimizer.params.": "fused foreach capturable differentiable set_grad_none fp32_optimizer_states",
    "fp16.": "fp16_master_weights_and_grads fused_mode consecutive_hysteresis",
    "bf16.": "immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "aio.": "block_size queue_depth single_submit overlap_events use_gds",
    "activation_checkpointing.": "profile synchronize_checkpoint_boundary",
    "checkpoint.": "tag_validation load_universal parallel_write use_node_local_storage "
    "checkpoint_serialization writer",
    "zero_optimization.": "reduce_bucket_size allgather_bucket_size allgather_partitions leaf_module.names "
    "overlap_comm round_robin_gradients memory_efficient_linear mics_shard_size mics_hierarchical_params_gather "
    "reduce_scatter zero_hpz_partition_size contiguous_gradients ignore_unused_parameters pipeline_loading_checkpoint "
    "load_from_fp32_weights elastic_checkpoint zero_quantized_weights "
    "zero_quantized_gradients zeropp_loco_param zenflow sub_group_size cpu_offload_use_pin_memory "
    "leaf_module.name_suffixes use_multi_rank_bucket_allreduce compute_grad_norm enable_sanity_checks "
    "parameter_alignment override_module_apply log_trace_cache_warnings save_muon_momentum_buffer_in_memory",
    "zero_optimization.offload_param.": "buffer_count buffer_size max_in_cpu",
    "zero_optimization.offload_optimizer.": "buffer_count buffer_size pipeline_read pipeline_write pipeline fast_init "
    "ratio super_offload cpuadam_cores_perc",
}
_STAGE3 = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance module_granularity_threshold use_all_reduce_for_fetch_params allgather_sequential "
    "gather_16bit_weights_on_model_save gather_fp16_weights_on_model_save"
)
IGNORED = frozenset(
    f"{section}{name}"
    for section, names in (*_IGNORED.items(), ("zero_optimization.", _STAGE3), ("zero_optimization.stage3_", _STAGE3))
    for name in names.split()
)
"""Ignored keys and sections: they only affect how data is moved or what is printed. Their values are not checked."""

_ABSENT = "zero has no such feature, and a run without it gives other numbers"

REJECTED: Mapping[str, str] = {
    "amp": "write bf16 or fp16",
    "torch_autocast": "write bf16 or fp16",
    "max_grad_norm": "write gradient_clipping",
    "optimizer.params.max_grad_norm": "write gradient_clipping, beside optimizer",
    **dict.fromkeys(
        (
            *("progressive_layer_drop", "curriculum_learning", "data_efficiency", "quantize_training", "eigenvalue"),
            *("compression_training", "sparse_attention", "pipeline", "expert_parallel", "weight_quantization"),
            *("tensor_parallel", "zero_optimization.legacy_stage1", "optimizer.params.maximize"),
            *("optimizer.params.dampening", "optimizer.params.lr_decay", "optimizer.params.initial_accumulator_value"),
        ),
        _ABSENT,
    ),
}
"""Keys and sections that are rejected if switched on, because they would change a run's numbers -> the reason."""
