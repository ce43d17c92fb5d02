"""The keys of `optimizer.params`: a class for each type of optimizer, with DeepSpeed's defaults."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from zero.core.schema import Section
from zero.core.setting_types import Fraction, NonNegative, Rate
from zero.deepspeed.config.key_types import Betas, means, to


class OptimizerKeys(Section):
    """Keys that all optimizers have; `name` is the corresponding optimizer of this library."""

    section_key: ClassVar[str] = "optimizer.params"
    name: ClassVar[str]

    lr: Rate = to("optim.lr", 1e-3)
    weight_decay: NonNegative = to("optim.weight_decay", 0.0)


class LionKeys(OptimizerKeys):
    """Keys of Lion."""

    name: ClassVar[str] = "lion"

    betas: Betas = means("`optim.beta1`, `optim.beta2`", (0.9, 0.999))


class AdamWKeys(LionKeys):
    """Keys of AdamW and Adam. Adam's weight decay is decoupled too, unless `adam_w_mode` is false."""

    name: ClassVar[str] = "adamw"

    eps: NonNegative = to("optim.eps", 1e-8)
    adam_w_mode: bool = means("false with Adam: `optim=adam`", True)
    torch_adam: bool = means("torch's default of `weight_decay`", False)
    bias_correction: Literal[True] = means("only true", True)
    amsgrad: Literal[False] = means("only false", False)


class MuonKeys(LionKeys):
    """Keys of Muon, which updates matrices, and of the AdamW beside it."""

    name: ClassVar[str] = "muon"

    lr: Rate = to("optim.lr", 0.02)
    betas: Betas = means("`optim.beta1`, `optim.beta2`, of AdamW", (0.9, 0.95))
    eps: NonNegative = to("optim.eps", 1e-10)
    momentum: Fraction = to("optim.momentum", 0.95)
    muon_lr: Rate | None = means("`optim.lr`; wins over `lr`", None)
    adam_lr: Rate | None = means("`optim.adamw_lr`; without it `lr`, or 3e-4", None)
    ns_method: Literal["gram", "standard"] = means("ignored: two ways to the same iteration", "gram")


class AdagradKeys(OptimizerKeys):
    """Keys of Adagrad."""

    name: ClassVar[str] = "adagrad"

    lr: Rate = to("optim.lr", 1e-2)
    eps: NonNegative = to("optim.eps", 1e-10)


class SgdKeys(OptimizerKeys):
    """Keys of SGD."""

    name: ClassVar[str] = "sgd"

    momentum: Fraction = to("optim.momentum", 0.0)
    nesterov: bool = to("optim.nesterov", False)


OPTIMIZER_KEYS: Mapping[str, type[OptimizerKeys]] = {
    "Adam": AdamWKeys, "AdamW": AdamWKeys, "Lion": LionKeys, "Adagrad": AdagradKeys, "SGD": SgdKeys, "Muon": MuonKeys
}  # fmt: skip
"""Value of `optimizer.type` -> class of its keys. A config may write it in upper or lower case."""
