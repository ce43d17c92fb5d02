"""One small collective at the end of a step: every rank's sums of squares, losses and flags.

They are added in rank order and in unit order, so all ranks have the same bits. Nothing has been updated yet.
"""

import ctypes
import math
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from zero.engine.arguments import NOTHING_TRAINS
from zero.engine.runtime import Runtime
from zero.errors import ConfigError, WorldError


class GradientStatus(IntEnum):
    """Result of one rank's backwards in a step."""

    NONE = 0
    """No gradient has arrived."""
    ARRIVED = 1
    UNSCALED = 2
    """A gradient came from a backward without the loss scale."""


class Totals(NamedTuple):
    """Numbers of one step over all ranks."""

    sums: Sequence[float]
    """By unit, the sum of squares of its gradient."""
    loss: float
    aux: Mapping[str, float]
    nonfinite_unit: str | None
    rank_flags: tuple[float, ...]
    statuses: Collection[int]
    any_extra: bool
    """Some rank has gradients that are not in the sums."""
    one_order: bool
    """Units became ready in the same order on all ranks."""

    def norm(self, divisor: float) -> float:
        """Return the global norm of the mean gradient, added in unit order and rounded once to fp32."""
        total = sum(self.sums)
        root = math.sqrt(total) if math.isfinite(total) else math.nan
        return ctypes.c_float(root / divisor).value


def gather_totals(
    runtime: Runtime, losses: list[Tensor], aux: dict[str, list[Tensor]], flag: float, status: GradientStatus
) -> Totals:
    """Exchange the numbers of each rank. Collective.

    Args:
        losses: of each microbatch, 0-dim fp64.
        aux: by name, means beside the loss, likewise.
        flag: a number that every rank gets to know.

    Raises:
        WorldError: ranks ran different collectives.
    """
    world, count = runtime.plan.world, len(runtime.units)
    names = sorted(aux)
    zero = torch.zeros((), dtype=torch.float64, device=world.device)
    measured = [
        *(runtime.updater.sums.get(unit.index, zero) for unit in runtime.units),
        (torch.stack(losses).sum() / runtime.plan.accumulate if losses else zero / 0).to(world.device),
        *(torch.stack(aux[name]).mean().to(world.device) for name in names),
    ]
    reducer = runtime.reducer
    numbers = flag, status, reducer.has_extra, reducer.order_seen, runtime.log.fingerprint
    # `new_full` is a launch; `tensor` would copy from the host and wait for it
    mine = torch.stack([*measured, *(zero.new_full((), number) if number else zero for number in numbers)])
    everyone = torch.zeros(world.size * mine.numel(), dtype=torch.float64, device=world.device)
    what = "norms and losses"
    [handle] = runtime.tape.under_way("reduce", what, lambda: [world.gather(mine, everyone, what=what)])
    handle.wait()
    ranks = world.compute.numbers(everyone.view(world.size, -1))
    flags, statuses, extras, orders, fingerprints = zip(*(rank[-len(numbers) :] for rank in ranks), strict=True)
    _check_fingerprints(runtime, fingerprints)
    sums = [sum(rank[number] for rank in ranks[: runtime.plan.sharers]) for number in range(count)]  # of one copy
    means = [sum(rank[number] for rank in ranks) / world.size for number in range(count, count + 1 + len(names))]
    nonfinite = (unit for unit, total in zip(runtime.units, sums, strict=True) if not math.isfinite(total))
    return Totals(
        sums,
        means[0],
        dict(zip(names, means[1:], strict=True)),
        next((unit.spec.name for unit in nonfinite), None),
        flags,
        {int(status) for status in statuses},
        any_extra=any(extras),
        one_order=len(set(orders)) == 1,
    )


def check_gradients(statuses: Collection[int], *, went_back: bool) -> None:
    """Raise an error for a step whose backward went wrong on any rank.

    Args:
        went_back: this rank called backward of a step, so it had a loss.

    Raises:
        ConfigError: no gradient on any rank, or one without the loss scale.
    """
    if GradientStatus.UNSCALED in statuses:
        raise ConfigError(
            "a backward in fp16 without the loss scale: call engine.backward(loss), or engine.scale(loss).backward(), "
            "or engine.scale(y, already=True).backward(grad) where the scale is in it; of a zero.Step they are "
            "step.backward and step.scaled"
        )
    if set(statuses) == {GradientStatus.NONE}:
        none = "no gradient has arrived since the last update, on any rank"
        raise ConfigError(NOTHING_TRAINS if went_back else f"{none}: call backward before the step")


def _check_fingerprints(runtime: Runtime, fingerprints: Sequence[float]) -> None:
    """Raise WorldError if ranks ran different collectives, because then tensors got the bytes of others."""
    odd = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if odd:
        raise WorldError(
            f"ranks {odd} gathered or reduced other units than rank 0 in this step, or with another rate or scale. All "
            "ranks must run the same units in the same order (this rank: " + ", ".join(runtime.log.recent) + ")."
        )
