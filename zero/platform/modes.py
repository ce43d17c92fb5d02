"""Keep the modes of torch that a user has entered away from the engine's own operators.

A mode that counts, records or replaces operators is meant for the user's model. A gather or an update inside such a
mode would be counted or replaced: selective checkpointing takes a gather for an operator of the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import _pop_mode as _pop_function_mode, _push_mode as _push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

P = ParamSpec("P")
T = TypeVar("T")


class DeviceMode(TorchDispatchMode):
    """A dispatch mode that is part of a device, so that it sees the engine's operators too."""


class unobserved:
    """Context manager and decorator for the engine's own work: leave all modes but those of the device.

    Without a mode it makes no generator, which would take several microseconds, eight times in each call of a site.
    """

    __slots__ = ("_left",)

    def __enter__(self) -> None:
        self._left = _without_modes() if _entered() else None
        if self._left is not None:
            self._left.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._left is not None:
            self._left.__exit__(*error)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if not _entered():
                return function(*args, **kwargs)
            with _without_modes():
                return function(*args, **kwargs)

        return run


def unobserved_items(function: Callable[P, Iterator[T]]) -> Callable[P, Iterator[T]]:
    """Decorate a generator function of the engine: it makes each item under `unobserved`, and its reader runs outside.

    `unobserved` itself would end before the first item is made.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        items = function(*args, **kwargs)
        while True:
            with unobserved():
                made = [*islice(items, 1)]  # a list, because `items` ends without an item
            if not made:
                return
            yield made.pop()

    return run


def _entered() -> bool:
    """Return whether the thread has entered a mode."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


@contextmanager
def _without_modes() -> Iterator[None]:
    dispatching = _get_current_dispatch_mode_stack()
    of_device = [mode for mode in dispatching if isinstance(mode, DeviceMode)]
    functions = []
    try:
        while torch._C._len_torch_function_stack():
            functions.append(_pop_function_mode())
        _exchange(of_device)
        yield
    finally:
        _exchange(dispatching)
        while functions:
            _push_function_mode(functions.pop())


def _exchange(modes: Sequence[TorchDispatchMode]) -> None:
    """Make `modes`, the innermost last, the thread's dispatch modes."""
    while torch._C._len_torch_dispatch_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
