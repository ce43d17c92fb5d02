"""One training step: run the microbatches; skip the update if a gradient is not finite, else clip and defer it.

`make_step` is a loop over `Step` that calls a loss function; `Step` is the same in pieces, for a loop of one's own. A
microbatch is whatever lies between `microbatch()` and the next one: any number of forwards and backwards, whoever
calls backward.

Source: Rajbhandari et al. 2020, "ZeRO"; Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero.core.optim import Hyper
from zero.engine.arguments import (
    check_function,
    check_loss,
    check_loss_fn,
    check_microbatches,
    check_type,
    loss_and_aux,
    numbers_by_name,
)
from zero.engine.plan import Plan
from zero.engine.runtime import Runtime
from zero.engine.state import State
from zero.engine.totals import GradientStatus, Totals, check_gradients, gather_totals
from zero.errors import ConfigError, PlanError, StoreError, if_it_fails
from zero.platform.timeline import Timeline
from zero.store import PrefetchStore

LossFn = Callable[[nn.Module, Any], Tensor | tuple[Tensor, Mapping[str, Any]]]


class Metrics(NamedTuple):
    """Results of one step, the same on every rank."""

    loss: float
    """Mean over the global batch."""
    grad_norm: float
    """Of the mean gradient, before clipping; infinite or NaN when the step was skipped."""
    lr: float
    """Learning rate of the default group."""
    loss_scale: float
    """The loss scale that this step ran with; 1 unless in fp16."""
    skipped: bool
    """Nothing was updated, because a gradient was not finite."""
    nonfinite_unit: str | None
    """The first unit with a gradient that is not finite."""
    aux: Mapping[str, float]
    """Means over the global batch of what `loss_fn` returned beside the loss."""
    rank_flags: tuple[float, ...]
    """The `flag` of each rank."""


class Step:
    """A step from `state` to the next one.

        step = zero.Step(state)
        for batch in microbatches:
            step.microbatch()
            loss = loss_fn(state.model, batch)
            step.backward(loss)
        state, metrics = step.finish()

    `state` is good until `finish` returns the next one; after an exception call `abandon`, which forgets the gradients,
    and begin another step. Buffers such as running statistics have seen the microbatches then.

    Args:
        state: the state that the step begins from.

    Attributes:
        microbatches: the number of microbatches that have begun.

    Raises:
        ConfigError: by every method, another thread uses the state.
        StaleStateError: `state` is spent.
        PlanError: the model has nothing to train.
    """

    def __init__(self, state: State) -> None:
        check_type(state, State, "zero.Step", "step = zero.Step(state)")
        self.state, self._runtime, self._plan = state, state.runtime, state.plan
        if not self._plan.trains:
            raise PlanError("the model has no trainable parameter, so there is no step; run it with zero.make_forward")
        self.microbatches = 0
        self._in_microbatch = self._dropped = self._went_back = False
        self._losses: list[list[Tensor]] = []
        self._aux: dict[str, list[Tensor]] = {}
        _clear(self._runtime)
        if self._runtime.reducer.is_busy:  # a backward that belonged to no step
            self._runtime.reducer.reset()
        self._runtime.reducer.clear()
        self._runtime.updater.begin()
        self._runtime.tape.passed("before the step")

    def microbatch(self) -> None:
        """Begin the next microbatch; `plan.accumulate` of them make a step."""
        with self._runtime.gatherer.use:
            self.read_groups()  # first: it may raise, and then no microbatch has begun
            self._end_microbatch()
            self.microbatches += 1
            self._in_microbatch = True
            self._losses.append([])
            self._runtime.gatherer.begin()
            self._runtime.reducer.begin(last=self.microbatches == self._plan.accumulate)
            self._at("forward")

    def read_groups(self) -> None:
        """Read from the optimizer's groups which of them train in the forwards that follow."""
        groups = self._hyper().groups
        self._runtime.updater.train(groups)
        self._runtime.gatherer.frozen_groups = frozenset(n for n, group in enumerate(groups) if not group.trains)

    def backward(self, loss: Tensor, aux: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        """Go backward from a scalar, the mean over its rows; several losses of a microbatch add up.

        Args:
            loss: 0-dim, or one element.
            aux: scalars to be averaged over microbatches and ranks beside the loss, by name.
            keywords: for `Tensor.backward`, such as `retain_graph`.

        Raises:
            ConfigError: `loss` is not a scalar tensor, a value of `aux` is not one number, or no microbatch has begun.
        """
        with self._runtime.gatherer.use:
            check_loss(loss, "step.backward({})")
            self._check_begun()
            numbers_by_name(aux or {})  # checked before backward, and read after it: backward may write into them
            if self._plan.params_offloaded:  # host memory is scarce: give back forward's temporaries
                self._plan.world.compute.give_back_memory()
            self._runtime.tape.passed("forward")
            self._at("backward")
            self._went_back = True
            self.scaled(loss).backward(**keywords)
            self._runtime.tape.passed("backward")
            self.count(loss, aux)

    def scaled(self, loss: Tensor, *, already: bool = False) -> Tensor:
        """Return `loss` times fp16's loss scale, to call `backward` on.

        Args:
            loss: a scalar, or with `already` any output.
            already: the scale is in `loss` already, or in the gradient that its backward will get.
        """
        scale = self.state.scale.scale
        if scale == 1.0:
            return loss
        scaled = loss.view_as(loss) if already else loss * scale
        if scaled.requires_grad:
            scaled.register_hook(self._runtime.gatherer.scaled)
        return scaled

    @property
    def has_gradients(self) -> bool:
        """A gradient has arrived in this step."""
        return self._runtime.gatherer.arrived

    @property
    def has_loss(self) -> bool:
        """A loss of this step has been counted."""
        return any(self._losses)

    def count(self, loss: Tensor, aux: Mapping[str, Any] | None = None) -> None:
        """Add a loss to the step's mean; the caller goes backward itself.

        Args:
            loss: a scalar, without the loss scale.
            aux: as in `backward`.

        Raises:
            ConfigError: a value of `aux` is not one number, or no microbatch has begun.
        """
        self._check_begun()
        numbers = numbers_by_name(aux or {})
        self._losses[-1].append(loss.detach().double())
        for name, number in numbers.items():
            self._aux.setdefault(name, []).append(number.double())

    def forget(self) -> None:
        """Drop the gradients that have arrived in this step; forwards under way may still go backward. Collective."""
        with self._runtime.gatherer.use:
            self._dropped = self._dropped or self._runtime.gatherer.arrived
            self._runtime.reducer.forget()
            self._runtime.updater.sums.clear()
            self._losses, self._aux = [[] for _ in self._losses], {}
            _clear(self._runtime)

    def abandon(self) -> None:
        """Drop everything that this step did, after an exception that may have lost tickets. Not collective."""
        runtime = self._runtime
        _drain(runtime.store)
        self._plan.world.compute.join()  # side streams must not write into memory that is allocated again
        runtime.gatherer.reset()
        runtime.reducer.reset()
        runtime.updater.sums.clear()

    def finish(self, flag: float = 0.0) -> tuple[State, Metrics]:
        """End the step: defer each unit's update to its next gather, or skip the step. Collective.

        Gradients are divided by `plan.accumulate`, however many microbatches there were, and so are their losses.

        Args:
            flag: a number that every rank gets to know.

        Returns:
            The next state, and the step's metrics. `self.state` is spent.

        Raises:
            ConfigError: no gradient has arrived on any rank, or in fp16 one without the loss scale; or the model has
                gained, lost or exchanged a parameter.
            WorldError: the ranks visited different units.
        """
        with self._runtime.gatherer.use:
            return self._finish(flag)

    def _finish(self, flag: float) -> tuple[State, Metrics]:
        plan, state, runtime = self._plan, self.state, self._runtime
        runtime.tree.check()  # not before: a forward may be inside torch.func.functional_call
        self._end_microbatch()
        hyper = self._hyper()
        self._at("norm")
        totals = self._reduce(hyper, flag)
        runtime.tape.passed("norm")
        check_gradients(totals.statuses, went_back=self._went_back)
        norm = totals.norm(hyper.divisor)
        finite = math.isfinite(norm)
        metrics = Metrics(
            loss=totals.loss,
            grad_norm=norm,
            lr=hyper.lr,
            loss_scale=state.scale.scale,
            skipped=not finite,
            nonfinite_unit=totals.nonfinite_unit,
            aux=totals.aux,
            rank_flags=totals.rank_flags,
        )
        following = state.advance(scale=plan.precision.scale.advance(state.scale, finite), finite=finite)
        if finite:
            _defer_updates(runtime, hyper._replace(divisor=hyper.divisor / _clip(plan.optimizer.clip, norm)))
        return following, metrics

    def _reduce(self, hyper: Hyper, flag: float) -> Totals:
        """Sum gradients and numbers over ranks; again where a rank has gradients that no planned round has taken."""
        runtime, reducer = self._runtime, self._runtime.reducer
        reducer.finish()
        runtime.log.note(repr(hyper))
        losses = [torch.stack(losses).sum() for losses in self._losses if losses]
        exchange = partial(gather_totals, runtime, losses, self._aux, flag, self._gradient_status())
        totals = exchange()
        if totals.any_extra:
            reducer.finish_extra()
            totals = exchange()
        if totals.one_order:
            reducer.adopt_order()
        return totals

    def _check_begun(self) -> None:
        if not self.microbatches:
            raise ConfigError("no microbatch of this step has begun. Call step.microbatch() before the forward.")

    def _end_microbatch(self) -> None:
        if self._in_microbatch:
            self._in_microbatch = False
            self._runtime.gatherer.end()
            if self._plan.params_offloaded:
                self._plan.world.compute.give_back_memory()

    def _gradient_status(self) -> GradientStatus:
        gatherer = self._runtime.gatherer
        if gatherer.unscaled and self.state.scale.scale != 1.0:
            return GradientStatus.UNSCALED
        return GradientStatus.ARRIVED if gatherer.arrived or self._dropped else GradientStatus.NONE

    def _hyper(self) -> Hyper:
        state, plan = self.state, self._plan
        return plan.optimizer.hyper_at(state.step + 1, plan.world.size * plan.accumulate * state.scale.scale)

    def _at(self, phase: str) -> None:
        self._plan.world.at(f"step {self.state.tried + 1}, {phase}")


def _clear(runtime: Runtime) -> None:
    """Forget the last step's sums and gradients, but for those that a deferred update still needs."""
    runtime.log.clear()
    runtime.gatherer.clear()
    for unit in runtime.units:
        unit.filled = False


def _drain(store: PrefetchStore) -> None:
    with suppress(StoreError):  # the caller raises the error of a broken store
        store.drain()


def _clip(limit: float | None, norm: float) -> float:
    """Return the factor of the gradient, as in `torch.nn.utils.clip_grad_norm_`."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


def _defer_updates(runtime: Runtime, hyper: Hyper) -> None:
    """Give every unit this step's update to make before its next gather, or make it now.

    Nothing has waited yet for the last update of a unit that this step skipped. That update reads numbers that the next
    decision drops, and the gather after it reads the shard.
    """
    runtime.gatherer.residency.land()
    for unit in runtime.units:
        unit.await_grad_readers()
    hyper = runtime.updater.decide(hyper)
    for unit in runtime.units:
        if not unit.spec.trainable.slots:
            continue
        if not unit.filled:  # not visited: the last update may still be deferred, and this one has no gradient
            runtime.updater.apply_deferred(unit)
            runtime.gradients.open(unit, fresh=True).zero_()
            runtime.gradients.park(unit)
        runtime.updater.schedule_update(unit, hyper)
    if runtime.plan.update == "serial":
        runtime.finish_step()


def make_step(
    plan: Plan,
    loss_fn: LossFn,
    *,
    flag: Callable[[], float] = lambda: 0.0,
) -> Callable[[State, Sequence[Any]], tuple[State, Metrics]]:
    """Make the training step: `state, metrics = step(state, microbatches)`.

    The step takes `plan.accumulate` microbatches of this rank and returns the next state; the old one is spent. If it
    raises, the old state is still good, except that buffers such as running statistics have seen the microbatches.

    Args:
        plan: the plan that the states are made from.
        loss_fn: (model, microbatch) to a scalar loss, the mean over the microbatch, or to (loss, dict of scalars). The
            model is the plan's.
        flag: returns a number that every rank gets to know, so that all act on it after the same step; it is called
            once a step, and `Metrics.rank_flags` has the numbers.

    Raises:
        ConfigError: `plan` is not a Plan, or `loss_fn` not a function of a model and a microbatch. By the step: an
            argument is not a state of this plan, not a list of `plan.accumulate` microbatches; the loss is not a
            scalar, or there is no gradient.
        StaleStateError: by the step, the state is spent.
        WorldError: by the step, the ranks visited different units.
    """
    check_type(plan, Plan, "zero.make_step", "step = zero.make_step(plan, loss_fn)")
    check_function(loss_fn, "loss_fn", "step = zero.make_step(plan, loss_fn)")
    check_loss_fn(loss_fn)

    def step(state: State, microbatches: Sequence[Any] = ()) -> tuple[State, Metrics]:
        check_type(state, State, "a step", "state, metrics = step(state, [batch])")
        _same_plan(plan, state)
        check_microbatches(microbatches, plan.accumulate)
        with state.runtime.gatherer.use:
            under_way = Step(state)
            with if_it_fails(under_way.abandon):
                for microbatch in microbatches:
                    under_way.microbatch()
                    under_way.backward(*loss_and_aux(loss_fn(state.model, microbatch)))
                return under_way.finish(flag())

    return step


def make_forward(plan: Plan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make an evaluation: `forward(state, *args)` is `fn(model, *args)` in eval mode without gradients.

    Deferred updates are made first, so the parameters are those of the state's step. Every rank must call it the same
    number of times.

    Args:
        plan: the plan that the states are made from.
        fn: (model, further arguments) to anything.

    Raises:
        ConfigError: `plan` is not a Plan, or `fn` not a function; by `forward`, a state of another plan.
        StaleStateError: by `forward`, the state is spent.
    """
    check_type(plan, Plan, "zero.make_forward", "forward = zero.make_forward(plan, fn)")
    check_function(fn, "fn", "forward = zero.make_forward(plan, fn)")

    def forward(state: State, *args: Any, **kwargs: Any) -> Any:
        check_type(state, State, "a forward", "forward(state, batch)")
        _same_plan(plan, state)
        model = state.model
        with state.runtime.gatherer.use:
            modes = [(module, module.training) for module in model.modules()]
            model.eval()
            try:
                with torch.no_grad():
                    state.runtime.gatherer.begin()
                    return fn(model, *args, **kwargs)
            finally:
                for module, training in modes:
                    module.training = training

    return forward


@contextmanager
def record(state: State, *, profile: bool = False) -> Iterator[Timeline]:
    """Record what this rank does, and when, until the block ends.

        with zero.record(state) as timeline:
            state, metrics = step(state, microbatches)
        print(timeline.hidden()["page in"])
        timeline.write(folder / "trace.json")

    The timeline is empty until the block ends. Not collective: one rank may record alone, and gets the same bits. Work
    that began before the block is not recorded, and work that ends after it is cut off there; with `zero.update=lazy`
    most updates in it were decided by the step before. On a GPU the block waits for the device at its start and end.

    Args:
        state: a state of the run to record.
        profile: also mark everything as ranges of torch.profiler ("gather blocks.3"), for a profile made meanwhile. It
            has those of the store's threads if it records all threads.

    Raises:
        StaleStateError: the state is spent, or its run is being recorded already.
    """
    check_type(state, State, "zero.record", "with zero.record(state) as timeline:")
    with state.runtime.tape.record(profile=profile) as timeline:
        yield timeline


def _same_plan(plan: Plan, state: State) -> None:
    if state.plan is not plan:
        raise ConfigError("this State was made by zero.init from another Plan; make the step from state.plan")
