"""Prediction of a step on the plans that a running step may move to when it runs out of memory.

Nothing is measured or traced then, so only the ratio of two predictions is of use.
"""

from collections.abc import Callable
from functools import cache

from zero.core.activations import ACTIVATIONS
from zero.engine.plan import Plan
from zero.trainer.config import Config
from zero.trainer.planning.cost import Rates, step_seconds
from zero.trainer.planning.machine import Machine
from zero.trainer.planning.rates import assumed
from zero.trainer.planning.traces.activations import ActivationTraces
from zero.trainer.planning.traces.tracing import Traced


def predictor(config: Config, plan: Plan, activations: ActivationTraces) -> Callable[[Plan], float]:
    """Return a function that predicts the seconds of a step of a plan, at rates assumed for the machine.

    The machine is read at the first prediction, which few runs need. The prediction is for a run of one rank.

    Args:
        config: the settings of the run; the batch is in numbers.
        plan: the first plan of the run.
    """

    @cache
    def made() -> Callable[[Plan], float]:
        machine = Machine.of(config, plan.world)
        traced = activations.resolved(config).of(config.batch.numbers()[1], machine.device)
        return seconds_of_moves(plan, traced, assumed(config, machine))

    return lambda moved: made()(moved)


def seconds_of_moves(first: Plan, traced: Traced, rates: Rates) -> Callable[[Plan], float]:
    """Return a function that predicts the seconds of a step of a plan that `Plan.moved` made of `first`.

    Args:
        traced: a microbatch of `first`. A unit that is recomputed only after a move takes its share of another forward.
    """
    before = _recomputed(first)

    def seconds(plan: Plan) -> float:
        again = traced.forward.times(max(0.0, _recomputed(plan) - before))
        tokens = first.accumulate / plan.accumulate
        return step_seconds(plan, rates, traced.forward, traced.backward + again, tokens=tokens)

    return seconds


def _recomputed(plan: Plan) -> float:
    """Return the share of a plan's sites whose activations are recomputed."""
    policies = plan.activations.values()
    return sum(ACTIVATIONS[policy].recomputes for policy in policies) / max(len(policies), 1)
