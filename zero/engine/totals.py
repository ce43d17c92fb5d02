"""Exchange every rank's sums of squares, losses and flags in one collective at the end of a step, before any update.

All ranks add the numbers in the same order, so the results have the same bits on all ranks.
"""

import ctypes
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from zero.distributed.world import World
from zero.engine.arguments import NOTHING_TRAINS
from zero.engine.runtime import Runtime
from zero.engine.step_losses import SUM_LOSSES, StepLosses, check_kinds, mean_of
from zero.errors import ConfigError, WorldError


class GradientStatus(IntEnum):
    """The state of a rank's gradients at the end of a step."""

    NONE = 0
    """No gradient has arrived."""
    ARRIVED = 1
    UNSCALED = 2
    """A gradient came from a backward without the loss scale."""


NO_UNIT = 2**31
"""Above every index of a unit."""


class Totals(NamedTuple):
    """The results of one step over all ranks, see `Metrics`."""

    square_sum: float
    """The sum of squares of the summed gradient."""
    loss: float
    tokens: float
    """The number of tokens of losses that are sums, by which the gradient is divided; 0 for means."""
    counts_tokens: bool
    """Whether losses are sums."""
    aux: Mapping[str, float]
    rank_flags: tuple[float, ...]
    statuses: Collection[int]
    any_extra: bool
    """Whether any rank has an extra flat of gradients, which is not in `square_sum`."""
    one_order: bool
    """Whether the units' gradients became ready in the same order on all ranks."""
    shortages: Sequence[int]
    """The bits of the memories of which each rank is short, see `zero.engine.pressure`."""
    equal_squares: Sequence[float] = ()
    """For each norm group, the part of `square_sum` of parameters that are equal on its ranks."""
    nonfinite: int | None = None
    """The index of the first unit with a gradient that is not finite, or `NO_UNIT`; None: not exchanged."""

    def norm(self, divisor: float) -> float:
        """Return the L2 norm of the mean gradient over all parameters, rounded once to fp32.

        Args:
            divisor: the number by which the sum of gradients is divided; the norm is NaN if it is 0.
        """
        if not math.isfinite(self.square_sum) or not divisor:
            return math.nan
        return ctypes.c_float(math.sqrt(self.square_sum) / divisor).value


class Exchanged(NamedTuple):
    """The numbers of a step that the ranks have exchanged. Those of the device may still be on their way.

    Attributes:
        square_sums: the ranks' sums of squares of their parts of the summed gradient, fp64 on the device.
        tokens: as in `Totals`, 0-dim fp64 on the device.
        totals: function to the totals; waits for the device.
        known: the totals with what the hosts know; other numbers are 0.
        later: whether the totals may not be known to the host.
        held: tensors of other streams that the device may still read.
    """

    square_sums: Tensor
    tokens: Tensor
    totals: Callable[[], Totals]
    known: Totals
    later: bool
    held: Sequence[Tensor]


def exchange_totals(
    runtime: Runtime,
    losses: StepLosses,
    flag: float,
    status: GradientStatus,
    shortage: int,
    *,
    later: bool,
) -> Exchanged:
    """Exchange each rank's numbers of the step. Collective.

    Args:
        losses: the losses of this rank's microbatches, with further numbers.
        flag: a number of this rank that is sent to every rank.
        status: the state of this rank's gradients.
        shortage: the bits of the memories of which this rank is short.
        later: whether the host does not wait for the device. What the ranks' hosts know is exchanged beside it then.

    Raises:
        ConfigError: some losses are means, and others sums.
        WorldError: ranks ran different collectives.
    """
    world, reducer, squares, names = runtime.plan.world, runtime.reducer, _squares(runtime), losses.names
    what, zero = "norms and losses", torch.zeros((), dtype=torch.float64, device=world.device)
    measured = [
        *losses.numbers(runtime.plan.accumulate, zero),
        *_measured(runtime, squares, zero),
    ]
    if later:
        measured.append(_first_nonfinite([squares.get(i, zero) for i in range(len(runtime.units))]))
    facts = status + _EXTRA * reducer.has_extra + _SHORTAGE * shortage + _KINDS * losses.kinds
    facts += _FINGERPRINT * runtime.log.fingerprint
    of_host = torch.tensor([reducer.rounds.order_seen, flag, facts], dtype=torch.float64, device="cpu")
    if not later:
        # `new_full` launches a kernel; an upload would wait for the copy
        measured += [zero.new_full((), number) if number else zero for number in of_host.tolist()]
    mine = torch.stack(measured)
    everyone = torch.zeros(world.size * mine.numel(), dtype=torch.float64, device=world.device)
    [handle] = runtime.tape.under_way("reduce", what, lambda: [world.gather(mine, everyone, what=what)])
    handle.wait()
    read = world.leave(everyone, what) if later else world.on_host(everyone, what).detach  # functions to the copy
    rows = world.exchange(of_host, what=what) if later else read().view(world.size, -1)[:, -3:]
    orders, flags, all_facts = rows.T.tolist()
    _check_fingerprints(runtime, [int(facts) // _FINGERPRINT for facts in all_facts])
    kinds = [int(facts) // _KINDS % 4 for facts in all_facts]
    check_kinds(kinds)
    sharers = runtime.plan.facts.sharers  # the ranks of one copy of the state
    known = Totals(
        0.0,
        0.0,
        0.0,
        SUM_LOSSES in kinds,
        dict.fromkeys(names, 0.0),
        tuple(flags),
        {int(facts) % _EXTRA for facts in all_facts},
        any_extra=any(int(facts) // _EXTRA % 2 for facts in all_facts),
        one_order=len(set(orders)) == 1,
        shortages=[int(facts) // _SHORTAGE % 4 for facts in all_facts],
    )
    table = everyone.view(world.size, -1)
    return Exchanged(
        table[:sharers, 2 + len(names)],
        table[:, 1].sum(),
        lambda: _with_numbers(known, read().view(world.size, -1).T.tolist(), kinds, sharers, later=later),
        known,
        later,
        (*measured, *squares.values()) if later else (),
    )


def _measured(runtime: Runtime, squares: Mapping[int, Tensor], zero: Tensor) -> Iterator[Tensor]:
    """Yield the sum of this rank's squares, and for each norm group the part of it that is equal on its ranks.

    They are sums, because W ranks receive W of each.
    """
    yield torch.stack([*squares.values()] or [zero]).sum()
    for number in range(len(runtime.plan.beside.groups)):
        equal = [runtime.units[index].step.equal_squares[number] for index in squares]
        yield torch.stack(equal or [zero]).sum()


def _with_numbers(
    known: Totals, columns: list[list[float]], kinds: Sequence[int], sharers: int, *, later: bool
) -> Totals:
    """Return totals with the numbers of the device, by column of `exchange_totals`."""
    losses, tokens, *columns = columns
    loss, total = mean_of(losses, tokens, kinds)
    count = len(known.aux)
    others = [sum(column) / len(column) for column in columns[:count]]
    squares, *rest = columns[count : len(columns) if later else -3]
    nonfinite = rest.pop() if later else None
    return known._replace(
        square_sum=sum(squares[:sharers]),
        loss=loss,
        tokens=total,
        aux=dict(zip(known.aux, others, strict=True)),
        equal_squares=[sum(column[:sharers]) for column in rest],
        nonfinite=None if nonfinite is None else int(min(nonfinite)),
    )


def _first_nonfinite(squares: Sequence[Tensor]) -> Tensor:
    """Return the index of the first sum of squares that is not finite, a 0-dim fp64 tensor; `NO_UNIT` if all are."""
    nonfinite = torch.stack([*squares]).isfinite().logical_not()
    return torch.where(nonfinite.any(), nonfinite.to(torch.uint8).argmax(), NO_UNIT).double()


def over_groups(groups: Sequence[World], totals: Totals) -> Totals:
    """Exchange the totals of a world over norm groups, one after the other. Collective among the ranks of each.

    Squares are added, losses and further numbers averaged, flags listed by the rank in the group.

    Raises:
        ConfigError: the ranks return different further numbers, or have different gradients of equal parameters.
    """
    for group, equal in zip(groups, totals.equal_squares, strict=True):
        seen, names = sum(1 << status for status in totals.statuses), crc32(repr([*totals.aux]).encode())
        mine = [names, equal, totals.square_sum, seen, totals.tokens, totals.loss]
        mine += [*totals.aux.values(), *totals.rank_flags]
        rows = group.exchange(torch.tensor(mine, dtype=torch.float64, device="cpu"), what="norms and losses").tolist()
        hashes, equals, squares, masks, tokens, *columns = zip(*rows, strict=True)
        if len(set(hashes)) > 1:
            raise ConfigError("aux: ranks of norm_groups return other names. Return the same names on all ranks.")
        if len(set(tokens)) > 1:
            raise ConfigError(
                f"the ranks of a norm group count {', '.join(f'{number:.0f}' for number in tokens)} tokens. Return the "
                "count of all of them on each, because they have parts of one model."
            )
        _check_equal(group, equals, sum(squares))
        loss, *others = (sum(column) / group.size for column in columns[: 1 + len(totals.aux)])
        totals = totals._replace(
            square_sum=sum(squares),
            statuses={status for status in GradientStatus if any(int(mask) >> status & 1 for mask in masks)},
            loss=loss,
            aux=dict(zip(totals.aux, others, strict=True)),
            rank_flags=tuple(flag for row in rows for flag in row[6 + len(others) :]),
        )
    return totals


def _check_equal(group: World, squares: Sequence[float], square_sum: float) -> None:
    """Raise ConfigError if gradients of parameters that are equal on a norm group's ranks differ beyond rounding."""
    low, high = min(squares), max(squares)
    if math.isfinite(square_sum) and high - low > max(_ROUNDING * high, _NOISE * square_sum):
        raise ConfigError(
            f"norm_groups: parameters that are equal on ranks {', '.join(map(str, group.ranks))} have other gradients "
            f"there, with sums of squares from {low:.3g} to {high:.3g}. Make each gradient whole on all of these ranks "
            "(SequenceParallel for torch's norms, an all-reduce in backward for layers by hand)."
        )


_ROUNDING, _NOISE = 1e-2, 1e-6
"""Differences of sums of squares that are rounding: a part of the larger sum, and of the sum over all parameters."""

_EXTRA, _SHORTAGE, _KINDS, _FINGERPRINT = 4, 8, 32, 128
"""Factors that pack a status below 4, a bit, twice two bits and a CRC-32 into one number, which is exact in fp64."""


def first_nonfinite_unit(runtime: Runtime, totals: Totals) -> str | None:
    """Return the name of the first unit with an infinite or NaN gradient, on any norm group's ranks.

    Collective, if the totals do not have its index.
    """
    if totals.nonfinite is not None:
        return runtime.units[totals.nonfinite].spec.name if totals.nonfinite < NO_UNIT else None
    world, names = runtime.plan.world, [unit.spec.name for unit in runtime.units]
    units = _squares(runtime)
    squares = world.compute.on_host(torch.stack([*units.values()])).tolist() if units else []
    nonfinite = (index for index, square in zip(units, squares, strict=True) if not math.isfinite(square))
    mine = torch.tensor([next(nonfinite, len(names))], device="cpu")
    name = dict(enumerate(names)).get(int(world.exchange(mine, what="the first nonfinite unit").min()))
    for group in runtime.plan.beside.groups:
        name = next(filter(None, group.gather_texts(name or "", "the first nonfinite unit")), None)
    return name


def _squares(runtime: Runtime) -> dict[int, Tensor]:
    """Return this rank's sum of squares of each unit that has a final gradient, by unit index."""
    return {unit.index: unit.step.squares for unit in runtime.units if unit.step.squares is not None}


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
