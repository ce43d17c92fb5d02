"""DeepSpeed's names: where each is here, or what does it instead.

`zero.NAME` and `from zero.ops.adam import NAME` find what `HERE` has, and answer with a line for the
rest: by attribute an AttributeError, so that a script may ask whether a name is there, and by import an ImportError.
docs/coming-from-deepspeed.md shows them. Nothing is imported before it is asked for.
"""

import logging
import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from zero.deepspeed.public_names import LOADER, MONITOR, NO_PIPELINE, TIERS, by_name
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
        "safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
        "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
        "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module",
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


OF_THE_MODULE: Mapping[str, str] = by_name(
    {
        MONITOR: "monitor",
        "zero.get_full: a shard has no shape of its own here": (
            "utils.safe_get_local_fp32_param utils.safe_get_local_grad utils.safe_get_local_optimizer_state"
        ),
        "zero.set_full: a shard has no shape of its own here": (
            "utils.safe_set_local_fp32_param utils.safe_set_local_grad utils.safe_set_local_optimizer_state"
        ),
        "safe_get_full_grad and safe_set_full_grad of each parameter": "utils.safe_update_full_grad_vectorized",
        "parameters of get_z3_leaf_modules(model)": "utils.z3_leaf_parameter",
        "nothing to do: every parameter reads in full": "runtime.zero.utils",
        "with zero.empty(): for meta, with torch.device(...): for others": "OnDevice",
        "torch.nn.Linear: it is gathered with its unit": "zero.TiledLinear runtime.zero.tiling",
        "zero.Init: all ranks share, there is no smaller group": "zero.MiCS_Init runtime.zero.mics",
        "engine.eval() and torch.no_grad(); the same state trains and generates": (
            "init_inference inference InferenceEngine DeepSpeedInferenceConfig runtime.hybrid_engine "
            "DeepSpeedHybridEngine"
        ),
        "zero.initialize takes the JSON as it is": "DeepSpeedConfig runtime.config",
        NO_PIPELINE: "pipe PipelineModule PipelineEngine",
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
        TIERS: "runtime.zero.offload_config",
        "gradient_clipping in the config, and engine.get_global_grad_norm()": "runtime.utils.clip_grad_norm_",
        "torch.manual_seed(seed) and random.seed(seed)": "runtime.utils.set_random_seed",
        "the scheduler in the config": "add_tuning_arguments",
        LOADER: "DeepSpeedDataLoader runtime.dataloader.DeepSpeedDataLoader",
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


def answer(path: str) -> str | None:
    """What to write in place of a name of `deepspeed`; None where that is not known."""
    return next((instead for name, instead in OF_THE_MODULE.items() if f"{path}.".startswith(f"{name}.")), None)


def missing(name: str) -> AttributeError:
    """The error for a name of `deepspeed` that is not here."""
    return AttributeError(f"zero has no {name}, as deepspeed has; in its place: {answer(name)}")


class Names(ModuleType):
    """A module of DeepSpeed's, by the names that `HERE` has of it."""

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__.removeprefix('zero.')}.{name}"
        if path in HERE:
            return found(path)
        if answer(path) is not None:
            raise missing(path)
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
            raise ImportError(str(missing(path)), name=name)
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
