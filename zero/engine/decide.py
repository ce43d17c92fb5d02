"""Decide a step: whether its updates are made, by what gradients are divided, and the counts of the next state.

The host decides where it computes, and where an update needs numbers of the host. Otherwise the device does: kernels
read its decision, the store's threads wait for it, and the host reads it in the next step or when somebody asks.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

import math
from collections.abc import Callable
from typing import Any

from zero.core.decision import Decision, clip
from zero.core.optim import Hyper
from zero.engine.after import After, Counts
from zero.engine.metrics import Metrics
from zero.engine.runtime import Runtime
from zero.engine.state import State
from zero.engine.totals import Exchanged, first_nonfinite_unit
from zero.engine.unit_state import UnitState
from zero.platform.modes import unobserved

UpdateNow = Callable[[UnitState, Hyper], None]
"""A function that makes a unit's update when the step decides it."""


@unobserved()
def decide(state: State, hyper: Hyper, exchanged: Exchanged, update: UpdateNow | None = None) -> tuple[State, Metrics]:
    """Defer each unit's update, or make it by `update` now; skip it if a gradient is not finite.

    Returns:
        The next state, and the step's metrics.
    """
    runtime, before = state.runtime, state.after.counts
    scaling, limit = state.plan.precision.scale, state.plan.optimizer.clip
    possible = tuple((before[0] + finite, scaling.advance(before[1], finite)) for finite in (True, False))

    def read() -> dict[str, Any]:
        totals = exchanged.totals()
        norm = totals.norm(hyper.divisor)
        finite = math.isfinite(norm)
        return {
            "loss": totals.loss,
            "grad_norm": norm,
            "lr": hyper.lr,
            "loss_scale": before[1].scale,
            "skipped": not finite,
            "nonfinite_unit": None if finite else first_nonfinite_unit(runtime, totals),
            "aux": totals.aux,
            "rank_flags": totals.rank_flags,
        }

    metrics = Metrics(read)

    def divisor() -> float | None:
        return None if metrics.skipped else hyper.divisor / clip(limit, metrics.grad_norm)

    def learn() -> Counts:
        if metrics.skipped:
            runtime.updater.numbers.counts.undo()
        return possible[metrics.skipped]

    if exchanged.later:
        following = state.advance(After(state.tried + 1, possible, learn))
        decision = Decision.of(exchanged.square_sums, hyper.divisor, limit, divisor)
        _defer_updates(runtime, hyper._replace(decision=decision), update)
    else:
        following = state.advance(After.known(*possible[metrics.skipped]))
        if (divided := divisor()) is not None:
            _defer_updates(runtime, hyper._replace(divisor=divided), update)
    return following, metrics


def _defer_updates(runtime: Runtime, hyper: Hyper, update: UpdateNow | None) -> None:
    """Schedule this step's update of every unit for before its next gather; with update="serial" apply it now.

    First wait for the last updates and gathers of units that this step did not use, because nothing else has waited for
    them: these updates read numbers that `Updater.decide` frees, and the gathers read shards that this update writes.
    """
    runtime.await_copies()
    runtime.residency.gathers.land()
    for unit in runtime.units:
        unit.await_grad_readers()
    hyper = runtime.updater.numbers.decide(hyper)
    for unit in runtime.units:
        if not unit.spec.trainable.slots:
            continue
        if not unit.step.filled:  # unused in this step: its last update may still be deferred, and its gradient is zero
            runtime.updater.apply_deferred(unit)
            runtime.gradients.open(unit, fresh=True).zero_()
            runtime.gradients.park(unit)
        (update or runtime.updater.schedule_update)(unit, hyper)
    if update is None and runtime.plan.update == "serial":
        runtime.finish_step()
