"""The sizes of a GPT, and numbers computed from them.

Does not import torch, so that a wrong size is reported at once. The presets are files in `conf/model/`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from zero.core.schema import Section
from zero.core.setting_types import Positive, Rate, Rows, key
from zero.errors import ConfigError

UNIT_CLASSES = ("Block", "Attention", "MLP", "Embedding", "Linear", "RMSNorm", "LayerNorm")
"""Module classes of the GPT that own parameters. `zero.units` chooses among them."""

Channels = Annotated[int, Field(ge=1, le=2**24)]


class GPTConfig(Section):
    """The sizes of a GPT, a decoder-only transformer.

    Rotary embeddings rotate channels in pairs, so each head has an even number of channels.
    """

    section_key = "model"

    name: Literal["gpt"] = key("gpt", "kind of model")
    vocab: Rows = key(256, "number of tokens that the model knows", unit="tokens", example="50304")
    width: Channels = key(128, "channels of the residual stream", unit="channels", example="256 model.heads=8")
    layers: Annotated[int, Field(ge=1, le=10_000)] = key(3, "number of blocks", unit="blocks", example="8")
    heads: Channels = key(4, "attention heads; width / heads must be even", unit="heads", example="8")
    seq: Rows = key(
        128,
        "longest context, in tokens; also the length of a training row",
        unit="tokens",
        trades="memory and time: activations grow with it, attention's work with its square",
        example="512",
    )
    hidden: Channels | None = key(
        None,
        "channels inside the MLP; null: 4 x width for gelu, 8/3 x width rounded up to 64 for swiglu",
        unit="channels",
        example="768",
    )
    norm: Literal["rms", "layer"] = key("rms", "normalisation before each half of a block", example="layer")
    mlp: Literal["swiglu", "gelu"] = key("swiglu", "kind of MLP", example="gelu")
    chunked_loss: bool = key(
        True,
        "hold 32 MiB of logits at a time, in chunks of 64 or more entries of the vocabulary",
        trades="a large vocabulary's logits in memory against computing them a second time in backward",
        example="false",
    )
    tied: bool = key(True, "whether the head reuses the embedding's weight", example="false")
    rotary_base: Positive = key(10_000.0, "longest rotary wavelength", unit="2 pi tokens", example="500000")
    init_std: Rate = key(
        0.02,
        "standard deviation of fresh weights; residual projections get init_std / sqrt(2 x layers)",
        example="0.01",
    )

    @model_validator(mode="after")
    def _heads_have_pairs(self) -> Self:
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"model.width={self.width} does not split into model.heads={self.heads} heads "
                "of an even number of channels"
            )
        return self

    @property
    def mlp_width(self) -> int:
        """Channels inside the MLP: `hidden`, or its default."""
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
        """Floating point operations of forward and backward for one token of a row of `seq`, without recomputation.

        Source: Chowdhery et al. 2022, "PaLM", appendix B. An embedding that is only used for look-ups counts as zero.
        """
        looked_up = 0 if self.tied else self.vocab * self.width
        return 6 * (self.parameters_numel - looked_up) + 12 * self.layers * self.width * self.seq
