"""Functions that Triton compiles for a GPU: the update of a tile, the sum of received chunks, the expansion of codes.

The operators in `zero.core` and `zero.distributed.world` define the results. These functions compute the same formats,
random bits and order of operations, and every fp32 operation rounds once: products and sums are not contracted.
`zero.platform.kernels` launches those with pointers to whole tensors: `update`, `add` and `expand`.

A tile is some vectors of 64 elements of one parameter. `zero.core.fused` has the columns of `slots` and `numbers`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


class Kernel(JITFunction[Any]):
    """A function that Triton compiles for a GPU, or interprets where an interpreted kernel calls it."""

    def __init__(
        self, fn: Callable[..., object], interpreted: Callable[..., object] | None = None, **options: Any
    ) -> None:
        super().__init__(fn, **options)
        self.interpreted = InterpretedFunction(interpreted or fn)

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
def _lowest(page, row, count):
    """Return a pointer to the exponent of each of `count` vectors, behind the codes of a row of 16 vectors."""
    whole = row >> 4
    return page + (whole * 1040 + tl.minimum(count - whole * 16, 16) * 64 + (row & 15))


@Kernel
def _codes(page, row, lane):
    """Return a pointer to the codes of each vector."""
    return page + (row * 64 + (row >> 4) * 16 + lane)


@Kernel
def _decode(page, row, count, lane, live, SQUARES: tl.constexpr):
    """Load a moment as fp32, see `zero.core.moments`."""
    if page.dtype.element_ty == tl.uint8:
        lowest = tl.load(_lowest(page, row, count), live, other=0).to(tl.int32) << 23
        code = tl.load(_codes(page, row, lane), live, other=0).to(tl.int32)
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
def _encode(page, value, random, key, first, row, count, lane, live, SQUARES: tl.constexpr):
    """Store a moment, rounded with 16 random bits, see `zero.core.moments`; they change no zero, so none in a gap."""
    if page.dtype.element_ty == tl.float32:
        tl.store(page + (row * 64 + lane), value, live)
    else:
        offset = (_mix(_mix(key.to(tl.uint32, bitcast=True)) + (first >> 10).to(tl.uint32)) >> 16).to(tl.int32)
        noise = tl.load(random + (offset + (first & 1023) * 64 + lane), live, other=0)
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
            tl.store(_lowest(page, row, count), lowest.to(tl.uint8), live)
            tl.store(_codes(page, row, lane), code.to(tl.uint8), live)


@partial(Kernel, do_not_specialize=["count", "first_key", "second_key"])
def update(
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
    count,
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
    key = tl.load(slot + 4)
    group = numbers + tl.load(slot + 5) * NUMBERS_WIDTH
    trains = tl.load(group) != 0.0
    at = row * 64 + lane

    gradient = _widened(grad, at, live) * tl.load(group + 1)
    if param.dtype.element_ty == tl.float32:
        old = tl.load(param + at, live, other=0.0)
    elif master.dtype.element_ty == tl.int16:
        bits = _widened(param, at, live).to(tl.int32, bitcast=True) + tl.load(master + at, live, other=0)
        old = bits.to(tl.float32, bitcast=True)
    else:
        old = tl.load(master + at, live, other=0.0)
    if MOMENTS == 0:
        new = RULE(old, gradient, group + 6)
    else:
        old_first = _decode(first_moment, row, count, lane, live, FIRST_SQUARES)
        if MOMENTS == 1:
            new, new_first = RULE(old, gradient, group + 6, old_first)
        else:
            old_second = _decode(second_moment, row, count, lane, live, SECOND_SQUARES)
            new, new_first, new_second = RULE(old, gradient, group + 6, old_first, old_second)
            new_second = tl.where(trains, new_second, old_second)
            _encode(second_moment, new_second, random, key ^ second_key, first, row, count, lane, live, SECOND_SQUARES)
        new_first = tl.where(trains, new_first, old_first)
        _encode(first_moment, new_first, random, key ^ first_key, first, row, count, lane, live, FIRST_SQUARES)
    new = tl.where(trains, new, old)
    if AVERAGES:
        mean = tl.load(average + at, live, other=0.0)
        moved = mean * tl.load(group + 4) + new * tl.load(group + 5)
        tl.store(average + at, tl.where(trains, moved, mean), live)
    if param.dtype.element_ty == tl.float32:
        tl.store(param + at, new, live)
    else:
        if master.dtype.element_ty == tl.int16:
            tl.store(master + at, new.to(tl.int32, bitcast=True).to(tl.int16), live)
        else:
            tl.store(master + at, new, live)
        _round_into(param, at, new, live)


@partial(Kernel, do_not_specialize=["count", "rank"])
def add(total, received, own, count, rank, RANKS: tl.constexpr, ACCUMULATE: tl.constexpr, TILE: tl.constexpr):
    """Add one tile of the chunks of all ranks, of `count` vectors each, in rank order."""
    numel = tl.cast(count, tl.int64) * 64
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    live = at < numel
    value = _widened(own if rank == 0 else received, at, live)
    for source in range(1, RANKS):
        value += _widened(own if source == rank else received + numel * source, at, live)
    if ACCUMULATE:
        value = tl.load(total + at, live, other=0.0) + value
    tl.store(total + at, value, live)


@Kernel
def expand(
    values,
    codes,
    slots,
    tiles,
    first_table,
    second_table,
    FORM: tl.constexpr,
    SLOT_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Expand one tile of the codes of a parameter, with the gap after it, see `zero.core.formats`."""
    tile = tl.program_id(0)
    slot = slots + tl.load(tiles + tile) * SLOT_WIDTH
    first = (tile - tl.load(slot)) * ROWS
    count = tl.load(slot + 3)
    values += (tl.load(slot + 1) + first).to(tl.int64) * 64
    codes += tl.load(slot + 2).to(tl.int64) * 64
    vector, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, 64)[None, :]
    value = FORM(codes, first_table, second_table, count, first, vector, lane)
    if values.dtype.element_ty == tl.int16:
        value = _bf16_bits(value)
    tl.store(values + (vector * 64 + lane), value.to(values.dtype.element_ty), first + vector < count)


def _nearest_bf16_bits(value):
    """Round fp32 numbers to the nearest bf16, as `Tensor.copy_` does: Triton's interpreter truncates them."""
    bits = value.to(tl.int32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value == value, nearest, 0x7FC0).to(tl.int16)


@partial(Kernel, interpreted=_nearest_bf16_bits)
def _bf16_bits(value):
    return value.to(tl.bfloat16).to(tl.int16, bitcast=True)
