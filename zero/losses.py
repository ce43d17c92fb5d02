"""Losses that do not hold all logits of a large vocabulary at once.

`linear_cross_entropy` is a linear layer and cross entropy in one. It processes the vocabulary in chunks, so only
(tokens, chunk) logits exist at a time, in forward and in backward. Forward keeps one number per token, the logarithm of
the sum of exponentials; backward computes each chunk of logits again. Each row of the weight's gradient is one product
over all tokens, as in the plain loss. The hidden states' gradient is summed over chunks in fp32.

Source: Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models"; Milakov and Gimelshein 2018, "Online
normalizer calculation for softmax".
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zero.errors import ConfigError

CHUNK_NUMEL = 2**23
"""Number of logits in a chunk of size "auto": 32 MiB of fp32."""

LEAST_CHUNK = 64
"""Fewest entries of the vocabulary in a chunk of size "auto"."""

IGNORE_INDEX = -100
"""The target of a token that does not count in the loss."""


Repeated = Callable[[int], AbstractContextManager[None]]
"""A function that takes a number of equal repetitions and returns a context manager for one of them."""

_REPEATED: ContextVar[Repeated | None] = ContextVar("repeated", default=None)


@contextmanager
def equal_chunks_once(repeated: Repeated) -> Iterator[None]:
    """Compute one chunk in place of all chunks of equal memory and work, inside `repeated`, in this thread.

    For traces on meta tensors, which have no values.
    """
    token = _REPEATED.set(repeated)
    try:
        yield
    finally:
        _REPEATED.reset(token)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | Literal["auto"] | None = "auto",
    *,
    bias: Tensor | None = None,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Return the cross entropy of `hidden @ weight.T + bias`, in nats: a 0-dim fp32 tensor.

    Args:
        hidden: (..., D), input of the last linear layer, of any floating-point dtype.
        weight: (V, D), weight of that layer, in the same dtype.
        targets: (...) int64, from 0 to V - 1; tokens with -100 do not count.
        chunk: number of vocabulary entries whose logits exist at a time, 1 or more; "auto": 32 MiB of fp32 logits, at
            least 64 entries, and the plain loss if all logits take no more; None: the plain loss.
        bias: (V,) or None.
        reduction: mean or sum over the tokens that count.

    Returns:
        `F.cross_entropy` of the fp32 logits, up to the rounding of fp32; a mean is NaN if no token counts. It can be
            differentiated once, with respect to hidden, weight and bias.

    Raises:
        ConfigError: shapes do not fit, a chunk is not a size, a reduction is not known, or, on a CPU, a target is not
            an entry of the vocabulary; on a GPU such a target ends the program, as with `F.cross_entropy`.
        IndexError: on a CPU, the plain loss is used and a target is not an entry of the vocabulary.
    """
    _check(hidden, weight, targets, bias)
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"reduction={reduction!r}: must be mean or sum")
    rows, goals = hidden.flatten(0, -2), targets.flatten()
    size = _chunk(chunk, len(rows), len(weight))
    if size is None:
        return F.cross_entropy(
            F.linear(rows, weight, bias).float(), goals, ignore_index=IGNORE_INDEX, reduction=reduction
        )
    weight = weight.view_as(weight)  # an autograd function would not gather a parameter that is read outside its unit
    bias = None if bias is None else bias.view_as(bias)
    loss = _LinearCrossEntropy.apply(rows, weight, bias, goals, size, reduction == "mean")
    assert isinstance(loss, Tensor)
    return loss


def _chunk(chunk: int | str | None, tokens: int, vocab: int) -> int | None:
    """Return the number of vocabulary entries in a chunk; None for the plain loss of all entries at once."""
    if chunk == "auto":
        return None if tokens * vocab <= CHUNK_NUMEL else max(LEAST_CHUNK, CHUNK_NUMEL // tokens)
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise ConfigError(f"chunk={chunk!r}: must be a number of entries of the vocabulary, auto or None")
    return chunk


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
    if not (hidden.dim() >= 2 and weight.dim() == 2 and hidden.shape == (*targets.shape, weight.shape[1])):
        raise ConfigError(f"linear_cross_entropy got {shapes}. Pass hidden (..., D), weight (V, D), targets (...).")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"linear_cross_entropy got bias {tuple(bias.shape)} with {shapes}. Pass bias (V,).")
    if targets.dtype != torch.int64:
        raise ConfigError(f"linear_cross_entropy got targets in {targets.dtype}. Convert them: targets.long().")


def _check_range(targets: Tensor, vocab: int) -> None:
    # a target out of range is in no chunk, so its token would get a wrong loss without an error
    if targets.is_meta or torch.compiler.is_compiling():
        return  # the targets have no values
    right = (targets == IGNORE_INDEX) | ((targets >= 0) & (targets < vocab))
    if not targets.is_cpu:
        torch._assert_async(right.all())  # the host does not wait for it
    elif not right.all():
        raise ConfigError(
            f"target {int(targets[~right][0])} is not one of the {vocab} entries of the vocabulary, from 0. Use "
            f"{IGNORE_INDEX} for tokens that do not count."
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, mean: bool
    ) -> Tensor:
        _check_range(targets, len(weight))
        total = torch.full(targets.shape, -torch.inf, dtype=torch.float32, device=hidden.device)
        chosen = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
        for first, last in _ranges(len(weight), chunk):
            logits = _logits(hidden, weight, bias, first, last)
            inside, index = _inside(targets, first, last)
            chosen += torch.where(inside, logits.gather(1, index)[:, 0], 0)  # no product: 0 x inf is NaN
            total = torch.logaddexp(total, logits.logsumexp(1))
            del logits
        counts = targets != IGNORE_INDEX
        number = counts.sum() if mean else torch.ones((), device=hidden.device)
        ctx.save_for_backward(hidden, weight, bias, targets, total, number)
        ctx.chunk = chunk
        return torch.where(counts, total - chosen, 0).sum() / number

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        hidden, weight, bias, targets, total, number = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        scale = ((targets != IGNORE_INDEX) * (grad / number))[:, None]
        for_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device) if needs_hidden else None
        for_weight = _empty(weight) if needs_weight else None
        for_bias = _empty(bias) if needs_bias else None
        for first, last in _ranges(len(weight), ctx.chunk):
            share = _logits(hidden, weight, bias, first, last).sub_(total[:, None]).exp_()
            inside, index = _inside(targets, first, last)
            share.scatter_add_(1, index, -inside[:, None].float()).mul_(scale)
            if for_bias is not None:
                for_bias[first:last] = share.sum(0)
            share = share.to(hidden.dtype)
            if for_weight is not None:
                torch.mm(share.T, hidden, out=for_weight[first:last])
            if for_hidden is not None:
                for_hidden += share @ weight[first:last]
            del share
        return None if for_hidden is None else for_hidden.to(hidden.dtype), for_weight, for_bias, None, None, None


def _empty(like: Tensor) -> Tensor:
    # not `empty_like`, which imports sympy for meta tensors, with which plans count activations
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _ranges(vocab: int, chunk: int) -> Iterator[tuple[int, int]]:
    ranges = [(first, min(first + chunk, vocab)) for first in range(0, vocab, chunk)]
    repeated = None if torch.compiler.is_compiling() else _REPEATED.get()  # torch 2.13 cannot compile the variable
    if repeated is None or len(ranges) < 4:
        yield from ranges
        return
    yield ranges[0]  # unlike later chunks, it has no tensors of a chunk before beside it
    with repeated(len(ranges) - 2):
        yield ranges[1]
    yield ranges[-1]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, first: int, last: int) -> Tensor:
    """Return the fp32 logits of a chunk, (tokens, last - first), as a new tensor."""
    return F.linear(hidden, weight[first:last], None if bias is None else bias[first:last]).float()


def _inside(targets: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return whether each target is in the chunk, (tokens,), and its index there clamped to the chunk, (tokens, 1)."""
    return (targets >= first) & (targets < last), (targets - first).clamp(0, last - first - 1)[:, None]
