"""A modern GPT: rotary positions, pre-norm blocks, one matrix for q, k and v, gated MLP, no biases.

Every parameter belongs to a module that has `reset_parameters`, so a model built on meta can be filled unit by unit.
Parameters may be fp32, bf16 or fp16; rotation and cross entropy are computed in fp32 in any case.

Dimensions: b rows, t tokens, h heads, d channels of a head, c channels of the residual stream.
Sources: Su et al. 2021 (rotary); Zhang and Sennrich 2019 (RMSNorm); Shazeer 2020 (SwiGLU); Radford et al. 2019 (scaled
initialisation of residual projections).
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from zero.errors import ConfigError
from zero.losses import linear_cross_entropy
from zero.sequence import SharedRows, attention
from zero.trainer.models.gpt_config import GPTConfig


class Linear(nn.Linear):
    """A linear layer without bias, initialised with a normal distribution of standard deviation `std`.

    With `targets` its forward returns the mean cross entropy of the outputs, see `linear_cross_entropy`.
    """

    def __init__(self, inputs: int, outputs: int, *, std: float) -> None:
        self.std = std  # before super(): nn.Linear fills its weight as it is built
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor, targets: Tensor | None = None, chunk: Literal["auto"] | None = "auto") -> Tensor:
        if targets is None:
            return super().forward(x)
        return linear_cross_entropy(x, self.weight, targets, chunk)


class Embedding(nn.Embedding):
    """An embedding, initialised like `Linear`, so that a tied weight may be reset through either module."""

    def __init__(self, vocab: int, width: int, *, std: float) -> None:
        self.std = std
        super().__init__(vocab, width)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


def _norm(config: GPTConfig) -> nn.Module:
    return nn.LayerNorm(config.width) if config.norm == "layer" else nn.RMSNorm(config.width, eps=1e-5)


class Rotary(nn.Module):
    """Rotary position embedding: rotates pairs of channels by an angle proportional to the position.

    Its tables are two fp32 buffers; it has no parameters.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_width: int, seq: int, *, base: float) -> None:
        super().__init__()
        self.head_width, self.seq, self.base = head_width, seq, base
        self._fill(torch.get_default_device())

    def _fill(self, device: torch.device) -> None:
        # fp64 on the CPU, so that the tables have the same bits on every device
        pair = torch.arange(0, self.head_width, 2, dtype=torch.float64, device="cpu") / self.head_width
        angle = torch.outer(torch.arange(self.seq, dtype=torch.float64, device="cpu"), self.base**-pair)
        self.register_buffer("cos", angle.cos().float().to(device), persistent=False)
        self.register_buffer("sin", angle.sin().float().to(device), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Rotary":
        # `.to(bfloat16)` would round the tables and `.to_empty` would leave garbage in them
        super()._apply(fn, recurse)
        self._fill(self.cos.device)
        return self

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        """Rotate x, (b, h, t, d), at positions from `first` on. Computes in fp32 and returns the dtype of x."""
        places = slice(first, first + x.shape[-2])
        cos, sin = self.cos[places], self.sin[places]
        left, right = x.float().chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig, rotary: Rotary) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.width, 3 * config.width, std=config.init_std)
        self.out = Linear(config.width, config.width, std=config.init_std / math.sqrt(2 * config.layers))
        self.rotary = rotary

    def forward(self, x: Tensor, shared_rows: SharedRows | None = None) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b t (qkv h d) -> qkv b h t d", qkv=3, h=self.heads)
        if shared_rows is None:
            y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        else:
            first = shared_rows.group.rank * x.shape[1]
            y = attention(self.rotary(q, first), self.rotary(k, first), v, shared_rows)
        return self.out(rearrange(y, "b h t d -> b t (h d)"))


class MLP(nn.Module):
    """A two-layer MLP; with swiglu the first layer returns a gate and a value."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.up = Linear(config.width, config.mlp_width * (2 if self.gated else 1), std=config.init_std)
        self.down = Linear(config.mlp_width, config.width, std=config.init_std / math.sqrt(2 * config.layers))

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(F.gelu(self.up(x)))
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    """A pre-norm block: attention, then MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(config), Attention(config, rotary)
        self.mlp_norm, self.mlp = _norm(config), MLP(config)

    def forward(self, x: Tensor, shared_rows: SharedRows | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), shared_rows)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer.

    Its forward maps tokens (b, t) int64 to logits (b, t, vocab) in the parameters' dtype. With targets (b, t) int64 it
    returns their mean cross entropy, 0-dim fp32, without holding all logits at once if `config.chunked_loss` is set.
    With `shared_rows` the tokens are this rank's slice of rows that a group of ranks shares, see `zero.sequence`.

    Raises:
        ConfigError: rows of more than `config.seq` tokens.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        rotary = Rotary(config.width // config.heads, config.seq, base=config.rotary_base)
        self.embed = Embedding(config.vocab, config.width, std=config.init_std)
        self.blocks = nn.ModuleList(Block(config, rotary) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = Linear(config.width, config.vocab, std=config.init_std)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None, shared_rows: SharedRows | None = None) -> Tensor:
        length = tokens.shape[1] * (1 if shared_rows is None else shared_rows.group.size)
        if length > self.config.seq:
            raise ConfigError(
                f"{length} tokens do not fit model.seq={self.config.seq}. Raise model.seq or cut the text."
            )
        x, extra = self.embed(tokens), () if shared_rows is None else (shared_rows,)
        for block in self.blocks:
            x = block(x, *extra)
        return self.head(self.norm(x), targets, "auto" if self.config.chunked_loss else None)


def loss(model: Callable[..., Tensor], batch: Tensor, shared_rows: SharedRows | None = None) -> Tensor:
    """Return the mean cross entropy over next tokens, in nats, fp32.

    Args:
        model: a `GPT`, or a function that maps tokens (b, t) and targets (b, t) to their mean cross entropy.
        batch: (b, t + 1) int64; each row contains both inputs and targets.
        shared_rows: the rows of which `batch` is a slice; None: `batch` has whole rows.
    """
    extra = () if shared_rows is None else (shared_rows,)
    return model(batch[:, :-1], batch[:, 1:], *extra)


def generate(
    forward: Callable[[Tensor], Tensor],
    prompt: Tensor,
    n: int,
    *,
    seq: int,
    temperature: float = 1.0,
    seed: int = 0,
    stopped: Callable[[], bool] = lambda: False,
    end: int | None = None,
) -> Tensor:
    """Append n generated tokens to each row of the prompt.

    `forward` is called once per token, and tokens are drawn with a generator of this function on the CPU, so ranks that
    call it together make the same calls and get the same tokens.

    Args:
        forward: maps tokens (b, t) with t <= seq to logits (b, t, vocab); a module, or the result of `make_forward`.
        prompt: (b, t) int64, t >= 1; the model sees only its last seq tokens.
        temperature: 0 takes the most likely token.
        stopped: called before each token; the generation ends early when it returns true.
        end: the token behind which the generation ends, if it is drawn in all rows; None: no token.

    Returns:
        (b, t + n) int64 on the prompt's device, prompt included; fewer columns if it ended early.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    tokens = prompt
    with torch.no_grad():
        for _ in range(n):
            if stopped():
                break
            logits = forward(tokens[:, -seq:])[:, -1].float().cpu()
            if temperature == 0:
                chosen = logits.argmax(dim=-1, keepdim=True)
            else:
                below = logits - logits.amax(dim=-1, keepdim=True)  # else a tiny temperature makes infinities
                chosen = torch.multinomial((below / temperature).softmax(dim=-1), 1, generator=generator)
            tokens = torch.cat((tokens, chosen.to(tokens.device)), dim=1)
            if end is not None and bool((chosen == end).all()):
                break
    return tokens
