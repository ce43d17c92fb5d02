"""Keep the modes of torch that a user has entered away from the engine's own operators.

A mode that counts, records or replaces operators is meant for the user's model. A gather or an update inside of it
would be counted, or be replaced: selective checkpointing takes it for an operator of the model.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.overrides import _pop_mode as _pop_function_mode, _push_mode as _push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode, _push_mode


class DeviceMode(TorchDispatchMode):
    """A dispatch mode that is part of a device, so that it sees the engine's operators too."""


@contextmanager
def unobserved() -> Iterator[None]:
    """Context manager and decorator for the engine's own work: leave all modes but those of the device."""
    if not (torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()):
        yield
        return
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
