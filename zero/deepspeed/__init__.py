"""DeepSpeed's interface: `import zero.deepspeed as deepspeed`, with modules that are named as DeepSpeed's.

Nothing is imported before it is used, so a script may parse its arguments without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero.deepspeed.accelerator import get_accelerator as get_accelerator
    from zero.deepspeed.initialization import (
        add_config_arguments as add_config_arguments,
        init_distributed as init_distributed,
        initialize as initialize,
    )
    from zero.deepspeed.runtime.engine import DeepSpeedEngine as DeepSpeedEngine
    from zero.deepspeed.utils.logging import log_dist as log_dist, logger as logger

_MODULES = {
    "DeepSpeedEngine": "runtime.engine",
    "add_config_arguments": "initialization",
    "get_accelerator": "accelerator",
    "init_distributed": "initialization",
    "initialize": "initialization",
    "log_dist": "utils.logging",
    "logger": "utils.logging",
}
__all__ = sorted(_MODULES)
_SUBMODULES = ("accelerator", "checkpointing", "comm", "ops", "runtime", "utils", "zero")

PIPELINE = "there is no pipeline parallelism; write engine(batch), engine.backward(loss), engine.step()"
MONITOR = "pass folder= to zero.initialize; it writes metrics.jsonl, and W&B if the config has it"
_EXPERTS = "ranks are not divided among experts; a block with experts is gathered as one unit"
_GENERATE = "the model that trains also generates; write engine.eval() and torch.no_grad()"
_TENSOR = "there is no tensor parallelism; use stage 3"
_LAYERS = "the model keeps its own layers; leave it out"
_ABSENT = {
    "pipe": PIPELINE,
    "PipelineModule": PIPELINE,
    "PipelineEngine": PIPELINE,
    "moe": _EXPERTS,
    "init_inference": _GENERATE,
    "inference": _GENERATE,
    "InferenceEngine": _GENERATE,
    "DeepSpeedHybridEngine": _GENERATE,
    "tp_model_init": _TENSOR,
    "sequence": "there is no sequence parallelism; use activation checkpointing",
    "module_inject": _LAYERS,
    "replace_transformer_layer": _LAYERS,
    "DeepSpeedTransformerLayer": _LAYERS,
    "OnDevice": "write `with zero.empty():` for a model without memory",
    "monitor": MONITOR,
    "profiling": "use torch.utils.flop_counter.FlopCounterMode, or profile=true of zero-train",
    "compression": "there is no compression; leave it out",
    "linear": "put PEFT's adapters on the model before zero.initialize",
    "autotuning": "run zero-train mode=plan",
    "elasticity": "checkpoints load into any number of ranks; leave it out",
    "launcher": "start with torchrun",
}
"""Names of DeepSpeed's that scripts use and that are absent here -> what to do."""


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"zero.deepspeed.{name}")
    if name in _MODULES:
        return getattr(import_module(f"zero.deepspeed.{_MODULES[name]}"), name)
    if name == "__version__":
        return import_module("zero").__version__
    if name in _ABSENT:
        raise AttributeError(f"zero.deepspeed.{name} does not exist: {_ABSENT[name]}.")
    raise AttributeError(f"module 'zero.deepspeed' has no attribute {name!r}")
