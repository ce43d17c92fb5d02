"""Shape, dtype and strides of the results of operators on meta tensors.

torch can compute them itself, but for most arithmetic it imports sympy first: two seconds and 75 MB in every rank,
measured with torch 2.13. The rules here cover the operators of transformers; other operators are left to torch.
`tests/trainer/test_planning.py` compares every rule with torch's own answer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

ShapeRule = Callable[..., Any]


def result_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of `func` on meta tensors: new tensors, or the arguments that `func` returns."""
    rule = _RULES.get(func)
    if rule is not None:
        return rule(*args, **kwargs)
    if torch.Tag.pointwise in func.tags:
        made = _pointwise(func, args, kwargs)
        if made is not None:
            return made
    return func(*args, **kwargs)


def operand_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments of an operator, and in their lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from operand_tensors(value)


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the result of a pointwise operator on tensors and numbers; None if its dtype is not known.

    The dtype is known for floating point tensors, and for arithmetic.
    """
    tensors = [*operand_tensors(args)]
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    arithmetic = func.overloadpacket in _ARITHMETIC and (func.overloadpacket is not aten.div or bool(floats))
    known = arithmetic or len(floats) == len(tensors)
    if kwargs or not known or func.overloadpacket in _TESTS or any(isinstance(value, complex) for value in args):
        return None
    if func._schema.is_mutable:
        return args[0] if func._schema.name.endswith("_") and isinstance(args[0], Tensor) else None
    shape = _broadcast([tensor.shape for tensor in tensors])
    # beside larger tensors, numbers and 0-dim tensors do not change the dtype of the result
    floating = _widest([tensor for tensor in tensors if tensor.ndim] or tensors)
    dtype = torch.result_type(*args[:2]) if arithmetic else floating
    if all(tensor.is_contiguous() for tensor in tensors if list(tensor.shape) == shape):
        return tensors[0].new_empty(shape, dtype=dtype)
    return tensors[0].new_empty_strided(shape, _strides([tensor.expand(shape) for tensor in tensors]), dtype=dtype)


def _broadcast(shapes: list[torch.Size]) -> list[int]:
    ndim = max(len(shape) for shape in shapes)
    padded = [(1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes]
    return [next((n for n in sizes if n != 1), 1) for sizes in zip(*padded, strict=True)]


def _strides(tensors: list[Tensor]) -> list[int]:
    """Return dense strides in the inputs' order of dimensions.

    The order of two dimensions is decided by the first input whose strides for them differ.
    """
    shape = tensors[0].shape

    def order(left: int, right: int) -> int:
        for tensor in tensors:
            a, b = tensor.stride(left), tensor.stride(right)
            if a and b and (a != b or shape[left] > shape[right]):
                return 1 if a >= b else -1
        return 0

    dims = list(reversed(range(len(shape))))  # the innermost first
    for last in range(1, len(dims)):
        place = last
        for before in range(last - 1, -1, -1):
            sign = order(dims[before], dims[place])
            if sign < 0:
                break
            if sign > 0:
                dims[before], dims[place] = dims[place], dims[before]
                place = before
    strides, step = [0] * len(shape), 1
    for dim in dims:
        strides[dim], step = step, step * shape[dim]
    return strides


def _reduced(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    dims = {d % x.ndim for d in ([dim] if isinstance(dim, int) else dim or range(x.ndim))} if x.ndim else set()
    shape = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    return x.new_empty(shape, dtype=dtype or (x.dtype if x.is_floating_point() else torch.int64))


def _cat(tensors: list[Tensor], dim: int = 0) -> Tensor:
    parts = [tensor for tensor in tensors if tensor.shape != (0,)] or tensors[:1]
    shape = list(parts[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in parts)
    return parts[0].new_empty(shape, dtype=_widest(tensors))


def _stack(tensors: list[Tensor], dim: int = 0) -> Tensor:
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return tensors[0].new_empty(shape, dtype=_widest(tensors))


def _widest(tensors: list[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors))


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32 if half_to_float else x.dtype)


def _softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    return grad.new_empty(grad.shape, dtype=dtype)


def _nll(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[:1] if reduction == 0 and x.ndim == 2 else ()), x.new_empty(())


def _nll_backward(grad: Tensor, x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _layer_norm(x: Tensor, shape: list[int], weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    outer = [*x.shape[: x.ndim - len(shape)], *[1] * len(shape)]
    return x.new_empty(x.shape), x.new_empty(outer), x.new_empty(outer)


def _layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, mask: list[bool]
) -> tuple[Tensor | None, ...]:
    made = (x, weight, bias)
    return tuple(t.new_empty(t.shape) if m and t is not None else None for t, m in zip(made, mask, strict=True))


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _grouped(a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Return the result of a grouped matrix product (experts): a, b or the inner dimension is in groups."""
    groups = (offsets.shape[0],) if offsets is not None and a.ndim == b.ndim == 2 else b.shape[:-2] * (a.ndim == 3)
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


def _alike(x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return x.new_empty_strided(x.shape, _strides([x]), dtype=dtype or x.dtype)


def _clamped(x: Tensor, low: float | None = None, high: float | None = None) -> Tensor:
    return _alike(x)


def _logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    return _reduced(x, dim, keepdim)


def _compared(x: Tensor, number: float) -> Tensor:
    return _alike(x, dtype=torch.bool)


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    shape = _broadcast([condition.shape, x.shape, y.shape])
    laid = _strides([tensor.expand(shape) for tensor in (condition, x, y)])
    return condition.new_empty_strided(shape, laid, dtype=torch.result_type(x, y))


def _gathered(x: Tensor, dim: int, index: Tensor, **_: Any) -> Tensor:
    return x.new_empty(index.shape)


def _in_place(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def _out(*_: Any, out: Tensor, **__: Any) -> Tensor:
    return out


def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Return the output, and one fp32 number per row of scores: (b, h, t), stored as (b, t, h)."""
    b, h, t, _d = query.shape
    return _alike(query), query.new_empty((b, t, h), dtype=torch.float32).transpose(1, 2)


def _value(x: Tensor) -> bool | int | float:
    """Return true or one as a meta tensor's value, which most code that branches on a value expects."""
    return True if x.dtype == torch.bool else 1.0 if x.is_floating_point() else 1


_ARITHMETIC = frozenset((aten.add, aten.sub, aten.mul, aten.div, aten.bitwise_and))

_TESTS = frozenset((aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.isnan, aten.isinf, aten.isfinite))
_TESTS |= {aten.logical_and, aten.logical_or, aten.logical_not, aten.signbit, aten.isposinf, aten.isneginf}

_RULES: Mapping[Any, ShapeRule] = {
    aten._local_scalar_dense.default: _value,
    aten.ones_like.default: _alike,
    aten.mm.default: _product,
    aten.bmm.default: _product,
    aten._grouped_mm.default: _grouped,
    aten.clamp.default: _clamped,
    aten.logsumexp.default: _logsumexp,
    aten.ge.Scalar: _compared,
    aten.lt.Scalar: _compared,
    aten.ne.Scalar: _compared,
    aten.where.self: _where,
    aten.gather.default: _gathered,
    aten.scatter_add_.default: _in_place,
    aten.mm.out: _out,
    aten.embedding.default: _embedding,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten.sum.default: _reduced,
    aten.sum.dim_IntList: _reduced,
    aten.mean.dim: _reduced,
    aten.mean.default: _reduced,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss_backward.default: _nll_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
}
