"""Public names of DeepSpeed's engine: methods that report a setting, and names that are not here.

`Engine.__getattr__` looks here. A setting that has no meaning here is reported as the JSON has it, or as DeepSpeed's
default; a feature that is not here is off. docs/coming-from-deepspeed.md shows the names that are not here.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

Report = Callable[[Any], Any]
"""Engine -> reported value. The engine's `json` has the checked keys of the JSON, dotted."""


def _keys(method: str, key: str, **defaults: Any) -> dict[str, Report]:
    """For each default: the name after `method` reports the key after `key`, or else the default."""

    def report(path: str, default: Any) -> Report:
        return lambda engine: engine.json.get(path, default)

    return {f"{method}{name}": report(f"{key}{name}", default) for name, default in defaults.items()}


def _section(engine: Any, name: str) -> dict[str, Any] | None:
    """A section of the JSON, without its own name; None where it has no key."""
    section = {key.removeprefix(name): value for key, value in engine.json.items() if key.startswith(name)}
    return section or None


def _constant(names: str, value: Any) -> dict[str, Report]:
    return {name: lambda engine: value for name in names.split()}


METHODS: Mapping[str, Report] = {
    **_keys(
        *("", ""),
        wall_clock_breakdown=False,
        memory_breakdown=False,
        dump_state=False,
        dataloader_drop_last=False,
        managed_gradient_accumulation=True,
        gradient_predivide_factor=1.0,
        zero_allow_untested_optimizer=False,
        zero_force_ds_cpu_optimizer=True,
        log_level=None,
    ),
    **_keys("", "checkpoint.", use_node_local_storage=False),
    **_keys(
        *("zero_", "zero_optimization."),
        reduce_scatter=True,
        reduce_bucket_size=500_000_000,
        allgather_bucket_size=500_000_000,
        allgather_partitions=True,
        contiguous_gradients=True,
        load_from_fp32_weights=True,
        elastic_checkpoint=False,
        sub_group_size=1_000_000_000,
        compute_grad_norm=True,
        ignore_unused_parameters=True,
        legacy_stage1=False,
        round_robin_gradients=False,
        parameter_alignment=False,
        save_muon_momentum_buffer_in_memory=False,
        log_trace_cache_warnings=False,
    ),
    **_keys(
        *("", "zero_optimization."),
        zero_hpz_partition_size=1,
        zero_quantized_weights=False,
        zero_quantized_nontrainable_weights=False,
        zero_quantized_gradients=False,
    ),
    **_keys(
        *("zero_", "zero_optimization.stage3_"),
        max_live_parameters=1_000_000_000,
        max_reuse_distance=1_000_000_000,
        prefetch_bucket_size=50_000_000,
        module_granularity_threshold=0,
        param_persistence_threshold=100_000,
        model_persistence_threshold=sys.maxsize,
        allgather_sequential=False,
    ),
    **_keys("", "zero_optimization.offload_optimizer.", super_offload=False),
    **_keys("fp16_", "fp16.", auto_cast=False),
    **_keys("", "bf16.", bf16_optimizer_states=False),
    **_keys("", "optimizer.", optimizer_legacy_fusion=False),
    "load_universal_checkpoint": lambda engine: engine.json.get("checkpoint.load_universal", False),
    "is_sanity_checks_enabled": lambda engine: engine.json.get("zero_optimization.enable_sanity_checks", False),
    "zero_multi_rank_bucket_allreduce": lambda engine: engine.json.get(
        "zero_optimization.use_multi_rank_bucket_allreduce", True
    ),
    "zero_partial_offload": lambda engine: engine.json.get("zero_optimization.offload_optimizer.ratio", 1.0),
    "fp16_master_weights_and_gradients": lambda engine: engine.json.get("fp16.fp16_master_weights_and_grads", False),
    "bf16_master_weights_and_gradients": lambda engine: engine.json.get("bf16.bf16_master_weights_and_grads", False),
    "postscale_gradients": lambda engine: not engine.json.get("prescale_gradients", False),
    "dynamic_loss_scale": lambda engine: not engine.json.get("fp16.loss_scale", 0),
    "initial_dynamic_scale": lambda engine: 2 ** engine.json.get("fp16.initial_scale_power", 16),
    "optimizer_name": lambda engine: (
        type(engine.client_optimizer).__name__
        if engine.client_optimizer
        else engine.json.get("optimizer.type", "").lower() or None
    ),
    "optimizer_params": lambda engine: _section(engine, "optimizer.params."),
    "scheduler_name": lambda engine: engine.json.get("scheduler.type"),
    "scheduler_params": lambda engine: _section(engine, "scheduler.params."),
    "zero_optimization": lambda engine: engine.plan.stage.moments,
    "zero_optimization_partition_gradients": lambda engine: engine.plan.stage.gradients,
    "zero_optimization_partition_weights": lambda engine: engine.plan.stage.parameters,
    "is_first_weights_partition_group": lambda engine: engine.plan.stage.parameters,
    "zero_overlap_comm": lambda engine: engine.json.get("zero_optimization.overlap_comm", engine.plan.stage.parameters),
    "zero_offload_optimizer": lambda engine: _section(engine, "zero_optimization.offload_optimizer."),
    "zero_offload_param": lambda engine: _section(engine, "zero_optimization.offload_param."),
    "zero_cpu_offload": lambda engine: engine.plan.offload.optimizer == "cpu",
    "zero_nvme_offload_optimizer": lambda engine: engine.plan.offload.optimizer == "nvme",
    "zero_use_cpu_optimizer": lambda engine: engine.plan.offload.optimizer in ("cpu", "nvme"),
    "get_data_parallel_rank": lambda engine: engine.global_rank,
    **_constant("get_tensor_parallel_rank get_model_parallel_rank", 0),
    **_constant("empty_partition_cache", None),  # no gathered parameter outlives its use
    **_constant(
        "autotuning_enabled checkpoint_writer_enabled compile_autosp compile_autotp curriculum_learning_enabled "
        "data_efficiency_enabled data_sampling_enabled flops_profiler_enabled is_deepcompile_active "
        "is_deepcompile_enabled random_ltd_enabled torch_autocast_enabled uses_parallelization_pass_only",
        False,
    ),
}
"""DeepSpeed's name of a method without arguments -> its result."""

ATTRIBUTES: Mapping[str, Report] = {
    **_constant("mp_world_size sequence_parallel_size", 1),
    **_constant("has_moe_layers is_compiled pipeline_parallelism zenflow", False),
    **_constant("mpu", None),
    "communication_data_type": lambda engine: engine.plan.precision.reduce,
    "seq_dp_world_size": lambda engine: engine.plan.world.size,
    "seq_data_parallel_group": lambda engine: engine.data_parallel_group,
    "param_names": lambda engine: {parameter: name for name, parameter in engine.module.named_parameters()},
}
"""DeepSpeed's name of an attribute -> its value."""


def by_name(names_of: Mapping[str, str]) -> dict[str, str]:
    """Reason -> names, as name -> reason."""
    return {name: reason for reason, names in names_of.items() for name in names.split()}


MONITOR = "zero.initialize(folder=...): metrics.jsonl, and W&B if the config has it"
NO_PIPELINE = "there is no pipeline parallelism"
TIERS = "offload_optimizer and offload_param in the config; or save_checkpoint and destroy"
LOADER = "zero.initialize(training_data=...) returns the loader"
_DATA = "data comes from the loader as it is"
_REDUCED = "backward reduces them"
_COMPILE = "model.compile() before zero.initialize compiles each unit"
_EXPERTS = "experts are modules like others: a block is gathered as one unit"
_PROFILE = "torch.utils.flop_counter.FlopCounterMode counts; profile=true of zero-train records one step"
_AUTOTUNING = "mode=plan of zero-train says what fits and what is fastest"

NOT_HERE: Mapping[str, str] = by_name(
    {
        "the plan fixes it: save, and initialize again with another config": (
            "set_train_batch_size set_train_micro_batch_size"
        ),
        _REDUCED: (
            "allreduce_gradients allreduce_and_copy allreduce_bucket allreduce_no_retain buffered_allreduce_fallback "
            "sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain all_gather_scalar "
            "enable_backward_allreduce"
        ),
        "a unit's gradients are reduced together, once per microbatch or step": "coalesce_grad_reduction",
        "gradient_clipping in the config": "clip_fp32_gradients",
        TIERS: "offload_states reload_states",
        LOADER: "deepspeed_io training_data collate_fn",
        MONITOR: "monitor",
        f"{NO_PIPELINE}: engine(batch), engine.backward(loss), engine.step()": "train_batch",
        f"{NO_PIPELINE}: engine.eval() and engine(batch)": "eval_batch",
        "engine.optimizer, whose kind says which": ("basic_optimizer get_optimizer_configuration get_type"),
        "engine.lr_scheduler": "client_lr_scheduler",
        "engine.config.offload": "aio_config swap_tensor_config cpuadam_cores_perc",
        "engine.plan.precision": "get_data_types dynamic_loss_scale_args torch_autocast_dtype",
        "autocast is not used; write bf16 or fp16": (
            "torch_autocast_lower_precision_safe_modules torch_autocast_z0_gradscaler"
        ),
        "the loss that engine(batch) returns": "losses",
        "engine.tput_timer": "timers engine_timers engine_timers_cache get_wall_clock_timers print_forward_breakdown",
        "every update is exact, and hides behind the next forward": "zenflow_config",
        _DATA: (
            "curriculum_learning_config data_efficiency_config data_sampling_config random_ltd_config "
            "random_ltd_initialize random_ltd_scheduler set_custom_curriculum_learning_schedule "
            "set_data_post_process_func"
        ),
        _PROFILE: (
            "flops_profiler flops_profiler_detailed flops_profiler_module_depth flops_profiler_output_file "
            "flops_profiler_profile_step flops_profiler_recompute_fwd_factor flops_profiler_top_modules"
        ),
        _AUTOTUNING: (
            "autotuning_start_profile_step autotuning_end_profile_step autotuning_metric autotuning_metric_path "
            "autotuning_model_info_path autotuning_profile_model_info"
        ),
        _COMPILE: (
            "compile_zero_optimization_stage get_autosp_backend get_autotp_backend get_compile_time "
            "get_deepcompile_backend get_deepspeed_compile_backend register_compile_pass"
        ),
        _EXPERTS: (
            "moe_layers num_experts gate_modules load_moe_state_dict expert_parallel_group expert_data_parallel_group"
        ),
        "there is no tensor parallelism": "tensor_parallel_config autotp_size",
        "there is no sequence parallelism": "get_sequence_parallel_group seq_parallel_group",
        "engine.save_checkpoint publishes the state of all ranks": (
            "checkpoint_engine checkpoint_mp_rank checkpoint_serialization_enabled checkpoint_tag_validation_enabled "
            "checkpoint_tag_validation_fail save_non_zero_checkpoint save_zero_checkpoint"
        ),
        "a checkpoint loads into any world": "loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size",
        "Python collects garbage when it wants to": "collect_python_gc",
    }
)
"""DeepSpeed's name -> what to write."""


def missing(name: str, model: str) -> AttributeError:
    """The error for a name that neither an engine nor its model has; `model` is the model's class."""
    if name in NOT_HERE:
        return AttributeError(f"engine has no {name}, as DeepSpeed's has; in its place: {NOT_HERE[name]}")
    return AttributeError(f"neither the engine nor its model, a {model}, has {name!r}")
