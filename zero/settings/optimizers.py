"""Settings of each optimizer, with the defaults of `zero.adamw` and the others, which are torch's.

They are apart from `zero.core.optimizers`, because settings are checked before torch is imported.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from zero.core.schema import Section
from zero.core.setting_types import EXCLUDED, Adjust, Fraction, Names, NonNegative, Positive, Rate, key
from zero.errors import ConfigError


class OptimizerSection(Section):
    """The settings of an optimizer, by its name."""

    if TYPE_CHECKING:
        name: str
    lr: Rate = key(1e-3, "peak learning rate; the schedule scales it", example="3e-4")
    weight_decay: NonNegative = key(0.0, "pull towards zero, per step and unit of learning rate", example="0.1")
    decay: Literal["matrices", "all"] = key(
        "matrices",
        "parameters with weight decay: matrices (2 or more dimensions: no norms, no biases) or all",
        example="all",
    )
    clip: Positive | None = key(
        None,
        "largest global gradient norm; null: no clipping",
        trades="needs the norm of all gradients before the first update; zero.update=lazy hides the wait",
        example="1.0",
    )
    moments: Literal["fp32", "bf16", "8bit"] = key(
        "fp32",
        "dtype of moments between updates; bf16 and 8bit are rounded stochastically, and computed with in fp32",
        trades="bytes per parameter and moment (4, 2, or 1 and a 64th) against digits and some arithmetic",
        example="bf16",
    )
    ema: Fraction | None = key(
        None,
        "memory of a running mean of the parameters, per step, kept beside the moments; null: none",
        trades="4 bytes per parameter",
        example="0.999",
    )

    @property
    def has_momentum(self) -> bool:
        """Whether a schedule can cycle a momentum."""
        return True

    @property
    def constants(self) -> dict[str, Any]:
        """The settings of a group of `torch.optim` besides its rate, decay and betas."""
        return {}

    @property
    def of_matrices(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The settings of a group of matrices, and of the group of all else, if these have others; else None."""
        return None


class AdamSection(OptimizerSection):
    """Adam; decay is added to the gradient."""

    name: Literal["adam"] = key("adam", "kind of optimizer")
    beta1: Fraction = key(0.9, "memory of the gradient's mean, per step", example="0.95")
    beta2: Fraction = key(0.999, "memory of the gradient's square, per step", example="0.95")
    eps: Positive = key(1e-8, "added to the root of the second moment", example="1e-6")

    @property
    def constants(self) -> dict[str, Any]:
        return {"eps": self.eps}


class AdamWSection(AdamSection):
    """Adam with decoupled decay."""

    name: Literal["adamw"] = key("adamw", "kind of optimizer")  # type: ignore[assignment]
    weight_decay: NonNegative = key(0.01, "pull towards zero, per step and unit of learning rate", example="0.1")


class SgdSection(OptimizerSection):
    """Gradient descent; decay is added to the gradient."""

    name: Literal["sgd"] = key("sgd", "kind of optimizer")
    lr: Rate = key(0.1, "peak learning rate; the schedule scales it", example="0.01")
    momentum: Fraction = key(
        0.0,
        "memory of the gradient, per step; 0: none kept",
        trades="4 bytes per parameter; at 0 the optimizer keeps nothing",
        example="0.9",
    )
    nesterov: bool = key(False, "whether to look ahead along the momentum", example="true optim.momentum=0.9")

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ConfigError("optim.nesterov=true needs optim.momentum above 0, such as optim.momentum=0.9")
        return self

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0

    @property
    def constants(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "nesterov": self.nesterov}


class LionSection(OptimizerSection):
    """The sign of an averaged gradient, with decoupled decay."""

    name: Literal["lion"] = key("lion", "kind of optimizer")
    lr: Rate = key(3e-4, "peak learning rate; the schedule scales it", example="1e-4")
    beta1: Fraction = key(0.9, "share of the memory in the sign that is applied", example="0.95")
    beta2: Fraction = key(0.99, "memory of the gradient, per step", example="0.98")


class MuonSection(OptimizerSection):
    """Matrices move along an orthogonalized momentum, all else by AdamW."""

    name: Literal["muon"] = key("muon", "kind of optimizer")
    lr: Rate = key(0.02, "peak learning rate of matrices; the schedule scales it", example="0.01")
    weight_decay: NonNegative = key(0.1, "pull towards zero, per step and unit of learning rate", example="0.01")
    momentum: Fraction = key(0.95, "memory of a matrix's gradient, per step", example="0.9")
    nesterov: bool = key(True, "whether to look ahead along the momentum", example="false")
    adjust: Adjust = key(
        "original",
        "factor of the learning rate of a matrix: original, the root of rows / columns if above 1; match_rms_adamw, "
        "0.2 times the root of the larger, with which AdamW's rates fit",
        example="match_rms_adamw optim.lr=1e-3",
    )
    blocks: Names = key(
        (),
        "matrices in one parameter, one below the other: patterns of names, each with a number",
        example="[*.qkv.weight:3]",
    )
    exclude: Names = key(
        EXCLUDED,
        "matrices that AdamW updates, by patterns of their names: embeddings and output layers",
        example="[*embed*,*head*,*router*]",
    )
    adamw_lr: Rate | None = key(
        None, "peak learning rate of AdamW; the schedule scales it; null: optim.lr", example="3e-4"
    )
    beta1: Fraction = key(0.9, "AdamW: memory of the gradient's mean, per step", example="0.8")
    beta2: Fraction = key(0.95, "AdamW: memory of the gradient's square, per step", example="0.999")
    eps: Positive = key(1e-8, "AdamW: added to the root of the second moment", example="1e-6")

    @model_validator(mode="after")
    def _blocks_have_numbers(self) -> Self:
        for entry in self.blocks:
            pattern, _, number = entry.rpartition(":")
            if not (pattern and number.isdecimal() and int(number)):
                raise ConfigError(f"optim.blocks={entry}: must be a pattern and a number, such as *.qkv.weight:3")
        return self

    @property
    def blocks_by_pattern(self) -> dict[str, int]:
        """Pattern of a parameter's name -> the number of matrices in it."""
        return {pattern: int(number) for pattern, _, number in (entry.rpartition(":") for entry in self.blocks)}

    @property
    def constants(self) -> dict[str, Any]:
        return {"nesterov": self.nesterov, "eps": self.eps}

    @property
    def of_matrices(self) -> tuple[dict[str, Any], dict[str, Any]]:
        rate = self.lr if self.adamw_lr is None else self.adamw_lr
        return {"lr": self.lr, "momentum": self.momentum}, {"lr": rate, "betas": (self.beta1, self.beta2)}


class AdagradSection(OptimizerSection):
    """Steps shrink with the sum of all squared gradients; decay is added to the gradient."""

    name: Literal["adagrad"] = key("adagrad", "kind of optimizer")
    lr: Rate = key(1e-2, "peak learning rate; the schedule scales it", example="3e-3")
    eps: Positive = key(1e-10, "added to the root of the sum of squares", example="1e-8")

    @property
    def has_momentum(self) -> bool:
        return False

    @property
    def constants(self) -> dict[str, Any]:
        return {"eps": self.eps, "lr_decay": 0.0}


Optim = Annotated[
    AdamWSection | AdamSection | SgdSection | LionSection | AdagradSection | MuonSection, Field(discriminator="name")
]
