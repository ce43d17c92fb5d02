"""Sequence parallelism by heads (Ulysses): the ranks of a group share rows, and each holds a slice of their tokens.

Everything but attention treats tokens one by one, so a rank computes it for its own slice. `attention` exchanges slices
for heads: each rank gets all tokens of h / G heads, computes plain attention, and exchanges the result back. So
activations shrink by G, and a rank sends and receives about four slices of hidden states in each forward of attention.

    group = zero.sequence.open_group(world, 2)
    parallel = zero.sequence.SequenceParallel(group)
    inputs, targets = parallel.slice({"input_ids": ids, "labels": labels})    # rows that both ranks hold
    hidden = model(**inputs)                        # its layers call zero.sequence.attention(q, k, v, shared_rows)
    loss = parallel.loss(zero.losses.linear_cross_entropy(hidden, weight, targets, reduction="sum"), targets)

Letters: G ranks of a group, b rows, t tokens of a row, s = t / G tokens of a slice, h heads, d channels of a head.
Source: Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from collections.abc import Mapping
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero.attention import Documents, Scoring, causal_attention
from zero.core import checks
from zero.distributed.world import World
from zero.errors import ConfigError, HandshakeError
from zero.losses import IGNORE_INDEX
from zero.platform.files import memory_of


class SharedRows(NamedTuple):
    """Rows of which each rank of a group holds a slice of the tokens."""

    group: World
    documents: Documents | None = None
    """Tokens attend within their document only; None: each row is one document."""

    def packed(self, positions: Tensor) -> "SharedRows":
        """Return these rows with their documents, which begin where positions do not go on by one. Collective.

        Args:
            positions: (b, s), positions of this rank's tokens in their documents. The host waits for them.
        """
        everyone = self.group.exchange(positions.flatten().cpu(), what="positions of documents")
        whole = everyone.unflatten(1, positions.shape).transpose(0, 1).flatten(1)
        return self._replace(documents=_documents(whole, None))


def open_group(world: World, size: int) -> World:
    """Return this rank's group of `size` consecutive ranks, which share rows. Collective.

    Raises:
        ConfigError: `size` does not divide the number of ranks.
    """
    checks.instance("world", world, World, "Pass zero.open_world().")
    checks.whole("size of a group", size, None)
    if size < 1 or world.size % size:
        raise ConfigError(f"{world.size} ranks do not divide into groups of {size}. Choose another size.")
    first = world.rank // size * size
    return world.part(range(first, first + size), f"sequence of {size}")


def check_heads(heads: int, kv_heads: int, size: int, name: str = "sequence parallelism") -> None:
    """Raise ConfigError unless the heads divide over a group of `size` ranks.

    Args:
        kv_heads: heads of keys and values; fewer than `size` are repeated, if `size` is a multiple.
        name: the setting that the message names.
    """
    if heads % kv_heads:
        raise ConfigError(f"{name}: {heads} attention heads are no multiple of {kv_heads} heads of keys and values.")
    if heads % size:
        raise ConfigError(f"{name}: {heads} attention heads do not divide over {size} ranks. Choose a divisor.")
    if kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"{name}: {kv_heads} heads of keys and values can neither be divided over {size} ranks nor repeated for "
            "them. Choose a divisor or a multiple."
        )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: SharedRows,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention over whole rows for this rank's slice of tokens, (b, h, s, d). Collective in the group.

    Args:
        q: (b, h, s, d).
        k, v: (b, kv heads, s, d), where kv heads divide h.
        scale: factor of the scores; None: 1 / sqrt(d).
        dropout: the probability that a weight is set to zero; 0 with `softcap` or a window shorter than a document.
        window: number of tokens that a token sees, itself included (a sliding window); None: all before it.
        softcap: bound of the scores, softcap * tanh(score / softcap); None: no bound.
        sinks: (h,), a score of each head that takes a share of the weights and has no value; None: no sinks.

    Raises:
        ConfigError: a tensor has another shape, a number is out of range, dropout where it must be 0, or the heads do
            not divide over the ranks, see `check_heads`.
    """
    checks.instance("rows", rows, SharedRows, "Pass shared_rows of SequenceParallel.slice.")
    _check_shapes(q, k, v)
    _check_scoring(q, window, softcap, sinks)
    size, kv_heads = rows.group.size, k.shape[1]
    check_heads(q.shape[1], kv_heads, size)
    if kv_heads % size:
        k, v = (x.repeat_interleave(size // kv_heads, dim=1) for x in (k, v))
    if sinks is not None:
        sinks = sinks.chunk(size)[rows.group.rank]
    q, k, v = _Exchange.apply(rows.group, True, q, k, v)
    result = causal_attention(q, k, v, rows.documents, Scoring(scale, dropout, window, softcap, sinks))
    return _Exchange.apply(rows.group, False, result)[0]


def _check_shapes(*qkv: Tensor) -> None:
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else () for x in qkv]
    fits = all(len(shape) == 4 and (shape[0], shape[2]) == (shapes[0][0], shapes[0][2]) for shape in shapes)
    if not fits or shapes[0][3] != shapes[1][3] or shapes[1][1] != shapes[2][1]:
        raise ConfigError(
            f"attention: q, k and v have shapes {', '.join(map(str, shapes))}. Pass (rows, heads, tokens, channels)."
        )


def _check_scoring(q: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None) -> None:
    if window is not None:
        checks.whole("window", window, 1)
    if softcap is not None:
        checks.number("softcap", softcap, lambda bound: bound > 0, "above 0")
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ConfigError(
            f"sinks have shape {tuple(sinks.shape)}, but q has {q.shape[1]} heads. Pass one for each head."
        )


class _Exchange(torch.autograd.Function):
    """An all-to-all from slices of tokens to slices of heads, or back. Each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, group: World, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(group, to_heads, tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_exchanged(ctx.group, not ctx.to_heads, grads)


def _exchanged(group: World, to_heads: bool, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Exchange (b, h, s, d) for (b, h / G, t, d), or back. The exchanges are all started before the first is awaited.

    Tokens are outermost in the sent tensors, so whole rows arrive in the order of their tokens and are not copied
    again.
    """
    sent = [_by_head(x, group.size) if to_heads else _by_token(x, group.size) for x in tensors]
    received = [torch.empty_like(x) for x in sent]
    handles = [
        group.all_to_all(x.view(-1), into.view(-1), what="attention") for x, into in zip(sent, received, strict=True)
    ]
    for handle in handles:
        handle.wait()
    return tuple(
        x.flatten(0, 1).permute(1, 2, 0, 3) if to_heads else x.permute(2, 1, 0, 3, 4).flatten(2, 3).transpose(1, 2)
        for x in received
    )


def _by_head(x: Tensor, size: int) -> Tensor:
    """Return (b, h, s, d) as (G, s, b, h / G, d), whose part r rank r of the group gets."""
    return x.unflatten(1, (size, -1)).permute(1, 3, 0, 2, 4).contiguous()


def _by_token(x: Tensor, size: int) -> Tensor:
    """Return (b, h / G, t, d) as (G, s, b, h / G, d)."""
    return x.unflatten(2, (size, -1)).permute(2, 3, 0, 1, 4).contiguous()


class SequenceParallel:
    """Slices of rows, and the loss over them, for one rank of a group.

    Args:
        group: the ranks that share rows, see `open_group`.
    """

    def __init__(self, group: World) -> None:
        checks.instance("group", group, World, "Pass zero.sequence.open_group(world, 2).")
        self.group, self._compared = group, False
        self._rows: Tensor | None = None  # a hash of all rows so far

    def slice(self, batch: Mapping[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
        """Return the model's arguments and the targets for this rank's slice of rows that the whole group holds.

        Collective the first time, when the ranks compare their rows by name; `loss` compares a hash of later rows. A
        document begins where positions do not go on by one. Padding is a document of its own, and predicts nothing.

        Args:
            batch: `input_ids` and `labels`, (b, t) int64, where G divides t; if need be `position_ids`, (b, t), and
                `attention_mask`, (b, t), which is 0 for padding. Labels of tokens that do not count are -100.

        Returns:
            `input_ids` and `position_ids`, (b, s), and `shared_rows` for `attention`, by name; and the targets,
                (b, s): the label of the next token, also if that token is on another rank.

        Raises:
            ConfigError: `batch` has other keys, or G does not divide t; or a row has padding between its tokens.
            HandshakeError: the ranks of the group have different rows.
        """
        ids, labels, positions = _checked(batch, self.group.size)
        if not self._compared:
            hashes = {name: sha256(memory_of(tensor.cpu().contiguous())).hexdigest() for name, tensor in batch.items()}
            self.group.agree(hashes, "rows of a group")
            self._compared = True
        self._rows = _hashed(batch, self._rows)
        mask = batch.get("attention_mask")
        documents = None if mask is None and "position_ids" not in batch else _documents(positions, mask)
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        targets = targets if mask is None else targets.masked_fill(mask == 0, IGNORE_INDEX)
        own = [x.chunk(self.group.size, dim=1)[self.group.rank].contiguous() for x in (ids, positions, targets)]
        rows = SharedRows(self.group, documents)
        return {"input_ids": own[0], "position_ids": own[1], "shared_rows": rows}, own[2]

    def loss(self, total: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over all tokens of the group's rows that count. Collective.

        Its gradient is that of this rank's tokens, times G: the engine takes the mean over ranks.

        Args:
            total: the sum of the losses of this rank's tokens.
            targets: this rank's targets; tokens with -100 do not count, and a slice may have no others.

        Returns:
            A 0-dim tensor, equal on all ranks of the group; 0 if no token counts.

        Raises:
            ConfigError: an argument is no tensor, or `total` has dimensions.
            HandshakeError: on a CPU, the ranks of the group have different rows; on a GPU this ends the program.
        """
        checks.instance("total", total, Tensor, 'Pass the sum of the losses, a tensor: reduction="sum".')
        checks.instance("targets", targets, Tensor, "Pass the targets that slice returned.")
        if total.dim():
            raise ConfigError(f'total has shape {tuple(total.shape)}. Pass the sum of the losses: reduction="sum".')
        count, rows = (targets != IGNORE_INDEX).sum(), self._rows
        rows = count if rows is None else rows
        sums = torch.stack([count.double(), rows.double(), total.detach().double()])
        self.group.all_reduce(sums, what="counted tokens and losses").wait()
        if self._rows is not None:
            _check_rows(sums[1] == self.group.size * rows)
        count = sums[0].clamp(min=1)
        own = total * (self.group.size / count).to(total.dtype)
        return (sums[2] / count).to(total.dtype) + (own - own.detach())


def _hashed(batch: Mapping[str, Tensor], before: Tensor | None) -> Tensor:
    """Return a hash of a batch and of `before`: 0-dim int64, of 40 bits, so that its sum over ranks is exact in fp64.

    It is computed on the batch's device, and the host does not wait for it.
    """
    for _, values in sorted(batch.items()):
        mixed = values.flatten().long() + (0 if before is None else before)
        mixed = mixed * _MULTIPLIER
        mixed = (mixed ^ (mixed >> 31)) * torch.arange(1, 2 * len(mixed), 2, device=mixed.device)
        before = mixed.sum() & ((1 << 40) - 1)
    assert before is not None
    return before


_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number with mixed bits, as int64. Source: Knuth, "The Art of Computer Programming", volume 3, section 6.4."""


def _check_rows(equal: Tensor) -> None:
    if not equal.is_cpu:
        torch._assert_async(equal)  # the host does not wait for it
    elif not equal:
        raise HandshakeError("the ranks of a group have different rows. Give all ranks of a group the same batch.")


def _checked(batch: Mapping[str, Tensor], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, labels and positions, (b, t) each."""
    checks.instance("a batch", batch, Mapping, "Pass a dict of input_ids and labels.")
    known = {"input_ids", "labels", "position_ids", "attention_mask"}
    if not known >= batch.keys() >= {"input_ids", "labels"}:
        raise ConfigError(
            f"a batch with {', '.join(sorted(map(str, batch)))} cannot be sliced. Pass input_ids, labels and, if need "
            "be, position_ids and attention_mask."
        )
    for name, rows in batch.items():
        checks.instance(name, rows, Tensor, "Pass a tensor, (rows, tokens).")
    ids, labels = batch["input_ids"], batch["labels"]
    if ids.dim() != 2:
        raise ConfigError(f"input_ids has shape {tuple(ids.shape)}. Pass (rows, tokens).")
    for name in ("labels", "attention_mask"):
        if name in batch and batch[name].shape != ids.shape:
            raise ConfigError(
                f"{name} has shape {tuple(batch[name].shape)}, but input_ids {tuple(ids.shape)}. Pass one per token."
            )
    if ids.shape[1] % size or not ids.shape[1]:
        raise ConfigError(f"rows of {ids.shape[1]} tokens do not divide into {size} slices. Pad or cut them.")
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)
    if positions.shape not in (ids.shape, (1, ids.shape[1]), ids.shape[1:]):
        raise ConfigError(
            f"position_ids has shape {tuple(positions.shape)}, but input_ids {tuple(ids.shape)}. Pass one per token."
        )
    for name, rows in {"input_ids": ids, "labels": labels, "position_ids": positions}.items():
        if rows.is_floating_point():
            raise ConfigError(f"{name} is {rows.dtype}. Pass whole numbers: {name}.long().")
    return ids, labels, positions.expand_as(ids)


def _documents(positions: Tensor, mask: Tensor | None) -> Documents:
    """Return the documents of rows; the host waits for the device."""
    begins = F.pad(positions[:, 1:] != positions[:, :-1] + 1, (1, 0), value=True)
    if mask is not None:
        turns = mask[:, 1:] != mask[:, :-1]
        resumes = turns & (mask[:, 1:] != 0) & (mask[:, :-1].cummax(dim=1).values != 0)
        if (resumes & ~begins[:, 1:]).any():
            raise ConfigError(
                "attention_mask: a row has padding between its tokens. Pass position_ids that begin anew after it."
            )
        begins[:, 1:] = turns | (begins[:, 1:] & (mask[:, 1:] != 0))
    tokens = positions.shape[1]
    return tuple(
        tuple(stop - start for start, stop in pairwise([*row.nonzero().flatten().tolist(), tokens]))
        for row in begins.cpu()
    )
