"""Build a model without allocating it: parameters on meta, and a record of what constructors wrote into them.

`zero.init` makes first values owner by owner, by `reset_parameters` and `_init_weights`. What else a constructor does
to a parameter that is registered (`nn.init.normal_(self.up.weight, std=0.02)`) is kept as a call and made again after
those. One that is registered with a value of its own (`nn.Parameter(torch.ones(3))`) begins with it, which takes its
memory meanwhile.
"""

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import methodcaller
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from zero.errors import PlanError
from zero.platform.device import aligned_zeros

MAPPED_BYTES = 1 << 20
"""From here on a tensor is worth a mapping of its own."""


@contextmanager
def empty() -> Iterator[None]:
    """Inside, parameters are created on meta, so that a model never takes its full memory; buffers stay real.

    What constructors write into them (`nn.init`, `.data.zero_()`) is written again when first values are made.

    `torch.device("meta")` would also destroy tables that a constructor computes. Ties survive: a parameter registered
    twice becomes one meta parameter. torch's hook is process-wide: ranks that are threads take turns
    (`world.exclusive()`).

        with zero.empty():
            model = GPT(config)
    """
    known: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        alive, meta = known.get(id(parameter), (None, None))
        if meta is None or alive is None or alive() is not parameter:
            meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            vars(meta)[KEPT] = kept = _Known(weakref.ref(meta), [])
            if untouched.has_value(parameter):
                kept.writes.append(Written(BEGIN, (), methodcaller("copy_", parameter.detach())))
            known[id(parameter)] = weakref.ref(parameter), meta
        return meta

    untouched = _Untouched()
    handle = nn.modules.module.register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with untouched:
            yield
    finally:
        handle.remove()


class _Untouched(TorchFunctionMode):
    """What a constructor makes and `empty` throws away at once costs no memory.

    Draws for a tensor on meta go nowhere: torch would import its compiler for them, 80 MB and two seconds. Large empty
    tensors are mappings of their own: in the heap each would leave a hole in which the next no longer fits, a gigabyte
    of holes for 340 million parameters, and training would touch them all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unwritten: dict[int, StorageWeakRef] = {}  # which keep the address from being given to another one

    def has_value(self, parameter: nn.Parameter) -> bool:
        """Whether it is more than what `torch.empty` makes."""
        storage = parameter.untyped_storage()._cdata
        return self._unwritten.pop(storage, None) is None or parameter._version > 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            made = _mapped_empty(*args, **kwargs)
            storage = made.untyped_storage()
            self._unwritten[storage._cdata] = StorageWeakRef(storage)
            return made
        first = next(iter((*args, *kwargs.values())), None)
        if not isinstance(first, Tensor) or not first.is_meta:
            return func(*args, **kwargs)
        known = _known(first)
        if func is F.pad and not any(args[1] if len(args) > 1 else kwargs["pad"]):
            return first  # as transformers does with a head's bias, for `bias.data = ...`
        name = func.__self__.__name__ if func.__name__ in ("__get__", "__set__") else func.__name__
        writes = func.__name__ == "__set__" or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if known is not None and writes and name not in ("requires_grad", "requires_grad_", "grad"):
            known.remember(func, args, kwargs)
        draws = func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == "torch.nn.init"
        if draws:
            return first
        result = func(*args, **kwargs)
        if known is not None and isinstance(result, Tensor) and _is_view(result, first):
            vars(result)[KEPT] = known.seen_through(func, args[1:], kwargs)
        return result


class Written(NamedTuple):
    """One write of a constructor into a parameter on meta: how to come to what was written to, and the call."""

    number: int
    way: tuple[Callable[[Tensor], Tensor], ...]
    write: Callable[[Tensor], Any]


@dataclass
class _Known:
    """A parameter on meta, or a view of it."""

    parameter: weakref.ref[nn.Parameter]
    writes: list[Written]
    way: tuple[Callable[[Tensor], Tensor], ...] = ()

    def seen_through(self, func: Any, args: Any, kwargs: Any) -> "_Known":
        return replace(self, way=(*self.way, lambda tensor: func(tensor, *args, **kwargs)))

    def remember(self, func: Any, args: Any, kwargs: Any) -> None:
        """Unless who writes is called again when first values are made; that comes after what was written before."""
        if _is_made_again(self.parameter()):
            self.writes[:] = [one for one in self.writes if one.number == BEGIN]
            return
        rest, named = args[1:], dict(kwargs)
        key = None if args else next(iter(named))
        others = [one for one in (*rest, *named.values()) if isinstance(one, Tensor) and one.is_meta][key is not None :]
        if any(_is_all_of(one, self) for one in others):
            return  # its own values

        def write(tensor: Tensor) -> Any:
            if others:
                raise PlanError(
                    f"a constructor of the model calls {func.__name__} on a parameter of shape {tuple(tensor.shape)} "
                    "with what it computed from parameters, which have no values under zero.empty(); build the model "
                    "without it, or pass weights= to zero.init"
                )
            return func(tensor, *rest, **named) if key is None else func(**{**named, key: tensor})

        self.writes.append(Written(next(_count), self.way, write))


_count = itertools.count()

KEPT = "_written_on_meta"
"""The attribute of a parameter on meta, and of its views, with what was written into it."""

BEGIN = -1
"""The number of what comes before `reset_parameters`."""

RESETS = ("reset_parameters", "_reset_parameters")
"""Methods of an owner that make its first values; and `_init_weights` of a module around it."""


def written(parameter: Tensor) -> Sequence[Written]:
    """What a constructor has written into a parameter on meta, and `reset_parameters` will not write again."""
    known = _known(parameter)
    return [] if known is None else known.writes


def write_again(target: Tensor, writes: Sequence[Written]) -> None:
    """Give a parameter with values what was written into it on meta."""
    with torch.no_grad():
        for one in writes:
            place = target
            for step in one.way:
                place = step(place)
            one.write(place)


def _known(tensor: Tensor) -> _Known | None:
    found: _Known | None = vars(tensor).get(KEPT)
    return found


def _is_view(result: Tensor, of: Tensor) -> bool:
    return result is not of and result.is_meta and result.untyped_storage()._cdata == of.untyped_storage()._cdata


def _is_all_of(tensor: Tensor, known: _Known) -> bool:
    """Whether a tensor on meta is all of a known parameter as it is, such as its `data`."""
    own, parameter = _known(tensor), known.parameter()
    if own is None or parameter is None or own.parameter is not known.parameter:
        return False
    return tensor.shape == parameter.shape and tensor.is_contiguous()


def _is_made_again(parameter: nn.Parameter | None) -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "_init_weights":
            return True
        if (
            frame.f_code.co_name in RESETS
            and isinstance(owner, nn.Module)
            and any(one is parameter for one in owner._parameters.values())
        ):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _mapped_empty(*args: Any, **kwargs: Any) -> Tensor:
    if str(kwargs.get("device") or torch.get_default_device()) != "cpu" or kwargs.get("pin_memory"):
        return torch.empty(*args, **kwargs)
    shape = torch.empty(*args, **{**kwargs, "device": "meta"})
    if shape.layout is not torch.strided or not shape.is_contiguous() or shape.nbytes < MAPPED_BYTES:
        return torch.empty(*args, **kwargs)
    return aligned_zeros(shape.numel(), shape.dtype, torch.device("cpu")).view(shape.shape)
