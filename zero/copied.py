"""The copy of a user's model that runs on gathered units: what stands where a parameter or a site was.

A parameter's place is taken by an `Absent`, which knows its sizes and refuses its values by name. A site's place is
taken by a `Unit`, which gathers, runs the module it replaced, and releases. `empty` is for building a model that is
never whole in the first place.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from zero.device import aligned_zeros
from zero.errors import OutsideUnitError, StaleStateError
from zero.unit import Site, Splitting

MAPPED_BYTES = 1 << 20
"""From here on a tensor is worth a mapping of its own."""

BATCH_NORM = nn.BatchNorm1d.forward
"""All dimensions share it. A subclass with a forward of its own knows itself in what dtype it computes."""

# What may be asked of a parameter that is not gathered: what is known without its values.
_METADATA = frozenset(
    {"shape", "dtype", "layout", "ndim", "names", "itemsize", "nbytes", "requires_grad", "grad", "grad_fn", "is_leaf"}
    | {"retains_grad", "is_sparse", "is_quantized", "is_nested", "size", "dim", "ndimension", "numel", "nelement"}
    | {"stride", "is_contiguous", "data_ptr", "element_size", "is_floating_point", "is_complex", "__len__", "__hash__"}
    | {"_version", "_base", "_backward_hooks"}
)


class Absent(nn.Parameter):
    """Stands where a parameter was: sizes, dtype and device of the gathered one can be read, values cannot.

    Reading values raises `OutsideUnitError` with the parameter's name, except during a backward pass: then the reader
    is a checkpoint inside user code that recomputes after its unit's forward has ended, and `regather` gives the view.
    """

    full_name: str
    home: torch.device
    regather: Callable[[], Tensor] | None

    def __new__(cls, name: str, like: Tensor, dtype: torch.dtype, home: torch.device) -> "Absent":
        absent = Tensor._make_subclass(cls, torch.empty(like.shape, dtype=dtype, device="meta"), like.requires_grad)
        absent.full_name, absent.home, absent.regather = name, home, None
        return absent

    def __deepcopy__(self, memo: dict[int, Any]) -> "Absent":
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        asked = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        if asked in ("device", "is_meta", "is_cuda", "is_cpu"):  # it is on meta itself, which is nobody's business
            home = args[0].home
            return home if asked == "device" else home.type == asked.removeprefix("is_")
        if asked in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*(_present(value) for value in args), **{k: _present(v) for k, v in (kwargs or {}).items()})


def _present(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_present(one) for one in value)
    if not isinstance(value, Absent):
        return value
    if value.regather is not None and in_backward():
        return value.regather()
    raise OutsideUnitError(
        f"parameter {value.full_name} was read outside the modules of its unit, where it is not gathered; "
        "read it inside their forward, or name a class that holds the reader in zero.units"
    )


def call_with(
    parameters: Mapping[str, Tensor],
    module: nn.Module,
    args: Any,
    kwargs: Any,
    *,
    buffers: Mapping[str, Tensor] | None = None,
) -> Any:
    """Run `module` with `parameters`, and perhaps `buffers`, in place of its own.

    Raises:
        StaleStateError: it put another tensor in a parameter's place, which would be gone after the call.
    """
    held = dict(parameters) | dict(buffers or {})
    outputs = functional_call(module, held, args, kwargs, tie_weights=False)
    for name, given in parameters.items():
        if held[name] is not given:
            raise StaleStateError(
                f"{type(module).__name__}: the parameter {name} was replaced by its own forward; only the optimizer "
                "changes parameters, so keep such a tensor in a buffer"
            )
    return outputs


def in_backward() -> bool:
    """True while autograd runs a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


class Unit(nn.Module):
    """Stands at a site in the copied model: runs the module it replaced, and answers for it otherwise.

    The module's forward hooks fire, inside, with the full parameters in place. What the model reads from it or sets on
    it is read from and set on the module.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        super().__setattr__("module", module)
        self.__dict__["_run"] = run
        self.__dict__["training"] = module.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or name in nn.Module.__dict__:
            super().__setattr__(name, value)
        elif name in self.module._parameters:  # `functional_call` puts plain tensors in places of parameters
            self.module._parameters[name] = value
        else:
            setattr(self.module, name, value)


def detached_copy(model: nn.Module, splitting: Splitting, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A copy of `model` with real buffers, on `device`, and an `Absent` in place of every parameter.

    Buffers keep their dtype, except torch's batch norm's, whose kernel takes statistics and weights of one dtype only.

    Args:
        dtype: that parameters are gathered in.
    """
    memo: dict[int, Any] = {}
    for owner in splitting.owners:
        module = model.get_submodule(owner.path)
        for own, name in owner.slots:
            parameter = module._parameters[own]
            assert parameter is not None
            memo.setdefault(id(parameter), Absent(name, parameter, dtype, device))
    copied = copy.deepcopy(model, memo)
    moved: dict[int, Tensor] = {}  # a buffer of two modules stays one
    for module in copied.modules():
        cast = dtype if type(module).forward is BATCH_NORM else None
        for name, buffer in module._buffers.items():
            if buffer is not None:
                to = cast if buffer.is_floating_point() else None
                module._buffers[name] = moved.setdefault(id(buffer), buffer.to(device, to))
    return copied


def attach(copied: nn.Module, splitting: Splitting, run: Callable[[Site], Callable[..., Any]]) -> nn.Module:
    """Replace each site of a copied model by a `Unit`, wherever the module is registered; returns the new root."""
    wrapped = {}
    for site in splitting.sites:
        module = copied.get_submodule(site.path)
        wrapped[id(module)] = Unit(module, run(site))
    for parent in list(copied.modules()):
        for name, child in parent._modules.items():
            if id(child) in wrapped:
                parent._modules[name] = wrapped[id(child)]
    return wrapped.get(id(copied), copied)


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
    """The persistent buffers of a copied model, by the names that they have in the user's."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> None:
        if isinstance(module, Unit):
            return walk(module.module, path)
        if id(module) in seen:  # the same module in two places
            return None
        seen.add(id(module))
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[path + name] = buffer
        for name, child in module.named_children():
            walk(child, f"{path}{name}.")
        return None

    walk(model, "")
    return found
