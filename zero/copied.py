"""The copy of a user's model that runs on gathered units: what stands where a parameter or a site was.

A parameter's place is taken by an `Absent`, which knows its sizes and gathers its values for whoever reads them. A site
gathers when it is called, runs as it would have, and releases. `empty` is for building a model that is never whole to
begin with.
"""

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from zero.copyable import made_by_hooks, naming_what_cannot, refuse_own_copies, refuse_shared_memory
from zero.device import aligned_zeros
from zero.errors import OutsideUnitError, PlanError, StaleStateError
from zero.functions import Closures, Held
from zero.nested import replaced, tensors_in
from zero.unit import Site, Splitting

MAPPED_BYTES = 1 << 20
"""From here on a tensor is worth a mapping of its own."""

BATCH_NORM = nn.BatchNorm1d.forward
"""All dimensions share it. A subclass with a forward of its own knows itself in what dtype it computes."""

# What may be asked of a parameter that is not gathered: what is known without its values.
_METADATA = frozenset(
    {"shape", "dtype", "layout", "ndim", "names", "itemsize", "nbytes", "requires_grad", "grad_fn", "is_leaf"}
    | {"retains_grad", "is_sparse", "is_quantized", "is_nested", "size", "dim", "ndimension", "numel", "nelement"}
    | {"stride", "is_contiguous", "data_ptr", "element_size", "is_floating_point", "is_complex", "__len__", "__hash__"}
    | {"_version", "_base", "_backward_hooks", "requires_grad_", "is_inference", "grad"}
)

_MEMORY = frozenset({"numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "__reduce_ex__"})
"""What gives a tensor's memory away in something that is no tensor."""


class Absent(nn.Parameter):
    """Stands where a parameter was: sizes, dtype and device of the gathered one can be read at any time.

    Who reads values gathers its unit: with gradients on they are a view whose gradient arrives as its unit's do, else
    they are a copy. So every rank has to read them in the same order. They are not written: that raises
    `OutsideUnitError` with the parameter's name, and so does reading before there are any.

    Attributes:
        regather: gives a view of the gathered parameter, one with a history if asked for; None: there is none yet.
        rests: it is another one, detached.
        hooks: what its gradient goes through, in order, before it leaves this rank.
    """

    full_name: str
    home: torch.device
    regather: Callable[[bool], Tensor] | None
    rests: bool
    hooks: "OrderedDict[int, Callable[[Tensor], Tensor | None]]"

    def __new__(cls, name: str, like: Tensor, dtype: torch.dtype, home: torch.device) -> "Absent":
        absent = Tensor._make_subclass(cls, torch.empty(like.shape, dtype=dtype, device="meta"), like.requires_grad)
        absent.full_name, absent.home, absent.regather, absent.rests = name, home, None, False
        absent.hooks = OrderedDict()
        return absent

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
        """As of any tensor: `hook` sees this rank's gradient, the sum over uses in a backward, and may replace it."""
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def at_rest(self) -> "Absent":
        """The same parameter as a constant."""
        made = Absent(self.full_name, self, self.dtype, self.home)
        made.requires_grad_(False)
        made.regather, made.rests = self.regather, True
        return made

    def value(self) -> Tensor:
        """A view of the gathered parameter."""
        if self.regather is None:
            raise OutsideUnitError(f"parameter {self.full_name} has no values yet; zero.init makes them")
        return self.regather(self.requires_grad and torch.is_grad_enabled())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Absent":
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, is_attribute = kwargs or {}, func.__name__ in ("__get__", "__set__")
        asked = func.__self__.__name__ if is_attribute else func.__name__
        if asked in ("device", "is_meta", "is_cuda", "is_cpu"):  # it is on meta itself, which is nobody's business
            home = args[0].home
            return home if asked == "device" else home.type == asked.removeprefix("is_")
        if asked in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = next(iter((*args, *kwargs.values())), None)
        for one in (kwargs.get("out"), first if func.__name__ == "__set__" or _writes(asked) else None):
            if isinstance(one, Absent):
                raise OutsideUnitError(
                    f"parameter {one.full_name} was written to by {asked}, and it lies in shards; write into it with "
                    "zero.gathered(state, names, modify=True) or zero.set_full"
                )
        if asked in ("detach", "data"):
            return args[0].at_rest()
        return _read(func, args, kwargs, clone=asked in _MEMORY)


def _writes(name: str) -> bool:
    """By torch's names, a function that writes into its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
    return name.endswith("_")


def _read(func: Any, args: Any, kwargs: Any, *, clone: bool) -> Any:
    """Call `func` on values in place of absent parameters; what would look at their memory and is no view in a graph is
    a copy, because the memory is another unit's next."""
    absent = {id(one): one for one in tensors_in((args, kwargs)) if isinstance(one, Absent)}
    values = {key: one.value() for key, one in absent.items()}
    memory = {value.untyped_storage().data_ptr() for value in values.values()}
    given = {key: value.clone() for key, value in values.items()} if clone else values
    args, kwargs = replaced((args, kwargs), given)
    result = func(*args, **kwargs)
    looking = [one for one in tensors_in(result) if not one.requires_grad and _lies_in(one, memory)]
    return replaced(result, {id(one): one.clone() for one in looking})


def _lies_in(tensor: Tensor, memory: set[int]) -> bool:
    if tensor.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.untyped_storage().data_ptr() in memory


def call_with(
    parameters: Mapping[str, Tensor],
    module: nn.Module,
    args: Any,
    kwargs: Any,
    *,
    buffers: Mapping[str, Tensor] | None = None,
    path: str = "",
    doubted: bool = False,
) -> Any:
    """Run `module` with `parameters`, and perhaps `buffers`, in place of its own.

    Args:
        path: where in the model it is, for messages.
        doubted: its code may write into parameters without being counted by torch, so their values are compared.

    Raises:
        StaleStateError: it wrote into a parameter, or put another tensor in its place: that would change a copy, and
            one rank's at that.
    """
    held = dict(parameters) | dict(buffers or {})
    before = {name: (_version(one), one.detach().clone() if doubted else None) for name, one in parameters.items()}
    try:
        return functional_call(module, held, args, kwargs, tie_weights=False)
    finally:
        for name, given in parameters.items():
            own, (version, values) = name.rpartition("module.")[2], before[name]
            if values is not None and not _same_bits(given.detach(), values):
                given.data.copy_(values)
                _refuse_change(f"{own} of {path or 'the model'} was written to in place")
            if _version(given) != version:
                _refuse_change(f"a parameter of {path or 'the model'} was written to in place")
            if held[name] is not given:
                _refuse_change(f"{own} of {path or 'the model'} was replaced")


def _version(tensor: Tensor) -> int:
    """How often it was written to; those of inference mode, which only a user can put in place, do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _refuse_change(what: str) -> None:
    raise StaleStateError(
        f"{what} by its own forward; only the optimizer changes parameters, so keep such a tensor in a buffer, and "
        "write into parameters between steps: with zero.gathered(state, names, modify=True)"
    )


def in_backward() -> bool:
    """True while autograd runs a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class Body(nn.Module):
    """A site's module as it is called while its parameters are in place; they are below `module`."""

    def __init__(self, module: nn.Module, kind: type[nn.Module]) -> None:
        super().__init__()
        self.module, self.kind = module, kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.kind.__call__(self.module, *args, **kwargs)


def detached_copy(model: nn.Module, splitting: Splitting, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of `model` with real buffers, on `device`, and an `Absent` in place of every parameter.

    Buffers keep their dtype, except torch's batch norm's, whose kernel takes statistics and weights of one dtype only.
    Functions among its attributes and hooks reach the copy where they reached the model; hooks of parameters go along.

    Args:
        dtype: that parameters are gathered in.

    Raises:
        PlanError: what cannot be copied, or would not be a copy: see `functions` and `copyable`.
    """
    refuse_shared_memory(model)
    memo: dict[int, Any] = {}
    absent: dict[str, Absent] = {}
    hooks: list[Held] = []
    for owner in splitting.owners:
        module = model.get_submodule(owner.path)
        for own, name in owner.slots:
            parameter = module._parameters[own]
            assert parameter is not None
            if name not in absent:
                absent[name] = memo[id(parameter)] = Absent(name, parameter, dtype, device)
                hooks += _hooks_of(name, parameter)
    closures = Closures(model, hooks)
    closures.begin(memo)
    for module in model.modules():
        memo |= {id(made): made.detach().clone() for made in made_by_hooks(module).values()}
        cast = dtype if type(module).forward is BATCH_NORM else None
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in memo:  # one of two modules stays one
                with naming_what_cannot(model, memo):
                    copied_buffer = copy.deepcopy(buffer, memo)
                memo[id(buffer)] = copied_buffer.to(device, cast if buffer.is_floating_point() else None)
    with naming_what_cannot(model, memo):
        copied = copy.deepcopy(model, memo)
        closures.end(copied, memo)
        for held in hooks:
            own = copy.deepcopy(held.value, memo) if closures.reach(held.value) else held.value
            absent[held.path].register_hook(own)
    refuse_own_copies(model, copied, splitting, absent)
    return copied


def _hooks_of(name: str, parameter: nn.Parameter) -> Iterator[Held]:
    if parameter._post_accumulate_grad_hooks:
        raise PlanError(
            f"{name} has a register_post_accumulate_grad_hook, and no gradient is accumulated here; register_hook sees "
            "it before it leaves this rank"
        )
    for hook in (parameter._backward_hooks or {}).values():
        yield Held(name, "a hook", hook)


Run = Callable[[Body, Any, Any], Any]
"""Takes a site's body and the arguments of its call."""


def attach(copied: nn.Module, splitting: Splitting, run: Callable[[Site], Run]) -> None:
    """Have each site of a copied model run through `run`, by whatever reference it is called.

    Its class becomes one that is called otherwise and is the same in everything else. Hooks fire inside, with the full
    parameters in place.
    """
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for site in splitting.sites:
        module = copied.get_submodule(site.path)
        kind = type(module)
        module.__dict__["_gathered_call"] = partial(run(site), Body(module, kind))
        module.__class__ = kinds.setdefault(kind, _called_otherwise(kind))


def _called_otherwise(kind: type[nn.Module]) -> type[nn.Module]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._gathered_call(args, kwargs)

    names = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), names)


@contextmanager
def empty() -> Iterator[None]:
    """Inside, parameters are created on meta, so that a model is never whole; buffers stay real.

    `torch.device("meta")` would also destroy tables that a constructor computes. Ties survive: a parameter registered
    twice becomes one meta parameter. torch's hook is process-wide: ranks that are threads take turns
    (`world.exclusive()`).
    """
    known: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None
        alive, meta = known.get(id(parameter), (None, None))
        if meta is None or alive is None or alive() is not parameter:
            meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
            known[id(parameter)] = weakref.ref(parameter), meta
        return meta

    handle = nn.modules.module.register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with _Untouched():
            yield
    finally:
        handle.remove()


class _Untouched(TorchFunctionMode):
    """What a constructor makes and `empty` throws away at once costs no memory.

    Draws for a tensor on meta go nowhere: torch would import its compiler for them, 80 MB and two seconds. Large empty
    tensors are mappings of their own: in the heap each would leave a hole in which the next no longer fits, a gigabyte
    of holes for 340 million parameters, and training would touch them all.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            return _mapped_empty(*args, **(kwargs or {}))
        first = next(iter((*args, *(kwargs or {}).values())), None)
        draws = func in (Tensor.normal_, Tensor.uniform_) or getattr(func, "__module__", "") == "torch.nn.init"
        if draws and isinstance(first, Tensor) and first.is_meta:
            return first
        return func(*args, **(kwargs or {}))


def _mapped_empty(*args: Any, **kwargs: Any) -> Tensor:
    if str(kwargs.get("device") or torch.get_default_device()) != "cpu" or kwargs.get("pin_memory"):
        return torch.empty(*args, **kwargs)
    told = torch.empty(*args, **{**kwargs, "device": "meta"})
    if told.layout is not torch.strided or not told.is_contiguous() or told.nbytes < MAPPED_BYTES:
        return torch.empty(*args, **kwargs)
    return aligned_zeros(told.numel(), told.dtype, torch.device("cpu")).view(told.shape)


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers of a model."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
