"""DeepSpeed's names: where each is here, or what does it instead.

`zero.NAME`, `from zero.ops.adam import NAME` and `engine.NAME` find what `HERE` has, and answer with a line for the
rest: by attribute an AttributeError, so that a script may ask whether a name is there, and by import an ImportError.
docs/coming-from-deepspeed.md shows them. Nothing is imported before it is asked for.
"""

import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

_PLACED = "zero.initialize has placed the model; the config's bf16 or fp16 says what it computes in"
_MONITOR = "zero.initialize(folder=...): metrics.jsonl, and W&B if the config has it"
_NO_PIPELINE = "there is no pipeline parallelism"
_FIXED = "the plan fixes it: save, and initialize again with another config"
_TIERS = "offload_optimizer and offload_param in the config; or save_checkpoint and destroy"
_OWN_LAYERS = "the model's own layers: none is replaced here"
_SAME_STATE = "engine.eval() and torch.no_grad(); the same state trains and generates"
_LOADER = "zero.initialize(training_data=...) returns the loader"
_LEAVES = "set_z3_leaf_modules(model, [Class]), before zero.initialize"


def _at(module: str, names: str, *prefixes: str) -> dict[str, str]:
    """Names of a module of this folder, under each prefix."""
    return {f"{prefix}{name}": f"zero.deepspeed.{module}:{name}" for prefix in prefixes for name in names.split()}


HERE: Mapping[str, str] = {
    **_at("accelerator", "get_accelerator", "", "accelerator."),
    **_at("optimizers", "FusedAdam DeepSpeedCPUAdam", "ops.adam."),
    **_at("optimizers", "DeepSpeedCPUAdagrad", "ops.adagrad."),
    **_at("optimizers", "FusedLion", "ops.lion."),
    "ops.lion.DeepSpeedCPULion": "zero.deepspeed.optimizers:FusedLion",
    **_at("model", "Init GatheredParameters", "", "zero."),
    **_at(
        "model",
        "register_external_parameter unregister_external_parameter unwrap_model_for_generation "
        "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
        "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state set_z3_leaf_modules",
        *("zero.", "utils.", "runtime.zero."),
    ),
    **_at("model", "Init GatheredParameters", "runtime.zero.", "runtime.zero.partition_parameters."),
    **_at("model", "ZeroParamStatus", "runtime.zero.partition_parameters."),
    **_at("model", "unwrap_model_for_generation", ""),
    **{f"{prefix}logger": "zero.deepspeed.missing_names:log" for prefix in ("utils.", "utils.logging.", "")},
    **_at("accelerator", "log_dist", "utils.", "utils.logging.", ""),
    **_at("loader", "RepeatingLoader", "utils.", "runtime.dataloader."),
    **_at("accelerator", "see_memory_usage", "runtime.utils."),
    **_at(
        "model",
        "checkpoint non_reentrant_checkpoint configure is_configured reset",
        *("checkpointing.", "runtime.activation_checkpointing.checkpointing."),
    ),
    **_at(
        "checkpoints",
        "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint "
        "convert_zero_checkpoint_to_fp32_state_dict",
        "utils.zero_to_fp32.",
    ),
    **_at("schedulers", "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest", "runtime.lr_schedules."),
    **{f"{prefix}DeepSpeedEngine": "zero.deepspeed.engine:Engine" for prefix in ("", "runtime.engine.")},
    **{
        f"{prefix}DeepSpeedOptimizer": "zero.deepspeed.optimizers:Optimizer"
        for prefix in ("", "runtime.base_optimizer.")
    },
    **_at("initialize", "init_distributed", "comm."),
    **_at("accelerator", "get_local_rank", "comm."),
}
"""DeepSpeed's name, with the modules in front -> where it is here."""

FORWARDED: Mapping[str, str] = {"comm": "torch.distributed"}
"""Modules of DeepSpeed's whose other names are another module's."""

log = logging.getLogger("zero")

OF_THE_MODULE: Mapping[str, str] = {
    "monitor": _MONITOR,
    **dict.fromkeys(
        (f"utils.safe_get_local_{what}" for what in ("fp32_param", "grad", "optimizer_state")),
        "zero.get_full: a shard has no shape of its own here",
    ),
    **dict.fromkeys(
        (f"utils.safe_set_local_{what}" for what in ("fp32_param", "grad", "optimizer_state")),
        "zero.set_full: a shard has no shape of its own here",
    ),
    "utils.safe_update_full_grad_vectorized": "safe_get_full_grad and safe_set_full_grad of each parameter",
    **dict.fromkeys(
        (f"utils.{name}" for name in ("set_z3_leaf_module", "set_z3_leaf_modules_by_name", "unset_z3_leaf_modules")),
        _LEAVES,
    ),
    "runtime.zero.utils": "nothing to ask: every parameter reads as whole",
    "OnDevice": "with zero.empty(): for meta, with torch.device(...): for others",
    **dict.fromkeys(("zero.TiledLinear", "runtime.zero.tiling"), "torch.nn.Linear: it is gathered with its unit"),
    **dict.fromkeys(("zero.MiCS_Init", "runtime.zero.mics"), "zero.Init: all ranks share, there is no smaller group"),
    **dict.fromkeys(("init_inference", "inference", "InferenceEngine", "DeepSpeedInferenceConfig"), _SAME_STATE),
    **dict.fromkeys(("runtime.hybrid_engine", "DeepSpeedHybridEngine"), _SAME_STATE),
    **dict.fromkeys(("DeepSpeedConfig", "runtime.config"), "zero.initialize takes the JSON as it is"),
    **dict.fromkeys(("pipe", "PipelineModule", "PipelineEngine"), _NO_PIPELINE),
    "moe": "experts are modules like others: a block is gathered whole",
    **dict.fromkeys(
        ("tp_model_init", "set_autotp_mode", "runtime.tensor_parallel", "runtime.domino"),
        "there is no tensor parallelism",
    ),
    **dict.fromkeys(("sequence", "runtime.sequence_parallel"), "there is no sequence parallelism"),
    "utils.groups": "all ranks are one group: torch.distributed.group.WORLD",
    **dict.fromkeys(("module_inject", "replace_transformer_layer", "revert_transformer_layer"), _OWN_LAYERS),
    **dict.fromkeys(("DeepSpeedTransformerLayer", "DeepSpeedTransformerConfig"), _OWN_LAYERS),
    "ops.sparse_attention": "attention is the model's own",
    "ops.op_builder": "nothing is compiled: operations are torch's",
    **dict.fromkeys(
        ("ops.lamb", "ops.muon", "runtime.fp16.onebit"), "optimizers are AdamW, Adam, Lion, Adagrad and SGD"
    ),
    **dict.fromkeys(
        ("runtime.fp16", "runtime.bf16_optimizer"), "fp16 or bf16 in the config; engine.loss_scale tells the scale"
    ),
    **dict.fromkeys(
        ("runtime.zero.stage3", "runtime.zero.stage_1_and_2"),
        "zero.DeepSpeedOptimizer for isinstance; engine.plan, or mode=plan of train.py, for what memory is needed",
    ),
    "runtime.zero.config": "engine.zero_optimization_stage(), which is a number",
    "runtime.zero.offload_config": _TIERS,
    "runtime.utils.clip_grad_norm_": "gradient_clipping in the config, and engine.get_global_grad_norm()",
    "runtime.utils.set_random_seed": "torch.manual_seed(seed) and random.seed(seed)",
    "add_tuning_arguments": "the scheduler in the config",
    **dict.fromkeys(("DeepSpeedDataLoader", "runtime.dataloader.DeepSpeedDataLoader"), _LOADER),
    "runtime.data_pipeline": "data comes from the loader as it is",
    "compression": "there is no compression",
    "linear": "PEFT's adapters, on the model before zero.initialize",
    "profiling": "torch.utils.flop_counter.FlopCounterMode counts; profile=true of train.py records one step",
    "utils.timer": "engine.tput_timer, or time.perf_counter() after get_accelerator().synchronize()",
    "utils.instrument_w_nvtx": "torch.profiler.record_function",
    "comm.log_summary": "profile=true of train.py: report.html has every collective of one step",
    "checkpoint.utils": "engine.module_state_dict(), whose tensors are copies already",
    "checkpoint.ds_to_universal": "nothing: a checkpoint loads into any world and stage",
    "autotuning": "mode=plan of train.py says what fits and what is fastest",
    "elasticity": "checkpoints load into any world",
    "launcher": "torchrun, or launch.ranks=N of train.py",
    "env_report": "mode=doctor of train.py",
    "git_version_info": "zero.__version__",
}
"""DeepSpeed's name, or that of a module that it is in -> what to write."""

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
    "deepspeed_io": _LOADER,
    "monitor": _MONITOR,
    "train_batch": f"{_NO_PIPELINE}: engine(batch), engine.backward(loss), engine.step()",
    "eval_batch": f"{_NO_PIPELINE}: engine.eval() and engine(batch)",
    "save_fp16_model": "engine.save_16bit_model",
    "optimizer_name": "engine.optimizer.kind",
    "scheduler_name": "type(engine.lr_scheduler).__name__",
    **dict.fromkeys(
        (f"zero_optimization{what}" for what in ("", "_partition_gradients", "_partition_weights")),
        "engine.zero_optimization_stage(): any, from 2, 3",
    ),
    "dump_state": "engine.config, engine.plan",
}


def answer(path: str) -> str | None:
    """What to write in place of a name of `deepspeed`; None where that is not known."""
    return next((instead for name, instead in OF_THE_MODULE.items() if f"{path}.".startswith(f"{name}.")), None)


def missing(owner: str, name: str) -> AttributeError:
    """What to raise where `owner`, "zero" or "engine", is asked for `name`."""
    theirs, instead = ("deepspeed", answer(name)) if owner == "zero" else ("DeepSpeed's", OF_THE_ENGINE[name])
    return AttributeError(f"{owner} has no {name}, as {theirs} has; in its place: {instead}")


class Names(ModuleType):
    """A module of DeepSpeed's, by the names that `HERE` has of it."""

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__.removeprefix('zero.')}.{name}"
        if path in HERE:
            return found(path)
        if answer(path) is not None:
            raise missing("zero", path)
        forwarded = FORWARDED.get(path.rpartition(".")[0])
        if forwarded is not None and not name.startswith("__"):
            return getattr(import_module(forwarded), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{_SEE}")


class Unfound:
    """The last place where Python looks for a module, and for a name that an import did not find in one."""

    @staticmethod
    def find_spec(name: str, *further: Any) -> None:
        """Nothing, or the line about it.

        Raises:
            ImportError: it is DeepSpeed's, and not here.
        """
        above, _, own = name.rpartition(".")
        if not name.startswith("zero.") or own.startswith("__"):
            return
        path = name.removeprefix("zero.")
        if answer(path) is not None:
            raise ImportError(str(missing("zero", path)), name=name)
        if isinstance(sys.modules.get(above), Names):
            raise ImportError(f"{above} has no {own}{_SEE}", name=name)


_SEE = "; docs/coming-from-deepspeed.md has the names that are here"


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
