"""Exchange every rank's sums of squares, losses and flags in one collective at the end of a step, before any update.

All ranks add them in rank order and in unit order, so the results have the same bits on all ranks.
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
    """The state of a rank's gradients at the end of a step."""

    NONE = 0
    """No gradient has arrived."""
    ARRIVED = 1
    UNSCALED = 2
    """A gradient came from a backward without the loss scale."""


class Totals(NamedTuple):
    """The results of one step over all ranks, see `Metrics`."""

    sums: Sequence[float]
    """The sum of squares of each unit's gradient, by unit index."""
    loss: float
    aux: Mapping[str, float]
    nonfinite_unit: str | None
    rank_flags: tuple[float, ...]
    statuses: Collection[int]
    any_extra: bool
    """Whether any rank has an extra flat of gradients, which is not in `sums`."""
    one_order: bool
    """Whether the units' gradients became ready in the same order on all ranks."""

    def norm(self, divisor: float) -> float:
        """Return the L2 norm of the mean gradient over all parameters, rounded once to fp32.

        Args:
            divisor: the number by which the sum of gradients is divided.
        """
        total = sum(self.sums)
        root = math.sqrt(total) if math.isfinite(total) else math.nan
        return ctypes.c_float(root / divisor).value


def gather_totals(
    runtime: Runtime, losses: list[Tensor], aux: dict[str, list[Tensor]], flag: float, status: GradientStatus
) -> Totals:
    """Exchange each rank's numbers of the step and return the totals. Collective.

    Args:
        losses: the loss of each microbatch, 0-dim fp64.
        aux: further numbers by name, a list of 0-dim fp64 each.
        flag: a number of this rank that is sent to every rank.
        status: the state of this rank's gradients.

    Raises:
        WorldError: ranks ran different collectives.
    """
    world, count = runtime.plan.world, len(runtime.units)
    names = sorted(aux)
    zero = torch.zeros((), dtype=torch.float64, device=world.device)
    measured = [
        *(zero if unit.step.squares is None else unit.step.squares for unit in runtime.units),
        (torch.stack(losses).sum() / runtime.plan.accumulate if losses else zero / 0).to(world.device),
        *(torch.stack(aux[name]).mean().to(world.device) for name in names),
    ]
    reducer = runtime.reducer
    numbers = flag, status, reducer.has_extra, reducer.order_seen, runtime.log.fingerprint
    # `new_full` launches a kernel; `torch.tensor` would copy from the host and wait for the copy
    mine = torch.stack([*measured, *(zero.new_full((), number) if number else zero for number in numbers)])
    everyone = torch.zeros(world.size * mine.numel(), dtype=torch.float64, device=world.device)
    what = "norms and losses"
    [handle] = runtime.tape.under_way("reduce", what, lambda: [world.gather(mine, everyone, what=what)])
    handle.wait()
    ranks = world.compute.numbers(everyone.view(world.size, -1))
    flags, statuses, extras, orders, fingerprints = zip(*(rank[-len(numbers) :] for rank in ranks), strict=True)
    _check_fingerprints(runtime, fingerprints)
    # the ranks of one copy of the state
    sums = [sum(rank[number] for rank in ranks[: runtime.plan.sharers]) for number in range(count)]
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
    """Raise ConfigError if no rank has a gradient, or if any rank has one from a backward without the loss scale.

    Args:
        statuses: the states that occur among the ranks.
        went_back: whether this rank called `Step.backward`, which selects the message.
    """
    if GradientStatus.UNSCALED in statuses:
        raise ConfigError(
            "a backward in fp16 without the loss scale. Call engine.backward(loss) (zero.Step: step.backward), "
            "engine.scale(loss).backward() (zero.Step: step.scaled) or, if grad has the scale, "
            "engine.scale(y, already=True).backward(grad)."
        )
    if set(statuses) == {GradientStatus.NONE}:
        none = "no rank has a new gradient since the last update. Call backward before the step."
        raise ConfigError(NOTHING_TRAINS if went_back else none)


def _check_fingerprints(runtime: Runtime, fingerprints: Sequence[float]) -> None:
    """Raise WorldError if ranks ran different collectives, because then tensors received the data of other tensors."""
    odd = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if odd:
        raise WorldError(
            f"ranks {odd} gathered or reduced other units than rank 0 in this step, or with another rate or scale. All "
            "ranks must run the same units in the same order (this rank: " + ", ".join(runtime.log.recent) + ")."
        )
