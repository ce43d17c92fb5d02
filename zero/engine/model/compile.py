"""Compile the forward of units with `torch.compile`, once for each class of modules.

Parameters and buffers are inputs of the compiled function, so all blocks of one class share it, also if a number in
them differs, such as the index of a layer. torch recompiles when anything else differs: a string or a flag in a module,
a sequence length, `requires_grad` of an input. After eight compilations torch runs new variants without compiling them.
Gathers, releases and hooks are not compiled. A unit that is nested in
another unit causes a graph break in the outer unit. Evaluations are not compiled, because text generation would
recompile at every sequence length.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import nn

from zero.core.setting_types import COMPILE_OPTIONS
from zero.errors import PlanError

Backend = bool | str | Callable[..., Any] | Mapping[str, Any]
"""A backend of `torch.compile`: its name or function, or a mapping of arguments of `torch.compile`, `COMPILE_OPTIONS`.

True means "inductor", False disables compilation.
"""


def check_backend(backend: object) -> None:
    """Raise PlanError unless `backend` is a bool, None, a function or the name of a backend of `torch.compile`."""
    if isinstance(backend, Mapping):
        for name in backend:
            if name not in COMPILE_OPTIONS:
                raise PlanError(f"zero.compile: {name} must be one of {', '.join(COMPILE_OPTIONS)}")
        backend = backend.get("backend", True) or "none"
    if isinstance(backend, bool | NoneType) or callable(backend):
        return
    if not isinstance(backend, str) or backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise PlanError(f"zero.compile={backend}: must be True, False or a backend of torch.compile: {known}")


def described(backend: Backend) -> str:
    """Return the backend or the options as text that is equal on all ranks."""
    options = backend if isinstance(backend, Mapping) else {"backend": backend}
    return str({name: _text(value) for name, value in options.items()})


def _text(value: object) -> str:
    """Return a value as text without the address of an object."""
    if callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return repr(value)


def _forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module(*args, **kwargs)


class Compiled(nn.Module):
    """A module whose forward calls `module` through a compiled function."""

    _function: Callable[..., Any]

    def __init__(self, module: nn.Module, function: Callable[..., Any], settings: AbstractContextManager[Any]) -> None:
        super().__init__()
        self.module = module
        self._function, self._settings = function, settings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._settings:
            return self._function(self.module, args, kwargs)


class Compiler:
    """The compiled functions of one model, one for each class of modules."""

    def __init__(self, backend: Backend) -> None:
        options = dict(backend) if isinstance(backend, Mapping) else {"backend": backend}
        if options.get("backend", True) is True:
            options["backend"] = "inductor"
        self._options: dict[str, Any] = options
        self._functions: dict[type[nn.Module], Callable[..., Any]] = {}
        # else torch compiles once for each value of a number, such as the index of a layer; made once, because every
        # new patch stays in the thread's context
        self._settings = torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True)

    def compiled(self, module: nn.Module, cls: type[nn.Module]) -> Compiled:
        """Return a module that runs `module` through the compiled function of class `cls`."""
        if cls not in self._functions:
            # torch limits recompilations per code object, so each class gets its own code object
            code = _forward.__code__.replace(co_name=f"forward_of_{cls.__name__}")
            self._functions[cls] = torch.compile(FunctionType(code, globals()), **self._options)
        return Compiled(module, self._functions[cls], self._settings)
