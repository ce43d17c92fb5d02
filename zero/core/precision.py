"""Which dtype each thing has.

Parameters are kept, and gradients added, in fp32 (the master, see `zero.core.master`); the model computes in `compute`;
ranks exchange gradients in `reduce`.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from zero.core.loss_scale import LossScaling
from zero.core.master import Master, SplitMaster, WholeMaster
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
        master: how the fp32 master is kept beside half-precision parameters: "split", as the 16 bits that a bf16
            parameter lacks; "whole", in 4 bytes a parameter; "auto": split with "bf16", whole with "fp16". The bits of
            a run are the same either way.

    Raises:
        ConfigError: an unknown name, a loss scale other than 1 where compute is not fp16, or a split master where
            compute is not bf16.
    """

    compute: torch.dtype
    """What the model's parameters are gathered in."""
    reduce: torch.dtype
    """What gradients travel between ranks in; they are added in fp32."""
    scale: LossScaling
    """Dynamic for fp16 unless given, else a static 1."""
    master: Master
    """What the optimizer updates, fp32 always, and how it is kept."""

    def __init__(
        self,
        compute: str = "fp32",
        *,
        reduce: str = "fp32",
        scale: LossScaling | None = None,
        master: Literal["auto", "split", "whole"] = "auto",
    ) -> None:
        if scale is None:
            scale = LossScaling() if compute == "fp16" else LossScaling(static=1.0)
        object.__setattr__(self, "compute", _dtype("compute", compute))
        object.__setattr__(self, "reduce", _dtype("reduce", reduce))
        object.__setattr__(self, "scale", scale)
        if self.compute != torch.float16 and scale.static != 1.0:
            raise ConfigError(f"precision.scale is for fp16; {compute} has fp32's range, so remove it")
        object.__setattr__(self, "master", _master(compute, master))

    @property
    def has_master(self) -> bool:
        """The old name of a question to `master`; it goes with the next version."""
        warnings.warn("Precision.has_master is Precision.master.kind is not None now", DeprecationWarning, stacklevel=2)
        return self.master.kind is not None


def _master(compute: str, how: str) -> Master:
    if how not in ("auto", "split", "whole"):
        raise ConfigError(f"precision.master={how}: it is one of auto, split, whole")
    if how == "split" and compute != "bf16":
        raise ConfigError(
            f"precision.master=split with precision.compute={compute}: a bf16 parameter alone is half of its master; "
            "set precision.master=auto"
        )
    if compute == "fp32":
        return Master()
    return SplitMaster() if compute == "bf16" and how != "whole" else WholeMaster()


def _digits(word: str) -> list[str]:
    return sorted(filter(str.isdigit, word))


def _dtype(key: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        word = str(name).removeprefix("torch.")
        alike = [known for known in DTYPES if _digits(known) == _digits(word)]  # fp8 is no misspelling of fp32
        hint = meant(word, alike, cutoff=0.4) or f"; known: {', '.join(DTYPES)}"
        raise ConfigError(f"precision.{key}={name}{hint}")
    return DTYPES[name]
