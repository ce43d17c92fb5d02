"""Build a model without allocating it: parameters on meta, each with a record of how its values are made.

A parameter that is registered inside `zero.empty()` becomes `Unmade`. Every operation on it is recorded, inside the
block and after it: `nn.init`, `.data.zero_()`, `load_state_dict`, `.half()`, a parameter computed from another.
`zero.init` runs the records, owner by owner. Reading a value before that raises.

A value that a parameter is registered with, as by `from_pretrained`, takes its memory until then.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from zero.core.tree import replaced, tensors_in
from zero.errors import OutsideUnitError
from zero.platform.device import aligned_zeros

MAPPED_BYTES = 1 << 20
"""From here on a tensor is worth a mapping of its own."""


@contextmanager
def empty() -> Iterator[None]:
    """Inside, parameters are created on meta, so that a model never takes its full memory; buffers stay real.

    Operations that write into them, inside the block or later, run when first values are made.

    `torch.device("meta")` would also destroy tables that a constructor computes. Each parameter stays the object that
    it is, so ties survive. torch's hook is process-wide: ranks that are threads take turns (`world.exclusive()`).

        with zero.empty():
            model = GPT(config)
    """
    with _unmade(kept=True):
        yield


@contextmanager
def absent() -> Iterator[None]:
    """Inside, parameters are created on meta, and writes to them have no effect: another rank has the values."""
    with _unmade(kept=False):
        yield


@contextmanager
def _unmade(*, kept: bool) -> Iterator[None]:
    empties = _Empties()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if type(parameter) is not nn.Parameter:
            return
        begin = parameter.detach() if kept and not is_meta(parameter) and empties.has_value(parameter) else None
        unmade = Unmade.of(torch.empty_like(parameter, device="meta"), Recipe.of(Root(parameter.shape, kept, begin)))
        unmade._is_param = True  # it is an nn.Parameter to isinstance
        vars(unmade).update(vars(parameter))
        try:
            torch.utils.swap_tensors(parameter, unmade.requires_grad_(parameter.requires_grad))
        except RuntimeError:
            return  # a graph uses it: it stays real

    _dispatch_trunc_normal()
    handle = nn.modules.module.register_module_parameter_registration_hook(to_meta)
    try:
        with empties:
            yield
    finally:
        handle.remove()


@cache
def _dispatch_trunc_normal() -> None:
    """Have `nn.init.trunc_normal_` call `__torch_function__`, as torch's `normal_` does.

    It draws again what it rejects, so it cannot be recorded operation by operation.
    """
    plain = nn.init._no_grad_trunc_normal_

    def dispatched(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, Unmade):
            return plain(tensor, *args, **kwargs)
        return Unmade.__torch_function__(plain, (), (tensor, *args), kwargs)

    nn.init._no_grad_trunc_normal_ = dispatched


class _Empties(TorchFunctionMode):
    """Tensors of `torch.empty` that were never written to: their values need not be kept.

    Large empty tensors are mappings of their own: in the heap each would leave a hole in which the next no longer fits,
    a gigabyte of holes for 340 million parameters, and training would touch them all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._unwritten: dict[int, StorageWeakRef] = {}  # a reference keeps the address from being reused

    def has_value(self, parameter: nn.Parameter) -> bool:
        """Return whether the parameter was written to, or other code may still write into its memory."""
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
"""References to the memory of a parameter that nothing else uses: its own, and the one that the count takes."""


def _mapped_empty(*args: Any, **kwargs: Any) -> Tensor:
    if str(kwargs.get("device") or torch.get_default_device()) != "cpu" or kwargs.get("pin_memory"):
        return torch.empty(*args, **kwargs)
    shape = torch.empty(*args, **{**kwargs, "device": "meta"})
    if shape.layout is not torch.strided or not shape.is_contiguous() or shape.nbytes < MAPPED_BYTES:
        return torch.empty(*args, **kwargs)
    return aligned_zeros(shape.numel(), shape.dtype, torch.device("cpu")).view(shape.shape)


# -- records -----------------------------------------------------------------------------------------------------------


_count = itertools.count()


@dataclass(eq=False)
class Root:
    """Memory that does not exist yet.

    Attributes:
        shape: of the parameter that it is the memory of, or of an operation's result.
        kept: operations on it are recorded.
        begin: the value that the parameter was registered with.
        number: of the tensor that is all of it, among all recorded tensors.
        is_made: it is the memory of an operation's result, not of a parameter.
        operations: those that make it, view it and write into it, in order.
        is_changed: some of them write into it.
    """

    shape: torch.Size
    kept: bool = True
    begin: Tensor | None = None
    is_made: bool = False
    number: int = field(default_factory=lambda: next(_count))
    operations: "list[Operation]" = field(default_factory=list)
    is_changed: bool = False

    @property
    def is_written(self) -> bool:
        return self.begin is not None or self.is_made or self.is_changed


class Recipe(NamedTuple):
    """A recorded tensor: the memory that it is a view of, and its number among all of them."""

    root: Root
    number: int

    @classmethod
    def of(cls, root: Root) -> "Recipe":
        return cls(root, root.number)


class Operation:
    """One recorded call of a torch function.

    Args:
        within: the memory that it writes into or views, which refers to it; None: it makes tensors of its own.

    Attributes:
        number: its place in the order of all recorded calls.
        reads: the memory that the call reads, except `within`.
        made: the places in its result of tensors that are recorded -> their numbers.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, within: Root | None = None) -> None:
        self.number, self._func = next(_count), func
        tensors = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        unmade = [tensor for tensor in tensors.values() if isinstance(tensor, Unmade)]
        meta = {id(tensor): _plainly(tensor.detach) for tensor in unmade}
        others = {key: tensor.detach().clone() for key, tensor in tensors.items() if key not in meta}
        self._call = replaced((args, kwargs), meta | others)
        self._numbers = {id(meta[id(tensor)]): tensor.recipe.number for tensor in unmade}
        self.reads = [tensor.recipe.root for tensor in unmade if tensor.recipe.root is not within]
        self.made: dict[int, int] = {}

    def run(self, values: dict[int, Tensor]) -> None:
        """Make the call on `values`, by number, and add to them what it makes."""
        args, kwargs = replaced(self._call, {key: values[number] for key, number in self._numbers.items()})
        result = tensors_in(self._func(*args, **kwargs))
        values.update({number: result[place] for place, number in self.made.items()})


class Unmade(Tensor):
    """A tensor on meta that knows how its values are made."""

    recipe: Recipe

    @classmethod
    def of(cls, meta: Tensor, recipe: Recipe) -> "Unmade":
        made = meta.as_subclass(cls)
        made.recipe = recipe
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unmade":
        copied: Unmade = self.detach().clone().requires_grad_(self.requires_grad)  # type: ignore[assignment]
        vars(copied).update({key: value for key, value in vars(self).items() if key != "recipe"})
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_reading(self, "saving")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, (name, is_attribute) = kwargs or {}, requested(func)
        first = next(iter((*args, *kwargs.values())), None)
        if (name == "data" and func.__name__ == "__set__") or (name == "set_" and isinstance(args[1], Tensor)):
            _rebind(*args)
            return first
        if name in _ITS_OWN or (is_attribute and func.__name__ == "__set__"):
            return _plainly(func, *args, **kwargs)
        if name in _AS_ON_CPU:
            return _AS_ON_CPU[name]
        if name in ("to", "cpu", "cuda") and isinstance(first, Unmade):
            func, args, kwargs = _only_dtype(func, args, kwargs)
            if not args:
                return first
        target = kwargs.get("out") if "out" in kwargs else first if writes(name) else None
        if target is None:
            return _result(func, args, kwargs)
        if not isinstance(target, Unmade):
            _refuse_reading(_unmade_in(args, kwargs)[0], name)
        _write(target, func, args, kwargs)
        return target


_AS_ON_CPU = {"device": torch.device("cpu"), "is_cpu": True, "is_meta": False}
"""On meta torch skips `orthogonal_` and warns in `load_state_dict`, and adapters of PEFT follow their layer there."""

_ITS_OWN = frozenset(
    {"grad", "_grad", "_base", "grad_fn", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"}
    | {"untyped_storage", "_backward_hooks", "_post_accumulate_grad_hooks", "retain_grad", "detach_"}
)
"""Names that concern the tensor on meta itself."""

_VIEWS = frozenset({"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_"})
"""Operations that change only the view that a tensor is of its memory."""

_DRAWS = frozenset(
    {"normal", "uniform", "random", "bernoulli", "exponential", "log_normal", "cauchy", "geometric"}
    | {"rand_like", "randn_like", "randint_like"}
)


def is_meta(tensor: Tensor) -> bool:
    """Return `tensor.is_meta`, also for an `Unmade`."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.is_meta


def lacks_values(parameter: Tensor) -> bool:
    """Return whether this rank still has to make the values of the parameter."""
    return is_meta(parameter) and (not isinstance(parameter, Unmade) or parameter.recipe.root.kept)


def _plainly(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _rebind(tensor: Unmade, value: Tensor) -> None:
    """Set `tensor.data` to `value`."""
    kept = tensor.recipe.root.kept
    if isinstance(value, Unmade):
        tensor.recipe = value.detach().recipe  # type: ignore[attr-defined]
    else:
        tensor.recipe = Recipe.of(Root(value.shape, kept, value.detach() if kept else None))
    _plainly(Tensor.data.__set__, tensor, value if is_meta(value) else torch.empty_like(value, device="meta"))  # type: ignore[attr-defined]


def _only_dtype(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Return a call of `to` without its device; it has no arguments if the dtype stays."""
    there = func(torch.empty(0, dtype=args[0].dtype, device="cpu"), *args[1:], **kwargs)
    return Tensor.to, () if there.dtype == args[0].dtype else (args[0], there.dtype), {}


def _write(target: Unmade, func: Any, args: Any, kwargs: Any) -> None:
    name, root = requested(func)[0], target.recipe.root
    if name in _VIEWS:
        root.operations.append(Operation(func, args, kwargs, root))
        _plainly(func, *args, **kwargs)
        return
    if name.startswith("resize_"):
        raise OutsideUnitError(f"{name} of a parameter without values: write parameter.data = value instead")
    if name == "copy_":
        _plainly(func, *args, **kwargs)  # compares shapes
    root.kept = all(tensor.recipe.root.kept for tensor in _unmade_in(args, kwargs))
    if root.kept:
        root.operations.append(Operation(func, args, kwargs, root))
        root.is_changed = True
    else:
        _draw_alike(func, args, kwargs)


def _draw_alike(func: Any, args: Any, kwargs: Any) -> None:
    """Draw what the rank that has the values draws, so that torch's generators stay alike."""
    if requested(func)[0].removesuffix("_") in _DRAWS or getattr(func, "__module__", "") == "torch.nn.init":
        shaped = {id(tensor): torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in _unmade_in(args, kwargs)}
        args, kwargs = replaced((args, kwargs), shaped)
        func(*args, **kwargs)


def _unmade_in(args: Any, kwargs: Any) -> list["Unmade"]:
    return [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, Unmade)]


def _result(func: Any, args: Any, kwargs: Any) -> Any:
    unmade = _unmade_in(args, kwargs)
    real = {id(tensor): tensor.to("meta") for tensor in tensors_in((args, kwargs)) if _is_real(tensor)}
    meta_args, meta_kwargs = replaced((args, kwargs), real)
    try:
        result = _plainly(func, *meta_args, **meta_kwargs)
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error).lower():
            raise
        _refuse_reading(unmade[0], requested(func)[0])
    known = {id(tensor) for tensor in tensors_in((args, kwargs))}
    if not any(is_meta(tensor) and id(tensor) not in known for tensor in tensors_in(result)):
        return result
    kept = all(tensor.recipe.root.kept for tensor in unmade)
    if not kept:
        _draw_alike(func, args, kwargs)
    roots = {tensor.untyped_storage()._cdata: tensor.recipe.root for tensor in unmade}
    made = [tensor for tensor in tensors_in(result) if is_meta(tensor) and id(tensor) not in known]
    viewed = {roots.get(tensor.untyped_storage()._cdata) for tensor in made}
    operation = Operation(func, args, kwargs, viewed.pop() if len(viewed) == 1 else None)
    new: dict[int, Tensor] = {}
    for place, tensor in enumerate(tensors_in(result)):
        if not is_meta(tensor) or id(tensor) in known:
            continue
        source = roots.get(tensor.untyped_storage()._cdata)
        root = source or Root(tensor.shape, kept, is_made=kept)
        recipe = Recipe.of(root) if source is None else Recipe(root, next(_count))
        operation.made[place] = recipe.number
        if kept and operation not in root.operations[-1:]:
            root.operations.append(operation)
        new[id(tensor)] = Unmade.of(tensor, recipe)
    return replaced(result, new)


def _is_real(tensor: Tensor) -> bool:
    return not is_meta(tensor) and tensor.ndim > 0


def _refuse_reading(tensor: Unmade, by: str) -> NoReturn:
    if tensor.recipe.root.kept:
        raise OutsideUnitError(
            f"{by} of a parameter without values: zero.empty() leaves them to zero.init; read them after it, or build "
            "the model without zero.empty()"
        )
    raise OutsideUnitError(
        f"{by} of a parameter before zero.initialize: only rank 0 has the values until then. Write if rank == 0."
    )


# -- names of functions ------------------------------------------------------------------------------------------------


def requested(func: Any) -> tuple[str, bool]:
    """Return the name of the function or attribute, and whether `func` reads or sets an attribute."""
    is_attribute = func.__name__ in ("__get__", "__set__")
    return func.__self__.__name__ if is_attribute else func.__name__, is_attribute


def writes(name: str) -> bool:
    """Return whether a function writes into its first argument, by torch's rule for names."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NO_WRITERS)
    return name.partition(".")[0].endswith("_")  # the name of an overload of torch.ops follows a dot


_NO_WRITERS = ("__invert__", "__int__", "__index__", "__iter__")
