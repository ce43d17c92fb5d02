"""Add received chunks in the order of ranks, so that a sum has the same bits on every backend and in every run."""

import torch
from torch import Tensor

from zero.core.layout import VECTOR
from zero.platform.device import Device


@torch.no_grad()
def ordered_sum(
    chunks_WS: Tensor,
    sum_S: Tensor,
    own_S: Tensor | None = None,
    rank: int = 0,
    *,
    accumulate: bool = False,
    device: Device | None = None,
) -> None:
    """Add the rows of `chunks_WS` in order, in sum_S.dtype: sum_S = [sum_S +] ((c_0 + c_1) + c_2) ...

    Adds `Device.sum_numel` elements at a time and allocates at most two tensors of that size, because an addition of
    two dtypes on a CPU would first make a converted copy of the whole operand.

    Args:
        chunks_WS: (W, S), contiguous, not in the memory of `sum_S`.
        sum_S: (S,).
        own_S: (S,) of the same dtype, to add in place of row `rank`; None: that row.
        accumulate: add the sum to `sum_S` instead of replacing it.
        device: the device that adds; None: a CPU.
    """
    own_S = chunks_WS[rank] if own_S is None else own_S
    fits = sum_S.dtype == torch.float32 and sum_S.numel() % VECTOR == 0  # as the shards of flats
    if device is not None and device.tile_numel and fits and device.is_home_of(sum_S):
        torch.ops.zero.add_in_order(sum_S, chunks_WS, own_S, rank, accumulate, device.tile_numel)
        return
    chunks = [own_S if row == rank else chunk for row, chunk in enumerate(chunks_WS.unbind())]
    on_host = device is None or device.shares_memory
    numel = min((device or Device).sum_numel, sum_S.numel())
    total = sum_S.new_empty(numel) if accumulate else None
    cast = sum_S.new_empty(numel) if on_host and chunks[0].dtype != sum_S.dtype else None
    if not numel:
        return
    tensors = (sum_S, *chunks)
    # `split` takes longer than the sum of a small chunk
    parts = [[tensor] for tensor in tensors] if numel == sum_S.numel() else [tensor.split(numel) for tensor in tensors]
    for out, first, *rest in zip(*parts, strict=True):
        acc = out if total is None else total[: out.numel()]
        if rest and first.dtype == acc.dtype:
            torch.add(first, rest.pop(0), out=acc)
        else:
            acc.copy_(first)
        for piece in rest:
            acc.add_(piece if cast is None else cast[: out.numel()].copy_(piece))
        if total is not None:
            out.add_(acc)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors share memory."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes
