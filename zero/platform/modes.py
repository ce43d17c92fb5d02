"""Keep the modes of torch that a user has entered away from the engine's own operators.

A mode that counts, records or replaces operators is meant for the user's model. A gather or an update inside such a
mode would be counted or replaced: selective checkpointing takes a gather for an operator of the model.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import islice
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode, _pop_mode as _pop_function_mode, _push_mode as _push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode

P = ParamSpec("P")
T = TypeVar("T")


class DeviceMode(TorchDispatchMode):
    """A dispatch mode that is part of a device, so that it sees the engine's operators too."""


class unobserved:
    """Context manager and decorator for the engine's own work: leave all modes but those of the device.

    A class, because a generator would take several microseconds, which each call of a site would pay eight times.
    """

    __slots__ = ("_left",)

    def __enter__(self) -> None:
        self._left = _leave() if _entered() else None

    def __exit__(self, *_: object) -> None:
        if self._left is not None:
            _enter_again(self._left)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if not _entered():
                return function(*args, **kwargs)
            with unobserved():
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


class _Modes(NamedTuple):
    """The modes of a thread, the innermost last."""

    functions: Sequence[TorchFunctionMode]
    dispatching: Sequence[TorchDispatchMode]


def _entered() -> bool:
    """Return whether the thread has entered a mode."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


def _leave() -> _Modes:
    """Leave all modes but those of the device, and return all modes."""
    functions = [_pop_function_mode() for _ in range(torch._C._len_torch_function_stack())]
    modes = _Modes(functions[::-1], _get_current_dispatch_mode_stack())
    _exchange([mode for mode in modes.dispatching if isinstance(mode, DeviceMode)])
    return modes


def _enter_again(modes: _Modes) -> None:
    _exchange(modes.dispatching)
    for mode in modes.functions:
        _push_function_mode(mode)


def _exchange(modes: Sequence[TorchDispatchMode]) -> None:
    """Make `modes`, the innermost last, the thread's dispatch modes."""
    while torch._C._len_torch_dispatch_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
