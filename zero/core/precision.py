"""The dtypes of a run.

Parameters are kept, and gradients added, in fp32 (the master, see `zero.core.master`); the model computes in `compute`;
ranks exchange gradients in `reduce`.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from zero.core.loss_scale import LossScaling
from zero.core.master import Master, SplitMaster, WholeMaster
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
    reduce: torch.dtype
    scale: LossScaling
    """Dynamic for fp16 by default, else a static 1."""
    master: Master

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
            raise ConfigError(f"precision.scale is for fp16; {compute} has fp32's range. Remove it.")
        object.__setattr__(self, "master", _master(compute, master))


def _master(compute: str, form: str) -> Master:
    if form not in ("auto", "split", "whole"):
        raise ConfigError(f"precision.master={form}: must be one of auto, split, whole")
    if form == "split" and compute != "bf16":
        raise ConfigError(
            f"precision.master=split with precision.compute={compute}: a bf16 parameter alone is half of its master. "
            "Set precision.master=auto."
        )
    if compute == "fp32":
        return Master()
    return SplitMaster() if compute == "bf16" and form != "whole" else WholeMaster()


def _dtype(key: str, name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"precision.{key}={name}: must be one of {', '.join(DTYPES)}")
    return DTYPES[name]
