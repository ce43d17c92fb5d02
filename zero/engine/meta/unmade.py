"""Tensors on meta that record every operation on them, and raise OutsideUnitError if a value is read."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zero.core.tree import replaced, tensors_in
from zero.engine.meta.function_names import requested, writes
from zero.engine.meta.operations import Recipe, RecordedOperation, RecordedRoot, next_number
from zero.errors import OutsideUnitError

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

_DRAWS = frozenset(
    {"normal", "uniform", "random", "bernoulli", "exponential", "log_normal", "cauchy", "geometric"}
    | {"rand_like", "randn_like", "randint_like"}
)


_DECOMPOSES = frozenset({"svd", "svd_lowrank", "qr", "linalg_svd", "linalg_qr"})

INSIDE_EMPTY = ContextVar("zero.empty", default=False)
"""Whether new parameters become `Unmade`, so that results may be assigned to them."""


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
        refuse_reading(self, "saving")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, (name, is_attribute) = kwargs or {}, requested(func)
        first = next(iter((*args, *kwargs.values())), None)
        if (name == "data" and func.__name__ == "__set__") or (name == "set_" and isinstance(args[1], Tensor)):
            _rebind(*args)
            return first
        if name == "backward" or func is torch.autograd.grad:
            refuse_reading(_unmade_in(args, kwargs)[0], name)
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
            refuse_reading(_unmade_in(args, kwargs)[0], name)
        _write(target, func, args, kwargs)
        return target


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
        root.operations.append(RecordedOperation(func, args, kwargs, _recipes_in(args, kwargs), root))
        _plainly(func, *args, **kwargs)
        return
    if name.startswith("resize_"):
        raise OutsideUnitError(f"{name} of a parameter without values: write parameter.data = value instead")
    if name == "copy_":
        _plainly(func, *args, **kwargs)  # raises now if the shapes do not fit
    root.kept = all(tensor.recipe.root.kept for tensor in _unmade_in(args, kwargs))
    if root.kept:
        root.operations.append(RecordedOperation(func, args, kwargs, _recipes_in(args, kwargs), root))
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


def _recipes_in(args: Any, kwargs: Any) -> dict[int, Recipe]:
    return {id(tensor): tensor.recipe for tensor in _unmade_in(args, kwargs)}


def _result(func: Any, args: Any, kwargs: Any) -> Any:
    unmade = _unmade_in(args, kwargs)
    if requested(func)[0] in _DECOMPOSES and not unmade[0].recipe.root.is_made and not INSIDE_EMPTY.get():
        # torch could not assign the result to a parameter with values, as peft does for PiSSA and OLoRA
        raise OutsideUnitError(
            f"{requested(func)[0]} of a parameter that has no values yet, for first values of an adapter or another "
            "parameter. Write init_lora_weights=True, or build the model with its values, without zero.empty()."
        )
    real = {id(tensor): tensor.to("meta") for tensor in tensors_in((args, kwargs)) if _is_real(tensor)}
    meta_args, meta_kwargs = replaced((args, kwargs), real)
    try:
        result = _plainly(func, *meta_args, **meta_kwargs)
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error).lower():
            raise
        refuse_reading(unmade[0], requested(func)[0])
    known = {id(tensor) for tensor in tensors_in((args, kwargs))}
    if not any(is_meta(tensor) and id(tensor) not in known for tensor in tensors_in(result)):
        return result
    kept = all(tensor.recipe.root.kept for tensor in unmade)
    if not kept:
        _draw_alike(func, args, kwargs)
    roots = {tensor.untyped_storage()._cdata: tensor.recipe.root for tensor in unmade}
    made = [tensor for tensor in tensors_in(result) if is_meta(tensor) and id(tensor) not in known]
    viewed = {roots.get(tensor.untyped_storage()._cdata) for tensor in made}
    operation = RecordedOperation(
        func, args, kwargs, _recipes_in(args, kwargs), viewed.pop() if len(viewed) == 1 else None
    )
    new: dict[int, Tensor] = {}
    for place, tensor in enumerate(tensors_in(result)):
        if not is_meta(tensor) or id(tensor) in known:
            continue
        source = roots.get(tensor.untyped_storage()._cdata)
        root = source or RecordedRoot(tensor.shape, kept, is_made=kept)
        recipe = Recipe.of(root) if source is None else Recipe(root, next_number())
        operation.made[place] = recipe.number
        if operation.is_alias:
            root.whole.add(recipe.number)
        if kept and operation not in root.operations[-1:]:
            root.operations.append(operation)
        new[id(tensor)] = Unmade.of(tensor, recipe)
    return replaced(result, new)


def _is_real(tensor: Tensor) -> bool:
    return not is_meta(tensor) and tensor.ndim > 0


def refuse_reading(tensor: Unmade, by: str) -> NoReturn:
    if tensor.recipe.root.kept:
        raise OutsideUnitError(
            f"{by} of a parameter that has no values yet, because its model was built under zero.empty(). Read it "
            "after zero.init, or build the model without zero.empty()."
        )
    raise OutsideUnitError(
        f"{by} of a parameter before zero.initialize: only rank 0 has the values until then. Put the line "
        "under `if rank == 0:`."
    )


@contextmanager
def explaining_meta() -> Iterator[None]:
    """Raise OutsideUnitError if a user's autograd function has got a parameter on meta, whose gradients torch rejects.

    `Function.apply` does not call `__torch_function__`, so only torch sees the parameter there.
    """
    try:
        yield
    except RuntimeError as error:
        match = re.match(r"Function (\w+?)Backward returned an invalid gradient .*expected device meta", str(error))
        if match is None:
            raise
        raise OutsideUnitError(
            f"{match[1]}.apply(weight): the weight is of another unit and was made by zero.empty(), so it takes no "
            "gradient here. Pass weight[:]."
        ) from error
