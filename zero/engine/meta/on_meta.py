"""Build a model without allocating its parameters: they are on meta, and their initialization is recorded.

A parameter that is registered inside `zero.empty()` becomes an `Unmade`. Every operation on it is recorded, inside the
block and after it: `nn.init`, `.data.zero_()`, `load_state_dict`, `.half()`, computing a parameter from another one.
`zero.init` replays the recorded operations, one owner (a module that holds parameters directly) after another. Reading
a value before that raises OutsideUnitError.

If a parameter is registered with values, as `from_pretrained` does, these values stay in memory until `zero.init`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from zero.engine.meta.operations import Recipe, RecordedRoot
from zero.engine.meta.unmade import INSIDE_EMPTY, Unmade, is_meta, refuse_reading
from zero.platform.host_memory import aligned_zeros

MAPPED_BYTES = 1 << 20
"""Empty CPU tensors of at least this many bytes get a memory mapping of their own, see `_Empties`."""


@contextmanager
def empty() -> Iterator[None]:
    """Context manager that creates parameters on meta, so that a model never takes its full memory.

    Buffers are created as usual. `torch.device("meta")` would also discard the buffers that a constructor computes.
    Operations that write into parameters, inside the block or later, are recorded, and `zero.init` runs them. Each
    parameter stays the same Python object, so tied parameters stay tied.

    The block uses torch's process-wide hook for the registration of parameters. Ranks that are threads of one process
    must enter the block one at a time (`world.exclusive()`).

        with zero.empty():
            model = GPT(config)
    """
    with _unmade(kept=True):
        yield


@contextmanager
def absent() -> Iterator[None]:
    """Context manager that creates parameters on meta and ignores writes to them: another rank has their values."""
    with _unmade(kept=False):
        yield


@contextmanager
def _unmade(*, kept: bool) -> Iterator[None]:
    empties = _Empties()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is not nn.Parameter:
            return
        begin = parameter.detach() if kept and not is_meta(parameter) and empties.has_value(parameter) else None
        unmade = Unmade.of(
            torch.empty_like(parameter, device="meta"), Recipe.of(RecordedRoot(parameter.shape, kept, begin))
        )
        unmade._is_param = True  # isinstance(unmade, nn.Parameter) is true
        vars(unmade).update(vars(parameter))
        try:
            torch.utils.swap_tensors(parameter, unmade.requires_grad_(parameter.requires_grad))
        except RuntimeError:
            return  # an autograd graph uses the parameter, so it keeps its memory

    dispatch_trunc_normal()
    _watch_steps()
    handle = nn.modules.module.register_module_parameter_registration_hook(to_meta)
    token = INSIDE_EMPTY.set(True)
    try:
        with empties:
            yield
    finally:
        INSIDE_EMPTY.reset(token)
        handle.remove()


@cache
def dispatch_trunc_normal() -> None:
    """Patch `nn.init.trunc_normal_` so that it calls `__torch_function__`, as `nn.init.normal_` does.

    The whole call has to be recorded, because `trunc_normal_` redraws rejected values: its operations depend on values.
    """
    plain = nn.init._no_grad_trunc_normal_

    def dispatched(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, Unmade):
            return plain(tensor, *args, **kwargs)
        return Unmade.__torch_function__(plain, (), (tensor, *args), kwargs)

    nn.init._no_grad_trunc_normal_ = dispatched


@cache
def _watch_steps() -> None:
    """Have every optimizer raise OutsideUnitError before it updates a parameter without values."""

    def refuse(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, Unmade) and parameter.grad is not None:
                    refuse_reading(parameter, "an update")

    register_optimizer_step_pre_hook(refuse)


class _Empties(TorchFunctionMode):
    """A mode that tracks the results of `torch.empty` that nothing has written to, because their values can be dropped.

    Large empty tensors get memory mappings of their own. On the heap each freed tensor would leave a hole that is too
    small for the next one: 1 GB of holes for a model of 340 million parameters, which training would touch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unwritten: dict[int, StorageWeakRef] = {}  # by storage address; the weak reference prevents its reuse

    def has_value(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter was written to, or another tensor that could write uses its memory."""
        storage = parameter.untyped_storage()._cdata
        is_empty = self._unwritten.pop(storage, None) is not None and parameter._version == 0
        return not is_empty or torch._C._storage_Use_Count(storage) > HOLDERS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.empty:
            return func(*args, **(kwargs or {}))
        made = _mapped_empty(*args, **(kwargs or {}))
        storage = made.untyped_storage()
        self._unwritten[storage._cdata] = StorageWeakRef(storage)
        return made


HOLDERS = 2
"""The use count of a storage that only its parameter uses: one reference by it, one by the call that counts."""


def _mapped_empty(*args: Any, **kwargs: Any) -> Tensor:
    if str(kwargs.get("device") or torch.get_default_device()) != "cpu" or kwargs.get("pin_memory"):
        return torch.empty(*args, **kwargs)
    shape = torch.empty(*args, **{**kwargs, "device": "meta"})
    if shape.layout is not torch.strided or not shape.is_contiguous() or shape.nbytes < MAPPED_BYTES:
        return torch.empty(*args, **kwargs)
    return aligned_zeros(shape.numel(), shape.dtype, torch.device("cpu")).view(shape.shape)
