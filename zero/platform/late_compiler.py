"""Put off the import of torch's compiler, which takes two seconds, in processes that compile nothing.

torch imports its compiler in the first call of functions that the compiler does not trace, such as `checkpoint`, only
to mark them.
"""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
LEAF = f"{COMPILER}._trace_wrapped_higher_order_op"
"""A submodule of the compiler that transformers imports, and that itself needs nothing of the compiler."""


def import_compiler_late() -> None:
    """Import torch's compiler when more of it is used than marks of functions. Has no effect once it is imported."""
    if COMPILER not in sys.modules:
        late = sys.modules[COMPILER] = _Late(COMPILER)
        late.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
        importlib.import_module(LEAF)
        del late.__path__


class _Config:
    """The compiler's settings; the one that `checkpoint` reads in torch 2.14 has its default."""

    error_on_nested_fx_trace = True

    def __getattr__(self, name: str) -> Any:
        return getattr(_compiler().config, name)


class _Late(ModuleType):
    """The module `torch._dynamo` until it is needed. Importing one of its submodules reads `__path__`."""

    config = _Config()

    @staticmethod
    def disable(fn: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Callable[..., Any]:
        return fn or (lambda function: function)

    allow_in_graph = assume_constant_result = disable

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # `inspect` reads `__file__` of all modules
            raise AttributeError(name)
        return getattr(_compiler(), name)


def _compiler() -> ModuleType:
    if isinstance(sys.modules[COMPILER], _Late):
        del sys.modules[COMPILER]
    return importlib.import_module(COMPILER)
