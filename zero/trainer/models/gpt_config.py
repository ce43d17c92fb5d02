"""The sizes of a GPT and what can be said about them without building one.

No torch here: a wrong size is refused before torch is imported. The presets are data in `conf/model/`.
"""

from dataclasses import dataclass
from typing import Literal

from zero.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A decoder-only transformer.

    Raises:
        ConfigError: a size is not positive, or `width` does not split into heads of an even number of channels
            (rotary turns channels in pairs).
    """

    vocab: int = 256
    """Number of tokens that the model knows."""
    width: int = 192
    """Channels of the residual stream."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 6
    """Attention heads; each has width / heads channels."""
    seq: int = 256
    """Longest context, in tokens; also the length of the rotary tables."""
    hidden: int | None = None
    """Channels inside the MLP. None: 4 x width for gelu, 8/3 x width rounded up to 64 for swiglu (equal weights)."""
    norm: Literal["rms", "layer"] = "rms"
    """Normalisation before each half of a block."""
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """Kind of MLP."""
    tied: bool = True
    """Whether the head reuses the embedding's weight."""
    rotary_base: float = 10_000.0
    """Longest rotary wavelength, in units of 2 pi tokens."""
    init_std: float = 0.02
    """Standard deviation of fresh weights; residual projections get init_std / sqrt(2 x layers)."""

    def __post_init__(self) -> None:
        for key in ("vocab", "width", "layers", "heads", "seq"):
            if getattr(self, key) < 1:
                raise ConfigError(f"model.{key}={getattr(self, key)} must be at least 1")
        if self.hidden is not None and self.hidden < 1:
            raise ConfigError(f"model.hidden={self.hidden} must be at least 1, or null for the usual size")
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"model.width={self.width} does not split into model.heads={self.heads} heads "
                "of an even number of channels"
            )
        for key, allowed in (("norm", ("rms", "layer")), ("mlp", ("swiglu", "gelu"))):
            if getattr(self, key) not in allowed:
                raise ConfigError(f"model.{key}={getattr(self, key)} must be one of {', '.join(allowed)}")
        for key in ("rotary_base", "init_std"):
            if not 0 < getattr(self, key) < float("inf"):
                raise ConfigError(f"model.{key}={getattr(self, key)} must be a positive number")

    @property
    def mlp_width(self) -> int:
        """Channels inside the MLP, after defaults."""
        if self.hidden is not None:
            return self.hidden
        if self.mlp == "gelu":
            return 4 * self.width
        return -(-8 * self.width // (3 * 64)) * 64

    @property
    def parameters_numel(self) -> int:
        """Number of trained values; a tied weight counts once."""
        norm = self.width * (2 if self.norm == "layer" else 1)
        matrices = 4 * self.width + self.mlp_width * (3 if self.mlp == "swiglu" else 2)
        tables = self.vocab * self.width * (1 if self.tied else 2)
        return self.layers * (self.width * matrices + 2 * norm) + norm + tables

    @property
    def flops_per_token(self) -> int:
        """Floating point operations of forward and backward for one token of a row of `seq`, remat not counted.

        Source: Chowdhery et al. 2022, "PaLM", appendix B. A table that is only looked things up in costs nothing.
        """
        looked_up = 0 if self.tied else self.vocab * self.width
        return 6 * (self.parameters_numel - looked_up) + 12 * self.layers * self.width * self.seq
