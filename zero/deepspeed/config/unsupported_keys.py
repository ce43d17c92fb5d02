"""The keys that are ignored, because they set how bytes move, and those that are rejected, because they set numbers."""

from collections.abc import Mapping

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

IGNORED_KEYS = frozenset(
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
