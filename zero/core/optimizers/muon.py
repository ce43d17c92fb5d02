"""Muon: a momentum whose matrices are orthogonalized before it is subtracted from the parameters.

An update has three parts. `mix` updates the momentum and writes directions, and `descend` subtracts them; both are
elementwise, so they work on any cut of a flat tensor. Between them `orthogonalize` needs whole matrices.

`orthogonalize` changes a matrix U S V^T to about U V^T: singular values from 0.7 to 1.2, by five steps of a polynomial
of degree 5 in products of bf16. Matrices of one parameter are multiplied in one batch. A batch depends on nothing but
the parameter, because libraries of matrix products promise no equal bits for batches of other sizes.

Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
Scalable for LLM Training", section 2.2 for the factor that matches AdamW's step; `torch.optim.Muon`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from math import sqrt
from typing import Any, Self, get_args

import torch
from torch import Tensor

from zero.core import checks
from zero.core.groups import Group, Mask, Number, decay_matrices
from zero.core.layout import Layout, Slot
from zero.core.lr_schedule import Schedule, scaled
from zero.core.matrices import Matrices
from zero.core.optim import MOMENTUM, Transform, make_transform
from zero.core.optimizers.adam import of_adamw
from zero.core.optimizers.rule import Rule
from zero.core.setting_types import EXCLUDED, Adjust
from zero.core.suggest import meant
from zero.core.updates import PageBatch, average
from zero.errors import ConfigError

COEFFICIENTS = 3.4445, -4.775, 2.0315
"""Coefficients of x, x^3 and x^5. They raise small singular values fast rather than converge to 1."""
ITERATIONS = 5
EPS = 1e-7
"""The least norm by which a matrix is divided."""
BATCH_NUMEL = 2**24
"""Elements of a batch of matrices, unless one matrix has more. A batch is on one rank, so this limits the imbalance."""

ROUNDED_NUMEL = 2**20
"""Elements that are rounded at a time, because each takes a temporary tensor."""


@dataclass(frozen=True)
class Muon:
    """The parameters that Muon updates, and its settings.

    Attributes:
        groups: the number of optimizer groups whose parameters are matrices; these groups come first.
        nesterov: whether a direction looks ahead along the momentum.
        adjust: the factor of the learning rate for a matrix: "original", the root of rows / columns if that is above 1;
            or "match_rms_adamw", 0.2 times the root of the larger of the two.
        blocks: pattern of a parameter's name -> the number of matrices that it has, one below the other.
        exclude: patterns of the names of matrices that AdamW updates.
    """

    groups: int
    nesterov: bool
    adjust: Adjust
    blocks: tuple[tuple[str, int], ...]
    exclude: tuple[str, ...]
    ema: float | None = None
    """The decay of the running mean of the parameters, see `with_ema`."""

    @property
    def title(self) -> str:
        return "Muon"

    def takes(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether Muon updates a parameter: a matrix, or several by `blocks`, whose name is not in `exclude`."""
        if self._is_excluded(name):
            return False
        return len(shape) == 2 or (len(shape) > 2 and self._count(name) is not None)

    def problem(self, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
        """Return a message if `blocks` or `exclude` does not fit the model's parameters; None: they do.

        A default pattern of `exclude` may match nothing.
        """
        for name, patterns in (("blocks", [pattern for pattern, _ in self.blocks]), ("exclude", self.exclude)):
            for pattern in patterns:
                if not (pattern in EXCLUDED or any(fnmatchcase(other, pattern) for other in shapes)):
                    return f"optim.{name}: no parameter matches {pattern!r}{meant(pattern, shapes)}"
        for pattern, _ in self.blocks:
            if not any(fnmatchcase(name, pattern) and not self._is_excluded(name) for name in shapes):
                return f"optim.blocks: AdamW updates all that {pattern!r} matches. Take it out of optim.exclude."
        for name, shape in shapes.items():
            count = self._count(name)
            if count and (len(shape) < 2 or torch.Size(shape[:-1]).numel() % count):
                return f"optim.blocks: {name} has shape {shape}, which is not {count} matrices of equal rows"
        return None

    def factor(self, slot: Slot) -> float:
        """Return the factor of the learning rate for a parameter."""
        _, rows, columns = self._shape(slot)
        return sqrt(max(1, rows / columns)) if self.adjust == "original" else 0.2 * sqrt(max(rows, columns))

    def batches(self, layout: Layout) -> list[Matrices]:
        """Return the batches of a flat of parameters that Muon updates, in order; they do not depend on the ranks."""
        batches = []
        for slot in layout.slots:
            count, rows, columns = self._shape(slot)
            numel = rows * columns
            most = max(1, BATCH_NUMEL // max(numel, 1))
            batches += [
                Matrices(slot.offset + first * numel, min(most, count - first), rows, columns)
                for first in range(0, count if numel else 0, most)
            ]
        return batches

    def mix(self, batch: PageBatch) -> None:
        """Update the momentum, and write directions to `batch.params` in their dtype, bf16."""
        grads, (mus,), (momentum,) = batch.grads, batch.moments, batch.settings.betas
        batch.divide_grads()
        torch._foreach_mul_(grads, 1 - momentum)
        torch._foreach_mul_(mus, momentum)
        torch._foreach_add_(mus, grads)
        if self.nesterov:
            torch._foreach_add_(grads, torch._foreach_mul(mus, momentum))
        torch._foreach_copy_(batch.params, grads if self.nesterov else mus)

    def descend(self, batch: PageBatch) -> None:
        """Subtract `batch.grads`, the orthogonal directions, from the parameters after these have decayed."""
        now = batch.settings
        if now.weight_decay:
            torch._foreach_mul_(batch.params, 1 - now.lr * now.weight_decay)
        torch._foreach_mul_(batch.grads, now.lr * batch.factor)
        torch._foreach_sub_(batch.params, batch.grads)
        if self.ema is not None:
            average(self.ema, batch.moments[-1], batch.params)

    def averaged(self, decay: float) -> Self:
        return replace(self, ema=decay)

    def orthogonalize(self, matrices_BMN: Tensor, scratch: Tensor) -> None:
        orthogonalize(matrices_BMN, scratch)

    def flops(self, batch: Matrices) -> int:
        low, high = sorted((batch.rows, batch.columns))
        return 2 * ITERATIONS * batch.number * (2 * low * low * high + low**3)

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def _count(self, name: str) -> int | None:
        return next((count for pattern, count in self.blocks if fnmatchcase(name, pattern)), None)

    def _shape(self, slot: Slot) -> tuple[int, int, int]:
        count = self._count(slot.name) or 1
        *leading, columns = slot.shape
        return count, torch.Size(leading).numel() // count, columns


def orthogonalize(matrices_BMN: Tensor, scratch: Tensor) -> None:
    """Replace each matrix by its orthogonal factor, about, in place.

    Args:
        matrices_BMN: (batch, rows, columns) bf16.
        scratch: (`Matrices.scratch_numel`,), bf16; or fp32, in which each result is rounded to bf16: products of
            bf16 are slow on CPUs without units for it.
    """
    a, b, c = COEFFICIENTS
    wide = matrices_BMN if matrices_BMN.shape[1] <= matrices_BMN.shape[2] else matrices_BMN.mT
    count, low, high = wide.shape
    sizes = [count * low * high] * 2 + [count * low * low] * 2
    x, y, gram, square = scratch[: sum(sizes)].split(sizes)
    x, y = x.view(wide.shape), y.view(wide.shape)
    gram, square = gram.view(count, low, low), square.view(count, low, low)
    x.copy_(wide)
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x.div_(_rounded(norms).clamp_(min=EPS))
    _rounded(x)
    for _ in range(ITERATIONS):
        _rounded(torch.bmm(x, x.mT, out=gram))
        _rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=square))
        _rounded(torch.baddbmm(x, square, x, beta=a, out=y))
        x, y = y, x
    wide.copy_(x)


def _rounded(values: Tensor) -> Tensor:
    """Round contiguous values to bf16 in place; values of bf16 stay as they are."""
    if values.dtype != torch.bfloat16:
        for part in values.view(-1).split(ROUNDED_NUMEL):
            part.copy_(part.bfloat16())
    return values


def muon(
    lr: Number,
    *,
    momentum: Number = 0.95,
    nesterov: bool = True,
    weight_decay: Number = 0.1,
    adjust: Adjust = "original",
    blocks: Mapping[str, int] | None = None,
    exclude: Sequence[str] = EXCLUDED,
    adamw_lr: Number | None = None,
    beta1: Number = 0.9,
    beta2: Number = 0.95,
    eps: float = 1e-8,
    clip: float | None = None,
    decay: Mask = decay_matrices,
    groups: Sequence[Group] = (),
) -> Transform:
    """Make Muon for matrices, as `torch.optim.Muon`, and AdamW for all other parameters.

    Its one moment per matrix is a momentum, whose matrices are orthogonalized in bf16 before they are subtracted, see
    this module. Other arguments as in `adamw`.

    Args:
        lr: learning rate of the matrices.
        momentum: decay of the momentum, 0 or more and less than 1; a number or a function of the step.
        nesterov: use Nesterov momentum.
        adjust: factor of the learning rate for a matrix: "original", the root of rows / columns if that is above 1; or
            "match_rms_adamw", 0.2 times the root of the larger of the two, with which AdamW's learning rates fit.
        blocks: number of matrices in a parameter, one below the other, by patterns of names, such as {"*.qkv.weight":
            3}. Parameters of 3 and more dimensions that no pattern matches go to AdamW.
        exclude: patterns of the names of matrices that AdamW updates, such as embeddings.
        adamw_lr: learning rate of AdamW; None: `lr`.
        beta1, beta2, eps: settings of AdamW.
        groups: as in `adamw`; one beta is Muon's momentum, two are AdamW's.

    Raises:
        ConfigError: a setting is not a number or is out of range, or a number of matrices is not 1 or more.
    """
    checks.one_of("optim.adjust", adjust, get_args(Adjust))
    exclude, nesterov = checks.patterns("optim.exclude", exclude), checks.boolean("optim.nesterov", nesterov)
    if not isinstance(blocks or {}, Mapping):
        raise ConfigError(
            f"optim.blocks={blocks!r}: must be a dict of patterns and numbers, such as {{'*.qkv.weight': 3}}"
        )
    for pattern, count in (blocks or {}).items():
        checks.text("a pattern of optim.blocks", pattern)
        if type(count) is not int or count < 1:
            raise ConfigError(f"optim.blocks: {pattern!r} has {count!r} matrices, but must have 1 or more")
    shared: dict[str, Any] = {"weight_decay": weight_decay, "clip": clip, "decay": decay, "groups": groups}
    betas, rest_lr = {"beta1": beta1, "beta2": beta2}, lr if adamw_lr is None else adamw_lr
    rest = of_adamw(rest_lr, betas, eps, shared, others=(1,))
    matrices = make_transform("muon", (MOMENTUM,), rest.update, (), lr, {"momentum": momentum}, **shared, others=(2,))
    rule = Muon(len(matrices.groups), nesterov, adjust, tuple((blocks or {}).items()), exclude)
    group = partial(_group_of, rule, matrices.group, rest.group)
    return replace(rest, name="muon", groups=(*matrices.groups, *rest.groups), group=group, matrix_rule=rule)


GroupOf = Callable[[str, tuple[int, ...]], int]


def _group_of(muon: Muon, matrices: GroupOf, rest: GroupOf, name: str, shape: tuple[int, ...]) -> int:
    return matrices(name, shape) if muon.takes(name, shape) else muon.groups + rest(name, shape)


def _build(chosen: Any, lr: Schedule, momentum: Schedule | None, shared: Mapping[str, Any]) -> Transform:
    rest = None if chosen.adamw_lr is None else scaled(lr, chosen.adamw_lr / chosen.lr)
    given = chosen.model_dump(include={"nesterov", "adjust", "exclude", "beta2", "eps"})
    return muon(
        lr,
        momentum=momentum or chosen.momentum,
        beta1=momentum or chosen.beta1,
        blocks=chosen.blocks_by_pattern,
        adamw_lr=rest,
        **given,
        **shared,
    )


MUON = Rule(muon, _build, constants=("nesterov", "eps"))
