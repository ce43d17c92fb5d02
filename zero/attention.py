"""Causal attention of whole rows: within documents, in a sliding window, with sinks and capped scores.

Plain attention calls torch's fused kernel. A window or a cap is computed in blocks of queries: a block reads only the
keys that its queries see, and backward computes the block again. So memory is linear in the tokens of a row, and no
mask of all pairs of tokens is made. Packed documents take one kernel of variable lengths on a GPU that has it,
otherwise one document after the other.

Letters: b rows, t tokens, h heads, d channels of a head.
Sources: Beltagy et al. 2020, "Longformer" (windows); Xiao et al. 2023, "Efficient Streaming Language Models with
Attention Sinks"; Gemma Team 2024, "Gemma 2" (capped scores); Rabe and Staats 2021, "Self-attention Does Not Need O(n^2)
Memory".
"""

from collections.abc import Iterator
from inspect import signature
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero.errors import ConfigError

Documents = tuple[tuple[int, ...], ...]
"""For each row, the tokens of its documents."""

BLOCK = 1024
"""The most queries of a block."""

SCORES_NUMEL, LEAST_BLOCK = 2**23, 64
"""Capped scores that are held at once (32 MiB of fp32), and the fewest queries of a block of them."""

SINK_CHANNELS = 8
"""Channels that a sink adds to a head. One is enough, but the kernels of GPUs take multiples of 8."""

VARLEN_CHANNELS = 256
"""The most channels of a head in torch's kernel of variable lengths."""


class Scoring(NamedTuple):
    """The way from scores to weights.

    Attributes:
        scale: factor of the scores; None: 1 / sqrt(d).
        dropout: the probability that a weight is set to zero.
        window: number of tokens that a query sees, itself included; None: all before it.
        softcap: scores are bounded by it: softcap * tanh(score / softcap); None: they are not.
        sinks: (h,), a score of each head that takes a share of the weights and has no value; None: no sinks.
    """

    scale: float | None = None
    dropout: float = 0.0
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, scoring: Scoring) -> Tensor:
    """Return causal attention within each document, (b, h, t, d).

    Args:
        q: (b, h, t, d).
        k, v: (b, kv heads, t, d), where kv heads divide h.
        documents: their tokens add up to t in each row; None: each row is one document.

    Raises:
        ConfigError: dropout with a cap, or with a window that is shorter than a document.
    """
    if documents is None:
        return _of_document(q, k, v, scoring)
    if _takes_varlen(q, v, documents, scoring):
        return _of_lengths(q, k, v, tuple(chain.from_iterable(documents)), scoring)
    if len(set(documents)) > 1:
        rows = zip(q.split(1), k.split(1), v.split(1), documents, strict=True)
        return torch.cat([causal_attention(q, k, v, (tokens,), scoring) for q, k, v, tokens in rows])
    q_parts, k_parts, v_parts = (x.split(documents[0], dim=2) for x in (q, k, v))
    parts = zip(q_parts, k_parts, v_parts, strict=True)
    return torch.cat([_of_document(q, k, v, scoring) for q, k, v in parts], dim=2)


def _takes_varlen(q: Tensor, v: Tensor, documents: Documents, scoring: Scoring) -> bool:
    """Return whether torch's kernel of variable lengths computes these documents.

    It has no caps, sinks and dropout. A GPU that lacks it computes in fp16, not in bf16.
    """
    plain = scoring.softcap is None and scoring.sinks is None and not scoring.dropout
    channels = q.shape[-1]
    fits = (
        not q.is_cpu and q.dtype == torch.bfloat16 and channels == v.shape[-1] <= VARLEN_CHANNELS and not channels % 8
    )
    longest = max(chain.from_iterable(documents))
    return plain and fits and (scoring.window is None or longest <= scoring.window) and _varlen_groups_heads()


def _varlen_groups_heads() -> bool:
    """Return whether the kernel takes fewer heads of keys than of queries; older releases of torch lack this."""
    from torch.nn.attention.varlen import varlen_attn  # imports torch's compiler

    return "enable_gqa" in signature(varlen_attn).parameters


def _of_lengths(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scoring: Scoring) -> Tensor:
    """Return attention of documents of all rows in one call."""
    from torch.nn.attention.varlen import varlen_attn

    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
    longest, (rows, heads, tokens, _) = max(lengths), q.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    how: dict[str, Any] = {"scale": scoring.scale, "window_size": (-1, 0), "enable_gqa": heads != k.shape[1]}
    result = varlen_attn(q, k, v, ends, ends, longest, longest, **how)
    assert isinstance(result, Tensor)
    return result.view(rows, tokens, heads, -1).transpose(1, 2)


def _of_document(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
    scale, dropout, window, softcap, sinks = scoring
    if softcap is not None or (window is not None and window < q.shape[2]):
        if dropout:
            raise ConfigError(f"attention has no dropout={dropout} with a window or capped scores. Set it to 0.")
        arguments = (q, k, v) if sinks is None else (q, k, v, sinks)
        result: Tensor = _InBlocks.apply(scoring._replace(sinks=None), *arguments)
        return result
    if sinks is not None:
        scale, channels = _scale(q, scoring), v.shape[-1]
        q, k, v = _with_sink(q, k, v, sinks, scale)
        q = F.pad(q, (0, 0, 1, 0))  # a query in the place of the sink, so that the causal mask of the kernel fits
        return _of_document(q, k, v, Scoring(scale, dropout))[:, :, 1:, :channels]
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, scale=scale, dropout_p=dropout)


def _scale(q: Tensor, scoring: Scoring) -> float:
    return q.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale


def _with_sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with one more key in front, whose score is the head's sink and whose value is 0.

    The channel that makes this score is 0 in all other keys. Heads that share keys have sinks of their own, so the sink
    is in the queries.
    """
    channels, (rows, _, tokens, d) = F.pad((sinks / scale).to(q.dtype)[:, None, None], (0, SINK_CHANNELS - 1)), q.shape
    q = torch.cat((q, channels.expand(rows, -1, tokens, -1)), dim=-1)
    k, v = (F.pad(x, (0, SINK_CHANNELS, 1, 0)) for x in (k, v))
    k[:, :, 0, d] = 1
    return q, k, v


class _InBlocks(torch.autograd.Function):
    """Attention in blocks of queries. Only its arguments are kept for backward."""

    @staticmethod
    def forward(ctx: Any, scoring: Scoring, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        ctx.scoring = scoring
        ctx.save_for_backward(q, k, v, *sinks)
        blocks = _blocks(scoring, q)
        results = [_of_block(scoring, q[:, :, own], k[:, :, seen], v[:, :, seen], *sinks) for own, seen in blocks]
        return torch.cat(results, dim=2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, *sinks = ctx.saved_tensors
        for_q, summed = torch.empty_like(q), (k, v, *sinks)
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in summed]
        for own, seen in _blocks(ctx.scoring, q):
            parts = [x.detach().requires_grad_() for x in (q[:, :, own], k[:, :, seen], v[:, :, seen], *sinks)]
            with torch.enable_grad():
                result = _of_block(ctx.scoring, *parts)
            for_q[:, :, own], *others = torch.autograd.grad(result, parts, grad[:, :, own])
            for total, gradient in zip((sums[0][:, :, seen], sums[1][:, :, seen], *sums[2:]), others, strict=True):
                total += gradient
        return None, for_q, *(total.to(x.dtype) for total, x in zip(sums, summed, strict=True))


def _blocks(scoring: Scoring, q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each block, and the keys that they see."""
    rows, heads, tokens, _ = q.shape
    size, window = BLOCK, tokens if scoring.window is None else scoring.window
    if scoring.softcap is not None:
        size = min(BLOCK, max(LEAST_BLOCK, SCORES_NUMEL // (rows * heads * tokens)))
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        yield slice(start, stop), slice(max(0, start - window + 1), stop)


def _of_block(scoring: Scoring, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return attention of queries that are the last tokens of the keys."""
    scale, softcap, window, channels = _scale(q, scoring), scoring.softcap, scoring.window, v.shape[-1]
    if q.shape[1] != k.shape[1]:  # fused kernels of GPUs take a mask or grouped heads, not both
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    places = torch.arange(k.shape[2], device=q.device)
    distance = places[-q.shape[2] :, None] - places
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    if softcap is None:
        if sinks is not None:
            q, k, v = _with_sink(q, k, v, sinks, scale)
            hidden = F.pad(hidden, (1, 0))
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
        return _fused(q, k, v, mask, scale)[..., :channels]
    scores = (softcap * torch.tanh((q @ k.mT).float() * (scale / softcap))).masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    return scores.softmax(dim=-1)[..., : k.shape[2]].to(v.dtype) @ v


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    if q.is_meta:  # a trace of memory, for which torch would choose the kernel that stores all scores
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(q, k, v, 0.0, False, attn_mask=mask, scale=scale)[0]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
