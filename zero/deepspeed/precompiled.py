"""Support for models that were passed to `torch.compile` before `zero.initialize`: their units are compiled instead.

The whole model is not compiled, because torch's compiler would trace the code that gathers units.
"""

import operator
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from zero.engine.model import Backend


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that was passed to `torch.compile`; `model` itself if it is not compiled."""
    return model._orig_mod if _is_compiled(model) else model  # type: ignore[return-value]


def bypass_compiled(model: nn.Module) -> tuple[Backend, Callable[[], None]]:
    """Make `model` and its modules run uncompiled.

    Returns:
        The backend of the compiled modules, False if there are none; and a function that undoes the change.
    """
    backend: Backend = False
    undo = ExitStack()
    for module in list(model.modules()):
        if _is_compiled(module):
            backend = backend or _backend(module.dynamo_ctx.callback)  # type: ignore[union-attr]
            undo.callback(setattr, module, "forward", module.forward)
            module.forward = partial(operator.call, module._orig_mod)  # type: ignore[arg-type]
        if module._compiled_call_impl is not None:
            backend = backend or _backend(_closed_over(module._compiled_call_impl, "callback"))
            undo.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
            module._compiled_call_impl = None
    return backend, undo.close


def _is_compiled(module: nn.Module) -> bool:
    # by name, so that torch's compiler is not imported
    return type(module).__name__ == "OptimizedModule"


def _backend(callback: Any) -> Backend:
    from torch._dynamo.eval_frame import innermost_backend  # no cost: torch.compile has imported it

    return True if callback is None else innermost_backend(callback)


def _closed_over(function: Callable[..., Any], name: str) -> Any:
    free = getattr(function, "__code__", None)
    cells = zip(free.co_freevars, getattr(function, "__closure__", ()) or (), strict=False) if free else ()
    return next((cell.cell_contents for variable, cell in cells if variable == name), None)
