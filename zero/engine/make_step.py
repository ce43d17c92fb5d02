"""Make functions of a state: a training step from a loss function, an evaluation, and a recording of their work."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero.core import checks
from zero.engine.arguments import (
    check_function,
    check_loss_fn,
    check_microbatches,
    check_type,
    loss_aux_and_count,
)
from zero.engine.metrics import Metrics
from zero.engine.plan import Plan
from zero.engine.replay import Replay, check_replay
from zero.engine.retry import Retry, in_pieces
from zero.engine.state import State
from zero.engine.step import Step
from zero.errors import ConfigError, if_it_fails
from zero.platform.timeline import Timeline

LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Any] | tuple[Tensor, int | Tensor, Mapping[str, Any]]]


def make_step(
    plan: Plan,
    loss_fn: LossFn,
    *,
    flag: Callable[[], float] = lambda: 0.0,
    replay: int = 0,
    retry: bool | Retry = False,
) -> Callable[[State, Sequence[Any]], tuple[State, Metrics]]:
    """Return the training step as a function: `state, metrics = step(state, microbatches)`.

    The step takes a list of `plan.accumulate` microbatches of this rank and returns the next state; the old one is
    spent. If the step raises, the old state is still valid, unless the two runs of `replay` differed. Buffers such as
    running statistics may have changed.

    Args:
        plan: the plan that the states are made from.
        loss_fn: a function of (model, microbatch) that returns a scalar loss, the mean over the microbatch; or (sum,
            count), the sum over tokens and their number, an int or a 0-dim tensor of integers. The step divides sums by
            the count of all microbatches and ranks. A dict of scalars may follow either. The model is the plan's.
        flag: a function that is called once per step and returns a number. Every rank gets all ranks' numbers in
            `Metrics.rank_flags`, so that all ranks can react to a flag after the same step.
        replay: make each step whose number is a multiple of `replay` twice, and compare the two runs bit by bit; 0:
            none. `loss_fn` must depend on the model, the microbatch and the random generators of torch and Python
            alone. A GPU needs `torch.use_deterministic_algorithms(True)`. These steps take 2.7 to 2.9 times as long.
        retry: make a step again that runs out of the device's memory: first with an empty cache, then with the state
            moved to lower tiers, see `zero.move`. No bit changes. `loss_fn` may change nothing but random generators
            of torch and Python, and buffers. With several ranks the error gets advice instead, because a rank cannot
            go back alone.

    Raises:
        ConfigError: `plan` is not a Plan, `loss_fn` not a function of a model and a microbatch, `replay` not a number
            of steps, or a GPU is not deterministic with `replay`. By the step: the state is not of this plan,
            `microbatches` is not a list of `plan.accumulate` microbatches, the loss is not a scalar, or no gradient
            has arrived.
        MachineError: by the step, if a step that was made twice differs; no state can be used then.
        StaleStateError: by the step, if the state is spent.
        WorldError: by the step, if the ranks ran different units, or in another order.
    """
    check_type(plan, Plan, "zero.make_step", "step = zero.make_step(plan, loss_fn)")
    check_function(loss_fn, "loss_fn", "step = zero.make_step(plan, loss_fn)")
    check_loss_fn(loss_fn)
    if not callable(flag):
        raise ConfigError(f"flag is {checks.type_text(flag)}. Pass a function that returns a number.")
    check_replay(replay, plan.world)
    checks.instance("retry", retry, bool | Retry, "Pass True to make a step again that runs out of memory.")
    retries = Retry() if retry is True else retry or None

    def run(microbatches: Sequence[Any], under_way: Step) -> None:
        for microbatch in microbatches:
            under_way.microbatch()
            under_way.backward(*loss_aux_and_count(loss_fn(plan.model, microbatch)))

    def step(state: State, microbatches: Sequence[Any] = ()) -> tuple[State, Metrics]:
        check_type(state, State, "a step", "state, metrics = step(state, [batch])")
        _same_plan(plan, state)
        check_microbatches(microbatches, state.plan.accumulate)
        with state.runtime.sites.use:
            if replay and (state.tried + 1) % replay == 0:
                return _made_twice(state, partial(run, microbatches), flag)
            if retries is None:
                return once(microbatches, state)
            return retries.step(state, partial(once, microbatches))

    def once(microbatches: Sequence[Any], state: State) -> tuple[State, Metrics]:
        under_way = Step(state)
        with if_it_fails(under_way.abandon):
            run(in_pieces(microbatches, state.plan.accumulate), under_way)
            return under_way.finish(flag())

    return step


def _made_twice(state: State, run: Callable[[Step], None], flag: Callable[[], float]) -> tuple[State, Metrics]:
    """Make one step twice and compare the two, see `zero.engine.replay`; return the state and metrics of the second.

    Args:
        run: runs the microbatches of a step.
        flag: as in `make_step`, called once.
    """
    replay = Replay(state.runtime, state.tried + 1)
    for again in (False, True):
        step = Step(state)
        with if_it_fails(step.abandon), replay.watched():
            run(step)
            totals = step.totals(flag() if again else 0.0)
    with if_it_fails(state.spend):  # it may have wrong bits, so it must not be saved
        replay.compare()
    with if_it_fails(step.abandon):
        made, metrics = step.decided(totals, replay.update)
        if not metrics.skipped:
            replay.end()
    return made, metrics


def make_forward(plan: Plan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return an evaluation function: `forward(state, *args)` calls `fn(model, *args)` in eval mode without gradients.

    Each unit's deferred update is applied before the unit is used, so the parameters are those of the state's step.
    Every rank must call `forward` the same number of times.

    Args:
        plan: the plan that the states are made from.
        fn: a function of (model, further arguments). `forward` returns its result, which is this rank's own: a loss is
            the mean over this rank's rows. `world.all_reduce` adds up results of all ranks.

    Raises:
        ConfigError: `plan` is not a Plan, or `fn` not a function. By `forward`, if the state is of another plan.
        StaleStateError: by `forward`, if the state is spent.
    """
    check_type(plan, Plan, "zero.make_forward", "forward = zero.make_forward(plan, fn)")
    check_function(fn, "fn", "forward = zero.make_forward(plan, fn)")

    def forward(state: State, *args: Any, **kwargs: Any) -> Any:
        check_type(state, State, "a forward", "forward(state, batch)")
        _same_plan(plan, state)
        model = state.model
        runtime = state.runtime
        with runtime.sites.use:
            modes = [(module, module.training) for module in model.modules()]
            try:
                model.eval()
                with torch.no_grad(), if_it_fails(runtime.residency.reset):
                    runtime.sites.begin()
                    return fn(model, *args, **kwargs)
            finally:
                for module, training in modes:
                    module.training = training

    return forward


@contextmanager
def record(state: State, *, profile: bool = False) -> Iterator[Timeline]:
    """Context manager that records a timeline of this rank's work: compute, collectives, copies and updates.

        with zero.record(state) as timeline:
            state, metrics = step(state, microbatches)
        print(timeline.hidden()["page in"])
        timeline.write(folder / "trace.json")

    The timeline is empty until the block ends. Not collective: one rank may record alone. Recording changes no bit of
    the results. Work that began before the block is not recorded, and work that ends after it is cut off at the block's
    end. With `zero.update=lazy` most recorded updates belong to the step before. On a GPU the block waits for the
    device at its start and end.

    Args:
        state: a state of the run to record.
        profile: also mark the work as ranges of torch.profiler, such as "gather blocks.3", in a profile that the caller
            records. Ranges of the store's threads appear only if the profiler records all threads.

    Raises:
        StaleStateError: the state is spent, or its run is already being recorded.
    """
    check_type(state, State, "zero.record", "with zero.record(state) as timeline:")
    with state.runtime.tape.record(profile=profile) as timeline:
        yield timeline


def _same_plan(plan: Plan, state: State) -> None:
    if state.plan.origin is not plan.origin:
        raise ConfigError("this State was made by zero.init from another Plan. Make the step from state.plan.")
