"""What DeepSpeed's scripts ask for by names that are not here, and what does it instead.

`zero.NAME` and `engine.NAME` answer with these lines; docs/coming-from-deepspeed.md shows them.
"""

from collections.abc import Mapping

_PLACED = "zero.initialize has placed the model; the config's bf16 or fp16 says what it computes in"
_ACCELERATOR = "torch.accelerator; and engine.device"
_MONITOR = "zero.initialize(folder=...): metrics.jsonl, and W&B if the config has it"
_NO_PIPELINE = "there is no pipeline parallelism"
_FIXED = "the plan fixes it: save, and initialize again with another config"
_TIERS = "offload_optimizer and offload_param in the config; or save_checkpoint and destroy"

OF_THE_MODULE: Mapping[str, str] = {
    "Init": "`with zero.empty():` builds a model whose parameters take no memory",
    "GatheredParameters": "`with zero.gathered(engine, names, modify=rank)`",
    "zero": "Init is zero.empty, GatheredParameters is zero.gathered",
    "comm": "torch.distributed, after zero.init_distributed(); and engine.global_rank, engine.world_size",
    **dict.fromkeys(("accelerator", "get_accelerator"), _ACCELERATOR),
    "ops": "torch.optim.AdamW for FusedAdam and DeepSpeedCPUAdam: the config says where it runs",
    "checkpointing": "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or the config's "
    "activation_checkpointing",
    "utils": "zero.get_full and zero.set_full for safe_get_full_... and safe_set_full_...; logging.getLogger('zero')",
    "monitor": _MONITOR,
    "runtime": "the config for its schedules and optimizers, or those of torch; zero.Engine for its engine",
    "init_inference": "engine.eval() and torch.no_grad(); the same state trains and generates",
    "DeepSpeedEngine": "zero.Engine",
    "DeepSpeedConfig": "zero.initialize takes the JSON as it is",
    **dict.fromkeys(("pipe", "PipelineModule"), _NO_PIPELINE),
    "moe": "experts are modules like others: a block is gathered whole",
    "tp_model_init": "there is no tensor parallelism",
}

IN_ITS_ZERO = ("Init", "GatheredParameters")
"""Of those, what DeepSpeed has in `deepspeed.zero`."""

OF_THE_ENGINE: Mapping[str, str] = {
    **dict.fromkeys(("to", "cuda", "cpu", "half", "bfloat16", "float", "double"), _PLACED),
    "compile": "zero.compile=true of train.py compiles what a unit computes; the config has no key for it",
    "requires_grad_": "the model that was passed: its flags are followed",
    "load_state_dict": "engine.load_checkpoint; or zero.set_full, value by value",
    **dict.fromkeys(("set_train_batch_size", "set_train_micro_batch_size"), _FIXED),
    "allreduce_gradients": "backward reduces them",
    "coalesce_grad_reduction": "a unit's gradients are reduced together, once per microbatch or step",
    **dict.fromkeys(("offload_states", "reload_states"), _TIERS),
    "empty_partition_cache": "no gathered parameter outlives its use",
    "deepspeed_io": "zero.initialize(training_data=...) returns the loader",
    "monitor": _MONITOR,
    "train_batch": f"{_NO_PIPELINE}: engine(batch), engine.backward(loss), engine.step()",
    "eval_batch": f"{_NO_PIPELINE}: engine.eval() and engine(batch)",
    "save_fp16_model": "engine.save_16bit_model",
    "optimizer_name": "engine.optimizer.kind",
    "scheduler_name": "type(engine.lr_scheduler).__name__",
    "dump_state": "engine.config, engine.plan",
}


def missing(owner: str, name: str) -> AttributeError:
    """What to raise where `owner`, "zero" or "engine", is asked for `name`."""
    table, theirs = (OF_THE_MODULE, "deepspeed") if owner == "zero" else (OF_THE_ENGINE, "DeepSpeed's")
    return AttributeError(f"{owner} has no {name}, as {theirs} has; in its place: {table[name]}")
