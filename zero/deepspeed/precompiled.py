"""A model that was given to `torch.compile`, whole or in parts, before `zero.initialize`: compiled by units instead.

torch's compiler would trace how a unit is gathered. So what it made of a module passes calls on to the module itself,
and each unit is compiled with the same backend where its parameters are whole.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from zero.engine.compile import Backend


def beneath(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given; `model` itself where it was given none."""
    return model._orig_mod if _is_compiled(model) else model  # type: ignore[return-value]


def as_written(model: nn.Module) -> tuple[Backend, Callable[[], None]]:
    """Have `model` and its parts run as they were written from here on.

    Returns:
        the backend that something was compiled with, False where nothing was; and what takes it all back.
    """
    backend: Backend = False
    before: list[tuple[nn.Module, str, Any]] = []
    for module in list(model.modules()):
        if _is_compiled(module):
            backend = backend or _backend(module.dynamo_ctx.callback)  # type: ignore[union-attr]
            before.append((module, "forward", module.forward))
            module.forward = _passing(module._orig_mod)  # type: ignore[arg-type]
        if module._compiled_call_impl is not None:
            backend = backend or _backend(_closed_over(module._compiled_call_impl, "callback"))
            before.append((module, "_compiled_call_impl", module._compiled_call_impl))
            module._compiled_call_impl = None

    def undo() -> None:
        for module, name, value in before:
            setattr(module, name, value)

    return backend, undo


def _is_compiled(module: nn.Module) -> bool:
    """Told by its name: torch's compiler is not imported to be asked."""
    return type(module).__name__ == "OptimizedModule"


def _passing(module: nn.Module) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return forward


def _backend(callback: Any) -> Backend:
    from torch._dynamo.eval_frame import innermost_backend  # it has been imported: something was compiled

    return True if callback is None else innermost_backend(callback)


def _closed_over(function: Callable[..., Any], name: str) -> Any:
    """What `torch.compile` keeps of its arguments in the function that it returns."""
    free = getattr(function, "__code__", None)
    cells = zip(free.co_freevars, getattr(function, "__closure__", ()) or (), strict=False) if free else ()
    return next((cell.cell_contents for own, cell in cells if own == name), None)
