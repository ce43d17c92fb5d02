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

from zero.platform.installed import page


def _at(module: str, names: str, *prefixes: str) -> dict[str, str]:
    """Names of a module of this folder, or THEIRS=OURS, under each prefix."""
    pairs = [name.partition("=") for name in names.split()]
    found = {theirs: f"zero.deepspeed.{module}:{ours or theirs}" for theirs, _, ours in pairs}
    return {f"{prefix}{theirs}": place for prefix in prefixes for theirs, place in found.items()}


HERE: Mapping[str, str] = {
    **_at("accelerator", "get_accelerator", "", "accelerator."),
    **_at("optimizers", "FusedAdam DeepSpeedCPUAdam", "ops.adam."),
    **_at("optimizers", "DeepSpeedCPUAdagrad", "ops.adagrad."),
    **_at("optimizers", "FusedLion DeepSpeedCPULion", "ops.lion."),
    **_at("model", "Init GatheredParameters", "", "zero.", "runtime.zero.", "runtime.zero.partition_parameters."),
    **_at(
        "model",
        "register_external_parameter unregister_external_parameter unwrap_model_for_generation "
        "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
        "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state set_z3_leaf_modules",
        *("zero.", "utils.", "runtime.zero."),
    ),
    **_at("model", "ZeroParamStatus", "runtime.zero.partition_parameters."),
    **_at("model", "unwrap_model_for_generation", ""),
    **_at("missing_names", "logger=log", "utils.", "utils.logging.", ""),
    **_at("accelerator", "log_dist", "utils.", "utils.logging.", ""),
    **_at("initialize", "RepeatingLoader", "utils.", "runtime.dataloader."),
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
    **_at("engine", "DeepSpeedEngine=Engine", "", "runtime.engine."),
    **_at("optimizers", "DeepSpeedOptimizer=Optimizer", "", "runtime.base_optimizer."),
    **_at("initialize", "init_distributed", "comm."),
    **_at("accelerator", "get_local_rank", "comm."),
}
"""DeepSpeed's name, with the modules in front -> where it is here."""

log = logging.getLogger("zero")


def _by_name(names_of: Mapping[str, str]) -> dict[str, str]:
    """Reason -> names, as name -> reason."""
    return {name: reason for reason, names in names_of.items() for name in names.split()}


_MONITOR = "zero.initialize(folder=...): metrics.jsonl, and W&B if the config has it"
_NO_PIPELINE = "there is no pipeline parallelism"
_TIERS = "offload_optimizer and offload_param in the config; or save_checkpoint and destroy"
_LOADER = "zero.initialize(training_data=...) returns the loader"

OF_THE_MODULE: Mapping[str, str] = _by_name(
    {
        _MONITOR: "monitor",
        "zero.get_full: a shard has no shape of its own here": (
            "utils.safe_get_local_fp32_param utils.safe_get_local_grad utils.safe_get_local_optimizer_state"
        ),
        "zero.set_full: a shard has no shape of its own here": (
            "utils.safe_set_local_fp32_param utils.safe_set_local_grad utils.safe_set_local_optimizer_state"
        ),
        "safe_get_full_grad and safe_set_full_grad of each parameter": "utils.safe_update_full_grad_vectorized",
        "set_z3_leaf_modules(model, [Class]), before zero.initialize": (
            "utils.set_z3_leaf_module utils.set_z3_leaf_modules_by_name utils.unset_z3_leaf_modules"
        ),
        "nothing to do: every parameter reads in full": "runtime.zero.utils",
        "with zero.empty(): for meta, with torch.device(...): for others": "OnDevice",
        "torch.nn.Linear: it is gathered with its unit": "zero.TiledLinear runtime.zero.tiling",
        "zero.Init: all ranks share, there is no smaller group": "zero.MiCS_Init runtime.zero.mics",
        "engine.eval() and torch.no_grad(); the same state trains and generates": (
            "init_inference inference InferenceEngine DeepSpeedInferenceConfig runtime.hybrid_engine "
            "DeepSpeedHybridEngine"
        ),
        "zero.initialize takes the JSON as it is": "DeepSpeedConfig runtime.config",
        _NO_PIPELINE: "pipe PipelineModule PipelineEngine",
        "experts are modules like others: a block is gathered as one unit": "moe",
        "there is no tensor parallelism": "tp_model_init set_autotp_mode runtime.tensor_parallel runtime.domino",
        "there is no sequence parallelism": "sequence runtime.sequence_parallel",
        "all ranks are one group: torch.distributed.group.WORLD": "utils.groups",
        "the model's own layers: none is replaced here": (
            "module_inject replace_transformer_layer revert_transformer_layer DeepSpeedTransformerLayer "
            "DeepSpeedTransformerConfig"
        ),
        "attention is the model's own": "ops.sparse_attention",
        "nothing is compiled: operations are torch's": "ops.op_builder",
        "optimizers are AdamW, Adam, Lion, Adagrad and SGD": "ops.lamb ops.muon runtime.fp16.onebit",
        "fp16 or bf16 in the config; engine.loss_scale is the scale": "runtime.fp16 runtime.bf16_optimizer",
        "zero.DeepSpeedOptimizer for isinstance; engine.plan, or mode=plan of zero-train, for what memory is needed": (
            "runtime.zero.stage3 runtime.zero.stage_1_and_2"
        ),
        "engine.zero_optimization_stage(), which is a number": "runtime.zero.config",
        _TIERS: "runtime.zero.offload_config",
        "gradient_clipping in the config, and engine.get_global_grad_norm()": "runtime.utils.clip_grad_norm_",
        "torch.manual_seed(seed) and random.seed(seed)": "runtime.utils.set_random_seed",
        "the scheduler in the config": "add_tuning_arguments",
        _LOADER: "DeepSpeedDataLoader runtime.dataloader.DeepSpeedDataLoader",
        "data comes from the loader as it is": "runtime.data_pipeline",
        "there is no compression": "compression",
        "PEFT's adapters, on the model before zero.initialize": "linear",
        "torch.utils.flop_counter.FlopCounterMode counts; profile=true of zero-train records one step": "profiling",
        "engine.tput_timer, or time.perf_counter() after get_accelerator().synchronize()": "utils.timer",
        "torch.profiler.record_function": "utils.instrument_w_nvtx",
        "profile=true of zero-train: report.html has every collective of one step": "comm.log_summary",
        "engine.module_state_dict(), whose tensors are copies already": "checkpoint.utils",
        "nothing to do: a checkpoint loads into any world and stage": "checkpoint.ds_to_universal",
        "mode=plan of zero-train says what fits and what is fastest": "autotuning",
        "checkpoints load into any world": "elasticity",
        "torchrun, or launch.ranks=N of zero-train": "launcher",
        "mode=doctor of zero-train": "env_report",
        "zero.__version__": "git_version_info",
    }
)
"""DeepSpeed's name, or that of a module that it is in -> what to write."""

OF_THE_ENGINE: Mapping[str, str] = _by_name(
    {
        "zero.initialize has placed the model; the config's bf16 or fp16 says what it computes in": (
            "to cuda cpu half bfloat16 float double"
        ),
        "zero.compile=true of zero-train compiles what a unit computes; the config has no key for it": "compile",
        "the model that was passed: its flags are followed": "requires_grad_",
        "engine.load_module_state_dict, or engine.load_checkpoint": "load_state_dict",
        "the plan fixes it: save, and initialize again with another config": (
            "set_train_batch_size set_train_micro_batch_size"
        ),
        "backward reduces them": "allreduce_gradients",
        "a unit's gradients are reduced together, once per microbatch or step": "coalesce_grad_reduction",
        _TIERS: "offload_states reload_states",
        "no gathered parameter outlives its use": "empty_partition_cache",
        _LOADER: "deepspeed_io",
        _MONITOR: "monitor",
        f"{_NO_PIPELINE}: engine(batch), engine.backward(loss), engine.step()": "train_batch",
        f"{_NO_PIPELINE}: engine.eval() and engine(batch)": "eval_batch",
        "engine.save_16bit_model": "save_fp16_model",
        "engine.optimizer.kind": "optimizer_name",
        "type(engine.lr_scheduler).__name__": "scheduler_name",
        "engine.zero_optimization_stage(): any, from 2, 3": (
            "zero_optimization zero_optimization_partition_gradients zero_optimization_partition_weights"
        ),
        "engine.config, engine.plan": "dump_state",
    }
)


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
        if path == f"comm.{name}" and not name.startswith("__"):  # whose other names are torch's
            return getattr(import_module("torch.distributed"), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{_see()}")


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
            raise ImportError(f"{above} has no {own}{_see()}", name=name)


def _see() -> str:
    return f"; {page('coming-from-deepspeed.md')} has the names that are here"


def found(path: str) -> Any:
    """What `HERE` has by a name."""
    module, _, name = HERE[path].partition(":")
    return getattr(import_module(module), name)


def modules() -> dict[str, Names]:
    """DeepSpeed's modules by full name, for `sys.modules`, each within the one above it."""
    made: dict[str, Names] = {}
    for path in HERE:
        name = f"zero.{path}"
        while (name := name.rpartition(".")[0]) not in ("zero", *made):
            made[name] = Names(name)
            made[name].__path__ = []
    for name, module in made.items():
        above, _, own = name.rpartition(".")
        if above in made:
            setattr(made[above], own, module)
    return made
