"""Which dtype each thing has.

Parameters are kept, and gradients added, in fp32 (the master); the model computes in `compute`; ranks exchange
gradients in `reduce`.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch

from zero.core.loss_scale import LossScaling
from zero.core.suggest import meant
from zero.errors import ConfigError

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


@dataclass(frozen=True, init=False)
class Precision:
    """The dtypes of a run, named "fp32", "bf16" or "fp16".

    Args:
        compute: what the model's parameters are gathered in, and what forward and backward compute in; default "fp32".
        reduce: the widest dtype in which gradients travel between ranks; they are added in fp32. Default "fp32".
        scale: loss scaling; by default dynamic with "fp16", none otherwise.

    Raises:
        ConfigError: an unknown name, or a loss scale other than 1 where compute is not fp16.
    """

    compute: torch.dtype
    """What the model's parameters are gathered in."""
    reduce: torch.dtype
    """What gradients travel between ranks in; they are added in fp32."""
    scale: LossScaling
    """Dynamic for fp16 unless given, else a static 1."""

    def __init__(self, compute: str = "fp32", *, reduce: str = "fp32", scale: LossScaling | None = None) -> None:
        if scale is None:
            scale = LossScaling() if compute == "fp16" else LossScaling(static=1.0)
        object.__setattr__(self, "compute", _dtype("compute", compute))
        object.__setattr__(self, "reduce", _dtype("reduce", reduce))
        object.__setattr__(self, "scale", scale)
        if self.compute != torch.float16 and scale.static != 1.0:
            raise ConfigError(f"precision.scale is for fp16; {compute} has fp32's range, so remove it")

    @property
    def master(self) -> torch.dtype:
        """What the optimizer updates: fp32 always."""
        return torch.float32

    @property
    def has_master(self) -> bool:
        """Whether the master is a tensor of its own, because compute is a half type."""
        return self.compute != self.master


def _dtype(key: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        hint = meant(str(name), DTYPES, cutoff=0.3) or f"; known: {', '.join(DTYPES)}"
        raise ConfigError(f"precision.{key}={name}{hint}")
    return DTYPES[name]
