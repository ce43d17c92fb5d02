"""DeepSpeed's names: where each is here, or what does it instead.

`zero.NAME`, `from zero.ops.adam import NAME` and `engine.NAME` find what `HERE` has, and answer with a line for the
rest; docs/coming-from-deepspeed.md shows them. Nothing is imported before it is asked for.
"""

import logging
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

_PLACED = "zero.initialize has placed the model; the config's bf16 or fp16 says what it computes in"
_MONITOR = "zero.initialize(folder=...): metrics.jsonl, and W&B if the config has it"
_NO_PIPELINE = "there is no pipeline parallelism"
_FIXED = "the plan fixes it: save, and initialize again with another config"
_TIERS = "offload_optimizer and offload_param in the config; or save_checkpoint and destroy"

_NAMES = "zero.interop.parameters"

HERE: Mapping[str, str] = {
    "get_accelerator": "zero.interop.accelerator:get_accelerator",
    "accelerator.get_accelerator": "zero.interop.accelerator:get_accelerator",
    "ops.adam.FusedAdam": "zero.interop.classes:FusedAdam",
    "ops.adam.DeepSpeedCPUAdam": "zero.interop.classes:DeepSpeedCPUAdam",
    "ops.adagrad.DeepSpeedCPUAdagrad": "zero.interop.classes:DeepSpeedCPUAdagrad",
    "ops.lion.FusedLion": "zero.interop.classes:FusedLion",
    "ops.lion.DeepSpeedCPULion": "zero.interop.classes:FusedLion",
    **{f"{place}Init": f"{_NAMES}:Init" for place in ("", "zero.")},
    **{f"{place}GatheredParameters": f"{_NAMES}:GatheredParameters" for place in ("", "zero.")},
    **{
        f"{place}.{name}": f"{_NAMES}:{name}"
        for place in ("zero", "utils", "runtime.zero")
        for name in (
            *("register_external_parameter", "unregister_external_parameter", "unwrap_model_for_generation"),
            *("safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state"),
            *("safe_set_full_fp32_param", "safe_set_full_grad", "safe_set_full_optimizer_state"),
            "set_z3_leaf_modules",
        )
    },
    "runtime.zero.Init": f"{_NAMES}:Init",
    "runtime.zero.GatheredParameters": f"{_NAMES}:GatheredParameters",
    **{
        f"runtime.zero.partition_parameters.{name}": f"{_NAMES}:{name}"
        for name in ("Init", "GatheredParameters", "ZeroParamStatus")
    },
    "unwrap_model_for_generation": f"{_NAMES}:unwrap_model_for_generation",
    "utils.logger": "zero.elsewhere:log",
    "DeepSpeedEngine": "zero.interop.engine:Engine",
    "comm.init_distributed": "zero.interop.begin:init_distributed",
}
"""DeepSpeed's name, with the modules in front -> where it is here."""

FORWARDED: Mapping[str, str] = {"comm": "torch.distributed"}
"""Modules of DeepSpeed's whose other names are another module's."""

log = logging.getLogger("zero")

OF_THE_MODULE: Mapping[str, str] = {
    "checkpointing": "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or the config's "
    "activation_checkpointing",
    "monitor": _MONITOR,
    "safe_get_local_fp32_param": "zero.get_full: a shard has no shape of its own here",
    "init_inference": "engine.eval() and torch.no_grad(); the same state trains and generates",
    "DeepSpeedConfig": "zero.initialize takes the JSON as it is",
    **dict.fromkeys(("pipe", "PipelineModule"), _NO_PIPELINE),
    "moe": "experts are modules like others: a block is gathered whole",
    "tp_model_init": "there is no tensor parallelism",
}

OF_THE_ENGINE: Mapping[str, str] = {
    **dict.fromkeys(("to", "cuda", "cpu", "half", "bfloat16", "float", "double"), _PLACED),
    "compile": "zero.compile=true of train.py compiles what a unit computes; the config has no key for it",
    "requires_grad_": "the model that was passed: its flags are followed",
    "load_state_dict": "engine.load_module_state_dict, or engine.load_checkpoint",
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


class Names(ModuleType):
    """A module of DeepSpeed's, by the names that `HERE` has of it."""

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__.removeprefix('zero.')}.{name}"
        if path in HERE:
            return found(path)
        forwarded = FORWARDED.get(path.rpartition(".")[0])
        if forwarded is not None and not name.startswith("__"):
            return getattr(import_module(forwarded), name)
        if name in OF_THE_MODULE:
            raise missing("zero", name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def found(path: str) -> Any:
    """What `HERE` has by a name."""
    module, _, name = HERE[path].partition(":")
    return getattr(import_module(module), name)


def modules() -> dict[str, Names]:
    """DeepSpeed's modules by full name, for `sys.modules`, each within the one above it."""
    made: dict[str, Names] = {}
    for path in (*HERE, *(f"{name}." for name in FORWARDED)):
        above, _, _ = path.rpartition(".")
        parts = above.split(".") if above else []
        for count in range(1, len(parts) + 1):
            name = ".".join(("zero", *parts[:count]))
            if name not in made:
                made[name] = Names(name)
                made[name].__path__ = []
                outer, _, own = name.rpartition(".")
                if outer in made:
                    setattr(made[outer], own, made[name])
    return made
