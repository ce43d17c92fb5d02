"""Triton kernels of a GPU: the update of a piece, the sum of received chunks in rank order, and the expansion of codes.

The operators in `zero.core` and `zero.distributed.world` define the results. These kernels compute the same formats,
random bits and order of operations, and every fp32 operation rounds once: products and sums are not contracted. Import
this file only where a device has kernels (`Device.tile_numel`), because it imports Triton. On CPU tensors the
interpreter of Triton runs the kernels, for tests.

A tile is some vectors of 64 elements of one parameter. `zero.core.fused` has the columns of `slots` and `numbers`.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


class Kernel(JITFunction[Any]):
    """A function that Triton compiles for a GPU, or interprets where an interpreted kernel calls it."""

    def __init__(self, fn: Callable[..., object], **options: Any) -> None:
        super().__init__(fn, **options)
        self.interpreted = InterpretedFunction(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.interpreted.rewrite()(*args, **kwargs)


@Kernel
def _mix(x):
    """Hash uint32 numbers as `zero.core.moments.mix` does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@Kernel
def _widened(pointer, at, live):
    """Load fp32, fp16 or the bits of bf16 (int16) as fp32."""
    value = tl.load(pointer + at, live, other=0)
    if pointer.dtype.element_ty == tl.int16:
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@Kernel
def _round_into(param, at, value, live):
    """Store fp32 numbers as parameters; in bf16 a tie is rounded up in magnitude, see `zero.core.master.rounded`."""
    if param.dtype.element_ty == tl.int16:
        bits = value.to(tl.int32, bitcast=True) + 0x8000
        tl.store(param + at, tl.where(value == value, bits >> 16, 0x7FC0).to(tl.int16), live)
    else:
        tl.store(param + at, value.to(param.dtype.element_ty), live)


@Kernel
def _decode(page, row, lane, live, SQUARES: tl.constexpr):
    """Load a moment as fp32, see `zero.core.moments`."""
    if page.dtype.element_ty == tl.uint8:
        lowest = tl.load(page + row * 65, live, other=0).to(tl.int32) << 23
        code = tl.load(page + (row * 65 + 1 + lane), live, other=0).to(tl.int32)
        if SQUARES:
            bits = (code << 20) + lowest
        else:
            size = code & 0x7F
            bits = ((size << 20) + tl.where(size > 0, lowest, 0)) | ((code & 0x80) << 24)
        value = bits.to(tl.float32, bitcast=True)
    else:
        value = _widened(page, row * 64 + lane, live)
    return value


@Kernel
def _encode(page, value, random, key, first, row, lane, live, drawn, SQUARES: tl.constexpr):
    """Store a moment, rounded with 16 random bits, see `zero.core.moments`."""
    if page.dtype.element_ty == tl.float32:
        tl.store(page + (row * 64 + lane), value, live)
    else:
        offset = (_mix(_mix(key.to(tl.uint32, bitcast=True)) + (first >> 10).to(tl.uint32)) >> 16).to(tl.int32)
        noise = tl.load(random + (offset + (first & 1023) * 64 + lane), drawn, other=0)
        bits = value.to(tl.int32, bitcast=True)
        if page.dtype.element_ty == tl.int16:
            bits = tl.minimum(bits, 0x7FC00000) + noise
            tl.store(page + (row * 64 + lane), (bits >> 16).to(tl.int16), live)
        else:
            code = (tl.minimum(bits & 0x7FFFFFFF, 0x7FC00000) + (noise << 4)) >> 20
            # the interpreter of Triton knows this function, and is slow for any other reduction
            highest = tl.reduce(code, 1, tl.standard._elementwise_max, keep_dims=True) >> 3
            lowest = tl.maximum(highest - (31 if SQUARES else 15), 0)
            code = tl.maximum(code - (lowest << 3), 0)
            if not SQUARES:
                code += tl.where(bits < 0, 128, 0)
            tl.store(page + row * 65, lowest.to(tl.uint8), live)
            tl.store(page + (row * 65 + 1 + lane), code.to(tl.uint8), live)


@partial(Kernel, do_not_specialize=["first_key", "second_key"])
def _update(
    param,
    grad,
    master,
    first_moment,
    second_moment,
    average,
    slots,
    tiles,
    numbers,
    random,
    first_key,
    second_key,
    RULE: tl.constexpr,
    MOMENTS: tl.constexpr,
    FIRST_SQUARES: tl.constexpr,
    SECOND_SQUARES: tl.constexpr,
    AVERAGES: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    NUMBERS_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Update one tile: decode the state to fp32, apply the optimizer's rule, and encode the results."""
    tile = tl.program_id(0)
    slot = slots + tl.load(tiles + tile) * SLOT_WIDTH
    place = (tile - tl.load(slot)) * ROWS + tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, 64)[None, :]
    live = place < tl.load(slot + 2)
    row = (tl.load(slot + 1) + place).to(tl.int64)
    first = tl.load(slot + 3) + place  # the index of each vector in the parameter
    whole = tl.load(slot + 4)
    drawn = live & ((first < whole) | ((first == whole) & (lane < tl.load(slot + 5))))
    key = tl.load(slot + 6)
    group = numbers + tl.load(slot + 7) * NUMBERS_WIDTH
    trains = tl.load(group) != 0.0
    at = row * 64 + lane

    gradient = tl.div_rn(_widened(grad, at, live), tl.load(group + 1))
    if param.dtype.element_ty == tl.float32:
        old = tl.load(param + at, live, other=0.0)
    elif master.dtype.element_ty == tl.int16:
        bits = _widened(param, at, live).to(tl.int32, bitcast=True) + tl.load(master + at, live, other=0)
        old = bits.to(tl.float32, bitcast=True)
    else:
        old = tl.load(master + at, live, other=0.0)
    if MOMENTS == 0:
        new = RULE(old, gradient, group + 5)
    else:
        old_first = _decode(first_moment, row, lane, live, FIRST_SQUARES)
        if MOMENTS == 1:
            new, new_first = RULE(old, gradient, group + 5, old_first)
        else:
            old_second = _decode(second_moment, row, lane, live, SECOND_SQUARES)
            new, new_first, new_second = RULE(old, gradient, group + 5, old_first, old_second)
            new_second = tl.where(trains, new_second, old_second)
            _encode(second_moment, new_second, random, key ^ second_key, first, row, lane, live, drawn, SECOND_SQUARES)
        new_first = tl.where(trains, new_first, old_first)
        _encode(first_moment, new_first, random, key ^ first_key, first, row, lane, live, drawn, FIRST_SQUARES)
    new = tl.where(trains, new, old)
    if AVERAGES:
        mean = tl.load(average + at, live, other=0.0)
        moved = mean * tl.load(group + 3) + new * tl.load(group + 4)
        tl.store(average + at, tl.where(trains, moved, mean), live)
    if param.dtype.element_ty == tl.float32:
        tl.store(param + at, new, live)
    else:
        if master.dtype.element_ty == tl.int16:
            tl.store(master + at, new.to(tl.int32, bitcast=True).to(tl.int16), live)
        else:
            tl.store(master + at, new, live)
        _round_into(param, at, new, live)


@partial(Kernel, do_not_specialize=["rank"])
def _add(total, received, own, numel, rank, RANKS: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr):
    """Add one tile of the chunks of all ranks in rank order."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = at < numel
    value = _widened(own if rank == 0 else received, at, live)
    for source in range(1, RANKS):
        value += _widened(own if source == rank else received + tl.cast(numel, tl.int64) * source, at, live)
    if ACCUMULATE:
        value = tl.load(total + at, live, other=0.0) + value
    tl.store(total + at, value, live)


@Kernel
def _expand(values, codes, first_table, second_table, numel, FORM: tl.constexpr, TILE: tl.constexpr):
    """Expand one tile of the codes of a format, see `zero.core.formats`."""
    first, lane = tl.program_id(0).to(tl.int64) * TILE, tl.arange(0, TILE)
    value = FORM(codes, first_table, second_table, numel, first, lane)
    _round_to_even(values, first + lane, value, first + lane < numel)


@Kernel
def _round_to_even(values, at, value, live):
    """Store fp32 numbers as `Tensor.copy_` does."""
    if values.dtype.element_ty == tl.int16:
        bits = value.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(values + at, tl.where(value == value, nearest, 0x7FC0).to(tl.int16), live)
    else:
        tl.store(values + at, value.to(values.dtype.element_ty), live)


@cache
def _rule(name: str) -> Kernel:
    """Return the function of an optimizer or format, by its full name, as a kernel that another kernel calls.

    The file of an optimizer or format does not import Triton, so the function and those that it calls get `tl` here.
    """
    module, _, function = name.rpartition(".")
    return _bound(getattr(import_module(module), function))


def _bound(function: FunctionType) -> Kernel:
    scope = {**function.__globals__, "tl": tl}
    for name in function.__code__.co_names:
        if isinstance(called := scope.get(name), FunctionType):
            scope[name] = _bound(called)
    return Kernel(FunctionType(function.__code__, scope, function.__name__))


def _run_update(
    run: Callable[..., None],
    param: Tensor,
    kept: Sequence[Tensor],
    grad: Tensor,
    tables: Sequence[Tensor],
    keys: Sequence[int],
    squares: Sequence[bool],
    averages: bool,
    rule: str,
    tile_numel: int,
) -> None:
    """Run the kernel of the update on a piece, with bf16 tensors as their bits.

    Args:
        run: function of (kernel, number of tiles, *arguments of the kernel).
        kept: the master, if `param` is not fp32, and the moments.
        tables: slots, tiles and numbers of `zero.core.fused`, and the permutation of `zero.core.moments`.
        keys: a signed 32-bit seed of random bits for each moment.
        squares: whether each moment is never negative.
        averages: whether the last moment is the running mean of the parameters, in fp32.
        rule: the full name of the function `tile` of the optimizer, see `zero.core.optim.Fused`.
    """
    slots, tiles, numbers, _ = tables
    tensors = [page.view(torch.int16) if page.dtype == torch.bfloat16 else page for page in (param, grad, *kept)]
    if param.dtype == torch.float32:
        tensors.insert(2, tensors[0])
    average = tensors.pop() if averages else tensors[0]
    count = len(tensors) - 3
    tensors += [tensors[0]] * (2 - count)
    first_key, second_key, *_ = (*keys, 0, 0)
    first_squares, second_squares, *_ = (*squares, False, False)
    run(
        _update,
        tiles.numel(),
        *tensors,
        average,
        *tables,
        first_key,
        second_key,
        _rule(rule),
        count,
        first_squares,
        second_squares,
        averages,
        slots.shape[1],
        numbers.shape[1],
        tile_numel // 64,
    )


def _run_add(
    run: Callable[..., None], total: Tensor, received: Tensor, own: Tensor, rank: int, accumulate: bool, tile_numel: int
) -> None:
    ranks, numel = received.shape
    received, own = (chunk.view(torch.int16) if chunk.dtype == torch.bfloat16 else chunk for chunk in (received, own))
    run(_add, -(-numel // tile_numel), total, received, own, numel, rank, ranks, accumulate, tile_numel)


def _run_expand(
    run: Callable[..., None], values: Tensor, codes: Tensor, tables: Sequence[Tensor], rule: str, tile_numel: int
) -> None:
    numel, tile_numel = values.numel(), min(tile_numel, 16384)
    values = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    first_table, second_table, *_ = (*tables, codes, codes)
    run(_expand, -(-numel // tile_numel), values, codes, first_table, second_table, numel, _rule(rule), tile_numel)


def _compiled(kernel: Kernel, tiles: int, *args: Any) -> None:
    if tiles:
        kernel[(tiles,)](*args, enable_fp_fusion=False)


def _interpreted(kernel: Kernel, tiles: int, *args: Any) -> None:
    if tiles:
        tensors = [_in_own_storage(arg) if isinstance(arg, Tensor) else arg for arg in args]
        with _INTERPRETER:
            kernel.interpreted[(tiles,)](*tensors)


def _in_own_storage(tensor: Tensor) -> Tensor:
    """Return the tensor in a storage of its own bytes, because the interpreter copies whole storages onto themselves.

    Another thread may write to the rest of the storage meanwhile.
    """
    buffer = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)


_INTERPRETER = threading.Lock()
"""Held by the thread that interprets a kernel, because the interpreter of Triton has global state."""

SCHEMAS: dict[str, Callable[..., None]] = {
    "update(Tensor(a!) param, Tensor(b!)[] kept, Tensor grad, Tensor[] tables, int[] keys, bool[] squares, "
    "bool averages, str rule, int tile_numel) -> ()": _run_update,
    "add_in_order(Tensor(a!) total, Tensor received, Tensor own, int rank, bool accumulate, int tile_numel) -> ()": (
        _run_add
    ),
    "expand(Tensor(a!) values, Tensor codes, Tensor[] tables, str rule, int tile_numel) -> ()": _run_expand,
}
OPERATORS = torch.library.Library("zero", "DEF")
for schema, function in SCHEMAS.items():
    name = OPERATORS.define(schema)
    OPERATORS.impl(name, partial(function, _compiled), "CUDA")
    OPERATORS.impl(name, partial(function, _interpreted), "CPU")
