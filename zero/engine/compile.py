"""Compile what a unit computes, once for each class of modules.

Parameters and buffers are inputs of the compiled function, so all blocks of a model share one; torch compiles again
where something else differs (a number in a module, a length, whether the input wants a gradient), eight times at most,
and runs what comes after as it is written. Gathering, hooks and releasing stay outside, and a unit inside another one
is a break in the graph of that. Evaluations run as written: a text that grows would be compiled at every length.
"""

from collections.abc import Callable
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import nn

from zero.errors import PlanError

Backend = bool | str | Callable[..., Any]
"""True for torch's own compiler; or what `torch.compile` takes as a backend."""


def check_backend(backend: object) -> None:
    """Raise PlanError unless `backend` is a switch, a function or the name of a backend of `torch.compile`."""
    if isinstance(backend, bool | NoneType) or callable(backend):
        return
    if not isinstance(backend, str) or backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise PlanError(f"zero.compile={backend}: it is True, False or a backend of torch.compile: {known}")


def _forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module(*args, **kwargs)


class Compiled(nn.Module):
    """Runs `module` through a compiled function."""

    _function: Callable[..., Any]

    def __init__(self, module: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self.module, args, kwargs)


class Compiler:
    """Compiled functions by class of modules."""

    def __init__(self, backend: Backend) -> None:
        self._backend: Any = "inductor" if backend is True else backend
        self._functions: dict[type[nn.Module], Callable[..., Any]] = {}

    def compiled(self, module: nn.Module, cls: type[nn.Module]) -> Compiled:
        """Return a module that runs `module` compiled, with one function for each class `cls`."""
        if cls not in self._functions:
            # torch counts how often it compiled by code object, so every class gets one of its own
            code = _forward.__code__.replace(co_name=f"forward_of_{cls.__name__}")
            self._functions[cls] = torch.compile(FunctionType(code, globals()), backend=self._backend)
        return Compiled(module, self._functions[cls])
