"""Decide a step: whether its updates are made, by what gradients are divided, and the counts of the next state.

The host decides where it computes, and where an update needs numbers of the host. Otherwise the device does: kernels
read its decision, the store's threads wait for it, and the host reads it in the next step or when somebody asks.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

from zero.core.decision import Decision, clip
from zero.core.optim import Hyper
from zero.engine.after import After, Counts
from zero.engine.metrics import Metrics
from zero.engine.runtime import Runtime
from zero.engine.state import State
from zero.engine.step_losses import divisor_per_token
from zero.engine.totals import Exchanged, first_nonfinite_unit
from zero.engine.unit_state import UnitState
from zero.platform.modes import unobserved

log = logging.getLogger("zero")

UpdateNow = Callable[[UnitState, Hyper], None]
"""A function that makes a unit's update when the step decides it."""


@unobserved()
def decide(
    state: State, hyper: Hyper, exchanged: Exchanged, limit: float | None, update: UpdateNow | None = None
) -> tuple[State, Metrics]:
    """Defer each unit's update, or make it by `update` now; skip it if a gradient is not finite.

    Args:
        limit: the largest norm of the mean gradient; None: no clipping.

    Returns:
        The next state, and the step's metrics.
    """
    runtime, before = state.runtime, state.after.counts
    scaling = state.plan.precision.scale
    per_token = divisor_per_token(state.plan.precision, before[1].scale)
    counts_tokens = exchanged.known.counts_tokens
    number, is_first = state.tried + 1, state.plan.world.whole.rank == 0  # `state` is spent when they are read
    possible = tuple((before[0] + finite, scaling.advance(before[1], finite)) for finite in (True, False))

    def mean(tokens: Any, planned: float = hyper.divisor) -> Any:
        """Return the number by which the sum of gradients is divided."""
        return tokens * per_token if counts_tokens else planned

    def read() -> dict[str, Any]:
        totals = exchanged.totals()
        norm = totals.norm(mean(totals.tokens))
        finite = math.isfinite(norm)
        if counts_tokens and not totals.tokens and is_first:
            log.warning("step %d: no token counts in the losses, so the step is skipped", number)
        return {
            "loss": totals.loss,
            "grad_norm": norm,
            "lr": hyper.lr,
            "loss_scale": before[1].scale,
            "skipped": not finite,
            "nonfinite_unit": None if finite else first_nonfinite_unit(runtime, totals),
            "aux": totals.aux,
            "rank_flags": totals.rank_flags,
            "tokens": int(totals.tokens) if counts_tokens else None,
        }

    known = {"lr": hyper.lr, "loss_scale": before[1].scale, "rank_flags": exchanged.known.rank_flags}
    metrics = Metrics(read, known if exchanged.later else {})

    def divisor() -> float | None:
        return None if metrics.skipped else mean(exchanged.totals().tokens) / clip(limit, metrics.grad_norm)

    def learn() -> Counts:
        if metrics.skipped:
            runtime.updater.numbers.counts.undo()
        return possible[metrics.skipped]

    after: After | None = None
    if exchanged.later:
        after = After(state.tried + 1, possible, learn)
        hyper = hyper._replace(decision=Decision.of(exchanged.square_sums, mean(exchanged.tokens), limit, divisor))
    elif (divided := divisor()) is None:
        return state.advance(After.known(*possible[True])), metrics
    else:
        hyper = hyper._replace(divisor=divided)
    hyper = _prepared(runtime, hyper)
    following = state.advance(after or After.known(*possible[False]))  # from here on `state` cannot be used again
    for unit in runtime.units:
        if unit.spec.trainable.slots:
            (update or runtime.updater.schedule_update)(unit, hyper)
    if update is None and runtime.plan.update == "serial":
        runtime.finish_step()
    return following, metrics


def _prepared(runtime: Runtime, hyper: Hyper) -> Hyper:
    """Return the numbers of this step's updates, with the counts of each group, and make every gradient complete.

    First wait for the last updates and gathers of units that this step did not use, because nothing else has waited for
    them: these updates read numbers that `Updater.decide` frees, and the gathers read shards that this update writes.
    """
    runtime.await_copies()
    runtime.residency.gathers.land()
    for unit in runtime.units:
        unit.await_grad_readers()
    for unit in runtime.units:
        if unit.spec.trainable.slots and not unit.step.filled:  # its last update may be deferred, its gradient is zero
            runtime.updater.apply_deferred(unit)
            runtime.gradients.open(unit, fresh=True).zero_()
            runtime.gradients.park(unit)
    return runtime.updater.numbers.decide(hyper)
