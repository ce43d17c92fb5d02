"""The dtypes of a run.

The master is stored, and gradients are added, in fp32 (see `zero.core.master`). The model computes in the dtype
`compute`. Ranks exchange gradients in the dtype `reduce`.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from zero.core import checks
from zero.core.formats import PACKED_FORMATS, PackedFormat
from zero.core.loss_scale import LossScaling
from zero.core.master import Master, SplitMaster, WholeMaster
from zero.errors import ConfigError

DTYPES = MappingProxyType({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16})


@dataclass(frozen=True, init=False)
class Precision:
    """The dtypes of a run, named "fp32", "bf16" or "fp16".

    Args:
        compute: dtype of gathered parameters, forward and backward; default "fp32".
        reduce: dtype in which ranks exchange gradients, or `compute` if that is narrower; they are added in fp32.
            Default "fp32".
        scale: loss scaling; by default dynamic with "fp16", none otherwise.
        master: how the fp32 master is stored beside half-precision parameters: "split": the 16 bits that a bf16
            parameter lacks, 2 bytes a parameter; "whole": 4 bytes a parameter; "auto": split with "bf16", whole with
            "fp16". A run gives the same bits either way.
        frozen: how parameters that do not train are stored: "compute": in the dtype of compute; "nf4" or "int8": as
            codes that each gather expands, see `zero.core.formats`.
        coded: patterns of the names of the parameters that are stored as codes; by default all frozen matrices except
            embeddings and heads, see `zero.engine.model.coded`.

    Raises:
        ConfigError: an unknown name, a loss scale other than 1 where compute is not fp16, a split master where compute
            is not bf16, or `coded` without codes.
    """

    compute: torch.dtype
    reduce: torch.dtype
    scale: LossScaling
    """Loss scaling; by default dynamic for fp16, else a static scale of 1."""
    master: Master
    frozen: PackedFormat | None
    """The format of frozen parameters; None: the dtype of compute."""
    coded: tuple[str, ...]

    def __init__(
        self,
        compute: str = "fp32",
        *,
        reduce: str = "fp32",
        scale: LossScaling | None = None,
        master: Literal["auto", "split", "whole"] = "auto",
        frozen: Literal["compute", "nf4", "int8"] = "compute",
        coded: Sequence[str] = (),
    ) -> None:
        if scale is None:
            scale = LossScaling() if compute == "fp16" else LossScaling(static=1.0)
        checks.instance("precision.scale", scale, LossScaling, "Write zero.LossScaling(static=1024).")
        object.__setattr__(self, "compute", _dtype("compute", compute))
        object.__setattr__(self, "reduce", _dtype("reduce", reduce))
        object.__setattr__(self, "scale", scale)
        if self.compute != torch.float16 and scale.static != 1.0:
            raise ConfigError(f"precision.scale is for fp16, but {compute} has the range of fp32. Remove it.")
        object.__setattr__(self, "master", _master(compute, master))
        checks.one_of("precision.frozen", frozen, ("compute", *PACKED_FORMATS))
        coded = checks.patterns("precision.coded", coded)
        if coded and frozen == "compute":
            raise ConfigError("precision.coded needs a format. Set precision.frozen=nf4, or remove it.")
        object.__setattr__(self, "frozen", PACKED_FORMATS.get(frozen))
        object.__setattr__(self, "coded", coded)


def _master(compute: str, form: str) -> Master:
    checks.one_of("precision.master", form, ("auto", "split", "whole"))
    if form == "split" and compute != "bf16":
        raise ConfigError(
            f"precision.master=split with precision.compute={compute}: a bf16 parameter alone is half of its master. "
            "Set precision.master=auto."
        )
    if compute == "fp32":
        return Master()
    return SplitMaster() if compute == "bf16" and form != "whole" else WholeMaster()


def _dtype(key: str, name: str) -> torch.dtype:
    return DTYPES[checks.one_of(f"precision.{key}", name, DTYPES)]
