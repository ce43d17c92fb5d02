"""Build a model without allocating its parameters: they are on meta, and their initialization is recorded.

A parameter that is registered inside `zero.empty()` becomes an `Unmade`. Every operation on it is recorded, inside the
block and after it: `nn.init`, `.data.zero_()`, `load_state_dict`, `.half()`, computing a parameter from another one.
`zero.init` replays the recorded operations, one owner (a module that holds parameters directly) after another. Reading
a value before that raises OutsideUnitError.

If a parameter is registered with values, as `from_pretrained` does, these values stay in memory until `zero.init`.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from zero.core.tree import replaced, tensors_in
from zero.engine.model.function_names import requested, writes
from zero.errors import OutsideUnitError
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
    """Context manager that creates parameters on meta and ignores writes to them, because another rank has values."""
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
    try:
        with empties:
            yield
    finally:
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
                    _refuse_reading(parameter, "an update")

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


# -- records -----------------------------------------------------------------------------------------------------------


_count = itertools.count()


@dataclass(eq=False)
class RecordedRoot:
    """The storage, not allocated yet, of a recorded tensor and its views.

    Attributes:
        shape: the shape of the parameter or of the operation's result that owns the storage.
        kept: whether operations on the storage are recorded.
        begin: the value that the parameter was registered with; None if it had none.
        is_made: whether an operation's result owns the storage, instead of a parameter.
        number: the number of the tensor that covers the whole storage, unique among recorded tensors and operations.
        operations: the recorded operations that create, view or write the storage, in order.
        is_changed: whether an operation writes into the storage.
        whole: numbers of all tensors that cover the whole storage in the shape of the parameter.
    """

    shape: torch.Size
    kept: bool = True
    begin: Tensor | None = None
    is_made: bool = False
    number: int = field(default_factory=lambda: next(_count))
    operations: "list[Operation]" = field(default_factory=list)
    is_changed: bool = False
    whole: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.whole = {self.number}

    @property
    def is_elementwise(self) -> bool:
        """Whether any part of the values can be computed alone."""
        return not self.is_made and all(operation.is_elementwise for operation in self.operations)

    @property
    def is_written(self) -> bool:
        return self.begin is not None or self.is_made or self.is_changed


class Recipe(NamedTuple):
    """A recorded tensor: the root that it is a view of, and its unique number."""

    root: RecordedRoot
    number: int

    @classmethod
    def of(cls, root: RecordedRoot) -> "Recipe":
        return cls(root, root.number)


class Operation:
    """One recorded call of a torch function.

    Args:
        within: the root that the call writes into or views; that root's `operations` has this operation. None if the
            call creates new tensors.

    Attributes:
        name: the name of the function.
        number: a counter that orders all recorded calls.
        reads: the roots that the call reads, except `within`.
        made: position of a recorded tensor in the call's result -> the tensor's number.
        is_alias: whether the call returns the whole root once more.
        is_elementwise: whether it does, or changes each element of the whole root in the same way and reads nothing
            else, so that it can run on a part of the root.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, within: RecordedRoot | None = None) -> None:
        self.number, self._func, self.name = next(_count), func, requested(func)[0]
        tensors = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
        unmade = [tensor for tensor in tensors.values() if isinstance(tensor, Unmade)]
        meta = {id(tensor): _plainly(tensor.detach) for tensor in unmade}
        others = {key: tensor.detach().clone() for key, tensor in tensors.items() if key not in meta}
        self._call = replaced((args, kwargs), meta | others)
        self._numbers = {id(meta[id(tensor)]): tensor.recipe.number for tensor in unmade}
        is_whole = within is not None and within.whole.issuperset(self._numbers.values()) and len(self._numbers) == 1
        has_generator = any(isinstance(argument, torch.Generator) for argument in (*args, *kwargs.values()))
        self.is_alias = is_whole and self.name in ("data", "detach")
        self.is_elementwise = self.is_alias or (
            is_whole and self.name in _ELEMENTWISE and not others and not has_generator
        )
        self.reads = [tensor.recipe.root for tensor in unmade if tensor.recipe.root is not within]
        self.made: dict[int, int] = {}

    def run(self, values: dict[int, Tensor]) -> None:
        """Execute the call on tensors of `values` (tensor number -> tensor) and add its recorded results to them."""
        args, kwargs = replaced(self._call, {key: values[number] for key, number in self._numbers.items()})
        result = tensors_in(self._func(*args, **kwargs))
        values.update({number: result[place] for place, number in self.made.items()})


class Unmade(Tensor):
    """A tensor on meta with the record (`recipe`) of the operations that will make its values."""

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
        if name == "backward" or func is torch.autograd.grad:
            _refuse_reading(_unmade_in(args, kwargs)[0], name)
        if name in _ITS_OWN or (is_attribute and func.__name__ == "__set__"):
            return _plainly(func, *args, **kwargs)
        if name in _AS_ON_CPU:
            return _AS_ON_CPU[name]
        if func is nn.init.kaiming_uniform_:
            return _kaiming_uniform(*args, **kwargs)
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
"""Attributes that report a CPU.

If they reported meta, torch would skip `orthogonal_` and warn in `load_state_dict`, and PEFT would put its adapters on
meta.
"""

_ITS_OWN = frozenset(
    {"grad", "_grad", "_base", "grad_fn", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"}
    | {"untyped_storage", "_backward_hooks", "_post_accumulate_grad_hooks", "retain_grad", "detach_"}
    | {"dtype", "layout", "shape", "requires_grad", "numel", "ndim", "dim", "size", "stride", "storage_offset"}
    | {"element_size", "itemsize", "nbytes", "is_leaf", "is_floating_point", "is_complex", "is_contiguous"}
)
"""Attributes and methods that are executed on the meta tensor itself and are not recorded.

A plan reads the metadata of each parameter a dozen times.
"""

_VIEWS = frozenset({"t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_", "as_strided_"})
"""In-place operations that change a tensor's shape or strides, but none of its values."""

_ELEMENTWISE = frozenset(
    {"normal_", "uniform_", "_no_grad_trunc_normal_", "exponential_", "bernoulli_", "log_normal_", "cauchy_"}
    | {"zero_", "fill_", "constant_", "add_", "sub_", "mul_", "div_", "clamp_", "clamp_min_", "clamp_max_"}
    | {"__iadd__", "__isub__", "__imul__", "__itruediv__"}
)
"""In-place functions that treat every element alike, if their other arguments are numbers."""

_DRAWS = frozenset(
    {"normal", "uniform", "random", "bernoulli", "exponential", "log_normal", "cauchy", "geometric"}
    | {"rand_like", "randn_like", "randint_like"}
)


def is_meta(tensor: Tensor) -> bool:
    """Return whether the tensor is on meta; an `Unmade` itself reports that it is not."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.is_meta


def lacks_values(parameter: Tensor) -> bool:
    """Return whether this rank still has to initialize the parameter's values."""
    return is_meta(parameter) and (not isinstance(parameter, Unmade) or parameter.recipe.root.kept)


def _kaiming_uniform(
    tensor: Tensor, a: float = 0, mode: Any = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> Tensor:
    """Record `nn.init.kaiming_uniform_` as `uniform_`, because its bound depends on the shape of the whole tensor."""
    if 0 in tensor.shape:
        return tensor
    fan = nn.init._calculate_correct_fan(tensor, mode)
    bound = math.sqrt(3.0) * nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan)
    return tensor.uniform_(-bound, bound, generator=generator)


def _plainly(func: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _rebind(tensor: Unmade, value: Tensor) -> None:
    """Record the assignment `tensor.data = value`."""
    kept = tensor.recipe.root.kept
    if isinstance(value, Unmade):
        tensor.recipe = value.detach().recipe  # type: ignore[attr-defined]
    else:
        tensor.recipe = Recipe.of(RecordedRoot(value.shape, kept, value.detach() if kept else None))
    _plainly(Tensor.data.__set__, tensor, value if is_meta(value) else torch.empty_like(value, device="meta"))  # type: ignore[attr-defined]


def _only_dtype(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Replace a call of `to`, `cpu` or `cuda` by `to(dtype)`, because the device does not matter before `zero.init`.

    Returns:
        (function, args, kwargs); `args` is empty if the call does not change the dtype.
    """
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
        _plainly(func, *args, **kwargs)  # raises now if the shapes do not fit
    root.kept = all(tensor.recipe.root.kept for tensor in _unmade_in(args, kwargs))
    if root.kept:
        root.operations.append(Operation(func, args, kwargs, root))
        root.is_changed = True
    else:
        _draw_alike(func, args, kwargs)


def _draw_alike(func: Any, args: Any, kwargs: Any) -> None:
    """Draw the same random numbers as the rank that has the values, to keep torch's generators equal on all ranks."""
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
        root = source or RecordedRoot(tensor.shape, kept, is_made=kept)
        recipe = Recipe.of(root) if source is None else Recipe(root, next(_count))
        operation.made[place] = recipe.number
        if operation.is_alias:
            root.whole.add(recipe.number)
        if kept and operation not in root.operations[-1:]:
            root.operations.append(operation)
        new[id(tensor)] = Unmade.of(tensor, recipe)
    return replaced(result, new)


def _is_real(tensor: Tensor) -> bool:
    return not is_meta(tensor) and tensor.ndim > 0


def _refuse_reading(tensor: Unmade, by: str) -> NoReturn:
    if tensor.recipe.root.kept:
        raise OutsideUnitError(
            f"{by} of a parameter that has no values yet, because its model was built under zero.empty(). Read it "
            "after zero.init, or build the model without zero.empty()."
        )
    raise OutsideUnitError(
        f"{by} of a parameter before zero.initialize: only rank 0 has the values until then. Put the line "
        "under `if rank == 0:`."
    )
