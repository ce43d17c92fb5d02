"""DeepSpeed's interface: `import zero.deepspeed as deepspeed`, whose modules have the names of DeepSpeed's modules.

Names are imported on first use, so that a script can parse its arguments before torch is imported.
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


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"zero.deepspeed.{name}")
    if name in _MODULES:
        return getattr(import_module(f"zero.deepspeed.{_MODULES[name]}"), name)
    if name == "__version__":
        return import_module("zero").__version__
    raise AttributeError(
        f"zero.deepspeed has no {name!r}. It has data parallelism, but no pipeline, tensor, sequence or "
        "expert parallelism, no compression and no inference engine."
    )
