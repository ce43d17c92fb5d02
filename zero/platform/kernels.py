"""Launch Triton's kernels on a GPU: the update of a piece, the sum of chunks in rank order, the expansion of codes.

Import this file only where a device has kernels (`Device.tile_numel`), because it imports Triton. On CPU tensors the
interpreter of Triton runs the kernels, for tests.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from zero.core.layout import VECTOR
from zero.core.tile import bound
from zero.platform.tiles import Kernel, add, expand, update


@cache
def _rule(name: str) -> Kernel:
    """Return the function of an optimizer or format, by its full name, as a kernel that another kernel calls.

    The file of an optimizer or format does not import Triton, so the function and those that it calls get `tl` here.
    """
    module, _, function = name.rpartition(".")
    rule: Kernel = bound(getattr(import_module(module), function), tl, Kernel)
    return rule


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
        update,
        tiles.numel(),
        *tensors,
        average,
        *tables,
        param.numel() // VECTOR,
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
    """Run the kernel that adds the chunks of ranks, (W, S), for S in whole vectors, with bf16 tensors as their bits."""
    ranks, numel = received.shape
    received, own = (chunk.view(torch.int16) if chunk.dtype == torch.bfloat16 else chunk for chunk in (received, own))
    run(add, -(-numel // tile_numel), total, received, own, numel // VECTOR, rank, ranks, accumulate, tile_numel)


def _run_expand(
    run: Callable[..., None], values: Tensor, codes: Tensor, tables: Sequence[Tensor], rule: str, tile_numel: int
) -> None:
    """Run the kernel that expands the codes of a flat, with bf16 values as their bits.

    Args:
        run: function of (kernel, number of tiles, *arguments of the kernel).
        tables: slots and tiles of `zero.core.fused.expansion`, and the tables of the format.
    """
    slots, tiles, *tables = tables
    values = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
    first_table, second_table, *_ = (*tables, codes, codes)
    tensors = values, codes, slots, tiles, first_table, second_table
    run(expand, tiles.numel(), *tensors, _rule(rule), slots.shape[1], tile_numel // 64)


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
